"""A keeper's line to a store on its own machine: what can be seen of a store that does not read."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from agents.core import lease_events as le
from agents.keeper_line import StoreLine
from mesh.store.local import local_name

LIMIT_S = 10.0


class Store:
    """Somebody who listens at the store's short way, and reads only when told."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(local_name("127.0.0.1", self.port))
        self._listener.listen()
        self._listener.settimeout(LIMIT_S)

    def read(self) -> bytes:
        connection, _ = self._listener.accept()
        with connection:
            return connection.recv(4096)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store()
    yield store
    store.close()


def the_still(events: list[le.LeaseEvent]) -> le.StoreStoodStill:
    (event,) = events
    assert isinstance(event, le.StoreStoodStill)
    return event


def test_what_lies_unread_is_seen_from_when_it_was_sent_until_it_is_read(store: Store) -> None:
    line = StoreLine(("127.0.0.1", store.port), "secret", now=time.monotonic)
    before = time.monotonic()
    assert line.connect() == []
    after = time.monotonic()
    first = the_still(line.happened())
    assert before <= first.since <= after + 0.001
    second = the_still(line.happened())
    assert second.since == pytest.approx(first.since, abs=0.001)
    assert second.seen_at >= first.seen_at
    assert b"secret" in store.read()
    assert [type(event) for event in line.happened()] == [le.ConnectionLost], "read, and closed"
    line.close()


def test_time_in_which_the_machine_was_suspended_is_no_time_in_which_the_store_stood(store: Store) -> None:
    """The store's own clock stood as well, so that it will not notice."""
    asleep_s = 0.0
    line = StoreLine(("127.0.0.1", store.port), "secret", now=lambda: time.monotonic() + asleep_s)
    line.connect()
    asleep_s = 3600.0
    event = the_still(line.happened())
    assert event.seen_at > 3600.0
    assert event.seen_at - event.since < 60.0
    line.close()


def test_nobody_there_is_a_lost_connection_and_no_news_of_a_store_never_seen() -> None:
    store = Store()
    store.close()
    line = StoreLine(("127.0.0.1", store.port), "secret", now=time.monotonic)
    events = line.connect()
    deadline = time.monotonic() + LIMIT_S
    while not events and time.monotonic() < deadline:
        events = line.happened()
    assert [type(event) for event in events] == [le.ConnectionLost]
    assert "refused" in str(events[0])
