"""One connection between a machine and the store: ordered, reliable while it lasts, delayed by a cut path."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from mesh.store import messages as ms
from mesh.store.books import ConnectionId

if TYPE_CHECKING:
    from tests.sim.machine import Machine
    from tests.sim.store import SimStore


class Receiver(Protocol):
    """Who is at the machine's end."""

    def hear(self, message: ms.Message) -> None: ...

    def hear_lost(self) -> None: ...


class Wire:
    """A TCP connection, seen from its client. What is sent into a cut path arrives when the path is open again."""

    __slots__ = ("_down_after", "_up_after", "id", "is_closed", "life", "machine", "receiver", "store")

    def __init__(self, store: SimStore, machine: Machine, receiver: Receiver) -> None:
        self.store = store
        self.machine = machine
        self.receiver = receiver
        self.is_closed = False
        self.id: ConnectionId | None = None
        """The store's number for it, once it was accepted."""
        self.life = store.life
        """The store's life that it was opened to."""
        self._up_after = self._down_after = 0.0
        self.up(store.accept, self)

    def send(self, kind: Any, fields: tuple[Any, ...]) -> None:
        """One request, `fields` after its class."""
        self.up(self.store.receive, self, kind(*fields))

    def close(self) -> None:
        """Closed by this end; the other hears of it as soon as the path allows."""
        if not self.is_closed:
            self.is_closed = True
            self.up(self.store.hang_up, self)

    def up(self, act: Callable[..., None], *arguments: Any) -> None:
        machine = self.machine
        if machine.is_lost:
            return
        at = max(machine.world.now, machine.cut_until["store out"]) + machine.latency()
        self._up_after = at = max(at, self._up_after)
        machine.world.at(at, self._arrive_up, act, arguments)

    def _arrive_up(self, act: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        until = self.machine.cut_until["store out"]
        world = self.machine.world
        if until > world.now:
            self._up_after = at = max(until, self._up_after)
            world.at(at, self._arrive_up, act, arguments)
        else:
            self.store.run(act, *arguments)

    def down(self, message: ms.Message | None) -> None:
        """From the store; None is the end of the connection."""
        machine = self.machine
        at = max(machine.world.now, machine.cut_until["store in"]) + machine.latency()
        self._down_after = at = max(at, self._down_after)
        machine.world.at(at, self._arrive_down, message)

    def _arrive_down(self, message: ms.Message | None) -> None:
        machine = self.machine
        until = machine.cut_until["store in"]
        if until > machine.world.now:
            self._down_after = at = max(until, self._down_after)
            machine.world.at(at, self._arrive_down, message)
        elif not self.is_closed:
            receiver = self.receiver
            if message is None:
                self.is_closed = True
                machine.run(receiver.hear_lost, ())
            else:
                machine.run(receiver.hear, (message,))
