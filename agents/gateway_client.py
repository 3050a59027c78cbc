"""How a machine's agent speaks with its gateway process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from agents.gateway_wire import FRAME_BYTES_MAX, Request, to_wire
from mesh.errors import MeshError, MeshTimeoutError, RemoteProtocolError, TransportError
from mesh.wire import FrameParser, encode_frame

ANSWER_LIMIT_S = 30.0
"""Longer than a request's slowest part, which runs `ip` a few times."""
READ_BYTES = 64 * 1024


class GatewayClient:
    """One request after the other, each with a number that its answer bears. Make it with `connect`; always `close` it.

    Who gives a request up leaves the line as it is: an answer that comes late is nobody else's.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._parser = FrameParser()
        self._turn = asyncio.Lock()
        self._number = 0
        self.silences = 0
        """How many requests in a row were not answered in time."""
        self.is_broken = False
        """The line: nothing that is asked on it will be answered."""

    @classmethod
    async def connect(cls, path: Path) -> GatewayClient:
        """Raises TransportError."""
        try:
            return cls(*await asyncio.open_unix_connection(path))
        except OSError as error:
            raise TransportError(f"The gateway at {path} does not answer: {error.strerror}.") from error

    async def ask(self, request: Request) -> Any:
        """What it answers, when it is done. Raises what the gateway raised, TransportError, MeshTimeoutError."""
        async with self._turn:
            self._number += 1
            frame = encode_frame({"id": self._number} | to_wire(request), bytes_max=FRAME_BYTES_MAX)
            try:
                async with asyncio.timeout(ANSWER_LIMIT_S):
                    self._writer.write(frame)
                    await self._writer.drain()
                    answer = await self._answer_to(self._number)
            except TimeoutError:
                self.silences += 1
                raise MeshTimeoutError(
                    f"The gateway did not answer {type(request).__name__}.", timeout_s=ANSWER_LIMIT_S
                ) from None
            except (OSError, RemoteProtocolError) as error:
                self.is_broken = True
                raise TransportError(f"The gateway is gone: {error}.") from error
            self.silences = 0
        if "error" in answer:
            raise MeshError.from_wire(answer["error"])
        return answer["ok"]

    async def _answer_to(self, number: int) -> dict[str, Any]:
        while True:
            data = await self._reader.read(READ_BYTES)
            if not data:
                raise ConnectionResetError("it closed the connection")
            for answer in self._parser.feed(data):
                if not isinstance(answer, dict) or "id" not in answer:
                    raise RemoteProtocolError("what it says is no answer")
                if answer["id"] == number:
                    return dict(answer)

    @property
    def is_closed(self) -> bool:
        return self._writer.is_closing()

    def close(self) -> None:
        self._writer.close()
