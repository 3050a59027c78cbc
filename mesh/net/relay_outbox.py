"""What a relay has carried, on its way to the head: nothing is lost, nothing is counted twice. Pure.

Theory of operation. Bytes that nobody was told of yet are added up for each run and pair of machines (`fresh`). A part
of them becomes a report with a number, which is sent as it is until the head has said that it has it; the head enters
each number of a life once. Who keeps the outbox on disk (`to_json`) before a report is sent may be ended at any moment.

Rules of this file:
1. One report at a time is under way. The next one gets the next number.
2. A life is one outbox from its making on: numbers of another life say nothing about those of this one.
3. Bounded: with PAIRS_MAX pairs nothing more is taken from the relay, which then refuses new pairs (`relay_book.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mesh.errors import RemoteProtocolError
from mesh.ids import MachineName, RunUid
from mesh.net.relay_book import Pair, RelayBook

PAIRS_MAX = 10_000
PAIRS_PER_REPORT_MAX = 500
LIFE_LETTERS_MAX = 64
NAME_LETTERS_MAX = 128
BYTES_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Bytes that passed, once."""

    life: str
    number: int
    """1, 2, … in a life."""
    amounts: Mapping[Pair, int]


@dataclass(slots=True, kw_only=True)
class Outbox:
    """Of one relay."""

    life: str
    delivered: int = 0
    """The number of the last report that the head has."""
    under_way: Report | None = None
    fresh: dict[Pair, int] = field(default_factory=dict)
    """In no report yet."""

    def fill(self, book: RelayBook) -> bool:
        """Takes the relay's counts over; whether there were any."""
        if len(self.fresh) >= PAIRS_MAX:
            return False
        taken = book.take_usage()
        for pair, amount in taken.items():
            self.fresh[pair] = self.fresh.get(pair, 0) + amount
        return bool(taken)

    def next_report(self) -> Report | None:
        """The one that is under way, else a new one; None when there is nothing to say."""
        if self.under_way is None and self.fresh:
            chosen = list(self.fresh)[:PAIRS_PER_REPORT_MAX]
            amounts = {pair: self.fresh.pop(pair) for pair in chosen}
            self.under_way = Report(life=self.life, number=self.delivered + 1, amounts=amounts)
        return self.under_way

    def on_delivered(self, life: str, number: int) -> None:
        """The head has the report with this number of this life."""
        report = self.under_way
        if report is not None and (report.life, report.number) == (life, number):
            self.delivered, self.under_way = number, None

    def to_json(self) -> dict[str, Any]:
        return {
            "life": self.life,
            "delivered": self.delivered,
            "under_way": report_out(self.under_way),
            "fresh": _amounts_out(self.fresh),
        }

    @classmethod
    def from_json(cls, data: Any) -> Outbox:
        """Raises RemoteProtocolError for what `to_json` has not made."""
        try:
            delivered, fresh = int(data["delivered"]), _amounts_in(data["fresh"], PAIRS_MAX * 2)
            return cls(
                life=_text(data["life"], LIFE_LETTERS_MAX),
                delivered=delivered,
                under_way=report_in(data["under_way"]),
                fresh=fresh,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RemoteProtocolError(f"This is no outbox of a relay: {error!r}.") from error


def report_out(report: Report | None) -> dict[str, Any] | None:
    """As JSON."""
    if report is None:
        return None
    return {"life": report.life, "number": report.number, "amounts": _amounts_out(report.amounts)}


def report_in(data: Any) -> Report | None:
    """The inverse. Raises RemoteProtocolError."""
    if data is None:
        return None
    try:
        number = data["number"]
        if type(number) is not int or not 0 < number <= BYTES_MAX:
            raise ValueError("number")
        return Report(
            life=_text(data["life"], LIFE_LETTERS_MAX),
            number=number,
            amounts=_amounts_in(data["amounts"], PAIRS_PER_REPORT_MAX),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RemoteProtocolError(f"This is no report of a relay: {error!r}.") from error


def _amounts_out(amounts: Mapping[Pair, int]) -> list[list[str | int | None]]:
    return [[pair.run, pair.dialler, pair.target, amount] for pair, amount in amounts.items()]


def _amounts_in(rows: Any, rows_max: int) -> dict[Pair, int]:
    if not isinstance(rows, list) or len(rows) > rows_max:
        raise ValueError("amounts")
    amounts: dict[Pair, int] = {}
    for run, dialler, target, amount in rows:
        if type(amount) is not int or not 0 <= amount <= BYTES_MAX:
            raise ValueError("bytes")
        pair = Pair(
            run=None if run is None else RunUid(_text(run, NAME_LETTERS_MAX)),
            dialler=MachineName(_text(dialler, NAME_LETTERS_MAX)),
            target=MachineName(_text(target, NAME_LETTERS_MAX)),
        )
        amounts[pair] = amounts.get(pair, 0) + amount
    return amounts


def _text(value: Any, letters_max: int) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= letters_max:
        raise ValueError("a name")
    return value
