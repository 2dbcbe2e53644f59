"""Files of cells are what TensorStore would write, byte by byte, and no more is assumed of others."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch

from dist_ckpt import ShardedTensor
from dist_ckpt._formats.zarr.arrays import tensorstore
from dist_ckpt._formats.zarr.layout import crc32c, is_by_rows, shard_index, stored_extents
from dist_ckpt.box import Box
from tests.unit._zarr import boxes_of, files_of, read_box, read_whole, save_ranks, values


def written_by_tensorstore(path: Path, document: dict[str, object], tensor: torch.Tensor) -> None:
    """Write an array with the same metadata."""
    package = tensorstore()
    driver = "zarr" if document["zarr_format"] == 2 else "zarr3"
    spec = {
        "driver": driver,
        "kvstore": {"driver": "file", "path": f"{path}/"},
        "metadata": document,
        "create": True,
        "delete_existing": True,
        "store_data_equal_to_fill_value": True,
    }
    package.open(spec).result().write(tensor.numpy()).result()


@pytest.mark.parametrize("version", [1, 2], ids=["zarr2", "zarr3"])
@pytest.mark.parametrize(
    ("shape", "cuts"),
    [((), None), ((7,), None), ((10, 6), 4), ((3, 5, 2), 2), ((1500, 999), None), ((700_001,), 4)],
    ids=str,
)
def test_files_are_those_of_tensorstore(
    tmp_path: Path, shape: tuple[int, ...], cuts: int | None, version: int
) -> None:
    """Padded ends and the index of a shard, too."""
    tensor = values(shape)
    boxes = [Box((0,) * len(shape), shape)]
    if cuts is not None:
        starts = range(0, shape[0], cuts) if shape[0] < 100 else (0, 300_000)
        stops = [*list(starts)[1:], shape[0]]
        boxes = [
            Box((a, *boxes[0].offset[1:]), (b - a, *shape[1:]))
            for a, b in zip(starts, stops, strict=True)
        ]
    save_ranks(tmp_path / "ours", [boxes_of(tensor, "w", [box]) for box in boxes], version)
    folder = tmp_path / "ours" / "w"
    name = ".zarray" if version == 1 else "zarr.json"
    written_by_tensorstore(tmp_path / "theirs", json.loads((folder / name).read_text()), tensor)

    ours, theirs = files_of(folder), files_of(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for file in ours.keys() - {name}:
        assert (folder / file).read_bytes() == (tmp_path / "theirs" / file).read_bytes()


def test_shards_of_blocks_are_read_as_what_they_are(tmp_path: Path) -> None:
    """Inner chunks that are no runs of rows: earlier versions cut so."""
    tensor = values((8, 6))
    index = save_ranks(tmp_path, [[ShardedTensor.from_rank_offsets("w", tensor)]], 2)
    path = tmp_path / "w" / "zarr.json"
    document = json.loads(path.read_text())
    document["codecs"][0]["configuration"]["chunk_shape"] = [4, 3]
    written_by_tensorstore(tmp_path / "w", document, tensor)

    assert torch.equal(read_whole(tmp_path, index, "w"), tensor)
    assert torch.equal(read_box(tmp_path, index, "w", Box((3, 2), (3, 3))), tensor[3:6, 2:5])


def test_the_order_in_a_shard_is_the_one_of_its_index(tmp_path: Path) -> None:
    """Inner chunks may lie anywhere in the file: it is not assumed that they lie in order."""
    tensor = values((8, 6))
    index = save_ranks(tmp_path, [[ShardedTensor.from_rank_offsets("w", tensor)]], 2)
    path = tmp_path / "w" / "zarr.json"
    document = json.loads(path.read_text())
    document["codecs"][0]["configuration"]["chunk_shape"] = [4, 6]
    path.write_text(json.dumps(document))
    entries = struct.pack("<4Q", 96, 96, 0, 96)
    data = tensor[4:].numpy().tobytes() + tensor[:4].numpy().tobytes()
    (tmp_path / "w" / "c.0.0").write_bytes(data + entries + struct.pack("<I", crc32c(entries)))

    assert torch.equal(read_whole(tmp_path, index, "w"), tensor)
    assert torch.equal(read_box(tmp_path, index, "w", Box((3, 2), (3, 3))), tensor[3:6, 2:5])


@pytest.mark.parametrize(
    ("data", "expected"),
    [(b"", 0), (b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43)],
    ids=["none", "digits", "zeros", "ones"],
)
def test_checksums_are_those_of_the_rfc(data: bytes, expected: int) -> None:
    """RFC 3720, appendix B.4, and the check value of the polynomial."""
    assert crc32c(data) == expected


def test_what_lies_by_rows() -> None:
    """One of each outer axis, a part of one, the others in full."""
    assert is_by_rows((), ())
    assert is_by_rows((8, 6), (8, 6))
    assert is_by_rows((8, 6), (2, 6))
    assert is_by_rows((8, 6), (1, 3))
    assert not is_by_rows((8, 6), (8, 3))
    assert not is_by_rows((8, 6, 4), (1, 3, 2))


def test_inner_chunks_beyond_the_tensor_are_not_there() -> None:
    """Those at its end are stored in full."""
    assert stored_extents((5, 6), (2, 6)) == (6, 6)
    index = shard_index((8, 6), (2, 6), (5, 6), 4)
    assert struct.unpack("<8Q", index[:-4]) == (0, 48, 48, 48, 96, 48, *(2**64 - 1,) * 2)
