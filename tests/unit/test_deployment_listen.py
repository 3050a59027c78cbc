"""Where the API listens."""

from __future__ import annotations

import pytest

from coordinator.listen import bind, checked_address, listen_default, parse_listen, url_of
from mesh.errors import DeploymentError, SpecError
from mesh.reasons import Reason


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:8470", "127.0.0.1", 8470),
        (":8470", "0.0.0.0", 8470),
        ("[::1]:0", "::1", 0),
        ("localhost:1", "localhost", 1),
    ],
)
def test_host_and_port_are_read(text: str, host: str, port: int) -> None:
    assert parse_listen(text) == (host, port)


@pytest.mark.parametrize("text", ["", "8470", "127.0.0.1", "127.0.0.1:", "h:70000", "h:-1", "h:²"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(SpecError):
        parse_listen(text)


def test_a_taken_port_is_named() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(DeploymentError) as raised:
            bind("127.0.0.1", port)
    assert raised.value.reason is Reason.PORT_TAKEN
    assert str(port) in raised.value.message


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(DeploymentError) as raised:
        bind("192.0.2.77", 0)
    assert raised.value.reason is Reason.UNREACHABLE


def test_the_url_is_one_that_a_client_on_this_host_can_use() -> None:
    with bind("0.0.0.0", 0) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_an_address_for_other_machines_is_one_that_they_can_reach() -> None:
    assert checked_address("10.1.2.3", has_machines=False) == "10.1.2.3"
    assert listen_default("10.1.2.3") == "10.1.2.3:0"


@pytest.mark.parametrize("text", ["", "host", "0.0.0.0", "127.0.0.1", "224.0.0.1", "fd77::1", "10.1.2.3:80"])
def test_any_other_address_is_refused_by_name(text: str) -> None:
    with pytest.raises(SpecError) as raised:
        checked_address(text, has_machines=False)
    assert raised.value.details["field"] == "--address"


def test_simulated_machines_are_not_for_others_to_reach() -> None:
    with pytest.raises(SpecError, match="exclude each other"):
        checked_address("10.1.2.3", has_machines=True)
