"""The deployment's certificate authority as it lies in the state folder. The head has it, and the coordinator.

Rules of this file:
1. One file, `authority/authority.json`, written whole or not at all, for its owner only: keys are in it.
2. Whoever has it open sees a rotation that another process made: the file is read again when it is another one.
3. What is signed is said by the caller's records: a machine's name, a member's run, epoch, rank and machine.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from mesh.errors import AuthenticationError, DeploymentError
from mesh.ids import MachineName
from mesh.net.authority import (
    Authority,
    Rotation,
    fingerprint,
    new_authority,
    new_key_pem,
    signing_request,
)
from mesh.net.clock import wall_clock
from mesh.net.identity import MachineIdentity, MemberIdentity, RelayIdentity
from mesh.net.tls import API_NAME, Credentials
from mesh.private_files import write_private
from mesh.reasons import Reason

MACHINE_CERTIFICATE_S = 2 * 86400.0
"""A machine asks for the next one every twelve hours. Whoever is gone is remembered as long: so the list of those,
which every machine hears, stays short."""
FOLDER_NAME = "authority"
FILE_NAME = "authority.json"
BUNDLE_NAME = "bundle.pem"
"""No secret: for `$GANGMESH_AUTHORITY` of clients elsewhere."""


class MeshAuthority:
    """Open it with `open`; `create` makes it the first time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: tuple[tuple[int, int], Rotation, str] | None = None

    @classmethod
    def create(cls, state_path: Path, *, deployment: str) -> MeshAuthority:
        """Opens it, made first when there is none. Raises DeploymentError, OSError."""
        path = state_path / FOLDER_NAME / FILE_NAME
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            rotation = Rotation(signing=new_authority(deployment, now=wall_clock()))
            write_private(path, _to_json(deployment, rotation))
        made = cls.open(state_path)
        made.publish()
        return made

    @classmethod
    def open(cls, state_path: Path) -> MeshAuthority:
        """Raises DeploymentError when there is none, or it is damaged."""
        made = cls(state_path / FOLDER_NAME / FILE_NAME)
        made._current()
        return made

    @property
    def deployment(self) -> str:
        """The deployment's name in every certificate."""
        return self._current()[1]

    def bundle_pem(self) -> bytes:
        """What everybody trusts now."""
        return self._current()[0].bundle_pem()

    def fingerprint(self) -> str:
        """What a join token carries."""
        return fingerprint(self._current()[0].signing.certificate_pem)

    def sign_machine(self, request_pem: bytes, machine: MachineName) -> bytes:
        """A machine's certificate (PEM). Raises AuthenticationError for what is no request."""
        rotation, deployment = self._current()
        identity = MachineIdentity(deployment=deployment, machine=machine)
        return rotation.signing.sign(request_pem, identity, now=wall_clock(), ttl_s=MACHINE_CERTIFICATE_S)

    def sign_relay(self, request_pem: bytes, relay: MachineName) -> bytes:
        """A relay's certificate (PEM). Raises AuthenticationError for what is no request or no name."""
        rotation, deployment = self._current()
        identity = RelayIdentity(deployment=deployment, machine=relay)
        try:
            return rotation.signing.sign(request_pem, identity, now=wall_clock())
        except ValueError as error:
            raise AuthenticationError(f"This is no name of a relay: {error}.") from error

    def sign_member(self, request_pem: bytes, member: MemberIdentity) -> bytes:
        """A member's certificate (PEM). Raises AuthenticationError, ValueError for another deployment's member."""
        return self._current()[0].signing.sign(request_pem, member, now=wall_clock())

    def rotation(self) -> Rotation:
        """Who signs, who will and who did."""
        return self._current()[0]

    def introduce(self, *, overlap_s: float) -> None:
        """Makes the next authority, for everybody to trust. Raises ConflictError, DeploymentError, OSError."""
        rotation, deployment = self._current()
        now = wall_clock()
        authority = new_authority(deployment, now=now)
        self._turn(rotation.introduce(authority, promote_at=now + overlap_s), deployment)

    def advance(self, *, have_all_heard: bool) -> None:
        """Makes the step that is due, if one is. Raises DeploymentError, OSError."""
        rotation, deployment = self._current()
        turned = rotation.advanced(now=wall_clock(), have_all_heard=have_all_heard)
        if turned is not rotation:
            self._turn(turned, deployment)

    def publish(self) -> None:
        """Writes the bundle for clients elsewhere, unless it is there. Raises DeploymentError, OSError."""
        path, text = self._path.with_name(BUNDLE_NAME), self.bundle_pem().decode()
        try:
            is_there = path.read_text(encoding="ascii") == text
        except (FileNotFoundError, ValueError):
            is_there = False
        if not is_there:
            write_private(path, text)

    def machine_credentials(self, machine: MachineName) -> Credentials:
        """For a machine whose key is made here: the head's own gateway."""
        key = new_key_pem()
        certificate = self.sign_machine(signing_request(key), machine)
        return Credentials(certificate_pem=certificate, key_pem=key, bundle_pem=self.bundle_pem())

    def api_credentials(self) -> Credentials:
        """For the API by its name."""
        key = new_key_pem()
        signing = self._current()[0].signing
        certificate = signing.sign_api(signing_request(key), API_NAME, now=wall_clock())
        return Credentials(certificate_pem=certificate, key_pem=key, bundle_pem=self.bundle_pem())

    def _turn(self, rotation: Rotation, deployment: str) -> None:
        write_private(self._path, _to_json(deployment, rotation))
        self.publish()

    def _current(self) -> tuple[Rotation, str]:
        try:
            facts = self._path.stat()
            which = (facts.st_ino, facts.st_mtime_ns)
            if self._read is None or self._read[0] != which:
                self._read = (which, *_from_json(self._path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise DeploymentError(
                f"The deployment's authority {self._path} cannot be read: {error!r}.",
                hint="Put its copy back. Without it every machine has to join anew: remove the folder, and `mesh up`.",
                reason=Reason.UNREADABLE,
                path=str(self._path),
            ) from error
        return self._read[1], self._read[2]


def _to_json(deployment: str, rotation: Rotation) -> str:
    def out(authority: Authority | None) -> dict[str, str] | None:
        if authority is None:
            return None
        return {"key": authority.key_pem.decode(), "certificate": authority.certificate_pem.decode()}

    return json.dumps(
        {
            "deployment": deployment,
            "signing": out(rotation.signing),
            "next": out(rotation.next),
            "old": out(rotation.old),
            "promote_at": rotation.promote_at,
            "promoted_at": rotation.promoted_at,
        }
    )


def _from_json(text: str) -> tuple[Rotation, str]:
    data = json.loads(text)
    deployment = str(data["deployment"])

    def read(words: Any) -> Authority | None:
        if words is None:
            return None
        authority = Authority(
            deployment=deployment,
            key_pem=words["key"].encode(),
            certificate_pem=words["certificate"].encode(),
        )
        authority.check()  # every machine is told of it, and keeps it
        return authority

    def moment(name: str) -> float:
        value = float(data[name])
        if not math.isfinite(value):
            raise ValueError(f"{name} is no moment")
        return value

    signing = read(data["signing"])
    if signing is None:
        raise ValueError("no authority signs")
    rotation = Rotation(
        signing=signing,
        next=read(data["next"]),
        old=read(data["old"]),
        # an authority of before it could be rotated has none
        promote_at=moment("promote_at") if "promote_at" in data else 0.0,
        promoted_at=moment("promoted_at"),
    )
    return rotation, deployment
