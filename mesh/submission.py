"""From a valid Job to what a submit needs and what a dry run shows.

Used by the API and, without one, by the CLI.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mesh.net.paths import PROVIDER_LABEL, REGION_LABEL
from mesh.network_resources import PathEstimate
from mesh.plan import RunPlan
from mesh.resources import DryRun, Estimate, Machine
from mesh.spec import DeploymentFacts, Job, admit, resolve

REPLACEMENTS_PER_ASSEMBLY_MAX = 2
"""First document, "Failures and restarts": up to two replacement machines per assembly."""
LOCAL_RATE_USD_PER_HOUR = 0.0
UNTYPED_GPU = "GPU"
NO_PRICE = "No machine here has a price: simulated ones cost nothing, those of your own are paid elsewhere."


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A Job that this deployment can take."""

    job: dict[str, Any]
    """As JSON, every default filled in."""
    plan: RunPlan
    warnings: tuple[str, ...]


def prepare(job: Job, *, facts: DeploymentFacts) -> Prepared:
    """Admits and resolves a Job. Raises SpecError for what this deployment cannot do."""
    warnings = tuple(str(warning) for warning in admit(job, facts))
    return Prepared(job=job.to_json(), plan=resolve(job, facts=facts), warnings=warnings)


def facts_now(facts: DeploymentFacts, machines: Iterable[Machine]) -> DeploymentFacts:
    """These facts with the machines that there are at this moment."""
    present = [machine for machine in machines if machine["state"] not in ("Lost", "Leaving")]
    gpus: dict[str, int] = {}
    for machine in present:
        count = int(machine["gpus"].get("count") or 0)
        if count:
            kind = str(machine["gpus"].get("type") or UNTYPED_GPU)
            gpus[kind] = max(count, gpus.get(kind, 0))
    places = {(m["labels"].get(PROVIDER_LABEL), m["labels"].get(REGION_LABEL)) for m in present}
    networks = [network for machine in present if (network := machine["network"]) is not None]
    return replace(
        facts,
        machines=len(present),
        gpus=gpus,
        single_site=facts.single_site and len(places) <= 1,
        relay_possible=facts.relay_possible or any(not network["dialable"] for network in networks),
        public_possible=sum(network["publicAddress"] is not None for network in networks) > 1,
    )


def facts_for(job: Job) -> DeploymentFacts:
    """What an embedded deployment that is started for this Job would be."""
    plan = resolve(job)
    gpus = dict.fromkeys(plan.gpu_types or (UNTYPED_GPU,), plan.gpus_per_node)
    return DeploymentFacts(machines=plan.nodes, gpus=gpus if plan.gpus_per_node else {})


def dry_run_answer(prepared: Prepared, *, paths: Sequence[PathEstimate] = ()) -> DryRun:
    """What a dry run shows."""
    plan = prepared.plan
    return {
        "dryRun": True,
        "job": prepared.job,
        "topology": {
            "nodes": plan.nodes,
            "gpusPerNode": plan.gpus_per_node,
            "processesPerNode": plan.processes_per_node,
            "worldSize": plan.nodes * plan.processes_per_node,
        },
        "estimate": estimate(plan, rate_usd_per_hour=LOCAL_RATE_USD_PER_HOUR),
        "paths": list(paths),
        "warnings": list(prepared.warnings),
    }


def estimate(plan: RunPlan, *, rate_usd_per_hour: float) -> Estimate:
    """What this run costs and what its assembly can cost at most.

    The bound is the first document's: the members' rates plus up to two replacement machines, times the
    startup timeout plus teardown, times the number of tries.

    Args:
        rate_usd_per_hour: of one machine.
    """
    tries = plan.max_assembly_retries + 1
    bound_s = (plan.startup_timeout_s + plan.grace_period_s) * tries
    machines_most = plan.nodes + REPLACEMENTS_PER_ASSEMBLY_MAX
    free = rate_usd_per_hour == 0
    return {
        "ratePerHourUSD": rate_usd_per_hour * plan.nodes,
        "gangHoldUSD": rate_usd_per_hour * plan.nodes,
        "assemblyBoundUSD": rate_usd_per_hour * machines_most * bound_s / 3600,
        "assemblyBoundSeconds": bound_s,
        "assemblyTries": tries,
        "note": NO_PRICE if free else "",
    }
