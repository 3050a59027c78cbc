"""Losses in the lab: how soon they are known, how soon nothing of the epoch lives, how soon the next one speaks.

Deaths are what the lab's watcher saw (it looks every few milliseconds), what the coordinator knew and when is its own
events' time; both clocks are this machine's. `ours` is the median of the rounds, `ratio` the worst one over the target.
Needs root; see `tests.lab.network.why_not`.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mesh.messages import LEASE_GUARD_S, LEASE_TTL_S
from tests.e2e.real_mesh import wait_until
from tests.lab.deployment import Beacon, Lab, build_lab
from tests.lab.hosts import Host
from tests.lab.network import why_not

HOSTS = 3
LIMIT_S = 120.0
KNOWN_MS = 20.0
DEAD_MS = 100.0
SILENT_S = LEASE_TTL_S + 2 * LEASE_GUARD_S
OVER_BARE_S = 1.0
FINAL = ("--nodes", "2", "--max-attempts", "0")


def run(quick: bool) -> list[dict[str, Any]]:
    """A few rounds of each kind of loss, each with a run of its own."""
    reason = why_not()
    if reason is not None:
        raise RuntimeError(reason)
    rounds = 3 if quick else 20
    folder = Path(tempfile.mkdtemp(prefix="gm-lab-bench-"))
    try:
        with build_lab(folder, hosts=HOSTS) as lab:
            died = [_process_dies(lab) for _ in range(rounds)]
            cut = [_falls_silent(lab, Host.cut) for _ in range(rounds)]
            frozen = [_falls_silent(lab, Host.freeze) for _ in range(rounds)]
            replaced = [_is_replaced(lab) for _ in range(rounds)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return [
        _row("a rank's process dies: coordinator knows", [k * 1000 for k, _ in died], KNOWN_MS, "ms"),
        _row("a rank's process dies: epoch dead everywhere", [d * 1000 for _, d in died], DEAD_MS, "ms"),
        _row("machine cut off: coordinator knows", [k for k, _, _ in cut], SILENT_S, "s"),
        _row("machine cut off: its own ranks dead", [own for _, own, _ in cut], LEASE_TTL_S, "s"),
        _row("machine cut off: epoch dead everywhere", [d for _, _, d in cut], SILENT_S, "s"),
        _row("machine frozen: coordinator knows", [k for k, _, _ in frozen], SILENT_S, "s"),
        _row("machine frozen: epoch dead on the others", [d for _, _, d in frozen], SILENT_S, "s"),
        _row("machine lost, spare ready: known to next first line, over a bare start", replaced, OVER_BARE_S, "s"),
    ]  # fmt: skip


def _row(name: str, rounds: list[float], limit: float, unit: str) -> dict[str, Any]:
    worst = max(rounds)
    return {
        "name": name, "ours": statistics.median(rounds), "theirs": None, "ratio": worst / limit, "unit": unit,
        "target": f"≤ {limit:g} {unit}, the worst of {len(rounds)}", "ok": worst <= limit,
    }  # fmt: skip


def _process_dies(lab: Lab) -> tuple[float, float]:
    """Until the coordinator knows, and until nothing of the epoch lives, in seconds."""
    beacon = lab.running_beacon(*FINAL)
    [life] = lab.observer.living(beacon.uid, host=lab.host_of(beacon.name, 1))
    at = time.monotonic()
    os.kill(life.pid, signal.SIGKILL)
    lab.ended(beacon.name, limit_s=LIMIT_S)
    lab.observer.wait_for_none(beacon.uid)
    return _known_at(lab, beacon, "Exited") - at, lab.observer.last_death(beacon.uid, epoch=1) - at


def _falls_silent(lab: Lab, fault: Callable[[Host], None]) -> tuple[float, float, float]:
    """Until the coordinator knows, until the silent machine's and until the other machine's processes are dead."""
    beacon = lab.running_beacon(*FINAL)
    lost, other = lab.host_of(beacon.name, 1), lab.host_of(beacon.name, 0)
    at = time.monotonic()
    fault(lost)
    lab.ended(beacon.name, limit_s=LIMIT_S)
    lab.observer.wait_for_none(beacon.uid, host=other)
    others = lab.observer.last_death(beacon.uid, epoch=1, host=other) - at
    lab.restore(joined=HOSTS)
    lab.observer.wait_for_none(beacon.uid)
    own = lab.observer.last_death(beacon.uid, epoch=1, host=lost) - at
    return _known_at(lab, beacon, "MemberLost") - at, own, max(others, own if fault is Host.cut else others)


def _is_replaced(lab: Lab) -> float:
    """From when the loss was known to the last rank's first word at the next epoch, less a bare start of the same."""
    beacon = lab.running_beacon("--nodes", "2")
    lost = lab.host_of(beacon.name, 1)
    bare_s = _bare_start(lab, lab.host_of(beacon.name, 0))
    others = [host for host in lab.hosts if host is not lost]
    wait_until(lambda: all(lab.is_warm(host) for host in others), "kept and spare machine to be warm")
    lost.power_off()
    wait_until(lambda: len(beacon.files(epoch=2)) == 2, "the next epoch's ranks to speak", limit_s=LIMIT_S)
    first_words = [
        min(beacon.said(epoch=2, host=host)) for host in lab.hosts if beacon.files(epoch=2, host=host)
    ]
    took_s = max(first_words) - _known_at(lab, beacon, "MemberLost")
    lab.restore(joined=HOSTS)
    return took_s - bare_s


def _bare_start(lab: Lab, host: Host) -> float:
    """The same interpreter on the same host, to its first word."""
    began = time.monotonic()
    said = host.run(sys.executable, "-c", "import os, signal, sys, time; print(time.monotonic())")
    return float(said.stdout) - began


def _known_at(lab: Lab, beacon: Beacon, kind: str) -> float:
    """When the coordinator said that it knew, on the monotonic clock."""
    offset_s = time.time() - time.monotonic()
    return min(float(event["at"]) for event in lab.events(beacon.name) if event["kind"] == kind) - offset_s
