"""Calls between the head (coordinator, fleet) and the machines: lost, doubled, late, or cut one way or both.

Such a call is asked again by whoever made it, so losing a message is as good as delaying it for long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mesh.messages import MemberReport
from tests.sim.tasks import DOWN, Begin, Resume

if TYPE_CHECKING:
    from tests.sim.machine import Machine
    from tests.sim.world import World

CALL_LIMIT_S = 8.0
"""`agents.member.REPORT_LIMIT_S`, and about `MEMBER_CALL_TIMEOUT_S` of the fleet."""


class Network:
    """Everything but the connections to the store."""

    def __init__(self, world: World) -> None:
        self.world = world

    def _passes(self, machine: Machine, direction: str) -> bool:
        return machine.is_open(direction) and not self.world.roll(self.world.faults.message_lost)

    # ---- from a machine to the coordinator --------------------------------------------------------

    def report(self, machine: Machine, report: MemberReport, answered: Callable[[bool], None]) -> None:
        """A member's report; `answered` is told on the machine whether it was taken."""
        world = self.world

        def reply(is_taken: bool) -> None:
            if self._passes(machine, "head in"):
                machine.after(machine.latency(), answered, is_taken)

        if self._passes(machine, "head out"):
            world.after(machine.latency(), world.coordinator.report, report, reply)
            if world.roll(world.faults.message_twice):
                late_s = world.random.expovariate(1 / 3)
                world.after(late_s, world.coordinator.report, report, _nobody)
        elif world.random.random() < 0.5:
            machine.after(CALL_LIMIT_S, answered, False)  # else its member finds out by its own clock

    # ---- from the head to a machine ---------------------------------------------------------------

    def call(self, machine: Machine, act: Callable[..., Any], *arguments: Any) -> Begin:
        """A call on the machine, to be yielded: what `act` returns, or DOWN after a while."""

        def begin(resume: Resume) -> None:
            state = {"is_open": True}

            def answer(value: Any) -> None:
                if state["is_open"]:
                    state["is_open"] = False
                    resume(value)

            def perform(replies: bool) -> None:
                value = act(*arguments)
                if replies and self._passes(machine, "head out"):
                    self.world.after(machine.latency(), answer, value)

            self.world.after(CALL_LIMIT_S, answer, DOWN)
            if self._passes(machine, "head in"):
                machine.after(machine.latency(), perform, True)
                if self.world.roll(self.world.faults.message_twice):
                    machine.after(self.world.random.expovariate(1 / 3), perform, False)

        return begin


def _nobody(_: bool) -> None:
    """Whose answer nobody waits for."""
