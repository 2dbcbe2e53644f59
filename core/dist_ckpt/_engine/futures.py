"""The future that knows whether its failure was reported.

Not here: what runs behind it (``checkpoint_process``). Used locally, from any thread.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TypeVar

from dist_ckpt.utils import follow

__all__ = ["ReportedFuture"]

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
        follow(original, self, lambda result: result)

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
