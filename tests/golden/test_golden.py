"""Checkpoints that real Megatron-Core releases wrote: every value, on every layout."""

from __future__ import annotations

import math
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_ckpt import (
    CorruptedCheckpointError,
    LoadOptions,
    MismatchError,
    ShardedObject,
    ShardedTensor,
    UnsafeContentError,
    load,
    load_common_state_dict,
    load_plain_tensors,
    load_sharded_metadata,
)
from dist_ckpt._formats.torch_dist import read
from dist_ckpt.serialization import load_sharded_objects, load_tensors_metadata
from tests.multiprocess._world import run_ranks

HERE = Path(__file__).parent
ZARR = ("mcore-0.5.0-zarr", "mcore-0.12.0-zarr")
TORCH_DIST = ("mcore-0.15.0-torch_dist", "mcore-main-torch_dist")
FLATTENED = ("mcore-0.12.0-zarr", "mcore-0.15.0-torch_dist")
FOLDERS = (*ZARR, *TORCH_DIST)

FLAT_KEY = "optimizer.state.fp32_param.layer.dense.weight"
LAYERS = "layers.mlp.weight"
TENSORS = {
    "embedding.weight": ((8, 6), torch.float32),
    "layer.dense.weight": ((4, 8), torch.bfloat16),
    "layer.dense.bias": ((5,), torch.float32),
    "layer.half": ((4, 3), torch.float16),
    "position_ids": ((7,), torch.int64),
    LAYERS: ((2, 3, 5), torch.float32),
    "optimizer.state.exp_avg.embedding.weight": ((8, 6), torch.float32),
}
COMMON = {
    "iteration": 7,
    "lr": 0.125,
    "args": {"hidden_size": 6, "betas": [0.9, 0.95], "name": "golden"},
}
RNG = [{"seed": 1234 + rank, "rank": rank} for rank in range(2)]


def tensors_of(folder: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = dict(TENSORS)
    if folder in TORCH_DIST:
        found["layer.scale"] = ((), torch.float32)
    if folder in FLATTENED:
        found[FLAT_KEY] = ((4, 8), torch.float32)
    return found


def value_of(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor by the formula in README.md."""
    base = zlib.crc32(key.encode()) % 97
    flat = (torch.arange(math.prod(shape), dtype=torch.float64) + base) / 8
    return flat.reshape(shape).to(dtype)


def cut(size: int, rank: int, world: int) -> tuple[int, int]:
    """Return an uneven share of ``size``; some are empty."""
    bounds = [min(size, math.ceil(size * (i / world) ** 1.5)) for i in range(world + 1)]
    return bounds[rank], bounds[rank + 1]


def along(axis: int) -> Callable[..., ShardedTensor]:
    """Shard along an axis, or replicate what does not have it."""

    def shard(key: str, whole: torch.Tensor, rank: int, world: int) -> ShardedTensor:
        if whole.dim() <= axis:
            return replicated(key, whole, rank, world)
        start, stop = cut(whole.shape[axis], rank, world)
        shape, offset = list(whole.shape), [0] * whole.dim()
        shape[axis], offset[axis] = stop - start, start
        target = torch.zeros(shape, dtype=whole.dtype)
        return ShardedTensor(
            key, target, whole.dtype, tuple(shape), tuple(whole.shape), tuple(offset), None
        )

    return shard


def replicated(key: str, whole: torch.Tensor, rank: int, world: int) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.zeros_like(whole), replica_id=rank)


def flattened(key: str, whole: torch.Tensor, rank: int, world: int) -> ShardedTensor:
    """Cut the flattened tensor at places that no writer cut it."""
    if not whole.dim():
        return replicated(key, whole, rank, world)
    shape = tuple(whole.shape)
    start, stop = cut(whole.numel(), rank, world)
    return ShardedTensor(
        key, torch.zeros(stop - start, dtype=whole.dtype), whole.dtype, shape, shape,
        (0,) * len(shape), (1,) * len(shape), flattened_range=slice(start, stop),
    )  # fmt: skip


def layer_by_layer(key: str, whole: torch.Tensor, rank: int, world: int) -> list[ShardedTensor]:
    """One prepended axis: rank ``r`` holds layer ``r``, one rank both; further ranks a replica."""
    layers = range(2) if world == 1 else (rank % 2,)
    return [
        ShardedTensor.from_rank_offsets(
            key, torch.zeros(3, 5), (0, layer, 2), replica_id=rank // 2, prepend_axis_num=1
        )
        for layer in layers
    ]


def copied(folder: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(HERE / folder, tmp_path / folder))


LAYOUTS = (along(0), along(1), replicated, flattened)


def check(loaded: torch.Tensor, asked: ShardedTensor, whole: torch.Tensor) -> None:
    expected = whole
    if asked.flattened_range is not None:
        expected = whole.reshape(-1)[asked.flattened_range]
    elif asked.axis_fragmentations is None or asked.prepend_axis_num:
        expected = whole[asked.global_slice()]
    assert torch.equal(loaded, expected), asked


def load_sharded(rank: int, world: int, folder: str) -> None:
    """Load every tensor in every layout, with objects and the common part, and look at each."""
    wholes = {key: value_of(key, *described) for key, described in tensors_of(folder).items()}
    for layout in LAYOUTS:
        asked = {key: layout(key, whole, rank, world) for key, whole in wholes.items()}
        mine = [ShardedObject("rng_state", None, (1, 2), (0, cell), rank // 2) for cell in
                (range(2) if world == 1 else (rank % 2,))]  # fmt: skip
        loaded = load({"model": asked, "rng": mine}, HERE / folder)
        for key, whole in wholes.items():
            check(loaded["model"][key], asked[key], whole)
        assert loaded["rng"] == [RNG[one.global_offset[1]] for one in mine]
        assert {key: loaded[key] for key in COMMON} == COMMON
    layers = layer_by_layer(LAYERS, wholes[LAYERS], rank, world)
    for one, data in zip(layers, load({"l": layers}, HERE / folder)["l"], strict=True):
        check(data, one, wholes[LAYERS])


@pytest.mark.parametrize("folder", FOLDERS)
def test_whole(folder: str) -> None:
    """Every tensor has every bit; nothing else is there, the lock folder of a writer least."""
    tensors = load_plain_tensors(HERE / folder)

    assert tensors.keys() == tensors_of(folder).keys()
    for key, (shape, dtype) in tensors_of(folder).items():
        assert tensors[key].dtype == dtype
        assert torch.equal(tensors[key], value_of(key, shape, dtype)), key


@pytest.mark.parametrize("folder", TORCH_DIST)
def test_without_torch_load(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every record's payload is found by its directory; small ones, too, if one insists."""
    monkeypatch.setattr(read, "_SMALL_RECORD_NBYTES", 0)
    monkeypatch.setattr(torch, "load", None)

    for key, tensor in load_plain_tensors(HERE / folder).items():
        assert torch.equal(tensor, value_of(key, tuple(tensor.shape), tensor.dtype)), key


@pytest.mark.multiprocess
@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_on_any_layout(folder: str, world: int) -> None:
    """Rows, columns, replicas, flattened ranges, layers; objects and the common part with them."""
    run_ranks(load_sharded, world, folder)


class Custom:
    """Not a plain value."""


def load_own_cell(rank: int, world: int, path: str) -> None:
    """Only rank 1 wants what needs pickle; every rank is told."""
    own = ShardedObject("rng_state", None, (1, 2), (0, rank))
    with pytest.raises(UnsafeContentError, match=r"rng_state/shard_0\.1_1.*Custom.*allow_pickle"):
        load({"o": own}, path)


@pytest.mark.multiprocess
def test_what_one_rank_may_not_load_is_told_to_all(tmp_path: Path) -> None:
    """No rank waits for one that has refused an object."""
    path = copied("mcore-0.5.0-zarr", tmp_path)
    torch.save(Custom(), path / "rng_state" / "shard_0.1_1.pt")

    run_ranks(load_own_cell, 2, str(path))


@pytest.mark.parametrize("folder", FOLDERS)
def test_common(folder: str) -> None:
    """From ``common.pt``, or from the object ``common_state`` where there is no such file."""
    assert load_common_state_dict(HERE / folder) == COMMON


@pytest.mark.parametrize("folder", FOLDERS)
def test_metadata(folder: str) -> None:
    """Tensors in their original shapes, objects by unique key; the common part is no object."""
    tensors = load_tensors_metadata(HERE / folder)
    both = load_sharded_metadata(HERE / folder)

    described = {key: (one.global_shape, one.dtype) for key, one in tensors.items()}
    assert described == tensors_of(folder)
    assert both.keys() - tensors.keys() == {"rng_state/shard_0.0_1.2", "rng_state/shard_0.1_1.2"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_is_missing_when_all_is_asked_for(folder: str) -> None:
    """The strictest mode accepts a request for all that the metadata lists."""
    request: dict[str, Any] = dict(load_sharded_metadata(HERE / folder))

    loaded = load(request, HERE / folder, strict="raise_all")

    assert loaded.keys() == request.keys() | COMMON.keys()


@pytest.mark.parametrize("folder", FOLDERS)
def test_objects_alone(folder: str) -> None:
    """Objects come out in their nesting, and the rest of the request as it was."""
    cell = ShardedObject("rng_state", None, (1, 2), (0, 1))

    found, rest = load_sharded_objects({"a": [cell], "b": 1}, HERE / folder)

    assert (found, rest) == ({"a": [RNG[1]]}, {"b": 1})


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("common", [None, ("torch", 1)])
def test_by_the_name_of_the_strategy(folder: str, common: tuple[str, int] | None) -> None:
    """Naming the format that is found there changes nothing."""
    key = "embedding.weight"
    backend = ("zarr", 1) if folder in ZARR else ("torch_dist", 1)
    request = {"w": ShardedTensor.from_rank_offsets(key, torch.zeros(8, 6))}

    loaded = load(request, HERE / folder, backend, common)

    assert torch.equal(loaded["w"], value_of(key, (8, 6), torch.float32))
    assert loaded["iteration"] == 7


@pytest.mark.parametrize("folder", FLATTENED)
def test_a_flattened_tensor_has_its_original_shape_only(folder: str) -> None:
    """A request for the form in which it is stored does not agree."""
    stored = ShardedTensor.from_rank_offsets(FLAT_KEY, torch.zeros(1, 1, 32))

    with pytest.raises(MismatchError, match=r"\(4, 8\) is stored"):
        load({"x": stored}, HERE / folder)


@pytest.mark.parametrize("folder", ZARR)
def test_chunks_that_nobody_wants_are_not_read(folder: str, tmp_path: Path) -> None:
    """A damaged chunk is noticed by whoever wants it, and by nobody else."""
    path = copied(folder, tmp_path)
    (path / "embedding.weight" / "1.0").write_bytes(b"x" * 200)
    above, below = (
        ShardedTensor.from_rank_offsets("embedding.weight", torch.zeros(4, 6), (0, half, 2))
        for half in range(2)
    )

    rows = load({"w": above}, path, validate_access_integrity=False)["w"]
    with pytest.raises(CorruptedCheckpointError, match="'embedding.weight'"):
        load({"w": below}, path, validate_access_integrity=False)

    assert torch.equal(rows, value_of("embedding.weight", (8, 6), torch.float32)[:4])


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        *((folder, "position_ids/0") for folder in ZARR),
        *((folder, "__1_0.distcp") for folder in TORCH_DIST),
        ("mcore-0.15.0-torch_dist", ".metadata"),
    ],
)
def test_a_missing_file(folder: str, name: str, tmp_path: Path) -> None:
    """Damage is named, never filled with zeros."""
    path = copied(folder, tmp_path)
    (path / name).unlink()

    with pytest.raises(CorruptedCheckpointError):
        load_plain_tensors(path)


@pytest.mark.parametrize("folder", FOLDERS)
def test_pickle_may_be_allowed(folder: str) -> None:
    """Nothing in these checkpoints needs it; allowing it changes nothing."""
    options = LoadOptions(allow_pickle=True)

    assert load_common_state_dict(HERE / folder, options=options) == COMMON
