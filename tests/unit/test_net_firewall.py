"""The firewall of a gang on the private and the public path: its text, and what it reads of the machine."""

from __future__ import annotations

import pytest

from mesh.errors import DeploymentError
from mesh.ids import Epoch, Incarnation, IncarnationToken, Rank, RunUid
from mesh.net import firewall
from mesh.net.programs import ProgramFailed

RUN = RunUid("0123456789abcdef")
LIFE = Incarnation(run_uid=RUN, epoch=Epoch(3), rank=Rank(0), token=IncarnationToken("ab" * 8))
TABLE = firewall.life_table("test", LIFE)


def test_members_and_the_machines_own_ports_are_all_that_new_connections_may_be_of() -> None:
    text = firewall.rules(TABLE, members=["10.0.0.2", "fd00::2"], open_tcp=[7443, 6000])
    lines = [line.strip() for line in text.splitlines()]
    assert lines[:2] == [f"table inet {TABLE} {{}}", f"delete table inet {TABLE}"]
    assert "set members4 { type ipv4_addr; elements = { 10.0.0.2 }; }" in lines
    assert "set members6 { type ipv6_addr; elements = { fd00::2 }; }" in lines
    assert "set open_tcp { type inet_service; elements = { 6000, 7443 }; }" in lines
    assert "set open_udp { type inet_service; }" in lines
    assert lines.index("ip saddr @members4 return") < lines.index("counter drop")
    assert "meta l4proto udp ct state != new return" in lines


def test_the_tables_of_earlier_lives_go_in_the_same_moment() -> None:
    text = firewall.rules(TABLE, members=[], instead_of=["gangmesh_a", TABLE])
    assert text.count(f"delete table inet {TABLE}\n") == 1
    assert text.index("delete table inet gangmesh_a\n") < text.index(f"table inet {TABLE} {{\n")


def test_without_connection_tracking_datagrams_are_let_alone() -> None:
    text = firewall.rules(TABLE, members=[], has_tracking=False)
    assert "ct state" not in text
    assert "meta l4proto udp meta l4proto udp return" not in text
    assert "meta l4proto udp return" in text


@pytest.mark.parametrize("member", ["10.0.0.2; accept", "10.0.0.0/8", "", "host"])
def test_what_is_no_address_gets_into_no_rule(member: str) -> None:
    with pytest.raises(ValueError, match="does not appear to be"):
        firewall.rules(TABLE, members=[member])


def test_tables_of_runs_are_told_from_all_others() -> None:
    listing = f"table ip nat\ntable inet gangmesh_0123456789ab\ntable inet {TABLE}\ntable inet {TABLE}x\n"
    assert firewall.tables_in(listing) == {TABLE: RUN}


def test_ports_are_read_as_the_kernel_shows_them() -> None:
    head = "  sl  local_address rem_address   st tx_queue rx_queue"
    rows = [
        "   0: 00000000:1D13 00000000:0000 0A 00000000:00000000",  # 7443, listening
        "   1: 0100007F:9C40 0200007F:1D13 01 00000000:00000000",  # 40000, established
        "   2: 00000000:0016 00000000:0000 0A 00000000:00000000",  # ssh: never looked at
        "",
    ]
    table = "\n".join([head, *rows])
    assert firewall.ports_in(table, listening=True) == {7443}
    assert firewall.ports_in(table, listening=False) == {7443, 40000}
    assert firewall.ports_in("", listening=False) == frozenset()


def test_a_kernel_that_tracks_nothing_gets_the_other_rules_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[str] = []

    def nft(*command: str, given_to: list[str] = given, **words: str) -> str:
        if not words:
            return ""
        given_to.append(words["given"])
        if "ct state" in words["given"]:
            raise ProgramFailed("nft -f -: Error: Could not process rule: No such file or directory")
        return ""

    monkeypatch.setattr(firewall, "run_program", nft)
    assert "datagrams are not covered" in firewall.admit_only("test", LIFE, ["10.0.0.2"])
    assert ["ct state" in text for text in given] == [True, False]


def test_without_the_right_to_it_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def nft(*command: str, **words: str) -> str:
        raise ProgramFailed("nft -f -: Error: Could not process rule: Operation not permitted")

    monkeypatch.setattr(firewall, "run_program", nft)
    with pytest.raises(DeploymentError, match=r"cannot be set: .*Operation not permitted") as caught:
        firewall.admit_only("test", LIFE, ["10.0.0.2"])
    assert "CAP_NET_ADMIN" in caught.value.hint
    firewall.admit_all("test", LIFE)  # and what was never made is taken away without a word
