"""``index.bin``: what is packed comes back, is read in parts, and is believed in nothing."""

from __future__ import annotations

import itertools
import math
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_ckpt import (
    CheckpointNotFoundError,
    CorruptedCheckpointError,
    IncompleteCheckpointError,
    ShardedTensor,
    StorageError,
    load,
    load_plain_tensors,
    save,
)
from dist_ckpt._formats.opening import open_contents
from dist_ckpt._sharding.chunks import ChunkRows, ChunkTable, table_of
from dist_ckpt._sharding.index import StoredChunk, StoredTensor
from dist_ckpt._sharding.packed import Directory, PackedTensors
from dist_ckpt._sharding.packed_check import check_packed
from dist_ckpt._sharding.packing import pack_index
from dist_ckpt.box import Box, split_box
from dist_ckpt.errors import UnknownStrategyError
from tests._forge import Index, Row, Tensor, forged, parsed
from tests._reseal import edit_index, reseal

ITEMSIZES = {"float32": 4, "uint8": 1, "bfloat16": 2, "complex128": 16}


class Source:
    """An index in memory that counts what is read of its rows."""

    where = "where/index.bin"

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.rows_read = 0

    def directory(self) -> bytes:
        return self.data[: Directory(self.data, where="x").layout.directory_nbytes]

    def rows(self, position: int, nbytes: int, *, checksum: int | None) -> bytes:
        del checksum
        self.rows_read += 1
        return self.data[position : position + nbytes]


@st.composite
def stored_tensors(draw: st.DrawFn) -> dict[str, StoredTensor]:
    """Tensors of any keys and shapes, cut in any number of boxes that lie behind each other."""
    keys = draw(st.lists(st.text(max_size=6), unique=True, max_size=6))
    at = [draw(st.integers(0, 1 << 40)), 0]
    tensors = {}
    for key in keys:
        role = draw(st.sampled_from(["tensor", "object", "part"]))
        dtype = "uint8" if role == "object" else draw(st.sampled_from(sorted(ITEMSIZES)))
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
        chunks = []
        if math.prod(shape):
            size = draw(st.integers(1, 40))
            for box in split_box(Box((0,) * len(shape), shape), 1, size):
                file = draw(st.integers(0, 1))
                nbytes = box.numel * ITEMSIZES[dtype]
                chunks.append(StoredChunk(box, f"__{file}_0.distcp", at[file], nbytes))
                at[file] += nbytes
        tensors[key] = StoredTensor(dtype, shape, tuple(chunks), role)
    return tensors


def sizes_of(tensors: dict[str, StoredTensor]) -> dict[str, int]:
    ends: dict[str, int] = {}
    for chunk in (chunk for one in tensors.values() for chunk in one.chunks):
        ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.position + chunk.nbytes)
    return ends


@given(stored_tensors(), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_what_is_packed_comes_back(tensors: dict[str, StoredTensor], rng: random.Random) -> None:
    """Whatever the keys, shapes and dtypes, and in whatever order the chunks come."""
    table = table_of(tensors)
    order = list(range(len(table)))
    rng.shuffle(order)
    mixed = ChunkTable(
        table.keys, table.dtypes, table.roles, table.shapes, table.files, table.tensor[order],
        table.offset[order], table.shape[order], table.file[order], table.position[order],
    )  # fmt: skip

    data = pack_index(mixed)

    directory = check_packed(data, where="i", sizes=sizes_of(tensors))
    found = PackedTensors(Source(data), directory)
    assert dict(found) == tensors
    assert list(found) == sorted(tensors)
    assert forged(parsed(data)) == data
    assert [one.key.decode() for one in parsed(data).tensors] == sorted(tensors)
    for role in ("tensor", "object", "part"):
        assert found.keys_of(role) == sorted(k for k, t in tensors.items() if t.role == role)


@given(stored_tensors(), st.data())
@settings(deadline=None)
def test_what_lies_in_a_box(tensors: dict[str, StoredTensor], data: st.DataObject) -> None:
    """The same chunks and numbers of elements, whether chunks are objects or columns."""
    packed = PackedTensors(Source(pack_index(table_of(tensors))))
    for key, tensor in tensors.items():
        bounds = [
            sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in tensor.shape
        ]
        box = Box(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))
        expected = [
            (chunk, common)
            for chunk in tensor.chunks
            if box.numel and (common := box.intersect(chunk.box)) is not None
        ]
        assert tensor.overlapping(box) == expected
        assert packed[key].overlapping(box) == expected
        assert packed[key].stored_in(box) == tensor.stored_in(box) == box.numel


def test_chunks_as_columns_are_a_sequence() -> None:
    """Indices from both ends, slices, equality with tuples, and nothing beyond the end."""
    chunks = tuple(StoredChunk(Box((i,), (1,)), "f", 10 + i, 1) for i in range(9))
    tensors = {"x": StoredTensor("int8", (9,), chunks)}
    found = PackedTensors(Source(pack_index(table_of(tensors))))["x"].chunks

    assert len(found) == 9
    assert found == chunks
    assert chunks == found
    assert hash(found) == hash(chunks)
    assert found[-1] == chunks[-1]
    assert found[2:4] == chunks[2:4]
    assert chunks[3] in found
    assert repr(found) == "<9 chunks>"
    assert found != chunks[:-1]
    assert found != 1
    with pytest.raises(IndexError):
        found[9]


def test_rows_are_read_when_they_are_looked_at() -> None:
    """Keys, shapes and numbers of chunks cost no read; the chunks of a tensor one."""
    tensors = {
        f"k{i}": StoredTensor("int8", (1,), (StoredChunk(Box((0,), (1,)), "f", i, 1),))
        for i in range(100)
    }
    source = Source(pack_index(table_of(tensors)))
    found = PackedTensors(source)

    assert len(found) == 100
    assert "k7" in found
    assert "k" not in found
    assert 7 not in found
    assert found.get("zz") is None
    assert found["k7"].shape == (1,)
    assert len(found["k7"].chunks) == 1
    assert source.rows_read == 0
    assert found["k7"].chunks[0].position == 7
    assert list(found["k7"].chunks) == list(tensors["k7"].chunks)
    assert source.rows_read == 1
    assert found["k7"] is found["k7"]


def test_no_sizes_of_tensors_are_too_large() -> None:
    """Coordinates of more than four bytes are stored where they do not fit."""
    wide = 1 << 40
    tensors = {
        "wide": StoredTensor(
            "int8", (wide, 2), (StoredChunk(Box((wide - 1, 0), (1, 2)), "f", 1 << 50, 2),)
        ),
        "long": StoredTensor(
            "int8", (1 << 32,), (StoredChunk(Box(((1 << 32) - 3,), (3,)), "f", 0, 3),)
        ),
    }
    data = pack_index(table_of(tensors))

    directory = check_packed(data, where="i", sizes={"f": 1 << 51})
    assert dict(PackedTensors(Source(data), directory)) == tensors


def test_what_cannot_be_packed() -> None:
    """A key twice, or more axes than a byte can tell."""
    one = table_of({"x": StoredTensor("int8", (0,), ())})
    twice = ChunkTable(
        one.keys * 2, one.dtypes * 2, one.roles * 2, one.shapes * 2, (), one.tensor, one.offset,
        one.shape, one.file, one.position,
    )  # fmt: skip
    with pytest.raises(ValueError, match="a key stands twice"):
        pack_index(twice)
    with pytest.raises(ValueError, match="256 axes"):
        pack_index(table_of({"x": StoredTensor("int8", (1,) * 255 + (0,), ())}))


def test_a_chunk_takes_few_bytes() -> None:
    """28 for two axes, 52 for five."""
    for ndim, expected in ((2, 28), (5, 52)):
        count, shape = 1000, (1000, *(3,) * (ndim - 1))
        table = ChunkTable(
            ("x",), ("int8",), ("tensor",), (shape,), ("f",), np.zeros(count, np.int32),
            np.stack([np.arange(count), *[np.zeros(count, np.int64)] * (ndim - 1)], axis=1),
            np.array([[1, *shape[1:]]] * count), np.zeros(count, np.int32),
            np.arange(count) * math.prod(shape[1:]),
        )  # fmt: skip
        assert len(pack_index(table)) / count == pytest.approx(expected, abs=0.3)


# -- what is not believed


def honest() -> Index:
    """Return an index of a tensor of two chunks, one without elements, and an object."""
    rows = [Row(100, [0, 0], [2, 3], 0), Row(0, [2, 0], [2, 3], 1)]
    return Index(
        dtypes=[(b"float32", 4), (b"uint8", 1)],
        files=[b"a", b"b"],
        tensors=[
            Tensor(b"empty", [0, 3], 0, 0, []),
            Tensor(b"o/shard_0_1", [5], 1, 1, [Row(124, [0], [5], 0)]),
            Tensor(b"x", [4, 3], 0, 0, rows),
        ],
    )


SIZES = {"a": 129, "b": 24, "c": 1000}


def grid(index: Index) -> None:
    """Rows that overlap in no pair of neighbours: only looking at all of them tells."""
    tensor = index.tensor("x")
    tensor.shape = [1000, 1000]
    tensor.rows = [Row(4 * i, [i, i], [1, 1], 2) for i in range(100)]
    tensor.rows += [Row(400 + 4 * i, [i, 0], [1, 1], 2) for i in range(100)]
    index.files.append(b"c")


Change = Callable[[Index, Tensor], Any]
LIES: dict[str, Change] = {
    "version 0": lambda d, _: setattr(d, "version", 0),
    "reserved": lambda d, _: setattr(d, "zero", 1),
    "more bytes": lambda d, _: setattr(d, "behind", b"\0\0\0\0"),
    "padding": lambda d, _: setattr(d, "padding", b"\0" * 15 + b"\1"),
    "padding of another length": lambda d, _: setattr(d, "padding", bytes(64)),
    "dtype that is none": lambda d, _: d.dtypes.__setitem__(0, (b"nn", 4)),
    "dtype that is no text": lambda d, _: d.dtypes.__setitem__(0, (b"\xff", 4)),
    "dtype that is empty": lambda d, _: d.dtypes.__setitem__(0, (b"", 4)),
    "itemsize": lambda d, _: d.dtypes.__setitem__(0, (b"float32", 1)),
    "quantized": lambda d, _: d.dtypes.__setitem__(0, (b"qint32", 4)),
    "itemsize 0": lambda d, _: d.dtypes.__setitem__(0, (b"float32", 0)),
    "dtype twice": lambda d, _: d.dtypes.append((b"uint8", 1)),
    "dtype number": lambda _, x: setattr(x, "dtype", 2),
    "role": lambda _, x: setattr(x, "role", 3),
    "object of floats": lambda _, x: setattr(x, "role", 1),
    "file outside": lambda d, _: d.files.__setitem__(0, b"../../etc/passwd"),
    "file that is none": lambda d, _: d.files.__setitem__(0, b""),
    "file with a nul": lambda d, _: d.files.__setitem__(0, b"a\0b"),
    "file that is not in the manifest": lambda d, _: d.files.__setitem__(0, b"d"),
    "file twice": lambda d, _: d.files.append(b"a"),
    "files beyond the manifest": lambda d, _: d.files.extend([b"c", b"d"]),
    "ends of files": lambda d, _: setattr(d, "name_ends", [2, 1]),
    "file number": lambda _, x: setattr(x.rows[0], "file", 2),
    "file number of 32 bits": lambda _, x: setattr(x.rows[0], "file", (1 << 32) - 1),
    "keys twice": lambda d, x: setattr(d.tensors[0], "key", x.key),
    "keys in another order": lambda d, _: d.tensors.reverse(),
    "key that is no text": lambda _, x: setattr(x, "key", b"\xff"),
    "ends of keys": lambda d, _: setattr(d, "key_ends", [5, 4, 17]),
    "ends of keys beyond": lambda d, _: setattr(d, "key_ends", [5, 16, 1 << 30]),
    "ends of keys before": lambda d, _: setattr(d, "key_ends", [5, 16, 16]),
    "negative shape": lambda _, x: x.shape.__setitem__(0, -1),
    "shape beyond 64 bits": lambda _, x: setattr(x, "shape", [1 << 63, 3]),
    "smaller shape": lambda _, x: x.shape.__setitem__(0, 3),
    "fewer axes": lambda _, x: setattr(x, "ndim", 1),
    "more axes": lambda _, x: setattr(x, "ndim", 200),
    "more chunks": lambda _, x: setattr(x, "count", 3),
    "chunks without end": lambda _, x: setattr(x, "count", (1 << 32) - 1),
    "no chunks": lambda _, x: setattr(x, "count", 0),
    "checksum of the chunks": lambda _, x: setattr(x, "checksum", 1),
    "position": lambda _, x: setattr(x.rows[0], "position", 106),
    "position behind the file": lambda _, x: setattr(x.rows[0], "position", 1 << 40),
    "negative position": lambda _, x: setattr(x.rows[0], "position", -1),
    "position of 64 bits": lambda _, x: setattr(x.rows[0], "position", (1 << 63) - 4),
    "offset": lambda _, x: x.rows[0].offset.__setitem__(0, 3),
    "negative offset": lambda _, x: x.rows[0].offset.__setitem__(0, -1),
    "empty chunk": lambda _, x: x.rows[0].shape.__setitem__(0, 0),
    "larger chunk": lambda _, x: x.rows[0].shape.__setitem__(1, 4),
    "same chunk": lambda _, x: x.rows.__setitem__(0, Row(100, [2, 0], [2, 3], 0)),
    "chunks that share a row": lambda _, x: x.rows.__setitem__(0, Row(64, [1, 0], [2, 3], 0)),
    "chunks that share bytes": lambda _, x: x.rows.__setitem__(0, Row(101, [0, 0], [2, 3], 0)),
    "chunks of different tensors that share bytes": lambda d, _: setattr(
        d.tensors[1].rows[0], "position", 123
    ),
    "chunk of a tensor without elements": lambda d, _: d.tensors[0].rows.append(
        Row(0, [0, 0], [1, 3], 0)
    ),
    "numel beyond 64 bits": lambda _, x: (
        setattr(x, "shape", [1 << 62, 1 << 62]),
        x.rows[0].shape.__setitem__(slice(None), [1 << 62, 1 << 62]),
    ),
    "numel that wraps to nothing": lambda _, x: (
        setattr(x, "shape", [1 << 32, 1 << 32]),
        x.rows[0].shape.__setitem__(slice(None), [1 << 32, 1 << 32]),
    ),
    "cells across each other": lambda d, _: grid(d),
    "value twice": lambda d, _: (
        d.tensors.append(Tensor(b"z", [], 1, 0, [Row(0, [], [], 2), Row(1, [], [], 2)])),
        d.files.append(b"c"),
    ),
}
for _name in ("directory_nbytes", "nbytes", "tensors", "chunks", "files", "dtypes", "axes",
              "key_nbytes", "name_nbytes"):  # fmt: skip
    for _value in (0, 1, 1 << 20, 1 << 31, 1 << 40, 1 << 63, (1 << 64) - 1):
        LIES[f"{_name} {_value}"] = lambda d, _, n=_name, v=_value: d.head.update({n: v})


def test_the_honest_one_is_believed() -> None:
    """What is refused below is refused for what is changed."""
    check_packed(forged(honest()), where="where/index", sizes=SIZES)


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_corruption(name: str) -> None:
    """Although every checksum is right."""
    index = honest()
    LIES[name](index, index.tensor("x"))

    with pytest.raises(CorruptedCheckpointError, match="where/index"):
        check_packed(forged(index), where="where/index", sizes=SIZES)


@pytest.mark.parametrize("at_a_time", [1, 2, 3])
def test_keys_are_compared_however_many_are_looked_at_at_a_time(
    monkeypatch: pytest.MonkeyPatch, at_a_time: int
) -> None:
    """Equal neighbours, and neighbours in another order, within a batch and across its end."""
    monkeypatch.setattr("dist_ckpt._sharding.packed_check._MANY_KEYS", at_a_time)
    check_packed(forged(honest()), where="i", sizes=SIZES)
    for number, keys in itertools.product((1, 2), ("the same", "the other way round")):
        index = honest()
        one, following = index.tensors[number - 1 : number + 1]
        one.key, following.key = following.key, (following.key if keys == "the same" else one.key)
        with pytest.raises(CorruptedCheckpointError, match="does not come behind"):
            check_packed(forged(index), where="i", sizes=SIZES)


def test_a_newer_version_is_no_damage() -> None:
    """It must not be set aside."""
    index = honest()
    index.version = 2

    with pytest.raises(UnknownStrategyError, match="index version 2; this release reads 1"):
        check_packed(forged(index), where="i", sizes=SIZES)


def test_every_byte_is_under_a_checksum() -> None:
    """A changed byte anywhere, and every length but the right one."""
    data = forged(honest())
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        with pytest.raises(CorruptedCheckpointError):
            check_packed(bytes(changed), where="i", sizes=SIZES)
    for nbytes in range(len(data)):
        with pytest.raises(CorruptedCheckpointError):
            check_packed(data[:nbytes], where="i", sizes=SIZES)


# -- as a file of a checkpoint


def saved(path: Path, count: int = 3) -> dict[str, torch.Tensor]:
    values = {f"w{i}": torch.arange(float(i + 2)) for i in range(count)}
    save({k: ShardedTensor.from_rank_offsets(k, v) for k, v in values.items()}, path)
    return values


def asked(values: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {k: ShardedTensor.from_rank_offsets(k, torch.zeros_like(v)) for k, v in values.items()}


def test_other_ranks_are_told_where_and_not_what(tmp_path: Path) -> None:
    """What is sent of a checkpoint does not grow with its tensors; all of it is there elsewhere."""
    sent = {}
    for count in (3, 300):
        saved(tmp_path / str(count), count)
        contents = open_contents(tmp_path / str(count))
        sent[count] = pickle.dumps(contents)
        elsewhere = pickle.loads(sent[count])

        assert elsewhere.index.tensors == dict(contents.index.tensors)
        assert elsewhere.files == dict(contents.files)
        assert len(pickle.dumps(elsewhere)) == len(sent[count])
    assert abs(len(sent[300]) - len(sent[3])) < 100


def test_a_replaced_checkpoint_is_no_damage(tmp_path: Path) -> None:
    """Who reads the index after it was replaced is told that."""
    saved(tmp_path / "c")
    elsewhere = pickle.loads(pickle.dumps(open_contents(tmp_path / "c")))
    again = pickle.loads(pickle.dumps(open_contents(tmp_path / "c")))
    saved(tmp_path / "c", 4)

    with pytest.raises(CheckpointNotFoundError, match="was replaced while it was read"):
        len(elsewhere.index.tensors)
    with pytest.raises(CheckpointNotFoundError, match="was replaced while it was read"):
        dict(elsewhere.files)
    shutil.rmtree(tmp_path / "c")
    with pytest.raises(CheckpointNotFoundError):
        len(again.index.tensors)
    assert len(again.files) == 6


def test_another_index_with_right_checksums_is_refused(tmp_path: Path) -> None:
    """Every rank reads the very bytes that rank 0 has checked."""
    saved(tmp_path / "c")
    elsewhere = pickle.loads(pickle.dumps(open_contents(tmp_path / "c")))
    edit_index(tmp_path / "c", lambda index: index.tensor("w0").shape.__setitem__(0, 3))

    with pytest.raises(CorruptedCheckpointError, match=r"index\.bin"):
        len(elsewhere.index.tensors)
    with pytest.raises(CorruptedCheckpointError, match=r"manifest\.json"):
        dict(elsewhere.files)


def test_rows_that_change_while_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory knows the checksum of the rows of each tensor."""
    monkeypatch.setattr("dist_ckpt._formats.torch_dist.index_file._PAGE_NBYTES", 1)
    saved(tmp_path / "c")
    elsewhere = pickle.loads(pickle.dumps(open_contents(tmp_path / "c")))
    elsewhere.index.tensors.load()
    path = tmp_path / "c" / "index.bin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    assert elsewhere.index.tensors["w0"].chunks[0].box == Box((0,), (2,))
    with pytest.raises(CorruptedCheckpointError, match=r"index\.bin: bytes \d+ to \d+ have the"):
        tuple(elsewhere.index.tensors["w2"].chunks)


def test_rows_that_are_read_together_are_compared() -> None:
    """Also if they are right when they are read once more."""
    tensors = {
        f"k{i}": StoredTensor("int8", (1,), (StoredChunk(Box((0,), (1,)), "f", i, 1),))
        for i in range(4)
    }
    source = Source(pack_index(table_of(tensors)))
    found = PackedTensors(source)
    right = found.rows_of(np.arange(1, 4))
    original = source.rows

    def once_wrong(position: int, nbytes: int, *, checksum: int | None) -> bytes:
        data = original(position, nbytes, checksum=checksum)
        return data if checksum is not None else data[:-1] + b"\1"

    source.rows = once_wrong  # type: ignore[method-assign]

    with pytest.raises(CorruptedCheckpointError, match="'k3' were others"):
        found.rows_of(np.arange(1, 4))
    assert right == original(*found.directory.extent(1), checksum=None) + original(
        *found.directory.extent(2), checksum=None
    ) + original(*found.directory.extent(3), checksum=None)


def test_an_index_that_is_larger_than_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are read page by page, those of a large tensor at once."""
    module = "dist_ckpt._formats.torch_dist.index_file"
    monkeypatch.setattr(f"{module}._KEPT_NBYTES", 0)
    monkeypatch.setattr(f"{module}._PAGE_NBYTES", 64)
    values = saved(tmp_path / "c", 30)
    rows = torch.arange(40.0).view(20, 2)
    shards = [
        ShardedTensor.from_rank_offsets("rows", rows[i : i + 1], (0, i, 20)) for i in range(20)
    ]
    save({"rows": shards}, tmp_path / "rows")

    assert isinstance(open_contents(tmp_path / "rows").index.tensors["rows"].chunks[:], tuple)
    loaded = load(asked(values), tmp_path / "c")
    assert all(torch.equal(loaded[key], value) for key, value in values.items())
    assert torch.equal(load_plain_tensors(tmp_path / "rows")["rows"], rows)


def test_no_index_is_corruption(tmp_path: Path) -> None:
    """Gone from the directory, or from the manifest, too; without a marker nothing was saved."""
    saved(tmp_path / "c")
    for_later = tmp_path / "index.bin"
    shutil.move(tmp_path / "c" / "index.bin", for_later)
    with pytest.raises(CorruptedCheckpointError, match=r"index\.bin is missing"):
        open_contents(tmp_path / "c")
    shutil.copy(for_later, tmp_path / "c" / "index.bin")
    reseal(tmp_path / "c")
    (tmp_path / "c" / "metadata.json").unlink()
    with pytest.raises(IncompleteCheckpointError):
        open_contents(tmp_path / "c")


def test_columns_of_a_tensor() -> None:
    """``ChunkRows`` gives rows, offsets and shapes of what is common, in global coordinates."""
    rows = ChunkRows(
        ("f",), 4, offset=np.array([[0, 0], [2, 0], [4, 0]]), shape=np.array([[2, 3]] * 3),
        file=np.zeros(3, np.int32), position=np.array([0, 24, 48]),
    )  # fmt: skip

    found, offset, shape = rows.common(Box((3, 1), (2, 2)))

    assert found.tolist() == [1, 2]
    assert offset.tolist() == [[3, 1], [4, 1]]
    assert shape.tolist() == [[1, 2], [1, 2]]


def test_an_index_that_nobody_would_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The save fails, and not every load of it."""
    monkeypatch.setattr("dist_ckpt._sharding.packing._MAX_NBYTES", 200)

    with pytest.raises(StorageError, match="index of 0 chunks would have"):
        pack_index(table_of({"x" * 100: StoredTensor("int8", (0,), ())}))
