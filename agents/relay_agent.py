"""The process of a relay that takes part in a deployment: `python -m agents.relay_agent`, behind `mesh relay`.

Theory of operation. It is taken in by a join token for relays, listens, and is dialled back by the head, which then
tells machines of it. From then on it asks for news (whom to trust, whom not to believe any more), and says what it has
carried. Started again, by whoever supervises it, it is the same relay: everything that makes it one is in its folder.

Rules of this file:
1. Key, certificate and secret are on disk before they are used. The key goes nowhere.
2. A head that is away is waited for, also at a start: the relay goes on with what it knows, and counts.
3. What was carried is on disk within COUNT_EVERY_S, and a report of it before it is sent (`relay_outbox.py`). So
   SIGKILL costs what passed since then, and nothing is said twice.
4. A head that refuses ends it, and so does a port that the head cannot dial when it starts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvloop

from agents.agent_program import ReadyLine, take_token
from agents.coming_back import IN_USE_LIMIT_S, ask_until_free
from agents.gateway import raise_descriptor_limit
from agents.head_line import JOIN_LIMIT_S, HeadUrl, ask_trust, head_api, own_addresses
from agents.join_key import forget_join_key, join_key
from agents.join_mesh_settings import check_address, listen_address
from agents.leaving_afar import leave_head
from agents.machine_state import LEAVING_NAME, claimed
from agents.mesh_heard import RelayNewsHeard, answer_errors
from agents.own_port import check_free, port_errors
from agents.relay_folder import KnownRelay, RelayFolder
from agents.stopping import unless_stopped
from mesh import __version__
from mesh.errors import (
    AuthenticationError,
    ConflictError,
    DeploymentError,
    MeshError,
    MeshTimeoutError,
    TransportError,
)
from mesh.ids import MachineName
from mesh.joining import RELAY_STATE
from mesh.net.authority import new_key_pem, read_certificate, signing_request
from mesh.net.clock import wall_clock
from mesh.net.identity import RelayIdentity
from mesh.net.relay import Relay
from mesh.net.relay_book import RelayLimits
from mesh.net.relay_outbox import report_out
from mesh.net.tokens import JoinToken
from mesh.reasons import Reason

FOLLOW_LIMIT_S = 40.0
"""The head answers within 20 s when there is nothing new."""
AGAIN_FIRST_S, AGAIN_MAX_S = 0.5, 10.0
COUNT_EVERY_S = 1.0
REPORT_EVERY_S = 5.0
RENEW_BEFORE_S = 20 * 86400.0
"""Of a certificate's 30 days so many may be left when a newer one is asked for."""
RENEW_AGAIN_S = 3600.0
"""Not more often than that, however long a certificate lasts."""
RENEW_FAILED_S = 60.0
"""An authority that is rotated may be gone soon."""
GOODBYE_LIMIT_S = 10.0
SAID_EVERY = 60
"""Of failures alike, a few seconds apart, so many are one line in the log."""
STREAMS_PER_MACHINE_MAX = 1024

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySettings:
    """What a relay is told."""

    head: HeadUrl
    token: JoinToken | None
    listen: tuple[str, int]
    public_address: str = ""
    name_hint: str = ""


class RelayAgent:
    """One process's. `run` it; the folder is claimed."""

    def __init__(self, settings: RelaySettings, folder: RelayFolder) -> None:
        self._settings = settings
        self._folder = folder
        self._outbox = folder.read_outbox()
        self._known: KnownRelay | None = None
        self._relay: Relay | None = None
        self._is_announced = False
        self._stop = asyncio.Event()
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises when this relay is none any more."""
        self._reporting = asyncio.Lock()
        self._failures: Counter[str] = Counter()
        """Since it went well last."""
        self._keeping = asyncio.Lock()
        self._renew_now = asyncio.Event()
        """Others are to be trusted: another authority may sign."""

    def stop(self) -> None:
        self._stop.set()

    async def run(self, on_ready: Callable[[str], None] = lambda name: None) -> None:
        """Until `stop`. Raises MeshError when the head refuses, or cannot be reached the first time."""
        check_free(*self._settings.listen)
        known = self._known = await unless_stopped(self._stop, self._enter())
        if known is None:
            return
        relay = self._relay = Relay(
            identity=RelayIdentity(deployment=known.deployment, machine=MachineName(known.name)),
            limits=RelayLimits(streams_per_machine_max=STREAMS_PER_MACHINE_MAX),
        )
        relay.set_identity(known.credentials)
        relay.revoke(_names(known.revoked))
        with port_errors(*self._settings.listen):
            relay.start(listen_on=(self._settings.listen,))
        try:
            if self._is_announced:
                await unless_stopped(self._stop, self._announce())
            _log.info("the relay %s listens on %s", known.name, relay.addresses)
            if not self._stop.is_set():
                on_ready(known.name)
            await self._serve()
        finally:
            await relay.stop()
            await self._count()
        await self._say_goodbye()

    async def _serve(self) -> None:
        works: dict[str, Coroutine[Any, Any, None]] = {
            "news": self._follow(),
            "certificate": self._renew(),
            "counts": self._keep_counting(),
            "reports": self._keep_reporting(),
        }
        tasks = [asyncio.create_task(work, name=name) for name, work in works.items()]
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        either: list[asyncio.Future[Any]] = [stop, self._over, *tasks]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()  # a fault of ours: whoever supervises this process begins again
            if self._over.done():
                self._over.result()
        finally:
            stop.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.wait([*tasks, stop])

    # ---- entering ---------------------------------------------------------------------------------

    async def _enter(self) -> KnownRelay:
        """As the relay that it was, when it was one; else by its token."""
        known, token = self._folder.read_known(), self._settings.token
        if known is not None:
            try:
                return await self._ask_again(known)
            except (AuthenticationError, ConflictError) as error:
                if token is None or error.reason is Reason.CLOCK_SKEW:
                    raise
                _log.info("taking part anew, by the token: %s", error)
            except (TransportError, MeshTimeoutError) as error:
                _log.warning("going on as %s without the head, for now: %s", known.name, error)
                return replace(known, head=self._settings.head.url)
        if token is None:
            raise AuthenticationError(
                "This relay has not taken part before: it needs a token.",
                hint="`mesh token create --relay` on the head makes one; then: mesh relay URL --token-file FILE "
                "--listen …",
            )
        authority = await ask_trust(self._settings.head, token.fingerprint)
        key = await asyncio.to_thread(join_key, self._folder.path, token)
        known = await self._ask_with({"token": str(token)}, authority, key)
        await asyncio.to_thread(forget_join_key, self._folder.path)
        return known

    async def _ask_again(self, known: KnownRelay) -> KnownRelay:
        again = {"again": {"name": known.name, "secret": known.secret}}
        return await ask_until_free(
            lambda: self._ask_with(again, known.bundle.encode(), new_key_pem()), patience_s=IN_USE_LIMIT_S
        )

    async def _ask_with(self, credentials: dict[str, Any], authority_pem: bytes, key: bytes) -> KnownRelay:
        request = {
            **credentials,
            "request": signing_request(key).decode(),
            "clock": wall_clock(),
            "version": __version__,
            "nameHint": self._settings.name_hint,
        }
        async with head_api(self._settings.head, bundle_pem=authority_pem) as api:
            answer = await api.call("POST", "/v1/relays", body=request, limit_s=JOIN_LIMIT_S, repeat_s=0.0)
        with answer_errors():
            news = RelayNewsHeard.read(answer["news"])
            known = KnownRelay(
                head=self._settings.head.url,
                name=str(answer["name"]),
                secret=str(answer["secret"]),
                deployment=str(answer["deployment"]),
                bundle=news.bundle,
                key=key.decode(),
                certificate=str(answer["certificate"]),
                revoked=news.revoked,
            )
        await self._folder.save_known(known)
        self._is_announced = True
        return known

    async def _announce(self) -> None:
        """Lets the head dial back. Raises DeploymentError when it cannot."""
        known, (host, port) = self._present(), self._settings.listen
        own = [self._settings.public_address] if self._settings.public_address else []
        own = own or await own_addresses(self._settings.head, listen=host)
        body = {"addresses": [[address, port] for address in own], "port": port}
        async with self._api(known) as api:
            answer = await api.call("POST", f"/v1/relays/{known.name}/reach", body=body, limit_s=JOIN_LIMIT_S)
        with answer_errors():
            found = list(answer["addresses"])
        if not found:
            tried = ", ".join(own) or "no address"
            raise DeploymentError(
                f"The head cannot dial this relay: port {port} of {tried} does not lead to it.",
                hint="Open the port in firewalls and forward it in NATs, or name the address that others reach: "
                f"--public-address. It is known as {known.name} now, and started again it needs no token. To give "
                f"it up: `mesh leave --state {self._folder.path}` here, or `mesh drain {known.name}` on the head.",
                reason=Reason.UNREACHABLE,
            )

    async def _announce_late(self) -> None:
        """It was started while the head was away. Raises MeshError when the head does not say whether it can dial."""
        try:
            await self._announce()
        except DeploymentError as error:
            if error.reason is not Reason.UNREACHABLE:
                raise
            _log.error("%s", error)
        self._is_announced = True

    # ---- life -------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        pause_s, version = AGAIN_FIRST_S, ""
        while True:
            try:
                async with self._api(self._present()) as api:
                    while True:
                        answer = await api.call(
                            "GET",
                            f"/v1/relays/{self._present().name}/news",
                            query={"after": version},
                            limit_s=FOLLOW_LIMIT_S,
                            repeat_s=0.0,
                        )
                        news = RelayNewsHeard.read(answer)
                        pause_s = AGAIN_FIRST_S
                        del self._failures["news"]
                        if not self._is_announced:
                            await self._announce_late()
                        if news.version != version:
                            await self._hear(news)
                            version = news.version
            except AuthenticationError as error:
                self._over.set_exception(error)
                return
            except (MeshError, OSError) as error:
                self._say("news", f"no news from the head, asking again and again: {error}")
            await asyncio.sleep(pause_s)
            pause_s = min(AGAIN_MAX_S, pause_s * 2)

    async def _hear(self, news: RelayNewsHeard) -> None:
        known = self._present()
        if news.revoked == known.revoked and news.bundle == known.bundle:
            return
        if self._relay is not None:  # at once, also where the disk does not take it
            self._relay.revoke(_names(news.revoked))
        await self._keep(revoked=news.revoked, bundle=news.bundle)
        if news.bundle != known.bundle:
            self._renew_now.set()

    async def _renew(self) -> None:
        has_failed = False
        while True:
            ends_at = read_certificate(self._present().certificate.encode()).not_after
            pause_s = max(RENEW_AGAIN_S, ends_at - RENEW_BEFORE_S - wall_clock())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(pause_s, RENEW_FAILED_S) if has_failed else pause_s):
                    await self._renew_now.wait()
            self._renew_now.clear()
            key, known = new_key_pem(), self._present()
            try:
                async with self._api(known) as api:
                    answer = await api.call(
                        "POST",
                        f"/v1/relays/{known.name}/certificate",
                        body={"request": signing_request(key).decode()},
                    )
                with answer_errors():
                    certificate = str(answer["certificate"])
                await self._keep(key=key.decode(), certificate=certificate)
                has_failed = False
            except (MeshError, OSError) as error:
                has_failed = True
                _log.warning("no new certificate: %s", error)

    async def _keep(self, **changes: Any) -> None:
        """On disk, then in use. One after the other: each changes what the one before has left."""
        async with self._keeping:
            before = self._present()
            known = replace(before, **changes)
            await self._folder.save_known(known)
            self._known = known
            if self._relay is not None and known.credentials != before.credentials:
                self._relay.set_identity(known.credentials)

    # ---- what was carried -------------------------------------------------------------------------

    async def _keep_counting(self) -> None:
        while True:
            await asyncio.sleep(COUNT_EVERY_S)
            await self._count()

    async def _count(self) -> None:
        """A disk that takes nothing stops no stream: the counts stay in memory."""
        relay = self._relay
        async with self._reporting:
            if relay is None or not self._outbox.fill(relay.book):
                return
            try:
                await self._folder.save_outbox(self._outbox)
                del self._failures["counts"]
            except OSError as error:
                self._say("counts", f"what was carried is not on disk: {error}")

    async def _keep_reporting(self) -> None:
        said: dict[str, Any] = {}
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            try:
                said = await self._report(said)
                del self._failures["reports"]
            except (MeshError, OSError) as error:
                self._say("reports", f"what was carried is kept until the head takes it: {error}")

    async def _report(self, said: dict[str, Any]) -> dict[str, Any]:
        """Everything that there is to say, when it is not what was said last. Raises MeshError, OSError."""
        assert self._relay is not None
        while True:
            async with self._reporting:
                report = self._outbox.next_report()
                if report is not None:
                    await self._folder.save_outbox(self._outbox)
            counters = self._relay.counters()
            counts = {"lines": counters["lines"], "streams": counters["streams"]}
            if report is None and counts == said:
                return said
            known = self._present()
            async with self._api(known) as api:
                await api.call(
                    "POST",
                    f"/v1/relays/{known.name}/report",
                    body={**counts, "report": report_out(report)},
                    repeat_s=0.0,
                )
            said = counts
            if report is not None:
                async with self._reporting:
                    self._outbox.on_delivered(report.life, report.number)
                    await self._folder.save_outbox(self._outbox)

    async def _say_goodbye(self) -> None:
        """The rest of what was carried; and that it is for good, when `mesh leave` has said so."""
        await self._tell_last("what was carried", self._report_all())
        if (self._folder.path / LEAVING_NAME).exists():
            await self._tell_last("that this relay has left", self._leave())

    async def _report_all(self) -> None:
        await self._report({})

    async def _leave(self) -> None:
        await leave_head(self._present())
        await asyncio.to_thread(self._folder.forget)

    async def _tell_last(self, what: str, telling: Coroutine[Any, Any, None]) -> None:
        """Nobody tries again here: counts are kept, and whoever has said that it leaves sees that it is still one."""
        try:
            async with asyncio.timeout(GOODBYE_LIMIT_S):
                await telling
        except (MeshError, OSError) as error:  # a time-out is one
            _log.warning("the head was not told %s: %s", what, error or "no answer")

    # ---- inside -----------------------------------------------------------------------------------

    def _say(self, what: str, text: str) -> None:
        """Into the log, the first of many alike."""
        if self._failures[what] % SAID_EVERY == 0:
            _log.warning("%s", text)
        self._failures[what] += 1

    def _present(self) -> KnownRelay:
        assert self._known is not None
        return self._known

    def _api(self, known: KnownRelay) -> Any:
        return head_api(self._settings.head, bundle_pem=known.bundle.encode(), secret=known.secret)


def _names(names: list[str]) -> frozenset[MachineName]:
    return frozenset(MachineName(name) for name in names)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m agents.relay_agent", description="A relay of a deployment; `mesh relay` starts it."
    )
    parser.add_argument("--head", metavar="URL", required=True, help="of the head's mesh port")
    parser.add_argument("--listen", metavar="ADDRESS:PORT", required=True)
    parser.add_argument("--public-address", metavar="ADDRESS", default="")
    parser.add_argument("--name-hint", metavar="NAME", default="")
    parser.add_argument("--state", metavar="DIR", type=Path, default=RELAY_STATE)
    parser.add_argument(
        "--ready-fd", metavar="FD", type=int, help="told when it has joined, or why it has not"
    )
    return parser


def read_settings(options: argparse.Namespace, token: str | None) -> RelaySettings:
    """Raises SpecError."""
    check_address("--public-address", options.public_address)
    listen = listen_address(options.listen)
    return RelaySettings(
        head=HeadUrl.parse(options.head),
        token=JoinToken.parse(token) if token else None,
        listen=listen,
        public_address=options.public_address,
        name_hint=options.name_hint,
    )


async def serve(settings: RelaySettings, folder: RelayFolder, ready: ReadyLine) -> None:
    """Until SIGTERM or SIGINT. Raises MeshError, OSError."""
    agent = RelayAgent(settings, folder)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, agent.stop)
    await agent.run(ready.joined)


def main() -> int:
    options = build_parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    ready, token = ReadyLine(options.ready_fd), take_token()
    raise_descriptor_limit()
    path = options.state.expanduser().absolute()
    try:
        settings = read_settings(options, token)
        with claimed(path):
            (path / LEAVING_NAME).unlink(missing_ok=True)  # of one that was killed meanwhile
            uvloop.run(serve(settings, RelayFolder(path), ready))
    except (MeshError, OSError) as error:
        return ready.failed(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
