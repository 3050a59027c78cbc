"""torchrun: its command line, its environment, and the truth behind its exit code 1.

torchrun (torch 2.13) exits with 1 for every failure of a worker. What really happened is in two places:
- the file named by TORCHELASTIC_ERROR_FILE in torchrun's own environment: torchrun copies the first failed worker's
  error file there, when the worker wrote one (`@record`, or a library that uses it), with the exit code added;
- the summary that it prints to stderr ("Root Cause (first observed failure)"), always: exit code or signal, global
  rank, and the traceback when there was an error file.
Both are read: the file has the exception's own text, the summary has the rank and the signal. Times in both have a
resolution of one second, so among failures of one second a worker that torchrun itself stopped (SIGTERM)
can come out as "first": it yields to any other.

torchrun kills workers that do not end within 30 s of SIGTERM; `mesh.contract` raises that limit to the grace period
(TORCH_ELASTIC_SHUTDOWN_TIMEOUT), for torch versions that read it.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from agents.launcher import evidence as words
from agents.launcher import torchrun_script
from agents.launcher.strategy import CommandEnd, Explanation
from mesh.errors import LaunchError
from mesh.messages import CauseEvidence, ProcessExit
from mesh.states import LauncherKind

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
ERROR_FILE_BYTES_MAX = 1024 * 1024
STOPPING_SPREAD_CHARACTERS = 32 * 1024
"""Between the first and the last log line about one failure: what its workers print while they are stopped."""

_LOG_LINE = re.compile(r"[WEI]\d{4} \d\d:\d\d:\d\d\.\d+ \d+ (?:site-packages/)?torch/distributed/")
_BANNER = re.compile(r"^\*{20,}\nSetting OMP_NUM_THREADS[^\n]*\n\*{20,}$", re.MULTILINE)
"""What torchrun logs at its start, on lines of their own."""
_STOPPING = re.compile(
    _LOG_LINE.pattern + r"[^\n]*\] (?:Sending process \d+ closing signal|failed \(exitcode:)"
)
_BLOCK = re.compile(
    r"^\[\d+\]:\n"
    r"  time      : [^\n]*\n"
    r"  host      : [^\n]*\n"
    r"  rank      : (?P<rank>\d{1,9}) \(local_rank: \d+\)\n"
    r"  exitcode  : (?P<code>-?\d{1,3}) \(pid: \d+\)[^\n]*\n"
    r"  error_file: [^\n]*\n"
    r"  traceback : (?P<text>.*?)(?=^\[\d+\]:|^-{5,}|^={5,}|\Z)",
    re.MULTILINE | re.DOTALL,
)
_FAILED_LINE = re.compile(r"failed \(exitcode: (?P<code>-?\d{1,3})\) local_rank: \d+ \(pid: \d+\)")
_ROOT_TITLE = "Root Cause (first observed failure):"
_NO_TRACEBACK = "To enable traceback see:"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailure:
    """One worker's failure, as torchrun tells it."""

    global_rank: int | None
    exit: ProcessExit
    traceback: str = ""

    @property
    def stopped_by_launcher(self) -> bool:
        return self.exit.signal == signal.SIGTERM


class Torchrun:
    """The strategy for `launcher: Torchrun`."""

    kind = LauncherKind.TORCHRUN

    def check(self, argv: Sequence[str]) -> None:
        """Raises LaunchError for a command that cannot mean what the user wants."""
        if not argv or not argv[0]:
            raise LaunchError("There is no command to start.")
        if PurePath(argv[0]).name == "torchrun" and not _has_script(argv[1:]):
            raise LaunchError(
                "torchrun was given no script to run.", hint="Write it after the options: torchrun train.py"
            )

    def arguments(self, argv: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
        """The command, or the same with a quick end (`agents.launcher.torchrun_script`)."""
        return torchrun_script.with_quick_end(argv, env)

    def environment(self, *, error_file: str) -> dict[str, str]:
        """What this launcher adds below the user's own variables."""
        return {ERROR_FILE_VARIABLE: error_file}

    def explain(self, end: CommandEnd) -> Explanation:
        """Why torchrun ended as it did. Pure: everything was read before."""
        own_output = without_torchrun_words(end.output)
        lines = words.last_lines(own_output)
        if end.exit.ok:
            return Explanation(evidence=CauseEvidence(exit=end.exit), last_lines=lines)
        failure = root_failure(end.output)
        if failure is None:
            return Explanation(evidence=_launcher_failure(end), last_lines=words.last_lines(end.output))
        recorded = recorded_message(end.error_file)
        exception = recorded or _exception_of(failure.traceback)
        if not exception and failure.exit.signal is None:
            exception = words.decisive_exception(own_output, global_rank=failure.global_rank)
        evidence = words.evidence_of(
            exit=failure.exit,
            launcher_exit=end.exit,
            decisive=exception,
            said=exception or words.last_words(own_output),
            output=own_output,
            oom_killed=end.oom_killed,
            global_rank=failure.global_rank,
        )
        return Explanation(evidence=evidence, last_lines=lines)


def failures_in(output: str) -> list[WorkerFailure]:
    """Every failure of torchrun's summary, the root cause first; empty when it printed none."""
    start = output.rfind(_ROOT_TITLE)
    if start < 0:
        return []
    root = [_failure(match) for match in _BLOCK.finditer(output, start)][:1]
    first = output.rfind("Failures:\n", 0, start)
    others = [_failure(match) for match in _BLOCK.finditer(output, max(first, 0), start)]
    return root + others


def root_failure(output: str) -> WorkerFailure | None:
    """The first failure that torchrun did not cause itself; from its log line when the summary is missing."""
    failures = failures_in(output)
    for failure in failures:
        if not failure.stopped_by_launcher:
            return failure
    if failures:
        return failures[0]
    lines = list(_FAILED_LINE.finditer(output))
    if not lines:
        return None
    return WorkerFailure(global_rank=None, exit=_exit_of(int(lines[-1]["code"])))


def recorded_message(error_file: str) -> str:
    """The exception's own text from an error file's content; empty when there is none that can be read."""
    if not error_file:
        return ""
    try:
        data: Any = json.loads(error_file)
    except ValueError:
        return ""
    message = data.get("message") if isinstance(data, dict) else None
    if isinstance(message, dict):
        message = message.get("message")
    return message[: words.MESSAGE_CHARACTERS_MAX] if isinstance(message, str) else ""


def without_torchrun_words(output: str) -> str:
    """The output before torchrun began to speak of the failure, without its log lines: the workers' last words end it.

    Something printed without a newline stands on one line with torchrun's next log line, and is kept.
    """
    stopping = list(_STOPPING.finditer(output))
    end = len(output)
    for match in reversed(stopping):
        if end - match.end() > STOPPING_SPREAD_CHARACTERS and end < len(output):
            break  # an earlier failure's words (a wrapper script runs torchrun twice)
        end = match.start()
    kept = (_LOG_LINE.split(line)[0] for line in _BANNER.sub("", output[:end]).split("\n"))
    return "\n".join(line for line in kept if line.strip())


def _failure(match: re.Match[str]) -> WorkerFailure:
    text = match["text"].strip()
    return WorkerFailure(
        global_rank=int(match["rank"]),
        exit=_exit_of(int(match["code"])),
        traceback="" if text.startswith(_NO_TRACEBACK) else text,
    )


def _exit_of(code: int) -> ProcessExit:
    return ProcessExit(signal=-code) if code < 0 else ProcessExit(code=code)


def _exception_of(traceback: str) -> str:
    """The exception at the end of a printed traceback; torchrun's own sentence about a signal is not one."""
    if not traceback or traceback.startswith("Signal "):
        return ""
    undented = "\n".join(line[2:] if line.startswith("  ") else line for line in traceback.split("\n"))
    return words.decisive_exception(undented) or undented.split("\n")[0]


def _launcher_failure(end: CommandEnd) -> CauseEvidence:
    """torchrun itself failed (bad arguments, no rendezvous, killed): there is no worker to name."""
    exception = recorded_message(end.error_file) or words.decisive_exception(end.output)
    return words.evidence_of(
        exit=end.exit,
        launcher_exit=end.exit,
        decisive=exception,
        said=exception or words.last_words(end.output),
        output=end.output,
        oom_killed=end.oom_killed,
    )


_OPTIONS_WITHOUT_VALUE = frozenset(
    {
        "--standalone",
        "-m",
        "--module",
        "--no-python",
        "--no_python",
        "--run-path",
        "--run_path",
        "-h",
        "--help",
    }
)


def _has_script(arguments: Sequence[str]) -> bool:
    """True when something that is not an option's value is among torchrun's arguments."""
    expects_value = False
    for argument in arguments:
        if argument == "--":
            return True
        if argument in ("-h", "--help"):
            return True
        if argument.startswith("-"):
            expects_value = "=" not in argument and argument not in _OPTIONS_WITHOUT_VALUE
        elif expects_value:
            expects_value = False
        else:
            return True
    return False
