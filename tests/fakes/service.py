"""An in-memory `CoordinatorService` and `LogReader`, for tests of the API, the client and the CLI.

Runs live through the usual states on their own, driven by a script in their command: `["script", STEP, …]`, the same on
every rank and in every epoch unless a step starts with `R=` for rank R only, or `@E:` for epoch E only (`1=@2:exit:0`).
Steps:

    say:TEXT  err:TEXT      a line on stdout, stderr
    part:TEXT               a preview of an unfinished line
    sleep:SECONDS           of real time
    flood:N                 N lines of 100 characters
    checkpoint:STEP         a gang checkpoint is committed
    exit:CODE  signal:N     the rank ends
    hang                    until it is stopped
    stubborn:SECONDS        it takes so long to stop the run when it is cancelled

Anything else runs as `exit:0`. `tests/contract/test_service.py` holds it to what every implementation does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from coordinator.network_view import path_resource
from mesh.errors import ConflictError, NotFoundError, TransportError
from mesh.netcheck.path_book import PathLine
from mesh.network_resources import NetworkReport, ProviderPath
from mesh.plan import RunPlan
from mesh.reasons import Reason
from mesh.resources import (
    Attempt,
    DeploymentStatus,
    Event,
    Harm,
    Machine,
    Run,
)
from mesh.selectors import attempt_labels, run_labels
from mesh.states import FailurePolicy
from tests.fakes.service_logs import FakeLogs
from tests.fakes.service_network import fake_report
from tests.fakes.service_runs import FakeRun, steps_of

LOOK_S = 0.02
_KINDS = {"loss": "Loss", "reclaim": "Reclaim", "failure": "Failure"}


class FakeService:
    """One deployment in memory. `outage` makes every call fail as if the coordinator were restarting."""

    def __init__(self, *, machines: int = 2, gpu_type: str | None = None, gpu_count: int = 0) -> None:
        self.outage = False
        self.allows_chaos = True
        self.details: dict[str, Any] = {}
        """What the deployment says of itself beside the rest."""
        self.apart: set[str] = set()
        """Machines that nobody reaches."""
        self.calls: list[str] = []
        self.logs = FakeLogs()
        self._gpus = {"type": gpu_type, "count": gpu_count}
        self._machines = machines
        self._leaving: set[str] = set()
        self._lost: set[str] = set()
        self._runs: dict[str, FakeRun] = {}
        self._requests: dict[str, FakeRun] = {}
        self._events: list[Event] = []
        self._news = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def grow(self, count: int) -> list[Machine]:
        """As `coordinator.api.service.Grow`."""
        self._machines = max(self._machines, count + len(self._lost))
        return await self.list_machines()

    def _enter(self, call: str) -> None:
        self.calls.append(call)
        if self.outage:
            raise TransportError("The coordinator cannot be asked now; it is being restarted.")

    async def submit(self, job: dict[str, Any], plan: dict[str, Any], request_id: str | None) -> Run:
        self._enter("submit")
        if request_id is not None and request_id in self._requests:
            return self._requests[request_id].resource  # type: ignore[return-value]
        run_plan = RunPlan.from_record(plan)
        if run_plan.name in self._runs:
            raise ConflictError(
                f"There is a run named {run_plan.name} already.",
                reason=Reason.ALREADY_EXISTS,
                run=run_plan.name,
            )
        run = FakeRun(job, run_plan)
        self._runs[run_plan.name] = run
        if request_id is not None:
            self._requests[request_id] = run
        await self._tell(run, "Submitted", "The run was accepted.")
        task = asyncio.create_task(self._live(run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return run.resource  # type: ignore[return-value]

    async def get_run(self, name: str) -> Run:
        self._enter("get_run")
        return self._find(name).resource  # type: ignore[return-value]

    def _find(self, name: str) -> FakeRun:
        if name not in self._runs:
            raise NotFoundError(f"There is no run named {name}.", hint="See them all: mesh get runs")
        return self._runs[name]

    async def list_runs(self, labels: Mapping[str, str]) -> list[Run]:
        self._enter("list_runs")
        runs = [run.resource for run in self._runs.values()]
        return [run for run in runs if _has(run_labels(run), labels)]  # type: ignore[misc]

    async def cancel(self, name: str, reason: str) -> Run:
        self._enter(f"cancel:{reason}")
        run = self._find(name)
        if not run.is_cancelled and not run.has_ended:
            run.is_cancelled = True
            run.wishes.put_nowait(("cancel", reason or str(Reason.CANCELLED)))
        return run.resource  # type: ignore[return-value]

    async def suspend(self, name: str) -> Run:
        self._enter("suspend")
        run = self._find(name)
        if run.has_ended:
            raise ConflictError(f"Run '{name}' is {run.status['state']}.")
        if run.status["state"] != "Suspended":
            run.wishes.put_nowait(("suspend", None))
        return run.resource  # type: ignore[return-value]

    async def resume(self, name: str) -> Run:
        self._enter("resume")
        run = self._find(name)
        if run.status["state"] != "Suspended":
            raise ConflictError(f"Run '{name}' is {run.status['state']}.")
        run.status.update(state="Pending", reason=None, message="Waiting for machines.")
        await self.logs.go_on(run.uid)
        await self._tell(run, "Resumed", "Resumed by a user.")
        run.wishes.put_nowait(("resume", None))
        return run.resource  # type: ignore[return-value]

    async def delete(self, name: str) -> None:
        self._enter("delete")
        run = self._find(name)
        if not run.has_ended:
            raise ConflictError(
                f"Run {name} is {run.status['state']}.", hint=f"Stop it first: mesh cancel {name}"
            )
        del self._runs[name]

    async def list_attempts(self, labels: Mapping[str, str]) -> list[Attempt]:
        self._enter("list_attempts")
        attempts = [attempt for run in self._runs.values() for attempt in run.attempts()]
        return [attempt for attempt in attempts if _has(attempt_labels(attempt), labels)]

    async def list_machines(self) -> list[Machine]:
        self._enter("list_machines")
        return [self._machine(index) for index in range(self._machines)]

    def _machine(self, index: int) -> Machine:
        name = f"m{index}"
        user = next((r.name for r in self._runs.values() if name in self._held_by(r)), None)
        state = "InUse" if user else "Ready"
        if name in self._leaving:
            state = "Leaving"
        return {
            "name": name,
            "address": f"127.0.1.{index + 1}",
            "labels": {"provider": "local", "region": "here"},
            "gpus": dict(self._gpus),
            "state": "Lost" if name in self._lost else state,
            "run": user,
            "waitsFor": f"run {user} to leave it" if state == "Leaving" and user else None,
            "network": None,
        }

    @staticmethod
    def _held_by(run: FakeRun) -> set[str]:
        rests = run.has_ended or run.status["state"] in ("Pending", "Suspended")
        return set() if rests else set(run.machines.values())

    async def reclaim(self, machine: str, grace_s: float, message: str) -> Machine:
        self._enter("reclaim")
        index = next((i for i in range(self._machines) if f"m{i}" == machine), None)
        if index is None:
            raise NotFoundError(f"There is no machine named '{machine}'.")
        if machine in self._leaving:
            return self._machine(index)
        self._leaving.add(machine)
        for run in self._runs.values():
            for rank, place in run.machines.items():
                if place == machine and not run.has_ended:
                    said = f"Rank {rank}: {machine} is wanted back in {grace_s:g} s. {message}"
                    await self._tell(run, "Reclaimed", said.rstrip(), rank)
                    run.wishes.put_nowait(("reclaim", rank))
        return self._machine(index)

    async def chaos(self, name: str, kind: str, rank: int, seconds: float | None, one_way: bool) -> Harm:
        self._enter("chaos")
        run = self._find(name)
        if not self.allows_chaos:
            raise ConflictError("This deployment allows no rehearsals.", reason=Reason.FORBIDDEN)
        if run.status["state"] != "Running":
            raise ConflictError(f"Run '{name}' is {run.status['state']}.")
        if rank not in run.machines:
            raise NotFoundError(f"Run '{name}' has no rank {rank}.")
        message = f"A rehearsed fault: {kind} of rank {rank} on {run.machines[rank]}."
        harm: Harm = {
            "run": name,
            "kind": kind,
            "rank": rank,
            "epoch": run.status["epoch"],
            "machine": run.machines[rank],
            "at": time.time(),
            "seconds": seconds,
            "oneWay": one_way,
            "message": message,
        }
        await self._tell(run, "Rehearsed", message, rank)
        run.wishes.put_nowait(("kill" if kind == "KillRank" else "loss", rank))
        return harm

    async def check_network(self, machines: list[str], nodes: int | None) -> NetworkReport:
        """All is well, unless one of the machines is named in `apart`."""
        self._enter("check_network")
        known = {machine["name"]: machine for machine in await self.list_machines()}
        for name in machines:
            if name not in known:
                raise NotFoundError(
                    f"There is no machine named '{name}'.", hint="See them: mesh get machines"
                )
        names = (machines or sorted(n for n, m in known.items() if m["run"] is None))[:nodes]
        if len(names) < max(2, nodes or 2):
            raise ConflictError(f"A check needs {max(2, nodes or 2)} free machines; there are {len(names)}.")
        return fake_report(names, apart=self.apart)

    async def list_paths(self, parameters: float | None, members: int) -> list[ProviderPath]:
        self._enter("list_paths")
        line = PathLine(
            providers=("aws", "gcp"), path="private", passed=3, passed_at=1.7e9, round_trip_s=0.01,
            bytes_per_s=125e6,
        )  # fmt: skip
        return [path_resource(line, parameters=parameters, members=members)]

    async def events(self, after: int, run: str | None, limit: int, wait_s: float) -> list[Event]:
        self._enter("events")

        def found() -> list[Event]:
            uid = self._runs[run].uid if run in self._runs else run
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
            runs[run.status["state"]] = runs.get(run.status["state"], 0) + 1
        machines = {"Ready": 0, "InUse": 0, "Leaving": 0, "Lost": 0}
        for index in range(self._machines):
            machines[self._machine(index)["state"]] += 1
        return {
            "state": "Ready",
            "version": "fake",
            "local": True,
            "machines": machines,
            "runs": runs,
            "details": dict(self.details),
        }

    # -- the life of a run ---------------------------------------------------------------------------------------------

    async def _tell(self, run: FakeRun, kind: str, message: str, rank: int | None = None) -> None:
        async with self._news:
            self._events.append(
                {
                    "seq": len(self._events) + 1,
                    "at": time.time(),
                    "run": run.name,
                    "uid": run.uid,
                    "epoch": run.status["epoch"],
                    "rank": rank,
                    "kind": kind,
                    "reason": None,
                    "message": message,
                }
            )
            self._news.notify_all()

    async def _live(self, run: FakeRun) -> None:
        avoid: dict[int, str] = {}
        while not run.has_ended:
            run.begin_epoch(await self._place(run, avoid))
            avoid = {}
            what, value = await self._epoch(run)
            if what == "cancel":
                stubborn = [step for step in run.plan.command if step.startswith("stubborn:")]
                await asyncio.sleep(sum(float(step.partition(":")[2]) for step in stubborn))
                await self._cancelled(run, value)
            elif what == "suspend":
                await self._suspended(run)
            elif what in _KINDS:
                await self._fail_or_restart(run, what, value)
                if what != "failure":
                    avoid = {value: run.machines[value]}
            else:
                run.stop_epoch("Completed", "It exited 0.")
                run.chapter["stoppedAt"] = None
                await self._end(run, "Succeeded", 0, "Completed", "Every rank exited 0.")
        await self.logs.end(run.uid)

    async def _place(self, run: FakeRun, avoid: Mapping[int, str]) -> dict[int, str]:
        """A machine for every rank: the one it had, unless that is to be avoided."""
        while True:
            count = max(self._machines, run.plan.nodes)  # a gang that is too large is placed all the same
            usable = [f"m{i}" for i in range(count) if f"m{i}" not in self._leaving | self._lost]
            places = {r: m for r, m in run.machines.items() if r not in avoid and m in usable}
            free = [m for m in usable if m not in (*places.values(), *avoid.values())]
            vacant = [rank for rank in range(run.plan.nodes) if rank not in places]
            if len(free) >= len(vacant):
                return dict(sorted({**places, **dict(zip(vacant, free, strict=False))}.items()))
            await asyncio.sleep(LOOK_S)

    async def _epoch(self, run: FakeRun) -> tuple[str, Any]:
        """From the barrier to the first thing that the epoch ends of."""
        for rank in range(run.plan.nodes):
            run.arrive(rank)
            await self._tell(run, "Arrived", f"Rank {rank} is at the barrier.", rank)
        run.run_on()
        await self._tell(run, "Running", "Every rank runs.")
        ranks = {asyncio.create_task(self._rank_life(run, r)): r for r in range(run.plan.nodes)}
        wish = asyncio.create_task(run.wishes.get())
        pending = set(ranks)
        try:
            while pending:
                done, _ = await asyncio.wait({*pending, wish}, return_when=asyncio.FIRST_COMPLETED)
                failed = [ranks[task] for task in ranks if task in done & pending and not task.result()]
                if failed:
                    return "failure", failed[0]
                pending -= done
                if wish in done and wish.result()[0] == "kill":
                    rank = wish.result()[1]
                    self._exit(run, rank, {"code": None, "signal": 9})
                    return "failure", rank
                if wish in done:
                    return wish.result()
            return "success", None
        finally:
            for task in [*ranks, wish]:
                task.cancel()
            await asyncio.wait([*ranks, wish])

    async def _rank_life(self, run: FakeRun, rank: int) -> bool:
        state = run.status["ranks"][rank]
        state["state"] = "Running"
        end: dict[str, int | None] = {"code": 0, "signal": None}
        for step in steps_of(run.plan, rank, run.status["epoch"]):
            verb, _, value = step.partition(":")
            if verb == "sleep":
                await asyncio.sleep(float(value))
            elif verb == "hang":
                await asyncio.Event().wait()
            elif verb in ("say", "err", "part"):
                await self.logs.add(run.resource, rank, verb, value)
                state["lastOutputAt"] = time.time()
            elif verb == "flood":
                for number in range(int(value)):
                    await self.logs.add(run.resource, rank, "say", f"{number:0100d}")
            elif verb == "checkpoint":
                run.save(int(value))
                await self._tell(run, "Checkpointed", f"Step {value} is committed.")
            elif verb in ("exit", "signal"):
                key = {"exit": "code", "signal": "signal"}[verb]
                end = {"code": None, "signal": None, key: int(value)}
                break
        self._exit(run, rank, end)
        await self._tell(run, "Exited", f"Rank {rank} ended.", rank)
        return end["code"] == 0

    @staticmethod
    def _exit(run: FakeRun, rank: int, end: dict[str, int | None]) -> None:
        run.status["ranks"][rank].update(state="Exited", exit=end, finishedAt=time.time())

    async def _fail_or_restart(self, run: FakeRun, kind: str, rank: int) -> None:
        machine = run.machines[rank]
        reason, message = _told(run, kind, rank)
        if kind == "loss":
            self._lost.add(machine)
            await self._tell(run, "MemberLost", message, rank)
            run.status["ranks"][rank].update(state="Lost", finishedAt=time.time())
        run.blame(rank, reason, message)
        run.stop_epoch("EpochEnded", message)
        restarts = run.status["restarts"]
        may_restart = kind != "failure" or run.plan.on_process_failure is not FailurePolicy.FAIL
        if not may_restart or restarts[kind] >= restarts["of"]:
            state = run.status["ranks"][rank]["exit"] or {"code": 1, "signal": None}
            code = state["code"] if state["signal"] is None else 128 + state["signal"]
            await self._end(run, "Failed", code, reason, message)
            return
        restarts[kind] += 1
        restarts["total"] += 1
        restarts["withoutProgress"] += 1
        run.chapter["chargedTo"] = _KINDS[kind]
        run.status.update(state="Pending", reason=reason, message=message)
        await self._tell(run, "Restarting", f"Restart {restarts[kind]} of {restarts['of']}: {message}", rank)

    async def _suspended(self, run: FakeRun) -> None:
        run.stop_epoch("Suspended", "Suspended by a user.")
        run.status.update(state="Suspended", reason="Suspended", message="Suspended by a user.")
        await self._tell(run, "Suspended", "Suspended by a user.")
        await self.logs.end(run.uid)
        while True:
            what, value = await run.wishes.get()
            if what == "cancel":
                await self._cancelled(run, value)
            if what in ("cancel", "resume"):
                return

    async def _cancelled(self, run: FakeRun, reason: str) -> None:
        run.stop_epoch(reason, "Cancelled by a user.")
        await self._end(run, "Cancelled", 130, reason, "Cancelled by a user.")

    async def _end(self, run: FakeRun, state: str, code: int, reason: str, message: str) -> None:
        run.status.update(state=state, exitCode=code, reason=reason, message=message, endedAt=time.time())
        await self._tell(run, state, message)


def _told(run: FakeRun, kind: str, rank: int) -> tuple[str, str]:
    """Reason and sentence."""
    machine, end = run.machines[rank], run.status["ranks"][rank]["exit"]
    if kind == "loss":
        return "MachineLost", f"Rank {rank}: {machine} was lost (its lease ran out)."
    if kind == "reclaim":
        return "MachineReclaimed", f"Rank {rank}: {machine} was wanted back."
    code = end["code"] if end["signal"] is None else 128 + end["signal"]
    reason = "CommandFailed" if end["signal"] is None else "CommandKilled"
    return reason, f"Rank {rank} on {machine} ended with exit code {code}."


def _has(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in wanted.items())
