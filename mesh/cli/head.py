"""Starting and stopping the head process of a local deployment.

Rules of this file:
1. The head is a daemon: a session of its own, no terminal, its output in `head.log`. It outlives the client.
2. One client at a time starts or stops a deployment of a state folder (`starting.lock`); others wait for it
   and find its deployment running. The head's own `lock` is what keeps two heads apart.
3. What may hold a password (the journal's URL) goes to the head in its environment: everybody on the host can read
   arguments.
4. A process is signalled through a pidfd whose start time was checked, never by a number that may have been
   reused.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh.deployment import (
    CHECKPOINTS_VARIABLE,
    DB_VARIABLE,
    STATE_VARIABLE,
    DeploymentRecord,
    claimed_by,
    live_record,
    read_record,
    without_password,
)
from mesh.errors import DeploymentError, MeshError, MeshTimeoutError
from mesh.own_source import with_own_source
from mesh.reasons import Reason

START_LIMIT_S = 180.0
STOP_LIMIT_S = 90.0
LOCK_LIMIT_S = 240.0
LOCK_LOOK_S = 0.1
ABANDONED_STOP_LIMIT_S = 20.0
LOG_TAIL_LINES = 15
LOG_NAME = "head.log"
PROGRAM = (sys.executable, "-P", "-m", "coordinator")
"""-P: a folder named coordinator where the user stands is not ours."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOptions:
    """How a head is started; fields that are None are left to it."""

    state: Path
    machines: int
    address: str | None = None
    gpu: str | None = None
    listen: str | None = None
    """The mesh port."""
    api: str | None = None
    db: str | None = None
    allow_chaos: bool = False
    checkpoints: str | None = None
    """URL of the checkpoint store, absolute: the head has another working directory."""

    def arguments(self, ready_fd: int) -> list[str]:
        given = {
            "--address": self.address,
            "--gpu": self.gpu,
            "--listen": self.listen,
            "--api": self.api,
        }
        if self.address is None and self.listen is None:  # else machines join by themselves
            given["--machines"] = str(self.machines)
        rest = [part for flag, value in given.items() if value is not None for part in (flag, value)]
        return [
            *("serve", "--state", str(self.state)),
            *rest,
            *(["--allow-chaos"] if self.allow_chaos else []),
            *("--ready-fd", str(ready_fd)),
        ]


def late_options(options: HeadOptions, record: DeploymentRecord) -> dict[str, str]:
    """What is asked for of a deployment that runs already, and is another than what it was started with."""
    given = {
        "--gpu": options.gpu,
        "--listen": options.listen,
        "--api": options.api,
        "--db": without_password(options.db) if options.db is not None else None,
        "--address": options.address,
        "--checkpoints": options.checkpoints,
        "--allow-chaos": "" if options.allow_chaos and not record.local else None,
    }
    has = record.started_with
    return {flag: value for flag, value in given.items() if value is not None and has.get(flag) != value}


def prepare_state(state: Path) -> None:
    """Makes the state folder, for its owner only. Raises DeploymentError when it cannot be written to."""
    probe = state / f".probe-{os.getpid()}"
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise DeploymentError(
            f"The state folder {state} cannot be written to: {error.strerror}.",
            hint="Name another one: --state DIR, or $" + STATE_VARIABLE + ".",
            reason=Reason.STATE_NOT_WRITABLE,
            path=str(state),
        ) from error


@asynccontextmanager
async def starting_lock(state: Path, say: Say) -> AsyncIterator[None]:
    """Holds the right to start or stop this folder's deployment; waits for another client that has it.

    Raises:
        DeploymentError: (DeploymentBusy) it was not given up in time.
    """
    with (state / "starting.lock").open("w") as file:
        waited_s = 0.0
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # a lock has no way to be awaited; this one is held for seconds only
                say("Another mesh starts or stops this deployment; waiting for it")
                if waited_s > LOCK_LIMIT_S:
                    raise DeploymentError(
                        f"Another mesh has been starting or stopping the deployment in {state} for "
                        f"{LOCK_LIMIT_S:g} s.",
                        hint="See what it does: `mesh status`, and head.log in that folder.",
                        reason=Reason.DEPLOYMENT_BUSY,
                    ) from None
                await asyncio.sleep(LOCK_LOOK_S)
                waited_s += LOCK_LOOK_S
        yield


async def settled_record(state: Path, say: Say) -> DeploymentRecord | None:
    """As `live_record`, but a head that starts or stops on its own is waited for. Hold `starting_lock`.

    That one's client was killed, or it begins again because Ray was lost.

    Raises:
        DeploymentError: the record is damaged; (DeploymentBusy) it did not come to rest in time.
    """
    waited_s = 0.0
    while (record := live_record(state)) is None and (pid := claimed_by(state)) is not None:
        say(f"A deployment is starting or stopping here on its own (process {pid}); waiting for it")
        if waited_s > START_LIMIT_S:
            raise DeploymentError(
                f"The deployment in {state} has been starting or stopping for {START_LIMIT_S:g} s (process {pid}).",
                hint="See what it does: head.log in that folder.",
                reason=Reason.DEPLOYMENT_BUSY,
                pid=pid,
            )
        await asyncio.sleep(LOCK_LOOK_S)
        waited_s += LOCK_LOOK_S
    return record


async def start_head(options: HeadOptions, say: Say) -> DeploymentRecord:
    """Starts the head and returns when it is ready. Hold `starting_lock`, and have looked for a live one.

    Raises:
        DeploymentError: it could not start; the message is its own, or the end of its log.
    """
    reading, writing = os.pipe()
    try:
        process = _spawn(options, writing)
    except OSError as error:
        os.close(reading)
        raise DeploymentError(f"The head process cannot be started: {error}.") from error
    finally:
        os.close(writing)
    try:
        async with asyncio.timeout(START_LIMIT_S):
            await _until_ready(reading, process, options, say)
    except TimeoutError as error:
        await _abandon(process)
        raise MeshTimeoutError(
            f"The deployment was not ready after {START_LIMIT_S:g} s.",
            hint=f"Its log is {options.state / LOG_NAME}.",
            timeout_s=START_LIMIT_S,
        ) from error
    except BaseException:
        await asyncio.shield(_abandon(process))
        raise
    record = live_record(options.state)
    if record is None:
        await _abandon(process)
        raise DeploymentError(
            "The head process said that it is ready, but left no record of itself.",
            hint=f"Its log is {options.state / LOG_NAME}.",
            reason=Reason.INTERNAL,
        )
    process.returncode = 0  # it is a daemon now: not ours to wait for, and no cause for a warning
    return record


def _spawn(options: HeadOptions, ready_fd: int) -> subprocess.Popen[bytes]:
    log = os.open(options.state / LOG_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        return subprocess.Popen(
            [*PROGRAM, *options.arguments(ready_fd)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=options.state,
            env=head_environment(options),
            pass_fds=(ready_fd,),
            start_new_session=True,
        )
    finally:
        os.close(log)


def head_environment(options: HeadOptions) -> dict[str, str]:
    environment = dict(os.environ)
    if options.db is not None:
        environment[DB_VARIABLE] = options.db
    if options.checkpoints is not None:
        environment[CHECKPOINTS_VARIABLE] = options.checkpoints
    return with_own_source(environment)


async def _until_ready(
    reading: int, process: subprocess.Popen[bytes], options: HeadOptions, say: Say
) -> None:
    """Follows what the head tells about its start. Raises the error that it tells, or how it ended."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb", buffering=0)
    )
    try:
        while line := await reader.readline():
            news = _news(line)
            if "error" in news:
                raise MeshError.from_wire(news["error"])
            if news.get("ready"):
                return
            if news.get("stage"):
                say(str(news["stage"]))
    finally:
        transport.close()
    code = await asyncio.to_thread(process.wait)
    raise DeploymentError(
        f"The head process ended while it was starting ({_how(code)}).",
        hint=_log_tail(options.state / LOG_NAME),
        reason=Reason.INTERNAL,
    )


def _news(line: bytes) -> dict[str, Any]:
    try:
        news = json.loads(line)
    except ValueError:
        return {}
    return news if isinstance(news, dict) else {}


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _log_tail(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
    except OSError:
        lines = []
    return "\n".join([f"The end of its log, {path}:", *(f"  {line}" for line in lines)])


async def _abandon(process: subprocess.Popen[bytes]) -> None:
    """Ends a head that never became ready: it stops what it had started."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        await asyncio.to_thread(process.wait, ABANDONED_STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        await asyncio.to_thread(process.wait)


async def stop_head(record: DeploymentRecord, *, limit_s: float = STOP_LIMIT_S) -> None:
    """Asks the head to stop everything, and returns when it is gone (at once when it was).

    Raises:
        MeshTimeoutError: it still stops after `limit_s`.
    """
    with _handle_of(record) as handle:
        if handle is None:
            return
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        loop = asyncio.get_running_loop()
        gone = loop.create_future()
        loop.add_reader(handle, lambda: None if gone.done() else gone.set_result(None))
        try:
            async with asyncio.timeout(limit_s):
                await gone
        except TimeoutError as error:
            raise MeshTimeoutError(
                f"The deployment still stops after {limit_s:g} s (process {record.pid}).",
                hint="Wait, or see its head.log for what it waits for.",
                timeout_s=limit_s,
            ) from error
        finally:
            loop.remove_reader(handle)


@contextlib.contextmanager
def _handle_of(record: DeploymentRecord) -> Iterator[int | None]:
    """A pidfd of the head that this record is about; None when it is gone."""
    try:
        handle = os.pidfd_open(record.pid)
    except ProcessLookupError:
        yield None
        return
    try:
        # checked after opening: from here on the handle means this process and no other
        ended = bool(select.select([handle], [], [], 0)[0])
        yield None if ended or not record.is_alive else handle
    finally:
        os.close(handle)


def stale_record(state: Path) -> bool:
    """True when a record is left of a deployment that was killed."""
    record = read_record(state)
    return record is not None and not record.is_alive
