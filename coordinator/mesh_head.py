"""The head's end of the mesh: its gateway process, its desk for machines, and who is not believed any more.

Theory of operation. The head's gateway comes first: it gives the head its overlay address, on which Ray, the store and
the log sink then listen. Their ports are one block that is known ahead (`mesh_ports.py`), offered to machines, and
closed to everybody else. The same port carries the API (by name) and the relay for machines that cannot be dialled.

Rules of this file:
1. Whatever the desk changes, the gateway is told: places and revocations, the newest only.
2. A machine that Ray holds for dead, or that was never heard of, is given up, and its certificate revoked.
3. Certificates of the head itself are replaced long before they end.
4. What has to go on for ever goes on after a fault, of ours too: runs go on meanwhile, so the head does not end.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from agents.gateway_keeper import GatewayKeeper, GatewayPlan
from agents.gateway_wire import (
    CarryRelay,
    Offer,
    Probe,
    ProbeRelay,
    Revoke,
    SetApi,
    SetIdentity,
    SetMachines,
    SetRelays,
    SourceOf,
    TakeReport,
)
from agents.mesh_ports import MeshPorts
from agents.raylet_process import NODE_ID_BYTES
from coordinator.deployment import StateFolder
from coordinator.insistence import for_ever
from coordinator.mesh_authority import MeshAuthority
from coordinator.mesh_books import MeshBooks
from coordinator.mesh_desk import ClusterFacts, MeshDesk
from coordinator.providers.joined import check_versions
from coordinator.ray_processes import RayProcesses
from mesh.errors import DeploymentError, MeshError
from mesh.ids import HEAD, MachineName
from mesh.net.overlay import HEAD_NUMBER, machine_overlay
from mesh.net.relay_client import RelayPlace
from mesh.net.relay_outbox import report_in
from mesh.reasons import Reason
from mesh.resources import Machine

RELAY_STREAMS_MAX = 2048
RELAY_STREAMS_PER_MACHINE_MAX = 1024
"""The head itself dials every machine behind it, with tens of connections each."""
JOIN_LIMIT_S = 90.0
"""From being told its name until a machine is known to Ray."""
LOOK_S = 2.0
RENEW_EVERY_S = 12 * 3600.0
LAST_REPORT_LIMIT_S = 3.0
GATEWAY_FOLDER = "g"

_log = logging.getLogger(__name__)

Spawn = Callable[[Coroutine[Any, Any, None], str], object]


class MeshHead:
    """One life of a head on the mesh. `start` before Ray, `stop` after it.

    Args:
        listen: of the mesh port.
        api: where the API listens, on this host.
        ports: of Ray, the store and the log sink.
        sockets: a short folder.
        environment: of the gateway process.
        spawn: runs something beside everything else, by this name, until the head stops.
    """

    def __init__(
        self,
        *,
        state: StateFolder,
        listen: tuple[str, int],
        api: tuple[str, int],
        ports: MeshPorts,
        sockets: Path,
        environment: Mapping[str, str],
        spawn: Spawn,
    ) -> None:
        self._state = state
        self._ports = ports
        self._api = api
        self._spawn = spawn
        self._authority = MeshAuthority.create(state.path, deployment=state.deployment_id)
        self._books = MeshBooks(state.path)
        self._ray: RayProcesses | None = None
        self._naming = asyncio.Lock()
        self._news = asyncio.Event()
        self._own_relay: RelayPlace | None = None
        self._take_report = TakeReport(life="", delivered=0)
        """Says which report of the gateway's relay is in the books."""
        host, port = listen
        plan = GatewayPlan(
            folder=sockets / GATEWAY_FOLDER,
            deployment=self._authority.deployment,
            machine=HEAD,
            listen=(f"[{host}]:{port}" if ":" in host else f"{host}:{port}",),
            closed=(ports.first, ports.last),
            environment=environment,
            log=state.path / "gateway.log",
        )
        self._gateway = GatewayKeeper(plan)
        self.desk = MeshDesk(
            books=self._books, authority=self._authority, around=self, on_change=self._news.set
        )

    @property
    def address(self) -> str:
        """The head's overlay address: where everything of it listens that machines use."""
        return machine_overlay(HEAD_NUMBER)[0]

    async def start(self) -> int:
        """Returns when the head has its overlay address; the mesh port. Raises DeploymentError, MeshTimeoutError."""
        await asyncio.to_thread(self._books.load)
        addresses = await self._gateway.start()
        await self._gateway.tell(SetIdentity(credentials=self._authority.machine_credentials(HEAD)))
        await self._tell_news()
        await self._gateway.tell(Offer(ports=self._ports.offered, deliver_to=(self.address,)))
        await self._gateway.tell(
            CarryRelay(streams_max=RELAY_STREAMS_MAX, streams_per_machine_max=RELAY_STREAMS_PER_MACHINE_MAX)
        )
        await self._gateway.tell(SetApi(credentials=self._authority.api_credentials(), target=self._api))
        self._spawn(self._keep_told(), "news for the gateway")
        self._spawn(self._keep_certificates(), "certificates")
        self._spawn(self._keep_rotating(), "rotation of the authority")
        host, port = addresses[0]
        itself = "127.0.0.1" if host == "0.0.0.0" else "::1" if host == "::" else host
        self._own_relay = RelayPlace(machine=HEAD, addresses=((itself, port),), is_gateway=True)
        self.desk.relays.look()
        await self._tell_news()
        self._spawn(self._keep_relays(), "relays")
        return port

    async def stop(self) -> None:
        if self._own_relay is not None:
            try:
                async with asyncio.timeout(LAST_REPORT_LIMIT_S):
                    await self._enter_own_report()
            except (MeshError, TimeoutError) as error:
                _log.warning("what the head's relay carried last is not known: %s", error)
        await self._gateway.stop()

    def use(self, ray: RayProcesses) -> None:
        """The cluster that machines become part of."""
        self._ray = ray

    async def look_for_lost(self, list_machines: Callable[[], Coroutine[Any, Any, list[Machine]]]) -> None:
        """For ever: rule 2."""

        async def look() -> None:
            await asyncio.sleep(LOOK_S)
            seen = await list_machines()
            lost = [machine["name"] for machine in seen if machine["state"] == "Lost"]
            known = {machine["name"] for machine in seen}
            never = [n for n in self.desk.unheard(older_than_s=JOIN_LIMIT_S) if n not in known]
            await self.desk.give_up([*lost, *never])

        await for_ever(look, what="looking for lost machines")

    # ---- what the desk needs ----------------------------------------------------------------------

    def cluster(self) -> ClusterFacts:
        if self._ray is None:
            raise DeploymentError("The deployment is not up yet.", reason=Reason.DEPLOYMENT_NOT_RUNNING)
        terms = self._ray.terms
        return ClusterFacts(
            address=terms.address,
            id=terms.cluster_id,
            session=terms.session,
            token=self._state.secret("ray-token"),
        )

    async def next_name_number(self) -> int:
        async with self._naming:  # many machines join at once when a head began again
            return await asyncio.to_thread(self._state.count_joined)

    def check_versions(self, request: Mapping[str, Any]) -> None:
        check_versions(request)

    async def source_of(self, port: int) -> str | None:
        found = await self._gateway.ask(SourceOf(port=port))
        return str(found) if found else None

    async def probe(
        self, machine: MachineName, addresses: Sequence[tuple[str, int]]
    ) -> list[tuple[str, int]]:
        found = await self._gateway.ask_aside(Probe(machine=machine, addresses=tuple(addresses)))
        return [(str(host), int(port)) for host, port in found]

    async def probe_relay(
        self, relay: MachineName, addresses: Sequence[tuple[str, int]]
    ) -> list[tuple[str, int]]:
        found = await self._gateway.ask_aside(ProbeRelay(relay=relay, addresses=tuple(addresses)))
        return [(str(host), int(port)) for host, port in found]

    def new_node_id(self) -> str:
        return secrets.token_hex(NODE_ID_BYTES)

    # ---- inside -----------------------------------------------------------------------------------

    async def _keep_told(self) -> None:
        async def tell() -> None:
            await self._news.wait()
            self._news.clear()
            try:
                await self._tell_news()
            except BaseException:
                self._news.set()
                raise

        await for_ever(tell, what="news for the gateway")

    async def _tell_news(self) -> None:
        await self._gateway.tell(SetMachines(machines=self.desk.places()))
        await self._gateway.tell(Revoke(machines=frozenset(self.desk.revoked())))
        if self._own_relay is not None:
            relays = [
                RelayPlace(machine=name, addresses=addresses)
                for name, addresses in self.desk.relays.offered().items()
            ]
            await self._gateway.tell(SetRelays(places=(*relays, self._own_relay)))

    async def _keep_relays(self) -> None:
        """Looks who is silent, and enters what the head's own relay has carried."""

        async def look() -> None:
            await asyncio.sleep(LOOK_S)
            self.desk.relays.look()
            await self._enter_own_report()

        await for_ever(look, what="looking after relays")

    async def _enter_own_report(self) -> None:
        answer = await self._gateway.ask(self._take_report)
        report = report_in(answer["report"])
        await self.desk.relays.enter(HEAD, report, lines=int(answer["lines"]), streams=int(answer["streams"]))
        if report is not None:
            self._take_report = TakeReport(life=report.life, delivered=report.number)

    async def _keep_certificates(self) -> None:
        """Rule 3; at once, too, when others are to be trusted."""
        renewed_at, trusted = time.monotonic(), b""

        async def look() -> None:
            nonlocal renewed_at, trusted
            await asyncio.sleep(LOOK_S)
            now_trusted = self._authority.bundle_pem()
            if now_trusted != trusted or time.monotonic() - renewed_at >= RENEW_EVERY_S:
                await self._tell_certificates()
                renewed_at, trusted = time.monotonic(), now_trusted

        await for_ever(look, what="certificates")

    async def _keep_rotating(self) -> None:
        async def look() -> None:
            await asyncio.sleep(LOOK_S)
            await self.desk.rotation.advance()

        await for_ever(look, what="rotation of the authority")

    async def _tell_certificates(self) -> None:
        await self._gateway.tell(SetIdentity(credentials=self._authority.machine_credentials(HEAD)))
        api = self._authority.api_credentials()
        await self._gateway.tell(SetApi(credentials=api, target=self._api))
