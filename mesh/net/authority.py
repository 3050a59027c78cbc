"""The deployment's certificate authority, and the keys and requests that it is asked with.

Rules of this file:
1. A private key never leaves where it was made: machines send certificate signing requests, the authority's key stays
   on the head.
2. The authority writes the name from its own records; of a request it takes the public key and nothing else.
3. A leaf never lives longer than its authority. So whoever checks the leaf's times has checked both.
4. Rotation has no break: everybody trusts the next authority before it signs (`introduce`, `promote`), and the old one
   until nothing that it signed can be valid any more (`retire`).
5. Time is an argument: seconds since 1970.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from mesh.errors import AuthenticationError, ConflictError
from mesh.net.clock import SKEW_MAX_S
from mesh.net.identity import (
    Identity,
    MemberIdentity,
    PeerCertificate,
    RelayIdentity,
    checked,
    parse_identity,
)

AUTHORITY_TTL_S = 3650 * 86400.0
MACHINE_TTL_S = 30 * 86400.0
MEMBER_TTL_S = 12 * 3600.0
"""Long enough for a night without the head; a running stream is not asked again, an epoch's end cuts it."""
OVERLAP_S = 7 * 86400.0
"""From introducing the next authority until it signs, when nothing else is said: a machine that was away meanwhile, and
a client elsewhere whose copy of the bundle is older, trust only the one before."""
OVERLAP_MIN_S = MEMBER_TTL_S
"""Members hear of authorities when their certificate is renewed."""
OVERLAP_MAX_S = 30 * 86400.0
REQUEST_BYTES_MAX = 4096
_PEM, _PKCS8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
_OPEN = serialization.NoEncryption()


# ---- on the machine -----------------------------------------------------------------------------------


def new_key_pem() -> bytes:
    """A fresh private key (P-256), PKCS 8, not encrypted: keep it in memory or in a file of mode 0600."""
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(_PEM, _PKCS8, _OPEN)


def signing_request(key_pem: bytes) -> bytes:
    """A request (PEM) that proves to hold the key and says nothing else."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(_private_key(key_pem), hashes.SHA256()).public_bytes(_PEM)


def read_certificate(pem: bytes) -> PeerCertificate:
    """What a certificate of ours says; the signature is not checked. Raises AuthenticationError."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        (uri,) = names.get_values_for_type(x509.UniformResourceIdentifier)
        return PeerCertificate(
            identity=parse_identity(uri),
            not_before=certificate.not_valid_before_utc.timestamp(),
            not_after=certificate.not_valid_after_utc.timestamp(),
        )
    except (ValueError, x509.ExtensionNotFound) as error:
        raise AuthenticationError(f"This is no certificate of a machine or member: {error}.") from error


def key_fingerprint(request_pem: bytes) -> str:
    """SHA-256 of the key that a request proves to hold, as hex. Raises AuthenticationError."""
    key = _requested_key(request_pem)
    spki = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(spki).hexdigest()


def fingerprint(authority_pem: bytes) -> str:
    """SHA-256 of an authority's certificate as hex: what a join token carries. Raises AuthenticationError."""
    try:
        certificate = x509.load_pem_x509_certificate(authority_pem)
    except ValueError as error:
        raise AuthenticationError(f"This is no certificate: {error}.") from error
    return hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).hexdigest()


# ---- on the head --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """One key that signs."""

    deployment: str
    key_pem: bytes = field(repr=False)
    certificate_pem: bytes

    def sign(
        self, request_pem: bytes, identity: Identity, *, now: float, ttl_s: float | None = None
    ) -> bytes:
        """A certificate (PEM) in this name for the request's key. Raises AuthenticationError, ValueError.

        Valid from SKEW_MAX_S before `now`, so that a clock that is a little behind takes it.
        """
        if identity.deployment != self.deployment:
            raise ValueError(f"this authority is of {self.deployment}, the name of {identity.deployment}")
        is_machine = not isinstance(identity, MemberIdentity)
        issuer = self._certificate()
        ends = now + (ttl_s if ttl_s is not None else MACHINE_TTL_S if is_machine else MEMBER_TTL_S)
        ends = min(ends, issuer.not_valid_after_utc.timestamp())  # rule 3
        usages = []
        if not isinstance(identity, RelayIdentity):  # a relay only answers: it reaches nothing of anybody's
            usages.append(ExtendedKeyUsageOID.CLIENT_AUTH)
        if is_machine:  # a member only dials: its certificate cannot answer for a machine
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
        uri = x509.UniformResourceIdentifier(checked(identity).uri)
        certificate = (
            _builder(x509.Name([]), issuer.subject, now=now, ends=ends)
            .public_key(_requested_key(request_pem))
            .add_extension(x509.SubjectAlternativeName([uri]), critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(_authority_key_id(issuer), critical=False)
        )
        return certificate.sign(_private_key(self.key_pem), hashes.SHA256()).public_bytes(_PEM)

    def sign_api(self, request_pem: bytes, name: str, *, now: float, ttl_s: float = MACHINE_TTL_S) -> bytes:
        """A certificate (PEM) for the API by this DNS name, and nothing else: no gateway takes it, no machine has one.

        Raises AuthenticationError.
        """
        issuer = self._certificate()
        ends = min(now + ttl_s, issuer.not_valid_after_utc.timestamp())
        certificate = (
            _builder(x509.Name([]), issuer.subject, now=now, ends=ends)
            .public_key(_requested_key(request_pem))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(_authority_key_id(issuer), critical=False)
        )
        return certificate.sign(_private_key(self.key_pem), hashes.SHA256()).public_bytes(_PEM)

    def check(self) -> None:
        """Raises ValueError for what is no certificate, no key, or another's key."""
        if self._certificate().public_key() != _private_key(self.key_pem).public_key():
            raise ValueError("the key is not that of the certificate")

    def ends_at(self) -> float:
        return self._certificate().not_valid_after_utc.timestamp()

    def _certificate(self) -> x509.Certificate:
        return x509.load_pem_x509_certificate(self.certificate_pem)


def new_authority(deployment: str, *, now: float, ttl_s: float = AUTHORITY_TTL_S) -> Authority:
    """A new key, and its certificate signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    # The fingerprint of the key in the name: two authorities of a deployment must not be mistaken for each other.
    key_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    label = f"{deployment} {key_id.digest.hex()[:12]}"
    name = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "gangmesh"),
            x509.NameAttribute(NameOID.COMMON_NAME, label[:64]),
        ]
    )
    certificate = (
        _builder(name, name, now=now, ends=now + ttl_s)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(key_id, critical=False)
        .sign(key, hashes.SHA256())
    )
    return Authority(
        deployment=deployment,
        key_pem=key.private_bytes(_PEM, _PKCS8, _OPEN),
        certificate_pem=certificate.public_bytes(_PEM),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """The authorities of a deployment: one signs, others are trusted. Frozen: every step gives a new one."""

    signing: Authority
    next: Authority | None = None
    """Trusted, does not sign yet."""
    promote_at: float = 0.0
    """When it may sign, at the soonest; 0 when there is none."""
    old: Authority | None = None
    """Does not sign any more, trusted until `retire`."""
    promoted_at: float = 0.0
    """When the old one signed last; 0 when there is none."""

    def bundle_pem(self) -> bytes:
        """What everybody trusts now."""
        trusted = (self.signing, self.next, self.old)
        return b"".join(authority.certificate_pem for authority in trusted if authority is not None)

    @property
    def retire_at(self) -> float:
        """When nothing that the old one signed is valid any more; 0 when there is none."""
        return 0.0 if self.old is None else self.promoted_at + MACHINE_TTL_S + SKEW_MAX_S

    def introduce(self, authority: Authority, *, promote_at: float) -> Rotation:
        """Step 1; then give everybody the new bundle. Raises ConflictError when a rotation is under way."""
        if self.next is not None or self.old is not None:
            raise ConflictError(
                "A rotation of the authority is under way; it has to end before the next begins.",
                hint="`mesh authority show` says how far it is.",
            )
        return replace(self, next=authority, promote_at=promote_at)

    def promote(self, *, now: float) -> Rotation:
        """Step 2, when everybody has the bundle; then sign new certificates for everybody. Raises ConflictError."""
        if self.next is None:
            raise ConflictError("No next authority has been introduced.")
        return Rotation(signing=self.next, old=self.signing, promoted_at=now)

    def retire(self, *, now: float) -> Rotation:
        """Step 3, when nothing that the old one signed can be valid. Raises ConflictError before."""
        if self.old is None:
            raise ConflictError("There is no old authority.")
        left_s = self.retire_at - now
        if left_s > 0:
            raise ConflictError(
                f"Certificates of the old authority may be valid for another {left_s / 3600:.1f} h."
            )
        return Rotation(signing=self.signing)

    def advanced(self, *, now: float, have_all_heard: bool) -> Rotation:
        """After the step that is due now; itself when none is.

        Args:
            have_all_heard: everybody has this bundle.
        """
        if self.next is not None and have_all_heard and now >= self.promote_at:
            return self.promote(now=now)
        if self.old is not None and now >= self.retire_at:
            return self.retire(now=now)
        return self


def _builder(subject: x509.Name, issuer: x509.Name, *, now: float, ends: float) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_moment(now) - timedelta(seconds=SKEW_MAX_S))
        .not_valid_after(_moment(ends))
    )


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC).replace(microsecond=0)


def _private_key(key_pem: bytes) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(key_pem, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"a key of P-256 is needed, this is {type(key).__name__}")
    return key


def _requested_key(request_pem: bytes) -> ec.EllipticCurvePublicKey:
    """The key that a request proves to hold. Raises AuthenticationError."""
    if len(request_pem) > REQUEST_BYTES_MAX:
        raise AuthenticationError(f"A certificate request has at most {REQUEST_BYTES_MAX} bytes.")
    try:
        request = x509.load_pem_x509_csr(request_pem)
        key, is_signed = request.public_key(), request.is_signature_valid
    except (ValueError, InvalidSignature, TypeError) as error:
        raise AuthenticationError(f"This is no certificate request: {error}.") from error
    if not is_signed:
        raise AuthenticationError("The certificate request is not signed by the key that it names.")
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise AuthenticationError("A certificate request must have a key of the curve P-256.")
    return key


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _authority_key_id(issuer: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    key_id = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(key_id)
