"""No process that the tests started is left when they are over.

Theory of operation: the session puts a token into its own environment, which everything that it starts inherits. At
the end every process of this machine is looked at: one that carries the mark of a deployment or of a rank, and that is
ours (it has the token, or one of its folders lies under this session's temporary folder, for processes that got
a clean environment), is a leak. What is only about to die gets a few seconds. A leak fails the session, is reported
with the tests during which it began, and is then killed, so that one bad test does not spoil the next session.

On several workers (`-n`) the session is still one: its workers inherit the token, and only the process that started
them looks, when all of them have ended. A worker that looked for itself would take the others' processes for leaks.

Other sessions and deployments on the same machine are never counted and never touched.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.plugins.parallel import is_worker

TOKEN_VARIABLE = "GANGMESH_TEST_SESSION"
MARKS = ("GANGMESH_DEPLOYMENT", "NODUS_INCARNATION")
WORKER_VARIABLE = "PYTEST_XDIST_WORKER"
FOLDERS = ("GANGMESH_DEPLOYMENT", "GANGMESH_STATE", "NODUS_STATE_DIR")
DYING_LIMIT_S = 10.0
"""How long a process that is about to die may take, before it is called a leak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """A process that should be gone: `began_at` in seconds since 1970, `worker` empty when that is not known."""

    pid: int
    began_at: float
    command: str
    mark: str
    worker: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """When a phase of a test ran, in seconds since 1970, and on which worker (empty without workers)."""

    test: str
    worker: str
    began_at: float
    ended_at: float

    def may_have_begun(self, leak: Leak) -> bool:
        is_elsewhere = self.worker and leak.worker and self.worker != leak.worker
        return not is_elsewhere and self.began_at - 1 <= leak.began_at <= self.ended_at + 1


@dataclass(slots=True, kw_only=True, eq=False)
class Watch:
    """One session's watch: its token, and when each test ran. A plugin itself, to be told of every report."""

    token: str
    began_at: float
    spans: list[Span] = field(default_factory=list)
    """Of every phase that has ended, in order."""
    leaks: list[Leak] = field(default_factory=list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        worker = getattr(report, "worker_id", "")
        span = Span(test=report.nodeid, worker=worker, began_at=report.start, ended_at=report.stop)
        self.spans.append(span)

    def tests_during(self, leak: Leak) -> list[str]:
        return list(dict.fromkeys(span.test for span in self.spans if span.may_have_begun(leak)))


_watch = pytest.StashKey[Watch]()


def find_leaks(*, token: str, temporary_folder: Path, began_at: float) -> list[Leak]:
    """Every process with a mark that belongs to the session of this token. Zombies run nothing and do not count."""
    found = []
    for process in psutil.process_iter():
        # Gone meanwhile, or another user's: not ours either way.
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            environment = process.environ()
            marks = [f"{name}={environment[name]}" for name in MARKS if name in environment]
            ours = environment.get(TOKEN_VARIABLE) == token or any(
                Path(environment.get(name, "/")).is_relative_to(temporary_folder) for name in FOLDERS
            )
            # One second of tolerance: the kernel counts a process's birth in ticks since boot.
            if marks and ours and process.create_time() >= began_at - 1:
                command = " ".join(process.cmdline()) or process.name()
                found.append(
                    Leak(
                        pid=process.pid,
                        began_at=process.create_time(),
                        command=command,
                        mark=marks[0],
                        worker=environment.get(WORKER_VARIABLE, ""),
                    )
                )
    return found


def wait_for_none(*, token: str, temporary_folder: Path, began_at: float, limit_s: float) -> list[Leak]:
    """What is left after at most `limit_s`; returns at once when nothing is."""
    deadline = time.monotonic() + limit_s
    while True:
        leaks = find_leaks(token=token, temporary_folder=temporary_folder, began_at=began_at)
        if not leaks or time.monotonic() > deadline:
            return leaks
        time.sleep(0.1)


def _kill(leak: Leak) -> None:
    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process(leak.pid)
        if process.create_time() == leak.began_at:
            process.send_signal(signal.SIGKILL)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gangmesh")
    group.addoption("--leak-limit-s", type=float, default=DYING_LIMIT_S, help="patience with dying processes")


def pytest_configure(config: pytest.Config) -> None:
    if is_worker(config):
        return
    watch = Watch(token=secrets.token_hex(8), began_at=time.time())
    config.stash[_watch] = watch
    config.pluginmanager.register(watch)
    os.environ[TOKEN_VARIABLE] = watch.token


@pytest.hookimpl(wrapper=True, trylast=True)  # within the terminal's own, which prints what is found
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, None, None]:
    try:
        return (yield)  # the teardown of what lives as long as the session; the end of the workers
    finally:
        # Also when a second Ctrl-C broke off that teardown: then above all.
        if not is_worker(session.config):
            _look(session)


def _look(session: pytest.Session) -> None:
    watch = session.config.stash[_watch]
    factory = session.config._tmp_path_factory  # type: ignore[attr-defined]
    watch.leaks = wait_for_none(
        token=watch.token,
        temporary_folder=factory.getbasetemp(),
        began_at=watch.began_at,
        limit_s=session.config.getoption("--leak-limit-s"),
    )
    for leak in watch.leaks:
        _kill(leak)
    if watch.leaks and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    watch = config.stash[_watch]
    if not watch.leaks:
        return
    terminalreporter.section("processes left behind", red=True)
    for leak in watch.leaks:
        terminalreporter.line(f"pid {leak.pid} (killed now), {leak.mark}: {leak.command[:300]}")
        terminalreporter.line(
            f"    began during: {', '.join(watch.tests_during(leak)) or 'no test (collection, or a fixture)'}"
        )
