"""A token is for one machine, also when joining fails half way: who asked may ask again with its key, nobody else."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agents import mesh_asking
from agents.head_line import HeadUrl
from agents.join_key import FILE_NAME
from agents.machine_identity import FILE_NAME as IDENTITY_NAME
from agents.relay_agent import RelayAgent, RelaySettings
from agents.relay_folder import KNOWN_NAME, RelayFolder
from mesh.errors import AuthenticationError, MeshError, StorageError, TransportError
from mesh.ids import MachineName
from mesh.net.tokens import JoinToken
from tests.mesh_head_world import HeadWorld, head_world


@pytest.fixture
async def head(tmp_path: Path) -> AsyncIterator[HeadWorld]:
    state = tmp_path / "state"
    state.mkdir()
    async with head_world(state) as world:
        yield world


Ask = Callable[[HeadWorld, Path, JoinToken], Any]


async def as_machine(head: HeadWorld, folder: Path, token: JoinToken) -> Any:
    """Who it is then: its name and secret."""
    _, life = await head.way(folder, token)._asking.ask()
    return life


async def as_relay(head: HeadWorld, folder: Path, token: JoinToken) -> Any:
    folder.mkdir(exist_ok=True)
    settings = RelaySettings(head=head.url, token=token, listen=("127.0.0.1", 1))
    return await RelayAgent(settings, RelayFolder(folder))._enter()


async def token_for(head: HeadWorld, ask: Ask) -> JoinToken:
    return JoinToken.parse((await head.desk.create_token(None, for_relay=ask is as_relay))[0])


async def use_secret(head: HeadWorld, ask: Ask, life: Any) -> None:
    """The head hears of it."""
    desk = head.desk.relays if ask is as_relay else head.desk
    await desk._check(life.name, life.secret)


def forget_identity(folder: Path) -> None:
    for name in (IDENTITY_NAME, KNOWN_NAME):
        (folder / name).unlink(missing_ok=True)


@contextlib.contextmanager
def lost_answers(head: HeadWorld, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The head does what it is asked, and the connection breaks before it has said so."""

    class Lost(Exception):
        pass

    with monkeypatch.context() as patch:
        for module in (mesh_asking, __import__("agents.relay_agent", fromlist=["x"])):
            real = module.head_api

            @contextlib.asynccontextmanager
            async def cut(url: HeadUrl, real: Any = real, **trust: Any) -> AsyncIterator[Any]:
                async with real(url, **trust) as api:
                    call = api.call

                    async def lose(*words: Any, **more: Any) -> None:
                        await call(*words, **more)
                        raise Lost

                    api.call = lose
                    yield api

            patch.setattr(module, "head_api", cut)
        with pytest.raises(Lost):
            yield


@pytest.mark.parametrize("ask", [as_machine, as_relay])
async def test_an_answer_that_is_lost_costs_no_token(
    head: HeadWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Ask
) -> None:
    token = await token_for(head, ask)
    with lost_answers(head, monkeypatch):
        await ask(head, tmp_path / "m", token)
    assert [facts["state"] for facts in head.desk.list_tokens()] == ["Used"]
    with pytest.raises(AuthenticationError, match="used already"):
        await ask(head, tmp_path / "thief", token)
    assert not (tmp_path / "thief" / IDENTITY_NAME).exists()
    life = await ask(head, tmp_path / "m", token)
    await use_secret(head, ask, life)
    assert not (tmp_path / "m" / FILE_NAME).exists()
    assert len(head.desk.places()) + len(head.desk.relays.facts()) == 3  # the head twice, and it: once


@pytest.mark.parametrize("ask", [as_machine, as_relay])
async def test_who_has_been_heard_has_used_its_token_up_whatever_key_comes(
    head: HeadWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Ask
) -> None:
    token = await token_for(head, ask)
    with lost_answers(head, monkeypatch):
        await ask(head, tmp_path / "m", token)
    shutil.copytree(tmp_path / "m", tmp_path / "copy")  # of the disk, key and all
    life = await ask(head, tmp_path / "m", token)
    await use_secret(head, ask, life)
    with pytest.raises(AuthenticationError, match="used already"):
        await ask(head, tmp_path / "copy", token)


async def test_of_two_copies_that_ask_at_once_one_is_in(
    head: HeadWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = await head.token()
    with lost_answers(head, monkeypatch):
        await as_machine(head, tmp_path / "m", token)
    shutil.copytree(tmp_path / "m", tmp_path / "copy")
    first = await as_machine(head, tmp_path / "m", token)
    second = await as_machine(head, tmp_path / "copy", token)
    await head.desk._check(second.name, second.secret)
    with pytest.raises(AuthenticationError):
        await head.desk._check(first.name, first.secret)
    with pytest.raises(AuthenticationError, match="Somebody else has come back"):
        await head.way(tmp_path / "m")._asking.ask()
    assert list(head.desk.places())[1:] == [second.name]


async def test_an_answer_that_is_lost_again_and_again_is_asked_for_at_the_pace_of_who_comes_back(
    head: HeadWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.mesh_machines.RETURNS_MAX", 2)
    token = await head.token()
    for _ in range(2):
        with lost_answers(head, monkeypatch):
            await as_machine(head, tmp_path / "m", token)
    with pytest.raises(TransportError, match="too often"):
        await as_machine(head, tmp_path / "m", token)


async def test_who_has_come_back_as_another_has_used_its_token_up(
    head: HeadWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = await head.token()
    with lost_answers(head, monkeypatch):
        await as_machine(head, tmp_path / "m", token)
    key = (tmp_path / "m" / FILE_NAME).read_bytes()
    await as_machine(head, tmp_path / "m", token)
    _, life = await head.way(
        tmp_path / "m"
    )._asking.ask()  # again, by its identity: its gateway did not start
    await head.desk._check(life.name, life.secret)
    forget_identity(tmp_path / "m")
    (tmp_path / "m" / FILE_NAME).write_bytes(key)
    with pytest.raises(AuthenticationError, match="used already"):
        await as_machine(head, tmp_path / "m", token)


@pytest.mark.parametrize("ask", [as_machine, as_relay])
async def test_what_fails_at_the_head_costs_no_token(
    head: HeadWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Ask
) -> None:
    token = await token_for(head, ask)
    with monkeypatch.context() as patch:

        async def full() -> int:
            raise StorageError("The disk is full.")

        patch.setattr(head, "next_name_number", full)
        with pytest.raises(StorageError):
            await ask(head, tmp_path / "m", token)
        patch.undo()
        for module in ("mesh_machines.MACHINES_MAX", "mesh_relays.RELAYS_MAX"):
            patch.setattr(f"coordinator.{module}", 0)
        with pytest.raises(MeshError, match="takes no more"):
            await ask(head, tmp_path / "m", token)
    assert [facts["state"] for facts in head.desk.list_tokens()] == ["Open"]
    await ask(head, tmp_path / "other", token)


async def test_a_token_that_is_used_is_used_after_the_head_began_again_and_its_key_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    async with head_world(state) as head:
        token = await head.token()
        with lost_answers(head, monkeypatch):
            await as_machine(head, tmp_path / "m", token)
    async with head_world(state) as head:
        head.number = 1
        with pytest.raises(AuthenticationError, match="used already"):
            await as_machine(head, tmp_path / "thief", token)
        life = await as_machine(head, tmp_path / "m", token)
        assert (life.name, head.desk.revoked()) == ("machine-2", [MachineName("machine-1")])


async def test_a_stranger_makes_the_head_sign_nothing(
    head: HeadWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signatures cost: a secret is looked at first."""
    relay = await as_relay(head, tmp_path / "r", await token_for(head, as_relay))
    machine = await as_machine(head, tmp_path / "m", await head.token())
    signed: list[str] = []
    for name in ("sign_machine", "sign_relay"):
        monkeypatch.setattr(head.authority, name, lambda *words, name=name: signed.append(name))
    for desk, known in ((head.desk.relays, relay), (head.desk, machine)):
        good = {"request": "x", "clock": mesh_asking.wall_clock(), "version": mesh_asking.__version__}
        for shown in (
            {"token": str(await head.token())[:-1] + "g"},
            {"token": f"gm1.{'0' * 12}.{'0' * 48}.{'0' * 64}"},
            {"again": {"name": known.name, "secret": "x"}},
        ):
            with pytest.raises(MeshError):
                await desk.join({**good, **shown})
        with pytest.raises(MeshError):
            await desk.renew(known.name, "x", "x")
    assert signed == []
