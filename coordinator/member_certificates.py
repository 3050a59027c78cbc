"""Signs members' certificates: for whom the records have, and where they have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from coordinator.core.gang_state import Gang
from mesh.errors import AuthenticationError, ConflictError, FencedError
from mesh.ids import NO_EPOCH, Incarnation, MachineName, RunUid
from mesh.messages import MemberCertificate
from mesh.net.identity import MemberIdentity


class MemberAuthority(Protocol):
    """The deployment's authority, as far as members need it. `coordinator.mesh_authority.MeshAuthority` is one."""

    @property
    def deployment(self) -> str: ...

    def bundle_pem(self) -> bytes: ...

    def sign_member(self, request_pem: bytes, member: MemberIdentity) -> bytes: ...


class MemberCertificates:
    """Of one deployment.

    Args:
        authority: None where the deployment is not on the mesh.
        gang_of: the gang with this uid, as the coordinator has it.
    """

    def __init__(
        self, authority: MemberAuthority | None, *, gang_of: Callable[[RunUid], Gang | None]
    ) -> None:
        self._authority = authority
        self._gang_of = gang_of

    def issue(self, incarnation: Incarnation, machine: MachineName, request_pem: bytes) -> MemberCertificate:
        """A certificate for this life. Of the request the key is taken and nothing else.

        Raises:
            ConflictError: this deployment is not on the mesh.
            FencedError: the records have another life there, or none that goes on.
            AuthenticationError: they have it on another machine, or this is no request.
        """
        if self._authority is None:
            raise ConflictError("This deployment is not on the mesh: it has no authority.")
        gang = self._gang_of(incarnation.run_uid)
        member = None if gang is None else gang.members.get(incarnation.rank)
        is_over = gang is None or gang.state.is_terminal
        if is_over or member is None or member.incarnation != incarnation or member.settlement is not None:
            raise FencedError(
                f"Rank {incarnation.rank} of epoch {incarnation.epoch} is not this life, or it is over.",
                epoch=incarnation.epoch,
                floor=NO_EPOCH if gang is None else gang.epoch,
            )
        if member.machine != machine:
            raise AuthenticationError(
                f"Rank {incarnation.rank} is on {member.machine}, and {machine} asks for its certificate."
            )
        identity = MemberIdentity(
            deployment=self._authority.deployment,
            machine=member.machine,
            run=incarnation.run_uid,
            epoch=incarnation.epoch,
            rank=incarnation.rank,
        )
        return MemberCertificate(
            certificate_pem=self._authority.sign_member(request_pem, identity),
            bundle_pem=self._authority.bundle_pem(),
        )
