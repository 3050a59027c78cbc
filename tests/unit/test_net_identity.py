"""Names in certificates, the authority that signs them, join tokens, and whose clock is wrong."""

from __future__ import annotations

import ssl
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509 import CertificateSigningRequestBuilder, Name

from mesh.errors import AuthenticationError, ConflictError, SpecError
from mesh.net import tokens
from mesh.net.authority import (
    AUTHORITY_TTL_S,
    MACHINE_TTL_S,
    Authority,
    Rotation,
    fingerprint,
    new_authority,
    new_key_pem,
    read_certificate,
    signing_request,
)
from mesh.net.clock import SKEW_MAX_S, skew_text
from mesh.net.identity import parse_identity
from mesh.net.tls import client_context, peer_certificate, server_context
from mesh.net.tokens import JoinToken, TokenBook
from tests.net_world import DEPLOYMENT, credentials, machine, member, relay_identity

NOW = 1_800_000_000.0


@pytest.fixture(scope="module")
def authority() -> Authority:
    return new_authority(DEPLOYMENT, now=NOW)


# ---- names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "identity",
    [
        machine("node-3.rack_1"),
        member(0, "a", epoch=0),
        member(7, "b", epoch=2**53 - 1),
        relay_identity("relay-4"),
    ],
)
def test_a_name_is_read_back_as_it_was_written(identity: object) -> None:
    assert parse_identity(identity.uri) == identity  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "gangmesh://d/machine/",
        "gangmesh://d/machine/a/",
        "gangmesh://d/relay/",
        "gangmesh://d/relay/a/machine/a",
        "gangmesh://d/relay/a/run/r/epoch/1/rank/0",
        "gangmesh://d/machine/a/run/r/epoch/1",
        "gangmesh://d/machine/a/run/r/epoch/01/rank/0",
        "gangmesh://d/machine/a/run/r/epoch/-1/rank/0",
        "gangmesh://d/machine/a/run/r/epoch/1/rank/0/more",
        "gangmesh://d/machine/a b",
        "gangmesh://d/machine/a%2Fb",
        "gangmesh://d/machine/-a",
        "gangmesh://d/machine/a\n",
        "gangmesh://d/machine/a\x00",
        "gangmesh://d/machine/" + "a" * 129,
        "gangmesh://d/machine/a/run/r/epoch/9007199254740992/rank/0",
        "gangmesh://d/machine/a/run/r/epoch/٣/rank/0",
        "GANGMESH://d/machine/a",
        "https://d/machine/a",
    ],
)
def test_there_is_one_spelling_of_a_name_and_no_other(uri: str) -> None:
    with pytest.raises(ValueError, match=r"is no name|too large"):
        parse_identity(uri)


# ---- the authority ------------------------------------------------------------------------------------


def test_a_certificate_says_what_the_authority_knows_not_what_was_asked_for(authority: Authority) -> None:
    pem = authority.sign(signing_request(new_key_pem()), member(3, "a", epoch=9), now=NOW)
    said = read_certificate(pem)
    assert said.identity == member(3, "a", epoch=9)
    assert said.not_before == NOW - SKEW_MAX_S
    assert said.not_after > NOW


def test_no_certificate_outlives_its_authority(authority: Authority) -> None:
    late = NOW + AUTHORITY_TTL_S - 60
    pem = authority.sign(signing_request(new_key_pem()), machine("a"), now=late)
    assert read_certificate(pem).not_after == authority.ends_at()


def test_a_name_that_could_not_be_read_back_is_not_signed(authority: Authority) -> None:
    with pytest.raises(ValueError, match="is no name"):
        authority.sign(signing_request(new_key_pem()), machine("a/run/r"), now=NOW)
    with pytest.raises(ValueError, match="this authority is of"):
        authority.sign(signing_request(new_key_pem()), machine("a", deployment="other"), now=NOW)


def test_what_is_no_honest_request_is_refused(authority: Authority) -> None:
    weak = rsa.generate_private_key(65537, 1024)
    other_curve = ec.generate_private_key(ec.SECP384R1())
    good = signing_request(new_key_pem())
    requests = [
        b"",
        b"no pem at all",
        good[:-60] + good[-50:],
        new_key_pem(),
        authority.certificate_pem,
        good + b"\n" * 4096,
        *(
            CertificateSigningRequestBuilder()
            .subject_name(Name([]))
            .sign(key, hashes.SHA256())
            .public_bytes(serialization.Encoding.PEM)
            for key in (weak, other_curve)
        ),
    ]
    for request in requests:
        with pytest.raises(AuthenticationError):
            authority.sign(request, machine("a"), now=NOW)


def test_a_key_never_shows_in_what_is_printed(authority: Authority) -> None:
    who = credentials(authority, machine("a"), now=NOW)
    assert "PRIVATE" not in f"{who!r}{authority!r}"


def test_rotation_in_three_steps_and_no_step_too_early() -> None:
    first, second = new_authority(DEPLOYMENT, now=NOW), new_authority(DEPLOYMENT, now=NOW + 1)
    state = Rotation(signing=first)
    with pytest.raises(ConflictError):
        state.promote(now=NOW)
    state = state.introduce(second, promote_at=NOW)
    assert state.signing is first
    assert state.bundle_pem() == first.certificate_pem + second.certificate_pem
    with pytest.raises(ConflictError):
        state.introduce(second, promote_at=NOW)
    state = state.promote(now=NOW)
    assert state.signing is second
    assert state.bundle_pem() == second.certificate_pem + first.certificate_pem
    with pytest.raises(ConflictError, match="may be valid for another"):
        state.retire(now=NOW + MACHINE_TTL_S)
    state = state.retire(now=NOW + MACHINE_TTL_S + SKEW_MAX_S)
    assert state.bundle_pem() == second.certificate_pem
    with pytest.raises(ConflictError):
        state.retire(now=NOW)


def test_a_rotation_advances_when_its_time_has_come_and_everybody_has_heard() -> None:
    first, second = new_authority(DEPLOYMENT, now=NOW), new_authority(DEPLOYMENT, now=NOW)
    steady = Rotation(signing=first)
    assert steady.advanced(now=NOW, have_all_heard=True) is steady
    introduced = steady.introduce(second, promote_at=NOW + 10)
    assert introduced.advanced(now=NOW + 9, have_all_heard=True) is introduced
    assert introduced.advanced(now=NOW + 10, have_all_heard=False) is introduced
    promoted = introduced.advanced(now=NOW + 20, have_all_heard=True)
    assert (promoted.signing, promoted.old, promoted.next) == (second, first, None)
    assert promoted.retire_at == NOW + 20 + MACHINE_TTL_S + SKEW_MAX_S
    assert promoted.advanced(now=promoted.retire_at - 1, have_all_heard=True) is promoted
    assert promoted.advanced(now=promoted.retire_at, have_all_heard=False) == Rotation(signing=second)


def test_tls_says_who_the_peer_is_and_times_are_left_to_the_gate(authority: Authority) -> None:
    """`authority` is of 2027 or so: a certificate that is not valid at the moment of the test."""
    server = server_context(credentials(authority, machine("b"), now=NOW))
    client = client_context(credentials(authority, member(0, "a"), now=NOW))
    ours, theirs = shake_hands(client, server)
    assert peer_certificate(theirs).identity == member(0, "a")
    assert peer_certificate(ours).identity == machine("b")
    assert peer_certificate(ours).not_before == NOW - SKEW_MAX_S
    assert ours.version() == "TLSv1.3"


def test_a_certificate_and_a_key_that_do_not_belong_together_are_refused(authority: Authority) -> None:
    one, two = credentials(authority, machine("a"), now=NOW), credentials(authority, machine("a"), now=NOW)
    mixed = type(one)(certificate_pem=one.certificate_pem, key_pem=two.key_pem, bundle_pem=one.bundle_pem)
    with pytest.raises(AuthenticationError, match="do not make a TLS identity"):
        server_context(mixed)


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server)
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    for side in (ours, theirs, ours, theirs):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return ours, theirs


# ---- tokens -------------------------------------------------------------------------------------------


def token(number: int = 1) -> JoinToken:
    return JoinToken(id=f"{number:012x}", secret=f"{number + 5:048x}", fingerprint="f" * 64)


def redeem(book: TokenBook, token: JoinToken, *, now: float, key: str = "key", name: str = "m-1") -> None:
    record = book.find(token)
    tokens.check(record, key=key, now=now)
    book.redeem(record, key=key, name=name, now=now)


def test_a_token_is_good_once() -> None:
    book = TokenBook()
    record = book.add(token(), now=NOW)
    assert token().secret not in repr(book)
    assert token().secret not in repr(token())
    assert record.secret_hash != token().secret
    redeem(book, token(), now=NOW + 1)
    with pytest.raises(AuthenticationError, match="has been used"):
        redeem(book, token(), now=NOW + 2, key="another")


def test_who_used_a_token_may_ask_again_with_the_same_key_while_it_is_valid() -> None:
    book = TokenBook()
    book.add(token(), now=NOW, ttl_s=60)
    redeem(book, token(), now=NOW + 1)
    redeem(book, token(), now=NOW + 59, name="m-2")
    assert (book.find(token()).used_at, book.find(token()).used_for) == (NOW + 1, "m-2")
    with pytest.raises(AuthenticationError, match="has expired"):
        redeem(book, token(), now=NOW + 60)
    with pytest.raises(AuthenticationError, match="has been used"):
        redeem(book, token(), now=NOW + 60, key="another")
    with pytest.raises(AuthenticationError, match="has been used"):
        tokens.check(replace(book.find(token()), used_by=""), key="key", now=NOW)  # by a head before this one


def test_a_token_is_good_for_a_short_time_and_says_so_only_to_who_has_it() -> None:
    book = TokenBook()
    book.add(token(), now=NOW, ttl_s=60)
    with pytest.raises(AuthenticationError, match="not known"):
        book.find(replace(token(), secret="0" * 48))
    with pytest.raises(AuthenticationError, match="not known"):
        book.find(replace(token(), id="0" * 12))
    with pytest.raises(AuthenticationError, match="has expired"):
        redeem(book, token(), now=NOW + 60)
    assert not book.open_tokens(now=NOW + 60)
    with pytest.raises(SpecError):
        book.add(token(2), now=NOW, ttl_s=86401)


def test_the_book_of_tokens_is_bounded_and_forgets_the_dead_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.net.tokens.TOKENS_MAX", 3)
    book = TokenBook()
    for number in range(3):
        book.add(token(number), now=NOW)
    with pytest.raises(ConflictError):
        book.add(token(3), now=NOW)
    redeem(book, token(1), now=NOW)
    book.add(token(3), now=NOW)
    assert sorted(book.records) == [token(n).id for n in (0, 2, 3)]


def test_a_token_is_read_back_and_nothing_else_is(authority: Authority) -> None:
    made = JoinToken(id="a" * 12, secret="b" * 48, fingerprint=fingerprint(authority.certificate_pem))
    assert JoinToken.parse(f" {made}\n") == made
    for text in (
        "",
        "gm1",
        str(made)[:-1],
        str(made) + "0",
        str(made).upper(),
        str(made).replace("gm1", "gm2"),
    ):
        with pytest.raises(SpecError) as caught:
            JoinToken.parse(text)
        assert "b" * 48 not in str(caught.value)


# ---- clocks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "text"),
    [
        (90, 0, "This machine's clock is 90 s ahead of b's."),
        (0, 3600, "This machine's clock is 60 min behind b's."),
        (0, 36000, "This machine's clock is 10.0 h behind b's."),
        (86400 * 365, 0, "This machine's clock is 365 days ahead of b's."),
    ],
)
def test_skew_is_said_from_this_machines_point_of_view(ours: float, theirs: float, text: str) -> None:
    assert skew_text(ours=ours, theirs=theirs, them="b") == text
