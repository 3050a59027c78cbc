"""Ray's placement groups as we use them: one bundle, on one machine, for one reservation. Blocking calls.

Theory of operation. A group is pinned to its machine by the machine's label. Ray puts the bundle of a lost machine
wherever it fits, bundle by bundle, and gives no single machine of a group back; a group that fits one machine only has
neither trouble. It outlives the coordinator: what is held is read back from Ray.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import ray
from ray import PlacementGroupID
from ray._private.state import available_resources_per_node
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from agents.raylet import MACHINE_LABEL, SLOT_RESOURCE
from mesh.ids import MachineName, RunUid

_PREFIX = "gang"
_CREATED, _REMOVED = "CREATED", "REMOVED"


@dataclass(frozen=True, slots=True)
class Key:
    """A reservation's name."""

    uid: RunUid
    reservation: int


def group_name(key: Key, machine: MachineName) -> str:
    return f"{_PREFIX}-{key.uid}-{key.reservation}-{machine}"


def parse_group_name(name: str) -> tuple[Key, MachineName] | None:
    """None when the group is not one of ours."""
    prefix, _, rest = name.partition("-")
    uid, _, rest = rest.partition("-")
    reservation, _, machine = rest.partition("-")
    if prefix != _PREFIX or not uid or not reservation.isdigit() or not machine:
        return None
    return Key(RunUid(uid), int(reservation)), MachineName(machine)


def read_all() -> dict[MachineName, tuple[Key, PlacementGroup]]:
    """Every group of ours that there is. Slow once there were many: Ray keeps the removed ones in its table."""
    found = {}
    for group_id, row in placement_group_table().items():
        named = parse_group_name(row.get("name") or "")
        if named is not None and row["state"] != _REMOVED:
            key, machine = named
            found[machine] = (key, PlacementGroup(PlacementGroupID(bytes.fromhex(group_id))))
    return found


def find(key: Key, machine: MachineName) -> PlacementGroup | None:
    """The group of this name, unless it is removed."""
    try:
        group = get_placement_group(group_name(key, machine))
    except ValueError:
        return None
    return None if is_removed(group) else group


def create_all(
    key: Key, machines: Iterable[MachineName], bundle: Mapping[str, float]
) -> dict[MachineName, PlacementGroup]:
    """Asks for a group on each of the machines. None of them may have one of this key."""
    return {
        machine: placement_group(
            [dict(bundle)],
            strategy="STRICT_PACK",
            name=group_name(key, machine),
            lifetime="detached",
            bundle_label_selector=[{MACHINE_LABEL: machine}],
        )
        for machine in machines
    }


def not_created(groups: Mapping[MachineName, PlacementGroup]) -> list[MachineName]:
    """The machines whose groups do not hold them yet, or not any more."""
    return [
        machine for machine, group in groups.items() if placement_group_table(group).get("state") != _CREATED
    ]


def remove_all(groups: Sequence[PlacementGroup]) -> None:
    for group in groups:
        remove_placement_group(group)


def is_removed(group: PlacementGroup) -> bool:
    return bool(placement_group_table(group).get("state", _REMOVED) == _REMOVED)


def has_free_slot(machines: Iterable[MachineName]) -> bool:
    """Whether Ray's directory knows that they may be given again; a machine that is lost does not count.

    Its view lags by some 100 ms behind a removal, and a group that is asked for too early waits for a whole second.
    """
    wanted = set(machines)
    available = available_resources_per_node()
    return all(
        available.get(node["NodeID"], {}).get(SLOT_RESOURCE, 0) >= 1
        for node in ray.nodes()
        if node["Alive"] and node["Labels"].get(MACHINE_LABEL) in wanted
    )
