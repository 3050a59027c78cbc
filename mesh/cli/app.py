"""The program `mesh` (also called `nodus`): which commands there are.

Nothing here, or in the modules imported here, imports more than Typer: `mesh --help` has to be quick. What a command
needs it imports when it runs.
"""

from __future__ import annotations

import typer
from typer.core import TyperGroup

from mesh.cli import (
    authority,
    chaos,
    check,
    deployment,
    describe,
    get,
    join,
    logs,
    machines,
    pause,
    relay,
    run,
    runs,
    tokens,
)
from mesh.cli.exit_codes import TABLE
from mesh.cli.options import StateOption, UrlOption

app = typer.Typer(
    name="mesh",
    help="Runs one training command on several machines as a gang: started together, fenced together.",
    epilog=TABLE,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


@app.callback()
def shared(context: typer.Context, state: StateOption = None, url: UrlOption = None) -> None:
    """Which deployment is meant may be said before the command as well as after it."""
    given = {name: value for name, value in (("state", state), ("url", url)) if value is not None}
    group, name = context.command, context.invoked_subcommand or ""
    assert isinstance(group, TyperGroup)
    taken = {parameter.name for parameter in group.commands[name].params} if name in group.commands else given
    for option in given.keys() - taken:
        raise typer.BadParameter(f"`mesh {name}` takes no --{option}")
    context.default_map = {name: given}


app.command(
    "run",
    cls=run.RunCommand,
    short_help="Run a command on several machines as a gang.",
    epilog=run.EPILOG,
    context_settings={"allow_interspersed_args": False},
)(run.run)
app.command("get", short_help="List runs, attempts, machines, events, paths or relays.")(get.get)
app.command("describe", short_help="Tell the story of a run.")(describe.describe)
app.command("logs", short_help="Show what the ranks printed.")(logs.logs)
app.command("wait", short_help="Wait until a run runs, is suspended, or has ended.")(runs.wait)
app.command("suspend", short_help="Stop a run for now; its machines are given back.")(pause.suspend)
app.command("resume", short_help="Let a suspended run go on.")(pause.resume)
app.command("cancel", short_help="Stop a run.")(runs.cancel)
app.command("delete", short_help="Forget ended runs, with their logs.")(runs.delete)
app.command("chaos", short_help="Do a rank harm on purpose, and see whether the run recovers.")(chaos.chaos)
app.command("drain", short_help="Say that a machine goes away.")(machines.drain)
app.command("authority", short_help="Show or rotate the certificate authority of the mesh.")(
    authority.authority
)
app.command("token", short_help="Make, list or revoke tokens that machines join with.")(tokens.token)
app.command("join", short_help="Let this machine join a deployment elsewhere.")(join.join)
app.command("leave", short_help="Let this machine leave its deployment.")(join.leave)
app.command("check", short_help="Measure the network between free machines.")(check.check)
app.command("relay", short_help="Run a relay for a deployment on this host.")(relay.relay)
app.command("up", short_help="Start a deployment on this host.")(deployment.up)
app.command("down", short_help="End the deployment on this host.")(deployment.down)
app.command("status", short_help="Say whether a deployment runs, and how it is.")(deployment.status)
app.command("version", short_help="Print this program's version.")(deployment.version)
app.command("openapi", short_help="Print the API's OpenAPI document.")(deployment.openapi)
