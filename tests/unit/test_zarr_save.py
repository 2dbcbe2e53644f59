"""Saves in both zarr formats: what lies on disk, and that every bit comes back."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from dist_ckpt import ShardedObject, ShardedTensor, load, save
from dist_ckpt._formats.zarr.metadata import array_dtype
from dist_ckpt.box import Box, boxes_of_flat_range
from dist_ckpt.errors import StorageError, UnknownStrategyError
from tests.unit._zarr import boxes_of, files_of, read_box, read_whole, save_ranks, values

BOTH = pytest.mark.parametrize("version", [1, 2], ids=["zarr2", "zarr3"])

DTYPES = [
    torch.bool, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.float16, torch.float32, torch.float64, torch.bfloat16,
    torch.complex32, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
]  # fmt: skip


def one_rank(**tensors: torch.Tensor) -> list[list[ShardedTensor]]:
    return [[ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tensors.items()]]


def all_bits(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Return elements of any bits there are: NaNs with payloads, infinities, subnormals."""
    if dtype == torch.bool:
        return torch.arange(count) % 3 == 0
    generator = torch.Generator().manual_seed(7)
    data = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return data.view(dtype)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_of_every_dtype_comes_back(
    tmp_path: Path, dtype: torch.dtype, version: int
) -> None:
    """NaN payloads too: bits are moved, never values."""
    data = all_bits(dtype, 1000)
    index = save_ranks(tmp_path / "c", one_rank(w=data), version)

    loaded = read_whole(tmp_path / "c", index, "w")

    assert index.tensors["w"].dtype == str(dtype).removeprefix("torch.")
    assert loaded.dtype == dtype
    assert torch.equal(loaded.view(torch.uint8), data.view(torch.uint8))


@BOTH
def test_uneven_rows(tmp_path: Path, version: int) -> None:
    """Ten rows over four ranks: the last has one; a file each."""
    tensor = values((10, 6))
    boxes = [Box((start, 0), (min(3, 10 - start), 6)) for start in (0, 3, 6, 9)]
    index = save_ranks(tmp_path / "c", [boxes_of(tensor, "w", [box]) for box in boxes], version)

    assert torch.equal(read_whole(tmp_path / "c", index, "w"), tensor)
    assert len(files_of(tmp_path / "c")) == 4 + 2
    assert [chunk.box for chunk in index.tensors["w"].chunks] == [Box((0, 0), (10, 6))]


@BOTH
@pytest.mark.parametrize(
    "boxes",
    [
        [Box((0, j), (4, 2)) for j in (0, 2, 4, 6)],
        [Box((i, j), (2, 4)) for i in (0, 2) for j in (0, 4)],
        [Box((0, 0), (3, 8)), Box((3, 0), (1, 3)), Box((3, 3), (1, 5))],
        [Box((0, 0), (4, 3)), Box((0, 3), (2, 5)), Box((2, 3), (2, 5))],
    ],
    ids=["columns", "blocks", "ragged", "L"],
)
def test_boxes_of_any_layout(tmp_path: Path, boxes: list[Box], version: int) -> None:
    """Columns, a two-dimensional grid, boxes that fit no grid; parts of it come back too."""
    tensor = values((4, 8), torch.bfloat16)
    index = save_ranks(tmp_path / "c", [boxes_of(tensor, "w", [box]) for box in boxes], version)

    assert torch.equal(read_whole(tmp_path / "c", index, "w"), tensor)
    part = Box((1, 2), (2, 5))
    assert torch.equal(read_box(tmp_path / "c", index, "w", part), tensor[part.slices()])


@BOTH
def test_flattened_ranges(tmp_path: Path, version: int) -> None:
    """[0, 13) on one rank, [13, 32) on the other: they share a cell, its owner writes it."""
    tensor = values((4, 8))
    ranks = [
        [one for _, box in boxes_of_flat_range((4, 8), *r) for one in boxes_of(tensor, "w", [box])]
        for r in ((0, 13), (13, 32))
    ]
    index = save_ranks(tmp_path / "c", ranks, version)

    assert torch.equal(read_whole(tmp_path / "c", index, "w"), tensor)
    assert not list((tmp_path / "c").glob(".pieces*")), "what was passed on is gone"


@BOTH
def test_large_flattened_ranges_are_mostly_written_directly(tmp_path: Path, version: int) -> None:
    """Only cells at the ends of ranges are put together from several ranks."""
    tensor = torch.randn(2048, 512)
    cuts = [0, 300_007, 700_001, tensor.numel()]
    ranks = [
        [
            one
            for _, box in boxes_of_flat_range((2048, 512), low, high)
            for one in boxes_of(tensor, "w", [box])
        ]
        for low, high in pairwise(cuts)
    ]
    index = save_ranks(tmp_path / "c", ranks, version)

    assert torch.equal(read_whole(tmp_path / "c", index, "w"), tensor)


@BOTH
def test_prepended_axes(tmp_path: Path, version: int) -> None:
    """One layer a rank, stacked to one array; a file for each layer."""
    layers = [values((3, 5)) + rank for rank in range(2)]
    ranks = [
        [ShardedTensor.from_rank_offsets("w", layer, (0, rank, 2), prepend_axis_num=1)]
        for rank, layer in enumerate(layers)
    ]
    index = save_ranks(tmp_path / "c", ranks, version)

    assert torch.equal(read_whole(tmp_path / "c", index, "w"), torch.stack(layers))
    assert len(files_of(tmp_path / "c")) == 2 + 2


@BOTH
def test_single_values_and_tensors_without_elements(tmp_path: Path, version: int) -> None:
    """A 0-dim tensor is one chunk; an empty one is metadata alone."""
    ranks = [
        [
            ShardedTensor.from_rank_offsets("scale", torch.tensor(2.5), replica_id=rank),
            ShardedTensor.from_rank_offsets("none", torch.zeros(0, 3), replica_id=rank),
        ]
        for rank in range(2)
    ]
    index = save_ranks(tmp_path / "c", ranks, version)

    assert read_whole(tmp_path / "c", index, "scale") == 2.5
    assert read_whole(tmp_path / "c", index, "none").shape == (0, 3)
    assert index.tensors["none"].chunks == ()


@BOTH
def test_zeros_are_stored(tmp_path: Path, version: int) -> None:
    """A chunk that is not there is always damage, never a block of zeros."""
    index = save_ranks(tmp_path / "c", one_rank(w=torch.zeros(4, 4)), version)

    chunks = [n for n in files_of(tmp_path / "c") if n.startswith("w/") and "zar" not in n]
    assert len(chunks) == 1
    assert not read_whole(tmp_path / "c", index, "w").any()


@BOTH
def test_strided_conjugated_and_negated_views(tmp_path: Path, version: int) -> None:
    """What a tensor means is stored, whatever its memory looks like."""
    numbers = torch.randn(6, 4, dtype=torch.complex64)
    tensors = {
        "transposed": values((4, 6)).t(),
        "sliced": values((9, 9))[1:8:2, ::3],
        "conjugated": numbers.conj(),
        "negated": numbers.conj().imag,
        "expanded": torch.ones(1, 5).expand(4, 5),
        "parameter": torch.nn.Parameter(values((3, 3))),
    }
    index = save_ranks(tmp_path / "c", one_rank(**tensors), version)

    for key, tensor in tensors.items():
        assert torch.equal(read_whole(tmp_path / "c", index, key), tensor.detach())


@BOTH
def test_any_holder_may_write(tmp_path: Path, version: int) -> None:
    """Large tensors that all ranks hold are shared out along the grid."""
    tensor = torch.randn(4096, 2048 + 1024)
    ranks = [
        [replace(ShardedTensor.from_rank_offsets("w", tensor, replica_id=rank), writer="any")]
        for rank in range(3)
    ]
    index = save_ranks(tmp_path / "c", ranks, version)

    assert torch.equal(read_whole(tmp_path / "c", index, "w"), tensor)


@BOTH
def test_what_is_written_of_a_tensor_with_gaps_is_told(tmp_path: Path, version: int) -> None:
    """Without a check of coverage, a save may hold parts of a tensor."""
    tensor = values((10, 4))
    index = save_ranks(tmp_path / "c", [boxes_of(tensor, "w", [Box((3, 0), (4, 4))])], version)

    stored = index.tensors["w"]
    assert [chunk.box for chunk in stored.chunks] == [Box((3, 0), (4, 4))]
    assert stored.shape == (10, 4)
    assert torch.equal(read_box(tmp_path / "c", index, "w", Box((4, 1), (2, 2))), tensor[4:6, 1:3])


@BOTH
def test_the_same_state_gives_the_same_bytes(tmp_path: Path, version: int) -> None:
    """Plans depend on descriptions alone."""
    ranks = [
        [
            one
            for _, box in boxes_of_flat_range((7, 9), *r)
            for one in boxes_of(values((7, 9)), "w", [box])
        ]
        for r in ((0, 20), (20, 41), (41, 63))
    ]
    for name in ("a", "b"):
        save_ranks(tmp_path / name, ranks, version)

    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    for name in files_of(tmp_path / "a"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_v2_is_as_megatron_wrote_it(tmp_path: Path) -> None:
    """The golden file's metadata, and chunks of plain little-endian elements."""
    tensor = values((4, 8), torch.bfloat16)
    boxes = [Box((0, j), (4, 4)) for j in (0, 4)]
    save_ranks(tmp_path / "c", [boxes_of(tensor, "layer.dense.weight", [b]) for b in boxes], 1)

    folder = tmp_path / "c" / "layer.dense.weight"
    assert json.loads((folder / ".zarray").read_text()) == {
        "chunks": [4, 4], "compressor": None, "dtype": "bfloat16", "fill_value": None,
        "filters": None, "order": "C", "shape": [4, 8], "zarr_format": 2,
    }  # fmt: skip
    for name, box in zip(("0.0", "0.1"), boxes, strict=True):
        stored = torch.frombuffer(bytearray((folder / name).read_bytes()), dtype=torch.bfloat16)
        assert torch.equal(stored.reshape(4, 4), tensor[box.slices()])


def test_v3_has_shards_with_small_parts_and_checked_indexes(tmp_path: Path) -> None:
    """A file of many inner chunks."""
    save_ranks(tmp_path / "c", one_rank(w=torch.zeros(4096, 1024)), 2)

    document = json.loads((tmp_path / "c" / "w" / "zarr.json").read_text())
    (codec,) = document["codecs"]
    assert document["chunk_grid"]["configuration"]["chunk_shape"] == [4096, 1024]
    assert codec["name"] == "sharding_indexed"
    assert codec["configuration"]["chunk_shape"] == [512, 1024]
    assert codec["configuration"]["index_codecs"][-1] == {"name": "crc32c"}


@pytest.mark.parametrize(
    ("name", "stored"),
    [("float8_e4m3fn", "float8_e4m3fn"), ("float8_e8m0fnu", "uint8"), ("complex32", "uint32")],
)
def test_dtypes_without_a_name_in_zarr_are_stored_as_integers(name: str, stored: str) -> None:
    """As wide as they are; the index tells what they mean."""
    assert array_dtype(name) == stored


@BOTH
@pytest.mark.parametrize("key", ["../escape", "index.json", "", "a/.zarray", "x" * 300])
def test_keys_that_are_no_path_are_stored_all_the_same(
    tmp_path: Path, key: str, version: int
) -> None:
    """Below the checkpoint, whatever the key says."""
    index = save_ranks(tmp_path / "c", one_rank(**{key: values((2, 2))}), version)

    assert torch.equal(read_whole(tmp_path / "c", index, key), values((2, 2)))
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@BOTH
def test_what_is_plain_needs_no_tensorstore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """Neither to write it nor to read it; what is not says which package is missing."""
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    index = save_ranks(tmp_path / "c", one_rank(w=values((3, 5))), version)

    assert torch.equal(read_whole(tmp_path / "c", index, "w"), values((3, 5)))
    document = tmp_path / "c" / "w" / (".zarray" if version == 1 else "zarr.json")
    told = json.loads(document.read_text())
    document.write_text(json.dumps({**told, "fill_value": 1.0}))
    with pytest.raises(UnknownStrategyError, match=re.escape("pip install 'dist-ckpt[zarr]'")):
        read_whole(tmp_path / "c", index, "w")


@BOTH
def test_a_directory_that_takes_no_chunk_is_a_storage_error(tmp_path: Path, version: int) -> None:
    """The error names the key; here the chunk's name is taken by a folder."""
    tensors = one_rank(w=values((4, 4)))
    (tmp_path / "c" / "w" / ("0.0" if version == 1 else "c.0.0") / "x").mkdir(parents=True)

    with pytest.raises(StorageError, match="'w'"):
        save_ranks(tmp_path / "c", tensors, version)


@BOTH
@pytest.mark.parametrize(
    "key", ["", "..", "/abs", "a//b", "x" * 300, "w", "w/0", "w/0.0", "index.json", "m\0"]
)
def test_objects_under_any_key(tmp_path: Path, key: str, version: int) -> None:
    """Neither the document's array nor the file for Megatron-Core meets anything else."""
    state = {
        "object": ShardedObject(key, {"a": torch.ones(3)}, (1,), (0,)),
        "tensor": ShardedTensor.from_rank_offsets("w", torch.ones(3)),
    }
    save(state, tmp_path / "c", sharded_strategy=("zarr", version))

    loaded = load(
        {
            "object": ShardedObject(key, None, (1,), (0,)),
            "tensor": ShardedTensor.from_rank_offsets("w", torch.zeros(3)),
        },
        tmp_path / "c",
    )

    assert torch.equal(loaded["object"]["a"], torch.ones(3))
    assert torch.equal(loaded["tensor"], torch.ones(3))
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
