"""Frames: what is a message, what is garbage, and where the limit is."""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import pytest

from mesh.errors import LocalProtocolError, RemoteProtocolError
from mesh.wire import FRAME_BYTES_MAX, FrameParser, encode_frame


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def parse(data: bytes, *, bytes_max: int = FRAME_BYTES_MAX) -> list[Any]:
    return list(FrameParser(bytes_max=bytes_max).feed(data))


def test_a_frame_is_a_four_byte_big_endian_length_and_msgpack() -> None:
    assert encode_frame({"op": "get"}) == b"\x00\x00\x00\x08" + msgpack.packb({"op": "get"})


def test_text_and_bytes_stay_apart() -> None:
    assert parse(encode_frame({"text": "é\0", "bytes": b"\xff\0"})) == [{"text": "é\0", "bytes": b"\xff\0"}]


def test_a_message_comes_out_with_the_byte_that_completes_it() -> None:
    parser = FrameParser()
    data = encode_frame([1, 2, 3])
    for byte in data[:-1]:
        assert list(parser.feed(bytes([byte]))) == []
    assert list(parser.feed(data[-1:])) == [[1, 2, 3]]


def test_several_messages_in_one_read_come_out_in_order() -> None:
    data = b"".join(encode_frame(n) for n in range(100))
    assert parse(data + encode_frame("half")[:-1]) == list(range(100))


def test_bytes_are_taken_even_when_nobody_iterates() -> None:
    parser = FrameParser()
    parser.feed(encode_frame("first"))
    assert list(parser.feed(encode_frame("second"))) == ["first", "second"]


def test_what_a_dropped_iterator_had_not_given_is_given_by_the_next() -> None:
    parser = FrameParser()
    for message in parser.feed(encode_frame(1) + encode_frame(2) + encode_frame(3)):
        assert message == 1
        break
    assert list(parser.feed(b"")) == [2, 3]


def test_a_message_of_exactly_the_limit_passes_and_one_byte_more_does_not_on_both_sides() -> None:
    fits = encode_frame(b"x" * 98, bytes_max=100)
    assert parse(fits, bytes_max=100) == [b"x" * 98]
    with pytest.raises(LocalProtocolError, match="over the limit of 100"):
        encode_frame(b"x" * 99, bytes_max=100)
    with pytest.raises(RemoteProtocolError, match="announced a frame of 101 bytes; the limit is 100"):
        parse(encode_frame(b"x" * 99), bytes_max=100)


def test_a_length_above_the_limit_is_refused_before_any_of_its_body_came() -> None:
    with pytest.raises(RemoteProtocolError):
        parse(struct.pack(">I", FRAME_BYTES_MAX + 1))


def test_a_client_that_speaks_http_is_refused_at_its_first_bytes() -> None:
    with pytest.raises(RemoteProtocolError):
        parse(b"GET / HTTP/1.1\r\n")


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty body"),
        pytest.param(b"\xc1", id="the one byte that msgpack never uses"),
        pytest.param(b"\x92\x01", id="array cut short"),
        pytest.param(b"\x01\x02", id="two messages in one frame"),
        pytest.param(b"\xa2\xff\xfe", id="text that is not utf-8"),
        pytest.param(b"\xdd\xff\xff\xff\xff", id="array of four billion announced"),
        pytest.param(b"\xdf\xff\xff\xff\xff", id="map of four billion announced"),
        pytest.param(b"\xc6\xff\xff\xff\xff", id="four gigabytes announced"),
        pytest.param(b"\x81\x91\x01\x02", id="a list as the key of a map"),
        pytest.param(b"\x81\x80\x02", id="a map as the key of a map"),
        pytest.param(b"\x91" * 100_000 + b"\x01", id="nested a hundred thousand deep"),
        pytest.param(b"\xd4\xff\x00", id="timestamp of a wrong length"),
        pytest.param(b"\xc7\x0c\xff" + b"\xff" * 12, id="timestamp out of range"),
    ],
)
def test_a_body_that_is_no_message_is_a_fault_of_the_peer(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        parse(frame(body))


def test_messages_before_the_garbage_come_out_and_nothing_after_it() -> None:
    parser = FrameParser()
    got = []
    with pytest.raises(RemoteProtocolError, match="not msgpack"):
        for message in parser.feed(encode_frame("good") + frame(b"\xc1") + encode_frame("never")):
            got.append(message)
    assert got == ["good"]
    with pytest.raises(RemoteProtocolError, match="not read any more"):
        parser.feed(encode_frame("never"))


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(object(), id="an object"),
        pytest.param({1, 2}, id="a set"),
        pytest.param(2**64, id="an integer of 65 bits"),
        pytest.param("\ud800", id="half a surrogate pair"),
        pytest.param([["x", object()]], id="an object inside"),
    ],
)
def test_what_cannot_be_encoded_is_our_fault_and_spoils_nothing_that_follows(message: object) -> None:
    with pytest.raises(LocalProtocolError):
        encode_frame(message)
    assert parse(encode_frame({"next": 1})) == [{"next": 1}]


def test_a_message_nested_too_deep_is_refused_here_not_by_the_peer() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(LocalProtocolError):
        encode_frame(deep)
    while deep:  # taken apart by hand: freeing it in one go recurses as deep
        deep = deep.pop()


def test_nothing_read_stays_in_memory_once_it_was_given() -> None:
    parser = FrameParser()
    data = encode_frame(b"x" * 100_000)
    for _ in range(100):
        assert len(list(parser.feed(data))) == 1
    assert len(parser._buffer) == 0
