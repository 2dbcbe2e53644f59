"""Jobs in threads: results in order, the first error cancels the rest and is raised."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from dist_ckpt.storage.transfer import Cancelled, run_jobs


@pytest.mark.parametrize("threads", [1, 3])
def test_results_come_in_order(threads: int) -> None:
    """Whoever ends first."""
    jobs = [lambda _, n=n: n * n for n in range(20)]

    assert run_jobs(jobs, thread_count=threads, name="t") == [n * n for n in range(20)]
    assert run_jobs([], thread_count=threads, name="t") == []


def test_one_thread_is_the_callers() -> None:
    """No pool for one job, nor for one thread."""
    here = threading.current_thread()

    assert run_jobs([lambda _: threading.current_thread()], thread_count=4, name="t") == [here]
    assert (
        run_jobs([lambda _: threading.current_thread()] * 2, thread_count=1, name="t") == [here] * 2
    )


def test_the_first_error_cancels_the_rest() -> None:
    """A running job is told at its next check; a waiting one never starts; nobody is left behind."""
    running, failed = threading.Event(), threading.Event()
    stopped: list[str] = []

    def waits(check: Callable[[], None]) -> None:
        running.set()
        assert failed.wait(60)
        try:
            while True:
                check()
        except Cancelled:
            stopped.append("cancelled")
            raise

    def fails(check: Callable[[], None]) -> None:
        assert running.wait(60)
        failed.set()
        raise OSError(28, "full")

    def never(check: Callable[[], None]) -> None:
        check()
        stopped.append("started")

    with pytest.raises(OSError, match="full"):
        run_jobs([waits, fails, *[never] * 50], thread_count=2, name="dist_ckpt-test")

    assert "cancelled" in stopped
    assert not [t for t in threading.enumerate() if t.name.startswith("dist_ckpt-test")]
