"""What the documents show, word for word."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from tests.e2e.real_mesh import RealMesh

pytestmark = [pytest.mark.ray, pytest.mark.torch]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DOCUMENTED = (
    "nodus run --name torchrun-2-node --gpu H100 --nodes 2 --launcher torchrun --max-cost 2.00 "
    "-- torchrun train.py"
)


@pytest.mark.timeout(400)
def test_the_first_documents_script_runs_by_its_documented_command(mesh: RealMesh) -> None:
    """Word for word. The script ends without a barrier, so that torch may abort at its exit: then that is named."""
    shutil.copy(EXAMPLES / "train.py", mesh.work)
    program, *arguments = shlex.split(DOCUMENTED)
    done = mesh.cli(
        *arguments, program=program, code=None, limit_s=330.0
    )  # torch's exit barrier alone may take 300 s
    run = mesh.run("torchrun-2-node")
    assert run["status"]["topology"]["worldSize"] == 2
    if done.returncode == 0:
        assert "[rank 0] world_size=2 node=0 transport=private loss=" in done.stdout
        assert run["status"]["state"] == "Succeeded"
    else:
        assert run["status"]["state"] == "Failed", done.stderr
        assert "SIGABRT" in run["status"]["message"], done.stderr
        assert "dist.barrier()" in done.stderr
