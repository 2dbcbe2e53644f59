"""What Megatron-Core adds to DCP checkpoints: flattened tensors, and metadata that lies."""

from __future__ import annotations

import io
import itertools
import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp

from dist_ckpt import (
    CorruptedCheckpointError,
    MismatchError,
    ShardedTensor,
    UnsafeContentError,
    load,
    load_common_state_dict,
    load_plain_tensors,
    load_sharded_metadata,
)
from dist_ckpt._formats.torch_dist.mcore import is_common_state, is_object_key, unfold_flattened
from dist_ckpt._sharding.index import StoredChunk
from dist_ckpt.box import Box

FILE = "__0_0.distcp"
KEY = "optimizer.exp_avg.w"


class Writer:
    """Writes a checkpoint as Megatron-Core does, piece by piece."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.path, self.data = path, b""
        self.tensors: dict[str, Any] = {}
        self.storage: dict[Any, Any] = {}
        self.mcore_data: Any = {}

    def record(self, index: dcp.MetadataIndex, value: object) -> None:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        data = buffer.getvalue()
        self.storage[index] = filesystem._StorageInfo(FILE, len(self.data), len(data))
        self.data += data

    def object(self, key: str, value: object) -> None:
        self.tensors[key] = dcp.BytesStorageMetadata()
        self.record(dcp.MetadataIndex(key), value)

    def flattened(
        self, key: str, whole: torch.Tensor, grid: tuple[int, ...], cuts: list[int]
    ) -> None:
        """Cut ``whole`` into a grid of shards, each flattened and cut at ``cuts``."""
        shard = tuple(n // parts for n, parts in zip(whole.shape, grid, strict=True))
        size = torch.Size((*grid, math.prod(shard)))
        properties = dcp.TensorProperties(dtype=whole.dtype)
        entry = self.tensors[key] = dcp.TensorStorageMetadata(properties, size, [])
        self.mcore_data[key] = {"nd_reformulated_orig_global_shape": tuple(whole.shape)}
        bounds = [0, *cuts, math.prod(shard)]
        for cell in itertools.product(*map(range, grid)):
            corner = [at * n for at, n in zip(cell, shard, strict=True)]
            box = Box(tuple(corner), shard)
            flat = whole[box.slices()].reshape(-1)
            for start, stop in itertools.pairwise(bounds):
                offset = torch.Size((*cell, start))
                sizes = torch.Size((*(1 for _ in cell), stop - start))
                entry.chunks.append(dcp.ChunkStorageMetadata(offset, sizes))
                self.record(dcp.MetadataIndex(key, offset), flat[start:stop].clone().view(sizes))

    def commit(self, *, marker: bool = True) -> Path:
        (self.path / FILE).write_bytes(self.data)
        metadata = dcp.Metadata(self.tensors, None, self.storage)
        metadata.mcore_data = self.mcore_data  # type: ignore[attr-defined]
        (self.path / ".metadata").write_bytes(pickle.dumps(metadata))
        if marker:
            config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
            (self.path / "metadata.json").write_text(json.dumps(config))
        return self.path


WHOLE = torch.arange(4 * 6 * 5, dtype=torch.float32).reshape(4, 6, 5)


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path / "c")


@pytest.mark.parametrize("grid", [(1, 1, 1), (2, 1, 1), (2, 3, 1), (4, 6, 5), (1, 2, 5)])
@pytest.mark.parametrize("cuts", [[], [1], [3, 4]])
def test_flattened_shards(grid: tuple[int, ...], cuts: list[int], writer: Writer) -> None:
    """Any grid, cut anywhere: whole, as rows, as columns and as ranges of another cut."""
    shard = WHOLE.numel() // math.prod(grid)
    writer.flattened(KEY, WHOLE, grid, [cut for cut in cuts if cut < shard])
    path = writer.commit()

    def part(box: Box) -> ShardedTensor:
        return ShardedTensor(
            KEY, torch.zeros(box.shape), torch.float32, box.shape, (4, 6, 5), box.offset, None
        )

    rows, columns = part(Box((1, 0, 0), (2, 6, 5))), part(Box((0, 3, 2), (4, 2, 2)))
    flat = ShardedTensor(
        KEY, torch.zeros(50), torch.float32, (4, 6, 5), (4, 6, 5), (0, 0, 0), (1, 1, 1),
        flattened_range=slice(17, 67),
    )  # fmt: skip
    loaded = load({"r": rows, "c": columns, "f": flat}, path, validate_access_integrity=False)

    assert torch.equal(load_plain_tensors(path)[KEY], WHOLE)
    assert torch.equal(loaded["r"], WHOLE[1:3])
    assert torch.equal(loaded["c"], WHOLE[:, 3:5, 2:4])
    assert torch.equal(loaded["f"], WHOLE.reshape(-1)[17:67])


@st.composite
def _grids(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    pairs = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=0, max_size=3))
    return tuple(parts for parts, _ in pairs), tuple(parts * extent for parts, extent in pairs)


@given(_grids(), st.data())
def test_unfolding_is_exact(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], data: st.DataObject
) -> None:
    """The boxes of a chunk are disjoint, in order, and are its elements, each at its place."""
    grid, original = shapes
    length = math.prod(original) // math.prod(grid)
    cell = tuple(data.draw(st.integers(0, n - 1)) for n in grid)
    start = data.draw(st.integers(0, length - 1))
    stop = data.draw(st.integers(start + 1, length))
    whole = torch.arange(math.prod(original)).reshape(original)
    shard = tuple(size // n for n, size in zip(grid, original, strict=True))
    corner = Box(tuple(at * n for at, n in zip(cell, shard, strict=True)), shard)
    payload = (whole[corner.slices()] if grid else whole).reshape(-1)[start:stop]
    box = Box((*cell, start), (*(1 for _ in cell), stop - start))

    parts = list(unfold_flattened(StoredChunk(box, "f", 7, 9), (*grid, length), original))

    assert len(parts) <= max(2 * len(original) - 1, 1)
    at = 0
    for part in parts:
        assert (part.file, part.position, part.nbytes) == ("f", 7, 9)
        assert (part.record_shape, part.record_start) == (box.shape, at)
        found = (whole[part.box.slices()] if grid else whole).reshape(-1)
        assert torch.equal(found, payload[at : at + part.box.numel])
        at += part.box.numel
    assert at == stop - start


def test_a_large_flattened_record_is_not_read_whole(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of a large flattened tensor: torch.load, which reads all of it, is not called."""
    whole = torch.arange(1 << 16, dtype=torch.float32).reshape(256, 256)
    writer.flattened(KEY, whole, (1, 1), [30000])
    path = writer.commit()
    row = ShardedTensor(
        KEY, torch.zeros(1, 256), torch.float32, (1, 256), (256, 256), (117, 0), None
    )
    monkeypatch.setattr(torch, "load", None)

    loaded = load({"row": row}, path, validate_access_integrity=False)

    assert torch.equal(loaded["row"], whole[117:118])


def test_a_flattened_tensor_of_an_older_release(writer: Writer) -> None:
    """Without its original shape noted, a tensor has the shape in which it is stored."""
    writer.flattened(KEY, WHOLE, (2, 3, 1), [4])
    writer.mcore_data = {}

    found = load_sharded_metadata(writer.commit())[KEY]

    assert isinstance(found, ShardedTensor)
    assert found.global_shape == (2, 3, 1, 20)


def test_a_part_that_is_not_stored(writer: Writer) -> None:
    """Elements that no chunk holds are noticed before anything is read."""
    writer.flattened(KEY, WHOLE, (1, 1, 1), [30])
    del writer.tensors[KEY].chunks[1]

    with pytest.raises(MismatchError, match="30 of the 120 elements"):
        load_plain_tensors(writer.commit())


@pytest.mark.parametrize(
    ("original", "message"),
    [
        pytest.param((4, 30), "is no flattened form", id="other-rank"),
        pytest.param((4, 7, 5), "is no flattened form", id="not-divisible"),
        pytest.param((8, 6, 5), "do not have 40 elements", id="other-size"),
        pytest.param((-4, 6, 5), "expected sizes", id="negative"),
        pytest.param((4, 6, 5.0), "expected sizes", id="no-int"),
        pytest.param("abc", "expected sizes", id="text"),
        pytest.param(7, "not iterable", id="number"),
        pytest.param((1 << 62, 1 << 62, 5), "larger than any tensor", id="huge"),
    ],
)
def test_an_original_shape_that_does_not_fit(original: Any, message: str, writer: Writer) -> None:
    """Nothing is reshaped by guess."""
    writer.flattened(KEY, WHOLE, (1, 3, 1), [])
    writer.mcore_data[KEY]["nd_reformulated_orig_global_shape"] = original

    with pytest.raises(CorruptedCheckpointError, match=message):
        load_plain_tensors(writer.commit())


@pytest.mark.parametrize("mcore_data", [[], {KEY: None}, {KEY: "x"}, "x"])
def test_mcore_data_of_another_form(mcore_data: Any, writer: Writer) -> None:
    """Errors of our tree."""
    writer.flattened(KEY, WHOLE, (1, 3, 1), [])
    writer.mcore_data = mcore_data

    with pytest.raises(CorruptedCheckpointError, match="not the metadata"):
        load_plain_tensors(writer.commit())


def chunk_across_shards(writer: Writer) -> None:
    writer.tensors[KEY].chunks[0] = dcp.ChunkStorageMetadata(
        torch.Size((0, 0, 0, 0)), torch.Size((1, 2, 1, 20))
    )


def negative_offset(writer: Writer) -> None:
    # torch.Size takes what a pickle gives it.
    writer.tensors[KEY].chunks[0] = dcp.ChunkStorageMetadata(
        torch.Size((0, 0, 0, -1)), torch.Size((1, 1, 1, 40))
    )


def negative_position(writer: Writer) -> None:
    next(iter(writer.storage.values())).offset = -5


def outside_file(writer: Writer) -> None:
    next(iter(writer.storage.values())).length = 1 << 40


def outside_directory(writer: Writer) -> None:
    next(iter(writer.storage.values())).relative_path = "../secret"


def huge_shape(writer: Writer) -> None:
    size = torch.Size((1 << 40, 1 << 20))
    entry = writer.tensors["huge"] = dcp.TensorStorageMetadata(
        dcp.TensorProperties(), size, [dcp.ChunkStorageMetadata(torch.Size((0, 0)), size)]
    )
    writer.record(dcp.MetadataIndex("huge", entry.chunks[0].offsets), torch.ones(3))


def no_storage(writer: Writer) -> None:
    writer.storage.clear()


def text_key(writer: Writer) -> None:
    writer.tensors[7] = writer.tensors[KEY]  # type: ignore[index]


@pytest.mark.parametrize(
    "change",
    [
        chunk_across_shards, negative_offset, negative_position, outside_file, outside_directory,
        huge_shape, no_storage, text_key,
    ],
)  # fmt: skip
def test_metadata_that_lies(change: Callable[[Writer], None], writer: Writer) -> None:
    """Nothing outside of the checkpoint is touched, nothing is allocated for what is not there."""
    writer.flattened(KEY, WHOLE, (1, 3, 1), [])
    change(writer)

    with pytest.raises(CorruptedCheckpointError):
        load_plain_tensors(writer.commit())


@pytest.mark.parametrize(
    ("data", "name"),
    [
        pytest.param(b"cos\nsystem\n(S'true'\ntR.", "os.system", id="os.system"),
        pytest.param(b"cbuiltins\neval\n(S'1'\ntR.", "builtins.eval", id="eval"),
        pytest.param(b"ctorch\nload\n(S'x'\ntR.", "torch.load", id="torch.load"),
        pytest.param(
            b"cmegatron.core.dist_checkpointing.strategies.torch\nother\n.", "megatron", id="other"
        ),
        pytest.param(b"\x80\x04\x8c\x05torch\x8c\x10serialization.os\x93.", "torch", id="dotted"),
    ],
)
def test_metadata_that_names_code(data: bytes, name: str, writer: Writer) -> None:
    """Refused by name; it is never imported."""
    path = writer.commit()
    (path / ".metadata").write_bytes(data)

    with pytest.raises(UnsafeContentError, match=name):
        load_plain_tensors(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(
            b"ctorch.distributed.checkpoint.metadata\nTensorProperties\n",
            b"ctorch.distributed._shard.sharded_tensor.metadata\nTensorProperties\n",
            id="torch-2.1",
        ),
        pytest.param(
            b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n",
            b"ctorch.distributed._shard.sharded_tensor.metadata\nMEM_FORMAT_ENCODING\n",
            id="torch-2.1-format",
        ),
        pytest.param(
            b"ctorch.distributed.checkpoint.metadata\nMetadata\n",
            b"cmegatron.core.dist_checkpointing.strategies.torch\nMCoreMetadata\n",
            id="megatron",
        ),
        pytest.param(b"cpathlib\nPosixPath\n", b"cpathlib._local\nPosixPath\n", id="python-3.13"),
    ],
)
def test_names_of_other_releases(old: bytes, new: bytes, writer: Writer) -> None:
    """The same classes under the names that other releases gave them."""
    writer.flattened(KEY, WHOLE, (1, 3, 1), [])
    path = writer.commit()
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.storage_meta = dcp.StorageMeta(checkpoint_id=Path("a/b"))
    data = pickle.dumps(metadata, protocol=2)
    assert old in data
    (path / ".metadata").write_bytes(data.replace(old, new))

    assert torch.equal(load_plain_tensors(path)[KEY], WHOLE)


@pytest.mark.parametrize(
    "target",
    [
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n",
        b"ctorch.serialization\n_get_layout\n",
        b"ctorch\nSize\n",
        b"ctorch\nfloat32\n",
        b"cpathlib\nPosixPath\n",
        b"ccollections\nOrderedDict\n",
    ],
)
def test_metadata_cannot_change_classes(target: bytes, writer: Writer) -> None:
    """Setting an attribute of what it names does not reach the class of that name."""
    path = writer.commit()
    (path / ".metadata").write_bytes(
        b"\x80\x02" + target + b"N}X\x06\x00\x00\x00hackedK\x01s\x86b."
    )

    with pytest.raises(CorruptedCheckpointError):
        load_plain_tensors(path)

    places = (dcp.Metadata, torch.serialization._get_layout, torch.Size, Path, torch.float32)
    assert not any(hasattr(place, "hacked") for place in places)


COMMON = {"iteration": 3}


def test_the_common_object(writer: Writer) -> None:
    """It is the common part, in its list, and wins over an older file."""
    writer.object("common_state/shard_0_1", [COMMON])
    torch.save({"iteration": 1}, writer.path / "common.pt")

    assert load_common_state_dict(writer.commit()) == COMMON


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        pytest.param({"0_1": [[1]]}, "holds a list, not a dict", id="no-dict"),
        pytest.param({"0_2": [COMMON], "1_2": [COMMON]}, "stored several times", id="twice"),
    ],
)
def test_a_common_object_that_is_none(
    objects: dict[str, Any], message: str, writer: Writer
) -> None:
    """Errors of our tree."""
    for name, value in objects.items():
        writer.object(f"common_state/shard_{name}", value)

    with pytest.raises(CorruptedCheckpointError, match=message):
        load_common_state_dict(writer.commit())


def test_objects_are_unwrapped_only_where_megatron_wraps_them(writer: Writer) -> None:
    """Without its marker the writer is another, and a list is a list."""
    writer.object("o/shard_0_1", [5])
    path = writer.commit()
    request = dict(load_sharded_metadata(path))

    assert load(request, path) == {"o/shard_0_1": 5}
    (path / "metadata.json").unlink()
    assert load(request, path) == {"o/shard_0_1": [5]}


def test_a_common_file_that_is_no_dict(writer: Writer) -> None:
    """Nothing is merged into a list."""
    torch.save([1], writer.path / "common.pt")

    with pytest.raises(CorruptedCheckpointError, match="holds a list"):
        load_common_state_dict(writer.commit())


@pytest.mark.parametrize(
    ("key", "is_object", "is_common"),
    [
        ("rng/shard_0.1_1.2", True, False),
        ("a/b/shard_0_1", True, False),
        ("o/shard__", True, False),
        ("common_state/shard_0_1", True, True),
        ("common_state/other/shard_0_1", True, False),
        ("x.common_state/shard_0_1", True, False),
        ("rng/shard_0.1_1", False, False),
        ("rng/shard_0.1_1.", False, False),
        ("rng/shard_a_b", False, False),
        ("rng/shard_0_", False, False),
        ("rng/shard_0.2_1.2", False, False),
        ("shard_0_1", False, False),
        ("w", False, False),
    ],
)
def test_names_of_objects(key: str, is_object: bool, is_common: bool) -> None:
    """Only what ``ShardedObject.unique_key`` makes is one."""
    assert (is_object_key(key), is_common_state(key)) == (is_object, is_common)
