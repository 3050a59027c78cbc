"""What comes to the head because its parents died: the head's own is left alone, a command's is ended."""

from __future__ import annotations

import errno
import subprocess
import sys

import psutil
import pytest

from agents.orphans import OrphanReaper

HEAD = """
import os, psutil, subprocess, sys, time
import agents.keeper
from agents.child import become_subreaper
from agents.orphans import OrphanReaper
from coordinator.leftovers import MARK
from mesh.deployment import process_started

def orphan(*argv, **environment):
    "A process that has lost its parent, and so is a child of ours."
    script = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL).pid)"
    return int(subprocess.run([sys.executable, "-c", script, *argv], env=environment, stdout=-1, check=True).stdout)

become_subreaper()
sleep = "/bin/sh", "-c", "sleep 600 & sleep 600; :"
hidden = orphan(*sleep)
marked = orphan(*sleep, **{MARK: "0" * 16})
keeper = orphan(sys.executable, "-c", "import time; time.sleep(600)", agents.keeper.__file__)
own = subprocess.Popen(["/bin/sleep", "600"], env={MARK: "0" * 16})
while MARK not in psutil.Process(own.pid).environ():  # in the middle of its exec it shows none; looks are seconds apart
    os.sched_yield()
everyone = dict(hidden=hidden, marked=marked, keeper=keeper, own=own.pid)
reaper = OrphanReaper()

def living():
    return " ".join(name for name, pid in everyone.items() if process_started(pid) is not None)

print(living())
reaper.look()
print(living())
reaper.look()
deadline = time.monotonic() + 20
while "hidden" in living() and time.monotonic() < deadline:
    os.sched_yield()
print(living())
for pid in (marked, keeper, own.pid, *([hidden] if "hidden" in living() else [])):
    subprocess.run(["pkill", "-9", "-P", str(pid)])
    os.kill(pid, 9)
"""


def test_a_stranger_is_ended_once_it_was_seen_twice_and_what_is_ours_is_not() -> None:
    done = subprocess.run([sys.executable, "-c", HEAD], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "hidden marked keeper own",
        "hidden marked keeper own",
        "marked keeper own",
    ]


def test_a_look_that_is_not_possible_now_ends_no_housekeeping(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: psutil.Process) -> list[psutil.Process]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(psutil.Process, "children", fail)
    OrphanReaper().look()
