"""plain: the command as it is, once per machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agents.launcher import evidence as words
from agents.launcher import torchrun
from agents.launcher.strategy import CommandEnd, Explanation
from mesh.errors import LaunchError
from mesh.messages import CauseEvidence
from mesh.states import LauncherKind


class Plain:
    """The strategy for `launcher: Plain`."""

    kind = LauncherKind.PLAIN

    def check(self, argv: Sequence[str]) -> None:
        """Raises LaunchError when there is nothing to start."""
        if not argv or not argv[0]:
            raise LaunchError("There is no command to start.")

    def arguments(self, argv: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
        """The command as it is."""
        return tuple(argv)

    def environment(self, *, error_file: str) -> dict[str, str]:
        """What this launcher adds below the user's own variables: a plain command may be torchrun all the same."""
        return {torchrun.ERROR_FILE_VARIABLE: error_file}

    def explain(self, end: CommandEnd) -> Explanation:
        """Why the command ended as it did. Pure: everything was read before."""
        if torchrun.root_failure(end.output) is not None and not end.exit.ok:
            return torchrun.Torchrun().explain(end)
        lines = words.last_lines(end.output)
        if end.exit.ok:
            return Explanation(evidence=CauseEvidence(exit=end.exit), last_lines=lines)
        exception = ""
        if end.exit.signal is None:
            exception = torchrun.recorded_message(end.error_file) or words.decisive_exception(end.output)
        said = exception or words.last_words(end.output)
        evidence = words.evidence_of(
            exit=end.exit,
            launcher_exit=end.exit,
            decisive=exception,
            said=said,
            output=end.output,
            oom_killed=end.oom_killed,
        )
        return Explanation(evidence=evidence, last_lines=lines)
