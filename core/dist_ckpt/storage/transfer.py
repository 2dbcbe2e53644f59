"""Runs jobs in a few threads; the first error cancels the rest and is raised.

Here: the thread pool and its error rule. Not here: what a job does (``_formats``). Called on every
rank, in the thread that saves or loads; jobs only touch files and memory, never other ranks.
"""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, TypeVar

from dist_ckpt._process.endings import is_ending

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Cancelled", "run_jobs"]

T = TypeVar("T")


class Cancelled(Exception):  # noqa: N818 - a signal between jobs, never seen by callers
    """Raised inside a job that stops because another one failed."""


def run_jobs(
    jobs: Sequence[Callable[[Callable[[], None]], T]], *, thread_count: int, name: str
) -> list[T]:
    """Run all jobs and return their results in order.

    Args:
        jobs: Each takes ``check``, to be called between pieces of work; ``check`` raises
            ``Cancelled`` once another job has failed.
        thread_count: Most jobs at a time. One job or one thread runs in the caller's thread,
            and so do all when the interpreter ends.
        name: Prefix of the threads' names, as seen in stack dumps.

    Raises:
        Exception: The first error of any job; every other job has ended by then.
    """
    failed = threading.Event()

    def check() -> None:
        if failed.is_set():
            raise Cancelled

    if thread_count == 1 or len(jobs) <= 1 or is_ending():
        return [job(check) for job in jobs]
    with ThreadPoolExecutor(thread_count, thread_name_prefix=name) as pool:
        futures = [pool.submit(job, check) for job in jobs]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            failed.set()
            # Leaving the block joins the threads: none writes after this call has ended.
            pool.shutdown(wait=False, cancel_futures=True)
    errors = [e for f in done if not f.cancelled() and (e := f.exception()) is not None]
    real = [error for error in errors if not isinstance(error, Cancelled)]
    if real:
        raise real[0]
    return [future.result() for future in futures]
