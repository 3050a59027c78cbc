"""What a run would wait for if it were submitted now, in the words of the wait itself. Pure.

Told is only what time does not mend: machines that others use are given back, a path between machines does not come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coordinator.fleet import MachineFacts, Shape, why_waiting
from coordinator.machine_choice import Asked, choose, never_passed, why_not_together
from mesh.ids import MachineName, new_run_uid
from mesh.network_resources import ProviderPath
from mesh.path_estimates import network_facts, providers_apart
from mesh.plan import RunPlan
from mesh.resources import Machine


def why_it_would_wait(
    plan: RunPlan, machines: Sequence[Machine], known: Iterable[ProviderPath]
) -> str | None:
    """None when the machines that there are would do, if nobody else had them."""
    shape = Shape(
        nodes=plan.nodes,
        gpus_per_node=plan.gpus_per_node,
        gpu_types=plan.gpu_types,
        policy=plan.transport_policy,
        scope=plan.network,
    )
    there = [_facts(machine) for machine in machines if machine["state"] != "Lost"]
    apart = providers_apart(known)

    def why_apart(a: str, b: str) -> str | None:
        one, other = sorted((a, b))
        fault = apart.get((one, other))
        return None if fault is None else never_passed(one, other, fault)

    asked = Asked(uid=new_run_uid(), reservation=1, shape=shape, since=0.0)
    if choose([asked], there, {}, now=0.0, why_apart=why_apart):
        return None
    used_by = {m["name"]: m["run"] for m in machines if m["run"] is not None}
    told = why_not_together(shape, there, {m.name for m in there if m.name in used_by}, why_apart=why_apart)
    return why_waiting(shape, there, used_by, apart=told).why


def _facts(machine: Machine) -> MachineFacts:
    return MachineFacts(
        name=MachineName(machine["name"]),
        address=machine["address"],
        labels=dict(machine["labels"]),
        gpu_type=machine["gpus"]["type"],
        gpu_count=machine["gpus"]["count"],
        is_alive=True,
        is_cordoned=machine["state"] == "Leaving",
        network=network_facts(machine),
    )
