"""A relay without a head, by certificates that somebody made: `python -m tests.net_relay`. For benches and the lab.

Rules of this file:
1. Its certificate, key and authorities are files of its folder (`certificate.pem`, `key.pem`, `bundle.pem`); SIGHUP
   reads them again.
2. What passed is written to its log once a minute, for each run and pair of machines, as one JSON object. SIGTERM and
   SIGINT write the rest, and end it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from pathlib import Path

import uvloop

from agents.gateway import address_and_port, raise_descriptor_limit, take_folder
from mesh.errors import AuthenticationError, MeshError
from mesh.ids import MachineName
from mesh.net.identity import RelayIdentity
from mesh.net.relay import Relay
from mesh.net.relay_book import RelayLimits
from mesh.net.tls import Credentials

USAGE_EVERY_S = 60.0
_log = logging.getLogger(__name__)


def read_credentials(folder: Path) -> Credentials:
    """Raises AuthenticationError when one is missing."""
    try:
        return Credentials(
            certificate_pem=(folder / "certificate.pem").read_bytes(),
            key_pem=(folder / "key.pem").read_bytes(),
            bundle_pem=(folder / "bundle.pem").read_bytes(),
        )
    except OSError as error:
        raise AuthenticationError(
            f"{error.filename} cannot be read: {error.strerror}.", path=str(error.filename)
        ) from error


def write_usage(relay: Relay) -> None:
    """What has passed since the last time, for each run and pair of machines, as one JSON object each."""
    for pair, amount in relay.book.take_usage().items():
        words = {"run": pair.run, "from": pair.dialler, "to": pair.target, "bytes": amount}
        _log.info("relayed %s", json.dumps(words))


async def serve(options: argparse.Namespace) -> None:
    """Until SIGTERM or SIGINT. Raises MeshError, OSError."""
    loop = asyncio.get_running_loop()
    listen_on = tuple(address_and_port(text) for text in options.listen)
    lock = take_folder(options.folder)
    relay = Relay(
        identity=RelayIdentity(deployment=options.deployment, machine=MachineName(options.machine)),
        limits=RelayLimits(streams_per_machine_max=options.streams_per_machine),
    )
    relay.set_identity(read_credentials(options.folder))

    def read_again() -> None:
        try:
            relay.set_identity(read_credentials(options.folder))
        except AuthenticationError as error:
            _log.error("the certificate stays what it was: %s", error)

    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGHUP, read_again)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        relay.start(listen_on=listen_on)
        print(json.dumps({"addresses": relay.addresses}), flush=True)
        while not stop.is_set():
            try:
                async with asyncio.timeout(USAGE_EVERY_S):
                    await stop.wait()
            except TimeoutError:
                write_usage(relay)
    finally:
        await relay.stop()
        write_usage(relay)
        os.close(lock)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.net_relay", description="A relay.")
    parser.add_argument(
        "--folder", type=Path, required=True, help="of this process alone; has its certificate"
    )
    parser.add_argument("--deployment", required=True)
    parser.add_argument("--machine", required=True, help="its name, as in its certificate")
    parser.add_argument(
        "--listen", action="append", required=True, metavar="ADDRESS:PORT", help="may be repeated"
    )
    parser.add_argument(
        "--streams-per-machine",
        type=int,
        default=RelayLimits().streams_per_machine_max,
        metavar="N",
        help="that one machine may have dialled at a time (default: %(default)s)",
    )
    return parser


def main() -> int:
    options = build_parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    raise_descriptor_limit()
    try:
        uvloop.run(serve(options))
    except (MeshError, OSError) as error:
        print(f"relay: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
