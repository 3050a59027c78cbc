"""Which path a set of machines has, and in which words it is told that there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mesh.ids import MachineName
from mesh.net.paths import UNNAMED_PROVIDER, NetworkFacts, NoPath, Path, best_set, choose_path, facts_of
from mesh.states import NetworkScope, Transport, TransportPolicy

DIRECT, AUTO = TransportPolicy.DIRECT, TransportPolicy.AUTO
COLOCATED, REGIONAL, GLOBAL = NetworkScope.COLOCATED, NetworkScope.REGIONAL, NetworkScope.GLOBAL


def on_mesh(number: int, **facts: object) -> NetworkFacts:
    plain = NetworkFacts(
        machine=MachineName(f"m{number}"),
        address=f"198.19.0.{number}",
        is_on_mesh=True,
        is_dialable=True,
    )
    return replace(plain, **facts)  # type: ignore[arg-type]


def in_private(number: int, network: str = "rack", address: str | None = None) -> NetworkFacts:
    return on_mesh(number, private_network=network, private_address=address or f"10.0.0.{number}")


def by_address(number: int) -> NetworkFacts:
    return NetworkFacts(machine=MachineName(f"m{number}"), address=f"10.0.0.{number}")


def path(*machines: NetworkFacts, policy: TransportPolicy = DIRECT) -> Path:
    found = choose_path(machines, policy=policy, scope=GLOBAL)
    assert isinstance(found, Path), found
    return found


def why(*machines: NetworkFacts, policy: TransportPolicy = DIRECT, scope: NetworkScope = GLOBAL) -> str:
    found = choose_path(machines, policy=policy, scope=scope)
    assert isinstance(found, NoPath), found
    return found.why


def test_machines_on_one_trusted_network_reach_each_other_as_ever() -> None:
    assert path(by_address(1), by_address(2)) == Path(
        transport=Transport.PRIVATE, addresses=("10.0.0.1", "10.0.0.2")
    )
    assert "m1 joined by --address and not by the mesh" in why(by_address(1), on_mesh(2), policy=AUTO)


def test_the_best_path_that_all_are_fit_for() -> None:
    assert path(in_private(1), in_private(2)) == Path(
        transport=Transport.PRIVATE, addresses=("10.0.0.1", "10.0.0.2")
    )
    mine, theirs = in_private(1), in_private(2, "another")
    assert path(mine, theirs) == Path(transport=Transport.DIRECT, addresses=("198.19.0.1", "198.19.0.2"))
    mine, theirs = (replace(m, public_address=f"203.0.113.{i}") for i, m in enumerate((mine, theirs)))
    assert path(mine, theirs) == Path(transport=Transport.PUBLIC, addresses=("203.0.113.0", "203.0.113.1"))
    assert path(mine, replace(theirs, public_address=None)).transport is Transport.DIRECT


def test_addresses_of_two_families_reach_nobody() -> None:
    assert path(in_private(1), in_private(2, address="fd00::2")).transport is Transport.DIRECT
    ends = (on_mesh(1, public_address="203.0.113.1"), on_mesh(2, public_address="2001:db8::2"))
    assert path(*ends).transport is Transport.DIRECT


def test_a_relay_only_where_the_run_admits_it_and_for_two() -> None:
    inside = on_mesh(2, is_dialable=False)
    assert path(on_mesh(1), inside, policy=AUTO).transport is Transport.RELAYED
    assert path(on_mesh(1), on_mesh(2), policy=AUTO).transport is Transport.DIRECT
    assert why(on_mesh(1), inside) == (
        "they share no private network that is named; m1 and m2 joined without a public address; "
        "m2 cannot be dialled by the others; transport Direct admits no relay, Auto does"
    )
    assert why(on_mesh(1), inside, on_mesh(3), policy=AUTO).endswith(
        "m2 cannot be dialled by the others; a relayed gang has at most 2 members"
    )


def test_one_machine_alone_needs_nobody_to_dial_it() -> None:
    assert path(on_mesh(1, is_dialable=False)).transport is Transport.DIRECT
    assert path(by_address(1)).transport is Transport.PRIVATE


def test_where_members_may_be() -> None:
    here = on_mesh(1, provider="aws", region="eu")
    there = on_mesh(2, provider="gcp", region="eu")
    far = on_mesh(3, provider="gcp", region="us")
    assert isinstance(choose_path((here, there), policy=DIRECT, scope=REGIONAL), Path)
    assert why(here, there, scope=COLOCATED) == (
        "network Colocated wants one provider and region, and m1 is with aws in eu, m2 is with gcp in eu"
        " (--network global takes them together)"
    )
    assert why(there, far, scope=REGIONAL) == (
        "network Regional wants one region, and m2 is in eu, m3 is in us (--network global takes them together)"
    )
    assert "m4 is without a label for its provider and region (--network global takes them together; " in why(
        here, on_mesh(4), scope=COLOCATED
    )
    unnamed = on_mesh(5, provider=UNNAMED_PROVIDER, region="eu")
    assert "m5 is in eu and without a label for its provider (" in why(here, unnamed, scope=COLOCATED)
    lost = on_mesh(6, provider="aws")
    assert "m6 is with aws and without a label for its region (" in why(here, lost, scope=COLOCATED)
    assert "m6 is without a label for its region (" in why(here, lost, scope=REGIONAL)
    assert isinstance(choose_path((on_mesh(4), on_mesh(5)), policy=DIRECT, scope=COLOCATED), Path)


def test_the_best_path_decides_who_is_taken_then_the_order() -> None:
    loose = [on_mesh(1), on_mesh(2)]
    racked = [in_private(3), in_private(4), in_private(5)]

    def names(nodes: int, *beside: NetworkFacts, policy: TransportPolicy = DIRECT) -> list[str] | None:
        found = best_set([*loose, *racked], nodes=nodes, beside=beside, policy=policy, scope=GLOBAL)
        return None if found is None else [facts.machine for facts in found]

    assert names(1) == ["m1"]
    assert names(2) == ["m3", "m4"]
    assert names(3) == ["m3", "m4", "m5"]
    assert names(4) == ["m1", "m2", "m3", "m4"]
    assert names(6) is None
    assert names(1, on_mesh(9)) == ["m1"]
    assert names(1, in_private(9)) == ["m3"]
    assert names(1, on_mesh(9, is_dialable=False)) is None
    assert names(1, on_mesh(9, is_dialable=False), policy=AUTO) == ["m1"]
    assert names(2, on_mesh(9, is_dialable=False), policy=AUTO) is None


def test_a_machine_as_its_labels_describe_it() -> None:
    labels = {
        "gangmesh.transport": "mesh",
        "gangmesh.dialable": "0",
        "gangmesh.network": "rack",
        "gangmesh.private-address": "10.0.0.7",
        "gangmesh.public-address": "203.0.113.7",
        "provider": "aws",
        "region": "eu",
    }
    facts = facts_of(MachineName("m7"), "198.19.0.7", labels)
    assert facts == NetworkFacts(
        machine=MachineName("m7"), address="198.19.0.7", is_on_mesh=True, is_dialable=False,
        private_network="rack", private_address="10.0.0.7", public_address="203.0.113.7",
        provider="aws", region="eu",
    )  # fmt: skip
    assert NetworkFacts.from_payload(facts.to_payload()) == facts
    assert facts_of(MachineName("m7"), "10.0.0.7", {}) == by_address(7)


@pytest.mark.parametrize("field", ["address", "private_address", "public_address"])
def test_an_address_that_is_none_is_refused_where_it_is_read(field: str) -> None:
    payload = {**in_private(1).to_payload(), field: "10.0.0.1; drop"}
    with pytest.raises(ValueError, match="does not appear to be"):
        NetworkFacts.from_payload(payload)
