"""The head's book of relays: who is who, which secret is good, what survives a restart."""

from __future__ import annotations

import json

import pytest

from coordinator import mesh_relays
from coordinator.mesh_relays import MeshRelays
from mesh.errors import AuthenticationError, ConflictError, NotFoundError, TransportError
from mesh.ids import MachineName
from mesh.net.authority import MACHINE_TTL_S
from mesh.reasons import Reason

NOW = 1_800_000_000.0
R = MachineName("relay-1")


def book() -> MeshRelays:
    made = MeshRelays()
    made.enter(R, "first", now=NOW)
    return made


def test_a_relay_that_is_started_again_keeps_its_name_and_gets_the_next_secret() -> None:
    relays = book()
    relays.check(R, "first")
    relays.place(R, (("10.0.0.1", 1),))
    relays.come_back(R, "first", "second", is_followed=False)
    assert relays.check(R, "second").addresses == (("10.0.0.1", 1),)
    again = MeshRelays.from_json(json.loads(json.dumps(relays.to_json())))
    assert again == relays


def test_an_answer_that_was_lost_is_asked_for_again_and_a_copied_disk_is_told_so() -> None:
    relays = book()
    relays.come_back(R, "first", "lost", is_followed=False)
    relays.come_back(R, "first", "second", is_followed=False)
    with pytest.raises(AuthenticationError):
        relays.check(R, "lost")
    relays.check(R, "second")
    for use in (
        lambda: relays.come_back(R, "first", "third", is_followed=False),
        lambda: relays.check(R, "first"),
    ):
        with pytest.raises(AuthenticationError) as caught:
            use()
        assert caught.value.reason is Reason.IDENTITY_COPIED
    relays.check(R, "second")


def test_one_that_is_there_is_not_pushed_out_by_a_copy() -> None:
    relays = book()
    with pytest.raises(ConflictError) as caught:
        relays.come_back(R, "first", "second", is_followed=True)
    assert caught.value.reason is Reason.IDENTITY_IN_USE
    relays.check(R, "first")


def test_who_has_left_is_revoked_until_no_certificate_of_it_can_be_valid() -> None:
    relays = book()
    relays.leave(R, now=NOW)
    assert (relays.revoked(), relays.present()) == ([R], {})
    with pytest.raises(NotFoundError):
        relays.leave(R, now=NOW)
    for use in (
        lambda: relays.check(R, "first"),
        lambda: relays.come_back(R, "first", "x", is_followed=False),
    ):
        with pytest.raises(AuthenticationError, match="left"):
            use()
    relays.enter(MachineName("relay-2"), "s", now=NOW + 1)
    assert relays.revoked() == [R]
    relays.enter(MachineName("relay-3"), "s", now=NOW + MACHINE_TTL_S + 1000)
    assert relays.revoked() == []


def test_nobody_else_s_secret_is_good() -> None:
    relays = book()
    for name, secret in ((R, "x"), (R, ""), (MachineName("relay-9"), "first"), (MachineName("relay-9"), "")):
        with pytest.raises(AuthenticationError):
            relays.check(name, secret)


def test_there_are_so_many_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_relays, "RELAYS_MAX", 1)
    relays = book()
    with pytest.raises(ConflictError):
        relays.enter(MachineName("relay-2"), "s", now=NOW)
    relays.leave(R, now=NOW)
    with pytest.raises(ConflictError, match="has been given"):
        relays.enter(R, "s", now=NOW)


def test_no_relay_is_forgotten_whose_certificate_could_be_valid_however_many_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mesh_relays, "GONE_MAX", 1)
    relays = book()
    relays.leave(R, now=NOW)
    with pytest.raises(TransportError, match="1 relays that have left") as refused:
        relays.enter(MachineName("relay-2"), "s", now=NOW + 60)
    assert refused.value.reason is Reason.LIMIT_EXCEEDED
    assert relays.revoked() == [R]
    relays.enter(MachineName("relay-2"), "s", now=NOW + MACHINE_TTL_S + 1000)
    assert relays.revoked() == []
