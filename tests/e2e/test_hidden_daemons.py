"""A daemon that shed everything by which it could be known, and what of ours died: it is gone with the run."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from agents import control_group
from tests.e2e.real_mesh import RealMesh, wait_until

pytestmark = pytest.mark.ray

HIDES = """
for base in {bases}; do echo $$ > $base/cgroup.procs; done 2> /dev/null
(setsid env -i sh -c 'echo $$ > {file}; exec sleep 600' < /dev/null > /dev/null 2>&1 &)
sleep 600
"""


def daemon_of(file: Path) -> psutil.Process:
    wait_until(lambda: file.exists() and file.read_text().strip(), "the daemon to come up")
    return psutil.Process(int(file.read_text()))


@pytest.mark.parametrize(
    "victim",
    [
        pytest.param("supervisor", marks=pytest.mark.long),
        "launcher",
        pytest.param("member", marks=pytest.mark.long),
    ],
)
def test_a_daemon_without_a_sign_of_its_origin_dies_with_its_run(
    mesh: RealMesh, tmp_path: Path, victim: str
) -> None:
    file = tmp_path / "daemon"
    script = HIDES.format(bases=" ".join(control_group.bases()), file=file)
    name = mesh.submit("--max-attempts", "0", "--", "sh", "-c", script)
    mesh.running(name)
    daemon = daemon_of(file)
    supervisor = mesh.command(name, 0).parent()
    assert supervisor is not None
    launcher = supervisor.parent()
    assert launcher is not None
    (member,) = mesh.named("ray::MemberNode")
    {"supervisor": supervisor, "launcher": launcher, "member": member}[victim].kill()
    assert mesh.ended(name)["status"]["state"] == "Failed"
    wait_until(lambda: not daemon.is_running() or daemon.status() == psutil.STATUS_ZOMBIE, "the daemon's end")
    log = (mesh.state / "head.log").read_text(encoding="utf-8")
    assert f"ending {daemon.pid} " not in log, "it lived on until the head came across it"
