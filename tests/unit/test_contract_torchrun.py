"""The contract against the real torch: every rank's command, word for word, with nothing but its environment.

Field failures 1, 2 and 6: nobody thinks it is the rendezvous host; the host name resolves to loopback or to nothing;
IPv6 addresses.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mesh.contract import clean_base_environment, rank_environment
from mesh.ids import Epoch, Incarnation, IncarnationToken, Rank, RunName, RunUid
from mesh.plan import RunPlan
from mesh.states import LauncherKind, Transport

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not shutil.which("unshare"), reason="needs util-linux"),
]

DEADLINE_S = 240
Facts = list[dict[str, Any]]
"""What each process of a gang saw, by its global rank."""
NOT_IN_TEXT_ORDER = ("127.0.1.20", "127.0.1.3")
"""c10d would order these the other way round: text order is not rank order."""

SCRIPT = """\
import json, os, socket, torch, torch.distributed as dist
dist.init_process_group("gloo")
ones = torch.ones(1000)
dist.all_reduce(ones)
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK"]
facts = {name: os.environ[name] for name in names}
facts |= {"host": socket.gethostname(), "sum": int(ones[0]), "restarts": os.environ.get("TORCHELASTIC_MAX_RESTARTS")}
with open(f"{os.environ['FACTS']}/{os.environ['RANK']}.json", "w") as file:
    json.dump(facts, file)
dist.barrier()
dist.destroy_process_group()
"""


@contextmanager
def ended_afterwards() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Whatever is started here is gone afterwards."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    with ended_afterwards() as processes:
        yield processes


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """What the processes of one gang saw, two a machine, whose host names resolve to nothing, with old variables."""
    with ended_afterwards() as started:
        return run_gang(
            started,
            tmp_path_factory.mktemp("torchrun"),
            launcher=LauncherKind.TORCHRUN,
            command=["torchrun", "ok.py"],
            gpus_per_node=2,
            prefix=in_nameless_hosts(),
            env=(("RANK", "9"), ("WORLD_SIZE", "99"), ("LOCAL_RANK", "9")),
        )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """The same of a gang without torchrun, one process a machine."""
    with ended_afterwards() as started:
        return run_gang(
            started,
            tmp_path_factory.mktemp("plain"),
            launcher=LauncherKind.PLAIN,
            command=["python", "ok.py"],
            prefix=in_nameless_hosts(),
        )


def in_nameless_hosts() -> list[str]:
    """The start of a command that runs where the host name resolves to nothing; only root may rename a host."""
    if os.geteuid() != 0:
        return []
    return ["unshare", "--uts", "sh", "-c", 'hostname no-such-host.invalid && exec "$@"', "sh"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def run_gang(
    started: list[subprocess.Popen[bytes]],
    folder: Path,
    *,
    launcher: LauncherKind,
    command: Sequence[str],
    addresses: Sequence[str] = NOT_IN_TEXT_ORDER,
    gpus_per_node: int = 0,
    prefix: Sequence[str] = (),
    env: tuple[tuple[str, str], ...] = (),
) -> Facts:
    """Starts every rank, the last one first, waits for all, and returns what each process saw, by global rank."""
    (folder / "ok.py").write_text(SCRIPT)
    facts = folder / "facts"
    facts.mkdir()
    plan = RunPlan(
        name=RunName("demo"),
        command=tuple(command),
        nodes=len(addresses),
        gpus_per_node=gpus_per_node,
        launcher=launcher,
        env=(("FACTS", str(facts)), ("OMP_NUM_THREADS", "1"), *env),
    )
    base = clean_base_environment(os.environ)
    base["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{base['PATH']}"
    port = free_port()
    for rank in reversed(range(len(addresses))):
        incarnation = Incarnation(
            run_uid=RunUid("a" * 16), epoch=Epoch(3), rank=Rank(rank), token=IncarnationToken("b" * 16)
        )
        contract = rank_environment(
            plan=plan,
            incarnation=incarnation,
            addresses=addresses,
            master_port=port,
            transport=Transport.PRIVATE,
            state_dir=str(folder),
            interface="lo",
        )
        started.append(
            subprocess.Popen(
                [*prefix, *command],
                env=base | contract,
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    for process in started:
        output, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, output.decode(errors="replace")[-3000:]
    return [json.loads((facts / f"{rank}.json").read_text()) for rank in range(len(list(facts.iterdir())))]


def test_torchrun_without_a_flag_gives_global_ranks_that_follow_node_ranks(torchrun: Facts) -> None:
    assert [(process["NODE_RANK"], process["LOCAL_RANK"]) for process in torchrun] == [
        ("0", "0"), ("0", "1"), ("1", "0"), ("1", "1"),
    ]  # fmt: skip
    assert {process["sum"] for process in torchrun} == {4}
    assert {process["MASTER_ADDR"] for process in torchrun} == {"127.0.1.20"}
    assert {process["restarts"] for process in torchrun} == {"0"}


def test_the_user_s_rank_variables_do_not_reach_torchruns_workers(torchrun: Facts) -> None:
    seen = [(process["RANK"], process["WORLD_SIZE"], process["LOCAL_RANK"]) for process in torchrun]
    assert seen == [("0", "4", "0"), ("1", "4", "1"), ("2", "4", "0"), ("3", "4", "1")]


def test_plain_gives_one_process_per_machine_and_env_initialization(plain: Facts) -> None:
    assert [(p["NODE_RANK"], p["RANK"], p["LOCAL_RANK"], p["LOCAL_WORLD_SIZE"]) for p in plain] == [
        ("0", "0", "0", "1"), ("1", "1", "0", "1"),
    ]  # fmt: skip
    assert {process["sum"] for process in plain} == {2}


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs a host name of its own")
def test_a_host_name_that_resolves_to_nothing_does_not_matter(torchrun: Facts, plain: Facts) -> None:
    assert {process["host"] for process in (*torchrun, *plain)} == {"no-such-host.invalid"}
    assert [process["sum"] for process in (*torchrun, *plain)] == [4, 4, 4, 4, 2, 2]


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
@pytest.mark.parametrize(
    "launcher", [pytest.param(LauncherKind.TORCHRUN, marks=pytest.mark.long), LauncherKind.PLAIN]
)
def test_ipv6_addresses_work(
    started: list[subprocess.Popen[bytes]], tmp_path: Path, launcher: LauncherKind
) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this host has no IPv6 loopback address")
    program = ["torchrun", "ok.py"] if launcher is LauncherKind.TORCHRUN else ["python", "ok.py"]
    seen = run_gang(started, tmp_path, launcher=launcher, command=program, addresses=["::1", "::1"])
    assert [process["sum"] for process in seen] == [2, 2]


def test_one_machine_under_plain_starts_torchrun_with_one_process_per_gpu(
    started: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    seen = run_gang(
        started,
        tmp_path,
        launcher=LauncherKind.PLAIN,
        command=["torchrun", "ok.py"],
        addresses=["127.0.1.20"],
        gpus_per_node=2,
    )
    assert [process["LOCAL_RANK"] for process in seen] == ["0", "1"]
