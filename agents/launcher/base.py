"""The runner of one command: drives its supervisor, ships its logs, and says as events what became of it.

Rules of this file:
1. The supervisor speaks JSON lines (`agents.supervisor`); its death without "empty" is noticed by the end of its
   stdout, and then this side ends the tree itself and says so in the evidence: the machine's fault, not the command's.
2. However a launch ends, exactly one of CommandStartFailed and TreeEmpty comes, last.
3. Why a command ended is worked out once, after its tree is empty and its output is in the spool.
4. Nothing here blocks the loop: files, /proc and killing go through threads.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, assert_never

import agents.supervisor
from agents import control_group, process_tree, spool
from agents.core import events as ev
from agents.launcher.evidence import TAIL_BYTES_MAX
from agents.launcher.plain import Plain
from agents.launcher.strategy import CommandEnd, Explanation, LauncherStrategy
from agents.launcher.torchrun import ERROR_FILE_BYTES_MAX, Torchrun
from agents.line_process import LineProcess
from agents.shim_program import refusal_of_command
from agents.shim_watch import LOOK_EVERY_S, LOOKS_S, ShimWatch
from agents.signing_in import SERVES_VARIABLE, sign_in
from mesh.errors import LaunchError, RemoteProtocolError
from mesh.ids import Incarnation
from mesh.messages import CauseEvidence, ProcessExit
from mesh.net.shim.library import CONFIG_VARIABLE, LIBRARY
from mesh.plan import Endpoint
from mesh.reasons import Reason
from mesh.states import LauncherKind

SPOOL_UNACKED_BYTES_MAX = 32 * 1024 * 1024
KILL_LIMIT_S = 5.0
"""How long one try to end a tree without its supervisor may take."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """One command to run, ready: nothing is left to decide."""

    incarnation: Incarnation
    launcher: LauncherKind
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    """The whole environment of the command. The launcher's own variables go below it."""
    working_dir: str
    spool_dir: str
    error_file: str
    logs: Endpoint | None
    """The head's log sink; None keeps the output in the spool only."""


def strategy_for(kind: LauncherKind) -> LauncherStrategy:
    """The strategy of a launcher. Raises LaunchError for one that is not there yet."""
    match kind:
        case LauncherKind.PLAIN:
            return Plain()
        case LauncherKind.TORCHRUN:
            return Torchrun()
        case LauncherKind.RAY | LauncherKind.VERL | LauncherKind.ACCELERATE | LauncherKind.DEEPSPEED:
            raise LaunchError(
                f"The launcher {kind} is not available yet.",
                hint="Use Plain or Torchrun.",
                reason=Reason.NOT_AVAILABLE_YET,
            )
        case _:
            assert_never(kind)


class SupervisedCommand:
    """One command under one supervisor. Make it, `start` it, read `next_event` to the end, `close` it.

    Args:
        spec: what to start.
        owns_process: this process is the reaper of its orphans and has no other children. What a dead supervisor
            leaves then comes to us, whatever it did to hide where it is from, and is ended with the rest.
    """

    def __init__(self, spec: LaunchSpec, *, owns_process: bool = False) -> None:
        self._spec = spec
        self._owns_process = owns_process
        self._strategy = strategy_for(spec.launcher)
        self._events: asyncio.Queue[ev.MemberEvent] = asyncio.Queue()
        self._process: LineProcess | None = None
        self._reader: asyncio.Task[None] | None = None
        self._is_started = False
        self._is_stopped = False
        """It was asked to stop, or killed: what has not been started yet will not be."""
        self._exit: ProcessExit | None = None
        self._is_over = False
        self._watcher: asyncio.Task[None] | None = None
        self._bypass = ""
        """Why the command was ended: it had to have the shim, and something of it had not."""
        self._oom_kills_before = 0

    @property
    def supervisor_pid(self) -> int | None:
        """Of the running supervisor."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Starts the supervisor and hands it the command. What a command can do wrong comes as an event.

        After `stop` or `kill` nothing is started, and CommandStartFailed says so (EpochEnded).
        """
        spec = self._spec
        try:
            self._strategy.check(spec.argv)
        except LaunchError as error:
            await self._fail_before_start(error.reason, str(error))
            return
        refused = await asyncio.to_thread(self._shim_refusal)
        if refused is not None:
            await self._fail_before_start(Reason.SHIM_NOT_LOADED, refused)
            return
        self._oom_kills_before = await asyncio.to_thread(count_oom_kills)
        env = {**self._strategy.environment(error_file=spec.error_file), **spec.env}
        argv = await asyncio.to_thread(self._strategy.arguments, spec.argv, spec.env)
        try:
            if not await asyncio.to_thread(sign_in, Path(spec.spool_dir).parent):
                self._is_stopped = True
            self._process = await LineProcess.start(
                [sys.executable, "-I", "-S", str(Path(agents.supervisor.__file__))],
                env={"PATH": spec.env.get("PATH", ""), SERVES_VARIABLE: str(spec.incarnation)},
            )
        except OSError as error:
            await self._fail_before_start(
                Reason.COMMAND_START_FAILED, f"The supervisor could not be started: {error}."
            )
            return
        if self._is_stopped:
            await self._process.close()
            await self._fail_before_start(
                Reason.EPOCH_ENDED, "The command was stopped before it was started."
            )
            return
        self._process.send(
            {
                "op": "start",
                "argv": list(argv),
                "env": env,
                "cwd": spec.working_dir,
                "spool": spec.spool_dir,
                "incarnation": str(spec.incarnation),
                "spool_unacked_max": SPOOL_UNACKED_BYTES_MAX,
            }
        )
        self._reader = asyncio.create_task(self._read(self._process), name=f"supervisor {spec.incarnation}")

    async def next_event(self) -> ev.MemberEvent:
        return await self._events.get()

    def stop(self, grace_s: float) -> None:
        self._is_stopped = True
        self._send({"op": "stop", "grace_s": grace_s})

    def acknowledge(self, offset: int) -> None:
        """The head has everything before `offset`: the spool may let go of it."""
        self._send({"op": "acked", "offset": offset})

    async def kill(self) -> None:
        """Asks the supervisor, and does not wait for it: the tree is ended from here as well."""
        self._is_stopped = True
        self._send({"op": "kill"})
        await self._kill_tree()

    async def close(self) -> None:
        """Ends the supervisor (its stdin closes, so it ends the tree) and reaps it. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            await process.close()
        if self._reader is not None:
            await self._reader
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        if process is not None and self._owns_process:
            await self._kill_tree(roots=(os.getpid(),))

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._process is not None:
            self._process.send(message)

    async def _read(self, process: LineProcess) -> None:
        try:
            while not self._is_over:
                message = await process.receive()
                if message is None:
                    break
                await self._on_message(message)
        except (RemoteProtocolError, KeyError, ValueError) as error:
            _log.exception("The supervisor of %s said something else: %s", self._spec.incarnation, error)
            process.kill()
        if not self._is_over:
            await self._on_supervisor_lost(process)

    async def _on_message(self, message: Mapping[str, Any]) -> None:
        incarnation = self._spec.incarnation
        match message["ev"]:
            case "started":
                self._is_started = True
                self._watch_shim(int(message["pid"]))
                self._events.put_nowait(ev.CommandStarted(incarnation=incarnation, pid=int(message["pid"])))
            case "start_failed":
                self._fail_start(Reason(message["reason"]), str(message["message"]))
            case "exited":
                self._exit = ProcessExit(code=message["code"], signal=message["signal"])
                self._events.put_nowait(ev.CommandExited(incarnation=incarnation, exit=self._exit))
            case "empty":
                await self._on_empty()
            case "output_lost":
                _log.warning("%s: %s", incarnation, message["message"])
            case "fence_failed":
                self._tell_kill_failed(tuple(int(pid) for pid in message["pids"]))
            case other:
                raise RemoteProtocolError(f"The supervisor sent the unknown event {other!r}.")

    async def _on_empty(self) -> None:
        if self._exit is None:
            raise RemoteProtocolError("The supervisor sent an empty tree before the exit.")
        explanation = await asyncio.to_thread(self._explain, self._exit)
        self._is_over = True
        evidence = explanation.evidence
        if self._bypass:
            evidence = CauseEvidence(exit=self._exit, message=self._bypass, is_without_shim=True)
        self._events.put_nowait(
            ev.TreeEmpty(
                incarnation=self._spec.incarnation,
                evidence=evidence,
                last_lines=explanation.last_lines,
            )
        )

    # --- the shim (docs/mesh.md) ------------------------------------------------------------------

    def _shim_refusal(self) -> str | None:
        """Why the command cannot have the shim that its environment asks for. Blocking."""
        spec = self._spec
        if not spec.env.get(CONFIG_VARIABLE):
            return None
        why = refusal_of_command(spec.argv, spec.env, spec.working_dir)
        return None if why is None else without_shim(why)

    def _watch_shim(self, pid: int) -> None:
        if self._spec.env.get(CONFIG_VARIABLE):
            watch = ShimWatch(pid=pid, incarnation=str(self._spec.incarnation), library=str(LIBRARY))
            name = f"shim of {self._spec.incarnation}"
            self._watcher = asyncio.create_task(self._look_on(watch), name=name)

    async def _look_on(self, watch: ShimWatch) -> None:
        """Ends the command when it goes past the shim."""
        pauses = iter(LOOKS_S)
        while not self._is_over:
            await asyncio.sleep(next(pauses, LOOK_EVERY_S))
            why = await asyncio.to_thread(watch.look)
            if why is not None and not self._is_over:
                self._bypass = without_shim(why)
                _log.warning("Killing everything of %s: %s", self._spec.incarnation, self._bypass)
                await self.kill()
                return

    def _explain(self, exit: ProcessExit) -> Explanation:
        """Blocking. What cannot be read or understood costs the words about the end, never the news of it."""
        try:
            return self._strategy.explain(
                CommandEnd(
                    exit=exit,
                    output=read_tail(self._spec.spool_dir),
                    error_file=_read_text(Path(self._spec.error_file)),
                    oom_killed=count_oom_kills() > self._oom_kills_before,
                )
            )
        except Exception:  # noqa: BLE001 - the guard: it is about whatever a command printed
            _log.exception("Why %s ended cannot be told.", self._spec.incarnation)
            return Explanation(evidence=CauseEvidence(exit=exit), last_lines=())

    async def _on_supervisor_lost(self, process: LineProcess) -> None:
        """The supervisor is gone without having said that the tree is empty: end the tree from here."""
        incarnation = self._spec.incarnation
        roots = (process.pid, os.getpid()) if self._owns_process else (process.pid,)
        while remaining := await self._kill_tree(roots=roots):
            self._tell_kill_failed(tuple(remaining))
        await asyncio.to_thread(spool.mark_end, self._spec.spool_dir)
        what = f"The supervisor of rank {incarnation.rank} ended on its own"
        if not self._is_started:
            self._fail_start(Reason.COMMAND_START_FAILED, f"{what} before the command was started.")
            return
        if self._exit is None:
            self._exit = ProcessExit(signal=9)
            self._events.put_nowait(ev.CommandExited(incarnation=incarnation, exit=self._exit))
        explanation = await asyncio.to_thread(self._explain, self._exit)
        self._is_over = True
        self._events.put_nowait(
            ev.TreeEmpty(
                incarnation=incarnation,
                evidence=lost_evidence(f"{what}; the command was killed with it."),
                last_lines=explanation.last_lines,
            )
        )

    async def _kill_tree(self, *, roots: tuple[int, ...] = ()) -> list[int]:
        outcome = await asyncio.to_thread(
            process_tree.kill_incarnation,
            str(self._spec.incarnation),
            roots=roots,
            limit_s=KILL_LIMIT_S,
        )
        return outcome.remaining

    async def _fail_before_start(self, reason: Reason, message: str) -> None:
        await asyncio.to_thread(spool.mark_end, self._spec.spool_dir)
        self._fail_start(reason, message)

    def _fail_start(self, reason: Reason, message: str) -> None:
        self._is_over = True
        self._events.put_nowait(
            ev.CommandStartFailed(incarnation=self._spec.incarnation, reason=reason, message=message)
        )

    def _tell_kill_failed(self, pids: tuple[int, ...]) -> None:
        self._events.put_nowait(
            ev.KillFailed(
                incarnation=self._spec.incarnation,
                pids=pids,
                message=f"{len(pids)} processes could not be ended: {', '.join(map(str, pids[:10]))}.",
            )
        )


def without_shim(why: str) -> str:
    """The sentence for the user."""
    return (
        f"{why}. On this machine a program reaches the other members by a library that it loads (LD_PRELOAD), since "
        "gangmesh may not use nftables here. Use a program that is linked with the GNU C library dynamically, or "
        "let gangmesh use nftables (as root)."
    )


def lost_evidence(message: str) -> CauseEvidence:
    """Evidence for a command that this program or its machine took down, not its own fault."""
    return CauseEvidence(exit=ProcessExit(signal=9), message=message, by_infrastructure=True)


def read_tail(spool_dir: str, *, bytes_max: int = TAIL_BYTES_MAX) -> str:
    """The end of what a command printed, both streams in the order in which they came. Blocking."""
    pieces: list[bytes] = []
    missing = bytes_max
    for index in reversed(spool.segment_indexes(spool_dir)):
        try:
            content = Path(spool.segment_path(spool_dir, index)).read_bytes()
        except FileNotFoundError:
            break  # acknowledged and deleted meanwhile
        try:
            records, _ = spool.parse_records(content)
        except spool.SpoolCorruptError:
            break
        for record in reversed(records):
            pieces.append(record.data)
            missing -= len(record.data)
            if missing <= 0:
                break
        if missing <= 0:
            break
    return b"".join(reversed(pieces))[-bytes_max:].decode("utf-8", "replace")


def count_oom_kills() -> int:
    """How many processes the kernel has killed so far for want of memory: in this container, else on this machine."""
    return parse_oom_kills(control_group.memory_events() or _read_text(Path("/proc/vmstat")))


def parse_oom_kills(text: str) -> int:
    """The counter in a text of lines like `oom_kill 3` (memory.events, vmstat); 0 when there is none."""
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill":
            return int(value)
    return 0


def _read_text(path: Path) -> str:
    """The start of a small file; empty when there is none or it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(ERROR_FILE_BYTES_MAX).decode("utf-8", "replace")
    except OSError:
        return ""
