"""Which failure is the run's reason, and how it is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.core import blame
from coordinator.core.gang_state import Failure, Gang, MemberRecord, Settlement, incarnation_for
from mesh.ids import Epoch, MachineName, Rank, RunName, RunUid
from mesh.messages import CauseEvidence, ProcessExit
from mesh.plan import RunPlan
from mesh.reasons import Reason

MEMBER = MemberRecord(
    incarnation=incarnation_for(RunUid("u"), Epoch(1), Rank(1), "t"),  # type: ignore[arg-type]
    machine=MachineName("local-2"),
    address="127.0.0.3",
    ordered_at=0.0,
)
KILLED = ProcessExit(signal=9)
FAILED = ProcessExit(code=1)


@pytest.mark.parametrize(
    ("exit_", "evidence", "reason", "sentence"),
    [
        (
            ProcessExit(code=42),
            CauseEvidence(),
            Reason.COMMAND_FAILED,
            "Rank 1 on local-2 ended with exit code 42.",
        ),
        (
            KILLED,
            CauseEvidence(message="FATAL xyz"),
            Reason.COMMAND_KILLED,
            "Rank 1 on local-2 ended with SIGKILL (signal 9): FATAL xyz.",
        ),
        (
            FAILED,
            CauseEvidence(exit=ProcessExit(signal=11), global_rank=3),
            Reason.COMMAND_KILLED,
            "Rank 1 on local-2 failed: worker 3 ended with SIGSEGV (signal 11) (its launcher returned exit code 1).",
        ),
        (
            KILLED,
            CauseEvidence(exit=KILLED, message="The supervisor ended.", by_infrastructure=True),
            Reason.MACHINE_LOST,
            "Rank 1 on local-2 was lost: The supervisor ended.",
        ),
        (
            KILLED,
            CauseEvidence(exit=KILLED, message="/opt/train is linked statically.", is_without_shim=True),
            Reason.SHIM_NOT_LOADED,
            "Rank 1 on local-2 was ended: /opt/train is linked statically.",
        ),
    ],
)
def test_a_failure_is_told_with_its_true_exit_and_whose_it_was(
    exit_: ProcessExit, evidence: CauseEvidence, reason: Reason, sentence: str
) -> None:
    assert blame.failure_reason(exit_, evidence) is reason
    assert blame.exit_failure_message(MEMBER, exit_, evidence) == sentence


@pytest.mark.parametrize(
    ("failed_at", "alive_at", "was_silent"),
    [
        (None, 100.0, True),
        (100.0, 96.7, True),
        (100.0, 100.0, True),
        (100.0, 100.1, False),
        (100.0, None, True),
    ],
    ids=[
        "nobody had failed",
        "it was silent",
        "it may have died at that moment",
        "it lived after the failure",
        "the store has never heard of it",
    ],
)
def test_a_machine_explains_a_failure_unless_it_was_heard_of_since(
    failed_at: float | None, alive_at: float | None, was_silent: bool
) -> None:
    assert blame.was_silent_before(failed_at, alive_at) is was_silent


@pytest.mark.parametrize(
    ("settlement", "is_expiring", "cause"),
    [
        (Settlement.LEASE_LAPSED, True, 1),
        (Settlement.FENCE_FAILED, True, 1),
        (Settlement.FENCE_FAILED, False, 0),
        (Settlement.CONFIRMED, True, 0),
    ],
    ids=["its lease ended", "nothing of it ended", "it says what does not end", "it came back"],
)
def test_a_complaint_yields_to_a_peer_of_which_nobody_heard_again(
    settlement: Settlement, *, is_expiring: bool, cause: int
) -> None:
    peer = replace(MEMBER, settlement=settlement, is_expiring=is_expiring)
    me = replace(MEMBER, incarnation=replace(MEMBER.incarnation, rank=Rank(0)), exit=FAILED)
    me = replace(me, settlement=Settlement.CONFIRMED)
    complaint = Failure(
        rank=Rank(0), at=5.0, reason=Reason.COMMAND_FAILED, message="", exit=FAILED,
        evidence=CauseEvidence(blames_peer=True),
    )  # fmt: skip
    plan = RunPlan(name=RunName("demo"), command=("true",), nodes=2)
    gang = Gang(
        uid=RunUid("u"), plan=plan, created_at=0.0, members={Rank(0): me, Rank(1): peer}, failures=[complaint]
    )
    assert blame.judge(gang).cause.rank == cause
