"""Saves through DCP in three steps on real ranks: round trips, plans used again, failures."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard as TensorShard
from torch.distributed._shard.sharded_tensor import ShardMetadata, init_from_local_shards
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dist_ckpt import (
    CorruptedCheckpointError,
    load,
    load_common_state_dict,
    load_plain_tensors,
)
from dist_ckpt._comm import group_communicator
from dist_ckpt._comm.store import StoreCommunicator
from dist_ckpt._formats.torch_dist.planners import MCoreLoadPlanner, MCoreSavePlanner
from dist_ckpt.errors import CheckpointingException, RankFailedError, StorageError
from dist_ckpt.mapping import ShardedTensor
from dist_ckpt.storage import LocalStore
from dist_ckpt.strategies.async_utils import (
    AsyncCallsQueue,
    AsyncRequest,
    PersistentAsyncCaller,
    TemporalAsyncCaller,
    UnmatchedAsyncCallsError,
)
from dist_ckpt.strategies.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from dist_ckpt.strategies.filesystem_async import FileSystemWriterAsync
from dist_ckpt.strategies.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
    verify_global_md_reuse,
)
from tests.multiprocess._world import run_ranks

pytestmark = pytest.mark.multiprocess

ROWS = torch.arange(21, dtype=torch.float32).view(7, 3)
FEW_ROWS = torch.arange(5.0).reshape(1, 5)


def cut(full: torch.Tensor, ranks: list[int]) -> DTensor:
    """Return this rank's rows of ``full``, uneven where they do not divide."""
    parts = list(full.chunk(len(ranks)))
    parts += [full[:0]] * (len(ranks) - len(parts))
    mesh = DeviceMesh("cpu", ranks)
    local = parts[ranks.index(dist.get_rank())].clone()
    return DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride()
    )


def state_of(rank: int, size: int) -> dict[str, Any]:
    """Return shards, this rank's own tensors of many kinds, and its own object."""
    return {
        "cut": cut(ROWS, list(range(size))),
        f"strided.{rank}": (torch.arange(12.0).view(3, 4) + rank).t(),
        f"bf16.{rank}": torch.full((5,), float(rank), dtype=torch.bfloat16),
        f"zero.{rank}": torch.tensor(rank),
        f"empty.{rank}": torch.empty(0, 3),
        f"object.{rank}": {"rank": rank},
    }


def check_saved(path: str, size: int) -> None:
    """Assert that DCP and this library both read what ``state_of`` has on each rank."""
    kinds = [
        lambda rank: (f"strided.{rank}", (torch.arange(12.0).view(3, 4) + rank).t()),
        lambda rank: (f"bf16.{rank}", torch.full((5,), float(rank), dtype=torch.bfloat16)),
        lambda rank: (f"zero.{rank}", torch.tensor(rank)),
        lambda rank: (f"empty.{rank}", torch.empty(0, 3)),
    ]
    expected = dict([("cut", ROWS), *(kind(rank) for rank in range(size) for kind in kinds)])
    assert_same(load_plain_tensors(path), expected)
    assert_same(dcp_read(path, expected), expected)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert (found[key].dtype, found[key].shape) == (value.dtype, value.shape), key
        assert torch.equal(found[key], value), key


def dcp_read(path: str, like: dict[str, torch.Tensor]) -> dict[str, Any]:
    target = {key: torch.full_like(value, 9) for key, value in like.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP says that there is no process group
        dcp.load(target, checkpoint_id=path, no_dist=True)
    return target


def flat_planner() -> MCoreSavePlanner:
    return MCoreSavePlanner(flatten_state_dict=False)


PLANNERS: dict[str, Callable[[], Any]] = {
    "default": lambda: None,
    "mcore": flat_planner,
    "mcore, nested": MCoreSavePlanner,
}


def plan_write_finalize(
    path: str, state: dict[str, Any], *, planner: str = "default", **options: Any
) -> tuple[Any, ...]:
    """Save at once; return what planning returned, with the metadata in place of its first."""
    writer = FileSystemWriterAsync(path, thread_count=2)
    ret, *rest = save_state_dict_async_plan(state, writer, planner=PLANNERS[planner](), **options)
    fn, preload, args = writer.get_save_function_and_args()
    if fn is not None:
        assert preload is not None
        args[1] = preload()
        fn(*args)
    save_state_dict_async_finalize(*ret)
    return (ret[1], *rest)


@contextmanager
def traffic() -> Iterator[dict[str, int]]:
    """Count this rank's exchanges and the bytes it puts into the store."""
    counts = {"exchanges": 0, "nbytes": 0}
    real_exchange = StoreCommunicator._exchange
    real_set, real_publish = StoreCommunicator._set, StoreCommunicator._publish

    def exchange(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts["exchanges"] += 1
        return real_exchange(self, *args, **kwargs)

    def set_(self: Any, key: str, value: object) -> None:
        counts["nbytes"] += len(pickle.dumps(value))
        real_set(self, key, value)

    def publish(self: Any, number: int, packed: Any) -> None:
        counts["nbytes"] += sum(map(len, packed))
        real_publish(self, number, packed)

    patch = pytest.MonkeyPatch()
    patch.setattr(StoreCommunicator, "_exchange", exchange)
    patch.setattr(StoreCommunicator, "_set", set_)
    patch.setattr(StoreCommunicator, "_publish", publish)
    try:
        yield counts
    finally:
        patch.undo()


# -- round trips -----------------------------------------------------------------------------------


def save_then_change(rank: int, size: int, path: str, planner: str, persistent: bool) -> Any:
    state = state_of(rank, size)
    writer = FileSystemWriterAsync(path, thread_count=2)
    ret, _, _, same, loaded = save_state_dict_async_plan(state, writer, planner=PLANNERS[planner]())
    for value in state.values():
        if isinstance(value, torch.Tensor):
            (value.to_local() if isinstance(value, DTensor) else value).zero_()
    fn, preload, args = writer.get_save_function_and_args()
    queue = AsyncCallsQueue(persistent)
    request = AsyncRequest(
        fn, args, [lambda: save_state_dict_async_finalize(*ret)], preload_fn=preload
    )
    idx = queue.schedule_async_request(request)
    done = queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    return idx, done, same, loaded, ret[1] is not None


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("persistent", [False, True])
def test_what_was_there_at_planning_is_written(
    tmp_path: Path, size: int, planner: str, persistent: bool
) -> None:
    """Changes after planning do not reach the files, which DCP and this library read alike."""
    path = str(tmp_path / "a" / "ckpt")
    results = run_ranks(save_then_change, size, path, planner, persistent)
    assert results == [(0, [0], False, False, rank == 0) for rank in range(size)]
    check_saved(path, size)
    if planner != "mcore":
        assert load_common_state_dict(path) == {f"object.{r}": {"rank": r} for r in range(size)}
    names = sorted(p.name for p in Path(path).iterdir())
    assert names[0] == ".metadata"
    assert all(name.endswith(".distcp") for name in names[1:])


def load_rows(rank: int, size: int, path: str) -> None:
    local = ROWS.tensor_split(size)[rank]
    start = int(local[0, 0]) // 3
    shard = ShardedTensor(
        "cut", torch.zeros_like(local), local.dtype, tuple(local.shape), (7, 3), (start, 0), None
    )
    loaded = load({"rows": shard}, path)
    assert torch.equal(loaded["rows"], local)
    assert loaded["object.0"] == {"rank": 0}


@pytest.mark.parametrize("planner", ["default", "mcore, nested"])
def test_it_loads_on_another_layout(tmp_path: Path, planner: str) -> None:
    """Three ranks save, two load, through this library."""
    path = str(tmp_path / "c")
    run_ranks(save_then_change, 3, path, planner, False)
    run_ranks(load_rows, 2, path)


def save_replicated(rank: int, size: int, path: str) -> None:
    plan_write_finalize(path, {"same": torch.ones(4), "cut": cut(ROWS, list(range(size)))})


def test_without_a_planner_replicas_are_stored_once(tmp_path: Path) -> None:
    """The default planner is DCP's, which lets one rank write what all have."""
    run_ranks(save_replicated, 2, str(tmp_path / "c"))
    assert_same(load_plain_tensors(tmp_path / "c"), {"same": torch.ones(4), "cut": ROWS})


def save_twice_planned(rank: int, size: int, path: str) -> None:
    plan_write_finalize(path, {"same": torch.ones(4)}, planner="mcore")


def save_few_rows(rank: int, size: int, path: str, planner: str) -> None:
    plan_write_finalize(path, {"few": cut(FEW_ROWS, [*range(size)])}, planner=planner)


@pytest.mark.parametrize("planner", PLANNERS)
def test_more_ranks_than_rows(tmp_path: Path, planner: str) -> None:
    """Several ranks have the same empty shard; that is no value planned twice."""
    run_ranks(save_few_rows, 3, str(tmp_path), planner)

    assert_same(dcp_read(str(tmp_path), {"few": FEW_ROWS}), {"few": FEW_ROWS})


def test_replicas_without_a_writer_are_refused_on_all_ranks(tmp_path: Path) -> None:
    """Nobody chooses between ranks that plan the same value: an error says which."""
    path = tmp_path / "c"
    for outcome in run_ranks(save_twice_planned, 2, str(path), expect_errors=True):
        assert "'same' by ranks [0, 1]" in outcome.message
        assert "dedup_replicated_tensors=True" in outcome.message
    assert not (path / ".metadata").exists()


def save_in_group(rank: int, size: int, path: str, members: list[int], coordinator: int) -> Any:
    group = dist.new_group(members)
    if rank not in members:
        with pytest.raises(CheckpointingException, match="not in the process group"):
            plan_write_finalize(path, {}, process_group=group, coordinator_rank=coordinator)
        return None
    out = {}
    for planner in PLANNERS:
        state = {"cut": cut(ROWS, members), f"own.{rank}": torch.full((2,), rank)}
        metadata, *_ = plan_write_finalize(
            f"{path}.{planner}",
            state,
            planner=planner,
            process_group=group,
            coordinator_rank=coordinator,
        )
        out[planner] = metadata is not None
    return out


@pytest.mark.parametrize(
    ("members", "coordinator", "committer"),
    [([0, 1, 2], 1, 1), ([0, 1, 2], 2, 2), ([1, 2], 2, 2), ([1, 2], 0, 1), ([2, 0], 2, 2)],
)
def test_groups_and_coordinators(
    tmp_path: Path, members: list[int], coordinator: int, committer: int
) -> None:
    """Any group saves, and any rank of it may commit: only that one has the metadata."""
    path = str(tmp_path / "c")
    results = run_ranks(save_in_group, 3, path, members, coordinator)
    has = [None if r is None else r["default"] for r in results]
    assert has == [r == committer if r in members else None for r in range(3)]
    expected = {"cut": ROWS, **{f"own.{r}": torch.full((2,), r) for r in members}}
    for planner in PLANNERS:
        assert_same(load_plain_tensors(f"{path}.{planner}"), expected)
        assert_same(dcp_read(f"{path}.{planner}", expected), expected)


def dcp_save_with_writer(rank: int, size: int, path: str, way: str) -> None:
    writer = FileSystemWriterAsync(path, thread_count=2)
    state = state_of(rank, size)
    if way == "save":
        dcp.save(state, storage_writer=writer, planner=DefaultSavePlanner())
    elif way == "async_save":
        dcp.async_save(state, storage_writer=writer).result()
    else:
        dcp.save(state, storage_writer=writer, use_collectives=False)
        state["cut"].to_local().zero_()
        dcp.load(state, storage_reader=CachedMetadataFileSystemReader(path))
        rows = ROWS.chunk(size)[rank]
        assert torch.equal(state["cut"].to_local(), rows)


@pytest.mark.parametrize("way", ["save", "async_save", "without collectives"])
def test_it_serves_dcp_itself(tmp_path: Path, way: str) -> None:
    """``torch.distributed.checkpoint`` takes the writer as it takes its own."""
    path = str(tmp_path / "c")
    run_ranks(dcp_save_with_writer, 2, path, way)
    if way != "without collectives":
        check_saved(path, 2)


def torch_sharded(rank: int, size: int, rows: int, fill: float | None) -> Any:
    """Return torch's ShardedTensor of ``rows`` rows of 3 for each rank."""
    start = rank * rows
    local = torch.full((rows, 3), fill) if fill is not None else ROWS[start : start + rows].clone()
    place = f"rank:{rank}/cpu"
    metadata = ShardMetadata(shard_offsets=[start, 0], shard_sizes=[rows, 3], placement=place)
    return init_from_local_shards([TensorShard(local, metadata)], rows * size, 3)


def save_and_load_torch_sharded(rank: int, size: int, path: str) -> None:
    tensor = torch_sharded(rank, size, 2, None)
    tensor.mcore_metadata = {"noted": "by the caller"}
    plan_write_finalize(path, {"cut": tensor, "part": cut(ROWS, [0, 1])}, planner="mcore")
    metadata = CachedMetadataFileSystemReader(path).read_metadata()
    assert metadata.mcore_data == {"cut": {"noted": "by the caller"}}

    target = {
        "cut": torch_sharded(rank, size, 3, 9.0),
        "part": cut(torch.full((9, 3), 9.0), [0, 1]),
    }
    described = ShardedTensor.from_rank_offsets("cut", torch.zeros(3, 3), (0, rank, size))
    described = replace(described, allow_shape_mismatch=True)
    planner = MCoreLoadPlanner(
        flatten_state_dict=False,
        shapes_validation_sharded_tensors=[described],
        allow_shape_mismatch_sharded_tensors={"cut": described, "part": described},
    )
    dcp.load(target, checkpoint_id=path, planner=planner)

    expected = torch.zeros(6, 3)
    expected[:4] = ROWS[:4]
    (shard,) = target["cut"].local_shards()
    assert torch.equal(shard.tensor, expected[rank * 3 : rank * 3 + 3])
    longer = torch.cat([ROWS, torch.zeros(2, 3)])
    assert torch.equal(target["part"].to_local(), longer.chunk(2)[rank])


def test_torch_sharded_tensors_in_and_out(tmp_path: Path) -> None:
    """What callers note of them is in the metadata; longer ones are filled with zeros."""
    run_ranks(save_and_load_torch_sharded, 2, str(tmp_path / "c"))
    assert torch.equal(load_plain_tensors(tmp_path / "c")["cut"], ROWS[:4])


# -- plans used again ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """What rank 1 does to its state dict before the third save."""

    name: str
    apply: Callable[[dict[str, Any]], None]


def added(state: dict[str, Any]) -> None:
    state["new"] = torch.arange(3)


def removed(state: dict[str, Any]) -> None:
    del state["own.1"]


def reshaped(state: dict[str, Any]) -> None:
    state["own.1"] = torch.full((2, 2), 7.0)


def retyped(state: dict[str, Any]) -> None:
    state["own.1"] = torch.full((4,), 7.0, dtype=torch.float64)


def became_object(state: dict[str, Any]) -> None:
    state["own.1"] = {"no": "tensor"}


CHANGES = {fn.__name__: fn for fn in (added, removed, reshaped, retyped, became_object)}


def own_state(rank: int, size: int, number: int) -> dict[str, Any]:
    return {
        "cut": cut(ROWS + number, list(range(size))),
        f"own.{rank}": torch.full((4,), float(number)),
        **{f"more.{rank}.{i}": torch.full((4,), float(number)) for i in range(30)},
    }


def three_saves(
    rank: int, size: int, path: str, planner: str, change: str | None, coordinator: int
) -> list[dict[str, Any]]:
    told, cached, metadata = [], None, None
    for number in range(4):
        state = own_state(rank, size, number)
        if change is not None and number >= 2 and rank == 1:
            CHANGES[change](state)
        writer = FileSystemWriterAsync(f"{path}.{number}")
        with traffic() as counts:
            ret, central, local, same, _ = save_state_dict_async_plan(
                state, writer, None, coordinator, PLANNERS[planner](), cached
            )
        fn, _, args = writer.get_save_function_and_args()
        assert fn is not None
        fn(*args)
        save_state_dict_async_finalize(*ret)
        cached = (central, local, same)
        told.append({"same": same, "metadata": ret[1] is not None, **counts})
    del metadata
    return told


@pytest.mark.parametrize("planner", ["default", "mcore"])
@pytest.mark.parametrize("coordinator", [0, 1])
def test_a_plan_is_used_again_while_nothing_changes(
    tmp_path: Path, planner: str, coordinator: int
) -> None:
    """From the third save on there is one exchange of some bytes, and the right data is written."""
    path = str(tmp_path / "c")
    ranks = run_ranks(three_saves, 3, path, planner, None, coordinator)
    full = 1 if coordinator == 0 else 2
    for rank, told in enumerate(ranks):
        assert [one["same"] for one in told] == [False, True, True, True]
        assert [one["metadata"] for one in told] == [rank == coordinator] * 2 + [False] * 2
        assert [one["exchanges"] for one in told] == [full, full, full, full]
        assert told[2]["nbytes"] < 1000
        if rank != 0:
            assert told[0]["nbytes"] > 10 * told[2]["nbytes"]
    for number in range(4):
        found = load_plain_tensors(f"{path}.{number}")
        assert torch.equal(found["cut"], ROWS + number)
        assert all(
            torch.equal(found[f"own.{r}"], torch.full((4,), float(number))) for r in range(3)
        )


@pytest.mark.parametrize("planner", ["default", "mcore"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_on_one_rank_is_noticed_by_all(tmp_path: Path, planner: str, change: str) -> None:
    """A value added, removed, reshaped or of another type on rank 1 only is planned anew by all."""
    path = str(tmp_path / "c")
    ranks = run_ranks(three_saves, 2, path, planner, change, 0)
    for rank, told in enumerate(ranks):
        # The third save: one rank could use its plan again, the other could not, so both plan.
        assert [one["exchanges"] for one in told[:3]] == [1, 1, 2]
        assert told[2]["metadata"] == (rank == 0)
    expected: dict[str, Any] = {"own.1": torch.full((4,), 2.0)}
    CHANGES[change](expected)
    for number in (2, 3):
        found = load_plain_tensors(f"{path}.{number}")
        assert torch.equal(found["cut"], ROWS + number)
        assert torch.equal(found["own.0"], torch.full((4,), float(number)))
        for key, value in expected.items():
            if not isinstance(value, torch.Tensor):
                assert load_common_state_dict(f"{path}.{number}")[key] == value
            elif change != "added" or key == "new":
                assert found[key].dtype == value.dtype
                assert torch.equal(found[key], value)
        assert ("own.1" in found) == (change not in {"removed", "became_object"})
        assert ("new" in found) == (change == "added")


def reuse_with_other_settings(rank: int, size: int, path: str) -> Any:
    state = own_state(rank, size, 0)
    cached = None
    for number in range(2):
        _, central, local, same, _ = plan_write_finalize(
            f"{path}.{number}", state, planner="mcore, nested", cached_ckpt_structure=cached
        )
        cached = (central, local, same)
    # The same plans, but offered by one rank only, and then to another planner.
    partly, *_ = plan_write_finalize(
        f"{path}.2",
        state,
        planner="mcore, nested",
        cached_ckpt_structure=cached if rank == 0 else None,
    )
    other, *_ = plan_write_finalize(
        f"{path}.3", state, planner="default", cached_ckpt_structure=cached
    )
    return partly is not None, other is not None


def test_a_plan_of_other_ranks_or_another_planner_is_made_anew(tmp_path: Path) -> None:
    """Whoever cannot use its plan again makes all ranks plan; so does another planner."""
    path = str(tmp_path / "c")
    assert run_ranks(reuse_with_other_settings, 2, path) == [(True, True), (False, False)]
    for number in range(4):
        assert torch.equal(load_plain_tensors(f"{path}.{number}")["cut"], ROWS)


def reuse_loaded(rank: int, size: int, path: str, change: str | None) -> Any:
    plan_write_finalize(f"{path}.0", own_state(rank, size, 0), planner="mcore")
    plans = CachedMetadataFileSystemReader(f"{path}.0").read_metadata().all_local_plans
    state = own_state(rank, size, 1)
    if change is not None and rank == 1:
        CHANGES[change](state)
    with traffic() as counts:
        metadata, _, local, _, loaded = plan_write_finalize(
            f"{path}.1", state, planner="mcore", loaded_all_plans=plans
        )
    wrapper = _DistWrapper(None, use_dist=True, coordinator_rank=0)
    verified = verify_global_md_reuse(plans, local, rank, wrapper)
    without = verify_global_md_reuse(plans if rank else [], local, rank, wrapper)
    fewer = verify_global_md_reuse(plans[:1], local, 0, wrapper)
    return metadata is not None, loaded, counts["exchanges"], verified, without, fewer


@pytest.mark.parametrize("change", [None, "added", "removed", "retyped"])
def test_plans_of_a_loaded_checkpoint(tmp_path: Path, change: str | None) -> None:
    """They are used again if all ranks have the same plan still, on CPU and gloo."""
    path = str(tmp_path / "c")
    results = run_ranks(reuse_loaded, 2, path, change)
    same = change is None
    # Planning is one exchange, or two when only some could use theirs again; the end is one more.
    planned = 2 if same else 3
    assert results == [
        (rank == 0 and not same, same, planned, same, False, False) for rank in range(2)
    ]
    found = load_plain_tensors(f"{path}.1")
    assert torch.equal(found["cut"], ROWS + 1)
    assert ("new" in found) == (change == "added")
    plans = CachedMetadataFileSystemReader(f"{path}.1").read_metadata().all_local_plans
    assert len(plans) == 2


# -- failures --------------------------------------------------------------------------------------


def broken_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(self: Any, name: str, extents: Any, *, nbytes: int) -> None:
        raise StorageError("no space on this device")

    monkeypatch.setattr(LocalStore, "write", write)


def fail_once(rank: int, size: int, path: str) -> Any:
    queue, told = AsyncCallsQueue(), []
    for number in range(3):
        writer = FileSystemWriterAsync(path, thread_count=2)
        ret, *_ = save_state_dict_async_plan(state_of(rank, size), writer)
        fn, preload, args = writer.get_save_function_and_args()
        finalize = lambda ret=ret: save_state_dict_async_finalize(*ret)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1 and number == 1:
                broken_disk(patch)
            queue.schedule_async_request(AsyncRequest(fn, args, [finalize], preload_fn=preload))
            try:
                queue.maybe_finalize_async_calls(blocking=True)
                told.append(None)
            except CheckpointException as error:
                told.append((str(error), sorted(error.failures), isinstance(error, StorageError)))
    queue.close()
    return told, queue.get_num_unfinalized_calls()


def test_a_write_failure_is_raised_on_all_ranks_once(tmp_path: Path) -> None:
    """Its text is on every rank, the checkpoint before it stays, and the next save is good."""
    path = str(tmp_path / "c")
    for told, left in run_ranks(fail_once, 3, path):
        assert told[0] is None
        assert told[2] is None
        message, ranks, is_ours = told[1]
        assert is_ours
        assert ranks == [1]
        assert "rank 1" in message
        assert "no space on this device" in message
        assert left == 0
    check_saved(path, 3)


def fail_first(rank: int, size: int, path: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            broken_disk(patch)
        plan_write_finalize(path, state_of(rank, size))


def test_nothing_is_committed_after_a_failure(tmp_path: Path) -> None:
    """There is no ``.metadata``, nor a leftover of it, and the path is no checkpoint."""
    path = tmp_path / "c"
    for outcome in run_ranks(fail_first, 2, str(path), expect_errors=True):
        assert outcome.error_type == "WriteFailedError"
        assert "no space on this device" in outcome.message
    assert not list(path.glob(".metadata*"))
    with pytest.raises(CheckpointingException):
        load_plain_tensors(path)
    run_ranks(save_then_change, 2, str(path), "default", False)
    check_saved(str(path), 2)


class _Broken(DefaultSavePlanner):
    """Fails in one of its hooks."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook

    def _may_fail(self, hook: str) -> None:
        if hook == self.hook and (dist.get_rank() == 1 or hook == "create_global_plan"):
            raise ZeroDivisionError(f"broken {hook}")

    def create_local_plan(self) -> Any:
        self._may_fail("create_local_plan")
        return super().create_local_plan()

    def create_global_plan(self, all_plans: Any) -> Any:
        self._may_fail("create_global_plan")
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: Any) -> Any:
        self._may_fail("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: Any) -> Any:
        self._may_fail("resolve_data")
        return super().resolve_data(write_item)


LATE_HOOKS = ("finish_plan", "resolve_data")


def fail_in_planner(rank: int, size: int, path: str, hook: str) -> None:
    writer = FileSystemWriterAsync(path)
    ret, *_ = save_state_dict_async_plan(state_of(rank, size), writer, None, 1, _Broken(hook))
    assert hook in LATE_HOOKS, "planning went on"
    fn, _, args = writer.get_save_function_and_args()
    if fn is not None:
        fn(*args)
    save_state_dict_async_finalize(*ret)


@pytest.mark.parametrize("hook", ["create_local_plan", "create_global_plan", *LATE_HOOKS])
def test_a_planner_that_fails_fails_on_all_ranks(tmp_path: Path, hook: str) -> None:
    """In planning at once; behind it when the save is finalized. Nothing is committed."""
    path = tmp_path / "c"
    for outcome in run_ranks(fail_in_planner, 3, str(path), hook, expect_errors=True):
        late = hook in LATE_HOOKS
        assert outcome.error_type == ("WriteFailedError" if late else "RankFailedError")
        assert f"ZeroDivisionError: broken {hook}" in outcome.message
    assert not list(path.glob(".metadata*"))


def finalize_without_metadata(rank: int, size: int, path: str) -> None:
    writer = FileSystemWriterAsync(path)
    save_state_dict_async_plan(state_of(rank, size), writer)
    fn, _, args = writer.get_save_function_and_args()
    assert fn is not None
    fn(*args)
    save_state_dict_async_finalize(writer, None, _DistWrapper(None, True, 0))


def test_metadata_that_is_lost_is_told_to_all_ranks(tmp_path: Path) -> None:
    """With a wrapper that knows of no plan, None is an error with a hint, not an assertion."""
    path = tmp_path / "c"
    for outcome in run_ranks(finalize_without_metadata, 2, str(path), expect_errors=True):
        assert outcome.error_type == "WriteFailedError"
        assert "the coordinator has no metadata" in outcome.message
    assert not (path / ".metadata").exists()


def stay_away(rank: int, size: int, path: str, step: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        module = "dist_ckpt._formats.torch_dist.coordination.group_communicator"
        patch.setattr(module, partial(group_communicator, timeout_secs=0.5))
        writer = FileSystemWriterAsync(path)
        if rank == 1 and step == "plan":
            return
        ret, *_ = save_state_dict_async_plan(state_of(rank, size), writer)
        fn, _, args = writer.get_save_function_and_args()
        assert fn is not None
        fn(*args)
        if rank == 1:
            return
        save_state_dict_async_finalize(*ret)


@pytest.mark.parametrize("step", ["plan", "write"])
def test_a_rank_that_does_not_come_is_named(tmp_path: Path, step: str) -> None:
    """Nobody waits for ever, and nothing is committed."""
    path = tmp_path / "c"
    outcomes = run_ranks(stay_away, 3, str(path), step, expect_errors=True)
    for rank in (0, 2):
        assert outcomes[rank].error_type == "BarrierTimeoutError"
        assert f"{step}: ranks [1] of 3 did not arrive" in outcomes[rank].message
    assert not list(path.glob(".metadata*"))


# -- requests and queues on real ranks -------------------------------------------------------------


def _fail(text: str) -> None:
    raise OSError(text)


def execute_sync_failing(rank: int, size: int, where: str) -> list[str]:
    done: list[str] = []
    request = AsyncRequest(
        (lambda: _fail("in the work"))
        if where == "work" and rank == 1
        else lambda: done.append("w"),
        (),
        [
            (lambda: _fail("in the end"))
            if where == "end" and rank == 0
            else lambda: done.append("f"),
            lambda: done.append("g"),
        ],
    )
    with pytest.raises((RankFailedError, OSError), match=f"in the {where}"):
        request.execute_sync()
    return done


@pytest.mark.parametrize(
    ("where", "done"), [("work", [["w"], []]), ("end", [["w"], ["w", "f"]])], ids=["work", "end"]
)
def test_a_request_stops_on_all_ranks_at_the_same_step(where: str, done: list[list[str]]) -> None:
    """No rank finalizes what failed on another one, nor waits for it."""
    assert run_ranks(execute_sync_failing, 2, where) == done


def callers(rank: int, size: int) -> list[bool]:
    told = []
    for caller in (TemporalAsyncCaller(), PersistentAsyncCaller()):
        fn = (lambda: _fail("mine")) if rank == 1 else None
        caller.schedule_async_call(AsyncRequest(fn, (), []))
        told.append(caller.is_current_async_call_done(blocking=True))
        told.append(isinstance(caller.take_error(), OSError))
        told.append(caller.take_error() is None)
        caller.close()
    return told


def test_callers_agree_that_a_call_is_done() -> None:
    """An error is told once, on the rank that has it."""
    assert run_ranks(callers, 2) == [[True, False, True] * 2, [True, True, True] * 2]


def unmatched(rank: int, size: int) -> str:
    queue = AsyncCallsQueue()
    for _ in range(2):
        queue.schedule_async_request(AsyncRequest(None, (), []))
    if rank == 1:
        queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
        queue.schedule_async_request(AsyncRequest(None, (), []))
    with pytest.raises(AssertionError, match="Unmatched async calls") as caught:
        queue.maybe_finalize_async_calls(blocking=True)
    assert isinstance(caught.value, UnmatchedAsyncCallsError)
    queue.close(abort=True)
    return str(caught.value)


def test_different_calls_are_named_with_their_ranks() -> None:
    """Every rank gets the same error."""
    told = run_ranks(unmatched, 3)
    assert len(set(told)) == 1
    assert "rank 0 finalizes call 0, rank 1 finalizes call 2, rank 2 finalizes call 0" in told[0]


def interrupted(rank: int, size: int, where: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    queue, ended, caller = AsyncCallsQueue(), threading.Event(), threading.get_ident()

    def work() -> None:
        if where == "waiting" and rank == 1:
            while "_status" not in functions_of(caller):
                ended.wait(0.01)
            os.kill(os.getpid(), signal.SIGINT)
            ended.wait(60)

    def finalize() -> None:
        if where == "finalizing" and rank == 1:
            raise KeyboardInterrupt

    queue.schedule_async_request(AsyncRequest(work, (), [finalize]))
    try:
        queue.maybe_finalize_async_calls(blocking=True)
    finally:
        ended.set()


def functions_of(thread: int) -> set[str]:
    """Return the names of the functions that a thread is in."""
    return {frame.name for frame in traceback.extract_stack(sys._current_frames()[thread])}


@pytest.mark.parametrize("where", ["waiting", "finalizing"])
def test_an_interrupt_of_one_rank_is_told_to_all(where: str) -> None:
    """Nobody waits for a rank that has stopped."""
    told = run_ranks(interrupted, 2, where, expect_errors=True, timeout_secs=60)

    assert [one.error_type for one in told] == ["RankFailedError", "KeyboardInterrupt"]
    assert "rank 1: KeyboardInterrupt" in told[0].message


def resave(rank: int, size: int, path: str) -> None:
    for number in range(2):
        plan_write_finalize(path, own_state(rank, size, number))


def test_an_older_checkpoint_is_replaced_in_one_step(tmp_path: Path) -> None:
    """Its files are not overwritten before the commit, and are gone behind it."""
    path = tmp_path / "c"
    run_ranks(resave, 2, str(path))
    assert torch.equal(load_plain_tensors(path)["cut"], ROWS + 1)
    assert len(list(path.iterdir())) == 2 * 2 + 1


def test_damage_is_noticed(tmp_path: Path) -> None:
    """A file cut short is an error of ours, not values."""
    path = tmp_path / "c"
    run_ranks(save_replicated, 2, str(path))
    for file in path.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(CorruptedCheckpointError):
        load_plain_tensors(path)
