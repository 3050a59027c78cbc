"""What the API's routes for machines of the mesh need of the head, and the shapes that they show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NotRequired, Protocol

from typing_extensions import TypedDict

from coordinator.api.relay_service import RelayService
from mesh.resources import JoinTokenFacts, RotationFacts


class TrustFacts(TypedDict):
    """The deployment's authority. Whoever joins compares its fingerprint with that in the token."""

    bundle: str
    """Certificates, PEM."""
    clock: float
    """What time it is at the head, in seconds since 1970."""


class JoinTokenList(TypedDict):
    """Those that were made, the used ones too."""

    tokens: list[JoinTokenFacts]


class TokenRequest(TypedDict):
    """How long a token is good."""

    ttlSeconds: NotRequired[float]
    """900 when left out, a day at most."""
    relay: NotRequired[bool]
    """It starts a relay; otherwise a machine joins with it."""


class RotationRequest(TypedDict):
    """How long the next authority is trusted before it signs."""

    overlapSeconds: NotRequired[float]
    """604800 (7 days) when left out; 43200 (12 hours) at least, 2592000 (30 days) at most."""


class KnownMachine(TypedDict):
    """A machine that comes back."""

    name: str
    secret: str


class MeshJoinRequest(TypedDict):
    """A machine that asks to join, by a token or as one that has been here."""

    token: NotRequired[str]
    again: NotRequired[KnownMachine]
    request: str
    """A certificate signing request, PEM; its key is P-256."""
    clock: float
    version: str
    python: str
    ray: str
    nameHint: NotRequired[str]


class MeshCluster(TypedDict):
    """The deployment's Ray cluster."""

    address: str
    id: str
    session: str


class PlaceFacts(TypedDict):
    """Where a machine is."""

    gateway: list[list[str | int]]
    """Addresses and ports of its gateway, best first; of the head none: it is where one has reached it."""
    overlay: list[str]


class MeshNews(TypedDict):
    """Everything that a machine has to know of the others."""

    version: str
    machines: dict[str, PlaceFacts]
    relays: dict[str, list[list[str | int]]]
    """Beside the head's own: addresses and ports of each."""
    revoked: list[str]
    bundle: str
    cluster: str
    """Which Ray cluster it is now; with another one a machine has to join again."""


class JoinedTerms(TypedDict):
    """The machine's name and secret from now on, and what it needs to become part of the cluster."""

    name: str
    number: int
    secret: str
    nodeId: str
    deployment: str
    certificate: str
    cluster: MeshCluster
    clusterToken: str
    news: MeshNews


class ReachRequest(TypedDict):
    """Where a machine takes itself to be."""

    addresses: list[list[str | int]]
    port: int | None


class Reached(TypedDict):
    """Where the head has reached it."""

    addresses: list[list[str | int]]


class RenewRequest(TypedDict):
    """A certificate signing request, PEM."""

    request: str


class Renewed(TypedDict):
    """The newer certificate, PEM."""

    certificate: str


class RotationService(Protocol):
    """See coordinator/authority_rotation.py."""

    def facts(self) -> RotationFacts: ...
    async def begin(self, overlap_s: float | None) -> RotationFacts: ...


class MeshService(Protocol):
    """The head's desk for machines; see coordinator/mesh_desk.py."""

    @property
    def relays(self) -> RelayService: ...
    @property
    def rotation(self) -> RotationService: ...
    def trust(self) -> dict[str, Any]: ...
    async def create_token(
        self, ttl_s: float | None, *, for_relay: bool = False
    ) -> tuple[str, JoinTokenFacts]: ...
    def list_tokens(self) -> list[JoinTokenFacts]: ...
    async def revoke_token(self, token_id: str) -> JoinTokenFacts: ...
    async def join(self, request: Mapping[str, Any]) -> JoinedTerms: ...
    async def follow(
        self, name: str, secret: str, after: str, *, is_gone: Callable[[], bool]
    ) -> MeshNews: ...
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
    async def check(self, name: str, secret: str) -> str: ...
    async def left(self, name: str, secret: str) -> None: ...
