"""Prefaces and answers arrive as they were sent, and no bytes bring out anything but a RemoteProtocolError."""

from __future__ import annotations

import hypothesis.strategies as st
import msgpack
import pytest
from hypothesis import example, given

from mesh.errors import RemoteProtocolError
from mesh.ids import Epoch, MachineName, Rank, RunUid
from mesh.net.identity import NUMBER_MAX
from mesh.net.preface import (
    HEADER_BYTES,
    PREFACE_BYTES_MAX,
    Answer,
    MemberTarget,
    Preface,
    VersionError,
    decode_answer,
    decode_preface,
    encode_answer,
    encode_preface,
    frame_length,
)
from mesh.net.refusals import Refusal

names = st.text(min_size=1, max_size=40)
numbers = st.integers(0, NUMBER_MAX)
clocks = st.floats(allow_nan=False, allow_infinity=False)
targets = st.builds(MemberTarget, run=names.map(RunUid), epoch=numbers.map(Epoch), rank=numbers.map(Rank))
prefaces = st.builds(
    Preface,
    machine=names.map(MachineName),
    member=st.none() | targets,
    port=st.integers(1, 65535),
    clock=clocks,
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
keys = ("machine", "run", "epoch", "rank", "port", "clock", "refusal", "message")


def body(frame: bytes) -> bytes:
    assert frame_length(frame[:HEADER_BYTES]) == len(frame) - HEADER_BYTES
    return frame[HEADER_BYTES:]


@given(prefaces)
def test_a_preface_arrives_as_it_was_sent(preface: Preface) -> None:
    assert decode_preface(body(encode_preface(preface))) == preface


@given(st.none() | st.sampled_from(Refusal), st.text(max_size=2000), clocks)
@example(Refusal.EXPIRED, "\U0001f600" * 1000, 0.0)
def test_an_answer_arrives_with_its_message_cut_to_size(
    refusal: Refusal | None, message: str, clock: float
) -> None:
    frame = encode_answer(Answer(refusal=refusal, message=message, clock=clock))
    assert len(frame) <= PREFACE_BYTES_MAX + HEADER_BYTES
    answer = decode_answer(body(frame))
    assert (answer.refusal, answer.clock) == (refusal, clock)
    assert message.encode("utf-8", "replace").decode().startswith(answer.message)


@given(st.binary(max_size=200))
@example(b"\x81\x91\x01\x02")
def test_no_bytes_bring_out_anything_but_a_protocol_error(data: bytes) -> None:
    for decode in (decode_preface, decode_answer):
        try:
            decode(data)
        except RemoteProtocolError:
            continue


@given(st.dictionaries(st.sampled_from(keys), anything))
def test_nor_does_any_map_with_the_right_keys(words: dict[str, object]) -> None:
    data = msgpack.packb({"v": 1, **words}, use_bin_type=True)
    for decode in (decode_preface, decode_answer):
        try:
            decode(data)
        except RemoteProtocolError:
            continue


@given(st.binary(min_size=4, max_size=4))
def test_a_header_announces_little_or_nothing(header: bytes) -> None:
    try:
        length = frame_length(header)
    except RemoteProtocolError:
        assert not 0 < int.from_bytes(header, "big") <= PREFACE_BYTES_MAX
    else:
        assert length == int.from_bytes(header, "big")


@pytest.mark.parametrize("version", [0, 2, "1", None, True, 1.5])
def test_another_version_is_another_error(version: object) -> None:
    with pytest.raises(VersionError):
        decode_preface(msgpack.packb({"v": version}))
