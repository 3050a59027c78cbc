"""Which process is where: every process says its numbers, and a sum over all of them proves that they are one group.

RANK counts the processes of the whole run and decides who does what; LOCAL_RANK counts those of one machine and
decides which GPU. Run it on two machines with two processes each:

    mesh run --nodes 2 --launcher torchrun -- torchrun --nproc-per-node 2 examples/topology.py
"""

import os
import socket

import torch
import torch.distributed as dist

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
machine = rank // local_world
if machine != int(os.environ["NODUS_NODE_RANK"]):
    raise SystemExit(f"rank {rank} should be on machine {machine}, not {os.environ['NODUS_NODE_RANK']}")

device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
print(
    f"machine={machine} rank={rank}/{world} local_rank={local_rank}/{local_world} on {socket.gethostname()}",
    flush=True,
)

total = torch.tensor([float(rank)], device=device)
dist.all_reduce(total)
expected = world * (world - 1) / 2
if total.item() != expected:
    raise SystemExit(f"the sum of all ranks is {total.item()}, not {expected}: not one group")
if rank == 0:
    print(f"sum of all {world} ranks: {total.item():.0f}", flush=True)
dist.barrier()
dist.destroy_process_group()
