"""Which checkpoints are worth keeping: pure decisions over what is known of each.

Here: the ``RetentionPolicy`` port and the policies that come with it. Not here: removing anything,
and what is never removed whatever a policy says (``manager``). Called on rank 0; nothing here looks
at a disk or a clock, so a policy of your own is a class with one method.

The policies here have three properties that yours should have too: they keep only what they were
given; the order of that does not matter; and what they keep, they go on to keep when any of the
others are gone, so that a removal that was cut short dooms nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from dist_ckpt.errors import ConfigError

__all__ = ["AnyOf", "CheckpointInfo", "KeepBest", "KeepEvery", "KeepLast", "RetentionPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """What a policy knows of a checkpoint.

    Attributes:
        step: Its step; no two have the same.
        metrics: What it was saved with.
        time: When it was saved, in seconds of the Unix clock.
    """

    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    time: float = 0.0


class RetentionPolicy(Protocol):
    """Says which checkpoints to keep."""

    def keep(self, checkpoints: Sequence[CheckpointInfo]) -> frozenset[int]:
        """Return the steps to keep; must not depend on anything but its argument."""
        ...


@dataclass(frozen=True, slots=True)
class KeepLast:
    """Keeps the ``n`` checkpoints of the largest steps.

    Attributes:
        n: At least 1.
    """

    n: int

    def __post_init__(self) -> None:
        """Refuse a number that keeps nothing.

        Raises:
            ConfigError: It is not positive.
        """
        _check_count("KeepLast", self.n)

    def keep(self, checkpoints: Sequence[CheckpointInfo]) -> frozenset[int]:
        """Return the ``n`` largest steps."""
        return frozenset(sorted((one.step for one in checkpoints), reverse=True)[: self.n])


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepEvery:
    """Keeps one checkpoint of every so many steps, or seconds: the first of each interval.

    Intervals are counted from step 0, or from the beginning of the Unix clock: which checkpoint is
    the first of one does not depend on which others were removed.

    Attributes:
        steps: Length of an interval in steps; or
        secs: in seconds. One of the two.
    """

    steps: int | None = None
    secs: float | None = None

    def __post_init__(self) -> None:
        """Refuse anything but one positive length.

        Raises:
            ConfigError: Both, neither, or not positive.
        """
        given = [one for one in (self.steps, self.secs) if one is not None]
        if len(given) != 1 or not 0 < given[0] < math.inf:
            raise ConfigError(
                f"KeepEvery takes steps or secs, positive, found steps={self.steps!r}, "
                f"secs={self.secs!r}."
            )

    def keep(self, checkpoints: Sequence[CheckpointInfo]) -> frozenset[int]:
        """Return the first step of each interval."""
        firsts: dict[int, int] = {}
        for one in sorted(checkpoints, key=lambda one: one.step):
            firsts.setdefault(self._interval(one), one.step)
        return frozenset(firsts.values())

    def _interval(self, one: CheckpointInfo) -> int:
        if self.steps is not None:
            return one.step // self.steps
        assert self.secs is not None  # noqa: S101 - one of the two is given
        return math.floor(one.time / self.secs)


@dataclass(frozen=True, slots=True)
class KeepBest:
    """Keeps the ``n`` checkpoints with the best value of a metric.

    One without that metric, or with NaN, is never among them; of equal values the later one is.

    Attributes:
        n: At least 1.
        metric: Its name.
        mode: Whether less is better, or more.
    """

    n: int
    metric: str
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        """Refuse a number that keeps nothing, and any other mode.

        Raises:
            ConfigError: One of them.
        """
        _check_count("KeepBest", self.n)
        if self.mode not in ("min", "max"):
            raise ConfigError(f"mode must be 'min' or 'max', not {self.mode!r}.")

    def keep(self, checkpoints: Sequence[CheckpointInfo]) -> frozenset[int]:
        """Return the steps of the ``n`` best."""
        sign = 1.0 if self.mode == "min" else -1.0
        values = [(one.metrics.get(self.metric, math.nan), one.step) for one in checkpoints]
        ranked = sorted((sign * v, -step) for v, step in values if not math.isnan(v))
        return frozenset(-step for _, step in ranked[: self.n])


class AnyOf:
    """Keeps what at least one of several policies keeps.

    Args:
        policies: At least one.
    """

    def __init__(self, *policies: RetentionPolicy) -> None:
        """Remember the policies.

        Raises:
            ConfigError: There are none.
        """
        if not policies:
            raise ConfigError("AnyOf of no policy would keep nothing.")
        self.policies = policies

    def __repr__(self) -> str:
        """Return it as it was made."""
        return f"AnyOf({', '.join(map(repr, self.policies))})"

    def keep(self, checkpoints: Sequence[CheckpointInfo]) -> frozenset[int]:
        """Return what any of them keeps."""
        return frozenset[int]().union(*(one.keep(checkpoints) for one in self.policies))


def _check_count(name: str, n: int) -> None:
    if type(n) is not int or n < 1:
        raise ConfigError(f"{name} keeps at least 1 checkpoint, not {n!r}.")
