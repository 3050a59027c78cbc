"""TLS contexts: version 1.3, both sides with certificates, nothing resumed.

Rules of this file:
1. OpenSSL checks signatures and purposes, not times (`_NO_TIMES`): the gate checks them, because only then can the
   refusal say whose clock is how far off. Whoever uses a context without the gate must check the times itself.
2. No session tickets: a resumed session would not show its certificate again, and rotation would not reach it.
3. Keys are loaded from memory (a memfd), never from a file on a disk.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from typing import Any

from mesh.errors import AuthenticationError
from mesh.net.identity import PeerCertificate, parse_identity
from mesh.net.refusals import Refusal

API_NAME = "api.gangmesh"
"""Of the API behind a mesh port, in TLS: as server name, and in its certificate. Resolved nowhere."""
_NO_TIMES = 0x200000  # X509_V_FLAG_NO_CHECK_TIME, x509_vfy.h


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """A certificate with its key, and whom to trust: all PEM."""

    certificate_pem: bytes
    key_pem: bytes
    bundle_pem: bytes
    """The authorities; two of them during a rotation."""

    def __repr__(self) -> str:
        return "<Credentials>"


def server_context(credentials: Credentials) -> ssl.SSLContext:
    """For who accepts. Raises AuthenticationError."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, credentials)
    context.num_tickets = 0  # rule 2
    return context


def client_context(credentials: Credentials) -> ssl.SSLContext:
    """For who dials. Raises AuthenticationError. The machine's name in the certificate is for the caller to check."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, credentials)


def api_context(credentials: Credentials) -> ssl.SSLContext:
    """For an API whose clients show no certificate. Raises AuthenticationError."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, credentials, asks_for_certificate=False)
    context.num_tickets = 0
    return context


def authority_context(authority_pem: bytes) -> ssl.SSLContext:
    """For a client of that API, which knows the authority and shows nothing. Raises AuthenticationError.

    The server's name is checked, its times are not (rule 1): a client whose clock is wrong has to hear that.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_STRICT | _NO_TIMES
    try:
        context.load_verify_locations(cadata=authority_pem.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise AuthenticationError(f"This is no certificate of an authority: {error}.") from error
    return context


def stranger_context() -> ssl.SSLContext:
    """For the one question that is asked before anything is known of the head: whom to trust. What it answers has to be
    compared with a fingerprint.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _context(side: int, credentials: Credentials, *, asks_for_certificate: bool = True) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the name is a URI, see `peer_certificate`
    context.verify_mode = ssl.CERT_REQUIRED if asks_for_certificate else ssl.CERT_NONE
    context.verify_flags |= ssl.VERIFY_X509_STRICT | _NO_TIMES
    context.options |= ssl.OP_NO_TICKET
    try:
        context.load_verify_locations(cadata=credentials.bundle_pem.decode("ascii"))
        memory = os.memfd_create("gangmesh-key", os.MFD_CLOEXEC)
        try:
            os.write(memory, credentials.certificate_pem + credentials.key_pem)
            context.load_cert_chain(f"/proc/self/fd/{memory}")
        finally:
            os.close(memory)
    except (ssl.SSLError, ValueError) as error:
        raise AuthenticationError(
            f"Certificate, key and authority do not make a TLS identity: {error}."
        ) from error
    return context


def peer_certificate(tls: ssl.SSLObject) -> PeerCertificate:
    """Who the other side is, after the handshake. Raises AuthenticationError when its name is none of ours."""
    shown: dict[str, Any] = dict(tls.getpeercert() or {})
    names = shown.get("subjectAltName", ())
    if len(names) != 1 or names[0][0] != "URI":
        raise AuthenticationError("The peer's certificate has not exactly one name.")
    try:
        identity = parse_identity(names[0][1])
    except ValueError as error:
        raise AuthenticationError(f"The peer's certificate: {error}.") from error
    return PeerCertificate(
        identity=identity,
        not_before=_seconds(shown["notBefore"]),
        not_after=_seconds(shown["notAfter"]),
    )


def _seconds(text: str) -> float:
    return float(ssl.cert_time_to_seconds(text))


def refusal_of(error: ssl.SSLError) -> Refusal:
    """What went wrong in a handshake that we accepted, as something to count."""
    reason = error.reason or ""
    if "UNSUPPORTED_PROTOCOL" in reason or "VERSION_TOO_LOW" in reason:
        return Refusal.TLS_VERSION
    if "DID_NOT_RETURN_A_CERTIFICATE" in reason:
        return Refusal.NO_CERTIFICATE
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST"):
        return Refusal.NOT_TLS
    return Refusal.HANDSHAKE_FAILED
