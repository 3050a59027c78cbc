"""What was observed of a lab, and the invariants over it. `tests.lab.watcher` does the looking.

Rules of this file:
1. Nothing here asks the product. Times are CLOCK_MONOTONIC, which all hosts of the lab share.
2. A process whose host is frozen cannot act; neither can one that is stopped. Both are alive all the same.
3. Between two looks a process may come and go. `longest_pause_s` says how far the looks were apart.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.real_mesh import wait_until
from tests.lab.hosts import Host
from tests.lab.network import LabNetwork

PAUSE_MS = 4
Span = tuple[float, float]


@dataclass(slots=True, kw_only=True)
class Life:
    """One process of a user's command: seen from `born_at` to `died_at` (None: it lives)."""

    pid: int
    host: str
    run: str
    epoch: int
    rank: int
    born_at: float
    died_at: float | None = None
    pauses: list[list[float]] = field(default_factory=list)
    """[from, to] of each time that it was stopped; the last one may have no end yet."""


class Observer:
    """The observations of one lab so far. Made by `observing`."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._read = 0
        self._lives: list[Life] = []
        self._living: dict[int, Life] = {}
        self._frozen: dict[str, list[list[float]]] = {}
        self.longest_pause_s = 0.0

    # ---- reading ----------------------------------------------------------------------------------

    def lives(self, run: str, *, epoch: int | None = None, host: Host | None = None) -> list[Life]:
        """Every process of the run's commands that was ever seen."""
        self._catch_up()
        return [
            life
            for life in self._lives
            if life.run == run and epoch in (None, life.epoch) and (host is None or life.host == host.name)
        ]

    def living(self, run: str, *, epoch: int | None = None, host: Host | None = None) -> list[Life]:
        return [life for life in self.lives(run, epoch=epoch, host=host) if life.died_at is None]

    def frozen(self, host: Host) -> list[list[float]]:
        self._catch_up()
        return self._frozen.get(host.name, [])

    def last_death(self, run: str, *, epoch: int, host: Host | None = None) -> float:
        """When the last process of that epoch (on that host) was gone. Fails when one lives."""
        lives = self.lives(run, epoch=epoch, host=host)
        assert lives, f"no process of {run} epoch {epoch} was ever seen"
        ends = [life.died_at for life in lives]
        assert None not in ends, [life for life in lives if life.died_at is None]
        return max(end for end in ends if end is not None)

    def first_birth(self, run: str, *, epoch: int, host: Host | None = None) -> float:
        return min(life.born_at for life in self.lives(run, epoch=epoch, host=host))

    def wait_for_none(
        self, run: str, *, epoch: int | None = None, host: Host | None = None, limit_s: float = 30.0
    ) -> None:
        """Returns when no process of the run (of that epoch, on that host) lives."""
        wait_until(
            lambda: not self.living(run, epoch=epoch, host=host),
            f"every process of {run} {f'epoch {epoch} ' if epoch else ''}to end",
            limit_s=limit_s,
        )

    # ---- invariants -------------------------------------------------------------------------------

    def assert_one_epoch_at_a_time(self, run: str, *, but_thawed: Host | None = None) -> None:
        """Invariant 1: no two epochs have processes that can act at the same time, anywhere.

        `but_thawed`: leaves out what an earlier epoch left on this host, from when the host was thawed on: until
        its keeper is scheduled nothing on it can know anything. What those did is for the test to look at.
        """
        by_epoch: dict[int, list[tuple[Span, Life]]] = {}
        for life in self.lives(run):
            for span in self._active(life, but_thawed):
                by_epoch.setdefault(life.epoch, []).append((span, life))
        epochs = sorted(by_epoch)
        for older, newer in itertools.pairwise(epochs):
            begins, first = min(((s[0], life) for s, life in by_epoch[newer]), key=lambda x: x[0])
            ends, last = max(((s[1], life) for s, life in by_epoch[older]), key=lambda x: x[0])
            assert ends <= begins, (
                f"epoch {older} could act for {ends - begins:.3f} s after epoch {newer} had begun: {last} and {first}"
            )

    def assert_together(self, run: str, *, epoch: int, not_before: float) -> None:
        """Invariant 2: no process of the epoch was born before this moment, when its last member can have arrived."""
        early = [life for life in self.lives(run, epoch=epoch) if life.born_at < not_before]
        assert not early, f"{not_before - early[0].born_at:.3f} s too early: {early}"

    def assert_nothing_left(self, run: str) -> None:
        left = self.living(run)
        assert not left, left

    def _active(self, life: Life, but_thawed: Host | None) -> list[Span]:
        """When the process could act: alive, not stopped, its host not frozen."""
        end = life.died_at if life.died_at is not None else time.monotonic()
        if but_thawed is not None and life.host == but_thawed.name:
            frozen = [since for since, _ in self._frozen.get(life.host, []) if since > life.born_at]
            end = min([end, *frozen])
        spans = [(life.born_at, end)]
        for since, until in [*life.pauses, *self._frozen.get(life.host, [])]:
            spans = [part for span in spans for part in _without(span, (since, until))]
        return spans

    # ---- inside -----------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Reads what was written since; what the watcher sees from now on may come with the next call."""
        with self._output.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole, _, _ = text.rpartition(b"\n")
        self._read += len(whole) + 1 if whole else 0
        for line in whole.splitlines():
            self._take(json.loads(line))

    def _take(self, told: dict[str, Any]) -> None:
        at = told["at"]
        match told["event"]:
            case "born":
                life = Life(
                    pid=told["pid"], host=told["host"], run=told["run"], epoch=told["epoch"], rank=told["rank"],
                    born_at=at,
                )  # fmt: skip
                self._lives.append(life)
                self._living[life.pid] = life
            case "died":
                self._living.pop(told["pid"]).died_at = at
            case "stopped":
                self._living[told["pid"]].pauses.append([at, float("inf")])
            case "continued":
                if pauses := self._living[told["pid"]].pauses:
                    pauses[-1][1] = at
            case "frozen":
                self._frozen.setdefault(told["host"], []).append([at, float("inf")])
            case "thawed":
                self._frozen[told["host"]][-1][1] = at
            case "looked":
                self.longest_pause_s = max(self.longest_pause_s, told["longest_s"])


def _without(span: Span, taken: Span) -> list[Span]:
    begin, end = span
    since, until = taken
    parts = [(begin, min(end, since)), (max(begin, until), end)]
    return [part for part in parts if part[0] < part[1]]


@contextmanager
def observing(network: LabNetwork, folder: Path) -> Iterator[Observer]:
    """Watches a lab's processes for as long as the block lasts."""
    output = folder / "observed.jsonl"
    output.touch()
    watcher = subprocess.Popen(
        [
            *(sys.executable, "-S", str(Path(__file__).with_name("watcher.py"))),
            *(str(network.cgroup), str(output), str(PAUSE_MS)),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert watcher.stdout is not None
    try:
        assert watcher.stdout.readline() == b"watching\n"
        yield Observer(output)
    finally:
        watcher.kill()
        watcher.wait()
        watcher.stdout.close()
