"""Checkpoints of other writers that are not what they should be: errors of the tree, no more."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from dist_ckpt import (
    CorruptedCheckpointError,
    load_common_state_dict,
    load_plain_tensors,
    save_model_and_optimizer,
)
from dist_ckpt.training_state import CheckpointView

# DCP says so whenever it saves without a process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def foreign(path: Path, change: Any) -> Path:
    dcp.save({"w": torch.ones(3), "l": {"a": 1, "b": 2}}, checkpoint_id=path, no_dist=True)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return path


def set_dtype(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].properties.dtype = "x"


def cross_paths(metadata: Any) -> None:
    metadata.planner_data.update({"l.a": ("l", 0), "l.b": ("l", "x")})


def empty_path(metadata: Any) -> None:
    metadata.planner_data["l.a"] = ()


def test_a_dtype_that_is_none(tmp_path: Path) -> None:
    """Noticed when the metadata is read, not when the tensor is."""
    with pytest.raises(CorruptedCheckpointError, match="unknown dtype"):
        load_plain_tensors(foreign(tmp_path / "c", set_dtype))


def test_paths_that_contradict_each_other(tmp_path: Path) -> None:
    """One key says list, another says dict."""
    with pytest.raises(CorruptedCheckpointError, match="does not fit those of other keys"):
        load_common_state_dict(foreign(tmp_path / "c", cross_paths))


def test_an_empty_path_is_none(tmp_path: Path) -> None:
    """The value stands under its flat key."""
    common = load_common_state_dict(foreign(tmp_path / "c", empty_path))

    assert common == {"l.a": 1, "l": {"b": 2}}


def test_a_memo_index_beyond_the_file(tmp_path: Path) -> None:
    """A few bytes must not make the unpickler ask for gigabytes."""
    path = foreign(tmp_path / "c", lambda metadata: None)
    (path / ".metadata").write_bytes(b"\x80\x02Nr\x00\x00\x00\x70.")

    with pytest.raises(CorruptedCheckpointError, match="memo index"):
        load_plain_tensors(path)


def test_a_record_that_is_no_plain_tensor(tmp_path: Path) -> None:
    """A sparse tensor in place of the expected one."""
    path = foreign(tmp_path / "c", lambda metadata: None)
    data = tmp_path / "record"
    torch.save(torch.ones(3).to_sparse(), data)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for place, info in metadata.storage_data.items():
        if place.fqn == "w":
            info.relative_path, info.offset, info.length = "record", 0, data.stat().st_size
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    data.rename(path / "record")

    with pytest.raises(CorruptedCheckpointError, match="'w'.*is not a float32 tensor"):
        load_plain_tensors(path)


def test_a_relative_path_means_where_it_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changing the directory between opening and loading changes nothing."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    monkeypatch.chdir(tmp_path)
    save_model_and_optimizer("c", model)
    view = CheckpointView.open("c")
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")

    view.load_model(0, other)

    assert torch.equal(model.weight, other.weight)
