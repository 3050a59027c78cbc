"""Two machines train one small model together: what `make demo` runs.

Like train.py, with another end. A barrier before the process group is destroyed: without it a rank on the gloo backend
may leave while another still talks to it. And the interpreter is not taken down: gloo's threads outlive the group once
DDP has used it (torch 2.13), and one that lets go of a tensor meanwhile aborts the process. That is rare, and one run
of fifty on a busy machine is too often.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

backend = "nccl" if torch.cuda.is_available() else "gloo"
dist.init_process_group(backend)
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")
if backend == "nccl":
    torch.cuda.set_device(device)

# Every process contributes 1, so the sum is the world size.
one = torch.ones(1, device=device)
dist.all_reduce(one)
print(
    f"rank {dist.get_rank()}: on machine {os.environ['NODUS_NODE_RANK']} of {os.environ['NODUS_NUM_NODES']}, "
    f"epoch {os.environ['NODUS_GANG_EPOCH']}",
    flush=True,
)

torch.manual_seed(0)
model = DDP(torch.nn.Linear(16, 1).to(device), device_ids=[local_rank] if backend == "nccl" else None)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + dist.get_rank())  # every rank learns from its own share of the data
for _ in range(20):
    x = torch.randn(32, 16, device=device)
    loss = (model(x) - x.sum(dim=1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

if dist.get_rank() == 0:
    print(
        f"world_size={int(one.item())} node={os.environ['NODUS_NODE_RANK']} "
        f"transport={os.environ['NODUS_GANG_TRANSPORT']} loss={loss.item():.4f}",
        flush=True,
    )
dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)
