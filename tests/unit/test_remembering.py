"""A save with the plan of the save before: only what is the same is taken again."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dist_ckpt import ShardedTensor, load, save
from dist_ckpt._comm.store import StoreCommunicator
from dist_ckpt._formats.torch_dist import format as torch_dist
from dist_ckpt.errors import CheckpointingException
from dist_ckpt.options import SaveOptions
from dist_ckpt.serialization import single_process
from dist_ckpt.strategies.base import SaveCommonStrategy
from dist_ckpt.strategies.torch import TorchDistSaveShardedStrategy
from dist_ckpt.testing import ThreadWorld
from dist_ckpt.testing.world import RankErrors
from dist_ckpt.training_state import SaveMemory, TrainingState, save_training_state


def rows(comm: Any, value: float, n: int = 4) -> dict[str, Any]:
    part = torch.full((n // comm.size, 3), value + comm.rank)
    return {"x": ShardedTensor.from_rank_offsets("x", part, (0, comm.rank, comm.size)), "at": value}


def loaded(path: Path, n: int = 4) -> Any:
    request = {"x": ShardedTensor.from_rank_offsets("x", torch.zeros(n, 3))}
    return load(request, path, communicator=single_process())


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an entry each time a plan is made."""
    made: list[int] = []
    original = torch_dist.assign_writers

    def noting(*args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch_dist, "assign_writers", noting)
    return made


def in_turn(world: int, path: Path, steps: list[Callable[[Any], dict[str, Any]]]) -> None:
    """Save states one after the other, each rank with one strategy of its own."""

    def job(comm: Any) -> None:
        strategy = TorchDistSaveShardedStrategy()
        for number, step in enumerate(steps):
            save(step(comm), path / str(number), strategy, communicator=comm)

    ThreadWorld(world).run(job)


@pytest.mark.parametrize("world", [1, 2])
def test_the_same_description_is_planned_once(world: int, tmp_path: Path, plans: list[int]) -> None:
    """Values differ from save to save, and are those of the save."""
    in_turn(world, tmp_path, [lambda comm, v=v: rows(comm, v) for v in (1.0, 5.0, 7.0)])

    assert len(plans) == 1
    for number, value in enumerate((1.0, 5.0, 7.0)):
        found = loaded(tmp_path / str(number))
        expected = torch.cat([torch.full((4 // world, 3), value + r) for r in range(world)])
        assert torch.equal(found["x"], expected)
        assert found["at"] == value


@pytest.mark.parametrize("changed", ["shape", "dtype", "key", "one more", "one rank", "replica"])
def test_another_description_is_planned_anew(
    changed: str, tmp_path: Path, plans: list[int]
) -> None:
    """On whatever rank it is another; and the one before is then another again."""

    def other(comm: Any) -> dict[str, Any]:
        state = rows(comm, 2.0, 8 if changed == "shape" else 4)
        if changed == "dtype":
            state["x"] = ShardedTensor.from_rank_offsets(
                "x", state["x"].data.double(), (0, comm.rank, comm.size)
            )
        elif changed == "key":
            state["y"] = ShardedTensor.from_rank_offsets(
                "y", state.pop("x").data, (0, comm.rank, 2)
            )
        elif changed == "one more" or (changed == "one rank" and comm.rank == 1):
            state["z"] = ShardedTensor.from_rank_offsets(
                "z", torch.ones(2), replica_id=0 if changed == "one rank" else comm.rank
            )
        elif changed == "replica":
            state["x"] = ShardedTensor.from_rank_offsets(
                "x", torch.full((4, 3), 2.0), replica_id=1 - comm.rank
            )
        return state

    in_turn(2, tmp_path, [lambda comm: rows(comm, 1.0), other, lambda comm: rows(comm, 3.0)])

    assert len(plans) == 3
    assert torch.equal(loaded(tmp_path / "2")["x"][:, 0], torch.tensor([3.0, 3, 4, 4]))


def test_what_is_wrong_now_is_refused_though_it_was_right_before(tmp_path: Path) -> None:
    """A gap that a changed rank leaves is found; nothing is committed."""

    def gap(comm: Any) -> dict[str, Any]:
        return rows(comm, 2.0) if comm.rank == 0 else {"at": 2.0}

    with pytest.raises(RankErrors, match="'x'.*saved by no main replica"):
        in_turn(2, tmp_path, [lambda comm: rows(comm, 1.0), gap])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0"]


def test_a_save_after_a_failed_one_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What failed leaves nothing, and the plan is no worse for it."""
    from dist_ckpt.storage import local

    strategy, comm = TorchDistSaveShardedStrategy(), single_process()
    save(rows(comm, 1.0), tmp_path / "a", strategy, communicator=comm)
    with monkeypatch.context() as patch:
        patch.setattr(local, "_write_all", _fail)
        with pytest.raises(CheckpointingException, match="boom"):
            save(rows(comm, 2.0), tmp_path / "b", strategy, communicator=comm)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]

    save(rows(comm, 3.0), tmp_path / "b", strategy, communicator=comm)

    assert torch.equal(loaded(tmp_path / "b")["x"], torch.full((4, 3), 3.0))


def _fail(*_: Any) -> None:
    raise OSError(28, "boom")


def test_second_saves_exchange_no_descriptions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank tells a number in place of its description, however much it has."""
    told: list[int] = []
    original = StoreCommunicator._set

    def noting(self: Any, key: str, value: Any) -> None:
        if "/in/" in key:
            told.append(len(pickle.dumps(value[1])))
        original(self, key, value)

    monkeypatch.setattr(StoreCommunicator, "_set", noting)
    many = {f"k{i}": torch.ones(2) for i in range(300)}

    def state(comm: Any) -> dict[str, Any]:
        return {
            key: ShardedTensor.from_rank_offsets(key, x, (0, comm.rank, comm.size))
            for key, x in many.items()
        }

    in_turn(2, tmp_path, [state, state])

    planning = told[0], told[3]  # the first save: description, layout, files; the second: two
    assert planning[0] > 10_000
    assert planning[1] <= 64


def test_a_plan_is_not_taken_for_that_of_another_rank(tmp_path: Path, plans: list[int]) -> None:
    """Processes that go on in another order plan anew, though each describes the same."""
    strategies = [TorchDistSaveShardedStrategy() for _ in range(3)]

    def state(process: int, value: float) -> dict[str, Any]:
        part = torch.full((2, 3), value + process)
        return {"x": ShardedTensor.from_rank_offsets("x", part, (0, process, 3)), "at": value}

    orders = [(0, 1, 2), (1, 0, 2), (1, 0, 2), (1, 2, 0), (0, 2, 1)]
    for number, order in enumerate(orders):

        def job(comm: Any, number: int = number, order: tuple[int, ...] = order) -> None:
            process = order[comm.rank]
            save(
                state(process, 10.0 * number), tmp_path / str(number), strategies[process],
                communicator=comm,
            )  # fmt: skip

        ThreadWorld(3).run(job)
        found = loaded(tmp_path / str(number), 6)
        assert found["x"][::2, 0].tolist() == [10.0 * number + process for process in range(3)]
        assert found["at"] == 10.0 * number

    assert len(plans) == 4


class _Aside(SaveCommonStrategy):
    """Stores the common part its own way, under the name of ours."""

    def __init__(self) -> None:
        super().__init__("json", 1)

    def save_common(self, common_state_dict: Any, checkpoint_dir: Any) -> None:
        Path(checkpoint_dir, "aside.txt").write_text(repr(common_state_dict))

    def save_sharded_objects(self, *_: Any) -> None:
        raise NotImplementedError

    def can_handle_sharded_objects(self) -> bool:
        return False


def test_another_way_to_store_the_common_part_takes_no_plan_of_ours(tmp_path: Path) -> None:
    """It is no bytes alone, however equal the descriptions are."""
    strategy, comm = TorchDistSaveShardedStrategy(), single_process()
    for number, common in enumerate((None, _Aside(), None)):
        state = rows(comm, float(number))
        save(state, tmp_path / str(number), strategy, common, communicator=comm)

    assert [(tmp_path / str(n) / "aside.txt").exists() for n in range(3)] == [False, True, False]
    assert [(tmp_path / str(n) / "common.json").exists() for n in range(3)] == [True, False, True]
    assert loaded(tmp_path / "2")["at"] == 2.0


def test_dcp_metadata_may_be_left_out_from_save_to_save(tmp_path: Path) -> None:
    """The option counts for each save, whatever is remembered."""
    strategy, comm = TorchDistSaveShardedStrategy(), single_process()
    for name, wanted in (("a", True), ("b", False), ("c", True)):
        options = SaveOptions(dcp_metadata=wanted)
        save(rows(comm, 1.0), tmp_path / name, strategy, communicator=comm, options=options)

    assert [(tmp_path / name / ".metadata").exists() for name in "abc"] == [True, False, True]
    assert (tmp_path / "a/.metadata").read_bytes() == (tmp_path / "c/.metadata").read_bytes()
    assert torch.equal(loaded(tmp_path / "b")["x"], torch.full((4, 3), 1.0))


def test_live_models_are_saved_as_they_are_now(tmp_path: Path, plans: list[int]) -> None:
    """Trained on, grown, and replaced."""
    memory, comm = SaveMemory(), single_process()
    model = nn.Sequential(nn.Linear(3, 2))

    def saved(name: str) -> dict[str, torch.Tensor]:
        state = TrainingState(models=[model])
        save_training_state(tmp_path / name, state, memory=memory, communicator=comm)
        weight = model[0].weight.detach()
        request = {
            "w": ShardedTensor.from_rank_offsets("models.0.0.weight", torch.zeros_like(weight))
        }
        found = load(request, tmp_path / name, communicator=comm, validate_access_integrity=False)
        assert torch.equal(found["w"], weight)
        return dict(model.state_dict())

    saved("a")
    with torch.no_grad():
        model[0].weight.add_(1)
    saved("b")
    assert len(plans) == 1
    model.append(nn.Linear(2, 2))
    saved("c")
    model[0] = nn.Linear(3, 2)
    saved("d")
    assert len(plans) in (2, 3)


def test_a_copy_remembers_nothing() -> None:
    """In another process live objects are others."""
    memory = SaveMemory()
    for other in (copy.copy(memory), copy.deepcopy(memory), pickle.loads(pickle.dumps(memory))):
        assert isinstance(other, SaveMemory)
        assert other is not memory
        assert other.planner.known is None
