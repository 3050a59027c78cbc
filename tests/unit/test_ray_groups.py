"""The names of placement groups."""

from __future__ import annotations

from coordinator.ray_groups import Key, group_name, parse_group_name
from mesh.ids import MachineName, RunUid


def test_a_name_reads_back_whatever_the_machine_is_called() -> None:
    key, machine = Key(RunUid("0123456789abcdef"), 12), MachineName("gpu-box-7.rack-2")
    assert parse_group_name(group_name(key, machine)) == (key, machine)


def test_groups_of_others_are_not_ours() -> None:
    for name in ("", "theirs", "gang", "gang-a-b", "gang-a-1", "gang-a-x-m", "gangs-a-1-m"):
        assert parse_group_name(name) is None
