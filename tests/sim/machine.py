"""A simulated machine: its clocks, its standing still, its end, and the network between it and the rest.

What is scheduled on a machine happens on its own clock, waits while it is frozen, and never happens once it is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log
from typing import TYPE_CHECKING, Any

from mesh.ids import MachineName, Rank, RunUid

if TYPE_CHECKING:
    from tests.sim.member import SimMember
    from tests.sim.process import SimProcess
    from tests.sim.saver import StateDirectory
    from tests.sim.world import World

STIRRING_S = 0.05
"""For so long after a thaw processes run that their keeper has not looked after yet."""
FOREVER = float("inf")


class Machine:
    """One host.

    Args:
        rate: how many seconds its monotonic clock counts in one.
    """

    def __init__(self, world: World, name: MachineName, *, rate: float) -> None:
        self.world = world
        self.name = name
        self.rate = rate
        self.wall_offset = 0.0
        self.is_the_stores = False
        """The store's process is on it too: its kernel tells what that process does not read, and that it is dead."""
        self.is_frozen = False
        self.is_lost = False
        self.is_cordoned = False
        self.is_dead_to_ray = False
        """It was silent for so long that the fleet knows no actor there any more."""
        self.stirs_until = 0.0
        self.members: list[SimMember] = []
        self.processes: list[SimProcess] = []
        """Alive, of whatever incarnation."""
        self.state_dirs: dict[tuple[RunUid, Rank], StateDirectory] = {}
        self.cut_until = {"store out": 0.0, "store in": 0.0, "head out": 0.0, "head in": 0.0}
        """When each direction of each path is open again."""
        self.slow_until = 0.0
        self.is_roused_until = 0.0
        """Until then its keepers do not doze."""
        self.troubled_until = 0.0
        """Until then nobody may be surprised that a lease of this machine lapses."""
        self._backlog: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    def clock(self) -> float:
        """Its monotonic clock, which counts the time that it stands still."""
        return self.world.now * self.rate

    def wall(self) -> float:
        """Its wall clock, which may be stepped."""
        return self.clock() + self.wall_offset

    # ---- what happens on it -----------------------------------------------------------------------

    def after(self, delay_s: float, act: Callable[..., object], *arguments: Any) -> None:
        """Schedules an act, `delay_s` on this machine's clock from now."""
        self.world.after(delay_s / self.rate, self.run, act, arguments)

    def run(self, act: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        """Does it now, or when the machine goes on, or never."""
        if self.is_lost:
            return
        if self.is_frozen:
            self._backlog.append((act, arguments))
        else:
            act(*arguments)

    # ---- standing still and ending ----------------------------------------------------------------

    def freeze(self) -> None:
        """Everything on it stands still; its clock counts on."""
        self.is_frozen = True

    def thaw(self) -> None:
        """Everything goes on with what it believed: the keepers first, mostly, the rest soon after."""
        if self.is_lost or not self.is_frozen:
            return
        self.is_frozen = False
        world = self.world
        backlog, self._backlog = self._backlog, []
        self.stirs_until = world.now + STIRRING_S
        for place, (act, arguments) in enumerate(sorted(backlog, key=_keeper_first)):
            is_keeper = _keeper_first((act, arguments)) < 2
            delay_s = 0.0 if is_keeper and world.random.random() < 0.8 else world.random.uniform(0.0, 0.04)
            world.after(delay_s + place * 1e-6, self.run, act, arguments)
        for process in self.processes:
            process.stir()
        world.after(STIRRING_S + 1e-3, world.truth.check_acting)

    def lose(self) -> None:
        """It is gone, with everything on it, for ever."""
        if self.is_lost:
            return
        self.is_lost = True
        for process in list(self.processes):
            process.vanish()
        self._backlog.clear()
        for member in self.members:
            member.vanish()
        self.world.fleet.machine_lost(self)

    def be_given_up(self) -> None:
        """Its silence was too long for the fleet."""
        self.is_dead_to_ray = True

    def be_taken_back(self) -> None:
        """It is heard again: every actor on it is ended, and it is as new."""
        if self.is_lost or not self.is_dead_to_ray:
            return
        if self.is_frozen or not self.is_open("head in") or not self.is_open("head out"):
            self.world.after(1.0, self.be_taken_back)
            return
        for member in self.members:
            member.die()
        self.is_dead_to_ray = False
        self.world.fleet.look()

    # ---- its network ------------------------------------------------------------------------------

    def cut(self, directions: tuple[str, ...], until: float) -> None:
        if self.is_the_stores:
            return
        for direction in directions:
            self.cut_until[direction] = max(self.cut_until[direction], until)

    def is_open(self, direction: str) -> bool:
        return self.cut_until[direction] <= self.world.now

    def latency(self) -> float:
        """Of one message from or to it."""
        world = self.world
        delay_s = -log(1.0 - world.random.random()) * world.faults.latency_s  # exponential
        if self.is_the_stores:
            return delay_s * 0.1
        if self.slow_until > world.now:
            delay_s += world.random.uniform(0.1, 1.5)
        return delay_s


def _keeper_first(entry: tuple[Callable[..., object], tuple[Any, ...]]) -> int:
    """What the store said comes before the keeper's own look at the clock, and both before anything else."""
    name = getattr(entry[0], "__qualname__", "")
    if name.startswith("SimKeeper.hear"):
        return 0
    return 1 if name.startswith("SimKeeper") else 2
