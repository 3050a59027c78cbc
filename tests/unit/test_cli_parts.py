"""The CLI's pure parts: exit codes, tables, log lines, the story, what becomes a job, and how light the imports are."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agents.machine_identity import KnownIdentity, write_identity
from agents.machine_state import claimed
from mesh.cli import chaos, machines
from mesh.cli.attend import StoryTeller, summary_of
from mesh.cli.dry_run import print_dry_run
from mesh.cli.exit_codes import ExitCode, code_of_agent, code_of_error, code_of_run
from mesh.cli.head import HeadOptions, head_environment
from mesh.cli.job_input import PASSED_ON, as_submitted, read_job
from mesh.cli.log_view import LogView, OutputPump
from mesh.cli.options import OutputFormat
from mesh.cli.output import end_of, lay_out, span
from mesh.cli.run import RunOptions
from mesh.cli.tables import MACHINES
from mesh.cli.terminal import OutputClosedError, Terminal, printable
from mesh.deployment import (
    DeploymentRecord,
    not_running,
    process_started,
    read_record,
    state_folder,
    write_record,
)
from mesh.errors import (
    AuthenticationError,
    ConflictError,
    DeploymentError,
    MeshError,
    MeshTimeoutError,
    NotFoundError,
    RemoteProtocolError,
    SpecError,
    StorageError,
    TransportError,
)
from mesh.reasons import Reason
from mesh.spec import job_from_flags
from mesh.submission import dry_run_answer, facts_for, prepare


def run_that(
    state: str, *, exit_code: int | None = None, reason: str | None = None, **status: Any
) -> dict[str, Any]:
    return {
        "metadata": {"name": "r", "uid": "u", "labels": {}, "createdAt": 100.0},
        "spec": {},
        "status": {
            "state": state,
            "reason": reason,
            "message": "why",
            "epoch": 1,
            "exitCode": exit_code,
            "barrier": {"arrived": 0, "of": 2},
            "startedAt": 101.0,
            "endedAt": 113.0,
            "path": None,
            "conditions": [],
            "cause": None,
            "restarts": {"total": 0},
            "epochs": [{"epoch": 2, "restored": "1-7", "restoredStep": 7}],
            **status,
        },
    }


@pytest.mark.parametrize(
    ("run", "code"),
    [
        (run_that("Succeeded", exit_code=0), 0),
        (run_that("Suspended"), 123),
        (run_that("Failed", exit_code=42), 42),
        (run_that("Failed", exit_code=139), 139),
        (run_that("Failed"), 1),
        (run_that("Failed", exit_code=0), 1),
        (run_that("Failed", exit_code=127, reason="CommandNotFound"), 127),
        (run_that("Cancelled", exit_code=130), 130),
        (run_that("Cancelled", exit_code=0), 130),
    ],
)
def test_a_run_that_did_not_succeed_is_never_exit_code_zero(run: dict[str, Any], code: int) -> None:
    assert code_of_run(run) == code


STEP_5 = "r: waiting for a checkpoint of step 5 or later"


@pytest.mark.parametrize(
    ("run", "at_step", "left_s", "missing"),
    [
        (run_that("Assembling"), 5, 0.5, "r is Assembling: waiting for it to run."),
        (run_that("Running", checkpoint=None), 5, 0.5, f"{STEP_5}; none is committed yet."),
        (run_that("Running", checkpoint={"step": None}), 5, 0.5, f"{STEP_5}; the newest names no step."),
        (run_that("Running", checkpoint={"step": 4}), 5, 0.5, f"{STEP_5}; the newest is of step 4."),
        (run_that("Running", checkpoint={"step": 7}), 5, 0.0, ""),
        (run_that("Running", epochs=[{"runningAt": 90.0}]), None, 20.0, "r runs: harm in 20s."),
    ],
)  # fmt: skip
def test_chaos_says_what_its_moment_waits_for(
    run: dict[str, Any], at_step: int | None, left_s: float, missing: str
) -> None:
    assert chaos._until(run, at_step=at_step, after_s=30.0, now=100.0) == (left_s, missing)


def test_every_error_has_an_exit_code_other_than_zero() -> None:
    assert all(code_of_error(error("x")) != ExitCode.OK for error in MeshError.tree())


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TransportError("no connection"), ExitCode.NO_DEPLOYMENT),
        (MeshTimeoutError("POST /v1/mesh/join was not answered"), ExitCode.NO_DEPLOYMENT),
        (StorageError("the head's disk is full"), ExitCode.NO_DEPLOYMENT),
        (RemoteProtocolError("no head"), ExitCode.NO_DEPLOYMENT),
        (DeploymentError("cannot dial", reason=Reason.UNREACHABLE), ExitCode.NO_DEPLOYMENT),
        (DeploymentError("no nft", reason=Reason.FORBIDDEN), ExitCode.FAILED),
        (DeploymentError("taken", reason=Reason.PORT_TAKEN), ExitCode.CONFLICT),
        (ConflictError("other versions"), ExitCode.CONFLICT),
        (AuthenticationError("another token"), ExitCode.UNAUTHENTICATED),
        (SpecError("--listen"), ExitCode.USAGE),
    ],
    ids=repr,
)
def test_an_agent_ends_as_the_table_says(error: MeshError, code: ExitCode) -> None:
    """3 may be tried again, 1 is for this machine's owner."""
    assert code_of_agent(error) == code


def test_a_table_fits_and_only_flexible_columns_give_way() -> None:
    rows = [["NAME", "STATE", "MESSAGE"], ["a" * 20, "Running", "m" * 90], ["b", "Failed", "日本語" * 20]]
    for line in lay_out(rows, 60, [0, 2]):
        assert len(line.encode("utf-16-le")) // 2 <= 60
    assert "Running" in lay_out(rows, 60, [0, 2])[1]
    assert lay_out(rows, 10_000, [])[1].endswith("m" * 90)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0s"),
        (3.21, "3.2s"),
        (59, "59s"),
        (184, "3m4s"),
        (7500, "2h5m"),
        (90000, "1d1h"),
        (3600, "1h"),
    ],
)
def test_a_length_of_time_is_its_two_largest_units(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_an_end_is_a_code_or_a_signals_name() -> None:
    assert end_of({"code": 42, "signal": None}) == "exit 42"
    assert end_of({"code": None, "signal": 9}) == "SIGKILL"
    assert end_of({"code": None, "signal": 99}) == "signal 99"
    assert end_of(None) == "-"


def test_control_characters_never_reach_the_terminal() -> None:
    assert printable("a\x1b[31mb\x07\nc\ud800") == "a�[31mb� c�"


def line(text: str, *, rank: int = 0, partial: bool = False, continued: bool = False) -> dict[str, Any]:
    return {
        "cursor": "1",
        "at": 0.0,
        "rank": rank,
        "epoch": 1,
        "stream": "stdout",
        "text": text,
        "partial": partial,
        "continued": continued,
    }


def test_lines_of_several_ranks_say_which() -> None:
    view = LogView(Terminal(tty_free=True), prefixed=True)
    assert view.render(line("hello", rank=1)) == "[rank 1] hello\n"
    epochs = LogView(Terminal(tty_free=True), prefixed=True, epochs=True, timestamps=True)
    assert epochs.render(line("x")) == "1970-01-01T00:00:00.000Z [rank 0 epoch 1] x\n"


def test_previews_are_for_terminals_only_and_a_long_line_stays_one() -> None:
    view = LogView(Terminal(tty_free=True), prefixed=False)
    assert view.render(line("50 %", partial=True)) == ""
    assert view.render(line("abc", continued=True)) + view.render(line("def")) == "abcdef\n"


def test_on_a_terminal_a_preview_is_replaced_by_what_comes_next() -> None:
    terminal = Terminal(tty_free=True)
    terminal.stdout_is_terminal = True
    view = LogView(terminal, prefixed=False)
    assert view.render(line("50 %", partial=True)) == "50 %"
    assert view.render(line("60 %", partial=True)) == "\r\x1b[2K60 %"
    assert view.render(line("done")) == "\r\x1b[2Kdone\n"
    assert view.finish() == ""


async def test_output_is_written_in_order_and_a_reader_that_left_is_told() -> None:
    reading, writing = os.pipe()
    saved = os.dup(1)
    try:
        os.dup2(writing, 1)
        pump = OutputPump()
        for number in range(100):
            await pump.put(f"{number}\n")
        await pump.drain()
        assert os.read(reading, 65536).decode().split() == [str(n) for n in range(100)]
        os.close(reading)
        gone = OutputPump()
        with pytest.raises(OutputClosedError):
            await gone.put("x")
            await gone.drain()
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(writing)


async def test_a_slow_reader_holds_back_what_feeds_it() -> None:
    reading, writing = os.pipe()
    saved = os.dup(1)
    try:
        os.dup2(writing, 1)
        pump = OutputPump()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                for _ in range(64):
                    await pump.put("x" * 65536)
        assert pump.waiting_characters <= 1024 * 1024 + 65536
    finally:
        os.close(reading)
        os.dup2(saved, 1)
        os.close(saved)
        os.close(writing)


def event(kind: str, message: str = "", *, epoch: int = 1, rank: int | None = None) -> dict[str, Any]:
    return {"kind": kind, "message": message, "epoch": epoch, "rank": rank}


def test_the_story_counts_arrivals_and_says_each_thing_once() -> None:
    teller = StoryTeller()
    run = run_that("Running")
    assert teller.tell(
        run, [event("Submitted", "x"), event("Arrived", rank=0), event("Arrived", rank=1)]
    ) == [
        "at the barrier: 1 of 2",
        "at the barrier: 2 of 2",
    ]
    assert teller.tell(run, [event("Running", "Every rank runs.")]) == ["2 of 2 ranks run"]
    lost = event("MemberLost", "m1 is lost.")
    assert teller.tell(run, [lost]) == ["m1 is lost."]
    assert teller.tell(run, [lost]) == []
    again = [event("Arrived", epoch=2, rank=0), event("Arrived", epoch=2, rank=0)]
    assert teller.tell(run, again) == ["at the barrier: 1 of 2"]
    assert teller.tell(run, [event("Running", "Every rank runs.", epoch=2)]) == [
        "2 of 2 ranks run again, in epoch 2, restored from step 7"
    ]


def test_what_was_warned_of_at_the_submit_is_not_told_again() -> None:
    wide = {"type": "WANBound", "message": "Training between distant machines is limited by the network."}
    run = run_that("Running", conditions=[wide])
    assert StoryTeller().tell(run, []) == [f"WANBound: {wide['message']}"]
    assert StoryTeller([f"WANBound: {wide['message']}"]).tell(run, []) == []


def test_a_long_sentence_is_told_in_full_once() -> None:
    teller = StoryTeller()
    run = run_that("Assembling")
    why = f"rank 0 does not reach rank 1: {'the port does not answer, ' * 12}the other way works."
    beginning = "rank 0 does not reach rank 1: the port does not answer, the port does not … (as before)"
    assert teller.tell(run, [event("Refused", why)]) == [why]
    failed = event("AssemblyFailed", f"{why} No other machine can take rank 1.")
    assert teller.tell(run, [failed]) == [f"{beginning} No other machine can take rank 1."]
    assert teller.tell(run, [event("Refused", why, epoch=2)]) == [beginning]
    short = "m1 is lost."
    assert teller.tell(run, [event("MemberLost", short)]) == [short]
    assert teller.tell(run, [event("MemberLost", short, epoch=2)]) == [short]


def test_the_summary_says_how_it_ended_and_where_to_read_more() -> None:
    assert summary_of(run_that("Succeeded", exit_code=0)) == "r succeeded after 12s (2 ranks)."
    assert summary_of(run_that("Failed", cause={"hint": "Add a barrier."})).splitlines() == [
        "r failed after 12s: why",
        "Add a barrier.",
        "More: mesh describe r",
    ]
    assert summary_of(run_that("Succeeded", exit_code=0, restarts={"total": 2})).endswith(
        "(2 ranks, 2 restarts)."
    )
    suspended = summary_of(run_that("Suspended"))
    assert "suspended, not ended" in suspended
    assert "mesh resume r" in suspended


def options(**given: Any) -> RunOptions:
    defaults: dict[str, Any] = {
        "command": (),
        "file": None,
        "shape": {},
        "env_files": (),
        "detach": False,
        "dry_run": False,
        "model_size": None,
        "output": OutputFormat.TABLE,
        "tty_free": True,
        "state": None,
        "url": None,
    }
    return RunOptions(**{**defaults, **given})


def test_nothing_to_run_says_what_to_do() -> None:
    with pytest.raises(SpecError, match="There is nothing to run") as caught:
        read_job(options())
    assert "mesh run -f job.yaml" in caught.value.hint


def test_a_file_and_flags_together_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="--nodes, --workdir, COMMAND cannot be given beside it"):
        read_job(options(file=str(tmp_path / "j"), shape={"nodes": "2", "working_dir": "/"}, command=("x",)))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"nowhere\.yaml cannot be read"):
        read_job(options(file=str(tmp_path / "nowhere.yaml")))
    broken = tmp_path / "broken.yaml"
    broken.write_bytes(b"spec:\n  command: [\xff]\n")
    with pytest.raises(SpecError, match="not UTF-8 text \\(line 2"):
        read_job(options(file=str(broken)))


def test_a_local_run_gets_this_directory_and_this_shells_paths(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in PASSED_ON:
        monkeypatch.setenv(name, f"/here/{name}")
    job = job_from_flags(command=["x"], env=["PATH=/mine"])
    data = as_submitted(job, local=True)
    assert data["spec"]["workingDir"] == str(tmp_path)
    assert data["spec"]["env"] == {
        "PATH": "/mine",
        **{name: f"/here/{name}" for name in PASSED_ON if name != "PATH"},
    }
    assert "workingDir" not in as_submitted(job, local=False)["spec"]


@pytest.mark.parametrize(
    ("flags", "nodes"), [({"nodes": 2, "gpu": ["H100"]}, 2), ({"total_gpus": 16, "gpu": ["H100"]}, 2)]
)
def test_a_dry_run_of_the_documents_commands_shows_shape_hold_and_bound(
    flags: dict[str, Any], nodes: int, capfd: pytest.CaptureFixture[str]
) -> None:
    job = job_from_flags(command=["torchrun", "train.py"], launcher="torchrun", **flags)
    answer = dry_run_answer(prepare(job, facts=facts_for(job)))
    assert answer["topology"]["nodes"] == nodes
    assert answer["estimate"]["gangHoldUSD"] == 0.0
    assert answer["estimate"]["note"]
    print_dry_run(Terminal(tty_free=True), answer, OutputFormat.TABLE)
    printed = capfd.readouterr().out
    for word in ("topology", "gangHoldUSD", "assembly bound", "Nothing was created"):
        assert word in printed


def test_a_record_is_private_whole_and_knows_whether_its_process_lives(tmp_path: Path) -> None:
    started = process_started(os.getpid())
    assert started is not None
    record = DeploymentRecord(
        version="1", url="http://h:1", token="t", pid=os.getpid(), pid_started=started, local=True, machines=2
    )
    write_record(tmp_path, record)
    assert read_record(tmp_path) == record
    assert (tmp_path / "deployment.json").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["deployment.json"]
    assert record.is_alive
    assert not replace(record, pid_started=started - 60).is_alive


def test_a_damaged_record_is_said(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None
    (tmp_path / "deployment.json").write_text("{")
    with pytest.raises(DeploymentError, match="is damaged"):
        read_record(tmp_path)
    (tmp_path / "deployment.json").write_text("[]")
    with pytest.raises(DeploymentError, match="is damaged"):
        read_record(tmp_path)


def test_the_state_folder_is_as_given_or_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GANGMESH_STATE", "/from/env")
    assert state_folder() == Path("/from/env")
    assert state_folder("/given") == Path("/given")
    monkeypatch.delenv("GANGMESH_STATE")
    assert state_folder() == Path("~/.gangmesh").expanduser()


HEAVY = ("aiohttp", "pydantic", "ray", "sqlalchemy", "rich", "yaml", "psutil", "msgpack", "asyncio")


@pytest.mark.parametrize("module", ["mesh", "mesh.cli.app"])
def test_nothing_heavy_is_imported_before_it_is_needed(module: str) -> None:
    code = f"import sys, {module}; print(*(m for m in {HEAVY!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    allowed = {"asyncio"} if module == "mesh.cli.app" else set()
    assert set(done.stdout.split()) <= allowed


def test_a_password_in_the_journals_url_is_no_argument_of_the_head(tmp_path: Path) -> None:
    options = HeadOptions(state=tmp_path, machines=2, listen="127.0.0.1:0", db="postgresql://me:secret@db/j")
    assert not any("secret" in argument for argument in options.arguments(3))
    assert head_environment(options)["GANGMESH_DB"] == "postgresql://me:secret@db/j"


async def test_a_drain_ends_when_the_machine_is_gone_for_good(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A deployment that began again knows nothing of it."""
    held = {"name": "local-1", "state": "InUse", "run": "r", "waitsFor": None}

    class Client:
        is_local = False
        listings = [[held], [held], []]

        async def __aenter__(self) -> Client:
            return self

        async def __aexit__(self, *_: object) -> None: ...

        async def list_machines(self) -> list[dict[str, Any]]:
            return self.listings.pop(0)

        async def reclaim(self, name: str, **_: Any) -> dict[str, Any]:
            return held

    monkeypatch.setattr(machines, "client_for", lambda state, url: Client())
    monkeypatch.setattr(machines, "LOOK_S", 0.001)
    assert await machines._drain("local-1", 5.0, "", False, OutputFormat.TABLE, None, None) == 0
    assert "local-1 is gone" in capfd.readouterr().err


def test_what_relays_carried_is_part_of_a_run_s_story() -> None:
    from mesh.cli.describe import describe_relayed

    rows = [
        {"relay": relay, "run": "u", "dialler": "a", "target": "b", "bytes": amount}
        for relay, amount in (("head", 512), ("relay-3", 3 * 2**20))
    ]
    assert describe_relayed([]) == []
    assert describe_relayed(rows) == [
        "Relayed:      3.0 MiB",
        "  a and b through head: 512 B",
        "  a and b through relay-3: 3.0 MiB",
    ]


@pytest.mark.parametrize("error", [None, NotFoundError("no relay"), ConflictError("no mesh port")])
async def test_a_relay_is_drained_by_its_name_too(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], error: MeshError | None
) -> None:
    class Client:
        async def __aenter__(self) -> Client:
            return self

        async def __aexit__(self, *_: object) -> None: ...

        async def list_machines(self) -> list[dict[str, Any]]:
            return []

        async def reclaim(self, name: str, **_: Any) -> dict[str, Any]:
            raise NotFoundError(f"no machine {name}")

        async def remove_relay(self, name: str) -> None:
            if error is not None:
                raise error

    monkeypatch.setattr(machines, "client_for", lambda state, url: Client())
    drained = machines._drain("relay-1", 5.0, "", False, OutputFormat.TABLE, None, None)
    if error is None:
        assert await drained == 0
        assert "relay-1" in capfd.readouterr().err
    else:
        with pytest.raises(NotFoundError, match="no machine relay-1"):
            await drained


def test_a_folder_that_an_agent_has_names_it_and_how_it_is_stopped_and_stays_who_it_is(
    tmp_path: Path,
) -> None:
    with (
        claimed(tmp_path),
        pytest.raises(DeploymentError, match=f"process {os.getpid()}") as refused,
        claimed(tmp_path),
    ):
        pass
    assert f"kill {os.getpid()}: it can come back as the same" in refused.value.hint


def test_on_a_machine_that_has_joined_it_is_said_whose_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".gangmesh-machine"
    folder.mkdir()
    identity = KnownIdentity(head="https://head:8471", name="m-1", secret="s", bundle="")
    with claimed(folder):
        write_identity(folder, identity)
        told = not_running(tmp_path / "state")
    assert "this is a machine of https://head:8471" in told.message and "--url https://head:8471" in told.hint
    assert "machine of" not in not_running(tmp_path / "state").message, "its agent has ended"


def test_the_wide_table_of_machines_says_who_can_be_dialled_and_the_private_network() -> None:
    columns = {column.title: column.text for column in MACHINES}
    on_mesh = {"network": {"dialable": False, "privateNetwork": "vpc"}}
    assert columns["DIALABLE"](on_mesh) == "no, by a relay"
    assert columns["PRIVATE NETWORK"](on_mesh) == "vpc"
    assert columns["DIALABLE"]({"network": None}) == columns["PRIVATE NETWORK"]({"network": None}) == "-"
