"""What an epoch ended of: which failure or loss explains the others, and how that is told.

Rules of this file:
1. An epoch is judged when every member is accounted for, from all that was heard, whenever it was heard: the order in
   which reports arrive says nothing. A rank's exit counts only as its own when no fence had reached it (its member says
   which), so what is heard after the stop is evidence as well.
2. First comes what would fail again anywhere: a command that cannot be started.
3. Then machines. One that may have been silent when the first failure was heard explains every failure; one that has
   proven itself alive since does not: its confirmed fence, or a lease that was renewed afterwards, is the proof. One
   that lost its lease and stopped itself before a fence reached it was silent too; when all of them did, or when the
   store was not heard here either (`store_silence`), the store or the way to it was, and nobody pays for that. One that
   was wanted back, with the notice heard first or about when the first failure was, explains failures in the same way.
   So does one on which our supervisor was killed, and a store of ours that does not let in whom it had admitted.
4. Then commands. One whose own error it was comes before one that somebody told to stop (SIGTERM), and that before one
   that complains about a peer: when one rank dies, the others' collectives fail within milliseconds, often before
   the first one's exit is heard.
5. Complaints and told-to-stop exits yield to a notice that came at any time, and to a machine that was lost before it
   had said how its command ended, whenever that was: its agent stood still, or died, while its lease was still renewed.
   One that never answered again and whose lease did not end either is no different.
6. Among equals the earliest is named, by the members' own clocks; for that only, never for what the restart is charged
   to. Of complaints, one about a peer that has not failed itself comes first.
7. While only complaints about peers have been heard, the stop waits a little for the peer's own
   failure (`JUDGEMENT_WINDOW_S`): torchrun looks at its workers every 0.1 s only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from coordinator.core.gang_state import Failure, Gang, MemberRecord, RestartKind, Settlement
from mesh.ids import Rank
from mesh.messages import CauseEvidence, ProcessExit
from mesh.reasons import Reason

JUDGEMENT_WINDOW_S = 2.0
CROSSING_S = 1.0
"""A reclaim notice and a failure that were heard so close to each other may have happened in either order."""
SIGTERM = 15
START_FAILURES = frozenset(
    {
        Reason.COMMAND_NOT_FOUND,
        Reason.COMMAND_NOT_EXECUTABLE,
        Reason.COMMAND_START_FAILED,
        Reason.WORKING_DIR_MISSING,
        Reason.SHIM_NOT_LOADED,
    }
)
"""What would fail again on the same machine: never tried again, and nobody else's fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What an epoch ended of."""

    cause: Failure
    kind: RestartKind
    lost: frozenset[Rank]
    """Ranks that need another machine, the cause's or not."""
    victims: tuple[Rank, ...]
    """Ranks that failed because of the cause."""
    others: tuple[Rank, ...] = ()
    """Ranks that failed of their own as well."""
    notes: str = ""
    """What is to be said beside the cause: sentences, each with a space before it; often none."""


def judge(gang: Gang) -> Verdict:
    """Names the cause of an epoch that is over. Every member is settled."""
    members = gang.members.values()
    lapsed = frozenset(m.rank for m in members if m.settlement is Settlement.LEASE_LAPSED)
    reclaimed = frozenset(r for r, seat in gang.seats.items() if seat.machine in gang.reclaimed)
    kind, cause = _cause(gang, reclaimed)
    failed = [f for f in gang.failures if f.rank != cause.rank and not _was_silent(gang.members[f.rank])]
    is_command = kind is RestartKind.FAILURE
    others = tuple(sorted(f.rank for f in failed if is_command and _weight(f) <= _OWN))
    victims = tuple(sorted(f.rank for f in failed if f.rank not in others))
    return Verdict(
        cause=cause,
        kind=kind,
        lost=lapsed | reclaimed,
        victims=victims,
        others=others,
        notes=_notes(gang, cause, kind, victims, others),
    )


def _cause(gang: Gang, reclaimed: frozenset[Rank]) -> tuple[RestartKind, Failure]:
    """Rules 2 to 5, in their order."""
    unstarted = [f for f in gang.failures if f.reason in START_FAILURES]
    if unstarted:
        return RestartKind.FAILURE, first_cause(unstarted)
    silent = [m for m in gang.members.values() if _was_silent(m)]
    unannounced = [m for m in silent if m.rank not in reclaimed]
    if unannounced:
        return _loss(gang, unannounced)
    if silent or (reclaimed and gang.was_reclaimed_first):
        announced = min((m.rank for m in silent), default=min(reclaimed))
        return RestartKind.RECLAIM, _reclaim_as_failure(gang, announced)
    taken_down = [f for f in gang.failures if f.evidence.by_infrastructure]
    with_machine = [f for f in taken_down if f.reason is not Reason.STORE_UNREACHABLE]
    if with_machine:
        return RestartKind.LOSS, first_cause(with_machine)
    if taken_down:
        return RestartKind.OURS, first_cause(taken_down)
    own = [f for f in gang.failures if _weight(f) <= _OWN]
    if own:
        return RestartKind.FAILURE, first_cause(own)
    if reclaimed:
        return RestartKind.RECLAIM, _reclaim_as_failure(gang, min(reclaimed))
    mute = [m for m in gang.members.values() if _is_mute(m)]
    if mute:
        return RestartKind.LOSS, _end_as_failure(min(mute, key=_age))
    if gang.failures:
        return RestartKind.FAILURE, _first_complaint(gang)
    others = [m for m in gang.members.values() if not m.succeeded] or list(gang.members.values())
    return RestartKind.LOSS, _end_as_failure(min(others, key=_age))


def _was_silent(member: MemberRecord) -> bool:
    if member.succeeded:
        return False
    is_lost = member.settlement is Settlement.LEASE_LAPSED and member.was_silent_first
    return is_lost or member.fenced_itself


def _is_mute(member: MemberRecord) -> bool:
    """Nobody knows how its command ended, or when: it may be what the others complain about."""
    is_unheard = member.settlement is Settlement.FENCE_FAILED and member.is_expiring
    return member.exit is None and (is_unheard or member.settlement is Settlement.LEASE_LAPSED)


def _loss(gang: Gang, silent: Sequence[MemberRecord]) -> tuple[RestartKind, Failure]:
    """Ours when it was not they who were silent: all lost their leases and live, or the store was not heard here."""
    needed = [m for m in gang.members.values() if not m.succeeded]
    is_everybody = len(needed) > 1 and all(m.fenced_itself for m in needed) and len(silent) == len(needed)
    lost = [m for m in silent if not m.store_was_silent]
    if lost and not is_everybody:
        return RestartKind.LOSS, _end_as_failure(min(lost, key=_age))
    first = _end_as_failure(min(silent, key=_age))
    return RestartKind.OURS, replace(first, reason=Reason.STORE_UNREACHABLE)


def was_silent_before(failed_at: float | None, alive_at: float | None) -> bool:
    """True when a member whose lease lapsed may have been dead when the failure was heard.

    `alive_at`: when it is known to have lived (`mesh.store.messages.LeaseLapsed`); None when that is not known, because
    the store was restarted meanwhile. Both times are on the coordinator's monotonic clock.
    """
    return failed_at is None or alive_at is None or alive_at <= failed_at


def may_have_crossed(failed_at: float | None, noticed_at: float) -> bool:
    """True when a reclaim notice that is heard now came before the failure, or may have."""
    return failed_at is None or noticed_at - failed_at <= CROSSING_S


def _age(member: MemberRecord) -> tuple[float, Rank]:
    return (member.ended_at or 0.0, member.rank)


def _end_as_failure(member: MemberRecord) -> Failure:
    where = f"Rank {member.rank} on {member.machine}"
    message, reason = member.message, member.reason
    if member.fenced_itself:
        reason = Reason.LEASE_LOST
        message = message or f"{where} stopped itself: it had lost its lease."
    return Failure(
        rank=member.rank,
        at=member.ended_at or 0.0,
        reason=reason or Reason.MACHINE_LOST,
        message=message or f"{where} was lost.",
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


# ---- among failures ---------------------------------------------------------------------------------

_UNSTARTED, _TAKEN_DOWN, _OWN, _TOLD_TO_STOP, _COMPLAINT = range(5)


def _weight(failure: Failure) -> int:
    """The lower, the more it explains."""
    evidence = failure.evidence
    if failure.reason in START_FAILURES:
        return _UNSTARTED
    if evidence.by_infrastructure:
        return _TAKEN_DOWN
    if evidence.blames_peer:
        return _COMPLAINT
    ends = [e.signal_behind for e in (failure.exit, evidence.exit) if e is not None]
    return _TOLD_TO_STOP if ends and ends[-1] == SIGTERM else _OWN


def first_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that explains the others. `failures` must not be empty."""
    return min(failures, key=lambda f: (_weight(f), f.at, f.rank))


def _first_complaint(gang: Gang) -> Failure:
    """When nobody failed of its own: the complaint about a peer that has not failed, if any names one."""
    failed = {f.rank for f in gang.failures}

    def key(failure: Failure) -> tuple[int, bool, float, Rank]:
        peer = blamed_rank(gang, failure)
        return _weight(failure), peer is None or peer in failed, failure.at, failure.rank

    return min(gang.failures, key=key)


def may_be_judged(failures: Sequence[Failure]) -> bool:
    """True when nothing that could still be heard would be a better explanation."""
    return any(not f.evidence.blames_peer for f in failures)


# ---- words ------------------------------------------------------------------------------------------


def exit_failure_message(member: MemberRecord, exit_: ProcessExit, evidence: CauseEvidence) -> str:
    """One sentence about a rank whose command ended badly: rank, machine, true exit, launcher's exit."""
    where = f"Rank {member.rank} on {member.machine}"
    true_exit = evidence.exit or exit_
    ended = true_exit.words + (", probably out of memory" if evidence.oom_killed else "")
    if evidence.by_infrastructure:
        sentence = f"{where} was lost"
    elif evidence.is_without_shim:
        sentence = f"{where} was ended"
    elif true_exit == exit_:
        sentence = f"{where} ended with {ended}"
    else:
        who = "its command" if evidence.global_rank is None else f"worker {evidence.global_rank}"
        sentence = f"{where} failed: {who} ended with {ended} (its launcher returned {exit_.words})"
    if evidence.message:
        sentence += f": {evidence.message.rstrip('.')}"
    return sentence + "."


def failure_reason(exit_: ProcessExit, evidence: CauseEvidence) -> Reason:
    """CommandKilled when a signal ended the command or its worker, CommandFailed otherwise.

    ShimNotLoaded when we ended it because it went past the shim.
    MachineLost when what we run on the machine died and took the command along: not the command's own doing.
    """
    if evidence.by_infrastructure:
        return Reason.MACHINE_LOST
    if evidence.is_without_shim:
        return Reason.SHIM_NOT_LOADED
    true_exit = evidence.exit or exit_
    return Reason.COMMAND_KILLED if true_exit.signal is not None else Reason.COMMAND_FAILED


def _notes(
    gang: Gang, cause: Failure, kind: RestartKind, victims: Sequence[Rank], others: Sequence[Rank]
) -> str:
    notes = ""
    if kind is RestartKind.FAILURE and cause.evidence.blames_peer:
        notes += _note_on_complaint(gang, cause)
    elif victims:
        notes += f" {_ranks(victims)} failed because of it."
    if others:
        notes += f" {_ranks(others)} failed as well, each of its own."
    if kind is RestartKind.FAILURE:
        notes += note_on_early_finishers(gang.members.values(), cause)
    return notes


def _note_on_complaint(gang: Gang, cause: Failure) -> str:
    """Nobody failed of its own: all that is known is who complained, about whom, and who did not."""
    peer = blamed_rank(gang, cause)
    about = "a peer" if peer is None else f"rank {peer} on {gang.members[peer].machine}"
    failed = {f.rank for f in gang.failures}
    quiet = [r for r, m in gang.members.items() if r not in failed and not m.succeeded]
    note = f" It complains about {about}, but no rank is known to have failed of its own"
    if quiet:
        note += f": {_ranks(quiet, is_first=False)} still ran and had said nothing"
    return note + "."


def blamed_rank(gang: Gang, failure: Failure) -> Rank | None:
    """The rank that a complaint is about, where it names it."""
    evidence = failure.evidence
    for rank, member in gang.members.items():
        if rank == failure.rank:
            continue
        if evidence.peer_address and member.address == evidence.peer_address:
            return rank
        named = evidence.peer_global_rank
        if named is not None and named // gang.plan.processes_per_node == rank:
            return rank
    return None


def note_on_early_finishers(members: Iterable[MemberRecord], cause: Failure) -> str:
    """Names ranks that had ended with zero before the cause: their early leave may be what broke it."""
    early = [
        m.rank for m in members if m.succeeded and m.rank != cause.rank and (m.ended_at or 0.0) <= cause.at
    ]
    return f" {_ranks(early)} had already exited 0." if early else ""


def _ranks(ranks: Sequence[Rank], *, is_first: bool = True) -> str:
    """ "Rank 1", "Ranks 0 and 2", "Ranks 0, 2 and 3"; with a small letter inside a sentence."""
    *most, last = (str(rank) for rank in sorted(ranks))
    word = "Rank" if not most else "Ranks"
    numbers = f"{', '.join(most)} and {last}" if most else last
    return f"{word if is_first else word.lower()} {numbers}"
