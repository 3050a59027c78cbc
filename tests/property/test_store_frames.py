"""Store frames under any bytes and any cuts."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import RemoteProtocolError
from mesh.ids import Epoch, IncarnationToken, Rank, RunUid
from mesh.store import messages as ms
from mesh.store.protocol import ReplyEncoder, ReplyStream, RequestStream, encode_request

texts = st.text(max_size=12)
ids = st.integers(1, 2**31 - 1)
epochs = st.integers(0, 2**31 - 1).map(Epoch)
uids = texts.map(RunUid)
tokens = texts.map(IncarnationToken)
ranks = st.integers(0, 100).map(Rank)
values = st.binary(max_size=40)
numbers = st.integers(-(2**63), 2**63 - 1)
durations = st.floats(allow_nan=False, allow_infinity=False)
requests = st.one_of(
    st.builds(ms.Hello, ids, texts, st.integers(0, 9)),
    st.builds(ms.Ping, ids),
    st.builds(
        ms.SetFloor,
        ids,
        uids,
        epochs,
        st.integers(0, 9),
        st.booleans(),
        st.lists(st.tuples(ranks, tokens), max_size=2).map(tuple),
    ),
    st.builds(ms.Revoke, ids, uids, epochs, ranks, tokens),
    st.builds(ms.Admit, ids, uids, epochs, ranks, tokens, tokens, st.floats(0, 600)),
    st.builds(ms.Expire, ids, uids, epochs, ranks, tokens, durations, durations),
    st.builds(ms.GrantLease, ids, uids, epochs, ranks, tokens, durations, durations),
    st.builds(ms.Arrive, ids, uids, epochs, ranks, tokens, texts, values),
    st.builds(ms.Get, ids, uids, epochs, texts),
    st.builds(ms.Set, ids, values, uids, epochs, texts),
    st.builds(ms.Add, ids, uids, epochs, texts, numbers),
    st.builds(ms.Wait, ids, uids, epochs, st.lists(texts, max_size=3).map(tuple)),
    st.builds(ms.CompareAndSet, ids, uids, epochs, texts, st.none() | values, values),
)
messages = st.one_of(
    st.builds(ms.Done, ids),
    st.builds(ms.Number, ids, numbers),
    st.builds(ms.Value, ids, values),
    st.builds(ms.Opened, ids, st.lists(values, max_size=4).map(tuple)),
    st.builds(ms.LeaseLapsed, uids, epochs, ranks, tokens),
)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


cuts = st.lists(st.integers(0, 400), max_size=8)


@given(st.lists(requests, max_size=6), cuts)
def test_requests_come_back_whole_however_the_stream_is_cut(sent: list[ms.Request], where: list[int]) -> None:
    stream = RequestStream(bytes_max=1 << 20)
    for _ in range(2):
        received: list[ms.Request] = []
        for piece in pieces(b"".join(map(encode_request, sent)), where):
            received += stream.feed(piece)
        assert received == sent
        assert [type(request) for request in received] == [type(request) for request in sent]
        assert not stream.is_partial


@given(st.lists(messages, max_size=6), cuts)
def test_replies_and_pushes_come_back_whole_however_the_stream_is_cut(
    sent: list[ms.Message], where: list[int]
) -> None:
    encoder, stream = ReplyEncoder(), ReplyStream()
    received: list[ms.Message] = []
    for piece in pieces(b"".join(map(encoder.encode, sent)), where):
        received += stream.feed(piece)
    assert received == sent


@given(st.lists(st.binary(max_size=80), max_size=6))
def test_any_bytes_are_requests_or_a_remote_error_and_never_more_memory_than_a_frame(
    chunks: list[bytes],
) -> None:
    stream = RequestStream(bytes_max=64)
    try:
        for chunk in chunks:
            stream.feed(chunk)
            assert len(stream._buffer) <= 64 + 4
    except RemoteProtocolError:
        assert not stream.is_partial


@given(requests, st.integers(0, 200), st.integers(0, 255))
def test_one_wrong_byte_makes_another_request_or_an_error_but_no_crash(
    request: ms.Request, place: int, byte: int
) -> None:
    frame = bytearray(encode_request(request))
    frame[place % len(frame)] = byte
    stream = RequestStream(bytes_max=1 << 16)
    try:
        stream.feed(bytes(frame))
    except RemoteProtocolError:
        assert not stream.is_partial


@given(st.binary(max_size=120), st.integers(0, 3))
def test_any_body_is_a_reply_or_a_remote_error(body: bytes, first: int) -> None:
    framed = len(body).to_bytes(4, "big") + body
    stream = ReplyStream()
    try:
        stream.feed(framed[:first])
        stream.feed(framed[first:])
    except RemoteProtocolError:
        assert not stream.is_partial
