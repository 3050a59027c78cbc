"""The launcher over a real supervisor: starts, exits, kills, last words; nobody is left behind."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agents import process_tree
from agents.core import events as ev
from agents.launcher.base import LaunchSpec, SupervisedCommand, read_tail
from agents.launcher.launcher import Launcher
from agents.launcher.plain import Plain
from agents.launcher.strategy import CommandEnd, Explanation
from mesh.ids import Epoch, Incarnation, Rank, new_run_uid, new_token
from mesh.messages import ProcessExit
from mesh.reasons import Reason
from mesh.states import LauncherKind

LIMIT_S = 30.0


class Bench:
    """Commands in one folder, and their events with a deadline."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commands: list[SupervisedCommand] = []

    def spec(
        self,
        *argv: str,
        launcher: LauncherKind = LauncherKind.PLAIN,
        env: dict[str, str] | None = None,
        working_dir: str | None = None,
    ) -> LaunchSpec:
        me = Incarnation(run_uid=new_run_uid(), epoch=Epoch(1), rank=Rank(0), token=new_token())
        spool_dir = self.folder / f"spool-{len(self.commands)}"
        spool_dir.mkdir()
        return LaunchSpec(
            incarnation=me,
            launcher=launcher,
            argv=argv,
            env={"PATH": os.environ["PATH"], "NODUS_INCARNATION": str(me), **(env or {})},
            working_dir=working_dir or str(self.folder),
            spool_dir=str(spool_dir),
            error_file=str(spool_dir / "error.json"),
            logs=None,
        )

    async def start(
        self,
        *argv: str,
        launcher: LauncherKind = LauncherKind.PLAIN,
        env: dict[str, str] | None = None,
        working_dir: str | None = None,
    ) -> tuple[SupervisedCommand, Incarnation]:
        spec = self.spec(*argv, launcher=launcher, env=env, working_dir=working_dir)
        command = SupervisedCommand(spec)
        self.commands.append(command)
        await command.start()
        return command, spec.incarnation

    async def torchrun(
        self, script: str, *, processes: int = 1, env: dict[str, str] | None = None
    ) -> SupervisedCommand:
        file = self.folder / "train.py"
        file.write_text(script)
        command, _ = await self.start(
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={processes}",
            str(file),
            launcher=LauncherKind.TORCHRUN,
            env=env,
        )
        return command

    def output(self) -> str:
        return read_tail(str(self.folder / f"spool-{len(self.commands) - 1}"))

    async def wait_for_output(self, text: str) -> None:
        async with asyncio.timeout(LIMIT_S):
            while text not in self.output():
                await asyncio.sleep(0.01)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    for command in bench.commands:
        await command.close()


async def next_event(command: SupervisedCommand) -> ev.MemberEvent:
    async with asyncio.timeout(LIMIT_S):
        return await command.next_event()


async def until_empty(command: SupervisedCommand) -> tuple[ProcessExit, ev.TreeEmpty]:
    exit: ProcessExit | None = None
    while True:
        event = await next_event(command)
        if isinstance(event, ev.CommandExited):
            exit = event.exit
        if isinstance(event, ev.TreeEmpty):
            assert exit is not None
            return exit, event
        assert not isinstance(event, (ev.CommandStartFailed, ev.KillFailed)), event


async def test_a_command_starts_and_its_exit_comes_after_everything_it_printed(bench: Bench) -> None:
    command, me = await bench.start("sh", "-c", "echo one; printf 'FATAL xyz' >&2; exit 3")
    assert isinstance(await next_event(command), ev.CommandStarted)
    exit, empty = await until_empty(command)
    assert exit == ProcessExit(code=3)
    assert "FATAL xyz" in "\n".join(empty.last_lines)
    assert empty.evidence.message == empty.last_lines[-1]
    assert empty.incarnation == me


async def test_the_last_words_before_a_kill_are_attached_to_the_cause(bench: Bench) -> None:
    command, _ = await bench.start("bash", "-c", "printf 'FATAL xyz' >&2; kill -9 $$")
    exit, empty = await until_empty(command)
    assert exit == ProcessExit(signal=9)
    assert "FATAL xyz" in empty.evidence.message
    assert empty.evidence.hint


@pytest.mark.parametrize(
    ("argv", "working_dir", "reason"),
    [
        (("no-such-command-here",), None, Reason.COMMAND_NOT_FOUND),
        (("true",), "/no/such/folder", Reason.WORKING_DIR_MISSING),
        (("",), None, Reason.COMMAND_START_FAILED),
    ],
)
async def test_a_command_that_cannot_start_says_why(
    bench: Bench, argv: tuple[str, ...], working_dir: str | None, reason: Reason
) -> None:
    command, _ = await bench.start(*argv, working_dir=working_dir)
    event = await next_event(command)
    assert isinstance(event, ev.CommandStartFailed)
    assert event.reason is reason


async def test_a_shell_that_does_not_find_its_command_gets_a_hint(bench: Bench) -> None:
    command, _ = await bench.start("bash", "-c", "no-such-command-here")
    exit, empty = await until_empty(command)
    assert exit == ProcessExit(code=127)
    assert "PATH" in empty.evidence.hint


async def test_one_megabyte_of_environment_arrives(bench: Bench) -> None:
    big = {f"BIG_{i}": "x" * 100_000 for i in range(10)}
    command, _ = await bench.start("sh", "-c", "echo ${#BIG_9}", env=big)
    exit, _ = await until_empty(command)
    assert exit.ok
    assert bench.output() == "100000\n"


async def test_a_stop_reaches_a_command_that_listens(bench: Bench) -> None:
    command, _ = await bench.start(
        sys.executable,
        "-c",
        "import os,signal,sys,time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b'saved'), sys.exit(7)))\n"  # print may be under way
        "print('ready', flush=True)\ntime.sleep(600)",
    )
    await bench.wait_for_output("ready")
    command.stop(60.0)
    exit, _ = await until_empty(command)
    assert exit == ProcessExit(code=7)
    assert "saved" in bench.output()


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_stop_that_overtakes_the_launch_means_that_nothing_will_start(
    bench: Bench, tmp_path: Path, how: str
) -> None:
    """Seen end to end: a fence that met a command about to be started was forgotten, and waited out its grace."""
    launcher = Launcher()
    await (launcher.stop(600.0) if how == "stop" else launcher.kill())
    await launcher.launch(bench.spec("touch", str(tmp_path / "started")))
    async with asyncio.timeout(LIMIT_S):
        event = await launcher.next_event()
    await launcher.close()
    assert isinstance(event, ev.CommandStartFailed)
    assert "before it was started" in event.message
    assert not (tmp_path / "started").exists()


async def test_a_kill_ends_a_command_that_ignores_sigterm_and_its_daemon(bench: Bench) -> None:
    command, me = await bench.start(
        "bash", "-c", "trap '' TERM; setsid sleep 600 & echo ready; while true; do sleep 600; done"
    )
    await bench.wait_for_output("ready")
    command.stop(600.0)
    await command.kill()
    exit, _ = await until_empty(command)
    assert exit == ProcessExit(signal=9)
    assert process_tree.find(str(me)) == {}


async def test_a_killed_supervisor_takes_its_command_along_and_is_blamed_not_the_command(
    bench: Bench,
) -> None:
    command, me = await bench.start("bash", "-c", "setsid sleep 600 & echo ready; sleep 600")
    await bench.wait_for_output("ready")
    assert command.supervisor_pid is not None
    os.kill(command.supervisor_pid, signal.SIGKILL)
    exit, empty = await until_empty(command)
    assert exit == ProcessExit(signal=9)
    assert empty.evidence.by_infrastructure
    assert "supervisor" in empty.evidence.message
    assert "ready" in empty.last_lines
    assert process_tree.find(str(me)) == {}


async def test_an_end_that_cannot_be_explained_is_told_all_the_same(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Plain, end: CommandEnd) -> Explanation:
        raise OSError("Input/output error")

    monkeypatch.setattr(Plain, "explain", fail)
    command, _ = await bench.start("bash", "-c", "exit 7")
    exit, empty = await until_empty(command)
    assert exit == ProcessExit(code=7) == empty.evidence.exit


async def test_a_supervisor_and_its_spool_lost_together_are_told_all_the_same(bench: Bench) -> None:
    command, me = await bench.start("bash", "-c", "echo ready; sleep 600")
    await bench.wait_for_output("ready")
    assert command.supervisor_pid is not None
    shutil.rmtree(bench.folder / "spool-0")
    os.kill(command.supervisor_pid, signal.SIGKILL)
    _, empty = await until_empty(command)
    assert empty.evidence.by_infrastructure
    assert process_tree.find(str(me)) == {}


@pytest.mark.torch
@pytest.mark.parametrize(
    ("fault", "exit", "words"),
    [
        ("import sys; sys.exit(42)", ProcessExit(code=42), ""),
        ("import os; os.kill(os.getpid(), 11)", ProcessExit(signal=11), ""),
        ("import os; os.write(2, b'FATAL xyz'); os.kill(os.getpid(), 9)", ProcessExit(signal=9), "FATAL xyz"),
        ("raise ValueError('loss is nan')", ProcessExit(code=1), "ValueError: loss is nan"),
    ],
    ids=["exit", "segfault", "kill", "exception"],
)
async def test_torchrun_hides_the_cause_and_the_evidence_has_it(
    bench: Bench, fault: str, exit: ProcessExit, words: str
) -> None:
    command = await bench.torchrun(
        f"import os, time\nif os.environ['RANK'] == '1':\n    {fault}\nelse:\n    time.sleep(600)\n",
        processes=2,
    )
    launcher_exit, empty = await until_empty(command)
    assert launcher_exit == ProcessExit(code=1)
    assert empty.evidence.exit == exit
    assert empty.evidence.global_rank == 1
    assert words in empty.evidence.message
    assert words or (empty.evidence.message, empty.last_lines) == ("", ()), (
        "what torchrun says is not the worker's"
    )
    assert not empty.evidence.blames_peer


@pytest.mark.torch
async def test_an_error_file_has_the_exceptions_own_text(bench: Bench) -> None:
    command = await bench.torchrun(
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\n"
        "def main():\n"
        "    raise ValueError('two\\nlines')\n"
        "main()\n"
    )
    _, empty = await until_empty(command)
    assert empty.evidence.exit == ProcessExit(code=1)
    assert "ValueError: two\nlines" in empty.evidence.message


@pytest.mark.torch
@pytest.mark.parametrize(("limit_s", "saves"), [("1", False), ("60", True)])
async def test_torchruns_own_limit_cuts_a_save_short_unless_it_is_raised(
    bench: Bench, limit_s: str, saves: bool
) -> None:
    """The mechanism behind case 27: the contract raises the limit to the grace period."""
    command = await bench.torchrun(
        "import signal, sys, time\n"
        "def save(*_):\n"
        "    time.sleep(3)\n"
        "    print('saved', flush=True)\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n",
        env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": limit_s},
    )
    await bench.wait_for_output("ready")
    command.stop(60.0)
    await until_empty(command)
    assert ("saved" in bench.output()) == saves
