"""Which congestion control connections of the mesh have, on this machine's own TCP."""

from __future__ import annotations

import socket

import pytest

from mesh.net import sockets
from mesh.net.dialling import connect

PACED = b"reno"
"""Played by what every kernel has and `unpace` does not choose where it has the choice."""


@pytest.fixture(autouse=True)
def _paced_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_paced_control", lambda: PACED)
    monkeypatch.setattr(sockets, "UNPACED", (b"no such thing", *available() - {PACED}))
    if not available() - {PACED}:
        pytest.skip("this kernel has one congestion control, or we may choose one only")


def available() -> set[bytes]:
    """What this process may choose and is not sent by timers."""
    found = set()
    with socket.socket() as sock:
        for name in (b"cubic", b"reno"):
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            except OSError:
                continue
            found.add(name)
    return found


def control(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


async def both_ends() -> tuple[socket.socket, socket.socket]:
    with sockets.listen("127.0.0.1", 0) as listener:
        dialled = await connect("127.0.0.1", listener.getsockname()[1])
        accepted, _ = listener.accept()
        return dialled, accepted


async def test_within_a_host_neither_end_is_sent_by_timers() -> None:
    dialled, accepted = await both_ends()
    with dialled, accepted:
        sockets.prepare(accepted)
        assert PACED not in (control(dialled), control(accepted))


async def test_on_a_long_way_both_ends_are_sent_as_the_system_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "NEAR_US", 0)
    dialled, accepted = await both_ends()
    with dialled, accepted:
        sockets.prepare(accepted)
        assert [control(dialled), control(accepted)] == [PACED, PACED]
