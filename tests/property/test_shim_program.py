"""Files of programs and the kernel's tables are read whatever is in them."""

from __future__ import annotations

import struct
from ipaddress import IPv4Address, IPv6Address, ip_network

from hypothesis import given
from hypothesis import strategies as st

from agents.shim_program import refusal_of_program
from agents.shim_watch import overlay_sockets, read_address
from mesh.net.shim.addresses import OVERLAY

V4, V6 = (ip_network(text) for text in OVERLAY)
HEAD = b"\x7fELF\x02\x01" + bytes(10)


def program(segments: list[tuple[int, bytes]], *, count: int | None = None, start: int = 64) -> bytes:
    """A file with these segments: kind and content."""
    table, contents = b"", b""
    behind = start + 56 * len(segments)
    for kind, content in segments:
        table += struct.pack(
            "<IIQQQQQQ", kind, 4, behind + len(contents), 0, 0, len(content), len(content), 1
        )
        contents += content
    numbers = (3, 62, 1, 0, start, 0, 0, 64, 56, len(segments) if count is None else count, 0, 0, 0)
    return HEAD + struct.pack("<HHIQQQIHHHHHH", *numbers) + bytes(start - 64) + table + contents


def refusal(data: bytes) -> str | None:
    return refusal_of_program(lambda offset, size: data[offset : offset + size])


@given(st.binary(max_size=400), st.booleans())
def test_a_file_of_anything_is_judged(data: bytes, is_program: bool) -> None:
    refusal(HEAD + data if is_program else data)


@given(
    st.lists(st.tuples(st.sampled_from((1, 2, 3, 4, 6)), st.binary(max_size=40)), max_size=6),
    st.integers(0, 65535),
    st.integers(64, 200),
    st.integers(0, 500),
)
def test_a_program_that_is_cut_or_lies_about_its_segments_is_judged(
    segments: list[tuple[int, bytes]], count: int, start: int, cut: int
) -> None:
    refusal(program(segments, count=count, start=start)[:cut])
    refusal(program(segments, count=count, start=start))


def test_what_decides() -> None:
    gnu, musl = (3, b"/lib64/ld-linux-x86-64.so.2\0"), (3, b"/lib/ld-musl-x86_64.so.1\0")
    go = (4, struct.pack("<III", 4, 4, 4) + b"Go\0\0abcd")
    other_note = (4, struct.pack("<III", 4, 4, 3) + b"GNU\0abcd")
    assert refusal(program([(1, b""), gnu, other_note])) is None
    assert refusal(program([(3, b"/nix/store/xyz-glibc-2.40/lib/ld-linux-aarch64.so.1\0")])) is None
    assert refusal(program([(1, b""), other_note])) == "is linked statically"
    assert refusal(program([musl])) == "is for another C library (/lib/ld-musl-x86_64.so.1)"
    assert refusal(program([gnu, go])) == "is a Go program, which makes its system calls itself"
    assert refusal(b"\x7fELF\x01\x01" + bytes(60)) == "is a program of another kind of machine"
    assert refusal(b"#!/bin/sh\n") is None


def line(address: bytes, inode: int, *, state: str = "02") -> str:
    words = b"".join(address[at : at + 4][::-1] for at in range(0, len(address), 4)).hex().upper()
    return f"   0: 0100007F:C350 {words}:1F90 {state} 00000000:00000000 00:00000000 00000000     0        0 {inode} 1 0"


@given(st.ip_addresses(), st.integers(1, 2**31))
def test_sockets_to_overlay_addresses_are_found_and_no_others(
    address: IPv4Address | IPv6Address, inode: int
) -> None:
    is_meant = address in (V4 if address.version == 4 else V6)
    assert list(overlay_sockets([line(address.packed, inode)])) == ([inode] if is_meant else [])


@given(st.integers(int(V4[0]), int(V4[-1])), st.integers(int(V6[0]), int(V6[-1])))
def test_both_families_and_mapped_addresses_count(v4: int, v6: int) -> None:
    mapped = bytes(10) + b"\xff\xff" + IPv4Address(v4).packed
    lines = [line(IPv4Address(v4).packed, 1), line(IPv6Address(v6).packed, 2), line(mapped, 3)]
    assert list(overlay_sockets(lines)) == [1, 2, 3]


@given(st.text(max_size=200))
def test_a_line_of_anything_is_read(text: str) -> None:
    list(overlay_sockets([text]))
    read_address(text)
