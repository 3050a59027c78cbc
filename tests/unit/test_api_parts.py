"""Selectors, query parameters, retries, server-sent events and errors: the pure parts of the API and its client."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

import pytest
from aiohttp.test_utils import make_mocked_request

from coordinator.api.endpoints import Parameter, read_query
from coordinator.api.failures import status_of
from coordinator.api.retry import ask
from mesh.errors import MeshError, MeshTimeoutError, NotFoundError, SpecError, TransportError
from mesh.http_transport import Backoff, checked_url
from mesh.selectors import parse_selector
from mesh.sse import EventParser

PARAMETERS = (
    Parameter(name="tail", kind="integer", text="", smallest=0, largest=10),
    Parameter(name="follow", kind="boolean", text=""),
    Parameter(name="after", kind="integer", text="", smallest=0),
    Parameter(name="wait", kind="number", text="", smallest=0, largest=30),
)


@pytest.mark.parametrize(
    ("text", "labels", "selected"),
    [
        ("", {}, True),
        ("a=1", {"a": "1"}, True),
        ("a==1", {"a": "1"}, True),
        ("a=1", {"a": "2"}, False),
        ("a=1", {}, False),
        ("a!=1", {}, True),
        ("a!=1", {"a": "1"}, False),
        ("a=1, b!=2", {"a": "1", "b": "3"}, True),
        ("a=", {"a": ""}, True),
        ("nodus.dev/rank=1", {"nodus.dev/rank": "1"}, True),
    ],
)
def test_a_selector_selects_what_all_of_its_conditions_hold_for(
    text: str, labels: dict, selected: bool
) -> None:
    assert parse_selector(text).selects(labels) is selected


@pytest.mark.parametrize("text", ["a", "=1", "a=1,,b=2", "a=b=c", "a>1", ","])
def test_what_is_no_condition_is_refused_by_name(text: str) -> None:
    with pytest.raises(SpecError, match="is no condition"):
        parse_selector(text)


def test_query_parameters_are_checked_and_default_to_none() -> None:
    request = make_mocked_request("GET", "/?tail=3")
    assert read_query(request, PARAMETERS) == {"tail": 3, "follow": None, "after": None, "wait": None}


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("tail=x", "takes a whole number from 0 to 10"),
        ("tail=11", "takes a whole number from 0 to 10"),
        ("follow=maybe", "takes true or false"),
        ("after=9223372036854775808", "takes a whole number from 0"),
        ("wait=nan", "takes a number from 0 to 30"),
        ("tial=3", "Did you mean tail"),
        ("tail=1&tail=2", "more than once"),
    ],
)
def test_an_impossible_query_says_what_is_possible(query: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_query(make_mocked_request("GET", f"/?{query}"), PARAMETERS)
    assert message in str(caught.value)


def test_every_error_of_the_tree_has_a_status_of_a_failure() -> None:
    assert all(400 <= status_of(error("x")) < 600 for error in MeshError.tree())
    assert status_of(NotFoundError("x")) == HTTPStatus.NOT_FOUND


async def test_a_coordinator_that_comes_back_is_asked_again() -> None:
    answers: list[Exception | str] = [TransportError("away"), MeshTimeoutError("slow"), "here"]

    async def call() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert await ask(call) == "here"


async def test_a_coordinator_that_stays_away_is_given_up_and_other_errors_are_not_repeated() -> None:
    calls = 0

    async def away() -> None:
        nonlocal calls
        calls += 1
        raise TransportError("away")

    async def wrong() -> None:
        nonlocal calls
        calls += 1
        raise NotFoundError("nobody")

    with pytest.raises(TransportError):
        await ask(away, limit_s=0.2)
    assert calls > 1
    calls = 0
    with pytest.raises(NotFoundError):
        await ask(wrong)
    assert calls == 1


async def test_a_call_that_hangs_is_given_up_too() -> None:
    with pytest.raises(TransportError, match=r"within 0\.05 s"):
        await ask(asyncio.Event().wait, limit_s=0.05)


async def test_patience_starts_afresh_with_every_success() -> None:
    backoff = Backoff(patience_s=0.15)
    for _ in range(3):
        await backoff.pause(TransportError("x"))
        backoff.succeeded()
    await backoff.pause(TransportError("x"))
    with pytest.raises(TransportError):
        await backoff.pause(TransportError("x"))


def test_server_sent_events_are_read_as_the_standard_says() -> None:
    parser = EventParser()
    text = b"retry: 1000\n\n: still here\n\nid: 7\ndata: a\ndata: b\n\nevent: end\r\ndata:{}\r\n\r\n"
    events = [event for line in text.split(b"\n") if (event := parser.feed(line))]
    assert [(e.event, e.data, e.id) for e in events] == [("message", "a\nb", "7"), ("end", "{}", "7")]


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("http://h:1/", "http://h:1"),
        ("127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("https://h/mesh/", "https://h/mesh"),
    ],
)
def test_an_address_is_completed(given: str, address: str) -> None:
    assert checked_url(given) == address


@pytest.mark.parametrize("given", ["", "http://", "ftp://h:1", "http://h:port", "http://[", "ray://h:1"])
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(SpecError):
        checked_url(given)
