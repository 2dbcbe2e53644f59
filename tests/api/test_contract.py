"""What the seeds' documentation and users of the seeds expect of the entry points, as one calls them.

Here: messages that users match, results that they rely on, edge cases. Not here: signatures
(``test_seed_names``), every dtype and layout (``tests/unit/test_serialization``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_ckpt import (
    CheckpointingException,
    InvalidShardingError,
    LocalNonpersistentObject,
    MismatchError,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    StrictHandling,
    load,
    load_common_state_dict,
    load_plain_tensors,
    load_sharded_metadata,
    load_tensors_metadata,
    save,
)
from dist_ckpt.core import CheckpointingConfig, maybe_load_config, save_config
from dist_ckpt.errors import UnknownStrategyError
from dist_ckpt.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
    load_content_metadata,
    load_sharded_objects,
    remove_sharded_tensors,
    validate_sharding_integrity,
)
from dist_ckpt.strategies.base import StrategyAction, get_default_strategy
from dist_ckpt.testing import ThreadWorld

WHOLE = torch.arange(12.0).reshape(4, 3)


def rows(
    rank: int, size: int, *, key: str = "w", data: torch.Tensor | None = None
) -> ShardedTensor:
    """Describe this rank's rows of ``WHOLE``."""
    own = WHOLE.chunk(size)[rank].clone() if data is None else data
    return ShardedTensor.from_rank_offsets(key, own, (0, rank, size))


def flat(start: int, stop: int, *, replica_id: int = 0) -> ShardedTensor:
    """Describe elements [start, stop) of ``WHOLE``, flattened."""
    data = WHOLE.reshape(-1)[start:stop].clone()
    return ShardedTensor.from_rank_offsets_flat(
        "w", data, (4, 3), flattened_range=slice(start, stop), replica_id=replica_id
    )


def saved(tmp_path: Path) -> Path:
    """Save a tensor, an object, a local value and common values."""
    state = {
        "w": rows(0, 1),
        "rng": ShardedObject("rng", {"seed": 5}, (1, 2), (0, 0)),
        "rng2": ShardedObject("rng", {"seed": 6}, (1, 2), (0, 1)),
        "local": LocalNonpersistentObject("here"),
        "iteration": 7,
        "args": {"lr": 0.125},
    }
    save(state, tmp_path / "c")
    return tmp_path / "c"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        pytest.param(lambda _: None, "Checkpoint directory .* does not exist", id="nothing"),
        pytest.param(lambda path: path.mkdir(), "is not a distributed checkpoint", id="no-marker"),
    ],
)
@pytest.mark.parametrize("read", [lambda path: load({}, path), load_common_state_dict,
                                  load_plain_tensors, load_tensors_metadata, load_sharded_metadata],
                         ids=["load", "common", "plain", "tensors", "sharded"])  # fmt: skip
def test_what_is_no_checkpoint(
    tmp_path: Path, read: Callable[[Path], Any], make: Callable[[Path], Any], says: str
) -> None:
    """Every reader says so in the words that users know, as a FileNotFoundError."""
    make(tmp_path / "c")

    with pytest.raises(CheckpointingException, match=says) as caught:
        read(tmp_path / "c")

    assert isinstance(caught.value, FileNotFoundError)


@pytest.mark.parametrize("kind", [str, Path])
def test_paths_of_both_kinds(tmp_path: Path, kind: Callable[[Path], Any]) -> None:
    """Text and Path are the same everywhere, in errors too."""
    path = kind(saved(tmp_path))

    assert load_common_state_dict(path)["iteration"] == 7
    assert load({"w": rows(0, 1)}, path)["args"] == {"lr": 0.125}
    assert maybe_load_config(path) is not None
    assert set(load_plain_tensors(path)) == {"w"}
    with pytest.raises(CheckpointingException, match="does not exist"):
        load_common_state_dict(kind(tmp_path / "no"))


def test_an_empty_request_returns_the_common_part(tmp_path: Path) -> None:
    """As all releases do."""
    path = saved(tmp_path)

    assert load({}, path) == load_common_state_dict(path) == {"iteration": 7, "args": {"lr": 0.125}}


def test_plain_tensors_come_without_the_common_part(tmp_path: Path) -> None:
    """As documented, on any rank; keys are those of the tensors, not of the state dict."""
    save({"model": {"layer": rows(0, 1, key="renamed")}, "iteration": 7}, tmp_path / "c")

    plain = load_plain_tensors(tmp_path / "c")

    assert list(plain) == ["renamed"]
    assert torch.equal(plain["renamed"], WHOLE)


def test_metadata_describes_whole_tensors(tmp_path: Path) -> None:
    """No data, no offset, one shard, main replica; it may be used as a request."""
    path = saved(tmp_path)

    tensors, everything = load_tensors_metadata(path), load_sharded_metadata(path)

    assert list(tensors) == ["w"]
    one = tensors["w"]
    assert one.data is None
    assert (one.global_shape, one.local_shape, one.global_offset) == ((4, 3), (4, 3), (0, 0))
    assert (one.axis_fragmentations, one.replica_id, one.dtype) == ((1, 1), 0, torch.float32)
    assert set(everything) == {"w", "rng/shard_0.0_1.2", "rng/shard_0.1_1.2"}
    assert torch.equal(load(dict(tensors), path)["w"], WHOLE)


def test_objects_alone(tmp_path: Path) -> None:
    """They come back in the request's nesting, beside the rest of it."""
    path = saved(tmp_path)
    wanted = {"a": [1, ShardedObject("rng", None, (1, 2), (0, 1))], "w": 2}

    objects, rest = load_sharded_objects(wanted, path)

    assert objects == {"a": [{"seed": 6}]}
    assert rest == {"a": [1], "w": 2}
    with pytest.raises(CheckpointingException, match=r"Object shard rng/shard_0_3 not found"):
        load_sharded_objects({"o": ShardedObject("rng", None, (3,), (0,))}, path)


def test_an_object_of_another_array_shape_is_another_object(tmp_path: Path) -> None:
    """Shards at the same offset of arrays of different shapes are never taken for each other."""
    save({"o": ShardedObject("a.b", "of 1", (1,), (0,))}, tmp_path / "c")

    with pytest.raises(CheckpointingException, match="not found"):
        load_sharded_objects({"o": ShardedObject("a.b", None, (2,), (0,))}, tmp_path / "c")


def test_content_metadata(tmp_path: Path) -> None:
    """It is found in the checkpoint and in a state dict that was loaded; None without any."""
    save({"w": rows(0, 1)}, tmp_path / "c", content_metadata={"layout": [1, 2]})
    save({"w": rows(0, 1)}, tmp_path / "d")
    loaded = load({"w": rows(0, 1)}, tmp_path / "c")

    assert load_content_metadata(tmp_path / "c") == {"layout": [1, 2]}
    assert load_content_metadata(preloaded_state_dict=loaded) == {"layout": [1, 2]}
    assert load_content_metadata(tmp_path / "d") is None
    with pytest.raises(ValueError, match="None"):
        load_content_metadata()


@pytest.mark.parametrize("backend", ["torch_dist", "zarr"])
def test_an_asynchronous_save_is_visible_when_it_is_finalised(tmp_path: Path, backend: str) -> None:
    """It stores what was there when it was asked for, however training goes on."""
    state = {"w": rows(0, 1), "n": [1]}

    request = save(state, tmp_path / "c", (backend, 1), async_sharded_save=True)
    state["w"].data.zero_()
    state["n"].append(2)

    assert not (tmp_path / "c").exists()
    assert request is not None
    request.execute_sync()
    assert torch.equal(load_plain_tensors(tmp_path / "c")["w"], WHOLE)
    assert load_common_state_dict(tmp_path / "c") == {"n": [1]}


@pytest.mark.parametrize("backend", [("torch_dist", 1), ("zarr", 1), ("zarr", 2)])
def test_flattened_ranges_load_as_anything_else(tmp_path: Path, backend: tuple[str, int]) -> None:
    """In every format, on save and on load, the first one empty; and rows load as ranges."""
    save({"e": flat(0, 0), "a": flat(0, 5), "b": flat(5, 12)}, tmp_path / "flat", backend)
    save({"w": rows(0, 1)}, tmp_path / "rows", backend)

    for path in (tmp_path / "flat", tmp_path / "rows"):
        parts = {"a": flat(0, 2), "b": flat(2, 10), "c": flat(10, 12)}
        for part in parts.values():
            part.data = torch.full_like(part.data, -1)  # type: ignore[arg-type]
        loaded = load(parts, path, backend)
        assert torch.equal(torch.cat([loaded["a"], loaded["b"], loaded["c"]]), WHOLE.reshape(-1))
        assert torch.equal(load({"w": rows(0, 1)}, path)["w"], WHOLE)


def test_tensors_can_be_removed_by_prefix(tmp_path: Path) -> None:
    """The others and the common part stay as they are."""
    state = {"a": rows(0, 1, key="model.w"), "b": rows(0, 1, key="optimizer.w"), "n": 1}
    save(state, tmp_path / "c")

    remove_sharded_tensors(tmp_path / "c", "optimizer.")

    assert list(load_plain_tensors(tmp_path / "c")) == ["model.w"]
    assert load_common_state_dict(tmp_path / "c") == {"n": 1}


def test_a_failed_check_leaves_nothing(tmp_path: Path) -> None:
    """Not even the directory; and an older checkpoint there is whole."""
    path = saved(tmp_path)
    half = {"w": rows(0, 2), "iteration": 8}

    for target in (tmp_path / "new", path):
        with pytest.raises(InvalidShardingError, match="Invalid access pattern for 'w'"):
            save(half, target)

    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["c"]
    assert load({}, path)["iteration"] == 7


@pytest.mark.parametrize(
    ("shards", "says"),
    [
        pytest.param([[rows(0, 2)], [rows(0, 2)]], "Invalid access pattern for 'w'", id="twice"),
        pytest.param([[rows(0, 2)], []], "Invalid access pattern for 'w'", id="gap"),
        pytest.param([[flat(0, 5)], [flat(6, 12)]], "Invalid access pattern", id="flat-gap"),
        pytest.param([[flat(0, 7)], [flat(6, 12)]], "overlap", id="flat-overlap"),
        pytest.param([[flat(0, 12, replica_id=1)], [flat(0, 12, replica_id=2)]],
                     "saved by no main replica", id="flat-no-main"),
        pytest.param([[flat(0, 6)], [flat(6, 12, replica_id=1)]], "no main", id="flat-half-main"),
    ],
)  # fmt: skip
def test_validation_is_heard_on_every_rank(shards: list[list[ShardedTensor]], says: str) -> None:
    """With the words that users match; never a hang, never another error."""
    errors = ThreadWorld(2).errors(
        lambda comm: validate_sharding_integrity(shards[comm.rank], communicator=comm)
    )

    assert sorted(errors) == [0, 1]
    for error in errors.values():
        assert isinstance(error, CheckpointingException)
        assert says in str(error)
        assert "Invalid sharding pattern validation. Errors: " in str(error)


def test_flattened_ranges_that_tile_pass() -> None:
    """Empty ranges and replicas do no harm."""
    shards = [[flat(0, 5), flat(5, 5)], [flat(5, 12), flat(0, 12, replica_id=1)]]

    ThreadWorld(2).run(
        lambda comm: validate_sharding_integrity(shards[comm.rank], communicator=comm)
    )


@pytest.mark.parametrize(
    ("offsets", "says"),
    [
        pytest.param([0, 0], "Duplicate ShardedObject keys", id="duplicate"),
        pytest.param([1, 1], "Duplicate ShardedObject keys", id="duplicate-and-missing"),
        pytest.param([1], "Invalid access pattern: 1 ShardedObject are missing", id="missing"),
    ],
)
def test_objects_are_validated(tmp_path: Path, offsets: list[int], says: str) -> None:
    """With the words that users match."""
    state = {str(i): ShardedObject("o", i, (2,), (at,)) for i, at in enumerate(offsets)}

    with pytest.raises(CheckpointingException, match=says):
        save(state, tmp_path / "c")

    assert not (tmp_path / "c").exists()


def test_access_is_validated_on_load_too(tmp_path: Path) -> None:
    """Unless the request is said to be partial."""
    path = saved(tmp_path)

    with pytest.raises(CheckpointingException, match="Invalid access pattern for 'w'"):
        load({"w": rows(1, 2)}, path)

    half = load({"w": rows(1, 2)}, path, validate_access_integrity=False)
    assert torch.equal(half["w"], WHOLE[2:])


def test_a_list_of_all_kinds_of_leaves(tmp_path: Path) -> None:
    """Each comes back at its place: sharded, object, factory, local and plain."""

    def halves(key: str, data: Any, replica_id: Any) -> list[ShardedTensor]:
        return [
            ShardedTensor.from_rank_offsets(f"{key}.{i}", half, replica_id=replica_id)
            for i, half in enumerate(data.chunk(2))
        ]

    def request() -> dict[str, Any]:
        return {
            "l": [
                rows(0, 1), 1, ShardedObject("o", [2], (1,), (0,)), {"x": 3, "y": rows(0, 1, key="y")},
                ShardedTensorFactory("f", WHOLE.clone(), halves, torch.cat),
                LocalNonpersistentObject("here"), [], "last",
            ]
        }  # fmt: skip

    save(request(), tmp_path / "c")
    found = load(request(), tmp_path / "c")["l"]

    assert [found[i] for i in (1, 2, 5, 6, 7)] == [1, [2], "here", [], "last"]
    assert found[3]["x"] == 3
    for tensor in (found[0], found[3]["y"], found[4]):
        assert torch.equal(tensor, WHOLE)


@dataclass
class Hiding:
    """A dataclass with a leaf."""

    inside: Any


@pytest.mark.parametrize(
    "hide",
    [lambda x: (x,), lambda x: Hiding(inside=[x]), lambda x: {"deep": [(1, (x,))]}],
    ids=["tuple", "dataclass", "deep"],
)
@pytest.mark.parametrize("leaf", [rows(0, 1), ShardedObject("o", 1, (1,), (0,)),
                                  LocalNonpersistentObject(1)],
                         ids=["tensor", "object", "local"])  # fmt: skip
def test_a_hidden_leaf_is_an_error(tmp_path: Path, hide: Callable[[Any], Any], leaf: Any) -> None:
    """It is neither stored as a plain value nor silently left unloaded."""
    path = saved(tmp_path)

    with pytest.raises(InvalidShardingError):
        save({"a": hide(leaf)}, tmp_path / "new")
    with pytest.raises(InvalidShardingError):
        load({"a": hide(leaf)}, path)

    assert not (tmp_path / "new").exists()


STRICT = {
    # mode: (raises, logs, missing keys that are returned, unexpected ones)
    "assume_ok_unexpected": (True, False, None, None),
    "log_unexpected": (False, True, None, None),
    "log_all": (False, True, None, None),
    "raise_unexpected": (True, False, None, None),
    "raise_all": (True, False, None, None),
    "return_unexpected": (False, False, set(), {"new"}),
    "return_all": (False, False, {"old"}, {"new"}),
    "ignore_all": (False, False, None, None),
}


@pytest.mark.parametrize("by", ["value", "flag"])
@pytest.mark.parametrize("mode", STRICT)
def test_strict_modes(tmp_path: Path, mode: str, by: str, caplog: pytest.LogCaptureFixture) -> None:
    """By flag or by its value; what is not stored is left out, the rest is loaded."""
    raises, logs, missing, unexpected = STRICT[mode]
    save({"w": rows(0, 1), "old": rows(0, 1, key="old")}, tmp_path / "c")
    request = {"w": rows(0, 1), "new": rows(0, 1, key="new")}
    strict = mode if by == "value" else StrictHandling(mode)

    with caplog.at_level(logging.WARNING):
        if raises:
            with pytest.raises(MismatchError, match="'new'"):
                load(request, tmp_path / "c", strict=strict)
            return
        result = load(request, tmp_path / "c", strict=strict)

    if unexpected is not None:
        result, *keys = result
        assert keys == [missing, unexpected]
    assert set(result) == {"w"}
    assert torch.equal(result["w"], WHOLE)
    assert ("new" in caplog.text) == logs
    assert (": old" in caplog.text) == (mode == "log_all")


def test_all_strict_modes_are_in_the_table() -> None:
    """A mode that is added is tested."""
    assert set(STRICT) == {flag.value for flag in StrictHandling}


@pytest.mark.parametrize("sharded", [None, ("torch_dist", 1), "object"])
@pytest.mark.parametrize("common", [None, ("torch", 1), ("json", 1)])
def test_strategies_as_none_tuple_or_object(tmp_path: Path, sharded: Any, common: Any) -> None:
    """For save and load, each in its own place."""
    path = tmp_path / "c"
    to_save = get_default_save_sharded_strategy() if sharded == "object" else sharded
    save({"w": rows(0, 1), "n": 7}, path, to_save, common)
    to_load = get_default_load_sharded_strategy(path) if sharded == "object" else sharded

    loaded = load({"w": rows(0, 1)}, path, to_load, common)

    assert torch.equal(loaded["w"], WHOLE)
    assert loaded["n"] == 7
    assert load({}, path)["n"] == 7


def test_unknown_strategies_are_told(tmp_path: Path) -> None:
    """Of the sharded and of the common part, for save and load; nothing is written."""
    path = saved(tmp_path)

    for place in ({"sharded_strategy": ("nobody", 3)}, {"common_strategy": ("nobody", 3)}):
        with pytest.raises(
            UnknownStrategyError, match="Cannot find a default strategy for: .*nobody"
        ):
            save({"n": 1}, tmp_path / "new", **place)
        with pytest.raises(
            UnknownStrategyError, match="Cannot find a default strategy for: .*nobody"
        ):
            load({}, path, **place)
        assert not (tmp_path / "new").exists()


BUILT_IN = [
    pytest.param(action, backend, version, id=f"{action.value}-{backend}-{version}")
    for action, backend, version in [
        (StrategyAction.LOAD_SHARDED, "torch_dist", 1),
        (StrategyAction.LOAD_SHARDED, "zarr", 1),
        (StrategyAction.LOAD_SHARDED, "zarr", 2),
        (StrategyAction.LOAD_COMMON, "torch", 1),
        (StrategyAction.LOAD_COMMON, "json", 1),
    ]
]


@pytest.mark.parametrize(("action", "backend", "version"), BUILT_IN)
def test_a_strategy_rejects_what_it_does_not_read(
    action: StrategyAction, backend: str, version: int
) -> None:
    """Its checks check; what it can handle is a property, true or false."""
    load_strategy = get_default_strategy(action, backend, version)
    save_action = StrategyAction(action.value.replace("load", "save"))
    save_strategy = get_default_strategy(save_action, backend, version)

    load_strategy.check_backend_compatibility(backend)
    load_strategy.check_version_compatibility(version)
    with pytest.raises(CheckpointingException, match="other"):
        load_strategy.check_backend_compatibility("other")
    with pytest.raises(CheckpointingException, match="99"):
        load_strategy.check_version_compatibility(99)
    assert (save_strategy.backend, save_strategy.version) == (backend, version)
    assert f"({backend}, {version})" in str(save_strategy)
    for strategy in (load_strategy, save_strategy):
        assert isinstance(strategy.can_handle_sharded_objects, bool)


def test_a_checkpoint_of_an_unknown_backend_is_refused(tmp_path: Path) -> None:
    """A checkpoint says what it is: nothing is guessed, whichever strategy is given."""
    path = saved(tmp_path)
    with pytest.raises(CheckpointingException, match="torch_dist"):
        load({"w": rows(0, 1)}, path, ("zarr", 1))
    (tmp_path / "other").mkdir()
    save_config(CheckpointingConfig("from_the_future", 1), tmp_path / "other")
    with pytest.raises(CheckpointingException, match="from_the_future"):
        load({"w": rows(0, 1)}, tmp_path / "other")
