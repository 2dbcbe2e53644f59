"""Rounds and what is made of them: turns, medians, ratios of the same round.

Here: pure functions. Not here: processes, clocks, tables.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range."""

    middle: float
    low: float
    high: float

    def text(self, digits: int | None = None) -> str:
        """Return ``median (min-max)``, with three digits behind the point, four of little."""
        if digits is None:
            digits = 3 if self.middle >= 0.1 else 4
        low, middle, high = (f"{one:.{digits}f}" for one in (self.low, self.middle, self.high))
        return middle if low == high else f"{middle} ({low}-{high})"


def in_turn(items: Sequence[T], number: int) -> list[T]:
    """Return the order of round ``number``: each round begins with another item."""
    start = number % len(items) if items else 0
    return [*items[start:], *items[:start]]


def goes_on(
    *, done: int, rounds: int, spent_secs: float, last_secs: float, budget_secs: float | None
) -> bool:
    """Whether another round begins: there is always one; later ones must fit into the budget.

    Args:
        done: Rounds so far.
        rounds: The most.
        spent_secs: On these, and on what was prepared for them.
        last_secs: On the last of them: the next will take as long.
        budget_secs: For all; None if it does not matter.
    """
    if done >= rounds:
        return False
    return not done or budget_secs is None or spent_secs + last_secs <= budget_secs


def spread(values: Sequence[float]) -> Spread:
    """Return median and range of one value or more."""
    return Spread(statistics.median(values), min(values), max(values))


def values(
    runs: Sequence[dict[str, Any]], *, case: str, contender: str, measure: str, field: str
) -> dict[int, float]:
    """Return a number of each round that has it."""
    return {
        run["round"]: run["measures"][measure][field]
        for run in runs
        if run["case"] == case
        and run["contender"] == contender
        and run["measures"].get(measure, {}).get(field) is not None
    }


def seconds_of(result: dict[str, Any], case: str, contender: str, measure: str) -> dict[int, float]:
    """Return the seconds of each round of a benchmark's result."""
    return values(result["runs"], case=case, contender=contender, measure=measure, field="seconds")


def ratios(mine: dict[int, float], theirs: dict[int, float]) -> list[float]:
    """Return the ratios of the rounds that have both."""
    return [mine[number] / theirs[number] for number in sorted(mine.keys() & theirs.keys())]
