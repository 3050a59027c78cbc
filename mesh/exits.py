"""How the end of a process is put into words: one wording for the core, the launchers, and the command line.

Rules of this file:
1. Linux's numbers by name, from a table: the words do not depend on the system that says them.
2. A shell turns its child's signal into 128 + number; such a code is told as what it probably means.
"""

from __future__ import annotations

_SIGNAL_NAMES = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE",
    9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE", 14: "SIGALRM", 15: "SIGTERM",
    16: "SIGSTKFLT", 17: "SIGCHLD", 18: "SIGCONT", 19: "SIGSTOP", 20: "SIGTSTP", 21: "SIGTTIN", 22: "SIGTTOU",
    23: "SIGURG", 24: "SIGXCPU", 25: "SIGXFSZ", 26: "SIGVTALRM", 27: "SIGPROF", 28: "SIGWINCH", 29: "SIGIO",
    30: "SIGPWR", 31: "SIGSYS",
}  # fmt: skip
_SHELL_BASE = 128


def signal_name(number: int) -> str:
    """ "SIGKILL", or "signal 64" for one without a name."""
    return _SIGNAL_NAMES.get(number, f"signal {number}")


def signal_behind(*, code: int | None, signal: int | None) -> int | None:
    """The signal that ended the process, or the shell's child whose end a shell passed on; None when there was none."""
    if signal is not None:
        return signal
    number = (code or 0) - _SHELL_BASE
    return number if number in _SIGNAL_NAMES else None


def describe_exit(*, code: int | None, signal: int | None) -> str:
    """ "exit code 42", "SIGSEGV (signal 11)", "exit code 137 (128 + SIGKILL)"."""
    if signal is not None:
        return f"{_SIGNAL_NAMES[signal]} (signal {signal})" if signal in _SIGNAL_NAMES else f"signal {signal}"
    behind = signal_behind(code=code, signal=None)
    return f"exit code {code}" + ("" if behind is None else f" (128 + {_SIGNAL_NAMES[behind]})")


def short_exit(*, code: int | None, signal: int | None) -> str:
    """For a table's cell: "exit 42", "SIGKILL"."""
    return f"exit {code}" if signal is None else signal_name(signal)
