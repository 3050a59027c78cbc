"""What `mesh join` is told, and what it says when the machine lacks something."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agents.agent_program import take_token
from agents.head_line import HeadUrl, cannot_reach
from agents.join_mesh_settings import read_settings
from agents.join_options import read_labels
from agents.mesh_ports import CHECK_PORTS, FIRST_PORTS, PORTS, MeshPorts, free_ports
from coordinator.listen import mesh_listen
from mesh.cli import agent as cli_agent
from mesh.cli.app import app
from mesh.errors import DeploymentError, SpecError
from mesh.joining import JOIN_TOKEN_VARIABLE
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
    for wrong in ("=x", "provider", "", "gangmesh.address=10.0.0.1", "ray.io/x=y"):
        with pytest.raises(SpecError):
            read_labels([wrong])


def test_a_token_is_taken_out_of_the_environment_that_commands_get(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv(JOIN_TOKEN_VARIABLE, TOKEN)
    assert take_token() == TOKEN
    assert JOIN_TOKEN_VARIABLE not in os.environ


@pytest.mark.parametrize("given", ["--token", "--token-file", "-", "variable"])
@pytest.mark.parametrize("command", ["join", "relay"])
def test_an_agent_gets_its_token_where_nobody_else_can_read_it(
    command: str, given: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    words, typed = {
        "--token": (["--token", TOKEN], ""),
        "--token-file": (["--token-file", str(tmp_path / "token")], ""),
        "-": (["--token-file", "-"], f"{TOKEN}\n"),
        "variable": ([], ""),
    }[given]
    monkeypatch.setenv(JOIN_TOKEN_VARIABLE, TOKEN if given == "variable" else "another")
    started: dict[str, Any] = {}

    def execve(path: str, arguments: list[str], environment: dict[str, str]) -> None:
        started.update(arguments=arguments, environment=environment)
        raise SystemExit

    monkeypatch.setattr(cli_agent.os, "execve", execve)
    CliRunner().invoke(app, [command, "https://10.0.0.1:8471", "--listen", "0.0.0.0:1", *words], input=typed)
    assert started["environment"][JOIN_TOKEN_VARIABLE] == TOKEN
    assert TOKEN not in " ".join(started["arguments"])


@pytest.mark.parametrize(
    "wrong",
    [
        ["--token", TOKEN, "--token-file", "x"],
        ["--token-file", "/nowhere/token"],
        ["--token-file", "/dev/null"],
        ["--token-file", "/dev/zero"],  # zeros can be in no environment
        ["--token-file", "-"],
    ],
)
def test_a_token_that_cannot_be_read_is_no_reason_to_go_without(
    wrong: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    done = CliRunner().invoke(app, ["join", "https://10.0.0.1:8471", *wrong])
    assert done.exit_code == 2
    assert "token" in capfd.readouterr().err


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


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionRefusedError(111, "x"), ["nobody listens there", "--listen"]),
        (TimeoutError(), ["no answer", "open it", "firewall"]),
        (OSError(113, "No route to host"), ["No route to host", "address"]),
        (socket.gaierror(-2, "Name or service not known"), ["Name or service not known", "resolver"]),
        (ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number"), ["no mesh port", "--listen"]),
        (ssl.SSLCertVerificationError(1, "x"), ["another certificate", "address"]),
    ],
)
def test_a_head_out_of_reach_is_named_with_its_port_and_what_to_do(error: OSError, words: list[str]) -> None:
    said = str(cannot_reach(HeadUrl.parse("https://head.example:8471"), error))
    for word in ("head.example port 8471", "cannot be reached", *words):
        assert word in said
    assert "mesh status" not in said
