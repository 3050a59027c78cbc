"""What a command's last output says about why it failed: pure text, no files, no processes.

Rules of this file:
1. The decisive words are those of the failure itself (its exception), when they can be told from the rest:
   a line that a retry printed an hour before the end blames nobody.
2. An error about a peer is a victim's error. A process killed by a signal of its own is never one.
3. A known fault gets a hint that says what to do, in one sentence.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mesh.messages import CauseEvidence, ProcessExit

LAST_LINES_MAX = 20
LINE_CHARACTERS_MAX = 500
TAIL_BYTES_MAX = 256 * 1024
"""How much of the end of a command's output is looked at."""
MESSAGE_CHARACTERS_MAX = 1000

PEER_MARKS = re.compile(
    r"connection closed by peer|connection reset by peer|connection was likely closed"
    r"|ncclRemoteError|remote process (?:has )?exited|network error or a remote process exiting"
    r"|watchdog caught collective operation timeout|ran for \d+ milliseconds before timing out"
    r"|timed out waiting \d+ ?ms for (?:recv|send) operation|application timeout caused pair closure"
    r"|gloo connectFullMesh failed|collective .{0,80}timed? ?out|socket timeout|wait timeout after \d+ ?ms"
    r"|client socket has timed out|failed to recv, got 0 bytes|recvVector|sendBytes failed|broken pipe"
    r"|monitoredBarrier|the remote (?:process|peer)",
    re.IGNORECASE,
)

_PEER_ADDRESS = re.compile(
    r"\[((?:\d{1,3}\.){3}\d{1,3}|[0-9A-Fa-f:]*:[0-9A-Fa-f:]+)(?:%\w+)?\]:\d+"  # gloo: [10.0.0.2]:4242
    r"|remote peer ([\w.:-]+?)<\d+>",  # NCCL: remote peer 10.0.0.2<4242>
)
_PEER_RANK = re.compile(r"(?i)\branks? (\d{1,9})\b[\d, ]* failed to pass monitoredBarrier")
_RANK_PREFIX = re.compile(r"^\[(?:rank|default)(\d{1,9})\]:\s?")
_GOT_SIGNAL = re.compile(r"[\w.]*\bSignalException: Process \d+ got signal: (\d{1,2})\b")
"""torchrun was told to stop: it forwards the signal, and exits with 1 all the same."""
_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning|Timeout)\b(?::|$)"
)
_TRACEBACK = "Traceback (most recent call last):"
# Signals that a process gets by its own doing; SIGTERM comes from a launcher that stops the others.
_OWN_SIGNALS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGKILL})


@dataclass(frozen=True, slots=True, kw_only=True)
class ExceptionText:
    """One Python exception as it was printed."""

    text: str
    """`ValueError: loss is nan`, with the lines that follow it."""
    global_rank: int | None = None
    """From torch's `[rank1]:` prefix, when there is one."""


def split_lines(text: str) -> list[str]:
    """Lines as a person sees them: a carriage return starts a line over, and blank ones do not count."""
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        shown = line.rstrip("\r").rpartition("\r")[2].rstrip()
        if shown:
            lines.append(shown)
    return lines


def last_lines(text: str) -> tuple[str, ...]:
    """The last lines of `text`, within the limits of `MemberExited.last_lines`."""
    return tuple(line[:LINE_CHARACTERS_MAX] for line in split_lines(text)[-LAST_LINES_MAX:])


def exceptions_in(text: str) -> list[ExceptionText]:
    """Every exception that was printed with its traceback, in order."""
    return list(_exceptions(split_lines(text)))


def _exceptions(lines: list[str]) -> Iterator[ExceptionText]:
    in_traceback = False
    for index, line in enumerate(lines):
        prefix = _RANK_PREFIX.match(line)
        bare = line[prefix.end() :] if prefix else line
        if bare.startswith(_TRACEBACK):
            in_traceback = True
        elif in_traceback and _EXCEPTION.match(bare):
            in_traceback = False
            yield ExceptionText(
                text=_with_continuation(bare, lines[index + 1 : index + 6], has_prefix=prefix is not None),
                global_rank=int(prefix.group(1)) if prefix else None,
            )


def _with_continuation(first: str, following: list[str], *, has_prefix: bool) -> str:
    """An exception's text may have several lines; it ends where something else begins."""
    kept = [first]
    for line in following:
        prefix = _RANK_PREFIX.match(line)
        bare = line[prefix.end() :] if prefix else line
        if (prefix is not None) != has_prefix or bare.startswith((_TRACEBACK, "[", "During ", "The above ")):
            break
        kept.append(bare)
    return "\n".join(kept)[:MESSAGE_CHARACTERS_MAX]


def decisive_exception(text: str, *, global_rank: int | None = None) -> str:
    """The exception that ended the process, or empty: the last one printed, of this rank if ranks are told."""
    found = exceptions_in(text)
    mine = [e for e in found if global_rank is not None and e.global_rank == global_rank]
    chosen = mine or found
    return chosen[-1].text if chosen else ""


def blames_peer(*, exit: ProcessExit, decisive: str, output: str) -> bool:
    """True when the failure is about another rank.

    Args:
        exit: the failed process's own end.
        decisive: the words of the failure itself; empty when they are not known.
        output: the last output, looked at only when `decisive` is empty and the process aborted.
    """
    if exit.signal in _OWN_SIGNALS:
        return False
    if decisive:
        return PEER_MARKS.search(decisive) is not None
    if exit.signal == signal.SIGABRT:
        # NCCL's watchdog and gloo's background threads end the process this way, after saying why.
        return PEER_MARKS.search("\n".join(split_lines(output)[-LAST_LINES_MAX:])) is not None
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFault:
    """A fault that others met before. `applies` gets the exit, the words and the last output."""

    applies: Callable[[ProcessExit, str], bool]
    hint: str


def _says(pattern: str) -> Callable[[ProcessExit, str], bool]:
    compiled = re.compile(pattern)
    return lambda exit, output: compiled.search(output) is not None


KNOWN_FAULTS: tuple[KnownFault, ...] = (
    KnownFault(
        applies=lambda exit, output: (
            exit.signal == signal.SIGABRT and "terminate called without an active exception" in output
        ),
        hint=(
            "This is a known race of torch on gloo at interpreter exit, not a fault of the training: "
            "call dist.barrier() before dist.destroy_process_group(), and leave with os._exit(0) after that."
        ),
    ),
    KnownFault(
        applies=_says(r"argument --node[_-]rank.*invalid int value: ''"),
        hint=(
            "--node_rank got an empty value: the variable in it was expanded where it is not set. "
            "Leave the flag out (the rank is provided), or put the command into bash -c '…'."
        ),
    ),
    KnownFault(
        applies=_says(r"Unable to find address for: \^"),
        hint="GLOO_SOCKET_IFNAME must be one exact interface name; unset it, and the right one is provided.",
    ),
    KnownFault(
        applies=_says(r"(?i)EADDRINUSE|address already in use"),
        hint=(
            "A port was taken by another process on this machine; use MASTER_PORT from the environment "
            "instead of a fixed one."
        ),
    ),
    KnownFault(
        applies=_says(r"No space left on device|\[Errno 28\]|Disk quota exceeded|\[Errno 122\]"),
        hint="A disk on that machine is full: see `df -h` there, for the state directory, /tmp and /dev/shm.",
    ),
    KnownFault(
        applies=_says(r"CUDA out of memory|torch\.OutOfMemoryError"),
        hint="The accelerator's memory was full; a smaller batch or sharding helps, a restart does not.",
    ),
    KnownFault(
        applies=lambda exit, output: exit.code == 127,
        hint="A shell exits with 127 when it finds no such command: check PATH and the name on the machine.",
    ),
    KnownFault(
        applies=lambda exit, output: exit.code == 126,
        hint="A shell exits with 126 when it may not run a file: chmod +x it, or name its interpreter.",
    ),
    KnownFault(
        applies=_says(r"ModuleNotFoundError: No module named"),
        hint="A Python package is missing on that machine, or another Python than expected ran.",
    ),
)

OOM_HINT = (
    "The kernel's out-of-memory killer ended a process on this machine while the command ran: "
    "it needs more memory, or fewer data-loading workers."
)
KILLED_HINT = (
    "Nobody here sent that signal: it is usually the out-of-memory killer of the machine or of its container."
)


STOPPED_HINT = (
    "This deployment did not send that SIGTERM: a shutdown of the machine did, a batch system, a script that watches "
    "the command, or a person."
)


def hint_for(*, exit: ProcessExit, launcher_exit: ProcessExit, output: str, oom_killed: bool) -> str:
    """What to do about a known fault, or empty.

    Args:
        exit: the failed process's own end.
        launcher_exit: the end of the command itself (a shell's 127, say).
        output: the last output.
        oom_killed: the kernel's out-of-memory killer was active while the command ran.
    """
    if exit.signal_behind == signal.SIGKILL:
        return OOM_HINT if oom_killed else KILLED_HINT
    if exit.signal_behind == signal.SIGTERM:
        return STOPPED_HINT
    for fault in KNOWN_FAULTS:
        if fault.applies(exit, output) or fault.applies(launcher_exit, output):
            return fault.hint
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPeer:
    """Whom a complaint is about, as far as it says so."""

    address: str = ""
    global_rank: int | None = None


def named_peer(words: str) -> NamedPeer:
    """The peer that an error names: gloo and NCCL by address, a monitored barrier by rank."""
    if match := _PEER_RANK.search(words):
        return NamedPeer(global_rank=int(match.group(1)))
    if match := _PEER_ADDRESS.search(words):
        return NamedPeer(address=match.group(1) or match.group(2))
    return NamedPeer()


def evidence_of(
    *,
    exit: ProcessExit,
    launcher_exit: ProcessExit,
    decisive: str,
    said: str,
    output: str,
    oom_killed: bool,
    global_rank: int | None = None,
) -> CauseEvidence:
    """What is known about one failure, for the judgement of who was first.

    Args:
        exit: the failed process's own end.
        launcher_exit: the end of the command itself.
        decisive: the words of the failure itself; empty when they are not known.
        said: what a person should read of it.
        output: the last output.
        oom_killed: the kernel's out-of-memory killer was active while the command ran.
        global_rank: of the failed worker, when it is known.
    """
    if told_to_stop := _GOT_SIGNAL.match(decisive):
        exit = ProcessExit(signal=int(told_to_stop.group(1)))
    is_complaint = blames_peer(exit=exit, decisive=decisive, output=output)
    peer = named_peer(decisive or said) if is_complaint else NamedPeer()
    return CauseEvidence(
        exit=exit,
        global_rank=global_rank,
        message=said[:MESSAGE_CHARACTERS_MAX],
        blames_peer=is_complaint,
        peer_address=peer.address,
        peer_global_rank=peer.global_rank,
        oom_killed=oom_killed and exit.signal_behind == signal.SIGKILL,
        hint=hint_for(exit=exit, launcher_exit=launcher_exit, output=output, oom_killed=oom_killed),
    )


def last_words(text: str) -> str:
    """The last line that says something, for a failure that printed no exception."""
    lines = split_lines(text)
    return lines[-1][:LINE_CHARACTERS_MAX] if lines else ""
