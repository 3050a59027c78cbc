"""The shell of a member: performs what its core decides, and tells the core what came of it.

Rules of this file:
1. One inbox, one driver. The core is called by the driver only; everything else puts an event into the inbox.
2. Every background task is made by `_spawn`, named and guarded: what goes wrong in it is an event, never silence.
3. Effects never wait for each other: a barrier, a grace period or a report that takes long holds nothing up.
4. Whatever dies (keeper, launcher, supervisor), the incarnation's tree is ended from here as well.

The Ray actor around it is `agents.node.MemberNode`. Tests run it without Ray.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agents import barrier, machine, process_tree, spool
from agents.core import effects as do
from agents.core import events as ev
from agents.core.member import Member as MemberCore
from agents.core.member_state import LOGS_STALL_S, REPORT_ANSWER_S
from agents.keeper_process import KeeperProcess
from agents.launcher.base import lost_evidence
from agents.launcher.launcher import LauncherHandle
from agents.launching import launch_spec, start_failed, told_with
from agents.logs import LogShipper
from agents.member_checkpoints import MemberCheckpoints, preparation_failed
from agents.network import MemberNetwork, TrustedNetwork
from agents.preparation import Folders, Preparation, prepare
from mesh.errors import ConflictError, MeshError, TransportError
from mesh.ids import Incarnation
from mesh.messages import CheckpointOrder, FenceOrder, JoinOrder, MemberReport, ProcessExit
from mesh.reasons import Reason

INBOX_MAX = 256
KILL_LIMIT_S = 4.0
"""One try to end the tree from here; the core asks again every KILL_REPEAT_S."""
REPORT_LIMIT_S = REPORT_ANSWER_S - 2.0
CLOSE_LIMIT_S = 5.0

SendReport = Callable[[MemberReport], Awaitable[bool]]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberConfig:
    """What a member knows of its machine."""

    address: str
    """Where peers reach it."""
    machine_dir: Path
    """The machine's folder, on its own disk."""
    base_environment: Mapping[str, str] = field(repr=False)
    """The environment that the machine's owner gave its agent, as it was before Ray."""


class Member:
    """One member. `start` it, give it orders, wait for `finished`, `close` it.

    Args:
        config: the machine.
        send_report: takes a report to the coordinator; True when it was taken. May raise MeshError.
        launcher: where the command will run; used for one command.
        network: its way to its peers; by default a network in which everybody is trusted.
        validate: check the core's invariants after every event.
    """

    def __init__(
        self,
        config: MemberConfig,
        *,
        send_report: SendReport,
        launcher: LauncherHandle,
        network: MemberNetwork | None = None,
        validate: bool = False,
    ) -> None:
        self._config = config
        self._send_report = send_report
        self._launcher = launcher
        self._network = network or TrustedNetwork()
        self._core = MemberCore(
            address=config.address, wall_offset_s=time.time() - time.monotonic(), validate=validate
        )
        self._inbox: asyncio.Queue[ev.MemberEvent] = asyncio.Queue(INBOX_MAX)
        self._tasks: set[asyncio.Task[None]] = set()
        self._preparing: list[asyncio.Task[None]] = []
        self._ending: list[asyncio.Task[None]] = []
        """What ends processes and gives back: never cut short."""
        self._driver: asyncio.Task[None] | None = None
        self._keeper: KeeperProcess | None = None
        self._preparation: Preparation | None = None
        self._checkpoints: MemberCheckpoints | None = None
        self._warming: asyncio.Task[None] | None = None
        self._command_started = False
        self._launcher_lost = False
        self._logs_delivered = False
        self.finished = asyncio.Event()
        """Set when the member's life is over and everything of it is ended."""

    @property
    def keeper_pid(self) -> int | None:
        """Of the running keeper."""
        return None if self._keeper is None else self._keeper.pid

    def start(self) -> None:
        """Begins to take orders."""
        self._driver = asyncio.create_task(self._drive(), name="member driver")

    # --- orders ---------------------------------------------------------------------------------

    async def join(self, order: JoinOrder) -> None:
        """Returns when the order is taken. Raises ConflictError when this member has another part already."""
        me = self._core.state.incarnation
        if me is not None and me != order.incarnation:
            raise ConflictError(f"This member is {me}, not {order.incarnation}.")
        address = self._config.address
        order = replace(
            order, store=machine.from_here(order.store, address), logs=machine.from_here(order.logs, address)
        )
        await self._inbox.put(ev.JoinOrdered(incarnation=order.incarnation, order=order))

    async def fence(self, order: FenceOrder) -> None:
        """Returns when the order is taken; MemberFenced is reported when it is done."""
        await self._inbox.put(ev.FenceOrdered(incarnation=order.incarnation, grace_s=order.grace_s))

    async def about_part(self, order: CheckpointOrder) -> None:
        """A question about a checkpoint's part, or word that one is lost."""
        if self._checkpoints is not None:
            self._checkpoints.about_part(order)

    async def leave(self) -> None:
        """Ends everything that is left, at once; returns when it is done."""
        me = self._core.state.incarnation
        if me is None:
            self.finished.set()
            return
        await self._inbox.put(ev.LeaveOrdered(incarnation=me))
        await self.finished.wait()

    async def close(self) -> None:
        """Stops the shell. What still runs of the incarnation is killed. Idempotent."""
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.cancel()
            await asyncio.gather(driver, return_exceptions=True)
        me = self._core.state.incarnation
        if me is not None and self._core.state.launched and not self._core.state.tree_empty:
            await self._kill_tree(me)
        if self._ending:
            await asyncio.wait(self._ending, timeout=CLOSE_LIMIT_S)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._keeper is not None:
            await self._keeper.close()
        await self._close_launcher()
        await self._network.close()
        await self._close_checkpoints()
        if self._preparation is not None:
            await asyncio.to_thread(self._preparation.release, keep_output=True)

    # --- the driver -----------------------------------------------------------------------------

    async def _drive(self) -> None:
        try:
            while not self.finished.is_set():
                event = await self._next_event()
                effects = self._core.handle(event, time.monotonic())
                for effect in effects:
                    _log.debug("%s -> %s", type(event).__name__, type(effect).__name__)
                    self._perform(effect)
        except Exception:  # noqa: BLE001 - the driver
            # A member that cannot decide any more must not leave a command running behind it. Its lease is not
            # given back: the store sees the keeper's connection close, and the coordinator learns of it.
            _log.exception("The member's driver failed; everything of it is killed.")
            if (me := self._core.state.incarnation) is not None:
                await self._kill_tree(me)
            if self._keeper is not None:
                await self._keeper.close()
            self.finished.set()

    async def _next_event(self) -> ev.MemberEvent:
        deadline = self._core.next_deadline()
        if deadline is None:
            return await self._inbox.get()
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                return await self._inbox.get()
        except TimeoutError:
            me = self._core.state.incarnation
            assert me is not None, "only a member with an order has deadlines"
            return ev.DeadlinePassed(incarnation=me)

    def _spawn(
        self,
        name: str,
        work: Coroutine[Any, Any, None],
        *,
        on_fault: Callable[[str], object] | None = None,
    ) -> asyncio.Task[None]:
        """A guarded task: a fault of ours in it is logged and, where the core waits for an answer, told as one."""

        async def guarded() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001 - the guard
                _log.exception("The member's task %r failed.", name)
                if on_fault is not None:
                    on_fault(f"{name} failed: {type(error).__name__}: {error}")

        task = asyncio.create_task(guarded(), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _perform(self, effect: do.MemberEffect) -> None:
        """Begins one effect. Nothing here waits."""
        me = effect.incarnation
        match effect:
            case do.TakeLease():
                fault = self._teller(ev.LeaseRefused, me)
                self._spawn("take lease", self._take_lease(effect), on_fault=fault)
            case do.WarmLauncher():
                self._warming = self._spawn("warm launcher", self._warm())
            case do.Prepare():
                fault = self._teller(ev.PreparationFailed, me)
                self._preparing.append(self._spawn("prepare", self._prepare(effect), on_fault=fault))
            case do.ArriveAtBarrier():
                fault = self._teller(ev.BarrierRefused, me)
                self._preparing.append(self._spawn("barrier", self._arrive(effect), on_fault=fault))
            case do.AbandonPreparation():
                self._abandon_preparation()
            case do.LaunchCommand():
                self._spawn("launch", self._launch(effect), on_fault=lambda why: self._lost_track(me, why))
            case do.StopCommand():
                self._spawn("stop", self._stop(effect))
            case do.KillEverything():
                _log.warning("Killing everything of %s: %s", me, effect.why)
                self._spawn("kill", self._kill(me))
            case do.HandOverLogs():
                self._spawn("hand over", self._hand_over(me))
            case do.SendReport():
                self._spawn("report", self._report(effect))
            case do.FreeResources():
                self._ending.append(self._spawn("free resources", self._free_resources()))
            case do.ReleaseLease():
                self._ending.append(self._spawn("release lease", self._release_lease()))
            case do.Finish():
                self._spawn("finish", self._finish())

    def _teller(
        self,
        kind: type[ev.LeaseRefused] | type[ev.PreparationFailed] | type[ev.BarrierRefused],
        incarnation: Incarnation,
    ) -> Callable[[str], None]:
        """For the guard: a fault of ours, told as the refusal that the core waits for."""
        return lambda why: self._tell(kind(incarnation=incarnation, reason=Reason.INTERNAL, message=why))

    # --- before the command ---------------------------------------------------------------------

    async def _take_lease(self, effect: do.TakeLease) -> None:
        self._keeper = KeeperProcess(effect.order, tell=self._tell)
        await self._keeper.start()

    def _tell(self, event: ev.MemberEvent) -> None:
        self._inbox.put_nowait(event)

    async def _warm(self) -> None:
        try:
            await self._launcher.warm()
        except TransportError as error:
            _log.warning("The launcher is not warm: %s", error)

    async def _prepare(self, effect: do.Prepare) -> None:
        try:
            preparation = await asyncio.to_thread(
                prepare,
                effect.incarnation,
                machine_dir=self._config.machine_dir,
                address=self._config.address,
            )
            self._preparation = preparation
            self._checkpoints = MemberCheckpoints(
                effect.order, machine_dir=self._config.machine_dir, send_report=self._send_report
            )
            network = await self._network.prepare(effect.order)
            await self._checkpoints.restore()
        except MeshError as error:
            self._tell(preparation_failed(effect.incarnation, error))
            return
        arrival = replace(preparation.arrival, network=network)
        self._tell(ev.Prepared(incarnation=effect.incarnation, arrival=arrival))

    async def _arrive(self, effect: do.ArriveAtBarrier) -> None:
        try:
            arrivals = await barrier.arrive(effect.order, effect.arrival)
        except MeshError as error:
            self._tell(
                ev.BarrierRefused(incarnation=effect.incarnation, reason=error.reason, message=str(error))
            )
            return
        self._tell(ev.BarrierOpened(incarnation=effect.incarnation, arrivals=arrivals))

    def _abandon_preparation(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.call_off()
        for task in self._preparing:
            task.cancel()
        self._preparing.clear()

    # --- the command ----------------------------------------------------------------------------

    async def _launch(self, effect: do.LaunchCommand) -> None:
        incarnation = effect.incarnation
        try:
            opened = await self._network.open(
                effect.order, effect.arrivals, on_lost=lambda why: self._lost_network(incarnation, why)
            )
        except MeshError as error:
            self._tell(start_failed(incarnation, error))
            return
        try:
            spec = launch_spec(
                effect,
                opened,
                folders=self._folders(incarnation),
                base=self._config.base_environment,
                machine=os.environ,
            )
        except (ValueError, MeshError) as error:
            reason = error.reason if isinstance(error, MeshError) else Reason.PROTOCOL
            self._tell(ev.CommandStartFailed(incarnation=incarnation, reason=reason, message=str(error)))
            return
        try:
            if self._warming is not None:
                await self._warming
            await self._launcher.launch(spec)
            while True:
                event = await self._launcher.next_event()
                self._command_started |= isinstance(event, ev.CommandStarted)
                if self._checkpoints is not None:
                    self._checkpoints.note(event)
                self._tell(await told_with(event, opened, self._network))
                if isinstance(event, (ev.TreeEmpty, ev.CommandStartFailed)):
                    return
        except TransportError as error:
            await self._bury(incarnation, str(error))

    def _lost_network(self, incarnation: Incarnation, why: str) -> None:
        """The path does not come back: without it the command waits for nothing."""
        _log.error("Killing everything of %s: %s", incarnation, why)
        self._spawn("kill", self._kill(incarnation))

    def _lost_track(self, incarnation: Incarnation, why: str) -> None:
        """For the guard: a fault of ours while the command was launched or ran."""
        self._spawn("bury", self._bury(incarnation, why))

    async def _bury(self, incarnation: Incarnation, why: str) -> None:
        """Nobody looks after the command any more: end its tree from here, and say whose fault it was."""
        self._launcher_lost = True
        while remaining := await self._kill_tree(incarnation):
            self._tell_kill_failed(incarnation, remaining)
        await asyncio.to_thread(spool.mark_end, str(self._folders(incarnation).spool))
        if not self._command_started:
            self._tell(
                ev.CommandStartFailed(
                    incarnation=incarnation, reason=Reason.COMMAND_START_FAILED, message=why
                )
            )
            return
        if self._checkpoints is not None:
            self._checkpoints.command_ended(ok=False)
        self._tell(ev.CommandExited(incarnation=incarnation, exit=ProcessExit(signal=9)))
        self._tell(ev.TreeEmpty(incarnation=incarnation, evidence=lost_evidence(why)))

    def _folders(self, incarnation: Incarnation) -> Folders:
        return Folders.of(incarnation, machine_dir=self._config.machine_dir)

    async def _stop(self, effect: do.StopCommand) -> None:
        try:
            await self._launcher.stop(effect.grace_s)
        except TransportError as error:
            _log.warning("The launcher cannot stop its command: %s", error)

    async def _kill(self, incarnation: Incarnation) -> None:
        """With the launcher's help and without: whichever is faster. `_launch` tells when the tree is empty."""
        asking = self._spawn("kill by launcher", self._kill_by_launcher())
        remaining = await self._kill_tree(incarnation)
        if remaining:
            self._tell_kill_failed(incarnation, remaining)
        await asyncio.wait([asking])

    async def _kill_by_launcher(self) -> None:
        try:
            await self._launcher.kill()
        except TransportError as error:
            _log.warning("The launcher cannot kill its command: %s", error)

    async def _kill_tree(self, incarnation: Incarnation) -> list[int]:
        outcome = await asyncio.to_thread(
            process_tree.kill_incarnation, str(incarnation), limit_s=KILL_LIMIT_S
        )
        return outcome.remaining

    def _tell_kill_failed(self, incarnation: Incarnation, pids: list[int]) -> None:
        self._tell(
            ev.KillFailed(
                incarnation=incarnation,
                pids=tuple(pids),
                message=f"{len(pids)} processes do not end: {', '.join(map(str, pids[:10]))}.",
            )
        )

    # --- the end --------------------------------------------------------------------------------

    async def _hand_over(self, incarnation: Incarnation) -> None:
        """The logs, and the last part of a checkpoint."""
        checkpoints = self._checkpoints
        parts = [] if checkpoints is None else [self._spawn("hand over checkpoint", self._hand_over_part())]
        await self._hand_over_logs(incarnation)
        if parts:
            await asyncio.wait(parts)
        self._tell(ev.LogsHandedOver(incarnation=incarnation))

    async def _hand_over_part(self) -> None:
        assert self._checkpoints is not None
        await self._checkpoints.hand_over(was_killed=self._core.state.kills > 0)

    async def _hand_over_logs(self, incarnation: Incarnation) -> None:
        if self._launcher_lost:
            self._logs_delivered = await self._ship_from_here(incarnation)
        else:
            try:
                self._logs_delivered = await self._launcher.hand_over_logs(stall_s=LOGS_STALL_S)
            except TransportError:
                self._logs_delivered = await self._ship_from_here(incarnation)

    async def _ship_from_here(self, incarnation: Incarnation) -> bool:
        """The launcher, whose work this was, is gone; the spool is on this machine's disk."""
        order = self._core.state.order
        assert order is not None
        shipper = LogShipper(
            self._folders(incarnation).spool, order.logs, incarnation, on_acked=lambda offset: None
        )
        shipper.start()
        try:
            return await shipper.drain(LOGS_STALL_S)
        finally:
            await shipper.stop()

    async def _report(self, effect: do.SendReport) -> None:
        try:
            async with asyncio.timeout(REPORT_LIMIT_S):
                is_taken = await self._send_report(effect.report)
        except (MeshError, TimeoutError) as error:
            _log.info("The coordinator did not take %s: %r", type(effect.report).__name__, error)
            is_taken = False
        kind = ev.ReportAcknowledged if is_taken else ev.ReportUndelivered
        self._tell(kind(incarnation=effect.incarnation, report_id=effect.report_id))

    async def _free_resources(self) -> None:
        await self._close_launcher()
        await self._network.close()
        await self._close_checkpoints()
        preparation, self._preparation = self._preparation, None
        if preparation is not None:
            keep = self._core.state.launched and not self._logs_delivered
            await asyncio.to_thread(preparation.release, keep_output=keep)

    async def _close_checkpoints(self) -> None:
        if self._checkpoints is not None:
            await self._checkpoints.close()

    async def _close_launcher(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await self._launcher.close()
        except (TransportError, TimeoutError) as error:
            _log.info("The launcher did not close by itself: %r", error)

    async def _release_lease(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            await keeper.release()

    async def _finish(self) -> None:
        """Lets what is under way end, within a limit, and then says that the member is finished."""
        me = asyncio.current_task()
        others = [task for task in self._tasks if task is not me]
        if others:
            await asyncio.wait(others, timeout=CLOSE_LIMIT_S)
        self.finished.set()
