"""What a head dials for who says that it is there, and how often."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from coordinator import dial_back
from coordinator.dial_back import DialBack, may_dial
from mesh.errors import TransportError
from mesh.ids import MachineName
from mesh.reasons import Reason

A = MachineName("machine-1")
OUTSIDE, INSIDE = "93.184.216.34", "192.168.7.7"


@pytest.mark.parametrize(
    ("address", "source", "may"),
    [
        (OUTSIDE, OUTSIDE, True),
        ("8.8.8.8", OUTSIDE, True),  # a public address of its own that its provider translates
        ("2600::1", OUTSIDE, True),
        ("8.8.8.8", None, True),
        (INSIDE, OUTSIDE, False),  # in the head's network that is somebody else
        (INSIDE, None, False),
        (INSIDE, "10.1.1.1", True),
        ("127.0.0.1", "127.0.0.1", True),  # on the head's own host
        ("10.0.0.1", "10.0.0.1", True),
        ("fe80::1%eth0", "fe80::1%eth0", True),
        ("127.0.0.2", "127.0.0.1", False),
        ("127.0.0.1", INSIDE, False),
        ("::1", INSIDE, False),
        ("::ffff:127.0.0.1", INSIDE, False),
        ("169.254.169.254", INSIDE, False),
        ("fe80::1", INSIDE, False),
        ("fd00:ec2::254", INSIDE, False),
        ("100.100.100.200", INSIDE, False),
        ("224.0.0.1", OUTSIDE, False),
        ("0.0.0.0", OUTSIDE, False),
        ("240.0.0.1", OUTSIDE, False),
        ("64:ff9b::a00:1", OUTSIDE, False),  # 10.0.0.1 by NAT64
        ("2002:a00:1::1", OUTSIDE, False),  # 10.0.0.1 by 6to4
        ("198.18.0.2", INSIDE, False),
        ("fd67:6d00::2", INSIDE, False),
        ("10.0.0.1", INSIDE, False),  # the head's own
    ],
)
def test_an_address_is_dialled_that_may_be_the_machine_s(address: str, source: str | None, may: bool) -> None:
    assert may_dial(address, source=source, own=["10.0.0.1"]) is may


async def test_few_are_dialled_at_the_same_time_and_the_rest_wait_in_a_queue_that_has_an_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dial_back, "WAITING_MAX", dial_back.ROUNDS_MAX + 1)
    door, at_once, most = asyncio.Event(), 0, 0

    async def dial(name: MachineName, addresses: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await door.wait()
        at_once -= 1
        return list(addresses)

    desk = DialBack()

    async def ask(number: int) -> object:
        name = MachineName(f"m-{number}")
        return await desk.find(name, [], origin=name, source=OUTSIDE, port=1, dial=dial)

    asking = [asyncio.create_task(ask(n)) for n in range(dial_back.ROUNDS_MAX + 2)]
    done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED, timeout=20)
    [refused] = [task.exception() for task in done]
    assert isinstance(refused, TransportError) and refused.reason is Reason.LIMIT_EXCEEDED
    door.set()
    found = await asyncio.gather(*asking, return_exceptions=True)
    assert [one for one in found if one != [(OUTSIDE, 1)]] == [refused]
    assert most == dial_back.ROUNDS_MAX


async def test_who_asks_too_often_is_told_so_and_may_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(dial_back.time, "monotonic", lambda: now)
    desk = DialBack()

    async def dial(name: MachineName, addresses: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        return []

    for _ in range(dial_back.ASKS_MAX):
        await desk.find(A, [], origin=A, source=OUTSIDE, port=1, dial=dial)
    with pytest.raises(TransportError, match="too often"):
        await desk.find(A, [], origin=A, source=OUTSIDE, port=1, dial=dial)
    now = dial_back.ASKS_WITHIN_S + 1
    await desk.find(A, [], origin=A, source=OUTSIDE, port=1, dial=dial)


async def test_what_is_asked_keeps_its_order_and_the_source_is_among_it() -> None:
    async def dial(name: MachineName, addresses: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        return list(addresses)

    async def asked(*said: str, source: str | None) -> list[str]:
        found = await DialBack().find(
            A, [(host, 7) for host in said], origin=A, source=source, port=7, dial=dial
        )
        return [host for host, port in found if port == 7]

    many = [f"8.8.8.{n}" for n in range(8)]
    assert await asked(OUTSIDE, "8.8.8.8", source=OUTSIDE) == [OUTSIDE, "8.8.8.8"]
    assert await asked("8.8.8.8", source=OUTSIDE) == ["8.8.8.8", OUTSIDE]
    assert await asked(*many, source=OUTSIDE) == [*many[:3], OUTSIDE]
    assert await asked(*many, source=None) == many[:4]
    assert await asked(INSIDE, source=None) == []
