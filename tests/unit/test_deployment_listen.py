"""Where the API listens."""

from __future__ import annotations

import pytest

from coordinator.listen import bind, parse_listen, url_of
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
