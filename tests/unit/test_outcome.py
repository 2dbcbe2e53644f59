"""Outcomes of steps, exchanged: a value on every rank, or an error on every rank."""

from __future__ import annotations

from typing import Any

import pytest

from dist_ckpt._comm.outcome import Outcome, agree, attempt, reduce, scatter
from dist_ckpt.errors import RankFailedError
from dist_ckpt.testing import ThreadWorld
from dist_ckpt.types import Communicator


def halve(number: int) -> int:
    if number % 2:
        raise ValueError(f"{number} is odd")
    return number // 2


def test_attempt_keeps_the_value_or_the_error() -> None:
    """None is a value; so is what a step is given by name."""
    assert attempt(halve, 4).get() == 2
    assert attempt(halve, number=0) == Outcome(0)
    assert attempt(lambda: None).get() is None
    with pytest.raises(ValueError, match="3 is odd"):
        attempt(halve, 3).get()


def test_a_step_after_an_error_is_not_run() -> None:
    """The first error is the one that is raised."""
    called: list[Any] = []

    assert attempt(halve, 4).then(halve).get() == 1
    failed = attempt(halve, 3).then(called.append)
    with pytest.raises(ValueError, match="3 is odd"):
        failed.check()
    assert called == []


def test_an_interrupt_is_kept_too() -> None:
    """Ctrl-C in a step is raised again by the exchange, which tells the other ranks first."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt(interrupted).get()


def test_each_rank_gets_its_own_value_once_all_have_one() -> None:
    """Values do not travel: they need not be picklable."""

    def run(comm: Communicator) -> tuple[int, Any]:
        value = agree(comm, "x", attempt(lambda: (comm.rank, lambda: None)))
        return value[0], reduce(comm, "y", attempt(halve, 2 * comm.rank), sum)

    assert ThreadWorld(3).run(run) == [(0, 3), (1, 3), (2, 3)]


def test_what_rank_0_gets_is_not_copied() -> None:
    """It may hold what only that process has; the others get copies."""
    kept: list[Any] = []

    def combine(values: Any) -> list[Any]:
        kept.append([object(), *values])
        return [kept[0], *values[1:]]

    def run(comm: Communicator) -> bool:
        found = scatter(comm, "x", attempt(halve, 2 * comm.rank), combine)
        return found is kept[0] if comm.rank == 0 else bool(found == comm.rank)

    assert ThreadWorld(2).run(run) == [True, True]


@pytest.mark.parametrize("how", [agree, reduce, scatter])
def test_one_failure_is_raised_on_every_rank(how: Any) -> None:
    """And nothing is combined of what the others have."""
    combined: list[Any] = []

    def run(comm: Communicator) -> None:
        own = attempt(halve, comm.rank)  # fails on rank 1 alone
        how(comm, "x", own) if how is agree else how(comm, "x", own, combined.append)

    errors = ThreadWorld(3).errors(run)

    assert set(errors) == {0, 1, 2}
    for error in errors.values():
        assert isinstance(error, RankFailedError)
        assert "rank 1: ValueError: 1 is odd" in str(error)
    assert combined == []


def test_one_rank_alone_gets_its_own_error() -> None:
    """Without others the error is what the step raised."""
    from dist_ckpt.serialization import single_process

    with pytest.raises(ValueError, match="3 is odd"):
        agree(single_process(), "x", attempt(halve, 3))
