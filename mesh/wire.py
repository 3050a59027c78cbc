"""Frames on a stream: a 4-byte big-endian length, then that many bytes of msgpack.

The parser is sans-io: bytes in, messages out. It accepts nothing above its limit, reads the length
before it buffers a body, and after an error refuses everything (the stream cannot be trusted again).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgpack

from mesh.errors import LocalProtocolError, RemoteProtocolError

FRAME_BYTES_MAX = 16 * 1024 * 1024
_HEADER = struct.Struct(">I")
# TypeError: a map whose key cannot be hashed. OverflowError: a timestamp beyond what the platform counts.
_UNPACK_ERRORS = (ValueError, TypeError, OverflowError, msgpack.exceptions.UnpackException, RecursionError)
_packer = msgpack.Packer(use_bin_type=True, autoreset=True)


def encode_frame(message: Any, *, bytes_max: int = FRAME_BYTES_MAX) -> bytes:
    """One message as a frame. Raises LocalProtocolError when it is too large or not encodable."""
    try:
        body = _packer.pack(message)
    except (TypeError, ValueError, OverflowError) as error:
        _packer.reset()
        raise LocalProtocolError(f"This message cannot be encoded: {error}.") from error
    if len(body) > bytes_max:
        raise LocalProtocolError(
            f"A message of {len(body)} bytes is over the limit of {bytes_max}.", size=len(body)
        )
    return _HEADER.pack(len(body)) + body  # type: ignore[no-any-return]


class FrameParser:
    """Splits a byte stream into messages. Feed it, then iterate.

    Args:
        bytes_max: the largest body accepted, in bytes.
    """

    def __init__(self, *, bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._buffer = bytearray()
        self._bytes_max = bytes_max
        self._broken = False

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Any]:
        """Takes the bytes at once; the iterator gives every message that is whole by now.

        One iterator at a time: finish or drop it before the next `feed`. What a dropped one had not given yet
        is given by the next. Raises RemoteProtocolError on garbage.
        """
        if self._broken:
            raise RemoteProtocolError("This stream sent garbage before and is not read any more.")
        self._buffer += data
        return self._messages()

    def _messages(self) -> Iterator[Any]:
        buffer = self._buffer
        position = 0
        size = len(buffer)
        try:
            while size - position >= 4:
                (length,) = _HEADER.unpack_from(buffer, position)
                if length > self._bytes_max:
                    raise RemoteProtocolError(
                        f"The peer announced a frame of {length} bytes; the limit is {self._bytes_max}."
                    )
                end = position + 4 + length
                if end > size:
                    break
                body = memoryview(buffer)[position + 4 : end]
                try:
                    message = msgpack.unpackb(body, raw=False, strict_map_key=False)
                except _UNPACK_ERRORS as error:
                    raise RemoteProtocolError(
                        f"The peer sent a frame that is not msgpack: {error}."
                    ) from error
                finally:
                    body.release()
                position = end
                yield message
        except RemoteProtocolError:
            self._broken = True
            raise
        finally:
            if position:
                del buffer[:position]
