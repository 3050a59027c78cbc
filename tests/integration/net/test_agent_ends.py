"""How `mesh join` and `mesh relay` end when it does not go well: exit codes and words, in front and detached."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from agents.leave import _agent_of
from agents.machine_state import claimed
from agents.own_port import check_free
from mesh.errors import DeploymentError
from mesh.joining import JOIN_TOKEN_VARIABLE
from mesh.net.tokens import JoinToken
from tests.mesh_head_world import HeadWorld, head_world
from tests.net_world import eventually

MESH = Path(sys.executable).with_name("mesh")
END_LIMIT_S = 60.0
RELAY = "relay"
JOIN = "join"


@pytest.fixture
async def head(tmp_path: Path) -> AsyncIterator[HeadWorld]:
    state = tmp_path / "state"
    state.mkdir()
    async with head_world(state) as world:
        yield world


@dataclass(frozen=True, slots=True)
class End:
    code: int | None
    said: str


async def mesh(
    command: str, head: HeadWorld, folder: Path, *words: str, token: JoinToken | str | None = None
) -> End:
    """`mesh join …` on this host."""
    environment = {name: value for name, value in os.environ.items() if name != JOIN_TOKEN_VARIABLE}
    environment |= {"HOME": str(folder.parent)} | ({} if token is None else {JOIN_TOKEN_VARIABLE: str(token)})
    process = await asyncio.create_subprocess_exec(
        *(str(MESH), command, head.url.url, "--state", str(folder), *words),
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await asyncio.wait_for(process.communicate(), END_LIMIT_S)
    return End(process.returncode, said.decode())


async def token_for(command: str, head: HeadWorld) -> JoinToken:
    return JoinToken.parse((await head.desk.create_token(None, for_relay=command == RELAY))[0])


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.mark.parametrize("command", [JOIN, RELAY])
async def test_every_end_has_its_code_and_its_words(head: HeadWorld, tmp_path: Path, command: str) -> None:
    listen, folder = ("--listen", f"127.0.0.1:{free_port()}"), tmp_path / "m"

    wrong = await mesh(command, head, folder, "--listen", "nonsense", token="x")
    assert (wrong.code, "ADDRESS:PORT" in wrong.said) == (2, True), wrong.said

    without = await mesh(command, head, folder, *listen)
    assert (without.code, "needs a token" in without.said) == (6, True), without.said

    token = await token_for(command, head)
    with claimed(folder):
        busy = await mesh(command, head, folder, *listen, token=token)
    assert (busy.code, "runs from" in busy.said) == (5, True), busy.said

    await head.desk.revoke_token(token.id)
    refused = await mesh(command, head, folder, *listen, token=token)
    assert (refused.code, "has been revoked" in refused.said) == (6, True), refused.said

    gone = head.port = free_port()
    away = await mesh(command, head, folder, *listen, token=token)
    assert away.code == 3, away.said
    assert f"127.0.0.1 port {gone}" in away.said
    assert "mesh status" not in away.said
    assert "--listen" in away.said
    for end in (wrong, without, busy, refused, away):
        assert end.said.startswith("mesh: "), end.said


@pytest.mark.parametrize(
    ("module", "whose"),
    [
        ("agents.gateway", "gangmesh's own gateway of m-3 (folder /m, process "),
        ("agents.relay_agent", "gangmesh's own relay (folder /r, process "),
        ("program", "Another program ("),
    ],
)
def test_who_has_the_port_is_named_where_it_is_ours(module: str, whose: str) -> None:
    listening = (
        "import socket, time; s = socket.create_server(('127.0.0.1', 0)); "
        "print(s.getsockname()[1], flush=True); time.sleep(60)"
    )
    child = [sys.executable, "-c", listening, module, "--machine", "m-3"]
    child += ["--state", "/r"] if module == "agents.relay_agent" else []
    agent = "import subprocess, sys; sys.exit(subprocess.call(eval(sys.argv[1])))"
    argv = [sys.executable, "-c", agent, repr(child), "--state", "/m"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with pytest.raises(DeploymentError) as caught:
            check_free("127.0.0.1", port)
        assert caught.value.hint is not None and caught.value.hint.startswith(whose)
        assert caught.value.hint.endswith("has it; name another port: --listen.")
    finally:
        for one in [*psutil.Process(process.pid).children(), psutil.Process(process.pid)]:
            one.kill()
        process.communicate()


@pytest.mark.parametrize("command", [JOIN, RELAY])
async def test_a_daemon_s_end_has_the_same_code_and_a_port_that_is_taken_costs_no_token(
    head: HeadWorld, tmp_path: Path, command: str
) -> None:
    token = await token_for(command, head)
    with taken_port() as port:
        taken = await mesh(
            command, head, tmp_path / "m", "--detach", "--listen", f"127.0.0.1:{port}", token=token
        )
    assert (taken.code, f"127.0.0.1 port {port}" in taken.said) == (5, True), taken.said
    assert [facts["state"] for facts in head.desk.list_tokens()] == ["Open"]

    other = replace(token, fingerprint="0" * 64)
    strange = await mesh(
        command, head, tmp_path / "m", "--detach", "--listen", f"127.0.0.1:{free_port()}", token=other
    )
    assert (strange.code, "not the head that made this token" in strange.said) == (6, True), strange.said


@pytest.mark.parametrize("command", [JOIN, RELAY])
async def test_one_ctrl_c_ends_who_waits_for_a_daemon_and_the_daemon(
    head: HeadWorld, tmp_path: Path, command: str
) -> None:
    folder = tmp_path / "m"
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        JOIN_TOKEN_VARIABLE: str(await token_for(command, head)),
    }
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"https://127.0.0.1:{silent.getsockname()[1]}"
        process = await asyncio.create_subprocess_exec(
            *(str(MESH), command, url, "--state", str(folder), "--detach"),
            *("--listen", f"127.0.0.1:{free_port()}"),
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        silent.settimeout(END_LIMIT_S)
        connection, _ = await asyncio.to_thread(silent.accept)  # the daemon asks: its end is waited for
        with connection:
            daemon = _agent_of(folder)
            assert daemon is not None
            os.kill(daemon, signal.SIGSTOP)  # it is not what ends the other one
            try:
                process.send_signal(signal.SIGINT)
                await asyncio.wait_for(process.wait(), 20.0)
            finally:
                os.kill(daemon, signal.SIGCONT)
    assert process.returncode == 130
    await eventually(lambda: _agent_of(folder) is None, "the daemon to end")


async def test_a_relay_that_the_head_cannot_dial_ends_as_unreachable(
    head: HeadWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nobody(port: int) -> None:
        return None

    monkeypatch.setattr(head, "source_of", nobody)
    end = await mesh(
        RELAY,
        head,
        tmp_path / "r",
        *("--listen", f"127.0.0.1:{free_port()}", "--public-address", "127.0.0.9"),
        token=await token_for(RELAY, head),
    )
    assert (end.code, "cannot dial this relay" in end.said) == (3, True), end.said
