"""`mesh chaos`: do a rank harm on purpose, watch what the run makes of it, and give a verdict."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mesh.cli.guard import execute
from mesh.cli.options import (
    OutputFormat,
    OutputOption,
    RunArgument,
    StateOption,
    UrlOption,
    client_for,
    duration,
)

if TYPE_CHECKING:
    from mesh.cli.terminal import Spinner, Terminal
    from mesh.client import MeshClient
    from mesh.rehearsal import Outcome
    from mesh.states import HarmKind

LOOK_S = 0.5
TELL_AGAIN_S = 10.0
"""How often at most it is said what the moment still waits for, where no line moves."""
TIMEOUT_S_DEFAULT = 600.0
FIRST_LINE_LIMIT_S = 15.0
"""A command that prints nothing for so long after it runs again is not waited for."""
_Rank = int | None
_TIMES = (
    ("detected", "detection", "from the harm until it was decided to stop"),
    ("fenced", "fence", "until every rank was proven gone"),
    ("paused", "pause", "before it was tried again"),
    ("assembled", "assembly", "until every rank was at the barrier"),
    ("first line", "firstLine", "from there until the command printed something"),
    ("started", "start", "from there until all ranks ran"),
    ("in all", "total", "from the harm until the first line"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What is to be done, and when."""

    kind: HarmKind
    rank: int
    seconds: float | None
    one_way: bool
    after_s: float
    at_step: int | None
    timeout_s: float


def chaos(
    run: RunArgument,
    lose_machine: Annotated[
        _Rank,
        typer.Option("--lose-machine", min=0, metavar="RANK", help="Kill everything of its machine at once."),
    ] = None,
    kill_rank: Annotated[
        _Rank,
        typer.Option(
            "--kill-rank", min=0, metavar="RANK", help="Kill -9 its command; the run must restart on failure."
        ),
    ] = None,
    freeze: Annotated[
        _Rank, typer.Option("--freeze", min=0, metavar="RANK", help="Let its machine stand still for a time.")
    ] = None,
    cut: Annotated[
        _Rank,
        typer.Option(
            "--cut", min=0, metavar="RANK", help="Cut its machine off for a time (root and nftables)."
        ),
    ] = None,
    for_: Annotated[
        float | None,
        typer.Option(
            "--for",
            parser=duration,
            metavar="TIME",
            help="How long a freeze or cut lasts; 10s when left out.",
        ),
    ] = None,
    one_way: Annotated[
        bool, typer.Option("--one-way", help="Of a cut: only what leaves the machine is lost.")
    ] = False,
    after: Annotated[
        float | None,
        typer.Option("--after", parser=duration, metavar="TIME", help="So long after all ranks run."),
    ] = None,
    at_step: Annotated[
        int | None,
        typer.Option(
            "--at-step", min=0, metavar="N", help="Once a checkpoint of step N or later is committed."
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", parser=duration, metavar="TIME", help="Wait for all of it so long; 10m."),
    ] = None,
    output: OutputOption = OutputFormat.TABLE,
    state: StateOption = None,
    url: UrlOption = None,
) -> None:
    """Does a rank of a running run harm, and says what came of it: resumed from where, what was lost, how long it took.

    Exits with 0 when the run resumed, or was not disturbed at all; with 1 when it ended. Local deployments allow it,
    others when they were started with --allow-chaos. The fault is real: what the rank had not saved is lost.
    """
    plan = _plan(
        {"LoseMachine": lose_machine, "KillRank": kill_rank, "Freeze": freeze, "Cut": cut},
        seconds=for_,
        one_way=one_way,
        after_s=after,
        at_step=at_step,
        timeout_s=timeout,
    )
    execute(lambda: _chaos(run, plan, output, state, url), state=state)


def _plan(
    ranks: Mapping[str, int | None],
    *,
    seconds: float | None,
    one_way: bool,
    after_s: float | None,
    at_step: int | None,
    timeout_s: float | None,
) -> _Plan:
    from mesh.states import HarmKind

    given = [(HarmKind(kind), rank) for kind, rank in ranks.items() if rank is not None]
    if len(given) != 1:
        raise typer.BadParameter(
            "say one harm and its rank: --lose-machine 1, --kill-rank 1, --freeze 1 or --cut 1."
        )
    ((kind, rank),) = given
    if seconds is not None and not kind.is_for_a_time:
        raise typer.BadParameter(
            "only --freeze and --cut are for a time; the others are not undone.", param_hint="--for"
        )
    if one_way and kind is not HarmKind.CUT:
        raise typer.BadParameter("only a --cut can be one way.", param_hint="--one-way")
    if after_s is not None and at_step is not None:
        raise typer.BadParameter("--after and --at-step say two different moments; give one.")
    return _Plan(
        kind=kind,
        rank=rank,
        seconds=seconds,
        one_way=one_way,
        after_s=after_s or 0.0,
        at_step=at_step,
        timeout_s=TIMEOUT_S_DEFAULT if timeout_s is None else timeout_s,
    )


async def _chaos(name: str, plan: _Plan, output: OutputFormat, state: Any, url: str | None) -> int:
    from mesh.cli.exit_codes import ExitCode
    from mesh.cli.output import print_document
    from mesh.cli.terminal import Terminal
    from mesh.errors import MeshTimeoutError
    from mesh.rehearsal import Outcome, verdict, why_no_rehearsal

    terminal = Terminal()
    deadline = time.monotonic() + plan.timeout_s
    async with client_for(state, url) as client, terminal.working(f"Waiting for {name} to run") as spinner:
        refused = why_no_rehearsal((await client.status())["details"], at_step=plan.at_step)
        if refused is not None:
            raise refused
        try:
            async with asyncio.timeout(plan.timeout_s):
                before = await _moment(client, name, plan, terminal, spinner)
        except TimeoutError:
            raise MeshTimeoutError(
                f"The moment did not come within {plan.timeout_s:g} s; nothing was done to {name}.",
                hint=f"See how it is: mesh describe {name}",
                timeout_s=plan.timeout_s,
            ) from None
        harm = await client.chaos(name, plan.kind, plan.rank, seconds=plan.seconds, one_way=plan.one_way)
        spinner.say(f"{name}: {harm['message']}")
        outcome, run = await _watch(client, before, harm, terminal, spinner, deadline)
        first_line_at = None
        if outcome is Outcome.RESUMED and run["status"]["epoch"] > harm["epoch"]:
            spinner.say(f"Waiting for the first line of epoch {run['status']['epoch']}")
            first_line_at = await _first_line(client, name, run["status"]["epoch"])
            run = await client.get_run(name)
        told = verdict(before, run, harm, outcome=outcome, first_line_at=first_line_at)
    if output in (OutputFormat.JSON, OutputFormat.YAML):
        print_document(terminal, told, output)
    else:
        for line in verdict_lines(told):
            terminal.out(line)
    if outcome is Outcome.NOT_YET:
        return ExitCode.TIMEOUT
    return ExitCode.OK if outcome.is_well else ExitCode.FAILED


async def _moment(
    client: MeshClient, name: str, plan: _Plan, terminal: Terminal, spinner: Spinner
) -> Mapping[str, Any]:
    """The run at the moment that was asked for, and until then what is missing. ConflictError: it ended before."""
    from mesh.errors import ConflictError
    from mesh.states import RunState

    told, told_at = "", -TELL_AGAIN_S
    while True:
        run: Mapping[str, Any] = await client.get_run(name)
        status = run["status"]
        if RunState(status["state"]).is_terminal:
            raise ConflictError(
                f"{name} has ended ({status['state']}) before anything was done to it.",
                hint="Give it longer to run, or do it harm earlier.",
            )
        left_s, missing = _until(run, at_step=plan.at_step, after_s=plan.after_s, now=time.time())
        if left_s <= 0.0:
            return run
        spinner.say(missing)
        if missing != told and time.monotonic() - told_at >= TELL_AGAIN_S:
            told, told_at = missing, time.monotonic()
            terminal.note(missing)
        await asyncio.sleep(min(LOOK_S, left_s))


def _until(run: Mapping[str, Any], *, at_step: int | None, after_s: float, now: float) -> tuple[float, str]:
    """How long the moment is away at least (seconds), and what it waits for."""
    from mesh.cli.output import span
    from mesh.cli.terminal import printable
    from mesh.states import RunState

    name, status = printable(run["metadata"]["name"]), run["status"]
    if status["state"] != RunState.RUNNING:
        return LOOK_S, f"{name} is {status['state']}: waiting for it to run."
    if at_step is None:
        left_s = max((e["runningAt"] or 0.0) for e in status["epochs"]) + after_s - now
        return left_s, f"{name} runs: harm in {span(left_s)}."
    checkpoint = status["checkpoint"]
    newest = None if checkpoint is None else checkpoint["step"]
    if newest is not None and newest >= at_step:
        return 0.0, ""
    if checkpoint is None:
        so_far = "none is committed yet"
    else:
        so_far = "the newest names no step" if newest is None else f"the newest is of step {newest}"
    return LOOK_S, f"{name}: waiting for a checkpoint of step {at_step} or later; {so_far}."


async def _watch(
    client: MeshClient,
    before: Mapping[str, Any],
    harm: Mapping[str, Any],
    terminal: Terminal,
    spinner: Spinner,
    deadline: float,
) -> tuple[Outcome, Mapping[str, Any]]:
    """What it came to, told as it happens; and the run then."""
    from contextlib import aclosing

    from mesh.cli.attend import StoryTeller
    from mesh.rehearsal import Outcome, outcome_of, undisturbed_after_s
    from mesh.states import RunState

    name, teller = harm["run"], StoryTeller()
    patience_s = undisturbed_after_s(harm)
    quiet_until = deadline if patience_s is None else min(deadline, time.monotonic() + patience_s)
    async with aclosing(client.watch_run(name)) as states:
        upcoming = asyncio.ensure_future(anext(states))
        try:
            while True:
                run: Mapping[str, Any]
                done, _ = await asyncio.wait([upcoming], timeout=max(0.0, quiet_until - time.monotonic()))
                if not done:
                    run = await client.get_run(name)
                    is_calm = (
                        run["status"]["state"] == RunState.RUNNING and run["status"]["epoch"] == harm["epoch"]
                    )
                    if is_calm and patience_s is not None:
                        return Outcome.UNDISTURBED, run
                    if time.monotonic() >= deadline:
                        return Outcome.NOT_YET, run
                    quiet_until = deadline
                    continue
                run, events = upcoming.result()
                for sentence in teller.tell(run, [e for e in events if e["at"] >= harm["at"]]):
                    terminal.note(f"{name}: {sentence}")
                    spinner.say(f"{name}: {sentence}")
                outcome = outcome_of(before, run, harm)
                if outcome is not None:
                    return outcome, run
                upcoming = asyncio.ensure_future(anext(states))
        finally:
            upcoming.cancel()
            await asyncio.wait([upcoming])


async def _first_line(client: MeshClient, name: str, epoch: int) -> float | None:
    """When the epoch first printed something; None when it has not within the limit."""
    from contextlib import aclosing

    try:
        async with (
            asyncio.timeout(FIRST_LINE_LIMIT_S),
            aclosing(client.follow_logs(name, epoch=epoch)) as lines,
        ):
            async for line in lines:
                return line["at"]
    except TimeoutError:
        pass
    return None


def verdict_lines(told: Mapping[str, Any]) -> list[str]:
    """The verdict for people."""
    from mesh.cli.output import span
    from mesh.cli.terminal import printable

    def row(title: str, text: str) -> str:
        return f"  {title:<12}{printable(text)}"

    seconds, cause, name = told["seconds"], told["cause"], told["run"]
    lines = [_headline(told), row("harm", told["harm"]["message"])]
    if cause is not None:
        charged = f", charged as {told['chargedTo']}" if told["chargedTo"] else ""
        lines.append(row("told as", f"{cause['reason']}: {cause['message']} (rank {cause['rank']}{charged})"))
        if not told["ofTheHarm"]:
            lines.append(row("", "another rank than the one that was harmed"))
    for title, key, meaning in _TIMES:
        if told["alone"]:
            meaning = "from the harm until its command ran again"
        if seconds[key] is not None and (key != "pause" or seconds[key] >= 0.1):
            lines.append(row(title, f"{span(seconds[key]):<6} {meaning}"))
    lines += [row(f"rank {r['rank']}", f"{r['from']} -> {r['to']}") for r in told["replaced"]]
    if told["kept"]:
        lines.append(row("kept", "rank " + ", ".join(map(str, told["kept"]))))
    return [*lines, f"More: mesh describe {name}"]


def _headline(told: Mapping[str, Any]) -> str:
    from mesh.cli.output import span
    from mesh.cli.terminal import printable
    from mesh.rehearsal import Outcome

    name, origin = told["run"], told["resumedFrom"]
    match Outcome(told["outcome"]):
        case Outcome.RESUMED if told["alone"]:
            rank = told["harm"]["rank"]
            return printable(
                f"{name}: rank {rank} started again alone in epoch {told['epoch']}; the others went on."
            )
        case Outcome.RESUMED:
            where = "with no checkpoint to restore"
            if origin["checkpoint"] is not None:
                where = "from " + (
                    f"step {origin['step']}" if origin["step"] is not None else str(origin["checkpoint"])
                )
            lost = "" if told["lostSeconds"] is None else f"; {span(told['lostSeconds'])} of work were lost"
            return printable(f"{name} resumed in epoch {told['epoch']}, {where}{lost}.")
        case Outcome.UNDISTURBED:
            return printable(f"{name} was not disturbed: it runs on in epoch {told['epoch']}.")
        case Outcome.ENDED:
            return printable(f"{name} did not resume, it is {told['state']}: {told['message']}")
        case Outcome.SUSPENDED:
            return printable(f"{name} did not resume: it was suspended.")
        case Outcome.NOT_YET:
            return printable(f"{name} has not resumed yet; it is {told['state']}: {told['message']}")
