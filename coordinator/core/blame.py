"""What an epoch ended of: which failure or loss explains the others.

Rules of this file:
1. A rank whose own error it was comes before a rank that complains about a peer: when one rank dies, the
   others' collectives fail within milliseconds, often before the first one's exit is heard.
2. Among equals the earliest is the first.
3. While only complaints about peers have been heard, the judgement waits a little for the peer's own
   failure (`JUDGEMENT_WINDOW_S`): torchrun looks at its workers every 0.1 s only.
4. A machine that may have been silent when the first failure was heard explains that failure. One that has proven
   itself alive since does not: its confirmed fence, or a lease that was renewed afterwards, is the proof.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from coordinator.core.gang_state import Failure, Gang, MemberRecord, RestartKind, Settlement
from mesh.ids import Rank
from mesh.messages import HEARTBEAT_S, LEASE_GUARD_S, LEASE_TTL_S, CauseEvidence, ProcessExit
from mesh.reasons import Reason

JUDGEMENT_WINDOW_S = 2.0
START_FAILURES = frozenset(
    {
        Reason.COMMAND_NOT_FOUND,
        Reason.COMMAND_NOT_EXECUTABLE,
        Reason.COMMAND_START_FAILED,
        Reason.WORKING_DIR_MISSING,
    }
)
"""What would fail again on the same machine: never tried again, and nobody else's fault."""

_SIGNAL_NAMES = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE",
    9: "SIGKILL", 11: "SIGSEGV", 13: "SIGPIPE", 14: "SIGALRM", 15: "SIGTERM", 24: "SIGXCPU", 25: "SIGXFSZ",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What an epoch ended of."""

    cause: Failure
    kind: RestartKind
    lost: frozenset[Rank]
    """Ranks that need another machine, the cause's or not."""
    victims: tuple[Rank, ...]
    """Ranks that failed because of the cause."""


def judge(gang: Gang) -> Verdict:
    """Names the cause of an epoch that is over. Every member is settled."""
    members = gang.members.values()
    lost = frozenset(m.rank for m in members if m.settlement is Settlement.LEASE_LAPSED)
    reclaimed = frozenset(r for r, seat in gang.seats.items() if seat.machine in gang.reclaimed)
    own = [f for f in gang.failures if f.reason in START_FAILURES]
    culprits = [m for m in members if m.rank in lost and not m.succeeded and m.was_silent_first]
    selves = [m for m in members if m.reason is Reason.LEASE_LOST and m.settlement is Settlement.CONFIRMED]
    if own:
        kind, cause = RestartKind.FAILURE, first_cause(own)
    elif culprits:
        kind, cause = RestartKind.LOSS, _end_as_failure(min(culprits, key=_age))
    elif gang.failures:
        cause = first_cause(gang.failures)
        kind = RestartKind.LOSS if cause.evidence.by_infrastructure else RestartKind.FAILURE
    elif reclaimed:
        rank = min(reclaimed)
        kind, cause = RestartKind.RECLAIM, _reclaim_as_failure(gang, rank)
    elif selves:
        all_of_them = len(selves) == len(gang.members) > 1
        kind = RestartKind.OURS if all_of_them else RestartKind.LOSS
        cause = _end_as_failure(min(selves, key=_age))
    else:
        others = [m for m in members if not m.succeeded]
        kind, cause = RestartKind.LOSS, _end_as_failure(min(others or list(members), key=_age))
    victims = tuple(sorted(f.rank for f in gang.failures if f.rank != cause.rank))
    return Verdict(cause=cause, kind=kind, lost=lost | reclaimed, victims=victims)


def was_silent_before(failed_at: float | None, lapsed_at: float) -> bool:
    """True when a lease that lapsed now was possibly not renewed any more when the failure was heard.

    Both times are on the coordinator's monotonic clock. The store declares a lease lapsed at ttl + guard after the last
    renewal that it received.
    """
    if failed_at is None:
        return True
    last_renewal = lapsed_at - LEASE_TTL_S - LEASE_GUARD_S
    return last_renewal <= failed_at + HEARTBEAT_S


def _age(member: MemberRecord) -> tuple[float, Rank]:
    return (member.ended_at or 0.0, member.rank)


def _end_as_failure(member: MemberRecord) -> Failure:
    return Failure(
        rank=member.rank,
        at=member.ended_at or 0.0,
        reason=member.reason or Reason.MACHINE_LOST,
        message=member.message or f"Rank {member.rank} on {member.machine} was lost.",
    )


def _reclaim_as_failure(gang: Gang, rank: Rank) -> Failure:
    machine = gang.seats[rank].machine
    at = gang.history[-1].stopped_at if gang.history else None
    return Failure(
        rank=rank,
        at=at or 0.0,
        reason=Reason.MACHINE_RECLAIMED,
        message=f"Rank {rank}: {machine} was wanted back.",
    )


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
