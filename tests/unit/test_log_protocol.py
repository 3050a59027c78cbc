"""The frames between shipper and sink: what can be said, and that nothing else is believed."""

from __future__ import annotations

import msgpack
import pytest

from coordinator.logs.rate import TokenBucket
from mesh.errors import NotFoundError, RemoteProtocolError
from mesh.log_protocol import (
    CHUNK_BYTES_MAX,
    WINDOW_BYTES_MAX,
    Ack,
    Data,
    End,
    Ended,
    FromShipper,
    FromSink,
    Hello,
    Refused,
    SendWindow,
    Welcome,
    from_shipper,
    from_sink,
    to_frame,
)
from tests.fakes.log_stream import incarnation


@pytest.mark.parametrize(
    "message",
    [Hello(secret="s", incarnation=incarnation()), Data(offset=7, records=b"r"), End(offset=9)],
    ids=["hello", "data", "end"],
)
def test_what_a_shipper_says_arrives_as_it_was(message: FromShipper) -> None:
    assert from_shipper(msgpack.unpackb(msgpack.packb(to_frame(message)))) == message


@pytest.mark.parametrize(
    "message", [Welcome(offset=7), Ack(offset=9), Ended()], ids=["welcome", "ack", "ended"]
)
def test_what_a_sink_says_arrives_as_it_was(message: FromSink) -> None:
    assert from_sink(msgpack.unpackb(msgpack.packb(to_frame(message)))) == message


def test_a_refusal_keeps_its_error() -> None:
    refusal = from_sink(to_frame(Refused(error=NotFoundError("No such run."), final=True)))
    assert isinstance(refusal, Refused)
    assert refusal.final
    assert isinstance(refusal.error, NotFoundError)


@pytest.mark.parametrize(
    "frame",
    [
        None,
        [],
        ["hello", 2, "s", str(incarnation())],
        ["hello", 1, "s", "../../etc"],
        ["hello", 1, b"s", str(incarnation())],
        ["data", -1, b"x"],
        ["data", True, b"x"],
        ["data", 0, b""],
        ["data", 0, "text"],
        ["data", 2**63, b"x"],
        ["data", 0, b"x" * (CHUNK_BYTES_MAX + 1)],
        ["end", 1.5],
        ["ack", 1],
    ],
)
def test_a_sink_believes_nothing_else(frame: object) -> None:
    with pytest.raises(RemoteProtocolError):
        from_shipper(frame)


@pytest.mark.parametrize("frame", [None, ["ack", -1], ["welcome"], ["refused", "x", True], ["data", 0, b"x"]])
def test_a_shipper_believes_nothing_else(frame: object) -> None:
    with pytest.raises(RemoteProtocolError):
        from_sink(frame)


def test_the_window_closes_and_opens_with_acknowledgements() -> None:
    window = SendWindow(offset=100)
    window.on_sent(100 + WINDOW_BYTES_MAX)
    assert window.room == 0
    window.on_ack(200)
    assert window.room == 100


@pytest.mark.parametrize("offset", [99, 301])
def test_an_acknowledgement_of_what_was_not_sent_is_refused_and_changes_nothing(offset: int) -> None:
    window = SendWindow(offset=100)
    window.on_sent(300)
    with pytest.raises(RemoteProtocolError):
        window.on_ack(offset)
    assert (window.acked, window.sent) == (100, 300)


def test_a_secret_is_not_shown() -> None:
    assert "hush" not in repr(Hello(secret="hush", incarnation=incarnation()))


def test_a_burst_goes_through_at_once_and_the_rest_at_the_rate() -> None:
    bucket = TokenBucket(rate_per_s=100, burst=1000)
    assert bucket.take(1000, now=0.0) == 0.0
    assert bucket.take(50, now=0.0) == pytest.approx(0.5)
    assert bucket.take(50, now=1.0) == 0.0


def test_an_idle_rank_saves_up_no_more_than_the_burst() -> None:
    bucket = TokenBucket(rate_per_s=100, burst=1000)
    bucket.take(0, now=0.0)
    assert bucket.take(1100, now=1e6) == pytest.approx(1.0)


def test_a_clock_that_goes_back_gives_nothing_away() -> None:
    bucket = TokenBucket(rate_per_s=100, burst=1000)
    bucket.take(1000, now=10.0)
    assert bucket.take(100, now=5.0) == pytest.approx(1.0)
