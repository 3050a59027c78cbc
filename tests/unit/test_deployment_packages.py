"""A package of another project that has the name of one of ours is noticed and named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from agents import shadow_check

ROOT = Path(shadow_check.__file__).resolve().parents[1]


def test_ours_are_ours() -> None:
    assert shadow_check.shadowed_packages() == []


def test_packages_from_elsewhere_are_named(tmp_path: Path) -> None:
    problems = shadow_check.shadowed_packages(tmp_path)
    assert len(problems) == 3
    assert str(tmp_path / "mesh") in problems[0]
    assert "environment of its own" in shadow_check.advice(problems)


def test_a_package_that_was_installed_over_ours_is_noticed(tmp_path: Path) -> None:
    for name in shadow_check.OUR_FILES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    shutil.copy(shadow_check.__file__, tmp_path / "agents")
    (tmp_path / "agents" / "supervisor.py").write_text("")
    code = "from agents.shadow_check import shadowed_packages; print(*shadowed_packages(), sep='\\n')"
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "'agents'" in ran.stdout
    assert "spool.py is missing" in ran.stdout


def test_the_head_says_it_to_whoever_started_it(tmp_path: Path) -> None:
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "__init__.py").write_text("")
    reading, writing = os.pipe()
    ran = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "coordinator",
            "serve",
            "--state",
            str(tmp_path / "s"),
            "--ready-fd",
            str(writing),
        ],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        pass_fds=(writing,),
        capture_output=True,
        check=False,
    )
    os.close(writing)
    with os.fdopen(reading) as news:
        said = json.loads(news.readline())
    assert ran.returncode == 1
    assert said["error"]["reason"] == "PackageShadowed"
    assert not (tmp_path / "s").exists()
