"""Who gets which machine: fairness, patience, replacements first, and what is taken."""

from __future__ import annotations

from dataclasses import replace

from coordinator.fleet import MachineFacts, Shape, why_waiting
from coordinator.machine_choice import (
    PATIENCE_S,
    Asked,
    WhyApart,
    choose,
    natural,
    together,
    why_not_together,
)
from mesh.ids import MachineName, RunUid
from mesh.net.paths import NetworkFacts
from mesh.states import NetworkScope, TransportPolicy


def machine(name: str, *, gpus: int = 0, is_alive: bool = True, is_cordoned: bool = False) -> MachineFacts:
    return MachineFacts(
        name=MachineName(name), address="", labels={}, gpu_type="H100" if gpus else None, gpu_count=gpus,
        is_alive=is_alive, is_cordoned=is_cordoned,
    )  # fmt: skip


def asked(uid: str, nodes: int, *, since: float = 0.0, gpus: int = 0, avoid: tuple[str, ...] = ()) -> Asked:
    shape = Shape(
        nodes=nodes, gpus_per_node=gpus, gpu_types=(), avoid=tuple(MachineName(name) for name in avoid)
    )
    return Asked(uid=RunUid(uid), reservation=1, shape=shape, since=since)


def granted(
    waiting: list[Asked],
    machines: list[MachineFacts],
    taken: dict[str, str] | None = None,
    *,
    shunned: tuple[str, ...] = (),
    now: float = 1.0,
    why_apart: WhyApart = together,
) -> dict[str, list[str]]:
    grants = choose(
        waiting,
        machines,
        {MachineName(m): RunUid(uid) for m, uid in (taken or {}).items()},
        shunned=frozenset(MachineName(name) for name in shunned),
        now=now,
        why_apart=why_apart,
    )
    return {grant.asked.uid: [m.name for m in grant.machines] for grant in grants}


THREE = [machine("m-1"), machine("m-2"), machine("m-3")]


def test_who_came_first_is_served_first_and_all_or_nothing() -> None:
    assert granted([asked("a", 2), asked("b", 2)], THREE) == {"a": ["m-1", "m-2"]}


def test_who_fits_overtakes_who_does_not() -> None:
    assert granted([asked("big", 4), asked("small", 1)], THREE) == {"small": ["m-1"]}
    assert granted([asked("big", 3), asked("small", 1)], THREE, {"m-3": "x"}) == {"small": ["m-1"]}


def test_after_its_patience_what_fits_a_big_gang_is_kept_for_it() -> None:
    now = PATIENCE_S + 1
    waiting = [asked("big", 3), asked("small", 1, since=now)]
    assert granted(waiting, THREE, {"m-3": "x"}, now=now) == {}
    assert granted(waiting, THREE, now=now) == {"big": ["m-1", "m-2", "m-3"]}


def test_what_does_not_fit_the_patient_one_is_not_kept_for_it() -> None:
    now = PATIENCE_S + 1
    machines = [machine("cpu-1"), machine("gpu-1", gpus=8), machine("gpu-2", gpus=8)]
    waiting = [asked("big", 2, gpus=8), asked("small", 1, since=now)]
    assert granted(waiting, machines, {"gpu-2": "x"}, now=now) == {"small": ["cpu-1"]}


def test_who_can_never_be_served_keeps_nothing() -> None:
    now = PATIENCE_S + 1
    assert granted([asked("huge", 9), asked("small", 1, since=now)], THREE, now=now) == {"small": ["m-1"]}


def test_a_gang_that_stands_still_for_one_rank_goes_first() -> None:
    waiting = [asked("new", 1), asked("held up", 1)]
    assert granted(waiting, THREE[1:2], {"m-1": "held up"}) == {"held up": ["m-2"]}


def test_a_machine_is_given_once_and_never_when_it_is_not_to_be_had() -> None:
    machines = [
        machine("dead", is_alive=False), machine("leaving", is_cordoned=True), machine("taken"),
        machine("shunned"), machine("old"), machine("free"),
    ]  # fmt: skip
    waiting = [asked("a", 1, avoid=("old",)), asked("b", 1, avoid=("old",))]
    assert granted(waiting, machines, {"taken": "x"}, shunned=("shunned",)) == {"a": ["free"]}


def test_accelerators_are_not_given_to_who_needs_none_while_there_are_others() -> None:
    machines = [machine("a", gpus=8), machine("b")]
    assert granted([asked("plain", 1)], machines) == {"plain": ["b"]}
    assert granted([asked("plain", 2)], machines) == {"plain": ["a", "b"]}


def test_numbers_in_names_count_as_numbers() -> None:
    names = ["local-10", "local-9", "a", "10.0.0.2", "local"]
    assert sorted(names, key=natural) == ["a", "local", "local-9", "local-10", "10.0.0.2"]


def test_a_run_that_waits_hears_who_has_what_and_what_is_coming() -> None:
    shape = asked("a", 2, avoid=("m-2",)).shape
    machines = [machine("m-1", is_alive=False), machine("m-2"), machine("m-3")]
    waiting = why_waiting(shape, machines, {"m-1": "mine", "m-3": "theirs"}, coming=["m-4"])
    assert waiting.why == (
        "Waiting for 2 machines, all at once: m-1 lost; m-2 not for this rank; m-3 in use by theirs; m-4 is coming."
    )
    assert waiting.is_possible
    assert not why_waiting(shape, machines, {}).is_possible


def test_a_machine_that_has_left_is_not_told_of_and_of_many_lost_ones_some() -> None:
    left = [machine(f"l-{number}", is_alive=False, is_cordoned=True) for number in range(5)]
    shape = asked("a", 2).shape
    assert "l-" not in why_waiting(shape, [*left, machine("m-1")], {}).why
    assert why_waiting(shape, left, {}).why.endswith("the deployment has no machines.")
    assert "l-0 lost" in why_waiting(shape, left, {"l-0": "mine"}).why, "it is not given back yet"
    lost = [machine(f"m-{number}", is_alive=False) for number in range(5)]
    assert why_waiting(shape, lost, {}).why.endswith("m-0 lost; m-1 lost; m-2 lost; 2 more lost.")


# ---- paths ------------------------------------------------------------------------------------------


def on_mesh(
    name: str, *, is_dialable: bool = True, is_alive: bool = True, region: str = "eu"
) -> MachineFacts:
    standing = NetworkFacts(
        machine=MachineName(name),
        address="198.19.0.1",
        is_on_mesh=True,
        is_dialable=is_dialable,
        region=region,
    )
    return replace(machine(name, is_alive=is_alive), network=standing)


def wanting(nodes: int, *beside: str, policy: TransportPolicy = TransportPolicy.DIRECT) -> Asked:
    shape = Shape(
        nodes=nodes,
        gpus_per_node=0,
        gpu_types=(),
        beside=tuple(MachineName(name) for name in beside),
        policy=policy,
    )
    return Asked(uid=RunUid("run"), reservation=1, shape=shape, since=0.0)


HIDDEN = [on_mesh("m-1", is_dialable=False), on_mesh("m-2"), on_mesh("m-3")]


def test_machines_without_an_allowed_path_are_never_granted_together() -> None:
    assert granted([wanting(2)], HIDDEN) == {"run": ["m-2", "m-3"]}
    assert granted([wanting(3)], HIDDEN) == {}
    assert granted([wanting(2)], HIDDEN[:2]) == {}
    assert granted([wanting(2, policy=TransportPolicy.AUTO)], HIDDEN[:2]) == {"run": ["m-1", "m-2"]}
    places = [on_mesh("m-1"), on_mesh("m-2", region="us"), on_mesh("m-3")]
    assert granted([wanting(2)], places) == {"run": ["m-1", "m-3"]}
    assert granted(
        [replace(wanting(3), shape=replace(wanting(3).shape, scope=NetworkScope.GLOBAL))], places
    ) == {"run": ["m-1", "m-2", "m-3"]}


def test_a_replacement_has_a_path_to_what_the_run_holds() -> None:
    assert granted([wanting(1, "m-2")], HIDDEN, {"m-2": "run"}) == {"run": ["m-3"]}
    hidden = [*HIDDEN[:2]]
    assert granted([wanting(1, "m-2")], hidden, {"m-2": "run"}) == {}
    lost = [hidden[0], on_mesh("m-2", is_alive=False)]
    assert granted([wanting(1, "m-2")], lost, {"m-2": "run"}) == {"run": ["m-1"]}
    assert granted([wanting(1, "m-2")], hidden, {"m-2": "another"}) == {"run": ["m-1"]}


def test_a_run_that_waits_for_a_path_says_so_and_keeps_nothing_from_others() -> None:
    shape = wanting(2).shape
    waiting = why_waiting(shape, HIDDEN[:2], {})
    assert not waiting.is_possible
    assert waiting.why == (
        "Waiting for 2 machines, all at once: m-1 free; m-2 free. No allowed path joins so many of those that are "
        "free; m-1, m-2: they share no private network that is named; m-1 and m-2 joined without a public address; "
        "m-1 cannot be dialled by the others; transport Direct admits no relay, Auto does."
    )
    busy = why_waiting(shape, HIDDEN, {"m-3": "another"})
    assert busy.is_possible
    assert "No allowed path" in busy.why
    now = PATIENCE_S + 1
    assert granted([wanting(2), asked("small", 1, since=now)], HIDDEN[:2], now=now) == {"small": ["m-1"]}


# ---- providers that are apart -------------------------------------------------------------------------


def apart(a: str, b: str) -> str | None:
    """`a` and `b` never reached each other."""
    return "a and b are apart." if {a, b} == {"a", "b"} else None


def of(name: str) -> MachineFacts:
    return replace(machine(name), labels={"provider": name[0]})


MIXED = [of(name) for name in ("a-1", "b-1", "b-2", "c-1", "c-2")]


def anywhere(uid: str, nodes: int) -> Asked:
    one = asked(uid, nodes)
    return replace(one, shape=replace(one.shape, scope=NetworkScope.GLOBAL))


def test_machines_that_never_reached_each_other_are_not_given_to_one_run() -> None:
    assert granted([anywhere("x", 2)], MIXED[:3], why_apart=apart) == {"x": ["b-1", "b-2"]}
    assert granted([anywhere("x", 3)], MIXED[:4], why_apart=apart) == {"x": ["b-1", "b-2", "c-1"]}
    assert granted([anywhere("x", 2)], [MIXED[0], MIXED[1]], why_apart=apart) == {}
    assert granted([anywhere("x", 5)], MIXED, why_apart=apart) == {}
    assert granted([anywhere("x", 3), anywhere("y", 2)], MIXED, why_apart=apart) == {
        "x": ["a-1", "c-1", "c-2"],
        "y": ["b-1", "b-2"],
    }


def test_a_replacement_fits_to_the_machines_that_the_run_has() -> None:
    one = replace(wanting(1, "b-1"), shape=replace(wanting(1, "b-1").shape, scope=NetworkScope.GLOBAL))
    assert granted([one], MIXED, {"b-1": "run"}, why_apart=apart) == {"run": ["b-2"]}
    assert granted([one], MIXED[:2], {"b-1": "run"}, why_apart=apart) == {}
    assert granted([one], MIXED[:2], {"b-1": "another"}, why_apart=apart) == {"run": ["a-1"]}


def test_why_it_waits_says_which_providers_are_not_offered_together() -> None:
    shape = anywhere("x", 2).shape
    reasons = why_not_together(shape, MIXED, {"b-2"}, why_apart=apart)
    assert reasons == ["a and b are apart."]
    waiting = why_waiting(shape, MIXED[:2], {}, apart=reasons)
    assert waiting.why.endswith("a-1 free; b-1 free. Not offered together: a and b are apart.")
    assert why_not_together(shape, MIXED[1:], {}, why_apart=apart) == []
    assert why_not_together(shape, MIXED, {}, why_apart=together) == []
