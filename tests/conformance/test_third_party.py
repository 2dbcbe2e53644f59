"""A backend that this library does not know: it passes the kit, and what goes wrong is told."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_ckpt import ShardedObject, ShardedTensor, load, save
from dist_ckpt.errors import (
    CheckpointingException,
    ConfigError,
    CorruptedCheckpointError,
    MismatchError,
    RankFailedError,
    UnknownStrategyError,
)
from dist_ckpt.serialization import (
    load_common_state_dict,
    load_plain_tensors,
    load_sharded_objects,
    load_tensors_metadata,
    remove_sharded_tensors,
)
from dist_ckpt.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from dist_ckpt.strategies.base import (
    StrategyAction,
    default_strategies,
    get_default_strategy,
    register_default_strategy,
)
from dist_ckpt.testing import StrategyConformance, ThreadWorld
from dist_ckpt.types import Communicator
from tests.conformance._npz import NpzAsyncSaveStrategy, NpzLoadStrategy, NpzSaveStrategy

HOME = "tests.conformance._npz"


class TestNpz(StrategyConformance):
    save_strategy = NpzSaveStrategy("npz", 1)
    load_strategy = NpzLoadStrategy()


class TestNpzAsync(StrategyConformance):
    save_strategy = NpzAsyncSaveStrategy("npz", 1)
    load_strategy = NpzLoadStrategy()
    common_strategy = ("torch", 1)
    worlds = ((2, 4),)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what a test registers."""
    for action in StrategyAction:
        monkeypatch.setitem(default_strategies, action.value, {})


def install(folder: Path, points: dict[str, str], name: str = "npz-backend") -> None:
    """Make what an installed package leaves: its dist-info with entry points."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{point} = {value}" for point, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[dist_ckpt.strategies]", *lines, ""]))


NPZ_POINTS = {
    "save_sharded.npz.1": f"{HOME}:NpzSaveStrategy",
    "load_sharded.npz.1": f"{HOME}:NpzLoadStrategy",
}


def shard(comm: Communicator, value: float) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("w", torch.full((2,), value), (0, comm.rank, comm.size))


def save_npz(path: Path, comm: Communicator, strategy: Any = ("npz", 1), **more: Any) -> Any:
    cell = ShardedObject("cell", comm.rank, (comm.size,), (comm.rank,))
    state = {"w": shard(comm, 1.0), "cell": cell, "step": 3}
    return save(state, path, strategy, communicator=comm, **more)


def load_npz(path: Path, comm: Communicator, strategy: Any = None) -> Any:
    return load({"w": shard(comm, 0.0)}, path, strategy, communicator=comm)


def told(errors: dict[int, BaseException], size: int, *texts: str) -> None:
    """Every rank raised an error of ours which says all of ``texts``."""
    assert sorted(errors) == list(range(size))
    for error in errors.values():
        assert isinstance(error, CheckpointingException)
        assert all(text in str(error) for text in texts), error


def nothing_left(directory: Path, kept: tuple[str, ...] = ()) -> bool:
    return sorted(path.name for path in directory.iterdir()) == sorted(kept)


def test_an_entry_point_adds_a_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installing a package is enough: a tuple names it on save, and a load needs nothing."""
    install(tmp_path / "site", NPZ_POINTS)
    monkeypatch.syspath_prepend(tmp_path / "site")
    path = tmp_path / "c"

    ThreadWorld(2).run(functools.partial(save_npz, path))
    loaded = ThreadWorld(4).run(
        lambda comm: load(
            {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(1), (0, comm.rank, 4))},
            path, communicator=comm,
        )
    )  # fmt: skip

    assert [one["w"].tolist() for one in loaded] == [[1.0]] * 4
    assert {one["step"] for one in loaded} == {3}
    assert load_tensors_metadata(path)["w"].global_shape == (4,)
    assert load_common_state_dict(path) == {"step": 3}
    objects, rest = load_sharded_objects(
        {"cell": ShardedObject("cell", None, (2,), (1,)), "other": 1}, path
    )
    assert (objects, rest) == ({"cell": 1}, {"other": 1})
    with pytest.raises(UnknownStrategyError, match="npz"):
        load_plain_tensors(path)
    with pytest.raises(NotImplementedError):
        remove_sharded_tensors(path, "w")


def test_a_registered_strategy_is_taken_before_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: None
) -> None:
    """What this process registers stands before entry points; it is the same instance each time."""
    install(tmp_path / "site", {"save_sharded.npz.1": "no.such.module:Strategy"})
    monkeypatch.syspath_prepend(tmp_path / "site")
    strategy = NpzSaveStrategy("npz", 1)
    register_default_strategy(StrategyAction.SAVE_SHARDED, "npz", 1, strategy)
    register_default_strategy(StrategyAction.LOAD_SHARDED, "npz", 1, NpzLoadStrategy())

    ThreadWorld(2).run(functools.partial(save_npz, tmp_path / "c"))
    loaded = ThreadWorld(2).run(functools.partial(load_npz, tmp_path / "c"))

    assert get_default_strategy(StrategyAction.SAVE_SHARDED, "npz", 1) is strategy
    assert [one["w"].tolist() for one in loaded] == [[1.0, 1.0]] * 2


def test_two_packages_with_one_name_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which of two would be used is nobody's guess: both are named, nothing is saved."""
    install(tmp_path / "site", NPZ_POINTS)
    install(tmp_path / "site", {"save_sharded.npz.1": "other.home:Strategy"}, name="other")
    monkeypatch.syspath_prepend(tmp_path / "site")

    errors = ThreadWorld(2).errors(functools.partial(save_npz, tmp_path / "home" / "c"))

    told(errors, 2, "Several packages", "other.home:Strategy", f"{HOME}:NpzSaveStrategy")
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("source", "value"),
    [
        pytest.param(None, "gone_away:Strategy", id="no module"),
        pytest.param("import a_package_that_is_not_here", "broken:Strategy", id="no package"),
        pytest.param("raise RuntimeError('bad build')", "broken:Strategy", id="raises"),
        pytest.param("", "broken:Strategy", id="no such name"),
    ],
)
def test_a_strategy_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | None, value: str
) -> None:
    """The error names backend, module and cause, on every rank."""
    install(tmp_path / "site", {"save_sharded.npz.1": value})
    if source is not None:
        (tmp_path / "site" / "broken.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "broken", raising=False)

    with pytest.raises(UnknownStrategyError, match="Cannot import a default strategy for: ") as e:
        get_default_strategy(StrategyAction.SAVE_SHARDED, "npz", 1)
    errors = ThreadWorld(2).errors(functools.partial(save_npz, tmp_path / "home" / "c"))

    assert value in str(e.value)
    told(errors, 2, "save_sharded, npz, 1", value)
    assert all(isinstance(error, UnknownStrategyError) for error in errors.values())
    assert not (tmp_path / "home").exists()


def test_a_backend_that_one_rank_lacks_on_load_is_told_to_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: None
) -> None:
    """A package that is missing on one node only does not leave the others waiting."""
    import dist_ckpt.strategies.selection as choice

    ThreadWorld(2).run(functools.partial(save_npz, tmp_path / "c", strategy=TestNpz.save_strategy))
    register_default_strategy(StrategyAction.LOAD_SHARDED, "npz", 1, NpzLoadStrategy())
    found = choice.get_default_strategy

    def on_rank_1_nobody(*asked: Any) -> Any:
        import threading

        if threading.current_thread().name == "rank-1":
            raise UnknownStrategyError("Cannot find a default strategy for: load_sharded, npz, 1.")
        return found(*asked)

    monkeypatch.setattr(choice, "get_default_strategy", on_rank_1_nobody)
    errors = ThreadWorld(2).errors(functools.partial(load_npz, tmp_path / "c"))

    told(errors, 2, "rank 1", "Cannot find a default strategy for: load_sharded, npz, 1")
    assert all(isinstance(error, UnknownStrategyError) for error in errors.values())


class LoadsWrongly(NpzLoadStrategy):
    """Does something else with what it has loaded."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self._change = change

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        return self._change(super().load(sharded_state_dict, checkpoint_dir))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        pytest.param(lambda loaded: {}, CorruptedCheckpointError, "did not return w", id="nothing"),
        pytest.param(
            lambda loaded: {"w": loaded["w"][:1]}, MismatchError, "(1,) for 'w'", id="part"
        ),
        pytest.param(lambda loaded: {"w": 1.0}, MismatchError, "float for 'w'", id="no tensor"),
    ],
)
def test_a_strategy_that_returns_too_little_is_told(
    tmp_path: Path, change: Callable[[Any], Any], error: type[Exception], text: str
) -> None:
    """Half of a state is an error that names strategy and key, on every rank."""
    strategy = TestNpz.save_strategy
    ThreadWorld(2).run(functools.partial(save_npz, tmp_path / "c", strategy=strategy))

    job = functools.partial(load_npz, tmp_path / "c", strategy=LoadsWrongly(change))
    errors = ThreadWorld(2).errors(job)

    told(errors, 2, "LoadsWrongly", text)
    assert all(isinstance(one, error) for one in errors.values())


class SavesWrongly(NpzSaveStrategy):
    """Raises on rank 1, behind its own writing."""

    def __init__(self, error: BaseException) -> None:
        super().__init__("npz", 1)
        self._error = error

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        super().save(sharded_state_dict, checkpoint_dir)
        if next(iter(sharded_state_dict.values())).global_offset[0]:
            raise self._error


@pytest.mark.parametrize("old", [False, True], ids=["first save", "re-save"])
def test_a_strategy_that_raises_on_one_rank_fails_the_save(tmp_path: Path, old: bool) -> None:
    """All ranks are told which rank and what; nothing is committed, no attempt stays."""
    path = tmp_path / "c"
    if old:
        ThreadWorld(2).run(functools.partial(save_npz, path, strategy=TestNpz.save_strategy))

    job = functools.partial(save_npz, path, strategy=SavesWrongly(OSError("the cable")))
    errors = ThreadWorld(2).errors(job)

    told(errors, 2, "rank 1", "the cable")
    assert nothing_left(tmp_path, ("c",) if old else ())
    if old:
        job = functools.partial(load_npz, path, strategy=NpzLoadStrategy())
        assert ThreadWorld(2).run(job)[0]["w"].tolist() == [1.0, 1.0]


def test_an_interrupt_in_a_strategy_reaches_the_others(tmp_path: Path) -> None:
    """Ctrl-C on one rank stays one there; the other ranks are told and do not wait."""
    job = functools.partial(save_npz, tmp_path / "c", strategy=SavesWrongly(KeyboardInterrupt()))
    errors = ThreadWorld(2).errors(job)

    assert isinstance(errors[1], KeyboardInterrupt)
    assert isinstance(errors[0], RankFailedError)
    assert "KeyboardInterrupt" in str(errors[0])
    assert nothing_left(tmp_path)


def test_an_interrupt_in_a_load_reaches_the_others(tmp_path: Path) -> None:
    """The same while loading."""
    ThreadWorld(2).run(functools.partial(save_npz, tmp_path / "c", strategy=TestNpz.save_strategy))

    def load_it(comm: Communicator) -> Any:
        def stop(loaded: Any) -> Any:
            if comm.rank:
                raise KeyboardInterrupt
            return loaded

        return load_npz(tmp_path / "c", comm, LoadsWrongly(stop))

    errors = ThreadWorld(2).errors(load_it)

    assert isinstance(errors[1], KeyboardInterrupt)
    assert "KeyboardInterrupt" in str(errors[0])


def test_a_given_strategy_is_asked_whether_it_fits(tmp_path: Path) -> None:
    """A strategy for another backend is refused before it reads."""
    save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}, tmp_path / "c")

    with pytest.raises(UnknownStrategyError, match="not npz: torch_dist"):
        load({}, tmp_path / "c", NpzLoadStrategy())


def test_files_named_like_ours_are_the_strategys_own(tmp_path: Path) -> None:
    """``index.json`` and ``common.json`` of another format are not read as ours."""

    class Named(NpzSaveStrategy):
        def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
            super().save(sharded_state_dict, checkpoint_dir)
            for name in ("index.json", "common.json", "shard_0.json"):
                if not (Path(checkpoint_dir) / name).exists():
                    (Path(checkpoint_dir) / name).write_text("[1, 2]")

    world = ThreadWorld(1)
    world.run(functools.partial(save_npz, tmp_path / "c", strategy=Named("npz", 1)))
    job = functools.partial(load_npz, tmp_path / "c", strategy=NpzLoadStrategy())

    assert world.run(job)[0]["w"].tolist() == [1.0, 1.0]


def test_what_is_registered_must_be_a_strategy(tmp_path: Path, registry: None) -> None:
    """Something else under a backend's name is refused by name."""
    register_default_strategy(StrategyAction.SAVE_SHARDED, "npz", 1, NpzLoadStrategy())

    errors = ThreadWorld(2).errors(functools.partial(save_npz, tmp_path / "c"))

    told(errors, 2, "save_sharded, npz, 1", "SaveShardedStrategy")
    assert nothing_left(tmp_path)


# -- asynchronous ----------------------------------------------------------------------------------


class AsyncWith(NpzAsyncSaveStrategy):
    """An asynchronous strategy with steps of the test's own."""

    def __init__(self, *, staged: bool = False, **steps: Callable[[bool], None]) -> None:
        super().__init__("npz", 1)
        self._staged, self._steps = staged, steps

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> AsyncRequest:
        second = next(iter(sharded_state_dict.values())).global_offset[0] > 0
        self._step("plan", second)
        inner = super().async_save(sharded_state_dict, checkpoint_dir)
        data = next(iter(sharded_state_dict.values())).data

        def write(name: str, staged: torch.Tensor) -> None:
            self._step("write", second)
            assert inner.async_fn is not None
            arrays, *more = inner.async_fn_args
            inner.async_fn(
                {"a0": staged.view(torch.int32).numpy()} | dict(list(arrays.items())[1:]), *more
            )

        return AsyncRequest(
            write,
            ("name", data),
            [lambda: self._step("finish", second), lambda: self._step("after", second)],
            preload_fn=data.clone,
        )

    def _step(self, name: str, second: bool) -> None:
        self._steps.get(name, lambda _: None)(second)


def begin(path: Path, comm: Communicator, strategy: Any) -> tuple[torch.Tensor, Any]:
    mine = shard(comm, 1.0)
    state = {"w": mine, "step": [3]}
    request = save(state, path, strategy, communicator=comm, async_sharded_save=True)
    assert mine.data is not None
    return mine.data, request


def test_what_a_strategy_preloads_is_copied_at_once(tmp_path: Path) -> None:
    """The caller may change tensors as soon as ``save`` has returned."""

    def save_it(comm: Communicator) -> None:
        data, request = begin(tmp_path / "c", comm, AsyncWith())
        data.fill_(9.0)
        request.execute_sync()

    ThreadWorld(2).run(save_it)

    job = functools.partial(load_npz, tmp_path / "c", strategy=NpzLoadStrategy())
    assert ThreadWorld(2).run(job)[1]["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("through", ["queue", "execute_sync"])
@pytest.mark.parametrize("step", ["plan", "write", "finish"])
def test_a_failure_of_one_rank_fails_the_asynchronous_save(
    tmp_path: Path, step: str, through: str
) -> None:
    """All ranks are told when it is finished; later steps are not done, no attempt stays."""
    after: list[bool] = []

    def fail(second: bool) -> None:
        if second:
            raise OSError(f"boom in {step}")

    def save_it(comm: Communicator) -> None:
        strategy = AsyncWith(after=after.append, **{step: fail})
        _, request = begin(tmp_path / "c", comm, strategy)
        if through == "execute_sync":
            request.execute_sync()
            return
        queue = AsyncCallsQueue(communicator=comm)
        queue.schedule_async_request(request)
        try:
            queue.maybe_finalize_async_calls(blocking=True)
        finally:
            queue.close()

    errors = ThreadWorld(2).errors(save_it)

    told(errors, 2, "rank 1", f"boom in {step}")
    assert after == []
    assert nothing_left(tmp_path)


def test_what_was_never_written_is_not_committed(tmp_path: Path) -> None:
    """To finish a request that nobody has executed is an error on every rank."""

    def finish_it(comm: Communicator) -> None:
        _, request = begin(tmp_path / "c", comm, AsyncWith())
        for finalize in request.finalize_fns:
            finalize()

    errors = ThreadWorld(2).errors(finish_it)

    told(errors, 2, "never written")
    assert nothing_left(tmp_path)


def test_a_strategy_that_cannot_save_asynchronously_says_so(tmp_path: Path) -> None:
    """The error comes at once, on every rank, and no attempt stays."""
    errors = ThreadWorld(2).errors(lambda comm: begin(tmp_path / "c", comm, TestNpz.save_strategy))

    told(errors, 2, "NpzSaveStrategy(npz, 1) cannot save asynchronously")
    assert all(isinstance(error, ConfigError) for error in errors.values())
    assert nothing_left(tmp_path)
