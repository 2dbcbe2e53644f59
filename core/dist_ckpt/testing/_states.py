"""States of which each rank holds a part, for the conformance kit.

Here: the cases, as functions of rank and number of ranks; what a loaded state is compared with. Not
here: the tests (``testing.strategies``). Nothing communicates.

A state is cut from whole tensors that every rank can make, so what a rank must get on another
layout is known without any rank having saved it that way.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from dist_ckpt.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from dist_ckpt.types import ShardedStateDict

__all__ = ["CASES", "bits_of", "cleared", "differences", "expected", "random_bits"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of which no two near elements are equal."""
    return (torch.arange(math.prod(shape)) * 7 % 251).to(dtype).reshape(shape)


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return elements of any bits, the same ones each time; NaN payloads are among them."""
    generator = torch.Generator().manual_seed(7)
    nbytes = math.prod(shape) * dtype.itemsize
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return (data % 2 if dtype == torch.bool else data).view(dtype).view(shape)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bits as integers: these can be compared, NaN included."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(_BITS[min(tensor.element_size(), 8)])


def _box(key: str, whole: torch.Tensor, *bounds: tuple[int, int], **options: Any) -> ShardedTensor:
    """Return the part of ``whole`` within ``bounds`` of its first axes, as no regular grid."""
    part = whole[tuple(slice(a, b) for a, b in bounds)].clone()
    offset = [a for a, _ in bounds] + [0] * (whole.ndim - len(bounds))
    shapes = (tuple(part.shape), tuple(whole.shape), tuple(offset))
    return ShardedTensor(key, part, part.dtype, *shapes, None, **options)


def _share(n: int, rank: int, size: int) -> tuple[int, int]:
    return n * rank // size, n * (rank + 1) // size


def plain(rank: int, size: int) -> ShardedStateDict:
    """Return rows and columns of a regular grid."""
    rows, columns = numbered(12, 5), numbered(3, 24, dtype=torch.int64)
    data = (rows.chunk(size)[rank].clone(), columns.chunk(size, 1)[rank].clone())
    return {
        "rows": ShardedTensor.from_rank_offsets("rows", data[0], (0, rank, size)),
        "deep": {"er": [ShardedTensor.from_rank_offsets("columns", data[1], (1, rank, size))]},
        "step": 7,
    }


def uneven(rank: int, size: int) -> ShardedStateDict:
    """Return rows and blocks that the number of ranks does not divide; a rank may have none."""
    across, down = (2, size // 2) if size % 2 == 0 else (1, size)
    block = _share(7, rank % across, across), _share(9, rank // across, down)
    return {
        "rows": _box("rows", numbered(10, 3), _share(10, rank, size)),
        "few": _box("few", numbered(3, 2), _share(3, rank, size)),
        "blocks": _box("blocks", numbered(7, 9), *block),
    }


def prepended(rank: int, size: int) -> ShardedStateDict:
    """Return layers of a stack: the first axis is one that no local tensor has."""
    whole = numbered(12, 3, 4)
    return {
        "layers": [
            ShardedTensor.from_rank_offsets(
                "layers", whole[n].clone(), (0, n, 12), prepend_axis_num=1
            )
            for n in range(*_share(12, rank, size))
        ]
    }


def flattened(rank: int, size: int) -> ShardedStateDict:
    """Return ranges of a flattened tensor, and of the flattened shard that each rank has."""
    whole, rows = numbered(5, 7), numbered(12, 5)
    a, b = _share(35, rank, size)
    mine = rows.chunk(size)[rank]
    middle = mine.numel() // 3
    return {
        "all": ShardedTensor.from_rank_offsets_flat(
            "all", whole.flatten()[a:b].clone(), (5, 7), flattened_range=slice(a, b)
        ),
        "own": [
            ShardedTensor.from_rank_offsets_flat(
                "own",
                mine.flatten()[cut].clone(),
                tuple(mine.shape),
                (0, rank, size),
                flattened_range=cut,
            )
            for cut in (slice(0, middle), slice(middle, mine.numel()))
        ],
    }


def replicated(rank: int, size: int) -> ShardedStateDict:
    """Return tensors that all ranks have, and one that each pair of ranks has."""
    half, replica = (rank // 2, rank % 2) if size % 2 == 0 else (rank, 0)
    halves = max(size // 2, 1) if size % 2 == 0 else size
    make = ShardedTensor.from_rank_offsets
    return {
        "main": make("main", numbered(3, 4), replica_id=rank),
        "late main": make("late main", numbered(4), replica_id=size - 1 - rank),
        "any": make("any", numbered(9, 2), replica_id=rank + 1, writer="any"),
        "first": make("first", numbered(2, 2), replica_id=rank + 1, writer="first"),
        "pairs": make(
            "pairs",
            numbered(12, 2).chunk(halves)[half].clone(),
            (0, half, halves),
            replica_id=(0, replica),
        ),
    }


def factories(rank: int, size: int) -> ShardedStateDict:
    """Return a tensor that is stored as two: its halves are cut apart, each over all ranks."""
    gate, up = (one.chunk(size)[rank] for one in numbered(24, 3).chunk(2))

    def build(key: str, data: torch.Tensor | None, replica_id: Any) -> ShardedStateDict:
        parts = (None, None) if data is None else data.chunk(2)
        return {
            name: ShardedTensor(
                f"{key}.{name}",
                None if part is None else part.clone(),
                torch.float32,
                (12 // size, 3),
                (12, 3),
                (12 // size * rank, 0),
                (size, 1),
                replica_id,
            )
            for name, part in zip(("gate", "up"), parts, strict=True)
        }

    def merge(loaded: ShardedStateDict) -> torch.Tensor:
        return torch.cat([loaded["gate"], loaded["up"]])

    return {"fc": ShardedTensorFactory("fc", torch.cat([gate, up]), build, merge)}


def objects(rank: int, size: int) -> ShardedStateDict:
    """Return cells of an array of objects, one that all ranks have, and one that is not stored."""

    def value(n: int) -> dict[str, Any]:
        return {"n": n, "pair": (n, None), "seed": torch.arange(n + 1), "raw": bytes([n])}

    return {
        "cells": [
            ShardedObject("some/cells", value(n), (12,), (n,))
            for n in range(*_share(12, rank, size))
        ],
        "shared": ShardedObject("shared", [1.5, "x", {2: True}], (1,), (0,), replica_id=rank),
        "here": LocalNonpersistentObject(f"of rank {rank} of {size}"),
        "tensor": ShardedTensor.from_rank_offsets("tensor", numbered(3), replica_id=rank),
    }


CASES: dict[str, Callable[[int, int], ShardedStateDict]] = {
    "plain": plain,
    "uneven": uneven,
    "prepended": prepended,
    "flattened": flattened,
    "replicated": replicated,
    "factories": factories,
    "objects": objects,
}


def _mapped(function: Callable[[Any], Any], node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _mapped(function, value) for key, value in node.items()}
    if isinstance(node, list):
        return [_mapped(function, value) for value in node]
    return function(node)


def cleared(state: ShardedStateDict) -> ShardedStateDict:
    """Return a request for the same: other bits in the tensors, or none at each second one."""
    count = 0

    def clear(leaf: Any) -> Any:
        nonlocal count
        if isinstance(leaf, ShardedTensor) and leaf.data is not None:
            count += 1
            data = bits_of(leaf.data).clone().bitwise_not_() if leaf.data.numel() else leaf.data
            fresh = data.view(leaf.dtype) if leaf.dtype != torch.bool else leaf.data.logical_not()
            leaf.data = fresh.view(leaf.data.shape) if count % 2 else None
        elif isinstance(leaf, ShardedTensorFactory) and isinstance(leaf.data, torch.Tensor):
            leaf.data = torch.full_like(leaf.data, -1)
        elif isinstance(leaf, ShardedObject):
            return leaf.without_data()
        elif not isinstance(leaf, LocalNonpersistentObject):
            return None  # of the common part: the stored one comes
        return leaf

    cleaned: ShardedStateDict = _mapped(clear, state)
    return cleaned


def expected(state: ShardedStateDict) -> Any:
    """Return what must be loaded: the values themselves."""

    def value(leaf: Any) -> Any:
        if isinstance(leaf, LocalNonpersistentObject):
            return leaf.unwrap()
        if isinstance(leaf, ShardedTensor | ShardedTensorFactory | ShardedObject):
            return leaf.data
        return leaf

    return _mapped(value, state)


def differences(wanted: Any, found: Any, path: str = "") -> list[str]:
    """Return in what two nested values differ: types, keys, and tensors to the bit."""
    if type(wanted) is not type(found):
        return [f"{path}: {type(wanted).__name__} expected, {type(found).__name__} found"]
    if isinstance(wanted, torch.Tensor):
        return _tensor_differences(wanted, found, path)
    if isinstance(wanted, dict | list | tuple):
        ours, theirs = _items(wanted), _items(found)
        if ours.keys() != theirs.keys():
            return [f"{path}: keys {list(ours)} expected, {list(theirs)} found"]
        return [
            line
            for key, value in ours.items()
            for line in differences(value, theirs[key], f"{path}.{key}")
        ]
    return [] if repr(wanted) == repr(found) else [f"{path}: {wanted!r} expected, {found!r} found"]


def _items(node: Any) -> dict[Any, Any]:
    return dict(node.items() if isinstance(node, dict) else enumerate(node))


def _tensor_differences(wanted: torch.Tensor, found: torch.Tensor, path: str) -> list[str]:
    ours, theirs = ((one.dtype, tuple(one.shape)) for one in (wanted, found))
    if ours != theirs:
        return [f"{path}: {ours} expected, {theirs} found"]
    same = torch.equal(bits_of(wanted), bits_of(found))
    return [] if same else [f"{path}: other values"]
