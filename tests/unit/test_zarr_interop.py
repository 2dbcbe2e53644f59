"""zarr-python reads what we write, and we read what it writes in our layout."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dist_ckpt import ShardedTensor
from dist_ckpt._formats.zarr.index import zarr_index_from_json
from dist_ckpt._formats.zarr.scan import scan_arrays
from dist_ckpt.box import Box, boxes_of_flat_range
from tests.unit._zarr import boxes_of, files_of, read_box, read_whole, save_ranks, values

zarr = pytest.importorskip("zarr")

BOTH = pytest.mark.parametrize("version", [1, 2], ids=["zarr2", "zarr3"])
NUMPY = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
]  # fmt: skip


def opened(directory: Path, key: str) -> Any:
    return zarr.open_array(str(directory / key), mode="r")


@BOTH
@pytest.mark.parametrize("name", NUMPY)
def test_zarr_python_reads_every_dtype_it_knows(tmp_path: Path, name: str, version: int) -> None:
    """Whole arrays, in our directory, without any of our documents."""
    tensor = values((5, 7), getattr(torch, name))
    boxes = [Box((0, 0), (3, 7)), Box((3, 0), (2, 7))]
    save_ranks(tmp_path, [boxes_of(tensor, "a/w", [box]) for box in boxes], version)

    array = opened(tmp_path, "a/w")

    assert array.dtype == np.dtype(name)
    assert array.metadata.zarr_format == version + 1
    np.testing.assert_array_equal(array[...], tensor.numpy())


@BOTH
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (3, 4, 5, 6)])
def test_zarr_python_reads_every_shape(
    tmp_path: Path, shape: tuple[int, ...], version: int
) -> None:
    """0-dim and empty ones too."""
    tensor = values(shape)
    save_ranks(tmp_path, [[ShardedTensor.from_rank_offsets("w", tensor)]], version)

    array = opened(tmp_path, "w")

    assert array.shape == shape
    np.testing.assert_array_equal(array[...], tensor.numpy())


@BOTH
def test_zarr_python_reads_flattened_ranges_and_many_inner_chunks(
    tmp_path: Path, version: int
) -> None:
    """Cells of several ranks, shards of several chunks."""
    shape = (3000, 701)
    tensor = torch.randn(shape)
    cuts = [0, 700_123, tensor.numel()]
    ranks = [
        [one for _, box in boxes_of_flat_range(shape, *r) for one in boxes_of(tensor, "w", [box])]
        for r in pairwise(cuts)
    ]
    save_ranks(tmp_path, ranks, version)

    np.testing.assert_array_equal(opened(tmp_path, "w")[...], tensor.numpy())


def test_bits_of_other_dtypes_are_read_as_integers(tmp_path: Path) -> None:
    """What zarr-python has no dtype for and we store as integers."""
    tensor = torch.arange(12, dtype=torch.uint8).view(torch.float8_e8m0fnu).reshape(3, 4)
    save_ranks(tmp_path, [[ShardedTensor.from_rank_offsets("w", tensor)]], 2)

    np.testing.assert_array_equal(opened(tmp_path, "w")[...], tensor.view(torch.uint8).numpy())


def rewritten(source: Path, target: Path, key: str, version: int) -> None:
    """Write an array of ours again with zarr-python, with the metadata we gave it."""
    ours = opened(source, key)
    common = {"shape": ours.shape, "dtype": ours.dtype, "store": str(target / key)}
    if version == 1:
        copy = zarr.create_array(
            **common, zarr_format=2, chunks=ours.chunks, compressors=None, filters=None,
            fill_value=None, order="C",
        )  # fmt: skip
    else:
        copy = zarr.create_array(
            **common, zarr_format=3, chunks=ours.chunks, shards=ours.shards, compressors=None,
            fill_value=0, chunk_key_encoding={"name": "default", "separator": "."},
            config={"write_empty_chunks": True},
        )  # fmt: skip
    copy[...] = ours[...]


@BOTH
@pytest.mark.parametrize("name", ["float32", "int64", "bool", "complex64"])
def test_an_array_of_zarr_python_in_our_layout_loads(
    tmp_path: Path, name: str, version: int
) -> None:
    """Whole and in parts: with our index, and for v2 without."""
    shape = (1100, 601)
    tensor = values(shape, getattr(torch, name))
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    boxes = [Box((0, 0), (800, 601)), Box((800, 0), (300, 601))]
    save_ranks(ours, [boxes_of(tensor, "w", [box]) for box in boxes], version)
    rewritten(ours, theirs, "w", version)

    indexes = [
        zarr_index_from_json((ours / "index.json").read_bytes(), where="x", sizes=files_of(theirs))
    ]
    indexes += [scan_arrays(theirs)] if version == 1 else []

    for index in indexes:
        assert torch.equal(read_whole(theirs, index, "w"), tensor)
        part = Box((790, 5), (30, 500))
        assert torch.equal(read_box(theirs, index, "w", part), tensor[part.slices()])


def test_other_settings_of_v2_load_too(tmp_path: Path) -> None:
    """Compressed, Fortran order, big-endian, nested chunk names: what Megatron-Core might meet."""
    tensor = values((9, 8))
    settings: dict[str, dict[str, Any]] = {
        "compressed": {"compressors": [{"id": "gzip", "level": 1}]},
        "fortran": {"order": "F", "compressors": None},
        "big": {"dtype": ">f4", "compressors": None},
        "nested": {"chunk_key_encoding": {"name": "v2", "separator": "/"}, "compressors": None},
    }
    for key, setting in settings.items():
        merged = {
            "dtype": "<f4",
            "fill_value": 0.0,
            "config": {"write_empty_chunks": True},
            **setting,
        }
        array = zarr.create_array(
            str(tmp_path / key), shape=(9, 8), chunks=(4, 8), zarr_format=2, **merged
        )
        array[...] = tensor.numpy()

    index = scan_arrays(tmp_path)

    assert set(index.tensors) == set(settings)
    for key in settings:
        assert json.loads((tmp_path / key / ".zarray").read_text())["zarr_format"] == 2
        assert torch.equal(read_whole(tmp_path, index, key), tensor)
        assert math.prod(index.tensors[key].shape) == 72
