"""The index of a zarr checkpoint believes nothing that it reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt import ShardedTensor
from dist_ckpt._formats.zarr.index import zarr_index_from_json, zarr_index_without
from dist_ckpt.box import Box
from dist_ckpt.errors import CorruptedCheckpointError
from dist_ckpt.storage.sealed import sealed
from tests._reseal import read_sealed
from tests.unit._zarr import files_of, save_ranks, values

GOOD: dict[str, Any] = {
    "version": 1,
    "format": "zarr2",
    "tensors": {
        "w": {
            "dtype": "float32",
            "shape": [4, 2],
            "role": "tensor",
            "path": "w",
            "boxes": [[[0, 0], [2, 2]]],
        }
    },
}
SIZES = {"w/.zarray": 100}


def sealed_json(document: Any) -> bytes:
    return sealed(document) if type(document) is dict else json.dumps(document).encode()


def index_of(document: Any) -> Any:
    return zarr_index_from_json(sealed_json(document), where="there", sizes=SIZES)


def changed(**entries: Any) -> dict[str, Any]:
    return {**GOOD, "tensors": {"w": {**GOOD["tensors"]["w"], **entries}}}


def test_what_is_told() -> None:
    """Dtype, shape, and which boxes of which array are written."""
    tensor = index_of(GOOD).tensors["w"]

    assert (tensor.dtype, tensor.shape, tensor.role) == ("float32", (4, 2), "tensor")
    (chunk,) = tensor.chunks
    assert (chunk.box, chunk.file, chunk.nbytes) == (Box((0, 0), (2, 2)), "w", 16)
    assert chunk.encoding == "zarr2"


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        {},
        {**GOOD, "version": 2},
        {**GOOD, "version": "1"},
        {**GOOD, "format": "zarr4"},
        {**GOOD, "format": []},
        {**GOOD, "tensors": []},
        {**GOOD, "tensors": {"w": None}},
        changed(path="../w"),
        changed(path="/w"),
        changed(path=""),
        changed(path="other"),
        changed(path=7),
        changed(dtype="float33"),
        changed(dtype="nn"),
        changed(dtype="quint8"),
        changed(role="king"),
        changed(role="object"),
        changed(shape=[4, -2]),
        changed(shape=[4.0, 2]),
        changed(shape=[True, 2]),
        changed(shape=[1 << 63, 2]),
        changed(shape="42"),
        changed(boxes=[[[0, 0], [5, 2]]]),
        changed(boxes=[[[3, 0], [2, 2]]]),
        changed(boxes=[[[0], [2]]]),
        changed(boxes=[[[0, 0], [0, 2]]]),
        changed(boxes=[[[0, 0], [4, 2]], [[0, 0], [4, 2]]]),
        changed(boxes=[[[0, 0]]]),
        {**GOOD, "tensors": {"w": GOOD["tensors"]["w"], "v": GOOD["tensors"]["w"]}},
    ],
)
def test_anything_else_is_damage(document: Any) -> None:
    """One class of error, naming the file."""
    with pytest.raises(CorruptedCheckpointError, match="there"):
        index_of(document)


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[" * 100_000, b'{"version": 1}'])
def test_bytes_that_are_no_document_are_damage(data: bytes) -> None:
    """As above."""
    with pytest.raises(CorruptedCheckpointError):
        zarr_index_from_json(data, where="there", sizes=SIZES)


def test_keys_are_taken_out(tmp_path: Path) -> None:
    """The others stay as they are."""
    tensors = [ShardedTensor.from_rank_offsets(key, values((2, 3))) for key in ("a", "b", "c")]
    index = save_ranks(tmp_path, [tensors], 2)
    sizes = files_of(tmp_path)

    data = zarr_index_without((tmp_path / "index.json").read_bytes(), {"b"})

    kept = zarr_index_from_json(data, where="there", sizes=sizes)
    assert kept.tensors == {key: index.tensors[key] for key in ("a", "c")}


def test_a_shape_that_the_files_cannot_fill_is_damage(tmp_path: Path) -> None:
    """Nobody is asked for the memory of a tensor whose bytes are not there."""
    save_ranks(tmp_path, [[ShardedTensor.from_rank_offsets("w", values((2, 3)))]], 2)
    document = read_sealed(tmp_path / "index.json")
    document["tensors"]["w"] |= {"shape": [1 << 40], "boxes": [[[0], [1 << 40]]]}

    with pytest.raises(CorruptedCheckpointError, match="'w'.* bytes for 4398046511104"):
        zarr_index_from_json(sealed(document), where="there", sizes=files_of(tmp_path))
