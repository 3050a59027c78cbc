"""What the network between the machines that there are means for a run, before it is paid for. Pure.

Rules of this file:
1. Asked about are two machines that the run could get together: each has the accelerators that it needs, and their
   providers are not apart (`offered` in what checks have found). Their path is the best that its spec admits.
2. Told is what leaves a trusted network: every path but `private`, and that one too between two places.
3. A figure is what a check has measured between the two providers over that path, else there is none. For `public`,
   `direct` is good enough: the same wire with encryption on it, so that in the clear is no slower.
4. Bounded: of very many kinds of machines the most frequent ones are asked about.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Any

from mesh.ids import MachineName
from mesh.net.paths import (
    PROVIDER_LABEL,
    REGION_LABEL,
    RELAYED_MEMBERS_MAX,
    NetworkFacts,
    Path,
    choose_path,
)
from mesh.network_resources import PathEstimate, ProviderPath
from mesh.plan import RunPlan
from mesh.resources import Machine
from mesh.states import Transport, TransportPolicy

KINDS_MAX = 64
Pair = tuple[tuple[str, str], str]
"""Two providers by name, and the path between them."""


def path_estimates(
    plan: RunPlan, machines: Iterable[Machine], known: Iterable[ProviderPath]
) -> list[PathEstimate]:
    """By providers and path. `known` is what checks have measured, for as many members as the run has."""
    if plan.nodes < 2:
        return []
    by_pair: dict[Pair, ProviderPath] = {
        ((path["providers"][0], path["providers"][1]), path["path"]): path for path in known
    }
    apart = _apart(by_pair)
    possible = _possible(plan, machines)
    return [_estimate(pair, by_pair) for pair in sorted(possible) if pair[0] not in apart]


def providers_apart(known: Iterable[ProviderPath]) -> dict[tuple[str, str], str]:
    """Two providers of which no path is offered, in order, and what a check of them found."""
    by_pair: dict[Pair, ProviderPath] = {
        ((path["providers"][0], path["providers"][1]), path["path"]): path for path in known
    }
    apart = _apart(by_pair)
    return {pair: path["fault"] or "" for (pair, _), path in by_pair.items() if pair in apart}


def _apart(known: Mapping[Pair, ProviderPath]) -> set[tuple[str, str]]:
    """Two providers of which no path is offered."""
    offered = {providers for (providers, _), path in known.items() if path["offered"]}
    return {providers for providers, _ in known} - offered


def _can_have(plan: RunPlan, machine: Machine) -> bool:
    """As `coordinator.fleet.matches`."""
    gpus = machine["gpus"]
    if machine["state"] in ("Lost", "Leaving") or gpus["count"] < plan.gpus_per_node:
        return False
    return not plan.gpus_per_node or not plan.gpu_types or gpus["type"] in plan.gpu_types


def _possible(plan: RunPlan, machines: Iterable[Machine]) -> set[Pair]:
    """Rules 1 and 2, but for what is apart."""
    policy = plan.transport_policy if plan.nodes <= RELAYED_MEMBERS_MAX else TransportPolicy.DIRECT
    there = [network_facts(machine) for machine in machines if _can_have(plan, machine)]
    kinds = Counter(_kind(facts) for facts in there)
    one_of = {_kind(facts): facts for facts in there}
    most = [kind for kind, _ in kinds.most_common(KINDS_MAX)]
    alike = ((kind, kind) for kind in most if kinds[kind] > 1)
    found: set[Pair] = set()
    for a, b in ((one_of[a], one_of[b]) for a, b in (*combinations(most, 2), *alike)):
        path = choose_path((a, b), policy=policy, scope=plan.network)
        if not isinstance(path, Path):
            continue
        is_one_place = (a.provider, a.region) == (b.provider, b.region)
        if path.transport is not Transport.PRIVATE or not is_one_place:
            one, other = sorted((a.provider or "", b.provider or ""))
            found.add(((one, other), str(path.transport)))
    return found


def network_facts(machine: Machine) -> NetworkFacts:
    """Where a machine stands, as the API shows it."""
    network: Mapping[str, Any] = machine["network"] or {}
    return NetworkFacts(
        machine=MachineName(machine["name"]),
        address=machine["address"],
        is_on_mesh=machine["network"] is not None,
        is_dialable=bool(network.get("dialable")),
        private_network=network.get("privateNetwork"),
        private_address=network.get("privateAddress"),
        public_address=network.get("publicAddress"),
        provider=machine["labels"].get(PROVIDER_LABEL),
        region=machine["labels"].get(REGION_LABEL),
    )


def _kind(facts: NetworkFacts) -> tuple[Any, ...]:
    """What machines have in common that are the same to a path."""
    families = tuple(
        None if address is None else ":" in address
        for address in (facts.private_address, facts.public_address)
    )
    return (
        facts.is_on_mesh, facts.is_dialable, facts.private_network, *families, facts.provider, facts.region,
    )  # fmt: skip


def _estimate(pair: Pair, known: Mapping[Pair, ProviderPath]) -> PathEstimate:
    providers, path = pair
    over = path
    if pair not in known and path == Transport.PUBLIC:
        over = str(Transport.DIRECT)
    measured = known.get((providers, over))
    if measured is None or measured["bytesPerSecond"] is None:
        return {
            "providers": list(providers), "path": path, "measuredOver": None, "roundTripSeconds": None,
            "bytesPerSecond": None, "allReduceSeconds": None,
        }  # fmt: skip
    return {
        "providers": list(providers),
        "path": path,
        "measuredOver": over,
        "roundTripSeconds": measured["roundTripSeconds"],
        "bytesPerSecond": measured["bytesPerSecond"],
        "allReduceSeconds": measured["allReduceSeconds"],
    }
