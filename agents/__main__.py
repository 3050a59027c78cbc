"""`python -m agents join` and `leave`: this machine becomes one of a deployment's machines, until SIGTERM or SIGINT.

Rules of this file:
1. The owner's environment is kept as it was, for the users' commands, and replaced by a clean one before Ray is
   imported: Ray reads it then.
2. Tokens come from files: everybody on the machine can read arguments.
3. Whoever starts the agent is told on `--ready-fd`, one JSON object a line: `{"ready": true, "name": …}` or
   `{"error": …}`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesh.joining import MACHINE_STATE

if TYPE_CHECKING:
    from agents.agent_program import ReadyLine

MESH_PORT = 8471


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m agents", description="The parts of gangmesh that run on a machine."
    )
    verbs = parser.add_subparsers(dest="command", required=True)
    _add_join(verbs)
    leave = verbs.add_parser(
        "leave",
        help="end the agent of this machine, for good: the run on it saves and gets another machine",
    )
    _add_state(leave)
    return parser


def _add_state(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--state",
        metavar="DIR",
        type=Path,
        default=MACHINE_STATE,
        help=f"this machine's folder; one agent at a time (default: {MACHINE_STATE})",
    )


def _add_join(verbs: Any) -> None:
    join = verbs.add_parser(
        "join",
        help="make this machine one of a deployment's machines, until SIGTERM or SIGINT",
        description="Starts a Ray node on this machine that belongs to a deployment elsewhere, and again when the "
        "deployment began again. With https://, the head's mesh port, everything goes through the mesh, encrypted. "
        "With http:// and --address Ray listens on every interface, unencrypted: for a network in which everybody may "
        "be trusted.",
    )
    join.add_argument(
        "--head",
        metavar="URL",
        required=True,
        help="of the head's mesh port, or of the deployment's plain API",
    )
    join.add_argument(
        "--token-file",
        metavar="FILE",
        type=Path,
        help="a file that holds a join token, or (http://) the deployment's token. Not needed by who has joined before "
        "through a mesh port",
    )
    join.add_argument(
        "--address",
        metavar="ADDRESS",
        help="http:// only: this machine's IPv4 address, as the others reach it",
    )
    _add_state(join)
    join.add_argument(
        "--label",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="something to select this machine by, such as rack=3; may be repeated",
    )
    join.add_argument(
        "--grace",
        metavar="SECONDS",
        type=float,
        default=30.0,
        help="after SIGTERM or SIGINT: how long the run that has this machine may take to save and to leave; a second "
        "signal does not wait (default: 30)",
    )
    join.add_argument(
        "--listen",
        metavar="ADDRESS:PORT",
        default=f"0.0.0.0:{MESH_PORT}",
        help="where this machine's mesh port is (default: %(default)s); it need not be reachable",
    )
    join.add_argument("--name-hint", metavar="NAME", default="", help="what its name shall begin with")
    join.add_argument(
        "--private-network", metavar="NAME", default="", help="a network of its owner that it is in"
    )
    join.add_argument("--private-address", metavar="ADDRESS", default="", help="its address in that network")
    join.add_argument(
        "--public-address",
        metavar="ADDRESS",
        default="",
        help="its public address; says also that members may speak in the clear between such addresses",
    )
    join.add_argument("--ready-fd", metavar="FD", type=int, help="told when it has joined, or why it has not")


def main(arguments: Sequence[str] | None = None) -> int:
    from agents.agent_program import ReadyLine
    from mesh.errors import MeshError

    options = build_parser().parse_args(arguments)
    ready = ReadyLine(getattr(options, "ready_fd", None))
    try:
        if arguments is None and options.command == "join" and _is_mesh(options):
            from agents import machine_shim

            machine_shim.load()  # may start this process anew
        if options.command == "leave":
            from agents.leave import leave

            return leave(options.state)
        return _join(options, ready)
    except (MeshError, OSError) as error:
        return ready.failed(error)


def _is_mesh(options: argparse.Namespace) -> bool:
    return not options.head.startswith("http://") and options.address is None


def _join(options: argparse.Namespace, ready: ReadyLine) -> int:
    from agents.agent_program import take_token
    from agents.join import Way, run
    from agents.join_options import checked_grace, read_labels
    from agents.machine_state import machine_state, take_environment
    from mesh.errors import SpecError

    token = take_token(options.token_file)
    original = dict(os.environ)
    labels, grace_s = read_labels(options.label), checked_grace(options.grace)
    is_plain = not _is_mesh(options)
    way: Way
    if is_plain:
        from agents.join_plain import JoinSettings, PlainWay

        for option, value in (("--address", options.address), ("--token-file", options.token_file)):
            if value is None:
                raise SpecError(
                    f"With http:// this takes {option}.",
                    hint="To join through a mesh port write https://HOST:PORT.",
                    field=option,
                )
        plain = JoinSettings.read(
            head=options.head,
            token_file=options.token_file,
            address=options.address,
            labels=options.label,
            grace_s=grace_s,
        )
    else:
        from agents.join_mesh import MeshWay
        from agents.join_mesh_settings import read_settings
        from agents.kept_options import with_kept

        settings = read_settings(
            head=options.head,
            token=token,
            listen=options.listen,
            labels=labels,
            name_hint=options.name_hint,
            private_network=options.private_network,
            private_address=options.private_address,
            public_address=options.public_address,
        )
    with machine_state(options.state) as state:
        take_environment(state, original, has_gateway=not is_plain)
        way = PlainWay(plain) if is_plain else MeshWay(with_kept(settings, state.path), state)
        work = run(way, state, grace_s=grace_s, on_joined=ready.joined)
        # Not `asyncio.run`: at its end it waits for threads, and a call into a lost cluster may never return.
        asyncio.new_event_loop().run_until_complete(work)
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    code = main()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)
