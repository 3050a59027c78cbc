"""Which failure is the run's reason.

Rules of this file:
1. A rank whose own error it was comes before a rank that complains about a peer: when one rank dies, the
   others' collectives fail within milliseconds, often before the first one's exit is heard.
2. Among equals the earliest is the first.
3. While only complaints about peers have been heard, the judgement waits a little for the peer's own
   failure (`JUDGEMENT_WINDOW_S`): torchrun looks at its workers every 0.1 s only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coordinator.core.gang_state import Failure, MemberRecord
from mesh.messages import CauseEvidence, ProcessExit
from mesh.reasons import Reason

JUDGEMENT_WINDOW_S = 2.0

_SIGNAL_NAMES = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE",
    9: "SIGKILL", 11: "SIGSEGV", 13: "SIGPIPE", 14: "SIGALRM", 15: "SIGTERM", 24: "SIGXCPU", 25: "SIGXFSZ",
}  # fmt: skip


def first_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that explains the others. `failures` must not be empty."""
    return min(failures, key=lambda f: (f.evidence.blames_peer, f.at, f.rank))


def may_be_judged(failures: Sequence[Failure]) -> bool:
    """True when nothing that could still be heard would be a better explanation."""
    return any(not f.evidence.blames_peer for f in failures)


def describe_exit(exit_: ProcessExit) -> str:
    """ "exit code 42" or "SIGSEGV (signal 11)"."""
    if exit_.signal is not None:
        name = _SIGNAL_NAMES.get(exit_.signal)
        return f"{name} (signal {exit_.signal})" if name else f"signal {exit_.signal}"
    return f"exit code {exit_.code}"


def exit_failure_message(member: MemberRecord, exit_: ProcessExit, evidence: CauseEvidence) -> str:
    """One sentence about a rank whose command ended badly: rank, machine, true exit, launcher's exit."""
    where = f"Rank {member.rank} on {member.machine}"
    if evidence.by_infrastructure:
        sentence = f"{where} was lost"
    elif evidence.exit is None or evidence.exit == exit_:
        sentence = f"{where} ended with {describe_exit(exit_)}"
    else:
        worker = "a worker" if evidence.global_rank is None else f"worker {evidence.global_rank}"
        sentence = (
            f"{where} failed: {worker} ended with {describe_exit(evidence.exit)}"
            f" (its launcher returned {describe_exit(exit_)})"
        )
    if evidence.message:
        sentence += f": {evidence.message.rstrip('.')}"
    return sentence + "."


def failure_reason(exit_: ProcessExit, evidence: CauseEvidence) -> Reason:
    """CommandKilled when a signal ended the command or its worker, CommandFailed otherwise.

    MachineLost when what we run on the machine died and took the command along: not the command's own doing.
    """
    if evidence.by_infrastructure:
        return Reason.MACHINE_LOST
    true_exit = evidence.exit or exit_
    return Reason.COMMAND_KILLED if true_exit.signal is not None else Reason.COMMAND_FAILED


def note_on_early_finishers(members: Iterable[MemberRecord], cause: Failure) -> str:
    """Names ranks that had ended with zero before the cause: their early leave may be what broke it."""
    early = [
        m.rank for m in members if m.succeeded and m.rank != cause.rank and (m.ended_at or 0.0) <= cause.at
    ]
    if not early:
        return ""
    ranks = ", ".join(str(rank) for rank in sorted(early))
    return (
        f" Rank {ranks} had already exited 0." if len(early) == 1 else f" Ranks {ranks} had already exited 0."
    )
