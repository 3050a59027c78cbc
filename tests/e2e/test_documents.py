"""What the documents show, word for word."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

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
    if _succeeded(run, done):
        assert "[rank 0] world_size=2 node=0 transport=private loss=" in done.stdout


SAMPLED = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

torch.manual_seed(0)
dataset = TensorDataset(torch.arange(64.0).reshape(64, 1), torch.arange(64.0).reshape(64, 1))
dist.init_process_group("gloo")
local_rank = int(os.environ["LOCAL_RANK"])
model = DDP(torch.nn.Linear(1, 1))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
for epoch in range(2):
    sampler.set_epoch(epoch)
    seen = []
    for x, y in loader:
        seen += x.flatten().int().tolist()
        loss = torch.nn.functional.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print("share", epoch, *seen, flush=True)
print("weights", *(parameter.item() for parameter in model.parameters()), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_blogs_ddp_pattern_splits_the_data_and_keeps_the_copies_alike(mesh: RealMesh) -> None:
    """As its sketch has it, on gloo and without the lines about CUDA; it ends without a barrier, too."""
    script = mesh.script("sampled.py", SAMPLED)
    command = (
        "run",
        "--name",
        "ddp-pattern",
        "--nodes",
        "2",
        "--launcher",
        "torchrun",
        "--",
        "torchrun",
        str(script),
    )
    done = mesh.cli(*command, code=None, limit_s=330.0)
    _succeeded(mesh.run("ddp-pattern"), done)
    lines = [[line.split() for line in mesh.printed("ddp-pattern", rank).splitlines()] for rank in (0, 1)]
    for epoch in ("0", "1"):
        shares = [words[2:] for rank in lines for words in rank if words[:2] == ["share", epoch]]
        assert sorted(int(one) for share in shares for one in share) == list(range(64)), "each example once"
        assert [len(share) for share in shares] == [32, 32]
    weights = [words for rank in lines for words in rank if words[:1] == ["weights"]]
    assert len(weights) == 2 and weights[0] == weights[1]


def _succeeded(run: dict[str, Any], done: subprocess.CompletedProcess[str]) -> bool:
    """False where torch's exit race struck, which has to be named then."""
    if done.returncode == 0:
        assert run["status"]["state"] == "Succeeded"
        return True
    assert run["status"]["state"] == "Failed", done.stderr
    assert "SIGABRT" in run["status"]["message"], done.stderr
    assert "dist.barrier()" in done.stderr
    return False
