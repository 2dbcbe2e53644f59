"""Staging memory that is made once and used by one save after the other.

Here: ``StagingPool`` and ``Lease``, the token that says whose memory it is now. Not here: the
memory (``arena``), the copies into it (``copying``). Local, on every rank, from any thread.

The law: the bytes of a generation belong to one lease, from ``acquire`` to ``release``. Whoever
holds it releases it when nobody reads them any more, in whichever process.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dist_ckpt._process.available import available_nbytes
from dist_ckpt._staging_pool.arena import Arena
from dist_ckpt._staging_pool.host_memory import MAKERS
from dist_ckpt.errors import BarrierTimeoutError, ConfigError, StorageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dist_ckpt._staging_pool.host_memory import Maker

__all__ = ["BLOCK_NBYTES", "Lease", "StagingPool"]

logger = logging.getLogger(__name__)

BLOCK_NBYTES = 16 << 20
"""The least capacity, for state that is larger: pieces of less are not worth their trouble."""

_USABLE = 0.875
"""Of the memory that is available; the rest is left for what else the machine does."""

_keys = itertools.count(1)
"""Keys of mappings: one process may have several pools and hand all to one worker."""


@dataclass(slots=True)
class _Generation:
    """Memory for one save; ``lease`` has it, or nobody."""

    number: int
    arena: Arena | None = None
    key: int = 0
    layout: object = None
    lease: Lease | None = None

    @property
    def nbytes(self) -> int:
        return self.arena.nbytes if self.arena is not None else 0

    def discard(self) -> None:
        if self.arena is not None:
            self.arena.close()
        self.arena, self.layout = None, None


class Lease:
    """One generation of a pool, held by one save. Made by ``StagingPool.acquire``.

    Attributes:
        nbytes: How much of the arena may be used.
        what: Whose it is, for messages.
        retired: Keys of mappings that this lease's growth has replaced: a worker may forget them.
    """

    def __init__(
        self, generation: _Generation, what: str, give_back: Callable[[Lease], None]
    ) -> None:
        """Hold nothing yet; the pool fills it in."""
        self.nbytes = 0
        self.what = what
        self.retired: tuple[int, ...] = ()
        self.since = time.monotonic()
        self._generation = generation
        self._give_back = give_back

    @property
    def key(self) -> int:
        """Identifies the mapping; it changes when memory is made again or grows."""
        return self._held().key

    @property
    def arena(self) -> Arena:
        """The memory, at least ``nbytes`` large.

        Raises:
            ConfigError: The lease was released.
        """
        arena = self._held().arena
        if arena is None:
            raise ConfigError(f"the staging memory of {self.what} was never made.")
        return arena

    @property
    def layout(self) -> object:
        """A note of the last holder about the content, for the next one; None for new memory."""
        return self._held().layout

    @layout.setter
    def layout(self, layout: object) -> None:
        self._held().layout = layout

    def lend(self) -> Arena:
        """Return the memory as an arena that releases the lease by itself.

        It is released when that arena and all tensors cut from it are gone.

        Raises:
            ConfigError: The lease was released.
        """
        return self.arena.lent(self.release)

    def release(self) -> None:
        """Give the memory back; it must not be read or written through this lease any more.

        May be called again; from any thread, also while objects are collected.
        """
        self._give_back(self)

    def _held(self) -> _Generation:
        if self._generation.lease is not self:
            raise ConfigError(
                f"the staging memory of {self.what} was released.",
                hint="it may hold another save by now; keep the lease until the last reader ended.",
            )
        return self._generation


class StagingPool:
    """Shared memory for saves, page-aligned, made when first needed and kept.

    Args:
        generations: How many saves may hold memory at a time; no more is ever made.
        budget_nbytes: Most memory of one generation; None for what is available.
        use_pinned: Lock the pages for the GPU, in a process that uses one.
        available: Returns how much memory is available, None if that is not known.
        makers: The ways to get memory, best first.

    Raises:
        ConfigError: There is no generation, or no budget.
    """

    def __init__(
        self,
        *,
        generations: int = 2,
        budget_nbytes: int | None = None,
        use_pinned: bool = True,
        available: Callable[[], int | None] = available_nbytes,
        makers: Mapping[str, Maker] = MAKERS,
    ) -> None:
        """Make no memory yet."""
        if generations < 1 or (budget_nbytes is not None and budget_nbytes < 1):
            raise ConfigError(
                "expected a generation and a budget of bytes at least, found "
                f"{generations=}, {budget_nbytes=}."
            )
        self._generations = tuple(_Generation(number) for number in range(generations))
        self._budget, self._use_pinned = budget_nbytes, use_pinned
        self._available, self._makers = available, makers
        # The lock of a condition is reentrant: a lease may be released by the collector, in a
        # thread that is inside `acquire`.
        self._changed = threading.Condition()
        self._is_closed = False
        self._told: set[str] = set()

    def acquire(
        self, nbytes: int, *, timeout_secs: float, what: str = "a save", may_be_less: bool = True
    ) -> Lease:
        """Return memory for ``nbytes``, or for less if there is less: the rest is streamed then.

        Waits until a generation is free. Memory that is too small grows, as it is free: what lies
        in it is kept, the layout is not.

        Args:
            nbytes: How much is wanted. The capacity is a multiple of the page size, and no less
                than ``BLOCK_NBYTES`` unless less is wanted.
            timeout_secs: How long to wait.
            what: Whose it is, for messages.
            may_be_less: Whether the capacity may be less than wanted; if not, the budget does not
                count.

        Raises:
            BarrierTimeoutError: None became free in time; tells who holds them.
            StorageError: There is no memory, not even for the least capacity.
            ConfigError: The pool is closed.
        """
        lease = self._take(timeout_secs, what)
        try:
            self._fill(lease, nbytes, may_be_less=may_be_less)
        except BaseException:
            lease.release()
            raise
        return lease

    def close(self) -> None:
        """Give all memory back to the system. Idempotent.

        Raises:
            ConfigError: A lease is out; nothing is closed then.
        """
        with self._changed:
            held = self._holders()
            if held:
                raise ConfigError(f"staging memory cannot be closed: {held}.")
            self.retire()

    def retire(self) -> None:
        """Give free memory back to the system, and the rest as its leases are released."""
        with self._changed:
            self._is_closed = True
            for generation in self._generations:
                if generation.lease is None:
                    generation.discard()
            self._changed.notify_all()

    def _take(self, timeout_secs: float, what: str) -> Lease:
        deadline = time.monotonic() + timeout_secs
        with self._changed:
            while True:
                if self._is_closed:
                    raise ConfigError(f"no staging memory for {what}: the pool is closed.")
                free = [one for one in self._generations if one.lease is None]
                if free:
                    break
                left = deadline - time.monotonic()
                if left <= 0:
                    raise BarrierTimeoutError(
                        f"no staging memory for {what} within {timeout_secs:g} s: "
                        f"{self._holders()}.",
                        hint="saves come faster than they are written, or a writer is stuck.",
                    )
                self._changed.wait(left)
            # The largest: memory that is there is used before more is made.
            generation = max(free, key=lambda one: one.nbytes)
            generation.lease = Lease(generation, what, self._release)
            return generation.lease

    def _release(self, lease: Lease) -> None:
        generation = lease._generation  # noqa: SLF001 - a lease and its pool are one
        with self._changed:
            if generation.lease is lease:
                generation.lease = None
                if self._is_closed:
                    generation.discard()
                self._changed.notify_all()

    def _fill(self, lease: Lease, nbytes: int, *, may_be_less: bool) -> None:
        """Give the lease its capacity. Not under the lock: the generation is its holder's."""
        generation = lease._generation  # noqa: SLF001 - a lease and its pool are one
        wanted = _pages(max(nbytes, 1))
        least = min(wanted, BLOCK_NBYTES) if may_be_less else wanted
        capacity = wanted
        if self._budget is not None:
            capacity = max(min(wanted, _pages(self._budget + 1) - mmap.PAGESIZE), least)
        if capacity > generation.nbytes:
            capacity = self._made(generation, lease, capacity, least)
        lease.nbytes = min(capacity, generation.nbytes)
        if lease.nbytes < wanted:
            self._tell(
                "small",
                f"{lease.what} needs {wanted} bytes of staging memory and gets {lease.nbytes}: it "
                "is streamed through it, and the caller waits for the disk meanwhile.",
            )

    def _made(self, generation: _Generation, lease: Lease, capacity: int, least: int) -> int:
        """Make or grow a generation's memory; return the capacity that it was possible to get."""
        available = self._available()
        if available is not None:
            more = int(available * _USABLE) // mmap.PAGESIZE * mmap.PAGESIZE
            capacity = max(min(capacity, generation.nbytes + more), least)
        while capacity > generation.nbytes:
            try:
                arena = self._arena(generation.arena, capacity)
            except StorageError:
                # Others may have taken memory since it was looked at.
                if capacity == least:
                    raise
                capacity = max(_pages(capacity // 2), least)
                continue
            lease.retired = (generation.key,) if generation.arena is not None else ()
            generation.discard()
            generation.arena, generation.key = arena, next(_keys)
        return max(capacity, generation.nbytes)

    def _arena(self, old: Arena | None, nbytes: int) -> Arena:
        if old is not None:
            return old.grown(nbytes, use_pinned=self._use_pinned)
        arena = Arena(nbytes, use_pinned=self._use_pinned, makers=self._makers)
        if arena.source != next(iter(self._makers)):
            self._tell("source", f"staging memory is made through {arena.source}: it may be slow.")
        return arena

    def _holders(self) -> str:
        now = time.monotonic()
        return "; ".join(
            f"generation {one.number} ({one.nbytes} bytes) is held by {lease.what} since "
            f"{now - lease.since:.1f} s"
            for one in self._generations
            if (lease := one.lease) is not None
        )

    def _tell(self, about: str, message: str) -> None:
        if about not in self._told:
            self._told.add(about)
            logger.warning("%s", message)


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
