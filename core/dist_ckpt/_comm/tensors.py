"""Moves tensors and objects between the ranks of a group.

Here: what the ranks agree to move, and three ways to move it in bounded buffers. Not here: which
rank gives what (``exchange_utils``), exchanges of small values (``_comm.store``).

Before any tensor moves, the ranks agree on all that will move, through the store of the group: a
rank that cannot take part fails all of them, instead of leaving them to wait in a collective. A
failure while tensors move is exchanged afterwards. Called from the thread that saves or loads.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from dist_ckpt._comm import group_communicator
from dist_ckpt._comm.outcome import agree, attempt, reduce
from dist_ckpt._sharding.shard_info import dtype_from_name, dtype_name
from dist_ckpt._staging_pool.memory import copy_bits, copy_cast
from dist_ckpt.box import Box, split_box
from dist_ckpt.errors import CheckpointingException, CoordinationError, MismatchError
from dist_ckpt.validation import shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from torch.distributed import ProcessGroup

    from dist_ckpt.mapping import ShardedTensor

__all__ = [
    "EXCHANGE_ALGOS",
    "MAX_IN_FLIGHT_NBYTES",
    "ShardId",
    "can_be_filled",
    "exchange_objects",
    "exchange_tensors",
    "group_text",
    "sort_key",
]

EXCHANGE_ALGOS = ("broadcast", "gather_rounds", "gather_object")

MAX_IN_FLIGHT_NBYTES = 256 << 20
"""Most bytes of transfer buffers on one rank at a time, whatever the tensors' size."""

_VERDICT_SECS, _WHO_IS_GONE_SECS = 300.0, 5.0
"""How long ranks wait for each other after the transfer, which ends on all at about the same time;
and how long a rank whose transfer failed waits to find out which ranks are gone."""

_ALIGNMENT = 16
"""Every piece in a buffer begins at a multiple of this: of the largest element size, so that it can
be viewed as a tensor of its dtype."""

ShardId: TypeAlias = tuple[str, tuple[int, ...], tuple[Any, ...] | None]
"""Key, global offset, and the flattened range; for objects ``("object", *global_shape)``."""


def sort_key(shard: ShardId) -> tuple[str, tuple[int, ...], str]:
    """Return a key that sorts shards in the same way on all ranks."""
    return shard[0], shard[1], str(shard[2])


def group_text(group: ProcessGroup | None) -> str:
    """Return how a group is named in messages."""
    if group is None or dist.get_world_size(group) == dist.get_world_size():
        return "the default group"
    return f"the group of ranks {shortened([str(r) for r in dist.get_process_group_ranks(group)])}"


class _Kind(NamedTuple):
    """A tensor or object that is moved."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Offer:
    """What one rank has and what it requests; a kind of None accepts that of the source."""

    algo: object
    have: dict[ShardId, _Kind]
    need: dict[ShardId, _Kind | None]
    device_types: set[str]
    backends: str


@dataclass(frozen=True, slots=True)
class _Item:
    """One tensor that goes from ``source`` to ``receivers``."""

    shard: ShardId
    kind: _Kind
    source: int
    receivers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Plan:
    """What moves, in the same order on all ranks; ``device`` is that of the buffers."""

    items: list[_Item]
    device: str
    unknown_algo: str | None = None


class _Piece(NamedTuple):
    """A box of an item, at a place in a buffer."""

    item: _Item
    box: Box
    position: int
    nbytes: int


class _Batch(NamedTuple):
    """Pieces that travel in one buffer of ``nbytes``."""

    pieces: list[_Piece]
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Link:
    """This rank in a group: the tensors that it sends, and those that it receives into."""

    group: ProcessGroup | None
    rank: int
    size: int
    device: torch.device
    sources: Mapping[ShardId, torch.Tensor]
    targets: dict[ShardId, torch.Tensor]
    failures: list[Exception] = field(default_factory=list)

    def pack(self, batch: _Batch, buffer: torch.Tensor) -> None:
        """Copy the pieces of ``batch`` from the sources into ``buffer``, bit for bit."""
        with self._keeping_failures(), torch.no_grad():
            for piece in batch.pieces:
                region = _region(self.sources[piece.item.shard].detach(), piece.box)
                copy_bits(_window(buffer, piece, region.dtype), region)

    def unpack(self, batch: _Batch, buffer: torch.Tensor) -> None:
        """Copy the pieces that this rank wants from ``buffer`` into the targets, bit for bit."""
        with self._keeping_failures(), torch.no_grad():
            for piece in batch.pieces:
                if self.rank in piece.item.receivers:
                    region = _region(self.targets[piece.item.shard].detach(), piece.box)
                    dtype = dtype_from_name(piece.item.kind.dtype)
                    copy_cast(region, _window(buffer, piece, dtype))

    @contextlib.contextmanager
    def _keeping_failures(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - exchanged once no rank waits for this one in a collective
            self.failures.append(error)


def exchange_tensors(
    have: Mapping[ShardId, torch.Tensor],
    need: Mapping[ShardId, ShardedTensor | None],
    main_ranks: Mapping[ShardId, int],
    group: ProcessGroup | None,
    *,
    exchange_algo: str,
    on_host: bool = False,
    device: torch.device | str = "cpu",
) -> dict[ShardId, torch.Tensor]:
    """Send every rank the tensors that it wants and another rank has. Collective over the group.

    Args:
        have: What this rank has.
        need: What it wants: a shard, whose data is filled in place where there is some, or None to
            take whatever the source has.
        main_ranks: Which rank gives a shard; the lowest that has it, if that one does not.
        group: The group; None is the default one.
        exchange_algo: One of ``EXCHANGE_ALGOS``.
        on_host: Keep buffers in host memory, if the group can move host memory at all.
        device: Where tensors are made for shards that have no data.

    Returns:
        ``have`` and what was received.

    Raises:
        NotImplementedError: Another algorithm; on all ranks, also if only one asks for it.
        MismatchError: Nobody has a shard that is wanted, or it has another shape or dtype.
        CoordinationError: Ranks failed, vanished or asked for different algorithms.
    """
    comm = group_communicator(group)
    targets: dict[ShardId, torch.Tensor] = {}

    def offer() -> _Offer:
        # Allocate before anything moves: a rank without memory fails here, on all ranks alike.
        for shard, wanted in need.items():
            if wanted is not None and shard not in have:
                targets[shard] = _target(wanted, device)
        return _offer(have, need, targets, exchange_algo, group if comm.size > 1 else None)

    plan = comm.map_reduce(
        f"agreeing on what moves in {group_text(group)}",
        offer,
        lambda offers: _plan(offers, main_ranks, on_host=on_host),
    )
    if plan.unknown_algo is not None:
        raise NotImplementedError(plan.unknown_algo)
    if plan.items:
        link = _Link(group, comm.rank, comm.size, torch.device(plan.device), have, targets)
        phase = f"making memory for what moves in {group_text(group)}"
        agree(comm, phase, attempt(_make_targets, plan, link))
        _move(plan, link, exchange_algo)
    return {**have, **{shard: targets[shard] for shard in need if shard in targets}}


def exchange_objects(
    have: Mapping[ShardId, Any],
    need: Collection[ShardId],
    main_ranks: Mapping[ShardId, int],
    group: ProcessGroup | None,
    *,
    exchange_algo: str,
) -> dict[ShardId, Any]:
    """Send every rank the objects that it wants and another rank has. Collective over the group.

    They travel pickled, between processes of one job; nothing here was read from a checkpoint as
    pickled bytes.

    Raises:
        MismatchError: Nobody has an object that is wanted.
        CoordinationError: Ranks failed or vanished, or an object cannot be pickled.
    """
    comm = group_communicator(group)
    packed: dict[ShardId, torch.Tensor] = {}

    def pack() -> bool:
        for shard, value in have.items():
            file = io.BytesIO()
            torch.save(value, file)  # plain pickle does not know every dtype
            packed[shard] = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
        return any(shard not in have for shard in need)

    def unpack() -> dict[ShardId, Any]:
        files = {s: io.BytesIO(found[s].numpy().tobytes()) for s in need if s not in have}
        return {s: torch.load(file, weights_only=False) for s, file in files.items()}

    if not reduce(comm, f"packing objects in {group_text(group)}", attempt(pack), any):
        return dict(have)
    found = exchange_tensors(
        packed, dict.fromkeys(need), main_ranks, group, exchange_algo=exchange_algo
    )
    phase = f"unpacking objects in {group_text(group)}"
    return {**have, **agree(comm, phase, attempt(unpack))}


def _offer(
    have: Mapping[ShardId, torch.Tensor],
    need: Mapping[ShardId, ShardedTensor | None],
    targets: Mapping[ShardId, torch.Tensor],
    algo: object,
    group: ProcessGroup | None,
) -> _Offer:
    wanted = {
        shard: None if one is None else _Kind(dtype_name(one.dtype), one.data_shape)
        for shard, one in need.items()
        if shard not in have
    }
    kinds = {shard: _Kind(dtype_name(t.dtype), tuple(t.shape)) for shard, t in have.items()}
    devices = {tensor.device.type for tensor in (*have.values(), *targets.values())}
    backends = dist.get_backend_config(group) if dist.is_initialized() else "cpu:none"
    return _Offer(algo, kinds, wanted, devices, backends)


def _plan(offers: Sequence[_Offer], main_ranks: Mapping[ShardId, int], *, on_host: bool) -> _Plan:
    """Match what ranks want with what others have. Rank 0 of the group."""
    algos = {offer.algo for offer in offers}
    unknown = [algo for algo in algos if algo not in EXCHANGE_ALGOS]
    if unknown:
        told = f"exchange_algo {unknown[0]!r} is not one of {', '.join(EXCHANGE_ALGOS)}"
        return _Plan([], "cpu", told)
    if len(algos) > 1:
        raise CoordinationError(f"ranks ask for different exchange_algo: {sorted(map(str, algos))}")
    wanted: dict[ShardId, list[int]] = defaultdict(list)
    for rank, offer in enumerate(offers):
        for shard, kind in offer.need.items():
            if kind is None or 0 not in kind.shape:
                wanted[shard].append(rank)
    items, problems = [], []
    for shard in sorted(wanted, key=sort_key):
        source = _source(shard, offers, main_ranks)
        if source is None:
            problems.append(f"{shard[0]!r} at {shard[1]} is wanted by ranks {wanted[shard]}")
            continue
        kind = offers[source].have[shard]
        problems += _differences(shard, kind, wanted[shard], offers)
        items.append(_Item(shard, kind, source, tuple(wanted[shard])))
    if problems:
        raise MismatchError(
            f"Missing shards after fully parallel loading: {shortened(problems)}.",
            hint="every shard must be given, whole and of the same dtype, by a rank of its group.",
        )
    return _Plan(items, _buffer_device(offers, on_host=on_host))


def _source(
    shard: ShardId, offers: Sequence[_Offer], main_ranks: Mapping[ShardId, int]
) -> int | None:
    main = main_ranks.get(shard)
    if main is not None and main < len(offers) and shard in offers[main].have:
        return main
    return next((rank for rank, offer in enumerate(offers) if shard in offer.have), None)


def _differences(
    shard: ShardId, kind: _Kind, ranks: Iterable[int], offers: Sequence[_Offer]
) -> Iterator[str]:
    for rank in ranks:
        wanted = offers[rank].need[shard]
        if wanted is not None and wanted != kind:
            yield (
                f"{shard[0]!r} at {shard[1]}: rank {rank} wants {wanted.dtype} of shape "
                f"{wanted.shape}, there is {kind.dtype} of shape {kind.shape}"
            )


def _buffer_device(offers: Sequence[_Offer], *, on_host: bool) -> str:
    """Return where buffers lie: on the device if all tensors do, or if nothing else is moved."""
    found = dict(part.split(":", 1) for part in offers[0].backends.split(",") if ":" in part)
    devices = set[str]().union(*(offer.device_types for offer in offers))
    direct = next((d for d in devices if d != "cpu" and found.get(d) not in (None, "gloo")), None)
    if "cpu" in found and (on_host or direct is None or len(devices) > 1):
        return "cpu"
    return direct or next((device for device in found if device != "cpu"), "cpu")


def can_be_filled(data: torch.Tensor) -> bool:
    """Whether each element has memory of its own, unlike in an expanded tensor."""
    return not any(s == 0 and n > 1 for s, n in zip(data.stride(), data.shape, strict=True))


def _target(wanted: ShardedTensor, device: torch.device | str) -> torch.Tensor:
    data = wanted.data
    if data is not None and can_be_filled(data):
        return data
    device = device if data is None else data.device
    return torch.empty(wanted.data_shape, dtype=wanted.dtype, device=device)


def _region(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[box.slices()] if box.shape else tensor


def _window(buffer: torch.Tensor, piece: _Piece, dtype: torch.dtype) -> torch.Tensor:
    return buffer[piece.position : piece.position + piece.nbytes].view(dtype).view(piece.box.shape)


def _batches(items: Iterable[_Item], budget: int) -> list[_Batch]:
    """Cut items into pieces and fill buffers of at most ``budget`` bytes with them, in order."""
    budget = max(budget // _ALIGNMENT * _ALIGNMENT, _ALIGNMENT)
    batches: list[_Batch] = []
    pieces: list[_Piece] = []
    position = 0
    for item in items:
        itemsize = dtype_from_name(item.kind.dtype).itemsize
        whole = Box((0,) * len(item.kind.shape), item.kind.shape)
        for box in split_box(whole, itemsize, budget):
            nbytes = box.numel * itemsize
            if position + nbytes > budget:
                batches.append(_Batch(pieces, position))
                pieces, position = [], 0
            pieces.append(_Piece(item, box, position, nbytes))
            position += math.ceil(nbytes / _ALIGNMENT) * _ALIGNMENT
    return [*batches, _Batch(pieces, position)] if pieces else batches


def _make_targets(plan: _Plan, link: _Link) -> None:
    """Make the targets whose dtype and shape only the source knew."""
    for item in plan.items:
        if link.rank in item.receivers and item.shard not in link.targets:
            dtype = dtype_from_name(item.kind.dtype)
            link.targets[item.shard] = torch.empty(item.kind.shape, dtype=dtype)


def _move(plan: _Plan, link: _Link, algo: str) -> None:
    """Carry out a plan; a failure on any rank is raised on all."""
    where, broken = group_text(link.group), None
    try:
        _ALGORITHMS[algo](plan, link)
    except Exception as error:  # noqa: BLE001 - of the backend, or no memory for a buffer
        broken = error
        link.failures.append(error)

    def verdict() -> None:
        if link.failures:
            raise link.failures[0]

    patience = _VERDICT_SECS if broken is None else _WHO_IS_GONE_SECS
    comm = group_communicator(link.group, timeout_secs=patience)
    try:
        agree(comm, f"moving shards in {where}", attempt(verdict))
    except CheckpointingException as failure:
        if broken is None:
            raise
        raise CoordinationError(
            f"an exchange in {where} broke off (rank {link.rank} of it): {broken}. {failure}",
            hint="another rank has died, or had no memory left.",
        ) from broken


def _by_broadcast(plan: _Plan, link: _Link) -> None:
    """Send each batch to the ranks that want it: by a broadcast if that is all of them."""
    ways: dict[tuple[int, tuple[int, ...]], list[_Item]] = defaultdict(list)
    for item in plan.items:
        ways[item.source, item.receivers].append(item)
    # The order is the same on all ranks, and each step has both of its sides: no deadlock.
    for (source, receivers), items in sorted(ways.items(), key=lambda way: way[0]):
        if link.rank != source and link.rank not in receivers:
            continue
        for batch in _batches(items, MAX_IN_FLIGHT_NBYTES):
            buffer = torch.empty(batch.nbytes, dtype=torch.uint8, device=link.device)
            if link.rank == source:
                link.pack(batch, buffer)
            if len(receivers) == link.size - 1:
                dist.broadcast(buffer, group=link.group, group_src=source)
            elif link.rank == source:
                for receiver in receivers:
                    dist.send(buffer, group=link.group, group_dst=receiver)
            else:
                dist.recv(buffer, group=link.group, group_src=source)
            link.unpack(batch, buffer)


def _rounds(plan: _Plan, link: _Link, budget: int) -> Iterator[list[_Batch | None]]:
    """Yield for each round what each rank gives to all others."""
    per_rank = [
        _batches([item for item in plan.items if item.source == rank], budget)
        for rank in range(link.size)
    ]
    for number in range(max(map(len, per_rank))):
        yield [batches[number] if number < len(batches) else None for batches in per_rank]


def _by_gather_rounds(plan: _Plan, link: _Link) -> None:
    """Gather one batch of every rank at a time."""
    # One buffer is sent, and one of each rank received.
    for batches in _rounds(plan, link, MAX_IN_FLIGHT_NBYTES // (link.size + 1)):
        nbytes = max(batch.nbytes for batch in batches if batch is not None)
        buffers = [
            torch.empty(nbytes, dtype=torch.uint8, device=link.device) for _ in range(link.size)
        ]
        mine = torch.zeros(nbytes, dtype=torch.uint8, device=link.device)
        own = batches[link.rank]
        if own is not None:
            link.pack(own, mine)
        dist.all_gather(buffers, mine, group=link.group)
        for batch, buffer in zip(batches, buffers, strict=True):
            if batch is not None:
                link.unpack(batch, buffer)


def _by_gather_object(plan: _Plan, link: _Link) -> None:
    """Gather one batch of every rank at a time, as pickled bytes."""
    # The batch, its bytes and its pickle here; of each rank the pickle and the bytes again.
    for batches in _rounds(plan, link, MAX_IN_FLIGHT_NBYTES // (2 * link.size + 4)):
        own = batches[link.rank]
        packed = b""
        if own is not None:
            buffer = torch.zeros(own.nbytes, dtype=torch.uint8)
            link.pack(own, buffer)
            packed = buffer.numpy().tobytes()
        gathered: list[Any] = [None] * link.size
        dist.all_gather_object(gathered, packed, group=link.group)
        for rank, batch in enumerate(batches):
            if batch is not None:
                link.unpack(batch, torch.frombuffer(bytearray(gathered[rank]), dtype=torch.uint8))
            gathered[rank] = None


_ALGORITHMS: Mapping[str, Callable[[_Plan, _Link], None]] = {
    "broadcast": _by_broadcast,
    "gather_rounds": _by_gather_rounds,
    "gather_object": _by_gather_object,
}
