"""What this deployment can do of what a valid job asks for.

A field is refused with `NotAvailableYet` exactly where ignoring it would change what happens. The rules:

| field                        | rule                                                                                  |
|------------------------------|---------------------------------------------------------------------------------------|
| distributed.launcher         | Plain and Torchrun run. The others are refused: their commands would start without    |
|                              | what they expect (a Ray cluster, a hostfile, ACCELERATE_*)                            |
| image                        | refused: the command would run in another environment than the one asked for          |
| maxCost                      | accepted where machines cost nothing: nothing can pass it. Refused elsewhere: it      |
|                              | would not be enforced                                                                 |
| recovery.onProcessFailure    | in force. RestartRank with a warning where no rank can start again alone: it then     |
|                              | means RestartGang                                                                     |
| recovery.maxAttempts         | in force, with a warning where there is no checkpoint store: nothing is restored      |
| distributed.network          | in force among machines that are there (`mesh.net.paths`). Colocated and Regional are |
|                              | refused where machines are bought in several places: nobody would buy them in one.    |
|                              | Global always shows the condition WANBound                                            |
| distributed.transport        | in force. The warnings RelayedLowBandwidth and PublicClearText stand where such a     |
|                              | path is possible                                                                      |
| startupTimeout, gracePeriod, | in force                                                                              |
| maxAssemblyRetries, env,     |                                                                                       |
| workingDir, labels           |                                                                                       |
| resources.gpu, nodes         | accepted, with a warning when the machines that are there do not have it: the run     |
|                              | waits as Pending and says why                                                         |
| command                      | `mesh.command_check`: refused where it makes worlds of its own, else warned about     |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mesh.command_check import check_command
from mesh.contract import PLAIN_RANK_NAMES, SUPPORTED_LAUNCHERS
from mesh.errors import SpecError
from mesh.net.paths import RELAYED_MEMBERS_MAX
from mesh.plan import RunPlan
from mesh.reasons import Reason
from mesh.spec.model import Job
from mesh.spec.problems import Problem, spec_error
from mesh.spec.resolution import resolve
from mesh.states import FailurePolicy, LauncherKind, NetworkScope, TransportPolicy
from mesh.topology import GPUS_PER_NODE_CHOICES


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentFacts:
    """What is known of a deployment when a job is submitted to it."""

    machines: int
    """How many it has now."""
    gpus: Mapping[str, int] = field(default_factory=dict)
    """Per accelerator type, the most that one machine has."""
    machines_cost_nothing: bool = True
    grows_by_itself: bool = False
    """Machines are bought when they are needed, so what is there now is no bound."""
    single_site: bool = True
    """All machines are with one provider in one region, on one network."""
    relay_possible: bool = False
    keeps_checkpoints: bool = True
    """There is a checkpoint store, so that a restart has something to go on from."""
    public_possible: bool = False
    """At least two machines may be reached by public addresses, in clear text."""

    @property
    def machine_sizes(self) -> tuple[int, ...]:
        """The GPU counts that one machine can hold; all of them when nothing is known."""
        most = max(self.gpus.values(), default=0)
        if self.grows_by_itself or most == 0:
            return GPUS_PER_NODE_CHOICES
        return tuple(size for size in GPUS_PER_NODE_CHOICES if size <= most)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobWarning:
    """Something that the user should know and that does not stop the run."""

    type: str
    """A word for programs, such as `WANBound`."""
    message: str

    def __str__(self) -> str:
        return f"{self.type}: {self.message}"


def admit(job: Job, facts: DeploymentFacts) -> list[JobWarning]:
    """Warnings about a job on this deployment.

    Raises:
        SpecError: with reason NotAvailableYet for everything that cannot be done here yet, or InvalidSpec for a command
            that would make worlds of its own.
    """
    if unavailable := _unavailable(job, facts):
        raise spec_error(unavailable, source="", reason=Reason.NOT_AVAILABLE_YET)
    plan = resolve(job, facts=facts)
    findings = check_command(plan)
    if refused := [finding for finding in findings if finding.refuses]:
        raise SpecError(
            " ".join(finding.message for finding in refused),
            hint=" ".join(dict.fromkeys(finding.remedy for finding in refused)),
            field="spec.command",
            got=refused[0].flag,
        )
    warnings = [
        JobWarning(type="CommandOverridesContract", message=f"{finding.message} {finding.remedy}")
        for finding in findings
    ]
    warnings += _env_warnings(plan) + _recovery_warnings(plan) + _checkpoint_warnings(plan, facts)
    return warnings + _path_warnings(plan, job, facts) + _capacity_warnings(plan, facts)


def _unavailable(job: Job, facts: DeploymentFacts) -> list[Problem]:
    spec = job.spec
    found: list[Problem] = []

    def refuse(path: tuple[str, ...], got: str, text: str) -> None:
        found.append(Problem(f"Not available yet: {text}.", path=("spec", *path), got=got))

    if spec.distributed.launcher not in SUPPORTED_LAUNCHERS:
        known = " and ".join(sorted(SUPPORTED_LAUNCHERS))
        refuse(("distributed", "launcher"), spec.distributed.launcher, f"this deployment starts {known}")
    if spec.image is not None:
        refuse(("image",), spec.image, "commands run in the machine's own environment, not in a container")
    if spec.max_cost is not None and not facts.machines_cost_nothing:
        refuse(("maxCost",), spec.max_cost, "the cost of a run is not limited on this deployment")
    is_bounded = facts.single_site or not facts.grows_by_itself
    if not is_bounded and spec.distributed.network is not NetworkScope.GLOBAL:
        refuse(
            ("distributed", "network"),
            spec.distributed.network,
            "this deployment buys machines in several places and cannot keep a gang in one; Global is available",
        )
    return found


def _env_warnings(plan: RunPlan) -> list[JobWarning]:
    if plan.launcher is not LauncherKind.PLAIN:
        return []
    overridden = [name for name, _ in plan.env if name in PLAIN_RANK_NAMES]
    if not overridden:
        return []
    return [
        JobWarning(
            type="EnvOverridden",
            message=f"{', '.join(overridden)} in env: every rank of a Plain run is given its own value.",
        )
    ]


def _recovery_warnings(plan: RunPlan) -> list[JobWarning]:
    if plan.on_process_failure is not FailurePolicy.RESTART_RANK:
        return []
    why = ""
    if plan.launcher is not LauncherKind.PLAIN:
        why = f"the ranks of a {plan.launcher} run share a store"
    elif plan.nodes == 1:
        why = "rank 0 is the only one"
    if not why:
        return []
    return [
        JobWarning(
            type="RestartsWholeGang",
            message=f"onProcessFailure RestartRank starts every rank again here, as RestartGang does: {why}.",
        )
    ]


def _checkpoint_warnings(plan: RunPlan, facts: DeploymentFacts) -> list[JobWarning]:
    if facts.keeps_checkpoints or not plan.max_restarts:
        return []
    return [
        JobWarning(
            type="NoCheckpoints",
            message="This deployment has no checkpoint store (mesh up --checkpoints URL): a restart restores nothing.",
        )
    ]


def _path_warnings(plan: RunPlan, job: Job, facts: DeploymentFacts) -> list[JobWarning]:
    found: list[JobWarning] = []
    if job.spec.distributed.network is NetworkScope.GLOBAL:
        found.append(
            JobWarning(
                type="WANBound", message="Training between distant machines is limited by the network."
            )
        )
    if facts.public_possible and plan.nodes > 1:
        found.append(
            JobWarning(
                type="PublicClearText",
                message="A public path is possible: traffic between members crosses the internet in clear text.",
            )
        )
    if (
        job.spec.distributed.transport is TransportPolicy.AUTO
        and facts.relay_possible
        and plan.nodes <= RELAYED_MEMBERS_MAX
    ):
        found.append(
            JobWarning(
                type="RelayedLowBandwidth",
                message="A relayed path is possible: it is slow and fits small models only.",
            )
        )
    return found


def _capacity_warnings(plan: RunPlan, facts: DeploymentFacts) -> list[JobWarning]:
    """Why the run would wait. Which machines are free now is the placement's to say, not ours."""
    if facts.grows_by_itself:
        return []
    reasons: list[str] = []
    if plan.nodes > facts.machines:
        reasons.append(f"the run needs {plan.nodes} machines and this deployment has {facts.machines}")
    if plan.gpus_per_node and (reason := _gpu_reason(plan, facts)):
        reasons.append(reason)
    return [JobWarning(type="NoSuchCapacity", message=f"The run will wait: {reason}.") for reason in reasons]


def _gpu_reason(plan: RunPlan, facts: DeploymentFacts) -> str | None:
    have = {name.upper(): count for name, count in facts.gpus.items()}
    offered = {name: have.get(name, 0) for name in plan.gpu_types} if plan.gpu_types else have
    if max(offered.values(), default=0) >= plan.gpus_per_node:
        return None
    wanted = f"{plan.gpus_per_node} × {' or '.join(plan.gpu_types) or 'GPU'} on each machine"
    there = ", ".join(f"at most {count} × {name}" for name, count in sorted(have.items())) or "no GPU"
    return f"it needs {wanted}, and the machines of this deployment have {there}"
