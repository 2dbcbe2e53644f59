"""zarr checkpoints of Megatron-Core: objects in files with long and cut names, and hostile ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dist_ckpt import (
    CheckpointingException,
    CorruptedCheckpointError,
    LoadOptions,
    ShardedObject,
    UnsafeContentError,
    load,
    load_common_state_dict,
    load_plain_tensors,
    load_sharded_metadata,
)

WEIGHT = np.arange(12, dtype="<f4").reshape(4, 3)


def written(path: Path, key: str = "w") -> Path:
    """Write an array of two chunks, a common part and the marker, as Megatron-Core 0.5 does."""
    array = path / key
    array.mkdir(parents=True)
    document = {
        "chunks": [2, 3], "compressor": None, "dtype": "<f4", "fill_value": None,
        "filters": None, "order": "C", "shape": [4, 3], "zarr_format": 2,
    }  # fmt: skip
    (array / ".zarray").write_text(json.dumps(document))
    (array / "0.0").write_bytes(WEIGHT[:2].tobytes())
    (array / "1.0").write_bytes(WEIGHT[2:].tobytes())
    torch.save({"iteration": 7}, path / "common.pt")
    config = {"sharded_backend": "zarr", "sharded_backend_version": 1}
    (path / "metadata.json").write_text(json.dumps(config))
    return path


def shards(path: Path, key: str, names: dict[str, Any]) -> Path:
    folder = path / key
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in names.items():
        torch.save(value, folder / f"shard_{name}.pt")
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return written(tmp_path / "c")


def objects_of(path: Path) -> dict[str, Any]:
    """Return every sharded object that is stored, by its unique key, loaded."""
    stored = load_sharded_metadata(path)
    request = {key: one for key, one in stored.items() if isinstance(one, ShardedObject)}
    loaded: dict[str, Any] = load(request, path, validate_access_integrity=False)
    return {key: loaded[key] for key in request}


def test_arrays_and_common(path: Path) -> None:
    """A checkpoint as small as they come."""
    assert load_plain_tensors(path)["w"].numpy().tolist() == WEIGHT.tolist()
    assert load_common_state_dict(path) == {"iteration": 7}


def test_a_key_with_folders(path: Path) -> None:
    """A key with ``/`` is a nested folder, which its writer overlooks itself."""
    shards(written(path, "a/b/w"), "a/b/o", {"0_1": 5})

    assert load_plain_tensors(path).keys() == {"w", "a/b/w"}
    assert objects_of(path) == {"a/b/o/shard_0_1": 5}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        pytest.param({"0_2": 0, "1_2": 1}, {"0_2": 0, "1_2": 1}, id="one-axis"),
        pytest.param({"0.0_1.2": 0, "0.1_1.2": 1}, {"0.0_1.2": 0, "0.1_1.2": 1}, id="whole"),
        pytest.param({"0.0_1": 0, "0.1_1": 1}, {"0.0_1.2": 0, "0.1_1.2": 1}, id="cut"),
        pytest.param(
            {"0.0.0_1.2": 0, "0.0.1_1.2": 1, "0.1.0_1.2": 2, "0.1.1_1.2": 3},
            {"0.0.0_1.2.2": 0, "0.0.1_1.2.2": 1, "0.1.0_1.2.2": 2, "0.1.1_1.2.2": 3},
            id="cut-three-axes",
        ),
        pytest.param(
            {"0.0_1": "old", "0.1_1": "old", "0.0_1.2": 0, "0.1_1.2": 1},
            {"0.0_1.2": 0, "0.1_1.2": 1},
            id="whole-beside-all-cut",
        ),
        pytest.param(
            {"0.0_1": 0, "0.0_2": 1, "1.0_2": 2},
            {"0.0_1.1": 0, "0.0_2.1": 1, "1.0_2.1": 2},
            id="two-shapes",
        ),
        pytest.param(
            {"x_1": 0, "0.0.0_1": 1, "_": 2, "3.0_1": 3, "4_4": 4, "00_1": 5}, {}, id="other-names"
        ),
    ],
)
def test_names_of_shards(names: dict[str, Any], expected: dict[str, Any], path: Path) -> None:
    """Names of 0.5 lack the last extent of the shape; the files together tell it."""
    shards(path, "rng", names)

    assert objects_of(path) == {f"rng/shard_{name}": value for name, value in expected.items()}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        pytest.param(
            {"0.0_1": 0, "0.2_1": 2}, r"the 2 files of this kind are not the 3 cells", id="gap"
        ),
        pytest.param(
            {"1.0_2": 0}, r"the 1 files of this kind are not the 2 cells", id="first-gone"
        ),
        pytest.param(
            {"0.0_1.2": 0, "0.0_1": "old", "0.1_1": 1}, "two saves are mixed", id="two-saves"
        ),
    ],
)
def test_cut_names_that_do_not_tell(names: dict[str, Any], message: str, path: Path) -> None:
    """What a file is must be certain to load it; tensors are not concerned."""
    shards(path, "rng", names)

    with pytest.raises(CorruptedCheckpointError, match=message):
        objects_of(path)
    assert load_plain_tensors(path).keys() == {"w"}


def test_an_object_of_another_shape_is_not_stored(path: Path) -> None:
    """A cut name does not stand in for any shape that is asked for."""
    shards(path, "rng", {"0.0_1": 0, "0.1_1": 1})
    wanted = ShardedObject("rng", None, (1, 4), (0, 1))

    with pytest.raises(CheckpointingException, match="rng/shard_0.1_1.4"):
        load({"o": wanted}, path)


class Custom:
    """Not a plain value."""


def test_an_object_that_needs_pickle(path: Path) -> None:
    """The error names key, file and type; allowed, it loads."""
    shards(path, "o", {"0_1": Custom()})

    with pytest.raises(UnsafeContentError, match=r"'o/shard_0_1'.*o/shard_0_1\.pt.*Custom"):
        objects_of(path)
    request = dict(load_sharded_metadata(path))
    loaded = load(request, path, options=LoadOptions(allow_pickle=True))
    assert type(loaded["o/shard_0_1"]).__name__ == "Custom"


def linked_chunks(path: Path) -> None:
    (path / "w").rename(path.parent / "elsewhere")
    (path / "w").symlink_to(path.parent / "elsewhere")


def linked_chunk(path: Path) -> None:
    (path / "w" / "0.0").unlink()
    (path / "w" / "0.0").symlink_to("/etc/hostname")


def linked_metadata(path: Path) -> None:
    (path / "w" / ".zarray").rename(path.parent / "zarray")
    (path / "w" / ".zarray").symlink_to(path.parent / "zarray")


def linked_object(path: Path) -> None:
    (path / "o").mkdir()
    (path / "o" / "shard_0_1.pt").symlink_to(path / "common.pt")


def endless_links(path: Path) -> None:
    (path / "loop").symlink_to(path)


def altered(**fields: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        file = path / "w" / ".zarray"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    change.__name__ = f"{fields}"
    return change


def no_chunk(path: Path) -> None:
    (path / "w" / "1.0").unlink()


def short_chunk(path: Path) -> None:
    (path / "w" / "1.0").write_bytes(b"xy")


def no_json(path: Path) -> None:
    (path / "w" / ".zarray").write_text("{")


def empty_metadata(path: Path) -> None:
    (path / "w" / ".zarray").write_text("")


@pytest.mark.parametrize(
    "change",
    [
        linked_chunks, linked_chunk, linked_metadata, linked_object, endless_links, no_chunk,
        short_chunk, no_json, empty_metadata, altered(shape=[1 << 40, 1 << 20]),
        altered(shape=[1 << 62, 1 << 62]), altered(shape=[0, 1 << 63]), altered(shape=[-4, 3]),
        altered(shape=[4000, 3]), altered(shape="x"), altered(chunks=[0, 3]),
        altered(chunks=[-2, 3]), altered(dtype="|O"), altered(dtype=[["a", "<f4"]]),
        altered(zarr_format=9),
        altered(shape=[1 << 40, 3], compressor={"id": "zlib", "level": 1}),
    ],
)  # fmt: skip
def test_hostile_and_damaged(change: Callable[[Path], None], path: Path) -> None:
    """Errors of our tree; nothing outside is read, nothing is allocated that is not there."""
    change(path)

    with pytest.raises(CorruptedCheckpointError):
        load_plain_tensors(path)


def test_links_are_named(path: Path) -> None:
    """All of them, and what to do."""
    linked_chunk(path)
    linked_object(path)

    with pytest.raises(CorruptedCheckpointError, match=r"o/shard_0_1\.pt.*w/0\.0.*hint: links"):
        load_plain_tensors(path)


def test_locks_of_the_writer_are_no_arrays(path: Path) -> None:
    """The folders ``*.sync`` that it leaves behind hold empty files."""
    (path / "w.sync").mkdir()
    (path / "w.sync" / ".zarray").touch()

    assert load_plain_tensors(path).keys() == {"w"}


def test_a_compressed_array(path: Path) -> None:
    """Its files are smaller than its shape; that is no damage."""
    import zarr

    array = zarr.create_array(
        store=str(path / "z"), shape=(1000,), chunks=(1000,), dtype="i4", zarr_format=2
    )
    array[:] = np.ones(1000, "i4")

    assert (path / "z" / "0").stat().st_size < 4000
    assert load_plain_tensors(path)["z"].tolist() == [1] * 1000


def test_chunks_without_their_document_are_named(path: Path) -> None:
    """An array that lost its .zarray is damage, not a key less."""
    written(path, "other/x")
    (path / "w" / ".zarray").unlink()

    with pytest.raises(CorruptedCheckpointError, match=r"'w' has chunks but no \.zarray"):
        load_plain_tensors(path)
