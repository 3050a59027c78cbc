"""The processes of a gateway and a relay, as an agent starts and tells them. Without root: nothing is redirected."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agents.gateway_client import GatewayClient
from agents.gateway_wire import Counters, Fence, Host, SetIdentity, SetMachines, SetRelays, SetRoster
from mesh.errors import AuthenticationError, FencedError, TransportError
from mesh.ids import Epoch, MachineName
from mesh.net.authority import Authority, new_authority
from mesh.net.relay_client import RelayPlace
from mesh.net.roster import MachinePlace
from mesh.wire import encode_frame
from tests.integration.net.processes import ROOT, command, ready, running
from tests.net_world import DEPLOYMENT, RUN, credentials, machine, member, relay_identity, roster

LIMIT_S = 20.0


@pytest.fixture
def authority() -> Authority:
    return new_authority(DEPLOYMENT, now=time.time())


@contextlib.asynccontextmanager
async def client_of(folder: Path) -> AsyncIterator[GatewayClient]:
    client = await GatewayClient.connect(folder / "gateway.sock")
    try:
        yield client
    finally:
        client.close()


async def test_an_agent_tells_its_gateway_and_hears_what_went_wrong(
    tmp_path: Path, authority: Authority
) -> None:
    with running(command("agents.gateway", tmp_path, name="a")) as process:
        assert ready(process)["addresses"]
        async with client_of(tmp_path) as client:
            with pytest.raises(AuthenticationError, match="cannot use a certificate of"):
                await client.ask(SetIdentity(credentials=credentials(authority, machine("b"))))
            await client.ask(SetIdentity(credentials=credentials(authority, machine("a"))))
            await client.ask(SetRoster(roster=roster(2)))
            with pytest.raises(FencedError, match="the floor is 2"):
                await client.ask(SetRoster(roster=roster(1)))
            with pytest.raises(FencedError, match="has no place on a"):
                ghost = credentials(authority, member(0, "a", epoch=1))
                await client.ask(Host(credentials=ghost, deliver_to=("127.0.0.1",)))
            await client.ask(Fence(run=RUN, floor=Epoch(3)))
            assert (await client.ask(Counters()))["streams"] == 0
        # A client that sends garbage loses its connection, and nobody else loses anything.
        reader, writer = await asyncio.open_unix_connection(tmp_path / "gateway.sock")
        writer.write(encode_frame({"do": "Nonsense"}) + b"\xff" * 64)
        assert b"no request" in await reader.read()
        writer.close()
        async with client_of(tmp_path) as client:
            await client.ask(Counters())
        assert (tmp_path / "gateway.sock").stat().st_mode & 0o777 == 0o600
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
    with pytest.raises(TransportError):
        await GatewayClient.connect(tmp_path / "gateway.sock")


def test_what_keeps_a_gateway_from_starting_is_said_in_a_line(tmp_path: Path) -> None:
    with running(command("agents.gateway", tmp_path / "one", name="a")) as process:
        [[host, port]] = ready(process)["addresses"]  # type: ignore[misc,attr-defined]
        for argv, said in (
            (command("agents.gateway", tmp_path / "one", name="a"), "Another gateway runs in"),
            (
                command("agents.gateway", tmp_path / "two", name="a", listen=f"{host}:{port}"),
                "Address already in use",
            ),
            (command("agents.gateway", tmp_path / "three", name="a", listen="nowhere"), "is no ADDRESS:PORT"),
            (command("tests.net_relay", tmp_path / "four", name="r"), "certificate.pem cannot be read"),
            (
                [
                    *command("agents.gateway", tmp_path / "five", name="a", capture="--shim"),
                    "--overlay",
                    "10.0.0.0/8",
                ],
                "The shim knows no other overlay",
            ),
        ):
            done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT)
            assert done.returncode == 1
            assert said in done.stderr
            assert "Traceback" not in done.stderr


def test_a_gateway_for_programs_with_the_shim_shares_its_port_with_them(tmp_path: Path) -> None:
    ports = []
    for _ in range(2):
        with running(command("agents.gateway", tmp_path, name="a", capture="--shim")) as process:
            found = ready(process)["capture_port"]
            header = (tmp_path / "shim.table").read_bytes()[:10]
            ports.append(header[8:])
            assert int.from_bytes(header[8:], "big") == found
            nobody_meant = socket.create_connection(("127.200.0.1", int(str(found))))
            with nobody_meant, pytest.raises(ConnectionResetError):
                nobody_meant.recv(1)
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT_S) == 0
    assert ports[0] != ports[1]


async def test_a_relay_process_keeps_its_certificate_when_the_new_one_is_none(
    tmp_path: Path, authority: Authority
) -> None:
    relay_folder, gateway_folder = tmp_path / "relay", tmp_path / "gateway"
    relay_folder.mkdir()
    who = credentials(authority, relay_identity("r"))
    for name, content in (
        ("certificate", who.certificate_pem),
        ("key", who.key_pem),
        ("bundle", who.bundle_pem),
    ):
        (relay_folder / f"{name}.pem").write_bytes(content)
    with (
        running(command("tests.net_relay", relay_folder, name="r")) as relay,
        running(command("agents.gateway", gateway_folder, name="a")) as gateway,
    ):
        [[host, port]] = ready(relay)["addresses"]  # type: ignore[misc,attr-defined]
        ready(gateway)
        (relay_folder / "certificate.pem").write_bytes(b"nothing")
        relay.send_signal(signal.SIGHUP)
        place = RelayPlace(machine=MachineName("r"), addresses=((host, port),))
        async with client_of(gateway_folder) as client:
            with pytest.raises(AuthenticationError, match="has no certificate yet"):
                await client.ask(SetRelays(places=(place,)))
            await client.ask(SetIdentity(credentials=credentials(authority, machine("a"))))
            await client.ask(SetMachines(machines={MachineName("b"): MachinePlace(gateway=())}))
            await client.ask(SetRelays(places=(place,)))
            async with asyncio.timeout(LIMIT_S):
                while not (await client.ask(Counters()))["relay_lines"]:
                    await asyncio.sleep(0.01)
        relay.send_signal(signal.SIGTERM)
        assert relay.wait(LIMIT_S) == 0
        assert relay.stderr is not None
        assert "the certificate stays what it was" in relay.stderr.read()
