"""Work of the coordinator that takes steps: generators that yield what they wait for.

A step yields a `Begin`: a function that is given `resume` and calls it once, later, with the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

T = TypeVar("T")
Resume = Callable[[Any], None]
Begin = Callable[[Resume], None]
Step = Generator[Begin, Any, T]


class _Sign:
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


DOWN = _Sign("DOWN")
"""It could not be reached now; ask again."""
GONE = _Sign("GONE")
"""There is no such member."""


class Down(Exception):
    """A step could not be done now."""


class Task:
    """One generator under way. A cancelled one takes no further step, whatever is answered to it."""

    __slots__ = ("_gen", "_on_end", "is_over")

    def __init__(self, gen: Step[None], on_end: Callable[[Task], None]) -> None:
        self._gen = gen
        self._on_end = on_end
        self.is_over = False

    def step(self, value: Any = None) -> None:
        if self.is_over:
            return
        try:
            begin = self._gen.send(value)
        except StopIteration:
            self.is_over = True
            self._on_end(self)
            return
        begin(self.step)

    def cancel(self) -> None:
        self.is_over = True
