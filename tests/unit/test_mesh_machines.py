"""The book of the mesh's machines: names, numbers, secrets, who comes back, and who only says so."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from coordinator import mesh_machines
from coordinator.mesh_authority import MACHINE_CERTIFICATE_S
from coordinator.mesh_machines import MeshMachines, checked_hint
from mesh.errors import AuthenticationError, ConflictError, SpecError, TransportError
from mesh.ids import MachineName
from mesh.reasons import Reason

NOW = 1_800_000_000.0
A, B, C, D = (MachineName(f"machine-{i}") for i in range(1, 5))


def book(*names: MachineName) -> MeshMachines:
    """These have joined, each with its name as secret."""
    made = MeshMachines()
    for name in names:
        made.enter(name, name, now=NOW)
    return made


def test_numbers_are_of_those_that_are_there_and_come_back_last() -> None:
    made = book(A, B)
    assert [m.number for m in made.machines.values()] == [1, 2]
    made.leave(A, now=NOW)
    assert made.enter(C, "c", now=NOW).number == 3
    made.last_number = mesh_machines.NUMBER_MAX
    assert made.enter(D, "d", now=NOW).number == 1  # A's, which is gone; B's is not


def test_a_name_is_given_once() -> None:
    made = book(A)
    made.leave(A, now=NOW)
    with pytest.raises(ConflictError):
        made.enter(A, "again", now=NOW)


def test_only_who_has_the_secret_is_the_machine() -> None:
    made = book(A)
    assert made.check(A, A).name == A
    for name, secret in ((A, "wrong"), (A, ""), (B, B), (MachineName(""), "")):
        with pytest.raises(AuthenticationError):
            made.check(name, secret)
    assert A not in json.dumps(made.to_json()["machines"][0]["secret_hash"])


def test_a_machine_that_comes_back_is_another_and_the_old_one_is_revoked() -> None:
    made = book(A)
    assert made.may_come_back(A, A, is_followed=False).name == A
    made.enter(B, "b", now=NOW)
    made.succeed(A, B, now=NOW)
    assert list(made.present()) == [B]
    assert made.revoked() == [A]


def test_an_old_secret_is_good_again_as_long_as_nobody_has_used_the_next_one() -> None:
    """The answer was lost on its way, or the machine died before it wrote it down."""
    made = book(A, B)
    made.succeed(A, B, now=NOW)
    assert made.may_come_back(A, A, is_followed=False).name == A
    made.enter(C, "c", now=NOW)
    made.succeed(A, C, now=NOW)
    assert list(made.present()) == [C]
    assert made.revoked() == [A, B]


def test_two_copies_of_one_disk_do_not_both_come_back() -> None:
    made = book(A, B)
    made.succeed(A, B, now=NOW)
    made.check(B, B)  # the first copy speaks
    with pytest.raises(AuthenticationError, match="machine-2") as copied:
        made.may_come_back(A, A, is_followed=False)
    assert copied.value.reason is Reason.IDENTITY_COPIED
    with pytest.raises(AuthenticationError, match="machine-2"):
        made.check(A, A)


def test_a_copy_does_not_take_the_place_of_a_machine_that_is_there() -> None:
    made = book(A)
    with pytest.raises(ConflictError) as refused:
        made.may_come_back(A, A, is_followed=True)
    assert refused.value.reason is Reason.IDENTITY_IN_USE
    made.leave(A, now=NOW)  # given up while its poll is still open
    assert made.may_come_back(A, A, is_followed=True).name == A


def test_who_has_left_needs_a_token() -> None:
    made = book(A)
    made.leave(A, now=NOW, for_good=True)
    with pytest.raises(AuthenticationError, match="left"):
        made.may_come_back(A, A, is_followed=False)
    with pytest.raises(AuthenticationError):
        made.check(A, A)


def test_every_change_that_others_see_raises_the_version() -> None:
    made = book(A)
    version = made.version
    made.place(A, (("10.0.0.1", 8471),))
    assert made.version == version + 1
    made.place(A, (("10.0.0.1", 8471),))
    made.check(A, A)
    assert made.version == version + 1
    assert made.leave(A, now=NOW)
    assert not made.leave(A, now=NOW)
    assert made.version == version + 2
    made.place(A, (("10.0.0.2", 8471),))
    assert made.machines[A].gateway == ()


def test_the_book_comes_back_from_disk_as_it_was() -> None:
    made = book(A, B)
    made.place(B, (("10.0.0.1", 8471), ("fd00::1", 8471)))
    made.leave(A, now=NOW)
    again = MeshMachines.from_json(json.loads(json.dumps(made.to_json())))
    assert again == made


@pytest.mark.parametrize("words", [{}, {"machines": [{}], "last_number": 0, "version": 0}, {"machines": 3}])
def test_what_is_no_book_is_not_taken_for_one(words: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        MeshMachines.from_json(words)


def test_it_is_bounded_and_forgets_whom_nobody_could_believe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_machines, "MACHINES_MAX", 2)
    made = book(A, B)
    with pytest.raises(ConflictError, match="takes no more"):
        made.enter(C, "c", now=NOW)
    made.leave(A, now=NOW)
    made.enter(C, "c", now=NOW + MACHINE_CERTIFICATE_S)
    assert A in made.machines  # its certificate could be valid by a clock that is behind
    made.leave(B, now=NOW + MACHINE_CERTIFICATE_S)
    made.enter(D, "d", now=NOW + MACHINE_CERTIFICATE_S + 1000)
    assert A not in made.machines


def test_nobody_is_forgotten_whose_certificate_could_be_valid_however_many_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stolen machine was believed again once enough others had gone after it."""
    monkeypatch.setattr(mesh_machines, "GONE_MAX", 1)
    made = book(A, B, C)
    assert made.leave(A, now=NOW)
    assert made.leave(B, now=NOW)  # whoever has to go goes
    with pytest.raises(TransportError, match="2 machines that have gone") as refused:
        made.enter(D, "d", now=NOW + 60)
    assert refused.value.reason is Reason.LIMIT_EXCEEDED and refused.value.retryable
    assert made.revoked() == [A, B]
    made.enter(D, "d", now=NOW + MACHINE_CERTIFICATE_S + 1000)
    assert set(made.machines) == {C, D}


def test_who_comes_back_is_not_refused_for_how_many_have_gone_or_for_its_own_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A head that begins again makes one gone name of every machine: a few times of that, and nobody came back."""
    monkeypatch.setattr(mesh_machines, "GONE_MAX", 1)
    monkeypatch.setattr(mesh_machines, "GONE_BY_RETURNS_MAX", 2)
    monkeypatch.setattr(mesh_machines, "MACHINES_MAX", 2)
    made = book(A, B)
    made.enter(C, "c", now=NOW, before=A)
    made.succeed(A, C, now=NOW)
    with pytest.raises(TransportError, match="1 machines that have gone"):
        made.enter(D, "d", now=NOW)
    made.enter(D, "d", now=NOW, before=B)
    made.succeed(B, D, now=NOW)
    with pytest.raises(TransportError, match="2 machines that have gone"):
        made.enter(MachineName("machine-5"), "e", now=NOW, before=C)


def came_back(made: MeshMachines, name: MachineName, *, now: float) -> MachineName:
    """The name of the machine that has come back as it."""
    made.check_pace(name, now=now)
    new = MachineName(f"machine-{len(made.machines) + 1}")
    made.enter(new, new, now=now)
    made.succeed(name, new, now=now)
    return new


def test_who_comes_back_again_and_again_has_to_wait_under_whatever_name_and_others_do_not() -> None:
    """Each time is one more name that every machine has to hear of."""
    made = book(A, B)
    name = A
    for _ in range(mesh_machines.RETURNS_MAX - 1):
        name = came_back(made, name, now=NOW + 1)
    for again in (made, MeshMachines.from_json(json.loads(json.dumps(made.to_json())))):
        with pytest.raises(TransportError, match="again in 299 s") as refused:
            again.check_pace(name, now=NOW + 1)
        assert refused.value.reason is Reason.LIMIT_EXCEEDED and refused.value.retryable
        again.check_pace(B, now=NOW + 1)
    later = NOW + mesh_machines.RETURN_EVERY_S
    name = came_back(made, name, now=later)
    with pytest.raises(TransportError):
        made.check_pace(name, now=later + 60)
    assert {made.machines[name].origin for name in made.revoked()} == {A}
    made.check_pace(name, now=later - 7200)  # the clock was set back


def test_a_successor_that_was_forgotten_is_no_fault() -> None:
    made = book(A, B)
    made.succeed(A, B, now=NOW)
    del made.machines[B]
    assert made.may_come_back(A, A, is_followed=False).name == A
    with pytest.raises(AuthenticationError):
        made.check(A, A)


@pytest.mark.parametrize("hint", ["Ä", "UPPER", "-x", "x-", "a" * 41, "a b", 7, ["x"]])
def test_what_a_name_cannot_begin_with(hint: Any) -> None:
    with pytest.raises(SpecError):
        checked_hint(hint)


def test_a_hint_is_what_the_name_begins_with() -> None:
    assert [checked_hint(h) for h in (None, "", "gpu-box", "a")] == ["machine", "machine", "gpu-box", "a"]


def test_who_is_gone_is_remembered_as_long_as_its_certificate_is_good() -> None:
    assert MeshMachines().certificate_s >= MACHINE_CERTIFICATE_S


def test_of_two_copies_that_come_back_at_the_same_moment_one_stays_out() -> None:
    """The first got its answer and was not heard of when the second took its place: its new secret is no way in."""
    made = MeshMachines()
    made.enter(A, "s0", now=NOW)
    made.check(A, "s0")
    made.leave(A, now=NOW)
    first, second, third = (MachineName(f"machine-{n}") for n in (7, 8, 9))
    for name, secret in ((first, "s1"), (second, "s2")):
        made.may_come_back(A, "s0", is_followed=False)
        made.enter(name, secret, now=NOW)
        made.succeed(A, name, now=NOW)
    made.check(second, "s2")
    with pytest.raises(AuthenticationError) as raised:
        made.may_come_back(first, "s1", is_followed=False)
    assert raised.value.reason is Reason.IDENTITY_COPIED
    with pytest.raises(AuthenticationError) as raised:
        made.check(first, "s1")
    assert raised.value.reason is Reason.IDENTITY_COPIED

    # While nobody has heard of the second either, the first may still be the one: then the second is out.
    made.machines[second] = replace(made.machines[second], was_heard=False)
    made.may_come_back(first, "s1", is_followed=False)
    made.enter(third, "s3", now=NOW)
    made.succeed(first, third, now=NOW)
    made.check(third, "s3")
    for name, secret in ((A, "s0"), (second, "s2")):
        with pytest.raises(AuthenticationError):
            made.may_come_back(name, secret, is_followed=False)
