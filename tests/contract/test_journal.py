"""What every journal must do, on SQLite and (where a server can be started) on PostgreSQL."""

import asyncio
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.core.effects import Announcement
from coordinator.core.gang_record import gang_of, record_of
from coordinator.core.gang_state import Gang
from coordinator.journal import RunRow, SqlJournal
from mesh.errors import ConflictError, SpecError, StorageError
from mesh.ids import Epoch, Rank, RunName, RunUid
from mesh.plan import RunPlan
from mesh.reasons import Reason


def _row(uid: str, name: str, created_at: float = 1.0) -> RunRow:
    gang = Gang(uid=RunUid(uid), plan=RunPlan(name=RunName(name), command=("true",)), created_at=created_at)
    return RunRow(
        uid=gang.uid, name=name, job={"spec": {"x": "ü\n"}}, record=record_of(gang), created_at=created_at
    )


def _said(message: str) -> Announcement:
    return Announcement(kind="Said", message=message, epoch=Epoch(1), rank=Rank(0), reason=Reason.COMPLETED)


def _find_postgres() -> tuple[str, str] | None:
    for folder in [*map(str, Path("/usr/lib/postgresql").glob("*/bin")), *os.get_exec_path()]:
        initdb, postgres = Path(folder) / "initdb", Path(folder) / "postgres"
        if initdb.exists() and postgres.exists():
            return str(initdb), str(postgres)
    return None


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    """A PostgreSQL server of the test's own, on a socket in a private folder."""
    found = _find_postgres()
    if found is None:
        pytest.skip("PostgreSQL's server is not installed here")
    pytest.importorskip("asyncpg", reason="the extra 'postgres' is not installed")
    initdb, postgres = found
    user = "nobody" if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="gm-pg-"))
    if user:
        shutil.chown(folder, user)
    data = folder / "data"
    subprocess.run(
        [initdb, "-D", data, "-U", "mesh", "-A", "trust", "--no-sync"],
        check=True, user=user, cwd=folder, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    server = subprocess.Popen(
        [postgres, "-D", data, "-k", str(folder), "-c", "listen_addresses=", "-c", "fsync=off"],
        user=user, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stderr is not None
        for line in server.stderr:
            if "ready to accept connections" in line:
                break
        yield f"postgresql://mesh@/postgres?host={folder}"
    finally:
        server.terminate()
        server.wait(timeout=20)
        assert server.stderr is not None
        server.stderr.close()
        shutil.rmtree(folder)


@pytest.fixture(params=["sqlite", "postgres"])
async def journal(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SqlJournal]:
    urls = {"sqlite": lambda: f"sqlite:///{tmp_path}/journal.db"}
    url = urls.get(request.param, lambda: request.getfixturevalue("postgres_url"))()
    journal = SqlJournal(url)
    await journal.open()
    for row in await journal.runs():
        await journal.delete_run(row.uid, 2.0)
    yield journal
    await journal.close()


async def test_a_run_comes_back_as_it_was_written(journal: SqlJournal) -> None:
    row = _row(os.urandom(8).hex(), "alpha")
    assert await journal.create_run(row, request_id=None) == row
    assert await journal.runs() == [row]


async def test_a_name_belongs_to_one_undeleted_run(journal: SqlJournal) -> None:
    first = _row(os.urandom(8).hex(), "twin")
    await journal.create_run(first, request_id=None)
    with pytest.raises(ConflictError) as caught:
        await journal.create_run(_row(os.urandom(8).hex(), "twin"), request_id=None)
    assert caught.value.reason is Reason.ALREADY_EXISTS
    assert "mesh delete twin" in caught.value.hint
    await journal.delete_run(first.uid, 3.0)
    second = _row(os.urandom(8).hex(), "twin")
    await journal.create_run(second, request_id=None)
    assert await journal.runs() == [second]


async def test_a_repeated_request_finds_its_first_run(journal: SqlJournal) -> None:
    request_id = os.urandom(8).hex()
    first = _row(os.urandom(8).hex(), "once")
    await journal.create_run(first, request_id=request_id)
    again = await journal.create_run(_row(os.urandom(8).hex(), "once"), request_id=request_id)
    assert again.uid == first.uid


async def test_a_deleted_runs_variables_are_not_kept(journal: SqlJournal) -> None:
    """They are often secrets. What else is kept answers a request that is repeated."""
    plan = RunPlan(name=RunName("private"), command=("true",), env=(("KEY", "a secret"),))
    gang = Gang(uid=RunUid(os.urandom(8).hex()), plan=plan, created_at=1.0)
    job = {"spec": {"command": ["true"], "env": {"KEY": "a secret"}}}
    row = RunRow(uid=gang.uid, name="private", job=job, record=record_of(gang), created_at=1.0)
    request_id = os.urandom(8).hex()
    await journal.create_run(row, request_id=request_id)
    await journal.delete_run(row.uid, 2.0)
    kept = await journal.create_run(row, request_id=request_id)
    assert gang_of(kept.record).plan == replace(plan, env=())
    assert kept.job == {"spec": {"command": ["true"]}}


async def test_a_commit_replaces_the_record_and_adds_the_events_in_order(journal: SqlJournal) -> None:
    row = _row(os.urandom(8).hex(), "beta")
    other = _row(os.urandom(8).hex(), "gamma", created_at=2.0)
    await journal.create_run(row, request_id=None)
    await journal.create_run(other, request_id=None)
    before = max((e.seq for e in await journal.events(after=0, uid=None, limit=1000)), default=0)
    await journal.commit(row.uid, {**row.record, "epoch": 7}, [_said("one"), _said("two")], 5.0)
    await journal.commit(other.uid, other.record, [_said("three")], 6.0)
    assert (await journal.runs())[0].record["epoch"] == 7
    events = await journal.events(after=before, uid=None, limit=10)
    assert [(e.run, e.message) for e in events] == [("beta", "one"), ("beta", "two"), ("gamma", "three")]
    assert [e.seq for e in events] == sorted(e.seq for e in events)
    assert (events[0].reason, events[0].rank, events[0].epoch, events[0].at) == ("Completed", 0, 1, 5.0)
    assert [e.message for e in await journal.events(after=events[0].seq, uid=row.uid, limit=10)] == ["two"]
    assert len(await journal.events(after=before, uid=None, limit=2)) == 2


async def test_a_text_is_kept_under_its_name_in_place_of_the_last_one(journal: SqlJournal) -> None:
    assert await journal.kept("paths") is None
    for text in ("[1]", "[2]"):
        await journal.keep("paths", text)
    await journal.keep("schema", "no number")
    assert await journal.kept("paths") == "[2]"
    await journal.close()
    await journal.open()
    assert (await journal.kept("paths"), await journal.kept("schema")) == ("[2]", "no number")


async def test_what_was_committed_is_there_for_the_next_process(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/journal.db"
    first = SqlJournal(url)
    await first.open()
    row = _row("00000000000000bb", "kept")
    await first.create_run(row, request_id=None)
    second = SqlJournal(url)  # the first one never closed: it crashed
    await second.open()
    assert await second.runs() == [row]
    await second.close()
    await first.close()


async def test_a_change_does_not_write_what_never_changes(tmp_path: Path) -> None:
    """A megabyte of environment with every change would make every gang of the deployment wait."""
    journal = SqlJournal(f"sqlite:///{tmp_path}/journal.db")
    await journal.open()
    env = tuple((f"V{number}", "x" * 100_000) for number in range(10))
    plan = RunPlan(name=RunName("big"), command=("true",), env=env)
    gang = Gang(uid=RunUid("b1" * 8), plan=plan, created_at=1.0)
    record = record_of(gang)
    row = RunRow(uid=gang.uid, name="big", job={"spec": {"env": dict(env)}}, record=record, created_at=1.0)
    await journal.create_run(row, request_id=None)
    wal = tmp_path / "journal.db-wal"
    before = wal.stat().st_size
    for number in range(20):
        await journal.commit(gang.uid, {**record, "message": "m" * number}, [], 2.0)
    assert wal.stat().st_size - before < 1_000_000
    await journal.close()


async def test_a_full_disk_is_said_and_reading_goes_on(tmp_path: Path) -> None:
    """SQLite's own page limit stands for the disk: it fails with the same error at the same place."""
    journal = SqlJournal(f"sqlite:///{tmp_path}/journal.db")
    await journal.open()
    row = _row("00000000000000cc", "big")
    await journal.create_run(row, request_id=None)
    async with journal._transaction() as connection:
        pages = (await connection.exec_driver_sql("PRAGMA page_count")).scalar()
        await connection.exec_driver_sql(f"PRAGMA max_page_count={pages}")
    with pytest.raises(StorageError) as caught:
        await journal.commit(row.uid, {**row.record, "message": "x" * 1_000_000}, [], 1.0)
    assert caught.value.reason is Reason.STORAGE_FULL
    assert await journal.runs() == [row]
    async with journal._transaction() as connection:
        await connection.exec_driver_sql("PRAGMA max_page_count=100000")
    await journal.commit(row.uid, {**row.record, "message": "x"}, [], 1.0)
    await journal.close()


@pytest.mark.parametrize("damage", ["its beginning is overwritten", "its end is missing"])
async def test_a_damaged_file_is_said_and_what_to_do(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "journal.db"
    journal = SqlJournal(f"sqlite:///{file}")
    await journal.open()
    await journal.close()
    whole = file.read_bytes()
    file.write_bytes(b"?" * 100 + whole[100:] if damage == "its beginning is overwritten" else whole[:5000])
    with pytest.raises(StorageError, match="journal is damaged") as caught:
        await journal.open()
    assert "Put a copy of it back" in caught.value.hint
    file.write_bytes(whole)
    await journal.open()
    await journal.close()


async def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    journal = SqlJournal(f"sqlite:///{tmp_path}/nowhere/journal.db")
    with pytest.raises(StorageError) as caught:
        await journal.open()
    assert caught.value.reason is Reason.STATE_NOT_WRITABLE
    # aiosqlite's thread says goodbye to this loop, which must still be there.
    async with asyncio.timeout(10):
        while any("_connection_worker_thread" in thread.name for thread in threading.enumerate()):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("url", ["mysql://me:secret@host/x", "nonsense", "oracle://x"])
def test_a_database_of_another_kind_is_refused_without_showing_its_password(url: str) -> None:
    with pytest.raises(SpecError) as caught:
        SqlJournal(url)
    assert "sqlite" in str(caught.value) and "secret" not in str(caught.value)
