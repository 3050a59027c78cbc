"""A member's network on a machine of the mesh: certificate, overlay or firewall, and the fence of both.

Rules of this file:
1. The member's key is made here, anew for each life and each renewal, and stays in memory. The coordinator signs for
   whom its records have on this machine, in this epoch, and for nobody else.
2. On direct and relayed the gateway is told the epoch's roster and the member; on private and public the firewall
   admits the members' addresses. What the layer does not cover is said (`PathTaken.lacks`), and the run goes on.
3. When the life is over, the gateway refuses its epoch. But not where its rank may start again alone: that is the same
   epoch, so what was told stays until the next member comes, who finds it (`prepare`).
4. A machine has one member at a time: whoever comes takes away what others have left.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

from agents.core.events import Arrival
from agents.gateway_wire import Counters, Fence, Forget, Host, SetRoster
from agents.machine import interface_for
from agents.network import OnLost, OpenPath, open_path, path_of
from agents.overlay_line import OverlayLine, ask, patiently
from mesh.errors import DeploymentError, MeshError, MeshTimeoutError, PlacementError, TransportError
from mesh.ids import Epoch, Incarnation, MachineName, Rank, RunUid
from mesh.messages import CauseEvidence, JoinOrder, MemberCertificate
from mesh.net import firewall
from mesh.net.authority import new_key_pem, read_certificate, signing_request
from mesh.net.clock import SKEW_MAX_S
from mesh.net.guarded_tasks import as_errors, guarded_task
from mesh.net.identity import PeerCertificate
from mesh.net.overlay import member_overlay, number_of
from mesh.net.paths import NetworkFacts, Path
from mesh.net.roster import MemberPlace, Roster
from mesh.net.tls import Credentials
from mesh.reasons import Reason
from mesh.states import FailurePolicy, LauncherKind, Transport

Sign = Callable[[Incarnation, MachineName, bytes], Awaitable[MemberCertificate]]
"""Has the coordinator sign a request. Raises MeshError."""
SIGN_LIMIT_S = 60.0
"""Longer than a coordinator takes to be back after a crash."""
SIGN_AGAIN_S = 0.5
BREAK_EXPLAINS_S = 10.0
"""For so long a broken path, by its gateway or a relay, explains whatever the command ends of; later only its
complaints about peers."""
RENEW_PART, RENEW_AGAIN_PART = 1 / 2, 1 / 16
"""Of a certificate's time: until it is renewed, and between tries that fail."""
RENEW_AGAIN_S = 0.5
"""The least between two renewals."""
CLOSE_LIMIT_S = 5.0
ENCRYPTED = frozenset({Transport.DIRECT, Transport.RELAYED})

_log = logging.getLogger(__name__)


class MeshNetwork:
    """See `MemberNetwork`.

    Args:
        facts: where the machine stands.
        gateway: control socket of its gateway.
    """

    def __init__(self, facts: NetworkFacts, *, gateway: FilePath, sign: Sign) -> None:
        self._facts = facts
        self._gateway = gateway
        self._sign = sign
        self._order: JoinOrder | None = None
        self._credentials: Credentials | None = None
        self._deployment = ""
        self._line: OverlayLine | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._has_firewall = False
        self._lost_why = ""

    async def prepare(self, order: JoinOrder) -> NetworkFacts | None:
        self._order = order
        await self._take_over(order.incarnation.run_uid)
        shown = await self._certify(order)
        self._deployment = shown.identity.deployment
        await asyncio.to_thread(firewall.sweep, self._deployment)
        return replace(
            self._facts,
            private_address=_on_this_machine(self._facts.private_address),
            public_address=_on_this_machine(self._facts.public_address),
        )

    async def open(self, order: JoinOrder, arrivals: Sequence[Arrival], *, on_lost: OnLost) -> OpenPath:
        path = path_of(order, arrivals)
        if path.transport not in ENCRYPTED:
            return await self._open_firewall(order, path)

        def lost(why: str) -> None:
            self._lost_why = why
            on_lost(why)

        roster = SetRoster(roster=_roster(order, arrivals))
        self._line = OverlayLine(self._gateway, [roster, self._host()], on_lost=lost)
        await self._line.start()
        self._renewing = guarded_task(self._renew(order), name="renewing the certificate", on_fault=lost)
        epoch = order.incarnation.epoch
        return open_path(order, path, layer=f"gateways admit certificates of epoch {epoch} only")

    async def explain(self, evidence: CauseEvidence) -> CauseEvidence:
        if self._lost_why:
            return replace(evidence, by_infrastructure=True, blames_peer=False, message=self._lost_why)
        what = await self._what_ended(whenever=evidence.blames_peer)
        if not what:
            return evidence
        message = f"{what} ended, and its connections with it; {evidence.message}"
        return replace(evidence, by_infrastructure=True, blames_peer=False, message=message)

    async def _what_ended(self, *, whenever: bool) -> str:
        """Of what its connections went through; within BREAK_EXPLAINS_S, or whenever it was. Empty when nothing has."""
        if self._line is None:
            return ""
        broke_at = self._line.broke_at
        if broke_at is not None and (whenever or time.monotonic() - broke_at <= BREAK_EXPLAINS_S):
            return "the gateway of its machine"
        cut = await self._cut_by_relays()
        explaining = [relay for relay, ago_s in cut.items() if whenever or ago_s <= BREAK_EXPLAINS_S]
        return f"the relay {min(explaining, key=cut.__getitem__)}" if explaining else ""

    async def _cut_by_relays(self) -> dict[str, float]:
        """Relays that ended and broke connections of this epoch here: for how many seconds they have been broken."""
        assert self._order is not None, "prepare comes first"
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                counters: Any = await ask(self._gateway, Counters())
        except (MeshError, TimeoutError) as error:
            _log.warning("the gateway does not say which relays have ended: %r", error)
            return {}
        return dict(counters["cut_by_relays"].get(self._order.incarnation.run_uid, {}))

    async def close(self) -> None:
        order = self._order
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait([self._renewing])
        line, self._line = self._line, None
        if line is not None:
            await line.stop()
        if order is None:
            return
        uid, epoch = order.incarnation.run_uid, order.incarnation.epoch
        if line is not None and not _may_start_again_alone(order):
            try:
                async with asyncio.timeout(CLOSE_LIMIT_S):
                    await ask(self._gateway, Fence(run=uid, floor=Epoch(epoch + 1)))
            except (MeshError, TimeoutError) as error:
                # A gateway that is dead lets nothing pass, and one that is new knows of no member.
                _log.warning("the gateway was not told that epoch %d is over: %r", epoch, error)
        if self._has_firewall:
            self._has_firewall = False
            await asyncio.to_thread(firewall.admit_all, self._deployment, order.incarnation)

    # ---- before the barrier ---------------------------------------------------------------------------

    async def _take_over(self, run: RunUid) -> None:
        """Rule 4. Raises MeshTimeoutError when the gateway does not answer."""
        counters: Any = await patiently(lambda: ask(self._gateway, Counters()))
        left = [RunUid(uid) for uid in counters["runs"] if uid != run]
        if left:
            await ask(self._gateway, *(Forget(run=uid) for uid in left))

    async def _certify(self, order: JoinOrder) -> PeerCertificate:
        """Has a new key signed; waits for a coordinator that is being restarted. Raises MeshError."""
        key = await asyncio.to_thread(new_key_pem)
        request = signing_request(key)
        deadline = time.monotonic() + SIGN_LIMIT_S
        while True:
            try:
                signed = await self._sign(order.incarnation, self._facts.machine, request)
                break
            except (TransportError, MeshTimeoutError) as error:
                if time.monotonic() >= deadline:
                    raise
                _log.info("no certificate yet: %s", error)
            await asyncio.sleep(SIGN_AGAIN_S)
        self._credentials = Credentials(
            certificate_pem=signed.certificate_pem, key_pem=key, bundle_pem=signed.bundle_pem
        )
        return read_certificate(signed.certificate_pem)

    # ---- while it runs --------------------------------------------------------------------------------

    def _host(self) -> Host:
        assert self._credentials is not None, "prepare comes before open"
        return Host(credentials=self._credentials, deliver_to=_overlay(self._facts.address))

    async def _renew(self, order: JoinOrder) -> None:
        """A new certificate when half of the old one's time is over; what fails is tried again well before its end."""
        assert self._credentials is not None and self._line is not None
        shown, part = read_certificate(self._credentials.certificate_pem), RENEW_PART
        while True:
            ttl_s = shown.not_after - shown.not_before - SKEW_MAX_S  # it begins so long before it is signed
            await asyncio.sleep(max(RENEW_AGAIN_S, ttl_s * part))
            try:
                with as_errors("renewing the certificate"):
                    shown = await self._certify(order)
                    await self._line.tell(self._host())
                part = RENEW_PART
            except (MeshError, OSError) as error:
                part = RENEW_AGAIN_PART
                _log.error("the certificate of %s is not renewed: %s", order.incarnation, error)

    async def _open_firewall(self, order: JoinOrder, path: Path) -> OpenPath:
        self._has_firewall = True
        try:
            lacks = await asyncio.to_thread(
                firewall.admit_only, self._deployment, order.incarnation, path.addresses
            )
        except DeploymentError as error:
            return open_path(order, path, lacks=error.message)
        return open_path(
            order, path, layer="each machine's firewall admits the members' addresses only", lacks=lacks
        )


def _roster(order: JoinOrder, arrivals: Sequence[Arrival]) -> Roster:
    me = order.incarnation
    places = []
    for rank, arrival in enumerate(arrivals):
        assert arrival.network is not None, "an encrypted path has machines of the mesh only"
        overlay = _overlay(arrival.network.address)
        places.append(MemberPlace(rank=Rank(rank), machine=arrival.network.machine, overlay=overlay))
    return Roster(run=me.run_uid, epoch=me.epoch, members=tuple(places))


def _overlay(address: str) -> tuple[str, ...]:
    """Both overlay addresses of the member that has this one. Raises PlacementError."""
    number = number_of(address)
    if number is None:
        raise PlacementError(f"{address} is no overlay address of a member.", reason=Reason.NETWORK_FAILED)
    return member_overlay(number)


def _on_this_machine(address: str | None) -> str | None:
    """None for an address that no interface has (it is behind a translation): peers could not use it as it is."""
    if address is None or interface_for(address) is not None:
        return address
    _log.warning("%s is an address of no interface of this machine: not offered to peers", address)
    return None


def _may_start_again_alone(order: JoinOrder) -> bool:
    """See `coordinator.core.recovery.lone_failures`."""
    plan = order.plan
    is_for_ranks = plan.on_process_failure is FailurePolicy.RESTART_RANK
    return is_for_ranks and plan.launcher is LauncherKind.PLAIN and order.incarnation.rank != 0
