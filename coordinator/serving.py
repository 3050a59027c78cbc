"""What the coordinator's actor runs: makes the parts, hands them to `Coordinator`, and passes calls on.

The actor around it is `coordinator.actor.CoordinatorActor`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import ray

from coordinator.checkpoint_store import CheckpointStore
from coordinator.coordinator import Coordinator
from coordinator.core.effects import OrderMember
from coordinator.journal import SqlJournal
from coordinator.member_certificates import MemberCertificates
from coordinator.mesh_authority import MeshAuthority
from coordinator.network_watch import NetworkWatch
from coordinator.ray_fleet import RayFleet
from coordinator.store_link import StoreLink
from mesh.errors import InternalError, MeshError, StorageError, TransportError
from mesh.ids import Incarnation, MachineName
from mesh.messages import JoinOrder, MemberReport
from mesh.plan import Endpoint, RunPlan

START_AGAIN_S = 2.0

_SERVED = frozenset(
    {
        "submit",
        "get_run",
        "list_runs",
        "cancel",
        "suspend",
        "resume",
        "reclaim",
        "chaos",
        "delete",
        "list_attempts",
        "list_machines",
        "check_network",
        "list_paths",
        "events",
        "status",
        "shutdown",
    }
)

_log = logging.getLogger(__name__)


class ServingCoordinator:
    """One life of the coordinator, in its actor.

    Args:
        config: `db` (URL), `namespace`, `store_admin`, `store_member`, `logs` (Endpoints), `member` (what each
            MemberNode is constructed with), `checkpoints` (URL of their store, optional), `mesh` (the folder
            of the deployment's authority, optional), `deployment` (facts for status).
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._config = config
        journal = SqlJournal(config["db"])
        self._fleet = RayFleet(
            namespace=config["namespace"],
            member_config=config["member"],
            used_by=lambda: self._coordinator.used_by(),
            why_apart=lambda a, b: self._network.why_apart(a, b),
        )
        self._network = NetworkWatch(
            fleet=self._fleet, journal=journal, used_by=lambda: self._coordinator.used_by()
        )
        self._store = StoreLink(config["store_admin"], on_new_store=self._make_up_for_store)
        checkpoints = config.get("checkpoints")
        self._coordinator = Coordinator(
            journal=journal,
            fleet=self._fleet,
            store=self._store,
            join_order=self._join_order,
            deployment=config["deployment"],
            checkpoints=None if checkpoints is None else CheckpointStore(checkpoints),
            network=self._network,
        )
        mesh = config.get("mesh")
        self._certificates = MemberCertificates(
            None if mesh is None else MeshAuthority.open(Path(mesh)), gang_of=self._coordinator.gang
        )
        self._trouble: StorageError | None = None
        """What the journal says for as long as it cannot be opened."""
        self._started = asyncio.ensure_future(self._start())

    async def _start(self) -> None:
        """One that Ray restarted has gangs to look after: a journal that cannot be opened now is waited for."""
        while True:
            try:
                await self._coordinator.start()
                break
            except StorageError as error:
                if not ray.get_runtime_context().was_current_actor_reconstructed:
                    raise  # whoever made the deployment is told
                self._trouble = error
                _log.error("the journal cannot be read, trying again in %g s: %s", START_AGAIN_S, error)
            await asyncio.sleep(START_AGAIN_S)
        self._trouble = None
        self._store.start(self._coordinator)
        _log.info("the coordinator serves")
        self._looking = asyncio.create_task(self._look_at_machines(), name="first look at machines")

    async def _look_at_machines(self) -> None:
        """So that their worker processes come up before the first member does."""
        with contextlib.suppress(TransportError):  # whoever looks next does it
            await self._fleet.machines()

    def _make_up_for_store(self) -> None:
        """The head's spare worker has become a store: the next death shall find one as well."""
        self._fleet.look_at_workers(ray.get_runtime_context().get_node_id())

    def _join_order(self, plan: RunPlan, effect: OrderMember) -> JoinOrder:
        return JoinOrder(
            incarnation=effect.incarnation,
            plan=plan,
            machine=effect.machine,
            store=cast(Endpoint, self._config["store_member"]),
            logs=cast(Endpoint, self._config["logs"]),
            checkpoints=self._config.get("checkpoints"),
            # Where nothing is kept, nothing can be brought back: then each machine keeps what it has.
            is_clean_start=effect.is_clean_start and self._config.get("checkpoints") is not None,
            restore=effect.restore,
            is_left_behind=effect.is_left_behind,
        )

    async def ping(self) -> bool:
        """True once the journal has been read and everything under way goes on. Raises what `start` raised."""
        await asyncio.shield(self._started)
        return True

    async def report(self, report: MemberReport) -> bool:
        """A member's report; True when it is durable and needs not be repeated."""
        await asyncio.shield(self._started)
        return await self._coordinator.report(report)

    async def sign_member(
        self, incarnation: Incarnation, machine: MachineName, request_pem: bytes
    ) -> tuple[bool, Any]:
        """A member's certificate, or the error as data."""
        await asyncio.shield(self._started)
        try:
            # A key's operation takes a fraction of a millisecond: not worth a thread.
            return True, self._certificates.issue(incarnation, machine, request_pem)
        except MeshError as error:
            return False, error.to_wire()

    async def serve(self, method: str, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
        """One call of the CoordinatorService."""
        if method not in _SERVED:
            return False, InternalError(f"The coordinator has no method '{method}'.").to_wire()
        if self._trouble is not None:
            return False, self._trouble.to_wire()
        try:
            await asyncio.shield(self._started)
            return True, await getattr(self._coordinator, method)(*arguments)
        except MeshError as error:
            return False, error.to_wire()
