"""A head's mesh port on loopback, without Ray: the real desk, API, gateway and authority. For tests of who gets in."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from agents.head_line import HeadUrl
from agents.join_mesh import MeshWay
from agents.join_mesh_settings import MeshJoinSettings
from agents.machine_state import MachineState
from coordinator.api.app import make_app
from coordinator.mesh_authority import MeshAuthority
from coordinator.mesh_books import MeshBooks
from coordinator.mesh_desk import ClusterFacts, MeshDesk
from mesh import __version__
from mesh.errors import ConflictError
from mesh.ids import HEAD, MachineName
from mesh.net.api_front import ApiFront
from mesh.net.gateway import Gateway
from mesh.net.relay_book import RelayLimits
from mesh.net.tokens import JoinToken
from mesh.spec import DeploymentFacts
from tests.fakes.service import FakeService
from tests.net_world import DEPLOYMENT

TOKEN = "the-owners"


@dataclass
class HeadWorld:
    """Its own surroundings: see `coordinator.mesh_desk.Surroundings`."""

    state: Path
    authority: MeshAuthority
    gateway: Gateway
    cluster_id: str = "cluster-1"
    number: int = 0
    port: int = 0
    api: tuple[str, int] = ("", 0)
    desk: MeshDesk = field(init=False)

    @property
    def url(self) -> HeadUrl:
        return HeadUrl.parse(f"https://127.0.0.1:{self.port}")

    async def token(self, ttl_s: float | None = None) -> JoinToken:
        return JoinToken.parse((await self.desk.create_token(ttl_s))[0])

    def way(self, folder: Path, token: JoinToken | None = None, **settings: Any) -> MeshWay:
        """The agent of a machine whose folder this is, which has not asked yet."""
        folder.mkdir(exist_ok=True)
        state = MachineState(path=folder, sockets=folder, id="test")
        chosen: dict[str, Any] = {
            "head": self.url,
            "token": token,
            "listen": ("127.0.0.1", 1),
            "labels": {},
            **settings,
        }
        return MeshWay(MeshJoinSettings(**chosen), state)

    def use_certificates(self) -> None:
        """As the authority signs them now."""
        self.gateway.set_identity(self.authority.machine_credentials(HEAD))
        self.gateway.set_api(ApiFront(credentials=self.authority.api_credentials(), target=self.api))

    # ---- what the desk needs ----------------------------------------------------------------------

    def cluster(self) -> ClusterFacts:
        return ClusterFacts(address="198.18.0.1:31000", id=self.cluster_id, session="s", token="t")

    async def next_name_number(self) -> int:
        self.number += 1
        return self.number

    def check_versions(self, request: Mapping[str, Any]) -> None:
        if request.get("version") != __version__:
            raise ConflictError(f"The machine runs gangmesh {request.get('version')}.")

    async def source_of(self, port: int) -> str | None:
        return self.gateway.source_of(port)

    async def probe(
        self, machine: MachineName, addresses: Sequence[tuple[str, int]]
    ) -> list[tuple[str, int]]:
        return await self.gateway.probe(machine, addresses)

    async def probe_relay(
        self, relay: MachineName, addresses: Sequence[tuple[str, int]]
    ) -> list[tuple[str, int]]:
        return await self.gateway.probe_relay(relay, addresses)

    def new_node_id(self) -> str:
        return "n" * 56


@contextlib.asynccontextmanager
async def head_world(state: Path, *, mesh_port: int = 0) -> AsyncIterator[HeadWorld]:
    authority = MeshAuthority.create(state, deployment=DEPLOYMENT)
    gateway = Gateway(deployment=DEPLOYMENT, machine=HEAD)
    world = HeadWorld(state=state, authority=authority, gateway=gateway)
    books = MeshBooks(state)
    books.load()
    world.desk = MeshDesk(books=books, authority=authority, around=world, on_change=lambda: None)
    service = FakeService()
    app = make_app(
        service,
        service.logs,
        token=TOKEN,
        deployment_facts=DeploymentFacts(machines=0),
        mesh=world.desk,
    )
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    world.api = runner.addresses[0][:2]
    world.use_certificates()
    gateway.carry_relay(RelayLimits())
    gateway.start(listen_on=(("127.0.0.1", mesh_port),), capture_port=None)
    world.port = gateway.addresses[0][1]
    try:
        yield world
    finally:
        await gateway.stop()
        await runner.cleanup()
        await service.stop()
