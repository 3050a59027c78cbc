"""What `mesh join` is told, and what it says when the machine lacks something."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from agents.__main__ import TOKEN_VARIABLE, _read_token
from agents.join_mesh_settings import read_settings
from agents.join_options import read_labels
from agents.mesh_ports import CHECK_PORTS, FIRST_PORTS, PORTS, MeshPorts, free_ports
from coordinator.listen import mesh_listen
from mesh.cli import join as cli_join
from mesh.cli.app import app
from mesh.errors import DeploymentError, SpecError
from mesh.reasons import Reason

TOKEN = f"gm1.{'a' * 12}.{'b' * 48}.{'c' * 64}"
GIVEN: dict[str, Any] = {
    "head": "https://10.0.0.1:8471",
    "token": TOKEN,
    "listen": "0.0.0.0:8471",
    "labels": {"rack": "3"},
    "name_hint": "",
    "private_network": "",
    "private_address": "",
    "public_address": "",
}


def test_what_is_said_is_read() -> None:
    read = read_settings(
        **{
            **GIVEN,
            "private_network": "lan",
            "private_address": "192.168.1.2",
            "public_address": "2001:db8::1",
        }
    )
    assert (read.head.host, read.head.port, read.listen) == ("10.0.0.1", 8471, ("0.0.0.0", 8471))
    assert read_settings(**{**GIVEN, "head": "h.example:1"}).head.url == "https://h.example:1"
    assert read_settings(**{**GIVEN, "head": "https://[fd00::1]:1"}).head.host == "fd00::1"
    assert read_settings(**{**GIVEN, "token": None}).token is None


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"head": "http://10.0.0.1:8471"}, "HEAD"),
        ({"head": "https://10.0.0.1"}, "HEAD"),
        ({"token": "gm1.short"}, None),
        ({"listen": "8471"}, None),
        ({"listen": "0.0.0.0:0"}, "--listen"),
        ({"private_network": "lan"}, "--private-network"),
        ({"private_address": "10.0.0.2"}, "--private-network"),
        ({"public_address": "example.org"}, "--public-address"),
        ({"public_address": "0.0.0.0"}, "--public-address"),
    ],
)
def test_what_is_wrong_is_named(wrong: dict[str, Any], field: str | None) -> None:
    with pytest.raises(SpecError) as raised:
        read_settings(**{**GIVEN, **wrong})
    assert field is None or raised.value.details["field"] == field
    assert "b" * 48 not in str(raised.value)


def test_labels_of_ours_are_not_the_users_to_give() -> None:
    assert read_labels(["provider=aws", "rack="]) == {"provider": "aws", "rack": ""}
    for wrong in ("=x", "gangmesh.address=10.0.0.1", "ray.io/x=y"):
        with pytest.raises(SpecError):
            read_labels([wrong])


def test_a_token_is_taken_out_of_the_environment_that_commands_get(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert _read_token(None) == TOKEN
    assert TOKEN_VARIABLE not in os.environ
    assert TOKEN_VARIABLE == cli_join.TOKEN_VARIABLE


def test_mesh_join_of_a_plain_api_says_what_to_do(capfd: pytest.CaptureFixture[str]) -> None:
    done = CliRunner().invoke(app, ["join", "http://10.0.0.1:8470", "--token", TOKEN])
    assert done.exit_code == 2
    said = capfd.readouterr().err
    assert "https://HOST:PORT" in said
    assert "python -m agents join" in said


@pytest.mark.parametrize(
    ("text", "has_machines", "has_address"),
    [
        ("0.0.0.0:8471", True, False),
        ("0.0.0.0:8471", False, True),
        ("0.0.0.0:0", False, False),
        ("example.org:8471", False, False),
        ("8471", False, False),
    ],
)
def test_what_a_mesh_port_cannot_be(text: str, has_machines: bool, has_address: bool) -> None:
    with pytest.raises(SpecError):
        mesh_listen(text, has_machines=has_machines, has_address=has_address)


def test_a_mesh_port_may_be_of_ipv6() -> None:
    assert mesh_listen("[::]:8471", has_machines=False, has_address=False) == ("::", 8471)


def test_the_ports_of_a_machine_are_a_block_in_which_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    ports = free_ports()
    assert ports.first in FIRST_PORTS
    used = {ports.directory, ports.node_manager, ports.object_manager, ports.store, ports.logs}
    assert len(used) == 5
    assert max(used) < ports.first_worker <= ports.last < 32768
    assert used | set(CHECK_PORTS) <= ports.offered
    with socket.create_server(("127.0.0.1", ports.first + PORTS // 2)):
        assert free_ports().first != ports.first
        monkeypatch.setattr("agents.mesh_ports.FIRST_PORTS", (ports.first,))
        with pytest.raises(DeploymentError) as raised:
            free_ports()
    assert raised.value.reason is Reason.PORT_TAKEN
    assert MeshPorts(ports.first) == ports
