"""The network check over real links: hosts are network namespaces, and what is done to them is done by the kernel."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import secrets
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import pytest

from agents.probing import KEY_BYTES, MAGIC, Prober
from coordinator.network_check import check
from mesh.netcheck.limits import check_limit_s
from mesh.netcheck.measurements import MemberFacts, Reach, Seen
from mesh.netcheck.verdict import Finding, FindingKind, judge
from tests.lab.network import LabNetwork, call, why_not

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]
CLONE_NEWNET = 0x40000000
HOSTS = 5
LINK_KBIT = 20_000
"""Every host's link: far below what this machine's cores carry, so that the link decides, and not who else is busy."""
T = TypeVar("T")


class Host:
    """A thread in a network namespace, with an event loop of its own; as a `Probing` it is called from outside."""

    def __init__(self, network: LabNetwork, name: str, number: int) -> None:
        network.plug(name, number, hosts_file="127.0.0.1 localhost\n")
        self.network, self.name, self.address = network, name, network.address(number)
        self._loop = asyncio.new_event_loop()
        is_in: Future[None] = Future()
        self._thread = threading.Thread(target=self._live, args=(is_in,), name=name)
        self._thread.start()
        is_in.result(timeout=10)
        self.prober: Prober | None = None
        self._without_offload()

    def _live(self, is_in: Future[None]) -> None:
        namespace = os.open(f"/run/netns/{self.network.namespace(self.name)}", os.O_RDONLY)
        failed = ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET)
        os.close(namespace)
        if failed:
            is_in.set_exception(OSError(ctypes.get_errno(), "setns"))
            return
        is_in.set_result(None)
        self._loop.run_forever()

    def _without_offload(self) -> None:
        """A packet is what goes over a real wire, not 64 KB that are cut up later."""
        whole = ("gso_max_segs", "1")
        call("ip", "-n", self.network.namespace(self.name), "link", "set", "eth0", *whole)
        call("ip", "link", "set", self.network.port(self.name), *whole)

    def drop(self, rule: str) -> None:
        """Packets that leave this host and fit the rule are lost."""
        text = f"table inet lost {{\nchain out {{\ntype filter hook output priority 0\n{rule} drop\n}}\n}}\n"
        call("ip", "netns", "exec", self.network.namespace(self.name), "nft", "-f", "-", stdin=text)

    async def there(self, make: Callable[[], Awaitable[T]]) -> T:
        async def run() -> T:
            return await make()

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), self._loop))

    async def start(self, rank: int, key: bytes) -> MemberFacts:
        self.prober = Prober(rank=rank, name=self.name, address=self.address, key=key)
        return await self.there(self.prober.start)

    async def stop(self) -> None:
        if self.prober is not None:
            await self.there(self.prober.stop)
            self.prober = None

    async def reach(self, others: Sequence[MemberFacts], *, is_patient: bool = False) -> Mapping[int, Reach]:
        assert self.prober is not None
        prober = self.prober
        return await self.there(lambda: prober.reach(others, is_patient=is_patient))

    async def heard(self) -> frozenset[int]:
        assert self.prober is not None
        return self.prober.heard

    async def push(
        self, other: MemberFacts, *, seconds: float, limit_s: float, segment_bytes: int | None = None
    ) -> float | None:
        assert self.prober is not None
        prober = self.prober
        return await self.there(
            lambda: prober.push(other, seconds=seconds, limit_s=limit_s, segment_bytes=segment_bytes)
        )

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    network = LabNetwork.build()
    made: list[Host] = []
    try:
        for number in range(count):
            made.append(Host(network, f"m{number}", 10 + number))
            network.slow(f"m{number}", kbit=LINK_KBIT)
        yield made
    finally:
        for host in made:
            host.close()
        network.close()


@pytest.fixture
def five() -> Iterator[list[Host]]:
    with hosts(HOSTS) as made:
        yield made


async def look(members: Sequence[Host]) -> tuple[Seen, list[Finding]]:
    key = secrets.token_bytes(KEY_BYTES)
    try:
        facts = [await host.start(rank, key) for rank, host in enumerate(members)]
        async with asyncio.timeout(check_limit_s(len(members)) + 5):
            seen = await check({rank: (facts[rank], host) for rank, host in enumerate(members)})
    finally:
        for host in members:
            await host.stop()
    return seen, judge(seen)


def about(findings: Sequence[Finding]) -> list[tuple[FindingKind, tuple[int, ...]]]:
    return [(finding.kind, finding.ranks) for finding in findings]


async def test_links_that_are_well_are_measured_and_nothing_is_said(five: list[Host]) -> None:
    seen, findings = await look(five)
    assert findings == []
    ways = [(a, b) for a in range(HOSTS) for b in range(HOSTS) if a != b]
    assert sorted(seen.push) == sorted(seen.reach) == ways
    for push in seen.push.values():
        assert push.bytes_per_s is not None
        assert 0.5 * LINK_KBIT * 125 < push.bytes_per_s < 1.5 * LINK_KBIT * 125, "what the link carries"
    for reach in seen.reach.values():
        assert reach.offset_s is not None and abs(reach.offset_s) < 0.5, "they share one clock"


async def test_what_is_wrong_is_found_with_its_direction_and_nothing_else_is_said(five: list[Host]) -> None:
    one_way, only_one_port, tunnel, _, slow = five
    one_way.drop(f"ip daddr {only_one_port.address}")
    only_one_port.drop(f"ip daddr {tunnel.address} tcp dport != 29500 tcp flags & (syn | ack) == syn")
    tunnel.drop(f"ip daddr {one_way.address} ip length > 1300")
    slow.network.slow(slow.name, kbit=LINK_KBIT // 3)
    _, findings = await look(five)
    found = [(kind, ranks) for kind, ranks in about(findings) if kind is not FindingKind.SLOW]
    assert found == [
        (FindingKind.ONE_WAY, (0, 1)),  # neither can open a connection, and only one direction is to blame
        (FindingKind.PORT_CLOSED, (1, 2)),
        (FindingKind.PACKETS_TOO_LARGE, (2, 0)),
    ]
    slow_ones = [ranks for kind, ranks in about(findings) if kind is FindingKind.SLOW]
    assert slow_ones and all(4 in ranks for ranks in slow_ones), "the one slow link is behind each of them"
    hints = " ".join(finding.hint for finding in findings)
    assert "admits the rendezvous port only" in hints and "Set the MTU" in hints


async def test_a_cut_cable_is_told_as_one_host_within_the_limit(five: list[Host]) -> None:
    network = five[0].network
    network.cut("m3")
    _, findings = await look(five)
    assert about(findings) == [(FindingKind.UNREACHABLE, (3,))] * 2


@pytest.mark.long
async def test_who_does_not_know_the_key_learns_nothing_and_costs_nothing(five: list[Host]) -> None:
    """A port scan, garbage, a key of another check, silence, a flood: the check beside them says what is."""
    target = five[0]
    facts = await target.start(0, secrets.token_bytes(KEY_BYTES))
    other = five[1]

    async def stranger(said: bytes, *, port: int) -> bytes:
        async with asyncio.timeout(10):
            reader, writer = await asyncio.open_connection(target.address, port)
            try:
                writer.write(said)
                return await reader.read()
            except ConnectionError:
                return b""
            finally:
                writer.close()

    said = [b"", b"GET / HTTP/1.1\r\nHost: there\r\n\r\n", MAGIC + bytes(KEY_BYTES) + b"E", b"\0" * 1000]
    for words in said:
        for port in (facts.rendezvous_port, facts.ephemeral_port):
            answered: bytes = await other.there(lambda words=words, port=port: stranger(words, port=port))
            assert answered == b""

    async def flood() -> list[Any]:
        return await asyncio.gather(
            *(stranger(b"", port=facts.ephemeral_port) for _ in range(600)), return_exceptions=True
        )

    await other.there(flood)
    await target.stop()
    _, findings = await look(five[:2])
    assert findings == []


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_of_sixteen_hosts_that_are_well_nothing_is_ever_said() -> None:
    with hosts(16) as members:
        for number in range(20):
            _, findings = await look(members)
            # Sixteen hosts in one process may be too slow for the limit: that is no alarm about the network.
            alarms = [f.message for f in findings if f.kind is not FindingKind.NOT_MEASURED]
            assert alarms == [], f"check {number}"
