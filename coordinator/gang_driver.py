"""The shell around one gang's core: one inbox, one driver task, one place that performs effects.

Rules of this file:
1. Only `run()` calls the core. Whoever wants something posts an event and may wait until it is durable.
2. `Persist` is a barrier: while the journal cannot be written, nothing new is done for this gang; its
   members run on, and what was decided is done when the journal can be written again.
3. Effects run as guarded tasks that try again until they succeed or are overtaken, whatever goes wrong: one that
   was given up would leave its run standing. A batch's later effects do not wait for its earlier ones.
4. Whoever waits for an event to be durable is told when the driver ends before that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, assert_never

from coordinator.checkpoint_store import CheckpointStore, Lacking
from coordinator.core.checkpoints import CleanCheckpointStore, CommitCheckpoint
from coordinator.core.effects import (
    AdmitMember,
    Announcement,
    CheckNetwork,
    CloseBarrier,
    DismissMember,
    ExpireLease,
    FenceMember,
    ForgetGang,
    GangEffect,
    OpenEpoch,
    OrderMember,
    Persist,
    ReleaseMachine,
    ReserveMachines,
    RevokeMember,
    TellAboutPart,
    WithdrawReservation,
)
from coordinator.core.events import (
    BarrierClosed,
    CheckpointLacking,
    CheckpointWritten,
    FenceTaken,
    GangEvent,
    LeaseExpiring,
    MachineReleased,
    MachinesReserved,
    MemberAdmitted,
    MemberRevoked,
    MemberVanished,
    NetworkChecked,
    Now,
    ReservationWaiting,
    ReservationWithdrawn,
    TimePassed,
)
from coordinator.core.gang import GangCore
from coordinator.core.gang_record import record_of
from coordinator.core.pace import HEAR_FIRST_S, has_stalled
from coordinator.fleet import Fleet, MemberGoneError, Waiting
from coordinator.insistence import RETRY_MAX_S, delays, discard, insist, insist_on
from coordinator.journal import Journal
from coordinator.machine_choice import shape_of
from mesh.errors import StorageError, TransportError
from mesh.ids import Epoch, Incarnation, IncarnationToken, RunUid
from mesh.messages import CheckpointOrder, FenceOrder, JoinOrder

INBOX_MAX = 1024

_log = logging.getLogger(__name__)


class StoreControl(Protocol):
    """What a gang wants from the rendezvous store. Every call may be repeated."""

    async def open_epoch(self, uid: RunUid, epoch: Epoch, size: int, *, is_new: bool) -> None: ...

    async def close_barrier(self, uid: RunUid, epoch: Epoch) -> bool:
        """Returns whether the barrier had opened before it was closed."""
        ...

    async def revoke(self, uid: RunUid, incarnation: Incarnation) -> bool | None:
        """Refuses this incarnation from now on. Returns whether it had passed the open barrier before.

        None when nobody knows; then nothing is changed.
        """
        ...

    async def expire(self, uid: RunUid, incarnation: Incarnation) -> bool:
        """Has its lease renewed no more. Returns whether it is over already."""
        ...

    async def admit(
        self, uid: RunUid, incarnation: Incarnation, *, instead_of: IncarnationToken, alive_within_s: float
    ) -> bool:
        """Lets it through the open barrier, once the one before is over and the other ranks are known to have lived
        so long ago or later. False when this store never can."""
        ...

    async def forget(self, uid: RunUid, epoch: Epoch) -> None: ...


CheckingNetwork = Callable[[CheckNetwork], Awaitable[NetworkChecked]]


def real_now() -> Now:
    """Both clocks, read together."""
    return Now(mono=time.monotonic(), wall=time.time())


@dataclass(slots=True)
class _Letter:
    event: GangEvent | None
    """None asks the driver to stop when everything before it is done."""
    durable: asyncio.Future[None] | None = field(default=None)


class GangDriver:
    """Drives one gang from its acceptance to its last machine's release.

    Args:
        core: the gang's core.
        join_order: fills in what every member of this deployment is told besides its plan.
        on_events: called after announcements became durable.
        checkpoints: where members keep theirs; None where none are kept, and then nobody wishes for one.
        check_network: raises nothing; None where cores have nothing checked.
    """

    def __init__(
        self,
        core: GangCore,
        *,
        journal: Journal,
        fleet: Fleet,
        store: StoreControl,
        join_order: Callable[[GangCore, OrderMember], JoinOrder],
        on_events: Callable[[], None],
        checkpoints: CheckpointStore | None = None,
        check_network: CheckingNetwork | None = None,
        now: Callable[[], Now] = real_now,
    ) -> None:
        self.core = core
        self._checkpoints = checkpoints
        self._check_network = check_network
        self._journal = journal
        self._fleet = fleet
        self._store = store
        self._join_order = join_order
        self._on_events = on_events
        self._now = now
        self._inbox: asyncio.Queue[_Letter] = asyncio.Queue(maxsize=INBOX_MAX)
        self._in_hand: list[_Letter] = []
        """Taken from the inbox and not handled yet."""
        self._is_over = False
        self._tasks: dict[tuple[Any, ...], asyncio.Task[None]] = {}
        self.storage_trouble: str | None = None
        """What the journal said when it last refused to write; None while it works."""

    @property
    def uid(self) -> RunUid:
        return self.core.gang.uid

    def post(self, event: GangEvent) -> None:
        """Puts an event in the inbox without waiting. Raises asyncio.QueueFull when it is full."""
        self._inbox.put_nowait(_Letter(event))

    async def post_durably(self, event: GangEvent) -> None:
        """Returns when what the event changed is in the journal. Raises TransportError when the driver has ended."""
        durable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not self._is_over:
            await self._inbox.put(_Letter(event, durable))
        if self._is_over:  # perhaps while the inbox was full
            raise _driver_ended()
        await durable

    @property
    def is_finished(self) -> bool:
        """Nothing is left to be done: ended, and every machine given back."""
        gang = self.core.gang
        return gang.state.is_terminal and gang.is_released

    async def stop(self) -> None:
        """Asks `run` to end once what is in the inbox has been handled. A write is never cut in half by it."""
        await self._inbox.put(_Letter(None))

    async def run(self) -> None:
        """Handles events until `stop`."""
        try:
            is_stopping = False
            while not is_stopping:
                self._in_hand = await self._next_letters()
                is_stopping = any(letter.event is None for letter in self._in_hand)
                await self._handle(self._in_hand)
        finally:
            self._is_over = True
            self._send_back([*self._in_hand, *_emptied(self._inbox)])
            for task in list(self._tasks.values()):
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _send_back(self, letters: list[_Letter]) -> None:
        for letter in letters:
            if letter.durable is not None and not letter.durable.done():
                letter.durable.set_exception(_driver_ended())

    async def _next_letters(self) -> list[_Letter]:
        """Everything that waits in the inbox; a TimePassed when a deadline comes first.

        A coordinator that did not run itself hears first what was said meanwhile (`coordinator.core.pace`).
        """
        deadline = self.core.next_deadline()
        waiting_since = self._now().mono
        timeout_s = None if deadline is None else max(0.0, deadline - waiting_since)
        try:
            async with asyncio.timeout(timeout_s):
                letters = [await self._inbox.get()]
        except TimeoutError:
            assert deadline is not None, "without one there is no limit"
            if has_stalled(deadline=deadline, waiting_since=waiting_since, now=self._now().mono):
                _log.warning(
                    "run %s: this coordinator stood still; it listens first", self.core.gang.plan.name
                )
                await asyncio.sleep(HEAR_FIRST_S)
            return _emptied(self._inbox) or [_Letter(TimePassed())]
        return [*letters, *_emptied(self._inbox)]

    async def _handle(self, letters: list[_Letter]) -> None:
        announcements: list[Announcement] = []
        effects: list[GangEffect] = []
        is_dirty = False
        for letter in letters:
            if letter.event is None:
                continue
            for effect in self.core.handle(letter.event, self._now()):
                if isinstance(effect, Persist):
                    is_dirty = True
                    announcements.extend(effect.announcements)
                else:
                    effects.append(effect)
        if is_dirty:
            await self._persist(announcements)
        for letter in letters:
            if letter.durable is not None and not letter.durable.done():
                letter.durable.set_result(None)
        for effect in effects:
            self._perform(effect)

    async def _persist(self, announcements: list[Announcement]) -> None:
        record = record_of(self.core.gang)
        at = self._now().wall
        for delay_s in delays():
            try:
                await self._journal.commit(self.uid, record, announcements, at)
            except StorageError as error:
                if self.storage_trouble is None:
                    _log.error("run %s: %s", self.core.gang.plan.name, error)
                self.storage_trouble = error.message
                await asyncio.sleep(delay_s)
            else:
                self.storage_trouble = None
                self._on_events()
                return

    # ---- effects ----------------------------------------------------------------------------------

    def _perform(self, effect: GangEffect) -> None:
        match effect:
            case ReserveMachines():
                self._start(("reserve", effect.reservation), self._reserve(effect))
            case WithdrawReservation():
                self._stop(("reserve", effect.reservation))
                self._start(("withdraw", effect.reservation), self._withdraw(effect))
            case ReleaseMachine():
                self._start(("release", effect.reservation, effect.machine), self._release(effect))
            case OpenEpoch():
                # The store forgets a whole gang: of a run that was suspended, what comes late would be this epoch.
                self._stop_all("forget")
                self._start(
                    ("open", effect.epoch),
                    insist_on(
                        lambda: self._store.open_epoch(
                            self.uid, effect.epoch, effect.size, is_new=effect.is_new
                        )
                    ),
                )
            case CheckNetwork():
                self._stop_all("check")  # of an assembly that is over
                self._start(("check", effect.number), self._check(effect))
            case CloseBarrier():
                self._stop_all("check")
                self._start(("close", effect.epoch), self._close_barrier(effect))
            case OrderMember():
                self._start(("order", effect.incarnation), self._order(effect))
            case AdmitMember():
                self._start(("admit", effect.incarnation), self._admit(effect))
            case RevokeMember():
                self._stop(("admit", effect.incarnation))
                self._stop(("order", effect.incarnation))
                self._start(("revoke", effect.incarnation), self._revoke(effect))
            case FenceMember():
                self._stop(
                    ("fence", effect.incarnation)
                )  # only the newest one counts: it may grant less time
                self._start(("fence", effect.incarnation), self._fence(effect))
            case ExpireLease():
                self._start(("expire", effect.incarnation), self._expire(effect))
            case TellAboutPart() | CommitCheckpoint() | CleanCheckpointStore():
                self._perform_checkpoint(effect)
            case DismissMember():
                self._stop(("order", effect.incarnation))
                self._stop(("fence", effect.incarnation))
                self._stop(("expire", effect.incarnation))
                self._stop(("question", effect.incarnation))
                self._stop(("lost part", effect.incarnation))
                self._start(
                    ("dismiss", effect.incarnation),
                    insist_on(lambda: self._fleet.dismiss(effect.incarnation)),
                )
            case ForgetGang():
                # The store will not know the gang any more: what is still asked of it would be asked for ever.
                self._stop_all("open", "close", "revoke", "expire", "admit")
                self._start(
                    ("forget", effect.epoch), insist_on(lambda: self._store.forget(self.uid, effect.epoch))
                )
            case Persist():
                raise AssertionError("handled before")
            case _:
                assert_never(effect)

    def _perform_checkpoint(self, effect: TellAboutPart | CommitCheckpoint | CleanCheckpointStore) -> None:
        store = self._checkpoints
        match effect:
            case TellAboutPart():
                if effect.question is not None:  # only the newest one counts
                    self._stop(("question", effect.incarnation))
                what = "lost part" if effect.question is None else "question"
                self._start((what, effect.incarnation), self._tell_about_part(effect))
            case CommitCheckpoint() if store is not None:
                for key in [key for key in self._tasks if key[0] == "commit" and key[1] != effect.number]:
                    self._stop(key)  # of an epoch that is over
                self._start(("commit", effect.number), self._commit(store, effect))
            case CleanCheckpointStore() if store is not None:
                self._stop(("clean", "checkpoints"))
                self._start(
                    ("clean", "checkpoints"), insist_on(lambda: discard(store.clean(self.uid, effect)))
                )

    async def _tell_about_part(self, effect: TellAboutPart) -> None:
        order = CheckpointOrder(
            incarnation=effect.incarnation, digest=effect.digest, question=effect.question
        )
        with suppress(MemberGoneError):  # its lease will tell
            await insist(lambda: self._fleet.tell_about_part(order))

    async def _commit(self, store: CheckpointStore, wish: CommitCheckpoint) -> None:
        done = await insist(lambda: store.commit(self.uid, wish))
        event: GangEvent
        if isinstance(done, Lacking):
            event = CheckpointLacking(number=wish.number, parts=done.parts, message=done.message)
        else:
            event = CheckpointWritten(
                number=wish.number, uri=done.uri, size_bytes=done.size_bytes, created_at=done.created_at
            )
        await self._inbox.put(_Letter(event))

    def _start(self, key: tuple[Any, ...], work: Coroutine[Any, Any, None]) -> None:
        """The one maker of background tasks here: named, guarded, one per key."""
        if key in self._tasks:
            work.close()  # the same thing is being done already
            return
        task = asyncio.create_task(work, name=f"{self.core.gang.plan.name}: {key[0]} {key[1]}")
        self._tasks[key] = task
        task.add_done_callback(lambda done: self._ended(key, done))

    def _ended(self, key: tuple[Any, ...], task: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]
        if not task.cancelled() and task.exception() is not None:
            _log.error("%s failed", task.get_name(), exc_info=task.exception())

    def _stop(self, key: tuple[Any, ...]) -> None:
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()

    def _stop_all(self, *kinds: str) -> None:
        for key in [key for key in self._tasks if key[0] in kinds]:
            self._stop(key)

    async def _reserve(self, effect: ReserveMachines) -> None:
        shape = shape_of(effect, self.core.gang)

        def tell(waiting: Waiting) -> None:
            self.post(
                ReservationWaiting(
                    reservation=effect.reservation, why=waiting.why, is_possible=waiting.is_possible
                )
            )

        placements = await insist(
            lambda: self._fleet.reserve(self.uid, effect.reservation, shape, on_waiting=tell)
        )
        await self._inbox.put(
            _Letter(MachinesReserved(reservation=effect.reservation, placements=placements))
        )

    async def _check(self, effect: CheckNetwork) -> None:
        if self._check_network is not None:
            await self._inbox.put(_Letter(await self._check_network(effect)))

    async def _withdraw(self, effect: WithdrawReservation) -> None:
        await insist(lambda: self._fleet.withdraw(self.uid, effect.reservation))
        await self._inbox.put(_Letter(ReservationWithdrawn(reservation=effect.reservation)))

    async def _release(self, effect: ReleaseMachine) -> None:
        dismissals = [task for key, task in self._tasks.items() if key[0] == "dismiss"]
        if dismissals:  # an actor that still ends would be cut off by the loss of its placement
            await asyncio.wait(dismissals, timeout=RETRY_MAX_S)
        await insist(
            lambda: self._fleet.release(
                self.uid, effect.reservation, effect.machine, is_clean=effect.is_clean
            )
        )
        await self._inbox.put(
            _Letter(MachineReleased(reservation=effect.reservation, machine=effect.machine))
        )

    async def _revoke(self, effect: RevokeMember) -> None:
        has_passed = await insist(lambda: self._store.revoke(self.uid, effect.incarnation))
        await self._inbox.put(_Letter(MemberRevoked(incarnation=effect.incarnation, has_passed=has_passed)))

    async def _admit(self, effect: AdmitMember) -> None:
        is_admitted = await insist(
            lambda: self._store.admit(
                self.uid,
                effect.incarnation,
                instead_of=effect.instead_of,
                alive_within_s=self._now().mono - effect.alive_since,
            )
        )
        await self._inbox.put(
            _Letter(MemberAdmitted(incarnation=effect.incarnation, is_admitted=is_admitted))
        )

    async def _close_barrier(self, effect: CloseBarrier) -> None:
        was_open = await insist(lambda: self._store.close_barrier(self.uid, effect.epoch))
        await self._inbox.put(_Letter(BarrierClosed(epoch=effect.epoch, was_open=was_open)))

    async def _order(self, effect: OrderMember) -> None:
        order = self._join_order(self.core, effect)
        await self._tell_member(effect.incarnation, lambda: self._fleet.order(order, effect.reservation))

    async def _fence(self, effect: FenceMember) -> None:
        order = FenceOrder(incarnation=effect.incarnation, grace_s=effect.grace_s)
        if await self._tell_member(effect.incarnation, lambda: self._fleet.fence(order)):
            taken = FenceTaken(incarnation=effect.incarnation, grace_s=effect.grace_s)
            await self._inbox.put(_Letter(taken))

    async def _expire(self, effect: ExpireLease) -> None:
        is_over = await insist(lambda: self._store.expire(self.uid, effect.incarnation))
        await self._inbox.put(_Letter(LeaseExpiring(incarnation=effect.incarnation, is_over=is_over)))

    async def _tell_member(self, incarnation: Incarnation, call: Callable[[], Awaitable[None]]) -> bool:
        """Returns whether it was told; one that is gone never is."""
        try:
            await insist(call)
        except MemberGoneError as error:
            await self._inbox.put(_Letter(MemberVanished(incarnation=incarnation, message=error.message)))
            return False
        return True


def _emptied(inbox: asyncio.Queue[_Letter]) -> list[_Letter]:
    """Everything that waits in it now."""
    return [inbox.get_nowait() for _ in range(inbox.qsize())]


def _driver_ended() -> TransportError:
    return TransportError(
        "The coordinator does not look after this run now.",
        hint="Try again in a moment; if that does not help, its log is in the state folder, under ray/head.",
    )
