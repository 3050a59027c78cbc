"""What the gateway reads of a ClientHello: the name that a real client asks for, and nothing of anything else."""

from __future__ import annotations

import contextlib
import ssl

import hypothesis.strategies as st
from hypothesis import given

from mesh.net.client_hello import RECORD_BYTES_MAX, RECORD_HEADER_BYTES, missing, server_name


def hello(name: str | None, *, oldest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> bytes:
    """As OpenSSL says it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = oldest
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


def test_the_name_that_a_client_asks_for_is_read() -> None:
    assert server_name(hello("api.gangmesh")) == "api.gangmesh"
    assert server_name(hello("API.gangmesh")) == "api.gangmesh"
    assert server_name(hello("api.gangmesh", oldest=ssl.TLSVersion.TLSv1_2)) == "api.gangmesh"
    assert server_name(hello(None)) is None


@given(st.integers(0, 2000))
def test_a_hello_that_comes_in_pieces_is_waited_for(cut: int) -> None:
    whole = hello("api.gangmesh")
    part = whole[: min(cut, len(whole))]
    assert missing(whole) == 0
    assert (missing(part) == 0) == (part == whole)
    assert len(part) + missing(part) <= len(whole)
    if part != whole:
        assert server_name(part) is None


@given(st.binary(max_size=600))
def test_garbage_has_no_name_and_asks_for_no_more_than_a_record(data: bytes) -> None:
    assert server_name(data) is None or data[:1] == b"\x16"
    assert 0 <= missing(data) <= RECORD_HEADER_BYTES + RECORD_BYTES_MAX


@given(st.binary(max_size=400), st.integers(0, 300))
def test_a_hello_with_some_of_it_changed_raises_nothing(noise: bytes, at: int) -> None:
    whole = hello("api.gangmesh")
    server_name(whole[:at] + noise + whole[at + len(noise) :])


def test_what_is_no_handshake_is_not_waited_for() -> None:
    for first in (b"GET / HTTP/1.1\r\n", b"\x15\x03\x01", b"\x00"):
        assert missing(first) == 0
    assert missing(b"") == RECORD_HEADER_BYTES
    assert missing(b"\x16\x03\x01\xff\xff") == 0  # longer than a record may be: OpenSSL says so
