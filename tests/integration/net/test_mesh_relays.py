"""Relays that take part in a deployment: by which token, what they are told, what they carry, and what ends them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from agents import relay_agent
from agents.head_line import HeadUrl, head_api
from agents.leave import leave
from agents.machine_identity import KnownIdentity, read_identity, write_identity
from agents.machine_state import LEAVING_NAME
from agents.relay_agent import RelayAgent, RelaySettings
from agents.relay_folder import RelayFolder
from coordinator import relay_desk
from coordinator.api import routes_mesh, routes_relays
from mesh import private_writer
from mesh.cli.exit_codes import ExitCode
from mesh.errors import (
    AuthenticationError,
    ConflictError,
    DeploymentError,
    MeshError,
    SpecError,
    StorageError,
)
from mesh.ids import HEAD, MachineName
from mesh.joining import JOIN_TOKEN_VARIABLE
from mesh.net.authority import read_certificate
from mesh.net.gateway import Gateway
from mesh.net.relay_client import RelayPlace
from mesh.net.roster import MachinePlace
from mesh.net.tokens import JoinToken
from mesh.private_files import write_private
from mesh.reasons import Reason
from tests.mesh_head_world import TOKEN, HeadWorld, head_world
from tests.net_world import (
    DEPLOYMENT,
    MemberServer,
    Stream,
    eventually,
    member_server,
    relay_identity,
)


@pytest.fixture
async def head(tmp_path: Path) -> AsyncIterator[HeadWorld]:
    state = tmp_path / "state"
    state.mkdir()
    async with head_world(state) as world:
        yield world


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for minutes here."""
    monkeypatch.setattr(relay_agent, "REPORT_EVERY_S", 0.05)
    monkeypatch.setattr(relay_agent, "COUNT_EVERY_S", 0.05)
    monkeypatch.setattr(relay_agent, "IN_USE_LIMIT_S", 0.0)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


async def relay_token(head: HeadWorld) -> JoinToken:
    return JoinToken.parse((await head.desk.create_token(None, for_relay=True))[0])


def agent(
    head: HeadWorld, folder: Path, token: JoinToken | None = None, *, port: int = 0, **settings: Any
) -> RelayAgent:
    folder.mkdir(exist_ok=True)
    chosen: dict[str, Any] = {
        "head": head.url,
        "token": token,
        "listen": ("127.0.0.1", port or free_port()),
        **settings,
    }
    return RelayAgent(RelaySettings(**chosen), RelayFolder(folder))


@contextlib.asynccontextmanager
async def running(made: RelayAgent) -> AsyncIterator[str]:
    """Its name, once machines can use it; stopped in the end."""
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(made.run(ready.set_result))
    await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task
    try:
        yield ready.result()
    finally:
        made.stop()
        await task


@dataclass
class Pair:
    """Two machines that nobody can dial, and a port of b's that a may reach."""

    gateways: dict[str, Gateway]
    server: MemberServer
    streams: list[Stream] = field(default_factory=list)

    async def dial(self) -> tuple[Stream, Stream]:
        capture = self.gateways["a"].capture_port
        assert capture is not None
        stream = await Stream.open(capture)
        self.streams.append(stream)
        return stream, await self.server.next(len(self.streams) - 1)

    async def follow(self, head: HeadWorld) -> None:
        """Both are told what the desk tells machines now."""
        for gateway in self.gateways.values():
            news = head.desk._news()
            relays = [
                RelayPlace(machine=MachineName(name), addresses=tuple((str(h), int(p)) for h, p in at))
                for name, at in news["relays"].items()
            ]
            own = RelayPlace(machine=HEAD, addresses=(("127.0.0.1", head.port),), is_gateway=True)
            await gateway.set_relays([*relays, own])
        names = sorted([*head.desk.relays.offered(), HEAD])
        await eventually(
            lambda: all(g.counters()["relay_lines"] == names for g in self.gateways.values()), "the lines"
        )


@contextlib.asynccontextmanager
async def hidden_pair(head: HeadWorld) -> AsyncIterator[Pair]:
    async with member_server() as server:
        pair = Pair({}, server)
        for name in ("a", "b"):
            gateway = pair.gateways[name] = Gateway(
                deployment=DEPLOYMENT,
                machine=MachineName(name),
                target_of=lambda sock: ("198.18.0.9", server.port),
            )
            gateway.set_identity(head.authority.machine_credentials(MachineName(name)))
            gateway.start(listen_on=(("127.0.0.1", 0),), capture_port=0)
            gateway.set_machines(
                {
                    MachineName("b"): MachinePlace(gateway=(), overlay=("198.18.0.9",)),
                    MachineName("a"): MachinePlace(gateway=()),
                }
            )
            gateway.offer([server.port], deliver_to=("127.0.0.1",))
        try:
            await pair.follow(head)
            yield pair
        finally:
            for stream in pair.streams:
                stream.transport.abort()
            for gateway in pair.gateways.values():
                await gateway.stop()


def carried(head: HeadWorld, name: str) -> int:
    [facts] = [facts for facts in head.desk.relays.facts() if facts["name"] == name]
    return facts["bytes"]


def state_of(head: HeadWorld, name: str) -> str:
    [facts] = [facts for facts in head.desk.relays.facts() if facts["name"] == name]
    return facts["state"]


# ---- taking part --------------------------------------------------------------------------------------


async def test_a_relay_takes_part_carries_what_nobody_can_dial_and_says_how_much(
    head: HeadWorld, tmp_path: Path
) -> None:
    made = agent(head, tmp_path / "r", await relay_token(head), name_hint="tokyo")
    async with running(made) as name, hidden_pair(head) as pair:
        assert name == "tokyo-1"
        assert list(head.desk.relays.offered()) == [name]
        assert (tmp_path / "r" / "relay.json").stat().st_mode & 0o077 == 0
        stream, other = await pair.dial()
        stream.transport.write(b"x" * 1_000_000)
        await other.read(1_000_000)
        await eventually(lambda: carried(head, name) > 1_000_000, "the head to know")
        stream.reset()
        await eventually(lambda: head.desk.relays.facts()[1]["streams"] == 0, "the stream's end to be told")
        [row] = head.desk.relays.relayed(None)
        assert (row["relay"], row["run"], row["dialler"], row["target"]) == (name, None, "a", "b")
        assert head.desk.relays.relayed("some-run") == []
    await eventually(lambda: not head.desk._newsroom.is_followed(MachineName(name)), "it to be gone")


async def test_a_relay_s_token_is_no_machine_s_and_the_reverse_and_neither_is_used_up(
    head: HeadWorld, tmp_path: Path
) -> None:
    for_relay, for_machine = await relay_token(head), await head.token()
    with pytest.raises(AuthenticationError, match="is for a machine, not for a relay"):
        await agent(head, tmp_path / "r", for_machine).run()
    with pytest.raises(AuthenticationError, match="is for a relay, not for a machine"):
        await head.way(tmp_path / "m", for_relay)._asking.ask()
    assert {facts["purpose"]: facts["state"] for facts in head.desk.list_tokens()} == {
        "Relay": "Open",
        "Machine": "Open",
    }
    with pytest.raises(AuthenticationError, match="token"):
        await agent(head, tmp_path / "r").run()


async def test_a_relay_that_the_head_cannot_dial_is_told_so_and_offered_to_nobody(
    head: HeadWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nobody(port: int) -> None:
        return None

    made = agent(head, tmp_path / "r", await relay_token(head), public_address="127.0.0.9")
    with monkeypatch.context() as patch:
        patch.setattr(head, "source_of", nobody)
        with pytest.raises(
            DeploymentError, match=r"cannot dial this relay: port \d+ of 127\.0\.0\.9"
        ) as caught:
            await made.run()
    assert caught.value.reason is Reason.UNREACHABLE
    assert caught.value.hint is not None and "`mesh drain relay-1`" in caught.value.hint
    assert (state_of(head, "relay-1"), head.desk.relays.offered()) == ("Unreachable", {})
    await head.desk.rotation.begin(None)
    assert head.desk.rotation.facts()["waitsFor"] == [], "nobody could ever use it"
    async with running(agent(head, tmp_path / "r")) as name:  # no token any more
        assert (name, state_of(head, name)) == ("relay-1", "Up")
    await eventually(lambda: not head.desk._newsroom.is_followed(MachineName(name)), "it to be gone")
    assert head.desk.rotation._present() == [name], "it may come back"


async def test_another_machine_at_that_address_is_not_taken_for_the_relay(
    head: HeadWorld, tmp_path: Path
) -> None:
    found = await head.gateway.probe_relay(MachineName("relay-1"), [("127.0.0.1", head.port)])
    assert found == []


# ---- news ---------------------------------------------------------------------------------------------


async def test_a_relay_hears_of_revocations_and_of_nobody_s_place(head: HeadWorld, tmp_path: Path) -> None:
    _, life = await head.way(tmp_path / "m", await head.token())._asking.ask()
    made = agent(head, tmp_path / "r", await relay_token(head))
    async with running(made), hidden_pair(head) as pair:
        assert made._relay is not None
        gate = made._relay.gate
        await head.desk.give_up([life.name])
        await eventually(lambda: gate.revoked == {life.name}, "the relay to know")

        def on_disk() -> list[str]:
            known = RelayFolder(tmp_path / "r").read_known()
            assert known is not None
            return known.revoked

        await eventually(lambda: on_disk() == [life.name], "it to be on disk")
        assert set(head.desk.relays._news()) == {"version", "revoked", "bundle"}
        stream, _ = await pair.dial()
        made._relay.revoke(frozenset({MachineName("b")}))
        assert await stream.reset_seen()


async def test_a_relay_that_has_left_is_not_offered_and_not_believed(head: HeadWorld, tmp_path: Path) -> None:
    made = agent(head, tmp_path / "r", await relay_token(head))
    async with running(made) as name:
        (tmp_path / "r" / LEAVING_NAME).touch()
    assert (head.desk.relays.offered(), head.desk.revoked()) == ({}, [name])
    assert RelayFolder(tmp_path / "r").read_known() is None


async def test_a_relay_that_does_not_run_can_leave_and_be_removed(head: HeadWorld, tmp_path: Path) -> None:
    for folder in ("r", "s"):
        async with running(agent(head, tmp_path / folder, await relay_token(head))):
            pass
    assert await asyncio.to_thread(leave, tmp_path / "r") == 0
    assert head.desk.revoked() == ["relay-1"]
    async with head_api(head.url, bundle_pem=head.authority.bundle_pem(), secret=TOKEN) as api:
        await api.call("DELETE", "/v1/relays/relay-2")
    assert head.desk.revoked() == ["relay-1", "relay-2"]
    with pytest.raises(AuthenticationError, match="left"):
        await agent(head, tmp_path / "s").run()


async def test_a_relay_that_cannot_say_what_it_has_carried_leaves_all_the_same(
    head: HeadWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: Any, **__: Any) -> None:
        raise StorageError("the head's disk is full")

    made = agent(head, tmp_path / "r", await relay_token(head))
    async with running(made) as name:
        monkeypatch.setattr(head.desk.relays, "report", full)
        (tmp_path / "r" / LEAVING_NAME).touch()
    assert head.desk.revoked() == [name]
    assert RelayFolder(tmp_path / "r").read_known() is None


@contextlib.asynccontextmanager
async def silent_agent(folder: Path, *, lives: int = 1) -> AsyncIterator[None]:
    """One that holds the folder, and ends without a word to its head when it is told to. What supervises it starts it
    again, so that it has so many lives.
    """
    program = (
        "import os, pathlib, signal, sys; from agents.machine_state import LOCK_NAME, claimed\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "lock = claimed(folder); lock.__enter__(); print(flush=True)\n"
        "for life in range(int(sys.argv[2])):\n"
        "    if life and (next_one := os.fork()):\n"
        "        (folder / LOCK_NAME).write_text(str(next_one)); os._exit(0)\n"
        "    signal.alarm(60); signal.sigwait([signal.SIGTERM])\n"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, str(folder), str(lives)), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"\n"
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.mark.parametrize("lives", [1, 2])
async def test_a_relay_that_ended_without_a_word_to_its_head_leaves_from_afar(
    head: HeadWorld, tmp_path: Path, lives: int
) -> None:
    folder = tmp_path / "r"
    async with running(agent(head, folder, await relay_token(head))) as name:
        pass
    async with silent_agent(folder, lives=lives):
        assert await asyncio.to_thread(leave, folder) == 0
    assert head.desk.revoked() == [name]
    assert RelayFolder(folder).read_known() is None


async def test_nobody_says_that_a_relay_has_left_of_which_the_head_was_not_told(
    head: HeadWorld, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "r"
    async with running(agent(head, folder, await relay_token(head))) as name:
        pass
    known = RelayFolder(folder).read_known()
    assert known is not None
    await RelayFolder(folder).save_known(replace(known, head=f"https://127.0.0.1:{free_port()}"))
    async with silent_agent(folder):
        assert await asyncio.to_thread(leave, folder) == ExitCode.NO_DEPLOYMENT
    said = capfd.readouterr().err
    assert "has left" not in said
    assert f"mesh drain {name}" in said
    assert head.desk.revoked() == []


async def test_a_machine_whose_agent_could_not_tell_its_head_is_told_so(
    head: HeadWorld, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    nowhere, bundle = f"https://127.0.0.1:{free_port()}", head.authority.bundle_pem().decode()
    write_identity(tmp_path, KnownIdentity(head=nowhere, name="m", secret="s", bundle=bundle))
    async with silent_agent(tmp_path):
        assert await asyncio.to_thread(leave, tmp_path) == ExitCode.NO_DEPLOYMENT
    said = capfd.readouterr().err
    assert "has left" not in said
    assert "the head was not told" in said and "It gives the machine up" in said
    assert read_identity(tmp_path) is None


async def test_a_machine_whose_agent_ended_without_a_word_leaves_from_afar_and_only_once(
    head: HeadWorld, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    await head.way(tmp_path / "m", await head.token())._asking.ask()
    known = read_identity(tmp_path / "m")
    assert known is not None
    assert await asyncio.to_thread(leave, tmp_path / "m") == 0
    assert "has left" in capfd.readouterr().err
    assert head.desk.revoked() == [known.name]
    assert read_identity(tmp_path / "m") is None
    write_identity(tmp_path / "m", known)
    assert await asyncio.to_thread(leave, tmp_path / "m") == 0
    assert "Its head had done so before" in capfd.readouterr().err


async def test_a_relay_that_was_removed_already_has_nothing_left_to_be_drained(
    head: HeadWorld, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "r"
    async with running(agent(head, folder, await relay_token(head))) as name:
        pass
    await head.desk.relays.remove(name)
    assert await asyncio.to_thread(leave, folder) == 0
    said = capfd.readouterr().err
    assert "Its head had done so before" in said and "drain" not in said
    assert RelayFolder(folder).read_known() is None


async def test_a_relay_that_is_removed_while_it_runs_ends_and_says_why(
    head: HeadWorld, tmp_path: Path
) -> None:
    made = agent(head, tmp_path / "r", await relay_token(head))
    task = asyncio.create_task(made.run())
    await eventually(lambda: bool(head.desk.relays.offered()), "it to be offered")
    await head.desk.relays.remove("relay-1")
    with pytest.raises(AuthenticationError, match="left"):
        await task


async def test_a_silent_relay_is_not_offered_any_more_until_it_asks_again(
    head: HeadWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(agent(head, tmp_path / "r", await relay_token(head))):
        head.desk.relays.look()
        assert list(head.desk.relays.offered()) == ["relay-1"]
    await eventually(lambda: not head.desk._newsroom.is_followed(MachineName("relay-1")), "it to be gone")
    before = head.desk._newsroom.version()
    with monkeypatch.context() as patch:
        patch.setattr(relay_desk, "SILENT_S", 0.0)
        head.desk.relays.look()
        assert (head.desk.relays.offered(), state_of(head, "relay-1")) == ({}, "Away")
        assert head.desk._newsroom.version() != before, "machines are told"
    async with running(agent(head, tmp_path / "r")):
        assert list(head.desk.relays.offered()) == ["relay-1"]


async def test_a_relay_s_renewal_that_failed_is_not_put_off_for_days(
    head: HeadWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_agent, "RENEW_FAILED_S", 0.01)
    made = agent(head, tmp_path / "r", await relay_token(head))
    renew = head.desk.relays.renew

    async def full(*_: Any) -> str:
        monkeypatch.setattr(head.desk.relays, "renew", renew)
        raise StorageError("the head's disk is full")

    async with running(made):
        before = made._present().certificate
        monkeypatch.setattr(head.desk.relays, "renew", full)
        made._renew_now.set()
        await eventually(lambda: made._present().certificate != before, "it to be renewed")


async def test_a_certificate_is_renewed_and_streams_go_on(
    head: HeadWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_agent, "RENEW_AGAIN_S", 0.1)
    monkeypatch.setattr(relay_agent, "RENEW_BEFORE_S", 60 * 86400.0)
    made = agent(head, tmp_path / "r", await relay_token(head))
    async with running(made), hidden_pair(head) as pair:
        stream, other = await pair.dial()
        known = RelayFolder(tmp_path / "r").read_known()
        await eventually(
            lambda: RelayFolder(tmp_path / "r").read_known() != known and made._known != known, "a newer one"
        )
        assert read_certificate(made._present().certificate.encode()).identity == relay_identity("relay-1")
        stream.transport.write(b"x")
        await other.read(1)


async def test_a_disk_that_takes_nothing_stops_no_stream_and_loses_no_count(
    head: HeadWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = agent(head, tmp_path / "r", await relay_token(head))
    async with running(made) as name, hidden_pair(head) as pair:
        tries: list[Path] = []

        def full(path: Path, text: str) -> None:
            if path.parent != tmp_path / "r":  # the head's disk is another one
                return write_private(path, text)
            tries.append(path)
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(private_writer, "write_private", full)
            stream, other = await pair.dial()
            stream.transport.write(b"x" * 200_000)
            await other.read(200_000)
            _, life = await head.way(tmp_path / "m", await head.token())._asking.ask()
            await head.desk.give_up([life.name])
            assert made._relay is not None
            gate = made._relay.gate
            await eventually(lambda: gate.revoked == {life.name}, "the relay to know all the same")
            await eventually(lambda: len(tries) > 3, "it to try")
            assert carried(head, name) == 0, "what is not on disk is not told"
        await eventually(lambda: carried(head, name) > 200_000, "the head to know")
        stream.transport.write(b"x")
        await other.read(200_001)


# ---- one identity twice -------------------------------------------------------------------------------


async def test_a_copy_of_a_relay_is_told_so_whether_the_first_one_runs_or_not(
    head: HeadWorld, tmp_path: Path
) -> None:
    async with running(agent(head, tmp_path / "r", await relay_token(head))) as name:
        shutil.copytree(tmp_path / "r", tmp_path / "copy")
        await eventually(lambda: head.desk._newsroom.is_followed(MachineName(name)), "it to ask for news")
        with pytest.raises(ConflictError) as in_use:
            await agent(head, tmp_path / "copy").run()
        assert in_use.value.reason is Reason.IDENTITY_IN_USE
    await eventually(lambda: not head.desk._newsroom.is_followed(MachineName(name)), "it to be gone")
    async with running(agent(head, tmp_path / "r")) as again:
        assert again == name
        await eventually(lambda: head.desk._newsroom.is_followed(MachineName(name)), "it to ask for news")
    with pytest.raises(AuthenticationError) as copied:
        await agent(head, tmp_path / "copy").run()
    assert copied.value.reason is Reason.IDENTITY_COPIED
    async with running(agent(head, tmp_path / "copy", await relay_token(head))) as other:
        assert other == "relay-2"


# ---- what is begun again ------------------------------------------------------------------------------


async def test_a_relay_goes_on_and_counts_while_the_head_is_away_and_after_being_begun_again(
    tmp_path: Path,
) -> None:
    state, folder, port = tmp_path / "state", tmp_path / "r", free_port()
    state.mkdir()
    async with head_world(state) as first, hidden_pair(first) as pair:
        made = agent(first, folder, await relay_token(first), port=port)
        async with running(made) as name:
            await pair.follow(first)
            where = first.port
            await first.gateway.stop()
            stream, other = await pair.dial()
            stream.transport.write(b"x" * 300_000)
            await other.read(300_000)
        # It was begun again, and nobody can tell it anything.
        again = agent(first, folder, port=port)
        async with running(again) as same:
            assert same == name
            await eventually(lambda: pair.gateways["b"].counters()["relay_lines"] == [name], "b to come back")
            stream, other = await pair.dial()
            stream.transport.write(b"x" * 300_000)
            await other.read(300_000)
            await eventually(lambda: kept(folder) > 600_000, "it to keep its counts")
            async with head_world(state, mesh_port=where) as second:
                await eventually(lambda: carried(second, name) > 600_000, "the second head to know")
                await eventually(lambda: list(second.desk.relays.offered()) == [name], "it to be offered")
                total = carried(second, name)
    async with head_world(state) as third:
        assert carried(third, name) == total


async def test_a_report_that_is_sent_twice_is_entered_once(head: HeadWorld, tmp_path: Path) -> None:
    async with running(agent(head, tmp_path / "r", await relay_token(head))) as name:
        known = RelayFolder(tmp_path / "r").read_known()
        assert known is not None
        report = {"life": "x", "number": 1, "amounts": [["run-1", "a", "b", 5]]}
        async with head_api(head.url, bundle_pem=head.authority.bundle_pem(), secret=known.secret) as api:
            for _ in range(2):
                await api.call("POST", f"/v1/relays/{name}/report", body={"report": report})
            for wrong in ({"report": {"life": "x"}}, {"report": 3}, {"lines": -1}, {"streams": "x"}):
                with pytest.raises(SpecError):
                    await api.call("POST", f"/v1/relays/{name}/report", body=wrong)
        assert carried(head, name) == 5
        assert [row["bytes"] for row in head.desk.relays.relayed("run-1")] == [5]


async def test_nobody_but_the_relay_speaks_for_it(head: HeadWorld, tmp_path: Path) -> None:
    _, life = await head.way(tmp_path / "m", await head.token())._asking.ask()
    async with running(agent(head, tmp_path / "r", await relay_token(head))) as name:
        for secret in ("", TOKEN, "0" * 48, life.secret):
            async with head_api(head.url, bundle_pem=head.authority.bundle_pem(), secret=secret) as api:
                for method, path in (
                    ("GET", "news"),
                    ("POST", "reach"),
                    ("POST", "certificate"),
                    ("POST", "report"),
                    ("POST", "leave"),
                ):
                    body = {"addresses": [], "port": 1, "request": "x"} if method == "POST" else None
                    with pytest.raises(AuthenticationError):
                        await api.call(method, f"/v1/relays/{name}/{path}", body=body)
        known = RelayFolder(tmp_path / "r").read_known()
        assert known is not None
        async with head_api(head.url, bundle_pem=head.authority.bundle_pem(), secret=known.secret) as api:
            for method, path in (
                ("GET", f"/v1/machines/{name}/mesh"),
                ("GET", "/v1/relays"),
                ("DELETE", f"/v1/relays/{name}"),
            ):
                with pytest.raises(AuthenticationError):
                    await api.call(method, path)


async def test_a_request_that_is_none_makes_no_relay(head: HeadWorld, tmp_path: Path) -> None:
    good = {"request": "x", "clock": relay_agent.wall_clock(), "version": relay_agent.__version__}
    async with head_api(head.url, bundle_pem=head.authority.bundle_pem()) as api:
        for wrong in (
            {"token": "x"},
            {"token": str(await relay_token(head))},
            {"token": str(await relay_token(head)), "clock": None},
            {"token": str(await relay_token(head)), "version": "0"},
            {"token": str(await relay_token(head)), "nameHint": "Ä"},
            {"again": "x"},
            {"again": {"name": "relay-1", "secret": "x"}},
            {"again": {"name": "Ä", "secret": "x"}},
            {"again": {"name": "relay-1", "secret": "\ud800"}},
            {"again": {"name": "relay-1", "secret": "x"}, "request": "\ud800"},
            {},
        ):
            with pytest.raises(MeshError) as raised:
                await api.call("POST", "/v1/relays", body={**good, **wrong})
            assert raised.value.reason is not Reason.INTERNAL
    assert [facts["name"] for facts in head.desk.relays.facts()] == [HEAD]


async def test_every_answer_is_as_the_document_says(head: HeadWorld, tmp_path: Path) -> None:
    await head.token()
    async with (
        running(agent(head, tmp_path / "r", await relay_token(head))),
        head_api(head.url, bundle_pem=head.authority.bundle_pem(), secret=TOKEN) as api,
    ):
        for endpoint in (*routes_mesh.ENDPOINTS, *routes_relays.ENDPOINTS):
            if endpoint.method == "GET" and "{" not in endpoint.path:
                body = await api.call("GET", endpoint.path)
                assert TypeAdapter(endpoint.answers[0].shape).validate_python(body) == body, endpoint.path


# ---- the process --------------------------------------------------------------------------------------


async def start(
    folder: Path, port: int, url: HeadUrl, token: JoinToken | None = None
) -> asyncio.subprocess.Process:
    """As `mesh relay` does."""
    reading, writing = os.pipe()
    environment = dict(os.environ) | ({} if token is None else {JOIN_TOKEN_VARIABLE: str(token)})
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "agents.relay_agent", "--head", url.url),
        *("--listen", f"127.0.0.1:{port}", "--state", str(folder), "--ready-fd", str(writing)),
        env=environment,
        pass_fds=(writing,),
    )
    os.close(writing)
    with os.fdopen(reading) as told:
        line = await asyncio.to_thread(told.readline)
    assert json.loads(line).get("ready"), line
    return process


def kept(folder: Path) -> int:
    """Bytes that the relay has on disk, and that the head was not told of, as far as the relay knows."""
    outbox = RelayFolder(folder).read_outbox()
    reported = outbox.under_way.amounts.values() if outbox.under_way is not None else ()
    return sum(outbox.fresh.values()) + sum(reported)


async def test_a_relay_that_is_killed_is_the_same_one_when_it_is_begun_again(
    head: HeadWorld, tmp_path: Path
) -> None:
    folder, port = tmp_path / "r", free_port()
    process = await start(folder, port, head.url, await relay_token(head))
    async with hidden_pair(head) as pair:
        stream, other = await pair.dial()
        stream.transport.write(b"x" * 500_000)
        await other.read(500_000)
        await eventually(
            lambda: kept(folder) + carried(head, "relay-1") > 500_000, "the counts to be on a disk"
        )
        process.kill()
        assert await stream.reset_seen()
        await process.wait()
        stream, other = await pair.dial()  # through the head's own
        stream.transport.write(b"x")
        await other.read(1)
        assert head.gateway._carried is not None
        assert head.gateway._carried.counters()["streams"] == 1
        again = await start(folder, port, head.url)
        await eventually(
            lambda: all(
                gateway.counters()["relay_lines"] == [HEAD, "relay-1"] for gateway in pair.gateways.values()
            ),
            "both to come back",
        )
        stream, other = await pair.dial()
        stream.transport.write(b"x" * 500_000)
        await other.read(500_000)
        again.send_signal(signal.SIGTERM)
        assert await again.wait() == 0
        # What was on disk when it was killed, and all that came after it: each once.
        assert 1_000_000 < carried(head, "relay-1") < 1_100_000
