"""Store messages as frames: what comes back is what went in, and nothing else is let through."""

from __future__ import annotations

import struct

import msgpack
import pytest

from mesh.errors import (
    FencedError,
    LocalProtocolError,
    MeshError,
    RemoteProtocolError,
    RendezvousError,
)
from mesh.ids import Epoch, IncarnationToken, Rank, RunUid
from mesh.reasons import Reason
from mesh.store import messages as ms
from mesh.store import protocol
from mesh.store.protocol import (
    ReplyEncoder,
    ReplyStream,
    RequestStream,
    done_frame,
    encode_request,
    error_of,
    number_head,
    set_frame,
    set_tail,
)

GANG, E1, R0, TOKEN = RunUid("g"), Epoch(1), Rank(0), IncarnationToken("t")
REQUESTS: list[ms.Request] = [
    ms.Hello(1, "secret", 1), ms.Ping(2), ms.Cancel(3, 2), ms.SetFloor(4, GANG, E1, 2, True, ((R0, TOKEN),)),
    ms.DropGang(5, GANG, E1), ms.CloseBarrier(6, GANG, E1, "start"), ms.Watch(7), ms.Gangs(8), ms.Snapshot(9, GANG),
    ms.GrantLease(10, GANG, E1, R0, TOKEN, 3.0, 0.3), ms.ReleaseLease(11, GANG, E1, R0, TOKEN),
    ms.Arrive(12, GANG, E1, R0, TOKEN, "start", b"\x00"), ms.Get(13, GANG, E1, "k"), ms.Set(14, b"", GANG, E1, "k"),
    ms.Add(15, GANG, E1, "k", -(2**63)), ms.Wait(16, GANG, E1, ("a", "b")),
    ms.CompareAndSet(17, GANG, E1, "k", None, b"v"), ms.Delete(18, GANG, E1, "k"),
    ms.Revoke(19, GANG, E1, R0, TOKEN), ms.Admit(20, GANG, E1, R0, TOKEN, IncarnationToken("s"), 1.5),
    ms.Expire(21, GANG, E1, R0, TOKEN, 3.0, 0.3),
]  # fmt: skip
MESSAGES: list[ms.Message] = [
    ms.Done(1), ms.Done(2**31 - 1), ms.Number(1, -(2**63)), ms.Number(300, 2**63 - 1), ms.Value(3, b"\xff"),
    ms.Compared(4, True, b"v"), ms.Compared(4, False, None), ms.Opened(5, (b"a", b"b")),
    ms.Welcome(6, "i", ms.Role.ADMIN),
    ms.GangList(7, (ms.GangFloor(GANG, E1, 2, True),)),
    ms.GangSnapshot(
        8, GANG, E1, 2, (ms.LeaseView(R0, TOKEN, 1.5, True),),
        (ms.BarrierView("start", (R0,), False, True), ms.BarrierView("x", (R0,), True, False, (TOKEN,))),
    ),
    ms.Refused(9, Reason.STALE_EPOCH, "gone on", 7), ms.Refused(0, Reason.LIMIT_EXCEEDED, "full"),
    ms.LeaseLapsed(GANG, E1, R0, TOKEN), ms.LeaseReleased(GANG, E1, R0, TOKEN),
    ms.MemberConnectionLost(GANG, E1, R0, TOKEN), ms.BarrierOpened(GANG, E1, "start", (TOKEN,)),
]  # fmt: skip


def framed(body: object) -> bytes:
    packed = body if isinstance(body, bytes) else msgpack.packb(body)
    return struct.pack(">I", len(packed)) + packed


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: type(request).__name__)
def test_a_request_comes_back_as_it_was_the_second_time_too(
    request_: ms.Request,
) -> None:
    stream = RequestStream(bytes_max=1000)
    for _ in range(2):
        (decoded,) = stream.feed(encode_request(request_))
        assert decoded == request_
        assert type(decoded) is type(request_)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_reply_or_push_comes_back_as_it_was(message: ms.Message) -> None:
    (decoded,) = ReplyStream().feed(ReplyEncoder().encode(message))
    assert decoded == message
    assert type(decoded) is type(message)


def test_every_request_has_an_example_here() -> None:
    assert {type(request) for request in REQUESTS} == set(protocol._REQUESTS)
    assert {type(message) for message in MESSAGES} == set(protocol._REPLIES) | set(protocol._PUSHES)


def test_two_barriers_answers_are_not_mixed_up() -> None:
    encoder, stream = ReplyEncoder(), ReplyStream()
    answers = [(b"a",), (b"b", b"c"), (b"a",)]
    for number, payloads in enumerate(answers, start=1):
        for identifier in (number, number + 100):
            assert stream.feed(encoder.encode(ms.Opened(identifier, payloads))) == [
                ms.Opened(identifier, payloads)
            ]


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1",
        b"",
        b"\x92\x01",
        {"op": 1},
        [],
        [1],
        7,
        ["a", 1],
        [1, "a"],
        [True, 1],
        [99, 1],
        [-1, 1],
        [1, 0],
        [1, -1],
        [1, 2**31],
        [1, 1, "extra"],
        [12, 1, GANG, E1],
        [12, 1, GANG, "1", "k"],
        [12, 1, b"g", E1, "k"],
        [13, 1, "text", GANG, E1, "k"],
        [13, 1, b"v", GANG, E1],
        [14, 1, GANG, E1, "k", 1.5],
        [15, 1, GANG, E1, "k"],
        [15, 1, GANG, E1, ["k", 1]],
        [9, 1, GANG, E1, 0, TOKEN, float("nan"), 0.3],
        [9, 1, GANG, E1, 0, TOKEN, float("inf"), 0.3],
        [9, 1, GANG, E1, True, TOKEN, 3.0, 0.3],
    ],
    ids=repr,
)
def test_what_is_no_request_breaks_the_stream_for_good(body: object) -> None:
    stream = RequestStream(bytes_max=1000)
    with pytest.raises(RemoteProtocolError):
        stream.feed(framed(body))
    with pytest.raises(RemoteProtocolError):
        stream.feed(encode_request(ms.Ping(1)))


def test_a_frame_over_the_limit_is_refused_by_its_length_alone() -> None:
    stream = RequestStream(bytes_max=100)
    with pytest.raises(RemoteProtocolError, match="101"):
        stream.feed(struct.pack(">I", 101))


def test_a_whole_number_of_seconds_is_a_duration_as_well() -> None:
    (request,) = RequestStream(bytes_max=100).feed(framed([9, 1, GANG, 1, 0, TOKEN, 3, 0]))
    assert request == ms.GrantLease(1, GANG, E1, R0, TOKEN, 3.0, 0.0)


def test_a_set_made_of_its_tail_is_the_same_bytes() -> None:
    for identifier in (1, 127, 128, 300, 2**31 - 1):
        for value in (b"", b"v", b"\xc4" * 9, b"w" * 250, b"x" * 600):
            frame = encode_request(ms.Set(identifier, value, GANG, E1, "key"))
            assert set_frame(identifier, value, set_tail(GANG, E1, "key")) == frame


def test_half_a_frame_waits_and_is_counted_once() -> None:
    stream = RequestStream(bytes_max=100)
    frame = encode_request(ms.Ping(1))
    assert [list(stream.feed(frame[place : place + 1])) for place in range(len(frame))] == [
        *[[]] * (len(frame) - 1),
        [ms.Ping(1)],
    ]
    assert (stream.is_partial, stream.partials_count) == (False, 1)


@pytest.mark.parametrize(
    "body",
    [
        [0, 7],
        [0, -1],
        [1, 99],
        [-1, 0],
        [1, 1],
        [1, 5, "i", "king"],
        [1, 8, "NoReason", "m", None],
        [1, 4, 7],
    ],
)
def test_a_reply_that_cannot_be_read_is_a_remote_error(body: object) -> None:
    with pytest.raises(RemoteProtocolError):
        ReplyStream().feed(framed(body))


def test_a_field_that_cannot_be_encoded_is_a_local_error_and_spoils_nothing() -> None:
    with pytest.raises(LocalProtocolError):
        encode_request(ms.Add(1, GANG, E1, "k", 2**70))
    assert list(RequestStream(bytes_max=100).feed(encode_request(ms.Ping(1)))) == [ms.Ping(1)]


@pytest.mark.parametrize("value", [0, -5, 2**63 - 1])
def test_a_client_in_a_hurry_knows_the_head_of_its_number_and_the_frame_of_its_done(value: int) -> None:
    head = number_head(7)
    assert ReplyEncoder().encode(ms.Number(7, value)) == head + value.to_bytes(8, "big", signed=True)
    assert not ReplyEncoder().encode(ms.Number(8, value)).startswith(head)
    assert ReplyEncoder().encode(ms.Done(7)) == done_frame(7)


def test_a_refusal_becomes_the_error_of_its_reason_and_says_the_floor() -> None:
    stale = error_of(ms.Refused(1, Reason.STALE_EPOCH, "gone on", 7))
    assert isinstance(stale, FencedError)
    assert (stale.details["floor"], stale.retryable) == (7, False)
    unknown = error_of(ms.Refused(1, Reason.UNKNOWN_GANG, "who?"))
    assert isinstance(unknown, RendezvousError)
    assert unknown.retryable
    for reason in Reason:
        error = error_of(ms.Refused(1, reason, "why"))
        assert isinstance(error, MeshError)
        assert error.reason is reason
