"""What a relay keeps in its folder: who it is, and what it has carried and not told yet. For its owner only.

Rules of this file:
1. Files are written whole or not at all. What could lead to something being said twice is on disk when it returns.
2. An identity that cannot be read is no reason to take part anew: its owner is told.
"""

from __future__ import annotations

import json
import logging
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mesh.errors import DeploymentError, RemoteProtocolError
from mesh.net.relay_outbox import Outbox
from mesh.net.tls import Credentials
from mesh.private_writer import PrivateWriter
from mesh.reasons import Reason

KNOWN_NAME = "relay.json"
OUTBOX_NAME = "relay-outbox.json"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRelay:
    """As what this relay takes part."""

    head: str
    name: str
    secret: str = field(repr=False)
    deployment: str
    bundle: str
    """Whom it trusts, PEM."""
    key: str = field(repr=False)
    certificate: str
    revoked: list[str]
    """Machines that it does not believe any more."""

    @property
    def credentials(self) -> Credentials:
        return Credentials(
            certificate_pem=self.certificate.encode(),
            key_pem=self.key.encode(),
            bundle_pem=self.bundle.encode(),
        )


class RelayFolder:
    """One relay's. What reads blocks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writer = PrivateWriter()

    def read_known(self) -> KnownRelay | None:
        """None when it has never taken part, or has left. Raises DeploymentError when it cannot be read."""
        path = self.path / KNOWN_NAME
        try:
            return KnownRelay(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise DeploymentError(
                f"This relay's identity {path} cannot be read: {error!r}.",
                hint="Remove it, and start the relay with a new token.",
                reason=Reason.UNREADABLE,
                path=str(path),
            ) from error

    async def save_known(self, known: KnownRelay) -> None:
        """Raises OSError."""
        await self._writer.write(self.path / KNOWN_NAME, json.dumps(asdict(known)))

    def read_outbox(self) -> Outbox:
        """A new one where there is none, or it is damaged: what was not told yet is lost then. Raises OSError."""
        path = self.path / OUTBOX_NAME
        try:
            return Outbox.from_json(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            pass
        except (ValueError, RemoteProtocolError) as error:
            _log.error("what was carried and not told yet is lost: %s: %s", path, error)
        return Outbox(life=secrets.token_hex(8))

    async def save_outbox(self, outbox: Outbox) -> None:
        """Raises OSError."""
        await self._writer.write(self.path / OUTBOX_NAME, json.dumps(outbox.to_json()))

    def forget(self) -> None:
        """It is no relay any more. Raises OSError."""
        for name in (KNOWN_NAME, OUTBOX_NAME):
            (self.path / name).unlink(missing_ok=True)
