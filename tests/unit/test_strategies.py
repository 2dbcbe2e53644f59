"""Strategies by themselves: base classes, registry, the common part, removal, native ones alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_ckpt import LoadOptions, ShardedObject, ShardedTensor, load, save
from dist_ckpt._formats import removal
from dist_ckpt.core import CheckpointingConfig, maybe_load_config, save_config
from dist_ckpt.errors import (
    CheckpointingException,
    CheckpointNotFoundError,
    ConfigError,
    CorruptedCheckpointError,
    MismatchError,
    StorageError,
    UnknownStrategyError,
    UnsafeContentError,
)
from dist_ckpt.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    load_sharded_objects,
    load_tensors_metadata,
    remove_sharded_tensors,
)
from dist_ckpt.strategies import base
from dist_ckpt.strategies.async_utils import AsyncRequest
from dist_ckpt.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadCommonStrategy,
    LoadShardedStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
    SaveStrategyBase,
    StrategyAction,
    get_default_strategy,
    register_default_strategy,
)
from dist_ckpt.strategies.common import (
    JsonCommonLoadStrategy,
    JsonCommonSaveStrategy,
    TorchCommonLoadStrategy,
    TorchCommonSaveStrategy,
)
from dist_ckpt.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from dist_ckpt.strategies.tensorstore import TensorStoreLoadShardedStrategy
from dist_ckpt.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy
from dist_ckpt.strategies.zarr import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy
from dist_ckpt.testing._states import differences
from tests.faults._disk import Disk

FORMATS = (("torch_dist", 1), ("zarr", 1), ("zarr", 2))
by_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: f"{fmt[0]}-{fmt[1]}")


def shard(key: str, data: torch.Tensor) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, data)


# -- base classes ----------------------------------------------------------------------------------


def test_actions_are_plain_words() -> None:
    assert [action.value for action in StrategyAction] == [
        "load_common", "load_sharded", "save_common", "save_sharded",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("cls", "abstract"),
    [
        (LoadCommonStrategy, {"check_backend_compatibility", "check_version_compatibility",
                              "load_common", "load_sharded_objects"}),
        (LoadShardedStrategy, {"check_backend_compatibility", "check_version_compatibility",
                               "load", "load_tensors_metadata"}),
        (SaveCommonStrategy, {"save_common"}),
        (SaveShardedStrategy, {"save"}),
        (AsyncSaveShardedStrategy, {"async_save"}),
    ],
)  # fmt: skip
def test_what_a_subclass_must_say(cls: Any, abstract: set[str]) -> None:
    """These methods and no others are abstract; without them there is no instance."""
    assert cls.__abstractmethods__ == abstract
    with pytest.raises(TypeError, match="abstract"):
        cls()


class SavesCommon(SaveCommonStrategy):
    def save_common(self, common_state_dict: Any, checkpoint_dir: str | Path) -> None:
        (Path(checkpoint_dir) / "mine").write_text(json.dumps(sorted(common_state_dict)))


class LoadsCommon(LoadCommonStrategy):
    def check_backend_compatibility(self, loaded_backend: str) -> None:
        if loaded_backend != "mine":
            raise UnknownStrategyError(loaded_backend)

    def check_version_compatibility(self, loaded_version: int) -> None:
        if loaded_version != 3:
            raise UnknownStrategyError(str(loaded_version))

    def load_common(self, checkpoint_dir: str | Path) -> Any:
        return dict.fromkeys(json.loads((Path(checkpoint_dir) / "mine").read_text()), "mine")

    def load_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: Any) -> Any:
        raise NotImplementedError(str((sharded_objects_state_dict, checkpoint_dir)))


class AllObjects(LoadsCommon):
    @property
    def can_handle_sharded_objects(self) -> bool:
        return True


class LoadsNothing(LoadShardedStrategy):
    def check_backend_compatibility(self, loaded_backend: str) -> None: ...
    def check_version_compatibility(self, loaded_version: int) -> None: ...
    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any: ...
    def remove_sharded_tensors(self, checkpoint_dir: Any, key_prefix: str) -> None: ...

    def load_tensors_metadata(self, checkpoint_dir: Any) -> Any:
        return {"of": checkpoint_dir}


class LoadsObjects(LoadsNothing):
    can_handle_sharded_objects = True


def test_objects_are_not_handled_unless_it_is_said(tmp_path: Path) -> None:
    """The default is a property that is False; who says True must say what is stored, too."""
    strategy = SavesCommon("mine", 3)

    assert strategy.can_handle_sharded_objects is False
    assert LoadsCommon().can_handle_sharded_objects is False
    assert LoadsCommon().load_sharded_metadata(tmp_path) == {}
    assert LoadsNothing().load_sharded_metadata("d") == {"of": "d"}
    with pytest.raises(NotImplementedError, match="AllObjects"):
        AllObjects().load_sharded_metadata(tmp_path)
    with pytest.raises(NotImplementedError, match="LoadsObjects"):
        LoadsObjects().load_sharded_metadata(tmp_path)
    with pytest.raises(NotImplementedError, match="SavesCommon"):
        strategy.save_sharded_objects({}, tmp_path)


class OneFileSave(SaveShardedStrategy):
    """Saves all that it is given in one file."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        data = {leaf.key: leaf.data for leaf in sharded_state_dict.values()}
        torch.save(data, Path(checkpoint_dir) / "all.pt")


class OneFileLoad(LoadsNothing):
    """Loads it, and tells of its tensors only."""

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        data = torch.load(Path(checkpoint_dir) / "all.pt")
        return {name: data[leaf.key] for name, leaf in sharded_state_dict.items()}

    def load_tensors_metadata(self, checkpoint_dir: Any) -> Any:
        data = torch.load(Path(checkpoint_dir) / "all.pt")
        return {k: shard(k, v).without_data() for k, v in data.items() if torch.is_tensor(v)}


def as_method(cls: type, answer: bool) -> Any:
    """Return a class that says by a method, as some of Megatron-Core do, whether it has objects."""
    return type(cls.__name__, (cls,), {"can_handle_sharded_objects": lambda _: answer})


@pytest.mark.parametrize("handles", [True, False])
@pytest.mark.parametrize("wrapped", [True, False])
def test_strategies_of_the_sources_form_have_objects(
    tmp_path: Path, registry: None, *, handles: bool, wrapped: bool
) -> None:
    """A method counts as what it returns; what is stored of objects need not be told."""
    saves: Any = as_method(OneFileSave, handles)("mine", 3)
    loads: Any = as_method(OneFileLoad, handles)()
    register_default_strategy(StrategyAction.LOAD_SHARDED, "mine", 3, loads)
    if wrapped:
        saves, loads = (
            FullyParallelSaveStrategyWrapper(saves),
            FullyParallelLoadStrategyWrapper(loads),
        )
    path = tmp_path / "c"
    save({"x": shard("x", torch.ones(2)), "o": ShardedObject("o", [7], (1,), (0,))}, path, saves)
    wanted = {"o": ShardedObject("o", None, (1,), (0,))}
    request = {**wanted, "x": shard("x", torch.zeros(2))}

    assert set(torch.load(path / "all.pt")) == ({"x", "o"} if handles else {"x"})
    for strategy in (loads, None):
        found = load(request, path, strategy)
        assert found["o"] == [7]
        assert found["x"].tolist() == [1, 1]
        assert set(load_tensors_metadata(path, strategy)) == {"x"}
    assert load_sharded_objects(wanted, path) == ({"o": [7]}, {})
    if handles:
        with pytest.raises(NotImplementedError, match=r"load_sharded_metadata"):
            load(request, path, loads, strict="raise_all")


@pytest.mark.parametrize("fmt", FORMATS)
def test_it_is_a_property_everywhere(fmt: tuple[str, int]) -> None:
    """A bound method would be true whatever it returns."""
    found = [
        get_default_strategy(action, *(fmt if "sharded" in action.value else ("torch", 1)))
        for action in StrategyAction
    ]

    assert [one.can_handle_sharded_objects for one in found] == [True] * 4


def test_a_strategy_tells_what_it_is() -> None:
    assert str(SavesCommon("mine", 3)) == "SavesCommon(mine, 3)"
    assert str(SaveStrategyBase("b", 1)) == "SaveStrategyBase(b, 1)"
    assert str(ZarrSaveShardedStrategy("zarr", 2)) == "ZarrSaveShardedStrategy(zarr, 2)"


class Async(AsyncSaveShardedStrategy):
    def __init__(self, done: list[str]) -> None:
        super().__init__("async", 1)
        self.done = done

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> AsyncRequest:
        self.done.append(f"plan {sharded_state_dict} {Path(checkpoint_dir).name}")
        steps = [lambda: self.done.append("one"), lambda: self.done.append("two")]
        return AsyncRequest(self.done.append, ("write",), steps)


def test_an_asynchronous_strategy_is_a_synchronous_one() -> None:
    """``save`` plans, writes and finishes, in this order."""
    done: list[str] = []

    Async(done).save({}, "c")

    assert done == ["plan {} c", "write", "one", "two"]


# -- registry --------------------------------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    for action in StrategyAction:
        monkeypatch.setitem(base.default_strategies, action.value, {})


@pytest.mark.parametrize(
    ("action", "backend", "version", "cls"),
    [
        ("SAVE_SHARDED", "torch_dist", 1, TorchDistSaveShardedStrategy),
        ("LOAD_SHARDED", "torch_dist", 1, TorchDistLoadShardedStrategy),
        ("SAVE_SHARDED", "zarr", 1, ZarrSaveShardedStrategy),
        ("SAVE_SHARDED", "zarr", 2, ZarrSaveShardedStrategy),
        ("LOAD_SHARDED", "zarr", 1, ZarrLoadShardedStrategy),
        ("LOAD_SHARDED", "zarr", 2, ZarrLoadShardedStrategy),
        ("SAVE_COMMON", "torch", 1, TorchCommonSaveStrategy),
        ("LOAD_COMMON", "torch", 1, TorchCommonLoadStrategy),
        ("SAVE_COMMON", "json", 1, JsonCommonSaveStrategy),
        ("LOAD_COMMON", "json", 1, JsonCommonLoadStrategy),
    ],
)
def test_built_in_strategies(action: str, backend: str, version: int, cls: type) -> None:
    """Each backend of ours has its strategies, of the version that was asked for."""
    found = get_default_strategy(StrategyAction[action], backend, version)

    assert type(found) is cls
    if action.startswith("SAVE"):
        assert (found.backend, found.version) == (backend, version)


@pytest.mark.parametrize("action", StrategyAction)
def test_a_backend_of_nobody_is_told(action: StrategyAction) -> None:
    for asked in (("nobody", 1), ("torch_dist", 2), ("zarr", 3)):
        text = f"Cannot find a default strategy for: {action.value}, {asked[0]}, {asked[1]}"
        with pytest.raises(CheckpointingException, match=text):
            get_default_strategy(action, *asked)


def test_registering_again_replaces(registry: None) -> None:
    """The last one registered counts, for its own action, backend and version alone."""
    one, two = SavesCommon("mine", 3), SavesCommon("mine", 3)
    register_default_strategy(StrategyAction.SAVE_COMMON, "mine", 3, one)
    register_default_strategy(StrategyAction.SAVE_COMMON, "mine", 3, two)

    assert get_default_strategy(StrategyAction.SAVE_COMMON, "mine", 3) is two
    for other in ((StrategyAction.LOAD_COMMON, "mine", 3), (StrategyAction.SAVE_COMMON, "mine", 1)):
        with pytest.raises(UnknownStrategyError):
            get_default_strategy(*other)


def test_plain_arrays_need_no_tensorstore(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They are saved and loaded without; what needs it says so (``test_zarr_save``)."""
    import sys

    monkeypatch.setitem(sys.modules, "tensorstore", None)
    state = {"x": shard("x", torch.ones(2))}
    for backend in (("zarr", 1), ("zarr", 2), ("torch_dist", 1)):
        directory = tmp_path / f"{backend[0]}-{backend[1]}"
        save(state, directory, backend)
        found = load({"x": shard("x", torch.zeros(2))}, directory)
        assert torch.equal(found["x"], torch.ones(2))


@pytest.mark.parametrize(
    "strategy",
    ["zarr", 1, 3.5, ["zarr", 1], ("zarr", 1, 2), (["zarr"], [1]), ("zarr", True), (None, 1)],
    ids=str,
)
def test_what_is_no_strategy_is_refused(tmp_path: Path, strategy: Any) -> None:
    with pytest.raises(ConfigError, match="SaveShardedStrategy"):
        save({}, tmp_path / "c", strategy)
    with pytest.raises(ConfigError, match="SaveCommonStrategy"):
        save({}, tmp_path / "c", None, strategy)
    assert list(tmp_path.iterdir()) == []
    save({}, tmp_path / "c")
    with pytest.raises(ConfigError, match="LoadShardedStrategy"):
        load({}, tmp_path / "c", strategy)
    with pytest.raises(ConfigError, match="LoadCommonStrategy"):
        load({}, tmp_path / "c", None, strategy)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("other", FORMATS)
def test_a_strategy_reads_only_its_backend(
    tmp_path: Path, fmt: tuple[str, int], other: tuple[str, int]
) -> None:
    """The strategy of another backend is refused; so is a version that it does not know."""
    save({"x": shard("x", torch.ones(2))}, tmp_path / "c", fmt)
    request = {"x": shard("x", torch.zeros(2))}

    if fmt == other:
        assert load(request, tmp_path / "c", other)["x"].tolist() == [1, 1]
    else:
        told = "not as" if fmt[0] == other[0] else f"{other[0]!r}, not {fmt[0]!r}"
        with pytest.raises(UnknownStrategyError, match=told):
            load(request, tmp_path / "c", other)
        assert request["x"].data.tolist() == [0, 0]  # type: ignore[union-attr]
    strategy = get_default_load_sharded_strategy(tmp_path / "c")
    with pytest.raises(UnknownStrategyError, match="999"):
        strategy.check_version_compatibility(999)


def test_default_strategies_of_serialization(tmp_path: Path) -> None:
    save({}, tmp_path / "c", ("zarr", 2))

    assert isinstance(get_default_save_sharded_strategy(), TorchDistSaveShardedStrategy)
    assert isinstance(get_default_save_sharded_strategy("zarr", 2), ZarrSaveShardedStrategy)
    assert isinstance(get_default_load_sharded_strategy(tmp_path / "c"), ZarrLoadShardedStrategy)
    with pytest.raises(CheckpointNotFoundError):
        get_default_load_sharded_strategy(tmp_path / "nowhere")


# -- the common part -------------------------------------------------------------------------------

VALUES = {
    "plain": [None, True, 3, -0.0, float("nan"), "x", b"\0"],
    "pair": (1, ("x", 2.5)),
    "by number": {1: {"deep": []}, "1": 2},
    "tensor": torch.arange(6, dtype=torch.bfloat16).view(2, 3).t(),
    "nested": {"tensors": [torch.tensor(True), torch.empty(0, 2)]},
}


class Odd:
    """A class that only pickle can carry."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd)

    __hash__ = None  # type: ignore[assignment]


COMMON = {
    "json": (JsonCommonSaveStrategy, JsonCommonLoadStrategy),
    "torch": (TorchCommonSaveStrategy, TorchCommonLoadStrategy),
}
by_common = pytest.mark.parametrize("name", COMMON)


@by_common
def test_common_values_keep_their_types(tmp_path: Path, name: str) -> None:
    """Tuples, numbers as keys, NaN, bytes and tensors of any type and stride."""
    saves, loads = COMMON[name]

    saves().save_common(VALUES, tmp_path)

    assert differences(VALUES, loads().load_common(tmp_path)) == []


@by_common
def test_a_view_does_not_drag_its_storage_along(tmp_path: Path, name: str) -> None:
    """A slice of a large tensor is stored as large as it is."""
    COMMON[name][0]().save_common({"x": torch.zeros(1 << 20)[:4]}, tmp_path)

    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 1 << 14


@by_common
def test_objects_of_the_common_strategy(tmp_path: Path, name: str) -> None:
    """A file each, of main replicas only; found again by name, whatever dots there are in it."""
    saves, loads = COMMON[name]
    cells = [ShardedObject("a/b.c", VALUES, (2, 11), (1, n)) for n in (1, 10)]
    replica = ShardedObject("a/b.c", "no", (2, 11), (0, 0), replica_id=1)

    saves().save_sharded_objects({"deep": [*cells, replica]}, tmp_path)

    stored = loads().load_sharded_metadata(tmp_path)
    assert sorted(stored) == ["a/b.c/shard_1.10_2.11", "a/b.c/shard_1.1_2.11"]
    assert all(one.data is None for one in stored.values())
    request = {"x": [one.without_data() for one in cells], "other": 7}
    loaded = loads().load_sharded_objects(request, tmp_path)
    assert differences({"x": [VALUES, VALUES], "other": 7}, loaded) == []
    with pytest.raises(CheckpointNotFoundError, match=r"shard_0\.0_2\.11"):
        loads().load_sharded_objects({"x": replica.without_data()}, tmp_path)


@by_common
def test_what_needs_pickle_is_refused_unless_allowed(tmp_path: Path, name: str) -> None:
    saves, loads = COMMON[name]
    saves().save_common({"odd": Odd()}, tmp_path)

    with pytest.raises(UnsafeContentError):
        loads().load_common(tmp_path)

    assert loads(allow_pickle=True).load_common(tmp_path) == {"odd": Odd()}


@by_common
def test_common_strategies_refuse_others(tmp_path: Path, name: str) -> None:
    strategy = COMMON[name][1]()

    strategy.check_backend_compatibility(name)
    strategy.check_version_compatibility(1)
    with pytest.raises(UnknownStrategyError, match="other"):
        strategy.check_backend_compatibility("other")
    with pytest.raises(UnknownStrategyError, match="2"):
        strategy.check_version_compatibility(2)
    with pytest.raises(CheckpointNotFoundError, match=r"common.*(does not exist|no such file)"):
        strategy.load_common(tmp_path)


@by_format
@by_common
def test_a_tuple_for_the_common_part_means_the_common_part(
    tmp_path: Path, fmt: tuple[str, int], name: str
) -> None:
    """It chooses the common strategy, and leaves the sharded one as it is."""
    state = {"x": shard("x", torch.ones(3)), "o": ShardedObject("o", {1}, (1,), (0,)), **VALUES}

    save(state, tmp_path / "c", fmt, (name, 1))

    config = maybe_load_config(tmp_path / "c")
    assert config is not None
    assert (config.sharded_backend, config.sharded_backend_version) == fmt
    stored = config.common_backend, config.common_backend_version
    request = {"x": shard("x", torch.zeros(3)), "o": ShardedObject("o", None, (1,), (0,))}
    for common in (None, stored):
        loaded = load(request, tmp_path / "c", None, common)
        assert differences({"x": torch.ones(3), "o": {1}, **VALUES}, loaded) == []
    assert differences(VALUES, load_common_state_dict(tmp_path / "c")) == []


def test_a_common_strategy_of_somebody_else(tmp_path: Path, registry: None) -> None:
    """Its name and version are stored; the load asks whether it fits, and uses it."""
    register_default_strategy(StrategyAction.LOAD_COMMON, "mine", 3, LoadsCommon())
    state = {"x": shard("x", torch.ones(3)), "b": 1, "a": 2}

    save(state, tmp_path / "c", None, SavesCommon("mine", 3))

    config = CheckpointingConfig("torch_dist", 1, "mine", 3)
    assert maybe_load_config(tmp_path / "c") == config
    for common in (None, ("mine", 3), LoadsCommon()):
        loaded = load({"x": shard("x", torch.zeros(3))}, tmp_path / "c", None, common)
        assert differences({"a": "mine", "b": "mine", "x": torch.ones(3)}, loaded) == []
    assert load_common_state_dict(tmp_path / "c") == {"a": "mine", "b": "mine"}
    with pytest.raises(UnknownStrategyError, match="'mine'"):
        load({}, tmp_path / "c", None, ("torch", 1))


@by_format
def test_options_hold_for_common_parts_that_need_pickle(
    tmp_path: Path, fmt: tuple[str, int]
) -> None:
    save({"odd": Odd()}, tmp_path / "c", fmt)

    with pytest.raises(UnsafeContentError, match="allow_pickle"):
        load({}, tmp_path / "c")

    loaded = load({}, tmp_path / "c", options=LoadOptions(allow_pickle=True))
    assert loaded == {"odd": Odd()}


# -- serialization's readers -----------------------------------------------------------------------


@by_format
def test_plain_tensors_objects_and_content_metadata(tmp_path: Path, fmt: tuple[str, int]) -> None:
    """What can be read of a checkpoint without a model, in every format."""
    tensors = {"a": torch.randn(3, 4), "b/c": torch.tensor(2, dtype=torch.uint8)}
    state = {key: shard(key, data) for key, data in tensors.items()}
    cell = ShardedObject("o/p", {"deep": (1, torch.ones(2))}, (2,), (1,))
    save(
        {**state, "o": [cell], "step": 5}, tmp_path / "c", fmt,
        validate_access_integrity=False, content_metadata={"kind": ["x"]},
    )  # fmt: skip

    assert differences(tensors, load_plain_tensors(tmp_path / "c")) == []
    assert load_content_metadata(tmp_path / "c") == {"kind": ["x"]}
    assert load_content_metadata(preloaded_state_dict={"content_metadata": {"a": 1}}) == {"a": 1}
    assert load_content_metadata(preloaded_state_dict={}) is None
    with pytest.raises(ValueError, match="None"):
        load_content_metadata()
    assert set(load_sharded_metadata(tmp_path / "c")) == {"a", "b/c", "o/p/shard_1_2"}
    assert {k: t.dtype for k, t in load_tensors_metadata(tmp_path / "c").items()} == {
        "a": torch.float32, "b/c": torch.uint8,
    }  # fmt: skip
    request = {"x": [cell.without_data()], "more": {"a": state["a"]}}
    objects, rest = load_sharded_objects(request, tmp_path / "c")
    assert differences({"x": [{"deep": (1, torch.ones(2))}]}, objects) == []
    assert rest == {"more": {"a": state["a"]}}
    absent = ShardedObject("o/p", None, (2,), (0,))
    with pytest.raises(CheckpointNotFoundError, match=r"Object shard o/p/shard_0_2 not found"):
        load_sharded_objects({"x": absent}, tmp_path / "c")


# -- removal ---------------------------------------------------------------------------------------


def with_optimizer() -> dict[str, Any]:
    return {
        "model": shard("model.w", torch.arange(6.0)),
        "scale": shard("model.s", torch.tensor(3, dtype=torch.int8)),
        "moment": shard("optim.m", torch.arange(40.0)),
        "second": shard("optim.v", torch.arange(41.0)),
        "object": ShardedObject("optim.o", {"kept": torch.ones(1)}, (1,), (0,)),
        "plain": torch.full((3,), 2.0),
        "step": 7,
    }


def request_of(*names: str) -> dict[str, Any]:
    found = {name: one for name, one in with_optimizer().items() if name in names}
    return {name: one.without_data() for name, one in found.items()}


@by_format
def test_removed_tensors_are_gone_and_the_rest_is_whole(
    tmp_path: Path, fmt: tuple[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    """Kept tensors, objects and the common part are as they were; a second removal only warns."""
    path = tmp_path / "c"
    save(with_optimizer(), path, fmt)
    before = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())

    remove_sharded_tensors(path, "optim.")

    assert set(load_tensors_metadata(path)) == {"model.w", "model.s"}
    names = ("model", "scale", "object", "plain", "step")
    wanted = {name: getattr(one, "data", one) for name, one in with_optimizer().items()}
    wanted = {name: wanted[name] for name in names}
    wanted["plain"] = torch.full((3,), 2.0)
    assert differences(wanted, load(request_of("model", "scale", "object"), path)) == []
    with pytest.raises(MismatchError, match=r"optim\.m"):
        load(request_of("moment"), path)
    if fmt[0] == "zarr":
        assert not list(path.rglob("*optim.m*"))
        assert sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) < before
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
    remove_sharded_tensors(path, "optim.")
    assert "no tensor's key starts with 'optim.'" in caplog.text


def test_files_of_their_own_are_deleted(tmp_path: Path) -> None:
    """What was saved with a separation hint frees its space."""
    path = tmp_path / "c"
    state = {name: one for name, one in with_optimizer().items() if name != "object"}
    save(state, path, TorchDistSaveShardedStrategy(separation_hint="optim."))
    hinted = [file.name for file in path.iterdir() if "optim." in file.name]

    remove_sharded_tensors(path, "optim.")

    assert hinted
    assert [file.name for file in path.iterdir() if "optim." in file.name] == []
    assert load(request_of("model"), path)["model"].tolist() == list(range(6))


@by_format
def test_one_that_is_saved_again_while_tensors_are_removed_stays(
    tmp_path: Path, fmt: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index of one save over the files of another would replace the good one."""
    path = tmp_path / "c"
    save(with_optimizer(), path, fmt)
    original = removal.Attempt.begin

    def after_a_save(*args: Any) -> Any:
        monkeypatch.undo()
        save(request_of("model") | {"model": with_optimizer()["model"], "step": 8}, path, fmt)
        return original(*args)

    monkeypatch.setattr(removal.Attempt, "begin", after_a_save)

    with pytest.raises(CheckpointNotFoundError, match="was replaced"):
        remove_sharded_tensors(path, "optim.")

    assert load(request_of("model"), path)["step"] == 8
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize(
    ("fmt", "name"), [(("torch_dist", 1), "index.bin"), (("zarr", 2), "index.json")]
)
def test_damage_gets_no_new_checksum(tmp_path: Path, fmt: tuple[str, int], name: str) -> None:
    """What is written anew was compared: else a flipped offset would verify from then on."""
    path = tmp_path / "c"
    save(with_optimizer(), path, fmt)
    good = (path / name).read_bytes()
    for position in range(0, len(good), 7):
        (path / name).write_bytes(
            good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :]
        )
        with pytest.raises(CorruptedCheckpointError):
            remove_sharded_tensors(path, "optim.")
    (path / name).write_bytes(good)
    remove_sharded_tensors(path, "optim.")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_reads_what_is_left(tmp_path: Path) -> None:
    """The reader of torch finds the kept tensors, and no longer the others."""
    import torch.distributed.checkpoint as dcp

    path = tmp_path / "c"
    save(with_optimizer(), path)
    remove_sharded_tensors(path, "optim.")

    metadata = dcp.FileSystemReader(path).read_metadata()
    found = {"model.w": torch.zeros(6), "model.s": torch.tensor(0, dtype=torch.int8)}
    dcp.load(found, checkpoint_id=path, no_dist=True)

    assert {"model.w", "model.s"} <= set(metadata.state_dict_metadata)
    assert not {"optim.m", "optim.v"} & set(metadata.state_dict_metadata)
    assert (found["model.w"].tolist(), int(found["model.s"])) == (list(range(6)), 3)


@by_format
def test_an_object_with_the_key_of_a_removed_tensor_stays(
    tmp_path: Path, fmt: tuple[str, int]
) -> None:
    """Its files may lie in the folder of the tensor; Megatron-Core's copy of it too."""
    path = tmp_path / "c"
    save({"t": shard("k", torch.ones(3)), "o": ShardedObject("k", [1], (1,), (0,))}, path, fmt)
    copies = sorted(file.relative_to(path) for file in path.rglob("shard_*.pt"))

    remove_sharded_tensors(path, "k")

    assert load({"o": ShardedObject("k", None, (1,), (0,))}, path)["o"] == [1]
    assert sorted(file.relative_to(path) for file in path.rglob("shard_*.pt")) == copies
    assert bool(copies) == (fmt == ("zarr", 1))


@by_format
def test_a_common_part_under_a_removed_key_stays(tmp_path: Path, fmt: tuple[str, int]) -> None:
    """Tensors of the common part are no sharded tensors, however they are called."""
    path = tmp_path / "c"
    save({"t": shard("common", torch.ones(3)), "plain": torch.ones(2)}, path, fmt)

    remove_sharded_tensors(path, "common")

    assert load_tensors_metadata(path) == {}
    assert load({}, path)["plain"].tolist() == [1, 1]


@by_format
@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
def test_a_crash_in_a_removal_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fmt: tuple[str, int], exchange: bool
) -> None:
    """A copy of the disk after each operation has all of the tensors, or none; and loads."""
    home, copies = tmp_path / "home", tmp_path / "copies"
    save(with_optimizer(), home / "c", fmt)
    disk = Disk(monkeypatch)
    if not exchange:
        disk.without_exchange()
    seen: list[frozenset[str]] = []

    def crash(_: str) -> None:
        copy = copies / str(len(seen))
        shutil.copytree(home, copy)
        seen.append(frozenset(load_tensors_metadata(copy / "c")))
        assert load(request_of("model"), copy / "c")["plain"].tolist() == [2, 2, 2]

    disk.after = crash
    with disk.watched():
        remove_sharded_tensors(home / "c", "optim.")

    old, new = {"model.w", "model.s", "optim.m", "optim.v"}, {"model.w", "model.s"}
    assert seen[0] == old
    assert seen[-1] == new
    assert set(seen) == {frozenset(old), frozenset(new)}
    assert seen.index(frozenset(new)) + seen.count(frozenset(new)) == len(seen)
    assert [entry.name for entry in home.iterdir()] == ["c"]


def test_an_error_in_a_removal_leaves_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever operation fails: it is an error and all is as it was, or the tensors are gone."""
    disk = Disk(monkeypatch)
    errors = 0
    for number in range(100):
        home = tmp_path / str(number)
        save(with_optimizer(), home / "c")
        raised = False
        with disk.watched(fail_at=number):
            try:
                remove_sharded_tensors(home / "c", "optim.")
            except StorageError:
                raised = True
        assert len(load_tensors_metadata(home / "c")) == (4 if raised else 2), disk.done
        assert not raised or [entry.name for entry in home.iterdir()] == ["c"], disk.done
        errors += raised
        if len(disk.done) <= number:
            break

    assert 10 < errors < number


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_tensors_of_other_writers_are_not_removed(tmp_path: Path) -> None:
    """What torch's DCP wrote is left as it is."""
    import torch.distributed.checkpoint as dcp

    dcp.save({"optim.m": torch.ones(3)}, checkpoint_id=tmp_path / "c", no_dist=True)

    with pytest.raises(CheckpointNotFoundError, match="our own"):
        remove_sharded_tensors(tmp_path / "c", "optim.")

    assert load_plain_tensors(tmp_path / "c")["optim.m"].tolist() == [1, 1, 1]


# -- native strategies on their own ----------------------------------------------------------------

NATIVE: dict[str, tuple[Any, Any]] = {
    "torch_dist": (TorchDistSaveShardedStrategy, TorchDistLoadShardedStrategy),
    "zarr-1": (ZarrSaveShardedStrategy, ZarrLoadShardedStrategy),
    "zarr-2": (lambda: ZarrSaveShardedStrategy("zarr", 2), ZarrLoadShardedStrategy),
    "tensorstore": (ZarrSaveShardedStrategy, TensorStoreLoadShardedStrategy),
}


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("later", [False, True], ids=["save", "async_save"])
def test_a_strategy_saves_and_loads_without_the_rest(
    tmp_path: Path, name: str, later: bool
) -> None:
    """Into a directory that is there; the same nesting comes back; data is filled in place."""
    saves, loads = NATIVE[name][0](), NATIVE[name][1]()
    data = torch.arange(6.0)
    state = {"deep": [shard("x", data)], "o": ShardedObject("o", (1, "x"), (1,), (0,))}

    if later:
        request = saves.async_save(state, tmp_path)
        data.fill_(9.0)
        request.execute_sync()
    else:
        saves.save(state, tmp_path)

    assert maybe_load_config(tmp_path) is None
    target = torch.zeros(6)
    found = loads.load({"deep": [shard("x", target)], "o": state["o"].without_data()}, tmp_path)  # type: ignore[attr-defined]
    assert found["deep"][0] is target
    assert found["o"] == (1, "x")
    assert target.tolist() == list(range(6))
    assert set(loads.load_sharded_metadata(tmp_path)) == {"x", "o/shard_0_1"}
    assert set(loads.load_tensors_metadata(tmp_path)) == {"x"}
    with pytest.raises(MismatchError, match="'y' is not stored"):
        loads.load({"y": shard("y", torch.zeros(1))}, tmp_path)
    save_config(CheckpointingConfig(saves.backend, saves.version), tmp_path)


def test_two_copies_of_an_element_are_not_offered() -> None:
    with pytest.raises(ConfigError, match="keep_only_main_replica"):
        TorchDistSaveShardedStrategy(keep_only_main_replica=False)


def test_replicas_without_a_main_one_are_given_one(tmp_path: Path) -> None:
    """A strategy of others knows replica ids only: one holder of an "any" shard gets 0."""
    given: list[Any] = []

    class Looks(SaveShardedStrategy):
        def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
            assert Path(checkpoint_dir).is_dir()
            given.extend(sharded_state_dict.values())

    make = ShardedTensor.from_rank_offsets
    state = {
        "any": make("any", torch.ones(2), replica_id=5, writer="any"),
        "first": make("first", torch.ones(()), replica_id=(1, 2), writer="first"),
        "empty": make("empty", torch.ones(0, 2), replica_id=5, writer="any"),
        "main": make("main", torch.ones(1), replica_id=(0, 0)),
    }
    save(state, tmp_path / "c", Looks("looks", 1))

    assert {one.key: one.replica_id for one in given} == {
        "any": 0, "first": 0, "empty": 0, "main": (0, 0),
    }  # fmt: skip
    assert state["any"].replica_id == 5


def test_threads_of_a_strategy_stand_before_those_of_the_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A strategy object has a number of its own; a tuple has none."""
    from dist_ckpt import SaveOptions
    from dist_ckpt._formats.torch_dist import write as torch_dist
    from dist_ckpt._loading import fill as _filling

    told: list[int] = []
    for module, name in ((torch_dist, "write_shards"), (_filling, "read_wanted")):
        original = getattr(module, name)

        def noting(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            told.append(kwargs["thread_count"])
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, noting)
    state = {"x": shard("x", torch.ones(2))}

    save(state, tmp_path / "a", ("torch_dist", 1), options=SaveOptions(thread_count=5))
    save(state, tmp_path / "b", TorchDistSaveShardedStrategy(thread_count=3))
    assert told == [5, 3]

    load(state, tmp_path / "a", ("torch_dist", 1), options=LoadOptions(thread_count=4))
    load(state, tmp_path / "a", TorchDistLoadShardedStrategy(thread_count=7))
    assert set(told[2:]) == {4, 7}
