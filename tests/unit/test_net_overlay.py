"""Which addresses a machine and its member have: each number its own, and back again."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest

from mesh.net.overlay import (
    HEAD_NUMBER,
    MACHINES_V4,
    MEMBERS_V4,
    MEMBERS_V6,
    NUMBER_MAX,
    machine_overlay,
    member_overlay,
    number_of,
)
from mesh.net.redirect import OVERLAY

NUMBERS = (HEAD_NUMBER, 1, 254, 255, 256, 4096, NUMBER_MAX)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_is_in_its_addresses(number: int) -> None:
    machine, member = machine_overlay(number), member_overlay(number)
    assert number_of(machine[0]) == number_of(member[0]) == number
    assert ip_address(machine[0]) in ip_network(MACHINES_V4)
    assert ip_address(member[0]) in ip_network(MEMBERS_V4)
    assert ip_address(member[1]) in ip_network(MEMBERS_V6)
    assert ip_address(machine[1]) not in ip_network(MEMBERS_V6)
    for address in (*machine, *member):
        assert any(ip_address(address) in ip_network(net) for net in OVERLAY)
        assert str(ip_address(address)) == address


def test_no_two_numbers_share_an_address() -> None:
    addresses = [a for number in range(2000) for a in (*machine_overlay(number), *member_overlay(number))]
    assert len(set(addresses)) == len(addresses)


def test_the_ends_of_the_networks_are_nobodys() -> None:
    assert machine_overlay(HEAD_NUMBER)[0] == "198.18.0.1"
    assert machine_overlay(NUMBER_MAX)[0] == "198.18.255.254"
    for number in (-1, NUMBER_MAX + 1):
        with pytest.raises(ValueError, match="number"):
            machine_overlay(number)
    for address in ("198.18.0.0", "198.18.255.255", "10.0.0.1", "198.20.0.1", "fd67:6d00::1", "", "x"):
        assert number_of(address) is None
