"""Streams that cannot be begun leave nothing behind."""

from __future__ import annotations

import asyncio
import socket
import ssl

import pytest

from mesh.ids import MachineName
from mesh.net import streams as module
from mesh.net.channel import Channel
from mesh.net.gate import Gate
from mesh.net.pump import Pump
from mesh.net.streams import Streams
from tests.net_world import DEPLOYMENT


@pytest.mark.parametrize("fails_at", ["start", "make"])
async def test_a_stream_that_cannot_be_begun_closes_both_sides(
    monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no more watches")

    if fails_at == "start":
        monkeypatch.setattr(Pump, "start", fail)
    else:
        monkeypatch.setattr(module, "Pump", fail)
    made = Streams(Gate(deployment=DEPLOYMENT, machine=MachineName("a")), streams_max=8)
    plain, far = socket.socketpair()
    wire, peer = socket.socketpair()
    for sock in (plain, wire):
        sock.setblocking(False)
    ends: list[str] = []
    channel = Channel(wire, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), server_side=True)
    with pytest.raises(OSError, match="no more watches"):
        made.join(plain, channel, (), on_end=lambda: ends.append("over"))
    assert (plain.fileno(), wire.fileno(), len(made), ends) == (-1, -1, 0, ["over"])
    await asyncio.sleep(0)
    far.close()
    peer.close()
