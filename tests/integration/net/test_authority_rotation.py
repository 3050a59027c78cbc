"""The authority is replaced while a machine and a relay take part: who trusts whom, when, and who is waited for."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature

from agents.gateway_keeper import GatewayKeeper
from agents.gateway_wire import SetIdentity
from agents.join_mesh import MeshWay
from agents.machine_identity import read_identity
from agents.mesh_asking import Membership
from agents.relay_agent import RelayAgent, RelaySettings
from agents.relay_folder import RelayFolder
from coordinator import mesh_authority
from coordinator.mesh_authority import MeshAuthority
from mesh.client import connect
from mesh.errors import ConflictError, DeploymentError, SpecError, TransportError
from mesh.net import authority as rules
from mesh.net.tls import Credentials
from mesh.net.tokens import JoinToken
from mesh.private_files import write_private
from tests.mesh_head_world import TOKEN, HeadWorld, head_world
from tests.net_world import eventually


@pytest.fixture
async def head(tmp_path: Path) -> AsyncIterator[HeadWorld]:
    state = tmp_path / "state"
    state.mkdir()
    async with head_world(state) as world:
        yield world


class GatewayOfMachine:
    """What a machine's agent has told it."""

    credentials: Credentials | None = None

    async def tell(self, request: Any) -> None:
        if isinstance(request, SetIdentity):
            self.credentials = request.credentials


class Machine:
    """One that follows the news, and renews its certificate."""

    def __init__(self, way: MeshWay) -> None:
        self.gateway = GatewayOfMachine()
        self._way = way
        self._tasks: list[asyncio.Task[None]] = []

    async def join(self) -> str:
        _, life = await self._way._asking.ask()
        self._way._over = asyncio.get_running_loop().create_future()
        gateway = cast(GatewayKeeper, self.gateway)
        self._tasks = [
            asyncio.create_task(self._way._follow(life, gateway)),
            asyncio.create_task(self._way._renew(life, gateway)),
        ]
        return str(life.name)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    def trusts(self, authority: rules.Authority) -> bool:
        shown = self.gateway.credentials
        return shown is not None and authority.certificate_pem in shown.bundle_pem

    def is_signed_by(self, authority: rules.Authority) -> bool:
        shown = self.gateway.credentials
        return shown is not None and signed_by(shown.certificate_pem, authority)


def signed_by(certificate_pem: bytes, authority: rules.Authority) -> bool:
    try:
        certificate = x509.load_pem_x509_certificate(certificate_pem)
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(authority.certificate_pem))
    except (InvalidSignature, ValueError):
        return False
    return True


def hurry(head: HeadWorld, **changes: float) -> None:
    """As if the rotation had begun earlier: its times are facts in the authority's file."""
    path = head.state / "authority" / "authority.json"
    rotation, deployment = mesh_authority._from_json(path.read_text())
    write_private(path, mesh_authority._to_json(deployment, replace(rotation, **changes)))


async def test_from_the_first_authority_to_the_next_without_a_break(
    head: HeadWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = head.state / "authority" / "bundle.pem"
    monkeypatch.setenv("GANGMESH_AUTHORITY", str(bundle))
    first = head.authority.rotation().signing
    machine = Machine(head.way(tmp_path / "m", await head.token()))
    relay_token = JoinToken.parse((await head.desk.create_token(None, for_relay=True))[0])
    (tmp_path / "r").mkdir()
    settings = RelaySettings(head=head.url, token=relay_token, listen=("127.0.0.1", free_port()))
    relay = RelayAgent(settings, RelayFolder(tmp_path / "r"))
    serving = asyncio.create_task(relay.run())
    await machine.join()
    try:
        await eventually(lambda: relay._relay is not None and relay._relay.addresses, "the relay to be there")
        async with connect(url=head.url.url, token=TOKEN) as client:
            facts = await client.rotate_authority()
            assert facts["waitsFor"] != [] and facts["signsAt"] is not None
            with pytest.raises(ConflictError, match="under way"):
                await client.rotate_authority()
        second = head.authority.rotation().next
        assert second is not None
        await eventually(lambda: machine.trusts(second), "the machine to trust the next one")
        await eventually(lambda: head.desk.rotation.facts()["waitsFor"] == [], "everybody to have heard")
        await head.desk.rotation.advance()
        assert head.authority.rotation().signing == first, "the overlap is not over"

        hurry(head, promote_at=1.0)
        await head.desk.rotation.advance()
        assert head.authority.rotation().signing == second
        head.use_certificates()
        await eventually(lambda: machine.is_signed_by(second), "the machine's new certificate")

        def relay_is_signed_anew() -> bool:
            known = RelayFolder(tmp_path / "r").read_known()
            return known is not None and signed_by(known.certificate.encode(), second)

        await eventually(relay_is_signed_anew, "the relay's new certificate")
        assert machine.trusts(first)
        _, late = await head.way(tmp_path / "late", await head.token())._asking.ask()
        assert signed_by(late.certificate_pem, second)
        assert late.bundle_pem == second.certificate_pem + first.certificate_pem
        await head.desk.give_up([late.name])

        hurry(head, promoted_at=1.0)
        await head.desk.rotation.advance()
        assert head.authority.rotation() == rules.Rotation(signing=second)
        await eventually(lambda: not machine.trusts(first), "the first one to be forgotten")
        async with connect(url=head.url.url, token=TOKEN) as client:
            facts = await client.authority()
        assert (facts["next"], facts["old"], facts["waitsFor"]) == (None, None, [])
        assert bundle.read_bytes() == second.certificate_pem
    finally:
        await machine.stop()
        relay.stop()
        await serving


async def test_a_machine_that_has_not_heard_is_waited_for_until_it_is_given_up(
    head: HeadWorld, tmp_path: Path
) -> None:
    _, life = await head.way(tmp_path / "m", await head.token())._asking.ask()  # and never follows
    await head.desk.rotation.begin(None)
    hurry(head, promote_at=1.0)
    await head.desk.rotation.advance()
    assert head.desk.rotation.facts()["waitsFor"] == [life.name]
    assert head.authority.rotation().next is not None
    await head.desk.give_up([life.name])
    await head.desk.rotation.advance()
    assert head.authority.rotation().next is None


async def test_a_head_that_begins_again_goes_on_with_the_rotation_and_waits_for_everybody_anew(
    tmp_path: Path,
) -> None:
    async with head_world(tmp_path) as world:
        machine = Machine(world.way(tmp_path / "m", await world.token()))
        name = await machine.join()
        await world.desk.rotation.begin(None)
        await eventually(lambda: world.desk.rotation.facts()["waitsFor"] == [], "everybody to have heard")
        port = world.port
    async with head_world(tmp_path, mesh_port=port) as again:
        second = again.authority.rotation().next
        assert second is not None
        assert again.desk.rotation.facts()["waitsFor"] in ([name], [])
        await eventually(lambda: again.desk.rotation.facts()["waitsFor"] == [], "it to have heard again")
        hurry(again, promote_at=1.0)
        await again.desk.rotation.advance()
        assert again.authority.rotation().signing == second
        await machine.stop()


@pytest.mark.parametrize("overlap_s", [0.0, 12 * 3600.0 - 1, 30 * 86400.0 + 1, -1.0])
async def test_an_overlap_that_would_break_something_is_refused(head: HeadWorld, overlap_s: float) -> None:
    with pytest.raises(SpecError, match="between 12 h"):
        await head.desk.rotation.begin(overlap_s)
    assert head.authority.rotation().next is None


async def test_a_client_whose_bundle_is_older_is_told_what_to_do(
    head: HeadWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy.pem"
    copy.write_bytes(head.authority.bundle_pem())
    monkeypatch.setenv("GANGMESH_AUTHORITY", str(copy))
    token = await head.token()
    await head.desk.rotation.begin(None)
    hurry(head, promote_at=1.0)
    await head.desk.rotation.advance()
    head.use_certificates()
    async with connect(url=head.url.url, token=TOKEN) as client:
        with pytest.raises(TransportError, match="certificate"):
            await client.authority()
    # So is who comes with a token of before.
    with pytest.raises(TransportError) as raised:
        await head.way(tmp_path / "m", token)._asking.ask()
    assert "rotated" in (raised.value.hint or "")


async def test_a_rotation_that_began_on_a_full_disk_is_told_to_everybody_all_the_same(
    head: HeadWorld, tmp_path: Path
) -> None:
    """The authority is on the disk, the bundle for others is not: the one who asked is told of a failure."""
    machine = Machine(head.way(tmp_path / "m", await head.token()))
    await machine.join()
    bundle = head.state / "authority" / "bundle.pem"
    bundle.unlink()
    bundle.mkdir()  # so that it cannot be written
    with pytest.raises(DeploymentError):
        await head.desk.rotation.begin(None)
    second = head.authority.rotation().next
    assert second is not None
    await eventually(lambda: machine.trusts(second), "the machine to trust the next one")
    bundle.rmdir()
    await head.desk.rotation.advance()
    assert bundle.read_bytes() == head.authority.bundle_pem()
    await machine.stop()


async def test_a_rotation_that_another_process_began_waits_for_everybody(
    head: HeadWorld, tmp_path: Path
) -> None:
    """Such as a copy of the authority's file that was put back, from the middle of a rotation."""
    machine = Machine(head.way(tmp_path / "m", await head.token()))
    name = await machine.join()
    await eventually(lambda: head.desk.rotation._waits_for() == set(), "the machine to follow")
    await machine.stop()
    MeshAuthority.open(head.state).introduce(overlap_s=-1.0)
    await head.desk.rotation.advance()
    assert head.authority.rotation().next is not None
    assert head.desk.rotation.facts()["waitsFor"] == [name]


async def test_a_machine_whose_disk_is_full_trusts_the_next_authority_and_is_waited_for_until_it_is_kept(
    head: HeadWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(head.way(tmp_path / "m", await head.token()))
    name = await machine.join()
    await eventually(lambda: head.desk.rotation._waits_for() == set(), "the machine to follow")
    keep = machine._way._asking.keep

    def full(life: Membership) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(machine._way._asking, "keep", full)
    await head.desk.rotation.begin(None)
    second = head.authority.rotation().next
    assert second is not None
    await eventually(lambda: machine.trusts(second), "the machine to trust the next one")
    assert head.desk.rotation.facts()["waitsFor"] == [name]
    monkeypatch.setattr(machine._way._asking, "keep", keep)
    await eventually(lambda: head.desk.rotation.facts()["waitsFor"] == [], "it to have kept it")
    known = read_identity(tmp_path / "m")
    assert known is not None and second.certificate_pem.decode() in known.bundle
    await machine.stop()


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])
