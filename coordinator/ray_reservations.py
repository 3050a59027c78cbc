"""Who holds which machine of a Ray cluster, and who waits for one.

Theory of operation. A reservation is one placement group per machine (`coordinator.ray_groups`). This process is the
only one that makes them, so the books here say who has what; they are read from Ray once, after a start. A free machine
is alive, not wanted back, and has no group of ours. All or nothing is made here: what is granted is marked in the
books before anything else is looked at, the groups are asked for together, and when not all of them are there within
CREATION_LIMIT_S (somebody else in a shared cluster was faster, a machine just died) all are removed, and the
reservation waits again, without those machines for a while.

Rules of this file:
1. One look at Ray serves all who wait (`_serve`), and nobody is looked for when nobody waits.
2. An attempt is never cut in half by a cancellation: it ends as held or as removed, and `withdraw` waits for it.
3. A machine leaves the books when Ray has confirmed that its group is gone, not before.
4. What Ray refused to say leaves the books as they are: asking again looks for the groups by their names.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ray.util.placement_group import PlacementGroup

from agents.raylet import SLOT_RESOURCE
from coordinator import ray_groups, ray_notes
from coordinator.core.events import Placement
from coordinator.fleet import MachineFacts, Shape, Waiting, why_waiting
from coordinator.machine_choice import (
    Asked,
    Grant,
    WhyApart,
    choose,
    natural,
    together,
    why_not_together,
)
from coordinator.ray_call import ask_ray
from coordinator.ray_groups import Key
from mesh.errors import MeshTimeoutError, TransportError
from mesh.ids import MachineName, RunUid

CREATION_LIMIT_S = 5.0
READY_POLL_FIRST_S, READY_POLL_MAX_S = 0.002, 0.1
REMOVAL_POLL_S = 0.01
REMOVAL_LIMIT_S = 30.0
SLOT_LIMIT_S = 1.0
"""How long a removed group's machine is waited for; somebody else in a shared cluster may have it by then."""
LOOK_S = 0.25
"""Between two looks for all who wait. What is given back here is noticed at once."""
NOTICE_S = 1.0
"""How long a reservation may take before its run says why it waits, and between two such sayings."""
SHUN_FIRST_S, SHUN_MAX_S = 1.0, 30.0
"""How long a machine that could not be had is left alone; doubled each time."""

OnWaiting = Callable[[Waiting], None]

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Wish:
    """A reservation that is not served yet."""

    key: Key
    shape: Shape
    since: float
    on_waiting: OnWaiting
    told_at: float
    done: asyncio.Future[tuple[Placement, ...]]
    attempt: asyncio.Task[None] | None = None
    """While groups are being made for it."""
    asking: int = 0
    """How many wait for it. With none it is not served any more."""


@dataclass(slots=True, kw_only=True)
class _Held:
    """A machine in the books."""

    key: Key
    group: PlacementGroup | None = None
    """None while it is not known whether there is one."""


@dataclass(slots=True)
class _Shunned:
    until: float = 0.0
    pause_s: float = SHUN_FIRST_S


@dataclass(slots=True, kw_only=True)
class _Books:
    held: dict[MachineName, _Held] = field(default_factory=dict)
    wishes: dict[Key, _Wish] = field(default_factory=dict)
    """In the order of their coming."""
    shunned: dict[MachineName, _Shunned] = field(default_factory=dict)

    def machines_of(self, key: Key) -> list[MachineName]:
        return sorted((m for m, held in self.held.items() if held.key == key), key=natural)


class RayReservations:
    """The reservations of one deployment.

    Args:
        look: every machine, as it is now.
        used_by: which run holds which machine, for the sentence on why a run waits.
        why_apart: why two machines are not offered to one run; None where they are.
        jitter: between 0 and 1.
    """

    def __init__(
        self,
        *,
        look: Callable[[], Awaitable[list[MachineFacts]]],
        used_by: Callable[[], Mapping[str, str]],
        why_apart: WhyApart = together,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._look = look
        self._used_by = used_by
        self._why_apart = why_apart
        self._jitter = jitter
        self._books = _Books()
        self._is_loaded = False
        self._loading = asyncio.Lock()
        self._serving: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    # ---- asking -----------------------------------------------------------------------------------

    async def reserve(self, key: Key, shape: Shape, on_waiting: OnWaiting) -> tuple[Placement, ...]:
        """See `Fleet.reserve`."""
        await self._load()
        wish = self._books.wishes.get(key)
        if wish is None:
            wish = self._new_wish(key, shape, on_waiting)
        wish.on_waiting = on_waiting
        wish.asking += 1
        try:
            return await asyncio.shield(wish.done)
        finally:
            wish.asking -= 1
            if not wish.asking and wish.attempt is None:
                self._forget(wish)

    def _new_wish(self, key: Key, shape: Shape, on_waiting: OnWaiting) -> _Wish:
        now = time.monotonic()
        wish = _Wish(
            key=key,
            shape=shape,
            since=now,
            on_waiting=on_waiting,
            told_at=now,
            done=asyncio.get_running_loop().create_future(),
        )
        self._books.wishes[key] = wish
        found = self._books.machines_of(key)
        if found:
            self._begin(wish, self._take_over(wish, found))
        self._changed.set()
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve(), name="reservations")
        return wish

    def _forget(self, wish: _Wish) -> None:
        if self._books.wishes.get(wish.key) is wish:
            del self._books.wishes[wish.key]
        wish.done.cancel()

    async def _serve(self) -> None:
        """Grants what can be granted, as long as somebody waits."""
        while self._books.wishes:
            self._changed.clear()
            if waiting := [w for w in self._books.wishes.values() if w.attempt is None]:
                try:
                    machines = await self._look()
                    self._grant(machines)
                    await self._tell(waiting, machines)
                except TransportError as error:
                    _log.warning("who waits for machines waits on: %s", error)
                except Exception:  # noqa: BLE001 - the guard: one run's fault must not let all others wait
                    _log.exception("a look for machines failed")
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _grant(self, machines: Sequence[MachineFacts]) -> None:
        """Marks in the books whatever is granted, without a pause in between, and begins to make it true."""
        now = time.monotonic()
        books = self._books
        asked = [
            Asked(uid=w.key.uid, reservation=w.key.reservation, shape=w.shape, since=w.since)
            for w in books.wishes.values()
            if w.attempt is None
        ]
        taken = {machine: held.key.uid for machine, held in books.held.items()}
        shunned = frozenset(m for m, s in books.shunned.items() if now < s.until)
        for grant in choose(asked, machines, taken, shunned=shunned, now=now, why_apart=self._why_apart):
            key = Key(grant.asked.uid, grant.asked.reservation)
            for facts in grant.machines:
                books.held[facts.name] = _Held(key=key)
            wish = books.wishes[key]
            self._begin(wish, self._make(wish, grant))

    async def _tell(self, wishes: Sequence[_Wish], machines: list[MachineFacts]) -> None:
        now = time.monotonic()
        due = [w for w in wishes if w.attempt is None and now - w.told_at >= NOTICE_S]
        if not due:
            return
        coming = await ask_ray(ray_notes.read_coming)
        holders = {str(machine): f"run {held.key.uid}" for machine, held in self._books.held.items()}
        used_by = {**holders, **self._used_by()}
        taken = self._books.held.keys()
        sentences: dict[Shape, Waiting] = {}  # thousands may wait for the same
        for wish in due:
            wish.told_at = now
            if wish.shape not in sentences:
                apart = why_not_together(wish.shape, machines, taken, why_apart=self._why_apart)
                sentences[wish.shape] = why_waiting(wish.shape, machines, used_by, coming=coming, apart=apart)
            wish.on_waiting(sentences[wish.shape])

    # ---- an attempt -------------------------------------------------------------------------------

    def _begin(self, wish: _Wish, work: Awaitable[None]) -> None:
        wish.attempt = asyncio.create_task(self._attempt(wish, work), name=f"groups of {wish.key}")

    async def _attempt(self, wish: _Wish, work: Awaitable[None]) -> None:
        """One attempt; whatever goes wrong is the wish's answer, and it is asked again by who needs it."""
        try:
            await work
        except Exception as error:  # noqa: BLE001 - the guard
            if wish.asking and not wish.done.done():
                wish.done.set_exception(error)
            else:
                _log.warning("the machines of %s are not held: %r", wish.key, error)
        finally:
            wish.attempt = None
            if wish.done.done() or not wish.asking:
                self._forget(wish)
            self._changed.set()

    async def _make(self, wish: _Wish, grant: Grant) -> None:
        names = [facts.name for facts in grant.machines]
        bundle: dict[str, float] = {SLOT_RESOURCE: 1}
        if wish.shape.gpus_per_node:
            bundle["GPU"] = wish.shape.gpus_per_node
        for machine, group in (await ask_ray(ray_groups.create_all, wish.key, names, bundle)).items():
            self._books.held[machine].group = group
        missing = await self._wait_for_groups(names)
        if missing:
            _log.info("%s could not be had; looking again", ", ".join(missing))
            self._shun(missing)
            await self.give_back(names)
        else:
            self._hold(wish, grant.machines)

    async def _take_over(self, wish: _Wish, found: list[MachineName]) -> None:
        """What an earlier asking left: all of it, or it begins anew. Nobody was ordered there yet."""
        known = {facts.name: facts for facts in await self._look() if facts.is_alive}
        await self._find_groups(found)
        is_whole = len(found) == wish.shape.nodes and all(
            machine in known and self._books.held[machine].group is not None for machine in found
        )
        if is_whole and not await self._wait_for_groups(found):
            self._hold(wish, [known[machine] for machine in found])
        else:
            await self.give_back(found)

    async def _find_groups(self, machines: Sequence[MachineName]) -> None:
        for machine in machines:
            held = self._books.held[machine]
            if held.group is None:
                held.group = await ask_ray(ray_groups.find, held.key, machine)

    async def _wait_for_groups(self, machines: Sequence[MachineName]) -> list[MachineName]:
        """Those whose groups were not there in time."""
        groups = {m: group for m in machines if (group := self._books.held[m].group) is not None}
        deadline, pause_s = time.monotonic() + CREATION_LIMIT_S, READY_POLL_FIRST_S
        while missing := await ask_ray(ray_groups.not_created, groups):
            if time.monotonic() >= deadline:
                break
            await asyncio.sleep(pause_s)
            pause_s = min(READY_POLL_MAX_S, pause_s * 2)
        return missing

    def _hold(self, wish: _Wish, machines: Sequence[MachineFacts]) -> None:
        for facts in machines:
            self._books.shunned.pop(facts.name, None)
        if not wish.done.done():
            ordered = sorted(machines, key=lambda facts: natural(facts.name))
            wish.done.set_result(tuple(Placement(machine=f.name, address=f.address) for f in ordered))

    def _shun(self, machines: Sequence[MachineName]) -> None:
        for machine in machines:
            shunned = self._books.shunned.setdefault(machine, _Shunned())
            shunned.until = time.monotonic() + shunned.pause_s * (0.5 + self._jitter())
            shunned.pause_s = min(SHUN_MAX_S, shunned.pause_s * 2)

    # ---- giving back ------------------------------------------------------------------------------

    async def withdraw(self, key: Key) -> list[MachineName]:
        """See `Fleet.withdraw`. Returns the machines that were held."""
        await self._load()
        wish = self._books.wishes.pop(key, None)
        if wish is not None:
            if wish.attempt is not None:
                await asyncio.wait([wish.attempt])
            wish.done.cancel()
        machines = self._books.machines_of(key)
        await self.give_back(machines)
        return machines

    async def held_by(self, uid: RunUid) -> list[tuple[MachineName, Key]]:
        """Every machine of this run. What is being made for it now is made, or removed, first (rule 2)."""
        await self._load()
        attempts = [w.attempt for w in self._books.wishes.values() if w.key.uid == uid and w.attempt]
        if attempts:
            await asyncio.wait(attempts)
        held = [(machine, held.key) for machine, held in self._books.held.items() if held.key.uid == uid]
        return sorted(held, key=lambda each: natural(each[0]))

    async def holders(self) -> set[RunUid]:
        """Every run that has a machine."""
        await self._load()
        return {held.key.uid for held in self._books.held.values()}

    async def holds(self, key: Key, machine: MachineName) -> bool:
        """Whether the machine is held under this reservation."""
        await self._load()
        held = self._books.held.get(machine)
        return held is not None and held.key == key

    async def group(self, key: Key, machine: MachineName) -> PlacementGroup | None:
        """The group that holds the machine; None when it is not held under this reservation."""
        if not await self.holds(key, machine):
            return None
        await self._find_groups([machine])
        return self._books.held[machine].group

    async def give_back(self, machines: Sequence[MachineName]) -> None:
        """Removes their groups; returns when Ray has confirmed it. Raises MeshTimeoutError, TransportError."""
        if not machines:
            return
        await self._find_groups(machines)
        groups = [group for m in machines if (group := self._books.held[m].group) is not None]
        await ask_ray(ray_groups.remove_all, groups)
        try:
            async with asyncio.timeout(REMOVAL_LIMIT_S):
                for group in groups:
                    while not await ask_ray(ray_groups.is_removed, group):  # noqa: ASYNC110 - Ray cannot wait
                        await asyncio.sleep(REMOVAL_POLL_S)
        except TimeoutError:
            raise MeshTimeoutError(
                f"Ray has not confirmed the release of {', '.join(machines)}.", timeout_s=REMOVAL_LIMIT_S
            ) from None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SLOT_LIMIT_S):
                while not await ask_ray(ray_groups.has_free_slot, machines):  # noqa: ASYNC110
                    await asyncio.sleep(REMOVAL_POLL_S)
        for machine in machines:
            self._books.held.pop(machine, None)
        self._changed.set()

    async def _load(self) -> None:
        """Reads from Ray what an earlier coordinator held. Raises TransportError."""
        if self._is_loaded:
            return
        async with self._loading:
            if not self._is_loaded:
                for machine, (key, group) in (await ask_ray(ray_groups.read_all)).items():
                    self._books.held[machine] = _Held(key=key, group=group)
                self._is_loaded = True
