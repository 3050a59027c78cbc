"""Where relays are taken in, told the news, and asked what they have carried. Behind the API's routes.

Theory of operation. A relay shows a token that was made for relays, or the secret that it has from before, and a
request for a certificate. It is dialled back, and machines are told of it while it can be: the head has dialled it, and
it asks for news. Of the mesh it hears only whom to trust and whom not to believe any more, never where anybody is.

Rules of this file:
1. A change is in the books on disk before the relay that asked hears of it; so is what it has carried.
2. A relay that has not asked for SILENT_S is not offered to machines any more; when it asks again, it is.
3. What the head's own relay carries is entered as the others' is.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from coordinator.api.relay_service import RelayNews, RelayTerms
from coordinator.dial_back import DialBack
from coordinator.mesh_authority import MeshAuthority
from coordinator.mesh_books import LEDGER_NAME, RELAYS_NAME, TOKENS_NAME, MeshBooks
from coordinator.mesh_machines import checked_hint
from coordinator.mesh_news import MeshNewsroom
from coordinator.mesh_relays import DEFAULT_HINT, MeshRelay
from coordinator.mesh_requests import ShownToken, check_clock, new_secret, shown_token, text_of
from mesh import __version__
from mesh.errors import ConflictError, RemoteProtocolError, SpecError
from mesh.ids import HEAD, MachineName, RunUid
from mesh.net.clock import wall_clock
from mesh.net.relay_outbox import Report, report_in
from mesh.net.tokens import used_already
from mesh.resources import RelayedBytes, RelayFacts

SILENT_S = 30.0
"""A follower asks again at once, and a question is answered after 20 s at most."""
COUNT_MAX = 10**6


class Surroundings(Protocol):
    """What this needs of the head around it; see `coordinator.mesh_desk.Surroundings`."""

    async def next_name_number(self) -> int: ...
    async def source_of(self, port: int) -> str | None: ...
    async def probe_relay(
        self, relay: MachineName, addresses: Sequence[tuple[str, int]]
    ) -> list[tuple[str, int]]: ...


class RelayDesk:
    """One head's.

    Args:
        revoked: machines and relays that nobody believes any more.
        save: writes a book, by its name.
    """

    def __init__(
        self,
        *,
        books: MeshBooks,
        authority: MeshAuthority,
        around: Surroundings,
        dial_back: DialBack,
        newsroom: MeshNewsroom,
        revoked: Callable[[], list[MachineName]],
        save: Callable[[str], Awaitable[None]],
    ) -> None:
        self._books = books
        self._authority = authority
        self._around = around
        self._dial_back = dial_back
        self._newsroom = newsroom
        self._revoked = revoked
        self._save = save
        self._began = time.monotonic()
        self._heard: dict[MachineName, float] = {}
        """When each asked last; who has not asked since this head began counts from then."""
        self._counts: dict[MachineName, tuple[int, int]] = {}
        """Lines and streams, as each said last."""
        self._offered: dict[MachineName, tuple[tuple[str, int], ...]] = {}
        self.changes = 0
        """How often machines had to be told something of relays."""

    # ---- what a relay calls -----------------------------------------------------------------------

    async def join(self, request: Mapping[str, Any]) -> RelayTerms:
        """Takes a relay in, or in again.

        Raises:
            AuthenticationError: the token or the identity is not good; (ClockSkew) the clocks differ.
            ConflictError: another version, too many relays; (IdentityInUse) the relay is there already.
            TransportError: (LimitExceeded) too many have left.
            SpecError: what is asked makes no sense. StorageError.
        """
        check_clock(request)
        if request.get("version") != __version__:
            raise ConflictError(
                f"The relay runs gangmesh {str(request.get('version'))[:40]}, this deployment {__version__}.",
                hint="Install the same version on both.",
            )
        hint = checked_hint(request.get("nameHint") or DEFAULT_HINT)
        signing = text_of(request, "request").encode()
        secret = new_secret()
        if request.get("again") is None:
            name, certificate = await self._enter(request, hint, signing, secret)
        else:
            name, certificate = self._come_back(request, signing, secret)
        await self._save(RELAYS_NAME)
        return {
            "name": name,
            "secret": secret,
            "deployment": self._authority.deployment,
            "certificate": certificate.decode(),
            "news": self._news(),
        }

    async def _enter(
        self, request: Mapping[str, Any], hint: str, signing: bytes, secret: str
    ) -> tuple[MachineName, bytes]:
        """By a token: the relay's name and certificate."""
        self._shown(request)
        number = await self._around.next_name_number()
        shown = self._shown(request)  # again: somebody else may have come while the number was waited for
        name = shown.name_before
        is_known = name in self._books.relays.relays
        if name is None or not is_known:
            name = MachineName(f"{hint}-{number}")
        certificate = self._authority.sign_relay(signing, name)
        if is_known:
            self._books.relays.begin_anew(name, secret)
        else:
            self._books.relays.enter(name, secret, now=wall_clock())
        self._books.tokens.redeem(shown.record, key=shown.key, name=name, now=wall_clock())
        await self._save(TOKENS_NAME)
        return name, certificate

    def _shown(self, request: Mapping[str, Any]) -> ShownToken:
        """Changes nothing. Raises SpecError, AuthenticationError."""
        shown = shown_token(request, self._books.tokens, for_relay=True)
        if shown.name_before is not None and not self._books.relays.may_begin_anew(shown.name_before):
            raise used_already(shown.record)
        return shown

    def _come_back(
        self, request: Mapping[str, Any], signing: bytes, secret: str
    ) -> tuple[MachineName, bytes]:
        again = request.get("again")
        if not isinstance(again, dict):
            raise SpecError("`again` is the name and the secret of a relay.", field="again")
        name, shown = MachineName(text_of(again, "name")), text_of(again, "secret")
        is_followed = self._newsroom.is_followed(name)
        self._books.relays.may_come_back(name, shown, is_followed=is_followed)
        certificate = self._authority.sign_relay(signing, name)
        self._books.relays.come_back(name, shown, secret, is_followed=is_followed)
        return name, certificate

    async def follow(self, name: str, secret: str, after: str, *, is_gone: Callable[[], bool]) -> RelayNews:
        """What is new since `after`; waits for it, for a while. Raises as `MeshDesk.follow`."""
        relay = await self._check(name, secret)
        self._hear(relay.name)
        await self._newsroom.until_new(relay.name, after, is_gone=is_gone)
        await self._check(name, secret)
        self._hear(relay.name)
        return self._news()

    async def reach(
        self,
        name: str,
        secret: str,
        *,
        addresses: Sequence[tuple[str, int]],
        port: int | None,
        seen_from: int,
    ) -> list[tuple[str, int]]:
        """Where this relay can be dialled, found out by dialling it. Raises as `MeshDesk.reach`.

        Args:
            addresses: what it takes for its own.
            port: where it listens.
            seen_from: our side's port of the connection that it asks on.
        """
        relay = await self._check(name, secret)
        found = await self._dial_back.find(
            relay.name,
            addresses,
            origin=relay.name,
            source=await self._around.source_of(seen_from),
            port=port,
            dial=self._around.probe_relay,
        )
        self._books.relays.place(relay.name, tuple(found))
        await self._save(RELAYS_NAME)
        self._hear(relay.name)
        return found

    async def renew(self, name: str, secret: str, request_pem: str) -> str:
        """A newer certificate (PEM). Raises AuthenticationError."""
        relay = await self._check(name, secret)
        return self._authority.sign_relay(request_pem.encode(), relay.name).decode()

    async def report(self, name: str, secret: str, body: Mapping[str, Any]) -> None:
        """What it has carried; on disk when it returns, once, however often it is said.

        Raises AuthenticationError, SpecError, StorageError.
        """
        relay = await self._check(name, secret)
        try:
            report = report_in(body.get("report"))
        except RemoteProtocolError as error:
            raise SpecError(error.message, field="report") from error
        await self.enter(relay.name, report, lines=_count(body, "lines"), streams=_count(body, "streams"))

    async def left(self, name: str, secret: str) -> None:
        """This relay says goodbye. Raises AuthenticationError, StorageError."""
        relay = await self._check(name, secret)
        await self.remove(relay.name)

    # ---- what the deployment's owner calls --------------------------------------------------------

    async def remove(self, name: str) -> None:
        """Nobody believes this relay any more. Raises NotFoundError, StorageError."""
        self._books.relays.leave(MachineName(name), now=wall_clock())
        await self._save(RELAYS_NAME)
        for known in (self._offered, self._heard, self._counts):
            known.pop(MachineName(name), None)
        self._tell()

    def facts(self) -> list[RelayFacts]:
        """The head's own first."""
        now = time.monotonic()
        own = self._facts(HEAD, addresses=(), state="Up", since=None)
        others = [
            self._facts(
                relay.name, addresses=relay.addresses, state=self._state(relay, now), since=relay.joined_at
            )
            for relay in self._books.relays.present().values()
        ]
        return [own, *others]

    def relayed(self, run: str | None) -> list[RelayedBytes]:
        """What was carried, by relay, run and pair of machines; of one run only where it is named."""
        return [
            {"relay": relay, "run": pair.run, "dialler": pair.dialler, "target": pair.target, "bytes": amount}
            for relay, pair, amount in self._books.ledger.rows_of(None if run is None else RunUid(run))
        ]

    # ---- what the head calls ----------------------------------------------------------------------

    def offered(self) -> Mapping[MachineName, tuple[tuple[str, int], ...]]:
        """Those that machines use now, and where they are."""
        return self._offered

    def there_or_to_come_back(self) -> list[MachineName]:
        """Those that ask for news now, and those that are away and could be used; not one that never could."""
        present = self._books.relays.present().values()
        return [relay.name for relay in present if relay.addresses or self._newsroom.is_followed(relay.name)]

    def look(self) -> None:
        """Rule 2; every few seconds."""
        now = time.monotonic()
        offered = {
            name: relay.addresses
            for name, relay in self._books.relays.present().items()
            if self._state(relay, now) == "Up"
        }
        if offered != self._offered:
            self._offered = offered
            self._tell()

    async def enter(self, name: MachineName, report: Report | None, *, lines: int, streams: int) -> None:
        """A report, and how much is open. Raises StorageError; then it has to be entered again."""
        self._counts[name] = (lines, streams)
        if report is not None:
            self._books.ledger.enter(name, report)
            await self._save(LEDGER_NAME)  # also of one that was entered before: that time it may have failed

    # ---- inside -----------------------------------------------------------------------------------

    async def _check(self, name: str, secret: str) -> MeshRelay:
        known = self._books.relays.relays.get(MachineName(name))
        relay = self._books.relays.check(MachineName(name), secret)
        if known is not relay:
            await self._save(RELAYS_NAME)
        return relay

    def _hear(self, name: MachineName) -> None:
        self._heard[name] = time.monotonic()
        self.look()

    def _state(self, relay: MeshRelay, now: float) -> str:
        is_heard = now - self._heard.get(relay.name, self._began) < SILENT_S
        if not is_heard and not self._newsroom.is_followed(relay.name):
            return "Away"
        return "Up" if relay.addresses else "Unreachable"

    def _facts(
        self, name: MachineName, *, addresses: Sequence[tuple[str, int]], state: str, since: float | None
    ) -> RelayFacts:
        lines, streams = self._counts.get(name, (0, 0))
        return {
            "name": name,
            "addresses": [
                f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in addresses
            ],
            "state": state,
            "since": since,
            "lines": lines,
            "streams": streams,
            "bytes": self._books.ledger.bytes_of(name),
        }

    def _news(self) -> RelayNews:
        return {
            "version": self._newsroom.version(),
            "revoked": [str(name) for name in self._revoked()],
            "bundle": self._authority.bundle_pem().decode(),
        }

    def _tell(self) -> None:
        self.changes += 1
        self._newsroom.tell()


def _count(body: Mapping[str, Any], key: str) -> int:
    """Raises SpecError."""
    value = body.get(key, 0)
    if type(value) is not int or not 0 <= value <= COUNT_MAX:
        raise SpecError(f"{key} is a number.", field=key, got=str(value)[:80])
    return value
