"""The verdict on a rehearsed fault, from what the API says of the run before and after."""

from __future__ import annotations

from typing import Any

import pytest

from mesh.cli.chaos import verdict_lines
from mesh.rehearsal import Outcome, outcome_of, undisturbed_after_s, verdict


def epoch(number: int, began: float, **facts: Any) -> dict[str, Any]:
    blank = dict.fromkeys(("openedAt", "runningAt", "stoppedAt", "endedAt", "cause", "chargedTo", "restored"))
    return {
        "epoch": number,
        "beganAt": began,
        "restoredStep": None,
        "lostSeconds": None,
        **blank,
        **facts,
    }


CAUSE = {"rank": 1, "reason": "MachineLost", "message": "Rank 1: m1 was lost."}
HARMED = epoch(
    1, 90.0, runningAt=95.0, stoppedAt=103.5, endedAt=104.0, cause=CAUSE, chargedTo="Loss", lostSeconds=2.5
)
RESUMED = epoch(2, 104.0, openedAt=107.0, runningAt=107.5, restored="1-40", restoredStep=40)


def run(state: str, *epochs: dict[str, Any], machines: tuple[str, ...] = ("m0", "m1")) -> dict[str, Any]:
    return {
        "metadata": {"name": "train"},
        "status": {
            "state": state,
            "message": "How it is.",
            "epoch": epochs[-1]["epoch"],
            "epochs": list(epochs),
            "ranks": [
                {"rank": rank, "machine": machine, "lives": 1, "startedAt": 95.0}
                for rank, machine in enumerate(machines)
            ],
            "restarts": {"loss": 1},
        },
    }


def harm(kind: str = "LoseMachine", seconds: float | None = None) -> dict[str, Any]:
    return {
        "run": "train",
        "kind": kind,
        "rank": 1,
        "epoch": 1,
        "machine": "m1",
        "at": 100.0,
        "seconds": seconds,
        "message": "A rehearsed fault: everything on m1 (rank 1) is killed.",
    }


@pytest.mark.parametrize(
    ("state", "number", "outcome"),
    [
        ("Running", 1, None),
        ("Fencing", 1, None),
        ("Pending", 1, None),
        ("Assembling", 2, None),
        ("Running", 2, Outcome.RESUMED),
        ("Running", 5, Outcome.RESUMED),
        ("Failed", 1, Outcome.ENDED),
        ("Succeeded", 1, Outcome.ENDED),
        ("Suspended", 1, Outcome.SUSPENDED),
    ],
)
def test_a_run_has_resumed_when_it_runs_in_a_later_epoch(
    state: str, number: int, outcome: Outcome | None
) -> None:
    before = run("Running", epoch(1, 90.0))
    assert outcome_of(before, run(state, epoch(number, 90.0)), harm()) is outcome


def test_a_rank_that_began_again_alone_is_a_run_that_resumed() -> None:
    before, after = run("Running", epoch(1, 90.0)), run("Running", epoch(1, 90.0))
    after["status"]["ranks"][1] |= {"lives": 2, "startedAt": None}
    assert outcome_of(before, after, harm("KillRank")) is None, "it is on its way"
    after["status"]["ranks"][1]["startedAt"] = 104.5
    assert outcome_of(before, after, harm("KillRank")) is Outcome.RESUMED
    told = verdict(before, after, harm("KillRank"), outcome=Outcome.RESUMED)
    assert (told["alone"], told["chargedTo"], told["kept"], told["replaced"]) == (True, "Failure", [0, 1], [])
    assert told["seconds"]["total"] == 4.5
    assert verdict_lines(told)[0] == "train: rank 1 started again alone in epoch 1; the others went on."


def test_only_what_is_for_a_time_can_disturb_nobody() -> None:
    assert undisturbed_after_s(harm("LoseMachine")) is None
    assert undisturbed_after_s(harm("KillRank")) is None
    assert (undisturbed_after_s(harm("Freeze", 1.0)) or 0.0) > 1.0


def test_the_verdict_names_the_step_the_loss_the_times_and_the_machines() -> None:
    after = run("Running", HARMED, RESUMED, machines=("m0", "m2"))
    told = verdict(run("Running", HARMED), after, harm(), outcome=Outcome.RESUMED, first_line_at=108.0)
    assert told["resumedFrom"] == {"checkpoint": "1-40", "step": 40}
    assert (told["lostSeconds"], told["chargedTo"], told["ofTheHarm"]) == (2.5, "Loss", True)
    assert told["replaced"] == [{"rank": 1, "from": "m1", "to": "m2"}]
    assert told["kept"] == [0]
    assert told["seconds"] == {
        "detection": 3.5,
        "fence": 0.5,
        "pause": 0.0,
        "assembly": 3.0,
        "start": 0.5,
        "firstLine": 1.0,
        "total": 8.0,
    }
    lines = "\n".join(verdict_lines(told))
    for part in ("train resumed in epoch 2, from step 40; 2.5s of work were lost.", "m1 -> m2", "8.0s"):
        assert part in lines
    assert "paused" not in lines


def test_a_run_that_ends_of_another_rank_is_told_so() -> None:
    other = {**HARMED, "cause": {**CAUSE, "rank": 0}, "chargedTo": None}
    told = verdict(run("Running", HARMED), run("Failed", other), harm(), outcome=Outcome.ENDED)
    assert (told["ofTheHarm"], told["replaced"], told["kept"]) == (False, [], [])
    assert (told["seconds"]["total"], told["resumedFrom"]["step"]) == (None, None)
    lines = verdict_lines(told)
    assert lines[0] == "train did not resume, it is Failed: How it is."
    assert any("another rank than the one" in line for line in lines)


@pytest.mark.parametrize("outcome", Outcome)
def test_every_outcome_has_a_first_line(outcome: Outcome) -> None:
    calm = run("Running", epoch(1, 90.0, runningAt=95.0))
    told = verdict(calm, calm, harm("Freeze", 1.0), outcome=outcome)
    assert verdict_lines(told)[0].startswith("train ")
