"""Arrays of ours are read as runs of bytes, and whatever is not as it must be is left to others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from dist_ckpt import ShardedTensor
from dist_ckpt._formats.reading import Destination, Target, read_wanted
from dist_ckpt._formats.verification import VerifiedStore
from dist_ckpt._formats.zarr.known import read_known
from dist_ckpt._sharding.index import CheckpointIndex
from dist_ckpt._sharding.wanted import Wanted, boxes_of
from dist_ckpt.box import Box
from dist_ckpt.errors import CorruptedCheckpointError
from dist_ckpt.storage import Extent, open_store
from dist_ckpt.storage.checksums import BLOCK_NBYTES, FileSum, sum_of_file
from tests.unit._zarr import files_of, save_ranks, values

BOTH = pytest.mark.parametrize("version", [1, 2], ids=["zarr2", "zarr3"])


def sums(directory: Path) -> dict[str, FileSum]:
    return {name: sum_of_file(directory / name) for name in files_of(directory)}


def saved(
    directory: Path, tensors: Mapping[str, torch.Tensor], version: int
) -> tuple[CheckpointIndex, dict[str, FileSum]]:
    held = [ShardedTensor.from_rank_offsets(key, one) for key, one in tensors.items()]
    index = save_ranks(directory, [held], version)
    return index, sums(directory)


def chunk(directory: Path, key: str = "w") -> Path:
    return next(one for one in sorted((directory / key).iterdir()) if "0" in one.name)


class Asked:
    """Boxes of tensors, each with memory of its own, full of ones."""

    def __init__(self, index: CheckpointIndex, boxes: Sequence[tuple[str, Box]]) -> None:
        self.index, self.boxes = index, list(boxes)
        keys = [key for key, _ in boxes]
        self.wanted: Wanted = boxes_of(keys, [box for _, box in boxes], index.tensors)
        self.memory = [
            torch.full(box.shape, -1, dtype=getattr(torch, index.tensors[key].dtype))
            for key, box in boxes
        ]
        self.address = np.array([one.data_ptr() for one in self.memory], dtype=np.int64)

    def known(self, directory: Path, files: Mapping[str, FileSum]) -> tuple[int, list[bool]]:
        store = VerifiedStore(open_store(directory), files, directory)
        chosen = np.ones(len(self.boxes), dtype=bool)
        nbytes, filled = read_known(
            self.wanted, self.address, chosen, self.index.tensors, store, thread_count=3
        )
        return nbytes, filled.tolist()

    def read(self, directory: Path, files: Mapping[str, FileSum]) -> None:
        def destinations(rows: Sequence[int]) -> list[Destination]:
            return [Destination(*self.boxes[row], self.memory[row]) for row in rows]

        target = Target(self.address, np.ones(len(self.boxes), dtype=bool), destinations)
        read_wanted(
            self.wanted, target, self.index, directory, files=files, thread_count=3
        )  # fmt: skip


def whole(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, Box]]:
    return [(key, Box((0,) * one.dim(), tuple(one.shape))) for key, one in tensors.items()]


@BOTH
def test_whole_arrays_of_all_sizes_are_runs(tmp_path: Path, version: int) -> None:
    """Scalars, vectors, and matrices of several files."""
    tensors = {
        "scalar": torch.tensor(7.0),
        "vector": values((1000,)),
        "matrix": torch.randn(1500, 1024),
        "large": torch.randn(5000, 1024),
        "bytes": values((3, 5, 7), torch.uint8),
    }
    index, files = saved(tmp_path, tensors, version)
    asked = Asked(index, whole(tensors))

    nbytes, filled = asked.known(tmp_path, files)

    assert filled == [True] * len(tensors)
    assert nbytes == sum(one.nbytes for one in tensors.values())
    for found, expected in zip(asked.memory, tensors.values(), strict=True):
        assert torch.equal(found, expected)


@BOTH
def test_rows_are_runs_and_columns_are_left(tmp_path: Path, version: int) -> None:
    """Of the same array."""
    tensor = torch.randn(600, 64)
    index, files = saved(tmp_path, {"w": tensor}, version)
    rows, columns = Box((17, 0), (500, 64)), Box((0, 3), (600, 2))
    asked = Asked(index, [("w", rows), ("w", columns)])

    assert asked.known(tmp_path, files) == (500 * 64 * 4, [True, False])
    assert torch.equal(asked.memory[0], tensor[rows.slices()])
    asked.read(tmp_path, files)
    assert torch.equal(asked.memory[1], tensor[columns.slices()])


@BOTH
def test_of_equal_documents_one_is_read(tmp_path: Path, version: int) -> None:
    """The manifest says that they are equal: the others may be gone."""
    tensors = {key: torch.randn(4, 6) for key in ("a", "b", "c")}
    index, files = saved(tmp_path, tensors, version)
    for key in ("b", "c"):
        (tmp_path / key / (".zarray" if version == 1 else "zarr.json")).unlink()
    asked = Asked(index, whole(tensors))

    assert asked.known(tmp_path, files)[1] == [True] * 3
    assert all(torch.equal(*pair) for pair in zip(asked.memory, tensors.values(), strict=True))


@BOTH
def test_without_checksums_nothing_is_read_here(tmp_path: Path, version: int) -> None:
    """All is left to those who look at each file."""
    tensor = values((8, 6))
    index, _ = saved(tmp_path, {"w": tensor}, version)
    asked = Asked(index, whole({"w": tensor}))

    assert asked.known(tmp_path, {}) == (0, [False])
    assert (asked.memory[0] == -1).all()
    asked.read(tmp_path, {})
    assert torch.equal(asked.memory[0], tensor)


@BOTH
@pytest.mark.parametrize("what", ["flip", "cut", "gone"])
def test_damage_is_left_and_then_named(tmp_path: Path, version: int, what: str) -> None:
    """By the reader of single arrays; no other array is taken from a load that saw damage."""
    tensors = {"w": values((8, 6)), "x": values((8, 6))}
    index, files = saved(tmp_path, tensors, version)
    path = chunk(tmp_path)
    data = bytearray(path.read_bytes())
    data[5] ^= 4
    path.unlink()
    if what != "gone":
        path.write_bytes(data if what == "flip" else data[:7])
    asked = Asked(index, whole(tensors))

    assert asked.known(tmp_path, files) == (0, [False, False])
    with pytest.raises(CorruptedCheckpointError, match="'w'"):
        asked.read(tmp_path, files)


@BOTH
def test_a_file_longer_than_its_cell_is_left(tmp_path: Path, version: int) -> None:
    """Even if the manifest says so, too."""
    tensor = values((8, 6))
    index, _ = saved(tmp_path, {"w": tensor}, version)
    with chunk(tmp_path).open("ab") as file:
        file.write(b"more")

    asked = Asked(index, whole({"w": tensor}))

    assert asked.known(tmp_path, sums(tmp_path)) == (0, [False])


def test_a_shard_with_another_index_is_left(tmp_path: Path) -> None:
    """Checksums prove that it is as it was written, not how it was laid out."""
    tensor = values((8, 6))
    index, _ = saved(tmp_path, {"w": tensor}, 2)
    data = bytearray(chunk(tmp_path).read_bytes())
    data[-1] ^= 1
    chunk(tmp_path).write_bytes(data)
    asked, files = Asked(index, whole({"w": tensor})), sums(tmp_path)

    assert asked.known(tmp_path, files) == (0, [False])
    with pytest.raises(CorruptedCheckpointError, match="'w'"):
        asked.read(tmp_path, files)


@BOTH
def test_a_part_is_not_read_where_the_rest_was_never_written(tmp_path: Path, version: int) -> None:
    """The index says which boxes there are; a cell may reach further."""
    tensor = values((8, 6))
    part = ShardedTensor.from_rank_offsets("w", tensor[:4], (0, 0, 2))
    index = save_ranks(tmp_path, [[part]], version)
    boxes = [("w", Box((1, 0), (3, 6))), ("w", Box((0, 0), (8, 6)))]
    asked = Asked(index, boxes)

    assert asked.known(tmp_path, sums(tmp_path))[1] == [True, False]
    assert torch.equal(asked.memory[0], tensor[1:4])


def test_a_row_of_a_shard_costs_its_block_and_the_index(tmp_path: Path) -> None:
    """Not the block that the index is in."""
    tensor = torch.randn(1024, 512)
    index, files = saved(tmp_path, {"w": tensor}, 2)
    asked = Asked(index, [("w", Box((2, 0), (1, 512)))])
    read: list[int] = []
    store = open_store(tmp_path)
    plain = store.read_ranges

    def watched(name: str, extents: Sequence[Extent]) -> None:
        if name.startswith("w/c"):
            read.extend(memoryview(one.buffer).nbytes for one in extents)
        plain(name, extents)

    store.read_ranges = watched  # type: ignore[method-assign]
    verified = VerifiedStore(store, files)
    chosen = np.ones(1, dtype=bool)

    _, filled = read_known(
        asked.wanted, asked.address, chosen, index.tensors, verified, thread_count=1
    )

    assert filled.all()
    assert torch.equal(asked.memory[0], tensor[2:3])
    assert sorted(read) == [20, BLOCK_NBYTES]
