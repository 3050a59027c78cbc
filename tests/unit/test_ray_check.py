"""Where the ends of a network check listen: at real ports of addresses that all have in common, or behind gateways."""

from __future__ import annotations

from typing import Any

from agents.mesh_ports import CHECK_PORTS
from coordinator.fleet import MachineFacts
from coordinator.ray_check import spots_of
from mesh.ids import MachineName
from mesh.states import Transport


def machine(number: int, **labels: str) -> tuple[MachineFacts, dict[str, Any]]:
    from mesh.net.paths import facts_of

    name, address = MachineName(f"m{number}"), f"198.19.0.{number}"
    ours = {f"gangmesh.{key.replace('_', '-')}": value for key, value in labels.items()}
    facts = MachineFacts(
        name=name, address=address, labels={"provider": "p"}, gpu_type=None, gpu_count=0, is_alive=True,
        network=facts_of(name, address, ours),
    )  # fmt: skip
    return facts, {"NodeID": f"n{number}", "NodeManagerAddress": f"198.18.0.{number}"}


def test_machines_of_one_trusted_network_are_met_at_their_members_addresses_and_real_ports() -> None:
    spots = spots_of({0: machine(1), 3: machine(2)})
    assert {rank: (spot.address, spot.path, spot.ports) for rank, spot in spots.items()} == {
        0: ("198.19.0.1", Transport.PRIVATE, None),
        3: ("198.19.0.2", Transport.PRIVATE, None),
    }
    assert (spots[3].name, spots[3].node_id, spots[3].place) == ("m2", "n2", "p/")


def test_machines_of_the_mesh_are_met_behind_their_gateways_dialled_or_relayed() -> None:
    spots = spots_of(
        {0: machine(1, transport="mesh", dialable="1"), 1: machine(2, transport="mesh", dialable="0")}
    )
    assert [(spot.address, spot.path, spot.ports) for spot in spots.values()] == [
        ("198.18.0.1", Transport.DIRECT, CHECK_PORTS),
        ("198.18.0.2", Transport.RELAYED, CHECK_PORTS),
    ]


def test_a_private_network_or_public_addresses_that_all_have_are_what_members_would_use() -> None:
    private = [
        machine(n, transport="mesh", network="lan", private_address=f"10.0.0.{n}", dialable="0")
        for n in (1, 2)
    ]
    spots = spots_of(dict(enumerate(private)))
    assert [(spot.address, spot.path) for spot in spots.values()] == [
        ("10.0.0.1", Transport.PRIVATE),
        ("10.0.0.2", Transport.PRIVATE),
    ]
    public = [machine(n, transport="mesh", public_address=f"203.0.113.{n}", dialable="1") for n in (1, 2)]
    assert {spot.path for spot in spots_of(dict(enumerate(public))).values()} == {Transport.PUBLIC}
    assert {spot.path for spot in spots_of({0: private[0], 1: public[1]}).values()} == {
        Transport.RELAYED,
        Transport.DIRECT,
    }


def test_nobody_is_nowhere() -> None:
    assert spots_of({}) == {}
