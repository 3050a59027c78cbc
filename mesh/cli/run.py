"""`mesh run`: submit a command and stay with it until it has ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from mesh.cli.guard import execute
from mesh.cli.options import OutputFormat, StateOption, TtyFreeOption, UrlOption

if TYPE_CHECKING:
    from mesh.cli.ensure import Where
    from mesh.cli.terminal import Terminal
    from mesh.client import MeshClient
    from mesh.resources import DryRun, Submission
    from mesh.spec import Job

EPILOG = """
Everything after -- is the command, word for word: mesh run --nodes 2 --launcher torchrun -- torchrun train.py

On a local deployment the command runs in the directory where mesh run was called, and with PATH, VIRTUAL_ENV,
CONDA_PREFIX and LD_LIBRARY_PATH of the calling shell, unless --workdir, -e or the file set them.

Ctrl-C (or SIGTERM) cancels the run and waits until all of its processes are gone; a second one leaves at once. Only
that stops a run: when the terminal is closed or the reader of the output goes away (| head -1), the run goes on, and
mesh logs -f shows it again. A run that somebody suspends has not ended: mesh run says so and leaves with 123.

It exits with the run's own exit code; see mesh --help.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What `mesh run` was asked for."""

    command: tuple[str, ...]
    file: str | None
    shape: dict[str, Any]
    """The flags that make a job, by the parameter names of `mesh.spec.job_from_flags`."""
    env_files: tuple[Path, ...]
    detach: bool
    dry_run: bool
    model_size: str | None
    output: OutputFormat
    tty_free: bool
    state: Path | None
    url: str | None


class RunCommand(TyperCommand):
    """Takes everything from the first word that is no option as the user's command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        rest = super().parse_args(ctx, args)
        command = list(ctx.params.get("command") or ())
        start = len(given) - len(command)
        separated = start > 0 and given[start - 1] == "--"
        if command and not separated and any(word.startswith("-") for word in command):
            raise typer.BadParameter(
                f"put -- before the command, so that it is clear whose options are whose: "
                f"mesh run [OPTIONS] -- {command[0]} …",
                ctx=ctx,
                param_hint="COMMAND",
            )
        return rest


_Text = str | None


def run(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[--] COMMAND...", help="What every rank runs.")
    ] = None,
    file: Annotated[
        _Text,
        typer.Option("-f", "--file", metavar="FILE", help="A job as YAML or JSON; - is standard input."),
    ] = None,
    name: Annotated[_Text, typer.Option("--name", help="The run's name; made up when left out.")] = None,
    nodes: Annotated[_Text, typer.Option("--nodes", metavar="N", help="Machines, 2 to 8.")] = None,
    total_gpus: Annotated[_Text, typer.Option("--total-gpus", metavar="N", help="GPUs in all.")] = None,
    gpus_per_node: Annotated[
        _Text, typer.Option("--gpus-per-node", metavar="N", help="GPUs per machine: 1, 2, 4 or 8.")
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option("--gpu", metavar="TYPE[:N]", help="Accelerator and count per machine; may be repeated."),
    ] = None,
    launcher: Annotated[
        _Text, typer.Option("--launcher", help="plain, torchrun, ray, verl, accelerate, deepspeed.")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("-e", "--env", metavar="K=V", help="A variable; K alone passes on its value here."),
    ] = None,
    env_file: Annotated[
        list[Path] | None, typer.Option("--env-file", metavar="FILE", help="Variables, one a line.")
    ] = None,
    workdir: Annotated[
        _Text, typer.Option("--workdir", "--working-dir", metavar="DIR", help="Where the command runs.")
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option("--label", metavar="K=V", help="A label; may be repeated.")
    ] = None,
    network: Annotated[
        _Text, typer.Option("--network", help="colocated (default), regional, global: where members may be.")
    ] = None,
    transport: Annotated[
        _Text, typer.Option("--transport", help="direct (default), auto: auto also takes a relay.")
    ] = None,
    startup_timeout: Annotated[
        _Text, typer.Option("--startup-timeout", metavar="TIME", help="Bound on one assembly: 5m to 60m.")
    ] = None,
    max_attempts: Annotated[
        _Text,
        typer.Option("--max-attempts", metavar="N", help="Restarts of each kind, at most; 3 when left out."),
    ] = None,
    on_process_failure: Annotated[
        _Text,
        typer.Option(
            "--on-process-failure",
            metavar="fail|restart|restart-rank",
            help="What a non-zero exit leads to: the run fails (default), its gang starts again, or that rank alone.",
        ),
    ] = None,
    max_cost: Annotated[_Text, typer.Option("--max-cost", metavar="USD", help="The run's budget.")] = None,
    grace_period: Annotated[
        _Text, typer.Option("--grace-period", metavar="TIME", help="Between SIGTERM and SIGKILL.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("-d", "--detach", help="Print the name and leave; the run goes on.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show shape, cost and warnings; create nothing.")
    ] = False,
    model_size: Annotated[
        _Text,
        typer.Option(
            "--model-size",
            metavar="PARAMETERS",
            help="With --dry-run: how long one all-reduce of such a model takes over relayed and wide-area paths, "
            "such as 7B.",
        ),
    ] = None,
    output: Annotated[
        OutputFormat,
        typer.Option("-o", "--output", help="json or yaml: the run as a document on stdout, logs on stderr."),
    ] = OutputFormat.TABLE,
    tty_free: TtyFreeOption = False,
    state: StateOption = None,
    url: UrlOption = None,
) -> None:
    """Runs a command on several machines as a gang and stays with it until it has ended.

    Without a deployment it starts one on this host, with as many simulated machines as the run has nodes.
    """
    shape = {
        "name": name,
        "nodes": nodes,
        "total_gpus": total_gpus,
        "gpus_per_node": gpus_per_node,
        "gpu": gpu,
        "launcher": launcher,
        "env": env,
        "working_dir": workdir,
        "labels": label,
        "network": network,
        "transport": transport,
        "startup_timeout": startup_timeout,
        "max_attempts": max_attempts,
        "on_process_failure": on_process_failure,
        "max_cost": max_cost,
        "grace_period": grace_period,
    }
    if model_size is not None and not dry_run:
        raise typer.BadParameter("--model-size is for an estimate: mesh run --dry-run.")
    options = RunOptions(
        command=tuple(command or ()),
        file=file,
        shape={key: value for key, value in shape.items() if value is not None and value != []},
        env_files=tuple(env_file or ()),
        detach=detach,
        dry_run=dry_run,
        model_size=model_size,
        output=output,
        tty_free=tty_free,
        state=state,
        url=url,
    )
    execute(lambda: run_job(options), state=state)


async def run_job(options: RunOptions) -> int:
    """The whole command; returns the exit code."""
    from mesh.cli.ensure import Where, ensure_running
    from mesh.cli.interrupts import Interrupts, SignalledError
    from mesh.cli.job_input import read_job
    from mesh.cli.terminal import Terminal
    from mesh.spec import resolve

    terminal = Terminal(tty_free=options.tty_free)
    job = read_job(options)
    where = Where.from_options(options.state, options.url)
    if options.dry_run:
        return await _dry_run(options, job, where, terminal)
    with Interrupts() as interrupts:
        try:
            await ensure_running(where, resolve(job), terminal, interrupts)
        except SignalledError as error:
            terminal.note("Stopped before anything was submitted.")
            return error.exit_code
        async with where.connect() as client:
            return await _submit_and_stay(options, job, client, terminal, interrupts)


async def _submit_and_stay(
    options: RunOptions, job: Job, client: MeshClient, terminal: Terminal, interrupts: Any
) -> int:
    from mesh.cli.attend import Attendance
    from mesh.cli.ensure import ensure_machines
    from mesh.cli.interrupts import SignalledError
    from mesh.cli.job_input import as_submitted
    from mesh.cli.output import print_document
    from mesh.spec import resolve

    try:
        await interrupts.race(ensure_machines(client, resolve(job), terminal))
    except SignalledError as error:
        terminal.note("Stopped before anything was submitted.")
        return error.exit_code
    async with terminal.working("Submitting"):
        # not given up for a signal: the run might exist already; the signal is served right after
        submission = await client.submit(as_submitted(job, local=client.is_local))
    _warn(submission["warnings"], client, terminal)
    if options.detach:
        return _detached(submission, options, terminal)
    documents = options.output in (OutputFormat.JSON, OutputFormat.YAML)
    attendance = Attendance(
        client,
        submission["run"],
        terminal,
        interrupts,
        logs_to_stderr=documents,
        told=submission["warnings"],
    )
    code = await attendance.stay()
    if documents and attendance.final is not None:
        print_document(terminal, attendance.final, options.output)
    return code


def _warn(warnings: list[str], client: MeshClient, terminal: Terminal) -> None:
    for warning in warnings:
        terminal.warn(warning)
        if warning.startswith("NoSuchCapacity") and client.is_local:
            terminal.note(
                "Machines are what the deployment was started with: `mesh down`, then run this again."
            )


def _detached(submission: Submission, options: RunOptions, terminal: Terminal) -> int:
    from mesh.cli.output import print_document

    name = submission["run"]["metadata"]["name"]
    if options.output in (OutputFormat.JSON, OutputFormat.YAML):
        print_document(terminal, submission, options.output)
    else:
        terminal.out(name)
        terminal.note(f"Follow it: mesh logs -f {name}   Stop it: mesh cancel {name}")
    return 0


async def _dry_run(options: RunOptions, job: Job, where: Where, terminal: Terminal) -> int:
    """On the deployment there is, else as if one were started for this job; nothing is created either way."""
    from mesh.cli.dry_run import print_dry_run
    from mesh.cli.job_input import as_submitted
    from mesh.netcheck.estimate import parse_model_size
    from mesh.spec import job_from_data
    from mesh.submission import dry_run_answer, facts_for, prepare

    answer: DryRun
    if options.model_size is not None:
        parse_model_size(options.model_size)
    if where.is_running:
        async with where.connect() as client, terminal.working("Asking for an estimate"):
            answer = await client.dry_run(
                as_submitted(job, local=client.is_local), model_size=options.model_size
            )
    else:
        embedded = job_from_data(as_submitted(job, local=True), source="")
        answer = dry_run_answer(prepare(embedded, facts=facts_for(embedded)))
    print_dry_run(terminal, answer, options.output, model_size=options.model_size)
    return 0
