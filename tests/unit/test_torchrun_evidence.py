"""Why a command failed, told from what it printed: torchrun's summary, error files, peers, known faults."""

from __future__ import annotations

import json

import pytest

from agents.launcher import evidence as words
from agents.launcher.base import parse_oom_kills, strategy_for
from agents.launcher.plain import Plain
from agents.launcher.strategy import CommandEnd
from agents.launcher.torchrun import (
    Torchrun,
    failures_in,
    recorded_message,
    root_failure,
    without_torchrun_words,
)
from mesh.errors import LaunchError
from mesh.messages import ProcessExit
from mesh.states import LauncherKind

LOG = "1129 19:55:04.049000 25342 torch/distributed/elastic/multiprocessing/api.py:"
ONE = ProcessExit(code=1)


def block(index: int, rank: int, code: int, *, text: str = "", file: str = "<N/A>") -> str:
    text = text or "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
    return (
        f"[{index}]:\n  time      : 2026-11-29_19:55:04\n  host      : localhost\n"
        f"  rank      : {rank} (local_rank: {rank % 2})\n  exitcode  : {code} (pid: 77) \n"
        f"  error_file: {file}\n  traceback : {text}\n"
    )


def torchrun_output(before: str, *, root: str, others: str = "  <NO_OTHER_FAILURES>\n", code: int = 1) -> str:
    """As torch 2.13 prints it; the real program is asked in tests/integration/test_launcher_real.py."""
    line, dash = "=" * 60, "-" * 60
    return (
        f"W1129 19:55:03.925000 25342 torch/distributed/run.py:874] \n{'*' * 41}\n"
        "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid your system being "
        f"overloaded, please further tune the variable in your application as needed. \n{'*' * 41}\n{before}"
        f"W{LOG}1028] Sending process 25520 closing signal SIGTERM\n"
        f"E{LOG}1002] failed (exitcode: {code}) local_rank: 1 (pid: 77) of binary: /usr/bin/python3\n"
        "Traceback (most recent call last):\n"
        '  File "torchrun", line 8, in <module>\n    sys.exit(main())\n'
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        f"{line}\ntrain.py FAILED\n{dash}\nFailures:\n{others}{dash}\n"
        f"Root Cause (first observed failure):\n{root}{line}\n"
    )


def traceback(error: str, *, prefix: str = "") -> str:
    lines = [
        "Traceback (most recent call last):",
        '  File "train.py", line 9, in <module>',
        "    step()",
        error,
    ]
    return "".join(f"{prefix}{line}\n" for line in lines)


@pytest.mark.parametrize(
    ("code", "exit"),
    [(42, ProcessExit(code=42)), (-11, ProcessExit(signal=11)), (-9, ProcessExit(signal=9))],
)
def test_the_summary_has_the_workers_own_end_and_its_global_rank(code: int, exit: ProcessExit) -> None:
    output = torchrun_output("", root=block(0, 5, code), others=block(1, 4, -15), code=code)
    evidence = Torchrun().explain(CommandEnd(exit=ONE, output=output)).evidence
    assert (evidence.exit, evidence.global_rank, evidence.blames_peer) == (exit, 5, False)
    assert evidence.message == "", "what torchrun says itself is not the worker's"


def test_a_worker_that_torchrun_stopped_is_never_the_first_cause() -> None:
    """Its times have a resolution of one second, so the order of one second is by chance."""
    output = torchrun_output("", root=block(0, 0, -15), others=block(1, 1, 42))
    assert [f.global_rank for f in failures_in(output)] == [0, 1]
    evidence = Torchrun().explain(CommandEnd(exit=ONE, output=output)).evidence
    assert (evidence.exit, evidence.global_rank) == (ProcessExit(code=42), 1)


def test_when_all_were_stopped_that_is_what_is_said() -> None:
    output = torchrun_output("", root=block(0, 0, -15))
    evidence = Torchrun().explain(CommandEnd(exit=ONE, output=output)).evidence
    assert evidence.exit == ProcessExit(signal=15)


def test_a_summary_that_was_cut_off_leaves_the_log_line() -> None:
    output = torchrun_output("", root="", code=42).partition("Traceback")[0]
    evidence = Torchrun().explain(CommandEnd(exit=ONE, output=output)).evidence
    assert (evidence.exit, evidence.global_rank) == (ProcessExit(code=42), None)


@pytest.mark.parametrize("code", ["9" * 5000, "-" + "9" * 30])
def test_a_command_that_prints_nonsense_in_torchruns_words_is_no_workers_failure(code: str) -> None:
    assert root_failure(f"[0] failed (exitcode: {code}) local_rank: 0 (pid: 3)\n") is None


def test_words_without_a_newline_before_a_kill_are_kept_apart_from_torchruns_own() -> None:
    output = torchrun_output("step 7\nFATAL xyz", root=block(0, 1, -9), code=-9)
    explanation = Torchrun().explain(CommandEnd(exit=ONE, output=output))
    assert explanation.last_lines == ("step 7", "FATAL xyz")
    assert explanation.evidence.message.endswith("FATAL xyz")
    assert explanation.evidence.hint == words.KILLED_HINT


@pytest.mark.parametrize(("code", "is_its"), [(-9, True), (-11, False), (1, False)])
def test_the_kernels_memory_killer_is_named_when_it_was_active(code: int, is_its: bool) -> None:
    output = torchrun_output("", root=block(0, 1, code))
    evidence = Torchrun().explain(CommandEnd(exit=ONE, output=output, oom_killed=True)).evidence
    assert evidence.oom_killed is is_its
    assert (evidence.hint == words.OOM_HINT) is is_its


def test_a_shells_word_for_a_killed_child_counts_as_killed() -> None:
    evidence = Plain().explain(CommandEnd(exit=ProcessExit(code=137), output="", oom_killed=True)).evidence
    assert evidence.oom_killed
    assert evidence.hint == words.OOM_HINT


@pytest.mark.parametrize(
    ("text", "count"), [("low 0\noom 4\noom_kill 3\n", 3), ("", 0), ("oom_kill_disable 0\n", 0)]
)
def test_the_kernels_counter_is_read(text: str, count: int) -> None:
    assert parse_oom_kills(text) == count


def test_a_torchrun_that_was_told_to_stop_says_by_which_signal() -> None:
    output = traceback(
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: 15"
    )
    evidence = Torchrun().explain(CommandEnd(exit=ONE, output=output)).evidence
    assert evidence.exit == ProcessExit(signal=15)
    assert evidence.hint == words.STOPPED_HINT


@pytest.mark.parametrize(
    ("error", "address", "global_rank"),
    [
        ("RuntimeError: [a/pair.cc:534] Connection closed by peer [10.0.0.2]:4242", "10.0.0.2", None),
        ("RuntimeError: [a/pair.cc:541] Read error [fd00::2]:1: Connection reset by peer", "fd00::2", None),
        ("DistBackendError: Connection closed by remote peer 10.0.0.3<50123>", "10.0.0.3", None),
        ("RuntimeError: Rank 3 failed to pass monitoredBarrier in 1000 ms", "", 3),
        ("RuntimeError: [Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 1000 ms", "", 1),
        ("RuntimeError: wait timeout after 300000ms", "", None),
    ],
)
def test_a_complaint_says_about_whom(error: str, address: str, global_rank: int | None) -> None:
    assert words.named_peer(error) == words.NamedPeer(address=address, global_rank=global_rank)


def test_the_exception_of_the_failed_rank_is_chosen_among_those_of_others() -> None:
    before = traceback("RuntimeError: mine", prefix="[rank1]: ") + traceback(
        "RuntimeError: other", prefix="[rank0]: "
    )
    output = torchrun_output(before, root=block(0, 1, 1))
    evidence = Torchrun().explain(CommandEnd(exit=ONE, output=output)).evidence
    assert "RuntimeError: mine" in evidence.message
    assert "other" not in evidence.message


def test_an_error_file_wins_over_what_was_printed() -> None:
    file = json.dumps({"message": {"message": "ValueError: from the file", "extraInfo": {}, "errorCode": 1}})
    output = torchrun_output(traceback("ValueError: printed"), root=block(0, 1, 1))
    evidence = Torchrun().explain(CommandEnd(exit=ONE, output=output, error_file=file)).evidence
    assert "from the file" in evidence.message
    assert "printed" not in evidence.message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", ""),
        ("{half", ""),
        ("[]", ""),
        ('{"message": 3}', ""),
        ('{"message": "text alone"}', "text alone"),
        ('{"message": {"message": "x"}}', "x"),
    ],
)
def test_an_error_file_that_is_not_one_says_nothing(content: str, message: str) -> None:
    assert recorded_message(content) == message


PEER_ERRORS = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4242",
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:541] Read error [10.0.0.2]:1: "
    "Connection reset by peer",
    "torch.distributed.DistBackendError: NCCL error: ncclRemoteError: A call failed possibly due to a network "
    "error or a remote process exiting prematurely.",
    "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800ms for recv operation to complete",
    "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//cpu//0/1",
    "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
)


@pytest.mark.parametrize("error", PEER_ERRORS)
def test_an_error_about_a_peer_is_a_victims_error(error: str) -> None:
    output = torchrun_output(traceback(error, prefix="[rank0]: "), root=block(0, 0, 1))
    assert Torchrun().explain(CommandEnd(exit=ONE, output=output)).evidence.blames_peer
    assert Plain().explain(CommandEnd(exit=ONE, output=traceback(error))).evidence.blames_peer


def test_an_aborting_watchdog_blames_its_peer() -> None:
    said = "[rank0]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE)\n"
    output = torchrun_output(said, root=block(0, 0, -6), code=-6)
    assert Torchrun().explain(CommandEnd(exit=ONE, output=output)).evidence.blames_peer


@pytest.mark.parametrize(("error", "code"), [("ValueError: loss is nan", 1), ("", 42), ("", -11), ("", -9)])
def test_an_old_line_about_a_peer_does_not_turn_an_own_fault_into_a_victims(error: str, code: int) -> None:
    before = "download failed: Connection reset by peer, trying again\n" + (traceback(error) if error else "")
    output = torchrun_output(before, root=block(0, 1, code), code=code)
    assert not Torchrun().explain(CommandEnd(exit=ONE, output=output)).evidence.blames_peer


@pytest.mark.parametrize(
    ("output", "exit", "hint"),
    [
        ("terminate called without an active exception\n", ProcessExit(signal=6), "dist.barrier()"),
        (
            "torchrun: error: argument --node-rank/--node_rank: invalid int value: ''\n",
            ProcessExit(code=2),
            "rank",
        ),
        ("bash: line 1: torchrun: command not found\n", ProcessExit(code=127), "PATH"),
        ("bash: ./train.sh: Permission denied\n", ProcessExit(code=126), "chmod"),
        (traceback("RuntimeError: Unable to find address for: ^lo"), ONE, "GLOO_SOCKET_IFNAME"),
        (traceback("OSError: [Errno 98] Address already in use"), ONE, "MASTER_PORT"),
        (traceback("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate"), ONE, "memory"),
        (traceback("OSError: [Errno 28] No space left on device"), ONE, "full"),
        ("", ProcessExit(signal=15), "did not send"),
        ("", ProcessExit(code=143), "did not send"),
        (traceback("ModuleNotFoundError: No module named 'torch'"), ONE, "package"),
        (traceback("ValueError: nothing known"), ONE, ""),
    ],
)
def test_a_known_fault_says_what_to_do(output: str, exit: ProcessExit, hint: str) -> None:
    found = Plain().explain(CommandEnd(exit=exit, output=output)).evidence.hint
    assert hint in found
    assert bool(hint) == bool(found)


def test_the_exit_race_is_recognised_through_torchrun() -> None:
    output = torchrun_output(
        "ok\nterminate called without an active exception\n", root=block(0, 1, -6), code=-6
    )
    evidence = Torchrun().explain(CommandEnd(exit=ONE, output=output)).evidence
    assert "barrier" in evidence.hint


def test_torchruns_own_failure_is_told_as_such() -> None:
    output = traceback("torch.distributed.DistNetworkError: The client socket has timed out after 60000ms")
    evidence = Torchrun().explain(CommandEnd(exit=ONE, output=output)).evidence
    assert evidence.exit == ONE
    assert evidence.message.startswith("torch.distributed.DistNetworkError: The client socket")
    assert evidence.blames_peer


def test_a_success_has_its_last_lines_and_no_cause() -> None:
    explanation = Torchrun().explain(CommandEnd(exit=ProcessExit(code=0), output="a\nb\n"))
    assert explanation.last_lines == ("a", "b")
    assert (explanation.evidence.message, explanation.evidence.hint) == ("", "")


def test_a_plain_command_that_runs_torchrun_is_understood_too() -> None:
    output = torchrun_output("", root=block(0, 1, 42), code=42)
    evidence = Plain().explain(CommandEnd(exit=ONE, output=output)).evidence
    assert evidence.exit == ProcessExit(code=42)


def test_last_lines_are_bounded_and_progress_bars_are_one_line() -> None:
    text = "".join(f"line {i}\n" for i in range(50)) + "10%\r50%\r100%\n" + "x" * 10_000
    lines = words.last_lines(text)
    assert len(lines) == words.LAST_LINES_MAX
    assert lines[-2] == "100%"
    assert len(lines[-1]) == words.LINE_CHARACTERS_MAX


def test_an_exception_with_several_lines_is_kept_whole() -> None:
    output = traceback("ValueError: one") + "two\n" + "Traceback (most recent call last):\n"
    assert words.decisive_exception(output) == "ValueError: one\ntwo"


def test_output_without_torchruns_words_is_left_alone() -> None:
    assert without_torchrun_words("a\nb") == "a\nb"


@pytest.mark.parametrize(
    ("argv", "is_refused"),
    [
        (("torchrun", "train.py"), False),
        (("torchrun", "--nproc-per-node", "2", "train.py"), False),
        (("torchrun", "--nproc-per-node=2", "--standalone", "-m", "pkg"), False),
        (("torchrun", "--help"), False),
        (("/opt/bin/torchrun", "--nproc-per-node", "2"), True),
        (("torchrun",), True),
        (("bash", "-c", "exec torchrun train.py"), False),
        ((), True),
        (("",), True),
    ],
)
def test_a_torchrun_command_without_a_script_is_refused(argv: tuple[str, ...], is_refused: bool) -> None:
    if is_refused:
        with pytest.raises(LaunchError):
            Torchrun().check(argv)
    else:
        Torchrun().check(argv)


def test_a_launcher_that_is_not_there_yet_is_refused_by_name() -> None:
    with pytest.raises(LaunchError, match="Verl"):
        strategy_for(LauncherKind.VERL)
    assert strategy_for(LauncherKind.PLAIN).kind is LauncherKind.PLAIN
