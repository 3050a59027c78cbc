"""A launcher with a process of its own ends what a dead supervisor leaves, even what carries no sign of its origin."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agents import control_group, process_tree

LIMIT_S = 30.0

HOST = """
import asyncio, json, os, sys
from agents.launcher.base import LaunchSpec
from agents.launcher.launcher import Launcher, own_this_process
from mesh.ids import Epoch, Incarnation, Rank, new_run_uid, new_token
from mesh.states import LauncherKind

async def main(folder, script):
    me = Incarnation(run_uid=new_run_uid(), epoch=Epoch(1), rank=Rank(0), token=new_token())
    spec = LaunchSpec(
        incarnation=me, launcher=LauncherKind.PLAIN, argv=("bash", "-c", script),
        env={"PATH": os.environ["PATH"], "NODUS_INCARNATION": str(me)},
        working_dir=folder, spool_dir=folder + "/spool", error_file=folder + "/error.json", logs=None,
    )
    os.mkdir(spec.spool_dir)
    launcher = Launcher(owns_process=own_this_process())
    await launcher.launch(spec)
    while True:
        event = await launcher.next_event()
        print(json.dumps({"event": type(event).__name__, "pid": getattr(event, "pid", None)}), flush=True)
        if type(event).__name__ == "TreeEmpty":
            break
    await launcher.close()

asyncio.run(main(*sys.argv[1:]))
"""

LEAVES_NO_TRACE = """
for base in {bases}; do echo $$ > $base/cgroup.procs; done 2> /dev/null
(setsid env -i sh -c 'echo $$ > daemon; exec sleep 600' < /dev/null > /dev/null 2>&1 &)
sleep 600
"""


def wait_for(path: Path) -> int:
    deadline = time.monotonic() + LIMIT_S
    while not (path.exists() and path.read_text().strip()):
        assert time.monotonic() < deadline, f"{path.name} does not come"
        select.select([], [], [], 0.01)
    return int(path.read_text())


@pytest.fixture
def host(tmp_path: Path) -> subprocess.Popen[str]:
    script = LEAVES_NO_TRACE.format(bases=" ".join(control_group.bases()))
    return subprocess.Popen(
        [sys.executable, "-c", HOST, str(tmp_path), script], stdout=subprocess.PIPE, text=True
    )


def test_a_killed_supervisor_leaves_no_daemon_that_hid_its_origin(
    host: subprocess.Popen[str], tmp_path: Path
) -> None:
    daemon = wait_for(tmp_path / "daemon")
    try:
        (supervisor,) = process_tree.children_of(host.pid)
        os.kill(supervisor, signal.SIGKILL)
        output, _ = host.communicate(timeout=LIMIT_S)
        process = process_tree.read_process(daemon)
        assert process is None or not process.is_alive
        events = [json.loads(line)["event"] for line in output.splitlines()]
        assert events == ["CommandStarted", "CommandExited", "TreeEmpty"]
    finally:
        host.kill()
        host.communicate()
        process = process_tree.read_process(daemon)
        if process is not None and process.is_alive:
            os.kill(daemon, signal.SIGKILL)
