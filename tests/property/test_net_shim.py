"""What programs share with their gateway is read whatever is in it, and addresses go there and back."""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from hypothesis import example, given
from hypothesis import strategies as st

from mesh.net.shim.addresses import GATEWAY, OVERLAY, SOURCE, loopback_of, overlay_of, source_like
from mesh.net.shim.table import ASKED, FRESH_S, SLOT, TABLE_BYTES, read_slot, slot_offset

V4, V6 = (ip_network(text) for text in OVERLAY)
ports = st.integers(0, 65535)
loopbacks = st.integers(127 << 24, (128 << 24) - 1).map(lambda number: str(IPv4Address(number)))


def slot(*, state: int, when_s: int, source: str, port: int, family: int, target: bytes) -> bytes:
    own = [number.to_bytes(4, "little") for number in (state, when_s)]
    return SLOT.pack(own[0], own[1], IPv4Address(source).packed, port, family, target)


@given(st.binary(min_size=32, max_size=32), loopbacks, st.integers(0, 2**32 - 1))
def test_a_slot_of_anything_is_a_target_or_nothing(data: bytes, source: str, now_s: int) -> None:
    found = read_slot(data, source=source, now_s=now_s)
    if found is not None:
        ip_address(found[0])
        assert 0 <= found[1] < 65536


@given(
    loopbacks, ports, st.integers(0, 2**32 - 1), st.binary(min_size=16, max_size=16), st.sampled_from((4, 6))
)
def test_what_was_asked_is_read_once_it_is_fresh_and_by_its_own_source(
    source: str, port: int, now_s: int, target: bytes, family: int
) -> None:
    def read(*, state: int = ASKED, age_s: int = 0, by: str = source) -> tuple[str, int] | None:
        when_s = (now_s - age_s) % 2**32
        data = slot(state=state, when_s=when_s, source=source, port=port, family=family, target=target)
        return read_slot(data, source=by, now_s=now_s)

    host = str(ip_address(target[:4]) if family == 4 else IPv6Address(target))
    assert read() == read(age_s=FRESH_S)
    assert read() == ((host, port) if family == 4 else (socket.inet_ntop(socket.AF_INET6, target), port))
    assert read(age_s=FRESH_S + 1) is None
    assert read(age_s=-1) is None, "from the future"
    assert read(state=0) is None
    assert read(state=2) is None
    assert read(by="127.0.0.1" if source != "127.0.0.1" else SOURCE) is None


@given(loopbacks, ports, loopbacks, ports)
def test_no_two_connections_that_programs_have_not_bound_share_a_slot(
    source: str, port: int, other: str, other_port: int
) -> None:
    for one, number in ((source, port), (other, other_port)):
        assert 4096 <= slot_offset(one, number) <= TABLE_BYTES - SLOT.size
    if port != other_port:
        assert slot_offset(source, port) != slot_offset(other, other_port)
    if source != SOURCE:
        assert slot_offset(source, port) != slot_offset(SOURCE, port)


@given(st.integers(int(V4[0]), int(V4[-1])), st.integers(0, 65535), st.integers(0, 1))
@example(int(V4[0]), 0, 0)
@example(int(V4[-1]), 65535, 1)
def test_overlay_addresses_have_each_its_loopback_address(number: int, low: int, group: int) -> None:
    v4 = str(IPv4Address(number))
    v6 = str(IPv6Address(int(V6[0]) | group << 80 | low))
    there = [loopback_of(address) for address in (v4, v6)]
    assert there[0] != there[1]
    for address, loopback in zip((v4, v6), there, strict=True):
        assert loopback is not None
        assert IPv4Address(loopback).is_loopback
        assert loopback not in (GATEWAY, SOURCE, "127.0.0.1")
        assert overlay_of(loopback) == address
    assert source_like(there[0] or "", (v6, v4)) == there[0]
    assert source_like(there[1] or "", (v4, v6)) == there[1]
    assert source_like(there[1] or "", (v4,)) is None
    assert source_like("::1", (v4, v6)) is None


@given(st.ip_addresses())
def test_other_addresses_have_none(address: IPv4Address | IPv6Address) -> None:
    if address not in (V4 if address.version == 4 else V6):
        assert loopback_of(str(address)) is None


@given(loopbacks)
def test_loopback_addresses_of_others_mean_nothing(address: str) -> None:
    if overlay_of(address) is not None:
        assert loopback_of(overlay_of(address) or "") == address
    assert overlay_of("127.0.0.1") is overlay_of(GATEWAY) is overlay_of(SOURCE) is None
