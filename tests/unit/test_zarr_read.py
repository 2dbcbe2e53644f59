"""Reads of arrays: only the chunks needed, straight into memory, and no damage goes unnoticed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from dist_ckpt import ShardedTensor
from dist_ckpt._formats.base import Destination
from dist_ckpt._formats.verification import VerifiedStore
from dist_ckpt._formats.zarr.read import read_into
from dist_ckpt._formats.zarr.scan import scan_arrays
from dist_ckpt._sharding.index import CheckpointIndex
from dist_ckpt.box import Box
from dist_ckpt.errors import CorruptedCheckpointError, MismatchError, StorageError
from dist_ckpt.storage import open_store
from tests.unit._zarr import boxes_of, files_of, read_box, read_whole, save_ranks, values

BOTH = pytest.mark.parametrize("version", [1, 2], ids=["zarr2", "zarr3"])


def unverified(directory: Path) -> VerifiedStore:
    return VerifiedStore(open_store(directory), {})


def four_rows(directory: Path, version: int) -> tuple[torch.Tensor, CheckpointIndex]:
    """Save 8 rows on 4 ranks."""
    tensor = values((8, 6))
    ranks = [boxes_of(tensor, "w", [Box((start, 0), (2, 6))]) for start in (0, 2, 4, 6)]
    return tensor, save_ranks(directory, ranks, version)


def chunk_files(directory: Path) -> list[Path]:
    return sorted(p for p in (directory / "w").iterdir() if p.name not in (".zarray", "zarr.json"))


@BOTH
def test_a_part_needs_only_its_own_chunks(tmp_path: Path, version: int) -> None:
    """All others may be gone."""
    tensor, index = four_rows(tmp_path, version)
    for path in chunk_files(tmp_path)[2:]:
        path.unlink()

    part = Box((1, 2), (3, 3))
    assert torch.equal(read_box(tmp_path, index, "w", part), tensor[part.slices()])
    with pytest.raises(CorruptedCheckpointError, match="'w'.*missing"):
        read_box(tmp_path, index, "w", Box((3, 0), (2, 6)))


def test_a_part_of_a_shard_reads_only_its_own_bytes(tmp_path: Path) -> None:
    """Of 16 MiB in one file, a row costs a row; the other bytes may be anything."""
    tensor = torch.randn(4096, 1024)
    index = save_ranks(tmp_path, [[ShardedTensor.from_rank_offsets("w", tensor)]], 2)
    row = torch.empty(1, 1024)

    nbytes = read_into(
        [Destination("w", Box((700, 0), (1, 1024)), row)],
        index,
        tmp_path,
        unverified(tmp_path),
        thread_count=1,
    )

    assert nbytes == 4096
    assert torch.equal(row[0], tensor[700])


@BOTH
def test_values_go_straight_into_strided_memory(tmp_path: Path, version: int) -> None:
    """Columns of a larger tensor are filled; what is around them stays."""
    tensor, index = four_rows(tmp_path, version)
    memory = torch.full((6, 20), -1.0)

    read_into(
        [Destination("w", Box((0, 0), (8, 6)), memory.t()[2:18:2])],
        index,
        tmp_path,
        unverified(tmp_path),
        thread_count=2,
    )

    assert torch.equal(memory.t()[2:18:2], tensor)
    assert (memory.t()[3:18:2] == -1).all()
    assert (memory.t()[:2] == -1).all()


@BOTH
def test_another_dtype_is_cast(tmp_path: Path, version: int) -> None:
    """Whether that is wanted is decided elsewhere."""
    tensor, index = four_rows(tmp_path, version)

    loaded = read_box(tmp_path, index, "w", Box((0, 0), (8, 6)), torch.bfloat16)

    assert torch.equal(loaded, tensor.bfloat16())


@BOTH
def test_a_conjugated_destination_gets_the_values(tmp_path: Path, version: int) -> None:
    """Its memory holds their conjugates."""
    tensor = torch.randn(3, 4, dtype=torch.complex64)
    index = save_ranks(tmp_path, [[ShardedTensor.from_rank_offsets("w", tensor)]], version)
    memory = torch.zeros(3, 4, dtype=torch.complex64)

    read_into(
        [Destination("w", Box((0, 0), (3, 4)), memory.conj())],
        index,
        tmp_path,
        unverified(tmp_path),
        thread_count=1,
    )

    assert torch.equal(memory, tensor.conj().resolve_conj())


@BOTH
def test_a_truncated_chunk_is_damage(tmp_path: Path, version: int) -> None:
    """The error names the key."""
    _, index = four_rows(tmp_path, version)
    first = chunk_files(tmp_path)[0]
    first.write_bytes(first.read_bytes()[:-5])

    with pytest.raises(CorruptedCheckpointError, match="'w'"):
        read_whole(tmp_path, index, "w")


def test_an_altered_index_of_a_shard_is_damage(tmp_path: Path) -> None:
    """Its checksum tells."""
    _, index = four_rows(tmp_path, 2)
    first = chunk_files(tmp_path)[0]
    data = bytearray(first.read_bytes())
    data[-6] ^= 1
    first.write_bytes(data)

    with pytest.raises(CorruptedCheckpointError, match="'w'.*[Dd]igest"):
        read_whole(tmp_path, index, "w")


def metadata_path(directory: Path, version: int) -> Path:
    return directory / "w" / (".zarray" if version == 1 else "zarr.json")


@BOTH
@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b"\xff", b"[" * 100_000])
def test_metadata_that_cannot_be_read_is_damage(tmp_path: Path, data: bytes, version: int) -> None:
    """Whatever stands there."""
    _, index = four_rows(tmp_path, version)
    metadata_path(tmp_path, version).write_bytes(data)

    with pytest.raises(CorruptedCheckpointError):
        read_whole(tmp_path, index, "w")


@BOTH
@pytest.mark.parametrize(
    "change",
    [
        {"shape": [8, 7]},
        {"shape": [8]},
        {"shape": "86"},
        {"dtype": "<f8", "data_type": "float64"},
        {"dtype": "<i4", "data_type": "int32"},
        {"dtype": [["a", "<f4"]], "data_type": {"name": "x"}},
        {
            "chunks": [0, 6],
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0, 6]}},
        },
        {"zarr_format": 7},
        {"order": "Z", "node_type": "group"},
    ],
)
def test_an_array_other_than_the_index_says_is_damage(
    tmp_path: Path, change: dict[str, object], version: int
) -> None:
    """The error names the key and the file or folder."""
    _, index = four_rows(tmp_path, version)
    path = metadata_path(tmp_path, version)
    document = json.loads(path.read_text())
    change = {k: v for k, v in change.items() if k in document}
    path.write_text(json.dumps({**document, **change}))

    with pytest.raises(CorruptedCheckpointError, match=r"'w'.*w"):
        read_whole(tmp_path, index, "w")


HUGE = [
    [1 << 40, 1],
    [1 << 62, 1 << 62],
    [1 << 70, 1],
    [-1, 6],
    [0, 6],
    [4.5, 6],
    [True, 6],
    ["4", 6],
    [8],
    [8, 6, 1],
]


@pytest.mark.parametrize("extents", HUGE, ids=str)
@pytest.mark.parametrize("inner", [None, [1, 1]], ids=["whole", "ones"])
def test_metadata_cannot_choose_how_much_memory_a_shard_takes(
    tmp_path: Path, extents: list[object], inner: list[int] | None
) -> None:
    """TensorStore would end the process when it gets no memory for the chunk or the index."""
    _, index = four_rows(tmp_path, 2)
    path = metadata_path(tmp_path, 2)
    document = json.loads(path.read_text())
    document["chunk_grid"]["configuration"]["chunk_shape"] = extents
    document["codecs"][0]["configuration"]["chunk_shape"] = inner or extents
    path.write_text(json.dumps(document))

    with pytest.raises(CorruptedCheckpointError, match="'w'"):
        read_whole(tmp_path, index, "w")


@pytest.mark.parametrize("extents", HUGE, ids=str)
@pytest.mark.parametrize(
    "change",
    [{}, {"order": "F"}, {"compressor": {"id": "zlib", "level": 1}}, {"dimension_separator": "x"}],
    ids=["plain", "fortran", "compressed", "separator"],
)
def test_metadata_cannot_choose_how_much_memory_a_chunk_takes(
    tmp_path: Path, extents: list[object], change: dict[str, object]
) -> None:
    """Neither of plain chunks, whose file must be as long, nor of compressed ones."""
    _, index = four_rows(tmp_path, 1)
    path = metadata_path(tmp_path, 1)
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, **change, "chunks": extents}))

    with pytest.raises(CorruptedCheckpointError, match="'w'"):
        read_whole(tmp_path, index, "w")


def with_holes(directory: Path, nbytes: int) -> None:
    """Make the first chunk's file long, without taking the disk for it."""
    os.truncate(chunk_files(directory)[0], nbytes)


@pytest.mark.parametrize(
    ("cell", "inner"),
    [([1 << 37, 6], [1 << 37, 6]), ([1 << 37, 6], [1, 6])],
    ids=["chunk", "index"],
)
def test_a_shard_with_holes_does_not_end_the_process(
    tmp_path: Path, cell: list[int], inner: list[int]
) -> None:
    """A file may be as long as metadata says and yet take no room."""
    _, index = four_rows(tmp_path, 2)
    path = metadata_path(tmp_path, 2)
    document = json.loads(path.read_text())
    document["chunk_grid"]["configuration"]["chunk_shape"] = cell
    document["codecs"][0]["configuration"]["chunk_shape"] = inner
    path.write_text(json.dumps(document))
    with_holes(tmp_path, (1 << 37) * 24 + 20)

    with pytest.raises(CorruptedCheckpointError, match="'w'.*chunks of"):
        read_whole(tmp_path, index, "w")


@pytest.mark.parametrize("change", [{"order": "F"}, {"dtype": ">f4"}], ids=str)
def test_a_chunk_with_holes_does_not_end_the_process(
    tmp_path: Path, change: dict[str, object]
) -> None:
    """Neither of v2, where only TensorStore puts the elements in order."""
    _, index = four_rows(tmp_path, 1)
    path = metadata_path(tmp_path, 1)
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, **change, "chunks": [1 << 37, 6]}))
    with_holes(tmp_path, (1 << 37) * 24)

    with pytest.raises(CorruptedCheckpointError, match="'w'.*chunks of"):
        read_whole(tmp_path, index, "w")


@BOTH
def test_a_number_too_large_for_tensorstore_is_damage(tmp_path: Path, version: int) -> None:
    """Not an ``OverflowError``."""
    _, index = four_rows(tmp_path, version)
    path = metadata_path(tmp_path, version)
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "fill_value": 1 << 64, "attributes": {"x": 1 << 64}}))

    with pytest.raises(CorruptedCheckpointError, match="'w'"):
        read_whole(tmp_path, index, "w")


@pytest.mark.parametrize(
    "codecs",
    [
        [{"name": "bytes", "configuration": {"endian": "little"}}],
        [{"name": "bytes"}, {"name": "gzip", "configuration": {"level": 1}}],
        [],
        "bytes",
    ],
)
def test_v3_in_another_layout_is_refused(tmp_path: Path, codecs: object) -> None:
    """Only what this format writes is read."""
    _, index = four_rows(tmp_path, 2)
    path = metadata_path(tmp_path, 2)
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "codecs": codecs}))

    with pytest.raises(CorruptedCheckpointError, match="'w'.*layout"):
        read_whole(tmp_path, index, "w")


def test_shards_that_are_compressed_or_elsewhere_are_refused(tmp_path: Path) -> None:
    """Compression would undo the bound on memory; other names of chunks are not ours."""
    _, index = four_rows(tmp_path, 2)
    path = metadata_path(tmp_path, 2)
    good = path.read_text()
    compressed, elsewhere = json.loads(good), json.loads(good)
    compressed["codecs"][0]["configuration"]["codecs"].append({"name": "zstd"})
    elsewhere["chunk_key_encoding"]["configuration"]["separator"] = "/"

    for document in (compressed, elsewhere):
        path.write_text(json.dumps(document))
        with pytest.raises(CorruptedCheckpointError, match="'w'.*layout"):
            read_whole(tmp_path, index, "w")


def test_dtypes_without_a_conversion_are_a_mismatch(tmp_path: Path) -> None:
    """Where a cast is allowed but torch has none."""
    _, index = four_rows(tmp_path, 2)

    with pytest.raises(MismatchError, match="float4_e2m1fn_x2"):
        read_box(tmp_path, index, "w", Box((0, 0), (8, 6)), torch.float4_e2m1fn_x2)


@BOTH
def test_missing_metadata_is_damage(tmp_path: Path, version: int) -> None:
    """Not a missing checkpoint."""
    _, index = four_rows(tmp_path, version)
    metadata_path(tmp_path, version).unlink()

    with pytest.raises(CorruptedCheckpointError, match="'w'"):
        read_whole(tmp_path, index, "w")


@BOTH
def test_a_failing_file_system_is_a_storage_error(tmp_path: Path, version: int) -> None:
    """Here the chunk's name is a folder."""
    _, index = four_rows(tmp_path, version)
    first = chunk_files(tmp_path)[0]
    first.unlink()
    first.mkdir()

    with pytest.raises((StorageError, CorruptedCheckpointError), match="'w'"):
        read_whole(tmp_path, index, "w")


def uneven_rows(directory: Path) -> tuple[torch.Tensor, CheckpointIndex]:
    """Save rows as v2; the last chunk reaches beyond the tensor."""
    tensor = values((10, 6))
    ranks = [boxes_of(tensor, "w", [Box((s, 0), (min(4, 10 - s), 6))]) for s in (0, 4, 8)]
    return tensor, save_ranks(directory, ranks, 1)


def test_of_plain_chunks_only_the_needed_bytes_are_read(tmp_path: Path) -> None:
    """A shard of Megatron-Core is one chunk: a row of it costs a row. The last one is padded."""
    tensor, index = uneven_rows(tmp_path)
    row = torch.empty(1, 6)

    nbytes = read_into(
        [Destination("w", Box((5, 0), (1, 6)), row)],
        index,
        tmp_path,
        unverified(tmp_path),
        thread_count=1,
    )

    assert nbytes == 24
    assert torch.equal(row[0], tensor[5])
    assert torch.equal(read_whole(tmp_path, index, "w"), tensor)
    assert torch.equal(read_box(tmp_path, index, "w", Box((7, 1), (3, 4))), tensor[7:10, 1:5])


@pytest.mark.parametrize("cut", [None, 10])
def test_damage_of_plain_chunks_is_noticed(tmp_path: Path, cut: int | None) -> None:
    """Missing or truncated."""
    _, index = uneven_rows(tmp_path)
    path = tmp_path / "w" / "1.0"
    data = path.read_bytes()
    path.unlink()
    if cut is not None:
        path.write_bytes(data[:cut])

    with pytest.raises(CorruptedCheckpointError):
        read_whole(tmp_path, index, "w")


def test_arrays_are_found_without_an_index(tmp_path: Path) -> None:
    """By their metadata, at any depth; locks and links are left out."""
    tensors = {"a": values((3, 4)), "b/c.d": values((2,), torch.bfloat16), "e": torch.zeros(0, 2)}
    ranks = [[ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tensors.items()]]
    save_ranks(tmp_path / "c", ranks, 1)
    (tmp_path / "c" / "a.sync").mkdir()
    (tmp_path / "c" / "a.sync" / ".zarray").write_bytes(b"")
    (tmp_path / "c" / "link").symlink_to(tmp_path / "c" / "a")
    (tmp_path / "c" / "up").symlink_to(tmp_path)

    index = scan_arrays(tmp_path / "c")

    assert set(index.tensors) == set(tensors)
    for key, tensor in tensors.items():
        assert torch.equal(read_whole(tmp_path / "c", index, key), tensor)


@pytest.mark.parametrize(
    "document",
    [b"", b"{}", b'{"zarr_format": 3}', b'{"zarr_format": 2, "shape": [-1], "dtype": "<f4"}',
     b'{"zarr_format": 2, "shape": [1.5], "dtype": "<f4"}', b'{"zarr_format": 2, "shape": 3, "dtype": "<f4"}',
     b'{"zarr_format": 2, "shape": [2], "dtype": "|O"}', b'{"zarr_format": 2, "shape": [2], "dtype": {}}'],
)  # fmt: skip
def test_all_arrays_that_cannot_be_read_are_named(tmp_path: Path, document: bytes) -> None:
    """At once."""
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".zarray").write_bytes(document)

    with pytest.raises(CorruptedCheckpointError, match=r"'x'.*'y'"):
        scan_arrays(tmp_path)


@BOTH
def test_several_destinations_of_one_key(tmp_path: Path, version: int) -> None:
    """The array is opened once; boxes may overlap, and may be empty."""
    tensor, index = four_rows(tmp_path, version)
    boxes = [Box((0, 0), (5, 6)), Box((3, 1), (2, 2)), Box((2, 0), (0, 6))]
    wanted = [Destination("w", box, torch.empty(box.shape)) for box in boxes]

    read_into(wanted, index, tmp_path, unverified(tmp_path), thread_count=3)

    for one in wanted:
        assert torch.equal(one.view, tensor[one.box.slices()])


@BOTH
def test_a_relative_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """TensorStore wants absolute paths; callers need not."""
    monkeypatch.chdir(tmp_path)
    tensor, index = four_rows(Path("c"), version)

    assert torch.equal(read_whole(Path("c"), index, "w"), tensor)
    assert files_of(Path("c")).keys() == files_of(tmp_path / "c").keys()


@pytest.mark.parametrize(
    "change",
    [{"order": "F"}, {"dtype": ">f4"}, {"filters": [{"id": "delta", "dtype": "<f4"}]}],
    ids=["order", "bytes", "filter"],
)
def test_an_array_of_ours_in_another_layout_is_damage(
    tmp_path: Path, change: dict[str, object]
) -> None:
    """It would load other values from the same bytes; one flipped bit makes ``<f4`` of ``>f4``."""
    _, index = four_rows(tmp_path, 1)
    path = metadata_path(tmp_path, 1)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))

    with pytest.raises(CorruptedCheckpointError, match="'w'.*not laid out as they were written"):
        read_whole(tmp_path, index, "w")


def test_a_shard_of_ours_in_the_other_byte_order_is_damage(tmp_path: Path) -> None:
    """Of zarr v3, too."""
    _, index = four_rows(tmp_path, 2)
    path = metadata_path(tmp_path, 2)
    document = json.loads(path.read_text())
    document["codecs"][0]["configuration"]["codecs"][0]["configuration"]["endian"] = "big"
    path.write_text(json.dumps(document))

    with pytest.raises(CorruptedCheckpointError, match="'w'.*endian"):
        read_whole(tmp_path, index, "w")
