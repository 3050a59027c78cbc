"""What relays have carried, as the head keeps it: for each relay, run and pair of machines. Pure.

Rules of this file:
1. A report is entered once: its life and number say whether it was (`mesh/net/relay_outbox.py`).
2. A relay's sum has everything that it ever reported. Rows are bounded: the one that was touched longest ago is
   forgotten first, its bytes stay in the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mesh.ids import MachineName, RunUid
from mesh.net.relay_book import Pair
from mesh.net.relay_outbox import Report

ROWS_MAX = 10_000
ACCOUNTS_MAX = 1000

Row = tuple[MachineName, Pair]


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Of one relay."""

    bytes: int = 0
    life: str = ""
    number: int = 0
    """Of the last report of that life."""


@dataclass(slots=True)
class RelayLedger:
    """One deployment's."""

    accounts: dict[MachineName, Account] = field(default_factory=dict)
    """The one that reported longest ago first."""
    rows: dict[Row, int] = field(default_factory=dict)
    """The one that was touched longest ago first."""

    def enter(self, relay: MachineName, report: Report) -> bool:
        """False when it was entered before."""
        account = self.accounts.get(relay, Account())
        if account.life == report.life and report.number <= account.number:
            return False
        amounts = report.amounts
        self.accounts.pop(relay, None)
        self.accounts[relay] = Account(
            bytes=account.bytes + sum(amounts.values()), life=report.life, number=report.number
        )
        for pair, amount in amounts.items():
            before = self.rows.pop((relay, pair), 0)
            self.rows[relay, pair] = before + amount
        while len(self.rows) > ROWS_MAX:
            del self.rows[next(iter(self.rows))]
        while len(self.accounts) > ACCOUNTS_MAX:
            del self.accounts[next(iter(self.accounts))]
        return True

    def bytes_of(self, relay: MachineName) -> int:
        """All that it ever carried."""
        return self.accounts.get(relay, Account()).bytes

    def rows_of(self, run: RunUid | None) -> list[tuple[MachineName, Pair, int]]:
        """Of this run; of everything when it is None."""
        return [
            (relay, pair, amount)
            for (relay, pair), amount in self.rows.items()
            if run is None or pair.run == run
        ]

    def copy(self) -> RelayLedger:
        """As it is now; what is in it is frozen."""
        return replace(self, accounts=dict(self.accounts), rows=dict(self.rows))

    def to_json(self) -> dict[str, Any]:
        return {
            "accounts": [[name, a.bytes, a.life, a.number] for name, a in self.accounts.items()],
            "rows": [
                [relay, pair.run, pair.dialler, pair.target, amount]
                for (relay, pair), amount in self.rows.items()
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RelayLedger:
        """Raises KeyError, TypeError, ValueError for what `to_json` has not made."""
        ledger = cls()
        for name, amount, life, number in data["accounts"]:
            ledger.accounts[MachineName(name)] = Account(
                bytes=int(amount), life=str(life), number=int(number)
            )
        for relay, run, dialler, target, amount in data["rows"]:
            pair = Pair(
                run=None if run is None else RunUid(run),
                dialler=MachineName(dialler),
                target=MachineName(target),
            )
            ledger.rows[MachineName(relay), pair] = int(amount)
        return ledger
