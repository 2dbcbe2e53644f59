"""The outcome of a step on one rank (a value or an error), and exchanges of outcomes.

Here: ``Outcome``, ``attempt``, and the exchanges. Not here: how ranks communicate
(``types.Communicator``).

A step that may fail on one rank alone is run by ``attempt`` first; the exchange after it then
raises on every rank, or returns on every rank. What a later step needs is passed as a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dist_ckpt.types import Communicator

__all__ = ["Outcome", "agree", "attempt", "reduce", "scatter"]

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """A value, or the error that was raised instead."""

    value: T | None = None
    error: BaseException | None = None

    def get(self) -> T:
        """Return the value.

        Raises:
            BaseException: The error, if that is what this is.
        """
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]  # a value if there is no error

    def check(self) -> None:
        """Raise the error, if that is what this is."""
        self.get()

    def then(self, step: Callable[[T], R]) -> Outcome[R]:
        """Return the outcome of ``step`` with the value; the error if there is no value."""
        if self.error is not None:
            return Outcome(error=self.error)
        return attempt(step, self.get())


def attempt(step: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Outcome[T]:
    """Return what ``step`` returns or raises. Local; the exchange that follows sends it."""
    try:
        return Outcome(step(*args, **kwargs))
    except BaseException as error:  # noqa: BLE001 - raised again by the exchange, also Ctrl-C
        return Outcome(error=error)


def agree(comm: Communicator, phase: str, own: Outcome[T]) -> T:
    """Return this rank's own value once all ranks have one. Collective.

    Raises:
        CheckpointingException: On every rank, if the step of any rank failed.
    """
    comm.map_reduce(phase, own.check, _nothing)
    return own.get()


def reduce(
    comm: Communicator, phase: str, own: Outcome[T], combine: Callable[[Sequence[T]], R]
) -> R:
    """Return on every rank what ``combine`` makes of all values on rank 0. Collective.

    Raises:
        CheckpointingException: On every rank, if the step of any rank or ``combine`` failed.
    """
    return comm.map_reduce(phase, own.get, combine)


def scatter(
    comm: Communicator, phase: str, own: Outcome[T], combine: Callable[[Sequence[T]], Sequence[R]]
) -> R:
    """Return this rank's entry of what ``combine`` makes of all values on rank 0. Collective.

    What rank 0 gets itself is not pickled.

    Raises:
        CheckpointingException: On every rank, if the step of any rank or ``combine`` failed.
    """
    return comm.map_scatter(phase, own.get, combine)


def _nothing(values: Sequence[Any]) -> None:
    del values
