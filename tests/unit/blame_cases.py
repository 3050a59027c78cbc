"""Labelled cases of blame: what was heard of one epoch, and what it must be found to have ended of.

A case is a list of moments; what is heard in one moment may be heard in any order that keeps each rank's own. Every
rank that nothing else is said of confirms its fence, at any time after that was ordered. Outputs are those that torch
and NCCL print; the launchers' own reading of them is part of what is tested.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from agents.launcher.base import lost_evidence
from agents.launcher.plain import Plain
from agents.launcher.strategy import CommandEnd
from agents.launcher.torchrun import Torchrun
from coordinator.core.gang_state import RestartKind
from mesh.messages import HEARTBEAT_S, LEASE_GUARD_S, LEASE_TTL_S, CauseEvidence, ProcessExit
from mesh.reasons import Reason

# ---- what can be heard -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """Something about one rank. `at_s` is the member's own clock, from the start of the case."""

    rank: int
    at_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited(Heard):
    exit: ProcessExit
    evidence: CauseEvidence
    last_lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailed(Heard):
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class FencedItself(Heard):
    """The member lost its lease and says so."""

    reason: Reason = Reason.LEASE_LOST


@dataclass(frozen=True, slots=True, kw_only=True)
class Lapsed(Heard):
    """The store: its lease ran out."""

    silent_s: float | None = LEASE_TTL_S + LEASE_GUARD_S + HEARTBEAT_S
    read_late_s: float = 0.0
    """For so long the store's word lay unread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone(Heard):
    """The store: it holds no lease any more; and its own report never comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspected(Heard):
    """The store: its connection closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSilent(Heard):
    """The coordinator itself: the store has said nothing for so long. Heard before the rest of this rank's."""

    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHeard(Heard):
    """The coordinator itself: the store answers again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaimed(Heard):
    """The provider: this rank's machine is wanted back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the core must find, in whatever order it hears."""

    kind: RestartKind
    rank: int
    reason: Reason
    victims: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    """Ranks that get another machine."""
    says: tuple[str, ...] = ()
    says_not: tuple[str, ...] = ()
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One epoch of three ranks (on m0, m1, m2 at 10.0.0.1, .2, .3) after it had been running for a while."""

    name: str
    moments: tuple[tuple[float, tuple[Heard, ...]], ...]
    """Seconds since the first, and what is heard then."""
    expected: Expected
    survives_crashes: bool = True
    """A crash of the coordinator in its middle changes nothing. It does where proofs of life are forgotten with it."""


# ---- what processes print ----------------------------------------------------------------------------

ONE = ProcessExit(code=1)
GLOO_CLOSED = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [{}]:4242"
)
GLOO_TIMEOUT = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv "
    "operation to complete"
)
NCCL_REMOTE = (
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3384, remote process exited or there "
    "was a network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error or a "
    "remote process exiting prematurely."
)
NCCL_WATCHDOG = (
    "[rank{}]:[E ProcessGroupNCCL.cpp:629] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, "
    "OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600039 milliseconds before timing out.\n"
)
LOG = "1129 19:55:04.049000 25342 torch/distributed/elastic/multiprocessing/api.py:"


def traceback(error: str, *, prefix: str = "") -> str:
    lines = ["Traceback (most recent call last):", '  File "train.py", line 9, in <module>', "    step()"]
    return "".join(f"{prefix}{line}\n" for line in [*lines, *error.split("\n")])


def torchrun_report(printed: str, *, rank: int, code: int) -> str:
    """As torch 2.13 prints it when the worker of this rank ended with `code` (negative: a signal)."""
    line, dash = "=" * 60, "-" * 60
    return (
        f"{printed}"
        f"E{LOG}1002] failed (exitcode: {code}) local_rank: 0 (pid: 77) of binary: /usr/bin/python3\n"
        "Traceback (most recent call last):\n"
        '  File "torchrun", line 8, in <module>\n    sys.exit(main())\n'
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        f"{line}\ntrain.py FAILED\n{dash}\nFailures:\n  <NO_OTHER_FAILURES>\n{dash}\n"
        "Root Cause (first observed failure):\n"
        "[0]:\n  time      : 2026-11-29_19:55:04\n  host      : localhost\n"
        f"  rank      : {rank} (local_rank: 0)\n  exitcode  : {code} (pid: 77)\n  error_file: <N/A>\n"
        f"  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html\n{line}\n"
    )


def torchrun(
    rank: int,
    *,
    code: int = 1,
    error: str = "",
    printed: str = "",
    error_file: str = "",
    oom_killed: bool = False,
    at_s: float | None = None,
) -> Exited:
    """torchrun on this rank ended with 1 because its worker ended with `code`, having printed `error`."""
    text = printed + (traceback(error, prefix=f"[rank{rank}]: ") if error else "")
    end = CommandEnd(
        exit=ONE,
        output=torchrun_report(text, rank=rank, code=code),
        error_file=error_file,
        oom_killed=oom_killed,
    )
    explained = Torchrun().explain(end)
    return Exited(
        rank=rank, at_s=at_s, exit=ONE, evidence=explained.evidence, last_lines=explained.last_lines
    )


def plain(
    rank: int,
    *,
    code: int | None = None,
    signal: int | None = None,
    error: str = "",
    printed: str = "",
    oom_killed: bool = False,
    at_s: float | None = None,
) -> Exited:
    """A plain command on this rank ended so, having printed `printed` and the traceback of `error`."""
    exit_ = ProcessExit(code=code, signal=signal)
    output = printed + (traceback(error) if error else "")
    explained = Plain().explain(CommandEnd(exit=exit_, output=output, oom_killed=oom_killed))
    return Exited(
        rank=rank, at_s=at_s, exit=exit_, evidence=explained.evidence, last_lines=explained.last_lines
    )


def closed_by(peer: str, rank: int, *, at_s: float | None = None) -> Exited:
    """The collective of this rank broke because the peer's connection closed."""
    return torchrun(rank, error=GLOO_CLOSED.format(peer), at_s=at_s)


def taken_down(rank: int) -> Exited:
    """Our supervisor on this rank was killed, and the command with it."""
    message = f"The supervisor of rank {rank} ended on its own; the command was killed with it."
    return Exited(rank=rank, exit=ProcessExit(signal=9), evidence=lost_evidence(message))


def failure(rank: int, reason: Reason, victims: tuple[int, ...] = (), **more: object) -> Expected:
    return Expected(kind=RestartKind.FAILURE, rank=rank, reason=reason, victims=victims, **more)  # type: ignore[arg-type]


def loss(rank: int, victims: tuple[int, ...] = (), **more: object) -> Expected:
    facts: dict[str, object] = {"reason": Reason.MACHINE_LOST, "lost": (rank,), **more}
    return Expected(kind=RestartKind.LOSS, rank=rank, victims=victims, **facts)  # type: ignore[arg-type]


def reclaim(rank: int, victims: tuple[int, ...] = (), **more: object) -> Expected:
    facts: dict[str, object] = {"reason": Reason.MACHINE_RECLAIMED, "lost": (rank,), **more}
    return Expected(kind=RestartKind.RECLAIM, rank=rank, victims=victims, **facts)  # type: ignore[arg-type]


M1 = "10.0.0.2"
UNHEARD = Reason.STORE_UNREACHABLE
KILLED, FAILED = Reason.COMMAND_KILLED, Reason.COMMAND_FAILED
ERROR_FILE = json.dumps(
    {"message": {"message": "ValueError: loss is nan at step 812", "extraInfo": {"py_callstack": "…"}}}
)

# ---- the cases ---------------------------------------------------------------------------------------

COMMANDS = (
    Case(
        name="a segmentation fault whose peers complain",
        moments=((0.0, (closed_by(M1, 0), torchrun(1, code=-11), closed_by(M1, 2))),),
        expected=failure(
            1,
            KILLED,
            (0, 2),
            says=("worker 1 ended with SIGSEGV (signal 11)", "Ranks 0 and 2 failed because of it."),
        ),
    ),
    Case(
        name="a segmentation fault that is heard after its peers' complaints",
        moments=((0.0, (closed_by(M1, 0), closed_by(M1, 2))), (1.5, (torchrun(1, code=-11),))),
        expected=failure(1, KILLED, (0, 2)),
    ),
    Case(
        name="a killed rank that is heard only when everything is being stopped",
        moments=((0.0, (closed_by(M1, 0), closed_by(M1, 2))), (5.0, (plain(1, signal=9),))),
        expected=failure(1, KILLED, (0, 2), says_not=("out of memory",), hint="usually the out-of-memory"),
    ),
    Case(
        name="an out-of-memory kill that the kernel has counted, under torchrun",
        moments=(
            (
                0.0,
                (
                    torchrun(1, code=-9, oom_killed=True, printed="step 7\n"),
                    torchrun(0, code=-6, printed=NCCL_WATCHDOG.format(0)),
                    torchrun(2, code=-6, printed=NCCL_WATCHDOG.format(2)),
                ),
            ),
        ),
        expected=failure(
            1,
            KILLED,
            (0, 2),
            says=("SIGKILL (signal 9), probably out of memory", "step 7"),
            hint="needs more memory",
        ),
    ),
    Case(
        name="an out-of-memory kill behind a shell",
        moments=((0.0, (plain(1, code=137, oom_killed=True), closed_by(M1, 0))),),
        expected=failure(
            1,
            FAILED,
            (0,),
            says=("exit code 137 (128 + SIGKILL), probably out of memory",),
            hint="needs more memory",
        ),
    ),
    Case(
        name="exit 42 through torchrun's 1",
        moments=((0.0, (torchrun(1, code=42), closed_by(M1, 0), closed_by(M1, 2))),),
        expected=failure(
            1,
            FAILED,
            (0, 2),
            says=("worker 1 ended with exit code 42 (its launcher returned exit code 1)",),
        ),
    ),
    Case(
        name="an error file with the exception",
        moments=((0.0, (torchrun(1, error_file=ERROR_FILE), closed_by(M1, 0))),),
        expected=failure(1, FAILED, (0,), says=("ValueError: loss is nan at step 812",)),
    ),
    Case(
        name="somebody sends a rank SIGTERM",
        moments=((0.0, (plain(1, signal=15), closed_by(M1, 0), closed_by(M1, 2))),),
        expected=failure(
            1, KILLED, (0, 2), says=("SIGTERM (signal 15)",), hint="This deployment did not send"
        ),
    ),
    Case(
        name="somebody sends torchrun SIGTERM",
        moments=(
            (
                0.0,
                (
                    plain(
                        1,
                        code=1,
                        error="torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: 15",
                    ),
                    closed_by(M1, 0),
                ),
            ),
        ),
        expected=failure(1, KILLED, (0,), says=("SIGTERM (signal 15)",)),
    ),
    Case(
        name="a script's own SIGTERM to the others after a bug",
        moments=((0.0, (plain(0, code=42, at_s=0.4), plain(1, code=143, at_s=0.1), closed_by(M1, 2))),),
        expected=failure(0, FAILED, (1, 2), says=("exit code 42",)),
    ),
    Case(
        name="a full disk on one rank",
        moments=(
            (
                0.0,
                (torchrun(1, error="OSError: [Errno 28] No space left on device"), closed_by(M1, 0)),
            ),
        ),
        expected=failure(1, FAILED, (0,), says=("No space left on device",), hint="A disk on that machine"),
    ),
    Case(
        name="two bugs at once",
        moments=(
            (
                0.0,
                (
                    torchrun(2, error="KeyError: 'loss'", at_s=0.2),
                    torchrun(0, code=42, at_s=0.1),
                    closed_by(M1, 1, at_s=0.0),
                ),
            ),
        ),
        expected=failure(0, FAILED, (1,), says=("Rank 2 failed as well, each of its own.",)),
    ),
    Case(
        name="a rank that left early with zero",
        moments=((0.0, (plain(1, code=0),)), (10.0, (closed_by(M1, 0), closed_by(M1, 2, at_s=10.1)))),
        expected=failure(
            0, FAILED, (2,), says=("Rank 1 had already exited 0.", "complains about rank 1 on m1")
        ),
    ),
    Case(
        name="a command that is not found, beside complaints",
        moments=(
            (
                0.0,
                (
                    StartFailed(rank=1, reason=Reason.COMMAND_NOT_FOUND),
                    torchrun(0, error=GLOO_TIMEOUT),
                    torchrun(2, error=GLOO_TIMEOUT),
                ),
            ),
        ),
        expected=failure(1, Reason.COMMAND_NOT_FOUND, (0, 2)),
    ),
    Case(
        name="torch's race at interpreter exit",
        moments=(
            (0.0, (plain(0, code=0, at_s=0.0), plain(2, code=0, at_s=0.0))),
            (
                0.2,
                (plain(1, signal=6, printed="done\nterminate called without an active exception\n"),),
            ),
        ),
        expected=failure(
            1,
            KILLED,
            says=("SIGABRT (signal 6)", "Ranks 0 and 2 had already exited 0."),
            hint="dist.barrier()",
        ),
    ),
    Case(
        name="a collective that times out everywhere, and nobody failed",
        moments=(
            (
                0.0,
                (
                    torchrun(0, error=GLOO_TIMEOUT, at_s=0.2),
                    torchrun(1, error=GLOO_TIMEOUT, at_s=0.1),
                    torchrun(2, error=GLOO_TIMEOUT, at_s=0.3),
                ),
            ),
        ),
        expected=failure(
            1,
            FAILED,
            (0, 2),
            says=("complains about a peer, but no rank is known to have failed of its own.",),
        ),
    ),
    Case(
        name="a silent hang of one rank",
        moments=(
            (
                0.0,
                (
                    torchrun(0, error="RuntimeError: Rank 1 failed to pass monitoredBarrier in 60000 ms"),
                    torchrun(2, error=GLOO_TIMEOUT, at_s=0.1),
                ),
            ),
        ),
        expected=failure(
            0,
            FAILED,
            (2,),
            says=("It complains about rank 1 on m1", "rank 1 still ran and had said nothing"),
        ),
    ),
    Case(
        name="complaints in a chain",
        moments=((0.0, (closed_by("10.0.0.2", 0, at_s=0.0), closed_by("10.0.0.3", 1, at_s=0.1))),),
        expected=failure(1, FAILED, (0,), says=("complains about rank 2 on m2",)),
    ),
)

MACHINES = (
    Case(
        name="a lost machine whose peers complain seconds before its lease runs out",
        moments=(
            (0.0, (torchrun(0, error=NCCL_REMOTE), torchrun(2, error=NCCL_REMOTE))),
            (3.3, (Lapsed(rank=1),)),
        ),
        expected=loss(1, (0, 2), says=("lease ran out", "Ranks 0 and 2 failed because of it.")),
    ),
    Case(
        name="a machine whose connection closes, and whose peers time out",
        moments=(
            (0.0, (Suspected(rank=1), torchrun(0, code=-6, printed=NCCL_WATCHDOG.format(0)))),
            (3.2, (Lapsed(rank=1),)),
        ),
        expected=loss(1, (0,)),
    ),
    Case(
        name="a lost machine whose peers hide the error behind an exit of their own",
        moments=((0.0, (plain(0, code=3), plain(2, code=3))), (3.3, (Lapsed(rank=1),))),
        expected=loss(1, (0, 2)),
    ),
    Case(
        name="a bug beside a machine that has not proven itself alive since",
        moments=((0.0, (torchrun(0, code=42),)), (3.7, (Lapsed(rank=1),))),
        expected=loss(1, (0,)),
    ),
    Case(
        name="a bug beside a machine that was lost after it had proven itself alive",
        moments=((0.0, (torchrun(0, code=42),)), (9.0, (Lapsed(rank=1),))),
        expected=failure(0, FAILED, lost=(1,)),
        survives_crashes=False,
    ),
    Case(
        name="a command that is not found, beside a lost machine",
        moments=((0.0, (StartFailed(rank=0, reason=Reason.COMMAND_NOT_FOUND),)), (3.3, (Lapsed(rank=1),))),
        expected=failure(0, Reason.COMMAND_NOT_FOUND),
    ),
    Case(
        name="two machines lost at once",
        moments=(
            (0.0, (torchrun(0, error=NCCL_REMOTE),)),
            (3.3, (Lapsed(rank=1, at_s=3.3), Lapsed(rank=2, at_s=3.3))),
        ),
        expected=loss(1, (0,), lost=(1, 2)),
    ),
    Case(
        name="a lease that was given back by a machine that says nothing more",
        moments=((0.0, (Gone(rank=1), closed_by(M1, 0))),),
        expected=loss(1, (0,)),
    ),
    Case(
        name="a machine that stood still and fences itself",
        moments=((0.0, (closed_by(M1, 0), plain(1, signal=9), FencedItself(rank=1), closed_by(M1, 2))),),
        expected=loss(1, (0, 2), reason=Reason.LEASE_LOST, lost=(), says=("it had lost its lease",)),
    ),
    Case(
        name="a machine that stood still beyond its lease",
        moments=(
            (0.0, (torchrun(0, error=GLOO_TIMEOUT), torchrun(2, error=GLOO_TIMEOUT))),
            (2.0, (Lapsed(rank=1), FencedItself(rank=1))),
        ),
        expected=loss(1, (0, 2)),
    ),
    Case(
        name="the store is silent and everybody fences himself",
        moments=(
            (
                0.0,
                (
                    FencedItself(rank=0, at_s=0.0),
                    plain(1, signal=9),
                    FencedItself(rank=1, at_s=0.1),
                    closed_by(M1, 2),
                    FencedItself(rank=2, at_s=0.2),
                ),
            ),
        ),
        expected=Expected(kind=RestartKind.OURS, rank=0, reason=UNHEARD),
    ),
    Case(
        name="the store is silent, and the first that stops itself has the others fenced",
        moments=(
            (
                0.0,
                (StoreSilent(rank=1, silent_s=2.5), FencedItself(rank=0, reason=UNHEARD), closed_by(M1, 2)),
            ),
        ),
        expected=Expected(
            kind=RestartKind.OURS,
            rank=0,
            reason=UNHEARD,
            victims=(2,),
            says=("heard nothing of the store for 2.5 s",),
        ),
        survives_crashes=False,
    ),
    Case(
        name="the store was silent, and a member says late that it stopped itself for that",
        moments=(
            (0.0, (StoreSilent(rank=1, silent_s=1.0),)),
            (3.0, (StoreHeard(rank=1),)),
            (20.0, (FencedItself(rank=0, reason=UNHEARD),)),
        ),
        expected=Expected(kind=RestartKind.OURS, rank=0, reason=UNHEARD),
        survives_crashes=False,
    ),
    Case(
        name="a machine that is cut off long after the store was silent",
        moments=(
            (0.0, (StoreSilent(rank=1, silent_s=1.0),)),
            (3.0, (StoreHeard(rank=1),)),
            (90.0, (FencedItself(rank=0, reason=UNHEARD),)),
        ),
        expected=loss(0, reason=Reason.LEASE_LOST, lost=()),
    ),
    Case(
        name="a machine that is cut off while the store is silent for too short to explain it",
        moments=((0.0, (StoreSilent(rank=1, silent_s=1.2), FencedItself(rank=0, reason=UNHEARD))),),
        expected=loss(0, reason=Reason.LEASE_LOST, lost=()),
    ),
    Case(
        name="a machine that is lost while the store is silent",
        moments=(
            (0.0, (StoreSilent(rank=2, silent_s=2.5), FencedItself(rank=0, reason=UNHEARD))),
            (4.0, (Lapsed(rank=1, silent_s=6.5),)),
        ),
        expected=loss(1),
        survives_crashes=False,
    ),
    Case(
        name="a keeper that is killed while the store is silent",
        moments=((0.0, (StoreSilent(rank=1, silent_s=2.5), FencedItself(rank=0))),),
        expected=loss(0, reason=Reason.LEASE_LOST, lost=()),
    ),
    Case(
        name="an agent that stands still, whose peers complain",
        moments=((0.0, (closed_by(M1, 0), closed_by(M1, 2))), (70.0, (Lapsed(rank=1),))),
        expected=loss(1, (0, 2), says=("did not answer when it was stopped",)),
        survives_crashes=False,
    ),
    Case(
        name="an agent that dies long after its peers have complained, and had not said how its command ended",
        moments=((0.0, (closed_by(M1, 0), closed_by(M1, 2))), (9.0, (Lapsed(rank=1),))),
        expected=loss(1, (0, 2), says=("its lease ran out",)),
    ),
    Case(
        name="a complaint of a rank whose machine is lost after it was heard",
        moments=((0.0, (closed_by(M1, 0),)), (9.0, (Lapsed(rank=0),))),
        expected=failure(0, FAILED, lost=(0,)),
        survives_crashes=False,
    ),
    Case(
        name="an agent that stands still beside a bug",
        moments=((0.0, (torchrun(0, code=42), closed_by(M1, 2))), (70.0, (Lapsed(rank=1),))),
        expected=failure(0, FAILED, (2,), lost=(1,)),
        survives_crashes=False,
    ),
    Case(
        name="a lost machine of which the store had heard nothing since before it stood still",
        moments=((0.0, (plain(0, code=3), closed_by(M1, 2))), (9.0, (Lapsed(rank=1, silent_s=9.2),))),
        expected=loss(1, (0, 2)),
    ),
    Case(
        name="a lost machine whose lapse lay unread for long",
        moments=((0.0, (plain(0, code=3),)), (30.0, (Lapsed(rank=1, read_late_s=26.5),))),
        expected=loss(1, (0,)),
    ),
    Case(
        name="our supervisor is killed, and a peer hides the error behind an exit of its own",
        moments=((0.0, (taken_down(1), plain(0, code=3), closed_by(M1, 2))),),
        expected=loss(1, (0, 2), lost=(), says=("supervisor",)),
    ),
)

RECLAIMS = (
    Case(
        name="a reclaimed machine whose ranks end in every way",
        moments=(
            (
                0.0,
                (Reclaimed(rank=1), plain(1, code=143), closed_by(M1, 0), plain(2, code=1)),
            ),
        ),
        expected=reclaim(1, (0, 2)),
    ),
    Case(
        name="a reclaimed rank that saves and exits with zero",
        moments=(
            (0.0, (Reclaimed(rank=1), plain(1, code=0))),
            (0.1, (closed_by(M1, 0), plain(2, signal=15))),
        ),
        expected=reclaim(1, (0, 2)),
    ),
    Case(
        name="a provider whose SIGTERM comes before its notice",
        moments=((0.0, (plain(1, signal=15), closed_by(M1, 0))), (0.6, (Reclaimed(rank=1),))),
        expected=reclaim(1, (0,)),
    ),
    Case(
        name="a provider whose SIGTERM lets a rank save and exit with zero before its notice",
        moments=((0.0, (plain(1, code=0), closed_by(M1, 0))), (0.6, (Reclaimed(rank=1),))),
        expected=reclaim(1, (0,)),
    ),
    Case(
        name="a notice that comes long after the complaints",
        moments=((0.0, (plain(1, code=143), closed_by(M1, 0))), (6.0, (Reclaimed(rank=1),))),
        expected=reclaim(1, (0,)),
    ),
    Case(
        name="a bug before a notice",
        moments=((0.0, (torchrun(0, code=42), closed_by("10.0.0.1", 2))), (5.0, (Reclaimed(rank=1),))),
        expected=failure(0, FAILED, (2,), lost=(1,)),
        survives_crashes=False,
    ),
    Case(
        name="a bug long after the machine of a finished rank was wanted back",
        moments=((0.0, (plain(1, code=0), Reclaimed(rank=1))), (9.0, (torchrun(0, code=42),))),
        expected=failure(0, FAILED, lost=(1,), says=("Rank 1 had already exited 0.",)),
    ),
    Case(
        name="a reclaimed machine that is gone before its grace is over",
        moments=((0.0, (Reclaimed(rank=1),)), (0.3, (closed_by(M1, 0),)), (4.0, (Lapsed(rank=1),))),
        expected=reclaim(1, (0,)),
    ),
    Case(
        name="one machine reclaimed and another lost",
        moments=((0.0, (Reclaimed(rank=1), closed_by("10.0.0.3", 0))), (3.3, (Lapsed(rank=2),))),
        expected=loss(2, (0,), lost=(1, 2)),
    ),
)

CASES = (*COMMANDS, *MACHINES, *RECLAIMS)
assert len({case.name for case in CASES}) == len(CASES)
