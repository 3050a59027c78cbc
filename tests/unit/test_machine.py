"""Facts of a machine: addresses, interfaces, and ports that two runs never share."""

from __future__ import annotations

import socket

import pytest

from agents import machine
from mesh.errors import PlacementError
from mesh.reasons import Reason


@pytest.fixture
def port() -> int:
    """One that is free now, below the ephemeral range."""
    return next(p for p in range(30_100, 30_900) if machine.is_free(p))


@pytest.mark.parametrize("address", ["127.0.0.1", "127.3.2.1", "::1"])
def test_every_loopback_address_is_on_the_loopback_interface(address: str) -> None:
    if ":" in address and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    assert machine.interface_for(address) in ("lo", None if ":" in address else "lo")


def test_an_address_that_is_not_ours_has_no_interface() -> None:
    assert machine.interface_for("203.0.113.7") is None


def test_two_runs_that_ask_at_once_get_two_ports(port: int) -> None:
    first = machine.reserve_port(wanted=port, last=port + 20)
    second = machine.reserve_port(wanted=port, last=port + 20)
    assert first.port != second.port
    first.release()
    second.release()


def test_a_released_port_is_given_again(port: int) -> None:
    first = machine.reserve_port(wanted=port, last=port)
    first.release()
    first.release()
    second = machine.reserve_port(wanted=port, last=port)
    assert second.port == port
    second.release()


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.77", "0.0.0.0"])
def test_a_listener_on_any_one_address_takes_the_port(port: int, address: str) -> None:
    with socket.create_server((address, port)):
        assert not machine.is_free(port)
        other = machine.reserve_port(wanted=port, last=port + 20)
        assert other.port != port
        other.release()


def test_a_reservation_does_not_keep_the_job_from_its_port(port: int) -> None:
    reservation = machine.reserve_port(wanted=port, last=port)
    with socket.create_server(("0.0.0.0", port), reuse_port=False):
        pass
    reservation.release()


def test_when_all_are_taken_it_says_so(port: int) -> None:
    reservation = machine.reserve_port(wanted=port, last=port)
    with pytest.raises(PlacementError) as caught:
        machine.reserve_port(wanted=port, last=port)
    assert caught.value.reason is Reason.PORT_TAKEN
    reservation.release()
