"""Joining a head through its mesh port: this machine's identity, its gateway, and the news that it follows.

Theory of operation. `enter` asks the head to be taken in, by a join token or as the machine that this one was before,
with a request for a certificate. Then it starts this machine's gateway and tells it who and where everybody is; the
gateway gives the machine its overlay addresses. Ray's node is started with the machine's overlay address, its members
are known by theirs (`overlay.py`). From then on `_follow` asks for news again and again, and tells the gateway.

Rules of this file:
1. The key is made here and goes nowhere. The secret is on disk before it is used (`machine_identity.py`).
2. Only outbound connections are needed: who cannot be dialled is reached through the head's relay.
3. Told of another cluster, or that it is not a machine any more, this life is over; the agent begins the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from agents import machine_shim
from agents.gateway_keeper import GatewayKeeper, GatewayPlan
from agents.gateway_wire import Offer, Revoke, SetIdentity, SetLocal, SetMachines, SetRelays
from agents.gpus import Gpus, find_gpus
from agents.head_line import JOIN_LIMIT_S, has_moved, head_api, own_addresses
from agents.join import AGAIN_FIRST_S, AGAIN_MAX_S, LEAVE_LOOK_S, Terms
from agents.join_mesh_settings import MeshJoinSettings
from agents.kept_options import keep
from agents.machine_identity import forget_identity
from agents.machine_state import LEAVING_NAME, MachineState
from agents.mesh_asking import Asking, Membership
from agents.mesh_heard import JoinAnswer, MeshNewsHeard, answer_errors
from agents.mesh_ports import MeshPorts, free_ports
from agents.own_port import check_free
from agents.raylet import ADDRESS_LABEL, GPU_TYPE_LABEL
from agents.raylet_process import check_programs
from mesh.errors import AuthenticationError, MeshError, RemoteProtocolError, TransportError
from mesh.http_transport import HttpTransport
from mesh.ids import HEAD
from mesh.net import firewall, other_gateways, redirect
from mesh.net.authority import new_key_pem, signing_request
from mesh.net.guarded_tasks import guarded_task
from mesh.net.overlay import machine_overlay, member_overlay
from mesh.net.paths import (
    DIALABLE_LABEL,
    ON_MESH,
    PRIVATE_ADDRESS_LABEL,
    PRIVATE_NETWORK_LABEL,
    PROVIDER_LABEL,
    PUBLIC_ADDRESS_LABEL,
    TRANSPORT_LABEL,
    UNNAMED_PROVIDER,
)
from mesh.net.relay_client import RelayPlace
from mesh.net.roster import MachinePlace
from mesh.net.shim.library import ShimPlace
from mesh.net.tls import Credentials
from mesh.reasons import Reason

FOLLOW_LIMIT_S = 40.0
"""The head answers within 20 s when there is nothing new."""
NONSENSE_MAX = 30
"""So many answers in a row that are no news end this life: the next one begins with a question to be taken in."""
SAID_EVERY = 30
"""Of tries in vain, 10 s apart, so many are one line in the log."""
RENEW_EVERY_S = 12 * 3600.0
"""A quarter of a certificate's life."""
RENEW_FAILED_S = 60.0
"""An authority that is rotated may be gone in less than that quarter."""

_log = logging.getLogger(__name__)


class MeshWay:
    """See `agents.join.Way`."""

    def __init__(self, settings: MeshJoinSettings, state: MachineState) -> None:
        self._settings = settings
        self._state = state
        self._asking = Asking(settings, state.path)
        self._ports: MeshPorts | None = None
        self._gpus: Gpus | None = None
        self._gateway: GatewayKeeper | None = None
        self._life: Membership | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._over: asyncio.Future[str] | None = None
        self._renew_now = asyncio.Event()
        """Others are to be trusted: another authority may sign."""
        self._identifying = asyncio.Lock()
        self._head_at: tuple[tuple[str, int], ...] | None = None
        """Where the head was found last."""
        (state.path / LEAVING_NAME).unlink(missing_ok=True)  # of an agent that was killed meanwhile

    @property
    def head(self) -> str:
        return self._settings.head.url

    # ---- entering ---------------------------------------------------------------------------------

    async def enter(self) -> Terms:
        machine_shim.check()
        if self._ports is None:
            self._ports = free_ports()
            self._gpus = await asyncio.to_thread(find_gpus)
        await self._check_here()
        try:
            answer, life = await self._asking.ask()
        except TransportError as error:
            if self._head_at is not None and error.reason is Reason.UNREACHABLE:
                error.hint = " ".join(filter(None, (error.hint, has_moved(self._settings.head))))
            raise
        await asyncio.to_thread(keep, self._settings, self._state.path)
        self._life = life
        self._over = asyncio.get_running_loop().create_future()
        gateway = await self._open_gateway(life, answer)
        reached = await self._ask_reach(life, gateway)
        self._tasks = [
            self._beside(self._follow(life, gateway), "news of the mesh"),
            self._beside(self._renew(life, gateway), "certificate"),
        ]
        return Terms(
            name=life.name,
            node_id=answer.node_id,
            session=answer.session,
            cluster_address=answer.cluster_address,
            cluster_id=answer.cluster_id,
            cluster_token=answer.cluster_token,
            address=machine_overlay(life.number)[0],
            labels=self._labels(life, is_dialable=bool(reached)),
            resources={"GPU": self._gpus.count} if self._gpus is not None else {},
            ports=self._ports,
        )

    async def _check_here(self) -> None:
        """What can keep this machine from taking part is found before a token is used. Raises DeploymentError."""
        check_programs()
        check_free(*self._settings.listen)
        if machine_shim.why_no_redirect() is None:
            await asyncio.to_thread(other_gateways.clear, redirect.OVERLAY)

    async def _open_gateway(self, life: Membership, answer: JoinAnswer) -> GatewayKeeper:
        assert self._ports is not None
        deployment = answer.deployment
        lacking = machine_shim.why_no_redirect()
        host, port = self._settings.listen
        plan = GatewayPlan(
            folder=self._state.gateway,
            deployment=deployment,
            machine=life.name,
            listen=(f"[{host}]:{port}" if ":" in host else f"{host}:{port}",),
            closed=(self._ports.first, self._ports.last),
            is_shimmed=lacking is not None,
            environment=machine_shim.without(os.environ),
            log=self._state.path / "gateway.log",
        )
        self._gateway = gateway = GatewayKeeper(plan)
        await gateway.start()
        if lacking is not None:
            self._take_shim(life, deployment=deployment, lacking=lacking)
        await asyncio.to_thread(firewall.sweep, deployment)  # of members that an earlier life left behind
        await self._tell_identity(life, gateway)
        await gateway.tell(SetLocal(addresses=member_overlay(life.number)))
        await self._tell_news(gateway, answer.news)
        await gateway.tell(Offer(ports=self._ports.offered, deliver_to=(machine_overlay(life.number)[0],)))
        return gateway

    def _take_shim(self, life: Membership, *, deployment: str, lacking: str) -> None:
        assert self._ports is not None
        _log.warning(
            "No nftables (%s): programs here reach the overlay by a library that is preloaded. Ray's ports, %d to %d, "
            "are open to whoever reaches this machine; only the cluster's token guards them.",
            *(lacking, self._ports.first, self._ports.last),
        )
        place = ShimPlace(
            gateway_folder=self._state.gateway,
            device=redirect.device_name(deployment),
            addresses=(*machine_overlay(life.number), *member_overlay(life.number)),
        )
        machine_shim.take(place)

    async def _ask_reach(self, life: Membership, gateway: GatewayKeeper) -> list[Any]:
        """Where the head can dial this machine: perhaps nowhere."""
        host, port = self._settings.listen
        own = [self._settings.public_address, *await own_addresses(self._settings.head, listen=host)]
        body = {"addresses": [[address, port] for address in own if address], "port": port}
        async with self._api(life) as api:
            answer = await api.call(
                "POST", f"/v1/machines/{life.name}/reach", body=body, limit_s=JOIN_LIMIT_S
            )
        with answer_errors():
            return list(answer["addresses"])

    def _labels(self, life: Membership, *, is_dialable: bool) -> dict[str, str]:
        settings = self._settings
        hidden = {
            ADDRESS_LABEL: member_overlay(life.number)[0],
            TRANSPORT_LABEL: ON_MESH,
            DIALABLE_LABEL: "1" if is_dialable else "0",
            PRIVATE_NETWORK_LABEL: settings.private_network,
            PRIVATE_ADDRESS_LABEL: settings.private_address,
            PUBLIC_ADDRESS_LABEL: settings.public_address,
            GPU_TYPE_LABEL: self._gpus.type if self._gpus is not None else "",
        }
        given = {name: value for name, value in hidden.items() if value}
        return {PROVIDER_LABEL: UNNAMED_PROVIDER, **settings.labels, **given}

    # ---- life -------------------------------------------------------------------------------------

    def _beside(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A fault of ours in it ends this life; the next life begins anew."""
        return guarded_task(work, name=name, on_fault=self._end)

    async def until_over(self) -> str:
        assert self._over is not None
        return await asyncio.shield(self._over)

    async def _follow(self, life: Membership, gateway: GatewayKeeper) -> None:
        pause_s, failures, nonsense = AGAIN_FIRST_S, 0, 0
        while True:
            try:
                async with self._api(life) as api:
                    while True:
                        answer = await api.call(
                            "GET",
                            f"/v1/machines/{life.name}/mesh",
                            query={"after": life.version},
                            limit_s=FOLLOW_LIMIT_S,
                            repeat_s=0.0,
                        )
                        news = MeshNewsHeard.read(answer)
                        pause_s, failures, nonsense = AGAIN_FIRST_S, 0, 0
                        if not await self._hear(life, gateway, news):
                            return
            except AuthenticationError as error:
                self._end(error.message)
                return
            except (MeshError, OSError) as error:
                nonsense += isinstance(error, RemoteProtocolError)
                if nonsense == NONSENSE_MAX:
                    self._end(f"the head's news makes no sense: {error}")
                    return
                if failures % SAID_EVERY == 0:
                    is_away = isinstance(error, TransportError) and error.reason is Reason.UNREACHABLE
                    moved = has_moved(self._settings.head) if is_away else ""
                    _log.warning("no news from the head, asking again and again: %s %s", error, moved)
                failures += 1
            await asyncio.sleep(pause_s)
            pause_s = min(AGAIN_MAX_S, pause_s * 2)

    async def _hear(self, life: Membership, gateway: GatewayKeeper, news: MeshNewsHeard) -> bool:
        """False when this life is over."""
        if news.cluster != life.cluster:
            self._end("the deployment began again")
            return False
        if news.version == life.version:
            return True
        if news.bundle_pem != life.bundle_pem:
            await self._tell_identity(life, gateway, bundle_pem=news.bundle_pem)
            self._renew_now.set()
        await self._tell_news(gateway, news)
        if life.kept_bundle_pem != news.bundle_pem:  # a full disk does not keep the news from the gateway
            await asyncio.to_thread(self._asking.keep, life)
        life.version = news.version
        return True

    async def _renew(self, life: Membership, gateway: GatewayKeeper) -> None:
        pause_s = RENEW_EVERY_S
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._renew_now.wait()
            self._renew_now.clear()
            key = new_key_pem()
            try:
                async with self._api(life) as api:
                    answer = await api.call(
                        "POST",
                        f"/v1/machines/{life.name}/certificate",
                        body={"request": signing_request(key).decode()},
                    )
                with answer_errors():
                    certificate = str(answer["certificate"]).encode()
                await self._tell_identity(life, gateway, key_pem=key, certificate_pem=certificate)
                pause_s = RENEW_EVERY_S
            except MeshError as error:
                pause_s = min(RENEW_EVERY_S, RENEW_FAILED_S)
                _log.warning("no new certificate: %s", error)

    def _end(self, why: str) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(why)

    async def _tell_identity(self, life: Membership, gateway: GatewayKeeper, **changes: Any) -> None:
        """With these changes, which are this life's when the gateway has them. One after the other."""
        async with self._identifying:
            changed = replace(life, **changes)
            credentials = Credentials(
                certificate_pem=changed.certificate_pem,
                key_pem=changed.key_pem,
                bundle_pem=changed.bundle_pem,
            )
            await gateway.tell(SetIdentity(credentials=credentials))
            for name, value in changes.items():
                setattr(life, name, value)

    async def _tell_news(self, gateway: GatewayKeeper, news: MeshNewsHeard) -> None:
        """Where everybody is; the head is where this machine has found it, and so is its relay."""
        try:
            self._head_at = await self._settings.head.resolve()
        except TransportError:
            if self._head_at is None:
                raise
        at = self._head_at
        places = {**news.machines, HEAD: MachinePlace(gateway=at, overlay=news.machines[HEAD].overlay)}
        await gateway.tell(SetMachines(machines=places))
        await gateway.tell(Revoke(machines=news.revoked))
        own = RelayPlace(machine=HEAD, addresses=at, is_gateway=True)
        await gateway.tell(SetRelays(places=(*news.relays, own)))

    def _api(self, life: Membership) -> contextlib.AbstractAsyncContextManager[HttpTransport]:
        return head_api(self._settings.head, bundle_pem=life.bundle_pem, secret=life.secret)

    # ---- leaving ----------------------------------------------------------------------------------

    async def until_free(self, name: str, *, grace_s: float) -> None:
        assert self._life is not None
        notice = {"graceSeconds": grace_s, "message": "its agent was told to stop"}
        async with self._api(self._life) as api:
            await api.call("POST", f"/v1/machines/{name}/leave", body=notice)
            while True:
                machine = (await api.call("GET", f"/v1/machines/{name}/own"))["machine"]
                if machine is None or not machine["run"]:
                    return
                await asyncio.sleep(LEAVE_LOOK_S)

    async def say_goodbye(self, name: str) -> None:
        """For good, when `mesh leave` has said so; else it may come back as itself."""
        assert self._life is not None
        marker = self._state.path / LEAVING_NAME
        if not marker.exists():
            return
        async with self._api(self._life) as api:
            await api.call("DELETE", f"/v1/machines/{name}", repeat_s=2.0)
        await asyncio.to_thread(forget_identity, self._state.path)
        marker.unlink(missing_ok=True)

    async def close(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        gateway, self._gateway = self._gateway, None
        if gateway is not None:
            await gateway.stop()
        self._life = None
