"""Whose torchrun gets a quick end, and that it is the same torchrun up to there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agents.launcher import torchrun_program
from agents.launcher.torchrun_script import OFF_VARIABLE, with_quick_end

PIP = """#!{python}
# -*- coding: utf-8 -*-
import re
import sys
from torch.distributed.run import main
if __name__ == '__main__':
    sys.argv[0] = re.sub(r'(-script\\.pyw|\\.exe)?$', '', sys.argv[0])
    sys.exit(main())
"""
UV = """#!{python}
# -*- coding: utf-8 -*-
import sys
from torch.distributed.run import main
if __name__ == "__main__":
    if sys.argv[0].endswith("-script.pyw"):
        sys.argv[0] = sys.argv[0][:-11]
    elif sys.argv[0].endswith(".exe"):
        sys.argv[0] = sys.argv[0][:-4]
    sys.exit(main())
"""
LIMIT_S = 60.0


def script(folder: Path, text: str = PIP, *, python: str = sys.executable) -> Path:
    path = folder / "bin" / "torchrun"
    path.parent.mkdir()
    path.write_text(text.format(python=python) if "{python}" in text else text)
    path.chmod(0o755)
    return path


def found(folder: Path, **more: str) -> dict[str, str]:
    return {"PATH": f"{folder / 'bin'}:/usr/bin", **more}


@pytest.mark.parametrize("text", [PIP, UV])
def test_the_entry_script_is_run_by_its_own_interpreter(tmp_path: Path, text: str) -> None:
    path = str(script(tmp_path, text))
    quick = (sys.executable, torchrun_program.__file__, path, "train.py", "--lr", "1")
    assert with_quick_end(("torchrun", "train.py", "--lr", "1"), found(tmp_path)) == quick
    assert with_quick_end((path, "train.py", "--lr", "1"), {}) == quick


def test_a_variable_turns_it_off(tmp_path: Path) -> None:
    script(tmp_path)
    argv = ("torchrun", "train.py")
    assert with_quick_end(argv, found(tmp_path, **{OFF_VARIABLE: "1"})) == argv
    assert with_quick_end(argv, found(tmp_path, **{OFF_VARIABLE: ""})) != argv


@pytest.mark.parametrize(
    "text",
    [
        '#!/bin/sh\nexec python -m torch.distributed.run "$@"\n',
        PIP.replace("import re\n", "import re\nimport my_patches\n"),
        PIP.replace("{python}", "{python} -s"),
        PIP.replace("{python}", "/nowhere/python"),
        "\x7fELF\x00\xff",
    ],
)
def test_what_is_not_its_entry_script_is_run_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bin" / "torchrun"
    script(tmp_path, text)
    for argv in (("torchrun", "train.py"), (str(path), "train.py")):
        assert with_quick_end(argv, found(tmp_path)) == argv


@pytest.mark.parametrize("name", ["python", "./torchrun", "bin/torchrun", "mytorchrun"])
def test_other_commands_and_relative_paths_are_run_as_they_are(tmp_path: Path, name: str) -> None:
    script(tmp_path)
    assert with_quick_end((name, "train.py"), found(tmp_path)) == (name, "train.py")
    assert with_quick_end((), found(tmp_path)) == ()
    assert with_quick_end(("torchrun", "a.py"), {"PATH": "/nowhere"}) == ("torchrun", "a.py")


PLAYED = """
import atexit, sys
def main():
    atexit.register(lambda: print("tidied"))
    print(sys.argv[1:], sys.argv[0].endswith("/bin/torchrun"), sys.path[0].endswith("/bin"), end="|")
    {ends}
"""


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ("return None", 0, ""),
        ("return 3", 3, ""),
        ("sys.exit(4)", 4, ""),
        ("sys.exit('no workers')", 1, "no workers\n"),
        ("raise ValueError('worker 0 failed')", 1, "ValueError: worker 0 failed"),
    ],
)
def test_it_ends_as_torchrun_would_have(tmp_path: Path, ends: str, code: int, said: str) -> None:
    package = tmp_path / "torch" / "distributed"
    package.mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "run.py").write_text(PLAYED.replace("{ends}", ends))
    path = script(tmp_path)
    ended = [
        subprocess.run(
            [*command, "train.py"],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        for command in ([str(path)], list(with_quick_end((str(path),), {})))
    ]
    for one in ended:
        assert one.returncode == code
        assert one.stdout == "['train.py'] True True|tidied\n"
        assert said in one.stderr
