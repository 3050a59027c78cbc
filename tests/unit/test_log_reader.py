"""Reading a run's output: merged, from a cursor, from the end, as it comes. Cases of the field: 25, 34, 37."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.logs.reader import TAIL_LINES_MAX, LogReader
from coordinator.logs.store import LogStore
from mesh.errors import NotFoundError, SpecError, TransportError
from tests.fakes.log_stream import UID, Piece, err, incarnation, out, records, write_attempt

LIMIT_S = 20.0


class Run:
    """A run whose end the test decides."""

    def __init__(self, root: Path) -> None:
        self.store = LogStore(root)
        self.folder = root / UID
        self.ended = False
        self.failure: Exception | None = None
        self.reader = LogReader(self.store, is_ended=self.is_ended)

    async def is_ended(self, uid: str) -> bool:
        if self.failure is not None:
            raise self.failure
        return self.ended

    def print(
        self, pieces: list[Piece], *, rank: int = 0, epoch: int = 1, at: float = 100.0, ended: bool = False
    ) -> None:
        write_attempt(self.folder, pieces, rank=rank, epoch=epoch, at=at, ended=ended)
        self.store.notify(UID)

    def end(self) -> None:
        self.ended = True
        self.store.notify(UID)

    async def lines(self, **options: Any) -> list[dict[str, Any]]:
        async with asyncio.timeout(LIMIT_S):
            return [line async for line in self.reader.lines(UID, **options)]

    async def texts(self, **options: Any) -> list[str]:
        return [line["text"] for line in await self.lines(**options)]


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    run = Run(tmp_path / "logs")
    yield run
    run.store.close()


class Follower:
    """Follows in the background, so that the test can wait for what it has seen."""

    def __init__(self, run: Run, **options: Any) -> None:
        self.seen: list[dict[str, Any]] = []
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._follow(run, options))

    async def _follow(self, run: Run, options: dict[str, Any]) -> None:
        async for line in run.reader.lines(UID, follow=True, **options):
            self.seen.append(line)
            self._changed.set()

    async def until(self, condition: Callable[[list[dict[str, Any]]], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition(self.seen):
                self._changed.clear()
                await self._changed.wait()

    async def sees(self, text: str) -> None:
        await self.until(lambda seen: any(line["text"] == text for line in seen))

    async def end(self) -> list[str]:
        """Waits for its end; the lines without the previews."""
        async with asyncio.timeout(LIMIT_S):
            await self._task
        return [line["text"] for line in self.seen if not line["partial"]]

    def stop(self) -> None:
        self._task.cancel()


async def test_a_line_says_all_that_is_known_of_it(run: Run) -> None:
    run.print(err("oh no\n"), rank=3, epoch=2, at=100.0)
    (line,) = await run.lines()
    cursor = line.pop("cursor")
    assert isinstance(cursor, str)
    assert line == {
        "at": 100.0,
        "rank": 3,
        "epoch": 2,
        "stream": "stderr",
        "text": "oh no",
        "partial": False,
        "continued": False,
    }


async def test_a_run_that_has_printed_nothing_has_no_lines(run: Run) -> None:
    assert await run.lines() == []
    assert await run.reader.last_output_at(UID) == {}


@pytest.mark.parametrize("uid", ["../../etc", "", "UPPER", "a/b", "..", "a\n"])
async def test_what_is_no_uid_is_no_path(run: Run, uid: str) -> None:
    with pytest.raises(NotFoundError):
        [line async for line in run.reader.lines(uid)]
    with pytest.raises(NotFoundError):
        await run.reader.delete(uid)


async def test_ranks_are_merged_by_time(run: Run) -> None:
    run.print(out("a0\n", "a1\n", "a2\n"), rank=0, at=100.0)
    run.print(out("b0\n", "b1\n", "b2\n"), rank=1, at=100.5)
    assert await run.texts() == ["a0", "b0", "a1", "b1", "a2", "b2"]


async def test_epochs_do_not_mix_whatever_the_clocks_say(run: Run) -> None:
    run.print(out("late clock\n"), rank=0, epoch=1, at=999.0)
    run.print(out("early clock\n"), rank=1, epoch=2, at=1.0)
    assert await run.texts() == ["late clock", "early clock"]


async def test_a_clock_that_steps_back_does_not_reorder_a_rank(run: Run) -> None:
    run.print(out("one\n"), at=200.0)
    run.print(out("two\n"), at=50.0)
    run.print(out("three\n"), at=300.0)
    assert await run.texts() == ["one", "two", "three"]


async def test_only_one_rank_or_one_epoch(run: Run) -> None:
    for epoch, rank in itertools.product((1, 2), (0, 1)):
        run.print(out(f"{epoch}-{rank}\n"), rank=rank, epoch=epoch)
    assert await run.texts(rank=1) == ["1-1", "2-1"]
    assert await run.texts(epoch=2) == ["2-0", "2-1"]
    assert await run.texts(rank=0, epoch=1) == ["1-0"]


@pytest.mark.parametrize("tail", [0, 1, 2, 3, 5, 100])
async def test_the_last_lines_of_all_ranks_together(run: Run, tail: int) -> None:
    run.print(out("a0\n", "a1\n", "a2\n"), rank=0, at=100.0)
    run.print(out("b0\n", "b1\n"), rank=1, at=100.5)
    run.print(out("c0\n"), rank=0, epoch=2, at=200.0)
    everything = await run.texts()
    assert await run.texts(tail=tail) == everything[len(everything) - min(tail, len(everything)) :]


@pytest.mark.parametrize("tail", [-1, TAIL_LINES_MAX + 1])
async def test_a_tail_out_of_range_is_refused(run: Run, tail: int) -> None:
    with pytest.raises(SpecError) as caught:
        await run.lines(tail=tail)
    assert caught.value.details["field"] == "tail"


async def test_the_last_words_without_a_newline_count_as_a_last_line(run: Run) -> None:
    run.print([*out("step 1\n"), *err("FATAL xyz")], ended=True)
    assert await run.texts(tail=1) == ["FATAL xyz"]


async def test_reading_on_from_any_line_gives_exactly_the_rest(run: Run) -> None:
    for epoch, rank in itertools.product((1, 2), (0, 1)):
        pieces = [*out("one\ntw"), *err("bad "), *out("o\nthree"), *err("news\n"), *out("\n", "end")]
        run.print(pieces, rank=rank, epoch=epoch, at=100.0 + rank / 2, ended=epoch == 1)
    run.ended = True
    everything = await run.lines()
    assert len(everything) == 20
    for index, line in enumerate(everything):
        rest = await run.lines(cursor=line["cursor"])
        assert [r["text"] for r in rest] == [r["text"] for r in everything[index + 1 :]]


async def test_a_cursor_goes_before_a_tail(run: Run) -> None:
    run.print(out("a\n", "b\n", "c\n"))
    first = (await run.lines())[0]
    assert await run.texts(cursor=first["cursor"], tail=1) == ["b", "c"]


async def test_a_follower_sees_what_comes_and_ends_with_the_run(run: Run) -> None:
    run.print(out("early\n"))
    follower = Follower(run)
    await follower.sees("early")
    run.print(out("late\n"))
    await follower.sees("late")
    run.print([], ended=True)
    run.end()
    assert await follower.end() == ["early", "late"]


async def test_a_follower_that_comes_before_the_first_word_misses_nothing(run: Run) -> None:
    follower = Follower(run)
    run.print(out("hello\n"), ended=True)
    await follower.sees("hello")
    run.end()
    assert await follower.end() == ["hello"]


async def test_what_was_written_just_before_the_end_is_still_given(run: Run) -> None:
    follower = Follower(run)
    run.print(out("one\n"))
    await follower.sees("one")
    run.ended = True  # not told: the follower finds out on its own
    write_attempt(run.folder, out("last\n"), ended=False)
    assert (await follower.end())[:1] == ["one"]
    assert "last" in [line["text"] for line in follower.seen]


async def test_a_replaced_rank_of_the_next_epoch_is_seen_from_its_first_line(run: Run) -> None:
    run.print([*out("step 1\n"), *err("FATAL xyz")], rank=1, epoch=1)
    follower = Follower(run)
    await follower.sees("FATAL xyz")
    run.print(out("banner\n"), rank=1, epoch=2, at=500.0, ended=True)
    await follower.sees("banner")
    run.end()
    followed = await follower.end()
    assert await run.texts() == followed == ["step 1", "FATAL xyz", "banner"]


async def test_following_and_fetching_afterwards_give_the_same_lines_for_each_rank(run: Run) -> None:
    follower = Follower(run)
    for step in range(20):
        for rank in (0, 1):
            run.print([*out(f"step {step}\n"), *err(f"\rbar {step}")], rank=rank, at=100.0 + step)
        await follower.until(
            lambda seen, step=step: sum(line["text"] == f"step {step}" for line in seen) == 2
        )
    for rank in (0, 1):
        run.print([], rank=rank, ended=True)
    run.end()
    await follower.end()
    fetched = await run.lines()
    for rank in (0, 1):
        of_rank = [line for line in follower.seen if line["rank"] == rank and not line["partial"]]
        assert [(x["stream"], x["text"]) for x in of_rank] == [
            (x["stream"], x["text"]) for x in fetched if x["rank"] == rank
        ]


async def test_a_progress_bar_is_seen_live_and_is_one_line_in_the_end(run: Run) -> None:
    follower = Follower(run)
    for step in (1, 5, 9):
        run.print(err(f"\rstep {step} of 9"))
        await follower.sees(f"step {step} of 9")
    assert all(line["partial"] for line in follower.seen)
    run.print([], ended=True)
    run.end()
    assert await follower.end() == ["step 9 of 9"]
    assert await run.texts() == ["step 9 of 9"]


async def test_a_preview_that_does_not_change_is_not_repeated(run: Run) -> None:
    follower = Follower(run)
    run.print(out("Password: "))
    await follower.sees("Password: ")
    run.print(err("other\n"))
    await follower.sees("other")
    run.end()
    await follower.end()
    assert sum(line["partial"] for line in follower.seen) <= 2


async def test_a_broken_follower_goes_on_from_its_last_line(run: Run) -> None:
    first = Follower(run)
    run.print(out("one\n", "two\nthr"))
    await first.sees("thr")
    first.stop()
    run.print(out("ee\n", "four\n"), ended=True)
    second = Follower(run, cursor=first.seen[-1]["cursor"])
    await second.sees("four")
    run.end()
    assert await second.end() == ["three", "four"]


async def test_a_coordinator_that_is_away_does_not_end_the_following(run: Run) -> None:
    run.failure = TransportError("The coordinator is being restarted.")
    follower = Follower(run)
    run.print(out("one\n"))
    await follower.sees("one")
    run.failure = None
    run.print(out("two\n"), ended=True)
    run.end()
    assert await follower.end() == ["one", "two"]


async def test_a_run_that_was_deleted_ends_the_following(run: Run) -> None:
    run.print(out("one\n"))
    follower = Follower(run)
    await follower.sees("one")
    run.failure = NotFoundError("No such run.")
    await run.reader.delete(UID)
    assert await follower.end() == ["one"]
    assert not run.folder.exists()


async def test_a_rank_that_was_lost_without_an_end_keeps_its_last_words(run: Run) -> None:
    run.print(out("one\n", "half"))
    (_, half) = await run.lines()
    assert half["partial"]
    run.ended = True
    (_, half) = await run.lines()
    assert (half["text"], half["partial"]) == ("half", False)


async def test_a_quiet_rank_is_heard_beside_one_that_floods(run: Run) -> None:
    """The flooder's backlog is older than the quiet rank's line, and never ends."""
    flooding = True

    async def flood() -> None:
        while flooding:
            await asyncio.to_thread(
                write_attempt, run.folder, out(*["x" * 60 + "\n"] * 200), rank=0, at=1.0, ended=False
            )
            run.store.notify(UID)

    task = asyncio.create_task(flood())
    quiet = asyncio.Event()

    async def follow() -> None:
        async for line in run.reader.lines(UID, follow=True):
            if line["text"] == "psst":
                quiet.set()
                return

    following = asyncio.create_task(follow())
    run.print(out("psst\n"), rank=1, at=10.0**9)
    async with asyncio.timeout(LIMIT_S):
        await quiet.wait()
        await following
    flooding = False
    await task


async def test_the_raw_log_is_byte_exact(run: Run) -> None:
    data = [os.urandom(1000) for _ in range(50)]
    run.print([*out(*data), *err(b"\xff\x00\r\n")])
    found = b"".join([part async for part in run.reader.raw(UID, 0, 1)])
    assert found == b"".join(data) + b"\xff\x00\r\n"


async def test_there_is_no_raw_log_of_an_attempt_that_was_not(run: Run) -> None:
    run.print(out("a\n"))
    with pytest.raises(NotFoundError):
        [part async for part in run.reader.raw(UID, 1, 1)]


async def test_two_incarnations_of_one_rank_in_one_epoch_are_kept_apart(run: Run) -> None:
    for token in ("aaaa", "bbbb"):
        writer = run.store.open_writer(incarnation(token=token))
        writer.append(0, records(out(f"I am {token}\n")))
        writer.finish(writer.end)
        run.store.release(writer)
    again = run.store.open_writer(incarnation(token="aaaa"))
    assert again.ended
    run.store.release(again)
    assert await run.texts() == ["I am aaaa", "I am bbbb"]
    assert b"".join([part async for part in run.reader.raw(UID, 0, 1)]) == b"I am aaaa\nI am bbbb\n"


async def test_status_tells_when_each_rank_printed_last(run: Run) -> None:
    writer = run.store.open_writer(incarnation(rank=0))
    writer.append(0, records(out("x\n"), at=1000.0))
    fast = run.store.open_writer(incarnation(rank=1))
    fast.append(0, records(out("x\n"), at=9e12))
    found = await run.reader.last_output_at(UID)
    assert found[0] == 1000.0
    assert found[1] < 9e12, "a machine whose clock is ahead does not print in the future"
    run.store.release(writer)
    run.store.release(fast)
    assert set(await run.reader.last_output_at(UID)) == {0, 1}


async def test_a_deleted_run_takes_no_more_output(run: Run) -> None:
    await run.reader.delete(UID)
    with pytest.raises(NotFoundError):
        run.store.open_writer(incarnation())


async def test_a_slow_taker_costs_the_reader_no_memory(run: Run) -> None:
    """Nothing is read ahead of the taker beyond a batch."""
    run.print(out(*["x" * 1000 + "\n"] * 3000), ended=True)
    lines = run.reader.lines(UID)
    first = await anext(lines)
    assert first["text"] == "x" * 1000
    await lines.aclose()  # type: ignore[attr-defined]
