"""Whether and when a gang starts again: budgets by kind, pauses, what earns them back, what is never started again."""

from __future__ import annotations

import pytest

from coordinator.core import recovery
from coordinator.core.blame import START_FAILURES, Verdict
from coordinator.core.gang_state import Failure, Gang, RestartKind, Restarts
from coordinator.core.recovery import FRUITLESS_MAX, NoRestart, Restart
from mesh.ids import Rank, RunName, RunUid
from mesh.plan import RunPlan
from mesh.reasons import Reason
from mesh.states import FailurePolicy

FAILURE, LOSS, RECLAIM, OURS = RestartKind
BUDGETED = (FAILURE, LOSS, RECLAIM)


def gang(
    restarts: Restarts | None = None,
    *,
    max_restarts: int = 3,
    policy: FailurePolicy = FailurePolicy.RESTART_GANG,
) -> Gang:
    plan = RunPlan(
        name=RunName("demo"), command=("true",), max_restarts=max_restarts, on_process_failure=policy
    )
    return Gang(uid=RunUid("u"), plan=plan, created_at=0.0, restarts=restarts or Restarts())


def verdict(kind: RestartKind, reason: Reason = Reason.COMMAND_FAILED) -> Verdict:
    cause = Failure(rank=Rank(0), at=0.0, reason=reason, message="It broke.")
    return Verdict(cause=cause, kind=kind, lost=frozenset(), victims=())


def spent(kind: RestartKind, count: int, *, fruitless: int = 0) -> Restarts:
    return Restarts(**{kind.name.lower(): count, "fruitless": fruitless, "total": count})


@pytest.mark.parametrize("kind", BUDGETED)
@pytest.mark.parametrize(
    ("used", "limit", "goes_on"),
    [(0, 3, True), (2, 3, True), (3, 3, False), (0, 1, True), (1, 1, False), (9, 10, True), (10, 10, False)],
)
def test_each_kind_has_its_budget(kind: RestartKind, used: int, limit: int, goes_on: bool) -> None:
    decision = recovery.decide(gang(spent(kind, used), max_restarts=limit), verdict(kind))
    assert isinstance(decision, Restart) is goes_on
    if isinstance(decision, NoRestart):
        assert decision.reason is Reason.RESTART_BUDGET_SPENT
        assert f"{used} of {limit} restarts" in decision.why


@pytest.mark.parametrize("kind", RestartKind)
def test_what_the_others_have_spent_costs_nothing(kind: RestartKind) -> None:
    others = Restarts(**{k.name.lower(): 0 if k is kind else 50 for k in RestartKind}, total=150)
    decision = recovery.decide(gang(others), verdict(kind))
    assert isinstance(decision, Restart)
    assert decision.restarts.count(kind) == 1
    assert decision.restarts.total == 151
    assert all(decision.restarts.count(k) == 50 for k in RestartKind if k is not kind)


def test_what_was_our_own_fault_has_no_budget_but_must_bring_progress() -> None:
    assert isinstance(recovery.decide(gang(spent(OURS, 1000)), verdict(OURS)), Restart)
    decision = recovery.decide(gang(spent(OURS, 3, fruitless=FRUITLESS_MAX)), verdict(OURS))
    assert isinstance(decision, NoRestart)
    assert decision.reason is Reason.NO_PROGRESS


@pytest.mark.parametrize(
    ("kind", "delays_s"),
    [
        (FAILURE, [0, 10, 20, 40, 80, 160, 300, 300]),
        (LOSS, [0, 10, 20, 40, 80, 160, 300, 300]),
        (OURS, [0, 10, 20, 40, 80, 160, 300, 300]),
        (RECLAIM, [0, 0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_the_pauses_double_up_to_five_minutes(kind: RestartKind, delays_s: list[float]) -> None:
    told = []
    restarts = Restarts()
    for _ in delays_s:
        decision = recovery.decide(gang(restarts, max_restarts=100), verdict(kind))
        assert isinstance(decision, Restart)
        told.append(decision.delay_s)
        restarts = recovery.with_progress(decision.restarts)
    assert told == delays_s


def test_healthy_minutes_earn_everything_back_but_the_total() -> None:
    restarts = Restarts(failure=2, loss=3, reclaim=50, ours=1, fruitless=3, total=56)
    assert recovery.earned_back(restarts) == Restarts(total=56)
    decision = recovery.decide(gang(recovery.earned_back(restarts)), verdict(LOSS))
    assert isinstance(decision, Restart)
    assert (decision.delay_s, decision.restarts.loss, decision.restarts.total) == (0.0, 1, 57)


def test_a_newer_checkpoint_is_progress_and_gives_no_budget_back() -> None:
    restarts = recovery.with_progress(Restarts(failure=2, fruitless=3, total=5))
    assert restarts == Restarts(failure=2, fruitless=0, total=5)


@pytest.mark.parametrize("kind", RestartKind)
def test_three_restarts_without_progress_are_enough_whatever_they_were_charged_to(kind: RestartKind) -> None:
    for fruitless in range(FRUITLESS_MAX + 1):
        decision = recovery.decide(gang(Restarts(fruitless=fruitless, total=fruitless)), verdict(kind))
        if fruitless < FRUITLESS_MAX:
            assert isinstance(decision, Restart)
            assert decision.restarts.fruitless == fruitless + 1
        else:
            assert isinstance(decision, NoRestart)
            assert decision.reason is Reason.NO_PROGRESS


@pytest.mark.parametrize(
    ("kind", "policy", "reason", "goes_on"),
    [
        (FAILURE, FailurePolicy.FAIL, Reason.COMMAND_FAILED, False),
        (FAILURE, FailurePolicy.RESTART_GANG, Reason.COMMAND_FAILED, True),
        (FAILURE, FailurePolicy.RESTART_GANG, Reason.COMMAND_KILLED, True),
        *((FAILURE, FailurePolicy.RESTART_GANG, reason, False) for reason in sorted(START_FAILURES)),
        *((FAILURE, FailurePolicy.RESTART_RANK, reason, False) for reason in sorted(START_FAILURES)),
        (LOSS, FailurePolicy.FAIL, Reason.MACHINE_LOST, True),
        (RECLAIM, FailurePolicy.FAIL, Reason.MACHINE_RECLAIMED, True),
        (OURS, FailurePolicy.FAIL, Reason.LEASE_LOST, True),
    ],
)
def test_only_what_the_user_allows_and_what_can_help_is_started_again(
    kind: RestartKind, policy: FailurePolicy, reason: Reason, goes_on: bool
) -> None:
    decision = recovery.decide(gang(policy=policy), verdict(kind, reason))
    assert isinstance(decision, Restart) is goes_on
    if isinstance(decision, NoRestart):
        assert decision == NoRestart(reason=None, why="")  # the cause says it all


@pytest.mark.parametrize(
    ("kind", "policy", "why"),
    [
        (FAILURE, FailurePolicy.FAIL, ""),
        (FAILURE, FailurePolicy.RESTART_GANG, ""),
        (LOSS, FailurePolicy.FAIL, "maxAttempts is 0"),
        (RECLAIM, FailurePolicy.FAIL, "maxAttempts is 0"),
        (OURS, FailurePolicy.FAIL, "maxAttempts is 0"),
    ],
)
def test_no_attempts_means_no_restart_of_any_kind(kind: RestartKind, policy: FailurePolicy, why: str) -> None:
    decision = recovery.decide(gang(max_restarts=0, policy=policy), verdict(kind))
    assert isinstance(decision, NoRestart)
    assert decision.reason is None
    assert why in decision.why


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (FAILURE, "Restart 2 of 3 for a command that failed"),
        (LOSS, "Restart 2 of 3 for lost machines"),
        (RECLAIM, "Restart 2 of 3 for reclaimed machines"),
        (OURS, "Restart that counts for nothing"),
    ],
)
def test_a_restart_says_what_it_is_charged_to(kind: RestartKind, words: str) -> None:
    assert recovery.describe(spent(kind, 2), kind, gang().plan) == words
