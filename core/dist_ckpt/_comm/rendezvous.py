"""The rendezvous of processes without a process group, in a TCP store.

Here: where the processes meet, and ``Rendezvous``. Not here: one exchange (``_comm.store``). Used
by the checkpoint processes of a job, and by its ranks before there is a process group.

Each save has a number and a sequence of exchanges of its own, so that keys of a failed save do not
reach the next. A rank that cannot take part reports it (``give_up``), which ends the waits of the
others in that save at once.
"""

from __future__ import annotations

import datetime as dt
import os
import socket
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from dist_ckpt._comm.store import StoreCommunicator
from dist_ckpt._comm.torch_dist import default_communicator, group_store
from dist_ckpt.errors import ConfigError, CoordinationError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from dist_ckpt.types import Communicator

__all__ = ["Rendezvous", "RendezvousPoint", "find_rendezvous", "open_store"]

_NAP_SECS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousPoint:
    """Where ranks meet; picklable.

    Attributes:
        host: Host of the TCP store.
        port: Its port; 0 for one that the system chooses (only where the store is served).
        name: Prefix of the keys, one for each rendezvous.
        rank: This rank.
        size: Number of ranks.
        connect_secs: How long to try to connect.
    """

    host: str
    port: int
    name: str
    rank: int
    size: int
    connect_secs: float = 30.0


def open_store(point: RendezvousPoint, *, serves: bool = False, use_libuv: bool = True) -> Any:
    """Connect to the store, or serve it.

    Raises:
        CoordinationError: Nobody serves it there, or the port is taken.
    """
    try:
        return TCPStore(
            point.host,
            point.port,
            is_master=serves,
            timeout=dt.timedelta(seconds=point.connect_secs),
            wait_for_workers=False,
            use_libuv=use_libuv,
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        what = "serve" if serves else "reach"
        raise CoordinationError(
            f"rank {point.rank} cannot {what} the store at {point.host}:{point.port}: {error}"
        ) from error


def find_rendezvous(*, rank: int, size: int, timeout_secs: float) -> tuple[RendezvousPoint, Any]:
    """Return where the processes of all ranks can meet, and the store. Collective.

    This is the job's own TCP store: the one of the default process group, or at MASTER_ADDR and
    MASTER_PORT. For a group with another store (a file), rank 0 serves one.

    Returns:
        The place and the store, which must be kept: this process may be the one that serves it.

    Raises:
        ConfigError: There is neither; or this rank is another one in the group.
    """
    found: dict[str, Any] = {"rank": rank, "size": size}
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() == size:
        comm = default_communicator(timeout_secs=timeout_secs)
        store = _tcp_store_of_group()

        def look() -> bool:
            if comm.rank != rank:
                raise ConfigError(f"rank {rank} is rank {comm.rank} in the process group.")
            return store is not None

        shared = comm.map_reduce("looking for a store", look, all)
        if not shared:
            return _serve_on_first(comm, found)
        name = comm.broadcast("naming a rendezvous", lambda: uuid.uuid4().hex)
        assert store is not None  # noqa: S101 - all ranks have one
        return RendezvousPoint(host=store.host, port=store.port, name=name, **found), store
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        raise ConfigError(
            f"{size} ranks have no place to meet: no default process group of {size} ranks, and no "
            "MASTER_ADDR and MASTER_PORT.",
            hint="init_process_group first, or give a TCPStoreBarrier.",
        )
    point = RendezvousPoint(host=host, port=int(port), name="", **found)
    store = open_store(point)
    sequence = f"dist_ckpt/rendezvous/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    comm = StoreCommunicator(store, rank=rank, size=size, name=sequence, timeout_secs=timeout_secs)
    name = comm.broadcast("naming a rendezvous", lambda: uuid.uuid4().hex)
    return RendezvousPoint(host=host, port=int(port), name=name, **found), store


def _tcp_store_of_group() -> Any:
    world = dist.group.WORLD
    store: Any = group_store(world) if world is not None else None
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, TCPStore) else None


def _serve_on_first(comm: Communicator, found: dict[str, Any]) -> tuple[RendezvousPoint, Any]:
    served: list[Any] = []

    def serve() -> RendezvousPoint:
        host, name = socket.gethostname(), uuid.uuid4().hex
        store = open_store(RendezvousPoint(host=host, port=0, name=name, **found), serves=True)
        served.append(store)
        return RendezvousPoint(host=host, port=store.port, name=name, **found)

    first = comm.broadcast("serving a store", serve)
    point = RendezvousPoint(host=first.host, port=first.port, name=first.name, **found)
    return point, served[0] if served else open_store(point)


class Rendezvous:
    """The ranks of one rendezvous point, and the store that they share.

    Args:
        store: The store.
        rank: This rank.
        size: Number of ranks.
        name: Prefix of the keys.
    """

    def __init__(self, store: Store, *, rank: int, size: int, name: str) -> None:
        """Remember the store; nothing is exchanged yet."""
        self._store, self._rank, self._size, self._name = store, rank, size, name
        self._joined: list[int] = []

    def communicator(self, number: int, *, timeout_secs: float) -> Communicator:
        """Return the communicator of save ``number``; one save, one number, equal on all ranks."""
        if number not in self._joined:
            self._joined.append(number)
            # A rank in this save has left the one before last: no rank reads keys of that again.
            self._forget(self._joined[:-2])
            self._joined = self._joined[-2:]
        name = f"{self._name}/{number}"
        store: Any = _WatchedStore(self._store, f"{name}/gave_up")
        return StoreCommunicator(
            store, rank=self._rank, size=self._size, name=name, timeout_secs=timeout_secs
        )

    def give_up(self, number: int, reason: str) -> None:
        """End the waits of all ranks in save ``number``: this rank takes no further part in it."""
        text = f"rank {self._rank} gave up the save: {reason}"
        self._store.set(f"{self._name}/{number}/gave_up", text)

    def leave(self, number: int) -> None:
        """Report that this rank has read all that it needs of save ``number``."""
        self._store.set(f"{self._name}/{number}/left/{self._rank}", "")

    def wait_until_left(self, number: int, timeout_secs: float) -> bool:
        """Return whether all others have left save ``number``, so that the store may go."""
        keys = [f"{self._name}/{number}/left/{r}" for r in range(self._size) if r != self._rank]
        deadline = time.monotonic() + timeout_secs
        try:
            while not self._store.check(keys):
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_NAP_SECS)
        except dist.DistError:
            return False
        return True

    def _forget(self, numbers: list[int]) -> None:
        for number in numbers:
            name = f"{self._name}/{number}"
            calls = self._store.add(f"{name}/calls/{self._rank}", 0)
            ranks = range(self._size) if self._rank == 0 else ()
            keys = [f"{name}/{call}/in/{self._rank}" for call in range(1, calls + 1)]
            keys += [f"{name}/{call}/out/{r}" for call in range(1, calls + 1) for r in ranks]
            keys += [f"{name}/{call}/left" for call in range(1, calls + 1) if self._rank == 0]
            keys += [f"{name}/calls/{self._rank}", f"{name}/left/{self._rank}"]
            for key in keys:
                self._store.delete_key(key)


class _WatchedStore:
    """A store in which waiting for a key ends when a rank has given up."""

    def __init__(self, store: Store, flag: str) -> None:
        self._store, self._flag = store, flag

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def check(self, keys: list[str]) -> bool:
        """Return whether the keys are there.

        Raises:
            CoordinationError: They are not, and a rank has given up.
        """
        if self._store.check(keys):
            return True
        if self._store.check([self._flag]):
            raise CoordinationError(self._store.get(self._flag).decode())
        return False
