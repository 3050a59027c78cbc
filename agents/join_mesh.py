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
import platform
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agents import machine_shim
from agents.gateway_keeper import GatewayKeeper, GatewayPlan
from agents.gateway_wire import Offer, Revoke, SetIdentity, SetLocal, SetMachines, SetRelays
from agents.gpus import Gpus, find_gpus
from agents.head_line import HeadUrl, ask_trust, head_api, in_words
from agents.join import AGAIN_FIRST_S, AGAIN_MAX_S, LEAVE_LOOK_S, Terms
from agents.machine_identity import KnownIdentity, forget_identity, read_identity, write_identity
from agents.machine_state import MachineState
from agents.mesh_ports import MeshPorts, free_ports
from agents.raylet import ADDRESS_LABEL, GPU_TYPE_LABEL
from mesh import __version__
from mesh.errors import AuthenticationError, ConflictError, MeshError, SpecError
from mesh.http_transport import HttpTransport
from mesh.ids import MachineName
from mesh.net import firewall, redirect
from mesh.net.authority import new_key_pem, signing_request
from mesh.net.clock import wall_clock
from mesh.net.overlay import machine_overlay, member_overlay
from mesh.net.paths import (
    DIALABLE_LABEL,
    ON_MESH,
    PRIVATE_ADDRESS_LABEL,
    PRIVATE_NETWORK_LABEL,
    PUBLIC_ADDRESS_LABEL,
    TRANSPORT_LABEL,
)
from mesh.net.relay_client import RelayPlace
from mesh.net.roster import MachinePlace, Revocations
from mesh.net.shim.library import ShimPlace
from mesh.net.tls import Credentials
from mesh.net.tokens import JoinToken
from mesh.reasons import Reason

HEAD = MachineName("head")
JOIN_LIMIT_S = 30.0
FOLLOW_LIMIT_S = 40.0
"""The head answers within 20 s when there is nothing new."""
IN_USE_LIMIT_S = 60.0
"""How long a head may believe that this machine is still there, whose connection was cut without a word: 30 s."""
IN_USE_AGAIN_S = 2.0
RENEW_EVERY_S = 10 * 86400.0
"""A third of a certificate's life."""
LEAVING_NAME = "leaving"
"""In the agent's folder, when it ends because the machine leaves for good."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshJoinSettings:
    """What an agent is told that joins through a mesh port."""

    head: HeadUrl
    token: JoinToken | None
    listen: tuple[str, int]
    labels: Mapping[str, str]
    name_hint: str = ""
    private_network: str = ""
    private_address: str = ""
    public_address: str = ""


@dataclass(slots=True, kw_only=True)
class _Life:
    """One membership."""

    name: MachineName
    number: int
    secret: str = field(repr=False)
    key_pem: bytes = field(repr=False)
    certificate_pem: bytes
    bundle_pem: bytes
    cluster: str
    version: str


class MeshWay:
    """See `agents.join.Way`."""

    def __init__(self, settings: MeshJoinSettings, state: MachineState) -> None:
        self._settings = settings
        self._state = state
        self._ports: MeshPorts | None = None
        self._gpus: Gpus | None = None
        self._gateway: GatewayKeeper | None = None
        self._life: _Life | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._over: asyncio.Future[str] | None = None
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
        answer, life = await self._ask()
        self._life = life
        self._over = asyncio.get_running_loop().create_future()
        gateway = await self._open_gateway(life, answer["news"], deployment=str(answer["deployment"]))
        reached = await self._ask_reach(life, gateway)
        self._tasks = [
            asyncio.create_task(self._follow(life, gateway), name="news of the mesh"),
            asyncio.create_task(self._renew(life, gateway), name="certificate"),
        ]
        cluster = answer["cluster"]
        return Terms(
            name=life.name,
            node_id=str(answer["nodeId"]),
            session=str(cluster["session"]),
            cluster_address=str(cluster["address"]),
            cluster_id=str(cluster["id"]),
            cluster_token=str(answer["clusterToken"]),
            address=machine_overlay(life.number)[0],
            labels=self._labels(life, is_dialable=bool(reached)),
            resources={"GPU": self._gpus.count} if self._gpus is not None else {},
            ports=self._ports,
        )

    async def _ask(self) -> tuple[dict[str, Any], _Life]:
        """As the machine that it was, when it was one here; else by its token."""
        known = read_identity(self._state.path)
        token = self._settings.token
        if known is not None:
            try:
                return await self._ask_again(known)
            except AuthenticationError as error:
                if token is None or error.reason is Reason.CLOCK_SKEW:
                    raise
                _log.info("joining anew, by the token: %s", error)
        if token is None:
            raise SpecError(
                "This machine has not joined before: it needs a token.",
                hint="`mesh token create` on the head makes one; then: mesh join URL --token TOKEN",
                field="--token",
            )
        authority = await ask_trust(self._settings.head, token.fingerprint)
        return await self._ask_with({"token": str(token)}, authority)

    async def _ask_again(self, known: KnownIdentity) -> tuple[dict[str, Any], _Life]:
        """A machine that was cut off by its death may still be there for its head: it is waited for."""
        deadline = asyncio.get_running_loop().time() + IN_USE_LIMIT_S
        while True:
            try:
                return await self._ask_with(
                    {"again": {"name": known.name, "secret": known.secret}}, known.bundle.encode()
                )
            except ConflictError as error:
                late = asyncio.get_running_loop().time() > deadline
                if error.reason is not Reason.IDENTITY_IN_USE or late:
                    raise
                _log.info("%s Asking again.", error.message)
                await asyncio.sleep(IN_USE_AGAIN_S)

    async def _ask_with(
        self, credentials: Mapping[str, Any], authority_pem: bytes
    ) -> tuple[dict[str, Any], _Life]:
        import ray

        key = new_key_pem()
        request = {
            **credentials,
            "request": signing_request(key).decode(),
            "clock": wall_clock(),
            "version": __version__,
            "python": platform.python_version(),
            "ray": ray.__version__,
            "nameHint": self._settings.name_hint,
        }
        async with head_api(self._settings.head, bundle_pem=authority_pem) as api:
            answer: dict[str, Any] = await api.call(
                "POST", "/v1/mesh/join", body=request, limit_s=JOIN_LIMIT_S, repeat_s=0.0
            )
        news = answer["news"]
        life = _Life(
            name=MachineName(str(answer["name"])),
            number=int(answer["number"]),
            secret=str(answer["secret"]),
            key_pem=key,
            certificate_pem=str(answer["certificate"]).encode(),
            bundle_pem=str(news["bundle"]).encode(),
            cluster=str(news["cluster"]),
            version=str(news["version"]),
        )
        await asyncio.to_thread(self._keep, life)
        return answer, life

    def _keep(self, life: _Life) -> None:
        known = KnownIdentity(
            head=self.head, name=life.name, secret=life.secret, bundle=life.bundle_pem.decode()
        )
        write_identity(self._state.path, known)

    async def _open_gateway(self, life: _Life, news: Mapping[str, Any], *, deployment: str) -> GatewayKeeper:
        assert self._ports is not None
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
        await self._tell_news(gateway, news)
        await gateway.tell(Offer(ports=self._ports.offered, deliver_to=(machine_overlay(life.number)[0],)))
        return gateway

    def _take_shim(self, life: _Life, *, deployment: str, lacking: str) -> None:
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

    async def _ask_reach(self, life: _Life, gateway: GatewayKeeper) -> list[Any]:
        """Where the head can dial this machine: perhaps nowhere."""
        _, port = self._settings.listen
        own = [self._settings.public_address, *await self._own_addresses()]
        body = {"addresses": [[address, port] for address in own if address], "port": port}
        async with self._api(life) as api:
            answer = await api.call(
                "POST", f"/v1/machines/{life.name}/reach", body=body, limit_s=JOIN_LIMIT_S
            )
        return list(answer["addresses"])

    async def _own_addresses(self) -> list[str]:
        """As which this machine reaches its head, or what its gateway listens on when that is one address."""
        host, _ = self._settings.listen
        if host not in ("0.0.0.0", "::"):
            return [host]
        found = []
        for address, port in await self._settings.head.resolve():
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((address, port))  # asks the kernel for the route; sends nothing
                found.append(str(probe.getsockname()[0]))
        return found[:2]

    def _labels(self, life: _Life, *, is_dialable: bool) -> dict[str, str]:
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
        return {"provider": "joined", **settings.labels, **given}

    # ---- life -------------------------------------------------------------------------------------

    async def until_over(self) -> str:
        assert self._over is not None
        return await asyncio.shield(self._over)

    async def _follow(self, life: _Life, gateway: GatewayKeeper) -> None:
        pause_s = AGAIN_FIRST_S
        while True:
            try:
                async with self._api(life) as api:
                    while True:
                        news = await api.call(
                            "GET",
                            f"/v1/machines/{life.name}/mesh",
                            query={"after": life.version},
                            limit_s=FOLLOW_LIMIT_S,
                            repeat_s=0.0,
                        )
                        pause_s = AGAIN_FIRST_S
                        if not await self._hear(life, gateway, news):
                            return
            except AuthenticationError as error:
                self._end(error.message)
                return
            except (MeshError, OSError) as error:
                shown = in_words(error, self._settings.head) if isinstance(error, MeshError) else error
                _log.warning("no news from the head: %s", shown)
            await asyncio.sleep(pause_s)
            pause_s = min(AGAIN_MAX_S, pause_s * 2)

    async def _hear(self, life: _Life, gateway: GatewayKeeper, news: Mapping[str, Any]) -> bool:
        """False when this life is over."""
        if str(news["cluster"]) != life.cluster:
            self._end("the deployment began again")
            return False
        if str(news["version"]) == life.version:
            return True
        bundle = str(news["bundle"]).encode()
        if bundle != life.bundle_pem:
            life.bundle_pem = bundle
            await asyncio.to_thread(self._keep, life)
            await self._tell_identity(life, gateway)
        await self._tell_news(gateway, news)
        life.version = str(news["version"])
        return True

    async def _renew(self, life: _Life, gateway: GatewayKeeper) -> None:
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            key = new_key_pem()
            try:
                async with self._api(life) as api:
                    answer = await api.call(
                        "POST",
                        f"/v1/machines/{life.name}/certificate",
                        body={"request": signing_request(key).decode()},
                    )
            except MeshError as error:  # there are two more such periods
                _log.warning("no new certificate: %s", error)
                continue
            life.key_pem, life.certificate_pem = key, str(answer["certificate"]).encode()
            await self._tell_identity(life, gateway)

    def _end(self, why: str) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(why)

    async def _tell_identity(self, life: _Life, gateway: GatewayKeeper) -> None:
        credentials = Credentials(
            certificate_pem=life.certificate_pem, key_pem=life.key_pem, bundle_pem=life.bundle_pem
        )
        await gateway.tell(SetIdentity(credentials=credentials))

    async def _tell_news(self, gateway: GatewayKeeper, news: Mapping[str, Any]) -> None:
        """Where everybody is; the head is where this machine has found it, and so is its relay."""
        at = await self._settings.head.resolve()
        places = {
            MachineName(str(name)): MachinePlace(
                gateway=tuple((str(host), int(port)) for host, port in words["gateway"]),
                overlay=tuple(str(address) for address in words["overlay"]),
            )
            for name, words in news["machines"].items()
        }
        places[HEAD] = MachinePlace(gateway=at, overlay=places[HEAD].overlay)
        await gateway.tell(SetMachines(machines=places))
        revoked = frozenset(MachineName(str(name)) for name in news["revoked"])
        await gateway.tell(Revoke(revocations=Revocations(machines=revoked)))
        await gateway.tell(SetRelays(places=(RelayPlace(machine=HEAD, addresses=at, is_gateway=True),)))

    def _api(self, life: _Life) -> contextlib.AbstractAsyncContextManager[HttpTransport]:
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


def read_settings(
    *,
    head: str,
    token: str | None,
    listen: str,
    labels: Mapping[str, str],
    name_hint: str,
    private_network: str,
    private_address: str,
    public_address: str,
) -> MeshJoinSettings:
    """From the command line. Raises SpecError."""
    from agents.gateway import address_and_port

    for option, address in (("--private-address", private_address), ("--public-address", public_address)):
        _check_address(option, address)
    if bool(private_network) != bool(private_address):
        raise SpecError(
            "--private-network and --private-address belong together: which network, and this machine's address in it.",
            field="--private-network",
        )
    where = address_and_port(listen)
    if where[1] == 0:
        raise SpecError("--listen takes a port of its own choice.", field="--listen", got=listen)
    return MeshJoinSettings(
        head=HeadUrl.parse(head),
        token=JoinToken.parse(token) if token else None,
        listen=where,
        labels=labels,
        name_hint=name_hint,
        private_network=private_network,
        private_address=private_address,
        public_address=public_address,
    )


def _check_address(option: str, address: str) -> None:
    import ipaddress

    try:
        usable = not address or not ipaddress.ip_address(address).is_unspecified
    except ValueError:
        usable = False
    if not usable:
        raise SpecError(
            f"{option} takes an IP address, not {address[:80]!r}.", field=option, got=address[:80]
        )
