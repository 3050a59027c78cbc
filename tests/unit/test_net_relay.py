"""What a relay remembers, and the words that it understands."""

from __future__ import annotations

import hypothesis.strategies as st
import msgpack
import pytest
from hypothesis import given

from mesh.errors import RemoteProtocolError
from mesh.ids import MachineName
from mesh.net.preface import HEADER_BYTES
from mesh.net.refusals import Refusal
from mesh.net.relay_book import Pair, RelayBook, RelayLimits
from mesh.net.relay_words import (
    Accept,
    Dial,
    Incoming,
    Listen,
    decode_incoming,
    decode_request,
    encode_words,
)
from tests.net_world import RUN, machine, member

A, B, C = (MachineName(name) for name in "abc")
TICKETS = [f"{number:032x}" for number in range(10)]


def book(**limits: int) -> RelayBook:
    made = RelayBook(limits=RelayLimits(**limits))
    for name in "abc":
        assert made.open_line(machine(name)) is None
    return made


def test_a_stream_from_dialling_to_its_end() -> None:
    at = book()
    pair = at.dial(member(0, "a"), B, TICKETS[0])
    assert pair == Pair(run=RUN, dialler=A, target=B)
    assert at.accept(machine("c"), TICKETS[0]) is Refusal.UNKNOWN_TICKET
    assert at.accept(member(1, "b"), TICKETS[0]) is Refusal.UNKNOWN_TICKET
    assert at.accept(machine("b"), TICKETS[0]) is None
    assert at.accept(machine("b"), TICKETS[0]) is Refusal.UNKNOWN_TICKET
    at.count(pair, 10)
    at.count(pair, 5)
    assert at.take_usage() == {pair: 15}
    at.count(pair, 1)
    at.end(pair, TICKETS[0])
    assert at.take_usage() == {pair: 1}
    assert at.take_usage() == {}
    assert (at.tickets, at.streams.total(), at.usage) == ({}, 0, {})


def test_two_machines_for_a_run_and_any_number_for_machines_themselves() -> None:
    at = book()
    assert isinstance(at.dial(member(0, "a"), B, TICKETS[0]), Pair)
    assert isinstance(at.dial(member(1, "b"), A, TICKETS[1]), Pair)
    assert at.dial(member(2, "c"), A, TICKETS[2]) is Refusal.RELAY_MEMBERS
    assert at.dial(member(0, "a"), C, TICKETS[3]) is Refusal.RELAY_MEMBERS
    assert isinstance(at.dial(member(0, "a", run="other"), C, TICKETS[4]), Pair)
    for number, name in ((5, "a"), (6, "b")):
        assert isinstance(at.dial(machine(name), C, TICKETS[number]), Pair)
    for ticket, pair in list(at.tickets.items()):
        at.end(pair, ticket)
    assert isinstance(at.dial(member(2, "c"), A, TICKETS[7]), Pair), "the two have gone"


def test_limits_are_refused_by_name_and_a_refusal_leaves_nothing() -> None:
    at = book(streams_max=3, streams_per_machine_max=2)
    first = at.dial(machine("a"), B, TICKETS[0])
    assert isinstance(first, Pair)
    assert isinstance(at.dial(machine("a"), C, TICKETS[1]), Pair)
    assert at.dial(machine("a"), C, TICKETS[2]) is Refusal.STREAM_LIMIT
    assert isinstance(at.dial(machine("b"), C, TICKETS[3]), Pair)
    assert at.dial(machine("c"), B, TICKETS[4]) is Refusal.STREAM_LIMIT
    assert sorted(at.tickets) == [TICKETS[0], TICKETS[1], TICKETS[3]]
    at.end(first, TICKETS[0])
    assert isinstance(at.dial(machine("c"), B, TICKETS[5]), Pair)
    assert at.dial(machine("a"), MachineName("z"), TICKETS[6]) is Refusal.NOT_LISTENING


def test_bytes_that_nobody_takes_stop_new_pairs_and_forget_none() -> None:
    at = book(pairs_max=1)
    pair = at.dial(machine("a"), B, TICKETS[0])
    assert isinstance(pair, Pair)
    at.count(pair, 7)
    at.end(pair, TICKETS[0])
    assert at.dial(machine("a"), C, TICKETS[1]) is Refusal.STREAM_LIMIT
    assert isinstance(at.dial(machine("a"), B, TICKETS[1]), Pair)
    at.end(pair, TICKETS[1])
    assert at.take_usage() == {pair: 7}
    assert isinstance(at.dial(machine("a"), C, TICKETS[2]), Pair)


def test_lines_are_of_machines_and_bounded() -> None:
    at = book(lines_max=3)
    assert at.open_line(machine("a")) is None, "again"
    assert at.open_line(machine("d")) is Refusal.STREAM_LIMIT
    assert at.open_line(member(0, "a")) is Refusal.NOT_OUR_NAME
    at.close_line(A)
    assert at.dial(machine("b"), A, TICKETS[0]) is Refusal.NOT_LISTENING
    assert at.open_line(machine("d")) is None


@pytest.mark.parametrize("words", [Listen(), Dial(B), Accept(TICKETS[3])])
def test_requests_arrive_as_they_were_sent(words: Listen | Dial | Accept) -> None:
    assert decode_request(encode_words(words)[HEADER_BYTES:]) == words


def test_so_does_a_call() -> None:
    assert decode_incoming(encode_words(Incoming(TICKETS[1]))[HEADER_BYTES:]) == Incoming(TICKETS[1])


@given(
    st.binary(max_size=100)
    | st.dictionaries(
        st.sampled_from(["v", "do", "machine", "ticket"]),
        st.sampled_from([1, "listen", "dial", "accept", None, [], TICKETS[0], "a"])
        | st.text()
        | st.integers(0, 9),
    ).map(msgpack.packb)
)
def test_no_bytes_bring_out_anything_but_words_or_a_protocol_error(data: bytes) -> None:
    for decode in (decode_request, decode_incoming):
        try:
            decode(data)
        except RemoteProtocolError:
            continue
