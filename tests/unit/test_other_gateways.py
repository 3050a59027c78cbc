"""Which rules on a machine are of a gateway, as nft lists them."""

from __future__ import annotations

from mesh.net.other_gateways import OtherTable, overlaps, read_table, tables_in
from mesh.net.redirect import OVERLAY, device_name, table_name

LISTED = f"""table ip nat
table inet filter
table inet gangmesh_cbba318feccd
table inet {table_name("d")}
table inet gangmesh_cbba318feccd_more
table ip gangmesh_cbba318feccd
"""
CHAIN = """table inet gangmesh_cbba318feccd {
	chain capture {
		type nat hook output priority -100; policy accept;
		fib daddr type local return
		ip daddr 198.18.0.0/15 meta l4proto tcp redirect to :46611
		ip6 daddr fd67:6d00::/32 meta l4proto tcp redirect to :46611
	}
}
"""


def test_only_tables_of_gateways_are_ours_to_look_at() -> None:
    assert tables_in(LISTED) == [
        ("gangmesh_cbba318feccd", "gmcbba318fec"),
        (table_name("d"), device_name("d")),
    ]
    assert tables_in("") == []


def test_what_a_table_captures_is_read_from_its_rules() -> None:
    table = read_table("gangmesh_cbba318feccd", "gmcbba318fec", CHAIN)
    assert table.networks == OVERLAY
    assert table.capture_port == 46611
    assert overlaps(table, OVERLAY)
    assert overlaps(table, ("198.19.7.0/24",))
    assert not overlaps(table, ("10.7.0.0/16", "fd00::/32"))


def test_rules_that_are_not_whole_capture_nobody_knows_what() -> None:
    empty = read_table("gangmesh_cbba318feccd", "gmcbba318fec", "table inet gangmesh_cbba318feccd {\n}\n")
    assert empty == OtherTable(
        name="gangmesh_cbba318feccd", device="gmcbba318fec", networks=(), capture_port=None
    )
    assert overlaps(empty, OVERLAY)
