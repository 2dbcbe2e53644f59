"""Where the ranks of a checkpointer meet.

Here: ``Barrier`` and the two of ours, which a writer also commits through; and ``group_store``, the
key-value store of a process group under every torch that we support. Not here: exchanges
(``_comm``). The names are those of torch's ``_experimental`` checkpointer (torch 2.13).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from dist_ckpt._comm import default_communicator, group_store
from dist_ckpt.errors import ConfigError, CoordinationError

if TYPE_CHECKING:
    from dist_ckpt._comm.rendezvous import Rendezvous, RendezvousPoint
    from dist_ckpt.types import Communicator, RankInfo

__all__ = [
    "BARRIER_REGISTRY",
    "Barrier",
    "BarrierConfig",
    "DistBarrier",
    "MeetingBarrier",
    "TCPStoreBarrier",
    "create_barrier_from_config",
    "group_store",
    "register_barrier",
]

T = TypeVar("T")

BARRIER_REGISTRY: dict[str, type] = {}
"""The barriers that a ``BarrierConfig`` can name, by their ``barrier_type``."""

_LEAVE_SECS = 5.0
"""How long the rank that serves the store waits for others to hear how the last save ended."""


def register_barrier(barrier_class: type[T]) -> type[T]:
    """Let a ``BarrierConfig`` name a class by its ``barrier_type``, if it has one; a decorator."""
    kind = getattr(barrier_class, "barrier_type", None)
    if kind is not None:
        BARRIER_REGISTRY[kind] = barrier_class
    return barrier_class


class Barrier(ABC):
    """Holds every rank until all have come."""

    @abstractmethod
    def execute_barrier(self) -> None:
        """Return once all ranks have called this. Collective."""


class MeetingBarrier(Barrier):
    """A barrier through which ranks can also exchange: a writer commits through it."""

    @abstractmethod
    def communicator(self, *, timeout_secs: float) -> Communicator:
        """Return the ranks, who wait for each other for ``timeout_secs`` at most."""

    def execute_barrier(self) -> None:
        """Return once all ranks have called this. Collective.

        Raises:
            BarrierTimeoutError: Some did not come in time; names them.
        """
        comm = self.communicator(timeout_secs=self.timeout_secs)
        comm.map_reduce("waiting at a barrier", lambda: None, lambda _: None)

    timeout_secs: float = 600.0
    """How long ``execute_barrier`` waits."""


@register_barrier
class DistBarrier(MeetingBarrier):
    """The ranks of the default process group; no collective of its backend is used.

    Args:
        timeout_secs: How long ``execute_barrier`` waits.

    Raises:
        CoordinationError: There is no process group of several ranks.
    """

    barrier_type = "dist_barrier"

    def __init__(self, *, timeout_secs: float = 600.0) -> None:
        """Check that there is a group."""
        self.timeout_secs = timeout_secs
        if default_communicator().size == 1:
            raise CoordinationError(
                "DistBarrier needs a process group of several ranks.",
                hint="call torch.distributed.init_process_group first.",
            )

    def communicator(self, *, timeout_secs: float) -> Communicator:
        """Return the ranks of the default process group."""
        return default_communicator(timeout_secs=timeout_secs)


@register_barrier
class TCPStoreBarrier(MeetingBarrier):
    """Ranks that meet in a TCP store, with or without a process group.

    Args:
        global_rank: This rank.
        global_world_size: Number of ranks.
        barrier_prefix: Prefix of the keys; one for each barrier in a store.
        timeout_barrier_init_secs: How long to try to connect, in seconds.
        use_checkpoint_barrier_tcpstore_libuv: Whether the store is served through libuv.
        tcpstore_port: Port of the store.
        master_address: Host of the store; rank 0, which serves it, must be there.
        timeout_secs: How long ``execute_barrier`` waits, in seconds.

    Raises:
        CoordinationError: The store cannot be served or reached.
    """

    barrier_type = "tcp_store"

    def __init__(  # noqa: PLR0917 - torch's signature
        self,
        global_rank: int,
        global_world_size: int,
        barrier_prefix: str = "checkpoint",
        timeout_barrier_init_secs: float = 30,
        use_checkpoint_barrier_tcpstore_libuv: bool = True,  # noqa: FBT001, FBT002 - torch's signature
        tcpstore_port: int = 0,
        master_address: str = "localhost",
        timeout_secs: float = 600,
    ) -> None:
        """Serve the store on rank 0, connect to it on the others."""
        from dist_ckpt._comm.rendezvous import (  # noqa: PLC0415 - torch.distributed, when needed
            RendezvousPoint,
            open_store,
        )

        if global_world_size > 1 and not tcpstore_port:
            raise ConfigError("a TCPStoreBarrier of several ranks needs tcpstore_port.")
        point = RendezvousPoint(
            host=master_address,
            port=int(tcpstore_port),
            name=f"dist_ckpt/{barrier_prefix}",
            rank=global_rank,
            size=global_world_size,
            connect_secs=timeout_barrier_init_secs,
        )
        libuv = use_checkpoint_barrier_tcpstore_libuv
        store = open_store(point, serves=global_rank == 0, use_libuv=libuv)
        self._enter(point, store, timeout_secs)

    def _enter(self, point: RendezvousPoint, store: Any, timeout_secs: float) -> None:
        from dist_ckpt._comm.rendezvous import Rendezvous  # noqa: PLC0415 - as above

        self.timeout_secs = timeout_secs
        self._store = store  # kept: it may be the one that serves
        self._point = point
        self._number = 0
        self._rendezvous: Rendezvous = Rendezvous(
            store, rank=point.rank, size=point.size, name=point.name
        )

    @classmethod
    def of_job(cls, rank_info: RankInfo, *, timeout_secs: float = 600) -> TCPStoreBarrier:
        """Return a fresh barrier in the job's own store. Collective.

        Raises:
            ConfigError: The job has none.
        """
        from dist_ckpt._comm.rendezvous import find_rendezvous  # noqa: PLC0415 - as above

        rank, size = rank_info.global_rank, rank_info.global_world_size
        point, store = find_rendezvous(rank=rank, size=size, timeout_secs=timeout_secs)
        self = cls.__new__(cls)
        self._enter(point, store, timeout_secs)
        return self

    @classmethod
    def join(cls, point: RendezvousPoint, *, timeout_secs: float = 600) -> TCPStoreBarrier:
        """Return the barrier of another process of the same rank, from its ``point``."""
        from dist_ckpt._comm.rendezvous import open_store  # noqa: PLC0415 - as above

        self = cls.__new__(cls)
        self._enter(point, open_store(point), timeout_secs)
        return self

    @property
    def point(self) -> RendezvousPoint:
        """Where the ranks meet; another process of this rank can ``join`` there."""
        return self._point

    def begin(self, number: int) -> None:
        """Enter save ``number``, counted alike on all ranks, whatever became of those before."""
        self._number = number

    def give_up(self, number: int, reason: str) -> None:
        """Take no part in save ``number``; who waits for this rank is told at once."""
        self._rendezvous.give_up(number, reason)

    def leave(self, number: int) -> None:
        """Say that this rank knows how save ``number`` has ended."""
        self._rendezvous.leave(number)

    def wait_until_left(self, number: int) -> None:
        """Wait, for some seconds at most, until the others know how save ``number`` has ended."""
        self._rendezvous.wait_until_left(number, _LEAVE_SECS)

    def communicator(self, *, timeout_secs: float) -> Communicator:
        """Return the ranks, in the save that was begun last."""
        return self._rendezvous.communicator(self._number, timeout_secs=timeout_secs)


@dataclass(slots=True)
class BarrierConfig:
    """Which barrier to make.

    Attributes:
        barrier_type: ``tcp_store``, ``dist_barrier``, what was given to ``register_barrier``, or
            None: ranks meet in the job's own store.
        barrier_args: Arguments of its class; rank and world size need not be among them.
    """

    barrier_type: str | None = None
    barrier_args: dict[str, Any] = field(default_factory=dict)


def create_barrier_from_config(
    barrier_config: BarrierConfig, rank_info: RankInfo | None = None
) -> Barrier | None:
    """Return the barrier that a config names, None if it names none.

    Raises:
        ConfigError: There is no such type, or it does not take these arguments.
    """
    kind, arguments = barrier_config.barrier_type, dict(barrier_config.barrier_args)
    if kind is None:
        return None
    if kind not in BARRIER_REGISTRY:
        known = sorted(BARRIER_REGISTRY)
        raise ConfigError(f"Unknown barrier type: {kind}. Available types: {known}")
    cls = BARRIER_REGISTRY[kind]
    if cls is TCPStoreBarrier and rank_info is not None:
        arguments.setdefault("global_rank", rank_info.global_rank)
        arguments.setdefault("global_world_size", rank_info.global_world_size)
    try:
        barrier: Barrier = cls(**arguments)
    except TypeError as error:
        raise ConfigError(f"barrier {kind!r}: {error}") from error
    return barrier
