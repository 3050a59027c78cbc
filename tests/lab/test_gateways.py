"""Two hosts, a gateway process on each, real nftables: a plain program reaches another by an overlay address."""

from __future__ import annotations

import json
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.gateway_wire import Counters
from mesh.net import redirect
from tests.lab.gateways import (
    CALL,
    LIMIT_S,
    PORT,
    RELAY,
    SECRET,
    SHOUT,
    TABLE,
    TwoHosts,
    overlay,
    two_hosts,
    wiretap,
)
from tests.lab.network import call
from tests.net_world import DEPLOYMENT, RUN


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    lacking = redirect.why_not()
    if lacking is not None:
        pytest.skip(f"no redirect here: {lacking}")
    with two_hosts(tmp_path) as made:
        yield made


def test_a_plain_program_reaches_another_and_a_ghost_does_not(hosts: TwoHosts) -> None:
    server = hosts.start_echo("m1", overlay(1)[1])  # on the IPv6 address only; both can be dialled
    assert server.stdout is not None
    said = SECRET * 1000
    with wiretap(hosts.lab.port("m0")) as seen:
        for address in overlay(1):
            done = hosts.run("m0", CALL, address, str(PORT), said)
            assert done.stdout.strip() == said, done.stderr
        done = hosts.run("m0", SHOUT, overlay(1)[0], str(PORT), SECRET)
        assert done.returncode != 0, "what is no TCP must not go anywhere"
    assert len(seen) > 2 * len(said)
    assert SECRET.encode() not in seen
    assert hosts.tell("m1", Counters())["ended"] == {"finished": 2}
    assert [server.stdout.readline() for _ in range(2)] == ["accepted\n"] * 2

    # m1 is at epoch 2; nobody has told m0, on which everything of epoch 1 still runs.
    hosts.brief("m1", epoch=2)
    for address in overlay(1):
        done = hosts.run("m0", CALL, address, str(PORT), "from the grave")
        assert "ConnectionResetError" in done.stderr
    assert hosts.tell("m1", Counters())["refused_in"] == {"StaleEpoch": 2}
    heard, _, _ = select.select([server.stdout], [], [], 0)
    assert not heard, "the member has heard of the ghost"
    hosts.brief("m0", epoch=2)
    assert hosts.run("m0", CALL, overlay(1)[0], str(PORT), "alive").stdout.strip() == "alive"


def test_two_hosts_that_only_dial_out_reach_each_other_by_a_relay(hosts: TwoHosts) -> None:
    hosts.start_echo("m1", overlay(1)[0])
    relay = hosts.start_relay()
    hosts.only_by_relay()
    said = SECRET * 1000
    with wiretap(hosts.lab.port(RELAY)) as seen:
        done = hosts.run("m0", CALL, overlay(1)[0], str(PORT), said)
        assert done.stdout.strip() == said, done.stderr
    assert len(seen) > 4 * len(said)
    assert SECRET.encode() not in seen
    relay.send_signal(signal.SIGTERM)
    assert relay.wait(timeout=LIMIT_S) == 0
    log = (hosts.folder / f"{RELAY}.log").read_text()
    [line] = [line for line in log.splitlines() if "relayed " in line]
    billed = json.loads(line.partition("relayed ")[2])
    assert (billed["run"], billed["from"], billed["to"]) == (RUN, "m0", "m1")
    assert billed["bytes"] > 2 * len(said)


def test_what_a_gateway_leaves_when_it_is_killed_and_when_it_ends(hosts: TwoHosts) -> None:
    namespace = hosts.lab.namespace("m0")
    hosts.start_echo("m1", overlay(1)[0])
    hosts.gateways["m0"].send_signal(signal.SIGKILL)
    hosts.gateways["m0"].communicate()
    with wiretap(hosts.lab.port("m0")) as seen:
        done = hosts.run("m0", CALL, overlay(1)[0], str(PORT), SECRET)
        assert "ConnectionRefusedError" in done.stderr
    assert SECRET.encode() not in seen

    hosts.start_gateway("m0")
    left = call("ip", "-n", namespace, "address", "show")
    assert not any(address in left for address in overlay(0)), "an address of the one that was killed"
    hosts.brief("m0")
    assert hosts.run("m0", CALL, overlay(1)[0], str(PORT), "again").stdout.strip() == "again"
    tables = call("ip", "netns", "exec", namespace, "nft", "list", "tables").split()
    assert tables.count(TABLE) == 1

    hosts.gateways["m0"].send_signal(signal.SIGTERM)
    assert hosts.gateways["m0"].wait(timeout=LIMIT_S) == 0
    assert call("ip", "netns", "exec", namespace, "nft", "list", "ruleset").strip() == ""
    left = call("ip", "-n", namespace, "address", "show")
    assert not any(address in left for address in overlay(0))
    assert redirect.device_name(DEPLOYMENT) not in left
    for family in ("-4", "-6"):
        assert redirect.device_name(DEPLOYMENT) not in call("ip", family, "-n", namespace, "route")
