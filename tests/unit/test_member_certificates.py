"""For whom the coordinator signs a member's certificate, and for whom it does not."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from coordinator.core.gang_state import Gang, MemberRecord, Settlement
from coordinator.member_certificates import MemberCertificates
from mesh.errors import AuthenticationError, ConflictError, FencedError, MeshError
from mesh.ids import Epoch, Incarnation, IncarnationToken, MachineName, Rank, RunName, RunUid
from mesh.net.authority import (
    Authority,
    new_authority,
    new_key_pem,
    read_certificate,
    signing_request,
)
from mesh.net.identity import MemberIdentity
from mesh.plan import RunPlan
from mesh.states import RunState

ME = Incarnation(run_uid=RunUid("ab" * 8), epoch=Epoch(3), rank=Rank(1), token=IncarnationToken("cd" * 8))
HERE = MachineName("m1")


class OneAuthority:
    """As `MeshAuthority`, without a disk."""

    def __init__(self) -> None:
        self.authority: Authority = new_authority("test", now=time.time())

    @property
    def deployment(self) -> str:
        return "test"

    def bundle_pem(self) -> bytes:
        return self.authority.certificate_pem

    def sign_member(self, request_pem: bytes, member: MemberIdentity) -> bytes:
        return self.authority.sign(request_pem, member, now=time.time())


AUTHORITY = OneAuthority()
REQUEST = signing_request(new_key_pem())
MEMBER = MemberRecord(incarnation=ME, machine=HERE, address="198.19.0.2", ordered_at=0.0)


def gang(member: MemberRecord = MEMBER, *, state: RunState = RunState.ASSEMBLING) -> Gang:
    plan = RunPlan(name=RunName("job"), command=("true",), nodes=2)
    return Gang(
        uid=ME.run_uid,
        plan=plan,
        created_at=0.0,
        epoch=member.incarnation.epoch,
        state=state,
        members={Rank(1): member},
    )


def issue(
    known: Gang | None, incarnation: Incarnation = ME, machine: MachineName = HERE, request: bytes = REQUEST
) -> MemberIdentity:
    certificates = MemberCertificates(AUTHORITY, gang_of=lambda uid: known)
    identity = read_certificate(certificates.issue(incarnation, machine, request).certificate_pem).identity
    assert isinstance(identity, MemberIdentity)
    return identity


def test_who_is_current_gets_its_name_from_the_records() -> None:
    assert issue(gang()) == MemberIdentity(
        deployment="test", machine=HERE, run=ME.run_uid, epoch=Epoch(3), rank=Rank(1)
    )
    assert issue(gang(state=RunState.RUNNING)).epoch == 3  # a renewal


@pytest.mark.parametrize(
    "known",
    [
        None,
        gang(state=RunState.FAILED),
        gang(replace(MEMBER, incarnation=replace(ME, epoch=Epoch(4)))),
        gang(replace(MEMBER, incarnation=replace(ME, token=IncarnationToken("ef" * 8)))),
        gang(replace(MEMBER, settlement=Settlement.REVOKED)),
        gang(replace(MEMBER, settlement=Settlement.LEASE_LAPSED)),
    ],
    ids=["no run", "ended", "next epoch", "another life", "revoked", "lost"],
)
def test_a_ghost_gets_none(known: Gang | None) -> None:
    with pytest.raises(FencedError, match="is not this life, or it is over"):
        issue(known)


def test_another_machine_gets_none_for_it() -> None:
    with pytest.raises(AuthenticationError, match="Rank 1 is on m1, and m2 asks"):
        issue(gang(), machine=MachineName("m2"))


@pytest.mark.parametrize("request_pem", [b"", b"-----BEGIN", b"x" * 5000])
def test_what_is_no_request_is_not_signed(request_pem: bytes) -> None:
    with pytest.raises(MeshError):
        issue(gang(), request=request_pem)


def test_a_deployment_without_a_mesh_signs_nothing() -> None:
    with pytest.raises(ConflictError, match="not on the mesh"):
        MemberCertificates(None, gang_of=lambda uid: gang()).issue(ME, HERE, REQUEST)
