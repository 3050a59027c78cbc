"""A machine's question to be taken in: by a token, or as the machine that it was before. The key is made here."""

from __future__ import annotations

import asyncio
import logging
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from agents.coming_back import IN_USE_LIMIT_S, ask_until_free
from agents.head_line import JOIN_LIMIT_S, ask_trust, head_api
from agents.join_key import forget_join_key, join_key
from agents.join_mesh_settings import MeshJoinSettings
from agents.machine_identity import KnownIdentity, read_identity, write_identity
from agents.mesh_heard import JoinAnswer
from mesh import __version__
from mesh.errors import AuthenticationError, ConflictError
from mesh.ids import MachineName
from mesh.net.authority import new_key_pem, signing_request
from mesh.net.clock import wall_clock
from mesh.reasons import Reason

ANEW = (Reason.UNAUTHENTICATED, Reason.IDENTITY_COPIED, Reason.IDENTITY_IN_USE)
"""A machine that is refused for one of these joins anew, when it has a token."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Membership:
    """This machine as the head knows it now."""

    name: MachineName
    number: int
    secret: str = field(repr=False)
    key_pem: bytes = field(repr=False)
    certificate_pem: bytes
    bundle_pem: bytes
    cluster: str
    version: str
    kept_bundle_pem: bytes = b""
    """The bundle that is on disk."""


class Asking:
    """Of one machine, whose identity is kept in this folder."""

    def __init__(self, settings: MeshJoinSettings, folder: Path) -> None:
        self._settings = settings
        self._folder = folder

    async def ask(self) -> tuple[JoinAnswer, Membership]:
        """As the machine that it was, when it was one here; else by its token. What the head says, and who it is now.

        Raises AuthenticationError, ConflictError, SpecError when the head refuses; TransportError.
        """
        known = read_identity(self._folder)
        token = self._settings.token
        if known is not None:
            try:
                return await self._ask_again(known, patience_s=IN_USE_LIMIT_S if token is None else 0.0)
            except (AuthenticationError, ConflictError) as error:
                if token is None or error.reason not in ANEW:
                    raise
                _log.info("joining anew, by the token: %s", error)
        if token is None:
            raise AuthenticationError(
                "This machine has not joined before: it needs a token.",
                hint="`mesh token create` on the head makes one; then: mesh join URL --token-file FILE",
            )
        authority = await ask_trust(self._settings.head, token.fingerprint)
        try:
            key = await asyncio.to_thread(join_key, self._folder, token)
            return await self._ask_with({"token": str(token)}, authority, key)
        except AuthenticationError:
            if known is None:
                raise
            _log.info("the token is not good any more; asking once more as %s", known.name)
            return await self._ask_again(known, patience_s=IN_USE_LIMIT_S)

    async def _ask_again(self, known: KnownIdentity, *, patience_s: float) -> tuple[JoinAnswer, Membership]:
        """A machine that was cut off by its death may still be there for its head: it is waited for."""
        again = {"again": {"name": known.name, "secret": known.secret}}
        return await ask_until_free(
            lambda: self._ask_with(again, known.bundle.encode(), new_key_pem()), patience_s=patience_s
        )

    async def _ask_with(
        self, credentials: Mapping[str, Any], authority_pem: bytes, key: bytes
    ) -> tuple[JoinAnswer, Membership]:
        request = {
            **credentials,
            "request": signing_request(key).decode(),
            "clock": wall_clock(),
            "version": __version__,
            "python": platform.python_version(),
            "ray": version("ray"),
            "nameHint": self._settings.name_hint,
        }
        async with head_api(self._settings.head, bundle_pem=authority_pem) as api:
            words = await api.call("POST", "/v1/mesh/join", body=request, limit_s=JOIN_LIMIT_S, repeat_s=0.0)
        answer = JoinAnswer.read(words)
        life = Membership(
            name=answer.name,
            number=answer.number,
            secret=answer.secret,
            key_pem=key,
            certificate_pem=answer.certificate_pem,
            bundle_pem=answer.news.bundle_pem,
            cluster=answer.news.cluster,
            version=answer.news.version,
        )
        await asyncio.to_thread(self.keep, life)
        return answer, life

    def keep(self, life: Membership) -> None:
        """Who this machine is, on disk. Blocking. Raises OSError."""
        known = KnownIdentity(
            head=self._settings.head.url, name=life.name, secret=life.secret, bundle=life.bundle_pem.decode()
        )
        write_identity(self._folder, known)
        life.kept_bundle_pem = known.bundle.encode()
        forget_join_key(self._folder)
