"""zarr among real processes: all ranks write at once, others read on any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dist_ckpt import (
    CheckpointingException,
    CorruptedCheckpointError,
    ShardedObject,
    ShardedTensor,
    load,
    load_plain_tensors,
    save,
)
from dist_ckpt._formats.zarr import write as zarr_write
from dist_ckpt.errors import StorageError
from dist_ckpt.storage import LocalStore
from tests.multiprocess._world import run_ranks

pytestmark = pytest.mark.multiprocess

ROWS, COLUMNS = 1003, 384
WHOLE = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)
BOTH = pytest.mark.parametrize("version", [1, 2], ids=["zarr2", "zarr3"])
MIB = 1 << 20


def cut(total: int, rank: int, size: int) -> tuple[int, int]:
    """Return uneven bounds that lie on no grid."""
    return total * rank // size, total * (rank + 1) // size


def sharded(
    key: str, data: torch.Tensor | None, offset: tuple[int, int], extent: tuple[int, int]
) -> ShardedTensor:
    return ShardedTensor(key, data, torch.float32, extent, (ROWS, COLUMNS), offset, None)


def state(rank: int, size: int, *, filled: bool) -> dict[str, Any]:
    """Return rows, columns, a flattened range, a stack of layers, replicas, an object, a value."""
    low, high = cut(ROWS, rank, size)
    left, right = cut(COLUMNS, rank, size)
    flat = slice(*cut(ROWS * COLUMNS, rank, size))

    def data(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if filled else torch.zeros_like(tensor)

    return {
        "rows": sharded("model/rows", data(WHOLE[low:high]), (low, 0), (high - low, COLUMNS)),
        "columns": sharded("columns", data(WHOLE[:, left:right]), (0, left), (ROWS, right - left)),
        "flat": ShardedTensor("flat", data(WHOLE.flatten()[flat]), torch.float32, (ROWS, COLUMNS),
                              (ROWS, COLUMNS), (0, 0), None, flattened_range=flat),
        "layers": ShardedTensor.from_rank_offsets(
            "layers", data(torch.full((3, 5), rank, dtype=torch.bfloat16)), (0, rank, size),
            prepend_axis_num=1),
        "same": ShardedTensor.from_rank_offsets("same", data(WHOLE), replica_id=rank, writer="any"),
        "scale": ShardedTensor.from_rank_offsets("scale", data(torch.tensor(2.5)), replica_id=rank),
        "empty": ShardedTensor.from_rank_offsets("empty", torch.zeros(0, 3), replica_id=rank),
        "object": ShardedObject("rng", {"r": torch.tensor([rank])} if filled else None, (size,),
                                (rank,)),
        "step": 5 if filled else None,
    }  # fmt: skip


def save_all(rank: int, size: int, path: str, version: int) -> None:
    save(state(rank, size, filled=True), path, sharded_strategy=("zarr", version))


def load_same(rank: int, size: int, path: str) -> None:
    loaded, expected = load(state(rank, size, filled=False), path), state(rank, size, filled=True)
    for name, one in expected.items():
        if isinstance(one, ShardedTensor):
            assert torch.equal(loaded[name], one.data), name
    assert loaded["object"]["r"].tolist() == [rank]
    assert loaded["step"] == 5


def load_other(rank: int, size: int, path: str) -> None:
    """Cut each tensor as another one was cut."""
    low, high = cut(ROWS, rank, size)
    left, right = cut(COLUMNS, rank, size)
    flat = slice(*cut(ROWS * COLUMNS, rank, size))
    request = {
        "a": sharded("flat", None, (low, 0), (high - low, COLUMNS)),
        "b": sharded("model/rows", None, (0, left), (ROWS, right - left)),
        "c": ShardedTensor("columns", None, torch.float32, (ROWS, COLUMNS), (ROWS, COLUMNS), (0, 0),
                           None, flattened_range=flat),
    }  # fmt: skip
    loaded = load(request, path)
    assert torch.equal(loaded["a"], WHOLE[low:high])
    assert torch.equal(loaded["b"], WHOLE[:, left:right])
    assert torch.equal(loaded["c"], WHOLE.flatten()[flat])


@BOTH
@pytest.mark.parametrize(("saved", "loaded"), [(1, 1), (2, 4), (4, 2), (4, 3)])
def test_round_trips(tmp_path: Path, saved: int, loaded: int, version: int) -> None:
    """Every kind of cut, on as many ranks and on others."""
    path = tmp_path / "c"
    run_ranks(save_all, saved, str(path), version)

    run_ranks(load_same, saved, str(path))
    run_ranks(load_other, loaded, str(path))

    plain = load_plain_tensors(path)
    assert torch.equal(plain["flat"], WHOLE)
    assert plain["layers"].shape == (saved, 3, 5)
    assert plain["empty"].shape == (0, 3)
    assert not list(path.rglob("*pieces*"))
    assert not list(path.rglob("*__lock*"))


def fail_one(rank: int, size: int, path: str, version: int, where: str) -> str:
    """Save with a disk that fails on rank 1, in one of the steps of its own."""

    def refused(*args: object, **kwargs: object) -> None:
        raise StorageError("the disk says no")

    if rank == 1:
        owner = {"write": LocalStore, "_cell": zarr_write._Files, "shared_cell": zarr_write}
        setattr(owner[where], where, refused)
    with pytest.raises(CheckpointingException) as caught:
        save_all(rank, size, path, version)
    return str(caught.value)


@BOTH
@pytest.mark.parametrize("where", ["write", "_cell", "shared_cell"])
def test_what_fails_on_one_rank_fails_on_all(tmp_path: Path, where: str, version: int) -> None:
    """While pieces are passed on, while cells are written: nothing is committed, nothing stays."""
    messages = run_ranks(fail_one, 3, str(tmp_path / "c"), version, where)

    assert all("the disk says no" in message for message in messages)
    assert list(tmp_path.iterdir()) == []


@BOTH
def test_damage_is_told_on_every_rank(tmp_path: Path, version: int) -> None:
    """A chunk that has another size than the manifest says."""
    path = tmp_path / "c"
    run_ranks(save_all, 2, str(path), version)
    chunk = max((path / "model" / "rows").iterdir())
    chunk.write_bytes(chunk.read_bytes()[:-1])

    with pytest.raises(CorruptedCheckpointError, match="model/rows"):
        load_plain_tensors(path)


def memory(field: str) -> int:
    """Return ``VmRSS`` or ``VmHWM`` (its peak) of this process, bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def extra_peak_nbytes(rank: int, size: int, path: str, version: int) -> list[int]:
    """Return by how much a save and a load of 512 MiB raise the peak of the resident set."""
    tensors = [torch.full((64 * MIB // 4,), float(i)) for i in range(7)]
    tensors.append(torch.full((4096, 4096), 7.0).t())  # 64 MiB, not contiguous
    big = {
        str(i): ShardedTensor.from_rank_offsets(f"t{i}", tensor) for i, tensor in enumerate(tensors)
    }
    small = {"x": ShardedTensor.from_rank_offsets("x", torch.ones(4))}
    save(small, f"{path}/warm-up", sharded_strategy=("zarr", version))
    load(small, f"{path}/warm-up")
    peaks = []
    for call in (lambda: save(big, f"{path}/big", sharded_strategy=("zarr", version)),
                 lambda: load(big, f"{path}/big")):  # fmt: skip
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before = memory("VmRSS")
        call()
        peaks.append(memory("VmHWM") - before)
    assert all(bool((tensor == float(i)).all()) for i, tensor in enumerate(tensors))
    return peaks


@pytest.mark.slow
@BOTH
def test_only_a_few_chunks_are_held_besides_the_state(tmp_path: Path, version: int) -> None:
    """Two threads, each with a chunk or a shard; contiguous memory is written as it is."""
    ((saving, loading),) = run_ranks(extra_peak_nbytes, 1, str(tmp_path), version)

    print(f"extra peak RSS: save {saving / MIB:.1f} MiB, load {loading / MIB:.1f} MiB")
    assert saving < 96 * MIB
    assert loading < 96 * MIB
