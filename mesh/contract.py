"""The contract: the environment variables that every rank receives.

Rules of this file:
1. Pure. `rank_environment` is the user's own variables plus the contract; the member puts it over a base environment
   that `clean_base_environment` has cleaned. Nothing else reaches the command.
2. Addresses only, never host names: nothing here needs DNS, `/etc/hosts` or a reverse look-up to be right.
3. The user's own value wins, except for what would break the gang (the table below says which).

What a rank gets
----------------
Every launcher:

| variable                                       | value                                                              |
|------------------------------------------------|--------------------------------------------------------------------|
| NODUS_NODE_RANK, NODE_RANK                     | this node's rank, 0..n-1; rank 0 hosts the rendezvous              |
| NODUS_NUM_NODES, NNODES                        | machines                                                           |
| NODUS_GPUS_PER_NODE                            | accelerators on each machine; 0 on a CPU run                       |
| NODUS_NODE_IPS                                 | every member's address in rank order, separated by commas          |
| MASTER_ADDR, MASTER_PORT                       | rank 0's address; 29500, or another port when that one is taken    |
| NODUS_GANG_EPOCH, NODUS_GANG_TRANSPORT         | the epoch; private, public, direct or relayed                      |
| NODUS_RUN, NODUS_STATE_DIR                     | the run's name; the rank's own folder, kept across restarts        |
| NODUS_INCARNATION                              | run, epoch, rank and a random token: which life this process is of |
| NODUS_RESTORE_URI                              | the checkpoint to resume from; absent when there is none           |
| GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME         | the interface towards the peers, unless the user set them; on      |
|                                                | direct and relayed in any case                                     |
| NCCL_IB_DISABLE                                | 1 on public, direct and relayed, in any case                       |

Plain adds RANK and WORLD_SIZE (machines), LOCAL_RANK=0, LOCAL_WORLD_SIZE=1: `env://` works, one process per machine.

Torchrun adds PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE, PET_MASTER_ADDR, PET_MASTER_PORT, PET_LOCAL_ADDR,
PET_RDZV_BACKEND=static, PET_RDZV_ID=<run>-<epoch>, PET_MAX_RESTARTS=0 and TORCH_ELASTIC_SHUTDOWN_TIMEOUT. A Plain run
of one machine gets these too, so that `torchrun train.py` there starts one process per GPU without a flag and does
not fight for port 29500 with another run on the same host.

Why static: c10d orders ranks by the text of their addresses and decides who hosts the store by comparing host names;
with the static backend the global rank is `node rank × processes + local rank` and rank 0 hosts, whatever the names
say (torch 2.13, `elastic/rendezvous/static_tcp_rendezvous.py`). PET_RDZV_ENDPOINT is left out on purpose: with it
torchrun would ignore a `--master-port` of the user's (`run.py`, `get_rdzv_endpoint`), and without it the two are the
same.

TORCH_DISABLE_SHARE_RDZV_TCP_STORE is not set: only the c10d backend reads it (`dynamic_rendezvous.py`); under static
the workers always meet at the agent's store on MASTER_PORT, which is the one port that members are promised to reach.
A user who chooses c10d may set it; it is not reserved. Ghosts are kept out by the fence, not by a port.

TORCH_ELASTIC_SHUTDOWN_TIMEOUT (how long torchrun lets its workers save after SIGTERM, 30 s by default) is raised to the
grace period when that is longer, so that torchrun does not kill them earlier than the gang would.

What becomes of names that the user sets
----------------------------------------
| name                                               | fate                                                           |
|----------------------------------------------------|----------------------------------------------------------------|
| NODUS_*, PET_*, MASTER_*, NODE_RANK, NNODES        | refused at submit: provided to every rank                      |
| RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE     | Plain: overridden by the contract. Torchrun: kept for torchrun |
|                                                    | itself, which ignores them and gives each worker its own       |
| GROUP_RANK, ROLE_RANK …, TORCHELASTIC_*            | kept; torchrun gives its workers its own                       |
| GLOO_SOCKET_IFNAME, NCCL_*                         | kept, but for what the path decides: another interface would   |
|                                                    | lead past the encryption, or nowhere                           |
| SLURM_*, RAY_*, LD_PRELOAD, CUDA_VISIBLE_DEVICES,  | kept as given                                                  |
| OMP_NUM_THREADS, PATH and everything else          |                                                                |

Names are case-sensitive: `nodus_x` is the user's own.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Mapping, Sequence

from mesh.ids import Incarnation
from mesh.plan import RunPlan
from mesh.states import LauncherKind, Transport

NODE_IPS_SEPARATOR = ","
TORCHRUN_SHUTDOWN_TIMEOUT_S = 30
"""torchrun's own default (torch 2.13, `launcher/api.py`)."""

RESERVED_PREFIXES = ("NODUS_", "PET_", "MASTER_")
RESERVED_NAMES = frozenset({"NODE_RANK", "NNODES"})
PLAIN_RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

SUPPORTED_LAUNCHERS = frozenset({LauncherKind.PLAIN, LauncherKind.TORCHRUN})


def is_reserved(name: str) -> bool:
    """True for a variable that the user may not set because every rank is given it."""
    return name in RESERVED_NAMES or name.startswith(RESERVED_PREFIXES)


def rank_environment(
    *,
    plan: RunPlan,
    incarnation: Incarnation,
    addresses: Sequence[str],
    master_port: int,
    transport: Transport,
    state_dir: str,
    interface: str | None = None,
    restore_uri: str | None = None,
) -> dict[str, str]:
    """What one rank's command gets over the cleaned base environment: the user's variables and the contract.

    Args:
        plan: the run.
        incarnation: this rank's life; its rank and epoch are those of the contract.
        addresses: the members' addresses in rank order, as the barrier gave them. IPv6 without brackets or zone.
        master_port: a port that is free on rank 0's machine.
        transport: the path that this epoch uses.
        state_dir: absolute path of the rank's state folder.
        interface: this machine's network interface towards its peers; None when it is not known.
        restore_uri: the checkpoint to resume from.

    Raises:
        ValueError: the members' addresses do not fit the plan (a fault of the caller, never of the user).
    """
    _check(plan=plan, incarnation=incarnation, addresses=addresses, master_port=master_port)
    environment = _interface_defaults(interface)
    if _has_torchrun_part(plan):
        environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(
            max(TORCHRUN_SHUTDOWN_TIMEOUT_S, math.ceil(plan.grace_period_s))
        )
    environment.update(plan.env)
    environment.update(
        _common_part(
            plan=plan,
            incarnation=incarnation,
            addresses=addresses,
            master_port=master_port,
            transport=transport,
            state_dir=state_dir,
        )
    )
    environment.update(_decided_by_path(transport, interface))
    if restore_uri is not None:
        environment["NODUS_RESTORE_URI"] = restore_uri
    if plan.launcher is LauncherKind.PLAIN:
        environment.update(_plain_part(plan=plan, incarnation=incarnation))
    if _has_torchrun_part(plan):
        environment.update(
            _torchrun_part(plan=plan, incarnation=incarnation, addresses=addresses, master_port=master_port)
        )
    return environment


def _check(*, plan: RunPlan, incarnation: Incarnation, addresses: Sequence[str], master_port: int) -> None:
    if plan.launcher not in SUPPORTED_LAUNCHERS:
        raise ValueError(f"There is no contract for the launcher {plan.launcher} yet.")
    if len(addresses) != plan.nodes:
        raise ValueError(f"The run has {plan.nodes} members, and {len(addresses)} addresses were given.")
    if not 0 <= incarnation.rank < plan.nodes:
        raise ValueError(f"Rank {incarnation.rank} is not one of the {plan.nodes} members.")
    if not 0 < master_port < 65536:
        raise ValueError(f"{master_port} is not a port.")
    for address in addresses:
        if "%" in address:
            raise ValueError(f"{address} is valid on one machine only: it names an interface.")
        ipaddress.ip_address(address)


def _interface_defaults(interface: str | None) -> dict[str, str]:
    """gloo takes one exact name (no `^lo`). NCCL takes prefixes, so `=` keeps eth1 from matching eth10."""
    if interface is None:
        return {}
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}


def _decided_by_path(transport: Transport, interface: str | None) -> dict[str, str]:
    """What is the path's to say, whatever the user set (first document, "Every rank gets the same variables")."""
    decided = {} if transport is Transport.PRIVATE else {"NCCL_IB_DISABLE": "1"}
    is_overlay = transport in (Transport.DIRECT, Transport.RELAYED)
    return decided | (_interface_defaults(interface) if is_overlay else {})


def _common_part(
    *,
    plan: RunPlan,
    incarnation: Incarnation,
    addresses: Sequence[str],
    master_port: int,
    transport: Transport,
    state_dir: str,
) -> dict[str, str]:
    rank, nodes = str(incarnation.rank), str(plan.nodes)
    return {
        "NODUS_NODE_RANK": rank,
        "NODE_RANK": rank,
        "NODUS_NUM_NODES": nodes,
        "NNODES": nodes,
        "NODUS_GPUS_PER_NODE": str(plan.gpus_per_node),
        "NODUS_NODE_IPS": NODE_IPS_SEPARATOR.join(addresses),
        "MASTER_ADDR": addresses[0],
        "MASTER_PORT": str(master_port),
        "NODUS_GANG_EPOCH": str(incarnation.epoch),
        "NODUS_GANG_TRANSPORT": str(transport),
        "NODUS_RUN": plan.name,
        "NODUS_STATE_DIR": state_dir,
        "NODUS_INCARNATION": str(incarnation),
    }


def _plain_part(*, plan: RunPlan, incarnation: Incarnation) -> dict[str, str]:
    return {
        "RANK": str(incarnation.rank),
        "WORLD_SIZE": str(plan.nodes),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }


def _has_torchrun_part(plan: RunPlan) -> bool:
    return plan.launcher is LauncherKind.TORCHRUN or plan.nodes == 1


def _torchrun_part(
    *, plan: RunPlan, incarnation: Incarnation, addresses: Sequence[str], master_port: int
) -> dict[str, str]:
    """torchrun reads the default of `--some-flag` from `PET_SOME_FLAG` (torch 2.13, `argparse_util.py`)."""
    return {
        "PET_NNODES": str(plan.nodes),
        "PET_NODE_RANK": str(incarnation.rank),
        "PET_NPROC_PER_NODE": str(plan.processes_per_node),
        "PET_MASTER_ADDR": addresses[0],
        "PET_MASTER_PORT": str(master_port),
        "PET_LOCAL_ADDR": addresses[incarnation.rank],
        "PET_RDZV_BACKEND": "static",
        "PET_RDZV_ID": f"{plan.name}-{incarnation.epoch}",
        "PET_MAX_RESTARTS": "0",
    }


RAY_WORKER_MARKS = ("RAY_RAYLET_PID", "RAY_JOB_ID")
"""Ray puts these into the environment of every worker process that it starts."""
RAY_WORKER_DEFAULTS = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT")
"""What a Ray worker sets for itself when nobody else did (ray 2.60, `_private/utils.py`, `_private/worker.py`)."""
VISIBLE_DEVICE_NAMES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
CONTROL_PLANE_PREFIXES = ("RAY_", "GANGMESH_")
FOREIGN_RANK_PREFIXES = (
    *RESERVED_PREFIXES,
    "TORCHELASTIC_",
    "SLURM_",
    "OMPI_COMM_WORLD_",
    "PMI_",
    "PMIX_",
)
FOREIGN_RANK_NAMES = (
    RESERVED_NAMES
    | set(PLAIN_RANK_NAMES)
    | {"GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"}
)


def clean_base_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment that the user's command would have had if no orchestrator stood between.

    Hand it a snapshot that was taken before Ray was started: then only our own and Ray's names have to go, and what
    the machine's owner set (OMP_NUM_THREADS, CUDA_VISIBLE_DEVICES, PYTHONPATH, a breakpoint hook) is theirs and stays.
    From inside a Ray worker the two cannot be told apart: there OMP_NUM_THREADS, PYTHONBREAKPOINT and an empty
    device list are taken for Ray's and go too.

    Ranks and worlds of any other launcher go as well (torchrun, Slurm, MPI): a deployment that was started inside an
    allocation must not tell its jobs that they are part of it.
    """
    in_ray_worker = any(mark in environ for mark in RAY_WORKER_MARKS)
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(CONTROL_PLANE_PREFIXES)
        and not name.startswith(FOREIGN_RANK_PREFIXES)
        and name not in FOREIGN_RANK_NAMES
        and not (name == "PYTHONBREAKPOINT" and value.startswith("ray."))
        and not (in_ray_worker and _is_ray_default(name, value))
    }


def _is_ray_default(name: str, value: str) -> bool:
    return name in RAY_WORKER_DEFAULTS or (name in VISIBLE_DEVICE_NAMES and value == "")
