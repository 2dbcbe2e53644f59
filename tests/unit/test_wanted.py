"""What a rank wants beside what is stored: columns, and runs of bytes into memory."""

from __future__ import annotations

import ctypes
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from dist_ckpt._formats.torch_dist import runs as module
from dist_ckpt._formats.torch_dist.runs import Memory, read_runs
from dist_ckpt._formats.verification import VerifiedStore
from dist_ckpt._sharding.chunks import table_of
from dist_ckpt._sharding.columns import Stored, stored_columns
from dist_ckpt._sharding.index import StoredChunk, StoredTensor
from dist_ckpt._sharding.overlaps import clipped
from dist_ckpt._sharding.packed import Directory, PackedTensors
from dist_ckpt._sharding.packing import pack_index
from dist_ckpt._sharding.wanted import Runs, boxes_of, runs_of, whole_tensors
from dist_ckpt.box import Box
from dist_ckpt.errors import CorruptedCheckpointError
from dist_ckpt.storage import open_store
from dist_ckpt.storage.checksums import BLOCK_NBYTES, FileSum, sum_of

HUGE = 1 << 33


def rows(shape: tuple[int, ...], count: int, at: int) -> tuple[StoredChunk, ...]:
    """Chunks of one row each, the last first."""
    row = (1, *shape[1:])
    boxes = [Box((n, *(0 for _ in shape[1:])), row) for n in reversed(range(count))]
    return tuple(
        StoredChunk(b, f"f{n % 2}", at + n * 4096, 4 * b.numel) for n, b in enumerate(boxes)
    )


TENSORS = {
    "ü/rows": StoredTensor("float32", (3, 4), rows((3, 4), 3, 0)),
    "value": StoredTensor("float32", (), (StoredChunk(Box((), ()), "f1", 50_000, 4),)),
    "none": StoredTensor("int8", (0, 7), ()),
    "wide": StoredTensor("int32", (HUGE, 2, 1), rows((HUGE, 2, 1), 5, 100_000)),
    "object": StoredTensor("uint8", (8,), (StoredChunk(Box((0,), (8,)), "f0", 60_000, 8),), "object"),
}  # fmt: skip


class Bytes:
    """A packed index in memory."""

    where = "index.bin"

    def __init__(self, data: bytes) -> None:
        self.data = data

    def directory(self) -> bytes:
        return self.data[: Directory(self.data, where="x").layout.directory_nbytes]

    def rows(self, position: int, nbytes: int, *, checksum: int | None) -> bytes:
        del checksum
        return self.data[position : position + nbytes]


def told(stored: Stored) -> list[object]:
    """What the columns say of each key, in no order of the chunks."""
    chunks: list[list[object]] = [[] for _ in stored.keys]
    for row, tensor in enumerate(stored.tensor.tolist()):
        axes = int(stored.ndim[tensor])
        box = (*stored.offset[row, :axes].tolist(), *stored.shape[row, :axes].tolist())
        place = stored.files[stored.file[row]], int(stored.position[row])
        chunks[tensor].append((box, place))
    return [
        (key, there, stored.dtypes[stored.dtype[at]] if there else "", stored.shape_of(at),
         bool(stored.is_tensor[at]), sorted(map(repr, chunks[at])))
        for at, (key, there) in enumerate(zip(stored.keys, stored.is_there.tolist(), strict=True))
    ]  # fmt: skip


@pytest.mark.parametrize(
    "keys", [[], ["value"], ["no"], ["wide", "no", "ü/rows", "none"], [*TENSORS, "zz"]]
)
@pytest.mark.parametrize("dense", [1, 1 << 30])
def test_packed_and_plain_indexes_have_the_same_columns(
    keys: list[str], dense: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order that was asked for, whether keys are searched for or looked up."""
    monkeypatch.setattr("dist_ckpt._sharding.columns._DENSE", dense)
    packed = PackedTensors(Bytes(pack_index(table_of(TENSORS))))

    assert told(stored_columns(packed, keys)) == told(stored_columns(TENSORS, keys))
    some = [key for key in keys if key.isascii()]
    ascii_only = PackedTensors(
        Bytes(pack_index(table_of({k: TENSORS[k] for k in some if k in TENSORS})))
    )
    assert told(stored_columns(ascii_only, some)) == told(stored_columns(TENSORS, some))


def test_chunks_in_other_encodings_are_no_runs() -> None:
    """They are there all the same, to be counted."""
    chunk = StoredChunk(Box((0,), (4,)), "f", 0, 900, "torch_zip")

    wanted = whole_tensors(["x"], {"x": StoredTensor("int8", (4,), (chunk,))})
    runs, filled = runs_of(wanted, np.ones(1, dtype=bool))

    assert wanted.is_complete.tolist() == [True]
    assert filled.tolist() == [False]
    assert len(runs.box) == 0


def test_boxes_beyond_the_stored_tensor_are_cut() -> None:
    """What is outside is not wanted; such a box is left to who sets the rest to zero."""
    wanted = boxes_of(["ü/rows"] * 3, [Box((1, 0), (9, 4)), Box((9, 9), (1, 1)), Box((0, 0), (0, 4))], TENSORS)  # fmt: skip
    _, filled = runs_of(wanted, np.ones(3, dtype=bool))

    assert wanted.shape.tolist() == [[2, 4], [0, 0], [0, 4]]
    assert wanted.is_cut.tolist() == [True, True, False]
    assert wanted.is_complete.tolist() == [True, True, True]
    assert filled.tolist() == [False, False, True]


def test_boxes_that_are_too_large_to_count_are_left_open() -> None:
    """A product that does not fit is no proof that nothing is missing."""
    shape = (1 << 32, 1 << 32)

    wanted = whole_tensors(["x"], {"x": StoredTensor("int8", shape, ())})

    assert wanted.is_complete.tolist() == [False]
    assert clipped([1 << 70, 5, -(1 << 70)]).tolist() == [(1 << 63) - 1, 5, 1 - (1 << 63)]


class Place:
    """Some memory, and runs of one file into it, end to end in the order of ``nbytes``."""

    def __init__(self, positions: list[int], nbytes: list[int]) -> None:
        self.buffer = (ctypes.c_ubyte * max(sum(nbytes), 1))()
        count = len(positions)
        ends = np.cumsum(np.array(nbytes, dtype=np.int64))
        self.runs = Runs(
            ["f"],
            np.zeros(count, dtype=np.int64),
            np.array(positions, dtype=np.int64),
            np.array(nbytes, dtype=np.int64),
            np.arange(count),
            np.zeros(count, dtype=np.int64),
        )
        address = ctypes.addressof(self.buffer) + ends - self.runs.nbytes
        self.memory = Memory(address, "key-{}".format)

    def read(self, store: VerifiedStore, thread_count: int) -> bytes:
        nbytes = read_runs(self.runs, self.memory, store, thread_count=thread_count)
        assert nbytes == int(self.runs.nbytes.sum())
        return bytes(self.buffer)[:nbytes]


def stored_file(root: Path, nbytes: int) -> tuple[bytes, dict[str, FileSum]]:
    data = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8).tobytes()
    (root / "f").write_bytes(data)
    return data, {"f": sum_of(data)}


@pytest.mark.parametrize("verified", [True, False])
@pytest.mark.parametrize("thread_count", [1, 3])
def test_runs_of_any_size_reach_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thread_count: int, *, verified: bool
) -> None:
    """In any order, overlapping or not, larger than a batch and than a job."""
    monkeypatch.setattr(module, "_BATCH_NBYTES", 1 << 19)
    monkeypatch.setattr(module, "_JOB_NBYTES", (BLOCK_NBYTES, 2 * BLOCK_NBYTES))
    data, sums = stored_file(tmp_path, 9 * BLOCK_NBYTES + 777)
    rng = np.random.default_rng(1)
    positions = [0, 5, BLOCK_NBYTES - 1, 3 * BLOCK_NBYTES, 100, len(data) - 1]
    nbytes = [3, 6 * BLOCK_NBYTES, 2, BLOCK_NBYTES, len(data) - 100, 1]
    for at in rng.integers(0, len(data) - 5000, 300).tolist():
        positions.append(at)
        nbytes.append(int(rng.integers(1, 5000)))
    store = VerifiedStore(open_store(tmp_path), sums if verified else {}, tmp_path)

    found = Place(positions, nbytes).read(store, thread_count)

    assert found == b"".join(data[a : a + n] for a, n in zip(positions, nbytes, strict=True))
    assert Place([], []).read(store, thread_count) == b""


def test_a_huge_tensor_beside_many_takes_no_memory_for_each_of_them() -> None:
    """Only what is larger than a job is cut."""
    nbytes = np.array([32 << 30] + [8192] * 20_000, dtype=np.int64)
    position, number = np.cumsum(nbytes) - nbytes + 7, np.arange(len(nbytes))
    pieces = module._Piece(number, number * 0, position, nbytes, position + 1000)
    limit = module._JOB_NBYTES[1]

    tracemalloc.start()
    found = module._cut(pieces, limit)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 4 << 20
    assert found.nbytes.max() == limit
    assert (found.address - found.position == 1000).all()
    assert (found.position[1:] == found.position[:-1] + found.nbytes[:-1]).all()
    assert (found.position[1:513] % BLOCK_NBYTES == 0).all()
    assert (np.bincount(found.run, found.nbytes) == nbytes).all()


def test_a_damaged_block_names_the_key_it_hits(tmp_path: Path) -> None:
    """Not its neighbours in the same read; and what came before it is told of, too."""
    data, sums = stored_file(tmp_path, 4 * BLOCK_NBYTES)
    damaged = bytearray(data)
    damaged[2 * BLOCK_NBYTES + 9] ^= 1
    (tmp_path / "f").write_bytes(damaged)
    positions = [0, BLOCK_NBYTES, 2 * BLOCK_NBYTES + 50, 3 * BLOCK_NBYTES]
    store = VerifiedStore(open_store(tmp_path), sums, tmp_path)

    with pytest.raises(CorruptedCheckpointError, match=r"'key-2': .*checksum"):
        Place(positions, [100] * 4).read(store, 1)

    (tmp_path / "f").write_bytes(data[: 3 * BLOCK_NBYTES])
    with pytest.raises(CorruptedCheckpointError, match=r"'key-3': .*ends at byte"):
        Place(positions, [100] * 4).read(VerifiedStore(open_store(tmp_path), {}), 1)
