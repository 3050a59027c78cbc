"""What the coordinator knows of the network between its machines: it has it checked, and keeps what was seen.

Rules of this file:
1. A gang's check raises nothing: what keeps it from being done is told, and no fault of the network (`core.checking`).
2. What was seen is kept by providers (`mesh.netcheck.path_book`) in the journal. A journal that cannot be written now
   stops no check: the next one writes it.
3. `mesh check` takes free machines only: what is measured would disturb a run, and a run what is measured.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence

from coordinator import network_view
from coordinator.core.effects import CheckNetwork
from coordinator.core.events import NetworkChecked, NetworkRefusal
from coordinator.fleet import Fleet, Looked, MachineFacts
from coordinator.journal import Journal
from coordinator.machine_choice import natural, never_passed
from mesh.errors import ConflictError, MeshError, NotFoundError, StorageError
from mesh.ids import MachineName, Rank
from mesh.netcheck.path_book import PathBook
from mesh.netcheck.refusals import refusals
from mesh.netcheck.verdict import Finding, judge
from mesh.netcheck.words import summary
from mesh.network_resources import NetworkReport, ProviderPath

KEPT_AS = "paths"
MACHINES_MAX = 16
"""Of one `mesh check`."""
TOLD_MAX = 8

_log = logging.getLogger(__name__)


class NetworkWatch:
    """Of one deployment.

    Args:
        used_by: which run holds which machine.
        wall: seconds since 1970.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        journal: Journal,
        used_by: Callable[[], dict[str, str]],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._fleet, self._journal, self._used_by, self._wall = fleet, journal, used_by, wall
        self._book = PathBook()
        self._checking = asyncio.Lock()
        self._looked_at: frozenset[MachineName] = frozenset()
        """By the check that somebody asked for."""

    async def start(self) -> None:
        """Reads what was kept. The journal is open. Raises StorageError."""
        text = await self._journal.kept(KEPT_AS)
        if text is not None:
            try:
                self._book = PathBook.from_record(json.loads(text))
            except (ValueError, TypeError, KeyError) as error:
                _log.warning("what is known of paths cannot be read, and is begun anew: %r", error)

    # ---- a gang's machines ------------------------------------------------------------------------

    async def check_gang(self, effect: CheckNetwork) -> NetworkChecked:
        """Rule 1."""
        if self._looked_at & {machine for _, machine in effect.machines}:
            async with self._checking:  # it holds the ports that this one is about
                pass
        try:
            looked = await self._fleet.look(dict(effect.machines), fresh=effect.fresh)
        except Exception as error:  # noqa: BLE001 - the guard of rule 1
            _log.warning("a network check failed", exc_info=error)
            why = error.message if isinstance(error, MeshError) else f"{type(error).__name__}: {error}"
            return _unchecked(effect, why)
        if len(looked.seen.members) < 2:
            return _unchecked(effect, " ".join(looked.absent.values()))
        findings = judge(looked.seen)
        await self._note(looked, findings)
        return _verdict(effect, looked, findings)

    # ---- mesh check -------------------------------------------------------------------------------

    async def check_machines(self, names: Sequence[str], nodes: int | None) -> NetworkReport:
        """Of these free machines, or of as many of all (or of `nodes`).

        Raises:
            NotFoundError: no such machine.
            ConflictError: one of them is in use or lost, there are too few or too many, or another check is under way.
        """
        if self._checking.locked():
            raise ConflictError("Another check of the network is under way.", hint="Try again in a moment.")
        async with self._checking:
            machines = [
                facts.name for facts in _chosen(await self._fleet.machines(), self._used_by(), names, nodes)
            ]
            began, at = time.monotonic(), self._wall()
            self._looked_at = frozenset(machines)
            try:
                looked = await self._fleet.look(dict(enumerate(machines)), fresh=range(len(machines)))
            finally:
                self._looked_at = frozenset()
            looked.seen.has_ranks = False
            findings = judge(looked.seen)
            await self._note(looked, findings)
            seconds = time.monotonic() - began
            return network_view.report(looked, findings, machines, at=at, seconds=seconds)

    # ---- paths ------------------------------------------------------------------------------------

    async def _note(self, looked: Looked, findings: Sequence[Finding]) -> None:
        self._book.note(looked.seen, findings, at=self._wall())
        try:
            await self._journal.keep(KEPT_AS, json.dumps(self._book.to_record()))
        except StorageError as error:
            _log.warning("what was measured is known to this process only: %s", error)

    def paths(self, *, parameters: float | None, members: int) -> list[ProviderPath]:
        """What is known of each pair of providers."""
        return [
            network_view.path_resource(line, parameters=parameters, members=members)
            for line in self._book.lines()
        ]

    def why_apart(self, a: str, b: str) -> str | None:
        """Why machines of these two providers are not offered to one gang; None: they are."""
        line = self._book.unoffered().get(frozenset((a, b)))
        return None if line is None else never_passed(a, b, str(line.fault))


def _unchecked(effect: CheckNetwork, why: str) -> NetworkChecked:
    message = f"The network was not checked: {why}"
    return NetworkChecked(number=effect.number, message=message, is_performed=False)


def _verdict(effect: CheckNetwork, looked: Looked, findings: Sequence[Finding]) -> NetworkChecked:
    names = dict(effect.machines)
    bad = refusals(findings, fresh=effect.fresh, suspects=effect.suspects)
    measured = summary(looked.seen)
    if bad:
        why = (
            f"{names[Rank(one.rank)]} cannot be worked with: {_first_sentence(one.message)}" for one in bad
        )
        message = " ".join(why)
    else:
        message = (
            f"{len(looked.seen.members)} machines reach each other{f': {measured}' if measured else ''}."
        )
    warnings = [f"{why} It was not checked." for why in looked.absent.values()]
    warnings += [f"{finding.message} {finding.hint}" for finding in findings if not finding.is_fault]
    return NetworkChecked(
        number=effect.number,
        message=message,
        refusals=tuple(
            NetworkRefusal(
                rank=Rank(one.rank),
                machine=names[Rank(one.rank)],
                message=one.message,
                peers=tuple(Rank(peer) for peer in one.peers),
            )
            for one in bad
        ),
        warnings=tuple(warnings[:TOLD_MAX]),
    )


def _first_sentence(text: str) -> str:
    return f"{text.partition('. ')[0].rstrip('.')}."


def _chosen(
    machines: Sequence[MachineFacts], used_by: dict[str, str], names: Sequence[str], nodes: int | None
) -> list[MachineFacts]:
    """The machines of a `mesh check`, by name. Raises NotFoundError, ConflictError."""
    known = {facts.name: facts for facts in machines}
    for name in names:
        facts = known.get(MachineName(name))
        if facts is None:
            raise NotFoundError(
                f"There is no machine named '{name}'.", hint="See them all: mesh get machines"
            )
        if not facts.is_alive or name in used_by:
            why = f"in use by {used_by[name]}" if name in used_by else "lost"
            raise ConflictError(
                f"{name} is {why}; only free machines are checked.", hint="See them: mesh get machines"
            )
    free = [f for f in machines if f.is_alive and not f.is_cordoned and f.name not in used_by]
    wanted = [known[MachineName(name)] for name in dict.fromkeys(names)] or sorted(
        free, key=lambda facts: natural(facts.name)
    )
    count = len(wanted) if nodes is None else nodes
    if len(wanted) < max(2, count):
        raise ConflictError(
            f"A check needs {max(2, count)} free machines; there are {len(wanted)}.",
            hint="See who uses them: mesh get machines",
        )
    if count > MACHINES_MAX:
        raise ConflictError(
            f"At most {MACHINES_MAX} machines are checked at once; there are {count}.",
            hint=f"Take some of them: mesh check --nodes {MACHINES_MAX}, or name them with --machine.",
        )
    return wanted[:count]
