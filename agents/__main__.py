"""`python -m agents join`: this machine becomes one of a deployment's machines, until SIGTERM or SIGINT.

Rules of this file:
1. The owner's environment is kept as it was, for the users' commands, and replaced by a clean one before Ray is
   imported: Ray reads it then.
2. The token comes from a file: everybody on the machine can read arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m agents", description="The parts of gangmesh that run on a machine."
    )
    join = parser.add_subparsers(dest="command", required=True).add_parser(
        "join",
        help="make this machine one of a deployment's machines, until SIGTERM or SIGINT",
        description="Starts a Ray node on this machine that belongs to a deployment elsewhere, and again when the "
        "deployment began again. Ray listens on every interface, unencrypted: for a network in which everybody may "
        "be trusted.",
    )
    join.add_argument(
        "--head", metavar="URL", required=True, help="of the deployment's API, as `mesh up` says it"
    )
    join.add_argument(
        "--token-file",
        metavar="FILE",
        required=True,
        type=Path,
        help="a file that holds the deployment's token",
    )
    join.add_argument(
        "--address",
        metavar="ADDRESS",
        required=True,
        help="this machine's IPv4 address, as the others reach it",
    )
    join.add_argument(
        "--state",
        metavar="DIR",
        type=Path,
        default=Path("~/.gangmesh-machine"),
        help="this machine's folder; one agent at a time (default: ~/.gangmesh-machine)",
    )
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
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    from agents.join import JoinSettings, machine_state, run, take_environment
    from mesh.errors import MeshError

    options = build_parser().parse_args(arguments)
    original = dict(os.environ)
    try:
        settings = JoinSettings.read(
            head=options.head,
            token_file=options.token_file,
            address=options.address,
            labels=options.label,
            grace_s=options.grace,
        )
        with machine_state(options.state) as state:
            take_environment(state, original)
            # Not `asyncio.run`: at its end it waits for threads, and a call into a lost cluster may never return.
            asyncio.new_event_loop().run_until_complete(run(settings, state))
    except (MeshError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    code = main()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)
