"""What the REST API needs from the system behind it: three narrow seams.

Rules of this file:
1. Everything goes in and comes out as plain JSON-able data, in the shape that the API shows (camelCase keys
   as in a Job resource). The shapes are `mesh.resources`; the contract suite holds implementations
   to them.
2. What goes wrong is a `MeshError`. `NotFoundError` for a name that is not there, `ConflictError` for a
   state that does not allow the call, `TransportError` while the coordinator cannot be asked (it is being
   restarted). The last one says nothing about whether the call took effect, so the API repeats it only
   where repeating is harmless: reads, cancel, delete, and a submit, which always carries a request id.
3. No call waits longer than a few seconds, except `events`, which waits at most `wait_s`, and `check_network`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Protocol

from mesh.network_resources import NetworkReport, ProviderPath
from mesh.resources import (
    Attempt,
    DeploymentStatus,
    Event,
    Harm,
    Machine,
    Run,
)

Json = dict[str, Any]
"""One JSON object that is passed through."""


class CoordinatorService(Protocol):
    """The coordinator, as the API sees it."""

    async def submit(self, job: Json, plan: Json, request_id: str | None) -> Run:
        """Journals a new run and returns it; durable before it returns.

        Args:
            job: the validated Job resource, defaults filled in.
            plan: the `RunPlan` record (`RunPlan.to_record()`); its `name` is the run's name.
            request_id: a second submit with the same id returns the run of the first one, whatever its state.

        Raises:
            ConflictError: (AlreadyExists) an undeleted run, ended or not, has this name.
            StorageError: the journal cannot be written; nothing was accepted.
        """
        ...

    async def get_run(self, name: str) -> Run:
        """The run of this name. Raises NotFoundError."""
        ...

    async def list_runs(self, labels: Mapping[str, str]) -> list[Run]:
        """Every undeleted run that has all these labels, oldest first."""
        ...

    async def cancel(self, name: str, reason: str) -> Run:
        """Asks for the run to be stopped and returns it at once; it has stopped when its state is terminal.

        A run that is being cancelled or has ended is returned as it is: a second cancel changes nothing.
        `reason` is ClientInterrupted or empty. Raises NotFoundError.
        """
        ...

    async def suspend(self, name: str) -> Run:
        """Asks for the run to be stopped for now, its machines given back; it has when its state is Suspended.

        One that is being suspended, or is suspended, is returned as it is. A machine that is lost meanwhile changes
        nothing. Raises NotFoundError, ConflictError when it has ended.
        """
        ...

    async def resume(self, name: str) -> Run:
        """Lets a suspended run go on, in a new epoch, on whatever machines there are.

        Raises NotFoundError, ConflictError in any other state.
        """
        ...

    async def chaos(self, name: str, kind: str, rank: int, seconds: float | None, one_way: bool) -> Harm:
        """Does a rank harm on purpose, and says so among the run's events. Returns when it is done.

        Args:
            kind: a `HarmKind`.
            seconds: after which it is undone; only for kinds that are for a time.
            one_way: of a cut: only what leaves the machine is lost.

        Raises:
            NotFoundError: no such run.
            ConflictError: (Forbidden) not on this deployment; or the run has no such rank now, or the machine
                cannot do this to itself.
        """
        ...

    async def delete(self, name: str) -> None:
        """Forgets an ended run; its name is free again.

        Raises NotFoundError, ConflictError while it is active.
        """
        ...

    async def list_attempts(self, labels: Mapping[str, str]) -> list[Attempt]:
        """Every attempt that has all these labels (`nodus.dev/job`, `nodus.dev/rank`), oldest epoch first."""
        ...

    async def list_machines(self) -> list[Machine]:
        """Every machine of the deployment, by name."""
        ...

    async def check_network(self, machines: list[str], nodes: int | None) -> NetworkReport:
        """Measures the network between free machines: these, or all there are; of them `nodes`, when that is given.

        Takes seconds, and ends within its own limits. Raises NotFoundError for a name, ConflictError when a machine is
        in use or lost, when there are too few or too many, and while another check is under way.
        """
        ...

    async def list_paths(self, parameters: float | None, members: int) -> list[ProviderPath]:
        """What all checks have shown, by providers; for a model of so many parameters, with an all-reduce's length."""
        ...

    async def reclaim(self, machine: str, grace_s: float, message: str) -> Machine:
        """The machine goes away in `grace_s` seconds: nobody gets it from now on, and whoever has it saves and leaves.

        Saying it again changes nothing. Raises NotFoundError.
        """
        ...

    async def events(self, after: int, run: str | None, limit: int, wait_s: float) -> list[Event]:
        """At most `limit` events with `seq > after`, in the order of `seq`.

        Waits up to `wait_s` for the first one when there is none yet; then an empty list. `run` is a name
        or a uid; one that is not known has no events (yet), which is no error.
        """
        ...

    async def status(self) -> DeploymentStatus:
        """The deployment as a whole."""
        ...


class LogReader(Protocol):
    """What was printed. `coordinator.logs` implements it."""

    def lines(
        self,
        uid: str,
        *,
        rank: int | None,
        epoch: int | None,
        tail: int | None,
        cursor: str | None,
        follow: bool,
    ) -> AsyncIterator[Mapping[str, Any]]:
        """Lines of a run, all ranks merged in the order of their times.

        A line is a `mesh.resources.LogLine`. `cursor` is opaque:
        reading on from it gives what follows that line, with nothing left out and nothing repeated. With
        `follow` the iterator ends when the run is over and everything has been given. Raises SpecError for
        a cursor that is none.
        """
        ...

    def raw(self, uid: str, rank: int, epoch: int) -> AsyncIterator[bytes]:
        """The bytes that one rank printed in one epoch, as they were. Raises NotFoundError."""
        ...

    async def last_output_at(self, uid: str) -> dict[int, float]:
        """When each rank last printed, in seconds since 1970; ranks that printed nothing are not in it."""
        ...

    async def delete(self, uid: str) -> None:
        """Forgets what a run printed. Nothing kept is no error."""
        ...


Grow = Callable[[int], Awaitable[list[Machine]]]
"""Brings a local deployment to at least this many machines in all, waits for them, and returns all machines.

Asking for fewer than there are changes nothing. Raises SpecError above the deployment's limit."""

Admit = Callable[[Json], Awaitable[Json]]
"""Takes a machine in that asks to join from elsewhere: a `JoinRequest`, answered by `JoinTerms` (routes_deployment).

Raises SpecError for a request that is not one, ConflictError for a machine that does not fit."""
