"""A run's story as the API tells it: what each epoch led to, and the share of productive time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator import story, view
from coordinator.core.gang_state import (
    Chapter,
    CommittedCheckpoint,
    Failure,
    Gang,
    MemberPhase,
    MemberRecord,
    RestartKind,
    Restarts,
    Settlement,
    incarnation_for,
)
from mesh.ids import Epoch, IncarnationToken, MachineName, Rank, RunName, RunUid
from mesh.messages import ProcessExit
from mesh.plan import RunPlan
from mesh.reasons import Reason
from mesh.states import RunState

UID = RunUid("01run")
CAUSE = Failure(rank=Rank(1), at=160.0, reason=Reason.MACHINE_LOST, message="Rank 1: m1 was lost.")
FIRST = Chapter(
    epoch=Epoch(1),
    began_at=101.0,
    opened_at=108.0,
    running_at=110.0,
    stopped_at=160.0,
    ended_at=162.0,
    cause=CAUSE,
    victims=(Rank(0),),
    charged=RestartKind.LOSS,
)
SECOND = Chapter(
    epoch=Epoch(2), began_at=162.0, opened_at=168.0, running_at=170.0, kept=(Rank(0),), replaced=(Rank(1),)
)
SAVED = CommittedCheckpoint(id="1-40", uri="file:///c/1-40", epoch=Epoch(1), step=40, bytes=1024, at=150.0)


def gang(*chapters: Chapter, state: RunState = RunState.RUNNING, **facts: Any) -> Gang:
    plan = RunPlan(name=RunName("train"), command=("true",), nodes=2)
    made = Gang(uid=UID, plan=plan, created_at=100.0, state=state, epoch=chapters[-1].epoch)
    made.history = list(chapters)
    for name, value in facts.items():
        setattr(made, name, value)
    return made


def member(epoch: int, rank: int, machine: str, **facts: Any) -> MemberRecord:
    return MemberRecord(
        incarnation=incarnation_for(UID, Epoch(epoch), Rank(rank), IncarnationToken(f"t{epoch}{rank}")),
        machine=MachineName(machine),
        address="127.0.1.1",
        ordered_at=101.0,
        arrived_at=105.5,
        phase=MemberPhase.STARTED,
        **facts,
    )


def cause_of(told: Any) -> Any:
    assert told["cause"] is not None
    return told["cause"]


def test_an_epoch_without_a_checkpoint_led_nowhere_and_the_one_that_runs_counts() -> None:
    run = gang(FIRST, SECOND)
    first, second = story.epochs(run)
    assert (first["ledSomewhere"], first["lostSeconds"]) == (False, 50.0)
    assert (second["ledSomewhere"], second["lostSeconds"]) == (True, None)
    assert story.productive(run, 200.0) == {"seconds": 30.0, "share": 0.3}


def test_what_was_saved_before_the_end_is_not_lost() -> None:
    restored = replace(SECOND, restored="1-40", restored_step=40, restored_at=150.0)
    run = gang(FIRST, restored, checkpoint=SAVED)
    first, second = story.epochs(run)
    assert (first["ledSomewhere"], first["lostSeconds"]) == (True, 10.0)
    assert (second["restored"], second["restoredStep"]) == ("1-40", 40)
    assert story.productive(run, 200.0) == {"seconds": 70.0, "share": 0.7}


def test_an_older_checkpoint_saves_nothing_of_an_epoch() -> None:
    later = replace(SECOND, restored="0-1", restored_at=90.0)
    assert story.epochs(gang(FIRST, later))[0]["lostSeconds"] == 50.0


def test_a_run_that_succeeded_lost_nothing_at_its_end() -> None:
    done = gang(
        replace(FIRST, cause=None, stopped_at=None, ended_at=190.0), state=RunState.SUCCEEDED, ended_at=190.0
    )
    (only,) = story.epochs(done)
    assert (only["ledSomewhere"], only["lostSeconds"]) == (True, 0.0)
    assert story.productive(done, 500.0) == {"seconds": 80.0, "share": 0.8889}


def test_a_suspended_run_keeps_what_its_checkpoint_holds() -> None:
    paused = gang(replace(FIRST, cause=None), state=RunState.SUSPENDED, checkpoint=SAVED)
    assert story.epochs(paused)[0]["lostSeconds"] == 10.0


def test_an_epoch_that_never_ran_has_lost_nothing() -> None:
    (only,) = story.epochs(gang(Chapter(epoch=Epoch(1), began_at=101.0, stopped_at=105.0, ended_at=106.0)))
    assert (only["ledSomewhere"], only["lostSeconds"]) == (False, None)


def test_a_clock_that_was_set_back_gives_no_negative_times() -> None:
    back = gang(replace(FIRST, stopped_at=50.0, ended_at=40.0))
    assert story.epochs(back)[0]["lostSeconds"] == 0.0
    assert story.productive(back, 10.0)["share"] == 0.0


def test_each_life_says_why_it_ended() -> None:
    lost = member(1, 1, "m1", settlement=Settlement.LEASE_LAPSED, reason=Reason.MACHINE_LOST, ended_at=160.0)
    victim = member(1, 0, "m0", exit=ProcessExit(code=1), ended_at=161.0)
    run = gang(FIRST, SECOND)
    run.attempts = [victim, lost]
    run.members = {Rank(0): member(2, 0, "m0"), Rank(1): member(2, 1, "m2")}
    lives = view.attempt_resources(run)
    assert [(a["epoch"], a["rank"], a["reason"]) for a in lives] == [
        (1, 0, "CommandFailed"),
        (1, 1, "MachineLost"),
        (2, 0, None),
        (2, 1, None),
    ]
    assert "because of rank 1" in lives[0]["message"]
    assert cause_of(lives[1])["message"] == CAUSE.message
    assert lives[0]["cause"] is None
    assert lives[2]["bootSeconds"] == 4.5


def test_a_rank_that_was_replaced_while_assembling_has_two_lives_in_one_epoch() -> None:
    refused = member(
        1, 1, "m1", settlement=Settlement.REVOKED, reason=Reason.MACHINE_REFUSED, message="m1 is no good."
    )
    run = gang(FIRST, SECOND)
    run.attempts = [refused, member(1, 1, "m9", settlement=Settlement.LEASE_LAPSED)]
    first, second = view.attempt_resources(run)
    assert (first["reason"], first["message"], first["cause"]) == ("MachineRefused", "m1 is no good.", None)
    assert (second["reason"], cause_of(second)["rank"]) == ("MachineLost", 1)


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (Reason.COMMAND_NOT_FOUND, 127),
        (Reason.COMMAND_NOT_EXECUTABLE, 126),
        (Reason.WORKING_DIR_MISSING, None),
        (Reason.MACHINE_LOST, None),
    ],
)
def test_a_command_that_did_not_start_has_the_exit_code_that_a_shell_gives(
    reason: Reason, code: int | None
) -> None:
    """`mesh run` ended with it, and the tables showed none."""
    cause = Failure(rank=Rank(0), at=160.0, reason=reason, message="It did not start.")
    failed = gang(replace(FIRST, cause=cause), state=RunState.FAILED, cause=cause)
    assert view.exit_code(failed) == code


def test_the_exit_code_and_the_cause_are_the_last_epoch_s() -> None:
    bug = Failure(
        rank=Rank(0),
        at=160.0,
        reason=Reason.COMMAND_FAILED,
        message="It ended with 7.",
        exit=ProcessExit(code=7),
    )
    failed = gang(replace(FIRST, cause=bug), state=RunState.FAILED, cause=bug)
    assert view.exit_code(failed) == 7
    again = gang(replace(FIRST, cause=bug), SECOND, state=RunState.FAILED, cause=bug)
    assert view.exit_code(again) is None  # it ended of an assembly; the bug is of the epoch before
    shown = view.run_resource(again, {"spec": {}}, now=200.0)
    assert shown["status"]["cause"] is None
    assert cause_of(shown["status"]["epochs"][0])["exit"] == {"code": 7, "signal": None}


def test_conditions_say_what_will_be_replaced_and_that_nothing_is_saved() -> None:
    run = gang(FIRST, SECOND, restarts=Restarts(loss=1, total=1), reclaimed=(MachineName("m0"),))
    shown = view.run_resource(run, {"spec": {}}, now=200.0)
    assert {c["type"] for c in shown["status"]["conditions"]} == {"MachineWantedBack", "NothingToRestore"}
    assert shown["status"]["restarts"]["loss"] == 1
