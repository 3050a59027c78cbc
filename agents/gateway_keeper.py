"""Keeps a gateway process: starts it, tells it everything, and does both again when it ends by itself.

Rules of this file:
1. Of each kind of request the latest is remembered (`tell`), and told again in the order in which the kinds were told
   first. What is only asked (`ask`) is not.
2. Rosters and members are not told here: whoever runs a member tells it itself, and sees a new gateway by its broken
   connection.
3. A first start that fails is the caller's; later ones are tried again, for as long as it takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.child import Child, spawn
from agents.gateway_client import GatewayClient
from agents.gateway_wire import CONTROL_NAME, Counters, Request
from agents.raylet_process import log_tail
from mesh.errors import DeploymentError, MeshError, MeshTimeoutError, TransportError
from mesh.net.guarded_tasks import as_errors, guarded_task
from mesh.reasons import Reason

START_LIMIT_S = 30.0
START_LOOK_S = 0.02
STOP_GRACE_S = 8.0
"""It takes rules, device and addresses away: a few calls of `nft` and `ip`."""
SILENCES_MAX = 2
"""So many requests in a row that a gateway does not answer end it: one may be slow, on a machine that is busy."""
READY_LIMIT_S = 90.0
"""Longer than it takes to find out that it is dead, and to start another one."""
ASIDE_MAX = 16
"""Of `ask_aside` at a time; the gateway takes few connections."""
AGAIN_FIRST_S, AGAIN_MAX_S = 0.1, 5.0
LIVED_LONG_S = 30.0
"""After a life as long as this the pauses begin anew."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayPlan:
    """How a machine's gateway is started."""

    folder: Path
    """Of the process alone; its control socket lies in it, so its path has to be short."""
    deployment: str
    machine: str
    listen: Sequence[str]
    closed: tuple[int, int]
    """Ray's ports here: only the mesh leads to them."""
    is_shimmed: bool = False
    """Programs here reach it by the shim; no rules then, and no ports that they close."""
    environment: Mapping[str, str]
    log: Path

    @property
    def socket(self) -> Path:
        return self.folder / CONTROL_NAME

    @property
    def last_words(self) -> Path:
        """What it says outside of its log: why it does not start."""
        return self.log.with_suffix(".start")

    def command(self) -> list[str]:
        return [
            *(sys.executable, "-P", "-m", "agents.gateway", "--folder", str(self.folder)),
            *("--deployment", self.deployment, "--machine", self.machine),
            *(part for address in self.listen for part in ("--listen", address)),
            *(("--shim",) if self.is_shimmed else ("--closed", f"{self.closed[0]}-{self.closed[1]}")),
            *("--log", str(self.log)),
        ]


class GatewayKeeper:
    """`start`, then `tell` and `ask`, then `stop`."""

    def __init__(self, plan: GatewayPlan) -> None:
        self.plan = plan
        self._told: dict[type[Request], Request] = {}
        self._child: Child | None = None
        self._client: GatewayClient | None = None
        self._is_up = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._aside = asyncio.Semaphore(ASIDE_MAX)
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        """Of the process, while it runs."""
        return self._child.pid if self._child is not None and self._child.is_running else None

    async def start(self) -> list[tuple[str, int]]:
        """Returns when it accepts; where. Raises DeploymentError with what it said, MeshTimeoutError."""
        self.plan.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        client = await self._begin()
        counters = await client.ask(Counters())
        self._is_up.set()
        self._keeping = guarded_task(self._keep(), name="gateway")
        return [(str(host), int(port)) for host, port in counters["addresses"]]

    async def stop(self) -> None:
        """Rules, device and addresses are gone when it returns. May be called again."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
        if self._client is not None:
            self._client.close()
        if self._child is not None:
            await self._child.stop(grace_s=STOP_GRACE_S)

    async def tell(self, request: Request) -> Any:
        """Its answer, when it is done. Told again whenever the gateway is started anew. Raises as `ask`."""
        self._told[type(request)] = request
        return await self.ask(request)

    async def ask(self, request: Request) -> Any:
        """Its answer, of the next gateway if this one dies meanwhile. Raises what it raised, MeshTimeoutError."""
        async with self._ready_limit():
            while True:
                await self._is_up.wait()
                client = self._client
                if client is None:  # it ended in the moment in which it was up
                    await asyncio.sleep(START_LOOK_S)
                    continue
                try:
                    return await client.ask(request)
                except MeshError:
                    if not _is_dead(client):
                        raise
                    if client is self._client and self._child is not None:
                        self._is_up.clear()
                        await self._child.stop(grace_s=0.0)

    async def ask_aside(self, request: Request) -> Any:
        """The same for what waits for other machines, so that nothing else waits for it: on a line of its own.

        Raises TransportError, too, when the gateway dies meanwhile.
        """
        async with self._ready_limit(), self._aside:
            await self._is_up.wait()
            client = await GatewayClient.connect(self.plan.socket)
            try:
                return await client.ask(request)
            finally:
                client.close()

    @contextlib.asynccontextmanager
    async def _ready_limit(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(READY_LIMIT_S):
                yield
        except TimeoutError as error:
            raise MeshTimeoutError(
                f"The gateway of {self.plan.machine} does not come up.",
                hint=f"Its log is {self.plan.log}.",
                timeout_s=READY_LIMIT_S,
            ) from error

    async def _keep(self) -> None:
        pause_s = AGAIN_FIRST_S
        while True:
            assert self._child is not None
            began = time.monotonic()
            code = await asyncio.shield(self._child.ended)
            self._is_up.clear()
            if time.monotonic() - began > LIVED_LONG_S:
                pause_s = AGAIN_FIRST_S
            _log.error("the gateway ended by itself (code %d): starting it again", code)
            while True:
                try:
                    with as_errors("the gateway's keeper"):
                        client = await self._begin()
                        await self._tell_all(client)
                    break
                except (MeshError, OSError) as error:
                    _log.error("the gateway cannot be started, again in %g s: %s", pause_s, error)
                    await self._child.stop(grace_s=0.0)
                    await asyncio.sleep(pause_s)
                    pause_s = min(AGAIN_MAX_S, pause_s * 2)
            self.restarts += 1
            self._is_up.set()

    async def _begin(self) -> GatewayClient:
        """The client of a new process, kept from here on: whatever comes next, it is closed."""
        if self._client is not None:
            self._client.close()
            self._client = None
        child = self._child = spawn(
            f"gateway of {self.plan.machine}",
            self.plan.command(),
            environment=self.plan.environment,
            log=self.plan.last_words,
        )
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            if not child.is_running:
                raise DeploymentError(
                    _said(self.plan.last_words)
                    or f"The gateway ended while it was starting ({child.ended.result()}).",
                    reason=Reason.FORBIDDEN,
                )
            if self.plan.socket.exists():
                try:
                    self._client = await GatewayClient.connect(self.plan.socket)
                except TransportError:  # of the last one, which was killed
                    pass
                else:
                    return self._client
            await asyncio.sleep(START_LOOK_S)
        await child.stop(grace_s=0.0)
        raise MeshTimeoutError("Waited for the gateway to start, in vain.", timeout_s=START_LIMIT_S)

    async def _tell_all(self, client: GatewayClient) -> None:
        for request in list(self._told.values()):
            try:
                await client.ask(request)
            except MeshError as error:
                if client.is_broken or client.silences:
                    raise
                _log.error("the new gateway does not take %s: %s", type(request).__name__, error)


def _is_dead(client: GatewayClient) -> bool:
    """Or stands still: once it may only be late."""
    return client.is_broken or client.silences >= SILENCES_MAX


def _said(log: Path) -> str:
    """The last word of a gateway that did not start."""
    lines = log_tail(log).splitlines()
    return lines[-1].removeprefix("gateway: ").removeprefix("error: ") if lines else ""
