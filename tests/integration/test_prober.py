"""A prober's ports, when its start does not come to its end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from agents import machine, probing
from agents.probing import KEY_BYTES, Prober


@pytest.mark.parametrize("turns", range(0, 12, 3))
async def test_a_prober_that_is_given_up_while_it_starts_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    has_begun, may_end = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slow() -> dict[str, str]:
        loop.call_soon_threadsafe(has_begun.set)
        may_end.wait(10.0)
        return {}

    reserved: list[machine.PortReservation] = []
    reserve = machine.reserve_port

    def reserve_and_note(**wanted: int) -> machine.PortReservation:
        reserved.append(reserve(**wanted))
        return reserved[-1]

    monkeypatch.setattr(machine, "reserve_port", reserve_and_note)
    monkeypatch.setattr(probing, "versions", slow)
    prober = Prober(rank=0, name="m", address="127.0.0.1", key=bytes(KEY_BYTES))
    starting = asyncio.create_task(prober.start())
    if turns:
        for _ in range(turns):
            await asyncio.sleep(0)
    else:  # listening already
        await has_begun.wait()
    starting.cancel()
    await asyncio.wait([starting])
    may_end.set()
    assert starting.cancelled()
    assert prober._listeners == []
    assert all(reservation._guard.fileno() == -1 for reservation in reserved)
