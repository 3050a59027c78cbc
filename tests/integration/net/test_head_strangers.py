"""Before a fingerprint has been compared anybody may answer: whatever is said, who has asked is refused in words."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agents.head_line import HeadUrl, ask_trust
from coordinator.mesh_authority import MeshAuthority
from mesh.errors import AuthenticationError, RemoteProtocolError
from mesh.net.tls import api_context
from tests.net_world import DEPLOYMENT

WANTED = "0" * 64
ENDLESS_BYTES_MAX = 64 * 1024 * 1024


@contextlib.asynccontextmanager
async def stranger(
    tmp_path: Path, *pieces: bytes, again: bytes = b""
) -> AsyncIterator[tuple[HeadUrl, list[int]]]:
    """Who answers so, then `again` and again. How much it could send is counted, for each connection."""
    sent: list[int] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent.append(0)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
            while again and sent[-1] < ENDLESS_BYTES_MAX:
                writer.write(again)
                await writer.drain()
                sent[-1] += len(again)
        writer.close()

    authority = MeshAuthority.create(tmp_path, deployment=DEPLOYMENT)
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=api_context(authority.api_credentials()))
    try:
        yield HeadUrl.parse(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"), sent
    finally:
        server.close()
        await server.wait_closed()


def response(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


def words(**changes: object) -> bytes:
    return json.dumps({"bundle": "", "clock": 0.0, **changes}).encode()


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(words(clock=10**400), id="a clock beyond numbers"),
        pytest.param(words(clock=float("nan")), id="a clock that is none"),
        pytest.param(words(clock=float("inf")), id="a clock without end"),
        pytest.param(words(clock=[]), id="a clock of another kind"),
        pytest.param(words(bundle="\ud800"), id="half a character"),
        pytest.param(b"[" * 100_000, id="depth without end"),
        pytest.param(b"\xff", id="no text"),
        pytest.param(b"[]", id="a list"),
        pytest.param(b"{}", id="nothing"),
    ],
)
async def test_what_no_head_says_is_refused_in_words(tmp_path: Path, body: bytes) -> None:
    async with stranger(tmp_path, response(body)) as (head, _):
        with pytest.raises(RemoteProtocolError, match=r"127\.0\.0\.1"):
            await ask_trust(head, WANTED)


async def test_a_bundle_that_is_none_is_not_believed(tmp_path: Path) -> None:
    pem = "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"
    for bundle in ("", "x", pem):
        async with stranger(tmp_path, response(words(bundle=bundle))) as (head, _):
            with pytest.raises(AuthenticationError):
                await ask_trust(head, WANTED)


async def test_an_answer_without_end_is_not_read_to_it(tmp_path: Path) -> None:
    async with stranger(tmp_path, b"HTTP/1.1 200 OK\r\n\r\n", again=b" " * 65536) as (head, sent):
        with pytest.raises(RemoteProtocolError, match="more than"):
            await ask_trust(head, WANTED)
        assert sent[0] < ENDLESS_BYTES_MAX


async def test_nobody_is_sent_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    async with stranger(tmp_path / "other", response(words())) as (other, asked):
        to = response(b"{}", "302 Found", f"Location: {other.url}/v1/authority\r\n")
        async with stranger(tmp_path, to) as (head, _):
            with pytest.raises(RemoteProtocolError, match="status 302"):
                await ask_trust(head, WANTED)
        assert asked == []
