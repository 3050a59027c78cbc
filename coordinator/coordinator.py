"""The coordinator: every run of one deployment, as the API, the members and the store see it.

A plain class: `coordinator.actor` makes a Ray actor of it, tests use it as it is. It answers reads from the
cores' states, turns wishes and reports into events for the gangs' drivers, and replies to a report only when
what it changed is in the journal. After a crash, `start()` reads the journal and carries on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

from agents.chaos import HarmOrder
from coordinator import harm_watch, view
from coordinator.checkpoint_store import CheckpointStore
from coordinator.core.effects import OrderMember
from coordinator.core.events import (
    CancelRequested,
    FaultRehearsed,
    GangEvent,
    MachineReclaimed,
    Now,
    RehearsalLeft,
    ResumeRequested,
    RunAccepted,
    SuspendRequested,
)
from coordinator.core.gang import GangCore
from coordinator.core.gang_record import gang_of, record_of
from coordinator.core.gang_state import Gang
from coordinator.driver_care import DriverCare
from coordinator.fleet import Fleet
from coordinator.forgetting import forget_checkpoints
from coordinator.gang_driver import GangDriver, StoreControl, real_now
from coordinator.journal import Journal, RunRow
from coordinator.network_watch import NetworkWatch
from coordinator.rehearsal import harm_order, harm_resource
from mesh.errors import ConflictError, MeshError, NotFoundError, StorageError
from mesh.ids import MachineName, Rank, RunUid, new_run_uid, new_token
from mesh.messages import JoinOrder, MemberReport
from mesh.network_resources import NetworkReport, ProviderPath
from mesh.plan import RunPlan
from mesh.reasons import Reason
from mesh.rehearsal import why_no_rehearsal
from mesh.resources import (
    Attempt,
    DeploymentStatus,
    Event,
    Harm,
    Machine,
    Run,
)
from mesh.selectors import JOB_LABEL
from mesh.states import HarmKind, RunState

RUNS_MAX = 10_000
EVENTS_PAGE_MAX = 1_000
STOP_TIMEOUT_S = 5.0
GIVE_BACK_LIMIT_S = 5.0
"""How long a delete waits for the machines of a run that has just ended."""

_log = logging.getLogger(__name__)


class Coordinator:
    """Serves one deployment. One instance at a time (Ray sees to it).

    Args:
        journal: opened and closed by `start` and `stop`.
        join_order: what a member is told; made by whoever knows the deployment's addresses.
        deployment: facts for `status` that do not change; where it is `local` no network is checked.
    """

    def __init__(
        self,
        *,
        journal: Journal,
        fleet: Fleet,
        store: StoreControl,
        join_order: Callable[[RunPlan, OrderMember], JoinOrder],
        deployment: Mapping[str, Any],
        checkpoints: CheckpointStore | None = None,
        network: NetworkWatch | None = None,
        now: Callable[[], Now] = real_now,
    ) -> None:
        self._checkpoints = checkpoints
        self._network = network or NetworkWatch(fleet=fleet, journal=journal, used_by=self.used_by)
        self._journal = journal
        self._fleet = fleet
        self._store = store
        self._join_order = join_order
        self._deployment = dict(deployment)
        self._now = now
        self._drivers: dict[RunUid, GangDriver] = {}
        self._jobs: dict[RunUid, dict[str, Any]] = {}
        self._driver_tasks: dict[RunUid, asyncio.Task[None]] = {}
        self._names: dict[str, RunUid] = {}
        self._news = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()
        self._is_stopping = False
        self._care = DriverCare(
            journal=journal,
            fleet=fleet,
            now=now,
            adopt=self._adopt,
            is_current=lambda driver: self._drivers.get(driver.uid) is driver,
            knows=lambda uid: uid in self._drivers,
            spawn=self._in_background,
        )

    async def start(self) -> None:
        """Opens the journal, reads every run, and resumes what was under way."""
        await self._journal.open()
        await self._network.start()
        await self._care.take_up(await self._journal.runs())
        for uid in await self._journal.uncleared():
            self._in_background(
                forget_checkpoints(self._checkpoints, self._journal, uid), f"forget checkpoints of {uid}"
            )

    async def stop(self) -> None:
        """Stops deciding; the gangs run on. Idempotent."""
        self._is_stopping = True
        self._news.set()
        await asyncio.gather(*(self._stop_driver(uid) for uid in list(self._drivers)))
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._journal.close()

    async def _stop_driver(self, uid: RunUid) -> None:
        """Lets the driver end what it is at; one that cannot (the disk is full) is cut off."""
        task, driver = self._driver_tasks.pop(uid), self._drivers.pop(uid)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await driver.stop()
                await asyncio.wait([task])
        except TimeoutError:
            task.cancel()
            await asyncio.wait([task], timeout=STOP_TIMEOUT_S)

    def _adopt(self, gang: Gang, job: dict[str, Any]) -> GangDriver:
        driver = GangDriver(
            GangCore(gang, new_token=new_token, checks_network=not self._deployment.get("local", False)),
            journal=self._journal,
            fleet=self._fleet,
            store=self._store,
            join_order=lambda core, effect: self._join_order(core.gang.plan, effect),
            on_events=self._tell_news,
            checkpoints=self._checkpoints,
            check_network=self._network.check_gang,
            now=self._now,
        )
        self._drivers[gang.uid] = driver
        self._jobs[gang.uid] = job
        self._names[gang.plan.name] = gang.uid
        task = asyncio.create_task(driver.run(), name=f"{gang.plan.name}: driver")
        self._driver_tasks[gang.uid] = task
        task.add_done_callback(lambda ended: self._driver_ended(driver, ended))
        return driver

    def _driver_ended(self, driver: GangDriver, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (fault := task.exception()) is not None:
            self._care.fell(driver, fault)

    def _tell_news(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    # ---- what users want (CoordinatorService) -----------------------------------------------------

    async def submit(self, job: dict[str, Any], plan: dict[str, Any], request_id: str | None) -> Run:
        """See `CoordinatorService.submit`."""
        if self._is_stopping:
            raise ConflictError("The deployment is being stopped.", hint="Start it again: mesh up")
        if len(self._drivers) >= RUNS_MAX:
            raise ConflictError(
                f"The deployment holds {RUNS_MAX} runs.", hint="Delete ended ones: mesh delete RUN"
            )
        trouble = self._storage_trouble()
        if trouble is not None:
            raise StorageError(
                f"New work is refused: {trouble}", hint="Free some space; running gangs are not touched."
            )
        now = self._now()
        gang = Gang(uid=new_run_uid(), plan=RunPlan.from_record(plan), created_at=now.wall)
        row = RunRow(uid=gang.uid, name=gang.plan.name, job=job, record=record_of(gang), created_at=now.wall)
        accepted = await self._journal.create_run(row, request_id=request_id)
        if accepted.uid != gang.uid:
            return await self._earlier_request(accepted)
        driver = self._adopt(gang, job)
        await driver.post_durably(RunAccepted())
        return self._resource(driver)

    async def _earlier_request(self, row: RunRow) -> Run:
        driver = self._drivers.get(row.uid)
        if driver is not None:
            return self._resource(driver)
        return view.run_resource(gang_of(row.record), row.job, now=self._now().wall)

    async def get_run(self, name: str) -> Run:
        """See `CoordinatorService.get_run`."""
        return self._resource(self._driver(name))

    async def list_runs(self, labels: Mapping[str, str]) -> list[Run]:
        """See `CoordinatorService.list_runs`."""
        return [self._resource(d) for d in self._by_age() if _has(self._run_labels(d), labels)]

    async def cancel(self, name: str, reason: str) -> Run:
        """See `CoordinatorService.cancel`."""
        driver = self._driver(name)
        why = Reason.CLIENT_INTERRUPTED if reason == Reason.CLIENT_INTERRUPTED else Reason.CANCELLED
        message = "Cancelled: the client was interrupted." if why is not Reason.CANCELLED else reason
        await driver.post_durably(CancelRequested(reason=why, message=message or "Cancelled by a user."))
        return self._resource(driver)

    async def suspend(self, name: str) -> Run:
        """See `CoordinatorService.suspend`."""
        driver = self._driver(name)
        state = driver.core.gang.state
        if state.is_terminal:
            raise ConflictError(
                f"Run '{name}' is {state}.", hint="Only a run that has not ended is suspended."
            )
        await driver.post_durably(SuspendRequested(message="Suspended by a user."))
        return self._resource(driver)

    async def resume(self, name: str) -> Run:
        """See `CoordinatorService.resume`."""
        driver = self._driver(name)
        state = driver.core.gang.state
        if state is not RunState.SUSPENDED:
            raise ConflictError(f"Run '{name}' is {state}.", hint="Only a suspended run is resumed.")
        await driver.post_durably(ResumeRequested(message="Resumed by a user."))
        return self._resource(driver)

    async def reclaim(self, machine: str, grace_s: float, message: str) -> Machine:
        """See `CoordinatorService.reclaim`."""
        await self._fleet.cordon(MachineName(machine))
        notice = MachineReclaimed(machine=MachineName(machine), grace_s=grace_s, message=message)
        holders = [
            d for d in self._drivers.values() if machine in {h.machine for h in d.core.gang.seats.values()}
        ]
        for driver in holders:
            await driver.post_durably(notice)
        for facts in await self._fleet.machines():
            if facts.name == machine:  # also one that has gone since, and is not listed any more
                return view.machine_resource(facts, self.used_by().get(machine))
        raise NotFoundError(f"The machine {machine} is gone.", hint="See them all: mesh get machines")

    async def chaos(self, name: str, kind: str, rank: int, seconds: float | None, one_way: bool) -> Harm:
        """See `CoordinatorService.chaos`."""
        driver = self._driver(name)
        if (refused := why_no_rehearsal(self._details())) is not None:
            raise refused
        gang = driver.core.gang
        member = gang.members.get(Rank(rank))
        if gang.state.is_terminal or member is None or member.settlement is not None:
            raise ConflictError(
                f"Rank {rank} of run '{name}' is on no machine now; the run is {gang.state}.",
                hint=f"Wait until it runs: mesh wait {name} --for running",
            )
        order = harm_order(
            kind=HarmKind(kind),
            member=member,
            seconds=seconds,
            is_one_way=one_way,
            gangs=[d.core.gang for d in self._drivers.values()],
        )
        refusal = await self._fleet.why_no_harm(order)
        if refusal is not None:
            raise ConflictError(refusal)
        harm = harm_resource(gang, order, at=self._now().wall)
        await driver.post_durably(FaultRehearsed(rank=Rank(rank), message=harm["message"]))
        await self._fleet.harm(order)
        if order.seconds is not None:
            self._in_background(self._see_undone(order, order.seconds), f"end of harm to {name}")
        return harm

    async def _see_undone(self, order: HarmOrder, seconds: float) -> None:
        """The run hears of harm that should be over and is not."""
        message = await harm_watch.what_is_left(self._fleet, order, seconds)
        if message is None:
            return
        _log.error("run %s: %s", order.incarnation.run_uid, message)
        driver = self._drivers.get(order.incarnation.run_uid)
        if driver is None:
            return  # the run is deleted: the log has it
        with suppress(MeshError):
            await driver.post_durably(RehearsalLeft(rank=order.incarnation.rank, message=message))

    async def delete(self, name: str) -> None:
        """See `CoordinatorService.delete`."""
        driver = self._driver(name)
        if driver.core.gang.state.is_terminal:
            await self._finished([driver], GIVE_BACK_LIMIT_S)
        if not driver.is_finished:
            state = driver.core.gang.state
            raise ConflictError(
                f"Run '{name}' is {state}"
                + (" and its machines are still being given back." if state.is_terminal else "."),
                hint="Try again in a moment." if state.is_terminal else f"Stop it first: mesh cancel {name}",
            )
        await self._journal.delete_run(driver.uid, self._now().wall)
        if (
            self._names.get(name) == driver.uid
        ):  # else it was deleted meanwhile, and the name may be another run's
            del self._names[name]
            del self._jobs[driver.uid]
            await self._stop_driver(driver.uid)
            self._care.forget(driver.uid)
            self._in_background(
                forget_checkpoints(self._checkpoints, self._journal, driver.uid),
                f"forget checkpoints of {name}",
            )
            clearing = self._in_background(self._clear_machines(driver.uid), f"clear machines of {name}")
            # a machine that is just dying answers late
            await asyncio.wait([clearing], timeout=GIVE_BACK_LIMIT_S)

    async def _clear_machines(self, uid: RunUid) -> None:
        try:
            await self._fleet.forget_run(uid)
        except MeshError as error:
            _log.warning("what run %s kept on machines may still be there: %s", uid, error)

    def _in_background(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def list_attempts(self, labels: Mapping[str, str]) -> list[Attempt]:
        """See `CoordinatorService.list_attempts`."""
        return [
            attempt
            for driver in self._by_age()
            for attempt in view.attempt_resources(driver.core.gang)
            if _has(attempt["labels"], labels)
        ]

    async def list_machines(self) -> list[Machine]:
        """See `CoordinatorService.list_machines`."""
        used_by = self.used_by()
        return [
            view.machine_resource(facts, used_by.get(facts.name))
            for facts in sorted(await self._fleet.machines(), key=lambda m: m.name)
            if facts.is_alive or not facts.is_cordoned or facts.name in used_by
        ]

    async def check_network(self, machines: list[str], nodes: int | None) -> NetworkReport:
        """See `CoordinatorService.check_network`."""
        return await self._network.check_machines(machines, nodes)

    async def list_paths(self, parameters: float | None, members: int) -> list[ProviderPath]:
        """See `CoordinatorService.list_paths`."""
        return self._network.paths(parameters=parameters, members=members)

    async def events(self, after: int, run: str | None, limit: int, wait_s: float) -> list[Event]:
        """See `CoordinatorService.events`."""
        uid = None if run is None else self._names.get(run, RunUid(run))
        limit = max(1, min(limit, EVENTS_PAGE_MAX))
        deadline = asyncio.get_running_loop().time() + wait_s
        while True:
            news = self._news
            rows = await self._journal.events(after=after, uid=uid, limit=limit)
            left_s = deadline - asyncio.get_running_loop().time()
            if rows or left_s <= 0 or self._is_stopping:
                return [view.event_resource(row) for row in rows]
            try:
                async with asyncio.timeout(left_s):
                    await news.wait()
            except TimeoutError:
                return []

    def _details(self) -> dict[str, Any]:
        facts = {k: v for k, v in self._deployment.items() if k not in ("version", "local")}
        return {"chaos": False, **facts}

    async def status(self) -> DeploymentStatus:
        """See `CoordinatorService.status`."""
        machines = {"Ready": 0, "InUse": 0, "Leaving": 0, "Lost": 0}
        for machine in await self.list_machines():
            machines[machine["state"]] += 1
        runs: dict[str, int] = {}
        for driver in self._drivers.values():
            state = str(driver.core.gang.state)
            runs[state] = runs.get(state, 0) + 1
        details = self._details()
        trouble = self._storage_trouble()
        if trouble is not None:
            details["journal"] = trouble
        details |= self._care.details(lambda uid: self._drivers[uid].core.gang.plan.name)
        return {
            "state": "Stopping" if self._is_stopping else "Ready",
            "version": str(self._deployment.get("version", "")),
            "local": bool(self._deployment.get("local", False)),
            "machines": machines,
            "runs": runs,
            "details": details,
        }

    async def shutdown(self, wait_s: float) -> list[str]:
        """Cancels every active run and waits, at most so long, until each is fenced and its machines are back.

        A suspended run holds nothing: it stays, and can be resumed when the deployment is started again. Returns the
        names of the runs that were still not finished.
        """
        self._is_stopping = True
        active = [d for d in self._drivers.values() if not d.is_finished and not _is_at_rest(d)]
        for driver in active:
            with suppress(
                asyncio.QueueFull
            ):  # its journal cannot be written: it is among the unfinished ones
                driver.post(
                    CancelRequested(reason=Reason.CANCELLED, message="The deployment is being stopped.")
                )
        await self._finished(active, wait_s)
        return [d.core.gang.plan.name for d in active if not d.is_finished]

    async def _finished(self, drivers: list[GangDriver], wait_s: float) -> None:
        """Returns when nothing is left to do for any of these, or after `wait_s`."""
        deadline = asyncio.get_running_loop().time() + wait_s
        while any(not d.is_finished for d in drivers):
            left_s = deadline - asyncio.get_running_loop().time()
            if left_s <= 0:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, 0.5)):
                    await self._news.wait()

    # ---- what members and the store say -----------------------------------------------------------

    async def report(self, report: MemberReport) -> bool:
        """A member's report. Returns True when it needs not be repeated: taken, or of no gang we know."""
        driver = self._drivers.get(report.incarnation.run_uid)
        if driver is not None:
            await driver.post_durably(report)
        return True

    def post(self, uid: RunUid, event: GangEvent) -> None:
        """Something that the store says. Of a gang that is not known: nothing to do."""
        driver = self._drivers.get(uid)
        if driver is not None:
            driver.post(event)

    def gang(self, uid: RunUid) -> Gang | None:
        """The run's gang; None when there is no such run."""
        driver = self._drivers.get(uid)
        return None if driver is None else driver.core.gang

    def live_gangs(self) -> list[Gang]:
        """Gangs whose epoch is under way: what a store that was restarted has to be told."""
        return [
            d.core.gang
            for d in self._drivers.values()
            if not d.core.gang.state.is_terminal
            and d.core.gang.state not in (RunState.PENDING, RunState.SUSPENDED)
        ]

    # ---- looking ----------------------------------------------------------------------------------

    def _driver(self, name: str) -> GangDriver:
        uid = self._names.get(name)
        if uid is None:
            raise NotFoundError(f"There is no run named '{name}'.", hint="See them all: mesh get runs")
        return self._drivers[uid]

    def _by_age(self) -> list[GangDriver]:
        return sorted(self._drivers.values(), key=lambda d: (d.core.gang.created_at, d.uid))

    def _resource(self, driver: GangDriver) -> Run:
        return view.run_resource(driver.core.gang, self._jobs[driver.uid], now=self._now().wall)

    def _run_labels(self, driver: GangDriver) -> dict[str, str]:
        plan = driver.core.gang.plan
        return {JOB_LABEL: plan.name, **dict(plan.labels)}

    def _storage_trouble(self) -> str | None:
        return next((d.storage_trouble for d in self._drivers.values() if d.storage_trouble), None)

    def used_by(self) -> dict[str, str]:
        """Which run holds which machine."""
        return {
            holding.machine: driver.core.gang.plan.name
            for driver in self._drivers.values()
            for holding in driver.core.gang.holdings
            if holding.until is None
        }


def _is_at_rest(driver: GangDriver) -> bool:
    gang = driver.core.gang
    return gang.state is RunState.SUSPENDED and gang.is_released


def _has(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in wanted.items())
