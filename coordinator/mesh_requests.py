"""What is read the same way in every request of who joins."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mesh.errors import SpecError
from mesh.ids import MachineName
from mesh.net import tokens
from mesh.net.authority import key_fingerprint
from mesh.net.clock import check_against_head, wall_clock
from mesh.net.tokens import JoinToken, TokenBook, TokenRecord


def check_clock(request: Mapping[str, Any]) -> None:
    """Raises AuthenticationError (ClockSkew), SpecError."""
    clock = finite(request.get("clock"))
    if clock is None:
        raise SpecError(
            "A machine says what time it is there.", field="clock", got=repr(request.get("clock"))[:80]
        )
    check_against_head(ours=clock, theirs=wall_clock())


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownToken:
    """A token that may be used now, with the key of the request that shows it."""

    record: TokenRecord
    key: str

    @property
    def name_before(self) -> MachineName | None:
        """What was given for it before to who asks again."""
        return MachineName(self.record.used_for) if self.record.used_for else None


def shown_token(request: Mapping[str, Any], book: TokenBook, *, for_relay: bool) -> ShownToken:
    """Changes nothing. Raises SpecError, AuthenticationError."""
    record = book.find(JoinToken.parse(text_of(request, "token")))
    key = key_fingerprint(text_of(request, "request").encode())
    tokens.check(record, key=key, now=wall_clock(), for_relay=for_relay)
    return ShownToken(record=record, key=key)


def new_secret() -> str:
    """192 random bits, as hex: of a token, a machine or a relay."""
    return secrets.token_hex(24)


def text_of(request: Mapping[str, Any], key: str) -> str:
    """Raises SpecError."""
    value = request.get(key)
    if not isinstance(value, str) or not value:
        raise SpecError(f"The request has no {key}.", field=key)
    if not _is_utf8(value):  # JSON has escapes for what is no text
        raise SpecError(f"{key} is no text.", field=key)
    return value


def finite(value: Any) -> float | None:
    """A number of a request. None for what is none, is not finite or is too large: JSON of Python's has them all."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
