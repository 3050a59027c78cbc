"""One run of a `FakeService`: its resource, its epochs, and what its ranks do by script."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from coordinator.view import shown_spec
from mesh.ids import new_run_uid
from mesh.plan import RunPlan
from mesh.resources import Attempt


class FakeRun:
    """The resource as the API shows it, and what the fake keeps beside it."""

    def __init__(self, job: dict[str, Any], plan: RunPlan) -> None:
        self.plan = plan
        self.resource = _new_resource(job, plan)
        self.wishes: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        """cancel, suspend, resume, and what happens to a rank: loss, reclaim, kill."""
        self.is_cancelled = False
        self.machines: dict[int, str] = {}
        self.lives: list[dict[str, Any]] = []
        """Ranks' parts in earlier epochs and in this one."""

    @property
    def name(self) -> str:
        return str(self.plan.name)

    @property
    def uid(self) -> str:
        return str(self.resource["metadata"]["uid"])

    @property
    def status(self) -> dict[str, Any]:
        return self.resource["status"]  # type: ignore[no-any-return]

    @property
    def has_ended(self) -> bool:
        return self.status["endedAt"] is not None

    @property
    def chapter(self) -> dict[str, Any]:
        return self.status["epochs"][-1]  # type: ignore[no-any-return]

    def begin_epoch(self, machines: dict[int, str]) -> None:
        status, before = self.status, self.machines
        status["epoch"] += 1
        kept = [rank for rank, machine in machines.items() if before.get(rank) == machine]
        checkpoint = status["checkpoint"] or {"id": None, "step": None}
        unknown = ("openedAt", "runningAt", "stoppedAt", "endedAt", "network", "reason", "cause", "chargedTo")
        chapter = dict.fromkeys(unknown)
        status["epochs"].append(
            {
                **chapter,
                "epoch": status["epoch"],
                "beganAt": time.time(),
                "kept": kept,
                "replaced": [rank for rank in machines if before and rank not in kept],
                "restored": checkpoint["id"],
                "restoredStep": checkpoint["step"],
                "victims": [],
                "ledSomewhere": False,
                "lostSeconds": None,
            }
        )
        self.machines = dict(machines)
        status["ranks"] = [_rank(rank, machines[rank]) for rank in range(self.plan.nodes)]
        status["barrier"]["arrived"] = 0
        status.update(state="Assembling", reason=None, message="Members are on their way.", cause=None)
        self.lives += [
            {
                "rank": rank,
                "epoch": status["epoch"],
                "beganAt": time.time(),
                "chapter": self.chapter,
                "why": None,
                "startedAt": None,
            }
            for rank in status["ranks"]
        ]

    def arrive(self, rank: int) -> None:
        self.status["ranks"][rank]["state"] = "AtBarrier"
        self.status["barrier"]["arrived"] = rank + 1

    def run_on(self) -> None:
        now = time.time()
        self.chapter.update(openedAt=now, runningAt=now, ledSomewhere=True)
        self.status.update(state="Running", startedAt=self.status["startedAt"] or now, message="")
        for life in self.lives[-self.plan.nodes :]:
            life["startedAt"] = now

    def stop_epoch(self, reason: str, message: str) -> None:
        """Every rank that still runs is stopped."""
        now = time.time()
        for rank in self.status["ranks"]:
            if rank["exit"] is None:
                rank.update(state="Fenced", exit={"code": None, "signal": 15}, finishedAt=now)
        for life in self.lives[-self.plan.nodes :]:
            life["why"] = life["why"] or (reason, message)
        self.chapter.update(stoppedAt=now, endedAt=now)
        self.chapter["reason"] = (self.chapter["cause"] or {"reason": reason})["reason"]

    def blame(self, rank: int, reason: str, message: str) -> None:
        """What the epoch ended of."""
        state = self.status["ranks"][rank]
        cause = {
            "rank": rank,
            "at": time.time(),
            "reason": reason,
            "message": message,
            "exit": state["exit"] if reason.startswith("Command") else None,
            "workerExit": None,
            "globalRank": None,
            "hint": "",
            "lastLines": ["the last line"],
        }
        ran_s = max(0.0, time.time() - (self.chapter["runningAt"] or time.time()))
        checkpoint = self.status["checkpoint"]
        led_somewhere = checkpoint is not None and checkpoint["epoch"] == self.status["epoch"]
        self.chapter.update(cause=cause, lostSeconds=0.0 if led_somewhere else ran_s)
        self.chapter["ledSomewhere"] = led_somewhere
        self.status["cause"] = cause
        self.lives[rank - self.plan.nodes]["why"] = (reason, message)

    def save(self, step: int) -> None:
        """A checkpoint is committed."""
        self.status["checkpoint"] = {
            "id": f"{self.status['epoch']}-{step}",
            "uri": f"file:///checkpoints/{step}/manifest.json",
            "epoch": self.status["epoch"],
            "step": step,
            "bytes": 1024,
            "at": time.time(),
        }

    def attempts(self) -> list[Attempt]:
        return [self._attempt(life) for life in self.lives]

    def _attempt(self, life: dict[str, Any]) -> Attempt:
        rank, chapter = life["rank"], life["chapter"]
        reason, message = life["why"] or (None, "")
        cause = chapter["cause"]
        return {
            "run": self.name,
            "uid": self.uid,
            "rank": rank["rank"],
            "epoch": life["epoch"],
            "machine": rank["machine"],
            "state": rank["state"],
            "labels": {"nodus.dev/job": self.name, "nodus.dev/rank": str(rank["rank"])},
            "createdAt": life["beganAt"],
            "startedAt": life["startedAt"],
            "endedAt": rank["finishedAt"],
            "exit": rank["exit"],
            "reason": reason,
            "message": message,
            "cause": cause if cause is not None and cause["rank"] == rank["rank"] else None,
            "registeredAt": life["beganAt"],
            "arrivedAt": chapter["openedAt"],
            "bootSeconds": 0.0 if chapter["openedAt"] else None,
            "restored": chapter["restored"],
            "restoredStep": chapter["restoredStep"],
            "placement": {"machine": rank["machine"], "address": rank["address"]},
            "cost": None,
        }


def steps_of(plan: RunPlan, rank: int, epoch: int) -> list[str]:
    """The script of one rank in one epoch."""
    steps = plan.command[1:] if plan.command[0] == "script" else ()
    return [own for step in steps if (own := _own_step(step, rank, epoch))]


def _own_step(step: str, rank: int, epoch: int) -> str:
    prefix, equals, rest = step.partition("=")
    if equals and prefix.isdigit():
        if int(prefix) != rank:
            return ""
        step = rest
    if step.startswith("@"):
        wanted, _, step = step[1:].partition(":")
        if int(wanted) != epoch:
            return ""
    return step


def _new_resource(job: dict[str, Any], plan: RunPlan) -> dict[str, Any]:
    kinds = ("failure", "loss", "reclaim", "ours", "withoutProgress", "total")
    return {
        "apiVersion": "nodus.dev/v1",
        "kind": "Job",
        "metadata": {
            "name": plan.name,
            "uid": new_run_uid(),
            "labels": dict(plan.labels),
            "createdAt": time.time(),
        },
        "spec": shown_spec(job["spec"]),
        "status": {
            "state": "Pending",
            "reason": None,
            "message": "Waiting for machines.",
            "epoch": 0,
            "exitCode": None,
            "topology": {
                "nodes": plan.nodes,
                "gpusPerNode": plan.gpus_per_node,
                "processesPerNode": plan.processes_per_node,
                "worldSize": plan.nodes * plan.processes_per_node,
            },
            "barrier": {"arrived": 0, "of": plan.nodes},
            "startedAt": None,
            "endedAt": None,
            "ranks": [],
            "path": None,
            "conditions": [],
            "cause": None,
            "restarts": {"of": plan.max_restarts, **dict.fromkeys(kinds, 0)},
            "epochs": [],
            "checkpoint": None,
            "productive": {"seconds": 0.0, "share": 0.0},
        },
    }


def _rank(rank: int, machine: str) -> dict[str, Any]:
    return {
        "rank": rank,
        "machine": machine,
        "address": f"127.0.1.{int(machine.lstrip('m')) + 1}",
        "state": "Ordered",
        "exit": None,
        "lastOutputAt": None,
        "startedAt": None,
        "finishedAt": None,
        "lives": 1,
    }
