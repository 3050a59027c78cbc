"""The coordinator's shell with a real checkpoint store: parts in, a manifest out, whatever the store does meanwhile."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from coordinator.checkpoint_store import CheckpointStore
from coordinator.coordinator import Coordinator
from coordinator.core.effects import OrderMember
from coordinator.core.events import BarrierOpened, LeaseLapsed
from coordinator.journal import SqlJournal
from mesh.blob_store import BlobStore
from mesh.checkpoint_format import FileKind, FileRecord, Manifest, Part, blob_key, part_key
from mesh.errors import CheckpointStoreError
from mesh.ids import Incarnation, RunName, RunUid
from mesh.messages import (
    CheckpointPartAnswered,
    CheckpointPartStored,
    JoinOrder,
    MemberFenced,
    MemberStarted,
)
from mesh.plan import Endpoint, RunPlan
from mesh.resources import CheckpointStatus
from tests.fakes.fleet import FakeFleet, FakeStore

NOWHERE = Endpoint(host="127.0.0.1", port=1, secret="s")


def _join_order(plan: RunPlan, effect: OrderMember) -> JoinOrder:
    return JoinOrder(
        incarnation=effect.incarnation, plan=plan, machine=effect.machine, store=NOWHERE, logs=NOWHERE,
        is_clean_start=effect.is_clean_start, restore=effect.restore,
    )  # fmt: skip


class Away(BlobStore):
    """A store whose next calls fail."""

    failures = 0

    def create_bytes(self, key: str, data: bytes) -> None:
        if self.failures:
            self.failures -= 1
            raise CheckpointStoreError("The store is away.")
        super().create_bytes(key, data)

    def remove_below(self, prefix: str) -> None:
        if self.failures:
            self.failures -= 1
            raise CheckpointStoreError("The store is away.")
        super().remove_below(prefix)


class Bench:
    """One coordinator at a time over one journal and one store; two machines and a spare one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fleet = FakeFleet(3)
        self.store = FakeStore()
        self.blobs = Away(f"file://{folder}/store")
        self.uid = RunUid("")
        self.coordinator = self._make()

    def _make(self) -> Coordinator:
        return Coordinator(
            journal=SqlJournal(f"sqlite:///{self.folder}/journal.db"), fleet=self.fleet, store=self.store,
            join_order=_join_order, deployment={"version": "0", "local": True},
            checkpoints=CheckpointStore(self.blobs.url, blobs=self.blobs),
        )  # fmt: skip

    async def restart(self) -> None:
        await self.coordinator.stop()
        self.coordinator = self._make()
        await self.coordinator.start()

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(30):
            while not holds():
                await asyncio.sleep(0.002)

    async def run(self) -> list[Incarnation]:
        """Submits a run and starts its ranks."""
        plan = RunPlan(name=RunName("a"), command=("true",), nodes=2)
        await self.coordinator.submit({"spec": {}}, plan.to_record(), None)
        return await self.start_all(orders=2)

    async def start_all(self, *, orders: int) -> list[Incarnation]:
        await self.until(lambda: len(self.fleet.orders) >= orders)
        members = sorted((o.incarnation for o in self.fleet.orders[-2:]), key=lambda i: i.rank)
        self.uid, epoch = members[0].run_uid, members[0].epoch
        self.store.opened.add((self.uid, epoch))
        self.coordinator.post(self.uid, BarrierOpened(epoch=epoch))
        for member in members:
            await self.coordinator.report(
                MemberStarted(incarnation=member, at=time.time(), pid=1, master_port=29500)
            )
        return members

    def stored(self, content: str) -> Part:
        data = content.encode()
        sha256 = hashlib.sha256(data).hexdigest()
        self.blobs.put_bytes(blob_key(self.uid, sha256), data)
        file = FileRecord(path="a.pt", kind=FileKind.FILE, mode=0o644, size=len(data), sha256=sha256)
        part = Part(files=(file,))
        self.blobs.put_bytes(part_key(self.uid, part.digest), part.encode())
        return part

    async def report(self, member: Incarnation, part: Part, *, number: int, steps: tuple[int, ...]) -> None:
        await self.coordinator.report(
            CheckpointPartStored(
                incarnation=member, at=time.time(), number=number, digest=part.digest, content=part.digest, steps=steps,
                files=len(part.files), size_bytes=part.size_bytes,
            )
        )  # fmt: skip

    async def newest(self) -> CheckpointStatus | None:
        return (await self.coordinator.get_run("a"))["status"]["checkpoint"]

    async def until_committed(self, step: int | None) -> CheckpointStatus:
        async with asyncio.timeout(30):
            while (newest := await self.newest()) is None or newest["step"] != step:
                await asyncio.sleep(0.002)
            return newest


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    await made.coordinator.start()
    yield made
    await made.coordinator.stop()


async def test_parts_of_one_step_become_a_checkpoint_that_the_next_epoch_begins_from(bench: Bench) -> None:
    zero, one = await bench.run()
    assert await bench.newest() is None
    assert [order.is_clean_start for order in bench.fleet.orders] == [False, False]
    await bench.report(zero, bench.stored("zero"), number=1, steps=(100,))
    await bench.report(one, bench.stored("one"), number=1, steps=(100,))
    newest = await bench.until_committed(100)
    assert (newest["id"], newest["epoch"], newest["bytes"]) == ("e1-c000001", 1, 7)
    key = newest["uri"].removeprefix(f"{bench.blobs.url}/")
    assert Manifest.decode(bench.blobs.get_bytes(key, bytes_max=1 << 20)).world_size == 2
    bench.coordinator.post(bench.uid, LeaseLapsed(incarnation=one))
    await bench.until(lambda: bench.fleet.fences)
    await bench.coordinator.report(MemberFenced(incarnation=zero, at=time.time()))
    await bench.until(lambda: len(bench.fleet.orders) >= 4)
    for order in bench.fleet.orders[2:]:
        assert order.is_clean_start
        assert order.restore is not None
        assert (order.restore.uri, order.restore.step) == (newest["uri"], 100)


async def test_a_store_that_is_away_is_tried_until_it_is_back(bench: Bench) -> None:
    zero, one = await bench.run()
    bench.blobs.failures = 3
    await bench.report(zero, bench.stored("zero"), number=1, steps=(1,))
    await bench.report(one, bench.stored("one"), number=1, steps=(1,))
    await bench.until_committed(1)
    assert bench.blobs.failures == 0


async def test_a_coordinator_that_dies_before_the_manifest_is_written_writes_it_afterwards(
    bench: Bench,
) -> None:
    zero, one = await bench.run()
    bench.blobs.failures = 1_000_000
    await bench.report(zero, bench.stored("zero"), number=1, steps=(1,))
    await bench.report(one, bench.stored("one"), number=1, steps=(1,))
    await bench.until(lambda: bench.blobs.failures < 1_000_000)
    await bench.restart()
    assert await bench.newest() is None
    bench.blobs.failures = 0
    assert (await bench.until_committed(1))["id"] == "e1-c000001"


async def test_a_part_that_the_store_has_lost_is_told_and_taken_again(bench: Bench) -> None:
    zero, one = await bench.run()
    gone = bench.stored("gone")
    bench.blobs.remove([blob_key(bench.uid, gone.files[0].sha256)])
    await bench.report(zero, bench.stored("zero"), number=1, steps=(1,))
    await bench.report(one, gone, number=1, steps=(1,))
    await bench.until(lambda: bench.fleet.about_parts)
    (order,) = bench.fleet.about_parts
    assert (order.incarnation, order.digest, order.question) == (one, gone.digest, None)
    await bench.report(one, bench.stored("gone"), number=2, steps=(1,))
    await bench.until_committed(1)


async def test_ranks_without_a_step_are_asked_and_their_word_counts(bench: Bench) -> None:
    zero, one = await bench.run()
    await bench.report(zero, bench.stored("zero"), number=1, steps=())
    await bench.report(one, bench.stored("one"), number=1, steps=())
    await bench.until(lambda: len(bench.fleet.about_parts) == 2)
    for order in bench.fleet.about_parts:
        assert order.question == 1
        await bench.coordinator.report(
            CheckpointPartAnswered(
                incarnation=order.incarnation, at=time.time(), question=1, digest=order.digest, holds=True
            )
        )
    assert (await bench.until_committed(None))["id"] == "e1-c000001"


async def test_what_is_not_kept_any_more_goes_from_the_store_and_all_of_it_with_the_run(bench: Bench) -> None:
    zero, one = await bench.run()
    for step in range(1, 6):
        await bench.report(zero, bench.stored(f"zero {step}"), number=step, steps=(step,))
        await bench.report(one, bench.stored(f"one {step}"), number=step, steps=(step,))
        await bench.until_committed(step)
    place = f"runs/{bench.uid}"

    def manifests() -> list[str]:
        return [fact.key for fact in bench.blobs.list_below(f"{place}/checkpoints")]

    await bench.until(lambda: manifests() == [f"{place}/checkpoints/00000{n}.json" for n in (3, 4, 5)])
    await bench.coordinator.cancel("a", "enough")
    await bench.until(lambda: bench.fleet.fences)
    for member in (zero, one):
        await bench.coordinator.report(MemberFenced(incarnation=member, at=time.time()))
    bench.blobs.failures = 1
    await bench.coordinator.delete("a")
    await bench.until(lambda: not bench.blobs.failures)
    assert bench.blobs.list_below(place), "the store was away"
    await bench.restart()
    await bench.until(lambda: bench.blobs.list_below(place) == [])
