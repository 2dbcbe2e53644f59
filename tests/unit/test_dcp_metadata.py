"""``.metadata``, written opcode by opcode: what DCP's own classes would have been pickled to."""

from __future__ import annotations

import io
import json
import math
import pickle
import pickletools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint import metadata as dcp_classes

from dist_ckpt import ShardedObject, ShardedTensor, save
from dist_ckpt._formats.torch_dist.contents import index_documents
from dist_ckpt._formats.torch_dist.dcp_metadata import NOTE_KEY, NOTE_PATH, encode_metadata
from dist_ckpt._formats.torch_dist.metadata import decode_metadata
from dist_ckpt._formats.torch_dist.records import frame_of
from dist_ckpt._sharding.chunks import table_of
from dist_ckpt._sharding.index import StoredChunk, StoredTensor
from dist_ckpt._sharding.packing import pack_index
from dist_ckpt.box import Box, split_box
from tests._samples import sample

# DCP says so whenever it loads without a process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

DTYPES = {name: getattr(torch, name) for name in ("float32", "uint8", "bfloat16", "complex64")}

VERSION: dict[str, Any] = {"version": "1.0.0"} if hasattr(dcp_classes.Metadata, "version") else {}
"""What DCP writes of its own version: nothing before torch 2.9."""


def theirs(tensors: dict[str, StoredTensor]) -> dcp_classes.Metadata:
    """Return the same as DCP's objects."""
    entries: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for key, tensor in tensors.items():
        dtype = DTYPES[tensor.dtype]
        entry = entries[key] = dcp_classes.TensorStorageMetadata(
            dcp_classes.TensorProperties(dtype=dtype), torch.Size(tensor.shape), []
        )
        for chunk in sorted(tensor.chunks, key=lambda one: one.box):
            offset, shape = torch.Size(chunk.box.offset), torch.Size(chunk.box.shape)
            frame = frame_of(tensor.dtype, chunk.box.shape, dtype.itemsize)
            place = dcp_classes.MetadataIndex(key, offset, len(entry.chunks))
            entry.chunks.append(dcp_classes.ChunkStorageMetadata(offset, shape))
            start = chunk.position - len(frame.head)
            storage[place] = dcp_filesystem._StorageInfo(chunk.file, start, frame.total)
    paths: dict[str, Any] = {key: (key,) for key in entries} | {NOTE_KEY: NOTE_PATH}
    entries[NOTE_KEY] = dcp_classes.TensorStorageMetadata(
        dcp_classes.TensorProperties(dtype=torch.uint8), torch.Size((0,)), []
    )
    return dcp_classes.Metadata(
        state_dict_metadata=entries,
        planner_data=paths,
        storage_data=storage,
        storage_meta=dcp_classes.StorageMeta(),
        **VERSION,
    )


@st.composite
def tables(draw: st.DrawFn) -> dict[str, StoredTensor]:
    """Tensors of any keys, in boxes anywhere in files."""
    keys = draw(st.lists(st.text(max_size=5) | st.just("\ud800"), unique=True, max_size=5))
    at, tensors = draw(st.sampled_from([4096, 1 << 30, 1 << 40])), {}
    for key in keys:
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        largest = draw(st.sampled_from([4, 300, 1 << 33]))
        shape = tuple(draw(st.lists(st.integers(0, largest), max_size=3)))
        chunks = []
        if 0 < math.prod(shape) < 1 << 12:
            for box in split_box(Box((0,) * len(shape), shape), 1, draw(st.integers(7, 4000))):
                at += 4096
                nbytes = box.numel * DTYPES[dtype].itemsize
                chunks.append(StoredChunk(box, draw(st.sampled_from(["a", "é/b"])), at, nbytes))
                at += nbytes
        tensors[key] = StoredTensor(dtype, shape, tuple(chunks))
    return tensors


@given(tables())
@settings(deadline=None, max_examples=sample(20, 240))
def test_it_is_what_dcp_would_write(tensors: dict[str, StoredTensor]) -> None:
    """Object by object, in types too; and the order of the chunks is told."""
    made = encode_metadata(pack_index(table_of(tensors)))

    found, expected = pickle.loads(made), theirs(tensors)

    assert found == expected
    assert type(found.storage_meta) is type(expected.storage_meta)
    assert pickle.loads(pickle.dumps(found)) == expected
    indices = {(i.fqn, i.offset): i.index for i in expected.storage_data}
    assert {(i.fqn, i.offset): i.index for i in found.storage_data} == indices
    for key, entry in found.state_dict_metadata.items():
        assert type(entry.size) is torch.Size
        assert vars(entry.properties) == vars(expected.state_dict_metadata[key].properties)
        assert all(type(c.offsets) is torch.Size for c in entry.chunks)
    for opcode, _, _ in pickletools.genops(made):
        assert opcode.proto <= 2


@given(tables())
@settings(deadline=None, max_examples=sample(15, 120))
def test_our_own_reader_of_others_reads_it(tensors: dict[str, StoredTensor]) -> None:
    """What is written for others is nothing that we would refuse of others."""
    ends = {"a": 1 << 62, "é/b": 1 << 62}
    keys = {key: one for key, one in tensors.items() if math.prod(one.shape) < 1 << 60}

    found = decode_metadata(
        encode_metadata(pack_index(table_of(keys))), where="m", sizes=ends
    ).index.tensors

    assert {k: (t.dtype, t.shape) for k, t in found.items()} == {
        k: (t.dtype, t.shape) for k, t in keys.items()
    }
    for key, tensor in found.items():
        boxes = sorted(chunk.box for chunk in keys[key].chunks)
        assert [chunk.box for chunk in tensor.chunks] == boxes


@pytest.mark.parametrize("shape", [(1 << 31,), ((1 << 31) - 1,), (3, 1 << 30), (1, (1 << 31) - 1)])
def test_records_of_large_chunks(shape: tuple[int, ...]) -> None:
    """From 2 GiB on, what stands around a payload is longer."""
    box = Box((0,) * len(shape), shape)
    chunk = StoredChunk(box, "a", 1 << 20, math.prod(shape))
    tensors = {"x": StoredTensor("uint8", shape, (chunk,))}

    assert pickle.loads(encode_metadata(pack_index(table_of(tensors)))) == theirs(tensors)


def test_tensors_do_not_share_what_can_be_changed() -> None:
    """A reader may edit the metadata of one tensor in memory."""
    tensors = {key: StoredTensor("float32", (2,), ()) for key in "ab"}

    found = pickle.loads(encode_metadata(pack_index(table_of(tensors))))

    a, b, _ = found.state_dict_metadata.values()
    assert a.properties is not b.properties
    assert a.chunks is not b.chunks


def test_dcp_loads_it(tmp_path: Path) -> None:
    """With its own reader and planner, objects aside."""
    values = {
        "w": torch.arange(12.0).view(4, 3),
        "h": torch.randn(5).to(torch.bfloat16),
        "n": torch.tensor(7),
        "none": torch.empty(0, 3),
        "large": torch.arange(1 << 16, dtype=torch.int64),
    }
    state = {k: ShardedTensor.from_rank_offsets(k, v) for k, v in values.items()}
    save(state | {"o": ShardedObject("o", {"a": 1}, (1,), (0,))}, tmp_path / "c")

    loaded = {key: torch.full_like(value, 1) for key, value in values.items()}
    dcp.load(loaded, checkpoint_id=tmp_path / "c", no_dist=True)

    assert all(torch.equal(loaded[key], value) for key, value in values.items())
    metadata = dcp.FileSystemReader(tmp_path / "c").read_metadata()
    assert set(metadata.state_dict_metadata) == {*values, "o/shard_0_1", NOTE_KEY}


def test_it_can_be_left_out() -> None:
    """The index does not depend on it."""
    table = table_of({"x": StoredTensor("float32", (0,), ())})

    both, one = index_documents(table), index_documents(table, dcp_metadata=False)

    assert set(both) == {"index.bin", ".metadata"}
    assert one == {"index.bin": both["index.bin"]}


def test_it_is_made_without_torch_and_numpy(tmp_path: Path) -> None:
    """The process that writes in the background has neither."""
    tensors = {
        f"k{i}": StoredTensor("float32", (2,), (StoredChunk(Box((0,), (2,)), "f", 4096 * i, 8),))
        for i in range(1, 4)
    }
    index = pack_index(table_of(tensors))
    (tmp_path / "index.bin").write_bytes(index)
    script = (
        "import sys, json, pathlib\n"
        "from dist_ckpt._formats.torch_dist.dcp_metadata import encode_metadata\n"
        "data = encode_metadata(pathlib.Path('index.bin').read_bytes())\n"
        "pathlib.Path('out').write_bytes(data)\n"
        "print(json.dumps(sorted({'torch', 'numpy'} & set(sys.modules))))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )

    assert json.load(io.StringIO(done.stdout)) == []
    assert (tmp_path / "out").read_bytes() == encode_metadata(index)
