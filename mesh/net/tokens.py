"""Join tokens: what an operator hands to a machine so that it may join, once and soon.

Rules of this file:
1. A token is a secret and the fingerprint of the authority: who joins knows whom it talks to before it says the secret.
2. Only the hash of the secret is kept. A token is used up by the first who is taken in with it, and bound to the key
   of their certificate request: while it is valid the same key may ask again, since an answer can be lost. Whether
   that still leads to anything the books of machines and relays say. What is refused uses no token up.
   It is good for a machine or for a relay, never for both.
3. Pure: the time (seconds since 1970) and the secret are arguments. The book is bounded.

    gm1.<id>.<secret>.<fingerprint>
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from mesh.errors import AuthenticationError, ConflictError, NotFoundError, SpecError

TTL_S = 15 * 60.0
TTL_MAX_S = 24 * 3600.0
TOKENS_MAX = 10_000
_TOKEN = re.compile(r"gm1\.(?P<id>[0-9a-f]{12})\.(?P<secret>[0-9a-f]{48})\.(?P<fingerprint>[0-9a-f]{64})")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinToken:
    """A token as its holder knows it."""

    id: str
    """Twelve hex digits: what lists and logs show."""
    secret: str
    """48 hex digits (192 bits)."""
    fingerprint: str
    """SHA-256 of the authority's certificate."""

    def __str__(self) -> str:
        return f"gm1.{self.id}.{self.secret}.{self.fingerprint}"

    def __repr__(self) -> str:
        return f"<JoinToken {self.id}>"

    @classmethod
    def parse(cls, text: str) -> JoinToken:
        """The inverse of `str()`. Raises SpecError; its message never has the text in it."""
        match = _TOKEN.fullmatch(text.strip())
        if match is None:
            raise SpecError(
                "This is no join token: it has to look like gm1.….….…, whole and on one line.",
                hint="`mesh token create` on the head makes one.",
            )
        return cls(id=match["id"], secret=match["secret"], fingerprint=match["fingerprint"])


class TokenState(StrEnum):
    """What has become of a token."""

    OPEN = "Open"
    USED = "Used"
    EXPIRED = "Expired"
    REVOKED = "Revoked"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """What the head keeps of a token."""

    id: str
    secret_hash: str
    expires_at: float
    used_at: float | None = None
    used_by: str = ""
    """Fingerprint of the key that is bound to it."""
    used_for: str = ""
    """The name that was given for it last."""
    revoked_at: float | None = None
    for_relay: bool = False
    """A relay starts with it; otherwise a machine joins."""

    def state(self, *, now: float) -> TokenState:
        if self.revoked_at is not None:
            return TokenState.REVOKED
        if self.used_at is not None:
            return TokenState.USED
        return TokenState.OPEN if now < self.expires_at else TokenState.EXPIRED


@dataclass(slots=True)
class TokenBook:
    """The tokens of a deployment."""

    records: dict[str, TokenRecord] = field(default_factory=dict)
    """By id. Also used and expired ones, so that they are refused by name, until room is needed."""

    def add(
        self, token: JoinToken, *, now: float, ttl_s: float = TTL_S, for_relay: bool = False
    ) -> TokenRecord:
        """Enters a new token. Raises SpecError for a ttl out of range, ConflictError when the book is full."""
        if not 0 < ttl_s <= TTL_MAX_S:
            raise SpecError(f"A token is valid for at most {TTL_MAX_S / 3600:.0f} h.", field="ttl", got=ttl_s)
        if len(self.records) >= TOKENS_MAX:
            self._forget(now)
        if len(self.records) >= TOKENS_MAX or token.id in self.records:
            raise ConflictError("There are too many open join tokens; wait until some have expired.")
        record = TokenRecord(
            id=token.id,
            secret_hash=hash_secret(token.secret),
            expires_at=now + ttl_s,
            for_relay=for_relay,
        )
        self.records[token.id] = record
        return record

    def find(self, token: JoinToken) -> TokenRecord:
        """What is known of a token, for who has its secret. Raises AuthenticationError."""
        record = self.records.get(token.id)
        # Compared also when there is none, so that the time it takes tells nothing about which ids exist.
        known = record.secret_hash if record is not None else hash_secret("")
        if not hmac.compare_digest(known, hash_secret(token.secret)) or record is None:
            raise AuthenticationError("This join token is not known here.", hint=_NEW_TOKEN)
        return record

    def redeem(self, record: TokenRecord, *, key: str, name: str, now: float) -> None:
        """Uses a token up that was checked just now, for who gets this name."""
        used_at = now if record.used_at is None else record.used_at
        self.records[record.id] = replace(record, used_at=used_at, used_by=key, used_for=name)

    def revoke(self, token_id: str, *, now: float) -> TokenRecord:
        """Nobody joins with it any more. Raises NotFoundError; ConflictError when somebody has."""
        record = self.records.get(token_id)
        if record is None:
            raise NotFoundError(
                f"There is no join token {token_id[:40]!r}.", hint="See them: mesh token list"
            )
        if record.used_at is not None:
            raise ConflictError(
                f"The join token {token_id} has been used already.",
                hint="What joined with it is among `mesh get machines`.",
            )
        if record.revoked_at is None:
            record = self.records[token_id] = replace(record, revoked_at=now)
        return record

    def open_tokens(self, *, now: float) -> Mapping[str, TokenRecord]:
        """Those that can still be used."""
        return {i: r for i, r in self.records.items() if r.state(now=now) is TokenState.OPEN}

    def _forget(self, now: float) -> None:
        self.records = dict(self.open_tokens(now=now))


def check(record: TokenRecord, *, key: str, now: float, for_relay: bool = False) -> None:
    """Whether a token may be used now, with this key. Raises AuthenticationError: what is wrong with it."""
    if record.revoked_at is not None:
        raise AuthenticationError(f"The join token {record.id} has been revoked.", hint=_NEW_TOKEN)
    if record.used_at is not None and record.used_by != key:
        raise used_already(record)
    if now >= record.expires_at:
        raise AuthenticationError(f"The join token {record.id} has expired.", hint=_NEW_TOKEN)
    if record.for_relay != for_relay:
        kinds = ("a relay", "a machine") if record.for_relay else ("a machine", "a relay")
        raise AuthenticationError(
            f"The join token {record.id} is for {kinds[0]}, not for {kinds[1]}.", hint=_KINDS
        )


def used_already(record: TokenRecord) -> AuthenticationError:
    return AuthenticationError(f"The join token {record.id} has been used already.", hint=_NEW_TOKEN)


_KINDS = "`mesh token create` makes one to join with as a machine; with --relay it makes one to start a relay with."
_NEW_TOKEN = "`mesh token create` on the head makes another one."


def hash_secret(secret: str) -> str:
    """Of 192 random bits: no salt, no stretching needed. What a stranger shows need not be text."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
