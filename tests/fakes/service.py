"""An in-memory `CoordinatorService` and `LogReader`, for tests of the API, the client and the CLI.

Runs live through the usual states on their own, driven by a script in their command: `["script", STEP, …]`, the same on
every rank unless a step starts with `R=` for rank R only. Steps:

    say:TEXT  err:TEXT      a line on stdout, stderr
    part:TEXT               a preview of an unfinished line
    sleep:SECONDS           of real time
    flood:N                 N lines of 100 characters
    exit:CODE  signal:N     the rank ends
    hang                    until it is cancelled
    stubborn:SECONDS        it takes so long to stop the run when it is cancelled

Anything else runs as `exit:0`. `tests/contract/test_service.py` holds it to what every implementation does.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any

from mesh.errors import ConflictError, NotFoundError, SpecError, TransportError
from mesh.ids import new_run_uid
from mesh.plan import RunPlan
from mesh.reasons import Reason
from mesh.resources import Attempt, DeploymentStatus, Event, Machine, Run
from mesh.selectors import attempt_labels, run_labels

EPOCH = 1


class FakeService:
    """One deployment in memory. `outage` makes every call fail as if the coordinator were restarting."""

    def __init__(self, *, machines: int = 2, gpu_type: str | None = None, gpu_count: int = 0) -> None:
        self.outage = False
        self.calls: list[str] = []
        self.logs = FakeLogs(self)
        self._gpus = {"type": gpu_type, "count": gpu_count}
        self._machines = machines
        self._runs: dict[str, dict[str, Any]] = {}
        self._plans: dict[str, RunPlan] = {}
        self._requests: dict[str, str] = {}
        self._deleted: dict[str, dict[str, Any]] = {}
        self._events: list[Event] = []
        self._news = asyncio.Condition()
        self._cancelled: dict[str, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def grow(self, count: int) -> list[Machine]:
        """As `coordinator.api.service.Grow`."""
        self._machines = max(self._machines, count)
        return await self.list_machines()

    def _enter(self, call: str) -> None:
        self.calls.append(call)
        if self.outage:
            raise TransportError("The coordinator cannot be asked now; it is being restarted.")

    async def submit(self, job: dict[str, Any], plan: dict[str, Any], request_id: str | None) -> Run:
        self._enter("submit")
        if request_id is not None and request_id in self._requests:
            uid = self._requests[request_id]
            known = [run for run in self._runs.values() if run["metadata"]["uid"] == uid]
            return (known or [self._deleted[uid]])[0]  # type: ignore[return-value]
        run_plan = RunPlan.from_record(plan)
        if run_plan.name in self._runs:
            raise ConflictError(
                f"There is a run named {run_plan.name} already.",
                reason=Reason.ALREADY_EXISTS,
                run=run_plan.name,
            )
        run = _new_run(job, run_plan)
        uid = run["metadata"]["uid"]
        self._runs[run_plan.name] = run
        self._plans[uid] = run_plan
        self._cancelled[uid] = asyncio.Event()
        if request_id is not None:
            self._requests[request_id] = uid
        await self._tell(run, "Submitted", "The run was accepted.")
        task = asyncio.create_task(self._live(run, run_plan))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return run  # type: ignore[return-value]

    async def get_run(self, name: str) -> Run:
        self._enter("get_run")
        return self._find(name)  # type: ignore[return-value]

    def _find(self, name: str) -> dict[str, Any]:
        if name not in self._runs:
            raise NotFoundError(f"There is no run named {name}.", hint="See them all: mesh get runs")
        return self._runs[name]

    async def list_runs(self, labels: Mapping[str, str]) -> list[Run]:
        self._enter("list_runs")
        return [run for run in self._runs.values() if _has(run_labels(run), labels)]  # type: ignore[misc]

    async def cancel(self, name: str, reason: str) -> Run:
        self._enter(f"cancel:{reason}")
        run = self._find(name)
        event = self._cancelled[run["metadata"]["uid"]]
        if not event.is_set() and run["status"]["endedAt"] is None:
            run["status"]["reason"] = reason or str(Reason.CANCELLED)
            event.set()
        return run  # type: ignore[return-value]

    async def delete(self, name: str) -> None:
        self._enter("delete")
        run = self._find(name)
        if run["status"]["endedAt"] is None:
            raise ConflictError(
                f"Run {name} is {run['status']['state']}.", hint=f"Stop it first: mesh cancel {name}"
            )
        del self._runs[name]
        self._deleted[run["metadata"]["uid"]] = run

    async def list_attempts(self, labels: Mapping[str, str]) -> list[Attempt]:
        self._enter("list_attempts")
        attempts = [_attempt(run, rank) for run in self._runs.values() for rank in run["status"]["ranks"]]
        return [attempt for attempt in attempts if _has(attempt_labels(attempt), labels)]

    async def list_machines(self) -> list[Machine]:
        self._enter("list_machines")
        return [
            {
                "name": f"m{index}",
                "address": f"127.0.1.{index + 1}",
                "labels": {"provider": "local", "region": "here"},
                "gpus": dict(self._gpus),
                "state": "Ready",
                "run": None,
            }
            for index in range(self._machines)
        ]

    async def events(self, after: int, run: str | None, limit: int, wait_s: float) -> list[Event]:
        self._enter("events")

        def found() -> list[Event]:
            uid = self._runs[run]["metadata"]["uid"] if run in self._runs else run
            chosen = [e for e in self._events[after:] if run is None or e["uid"] == uid]
            return chosen[:limit]

        try:
            async with asyncio.timeout(wait_s), self._news:
                while not found():
                    await self._news.wait()
        except TimeoutError:
            return []
        return found()

    async def status(self) -> DeploymentStatus:
        self._enter("status")
        runs: dict[str, int] = {}
        for run in self._runs.values():
            runs[run["status"]["state"]] = runs.get(run["status"]["state"], 0) + 1
        return {
            "state": "Ready",
            "version": "fake",
            "local": True,
            "machines": {"Ready": self._machines, "InUse": 0, "Lost": 0},
            "runs": runs,
            "details": {},
        }

    # -- the life of a run ---------------------------------------------------------------------------------------------

    async def _tell(self, run: dict[str, Any], kind: str, message: str, rank: int | None = None) -> None:
        async with self._news:
            self._events.append(
                {
                    "seq": len(self._events) + 1,
                    "at": time.time(),
                    "run": run["metadata"]["name"],
                    "uid": run["metadata"]["uid"],
                    "epoch": run["status"]["epoch"],
                    "rank": rank,
                    "kind": kind,
                    "reason": None,
                    "message": message,
                }
            )
            self._news.notify_all()

    async def _live(self, run: dict[str, Any], plan: RunPlan) -> None:
        status, uid = run["status"], run["metadata"]["uid"]
        status.update(state="Assembling", epoch=EPOCH, message="Members are on their way.")
        status["ranks"] = [_rank(rank) for rank in range(plan.nodes)]
        for rank in range(plan.nodes):
            status["ranks"][rank]["state"] = "AtBarrier"
            status["barrier"]["arrived"] = rank + 1
            await self._tell(run, "Arrived", f"Rank {rank} is at the barrier.", rank)
        status.update(state="Running", startedAt=time.time(), message="")
        await self._tell(run, "Running", "Every rank runs.")
        ranks = [asyncio.create_task(self._rank_life(run, plan, rank)) for rank in range(plan.nodes)]
        cancelled = asyncio.create_task(self._cancelled[uid].wait())
        try:
            await self._until_decided(ranks, cancelled)
            if cancelled.done():
                stubborn = [step for step in plan.command if step.startswith("stubborn:")]
                await asyncio.sleep(sum(float(step.partition(":")[2]) for step in stubborn))
            await self._end(run, plan, cancelled.done())
        finally:
            for task in [*ranks, cancelled]:
                task.cancel()
            await asyncio.wait([*ranks, cancelled])
        await self.logs.end(uid)

    async def _until_decided(self, ranks: list[asyncio.Task[bool]], cancelled: asyncio.Task[bool]) -> None:
        pending = set(ranks)
        while pending and not cancelled.done():
            done, _ = await asyncio.wait({*pending, cancelled}, return_when=asyncio.FIRST_COMPLETED)
            pending -= done
            if any(task is not cancelled and not task.result() for task in done):
                return

    async def _rank_life(self, run: dict[str, Any], plan: RunPlan, rank: int) -> bool:
        state = run["status"]["ranks"][rank]
        state["state"] = "Running"
        steps = plan.command[1:] if plan.command[0] == "script" else ()
        end: dict[str, int | None] = {"code": 0, "signal": None}
        for step in steps:
            verb, _, value = _for_rank(step, rank).partition(":")
            if verb == "sleep":
                await asyncio.sleep(float(value))
            elif verb == "hang":
                await asyncio.Event().wait()
            elif verb in ("say", "err", "part"):
                await self.logs.add(run, rank, verb, value)
                state["lastOutputAt"] = time.time()
            elif verb == "flood":
                for number in range(int(value)):
                    await self.logs.add(run, rank, "say", f"{number:0100d}")
            elif verb in ("exit", "signal"):
                key = {"exit": "code", "signal": "signal"}[verb]
                end = {"code": None, "signal": None, key: int(value)}
                break
        state.update(state="Exited", exit=end, finishedAt=time.time())
        await self._tell(run, "Exited", f"Rank {rank} ended.", rank)
        return end["code"] == 0

    async def _end(self, run: dict[str, Any], plan: RunPlan, is_cancelled: bool) -> None:
        status = run["status"]
        for rank in status["ranks"]:
            if rank["exit"] is None:
                rank.update(state="Fenced", exit={"code": None, "signal": 15}, finishedAt=time.time())
        failed = [r for r in status["ranks"] if r["state"] == "Exited" and r["exit"]["code"] != 0]
        status["endedAt"] = time.time()
        if is_cancelled:
            status.update(state="Cancelled", exitCode=130, message="Cancelled by a user.")
        elif failed:
            status.update(_failure(failed[0]))
        else:
            status.update(state="Succeeded", exitCode=0, reason="Completed", message="Every rank exited 0.")
        await self._tell(run, status["state"], status["message"])


class FakeLogs:
    """What the runs of a `FakeService` printed. A cursor is the number of the line behind it."""

    def __init__(self, service: FakeService) -> None:
        self._service = service
        self._lines: dict[str, list[dict[str, Any]]] = {}
        self._whole: Counter[str] = Counter()
        self._ended: set[str] = set()
        self._news = asyncio.Condition()

    async def add(self, run: dict[str, Any], rank: int, verb: str, text: str) -> None:
        uid = run["metadata"]["uid"]
        lines = self._lines.setdefault(uid, [])
        async with self._news:
            is_partial = verb == "part"
            self._whole[uid] += not is_partial
            lines.append(
                {
                    "cursor": str(self._whole[uid]),
                    "at": time.time(),
                    "rank": rank,
                    "epoch": EPOCH,
                    "stream": "stderr" if verb == "err" else "stdout",
                    "text": text,
                    "partial": is_partial,
                    "continued": False,
                }
            )
            self._news.notify_all()

    async def end(self, uid: str) -> None:
        async with self._news:
            self._ended.add(uid)
            self._news.notify_all()

    async def lines(
        self,
        uid: str,
        *,
        rank: int | None = None,
        epoch: int | None = None,
        tail: int | None = None,
        cursor: str | None = None,
        follow: bool = False,
    ) -> AsyncIterator[dict[str, Any]]:
        if cursor is not None and not cursor.isdigit():
            raise SpecError(f"{cursor!r} is no cursor.", field="cursor")
        known = self._lines.setdefault(uid, [])
        matching = [n for n, line in enumerate(known) if _is_of(line, rank, epoch) and not line["partial"]]
        position = len(known) if tail == 0 else matching[-tail] if tail and len(matching) >= tail else 0
        behind = int(cursor or 0)
        while True:
            while position < len(known):
                line = known[position]
                position += 1
                if _is_of(line, rank, epoch) and int(line["cursor"]) + line["partial"] > behind:
                    yield line
            async with self._news:
                if not follow or (uid in self._ended and position == len(known)):
                    return
                if position == len(known):
                    await self._news.wait()

    async def raw(self, uid: str, rank: int, epoch: int) -> AsyncIterator[bytes]:
        lines = [
            line for line in self._lines.get(uid, []) if _is_of(line, rank, epoch) and not line["partial"]
        ]
        if not lines:
            raise NotFoundError(f"Rank {rank} printed nothing in epoch {epoch}.", rank=rank, epoch=epoch)
        for line in lines:
            yield line["text"].encode("utf-8", "surrogateescape") + b"\n"

    async def last_output_at(self, uid: str) -> dict[int, float]:
        return {line["rank"]: line["at"] for line in self._lines.get(uid, [])}

    async def delete(self, uid: str) -> None:
        self._lines.pop(uid, None)


def _new_run(job: dict[str, Any], plan: RunPlan) -> dict[str, Any]:
    return {
        "apiVersion": "nodus.dev/v1",
        "kind": "Job",
        "metadata": {
            "name": plan.name,
            "uid": new_run_uid(),
            "labels": dict(plan.labels),
            "createdAt": time.time(),
        },
        "spec": job["spec"],
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
            "conditions": [],
            "cause": None,
        },
    }


def _rank(rank: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "machine": f"m{rank}",
        "address": f"127.0.1.{rank + 1}",
        "state": "Ordered",
        "stage": None,
        "exit": None,
        "lastOutputAt": None,
        "finishedAt": None,
    }


def _failure(rank: dict[str, Any]) -> dict[str, Any]:
    number = rank["exit"]["signal"]
    code = rank["exit"]["code"] if number is None else 128 + number
    message = f"Rank {rank['rank']} on {rank['machine']} ended with exit code {code}."
    return {
        "state": "Failed",
        "reason": "CommandFailed" if number is None else "CommandKilled",
        "message": message,
        "exitCode": code,
        "cause": {
            "rank": rank["rank"],
            "at": rank["finishedAt"],
            "reason": "CommandFailed",
            "message": message,
            "exit": rank["exit"],
            "workerExit": None,
            "globalRank": None,
            "hint": "",
            "lastLines": ["the last line"],
        },
    }


def _attempt(run: dict[str, Any], rank: dict[str, Any]) -> Attempt:
    return {
        "run": run["metadata"]["name"],
        "uid": run["metadata"]["uid"],
        "rank": rank["rank"],
        "epoch": EPOCH,
        "machine": rank["machine"],
        "state": rank["state"],
        "labels": {"nodus.dev/job": run["metadata"]["name"], "nodus.dev/rank": str(rank["rank"])},
        "createdAt": run["metadata"]["createdAt"],
        "startedAt": run["status"]["startedAt"],
        "endedAt": rank["finishedAt"],
        "exit": rank["exit"],
        "cause": None,
        "placement": {"machine": rank["machine"], "address": rank["address"]},
        "cost": None,
    }


def _has(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in wanted.items())


def _is_of(line: dict[str, Any], rank: int | None, epoch: int | None) -> bool:
    return rank in (None, line["rank"]) and epoch in (None, line["epoch"])


def _for_rank(step: str, rank: int) -> str:
    prefix, equals, rest = step.partition("=")
    if equals and prefix.isdigit():
        return rest if int(prefix) == rank else ""
    return step
