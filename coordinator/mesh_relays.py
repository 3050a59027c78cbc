"""The relays of a deployment as its head knows them: who they are, and where. Pure; relay_desk.py is the shell.

Theory of operation. A relay joins with a token that was made for relays, and gets a name, a certificate and a secret.
When it is started again it keeps its name and gets the next secret; so a second user of the one before gives itself
away: a copied disk. Where the head has dialled it successfully, machines are told to find it.

Rules of this file:
1. A name is given once. Who has left is not believed any more, for as long as its certificate could be valid. While the
   book is full of such names no relay joins.
2. An answer can be lost: the secret before is good again as long as nobody has used the one that came after it.
3. Only hashes of secrets are kept. The time (seconds since 1970) and the secrets are arguments. The book is bounded.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from coordinator.mesh_machines import gone_too_many
from mesh.errors import AuthenticationError, ConflictError, NotFoundError
from mesh.ids import MachineName
from mesh.net.authority import MACHINE_TTL_S
from mesh.net.clock import SKEW_MAX_S
from mesh.net.tokens import hash_secret
from mesh.reasons import Reason

RELAYS_MAX = 16
"""At a time: each machine keeps a line to every one."""
GONE_MAX = 1000
DEFAULT_HINT = "relay"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshRelay:
    """One relay, from its joining on."""

    name: MachineName
    secret_hash: str
    earlier_hash: str = ""
    """Of the secret before; empty when there was none."""
    was_heard: bool = False
    """Its present secret has been used: it knows it."""
    joined_at: float
    addresses: tuple[tuple[str, int], ...] = ()
    """Where the head has dialled it, best first."""
    gone_at: float | None = None


@dataclass(slots=True)
class MeshRelays:
    """The book."""

    relays: dict[MachineName, MeshRelay] = field(default_factory=dict)
    """By name, also those that have left."""

    def enter(self, name: MachineName, secret: str, *, now: float) -> MeshRelay:
        """A new relay, of a name that nobody has had.

        Raises ConflictError when there are too many; TransportError (LimitExceeded) while too many have left of late.
        """
        self._forget(now)
        gone = len(self.revoked())
        if gone >= GONE_MAX:
            raise gone_too_many(f"{gone} relays that have left", days=MACHINE_TTL_S / 86400)
        present = self.present()
        if len(present) >= RELAYS_MAX:
            raise ConflictError(
                f"The deployment has {len(present)} relays, and takes no more.",
                hint="See them: mesh get relays. `mesh leave` on one of them, or `mesh drain NAME`, makes room.",
            )
        if name in self.relays:
            raise ConflictError(f"The name {name} has been given.")
        relay = self.relays[name] = MeshRelay(name=name, secret_hash=hash_secret(secret), joined_at=now)
        return relay

    def may_begin_anew(self, name: MachineName) -> bool:
        """Whether the relay that got this name by a token may take part by it again: it has not been heard of."""
        relay = self.relays.get(name)
        return relay is None or (not relay.was_heard and not relay.earlier_hash and relay.gone_at is None)

    def begin_anew(self, name: MachineName, secret: str) -> None:
        """It has not heard its secret, and gets another one."""
        self.relays[name] = replace(self.relays[name], secret_hash=hash_secret(secret))

    def may_come_back(self, name: MachineName, secret: str, *, is_followed: bool) -> MeshRelay:
        """Whether who has this secret may start again as this relay. Changes nothing.

        Args:
            is_followed: somebody who shows the relay's secret waits for news right now.

        Raises:
            AuthenticationError: not with this secret; (IdentityCopied) somebody else has come back with it.
            ConflictError: (IdentityInUse) the relay is there.
        """
        relay = self._known(name, secret)
        if is_followed:
            raise ConflictError(
                f"{name} is there now, with this identity.",
                hint="Is this disk a copy of its disk? Then name another folder, --state DIR, and start it with "
                "a token of its own.",
                reason=Reason.IDENTITY_IN_USE,
            )
        return relay

    def come_back(self, name: MachineName, secret: str, next_secret: str, *, is_followed: bool) -> MeshRelay:
        """It was started again. Raises as `may_come_back`."""
        relay = self.relays[name] = replace(
            self.may_come_back(name, secret, is_followed=is_followed),
            secret_hash=hash_secret(next_secret),
            earlier_hash=hash_secret(secret),
            was_heard=False,
        )
        return relay

    def check(self, name: MachineName, secret: str) -> MeshRelay:
        """The relay that shows this secret. Raises AuthenticationError."""
        relay = self._known(name, secret)
        if not hmac.compare_digest(relay.secret_hash, hash_secret(secret)):
            raise AuthenticationError(f"{name} has been given another secret.", hint=_WITH_TOKEN)
        if not relay.was_heard:
            relay = self.relays[name] = replace(relay, was_heard=True)
        return relay

    def place(self, name: MachineName, addresses: tuple[tuple[str, int], ...]) -> None:
        """Where it can be dialled."""
        relay = self.relays.get(name)
        if relay is not None and relay.gone_at is None:
            self.relays[name] = replace(relay, addresses=addresses)

    def leave(self, name: MachineName, *, now: float) -> None:
        """Nobody believes its certificate any more. Raises NotFoundError."""
        relay = self.relays.get(name)
        if relay is None or relay.gone_at is not None:
            raise NotFoundError(f"There is no relay {name[:60]!r}.", hint="See them: mesh get relays")
        self.relays[name] = replace(relay, gone_at=now, addresses=())

    def present(self) -> dict[MachineName, MeshRelay]:
        """Those that have not left."""
        return {name: relay for name, relay in self.relays.items() if relay.gone_at is None}

    def revoked(self) -> list[MachineName]:
        """Those that have, and whose certificates could be valid."""
        return sorted(name for name, relay in self.relays.items() if relay.gone_at is not None)

    def copy(self) -> MeshRelays:
        """As it is now; what is in it is frozen."""
        return replace(self, relays=dict(self.relays))

    def to_json(self) -> list[dict[str, Any]]:
        return [asdict(relay) for relay in self.relays.values()]

    @classmethod
    def from_json(cls, data: list[Mapping[str, Any]]) -> MeshRelays:
        """Raises KeyError, TypeError, ValueError for what `to_json` has not made."""
        book = cls()
        for words in data:
            places = tuple((str(host), int(port)) for host, port in words["addresses"])
            relay = MeshRelay(**{**words, "addresses": places})
            book.relays[relay.name] = relay
        return book

    def _known(self, name: MachineName, secret: str) -> MeshRelay:
        """Who has this secret or had it before, as long as that is good. Raises AuthenticationError."""
        relay = self.relays.get(name)
        hashed = hash_secret(secret)
        present, earlier = (relay.secret_hash, relay.earlier_hash) if relay else (hash_secret(""), "")
        is_present, was_before = hmac.compare_digest(present, hashed), hmac.compare_digest(earlier, hashed)
        if relay is None or not (is_present or was_before):
            raise AuthenticationError(
                f"This deployment does not know the relay {name[:60]!r} by this secret.", hint=_WITH_TOKEN
            )
        if relay.gone_at is not None:
            raise AuthenticationError(f"{name} has left the deployment.", hint=_WITH_TOKEN)
        if was_before and relay.was_heard:
            raise AuthenticationError(
                f"Somebody else has come back with the identity of {name}.",
                hint="Is this disk a copy of another relay's? Then name another folder, --state DIR, and start it with "
                "a token of its own.",
                reason=Reason.IDENTITY_COPIED,
            )
        return relay

    def _forget(self, now: float) -> None:
        """Those whose certificates cannot be valid any more."""
        old = now - MACHINE_TTL_S - 2 * SKEW_MAX_S
        for name in [n for n, r in self.relays.items() if r.gone_at is not None and r.gone_at < old]:
            del self.relays[name]


_WITH_TOKEN = "`mesh token create --relay` on the head makes a token for a relay."
