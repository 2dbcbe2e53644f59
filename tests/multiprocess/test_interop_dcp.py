"""torch.distributed.checkpoint reads what we write, and we read what it writes."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.fsdp import fully_shard

from dist_ckpt import (
    CorruptedCheckpointError,
    LoadOptions,
    ShardedObject,
    ShardedTensor,
    UnsafeContentError,
    load,
    load_common_state_dict,
    load_model_and_optimizer,
    load_plain_tensors,
    load_sharded_metadata,
    save,
)
from dist_ckpt.training_state import CheckpointView
from tests.multiprocess._world import run_ranks

pytestmark = pytest.mark.multiprocess

UNEVEN = torch.arange(7 * 3, dtype=torch.float32).view(7, 3)


def ours(rank: int, size: int) -> dict[str, Any]:
    """Return uneven shards, replicas, a 0-dim and an empty tensor, objects and common values."""
    rows = [(0, 7)] if size == 1 else [(0, 5), (5, 7)]
    start, stop = rows[rank]
    cut = ShardedTensor(
        "dir/cut.weight", UNEVEN[start:stop].clone(), torch.float32, (stop - start, 3), (7, 3),
        (start, 0), None,
    )  # fmt: skip

    def same(key: str, value: torch.Tensor) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(key, value, replica_id=rank, writer="any")

    return {
        "cut": cut,
        "bf16": same("bf16", torch.ones(4, dtype=torch.bfloat16)),
        "fp8": same("fp8", torch.ones(4).to(torch.float8_e4m3fn)),
        "zero": same("zero", torch.tensor(3.5)),
        "empty": same("empty", torch.empty(0, 3)),
        "object": ShardedObject("object", {"rank": rank}, (size,), (rank,)),
        "step": 7,
        "plain": torch.arange(3),
    }


def save_ours(rank: int, size: int, path: str) -> None:
    save(ours(rank, size), path)


def read_by_dcp(rank: int, size: int, path: str) -> None:
    """Load by DCP's own collective load."""
    target = {
        "dir/cut.weight": torch.zeros(7, 3),
        "bf16": torch.zeros(4, dtype=torch.bfloat16),
        "fp8": torch.zeros(4).to(torch.float8_e4m3fn),
        "zero": torch.tensor(0.0),
    }
    dcp.load(target, checkpoint_id=path)
    assert torch.equal(target["dir/cut.weight"], UNEVEN)
    assert target["bf16"].tolist() == [1.0] * 4
    assert target["fp8"].float().tolist() == [1.0] * 4
    assert target["zero"].item() == 3.5


@pytest.mark.parametrize("size", [1, 2])
def test_dcp_reads_ours(tmp_path: Path, size: int) -> None:
    """``dcp.load`` on other numbers of ranks, ``FileSystemReader`` and ``dcp_to_torch_save``."""
    path = tmp_path / "c"
    run_ranks(save_ours, size, str(path))

    run_ranks(read_by_dcp, 3 - size, str(path))

    metadata = FileSystemReader(path).read_metadata()
    entry = metadata.state_dict_metadata["dir/cut.weight"]
    assert isinstance(entry, TensorStorageMetadata)
    assert tuple(entry.size) == (7, 3)
    assert [tuple(c.sizes) for c in entry.chunks] == ([(7, 3)] if size == 1 else [(5, 3), (2, 3)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it is used without a process group
        dcp_to_torch_save(path, tmp_path / "all.pt")
    whole = torch.load(tmp_path / "all.pt", weights_only=True)
    flat = whole if "dir/cut.weight" in whole else {".".join(k): v for k, v in whole.items()}
    assert torch.equal(flat["dir/cut.weight"], UNEVEN)
    assert flat["empty"].shape == (0, 3)


# -- theirs ----------------------------------------------------------------------------------------


def trained(rank: int, size: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a small FSDP2 model after one step; sizes that no world divides."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def whole_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    full = {f"model.{k}": v.full_tensor() for k, v in model.state_dict().items()}  # type: ignore[attr-defined]
    names = {id(p): n for n, p in model.named_parameters()}
    for parameter, states in optimizer.state.items():
        for name, value in states.items():
            tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
            full[f"optimizer.state.{names[id(parameter)]}.{name}"] = tensor
    return {key: value.detach().clone() for key, value in full.items()}


def save_theirs(rank: int, size: int, path: str) -> dict[str, Any]:
    model, optimizer = trained(rank, size)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    extra = {"step": 3, "names": ["a", "b"]}
    dcp.save(
        {"model": model_state, "optimizer": optimizer_state, "extra": extra}, checkpoint_id=path
    )
    return whole_state(model, optimizer)


def read_theirs(rank: int, size: int, path: str) -> dict[str, Any]:
    """Load into a fresh model and optimizer through a view; and single boxes by ``load``."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    view = CheckpointView.open(path)
    view.load_model(0, model)
    view.load_optimizer(0, optimizer, [model])
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert view.common["extra"] == {"step": 3, "names": ["a", "b"]}
    whole = whole_state(model, optimizer)
    start, stop = 7 * rank // size, 7 * (rank + 1) // size
    rows = ShardedTensor(
        "model.0.weight", torch.zeros(stop - start, 5), torch.float32, (stop - start, 5), (7, 5),
        (start, 0), None,
    )  # fmt: skip
    loaded = load({"rows": rows}, path)
    assert torch.equal(loaded["rows"], whole["model.0.weight"][start:stop])
    return whole


@pytest.mark.parametrize("size", [1, 3])
def test_we_read_what_dcp_wrote_of_fsdp2(tmp_path: Path, size: int) -> None:
    """Model, optimizer and values, saved by ``dcp.save`` on 2 ranks, on fewer and more ranks."""
    path = str(tmp_path / "c")
    saved = run_ranks(save_theirs, 2, path)[0]

    loaded = run_ranks(read_theirs, size, path)

    for whole in loaded:
        assert saved.keys() == whole.keys()
        assert [k for k in saved if not torch.equal(saved[k], whole[k])] == []
    assert torch.equal(load_plain_tensors(path)["model.0.weight"], saved["model.0.weight"])
    assert "model.1.bias" in load_sharded_metadata(path)


SHAPES = ("app", "plain", "titan", "lightning")


def save_shapes(rank: int, size: int, root: str) -> dict[str, Any]:
    """Save one model and optimizer in the shapes of tests/unit/test_dcp_names.py, sharded."""
    model, optimizer = trained(rank, size)
    a, b = get_state_dict(model, optimizer)
    flat = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    step = {"train_state": {"step": torch.tensor(3)}}
    dcp.save({"app": {"model": a, "optim": b}}, checkpoint_id=f"{root}/app")
    dcp.save(model.state_dict(), checkpoint_id=f"{root}/plain")
    dcp.save({**model.state_dict(), "optimizer": flat, **step}, checkpoint_id=f"{root}/titan")
    dcp.save({"model": a, "optimizer_0": b}, checkpoint_id=f"{root}/lightning")
    return whole_state(model, optimizer)


def read_shapes(rank: int, size: int, root: str) -> dict[str, dict[str, Any]]:
    found = {}
    for shape in SHAPES:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = None
        if shape != "plain":
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        common = load_model_and_optimizer(f"{root}/{shape}", model, optimizer)
        assert common.get("train_state") == ({"step": 3} if shape == "titan" else None)
        assert optimizer is None or optimizer.param_groups[0]["lr"] == 0.25
        found[shape] = whole_state(model, optimizer or torch.optim.SGD(model.parameters()))
    return found


def test_live_objects_load_what_dcp_wrote_in_other_shapes(tmp_path: Path) -> None:
    """FSDP2 on two ranks, saved by ``dcp.save``, into FSDP2 on two ranks and on one."""
    saved = run_ranks(save_shapes, 2, str(tmp_path))[0]
    for size in (1, 2):
        for found in run_ranks(read_shapes, size, str(tmp_path)):
            for shape in SHAPES:
                expected = {k for k in saved if shape != "plain" or k.startswith("model.")}
                assert found[shape].keys() == expected
                assert all(torch.equal(saved[k], found[shape][k]) for k in expected), shape


# -- hostile ---------------------------------------------------------------------------------------


class Hostile:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it is used without a process group
        dcp.save(
            {"x": torch.arange(6.0), "o": {"plain": 1}}, checkpoint_id=tmp_path / "c", no_dist=True
        )
    return tmp_path / "c"


def request() -> dict[str, ShardedTensor]:
    return {"x": ShardedTensor.from_rank_offsets("x", torch.zeros(6))}


def test_hostile_metadata_is_not_run(theirs: Path, tmp_path: Path) -> None:
    """A pickle that names os.system is refused before it runs."""
    proof = tmp_path / "proof"
    (theirs / ".metadata").write_bytes(pickle.dumps(Hostile(f"touch {proof}")))

    for call in (load_plain_tensors, lambda path: load(request(), path)):
        with pytest.raises(UnsafeContentError, match="system"):
            call(theirs)
    assert not proof.exists()


def test_hostile_objects_are_not_run(tmp_path: Path) -> None:
    """Values that another writer pickled need ``allow_pickle``."""
    proof, path = tmp_path / "proof", tmp_path / "c"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            {"x": torch.arange(6.0), "o": Hostile(f"touch {proof}")}, checkpoint_id=path,
            no_dist=True,
        )  # fmt: skip

    with pytest.raises(UnsafeContentError, match="'o'"):
        load_common_state_dict(path)
    assert not proof.exists()
    load_common_state_dict(path, options=LoadOptions(allow_pickle=True))
    assert proof.exists()


def changed(path: Path, change: Any) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def _info(metadata: Any, key: str = "x") -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == key)


def climb(metadata: Any) -> None:
    _info(metadata).relative_path = "../outside.distcp"


def absolute(metadata: Any) -> None:
    _info(metadata).relative_path = "/etc/passwd"


def behind_the_end(metadata: Any) -> None:
    _info(metadata).offset = 1 << 40


def negative(metadata: Any) -> None:
    _info(metadata).offset = -8


def too_long(metadata: Any) -> None:
    _info(metadata).length = 1 << 40


def chunk_outside(metadata: Any) -> None:
    metadata.state_dict_metadata["x"].chunks[0].offsets = torch.Size([3])


def chunk_twice(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["x"]
    entry.size = torch.Size([12])
    entry.chunks.append(entry.chunks[0])


def not_metadata(metadata: Any) -> None:
    metadata.state_dict_metadata = 3


@pytest.mark.parametrize(
    "change",
    [climb, absolute, behind_the_end, negative, too_long, chunk_outside, chunk_twice, not_metadata],
)
def test_wrong_metadata_is_refused(theirs: Path, change: Any) -> None:
    """Nothing outside of the checkpoint's files is ever read, nothing is believed unchecked."""
    (theirs.parent / "outside.distcp").write_bytes(bytes(4096))
    changed(theirs, change)

    with pytest.raises(CorruptedCheckpointError):
        load(request(), theirs)


@pytest.mark.parametrize("data", [b"", b"\x80", b"garbage", pickle.dumps({"a": 1})])
def test_torn_metadata_is_corruption(theirs: Path, data: bytes) -> None:
    """Whatever pickle makes of it."""
    (theirs / ".metadata").write_bytes(data)

    with pytest.raises(CorruptedCheckpointError, match=r"[.]metadata"):
        load(request(), theirs)


def test_a_record_that_is_another_tensor_is_corruption(theirs: Path) -> None:
    """The record must have the dtype and shape that the metadata says."""

    def shrink(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["x"]
        entry.size = torch.Size([3])
        entry.chunks[0].sizes = torch.Size([3])

    changed(theirs, shrink)

    with pytest.raises(CorruptedCheckpointError, match="shape"):
        load({"x": ShardedTensor.from_rank_offsets("x", torch.zeros(3))}, theirs)
