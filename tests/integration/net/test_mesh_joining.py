"""Who gets in through a head's mesh port, by which token or secret, and in which words the others are refused."""

from __future__ import annotations

import asyncio
import errno
import math
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from agents import coming_back, head_line, join_mesh, mesh_asking
from agents.gateway_keeper import GatewayKeeper
from agents.gateway_wire import Request, Revoke, SetIdentity
from agents.head_line import HeadUrl, head_api
from agents.machine_identity import read_identity
from agents.mesh_heard import JoinAnswer, MeshNewsHeard
from agents.mesh_ports import free_ports
from coordinator import mesh_news
from mesh.client import connect
from mesh.errors import (
    AuthenticationError,
    ConflictError,
    MeshError,
    MeshTimeoutError,
    NotFoundError,
    RemoteProtocolError,
    SpecError,
    TransportError,
)
from mesh.ids import HEAD, MachineName
from mesh.net.authority import new_authority, new_key_pem, signing_request
from mesh.net.gateway import Gateway
from mesh.net.identity import MachineIdentity
from mesh.net.refusals import Refusal
from mesh.net.relay_client import RelayClient, RelayPlace
from mesh.net.tls import API_NAME, Credentials, stranger_context
from mesh.reasons import Reason
from tests.mesh_head_world import TOKEN, HeadWorld, head_world
from tests.net_world import DEPLOYMENT, eventually

HOUR_S = 3600.0
HALF_A_PAIR = "\ud800"
"""JSON can say it, UTF-8 cannot."""


@pytest.fixture
async def head(tmp_path: Path) -> AsyncIterator[HeadWorld]:
    state = tmp_path / "state"
    state.mkdir()
    async with head_world(state) as world:
        yield world


async def bundle(head: HeadWorld) -> bytes:
    return head.authority.bundle_pem()


async def joined(head: HeadWorld, folder: Path, **settings: Any) -> tuple[JoinAnswer, Any]:
    """What a machine with a good token is told, and what its agent remembers."""
    return await head.way(folder, await head.token(), **settings)._asking.ask()


# ---- tokens -------------------------------------------------------------------------------------------


async def test_a_token_lets_one_machine_in_and_its_identity_is_kept(head: HeadWorld, tmp_path: Path) -> None:
    answer, life = await joined(head, tmp_path / "m", name_hint="gpu")
    assert answer.name == "gpu-1" == life.name
    assert answer.number == 1
    assert answer.news.machines[MachineName("gpu-1")].overlay == ("198.18.0.2", "fd67:6d00::2")
    kept = read_identity(tmp_path / "m")
    assert kept is not None
    assert (kept.name, kept.secret) == ("gpu-1", life.secret)
    assert (tmp_path / "m" / "identity.json").stat().st_mode & 0o077 == 0
    assert life.secret not in (head.state / "mesh-machines.json").read_text()


async def test_a_token_that_expired_was_revoked_or_never_made_is_refused_in_so_many_words(
    head: HeadWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expired = await head.token(ttl_s=0.001)
    await asyncio.sleep(0.002)
    revoked = await head.token()
    await head.desk.revoke_token(revoked.id)
    unknown = replace(revoked, id="0" * 12)
    wrong = replace(await head.token(), secret="0" * 48)
    for token, words in (
        (expired, "expired"),
        (revoked, "revoked"),
        (unknown, "not known"),
        (wrong, "not known"),
    ):
        with pytest.raises(AuthenticationError, match=words):
            await head.way(tmp_path / "m", token)._asking.ask()


async def test_a_head_of_another_authority_hears_no_secret(head: HeadWorld, tmp_path: Path) -> None:
    other = replace(await head.token(), fingerprint="0" * 64)
    with pytest.raises(AuthenticationError, match="not the head that made this token"):
        await head.way(tmp_path / "m", other)._asking.ask()
    assert [record["state"] for record in head.desk.list_tokens()] == ["Open"]


async def test_who_has_never_joined_needs_a_token(head: HeadWorld, tmp_path: Path) -> None:
    with pytest.raises(AuthenticationError, match="token"):
        await head.way(tmp_path / "m")._asking.ask()


async def test_a_token_outlives_the_head(tmp_path: Path) -> None:
    async with head_world(tmp_path) as first:
        token = await first.token()
        await joined(first, tmp_path / "m")
    async with head_world(tmp_path) as second:
        second.number = 7
        answer, _ = await second.way(tmp_path / "n", token)._asking.ask()
        assert answer.number == 2


# ---- clocks and versions --------------------------------------------------------------------------------


@pytest.mark.parametrize(("off_s", "words"), [(HOUR_S, "60 min ahead of"), (-HOUR_S, "60 min behind")])
async def test_a_clock_that_is_an_hour_off_is_said_to_be_so(
    head: HeadWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off_s: float, words: str
) -> None:
    token = await head.token()
    now = head_line.wall_clock
    for module in (head_line, mesh_asking):
        monkeypatch.setattr(module, "wall_clock", lambda: now() + off_s)
    with pytest.raises(AuthenticationError, match=f"This machine's clock is {words}") as raised:
        await head.way(tmp_path / "m", token)._asking.ask()
    assert raised.value.reason is Reason.CLOCK_SKEW
    assert [record["state"] for record in head.desk.list_tokens()] == ["Open"]
    # Of one that comes back and asks no more whom to trust the head says it.
    monkeypatch.undo()
    await head.way(tmp_path / "m", token)._asking.ask()
    monkeypatch.setattr(mesh_asking, "wall_clock", lambda: now() + off_s)
    with pytest.raises(AuthenticationError, match=f"This machine's clock is {words}"):
        await head.way(tmp_path / "m")._asking.ask()


async def test_other_versions_cost_no_token(
    head: HeadWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = await head.token()
    monkeypatch.setattr(mesh_asking, "__version__", "0.0.0")
    with pytest.raises(ConflictError, match=r"0\.0\.0"):
        await head.way(tmp_path / "m", token)._asking.ask()
    monkeypatch.undo()
    await head.way(tmp_path / "m", token)._asking.ask()


# ---- coming back --------------------------------------------------------------------------------------


async def test_a_machine_comes_back_without_a_token_as_another_one(head: HeadWorld, tmp_path: Path) -> None:
    await joined(head, tmp_path / "m")
    answer, life = await head.way(tmp_path / "m")._asking.ask()
    assert answer.name == "machine-2"
    assert sorted(answer.news.revoked) == ["machine-1"]
    assert list(answer.news.machines) == [HEAD, "machine-2"]
    kept = read_identity(tmp_path / "m")
    assert kept is not None
    assert kept.name == life.name


async def test_a_copied_disk_is_told_so_and_joins_by_a_token_of_its_own(
    head: HeadWorld, tmp_path: Path
) -> None:
    await joined(head, tmp_path / "m")
    shutil.copytree(tmp_path / "m", tmp_path / "copy")
    _, life = await head.way(tmp_path / "m")._asking.ask()
    await head.desk.check(life.name, life.secret)  # it speaks
    with pytest.raises(AuthenticationError, match="copy") as raised:
        await head.way(tmp_path / "copy")._asking.ask()
    assert raised.value.reason is Reason.IDENTITY_COPIED
    answer, _ = await head.way(tmp_path / "copy", await head.token())._asking.ask()
    assert answer.name == "machine-3"
    await head.desk.check(life.name, life.secret)  # the first one is still in


async def test_a_copy_that_asks_in_the_same_moment_does_not_push_out_who_has_come_back(
    head: HeadWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await joined(head, tmp_path / "m")
    shutil.copytree(tmp_path / "m", tmp_path / "copy")
    number, is_waiting, may_go_on = head.next_name_number, asyncio.Event(), asyncio.Event()

    async def late_number() -> int:
        is_waiting.set()
        await may_go_on.wait()
        return await number()

    monkeypatch.setattr(head, "next_name_number", late_number)
    copy = asyncio.create_task(head.way(tmp_path / "copy")._asking.ask())
    async with asyncio.timeout(10.0):
        await is_waiting.wait()
    monkeypatch.setattr(head, "next_name_number", number)
    _, life = await head.way(tmp_path / "m")._asking.ask()
    await head.desk.check(life.name, life.secret)  # it speaks
    may_go_on.set()
    with pytest.raises(AuthenticationError) as raised:
        await copy
    assert raised.value.reason is Reason.IDENTITY_COPIED
    await head.desk.check(life.name, life.secret)  # and is still in


async def test_a_copy_of_a_machine_that_is_there_does_not_push_it_out(
    head: HeadWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh_asking, "IN_USE_LIMIT_S", 0.0)
    answer, life = await joined(head, tmp_path / "m")
    shutil.copytree(tmp_path / "m", tmp_path / "copy")
    follows = asyncio.create_task(
        head.desk.follow(life.name, life.secret, answer.news.version, is_gone=lambda: False)
    )
    await eventually(lambda: head.desk._newsroom.is_followed(life.name), "it to follow")
    with pytest.raises(ConflictError) as raised:
        await head.way(tmp_path / "copy")._asking.ask()
    assert raised.value.reason is Reason.IDENTITY_IN_USE
    assert not follows.done()
    follows.cancel()


async def test_a_version_that_nobody_was_told_is_answered_by_the_news(
    head: HeadWorld, tmp_path: Path
) -> None:
    """Digits without end among them, which are no number for the interpreter."""
    answer, life = await joined(head, tmp_path / "m")
    current, _, _ = answer.news.version.partition(".")
    for version in ("", ".", current, f"{current}.-1", f"{current}.{'9' * 5000}", f"{current}.²", "x" * 5000):
        news = await head.desk.follow(life.name, life.secret, version, is_gone=lambda: False)
        assert news["version"] != version


async def test_an_answer_that_was_lost_is_asked_for_again(head: HeadWorld, tmp_path: Path) -> None:
    await joined(head, tmp_path / "m")
    before = (tmp_path / "m" / "identity.json").read_text()
    await head.way(tmp_path / "m")._asking.ask()
    (tmp_path / "m" / "identity.json").write_text(before)  # it died before it was written
    answer, _ = await head.way(tmp_path / "m")._asking.ask()
    assert list(answer.news.machines) == [HEAD, "machine-3"]


async def test_who_has_left_is_forgotten(head: HeadWorld, tmp_path: Path) -> None:
    _, life = await joined(head, tmp_path / "m")
    async with head_api(head.url, bundle_pem=await bundle(head), secret=life.secret) as api:
        await api.call("DELETE", f"/v1/machines/{life.name}")
        with pytest.raises(AuthenticationError):
            await api.call("GET", f"/v1/machines/{life.name}/mesh")
    with pytest.raises(AuthenticationError, match="left"):
        await head.way(tmp_path / "m")._asking.ask()
    assert head.desk.revoked() == [life.name]


# ---- news ---------------------------------------------------------------------------------------------


async def test_whoever_follows_hears_of_every_change(head: HeadWorld, tmp_path: Path) -> None:
    answer, life = await joined(head, tmp_path / "m")
    async with head_api(head.url, bundle_pem=await bundle(head), secret=life.secret) as api:
        path = f"/v1/machines/{life.name}/mesh"
        waiting = asyncio.create_task(api.call("GET", path, query={"after": answer.news.version}))
        await eventually(lambda: head.desk._newsroom.is_followed(life.name), "it to follow")
        await joined(head, tmp_path / "n")
        news = await waiting
        assert set(news["machines"]) == {HEAD, "machine-1", "machine-2"}
        await head.desk.give_up(["machine-2"])
        news = await api.call("GET", path, query={"after": news["version"]})
        assert (set(news["machines"]), news["revoked"]) == ({HEAD, "machine-1"}, ["machine-2"])
        again = await api.call("GET", path, query={"after": "of-another-head"})
        assert again == news


async def test_a_machine_that_was_given_up_hears_it_while_it_waits(head: HeadWorld, tmp_path: Path) -> None:
    answer, life = await joined(head, tmp_path / "m")
    async with head_api(head.url, bundle_pem=await bundle(head), secret=life.secret) as api:
        path = f"/v1/machines/{life.name}/mesh"
        waiting = asyncio.create_task(api.call("GET", path, query={"after": answer.news.version}))
        await eventually(lambda: head.desk._newsroom.is_followed(life.name), "it to follow")
        await head.desk.give_up([life.name])
        with pytest.raises(AuthenticationError, match="given up"):
            await waiting


async def test_one_machine_holds_only_so_many_questions_open(head: HeadWorld, tmp_path: Path) -> None:
    answer, life = await joined(head, tmp_path / "m")
    async with head_api(head.url, bundle_pem=await bundle(head), secret=life.secret) as api:
        path, query = f"/v1/machines/{life.name}/mesh", {"after": answer.news.version}
        asked = [
            asyncio.create_task(api.call("GET", path, query=query, repeat_s=0.0))
            for _ in range(mesh_news.FOLLOWS_MAX + 1)
        ]
        done, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED, timeout=10.0)
        assert len(waiting) == mesh_news.FOLLOWS_MAX
        [refused] = done
        with pytest.raises(TransportError, match="wait for news already"):
            await refused
        await joined(head, tmp_path / "n")
        for news in await asyncio.gather(*waiting):
            assert set(news["machines"]) == {HEAD, "machine-1", "machine-2"}


async def test_a_follower_that_is_gone_is_soon_not_taken_for_one(head: HeadWorld, tmp_path: Path) -> None:
    answer, life = await joined(head, tmp_path / "m")
    async with head_api(head.url, bundle_pem=await bundle(head), secret=life.secret) as api:
        path = f"/v1/machines/{life.name}/mesh"
        waiting = asyncio.create_task(api.call("GET", path, query={"after": answer.news.version}))
        await eventually(lambda: head.desk._newsroom.is_followed(life.name), "it to follow")
        waiting.cancel()
    await eventually(lambda: not head.desk._newsroom.is_followed(life.name), "its wait to end")


async def test_nobody_but_the_machine_hears_its_news(head: HeadWorld, tmp_path: Path) -> None:
    _, life = await joined(head, tmp_path / "m")
    for secret in ("", TOKEN, "0" * 48):
        async with head_api(head.url, bundle_pem=await bundle(head), secret=secret) as api:
            for method, path in (
                ("GET", "mesh"),
                ("POST", "reach"),
                ("POST", "certificate"),
                ("POST", "leave"),
                ("GET", "own"),
            ):
                body = {"addresses": [], "port": None, "request": "x"} if method == "POST" else None
                with pytest.raises(AuthenticationError):
                    await api.call(method, f"/v1/machines/{life.name}/{path}", body=body)
            with pytest.raises(AuthenticationError):
                await api.call("DELETE", f"/v1/machines/{life.name}")
    async with head_api(head.url, bundle_pem=await bundle(head), secret=life.secret) as api:
        with pytest.raises(AuthenticationError):
            await api.call("GET", "/v1/runs")
        with pytest.raises(AuthenticationError):
            await api.call("POST", "/v1/tokens")


# ---- being dialled ------------------------------------------------------------------------------------


async def gateway_of(head: HeadWorld, answer: dict[str, Any], life: Any) -> Gateway:
    gateway = Gateway(deployment=DEPLOYMENT, machine=life.name)
    gateway.set_identity(
        Credentials(certificate_pem=life.certificate_pem, key_pem=life.key_pem, bundle_pem=life.bundle_pem)
    )
    gateway.start(listen_on=(("127.0.0.1", 0),), capture_port=None)
    return gateway


async def test_the_head_finds_out_where_a_machine_can_be_dialled(
    head: HeadWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh.net.probe.PROBE_LIMIT_S", 1.0)
    answer, life = await joined(head, tmp_path / "m")
    gateway = await gateway_of(head, answer, life)
    port = gateway.addresses[0][1]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dead = silent.getsockname()[1]
        async with head_api(head.url, bundle_pem=await bundle(head), secret=life.secret) as api:
            path = f"/v1/machines/{life.name}/reach"
            # The address that it does not say is that which its connection comes from.
            body = {"addresses": [["127.0.0.1", dead], ["127.0.0.1", 1]], "port": port}
            assert (await api.call("POST", path, body=body))["addresses"] == [["127.0.0.1", port]]
            assert head.desk.places()[life.name].gateway == (("127.0.0.1", port),)
            body = {"addresses": [["127.0.0.1", dead]], "port": None}
            assert (await api.call("POST", path, body=body))["addresses"] == []
            for wrong in ({"addresses": "x"}, {"addresses": [["name", 1]]}, {"addresses": [], "port": 70000}):
                with pytest.raises(SpecError):
                    await api.call("POST", path, body=wrong)
    await gateway.stop()


async def test_another_machine_at_that_address_is_not_taken_for_it(
    head: HeadWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, life = await joined(head, tmp_path / "m")
    answer, other = await joined(head, tmp_path / "n")
    gateway = await gateway_of(head, answer, other)
    port = gateway.addresses[0][1]

    async def loopback(seen_from: int) -> str:
        return "127.0.0.1"

    monkeypatch.setattr(head, "source_of", loopback)
    mine = await head.desk.reach(other.name, other.secret, addresses=[], port=port, seen_from=0)
    found = await head.desk.reach(life.name, life.secret, addresses=[], port=port, seen_from=0)
    assert (mine, found) == ([("127.0.0.1", port)], [])
    await gateway.stop()


async def test_a_machine_cannot_have_the_head_look_around(
    head: HeadWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.dial_back.ASKS_MAX", 2)
    _, life = await joined(head, tmp_path / "m")
    dialled: list[Any] = []

    async def probe(machine: MachineName, addresses: Any) -> list[Any]:
        dialled.extend(addresses)
        return []

    monkeypatch.setattr(head, "probe", probe)
    async with head_api(head.url, bundle_pem=await bundle(head), secret=life.secret) as api:
        path = f"/v1/machines/{life.name}/reach"
        named = ["169.254.169.254", "127.0.0.2", "198.18.0.2", "::1", "10.0.0.7"]
        body = {"addresses": [*([host, 80] for host in named), ["10.0.0.7", 22]], "port": 80}
        await api.call("POST", path, body=body)
        assert dialled == [("10.0.0.7", 80), ("127.0.0.1", 80)]  # its like, and where it comes from
        await api.call("POST", path, body=body)
        with pytest.raises(TransportError, match="too often") as raised:
            await api.call("POST", path, body=body, repeat_s=0.0)
        assert raised.value.reason is Reason.LIMIT_EXCEEDED


async def test_a_machine_that_comes_back_under_another_name_is_still_the_one_that_asked_so_often(
    head: HeadWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that joined and asked, again and again, filled the queue in which all wait to be dialled."""
    monkeypatch.setattr("coordinator.dial_back.ASKS_MAX", 2)
    body: dict[str, Any] = {"addresses": [], "port": None, "seen_from": 0}
    _, life = await joined(head, tmp_path / "m")
    for _ in range(2):
        await head.desk.reach(life.name, life.secret, **body)
        _, life = await head.way(tmp_path / "m")._asking.ask()
    with pytest.raises(TransportError, match="too often"):
        await head.desk.reach(life.name, life.secret, **body)
    _, other = await joined(head, tmp_path / "n")
    await head.desk.reach(other.name, other.secret, **body)


async def test_a_machine_that_comes_back_too_often_is_told_when_it_may_again(
    head: HeadWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.mesh_machines.RETURNS_MAX", 2)
    await joined(head, tmp_path / "m")
    await head.way(tmp_path / "m")._asking.ask()
    way = head.way(tmp_path / "m")

    async def nothing() -> None:
        pass

    monkeypatch.setattr(way, "_check_here", nothing)
    way._ports = free_ports()
    way._head_at = (("127.0.0.1", head.port),)  # it has been in: that the head has moved would be no help
    with pytest.raises(
        TransportError, match=r"machine-2 has come back too often\. .*again in \d+ s"
    ) as raised:
        await way.enter()
    assert raised.value.reason is Reason.LIMIT_EXCEEDED
    assert head.desk.revoked() == ["machine-1"]
    await joined(head, tmp_path / "n")


async def test_the_head_s_port_is_a_relay_too(head: HeadWorld, tmp_path: Path) -> None:
    _, life = await joined(head, tmp_path / "m")
    gateway = Gateway(deployment=DEPLOYMENT, machine=life.name)
    gateway.set_identity(
        Credentials(certificate_pem=life.certificate_pem, key_pem=life.key_pem, bundle_pem=life.bundle_pem)
    )
    place = RelayPlace(machine=HEAD, addresses=(("127.0.0.1", head.port),), is_gateway=True)
    await gateway.set_relays([place])
    await eventually(lambda: gateway.counters()["relay_lines"] == [HEAD], "the line")
    client = RelayClient(deployment=DEPLOYMENT, place=place, check=lambda peer: None)
    leg = await client.dial(life.name, head.gateway._machine_context())
    leg.socket.close()
    await gateway.stop()


# ---- strangers ----------------------------------------------------------------------------------------


def handshake(port: int, change: Callable[[ssl.SSLContext], None], *, name: str | None) -> str:
    """What a client of its own sort gets; blocking."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    change(context)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        try:
            with context.wrap_socket(sock, server_hostname=name) as tls:
                tls.sendall(b"GET /v1/version HTTP/1.0\r\n\r\n")
                return tls.recv(100).decode()
        except (ssl.SSLError, ConnectionError) as error:
            return type(error).__name__


async def test_tls_1_2_is_refused_with_and_without_the_api_s_name(head: HeadWorld) -> None:
    def old(context: ssl.SSLContext) -> None:
        context.maximum_version = ssl.TLSVersion.TLSv1_2

    for name in (API_NAME, None):
        said = await asyncio.to_thread(handshake, head.port, old, name=name)
        assert "HTTP" not in said
    await eventually(lambda: head.gateway.gate.counts[Refusal.TLS_VERSION] == 2, "both to be counted")


async def test_without_the_api_s_name_a_certificate_is_asked_for(head: HeadWorld) -> None:
    def plain(context: ssl.SSLContext) -> None:
        pass

    assert "401" in await asyncio.to_thread(handshake, head.port, plain, name=API_NAME)
    for name in (None, "example.org"):
        assert "HTTP" not in await asyncio.to_thread(handshake, head.port, plain, name=name)
    await eventually(lambda: head.gateway.gate.counts[Refusal.NO_CERTIFICATE] == 2, "both to be counted")


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x00\x05hello",
        b"\x16\x03\x01\x40\x01" + b"\0" * 100,
        b"\0" * 64,
    ],
    ids=["http", "no hello", "too long", "zeros"],
)
async def test_garbage_on_the_port_is_counted_and_harms_nobody(
    head: HeadWorld, tmp_path: Path, garbage: bytes
) -> None:
    for _ in range(3):
        reader, writer = await asyncio.open_connection("127.0.0.1", head.port)
        writer.write(garbage)
        writer.write_eof()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(1000), 10)
        writer.close()
    await eventually(lambda: head.gateway.gate.counts.total() == 3, "three to be counted")
    await joined(head, tmp_path / "m")


async def test_a_stranger_that_says_half_a_hello_is_let_go(
    head: HeadWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh.net.api_front.HANDSHAKE_LIMIT_S", 0.2)
    monkeypatch.setattr("mesh.net.greeting.HANDSHAKE_LIMIT_S", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", head.port)
    writer.write(b"\x16\x03\x01\x02\x00")
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(reader.readexactly(1), 10)
    writer.close()
    assert head.gateway.gate.counts[Refusal.HANDSHAKE_TIMEOUT] == 1


async def open_api(head: HeadWorld) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the API that says nothing."""
    before = head.gateway.counters()["streams"]
    ends = await asyncio.open_connection(
        "127.0.0.1", head.port, ssl=stranger_context(), server_hostname=API_NAME
    )
    await eventually(
        lambda: head.gateway.counters()["streams"] != before or ends[0].at_eof(), "it to be led on"
    )
    return ends


@pytest.mark.parametrize("limit", ["STREAMS_PER_SOURCE_MAX", "STREAMS_MAX"])
async def test_who_holds_connections_open_and_says_nothing_shuts_nobody_out(
    head: HeadWorld, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str
) -> None:
    monkeypatch.setattr(f"mesh.net.api_front.{limit}", 3)
    silent = [await open_api(head) for _ in range(3)]
    await asyncio.wait_for(joined(head, tmp_path / "m"), 20)
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await asyncio.wait_for(silent[0][0].readexactly(1), 20)  # the oldest made room
    for _, writer in silent:
        writer.close()
    await eventually(lambda: head.gateway.counters()["streams"] == 0, "all to end")
    assert head.gateway._api is not None
    assert head.gateway._api._open == {}
    assert head.gateway._api._sources == {}


async def test_a_stranger_s_request_has_a_size(head: HeadWorld) -> None:
    async with head_api(head.url, bundle_pem=await bundle(head)) as api:
        with pytest.raises(SpecError, match="limit"):
            await api.call("POST", "/v1/mesh/join", body={"token": "x" * 40_000})


async def test_a_copy_that_has_a_token_does_not_wait_for_the_machine_that_it_is_a_copy_of(
    head: HeadWorld, tmp_path: Path
) -> None:
    answer, life = await joined(head, tmp_path / "m")
    shutil.copytree(tmp_path / "m", tmp_path / "copy")
    follows = asyncio.create_task(
        head.desk.follow(life.name, life.secret, answer.news.version, is_gone=lambda: False)
    )
    await eventually(lambda: head.desk._newsroom.is_followed(life.name), "it to follow")
    way = head.way(tmp_path / "copy", await head.token())
    other, _ = await asyncio.wait_for(way._asking.ask(), 10)
    assert other.name == "machine-2"
    assert life.name in head.desk.places()
    follows.cancel()


async def test_a_token_in_a_unit_file_that_has_been_used_is_no_reason_to_stay_out(
    head: HeadWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine lost its power: its head believes for half a minute that it is there, and its token is used."""
    monkeypatch.setattr(coming_back, "IN_USE_AGAIN_S", 0.05)
    token = await head.token()
    way = head.way(tmp_path / "m", token)
    answer, life = await way._asking.ask()
    follows = asyncio.create_task(
        head.desk.follow(life.name, life.secret, answer.news.version, is_gone=lambda: False)
    )
    await eventually(lambda: head.desk._newsroom.is_followed(life.name), "it to follow")
    asking = asyncio.create_task(head.way(tmp_path / "m", token)._asking.ask())
    await asyncio.sleep(0)
    follows.cancel()  # the head has noticed
    again, _ = await asyncio.wait_for(asking, 20)
    assert again.name == "machine-2"
    assert sorted(again.news.revoked) == [life.name]


async def test_two_machines_that_want_one_name_get_two(head: HeadWorld, tmp_path: Path) -> None:
    names = [(await joined(head, tmp_path / folder, name_hint="gpu"))[0].name for folder in ("a", "b")]
    assert names == ["gpu-1", "gpu-2"]


async def test_a_machine_s_certificate_is_not_the_api_s(head: HeadWorld, tmp_path: Path) -> None:
    """A machine that stands between others and the head cannot be the head's API for them."""
    _, life = await joined(head, tmp_path / "m")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    pem = tmp_path / "pem"
    pem.write_bytes(life.certificate_pem + life.key_pem)
    context.load_cert_chain(pem)

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(never, "127.0.0.1", 0, ssl=context)
    between = HeadUrl.parse(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    async with head_api(between, bundle_pem=await bundle(head), secret=life.secret) as api:
        with pytest.raises(TransportError, match="certificate"):
            await api.call("GET", "/v1/version", repeat_s=0.0)
    server.close()


async def test_a_request_that_is_none_lets_nobody_in_and_is_no_fault_of_ours(head: HeadWorld) -> None:
    key = new_key_pem()
    good = {
        "request": signing_request(key).decode(),
        "clock": head_line.wall_clock(),
        "version": mesh_asking.__version__,
    }
    async with head_api(head.url, bundle_pem=await bundle(head)) as api:
        for wrong in (
            {"token": "x"},
            {"token": str(await head.token()), "clock": None},
            {"token": str(await head.token()), "request": "x"},
            {"token": str(await head.token()), "nameHint": "Ä"},
            {"again": "x"},
            {"again": {"name": "head", "secret": "x"}},
            {"token": None},
            {},
            *[{"token": "x", "clock": clock} for clock in (1e400, 10**400, float("nan"))],
            {"token": str(await head.token()), "nameHint": HALF_A_PAIR},
            {"token": str(await head.token()), "request": HALF_A_PAIR},
            {"again": {"name": HALF_A_PAIR, "secret": "x"}},
            {"again": {"name": "head", "secret": HALF_A_PAIR}},
        ):
            with pytest.raises(MeshError) as raised:
                await api.call("POST", "/v1/mesh/join", body={**good, **wrong})
            assert raised.value.reason is not Reason.INTERNAL, wrong
    assert list(head.desk.places()) == [HEAD]


@pytest.mark.parametrize(
    "number", [10**400, math.nan, math.inf, -math.inf], ids=["large", "nan", "inf", "-inf"]
)
async def test_a_time_that_is_no_number_of_seconds_is_refused(
    head: HeadWorld, monkeypatch: pytest.MonkeyPatch, number: float
) -> None:
    """JSON of Python's has them all, and integers that no float can be."""
    monkeypatch.setenv("GANGMESH_AUTHORITY", str(head.state / "authority" / "bundle.pem"))
    async with connect(url=head.url.url, token=TOKEN) as client:
        with pytest.raises(SpecError):
            await client.create_token(ttl_s=number)
        with pytest.raises(SpecError):
            await client.rotate_authority(overlap_s=number)


async def test_a_client_elsewhere_knows_the_head_by_its_authority(
    head: HeadWorld, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bundle_file = head.state / "authority" / "bundle.pem"
    monkeypatch.setenv("GANGMESH_AUTHORITY", str(bundle_file))
    async with connect(url=head.url.url, token=TOKEN) as client:
        assert await client.list_tokens() == []
        made = await client.create_token(ttl_s=60)
        assert [facts["state"] for facts in await client.list_tokens()] == ["Open"]
        revoked = await client.revoke_token(made["facts"]["id"])
        assert revoked["state"] == "Revoked"
        with pytest.raises(NotFoundError):
            await client.revoke_token("0" * 12)
    stranger = tmp_path / "stranger.pem"
    stranger.write_bytes(new_authority(DEPLOYMENT, now=head_line.wall_clock()).certificate_pem)
    monkeypatch.setenv("GANGMESH_AUTHORITY", str(stranger))
    async with connect(url=head.url.url, token=TOKEN) as client:
        with pytest.raises(TransportError, match="certificate"):
            await client.list_tokens()
    for wrong in (tmp_path / "none.pem", head.state / "join-tokens.json"):
        monkeypatch.setenv("GANGMESH_AUTHORITY", str(wrong))
        with pytest.raises(AuthenticationError):
            connect(url=head.url.url, token=TOKEN)


async def test_a_gateway_that_does_not_take_a_certificate_gets_the_next_one(
    head: HeadWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join_mesh, "RENEW_EVERY_S", 0.0)
    way = head.way(tmp_path / "m", await head.token())
    _, life = await way._asking.ask()
    has_taken = asyncio.Event()

    class Gateway:
        is_up = False

        async def tell(self, request: Any) -> None:
            if self.is_up:
                has_taken.set()
            self.is_up = True
            raise MeshTimeoutError("The gateway does not come up.", timeout_s=60.0)

    renewing = asyncio.create_task(way._renew(life, cast(GatewayKeeper, Gateway())))
    taking = asyncio.create_task(has_taken.wait())
    await asyncio.wait([renewing, taking], return_when=asyncio.FIRST_COMPLETED, timeout=10.0)
    assert has_taken.is_set() and not renewing.done()
    renewing.cancel()
    await asyncio.wait([renewing])


class FaultyGateway:
    """Which knows what it was told; the first time it refuses what its test wants."""

    def __init__(self, fault: type[Request] | None = None) -> None:
        self.told: list[Request] = []
        self._fault = fault

    async def tell(self, request: Request) -> None:
        if self._fault is not None and isinstance(request, self._fault):
            self._fault = None
            raise MeshTimeoutError("The gateway does not come up.", timeout_s=60.0)
        self.told.append(request)

    def trusts(self) -> list[bytes]:
        return [r.credentials.bundle_pem for r in self.told if isinstance(r, SetIdentity)]


@pytest.mark.parametrize("fault", ["the gateway is away", "the disk is full"])
async def test_a_new_authority_that_could_not_be_told_or_kept_comes_again(
    head: HeadWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    way = head.way(tmp_path / "m", await head.token())
    answer, life = await way._asking.ask()
    before = life.bundle_pem
    news = replace(answer.news, version="next", bundle_pem=before + before)
    gateway = FaultyGateway(SetIdentity if fault == "the gateway is away" else None)
    keep = way._asking.keep

    def full(_: object) -> None:
        monkeypatch.setattr(way._asking, "keep", keep)
        raise OSError(errno.ENOSPC, "No space left on device")

    if fault == "the disk is full":
        monkeypatch.setattr(way._asking, "keep", full)
    with pytest.raises((OSError, MeshTimeoutError)):
        await way._hear(life, cast(GatewayKeeper, gateway), news)
    if fault == "the disk is full":  # whom to trust and whom not any more is heard at once
        assert gateway.trusts() == [news.bundle_pem]
        assert any(isinstance(request, Revoke) for request in gateway.told)
    assert life.version == answer.news.version
    assert await way._hear(life, cast(GatewayKeeper, gateway), news)
    assert gateway.trusts() == [news.bundle_pem]
    known = read_identity(tmp_path / "m")
    assert known is not None and known.bundle.encode() == news.bundle_pem == life.bundle_pem
    assert (life.version, way._renew_now.is_set()) == ("next", True)


async def test_news_and_a_renewal_at_once_leave_the_gateway_with_both(
    head: HeadWorld, tmp_path: Path
) -> None:
    way = head.way(tmp_path / "m", await head.token())
    answer, life = await way._asking.ask()
    may_take = asyncio.Event()

    class Slow(FaultyGateway):
        async def tell(self, request: Request) -> None:
            await may_take.wait()
            await super().tell(request)

    gateway = Slow()
    told = cast(GatewayKeeper, gateway)
    news = replace(answer.news, version="next", bundle_pem=life.bundle_pem * 2)
    heard = asyncio.create_task(way._hear(life, told, news))
    renewed = asyncio.create_task(way._tell_identity(life, told, key_pem=b"k", certificate_pem=b"c"))
    await asyncio.sleep(0)
    may_take.set()
    await asyncio.gather(heard, renewed)
    [*_, last] = [request for request in gateway.told if isinstance(request, SetIdentity)]
    assert (last.credentials.bundle_pem, last.credentials.key_pem) == (news.bundle_pem, b"k")


async def test_a_renewal_that_failed_is_not_put_off_for_half_a_day(
    head: HeadWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rotation's end does not wait that long."""
    monkeypatch.setattr(join_mesh, "RENEW_FAILED_S", 0.01)
    way = head.way(tmp_path / "m", await head.token())
    _, life = await way._asking.ask()
    api, before = way._api, life.certificate_pem

    def away(_: object) -> Any:
        monkeypatch.setattr(way, "_api", api)
        raise TransportError("the head is away")

    monkeypatch.setattr(way, "_api", away)
    way._renew_now.set()
    renewing = asyncio.create_task(way._renew(life, cast(GatewayKeeper, FaultyGateway())))
    await eventually(lambda: life.certificate_pem != before, "it to be renewed")
    renewing.cancel()
    await asyncio.wait([renewing])


async def test_a_renewed_certificate_is_of_the_same_machine(head: HeadWorld, tmp_path: Path) -> None:
    from mesh.net.authority import read_certificate

    _, life = await joined(head, tmp_path / "m")
    async with head_api(head.url, bundle_pem=await bundle(head), secret=life.secret) as api:
        answer = await api.call(
            "POST",
            f"/v1/machines/{life.name}/certificate",
            body={"request": signing_request(new_key_pem()).decode()},
        )
    shown = read_certificate(answer["certificate"].encode())
    assert shown.identity == MachineIdentity(deployment=DEPLOYMENT, machine=MachineName(life.name))


@pytest.mark.parametrize("url", ["http://h:1", "https://h", "ray://h:1", "https://:1", ""])
def test_what_is_no_mesh_port_is_refused_before_it_is_asked(url: str) -> None:
    with pytest.raises(SpecError):
        HeadUrl.parse(url)


async def test_a_head_that_is_not_there_is_said_to_be_so(head: HeadWorld, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(TransportError, match="cannot be reached"):
        await head.way(
            tmp_path / "m", await head.token(), head=HeadUrl.parse(f"https://127.0.0.1:{port}")
        )._asking.ask()


async def test_an_agent_whose_head_is_gone_says_what_its_owner_can_do(
    head: HeadWorld, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, life = await joined(head, tmp_path / "m")
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    way = head.way(tmp_path / "m", head=HeadUrl.parse(f"https://127.0.0.1:{port}"))
    following = asyncio.create_task(way._follow(life, cast(GatewayKeeper, None)))
    await eventually(lambda: "mesh join https://NEW-ADDRESS" in caplog.text, "it to be said")
    following.cancel()
    assert "cannot be reached" in caplog.text


NEWS: dict[str, Any] = {
    "version": "1.2",
    "cluster": "cluster-1",
    "bundle": "PEM",
    "machines": {"head": {"gateway": [], "overlay": ["198.18.0.1"]}},
    "relays": {},
    "revoked": [],
}


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        "news",
        {},
        {**NEWS, "machines": {}},
        {**NEWS, "machines": {"head": {}}},
        {**NEWS, "machines": {"head": {"gateway": [["h", "x"]], "overlay": []}}},
        {**NEWS, "machines": {"head": {"gateway": [["h"]], "overlay": []}}},
        {**NEWS, "relays": {"r": 1}},
        {**NEWS, "relays": []},
        {**NEWS, "revoked": None},
        {name: value for name, value in NEWS.items() if name != "version"},
    ],
)
def test_news_that_is_none_is_a_refused_message(wrong: Any) -> None:
    assert MeshNewsHeard.read(NEWS).version == "1.2"
    with pytest.raises(RemoteProtocolError):
        MeshNewsHeard.read(wrong)


async def test_a_head_that_talks_nonsense_is_told_of_asked_again_and_given_up(
    head: HeadWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended the news in silence: the machine stayed, and heard of nobody any more."""
    for name, value in {"AGAIN_FIRST_S": 0.01, "AGAIN_MAX_S": 0.01, "NONSENSE_MAX": 3}.items():
        monkeypatch.setattr(join_mesh, name, value)
    _, life = await joined(head, tmp_path / "m")
    way = head.way(tmp_path / "m")
    way._over = asyncio.get_running_loop().create_future()
    life.version = "of before"
    monkeypatch.setattr(head.desk, "_news", lambda: {"version": "2", "machines": {"x": 1}})
    asked = [0]
    follow = head.desk.follow

    async def count(*words: Any, **more: Any) -> Any:
        asked[0] += 1
        return await follow(*words, **more)

    monkeypatch.setattr(head.desk, "follow", count)
    following = way._beside(way._follow(life, cast(GatewayKeeper, None)), "news")
    assert "makes no sense" in await asyncio.wait_for(way.until_over(), 20)
    assert asked == [3]
    assert "The head's answer is none" in caplog.text
    await following


async def test_a_fault_of_ours_in_the_news_ends_a_life_and_is_told(
    head: HeadWorld, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    way = head.way(tmp_path / "m")
    way._over = asyncio.get_running_loop().create_future()

    async def fails() -> None:
        raise RuntimeError("x")

    way._beside(fails(), "news")
    assert "RuntimeError" in await asyncio.wait_for(way.until_over(), 20)
    assert "news: a fault of this program" in caplog.text
