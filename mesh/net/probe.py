"""Whether a gateway or a relay can be dialled, by dialling it: TLS, its name, and a word with it. Carries nothing."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence

from mesh.ids import MachineName
from mesh.net.clock import wall_clock
from mesh.net.dialling import Dialler, DialRefused, Leg, connect_to_any
from mesh.net.gate import Refused
from mesh.net.identity import PeerCertificate
from mesh.net.preface import Preface
from mesh.net.refusals import Refusal
from mesh.net.relay_client import RelayClient, RelayDown, RelayPlace

PROBE_LIMIT_S = 2.0
"""For one address: three round trips across the world are 0.9 s. What takes longer is taken for a wall."""
ADDRESSES_MAX = 8
NO_SERVICE_PORT = 1


async def probe(
    deployment: str,
    machine: MachineName,
    addresses: Sequence[tuple[str, int]],
    *,
    context: ssl.SSLContext,
    check: Callable[[PeerCertificate], Refused | None],
) -> list[tuple[str, int]]:
    """Those of these addresses, in their order, at which that machine answered."""
    asked = addresses[:ADDRESSES_MAX]
    answers = await asyncio.gather(
        *(_answers(deployment, machine, address, context, check) for address in asked)
    )
    return [address for address, answered in zip(asked, answers, strict=True) if answered]


async def probe_relay(
    deployment: str,
    relay: MachineName,
    addresses: Sequence[tuple[str, int]],
    *,
    context: ssl.SSLContext,
    check: Callable[[PeerCertificate], Refused | None],
) -> list[tuple[str, int]]:
    """Those of these addresses, in their order, at which that relay answered."""

    async def answers(address: tuple[str, int]) -> bool:
        place = RelayPlace(machine=relay, addresses=(address,))
        try:
            async with asyncio.timeout(PROBE_LIMIT_S):
                leg = await RelayClient(deployment=deployment, place=place, check=check).dial(relay, context)
        except RelayDown:
            return False
        except DialRefused as refused:
            return refused.reason is Refusal.NOT_LISTENING  # it has no line of its own, and has said so
        except TimeoutError:
            return False
        leg.socket.close()
        return True

    asked = addresses[:ADDRESSES_MAX]
    found = await asyncio.gather(*(answers(address) for address in asked))
    return [address for address, answered in zip(asked, found, strict=True) if answered]


async def _answers(
    deployment: str,
    machine: MachineName,
    address: tuple[str, int],
    context: ssl.SSLContext,
    check: Callable[[PeerCertificate], Refused | None],
) -> bool:
    async def route(machine: MachineName, context: ssl.SSLContext) -> Leg:
        return Leg(socket=await connect_to_any(machine, [address]))

    dialler = Dialler(deployment=deployment, route=route, check=check)
    nothing = Preface(machine=machine, member=None, port=NO_SERVICE_PORT, clock=wall_clock())
    try:
        async with asyncio.timeout(PROBE_LIMIT_S):
            dialled = await dialler.dial(context=context, preface=nothing)
    except DialRefused as refused:
        return refused.reason is Refusal.PORT_NOT_OFFERED  # it has spoken, as itself
    except TimeoutError:
        return False
    dialled.channel.socket.close()
    return True
