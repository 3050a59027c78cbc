"""Machines that join from elsewhere: what is asked, what is answered, and whose folder and environment are used."""

from __future__ import annotations

import asyncio
import errno
import platform
import socket
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RpcError

from agents import join
from agents.child import Child, spawn
from agents.join_plain import JoinSettings, PlainWay
from agents.machine_folder import FOLDER_VARIABLE, machine_folder, note_environment, owner_environment
from agents.machine_state import machine_state
from agents.raylet import RayInstall
from coordinator.deployment import StateFolder
from coordinator.providers.joined import JoinedMachines
from coordinator.ray_processes import ClusterTerms
from mesh import __version__
from mesh.errors import (
    AuthenticationError,
    ConflictError,
    DeploymentError,
    SpecError,
    StorageError,
    TransportError,
)
from mesh.reasons import Reason

REQUEST = {
    "address": "10.1.2.3",
    "version": __version__,
    "python": platform.python_version(),
    "ray": ray.__version__,
}


class _Ray:
    terms = ClusterTerms(address="10.1.2.2:6379", cluster_id="c", session="s")


def _door(folder: Path) -> JoinedMachines:
    return JoinedMachines(
        state=StateFolder(folder),
        ray=_Ray(),  # type: ignore[arg-type]
    )


async def test_each_machine_gets_a_name_of_its_own_also_after_the_head_began_again(tmp_path: Path) -> None:
    door = _door(tmp_path)
    answers = await asyncio.gather(*(door.admit(dict(REQUEST)) for _ in range(3)))
    assert sorted(a["name"] for a in answers) == ["machine-1", "machine-2", "machine-3"]
    again = await _door(tmp_path).admit(dict(REQUEST))
    assert again["name"] == "machine-4"
    assert again["cluster"] == {"address": "10.1.2.2:6379", "id": "c", "session": "s"}
    assert again["clusterToken"] == StateFolder(tmp_path).secret("ray-token")


@pytest.mark.parametrize(
    "body", [None, [], {}, {**REQUEST, "address": "127.0.0.1"}, {**REQUEST, "address": 7}]
)
async def test_what_is_no_machine_is_refused(tmp_path: Path, body: Any) -> None:
    with pytest.raises(SpecError):
        await _door(tmp_path).admit(body)


@pytest.mark.parametrize(("key", "word"), [("version", "gangmesh"), ("python", "Python"), ("ray", "Ray")])
async def test_other_versions_are_refused_by_name(tmp_path: Path, key: str, word: str) -> None:
    with pytest.raises(ConflictError, match=word):
        await _door(tmp_path).admit({**REQUEST, key: "0.0.1"})


def test_a_simulated_machine_uses_what_the_head_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    assert machine_folder("/state/machines", "local-1") == Path("/state/machines/local-1")
    assert owner_environment({"A": "head"}) == {"A": "head"}


def test_a_joined_machine_uses_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    note_environment(tmp_path, {"A": "machine", "BYTES": "\udcff"})
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert machine_folder("/state/machines", "machine-1") == tmp_path / "machine-1"
    assert owner_environment({"A": "head"}) == {"A": "machine", "BYTES": "\udcff"}
    assert (tmp_path / "environment.json").stat().st_mode & 0o077 == 0


def test_one_agent_per_folder(tmp_path: Path) -> None:
    with machine_state(tmp_path / "m") as first, pytest.raises(DeploymentError) as raised:
        assert first.sockets.is_dir()
        with machine_state(tmp_path / "m"):
            pass
    assert raised.value.reason is Reason.DEPLOYMENT_BUSY
    assert not first.sockets.exists()


def test_what_an_agent_is_told_is_read_or_refused_by_name(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    read = JoinSettings.read(
        head="10.1.2.2:80", token_file=token, address="10.1.2.3", labels=["rack=3"], grace_s=5.0
    )
    assert (read.head, read.token, read.labels) == ("http://10.1.2.2:80", "secret", {"rack": "3"})
    assert "secret" not in repr(read)
    for wrong in (
        {"address": "::1"},
        {"labels": ["=x"]},
        {"token_file": tmp_path / "none"},
        {"head": "ray://x"},
        {"grace_s": -1.0},
    ):
        given: dict[str, Any] = {
            "head": "h:1",
            "token_file": token,
            "address": "10.1.2.3",
            "labels": [],
            "grace_s": 30.0,
            **wrong,
        }
        with pytest.raises(SpecError):
            JoinSettings.read(**given)


@pytest.mark.parametrize("has_joined", [True, False])
@pytest.mark.parametrize(
    ("fault", "may_pass"),
    [
        (TransportError("no connection"), True),
        (StorageError("the head's disk is full"), True),
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (ConflictError("other versions"), False),
        (AuthenticationError("another token"), False),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_an_agent_that_has_joined_before_outlasts_what_may_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception, may_pass: bool, has_joined: bool
) -> None:
    monkeypatch.setattr(join, "AGAIN_FIRST_S", 0.001)
    monkeypatch.setattr(join, "_end_everything_below", lambda: None)
    token = tmp_path / "token"
    token.write_text("secret")
    settings = JoinSettings.read(
        head="10.1.2.2:80", token_file=token, address="10.1.2.3", labels=[], grace_s=5.0
    )
    with machine_state(tmp_path / "m") as state:
        agent = join._Agent(PlainWay(settings), state, grace_s=settings.grace_s)
        agent._has_joined = has_joined
        lives = 0

        async def live() -> None:
            nonlocal lives
            lives += 1
            if lives == 1:
                raise fault
            agent._stop.set()

        monkeypatch.setattr(agent, "_live", live)
        if may_pass and has_joined:
            await agent._join_again_and_again()
            assert lives == 2
        else:
            with pytest.raises(type(fault)):
                await agent._join_again_and_again()


@pytest.mark.parametrize("dies", ["before it is asked", "while it is asked"])
@pytest.mark.parametrize("fault", [RpcError("Timed out while waiting for GCS."), RuntimeError("closed")])
async def test_a_directory_that_goes_away_while_a_machine_rejoins_may_pass_too_and_no_raylet_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception, dies: str
) -> None:
    """Ray raises errors of its own then: seen with an address at which nothing listens."""

    class Directory:
        def __init__(self, *, address: str) -> None:
            if dies == "before it is asked":
                raise fault

        def get_all_node_info(self) -> object:
            raise fault

    monkeypatch.setattr(ray._raylet, "GcsClient", Directory)
    monkeypatch.setattr(join, "prepare", lambda node: node.logs.mkdir(parents=True))
    monkeypatch.setattr(join, "raylet_command", lambda *_, **__: ["sleep", "60"])
    started: list[Child] = []
    monkeypatch.setattr(join, "spawn", lambda *a, **k: started.append(spawn(*a, **k)) or started[-1])
    settings = JoinSettings(head="http://h:1", token="t", address="10.1.2.3", labels={}, grace_s=5.0)
    terms = join.Terms(
        name="machine-1",
        node_id="n" * 56,
        session="s",
        cluster_address="10.1.2.2:6379",
        cluster_id="c",
        cluster_token="t",
        address="10.1.2.3",
        labels={},
    )
    with machine_state(tmp_path / "m") as state:
        agent = join._Agent(PlainWay(settings), state, grace_s=5.0)
        agent._install = asyncio.get_running_loop().create_future()
        agent._install.set_result(RayInstall(ray=tmp_path, python="python", commit=""))
        with pytest.raises(TransportError, match=r"10\.1\.2\.2:6379"):
            await agent._start(agent._node(terms), terms)
    assert [child.is_running for child in started] == [False]


async def test_who_is_told_to_stop_does_not_wait_for_a_head_that_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join, "_end_everything_below", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as silent, machine_state(tmp_path / "m") as state:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        settings = JoinSettings(head=url, token="t", address="10.1.2.3", labels={}, grace_s=5.0)
        agent = join._Agent(PlainWay(settings), state, grace_s=5.0)
        joining = asyncio.create_task(agent._join_again_and_again())
        silent.settimeout(20.0)
        connection, _ = await asyncio.to_thread(silent.accept)
        with connection:
            agent._stop.set()
            await asyncio.wait_for(joining, 20.0)
