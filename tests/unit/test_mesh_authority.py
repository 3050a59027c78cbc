"""The deployment's authority on disk: made once, private, seen when it changes, and missed by name."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from cryptography import x509

from coordinator import mesh_authority
from coordinator.mesh_authority import MACHINE_CERTIFICATE_S, MeshAuthority
from mesh.errors import AuthenticationError, DeploymentError
from mesh.ids import Epoch, MachineName, Rank, RunUid
from mesh.net.authority import (
    Rotation,
    fingerprint,
    new_authority,
    new_key_pem,
    read_certificate,
    signing_request,
)
from mesh.net.identity import MachineIdentity, MemberIdentity
from mesh.net.tls import API_NAME, api_context, server_context
from mesh.private_files import write_private
from mesh.reasons import Reason

M = MachineName("machine-1")


def test_it_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    first = MeshAuthority.create(tmp_path, deployment="d")
    again = MeshAuthority.create(tmp_path, deployment="other")
    assert again.deployment == "d"
    assert again.fingerprint() == first.fingerprint() == MeshAuthority.open(tmp_path).fingerprint()
    folder = tmp_path / "authority"
    assert folder.stat().st_mode & 0o077 == 0
    assert (folder / "authority.json").stat().st_mode & 0o077 == 0
    assert (folder / "bundle.pem").read_bytes() == first.bundle_pem()
    assert b"PRIVATE" not in first.bundle_pem()


def test_it_signs_what_it_is_told_and_not_what_is_asked(tmp_path: Path) -> None:
    authority = MeshAuthority.create(tmp_path, deployment="d")
    request = signing_request(new_key_pem())
    shown = read_certificate(authority.sign_machine(request, M))
    assert shown.identity == MachineIdentity(deployment="d", machine=M)
    assert shown.not_after - time.time() <= MACHINE_CERTIFICATE_S
    member = MemberIdentity(deployment="d", machine=M, run=RunUid("r"), epoch=Epoch(1), rank=Rank(0))
    assert read_certificate(authority.sign_member(request, member)).identity == member
    with pytest.raises(AuthenticationError):
        authority.sign_machine(b"nonsense", M)


def test_the_api_s_certificate_is_nobody_s_in_the_mesh(tmp_path: Path) -> None:
    authority = MeshAuthority.create(tmp_path, deployment="d")
    credentials = authority.api_credentials()
    with pytest.raises(AuthenticationError):
        read_certificate(credentials.certificate_pem)
    names = x509.load_pem_x509_certificate(credentials.certificate_pem).extensions
    alternative = names.get_extension_for_class(x509.SubjectAlternativeName).value
    assert alternative.get_values_for_type(x509.DNSName) == [API_NAME]
    api_context(credentials)
    server_context(authority.machine_credentials(M))


def test_a_rotation_by_another_process_is_seen(tmp_path: Path) -> None:
    authority = MeshAuthority.create(tmp_path, deployment="d")
    old = authority.fingerprint()
    path = tmp_path / "authority" / "authority.json"
    rotation, deployment = mesh_authority._from_json(path.read_text())
    now = time.time()
    turned: Rotation = rotation.introduce(new_authority("d", now=now), promote_at=now).promote(now=now)
    write_private(path, mesh_authority._to_json(deployment, turned))
    assert authority.fingerprint() == fingerprint(turned.signing.certificate_pem) != old
    assert authority.bundle_pem() == turned.bundle_pem()
    again, _ = mesh_authority._from_json(path.read_text())
    assert again == turned


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", json.dumps({"deployment": "d", "signing": None})])
def test_one_that_is_damaged_is_said_to_be_so(tmp_path: Path, text: str) -> None:
    MeshAuthority.create(tmp_path, deployment="d")
    (tmp_path / "authority" / "authority.json").write_text(text)
    with pytest.raises(DeploymentError, match=r"authority\.json") as raised:
        MeshAuthority.open(tmp_path)
    assert raised.value.reason is Reason.UNREADABLE
    os.remove(tmp_path / "authority" / "authority.json")
    with pytest.raises(DeploymentError):
        MeshAuthority.open(tmp_path)


def test_one_whose_certificates_or_keys_are_none_is_damaged_too(tmp_path: Path) -> None:
    """What is read is told to every machine, and kept there: nonsense must not leave the head."""
    MeshAuthority.create(tmp_path, deployment="d")
    path = tmp_path / "authority" / "authority.json"
    whole = json.loads(path.read_text())
    other = new_authority("d", now=time.time())
    signing, foreign_key = whole["signing"], other.key_pem.decode()
    for changes in (
        {"signing": {**signing, "certificate": "nonsense"}},
        {"signing": {**signing, "certificate": signing["certificate"][:200]}},
        {"signing": {**signing, "key": "nonsense"}},
        {"signing": {**signing, "key": foreign_key}},
        {"next": {**signing, "key": foreign_key}},
        {"old": {**signing, "certificate": ""}},
        {"promote_at": float("nan")},
        {"promoted_at": float("inf")},
        {"promoted_at": 10**400},
    ):
        path.write_text(json.dumps(whole | changes))
        with pytest.raises(DeploymentError, match=r"authority\.json"):
            MeshAuthority.open(tmp_path)
