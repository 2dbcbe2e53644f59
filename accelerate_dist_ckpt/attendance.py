"""Who is here? Whether all ranks entered ``save_state``, or rank 0 alone.

Here: the bounded waiting, through the key-value store of the default process group. Not here: the
exchanges of a save, in which all ranks must take part (``dist_ckpt``). Called on each rank that
enters ``save_state``.

Each rank but 0 has numbered slots, one for each save. It fills the next one with where it saves to
and waits for rank 0's reply. Rank 0 waits for the slots; one that stays empty it closes, with the
reason. A slot changes hands by compare-and-set, so that a rank that comes too late knows it.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import torch.distributed as dist

from dist_ckpt.barriers import group_store
from dist_ckpt.errors import BarrierTimeoutError, CoordinationError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Attendance", "attend"]

Attendance: TypeAlias = Literal["all", "alone", "late"]
"""All ranks are here; or rank 0 is alone; or this rank came when rank 0 had saved alone."""

_PREFIX: Final = "dist_ckpt_accelerate/"
_AFTER_ALONE_SECS: Final = 1.0
_HINT: Final = (
    "hint: call save_state() on every rank, not under `if accelerator.is_main_process:`, and with "
    "the same directory."
)


def attend(
    target: str, *, sharded: bool, lone_rank_timeout_secs: float, timeout_secs: float
) -> Attendance:
    """Find out who takes part in a save.

    Args:
        target: Where this rank saves to.
        sharded: Whether rank 0 alone does not have all of the state.
        lone_rank_timeout_secs: How long rank 0 waits for the others.
        timeout_secs: How long the others wait for rank 0.

    Raises:
        CoordinationError: Some ranks are here and some are not, ranks save to different places, or
            rank 0 is alone with sharded state.
        BarrierTimeoutError: Rank 0 did not come.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return "all"
    world = dist.group.WORLD
    assert world is not None  # noqa: S101 - is_initialized() says so
    store = _Keys(group_store(world))
    if dist.get_rank() == 0:
        return _Host(store, target).receive(lone_rank_timeout_secs, sharded=sharded)
    guest = _Guest(store, dist.get_rank(), target)
    return guest.arrive(lone_rank_timeout_secs, timeout_secs)


class _Host:
    """Rank 0's side."""

    def __init__(self, store: _Keys, target: str) -> None:
        self._store, self._target = store, target
        self._guests = range(1, dist.get_world_size())

    def receive(self, timeout_secs: float, *, sharded: bool) -> Attendance:
        """Wait for the others, tell those who came, and return or raise the verdict."""
        if not sharded and self._store.add("alone", 0):
            # It happened before, so it is meant: no need to wait that long each time.
            timeout_secs = min(timeout_secs, _AFTER_ALONE_SECS)
        deadline = time.monotonic() + timeout_secs
        places = {rank: self._place_of(rank, deadline) for rank in self._guests}
        absent = [rank for rank, place in places.items() if place is None]
        problem = self._problem(places, absent, timeout_secs, sharded=sharded)
        kind = "error" if problem else "alone" if absent else "all"
        for rank in self._guests:
            if rank in absent:
                self._close(rank, kind, problem)
            else:
                self._reply(rank, kind, problem)
        if problem:
            raise CoordinationError(problem)
        if absent:
            self._store.add("alone", 1)
            return "alone"
        return "all"

    def _problem(
        self,
        places: dict[int, str | None],
        absent: list[int],
        timeout_secs: float,
        *,
        sharded: bool,
    ) -> str:
        elsewhere = {r: p for r, p in places.items() if p is not None and p != self._target}
        if elsewhere:
            told = ", ".join(f"rank {rank} to {place}" for rank, place in elsewhere.items())
            return f"save_state(): rank 0 saves to {self._target}, but {told}. {_HINT}"
        if absent and (sharded or len(absent) < len(places)):
            why = "the state is sharded" if sharded else "others did"
            return (
                f"save_state({self._target!r}): ranks {absent} did not enter it within "
                f"{timeout_secs:g} s, and {why}. {_HINT}"
            )
        return ""

    def _place_of(self, rank: int, deadline: float) -> str | None:
        while True:
            key = self._slot(rank)
            if not self._store.wait(key, deadline - time.monotonic()):
                return None
            found = self._store.get(key)
            content = json.loads(found)
            if content["kind"] == "here":
                # Noted, so that it does not give up while rank 0 waits for others.
                noted = json.dumps({**content, "kind": "noted"})
                if self._store.exchange(key, found, noted) == noted:
                    return str(content["target"])
            self._next(rank)  # that rank gave up waiting

    def _close(self, rank: int, kind: str, problem: str) -> None:
        closed = json.dumps({"kind": kind, "target": self._target, "problem": problem})
        now = self._store.exchange(self._slot(rank), "", closed)
        if now == closed:
            self._next(rank)
        elif json.loads(now)["kind"] == "here":  # it came just now
            late = "alone" if json.loads(now)["target"] == self._target else "error"
            self._reply(rank, late, problem or f"save_state(): ranks save elsewhere. {_HINT}")

    def _reply(self, rank: int, kind: str, problem: str) -> None:
        number = self._next(rank)
        self._store.set(f"reply/{rank}/{number}", json.dumps({"kind": kind, "problem": problem}))

    def _slot(self, rank: int) -> str:
        return f"slot/{rank}/{self._store.add(f'host/{rank}', 0)}"

    def _next(self, rank: int) -> int:
        """Go on to this rank's next slot and return the number of the present one."""
        return self._store.add(f"host/{rank}", 1) - 1


class _Guest:
    """The side of every other rank."""

    def __init__(self, store: _Keys, rank: int, target: str) -> None:
        self._store, self._rank, self._target = store, rank, target

    def arrive(self, lone_rank_timeout_secs: float, timeout_secs: float) -> Attendance:
        """Tell rank 0 where this rank is, and return or raise its verdict."""
        here = json.dumps({"kind": "here", "target": self._target, "problem": ""})
        missed: dict[str, Any] = {}
        while True:
            number = self._store.add(f"guest/{self._rank}", 1) - 1
            slot = f"slot/{self._rank}/{number}"
            now = self._store.exchange(slot, "", here)
            if now == here:
                break
            missed = json.loads(now)
            self._store.delete(slot)
        came_late = missed.get("target") == self._target
        if came_late and missed["kind"] == "error" and self._withdraw(slot, here):
            raise CoordinationError(missed["problem"])
        # Rank 0 may also have saved to this place long ago; then it comes now, and soon.
        patience = lone_rank_timeout_secs if came_late else timeout_secs
        reply = f"reply/{self._rank}/{number}"
        if self._store.wait(reply, patience):
            return self._verdict(slot, reply)
        if self._withdraw(slot, here):
            if came_late:
                return "late"
        elif self._store.wait(reply, timeout_secs):
            return self._verdict(slot, reply)
        raise BarrierTimeoutError(
            f"save_state({self._target!r}): rank 0 did not enter it within {patience:g} s "
            f"(told by rank {self._rank}). {_HINT}"
        )

    def _withdraw(self, slot: str, here: str) -> bool:
        """Take the slot back; False if rank 0 has taken note of it after all."""
        gone = json.dumps({"kind": "gone"})
        return self._store.exchange(slot, here, gone) == gone

    def _verdict(self, slot: str, reply: str) -> Attendance:
        verdict = json.loads(self._store.get(reply))
        self._store.delete(slot)
        self._store.delete(reply)
        if verdict["kind"] == "error":
            raise CoordinationError(verdict["problem"])
        return "all" if verdict["kind"] == "all" else "late"


class _Keys:
    """The store, under a prefix of our own."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(_PREFIX + key, amount))

    def get(self, key: str) -> str:
        return bytes(self._store.get(_PREFIX + key)).decode()

    def set(self, key: str, value: str) -> None:
        self._store.set(_PREFIX + key, value)

    def delete(self, key: str) -> None:
        self._store.delete_key(_PREFIX + key)

    def exchange(self, key: str, expected: str, value: str) -> str:
        """Set ``value`` if ``expected`` stands there (empty: nothing); return what stands there."""
        return bytes(self._store.compare_set(_PREFIX + key, expected, value)).decode()

    def wait(self, key: str, timeout_secs: float) -> bool:
        """Return whether the key came to be there in time."""
        try:
            self._store.wait([_PREFIX + key], timedelta(seconds=max(timeout_secs, 0.001)))
        except dist.DistError:
            return bool(self._store.check([_PREFIX + key]))
        return True
