"""What a coordinator must not forget: durable before it is acted on."""

from coordinator.journal.base import EventRow, Journal, RunRow
from coordinator.journal.sql import SqlJournal

__all__ = ["EventRow", "Journal", "RunRow", "SqlJournal"]
