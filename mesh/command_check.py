"""Flags in the user's command that take the gang's rendezvous out of its hands.

torchrun's flags beat the PET_* variables. A command that was written for another system often carries `--nnodes`,
`--node_rank` or an endpoint of that system, and then each machine trains in a world of its own, or waits for ever for
peers that do not exist, while everything looks started. That is found here, when the run is submitted.

Rules of this file:
1. Pure, and best effort: what `mesh.command_lines` can read. What it cannot read is not judged.
2. Refused is only what is certain to be no gang: worlds of their own, or peers that can never meet. Everything else
   that overrides the contract is a warning. A value that agrees with the contract is neither.
3. A finding names what was written, says what it does, and what to write instead.

| flag of torchrun      | agrees                            | refused (more than one machine)               | else     |
|-----------------------|-----------------------------------|-----------------------------------------------|----------|
| --standalone          |                                   | always                                        |          |
| --nnodes              | the number, $NNODES, $PET_NNODES  | another number                                | warning  |
| --node-rank           | $NODE_RANK, $PET_NODE_RANK        | a number: every rank runs the same command    | warning  |
| --nproc-per-node      | the number; any on a CPU run      |                                               | warning  |
| --master-addr         | $MASTER_ADDR                      | this machine (localhost, 127.…)               | warning  |
| --master-port         | $MASTER_PORT                      |                                               | warning  |
| --rdzv-backend        | static                            | another one without an endpoint               | warning  |
| --rdzv-endpoint       | $MASTER_ADDR:$MASTER_PORT         | this machine                                  | warning  |
| --rdzv-id             | $PET_RDZV_ID                      | one per process ($RANDOM, $$, $HOSTNAME)      | warning  |
| --max-restarts        | 0                                 |                                               | warning  |

On one machine there is nobody to miss: there only a node count or rank that needs other machines is refused. A Plain
run of several machines gives torchrun no PET_*: there torchrun is refused without a node count and an address of its
own, and an explicit world for each machine (`--standalone`) is taken for intended, with a warning.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mesh.command_lines import UNKNOWN, Started, started_programs
from mesh.plan import RunPlan
from mesh.states import LauncherKind

LEAVE_OUT = "Leave it out: the gang gives it to torchrun."
PER_PROCESS_VARIABLES = re.compile(r"\$\{?(RANDOM|SRANDOM|BASHPID|HOSTNAME|SLURM_PROCID)\}?|\$\$")

_WORLD_FLAGS = (
    *("nnodes", "nproc-per-node", "node-rank", "master-addr", "master-port", "local-addr"),
    *("rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "max-restarts"),
)
_VALUE_FLAGS = (
    *_WORLD_FLAGS,
    *("monitor-interval", "start-method", "event-log-handler", "role", "log-dir", "redirects", "tee"),
    *("local-ranks-filter", "duplicate-stdout-filters", "duplicate-stderr-filters", "logs-specs"),
    *("numa-binding", "signals-to-handle", "shutdown-timeout"),
)
_BARE_FLAGS = ("standalone", "module", "no-python", "run-path", "virtual-local-rank", "use-env", "help")
"""torch 2.13, `torch/distributed/run.py` and `launch.py`; `_` and `-` are the same there."""
_SHORT_VALUE_FLAGS = ("-r", "-t")

# What the contract's values look like before there is an epoch. UNKNOWN is equal to nothing, these are equal to
# themselves.
_RANK, _ADDRESS, _PORT, _LOCAL_ADDRESS, _RDZV_ID = "<rank>", "<addr>", "<port>", "<local>", "<id>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing in the command that does not go with the gang."""

    flag: str
    """As it was written."""
    message: str
    """One sentence: what it does here."""
    remedy: str
    """One sentence: what to do."""
    refuses: bool = False
    """The run is not accepted with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flag:
    written: str
    value: str
    """Expanded."""


def check_command(plan: RunPlan) -> list[Finding]:
    """What this run's command would do to its gang; refusals and warnings in the order of the command."""
    variables = {**dict(plan.env), **_contract_variables(plan)}
    started = started_programs(plan.command, variables=variables)
    return [finding for program in started for finding in _findings(program, plan)]


def _contract_variables(plan: RunPlan) -> dict[str, str]:
    nodes, gpus = str(plan.nodes), str(plan.gpus_per_node)
    known = {
        "NNODES": nodes,
        "NODUS_NUM_NODES": nodes,
        "NODUS_GPUS_PER_NODE": gpus,
        "NODE_RANK": _RANK,
        "NODUS_NODE_RANK": _RANK,
        "MASTER_ADDR": _ADDRESS,
        "MASTER_PORT": _PORT,
        "NODUS_RUN": plan.name,
    }
    if plan.launcher is LauncherKind.PLAIN:
        known |= {"RANK": _RANK, "WORLD_SIZE": nodes}
    if plan.launcher is LauncherKind.TORCHRUN or plan.nodes == 1:
        known |= {
            "PET_NNODES": nodes,
            "PET_NODE_RANK": _RANK,
            "PET_NPROC_PER_NODE": str(plan.processes_per_node),
            "PET_MASTER_ADDR": _ADDRESS,
            "PET_MASTER_PORT": _PORT,
            "PET_LOCAL_ADDR": _LOCAL_ADDRESS,
            "PET_RDZV_BACKEND": "static",
            "PET_RDZV_ID": _RDZV_ID,
            "PET_MAX_RESTARTS": "0",
        }
    return known


def _findings(started: Started, plan: RunPlan) -> Iterator[Finding]:
    match started.program:
        case "torchrun":
            yield from _torchrun_findings(started, plan)
        case "mpirun" | "mpiexec" | "orterun" if plan.nodes > 1:
            yield Finding(
                flag=started.program,
                message=f"{started.program} cannot start processes on other members: there is no ssh and no PMI "
                "between them, so each machine would start a world of its own.",
                remedy="Use a framework that finds its peers from environment variables (PyTorch, JAX, Horovod with "
                "Gloo), or a launcher of your own.",
                refuses=True,
            )
        case "srun" | "scontrol" | "sbatch" | "salloc":
            yield Finding(
                flag=started.program,
                message=f"{started.program} is part of Slurm, and a gang's members are no Slurm allocation.",
                remedy="Leave it out: the command is started on every machine, and its peers are in NODUS_NODE_IPS.",
            )
        case "accelerate" | "deepspeed" | "torchx" if plan.nodes > 1:
            yield Finding(
                flag=started.program,
                message=f"{started.program} is not told about the gang and may start a world of its own on each "
                "machine.",
                remedy="Start the script with --launcher torchrun -- torchrun SCRIPT.",
            )
        case "python" if plan.launcher is LauncherKind.TORCHRUN and not started.in_shell:
            yield Finding(
                flag="python",
                message="With the launcher Torchrun the command is expected to be torchrun; python alone gets no RANK, "
                "LOCAL_RANK or WORLD_SIZE.",
                remedy="Write torchrun SCRIPT, or use the launcher Plain for one process per machine.",
            )
        case _:
            pass


def _torchrun_findings(started: Started, plan: RunPlan) -> Iterator[Finding]:
    flags = _torchrun_flags(started)
    if plan.nodes == 1:
        yield from _one_machine_findings(flags)
        return
    if plan.launcher is LauncherKind.PLAIN and _is_left_alone(flags):
        yield Finding(
            flag="torchrun",
            message=f"With the launcher Plain torchrun is not told about its peers: each of the {plan.nodes} machines "
            "would be a world of its own.",
            remedy="Add --launcher torchrun.",
            refuses=True,
        )
        return
    for name, flag in flags.items():
        if finding := _judge(name, flag, flags, plan, started):
            yield finding


def _is_left_alone(flags: Mapping[str, _Flag]) -> bool:
    if "standalone" in flags:
        return False
    return "nnodes" not in flags or not (flags.keys() & {"master-addr", "rdzv-endpoint"} or _is_one(flags))


def _is_one(flags: Mapping[str, _Flag]) -> bool:
    return flags["nnodes"].value in ("1", "1:1")


def _torchrun_flags(started: Started) -> dict[str, _Flag]:
    """torchrun's own flags, by their long names with dashes; the last one wins, as in argparse."""
    found: dict[str, _Flag] = {}
    pairs = list(zip(started.arguments, started.expanded, strict=True))
    index = 0
    while index < len(pairs) and pairs[index][0].startswith("-"):
        written, expanded = pairs[index]
        index += 1
        name, equals, value = expanded.partition("=")
        flag = _long_name(name)
        takes_value = flag in _VALUE_FLAGS or name in _SHORT_VALUE_FLAGS
        if takes_value and not equals and index < len(pairs):
            written, value = f"{written} {pairs[index][0]}", pairs[index][1]
            index += 1
        if flag is not None:
            found[flag] = _Flag(written=written, value=value)
    return found


def _long_name(word: str) -> str | None:
    """The flag that this is or, as argparse allows, the only one that it begins."""
    if not word.startswith("--"):
        return None
    name = word[2:].replace("_", "-")
    known = [*_VALUE_FLAGS, *_BARE_FLAGS]
    if name in known:
        return name
    begun = [flag for flag in known if flag.startswith(name)]
    return begun[0] if len(begun) == 1 else None


def _one_machine_findings(flags: Mapping[str, _Flag]) -> Iterator[Finding]:
    nodes = flags.get("nnodes")
    if nodes is not None and _smallest(nodes.value) > 1:
        yield Finding(
            flag=nodes.written,
            message=f"{nodes.written} waits for other machines, and this run has one.",
            remedy="Say --nodes to mesh, or leave the flag out.",
            refuses=True,
        )
    restarts = flags.get("max-restarts")
    if restarts is not None and restarts.value not in ("0", ""):
        yield _restarts_warning(restarts)


def _smallest(value: str) -> int:
    low = value.partition(":")[0]
    return int(low) if re.fullmatch(r"[0-9]{1,9}", low) else 0


def _judge(
    name: str, flag: _Flag, flags: Mapping[str, _Flag], plan: RunPlan, started: Started
) -> Finding | None:
    """What one flag does on several machines; None when it agrees or is none of our business."""
    match name:
        case "standalone":
            # PET_NNODES stays in force beside it: torchrun waits on each machine for the others, and nobody comes.
            alone = plan.launcher is LauncherKind.PLAIN
            return _world_of_its_own(flag, plan) if alone else _meets_itself(flag)
        case "nnodes":
            return _judge_nnodes(flag, plan, started)
        case "node-rank":
            return _judge_node_rank(flag, started)
        case "nproc-per-node":
            return _judge_processes(flag, plan, started)
        case "master-addr":
            if flag.value == _ADDRESS:
                return None
            return _meets_itself(flag) if _is_this_machine(flag.value) else _overrides(flag, started)
        case "master-port":
            return None if flag.value == _PORT else _overrides(flag, started)
        case "rdzv-backend":
            return _judge_backend(flag, flags)
        case "rdzv-endpoint":
            return _judge_endpoint(flag, started)
        case "rdzv-id":
            return _judge_rdzv_id(flag, started)
        case "max-restarts":
            return None if flag.value == "0" else _restarts_warning(flag)
        case _:
            return None


def _world_of_its_own(flag: _Flag, plan: RunPlan) -> Finding:
    return Finding(
        flag=flag.written,
        message=f"{flag.written} makes torchrun take one machine for the whole world: the {plan.nodes} machines do not "
        "train together.",
        remedy=LEAVE_OUT,
        refuses=plan.launcher is LauncherKind.TORCHRUN,
    )


def _judge_nnodes(flag: _Flag, plan: RunPlan, started: Started) -> Finding | None:
    nodes = str(plan.nodes)
    if flag.value in (nodes, f"{nodes}:{nodes}"):
        return None
    if flag.value in ("1", "1:1"):
        return _world_of_its_own(flag, plan)
    if re.fullmatch(r"[0-9]{1,9}", flag.value):
        return Finding(
            flag=flag.written,
            message=f"{flag.written} makes torchrun wait for {flag.value} machines, and this run has {nodes}.",
            remedy=LEAVE_OUT,
            refuses=True,
        )
    return _overrides(flag, started)


def _judge_node_rank(flag: _Flag, started: Started) -> Finding | None:
    if flag.value == _RANK:
        return None
    if re.fullmatch(r"[0-9]{1,9}", flag.value):
        return Finding(
            flag=flag.written,
            message=f"{flag.written} gives every machine the same rank: each runs this command, and they never meet.",
            remedy=LEAVE_OUT,
            refuses=True,
        )
    return _overrides(flag, started)


def _judge_processes(flag: _Flag, plan: RunPlan, started: Started) -> Finding | None:
    if flag.value == str(plan.processes_per_node):
        return None
    if re.fullmatch(r"[1-9][0-9]{0,8}", flag.value):
        if plan.gpus_per_node == 0:
            return None  # A CPU run has no other way to say how many processes it wants.
        return Finding(
            flag=flag.written,
            message=f"{flag.written} starts {flag.value} processes on machines that have {plan.gpus_per_node} "
            "GPUs each.",
            remedy="Leave it out: torchrun then starts one process per GPU.",
        )
    if flag.value in ("auto", "gpu", "cpu", "xpu"):
        if flag.value == "gpu" and plan.gpus_per_node:
            return None
        return Finding(
            flag=flag.written,
            message=f"{flag.written} counts what each machine has, so the members may start different numbers.",
            remedy="Leave it out, or give a number.",
        )
    return _overrides(flag, started)


def _judge_backend(flag: _Flag, flags: Mapping[str, _Flag]) -> Finding | None:
    if flag.value == "static":
        return None
    if "rdzv-endpoint" not in flags and UNKNOWN not in flag.value:
        return Finding(
            flag=flag.written,
            message=f"{flag.written} without an endpoint looks for the peers on each machine itself, and they never "
            "meet.",
            remedy=LEAVE_OUT,
            refuses=True,
        )
    return Finding(
        flag=flag.written,
        message=f"{flag.written} may order the ranks otherwise than the gang does, and decides by host names who hosts "
        "the rendezvous.",
        remedy=LEAVE_OUT,
    )


def _judge_endpoint(flag: _Flag, started: Started) -> Finding | None:
    if flag.value == f"{_ADDRESS}:{_PORT}":
        return None
    host = flag.value.rpartition(":")[0] or flag.value
    return _meets_itself(flag) if _is_this_machine(host) else _overrides(flag, started)


def _judge_rdzv_id(flag: _Flag, started: Started) -> Finding | None:
    if flag.value == _RDZV_ID:
        return None
    if started.in_shell and PER_PROCESS_VARIABLES.search(flag.written):
        return Finding(
            flag=flag.written,
            message=f"{flag.written} is another one on each machine, and they never meet.",
            remedy=LEAVE_OUT,
            refuses=True,
        )
    return _overrides(flag, started)


def _meets_itself(flag: _Flag) -> Finding:
    return Finding(
        flag=flag.written,
        message=f"{flag.written} makes every machine look for its peers on itself, and they never meet.",
        remedy=LEAVE_OUT,
        refuses=True,
    )


def _restarts_warning(flag: _Flag) -> Finding:
    return Finding(
        flag=flag.written,
        message=f"{flag.written} lets torchrun restart workers on one machine while the others go on; "
        "the gang owns restarts.",
        remedy="Leave it out: recovery.maxAttempts counts the gang's restarts.",
    )


def _overrides(flag: _Flag, started: Started) -> Finding:
    """A value that is not ours: it may be right, and nobody can tell before it runs."""
    if flag.value == "":
        message = f"{flag.written} has no value; a variable that is not set here may have stood there."
    elif "$" in flag.written and not started.in_shell:
        message = f"{flag.written} reaches torchrun as it stands: no shell is there to expand it."
    else:
        message = f"{flag.written} overrides what the gang tells torchrun."
    return Finding(flag=flag.written, message=message, remedy=LEAVE_OUT)


def _is_this_machine(host: str) -> bool:
    """True for the names and addresses that mean another machine on each machine."""
    plain = host.strip("[]").lower()
    if plain in ("localhost", "localhost.localdomain", "ip6-localhost"):
        return True
    try:
        address = ipaddress.ip_address(plain)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
