"""Whoever looks for a set of machines with a path finds one exactly where there is one, and the best."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.ids import MachineName
from mesh.net.paths import BEST_FIRST, NetworkFacts, Path, best_set, choose_path
from mesh.states import NetworkScope, TransportPolicy


@st.composite
def machines(draw: st.DrawFn) -> list[NetworkFacts]:
    addresses = st.sampled_from([None, "10.0.0.1", "fd00::1"])
    return [
        NetworkFacts(
            machine=MachineName(f"m{number}"),
            address=f"198.19.0.{number}",
            is_on_mesh=draw(st.booleans()),
            is_dialable=draw(st.booleans()),
            private_network=draw(st.sampled_from([None, "rack", "hall"])),
            private_address=draw(addresses),
            public_address=draw(addresses),
            provider=draw(st.sampled_from([None, "aws"])),
            region=draw(st.sampled_from([None, "eu"])),
        )
        for number in range(draw(st.integers(1, 6)))
    ]


@given(
    machines(),
    st.integers(1, 4),
    st.integers(0, 2),
    st.sampled_from(TransportPolicy),
    st.sampled_from(NetworkScope),
)
def test_a_set_is_found_exactly_where_there_is_one_and_none_is_better(
    everybody: list[NetworkFacts], nodes: int, held: int, policy: TransportPolicy, scope: NetworkScope
) -> None:
    beside, candidates = everybody[:held], everybody[held:]
    found = best_set(candidates, nodes=nodes, beside=beside, policy=policy, scope=scope)
    paths = [
        choose_path((*beside, *chosen), policy=policy, scope=scope)
        for chosen in combinations(candidates, nodes)
    ]
    possible = [BEST_FIRST.index(path.transport) for path in paths if isinstance(path, Path)]
    if found is None:
        assert not possible
    else:
        path = choose_path((*beside, *found), policy=policy, scope=scope)
        assert isinstance(path, Path)
        assert nodes + held == 1 or BEST_FIRST.index(path.transport) == min(possible)
        assert len(path.addresses) == held + nodes


@given(machines(), st.sampled_from(TransportPolicy), st.sampled_from(NetworkScope))
def test_all_members_come_to_the_same_answer(
    everybody: list[NetworkFacts], policy: TransportPolicy, scope: NetworkScope
) -> None:
    told = [NetworkFacts.from_payload(facts.to_payload()) for facts in everybody]
    here = choose_path(everybody, policy=policy, scope=scope)
    assert choose_path(told, policy=policy, scope=scope) == here
    turned = choose_path(everybody[::-1], policy=policy, scope=scope)
    assert type(turned) is type(here)
    if isinstance(here, Path) and isinstance(turned, Path):
        assert (turned.transport, turned.addresses[::-1]) == (here.transport, here.addresses)


GOOD = NetworkFacts(machine=MachineName("m1"), address="198.19.0.1").to_payload()
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(GOOD)), anything)
def test_what_another_member_brings_is_facts_or_refused(field: str, value: object) -> None:
    """By an error that the barrier takes for a peer's: KeyError, TypeError or ValueError."""
    try:
        facts = NetworkFacts.from_payload({**GOOD, field: value})
    except (TypeError, ValueError):
        return
    assert facts.to_payload() == {**GOOD, field: value}
    choose_path([facts, facts], policy=TransportPolicy.AUTO, scope=NetworkScope.GLOBAL)


@given(anything)
def test_what_is_no_map_is_refused(payload: object) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        NetworkFacts.from_payload(payload)  # type: ignore[arg-type]
