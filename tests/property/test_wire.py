"""Frames survive any cut, and no bytes at all bring out anything but a message or a RemoteProtocolError."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import msgpack
from hypothesis import example, given

from mesh.errors import RemoteProtocolError
from mesh.wire import FrameParser, encode_frame

scalars = (
    st.none()
    | st.booleans()
    | st.integers(min_value=-(2**63), max_value=2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
)
messages = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text() | st.integers(0, 99), inner, max_size=5)
    ),
    max_leaves=20,
)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """The same bytes in pieces; a place beyond the end cuts nothing."""
    edges = [0, *sorted(min(place, len(data)) for place in places), len(data)]
    return [data[begin:end] for begin, end in pairwise(edges)]


@given(sent=st.lists(messages, max_size=8), places=st.lists(st.integers(0, 400), max_size=12))
def test_every_message_arrives_whole_and_in_order_however_the_stream_is_cut(
    sent: list[Any], places: list[int]
) -> None:
    parser = FrameParser()
    stream = b"".join(encode_frame(message) for message in sent)
    got = [message for piece in cut(stream, places) for message in parser.feed(piece)]
    assert got == sent


@given(sent=st.lists(messages, min_size=1, max_size=5), kept=st.floats(0, 1))
def test_a_stream_that_breaks_off_gives_the_whole_messages_and_no_other(sent: list[Any], kept: float) -> None:
    frames = [encode_frame(message) for message in sent]
    stream = b"".join(frames)
    length = int(len(stream) * kept)
    whole = 0
    while whole < len(frames) and sum(map(len, frames[: whole + 1])) <= length:
        whole += 1
    assert list(FrameParser().feed(stream[:length])) == sent[:whole]


@given(data=st.binary(max_size=300), places=st.lists(st.integers(0, 300), max_size=5))
@example(data=b"\x00\x00\x00\x04\x81\x91\x01\x02", places=[])
def test_no_bytes_bring_out_anything_but_messages_or_the_peer_s_fault(data: bytes, places: list[int]) -> None:
    parser = FrameParser(bytes_max=64)
    broken = False
    for piece in cut(data, places):
        try:
            for _ in parser.feed(piece):
                assert not broken, "a message came after garbage"
        except RemoteProtocolError:
            broken = True


@given(body=st.binary(max_size=64))
def test_a_body_is_accepted_exactly_when_msgpack_takes_it_whole(body: bytes) -> None:
    framed = len(body).to_bytes(4, "big") + body
    try:
        expected = [msgpack.unpackb(body, raw=False, strict_map_key=False)]
    except Exception:  # noqa: BLE001 - whatever msgpack raises, the parser must turn into the peer's fault
        expected = None
    try:
        got = list(FrameParser().feed(framed))
    except RemoteProtocolError:
        got = None
    assert repr(got) == repr(expected)  # repr: a NaN is not equal to itself


@given(
    sent=st.lists(messages, min_size=1, max_size=4), flip=st.integers(0, 10_000), value=st.integers(0, 255)
)
def test_a_byte_changed_on_the_way_never_raises_anything_unexpected(
    sent: list[Any], flip: int, value: int
) -> None:
    stream = bytearray(b"".join(encode_frame(message) for message in sent))
    stream[flip % len(stream)] = value
    try:
        list(FrameParser().feed(stream))
    except RemoteProtocolError:
        return
