"""Between a member's decision to launch and its launcher: what is started, and what is told of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from agents import machine_shim
from agents.core import effects as do
from agents.core import events as ev
from agents.launcher.base import LaunchSpec
from agents.network import MemberNetwork, OpenPath
from agents.preparation import Folders
from mesh.contract import clean_base_environment, rank_environment
from mesh.errors import MeshError
from mesh.ids import Incarnation
from mesh.reasons import Reason
from mesh.states import Transport

OVERLAY_PATHS = frozenset({Transport.DIRECT, Transport.RELAYED})


def launch_spec(
    launch: do.LaunchCommand,
    opened: OpenPath,
    *,
    folders: Folders,
    base: Mapping[str, str],
    machine: Mapping[str, str],
) -> LaunchSpec:
    """The command with its environment: the machine owner's, the user's, the contract's.

    Args:
        base: the environment that the machine's owner gave its agent.
        machine: the environment of the machine's own processes.

    Raises:
        ValueError: the barrier gave what is no contract.
        DeploymentError: the overlay needs the shim here, and there is none.
    """
    order = launch.order
    plan = order.plan
    contract = rank_environment(
        plan=plan,
        incarnation=launch.incarnation,
        addresses=opened.addresses,
        master_port=launch.arrivals[0].master_port,
        transport=opened.taken.transport,
        state_dir=str(folders.state),
        interface=opened.interface,
        restore_uri=None if order.restore is None else order.restore.uri,
    )
    working_dir = plan.working_dir or str(folders.state)
    cleaned = clean_base_environment(base)
    cleaned.pop("OLDPWD", None)
    environment = {**cleaned, "PWD": working_dir, **contract}
    if opened.taken.transport in OVERLAY_PATHS:
        environment |= machine_shim.of_command(environment, machine=machine, address=opened.taken.address)
    elif machine_shim.is_in(machine):
        environment |= machine_shim.NONE
    return LaunchSpec(
        incarnation=launch.incarnation,
        launcher=plan.launcher,
        argv=plan.command,
        env=environment,
        working_dir=working_dir,
        spool_dir=str(folders.spool),
        error_file=str(folders.error_file),
        logs=order.logs,
    )


def start_failed(incarnation: Incarnation, error: MeshError) -> ev.CommandStartFailed:
    """The path could not be opened: never the command's own fault. Of an epoch that is over there is nothing to say."""
    is_over = error.reason is Reason.STALE_EPOCH
    return ev.CommandStartFailed(
        incarnation=incarnation,
        reason=Reason.EPOCH_ENDED if is_over else Reason.NETWORK_FAILED,
        message=str(error),
    )


async def told_with(event: ev.MemberEvent, opened: OpenPath, network: MemberNetwork) -> ev.MemberEvent:
    """What the launcher says, with what is known of the path."""
    if isinstance(event, ev.CommandStarted):
        return replace(event, path=opened.taken)
    if isinstance(event, ev.TreeEmpty):
        return replace(event, evidence=await network.explain(event.evidence))
    return event
