"""Training states whose every element is known without being kept twice.

Here: shapes, shards, how they are filled and compared. Not here: any contender's description.

An element is taken from one block of random numbers, by its place in its global tensor and by the
number of the tensor: any shard of any layout can be filled, and checked bit by bit, at the speed of
memory.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

MIB = 1 << 20
Shapes = dict[str, tuple[int, ...]]

_BLOCK = (4 << 20) + 37
"""Elements of the block; no power of two, so that tensors begin in different places of it."""

_STRIDE = 1_000_003


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one rank holds of a tensor.

    Attributes:
        number: Of the tensor.
        key: Its name.
        shape: Its global shape.
        axis: Along which it is cut, evenly; None if this rank holds all of it.
        part: Which part this is.
        parts: Of how many.
        data: The part's elements.
    """

    number: int
    key: str
    shape: tuple[int, ...]
    axis: int | None
    part: int
    parts: int
    data: torch.Tensor

    @property
    def span(self) -> tuple[int, int]:
        """First and last element along the axis."""
        length = self.shape[self.axis or 0] if self.shape else 1
        if self.axis is None:
            return 0, length
        step = length // self.parts
        return self.part * step, (self.part + 1) * step


def gpt(mib: int) -> Shapes:
    """Return parameters of a decoder and two Adam moments of each: 2048 are 2.15 GB in 876."""
    width, vocabulary = (704, 50304) if mib >= 1500 else (512, 8192) if mib >= 96 else (128, 2048)
    return _decoder(mib, width=width, vocabulary=vocabulary)


def divisible(mib: int) -> Shapes:
    """Return a state like that of ``gpt`` whose every axis can be cut into 2, 3 and 4 parts."""
    return _decoder(mib, width=768 if mib >= 192 else 192, vocabulary=3072)


def many(count: int) -> Shapes:
    """Return ``count`` vectors of 1 to 16 KB, in steps of 128 bytes."""
    chosen = random.Random(0)  # noqa: S311 - sizes, no secret
    return {f"tensor.{n}": (32 * chosen.randint(8, 128),) for n in range(count)}


def _decoder(mib: int, *, width: int, vocabulary: int) -> Shapes:
    layer = {
        "attn.qkv.weight": (3 * width, width), "attn.qkv.bias": (3 * width,),
        "attn.proj.weight": (width, width), "attn.proj.bias": (width,),
        "mlp.up.weight": (4 * width, width), "mlp.up.bias": (4 * width,),
        "mlp.down.weight": (width, 4 * width), "mlp.down.bias": (width,),
        "ln_1.weight": (width,), "ln_1.bias": (width,),
        "ln_2.weight": (width,), "ln_2.bias": (width,),
    }  # fmt: skip
    ends: Shapes = {
        "wte.weight": (vocabulary, width), "wpe.weight": (1008, width),
        "ln_f.weight": (width,), "ln_f.bias": (width,),
    }  # fmt: skip
    per_layer = 12 * sum(math.prod(shape) for shape in layer.values())
    rest = mib * MIB - 12 * sum(math.prod(shape) for shape in ends.values())
    shapes = dict(ends)
    for number in range(max(1, round(rest / per_layer))):
        shapes |= {f"h.{number}.{name}": shape for name, shape in layer.items()}
    return {
        f"{part}.{name}": shape
        for part in ("model", "exp_avg", "exp_avg_sq")
        for name, shape in shapes.items()
    }


STATES = {"gpt": gpt, "divisible": divisible, "many": many}


def cut(shapes: Shapes, *, layout: str = "whole", part: int = 0, parts: int = 1) -> list[Shard]:
    """Return a rank's shards, with memory that has been touched and holds no right value.

    Args:
        shapes: The global tensors.
        layout: ``whole``; ``rows``: cut along the first axis; ``columns``: along the last one.
        part: Which part this rank has.
        parts: Number of parts.
    """
    shards = []
    for number, (key, shape) in enumerate(shapes.items()):
        axis = {"whole": None, "rows": 0, "columns": len(shape) - 1}[layout]
        local = list(shape)
        if axis is not None:
            local[axis] //= parts
        data = torch.full(local, -1.0)
        shards.append(
            Shard(number=number, key=key, shape=shape, axis=axis, part=part, parts=parts, data=data)
        )
    return shards


def fill(shards: Iterable[Shard]) -> None:
    """Give each element its value."""
    for shard in shards:
        for target, start in _runs(shard):
            for piece, source in _pieces(target, start):
                piece.copy_(source)


def wipe(shards: Iterable[Shard]) -> None:
    """Give each element a wrong value."""
    for shard in shards:
        shard.data.fill_(-1.0)


def wrong(shards: Iterable[Shard]) -> list[str]:
    """Return the keys of shards with an element that has not its bits."""
    return [shard.key for shard in shards if not _is_right(shard)]


def nbytes(shards: Sequence[Shard]) -> int:
    """Return the size of all shards."""
    return sum(shard.data.nbytes for shard in shards)


def _is_right(shard: Shard) -> bool:
    return all(
        torch.equal(piece.view(torch.int32), source.view(torch.int32))
        for target, start in _runs(shard)
        for piece, source in _pieces(target, start)
    )


@cache
def _block() -> torch.Tensor:
    return torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0))


def _runs(shard: Shard) -> Iterable[tuple[torch.Tensor, int]]:
    """Yield contiguous runs of the shard, flat, with where each begins in the block."""
    begin = shard.number * _STRIDE
    low, _ = shard.span
    if shard.axis in (None, 0):
        yield shard.data.view(-1), begin + low * math.prod(shard.shape[1:])
        return
    for row, target in enumerate(shard.data):  # matrices, by columns
        yield target, begin + row * shard.shape[1] + low


def _pieces(target: torch.Tensor, start: int) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    block, done, total = _block(), 0, target.numel()
    while done < total:
        place = (start + done) % _BLOCK
        take = min(total - done, _BLOCK - place)
        yield target[done : done + take], block[place : place + take]
        done += take
