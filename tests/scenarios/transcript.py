"""Transcripts: whole lives of a gang as text that a person can read, and that the core must reproduce.

A line that starts with `>` is an event; the indented lines below it are what the core answered: what it
announced, what it wants done, and the state when it changed. `#` lines are prose. Time stands still except
in `> after SECONDS`.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from coordinator.core import effects as do
from coordinator.core import events as ev
from coordinator.core.checkpoints import CleanCheckpointStore, CommitCheckpoint
from coordinator.core.gang import GangCore
from coordinator.core.gang_record import gang_of, record_of
from coordinator.core.gang_state import Gang
from mesh import messages as msg
from mesh.ids import Epoch, Incarnation, IncarnationToken, MachineName, Rank, RunName, RunUid
from mesh.plan import RunPlan
from mesh.reasons import Reason
from mesh.states import FailurePolicy, RunState

UID = RunUid("00000000000000aa")


class Player:
    """Plays the events of one transcript against a fresh core."""

    def __init__(self, plan: RunPlan, *, checks_network: bool = False) -> None:
        self._checks_network = checks_network
        self.now = ev.Now(mono=1000.0, wall=5000.0)
        self._tokens = itertools.count(1)
        self.core = self._core(Gang(uid=UID, plan=plan, created_at=5000.0))
        self._state: RunState | None = None

    def _core(self, gang: Gang) -> GangCore:
        return GangCore(
            gang,
            new_token=lambda: IncarnationToken(f"t{next(self._tokens)}"),
            checks_network=self._checks_network,
            validate=True,
        )

    def play(self, line: str) -> list[str]:
        """Performs one event line (without its `>`); returns the answer's lines."""
        word, *arguments = line.split()
        if word == "crash":
            record = json.loads(json.dumps(record_of(self.core.gang)))
            self.core = self._core(gang_of(record))
            event: ev.GangEvent = ev.CoordinatorRecovered()
        elif word == "after":
            seconds = float(arguments[0])
            self.now = ev.Now(mono=self.now.mono + seconds, wall=self.now.wall + seconds)
            event = ev.TimePassed()
        else:
            event = self._event(word, arguments)
        return self._tell(self.core.handle(event, self.now))

    def _event(self, word: str, arguments: list[str]) -> ev.GangEvent:
        gang = self.core.gang
        options = dict(a.split("=", 1) for a in arguments if "=" in a)
        plain = [a for a in arguments if "=" not in a]
        epoch = Epoch(int(options.get("epoch", gang.epoch)))
        reservation = int(options.get("reservation", gang.reservation))
        match word:
            case "accepted":
                return ev.RunAccepted()
            case "waiting":
                return ev.ReservationWaiting(reservation=reservation, why=" ".join(plain))
            case "reserved":
                return ev.MachinesReserved(
                    reservation=reservation,
                    placements=tuple(
                        ev.Placement(machine=MachineName(m), address=f"10.0.0.{i + 1}")
                        for i, m in enumerate(plain)
                    ),
                )
            case "impossible":
                return ev.ReservationWaiting(reservation=reservation, why=" ".join(plain), is_possible=False)
            case "withdrawn":
                return ev.ReservationWithdrawn(reservation=reservation)
            case "released":
                machine = MachineName(plain[0])
                leaving = [h for h in gang.holdings if h.machine == machine and h.is_leaving]
                return ev.MachineReleased(reservation=leaving[-1].reservation, machine=machine)
            case "reclaimed":
                return ev.MachineReclaimed(
                    machine=MachineName(plain[0]), grace_s=float(plain[1]), message="Spot price."
                )
            case "checked" | "unchecked" | "bad":
                return self._verdict(word, plain, options)
            case "suspend":
                return ev.SuspendRequested(message="Suspended by a user.")
            case "resume":
                return ev.ResumeRequested(message="Resumed by a user.")
            case "rehearsed":
                return ev.FaultRehearsed(rank=Rank(int(plain[0])), message="Everything there is killed.")
            case "opened":
                return ev.BarrierOpened(epoch=epoch)
            case "closed":
                return ev.BarrierClosed(epoch=epoch, was_open=plain == ["open"])
            case "written":
                number = int(plain[0])
                uri = f"file:///store/{number}.json"
                return ev.CheckpointWritten(
                    number=number, uri=uri, size_bytes=1 << 20, created_at=self.now.wall
                )
            case "lacking":
                return ev.CheckpointLacking(
                    number=int(plain[0]), parts=tuple(plain[1:]), message="A part is not whole in the store."
                )
            case "cancel":
                return ev.CancelRequested(reason=Reason.CANCELLED, message="Cancelled by a user.")
        incarnation = self._incarnation(int(plain[0]), epoch)
        if word == "lapsed":
            return ev.LeaseLapsed(incarnation=incarnation)
        if word == "gone":
            return ev.LeaseGone(incarnation=incarnation)
        if word == "taken":
            return ev.FenceTaken(incarnation=incarnation, grace_s=float(plain[1]))
        if word == "expiring":
            return ev.LeaseExpiring(incarnation=incarnation, is_over="over" in plain)
        if word == "suspected":
            return ev.MemberSuspected(incarnation=incarnation)
        if word == "revoked":
            has_passed = None if "unknown" in plain else "passed" in plain
            return ev.MemberRevoked(incarnation=incarnation, has_passed=has_passed)
        if word == "admitted":
            return ev.MemberAdmitted(incarnation=incarnation, is_admitted="never" not in plain)
        if word == "vanished":
            return ev.MemberVanished(incarnation=incarnation, message="its agent died.")
        return self._report(word, plain, options, incarnation)

    def _verdict(self, word: str, plain: list[str], options: dict[str, str]) -> ev.NetworkChecked:
        """`checked [slow]`, `unchecked`, `bad RANK… [machine=NAME]` (their machines cannot be worked with)."""
        number = int(options.get("number", self.core.gang.checks))
        if word == "unchecked":
            return ev.NetworkChecked(number=number, message="m1 has no probe.", is_performed=False)
        ranks = [Rank(int(rank)) for rank in plain] if word == "bad" else []
        seats = self.core.gang.seats
        machines = {r: MachineName(options.get("machine", seats[r].machine)) for r in ranks}
        return ev.NetworkChecked(
            number=number,
            message=f"{len(ranks)} bad of {len(seats)} machines.",
            refusals=tuple(
                ev.NetworkRefusal(
                    rank=rank,
                    machine=machines[rank],
                    message=f"Nobody reaches {machines[rank]}.",
                    peers=(Rank(int(options["peer"])),) if "peer" in options else (),
                )
                for rank in ranks
            ),
            warnings=("The way from m0 to m1 is slow.",) if "slow" in plain else (),
        )

    def _report(
        self, word: str, plain: list[str], options: dict[str, str], incarnation: Incarnation
    ) -> msg.MemberReport:
        at = self.now.wall + float(options.get("at", 0))
        match word:
            case "registered":
                return msg.MemberRegistered(
                    incarnation=incarnation, at=at, machine=MachineName("m"), address="10.0.0.9"
                )
            case "arrived":
                return msg.MemberArrived(incarnation=incarnation, at=at)
            case "unprepared":
                return msg.MemberPreparationFailed(
                    incarnation=incarnation, at=at, reason=Reason.PREPARATION_FAILED, message="disk full."
                )
            case "damaged":
                number = int(plain[1])
                return msg.MemberPreparationFailed(
                    incarnation=incarnation, at=at, reason=Reason.CHECKPOINT_CORRUPT, damaged_checkpoint=number,
                    message=f"Checkpoint {number} cannot be restored: the content of 'a.pt' is missing.",
                )  # fmt: skip
            case "part" | "holds" | "changed" | "troubled":
                return _checkpoint_report(word, plain, options, incarnation, at)
            case "started":
                return msg.MemberStarted(incarnation=incarnation, at=at, pid=100, master_port=29500)
            case "unstarted":
                return msg.MemberStartFailed(
                    incarnation=incarnation, at=at, reason=Reason.COMMAND_NOT_FOUND, message="no 'trian'."
                )
            case "exited":
                worker = options.get("worker")
                return msg.MemberExited(
                    incarnation=incarnation,
                    at=at,
                    exit=_exit(plain[1]),
                    evidence=msg.CauseEvidence(
                        exit=None if worker is None else _exit(worker), blames_peer="peer" in plain
                    ),
                )
            case "fenced":
                reason = Reason.LEASE_LOST if "itself" in plain else None
                return msg.MemberFenced(incarnation=incarnation, at=at, reason=reason)
            case "unfenced":
                return msg.MemberFenceFailed(
                    incarnation=incarnation, at=at, message="process 7 does not die.", pids=(7,)
                )
        raise ValueError(f"no such event: {word}")

    def _incarnation(self, rank: int, epoch: Epoch) -> Incarnation:
        member = self.core.gang.members.get(Rank(rank))
        past = [m for m in self.core.gang.attempts if m.rank == rank and m.incarnation.epoch == epoch]
        if member is not None and member.incarnation.epoch == epoch:
            token = member.incarnation.token
        else:
            token = past[-1].incarnation.token if past else IncarnationToken("unheard")
        return Incarnation(run_uid=UID, epoch=epoch, rank=Rank(rank), token=token)

    def _tell(self, effects: list[do.GangEffect]) -> list[str]:
        lines = []
        for effect in effects:
            if isinstance(effect, do.Persist):
                lines += [f"    says {a.kind}: {a.message}" for a in effect.announcements]
            else:
                lines.append(f"    does {_effect_text(effect)}")
        state = self.core.gang.state
        if state is not self._state:
            self._state = state
            lines.append(f"    is {state}, epoch {self.core.gang.epoch}")
        return lines or ["    nothing"]


def _checkpoint_report(
    word: str, plain: list[str], options: dict[str, str], incarnation: Incarnation, at: float
) -> msg.MemberReport:
    """`part RANK NUMBER [STEP…|empty]`, `holds RANK QUESTION`, `changed RANK QUESTION`, `troubled RANK`."""
    digest = options.get("digest", f"r{incarnation.rank}p{plain[1] if word == 'part' else 1}")
    if word == "part":
        steps = tuple(int(word) for word in plain[2:] if word != "empty")
        files = 0 if "empty" in plain else 1
        return msg.CheckpointPartStored(
            incarnation=incarnation, at=at, number=int(plain[1]), digest=digest, content=digest, steps=steps,
            files=files, size_bytes=files << 20,
        )  # fmt: skip
    if word == "troubled":
        return msg.CheckpointTroubled(incarnation=incarnation, at=at, message="The store is away.")
    return msg.CheckpointPartAnswered(
        incarnation=incarnation, at=at, question=int(plain[1]), digest=digest, holds=word == "holds"
    )


def _exit(text: str) -> msg.ProcessExit:
    if text.startswith("signal"):
        return msg.ProcessExit(signal=int(text.removeprefix("signal")))
    return msg.ProcessExit(code=int(text))


def _effect_text(effect: do.GangEffect) -> str:
    name = type(effect).__name__
    match effect:
        case do.ReserveMachines():
            avoid = f" avoiding {', '.join(effect.avoid)}" if effect.avoid else ""
            return f"{name} reservation {effect.reservation}: {effect.nodes}{avoid}"
        case do.WithdrawReservation():
            return f"{name} reservation {effect.reservation}"
        case do.ReleaseMachine():
            return f"{name} {effect.machine}{'' if effect.is_clean else ', not clean'}"
        case do.CheckNetwork():
            machines = ", ".join(machine for _, machine in effect.machines)
            fresh, suspects = (", ".join(map(str, ranks)) for ranks in (effect.fresh, effect.suspects))
            suspected = f", suspected {suspects}" if suspects else ""
            return f"{name} {effect.number}: rank {fresh} of {machines}{suspected}"
        case do.FenceMember():
            incarnation = effect.incarnation
            return f"{name} rank {incarnation.rank} of epoch {incarnation.epoch}, {effect.grace_s:g} s"
        case do.OrderMember():
            incarnation = effect.incarnation
            start = "" if effect.restore is None else f" from {effect.restore.id}"
            return f"{name} rank {incarnation.rank} of epoch {incarnation.epoch} on {effect.machine}{start}"
        case do.TellAboutPart():
            question = "is lost" if effect.question is None else f"still holds? (question {effect.question})"
            return f"{name} rank {effect.incarnation.rank}: {effect.digest} {question}"
        case CommitCheckpoint():
            return f"{name} {effect.id}, step {effect.step}: {', '.join(effect.parts)}"
        case CleanCheckpointStore():
            kept = f"checkpoints {', '.join(map(str, effect.numbers))}; parts {', '.join(effect.parts)}"
            return f"{name} but {kept}"
        case do.RevokeMember() | do.DismissMember() | do.ExpireLease() | do.AdmitMember():
            return f"{name} rank {effect.incarnation.rank} of epoch {effect.incarnation.epoch}"
        case do.OpenEpoch() | do.CloseBarrier() | do.ForgetGang():
            return f"{name} epoch {effect.epoch}"
        case _:
            raise AssertionError(effect)


def replay(text: str) -> str:
    """The transcript as the core answers it today."""
    player: Player | None = None
    out = []
    for line in text.splitlines():
        if line.startswith("plan"):
            options = dict(a.split("=", 1) for a in line.split()[1:])
            player = Player(
                RunPlan(
                    name=RunName("demo"),
                    command=("true",),
                    nodes=int(options["nodes"]),
                    max_assembly_retries=int(options.get("retries", 2)),
                    max_restarts=int(options.get("restarts", 3)),
                    on_process_failure=FailurePolicy(options.get("onfailure", "Fail")),
                ),
                checks_network="checks" in options,
            )
            out.append(line)
        elif line.startswith(">"):
            assert player is not None, "a transcript begins with its plan"
            out.append(line)
            out += player.play(line[1:])
        elif not line.startswith("    "):
            out.append(line)
    return "\n".join(out) + "\n"


def transcripts() -> list[Path]:
    """Every transcript there is."""
    return sorted((Path(__file__).parent / "transcripts").glob("*.txt"))
