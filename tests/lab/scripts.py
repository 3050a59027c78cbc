"""What the lab's users run."""

from __future__ import annotations

OK = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(250_000)
dist.all_reduce(x)
print(f"ok world={int(x[0])} mesh={os.environ.get('NODUS_NODE_RANK', '?')} rank={dist.get_rank()}", flush=True)
dist.barrier()
dist.destroy_process_group()
"""
"""The yardstick: one all-reduce over all ranks."""

BEACON = """
import os, signal, sys, time
folder, rank, epoch = sys.argv[1], os.environ["NODE_RANK"], os.environ["NODUS_GANG_EPOCH"]
path = f"{folder}/{epoch}.{rank}.{os.environ['LAB_HOST']}"

def stop(number, frame):
    os.write(file, f"stop {time.monotonic()}\\n".encode())
    os._exit(143)

signal.signal(signal.SIGTERM, stop)
file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
while not os.path.exists(f"{folder}/done"):
    os.write(file, f"{time.monotonic()}\\n".encode())
    time.sleep(0.01)
"""
"""Says every 10 ms that it is alive, where every host of the lab can see it: what a ghost would do to shared data."""

TRAINER = """
import os, sys, time, torch, torch.distributed as dist
folder = sys.argv[1]
dist.init_process_group("gloo")
rank, epoch = dist.get_rank(), os.environ["NODUS_GANG_EPOCH"]
step = 0
while True:
    x = torch.ones(1000)
    dist.all_reduce(x)
    assert int(x[0]) == dist.get_world_size()
    stop = torch.tensor([float(os.path.exists(f"{folder}/done"))])
    if step == 0:
        print(f"training epoch={epoch} world={int(x[0])} rank={rank}", flush=True)
    step += 1
    dist.all_reduce(stop)
    if stop[0]:
        break
    time.sleep(0.02)
print(f"trained epoch={epoch} rank={rank}", flush=True)
dist.barrier()
dist.destroy_process_group()
"""
"""A training loop over gloo, until a file `done` appears; every rank leaves at the same step."""
