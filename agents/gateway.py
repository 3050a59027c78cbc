"""The process of a machine's gateway: `python -m agents.gateway`. mesh/net/gateway.py does the work.

Rules of this file:
1. One process per machine and deployment: the lock on its folder says so.
2. It knows nothing when it starts. Its agent tells it everything over the control socket, again after a restart; until
   then every stream is refused.
3. An answer on the control socket means done: addresses are there, streams of an older epoch are cut.
4. SIGTERM and SIGINT take the redirect and the addresses away, and end it. After a SIGKILL they stay, and connections
   to overlay addresses are refused by the kernel, until the next start replaces them.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import logging
import logging.handlers
import os
import resource
import secrets
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import uvloop

from agents.gateway_wire import (
    CONTROL_NAME,
    FRAME_BYTES_MAX,
    CarryRelay,
    Counters,
    Fence,
    Forget,
    Host,
    Offer,
    Probe,
    ProbeRelay,
    Request,
    Revoke,
    SetApi,
    SetIdentity,
    SetLocal,
    SetMachines,
    SetRelays,
    SetRoster,
    SourceOf,
    TakeReport,
    from_wire,
)
from mesh.errors import DeploymentError, MeshError, RemoteProtocolError, SpecError
from mesh.ids import MachineName
from mesh.net import redirect
from mesh.net.api_front import ApiFront
from mesh.net.gateway import Gateway
from mesh.net.relay import Relay
from mesh.net.relay_book import RelayLimits
from mesh.net.relay_outbox import Outbox, report_out
from mesh.net.shim import library as shim
from mesh.net.shim.table import ShimTable
from mesh.net.sockets import has_ipv6
from mesh.reasons import Reason
from mesh.wire import FrameParser, encode_frame

LOG_BYTES_MAX = 5_000_000
CLIENTS_MAX = 32
"""At the control socket: an agent, sometimes the next one, a member, and a head's probes."""
READ_BYTES = 64 * 1024
_log = logging.getLogger(__name__)


class GatewayProcess:
    """A gateway, its redirect, and the control socket."""

    def __init__(
        self,
        *,
        folder: Path,
        deployment: str,
        machine: str,
        overlay: tuple[str, ...],
        redirects: bool,
        shims: bool = False,
        closed: tuple[tuple[int, int], ...] = (),
    ) -> None:
        self._shim = ShimTable(folder / shim.TABLE_NAME) if shims else None
        self.gateway = Gateway(deployment=deployment, machine=MachineName(machine), shim=self._shim)
        self._folder = folder
        self._deployment = deployment
        self._overlay = tuple(net for net in overlay if ":" not in net or has_ipv6())
        self._redirects = redirects
        self._closed = closed
        self._has_rules = False
        """Ours are in force: those of another gateway are not ours to take away."""
        self._machines_overlay: tuple[str, ...] = ()
        self._local: tuple[str, ...] = ()
        self._relay: Relay | None = None
        self._outbox = Outbox(life=secrets.token_hex(8))
        """What the relay has carried; the head takes it."""
        self._given: set[str] = set()
        """Overlay addresses that this machine has from us."""
        self._one_at_a_time = asyncio.Lock()
        self._clients: set[asyncio.Task[None]] = set()
        self._control: asyncio.Server | None = None

    async def start(self, *, listen_on: tuple[tuple[str, int], ...]) -> dict[str, Any]:
        """Returns when streams are accepted and captured; where. Raises OSError, DeploymentError."""
        path = self._folder / CONTROL_NAME
        path.unlink(missing_ok=True)
        self.gateway.start(listen_on=listen_on, capture_port=0)
        capture_port = self.gateway.capture_port
        assert capture_port is not None
        if self._redirects:
            await redirect.apply(
                self._deployment, overlay=self._overlay, capture_port=capture_port, closed=self._closed
            )
            self._has_rules = True
        self._control = await asyncio.start_unix_server(self._serve, path)
        path.chmod(0o600)
        return {"addresses": self.gateway.addresses, "capture_port": capture_port}

    async def stop(self) -> None:
        """Takes everything away again."""
        if self._control is not None:
            self._control.close()
        for task in self._clients:
            task.cancel()
        await self.gateway.stop()
        if self._has_rules:
            await redirect.remove(self._deployment)
        if self._shim is not None:
            self._shim.close()
        (self._folder / CONTROL_NAME).unlink(missing_ok=True)

    async def perform(self, request: Request) -> Any:
        """One request, to its end: one at a time, but for probes, which wait for machines. Raises MeshError."""
        match request:
            case Probe():
                found = await self.gateway.probe(request.machine, request.addresses)
                return [list(address) for address in found]
            case ProbeRelay():
                found = await self.gateway.probe_relay(request.relay, request.addresses)
                return [list(address) for address in found]
        async with self._one_at_a_time:
            match request:
                case SetIdentity():
                    self.gateway.set_identity(request.credentials)
                case SetMachines():
                    mine = request.machines.get(self.gateway.identity.machine)
                    self._machines_overlay = mine.overlay if mine else ()
                    self.gateway.set_machines(request.machines)
                case SetRoster():
                    self.gateway.set_roster(request.roster)
                case Host():
                    self.gateway.host(request.credentials, deliver_to=request.deliver_to)
                case Fence():
                    self.gateway.fence(request.run, request.floor)
                case Forget():
                    self.gateway.forget(request.run)
                case Revoke():
                    self.gateway.revoke(request.machines)
                case Offer():
                    self.gateway.offer(request.ports, deliver_to=request.deliver_to)
                case SetRelays():
                    await self.gateway.set_relays(request.places)
                case SetLocal():
                    self._local = request.addresses
                case SetApi():
                    self.gateway.set_api(ApiFront(credentials=request.credentials, target=request.target))
                case CarryRelay():
                    self._carry_relay(request)
                case TakeReport():
                    return self._take_report(request)
                case SourceOf():
                    return self.gateway.source_of(request.port)
                case Counters():
                    return self.gateway.counters()
            if self._redirects:
                await self._update_addresses()
            return None

    def _carry_relay(self, request: CarryRelay) -> None:
        limits = RelayLimits(
            streams_max=request.streams_max, streams_per_machine_max=request.streams_per_machine_max
        )
        self._relay = self.gateway.carry_relay(limits)

    def _take_report(self, request: TakeReport) -> dict[str, Any]:
        if self._relay is None:
            return {"report": None, "lines": 0, "streams": 0}
        self._outbox.on_delivered(request.life, request.delivered)
        self._outbox.fill(self._relay.book)
        counters = self._relay.counters()
        return {
            "report": report_out(self._outbox.next_report()),
            "lines": counters["lines"],
            "streams": counters["streams"],
        }

    async def _update_addresses(self) -> None:
        wanted = {*self._machines_overlay, *self._local}
        for roster in self.gateway.gate.rosters.values():
            for place in roster.members:
                if place.machine == self.gateway.identity.machine:
                    wanted.update(place.overlay)
        for address in sorted(wanted - self._given):
            await redirect.give_address(self._deployment, address)
            self._given.add(address)
        for address in sorted(self._given - wanted):
            await redirect.take_address(self._deployment, address, overlay=self._overlay)
            self._given.discard(address)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        try:
            if len(self._clients) <= CLIENTS_MAX and _is_ours(writer):
                await self._answer_all(reader, writer)
        except (ConnectionError, RemoteProtocolError) as error:
            _log.warning("a client of the control socket is gone: %s", error)
        finally:
            self._clients.discard(task)
            writer.close()

    async def _answer_all(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parser = FrameParser(bytes_max=FRAME_BYTES_MAX)
        while data := await reader.read(READ_BYTES):
            for words in parser.feed(data):
                number = words.get("id") if isinstance(words, dict) else None
                try:
                    answer = {"ok": await self.perform(from_wire(words))}
                except MeshError as error:
                    answer = {"error": error.to_wire()}
                writer.write(encode_frame({"id": number, **answer}))
                await writer.drain()


def _is_ours(writer: asyncio.StreamWriter) -> bool:
    """Whether it is the user of this process, or root, that has connected."""
    credentials = writer.get_extra_info("socket").getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    _, uid, _ = struct.unpack("3i", credentials)
    return uid in (0, os.geteuid())


def take_folder(folder: Path) -> int:
    """The folder is this process's own. Raises DeploymentError when another one has it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(folder / "gateway.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise DeploymentError(
            f"Another gateway runs in {folder}.", reason=Reason.DEPLOYMENT_BUSY, path=str(folder)
        ) from None
    return lock


def address_and_port(text: str) -> tuple[str, int]:
    """`10.0.0.1:7000` or `[fd00::1]:7000`. Raises SpecError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise SpecError(f"{text!r} is no ADDRESS:PORT.", field="listen", got=text)
    return host.strip("[]"), int(port)


def port_range(text: str) -> tuple[int, int]:
    """`31000-31511`, both included. Raises SpecError."""
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) <= 65535):
        raise SpecError(f"{text!r} is no FIRST-LAST of ports.", field="closed", got=text)
    return int(first), int(last)


def raise_descriptor_limit() -> None:
    """As many sockets as this process may have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m agents.gateway", description="A machine's gateway.")
    parser.add_argument("--folder", type=Path, required=True, help="of this process alone")
    parser.add_argument("--deployment", required=True)
    parser.add_argument("--machine", required=True)
    parser.add_argument(
        "--listen", action="append", required=True, metavar="ADDRESS:PORT", help="may be repeated"
    )
    parser.add_argument(
        "--overlay",
        action="append",
        metavar="NETWORK",
        help=f"where overlay addresses are taken from; may be repeated (default: {' '.join(redirect.OVERLAY)})",
    )
    parser.add_argument("--log", type=Path, metavar="FILE", help="where it logs, bounded (default: stderr)")
    parser.add_argument(
        "--closed",
        action="append",
        default=[],
        metavar="FIRST-LAST",
        help="ports of this machine that others reach through the mesh only; may be repeated",
    )
    capture = parser.add_mutually_exclusive_group()
    capture.add_argument(
        "--shim",
        action="store_true",
        help="without rights: no rules and no addresses; programs reach the gateway by the shim (docs/mesh.md)",
    )
    capture.add_argument(
        "--no-redirect", action="store_true", help="no rules and no addresses: whoever dials the capture port"
    )
    return parser


async def serve(options: argparse.Namespace) -> None:
    """Until SIGTERM or SIGINT. Raises MeshError, OSError."""
    listen_on = tuple(address_and_port(text) for text in options.listen)
    overlay = tuple(options.overlay or redirect.OVERLAY)
    if options.shim and overlay != shim.OVERLAY:
        raise SpecError("The shim knows no other overlay.", field="overlay", got=" ".join(overlay))
    lock = take_folder(options.folder)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    process = GatewayProcess(
        folder=options.folder,
        deployment=options.deployment,
        machine=options.machine,
        overlay=overlay,
        redirects=not (options.no_redirect or options.shim),
        shims=options.shim,
        closed=tuple(port_range(text) for text in options.closed),
    )
    try:
        ready = await process.start(listen_on=listen_on)
        print(json.dumps(ready), flush=True)  # noqa: T201 - the word that it is ready, to who started it
        await stop.wait()
    finally:
        await process.stop()
        os.close(lock)


def _bounded(path: Path) -> logging.Handler:
    """Who dials in vain can do so for ever: the log has a size."""
    return logging.handlers.RotatingFileHandler(path, maxBytes=LOG_BYTES_MAX, backupCount=1, delay=True)


def main() -> int:
    options = build_parser().parse_args()
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        handlers=None if options.log is None else [_bounded(options.log)],
    )
    raise_descriptor_limit()
    try:
        uvloop.run(serve(options))
    except MeshError as error:
        print(f"gateway: {error}", file=sys.stderr)  # noqa: T201 - why it did not start
        return 1
    except OSError as error:
        where = ", ".join(options.listen)
        said = f"The mesh port {where} cannot be had: {error.strerror or error}. Another one: --listen ADDRESS:PORT."
        print(f"gateway: {said}", file=sys.stderr)  # noqa: T201 - why it did not start
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
