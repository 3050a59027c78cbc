"""Checkpoints from end to end: saved by real scripts, committed, and what a restart begins with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mesh import checkpoint
from mesh.blob_store import BlobStore, split_manifest_uri
from mesh.checkpoint_format import Manifest, blob_key
from mesh.ids import RunUid
from tests.e2e.real_mesh import RealMesh, real_mesh, wait_until
from tests.s3_fixture import new_bucket, s3_environment

pytestmark = pytest.mark.ray

RECOVERY_LIMIT_S = 180.0

COUNTING_DDP = """
import os, sys, time
import torch, torch.distributed as dist
import checkpoint  # the helper, copied beside this script

dist.init_process_group("gloo")
counted, start = torch.zeros(1), 0
if checkpoint.latest():
    counted, start = checkpoint.load()["counted"], checkpoint.step() + 1
    print("resumed from", checkpoint.step(), "counted", int(counted), os.environ["NODUS_RESTORE_URI"], flush=True)
step = start
while True:
    one = torch.ones(1)
    dist.all_reduce(one)
    counted += one
    checkpoint.save({"counted": counted}, step=step)
    print("saved", step, "counted", int(counted), flush=True)
    step += 1
    time.sleep(0.3)
    go_on = torch.tensor([0 if os.path.exists(sys.argv[1]) else 1])
    dist.broadcast(go_on, 0)
    if not go_on and step >= start + 2:
        break
dist.barrier()
dist.destroy_process_group()
"""

RANK_ZERO_SAVES = """
import os, pathlib, sys, time
state, gate = pathlib.Path(os.environ["NODUS_STATE_DIR"]), pathlib.Path(sys.argv[1])
model = state / "model.bin"
print("found", model.read_text() if model.exists() else "nothing", flush=True)
if os.environ["NODE_RANK"] == "0" and not model.exists():
    model.write_text("first")
    print("saved first", flush=True)
while not gate.exists():
    time.sleep(0.05)
if os.environ["NODE_RANK"] == "0" and os.environ["NODUS_GANG_EPOCH"] == "1":
    model.write_text("second")
    print("saved second", flush=True)
while not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.05)
"""


def committed(mesh: RealMesh, name: str) -> dict[str, Any] | None:
    found: dict[str, Any] | None = mesh.run(name)["status"]["checkpoint"]
    return found


def machine_of(mesh: RealMesh, name: str, rank: int) -> str:
    attempts = mesh.look("/v1/attempts")["attempts"]
    mine = [a for a in attempts if a["run"] == name and a["rank"] == rank]
    return str(max(mine, key=lambda a: a["epoch"])["machine"])


def manifest(uri: str) -> tuple[BlobStore, Manifest]:
    base, key = split_manifest_uri(uri)
    store = BlobStore(base)
    return store, Manifest.decode(store.get_bytes(key, bytes_max=1 << 20))


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.timeout(400)
def test_a_torchrun_job_goes_on_from_the_committed_step_after_its_machine_is_lost(mesh: RealMesh) -> None:
    script = mesh.script("count.py", COUNTING_DDP)
    script.with_name("checkpoint.py").write_bytes(Path(checkpoint.__file__).read_bytes())
    gate = mesh.gate("counted")
    name = mesh.submit("--nodes", "2", "--launcher", "torchrun", "--", "torchrun", str(script), str(gate))
    mesh.running(name)
    wait_until(
        lambda: (committed(mesh, name) or {}).get("step") or 0 >= 1, "a commit", limit_s=RECOVERY_LIMIT_S
    )
    victim = machine_of(mesh, name, 1)
    mesh.raylet(victim).kill()
    wait_until(
        lambda: all("resumed from" in mesh.printed(name, rank) for rank in (0, 1)),
        "both ranks to resume",
        limit_s=RECOVERY_LIMIT_S,
    )
    gate.touch()
    run = mesh.ended(name, limit_s=RECOVERY_LIMIT_S)
    assert (run["status"]["state"], run["status"]["epoch"]) == ("Succeeded", 2)
    said = [
        re.findall(r"resumed from (\d+) counted (\d+) (\S+)", mesh.printed(name, rank)) for rank in (0, 1)
    ]
    assert said[0] == said[1], "both from the same checkpoint"
    ((step, counted, uri),) = said[0]
    assert int(counted) == 2 * (int(step) + 1), "the state is the step's"
    assert uri.startswith("file://")
    for rank in (0, 1):
        saved = [int(s) for s in re.findall(r"saved (\d+)", mesh.printed(name, rank))]
        assert saved[0] == int(step) + 1, "it goes on with the next one"
    assert machine_of(mesh, name, 1) != victim
    kinds = [event["kind"] for event in mesh.events(name)]
    assert "CheckpointCommitted" in kinds and "Restarting" in kinds


@pytest.mark.timeout(400)
@pytest.mark.long
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_and_the_run_says_so(mesh: RealMesh) -> None:
    script = mesh.script("zero_saves.py", RANK_ZERO_SAVES)
    second, end = mesh.gate("second"), mesh.gate("end")
    name = mesh.submit("--nodes", "2", "--", "python", str(script), str(second), str(end))
    mesh.running(name)
    first = wait_until(lambda: committed(mesh, name), "the first commit", limit_s=RECOVERY_LIMIT_S)
    second.touch()
    newest = wait_until(
        lambda: (now := committed(mesh, name)) and now["id"] != first["id"] and now,
        "the second commit",
        limit_s=RECOVERY_LIMIT_S,
    )
    store, found = manifest(newest["uri"])
    (content,) = [file.sha256 for part in found.parts for file in part.files]
    store.put_bytes(blob_key(RunUid(mesh.run(name)["metadata"]["uid"]), content), b"sec0nd")
    mesh.raylet(machine_of(mesh, name, 0)).kill()
    wait_until(
        lambda: "found first" in mesh.printed(name, 0), "rank 0 to begin again", limit_s=RECOVERY_LIMIT_S
    )
    end.touch()
    run = mesh.ended(name, limit_s=RECOVERY_LIMIT_S)
    assert run["status"]["state"] == "Succeeded"
    (damage,) = [event for event in mesh.events(name) if event["kind"] == "CheckpointDamaged"]
    assert f"Checkpoint {newest['id']} cannot be restored on rank 0" in damage["message"]
    assert f"The one before, {first['id']}, is restored instead." in damage["message"]
    uid = run["metadata"]["uid"]
    mesh.call("DELETE", f"/v1/runs/{name}")
    wait_until(lambda: not store.list_below(f"runs/{uid}"), "its checkpoints to go with the run")


@pytest.mark.timeout(400)
@pytest.mark.long
def test_a_run_goes_on_from_a_bucket(tmp_path: Path, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The contract suites have the rest of what a checkpoint store on S3 does; here everything finds its way to it."""
    for name, value in s3_environment(s3_server).items():
        monkeypatch.setenv(name, value)
    url = f"s3://{new_bucket(s3_server)}/check points"
    with real_mesh(tmp_path, "--machines", "3", "--checkpoints", url) as mesh:
        script = mesh.script("zero_saves.py", RANK_ZERO_SAVES)
        end = mesh.gate("end")
        run_name = mesh.submit(
            "--nodes", "2", "--", "python", str(script), str(mesh.gate("second")), str(end)
        )
        mesh.running(run_name)
        first = wait_until(lambda: committed(mesh, run_name), "a commit", limit_s=RECOVERY_LIMIT_S)
        assert first["uri"].startswith(url)
        mesh.raylet(machine_of(mesh, run_name, 0)).kill()
        wait_until(
            lambda: "found first" in mesh.printed(run_name, 0), "rank 0 to go on", limit_s=RECOVERY_LIMIT_S
        )
        mesh.gate("second").touch()
        end.touch()
        run = mesh.ended(run_name, limit_s=RECOVERY_LIMIT_S)
        assert (run["status"]["state"], run["status"]["epoch"]) == ("Succeeded", 2)
        mesh.call("DELETE", f"/v1/runs/{run_name}")
        wait_until(lambda: BlobStore(url).list_below("runs") == [], "its checkpoints to go with the run")
