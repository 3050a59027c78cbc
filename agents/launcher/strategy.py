"""What one launcher must say about itself; the runner does everything else.

Adding a launcher is one file with a class of this shape and one line in `strategy_for`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mesh.messages import CauseEvidence, ProcessExit
from mesh.states import LauncherKind


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandEnd:
    """Everything that is known when a command has ended and its tree is empty."""

    exit: ProcessExit
    output: str
    """The end of its output, both streams as they came, at most `evidence.TAIL_BYTES_MAX` bytes."""
    error_file: str = ""
    """The content of the file that TORCHELASTIC_ERROR_FILE named; empty when nobody wrote it."""
    oom_killed: bool = False
    """The kernel's out-of-memory killer ended a process on this machine while the command ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a command ended, and its own last lines."""

    evidence: CauseEvidence
    last_lines: tuple[str, ...]


class LauncherStrategy(Protocol):
    """How one kind of launcher is checked, equipped and understood."""

    @property
    def kind(self) -> LauncherKind: ...

    def check(self, argv: Sequence[str]) -> None:
        """Raises LaunchError for a command that cannot work."""

    def arguments(self, argv: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
        """What is started for this command in this environment. Blocking: it may look at files."""

    def environment(self, *, error_file: str) -> dict[str, str]:
        """Variables that the launcher wants; the user's own win over them."""

    def explain(self, end: CommandEnd) -> Explanation:
        """Why the command ended as it did."""
