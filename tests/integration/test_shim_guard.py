"""Case 52: a command that cannot have the shim ends at once, by name; one that can is left alone. Real programs."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from ipaddress import ip_network
from pathlib import Path

import pytest

from agents import shim_watch
from agents.core import events as ev
from agents.launcher.base import LaunchSpec, SupervisedCommand, read_tail
from mesh.ids import Epoch, Incarnation, Rank, new_run_uid, new_token
from mesh.net.shim.library import TABLE_NAME, ShimPlace, shim_environment
from mesh.net.shim.table import ShimTable
from mesh.reasons import Reason
from mesh.states import LauncherKind

LIMIT_S = 30.0
DIALLER = """
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <stdlib.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>
#ifdef GO
__attribute__((section(".note.go.buildid"), aligned(4), used))
static const struct { int name, size, type; char text[8]; } note = {4, 4, 4, "Go\\0\\0abc"};
#endif
int main(int count, char **words) {
  printf("runs\\n");
  fflush(stdout);
  if (count == 1) return 0;
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(atoi(words[2]))};
  inet_pton(AF_INET, words[1], &to.sin_addr);
  syscall(SYS_connect, syscall(SYS_socket, AF_INET, SOCK_STREAM, 0), &to, sizeof to);
  pause();
}
"""
SLEEP = "import time; print('runs', flush=True); time.sleep(1.5)"


class Guard:
    """Commands that are to have the shim."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ShimTable(folder / TABLE_NAME).close()
        (folder / "try.c").write_text(DIALLER)
        self.commands: list[SupervisedCommand] = []

    def compile(self, name: str, *options: str) -> str:
        built = self.folder / name
        subprocess.run(["gcc", *options, "-o", built, self.folder / "try.c"], check=True, timeout=60)
        return str(built)

    async def start(self, *argv: str) -> SupervisedCommand:
        me = Incarnation(run_uid=new_run_uid(), epoch=Epoch(1), rank=Rank(0), token=new_token())
        spool = self.folder / f"spool-{len(self.commands)}"
        spool.mkdir()
        env = {"PATH": os.environ["PATH"], "NODUS_INCARNATION": str(me)}
        place = ShimPlace(gateway_folder=self.folder, device="gm0", addresses=("198.19.0.1",))
        spec = LaunchSpec(
            incarnation=me,
            launcher=LauncherKind.PLAIN,
            argv=argv,
            env=env | shim_environment(env, place),
            working_dir=str(self.folder),
            spool_dir=str(spool),
            error_file=str(spool / "error.json"),
            logs=None,
        )
        command = SupervisedCommand(spec)
        self.commands.append(command)
        await command.start()
        return command

    def output(self) -> str:
        return read_tail(str(self.folder / f"spool-{len(self.commands) - 1}"))


@pytest.fixture
async def guard(tmp_path: Path) -> AsyncIterator[Guard]:
    made = Guard(tmp_path)
    yield made
    for command in made.commands:
        await command.close()


async def last_event(command: SupervisedCommand) -> ev.MemberEvent:
    async with asyncio.timeout(LIMIT_S):
        while True:
            event = await command.next_event()
            if isinstance(event, ev.TreeEmpty | ev.CommandStartFailed):
                return event


async def test_a_program_that_cannot_have_it_is_not_started(guard: Guard) -> None:
    static = guard.compile("static", "-static")
    for path, why in (
        (static, "is linked statically"),
        (guard.compile("pie", "-static-pie"), "is linked statically"),
        (guard.compile("go", "-DGO"), "is a Go program"),
        (guard.compile("musl", "-Wl,--dynamic-linker=/lib/ld-musl-x86_64.so.1"), "is for another C library"),
    ):
        event = await last_event(await guard.start(path))
        assert isinstance(event, ev.CommandStartFailed), path
        assert event.reason is Reason.SHIM_NOT_LOADED
        assert event.message.startswith(f"{path} {why}"), event.message
        assert guard.output() == ""
    script = guard.folder / "script"
    script.write_text(f"#!{static} -x\n")
    script.chmod(0o755)
    event = await last_event(await guard.start("./script"))
    assert isinstance(event, ev.CommandStartFailed)
    assert event.message.startswith(f"{static} is linked statically")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root (a program of another owner)")
async def test_a_program_that_runs_with_other_rights_is_not_started(guard: Guard) -> None:
    path = Path(guard.compile("dynamic"))
    os.chown(path, 65534, 65534)
    path.chmod(path.stat().st_mode | stat.S_ISUID)
    event = await last_event(await guard.start(str(path)))
    assert isinstance(event, ev.CommandStartFailed)
    assert "setuid" in event.message


async def test_a_wrapper_that_becomes_a_static_program_is_ended_by_name(guard: Guard) -> None:
    static = guard.compile("static", "-static")
    event = await last_event(await guard.start("bash", "-c", f"echo first; exec env -i {static} 127.0.0.1 9"))
    assert isinstance(event, ev.TreeEmpty)
    assert event.evidence.is_without_shim
    assert event.evidence.message.startswith(f"{static} is linked statically")
    assert guard.output() == "first\nruns\n"


async def test_a_program_beside_it_may_be_static_until_it_dials_a_member(
    guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The overlay of this test is loopback's far end: nothing has to be set up for it."""
    monkeypatch.setattr(shim_watch, "_V4", ip_network("127.77.0.0/16"))
    static, dynamic = guard.compile("static", "-static"), guard.compile("dynamic")
    harmless = f'{static}; {sys.executable} -c "{SLEEP}"; {static}'
    event = await last_event(await guard.start("bash", "-c", f"{harmless}; exit 0"))
    assert isinstance(event, ev.TreeEmpty)
    assert not event.evidence.is_without_shim
    assert guard.output() == "runs\n" * 3
    with socket.create_server(("127.77.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for program, why in ((static, "is linked statically"), (dynamic, "goes past it")):
            line = f"{program} 127.77.0.1 {port}; exit 0"
            event = await last_event(await guard.start("bash", "-c", line))
            assert isinstance(event, ev.TreeEmpty)
            assert event.evidence.is_without_shim
            assert event.evidence.message.startswith(f"{program} has dialled a member itself: it {why}")


async def test_a_program_that_lost_it_on_the_way_is_ended(
    guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that we know does it: a system call that starts a program with another environment."""
    monkeypatch.setattr(shim_watch, "LOAD_LIMIT_S", 0.3)
    starter = """
import ctypes, sys
libc = ctypes.CDLL(None)
words = (ctypes.c_char_p * 4)(sys.executable.encode(), b"-c", b"import time; time.sleep(60)", None)
libc.syscall(59, words[0], words, (ctypes.c_char_p * 1)(None))
"""
    event = await last_event(await guard.start(sys.executable, "-c", starter))
    assert isinstance(event, ev.TreeEmpty)
    assert event.evidence.is_without_shim
    assert "was started without it" in event.evidence.message


async def test_what_has_it_is_left_alone(guard: Guard) -> None:
    for argv in (
        (sys.executable, "-c", SLEEP),
        ("env", "-i", sys.executable, "-c", SLEEP),
        ("bash", "-c", f'exec {sys.executable} -c "{SLEEP}"'),
    ):
        command = await guard.start(*argv)
        event = await last_event(command)
        assert isinstance(event, ev.TreeEmpty), event
        assert not event.evidence.is_without_shim
        assert guard.output() == "runs\n"
