"""Futures made of other futures.

Here: ``wrap_future`` and the future that knows whether its failure was told. Not here: what runs
behind them (``checkpoint_process``). Used locally, from any thread.
"""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ReportedFuture", "wrap_future"]

T = TypeVar("T")


class ReportedFuture(Future[T]):
    """A future that remembers whether somebody has been told how it ended.

    ``concurrent.futures`` does not tell whether an exception was ever looked at; the next save and
    ``close`` must know, so that a failure is raised once and not lost.
    """

    def __init__(self, original: Future[T]) -> None:
        """Follow ``original``: end when it ends, the same way."""
        super().__init__()
        self._told = False
        _follow(original, self, lambda result: result)

    def result(self, timeout: float | None = None) -> T:
        """Return the result, or raise the failure, which has then been told."""
        try:
            return super().result(timeout)
        finally:
            self._told = self._told or self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the failure, which has then been told."""
        try:
            return super().exception(timeout)
        finally:
            self._told = self._told or self.done()

    def untold_failure(self) -> BaseException | None:
        """Wait; return the failure if nobody has been told of it, which has then been told."""
        told = self._told
        error = self.exception()
        return None if told else error


def wrap_future(original_result: Any) -> Future[None]:
    """Return a future that ends when ``original_result`` does, without its result.

    Args:
        original_result: A future, whose failure is passed on; or anything else, which is done.
    """
    wrapped: Future[None] = Future()
    if isinstance(original_result, Future):
        _follow(original_result, wrapped, lambda _: None)
    else:
        wrapped.set_result(None)
    return wrapped


def _follow(original: Future[Any], target: Future[T], convert: Callable[[Any], T]) -> None:
    # From now on `target` cannot be cancelled: that would stop nothing, and hide how it ended.
    target.set_running_or_notify_cancel()

    def finish(ended: Future[Any]) -> None:
        if ended.cancelled():
            target.set_exception(CancelledError())
        elif (error := ended.exception()) is not None:
            target.set_exception(error)
        else:
            target.set_result(convert(ended.result()))

    original.add_done_callback(finish)
