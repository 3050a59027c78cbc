"""`mesh up`, `mesh down`, `mesh status`, `mesh version`, `mesh openapi`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mesh.cli.guard import execute
from mesh.cli.options import OutputFormat, OutputOption, StateOption, UrlOption, client_for

if TYPE_CHECKING:
    from mesh.cli.head import HeadOptions
    from mesh.cli.terminal import Terminal
    from mesh.deployment import DeploymentRecord

PROBE_LIMIT_S = 10.0
UNTIL_BACK = (
    "each agent, its gateway and its port stay, and it dials until this head is back. To end one there: SIGTERM to its "
    "agent, or `mesh leave` for good."
)
CHECKPOINTS_OPTION = "--checkpoints"
NO_CHECKPOINTS = "none, so a run that starts again restores nothing (mesh up --checkpoints URL)"


def up(
    machines: Annotated[
        int | None,
        typer.Option(
            "--machines", min=1, max=64, metavar="N", help="Simulated machines on this host; 2 when left out."
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="TYPE:COUNT", help="Accelerators that each machine claims to have."),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen",
            metavar="ADDRESS:PORT",
            help="Let machines join from anywhere, through this one port, encrypted: 0.0.0.0:8471. Needs root.",
        ),
    ] = None,
    api: Annotated[
        str | None,
        typer.Option(
            "--api", metavar="HOST:PORT", help="Where the plain HTTP API listens; on loopback else."
        ),
    ] = None,
    db: Annotated[
        str | None, typer.Option("--db", metavar="URL", help="The journal; SQLite in the state folder else.")
    ] = None,
    checkpoints: Annotated[
        str | None,
        typer.Option(
            "--checkpoints",
            metavar="URL",
            help="Where gang checkpoints are kept: file://, s3://, gs://, or a directory that every machine reaches. "
            "With --listen or --address there are none without it.",
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="ADDRESS",
            help="Let machines join from elsewhere, at this IPv4 address of this host. Unencrypted, on every "
            "interface: for a network in which everybody may be trusted.",
        ),
    ] = None,
    allow_chaos: Annotated[
        bool,
        typer.Option(
            "--allow-chaos",
            help="With --listen or --address: let `mesh chaos` harm ranks. With simulated machines it always may.",
        ),
    ] = False,
    output: OutputOption = OutputFormat.TABLE,
    state: StateOption = None,
) -> None:
    """Starts a deployment on this host that outlives the terminal; `mesh down` ends it.

    When one is running already it says so, and adds machines when --machines asks for more than there are.
    """
    from mesh.cli.head import HeadOptions
    from mesh.deployment import state_folder
    from mesh.errors import SpecError

    def options() -> HeadOptions:
        if machines is not None and (address is not None or listen is not None):
            option, how = (
                ("--listen", "mesh join") if listen is not None else ("--address", "python -m agents join")
            )
            raise SpecError(
                f"--machines and {option} exclude each other: simulated machines have loopback addresses.",
                hint=f"Let machines join, as many as you like: {how}",
                field="--machines",
            )
        return HeadOptions(
            state=state_folder(state),
            machines=machines or 2,
            address=address,
            gpu=gpu,
            listen=listen,
            api=api,
            db=db,
            allow_chaos=allow_chaos,
            checkpoints=None if checkpoints is None else _store_url(checkpoints),
        )

    execute(lambda: _up(options(), output), state=state)


def how_to_join(mesh_port: int | str) -> str:
    return f"let a machine join: `mesh token create` here, then `mesh join https://HOST:{mesh_port} --token …` there"


def _store_url(given: str) -> str:
    from mesh.blob_store import normal_url

    return normal_url(given)


async def _up(options: HeadOptions, output: OutputFormat) -> int:
    from mesh.cli.head import (
        prepare_state,
        settled_record,
        stale_record,
        start_head,
        starting_lock,
    )
    from mesh.cli.interrupts import Interrupts, SignalledError
    from mesh.cli.terminal import Terminal

    folder = options.state
    terminal = Terminal()
    prepare_state(folder)

    async def start() -> tuple[DeploymentRecord, bool]:
        async with terminal.working("Starting") as spinner, starting_lock(folder, spinner.say):
            running = await settled_record(folder, spinner.say)
            if running is not None:
                return running, False
            if stale_record(folder):
                terminal.note(f"The last deployment in {folder} was killed; starting it again.")
            return await start_head(options, lambda stage: spinner.say(f"Starting: {stage}")), True

    with Interrupts() as interrupts:
        try:
            record, started = await interrupts.race(start())
            present = record.machines if started else await interrupts.race(_grow(options, record, terminal))
        except SignalledError as error:
            terminal.note("Stopped; no deployment was started.")
            return error.exit_code
    if output in (OutputFormat.JSON, OutputFormat.YAML):
        from mesh.cli.output import print_document

        facts = {
            "url": record.url,
            "pid": record.pid,
            "state": str(folder),
            "started": started,
            "machines": present,
        }
        print_document(terminal, facts, output)
        return 0
    verb = "A deployment runs" if started else "A deployment was running already"
    terminal.out(
        f"{verb} at {record.url} ({present} machine{'s' if present != 1 else ''}, state folder {folder})."
    )
    if started and (options.listen or options.address) and CHECKPOINTS_OPTION not in record.started_with:
        terminal.note(f"Checkpoints: {NO_CHECKPOINTS}.")
    if record.mesh_port:
        joining = how_to_join(record.mesh_port)
        terminal.note(f"{joining[0].upper()}{joining[1:]}, HOST being an address of this host.")
    elif started and options.address is not None:
        terminal.note(
            f"On each machine: python -m agents join --head {record.url} --token-file FILE --address ADDRESS"
        )
    elif started:
        terminal.note("Run something: mesh run --nodes 2 -- hostname   Stop it: mesh down")
    return 0


async def _grow(options: HeadOptions, record: DeploymentRecord, terminal: Terminal) -> int:
    """Adds machines to the running deployment, up to what is asked for; says which options come too late."""
    from mesh.cli.head import late_options
    from mesh.client import connect
    from mesh.deployment import start_again

    late = late_options(options, record)
    if late:
        again = start_again(options.state, {**record.started_with, **late})
        terminal.warn(f"{', '.join(late)} cannot be changed while it runs. {again}")
    async with connect(state=options.state) as client:
        present = [machine for machine in await client.list_machines() if machine["state"] != "Lost"]
        if len(present) >= options.machines or not record.local:
            return len(present)
        async with terminal.working(f"Adding {options.machines - len(present)} machines"):
            grown = await client.grow(options.machines)
        return len([machine for machine in grown if machine["state"] != "Lost"])


def down(
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask, even when runs are active.")] = False,
    state: StateOption = None,
) -> None:
    """Ends the deployment of the state folder: cancels its runs, stops every process, keeps journal and logs.

    Suspended runs stay: after `mesh up` they can be resumed. Machines that joined keep running, and come back then.
    """
    execute(lambda: _down(state, yes), state=state)


async def _down(state: Path | None, yes: bool) -> int:
    from mesh.cli.head import prepare_state, settled_record, starting_lock, stop_head
    from mesh.cli.output import stdin_is_terminal
    from mesh.cli.terminal import Terminal
    from mesh.deployment import state_folder

    folder = state_folder(state)
    terminal = Terminal()
    if not folder.exists():
        terminal.note(f"No deployment is running from {folder}; there is nothing to stop.")
        return 0
    prepare_state(folder)
    async with terminal.working("Stopping") as spinner, starting_lock(folder, spinner.say):
        record = await settled_record(folder, spinner.say)
        if record is None:
            terminal.note(f"No deployment is running from {folder}; there is nothing to stop.")
            return 0
        active, joined = await _active_runs(folder), await _joined_machines(folder, record)
        if active and not yes and stdin_is_terminal():
            spinner.stop()
            question = f"{_listed(active)} will be cancelled. Stop the deployment?"
            if not typer.confirm(question, err=True):
                return 1
        spinner.say(f"Stopping the deployment at {record.url}")
        await stop_head(record)
    ended = f" Cancelled: {_listed(active)}." if active else ""
    terminal.note(f"Stopped the deployment at {record.url}.{ended} Journal and logs stay in {folder}.")
    if joined is not None:
        terminal.note(joined)
    return 0


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


async def _joined_machines(folder: Path, record: DeploymentRecord) -> str | None:
    """What becomes of the machines that joined; None when there are none."""
    import asyncio

    from mesh.client import connect
    from mesh.errors import MeshError

    if record.local:
        return None
    try:
        async with asyncio.timeout(PROBE_LIMIT_S), connect(state=folder) as client:
            count = sum(machine["state"] != "Lost" for machine in await client.list_machines())
    except (MeshError, TimeoutError):
        return f"Machines that joined keep running, if there are any: {UNTIL_BACK}"
    if count == 0:
        return None
    who = "1 machine that joined keeps" if count == 1 else f"{count} machines that joined keep"
    return f"{who} running: {UNTIL_BACK}"


async def _active_runs(folder: Path) -> list[str]:
    """Names of runs that would be cancelled; none when the deployment does not answer (it is stopped all the same).

    A suspended one stays as it is.
    """
    import asyncio

    from mesh.client import connect
    from mesh.errors import MeshError
    from mesh.states import RunState

    try:
        async with asyncio.timeout(PROBE_LIMIT_S), connect(state=folder) as client:
            runs = await client.list_runs()
    except (MeshError, TimeoutError):
        return []
    return [
        run["metadata"]["name"]
        for run in runs
        if run["status"]["state"] != RunState.SUSPENDED and not RunState(run["status"]["state"]).is_terminal
    ]


def status(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Of this run, not the deployment.")
    ] = None,
    output: OutputOption = OutputFormat.TABLE,
    json_: Annotated[bool, typer.Option("--json", help="The same as -o json.")] = False,
    state: StateOption = None,
    url: UrlOption = None,
) -> None:
    """Says whether a deployment runs, and how it is; exit code 3 when none does. With a RUN, how that run is."""
    chosen = OutputFormat.JSON if json_ else output
    if run is None:
        execute(lambda: _status(chosen, state, url), state=state)
    execute(lambda: _run_status(run, chosen, state, url), state=state)


async def _status(output: OutputFormat, state: Path | None, url: str | None) -> None:
    from mesh.cli.output import print_document
    from mesh.cli.terminal import Terminal

    terminal = Terminal()
    async with client_for(state, url) as client, terminal.working("Asking"):
        facts = await client.status()
        address = client.url
    if output in (OutputFormat.JSON, OutputFormat.YAML):
        print_document(terminal, {**facts, "url": address}, output)
        return
    machines = ", ".join(f"{count} {name}" for name, count in facts["machines"].items() if count) or "none"
    runs = ", ".join(f"{count} {name}" for name, count in facts["runs"].items() if count) or "none"
    terminal.out(f"deployment  {facts['state']} at {address} (version {facts['version']})")
    terminal.out(f"machines    {machines}")
    terminal.out(f"runs        {runs}")
    for line in _detail_lines(facts["details"]):
        terminal.out(line)


def _detail_lines(details: Mapping[str, Any]) -> list[str]:
    """What else a deployment says of itself, and what follows from it where machines join it."""
    said = {
        key: value for key, value in details.items() if key not in ("chaos", "checkpoints", "startedWith")
    }
    listen = details.get("startedWith", {}).get("--listen")
    if listen is not None:
        said["mesh port"] = f"{listen}; {how_to_join(listen.rpartition(':')[2])}"
    if "checkpoints" in details:
        said["checkpoints"] = details["checkpoints"] or NO_CHECKPOINTS
    if details.get("chaos") is False:
        said["chaos"] = "not allowed (mesh up --allow-chaos)"
    return [f"{key:<12}{value}" for key, value in said.items()]


async def _run_status(name: str, output: OutputFormat, state: Path | None, url: str | None) -> None:
    from mesh.cli.describe import describe_run
    from mesh.cli.output import print_document
    from mesh.cli.terminal import Terminal

    terminal = Terminal()
    async with client_for(state, url) as client, terminal.working(f"Asking for {name}"):
        run = await client.get_run(name)
    if output in (OutputFormat.JSON, OutputFormat.YAML):
        print_document(terminal, run, output)
        return
    for line in describe_run(run):
        terminal.out(line)


def version() -> None:
    """Prints the version of this program."""
    from mesh import __version__
    from mesh.cli.terminal import Terminal

    Terminal().out(f"gangmesh {__version__}")


def openapi(state: StateOption = None, url: UrlOption = None) -> None:
    """Prints the OpenAPI document of the deployment's API."""
    execute(lambda: _openapi(state, url), state=state)


async def _openapi(state: Any, url: str | None) -> None:
    from mesh.cli.output import print_document
    from mesh.cli.terminal import Terminal

    async with client_for(state, url) as client:
        document = await client.openapi()
    print_document(Terminal(), document, OutputFormat.JSON)
