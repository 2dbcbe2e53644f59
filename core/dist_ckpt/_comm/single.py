"""The communicator of one process: every exchange is a function call.

Here: ``SingleCommunicator``. Not here: real ranks (``_comm.torch_dist``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dist_ckpt.types import R, T

__all__ = ["SingleCommunicator"]


class SingleCommunicator:
    """The only rank of a job; errors of callbacks are raised unchanged."""

    rank = 0
    size = 1

    def broadcast(self, phase: str, produce: Callable[[], R]) -> R:
        """Return what ``produce`` returns."""
        del phase
        return produce()

    def map_reduce(
        self, phase: str, local: Callable[[], T], combine: Callable[[Sequence[T]], R]
    ) -> R:
        """Return ``combine([local()])``."""
        del phase
        return combine([local()])

    def map_scatter(
        self, phase: str, local: Callable[[], T], combine: Callable[[Sequence[T]], Sequence[R]]
    ) -> R:
        """Return the only result of ``combine([local()])``."""
        del phase
        (result,) = combine([local()])
        return result
