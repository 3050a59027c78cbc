"""What the API's routes for relays need of the head, and the shapes that they show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NotRequired, Protocol

from typing_extensions import TypedDict

from mesh.resources import RelayedBytes, RelayFacts


class KnownRelay(TypedDict):
    """A relay that was started again."""

    name: str
    secret: str


class RelayJoinRequest(TypedDict):
    """A relay that asks to take part, by a token that was made for relays or as one that has been here."""

    token: NotRequired[str]
    again: NotRequired[KnownRelay]
    request: str
    """A certificate signing request, PEM; its key is P-256."""
    clock: float
    version: str
    nameHint: NotRequired[str]


class RelayNews(TypedDict):
    """What a relay has to know: never where machines are."""

    version: str
    revoked: list[str]
    bundle: str


class RelayTerms(TypedDict):
    """The relay's name and secret from now on."""

    name: str
    secret: str
    deployment: str
    certificate: str
    news: RelayNews


class RelayReport(TypedDict):
    """How much is open, and bytes that passed since the report before."""

    lines: NotRequired[int]
    streams: NotRequired[int]
    report: NotRequired[dict[str, object] | None]
    """life (of the relay's counts), number (1, 2, … in a life; each is entered once) and amounts: rows of run or null,
    machine that dialled, machine that was dialled, bytes."""


class RelayList(TypedDict):
    """The relays of the deployment, the head's own first."""

    relays: list[RelayFacts]


class RelayedList(TypedDict):
    """Bytes that relays have carried."""

    relayed: list[RelayedBytes]


class RelayService(Protocol):
    """The head's desk for relays; see coordinator/relay_desk.py."""

    async def join(self, request: Mapping[str, Any]) -> RelayTerms: ...
    async def follow(
        self, name: str, secret: str, after: str, *, is_gone: Callable[[], bool]
    ) -> RelayNews: ...
    async def reach(
        self,
        name: str,
        secret: str,
        *,
        addresses: Sequence[tuple[str, int]],
        port: int | None,
        seen_from: int,
    ) -> list[tuple[str, int]]: ...
    async def renew(self, name: str, secret: str, request_pem: str) -> str: ...
    async def report(self, name: str, secret: str, body: Mapping[str, Any]) -> None: ...
    async def left(self, name: str, secret: str) -> None: ...
    async def remove(self, name: str) -> None: ...
    def facts(self) -> list[RelayFacts]: ...
    def relayed(self, run: str | None) -> list[RelayedBytes]: ...
