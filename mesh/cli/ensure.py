"""The deployment that a run goes to: the one that is named or running, or an embedded one started for it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from mesh.cli.head import HeadOptions, prepare_state, settled_record, start_head, starting_lock
from mesh.cli.interrupts import Interrupts
from mesh.cli.terminal import Terminal
from mesh.client import MeshClient, connect
from mesh.deployment import URL_VARIABLE, live_record, state_folder
from mesh.plan import RunPlan
from mesh.submission import UNTYPED_GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Which deployment is meant: by its address, or by its state folder."""

    state: Path
    url: str | None

    @classmethod
    def from_options(cls, state: Path | None, url: str | None) -> Where:
        return cls(
            state=state_folder(state), url=url or (os.environ.get(URL_VARIABLE) if state is None else None)
        )

    @property
    def is_running(self) -> bool:
        """True when there is something to connect to. Raises DeploymentError for a damaged record."""
        return self.url is not None or live_record(self.state) is not None

    def connect(self) -> MeshClient:
        """Raises as `mesh.connect`."""
        return connect(url=self.url, state=None if self.url else self.state)


def gpu_argument(plan: RunPlan) -> str | None:
    """The accelerators that an embedded deployment simulates for this run: `H100:8`; None for a CPU run."""
    if not plan.gpus_per_node:
        return None
    kind = plan.gpu_types[0] if plan.gpu_types else UNTYPED_GPU
    return f"{kind}:{plan.gpus_per_node}"


async def ensure_running(where: Where, plan: RunPlan, terminal: Terminal, interrupts: Interrupts) -> None:
    """Starts an embedded deployment when none is running. Raises DeploymentError, SignalledError."""
    if where.is_running:
        return
    prepare_state(where.state)
    options = HeadOptions(state=where.state, machines=plan.nodes, gpu=gpu_argument(plan))
    started = await interrupts.race(_start(options, terminal))
    if started:
        machines = "1 simulated machine" if plan.nodes == 1 else f"{plan.nodes} simulated machines"
        gpus = f" with {options.gpu} each" if options.gpu else ""
        folder = "" if where.state == state_folder() else f" --state {where.state}"
        terminal.note(
            f"Started a deployment of {machines}{gpus} on this host; stop it with: mesh down{folder}"
        )


async def _start(options: HeadOptions, terminal: Terminal) -> bool:
    """False when another client has started it meanwhile."""
    async with (
        terminal.working("Starting a deployment on this host") as spinner,
        starting_lock(options.state, spinner.say),
    ):
        if await settled_record(options.state, spinner.say) is not None:
            return False
        await start_head(options, lambda stage: spinner.say(f"Starting a deployment: {stage}"))
        return True


async def ensure_machines(client: MeshClient, plan: RunPlan, terminal: Terminal) -> None:
    """Adds machines to a local deployment that has too few for this run. Raises MeshError."""
    if not client.is_local:
        return
    states = [machine["state"] for machine in await client.list_machines()]
    present = states.count("Ready") + states.count("InUse")
    missing = plan.nodes - present
    if missing <= 0:
        return
    what = "1 machine" if missing == 1 else f"{missing} machines"
    async with terminal.working(f"Adding {what}"):
        await client.grow(plan.nodes + states.count("Leaving"))
    terminal.note(f"Added {what} to the deployment; it has {plan.nodes} now.")
