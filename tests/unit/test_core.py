"""metadata.json: written, recognised, and refused where it is something else."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt import CheckpointNotFoundError, CorruptedCheckpointError, StorageError
from dist_ckpt.core import (
    CONFIG_FNAME,
    CheckpointingConfig,
    check_is_distributed_checkpoint,
    maybe_load_config,
    save_config,
)


def test_a_config_round_trips(tmp_path: Path) -> None:
    """An older one is replaced; nothing else is left."""
    save_config(CheckpointingConfig("zarr", 3), tmp_path)
    config = CheckpointingConfig("torch_dist", 1, common_backend="json")
    save_config(config, tmp_path)

    assert maybe_load_config(tmp_path) == config
    assert maybe_load_config(str(tmp_path)) == config
    assert check_is_distributed_checkpoint(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == [CONFIG_FNAME]


def test_fields_of_other_releases(tmp_path: Path) -> None:
    """Unknown ones are ignored, absent ones have their defaults: older checkpoints load."""
    fields = {"sharded_backend": "torch_dist", "from_the_future": [1]}
    (tmp_path / CONFIG_FNAME).write_text(json.dumps(fields))

    assert maybe_load_config(tmp_path) == CheckpointingConfig("torch_dist", 1, "torch", 1)


def test_several_processes_may_write(tmp_path: Path) -> None:
    """As in old releases every rank did: none meets the temporary file of another."""
    threads = [
        threading.Thread(target=save_config, args=(CheckpointingConfig("torch_dist"), tmp_path))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert maybe_load_config(tmp_path) == CheckpointingConfig("torch_dist")
    assert [entry.name for entry in tmp_path.iterdir()] == [CONFIG_FNAME]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    """And nothing else: a reader never sees half a file."""
    old = tmp_path / CONFIG_FNAME
    old.mkdir()  # what cannot be replaced by a file

    with pytest.raises(StorageError, match="cannot write"):
        save_config(CheckpointingConfig("torch_dist"), tmp_path)

    assert list(tmp_path.iterdir()) == [old]
    with pytest.raises(CheckpointNotFoundError):
        save_config(CheckpointingConfig("torch_dist"), tmp_path / "no")


@pytest.mark.parametrize("path", ["", None])
def test_no_path_is_no_checkpoint(
    path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Least of all the one in the working directory."""
    save_config(CheckpointingConfig("torch_dist"), tmp_path)
    monkeypatch.chdir(tmp_path)

    assert maybe_load_config(path) is None
    assert not check_is_distributed_checkpoint(path)


def test_nothing_there(tmp_path: Path) -> None:
    """No directory, no file, a file in place of the directory."""
    (tmp_path / "file").write_text("{}")
    for path in (tmp_path, tmp_path / "no", tmp_path / "file"):
        assert maybe_load_config(path) is None
        assert not check_is_distributed_checkpoint(path)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b"3", b"\xff\xfe", b'{"sharded_backend": 3}', b"{}",
        b'{"sharded_backend": "a", "common_backend_version": true}', b"[" * 100000,
        b" " * ((1 << 20) + 1),
    ],
    ids=["empty", "torn", "list", "null", "number", "no text", "type", "no fields", "bool", "deep",
         "long"],
)  # fmt: skip
def test_something_else_is_corruption(tmp_path: Path, content: bytes) -> None:
    """Never another error; and it is no checkpoint."""
    (tmp_path / CONFIG_FNAME).write_bytes(content)

    with pytest.raises(CorruptedCheckpointError):
        maybe_load_config(tmp_path)
    assert not check_is_distributed_checkpoint(tmp_path)
