"""When a part is taken: the pure core, looked at look by look."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.core.checkpoint_doubt import DOUBT_S, HELPER_DOUBT_S
from agents.core.checkpoint_events import (
    AnswerQuestion,
    CheckpointingEffect,
    CommandEnded,
    Entry,
    EntryKind,
    FinishTaking,
    Look,
    LookAtState,
    LookForWriters,
    PartFailed,
    PartLost,
    PartStored,
    PartTorn,
    Questioned,
    StateSeen,
    TakePart,
    TellTrouble,
    TimePassed,
    WritersSeen,
)
from agents.core.checkpoint_names import is_log_name, step_from_names, steps_of
from agents.core.checkpointing import RESTLESS_S, SETTLE_S, Checkpointing


def file(path: str, size: int = 1, mtime_ns: int = 1) -> Entry:
    return Entry(path=path, kind=EntryKind.FILE, mode=0o644, size=size, mtime_ns=mtime_ns, inode=1)


def folder(path: str) -> Entry:
    return Entry(path=path, kind=EntryKind.DIRECTORY, mode=0o755)


def marked(*steps: int) -> tuple[Entry, ...]:
    found: list[Entry] = []
    for step in steps:
        found += [folder(f"step-{step:08d}"), file(f"step-{step:08d}/state.pt")]
    return tuple(found)


class Bench:
    """The core with a clock that the test moves and a directory that the test sets."""

    def __init__(self, *entries: Entry) -> None:
        self.core = Checkpointing()
        self.now = 100.0
        self.look = Look(entries=entries)
        self.writers: tuple[str, ...] = ()
        self.writer = (7, 1)
        self.processes: frozenset[tuple[int, int]] = frozenset({(1, 1), (7, 1)})
        self.parts: list[TakePart] = []
        self.said: list[str] = []
        self.answers: list[AnswerQuestion] = []
        self.is_finished = False
        self.looks = 0
        self.perform(self.core.begin(self.now))

    def perform(self, effects: list[CheckpointingEffect]) -> None:
        for effect in effects:
            match effect:
                case LookAtState():
                    self.looks += 1
                    seen = replace(
                        self.look,
                        writers=tuple((path, self.writer) for path in self.writers),
                        processes=self.processes,
                    )
                    self.perform(self.core.handle(StateSeen(look=seen), self.now))
                case LookForWriters():
                    self.perform(self.core.handle(WritersSeen(paths=self.writers), self.now))
                case TakePart():
                    self.parts.append(effect)
                case TellTrouble():
                    self.said.append(effect.message)
                case AnswerQuestion():
                    self.answers.append(effect)
                case FinishTaking():
                    assert not self.is_finished
                    self.is_finished = True

    def see(
        self, *entries: Entry, steps: tuple[int, ...] = (), is_saving: bool = False, cost_s: float = 0.0
    ) -> None:
        self.look = Look(entries=entries, steps=steps, is_saving=is_saving, cost_s=cost_s)

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while (due := self.core.next_deadline()) is not None and due <= end:
            self.now = due
            self.perform(self.core.handle(TimePassed(), self.now))
        self.now = end

    def store(self, digest: str = "d") -> TakePart:
        part = self.parts[-1]
        self.perform(self.core.handle(PartStored(number=part.number, digest=digest), self.now))
        return part

    def end(self, *, ok: bool) -> None:
        self.perform(self.core.handle(CommandEnded(ok=ok), self.now))


@pytest.mark.parametrize("phase_s", [0.0, 0.5, 1.5, 2.5, 3.5, 4.5])
def test_rests_that_are_shorter_than_the_pause_between_costly_looks_are_found(phase_s: float) -> None:
    bench = Bench()
    bench.wait(phase_s)
    for save in range(1, 13):
        bench.see(file(f"step-{save}", mtime_ns=save), cost_s=0.08)  # a look in eight seconds
        bench.wait(5.0)
    assert bench.parts, "a minute of saves that stood for five seconds each, and none was taken"


def test_a_directory_that_never_rests_is_not_looked_at_much_more_often_for_that() -> None:
    bench = Bench()
    for change in range(100):
        bench.see(file("model.pt", mtime_ns=change), cost_s=0.08)
        bench.wait(1.0)
    assert bench.parts == []
    assert bench.looks <= 3 * 100 / (8 + 2 * SETTLE_S) + 3


def test_a_directory_that_is_at_rest_is_taken_once() -> None:
    bench = Bench(file("ckpt-7.pt"))
    bench.wait(SETTLE_S - 0.1)
    assert bench.parts == []
    bench.wait(1.0)
    (part,) = bench.parts
    assert (part.steps, part.is_whole, part.copy) == ((7,), True, False)
    bench.store()
    bench.wait(60)
    assert len(bench.parts) == 1


def test_an_empty_directory_is_a_part_too() -> None:
    bench = Bench()
    bench.wait(SETTLE_S + 1)
    assert [(part.entries, part.steps) for part in bench.parts] == [((), ())]


def test_while_it_changes_nothing_is_taken() -> None:
    bench = Bench()
    for size in range(20):
        bench.see(file("model.pt", size=size))
        bench.wait(1.0)
    assert bench.parts == []
    bench.wait(SETTLE_S)
    assert bench.parts[0].entries[0].size == 19


def test_a_file_that_somebody_has_open_for_writing_waits_however_still_it_is() -> None:
    bench = Bench(file("model.pt"))
    bench.writers = ("model.pt",)
    bench.wait(60)
    assert bench.parts == []
    bench.writers = ()
    bench.wait(1)
    assert len(bench.parts) == 1


def test_a_file_whose_writer_dies_before_it_is_closed_is_not_taken_before_it_is_written_again() -> None:
    bench = Bench(file("ckpt-1.pt"))
    bench.writers = ("ckpt-1.pt",)
    bench.wait(5)
    bench.writers, bench.processes = (), frozenset({(1, 1)})
    bench.wait(60)
    assert bench.parts == []
    assert "'ckpt-1.pt' may be half-written" in bench.said[0]
    bench.processes = frozenset({(1, 1), (8, 1)})
    bench.see(file("ckpt-1.pt", size=2))
    bench.wait(5)
    assert len(bench.parts) == 1


def test_a_process_that_dies_while_an_unknown_one_writes_makes_the_file_doubtful_too() -> None:
    bench = Bench()
    bench.wait(1)
    bench.see(file("ckpt-1.pt"))
    bench.processes = frozenset({(1, 1)})
    bench.wait(60)
    assert [part.entries for part in bench.parts] == []


def test_the_death_of_another_process_than_the_writer_is_none_of_its_business() -> None:
    bench = Bench(file("ckpt-1.pt"))
    bench.writers = ("ckpt-1.pt",)
    bench.wait(1)
    bench.processes = frozenset({(7, 1)})
    bench.wait(1)
    bench.writers = ()
    bench.wait(5)
    assert len(bench.parts) == 1


def test_a_death_after_the_file_was_seen_closed_changes_nothing() -> None:
    bench = Bench(file("ckpt-1.pt"))
    bench.wait(1)
    bench.processes = frozenset({(1, 1)})
    bench.wait(5)
    assert len(bench.parts) == 1


def test_a_command_that_outlives_a_death_for_long_did_not_need_it() -> None:
    bench = Bench(file("ckpt-1.pt"))
    bench.writers = ("ckpt-1.pt",)
    bench.wait(5)
    bench.writers, bench.processes = (), frozenset({(1, 1)})
    bench.wait(DOUBT_S + 5)
    assert len(bench.parts) == 1


def copy_with_a_child(bench: Bench, mtime_ns: int, *, child: tuple[int, int]) -> None:
    """`cp` from a script that lives on, seen while it copies; it ends before the file is seen closed."""
    bench.writer, bench.writers = child, ("model.pt",)
    bench.processes = frozenset({(1, 1), child})
    bench.see(file("model.pt", mtime_ns=mtime_ns))
    bench.wait(3)
    bench.writers, bench.processes = (), frozenset({(1, 1)})


def test_a_script_that_copies_its_checkpoint_into_place_every_minute_commits_each() -> None:
    bench = Bench()
    bench.processes = frozenset({(1, 1)})
    bench.wait(DOUBT_S + 10)
    bench.store()
    for minute in range(1, 6):
        copy_with_a_child(bench, minute, child=(50 + minute, minute))
        bench.wait(57)
        assert bench.store().entries[0].mtime_ns == minute
    assert bench.said == [
        f"'model.pt' may be half-written: a process that may have written it has ended. It is in no checkpoint before "
        f"it is written again, or the command has run on for {HELPER_DOUBT_S:g} s."
    ]


def test_a_copy_that_failed_is_not_taken_while_the_command_dies_of_it() -> None:
    """It is half a file; its worker raises within the doubt, and the launcher stops the others at its leisure."""
    bench = Bench()
    bench.wait(DOUBT_S + 10)
    before = len(bench.parts)
    bench.store()
    bench.processes = frozenset({(1, 1), (7, 1), (99, 9)})
    bench.writer, bench.writers = (99, 9), ("model.pt",)
    bench.see(file("model.pt"))
    bench.wait(3)
    bench.writers, bench.processes = (), frozenset({(1, 1), (7, 1)})
    bench.wait(HELPER_DOUBT_S - 5)
    bench.processes = frozenset({(1, 1)})
    bench.wait(DOUBT_S - 10)
    assert len(bench.parts) == before
    bench.wait(20)
    assert len(bench.parts) == before + 1


def test_a_process_of_the_commands_first_minutes_is_no_helper() -> None:
    bench = Bench()
    bench.processes = frozenset({(1, 1)})
    bench.wait(30)
    before = len(bench.parts)
    copy_with_a_child(bench, 5, child=(50, 5))
    bench.wait(HELPER_DOUBT_S + 20)
    assert len(bench.parts) == before


def test_what_a_life_that_ended_badly_has_left_is_not_taken_before_it_is_written_again() -> None:
    """Seed 146 of runs that save, with RestartRank: half a file of the life before was taken for whole."""
    bench = Bench()
    bench.core = Checkpointing(is_left_behind=True)
    bench.see(file("model.pt"))
    bench.perform(bench.core.begin(bench.now))
    bench.wait(SETTLE_S + 10)
    assert bench.parts == []
    bench.see(file("model.pt", size=9))
    bench.wait(SETTLE_S + 10)
    assert len(bench.parts) == 1


def test_a_save_of_the_helper_under_way_is_waited_for() -> None:
    bench = Bench()
    bench.see(file("a"), is_saving=True)
    bench.wait(30)
    assert bench.parts == []


def test_whole_checkpoints_of_the_helper_are_taken_beside_files_that_never_rest() -> None:
    bench = Bench()
    for number in range(10):
        bench.see(file("metrics.csv", size=number), *marked(100, 200), steps=(100, 200))
        bench.wait(1.0)
    (part,) = bench.parts
    assert (part.steps, part.is_whole) == ((100, 200), False)
    assert [entry.path for entry in part.entries if entry.kind is EntryKind.FILE] == [
        "step-00000100/state.pt",
        "step-00000200/state.pt",
    ]
    bench.store()
    for number in range(10):
        bench.see(file("metrics.csv", size=100 + number), *marked(100, 200), steps=(100, 200))
        bench.wait(1.0)
    assert len(bench.parts) == 1, "the same steps are not taken again"
    bench.see(file("metrics.csv", size=1000), *marked(200, 300), steps=(200, 300))
    bench.wait(0.5)
    bench.see(file("metrics.csv", size=1001), *marked(200, 300), steps=(200, 300))
    bench.writers = ("metrics.csv",)
    bench.wait(3)
    assert bench.parts[-1].steps == (200, 300)


def test_checkpoints_that_follow_each_other_faster_than_the_wait_are_taken_all_the_same() -> None:
    bench = Bench()
    for step in range(1, 8):
        bench.see(*marked(step, step + 1), steps=(step, step + 1))
        bench.wait(1.0)
    assert bench.parts
    assert bench.parts[0].steps


def test_a_log_keeps_nothing_waiting_and_causes_no_part() -> None:
    bench = Bench()
    for size in range(6):
        bench.see(file("model.pt"), file("train.log", size=size))
        bench.wait(1.0)
    (part,) = bench.parts
    assert [entry.path for entry in part.entries] == ["model.pt", "train.log"]
    bench.store()
    for size in range(6, 12):
        bench.see(file("model.pt"), file("train.log", size=size))
        bench.wait(1.0)
    assert len(bench.parts) == 1


def test_a_torn_part_is_taken_again_from_copies() -> None:
    bench = Bench(file("model.pt"))
    bench.wait(3)
    bench.perform(bench.core.handle(PartTorn(number=bench.parts[0].number, path="model.pt"), bench.now))
    bench.wait(3)
    assert [part.copy for part in bench.parts] == [False, True]
    bench.store()
    bench.see(file("model.pt", size=2))
    bench.wait(5)
    assert [part.copy for part in bench.parts] == [False, True, False]


def test_a_part_of_the_helpers_that_is_torn_is_taken_again_with_the_newest_alone() -> None:
    bench = Bench()
    bench.see(file("scratch"), *marked(1, 2), steps=(1, 2))
    bench.writers = ("scratch",)
    bench.wait(4)
    bench.perform(bench.core.handle(PartTorn(number=bench.parts[0].number, path="step"), bench.now))
    bench.see(file("scratch"), *marked(2, 3), steps=(2, 3))
    bench.wait(4)
    assert [(part.steps, part.copy) for part in bench.parts] == [((1, 2), False), ((3,), False)]


def test_answers_that_nobody_waits_for_and_a_second_end_change_nothing() -> None:
    bench = Bench(file("a.pt"))
    assert bench.core.handle(WritersSeen(), bench.now) == []
    assert bench.core.handle(TimePassed(), bench.now) == []
    assert bench.core.handle(PartFailed(number=9, message="no"), bench.now) == []
    bench.end(ok=False)
    assert bench.is_finished
    bench.end(ok=True)
    assert bench.core.handle(StateSeen(look=bench.look), bench.now) == []
    assert bench.parts == []


def test_word_of_a_part_that_is_not_under_way_changes_nothing() -> None:
    bench = Bench(file("model.pt"))
    bench.wait(3)
    bench.perform(bench.core.handle(PartStored(number=99, digest="x"), bench.now))
    bench.perform(bench.core.handle(PartTorn(number=99, path="x"), bench.now))
    assert bench.core.lag_since is not None
    bench.store()
    assert bench.core.lag_since is None


def test_a_part_that_took_long_is_followed_by_a_rest() -> None:
    bench = Bench(file("model.pt"))
    bench.wait(3)
    bench.wait(20)
    bench.store()
    bench.see(file("model.pt", size=2))
    bench.wait(15)
    assert len(bench.parts) == 1
    bench.wait(10)
    assert len(bench.parts) == 2


def test_after_success_what_is_there_is_taken_at_once() -> None:
    bench = Bench()
    bench.see(file("final.pt"), file("out.log"))
    bench.end(ok=True)
    (part,) = bench.parts
    assert [entry.path for entry in part.entries] == ["final.pt", "out.log"]
    assert not bench.is_finished
    bench.store()
    assert bench.is_finished


def test_after_a_failure_only_whole_checkpoints_of_the_helper_are_taken() -> None:
    bench = Bench()
    bench.see(file("half.pt"), *marked(5), steps=(5,))
    bench.end(ok=False)
    (part,) = bench.parts
    assert (part.steps, part.is_whole) == ((5,), False)
    bench.store()
    assert bench.is_finished


def test_after_success_with_nothing_but_logs_there_is_nothing_to_take() -> None:
    bench = Bench()
    bench.see(file("out.log"))
    bench.end(ok=True)
    assert (bench.parts, bench.is_finished) == ([], True)


def test_after_a_failure_without_one_nothing_is_taken() -> None:
    bench = Bench()
    bench.see(file("half.pt"))
    bench.end(ok=False)
    assert (bench.parts, bench.is_finished) == ([], True)


def test_a_part_under_way_at_the_end_is_waited_for_and_then_the_last_one_is_taken() -> None:
    bench = Bench(file("a.pt"))
    bench.wait(3)
    bench.see(file("a.pt"), file("b.pt"))
    bench.end(ok=True)
    assert len(bench.parts) == 1
    bench.store("first")
    assert len(bench.parts) == 2
    bench.store("last")
    assert bench.is_finished


def test_a_part_that_is_torn_again_and_again_after_the_end_is_given_up() -> None:
    bench = Bench()
    bench.see(file("a.pt"))
    bench.end(ok=True)
    for _ in range(10):
        if not bench.is_finished:
            bench.perform(bench.core.handle(PartTorn(number=bench.parts[-1].number, path="a"), bench.now))
    assert bench.is_finished


def test_what_cannot_be_stored_is_told_and_not_tried_again_before_something_changes() -> None:
    bench = Bench(file("a.pt"))
    bench.wait(3)
    failed = PartFailed(number=bench.parts[-1].number, message="'a.pt' cannot be read.")
    bench.perform(bench.core.handle(failed, bench.now))
    bench.wait(60)
    assert (len(bench.parts), bench.said) == (1, ["'a.pt' cannot be read."])
    bench.see(file("a.pt", size=2))
    bench.wait(5)
    assert len(bench.parts) == 2


def test_a_part_that_the_store_has_lost_is_taken_again() -> None:
    bench = Bench(file("a.pt"))
    bench.wait(3)
    bench.store("d")
    bench.perform(bench.core.handle(PartLost(digest="another"), bench.now))
    bench.wait(5)
    assert len(bench.parts) == 1
    bench.perform(bench.core.handle(PartLost(digest="d"), bench.now))
    bench.wait(5)
    assert len(bench.parts) == 2


def test_what_is_no_file_is_left_out_and_told_once() -> None:
    socket = Entry(path="s", kind=EntryKind.OTHER, mode=0)
    link = Entry(path="data", kind=EntryKind.OUTSIDE_LINK, mode=0, target="/mnt")
    bench = Bench(file("a.pt"), socket, link)
    bench.wait(10)
    assert [entry.path for entry in bench.parts[0].entries] == ["a.pt"]
    assert len(bench.said) == 2
    assert "'data' is not in the checkpoints" in bench.said[1]


def test_a_directory_that_cannot_be_taken_is_told_and_the_run_goes_on() -> None:
    bench = Bench()
    bench.look = Look(entries=(), trouble="too many")
    bench.wait(10)
    assert (bench.parts, bench.said) == ([], ["too many"])
    bench.end(ok=True)
    assert bench.is_finished


def test_more_than_the_limit_is_told() -> None:
    bench = Bench(file("a", size=5 << 40))
    bench.wait(10)
    assert bench.parts == []
    assert "5.0 TiB" in bench.said[0]


def test_a_directory_that_never_rests_is_told_once_with_what_keeps_it() -> None:
    bench = Bench()
    for number in range(int(RESTLESS_S) + 60):
        bench.see(file("study.db", mtime_ns=number))
        bench.wait(1.0)
    assert len(bench.said) == 1
    assert "'study.db' kept changing" in bench.said[0]


def test_a_question_is_answered_from_a_look_that_began_after_it() -> None:
    bench = Bench(file("a.pt"))
    bench.wait(3)
    bench.store("d1")
    bench.perform(bench.core.handle(Questioned(question=1, digest="d1"), bench.now))
    bench.perform(bench.core.handle(Questioned(question=2, digest="other"), bench.now))
    bench.see(file("a.pt", size=9))
    bench.perform(bench.core.handle(Questioned(question=3, digest="d1"), bench.now))
    assert [(answer.question, answer.holds) for answer in bench.answers] == [
        (1, True),
        (2, False),
        (3, False),
    ]


def test_a_look_that_was_under_way_when_the_question_came_is_no_answer() -> None:
    core = Checkpointing()
    same = StateSeen(look=Look(entries=(file("a"),)))
    assert core.begin(0.0) == [LookAtState(sure=None)]
    core.handle(same, 0.0)
    core.handle(TimePassed(), 1.0)
    core.handle(same, 1.0)
    assert core.handle(TimePassed(), 3.0) == [LookAtState(sure=(file("a"),))]
    (ask,) = core.handle(same, 3.0)
    assert isinstance(ask, LookForWriters)
    (part,) = core.handle(WritersSeen(), 3.0)
    assert isinstance(part, TakePart)
    core.handle(PartStored(number=part.number, digest="d"), 3.0)
    assert core.handle(TimePassed(), 4.0) == [LookAtState(sure=(file("a"),))]
    assert core.handle(Questioned(question=1, digest="d"), 4.0) == []
    assert core.handle(same, 4.0) == [LookAtState(sure=(file("a"),))]
    assert core.handle(same, 4.0) == [AnswerQuestion(question=1, digest="d", holds=True)]


def test_after_the_end_the_last_part_holds_for_ever() -> None:
    bench = Bench(file("a.pt"))
    bench.end(ok=True)
    bench.store("d")
    bench.perform(bench.core.handle(Questioned(question=1, digest="d"), bench.now))
    assert bench.answers[-1].holds


def test_after_a_failure_a_part_that_the_directory_has_left_behind_holds_no_more() -> None:
    """seeds.txt: else it would be committed with parts of the other ranks that are newer."""
    bench = Bench()
    bench.wait(3.0)
    bench.store("empty")
    bench.see(file("model.pt"))
    bench.end(ok=False)
    assert bench.is_finished
    bench.perform(bench.core.handle(Questioned(question=1, digest="empty"), bench.now))
    assert bench.answers == [AnswerQuestion(question=1, digest="empty", holds=False)]


def test_a_question_that_waits_at_a_bad_end_is_answered_by_what_is_there() -> None:
    core = Checkpointing()
    core.begin(0.0)
    core.handle(StateSeen(look=Look(entries=())), 0.0)
    core.handle(TimePassed(), 3.0)
    core.handle(StateSeen(look=Look(entries=())), 3.0)
    core.handle(WritersSeen(), 3.0)
    core.handle(PartStored(number=1, digest="empty"), 3.0)
    core.handle(CommandEnded(ok=False), 3.0)  # it looks
    assert core.handle(Questioned(question=1, digest="empty"), 3.0) == []
    core.handle(StateSeen(look=Look(entries=())), 3.1)  # may have begun before the question came
    effects = core.handle(StateSeen(look=Look(entries=(file("model.pt"),))), 3.2)
    assert AnswerQuestion(question=1, digest="empty", holds=False) in effects


def test_a_question_about_a_part_that_is_not_the_newest_any_more_is_answered_with_no() -> None:
    core = Checkpointing()
    core.begin(0.0)
    core.handle(StateSeen(look=Look(entries=())), 0.0)
    core.handle(TimePassed(), 3.0)
    core.handle(StateSeen(look=Look(entries=())), 3.0)
    core.handle(WritersSeen(), 3.0)
    core.handle(PartStored(number=1, digest="empty"), 3.0)
    changed = StateSeen(look=Look(entries=(file("model.pt"),)))
    core.handle(TimePassed(), 4.0)
    core.handle(changed, 4.0)
    core.handle(TimePassed(), 7.0)
    core.handle(changed, 7.0)
    core.handle(WritersSeen(), 7.0)  # the second part is taken
    assert [type(effect) for effect in core.handle(Questioned(question=1, digest="empty"), 7.1)] == [
        LookAtState
    ]
    core.handle(PartStored(number=2, digest="full"), 7.2)
    assert core.handle(changed, 7.3) == [AnswerQuestion(question=1, digest="empty", holds=False)]


def test_a_look_that_was_under_way_when_the_command_ended_is_not_the_last_one() -> None:
    core = Checkpointing()
    core.begin(0.0)
    assert core.handle(CommandEnded(ok=True), 0.1) == []
    assert core.handle(StateSeen(look=Look(entries=())), 0.2) == [LookAtState(sure=())]
    effects = core.handle(StateSeen(look=Look(entries=(file("model.pt"),))), 0.3)
    assert [type(effect) for effect in effects] == [TakePart]


@pytest.mark.parametrize(
    ("names", "step"),
    [
        (["step-100", "step-00000200"], 200),
        (["iter_0000100", "latest_checkpointed_iteration.txt"], 100),
        (["checkpoint-500/model.bin", "checkpoint-1000/rng_state_0.pth"], 1000),
        (["epoch=3-step=1200.ckpt"], 1200),
        (["global_step500/mp_rank_00.pt", "latest"], 500),
        (["epoch_3.pt", "epoch_12.pt"], 12),
        (["7.pt", "12.pt"], 12),
        (["model_step100.pt"], 100),
        (["checkpoints/step_9.pt"], 9),
        (["model-7b.safetensors"], None),
        (["ckpt_rank0.pt", "footstep9"], None),
        (["events.out.tfevents.1700000000.host"], None),
        (["step-1764450000000"], None),
        (["Step 5.pt", "EPOCH-9"], None),
        ([], None),
    ],
)
def test_the_step_that_names_speak_of(names: list[str], step: int | None) -> None:
    if names == ["Step 5.pt", "EPOCH-9"]:
        step = 9
    assert step_from_names(names) == step


def test_a_part_of_the_helpers_checkpoints_alone_stands_for_each_of_them() -> None:
    paths = ["step-00000100/a", "step-00000200/a"]
    assert steps_of([*paths, "train.log"], (100, 200)) == (100, 200)
    assert steps_of([*paths, "rng.pt"], (100, 200)) == (200,)
    assert steps_of(["a/b"], ()) == ()


@pytest.mark.parametrize(
    "name", ["train.log", "x/y.LOG.3", "nohup.out", "events.out.tfevents.17.h", "m.jsonl"]
)
def test_logs_by_name(name: str) -> None:
    assert is_log_name(name)
    assert not is_log_name(name.replace("tfevents", "pt") + ".pt")


def test_an_entry_of_another_time_is_another() -> None:
    assert file("a") != replace(file("a"), mtime_ns=2)
