"""Staying with a run: its logs on stdout, its story on stderr, signals, and its exit code in the end.

Rules of this file:
1. Only Ctrl-C and SIGTERM stop the run (once: cancel and wait for the fence; twice: leave at once). A
   closed terminal or a reader that went away stops the client only.
2. The exit code is the run's own. When the client loses sight of the run it says so and exits with 125.
3. A run that is suspended has not ended: the client says how it goes on, and leaves with 123.
"""

from __future__ import annotations

import asyncio
import signal
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

from mesh.cli.exit_codes import ExitCode, code_of_run
from mesh.cli.interrupts import Interrupts
from mesh.cli.log_view import LogView, OutputPump
from mesh.cli.output import span
from mesh.cli.terminal import Spinner, Terminal, printable
from mesh.client import MeshClient
from mesh.errors import MeshError
from mesh.reasons import Reason
from mesh.states import RunState

LAST_LINES_LIMIT_S = 20.0
"""How long the next line is waited for after the run has ended: longer than the server waits for late output."""
CANCEL_SENT_LIMIT_S = 3.0
TOLD_KINDS = frozenset(
    {
        *("Waiting", "Assembling", "AssemblyFailed", "Refused", "Replaced"),
        *("MemberLost", "SelfFenced", "RankFailed", "FenceFailed", "Reclaimed", "Rehearsed", "NotUndone"),
        *("FenceOverdue", "Restarting", "Healthy", "SuspendRequested", "Resumed"),
        *("RankRestarting", "RankRestarted", "RankNotRestarted"),
        *("NetworkChecked", "NetworkWarning", "NetworkUnchecked"),
    }
)
"""Events whose own words are said; the others are for `mesh describe`."""

LONG_MIN, LONG_MAX, BEGINNING = 160, 32, 80
"""A sentence that is so long is told in full once, of the longest so many; then its beginning."""


class Attendance:
    """One client's stay with one run.

    Args:
        run: as it was when it was submitted.
        logs_to_stderr: stdout is kept for something else.
        told: what was said when it was submitted, and is not said again.
    """

    def __init__(
        self,
        client: MeshClient,
        run: Mapping[str, Any],
        terminal: Terminal,
        interrupts: Interrupts,
        *,
        logs_to_stderr: bool = False,
        told: Sequence[str] = (),
    ) -> None:
        self._told = tuple(told)
        self._client = client
        self._name = str(run["metadata"]["name"])
        self._many_ranks = int(run["status"]["topology"]["nodes"]) > 1
        self._terminal = terminal
        self._interrupts = interrupts
        self._logs_to_stderr = logs_to_stderr
        self._stopped_by: signal.Signals | None = None
        self._lines_shown = 0
        self.final: Mapping[str, Any] | None = None
        """The run as it ended, or was suspended; None until then."""

    async def stay(self) -> int:
        """Returns the exit code. Raises OutputClosedError when the reader of stdout has gone."""
        async with self._terminal.working(f"{self._name}: submitted") as spinner:
            story = asyncio.create_task(self._tell_story(spinner), name="story")
            logs = asyncio.create_task(self._show_logs(spinner), name="logs")
            try:
                code = await self._attend(story, logs)
                if code is not None:
                    return code
                return await self._finish(story, logs)
            finally:
                story.cancel()
                logs.cancel()

    async def _attend(self, story: asyncio.Task[None], logs: asyncio.Task[None]) -> int | None:
        """Serves signals until the run has ended and its logs are shown; an exit code when the client
        leaves.
        """
        loop = asyncio.get_running_loop()
        cancelling: asyncio.Task[None] | None = None
        signalled = asyncio.create_task(self._interrupts.next())
        deadline: float | None = None
        lines_before = 0
        try:
            while True:
                open_tasks = {task for task in (story, logs) if not task.done()}
                if logs.done():
                    logs.result()
                if story.done():
                    if not open_tasks or story.exception() is not None:
                        return None
                    if deadline is None:
                        deadline, lines_before = loop.time() + LAST_LINES_LIMIT_S, self._lines_shown
                left_s = None if deadline is None else max(0.0, deadline - loop.time())
                done, _ = await asyncio.wait(
                    {*open_tasks, signalled}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done and self._lines_shown > lines_before:
                    deadline = None  # they still come: there is much left
                    continue
                if not done:
                    self._terminal.warn(f"The end of the logs is missing; see `mesh logs {self._name}`.")
                    return None
                if signalled in done:
                    number = signalled.result()
                    if number is signal.SIGHUP:
                        return ExitCode.HUNG_UP
                    if cancelling is not None:
                        return await self._leave(number, cancelling)
                    self._stopped_by = number
                    cancelling = asyncio.create_task(self._cancel(number), name="cancel")
                    signalled = asyncio.create_task(self._interrupts.next())
        finally:
            signalled.cancel()
            if cancelling is not None:
                cancelling.cancel()

    async def _leave(self, number: signal.Signals, cancelling: asyncio.Task[None]) -> int:
        # an impatient second Ctrl-C must not overtake the request that the first one led to
        await asyncio.wait({cancelling}, timeout=CANCEL_SENT_LIMIT_S)
        if cancelling.done():
            self._terminal.note(
                f"{self._name} is still being stopped; see it with `mesh describe {self._name}`."
            )
        else:
            self._terminal.note(
                f"The deployment has not answered: {self._name} may go on. "
                f"See it with `mesh describe {self._name}`, stop it with `mesh cancel {self._name}`."
            )
        return 128 + number

    async def _cancel(self, number: signal.Signals) -> None:
        again = "Ctrl-C again leaves at once" if number is signal.SIGINT else "a second signal leaves at once"
        self._terminal.note(
            f"Cancelling {self._name} and waiting until all of its processes are gone; {again}."
        )
        try:
            await self._client.cancel(self._name, reason=Reason.CLIENT_INTERRUPTED)
        except MeshError as error:
            self._terminal.warn(f"{self._name} could not be cancelled: {error}")

    async def _show_logs(self, spinner: Spinner) -> None:
        view = LogView(self._terminal, prefixed=self._many_ranks)
        pump = OutputPump(to_stderr=self._logs_to_stderr)
        async with aclosing(self._client.follow_logs(self._name)) as lines:
            try:
                async for line in lines:
                    spinner.stop()
                    await pump.put(view.render(line))
                    self._lines_shown += 1
            except MeshError as error:
                self._terminal.warn(f"The logs of {self._name} cannot be shown: {error}")
        await pump.put(view.finish())
        await pump.drain()

    async def _tell_story(self, spinner: Spinner) -> None:
        """Says what happens, once each, until the run has ended."""
        teller = StoryTeller(self._told)
        async with aclosing(self._client.watch_run(self._name)) as states:
            async for run, events in states:
                for sentence in teller.tell(run, events):
                    self._terminal.note(f"{self._name}: {sentence}")
                    spinner.say(f"{self._name}: {sentence}")
                if run["status"]["state"] == RunState.RUNNING:
                    spinner.stop()
                self.final = run
                if run["status"]["state"] == RunState.SUSPENDED:
                    return

    async def _finish(self, story: asyncio.Task[None], logs: asyncio.Task[None]) -> int:
        error = story.exception()
        if isinstance(error, MeshError):
            self._terminal.note(
                f"mesh: lost sight of {self._name}: {error}\n"
                f"It may still go on: `mesh describe {self._name}`, `mesh logs -f {self._name}`."
            )
            return ExitCode.LOST_SIGHT
        if error is not None:
            raise error
        assert self.final is not None, "a watched run ends with its last state"
        self._terminal.note(summary_of(self.final))
        if self._stopped_by is not None and self.final["status"]["state"] == RunState.CANCELLED:
            return 128 + self._stopped_by
        return code_of_run(self.final)


class StoryTeller:
    """Turns events into what a person wants to hear, each sentence once; `told` were said already."""

    def __init__(self, told: Sequence[str] = ()) -> None:
        self._told: set[tuple[int | None, str]] = {(None, text) for text in told}
        self._arrived: dict[int | None, set[int]] = defaultdict(set)
        self._long: list[str] = []
        """Told already, and not to be read again in full."""

    def tell(self, run: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> list[str]:
        """What is new."""
        sentences: list[tuple[int | None, str]] = [(e["epoch"], self._sentence(run, e)) for e in events]
        status = run["status"]
        if not RunState(status["state"]).is_terminal:
            sentences += [(None, f"{c['type']}: {c['message']}") for c in status["conditions"]]
        fresh = [one for one in dict.fromkeys(sentences) if one[1] and one not in self._told]
        self._told.update(fresh)
        return [printable(self._shortened(text)) for _, text in fresh]

    def _shortened(self, text: str) -> str:
        """With what was told before as its beginning: a refusal is the same for one machine after the other."""
        shown = text
        if any(text in told for told in self._long if len(text) >= LONG_MIN):
            shown = _as_before(text)
        for told in self._long:
            shown = shown.replace(told, _as_before(told))
        if len(text) >= LONG_MIN and text not in self._long:
            self._long.append(text)
            self._long.sort(key=len, reverse=True)
            del self._long[LONG_MAX:]
        return shown

    def _sentence(self, run: Mapping[str, Any], event: Mapping[str, Any]) -> str:
        """Empty for what goes without saying."""
        of = run["status"]["barrier"]["of"]
        if event["kind"] == "Arrived":
            arrived = self._arrived[event["epoch"]]  # a rank that got another machine arrives again
            arrived.add(event["rank"])
            return f"at the barrier: {len(arrived)} of {of}"
        if event["kind"] == "Running":
            again = f" again, {_restored(run, event['epoch'])}" if (event["epoch"] or 1) > 1 else ""
            return f"{of} of {of} ranks run{again}"
        return str(event["message"]) if event["kind"] in TOLD_KINDS else ""


def _as_before(text: str) -> str:
    return f"{text[:BEGINNING].rsplit(' ', 1)[0]} … (as before)"


def _restored(run: Mapping[str, Any], number: int) -> str:
    """What an epoch went on from."""
    epoch = next((e for e in run["status"]["epochs"] if e["epoch"] == number), None)
    if epoch is None or epoch["restored"] is None:
        return f"in epoch {number} (no checkpoint to restore)"
    step = epoch["restoredStep"]
    return f"in epoch {number}, restored from " + (
        f"step {step}" if step is not None else str(epoch["restored"])
    )


def summary_of(run: Mapping[str, Any]) -> str:
    """The closing line, and what to do about a failure where that is known."""
    status = run["status"]
    name = run["metadata"]["name"]
    since = status["startedAt"] or run["metadata"]["createdAt"]
    took = span((status["endedAt"] or since) - since)
    ranks = status["barrier"]["of"]
    who = "1 rank" if ranks == 1 else f"{ranks} ranks"
    restarts = status["restarts"]["total"]
    again = f", {restarts} restart{'s' if restarts > 1 else ''}" if restarts else ""
    if status["state"] == RunState.SUCCEEDED:
        return f"{name} succeeded after {took} ({who}{again})."
    if status["state"] == RunState.SUSPENDED:
        line = printable(f"{name} is suspended, not ended: {status['message']}")
        return f"{line}\nGo on: mesh resume {name}   Follow it then: mesh logs -f {name}"
    ended = "was cancelled" if status["state"] == RunState.CANCELLED else "failed"
    line = printable(f"{name} {ended} after {took}: {status['message'] or status['reason']}")
    hint = (status["cause"] or {}).get("hint")
    return "\n".join([line, *([printable(hint)] if hint else []), f"More: mesh describe {name}"])
