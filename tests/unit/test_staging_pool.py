"""Staging memory that saves use one after the other: no byte has two holders."""

from __future__ import annotations

import gc
import itertools
import logging
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
)

from dist_ckpt._staging_pool.host_memory import MAKERS
from dist_ckpt._staging_pool.pool import BLOCK_NBYTES, Lease, StagingPool
from dist_ckpt.errors import BarrierTimeoutError, ConfigError, StorageError
from tests._samples import sample

PAGE = mmap.PAGESIZE


@contextmanager
def a_pool(**arguments: object) -> Iterator[StagingPool]:
    pool = StagingPool(**arguments)  # type: ignore[arg-type]
    try:
        yield pool
    finally:
        pool.retire()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def fill(lease: Lease, value: int) -> None:
    lease.arena.view(0, (lease.nbytes,), torch.uint8).fill_(value)


def values(lease: Lease) -> list[int]:
    found: list[int] = lease.arena.view(0, (lease.nbytes,), torch.uint8).unique().tolist()
    return found


# -- reuse -----------------------------------------------------------------------------------------


def test_memory_is_used_again() -> None:
    """Same mapping, same bytes, same notes; no second generation is made while one is free."""
    with a_pool() as pool:
        first = pool.acquire(3 * PAGE - 1, timeout_secs=0)
        assert first.layout is None
        assert first.nbytes == 3 * PAGE
        fill(first, 5)
        first.layout = "noted"
        key, pointer = first.key, first.arena.view(0, (1,), torch.uint8).data_ptr()
        first.release()

        for nbytes in (3 * PAGE, PAGE, 1):
            again = pool.acquire(nbytes, timeout_secs=0)
            assert (again.key, again.layout, again.retired) == (key, "noted", ())
            assert again.arena.view(0, (1,), torch.uint8).data_ptr() == pointer
            assert again.nbytes == -(-nbytes // PAGE) * PAGE
            assert values(again) == [5]
            again.release()


def test_growing_makes_a_new_mapping() -> None:
    """Its key is new, the old one may be forgotten, the notes are gone."""
    with a_pool() as pool:
        small = pool.acquire(PAGE, timeout_secs=0)
        old, small.layout = small.key, "noted"
        small.release()

        large = pool.acquire(9 * PAGE, timeout_secs=0)

        assert large.key != old
        assert large.retired == (old,)
        assert large.layout is None
        assert large.arena.nbytes == 9 * PAGE
        assert os.fstat(large.arena.descriptor).st_size == 9 * PAGE
        large.release()


def test_two_holders_have_different_memory() -> None:
    """Keys tell them apart, also those of two pools; nothing shows through."""
    with a_pool() as pool, a_pool() as other:
        leases = [pool.acquire(PAGE, timeout_secs=0) for _ in range(2)]
        leases.append(other.acquire(PAGE, timeout_secs=0))
        for value, lease in enumerate(leases):
            fill(lease, value)

        assert [values(lease) for lease in leases] == [[0], [1], [2]]
        assert len({lease.key for lease in leases}) == 3
        for lease in leases:
            lease.release()


def test_a_released_lease_is_of_no_use() -> None:
    """It cannot reach memory that may be another's; releasing again takes nothing from that one."""
    with a_pool(generations=1) as pool:
        old = pool.acquire(PAGE, timeout_secs=0, what="the save to a")
        old.release()
        new = pool.acquire(PAGE, timeout_secs=0)
        old.release()

        for use in (lambda: old.arena, lambda: old.layout, lambda: old.key, old.lend):
            with pytest.raises(ConfigError, match="the staging memory of the save to a was rel"):
                use()
        with pytest.raises(BarrierTimeoutError):
            pool.acquire(PAGE, timeout_secs=0)
        new.release()


def test_memory_that_is_lent_comes_back_by_itself() -> None:
    """When the last tensor is gone, not when the lease is."""
    with a_pool(generations=1) as pool:
        lease = pool.acquire(PAGE, timeout_secs=0)
        tensor = lease.lend().view(0, (4,), torch.uint8)
        del lease
        gc.collect()
        with pytest.raises(BarrierTimeoutError):
            pool.acquire(PAGE, timeout_secs=0)

        del tensor

        pool.acquire(PAGE, timeout_secs=0).release()


# -- waiting ---------------------------------------------------------------------------------------


def test_who_holds_memory_is_named() -> None:
    """With how long and how much; another holder later is not in the way."""
    with a_pool() as pool:
        leases = [pool.acquire(PAGE, timeout_secs=0, what=f"the save to {n}") for n in "ab"]

        with pytest.raises(BarrierTimeoutError) as caught:
            pool.acquire(PAGE, timeout_secs=0.01, what="the save to c")

        message = str(caught.value)
        assert message.startswith("no staging memory for the save to c within 0.01 s: generation 0")
        assert f"generation 0 ({PAGE} bytes) is held by the save to a since" in message
        assert f"generation 1 ({PAGE} bytes) is held by the save to b since" in message
        assert "hint: " in message
        for lease in leases:
            lease.release()
        pool.acquire(PAGE, timeout_secs=0).release()


def test_the_one_who_waits_gets_what_is_released() -> None:
    """At once, with what the holder before has left."""
    with a_pool(generations=1) as pool:
        lease = pool.acquire(PAGE, timeout_secs=0)
        fill(lease, 3)
        found: list[list[int]] = []

        def wait() -> None:
            next_one = pool.acquire(PAGE, timeout_secs=60)
            found.append(values(next_one))
            next_one.release()

        thread = threading.Thread(target=wait)
        thread.start()
        assert thread.is_alive()
        lease.release()
        thread.join(60)

        assert found == [[3]]


def test_closing_wakes_who_waits() -> None:
    with a_pool(generations=1) as pool:
        lease = pool.acquire(PAGE, timeout_secs=0)
        told: list[BaseException] = []

        def wait() -> None:
            try:
                pool.acquire(PAGE, timeout_secs=60)
            except ConfigError as error:
                told.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        pool.retire()
        thread.join(60)

        assert "the pool is closed" in str(told[0])
        lease.release()


def test_many_threads_one_law() -> None:
    """Each fills its memory and finds it so; nobody is left out."""
    with a_pool(generations=2) as pool:
        seen: list[list[int]] = []
        errors: list[BaseException] = []

        def saves(value: int) -> None:
            try:
                for turn in range(20):
                    lease = pool.acquire((1 + (value * turn) % 5) * PAGE, timeout_secs=60)
                    fill(lease, value)
                    seen.append([value, *values(lease)])
                    lease.release()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=saves, args=(value,)) for value in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

        assert errors == []
        assert len(seen) == 120
        assert [one for one in seen if one[0] != one[1] or len(one) != 2] == []


# -- closing ---------------------------------------------------------------------------------------


def test_closing_gives_everything_back() -> None:
    """Descriptors and pages; refused while somebody holds memory, and then nothing is closed."""
    before = descriptors()
    pool = StagingPool()
    lease, other = (pool.acquire(PAGE, timeout_secs=0, what=f"save {n}") for n in range(2))
    other.release()

    with pytest.raises(ConfigError, match="cannot be closed: generation 0 .* held by save 0"):
        pool.close()
    fill(lease, 1)
    lease.release()
    pool.close()
    pool.close()

    gc.collect()
    assert descriptors() == before
    with pytest.raises(ConfigError, match="the pool is closed"):
        pool.acquire(PAGE, timeout_secs=0)


def test_retiring_waits_for_each_holder() -> None:
    """Its memory stays until it is released, and goes then."""
    before = descriptors()
    pool = StagingPool()
    lease = pool.acquire(PAGE, timeout_secs=0)
    pool.retire()
    fill(lease, 4)
    assert values(lease) == [4]

    lease.release()

    gc.collect()
    assert descriptors() == before


# -- how much --------------------------------------------------------------------------------------


def test_a_budget_bounds_each_save(caplog: pytest.LogCaptureFixture) -> None:
    """Down to whole pages, never below one block unless less is wanted; told once."""
    budget = BLOCK_NBYTES + 3 * PAGE + 5
    with a_pool(budget_nbytes=budget) as pool, caplog.at_level(logging.WARNING):
        sizes = []
        for wanted in (PAGE, budget - 5, budget, 10 * budget):
            lease = pool.acquire(wanted, timeout_secs=0, what="the save to a")
            sizes.append(lease.nbytes)
            lease.release()

    whole = BLOCK_NBYTES + 3 * PAGE
    assert sizes == [PAGE, whole, whole, whole]
    (record,) = caplog.records
    assert record.getMessage() == (
        f"the save to a needs {whole + PAGE} bytes of staging memory and gets {whole}: it is "
        "streamed through it, and the caller waits for the disk meanwhile."
    )
    with a_pool(budget_nbytes=1) as pool:
        for wanted, capacity in ((PAGE, PAGE), (2 * BLOCK_NBYTES, BLOCK_NBYTES)):
            lease = pool.acquire(wanted, timeout_secs=0)
            assert lease.nbytes == capacity
            lease.release()


def test_what_the_machine_has_bounds_it(caplog: pytest.LogCaptureFixture) -> None:
    """An eighth is left alone; memory that is there already is not counted again."""
    room = 4 * BLOCK_NBYTES
    with a_pool(available=lambda: room) as pool, caplog.at_level(logging.WARNING):
        lease = pool.acquire(8 * BLOCK_NBYTES, timeout_secs=0)
        assert lease.nbytes == room * 7 // 8
        lease.release()
        room = 0
        again = pool.acquire(8 * BLOCK_NBYTES, timeout_secs=0)
        assert again.nbytes == 4 * BLOCK_NBYTES * 7 // 8
        assert again.retired == ()
        least = pool.acquire(8 * BLOCK_NBYTES, timeout_secs=0)
        assert least.nbytes == BLOCK_NBYTES
        least.release()
        again.release()

    assert len(caplog.records) == 1


def test_memory_that_others_took_meanwhile() -> None:
    """Half is asked for, then half of that, down to a block; no way at all is an error."""
    asked: list[int] = []
    most = BLOCK_NBYTES + PAGE

    def scarce(nbytes: int) -> int:
        asked.append(nbytes)
        if nbytes > most:
            raise OSError(12, "no memory")
        return MAKERS["memfd"](nbytes)

    with a_pool(makers={"scarce": scarce}, available=lambda: None) as pool:
        lease = pool.acquire(6 * BLOCK_NBYTES, timeout_secs=0)
        assert asked == [6 * BLOCK_NBYTES, 3 * BLOCK_NBYTES, BLOCK_NBYTES * 3 // 2, BLOCK_NBYTES]
        assert lease.nbytes == BLOCK_NBYTES
        most = 0
        with pytest.raises(StorageError, match="scarce: .*no memory"):
            pool.acquire(PAGE, timeout_secs=0)
        lease.release()
        pool.acquire(PAGE, timeout_secs=0).release()  # what failed holds nothing


def test_all_or_nothing() -> None:
    """For who cannot stream: what is wanted, whatever the budget, or an error that holds nothing."""
    room = 0
    with a_pool(budget_nbytes=1, available=lambda: room) as pool:
        lease = pool.acquire(2 * BLOCK_NBYTES, timeout_secs=0, may_be_less=False)
        key = lease.key
        assert lease.nbytes == 2 * BLOCK_NBYTES
        lease.release()
        with pytest.raises(StorageError, match="bytes of shared memory"):
            pool.acquire(1 << 50, timeout_secs=0, may_be_less=False)
        again = pool.acquire(2 * BLOCK_NBYTES, timeout_secs=0, may_be_less=False)
        assert (again.key, again.nbytes) == (key, 2 * BLOCK_NBYTES)
        again.release()


@pytest.mark.parametrize("wrong", [{"generations": 0}, {"budget_nbytes": 0}])
def test_wrong_settings(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="a generation and a budget"):
        StagingPool(**wrong)


# -- in any order ----------------------------------------------------------------------------------


class Holders(RuleBasedStateMachine):
    """Saves come and go in any order; each finds its own bytes until it lets go."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = StagingPool(generations=2, budget_nbytes=None)
        self.held: dict[Lease, int] = {}
        self.count = 0

    leases = Bundle("leases")

    @precondition(lambda self: len(self.held) < 2)
    @rule(target=leases, pages=st.integers(0, 6))
    def acquire(self, pages: int) -> Lease:
        lease = self.pool.acquire(pages * PAGE, timeout_secs=0)
        self.count = self.count % 255 + 1
        fill(lease, self.count)
        self.held[lease] = self.count
        return lease

    @rule(lease=leases)
    def change(self, lease: Lease) -> None:
        if lease in self.held:
            self.held[lease] ^= 0xFF
            fill(lease, self.held[lease])

    @rule(lease=consumes(leases), times=st.integers(1, 2))
    def release(self, lease: Lease, times: int) -> None:
        for _ in range(times):
            lease.release()
        self.held.pop(lease, None)

    @precondition(lambda self: len(self.held) == 2)
    @rule()
    def refuse_a_third(self) -> None:
        with pytest.raises(BarrierTimeoutError):
            self.pool.acquire(PAGE, timeout_secs=0)

    @invariant()
    def everybody_has_their_own(self) -> None:
        for lease, value in self.held.items():
            assert values(lease) == [value]
        spans = sorted(
            (start, start + lease.nbytes)
            for lease in self.held
            for start in [lease.arena.view(0, (1,), torch.uint8).data_ptr()]
        )
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))

    def teardown(self) -> None:
        for lease in self.held:
            lease.release()
        self.pool.close()


TestHolders = Holders.TestCase
TestHolders.settings = settings(max_examples=sample(15, 160), stateful_step_count=25, deadline=None)
