"""How a gang's members reach each other, as the API shows it: pure functions of the journalled state."""

from __future__ import annotations

from coordinator.core.gang_state import Gang
from coordinator.fleet import MachineFacts
from mesh.resources import Condition, MachineNetwork, PathStatus
from mesh.states import NetworkScope, Transport

_OF_PATH = {
    Transport.PUBLIC: Condition(
        type="PublicClearText",
        message="Traffic between members, gradients and rendezvous too, crosses public addresses in clear text.",
    ),
    Transport.RELAYED: Condition(
        type="RelayedLowBandwidth",
        message="Every byte between the members goes through a relay: slow, and for small models only.",
    ),
}


def path_status(gang: Gang) -> PathStatus | None:
    """The path of the current epoch."""
    taken = [(m.machine, m.path) for _, m in sorted(gang.members.items()) if m.path is not None]
    if not taken:
        return None
    return {
        "transport": str(taken[0][1].transport),
        "layer": next((path.layer for _, path in taken if path.layer), ""),
        "lacks": [f"{machine}: {path.lacks}" for machine, path in taken if path.lacks],
    }


def path_conditions(gang: Gang) -> list[Condition]:
    """What is worth knowing of where the members are and how they reach each other."""
    found: list[Condition] = []
    if gang.plan.network is NetworkScope.GLOBAL and gang.plan.nodes > 1:
        message = "Training between distant machines is limited by the network."
        found.append({"type": "WANBound", "message": message})
    status = path_status(gang)
    if status is None or gang.state.is_terminal:
        return found
    if gang.plan.nodes > 1 and (transport := Transport(status["transport"])) in _OF_PATH:
        found.append(_OF_PATH[transport])
    found += [{"type": "NetworkLayerOff", "message": f"{lack.rstrip('.')}."} for lack in status["lacks"]]
    return found


def machine_network(facts: MachineFacts) -> MachineNetwork | None:
    """How a machine can be reached, beyond its address."""
    standing = facts.standing
    if not standing.is_on_mesh:
        return None
    return {
        "dialable": standing.is_dialable,
        "privateNetwork": standing.private_network,
        "privateAddress": standing.private_address,
        "publicAddress": standing.public_address,
    }
