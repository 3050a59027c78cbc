"""The journal in SQL: SQLite (WAL, every commit synced) or PostgreSQL, through SQLAlchemy's async core.

SQLite's `synchronous=FULL` is what makes a commit in WAL mode survive the loss of power
(https://www.sqlite.org/pragma.html#pragma_synchronous).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from coordinator.core.effects import Announcement
from coordinator.journal.base import EventRow, RunRow
from mesh.errors import ConflictError, SpecError, StorageError
from mesh.ids import RunUid
from mesh.reasons import Reason

SCHEMA_VERSION = 4
_DRIVERS = {
    "sqlite": "sqlite+aiosqlite",
    "sqlite+aiosqlite": "sqlite+aiosqlite",
    "postgresql": "postgresql+asyncpg",
    "postgresql+asyncpg": "postgresql+asyncpg",
    "postgres": "postgresql+asyncpg",
}

_metadata = sa.MetaData()

_meta = sa.Table(
    "meta",
    _metadata,
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)

_KEPT = "kept/"
"""Before the names of texts that are kept beside the schema's number."""

_runs = sa.Table(
    "runs",
    _metadata,
    sa.Column("uid", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("request_id", sa.Text, unique=True),
    sa.Column("record", sa.Text, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("deleted_at", sa.Float),
)
_submitted = sa.Table(
    "submitted",
    _metadata,
    sa.Column("uid", sa.Text, primary_key=True),
    sa.Column("job", sa.Text, nullable=False),
    sa.Column("plan", sa.Text, nullable=False),
)
"""What never changes of a run. Apart, because a change of a row writes all of it, and this may hold a megabyte."""
_whole_run = sa.select(_runs, _submitted.c.job, _submitted.c.plan).join_from(
    _runs, _submitted, _runs.c.uid == _submitted.c.uid, isouter=True
)
_uncleared = sa.Table("uncleared", _metadata, sa.Column("uid", sa.Text, primary_key=True))
"""Deleted runs of which something is still outside the journal."""
_is_live = _runs.c.deleted_at.is_(None)
sa.Index("runs_live_name", _runs.c.name, unique=True, sqlite_where=_is_live, postgresql_where=_is_live)

_events = sa.Table(
    "events",
    _metadata,
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("uid", sa.Text, nullable=False, index=True),
    sa.Column("run", sa.Text, nullable=False),
    sa.Column("epoch", sa.Integer, nullable=False),
    sa.Column("rank", sa.Integer),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("reason", sa.Text),
    sa.Column("message", sa.Text, nullable=False),
    sqlite_autoincrement=True,
)


class SqlJournal:
    """A `Journal` behind a database URL.

    Args:
        url: `sqlite+aiosqlite:///path`, `sqlite:///path`, `postgresql://…` or `postgresql+asyncpg://…`.
    """

    def __init__(self, url: str) -> None:
        self._url = journal_url(url)
        self._engine: AsyncEngine | None = None
        self._is_sqlite = self._url.get_backend_name() == "sqlite"

    async def open(self) -> None:
        if self._is_sqlite:
            # One connection, lent to one transaction at a time: SQLite has one writer anyway, and reads
            # here are short.
            self._engine = create_async_engine(
                self._url, poolclass=sa.AsyncAdaptedQueuePool, pool_size=1, max_overflow=0
            )
            sa.event.listen(self._engine.sync_engine, "connect", _prepare_sqlite)
        else:
            self._engine = create_async_engine(self._url, pool_pre_ping=True)
        try:
            await self._make_tables()
        except StorageError:
            await self.close()
            raise

    async def _make_tables(self) -> None:
        async with self._transaction() as connection:
            await connection.run_sync(_metadata.create_all)
            found = (
                await connection.execute(sa.select(_meta.c.value).where(_meta.c.key == "schema"))
            ).scalar()
            if found is None:
                await connection.execute(_meta.insert().values(key="schema", value=str(SCHEMA_VERSION)))
            elif int(found) != SCHEMA_VERSION:
                raise StorageError(
                    f"The journal has schema {found}; this version reads schema {SCHEMA_VERSION}.",
                    hint="Use the version of gangmesh that wrote it, or another state folder.",
                    reason=Reason.STATE_NOT_WRITABLE,
                )

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.dispose()
            self._engine = None

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[AsyncConnection]:
        """One transaction; what the database cannot do becomes a StorageError."""
        if self._engine is None:
            raise StorageError("The journal is not open.", reason=Reason.INTERNAL)
        try:
            async with self._engine.begin() as connection:
                yield connection
        except IntegrityError:
            raise
        except DBAPIError as error:
            raise _storage_error(error.orig or error) from error
        except (SQLAlchemyError, OSError) as error:
            raise _storage_error(error) from error

    async def create_run(self, row: RunRow, *, request_id: str | None) -> RunRow:
        try:
            async with self._transaction() as connection:
                if request_id is not None:
                    earlier = (
                        await connection.execute(_whole_run.where(_runs.c.request_id == request_id))
                    ).first()
                    if earlier is not None:
                        return _run_row(earlier)
                await connection.execute(
                    _runs.insert().values(
                        uid=row.uid,
                        name=row.name,
                        request_id=request_id,
                        record=_changing_part(row.record),
                        created_at=row.created_at,
                    )
                )
                job, plan = json.dumps(row.job), json.dumps(row.record["plan"])
                await connection.execute(_submitted.insert().values(uid=row.uid, job=job, plan=plan))
        except IntegrityError as error:
            raise ConflictError(
                f"There is a run named '{row.name}' already.",
                hint=f"Choose another --name, or remove it first: mesh delete {row.name}",
                reason=Reason.ALREADY_EXISTS,
                name=row.name,
            ) from error
        return row

    async def commit(
        self, uid: RunUid, record: dict[str, Any], announcements: Sequence[Announcement], at: float
    ) -> None:
        async with self._transaction() as connection:
            await connection.execute(
                _runs.update().where(_runs.c.uid == uid).values(record=_changing_part(record))
            )
            if announcements:
                await connection.execute(
                    _events.insert(),
                    [
                        {
                            "at": at,
                            "uid": uid,
                            "run": record["plan"]["name"],
                            "epoch": a.epoch,
                            "rank": a.rank,
                            "kind": a.kind,
                            "reason": None if a.reason is None else str(a.reason),
                            "message": a.message,
                        }
                        for a in announcements
                    ],
                )

    async def runs(self) -> list[RunRow]:
        async with self._transaction() as connection:
            query = _whole_run.where(_is_live).order_by(_runs.c.created_at, _runs.c.uid)
            return [_run_row(row) for row in await connection.execute(query)]

    async def delete_run(self, uid: RunUid, at: float) -> None:
        async with self._transaction() as connection:
            deleting = _runs.update().where(_runs.c.uid == uid, _is_live).values(deleted_at=at)
            if (await connection.execute(deleting)).rowcount:
                await connection.execute(_uncleared.insert().values(uid=uid))
            is_its = _submitted.c.uid == uid
            found = (await connection.execute(sa.select(_submitted).where(is_its))).first()
            if found is not None:  # the rest stays, for a request that is repeated
                job, plan = _read(found.job), {**_read(found.plan), "env": []}
                if isinstance(spec := job.get("spec"), dict):
                    spec.pop("env", None)
                changed = _submitted.update().where(is_its)
                await connection.execute(changed.values(job=json.dumps(job), plan=json.dumps(plan)))
            await connection.execute(_events.delete().where(_events.c.uid == uid))

    async def uncleared(self) -> list[RunUid]:
        async with self._transaction() as connection:
            return [RunUid(row.uid) for row in await connection.execute(sa.select(_uncleared))]

    async def cleared(self, uid: RunUid) -> None:
        async with self._transaction() as connection:
            await connection.execute(_uncleared.delete().where(_uncleared.c.uid == uid))

    async def keep(self, name: str, text: str) -> None:
        key = _KEPT + name
        async with self._transaction() as connection:
            await connection.execute(_meta.delete().where(_meta.c.key == key))
            await connection.execute(_meta.insert().values(key=key, value=text))

    async def kept(self, name: str) -> str | None:
        query = sa.select(_meta.c.value).where(_meta.c.key == _KEPT + name)
        async with self._transaction() as connection:
            text: str | None = (await connection.execute(query)).scalar()
            return text

    async def events(self, *, after: int, uid: RunUid | None, limit: int) -> list[EventRow]:
        query = sa.select(_events).where(_events.c.seq > after).order_by(_events.c.seq).limit(limit)
        if uid is not None:
            query = query.where(_events.c.uid == uid)
        async with self._transaction() as connection:
            return [
                EventRow(
                    seq=r.seq,
                    at=r.at,
                    uid=RunUid(r.uid),
                    run=r.run,
                    epoch=r.epoch,
                    rank=r.rank,
                    kind=r.kind,
                    reason=r.reason,
                    message=r.message,
                )
                for r in await connection.execute(query)
            ]


def journal_url(text: str) -> sa.URL:
    """The database that `--db` names, with the driver that we use. Raises SpecError for any other kind."""
    try:
        url = sa.make_url(text)
    except ArgumentError:
        url = None
    driver = None if url is None else _DRIVERS.get(url.drivername)
    if url is None or driver is None:
        # The URL may hold a password: only its kind is shown.
        raise SpecError(
            f"--db takes sqlite:///PATH or postgresql://…; got one of kind '{text.partition(':')[0][:40]}'.",
            hint="Leave it out to keep the journal in the state folder.",
            field="--db",
        )
    return url.set(drivername=driver)


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=5000", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _changing_part(record: dict[str, Any]) -> str:
    """A record without its plan, which never changes and may hold a megabyte of environment."""
    return json.dumps({key: value for key, value in record.items() if key != "plan"})


def _run_row(row: Any) -> RunRow:
    record = _read(row.record)
    return RunRow(
        uid=RunUid(row.uid),
        name=row.name,
        job=_read(row.job),
        record={**record, "plan": _read(row.plan)} if record else record,
        created_at=row.created_at,
    )


def _read(text: str | None) -> dict[str, Any]:
    """Empty when this is no object in JSON: one row that was damaged is for whoever looks at that row."""
    try:
        value = json.loads(text or "")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {}


def _storage_error(error: BaseException) -> StorageError:
    text = str(error)
    if "full" in text or "No space" in text:
        return StorageError(
            f"The journal cannot be written: {text}.",
            hint="Free some space on the disk that holds the state folder; nothing was accepted meanwhile.",
        )
    if "malformed" in text or "not a database" in text:
        return StorageError(
            f"The journal is damaged: {text}.",
            hint="Put a copy of it back, its -wal first. Or move it away, with its -wal and -shm, to begin with an "
            "empty one: its runs are ended and forgotten then; what they printed and saved stays in its folders.",
            reason=Reason.STATE_NOT_WRITABLE,
        )
    return StorageError(
        f"The journal cannot be used: {text}.",
        hint="Check the database given with --db, or the state folder.",
        reason=Reason.STATE_NOT_WRITABLE,
    )
