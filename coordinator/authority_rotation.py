"""The rotation of the deployment's authority: begun by its owner, then carried through without a break.

Theory of operation. The next authority is introduced: the news bears its certificate. It signs when the overlap is over
and every machine and relay that is there has asked for news again after those: an agent asks again when what it heard
is in use. Then all get new certificates, and what the old one signed runs out by itself; after that it is forgotten.

Rules of this file:
1. Where a rotation stands is in the authority's file. Who has heard is not: a head that began again tells everybody
   everything, and so waits for everybody anew.
2. Whatever is to be trusted is told before a step is made, whoever changed it: another process, or a step that failed
   when half of it was on the disk.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from coordinator.deployment import state_errors
from coordinator.mesh_authority import MeshAuthority
from coordinator.mesh_news import MeshNewsroom
from mesh.errors import SpecError
from mesh.ids import MachineName
from mesh.net.authority import OVERLAP_MAX_S, OVERLAP_MIN_S, OVERLAP_S, Authority, fingerprint
from mesh.resources import AuthorityFacts, RotationFacts

_log = logging.getLogger(__name__)


class AuthorityRotation:
    """One head's.

    Args:
        present: every machine and relay that has to know whom to trust before the next authority signs.
    """

    def __init__(
        self,
        *,
        authority: MeshAuthority,
        newsroom: MeshNewsroom,
        present: Callable[[], Iterable[MachineName]],
        state_path: Path,
    ) -> None:
        self._authority = authority
        self._newsroom = newsroom
        self._present = present
        self._state_path = state_path
        self._since = 0
        """The number of the news that had the next authority first."""
        self._told = authority.bundle_pem()
        """Whom to trust, as the news have it."""
        self._turning = asyncio.Lock()
        self.changes = 0
        """How often everybody had to be told whom to trust."""

    async def begin(self, overlap_s: float | None) -> RotationFacts:
        """Introduces the next authority. Raises SpecError, ConflictError, DeploymentError, StorageError."""
        overlap_s = OVERLAP_S if overlap_s is None else overlap_s
        if not OVERLAP_MIN_S <= overlap_s <= OVERLAP_MAX_S:
            raise SpecError(
                f"The overlap is between {OVERLAP_MIN_S / 3600:g} h, in which every running member hears of the "
                f"next authority, and {OVERLAP_MAX_S / 86400:g} days.",
                field="overlapSeconds",
                got=f"{overlap_s:g}",
            )
        async with self._turning:
            try:
                with state_errors(self._state_path):
                    await asyncio.to_thread(self._authority.introduce, overlap_s=overlap_s)
            finally:
                self._tell()
        return self.facts()

    async def advance(self) -> None:
        """Makes the step that is due, if one is. Raises DeploymentError, StorageError."""
        async with self._turning:
            self._tell()
            try:
                with state_errors(self._state_path):
                    await asyncio.to_thread(self._authority.publish)
                    await asyncio.to_thread(self._authority.advance, have_all_heard=not self._waits_for())
            finally:
                self._tell()

    def facts(self) -> RotationFacts:
        """Raises DeploymentError."""
        rotation = self._authority.rotation()
        return {
            "signing": _facts(rotation.signing),
            "next": None if rotation.next is None else _facts(rotation.next),
            "old": None if rotation.old is None else _facts(rotation.old),
            "signsAt": rotation.promote_at or None,
            "forgottenAt": rotation.retire_at or None,
            "waitsFor": [] if rotation.next is None else sorted(self._waits_for()),
        }

    def _waits_for(self) -> set[MachineName]:
        return self._newsroom.lacking(self._present(), self._since)

    def _tell(self) -> None:
        """Tells everybody whom to trust, when that has changed. Raises DeploymentError."""
        trusted = self._authority.bundle_pem()
        if trusted == self._told:
            return
        _log.info("whom to trust has changed; %s signs", self._authority.fingerprint())
        self._told = trusted
        self.changes += 1
        self._newsroom.tell()
        self._since = self._newsroom.number()


def _facts(authority: Authority) -> AuthorityFacts:
    return {"fingerprint": fingerprint(authority.certificate_pem), "endsAt": authority.ends_at()}
