"""save and load in one process: every tensor and key there is, strict modes, in-place fills."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_ckpt import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptedCheckpointError,
    InvalidShardingError,
    LoadOptions,
    LocalNonpersistentObject,
    MismatchError,
    SaveOptions,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    StorageError,
    StrictHandling,
    UnsafeContentError,
    load,
    load_common_state_dict,
    load_plain_tensors,
    load_sharded_metadata,
    load_tensors_metadata,
    save,
)
from dist_ckpt.core import check_is_distributed_checkpoint
from dist_ckpt.errors import UnknownStrategyError
from dist_ckpt.serialization import validate_sharding_integrity
from tests._forge import Index
from tests._reseal import edit_index

DTYPES = sorted(
    {
        value
        for name, value in vars(torch).items()
        if isinstance(value, torch.dtype) and not name.startswith(("q", "bits"))
    },
    key=str,
)


def shard(key: str, data: torch.Tensor, **options: Any) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, data, **options)


def wanted(one: ShardedTensor) -> ShardedTensor:
    """Return the same shard with other memory, full of other bits."""
    data = torch.full((one.data.numel() * one.dtype.itemsize,), 0xA5, dtype=torch.uint8)  # type: ignore[union-attr]
    return shard(one.key, data.view(one.dtype).view(one.local_shape))


def bits_of(tensor: torch.Tensor) -> list[int]:
    resolved = tensor.detach().resolve_conj().resolve_neg()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = integer.get(resolved.element_size())
    if kind is not None:
        return resolved.view(kind).flatten().tolist()  # type: ignore[no-any-return]
    return torch.view_as_real(resolved).contiguous().view(torch.int64).flatten().tolist()  # type: ignore[no-any-return]


def random_bits(dtype: torch.dtype) -> torch.Tensor:
    """Return 3x4 elements of any bits: NaN payloads, denormals, -0.0 and all."""
    generator = torch.Generator().manual_seed(7)
    data = torch.randint(0, 256, (12 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    if dtype == torch.bool:
        data %= 2
    return data.view(dtype).view(3, 4)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda x: x,
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[::2, 1::2],
    "0-dim": lambda x: x[1, 2],
    "empty": lambda x: x[:, :0],
    "expanded": lambda x: x[:1].expand(5, 4),
    "expanded 0-dim": lambda x: x[1, 2].expand(2, 3),
    "axes of one": lambda x: x[None, :, None, :],
}


@pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_to_the_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    """Any bits of any dtype, in any strides, as shard and as common value."""
    views = {name: view(random_bits(dtype)) for name, view in VIEWS.items()}
    state = {name: shard(name, view) for name, view in views.items()}

    save({**state, "common": views}, tmp_path / "c")
    request = {name: wanted(one) for name, one in state.items()}
    loaded = load(request, tmp_path / "c")

    for name, view in views.items():
        assert bits_of(loaded[name]) == bits_of(view), name
        assert bits_of(loaded["common"][name]) == bits_of(view), name
        assert loaded["common"][name].dtype == dtype
        assert loaded[name] is request[name].data
    plain = load_plain_tensors(tmp_path / "c")
    assert {name: bits_of(t) for name, t in plain.items()} == {
        name: bits_of(view) for name, view in views.items()
    }


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_padding_of_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    """With ``allow_shape_mismatch``, what is not stored is zero, whatever the dtype."""
    save({"x": shard("x", random_bits(dtype))}, tmp_path / "c")
    target = wanted(shard("x", torch.zeros(5 * 2 * dtype.itemsize, dtype=torch.uint8)
                          .view(dtype).view(5, 2)))  # fmt: skip
    target.allow_shape_mismatch = True

    loaded = load({"x": target}, tmp_path / "c")["x"]

    per_row = len(bits_of(loaded)) // 5
    assert bits_of(loaded)[: 3 * per_row] == bits_of(random_bits(dtype)[:, :2])
    assert set(bits_of(loaded)[3 * per_row :]) == {0}


def test_conjugated_and_negated_views(tmp_path: Path) -> None:
    """Views with a pending conjugation or negation are stored and filled as what they show."""
    x = torch.randn(4, dtype=torch.complex64)
    views = {"conj": x.conj(), "neg": x.conj().imag, "both": x.conj()[::2]}
    save({name: shard(name, view) for name, view in views.items()}, tmp_path / "c")

    y = torch.zeros(4, dtype=torch.complex64)
    z = torch.zeros(4, dtype=torch.complex64)
    request = {"conj": shard("conj", y.conj()), "neg": shard("neg", z.conj().imag)}
    loaded = load(request, tmp_path / "c")

    assert torch.equal(loaded["conj"], x.conj())
    assert torch.equal(y, x)
    assert torch.equal(loaded["neg"], x.conj().imag)
    plain = load_plain_tensors(tmp_path / "c")
    assert all(torch.equal(plain[name], view) for name, view in views.items())


def test_channels_last_and_other_strides_are_filled_in_place(tmp_path: Path) -> None:
    """The caller's memory and strides stay; only its values change."""
    x = torch.randn(2, 3, 4, 5)
    save({"x": shard("x", x.to(memory_format=torch.channels_last))}, tmp_path / "c")
    base = torch.zeros(2, 3, 4, 10)
    for y in (
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(5, 4, 3, 2).permute(3, 2, 1, 0),
        base[..., ::2],
    ):
        before = y.data_ptr(), y.stride()

        loaded = load({"x": shard("x", y)}, tmp_path / "c")

        assert loaded["x"] is y or loaded["x"].data_ptr() == y.data_ptr()
        assert (y.data_ptr(), y.stride()) == before
        assert torch.equal(y, x)
    assert base[..., 1::2].count_nonzero() == 0


@pytest.mark.parametrize(
    "target",
    [torch.zeros(1, 3).expand(3, 3), torch.zeros(5).unfold(0, 3, 1)],
    ids=["expanded", "overlapping windows"],
)
def test_memory_that_overlaps_itself_is_not_filled(tmp_path: Path, target: torch.Tensor) -> None:
    """Filling it would let elements overwrite each other: a fresh tensor comes back."""
    x = torch.arange(9.0).view(3, 3)
    save({"x": shard("x", x)}, tmp_path / "c")

    loaded = load({"x": shard("x", target)}, tmp_path / "c")

    assert torch.equal(loaded["x"], x)
    assert target.count_nonzero() == 0


def test_parameters_are_filled_in_place(tmp_path: Path) -> None:
    """A leaf that requires grad is filled, and stays the leaf it was."""
    save({"w": shard("w", torch.nn.Parameter(torch.ones(3)))}, tmp_path / "c")
    parameter = torch.nn.Parameter(torch.zeros(3))

    loaded = load({"w": shard("w", parameter)}, tmp_path / "c")

    assert loaded["w"] is parameter
    assert parameter.tolist() == [1, 1, 1]
    assert parameter.is_leaf
    assert parameter.requires_grad


KEYS = [
    "a/b", "a.b", "a b", "ü€𝔘",  # noqa: RUF001 - beyond 16 bits, on purpose
     "k" * 300, "W", "w", "common", "common/x", "$tensor", "$", "", ".",
    "..", "../../etc/passwd", "a\nb", "a\0b", "\ud800", "__0_0.distcp", "index.json", "model.0", "é",
    "e\u0301",
]  # fmt: skip


def test_every_key(tmp_path: Path) -> None:
    """Keys are only names: all of these together, as tensors, objects, and keys of dicts."""
    state = {
        "tensors": [shard(key, torch.full((2,), float(i))) for i, key in enumerate(KEYS)],
        "objects": [ShardedObject(key, i, (1,), (0,)) for i, key in enumerate(KEYS)],
        "dict": {key: i for i, key in enumerate(KEYS)},
    }
    save(state, tmp_path / "c")

    loaded = load(state | {"tensors": [wanted(t) for t in state["tensors"]]}, tmp_path / "c")

    assert [t.tolist() for t in loaded["tensors"]] == [[float(i)] * 2 for i in range(len(KEYS))]
    assert loaded["objects"] == list(range(len(KEYS)))
    assert loaded["dict"] == state["dict"]
    assert set(load_tensors_metadata(tmp_path / "c")) == set(KEYS)
    assert len(load_sharded_metadata(tmp_path / "c")) == 2 * len(KEYS)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("check", [True, False])
def test_keys_that_would_collide_are_refused(tmp_path: Path, *, check: bool) -> None:
    """A tensor of the user and one of the common part or an object never share a place."""
    x = shard("common/part_0", torch.ones(3))
    y = shard("k/shard_0_1", torch.ones(3))

    for state in (
        {"x": x, "plain": torch.zeros(3)},
        {"y": y, "object": ShardedObject("k", 1, (1,), (0,))},
    ):
        with pytest.raises(InvalidShardingError, match="rename the sharded tensor"):
            save(state, tmp_path / "c", validate_access_integrity=check)
    save({"x": x, "y": y}, tmp_path / "c")
    assert load({"x": wanted(x)}, tmp_path / "c")["x"].tolist() == [1, 1, 1]


def test_int_keys_lists_and_nesting(tmp_path: Path) -> None:
    """Ints stay ints beside equal strings; lists keep plain and sharded leaves in place."""
    state = {
        0: "zero", "0": "text", -1: {True: "bool", None: "none", (1, "a"): "tuple", 1.5: "float"},
        "list": [1, shard("l1", torch.ones(1)), [shard("l2", torch.ones(2)), None], {3: 4}],
        "all sharded": [shard("s0", torch.zeros(1)), shard("s1", torch.zeros(1))],
        "empty": [[], {}, ()],
        3: {4: shard("int", torch.ones(3)), 5: [6]},
    }  # fmt: skip
    save(state, tmp_path / "c")
    request = {
        "list": [None, wanted(state["list"][1]), [wanted(state["list"][2][0]), None], {}],  # type: ignore[index]
        "all sharded": [wanted(one) for one in state["all sharded"]],  # type: ignore[union-attr]
        3: {4: wanted(state[3][4])},  # type: ignore[index]
    }

    loaded = load(request, tmp_path / "c")

    assert loaded[0] == "zero"
    assert loaded["0"] == "text"
    assert loaded[-1] == state[-1]
    assert loaded["list"][0] == 1
    assert loaded["list"][1].tolist() == [1]
    assert loaded["list"][2][0].tolist() == [1, 1]
    assert loaded["list"][2][1] is None
    assert loaded["list"][3] == {3: 4}
    assert [t.tolist() for t in loaded["all sharded"]] == [[0], [0]]
    assert loaded["empty"] == [[], {}, ()]
    assert loaded[3][5] == [6]
    assert loaded[3][4].tolist() == [1, 1, 1]


def test_dicts_of_other_classes_stay_what_they_are(tmp_path: Path) -> None:
    """Schedulers hold Counters; with and without a place in the request, shards beside them."""
    values = {
        "counter": Counter({3: 1}),
        "ordered": OrderedDict(b=1, a=2),
        "default": defaultdict(list, {"a": [1]}),
    }
    save({**values, "x": shard("x", torch.ones(2))}, tmp_path / "c")

    for request in ({}, values):
        loaded = load({**request, "x": shard("x", torch.zeros(2))}, tmp_path / "c")

        for name, value in values.items():
            assert type(loaded[name]) is type(value)
            assert loaded[name] == value
    assert list(loaded["ordered"]) == ["b", "a"]


def test_plain_lists_of_the_request_do_not_count(tmp_path: Path) -> None:
    """A list without shards comes from the checkpoint, however long it has become since."""
    save({"history": [1, 2, 3], "x": shard("x", torch.ones(2))}, tmp_path / "c")

    loaded = load({"history": [0], "x": shard("x", torch.zeros(2))}, tmp_path / "c")

    assert loaded["history"] == [1, 2, 3]


def test_lists_of_another_length_are_told(tmp_path: Path) -> None:
    """Where shards and plain values share a list, positions must agree."""
    save({"l": [1, shard("x", torch.ones(2))]}, tmp_path / "c")

    with pytest.raises(MismatchError, match="'l': 1 elements are expected, 2 are stored"):
        load({"l": [shard("x", torch.zeros(2))]}, tmp_path / "c")


def test_a_list_of_shards_may_be_cut_otherwise(tmp_path: Path) -> None:
    """Rank 0 with no shards at all stores an empty list; more or fewer shards load all the same."""
    save({"x": [], "y": [shard("y", torch.ones(2))]}, tmp_path / "c")
    halves = [
        ShardedTensor("y", torch.zeros(1), torch.float32, (1,), (2,), (i,), None) for i in (0, 1)
    ]

    loaded = load({"x": [shard("y", torch.zeros(2))], "y": halves}, tmp_path / "c",
                  validate_access_integrity=False)  # fmt: skip

    assert [t.tolist() for t in loaded["x"]] == [[1, 1]]
    assert [t.tolist() for t in loaded["y"]] == [[1], [1]]


@pytest.mark.parametrize(
    "wrap",
    [lambda x: (x,), lambda x: {"a": ({"b": x},)}, lambda x: [[(x,)]]],
    ids=["tuple", "dict in a tuple", "tuple in a list"],
)
def test_shards_in_tuples_are_refused(tmp_path: Path, wrap: Callable[[object], object]) -> None:
    """They would be taken for plain values; the path is named."""
    state = {"outer": wrap(shard("x", torch.ones(2)))}

    for call in (save, load):
        with pytest.raises((InvalidShardingError, CheckpointNotFoundError), match=r"outer|exist"):
            call(state, tmp_path / "c")
    save({"x": shard("x", torch.ones(2))}, tmp_path / "c")
    with pytest.raises(InvalidShardingError, match="outer"):
        load(state, tmp_path / "c")


def test_the_mark_of_a_shard_is_refused_as_a_value(tmp_path: Path) -> None:
    """What would be mistaken for the place of a shard cannot be stored as a value."""
    with pytest.raises(InvalidShardingError, match="marks the place"):
        save({"l": [{"__sharded__": True}, 1]}, tmp_path / "c")


@pytest.mark.parametrize("fmt", [("torch_dist", 1), ("zarr", 1), ("zarr", 2)])
@pytest.mark.parametrize("common", [None, ("torch", 1)])
def test_the_mark_of_a_shard_is_not_seen(tmp_path: Path, fmt: Any, common: Any) -> None:
    """In a list that is not asked for, or read without the sharded part."""
    state = {"l": [1, shard("x", torch.ones(2)), LocalNonpersistentObject(2), 3]}
    seen: list[Any] = []

    def look(part: dict[str, Any]) -> dict[str, Any]:
        seen.append(part)
        return part

    save(state, tmp_path / "c", fmt, common, preprocess_common_before_consistancy_check=look)
    assert seen == [{"l": [1, None, None, 3]}]

    assert load_common_state_dict(tmp_path / "c") == {"l": [1, None, None, 3]}
    loaded = load({}, tmp_path / "c", validate_access_integrity=False)
    assert loaded == {"l": [1, None, None, 3]}


@pytest.mark.parametrize("mode", ["log_all", "return_unexpected", "ignore_all"])
def test_a_factory_that_is_not_stored_is_left_out(tmp_path: Path, mode: str) -> None:
    """As a tensor is that the mode lets pass: its keys are reported, nothing is merged."""

    def build(key: str, data: torch.Tensor, _: Any) -> list[ShardedTensor]:
        return [shard(f"{key}.{i}", half) for i, half in enumerate(data.chunk(2))]

    def factory(key: str, value: float) -> ShardedTensorFactory:
        return ShardedTensorFactory(key, torch.full((4,), value), build, torch.cat)

    save({"f": factory("f", 1.0)}, tmp_path / "c")
    request = {"f": factory("f", 0.0), "g": factory("g", 0.0), "l": [factory("h", 0.0)]}

    result = load(request, tmp_path / "c", strict=mode)

    loaded = result[0] if mode.startswith("return") else result
    assert loaded["f"].tolist() == [1] * 4
    assert "g" not in loaded
    if mode.startswith("return"):
        assert result[2] == {"g.0", "g.1", "h.0", "h.1"}


def test_objects_factories_and_local_values(tmp_path: Path) -> None:
    """Objects come back, factories split and merge, local values stay local."""

    def build(key: str, data: torch.Tensor, replica_id: Any) -> dict[str, Any]:
        return {"halves": [shard(f"{key}.{i}", half) for i, half in enumerate(data.chunk(2))]}

    def merge(loaded: dict[str, Any]) -> torch.Tensor:
        return torch.cat(loaded["halves"])

    def state(value: float) -> dict[str, Any]:
        return {
            "factory": ShardedTensorFactory("f", torch.full((4,), value), build, merge),
            "list": [1, ShardedTensorFactory("g", torch.full((2,), value), build, merge)],
            "object": ShardedObject("o", {"t": torch.full((2,), value), 1: {2}}, (2, 1), (0, 0)),
            "other": ShardedObject("o", [value], (2, 1), (1, 0)),
            "local": LocalNonpersistentObject(value),
        }

    save(state(1.0), tmp_path / "c")
    loaded = load(state(0.0), tmp_path / "c")

    assert loaded["factory"].tolist() == [1] * 4
    assert loaded["list"][0] == 1
    assert loaded["list"][1].tolist() == [1, 1]
    assert loaded["object"]["t"].tolist() == [1, 1]
    assert loaded["object"][1] == {2}
    assert loaded["other"] == [1.0]
    assert loaded["local"] == 0.0
    assert set(load_tensors_metadata(tmp_path / "c")) == {"f.0", "f.1", "g.0", "g.1"}


def test_prepended_axes(tmp_path: Path) -> None:
    """Layers stacked on an axis that no local tensor has load as a stack, and the other way."""
    layers = [
        shard("w", torch.full((2, 3), float(i)), prepend_axis_num=1) for i in range(1)
    ]  # one layer is the whole axis
    save({"layers": layers}, tmp_path / "one")
    assert load_plain_tensors(tmp_path / "one")["w"].shape == (1, 2, 3)

    stack = [
        ShardedTensor.from_rank_offsets(
            "w", torch.full((2, 3), float(i)), (0, i, 3), prepend_axis_num=1
        )
        for i in range(3)
    ]
    save({"layers": stack}, tmp_path / "c")
    whole = load({"w": shard("w", torch.zeros(3, 2, 3))}, tmp_path / "c")["w"]
    again = load(
        {"l": [ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, i, 3), prepend_axis_num=1)
               for i in range(3)]},
        tmp_path / "c",
    )  # fmt: skip

    assert [whole[i].unique().tolist() for i in range(3)] == [[0.0], [1.0], [2.0]]
    assert all(torch.equal(a, b) for a, b in zip(again["l"], whole, strict=True))


def test_nothing_of_the_caller_is_changed(tmp_path: Path) -> None:
    """Neither save nor load touches containers, shards or values that they are lent."""

    def build(key: str, data: torch.Tensor, replica_id: Any) -> dict[str, Any]:
        return {"x": shard(key, data)}

    factory = ShardedTensorFactory("f", torch.ones(2), build, lambda loaded: loaded["x"])
    inner = [1, factory, LocalNonpersistentObject(3)]
    x = shard("x", torch.ones(2))
    fresh = ShardedTensor("x", None, torch.float32, (2,), (2,), (0,), None)
    state: dict[Any, Any] = {"x": x, "inner": inner, 4: {"five": 5}}
    request: dict[Any, Any] = {"x": fresh, "inner": [None, factory, inner[2]]}
    keep, keep_request = copy.copy(state), copy.copy(request)

    save(state, tmp_path / "c")
    loaded = load(request, tmp_path / "c")

    assert state == keep
    assert state["inner"] is inner
    assert inner[1] is factory
    assert request == keep_request
    assert fresh.data is None
    assert request["inner"] == [None, factory, inner[2]]
    assert loaded["inner"][0] == 1
    loaded[4]["five"] = 6
    assert load_common_state_dict(tmp_path / "c")[4] == {"five": 5}


# -- strict ----------------------------------------------------------------------------------------

STRICT = {
    "assume_ok_unexpected": ("raise", "quiet"),
    "log_unexpected": ("log", "quiet"),
    "log_all": ("log", "log"),
    "raise_unexpected": ("raise", "quiet"),
    "raise_all": ("raise", "raise"),
    "return_unexpected": ("return", "quiet"),
    "return_all": ("return", "return"),
    "ignore_all": ("quiet", "quiet"),
}


def test_all_strict_modes_are_tested() -> None:
    """The table below has every mode."""
    assert set(STRICT) == {mode.value for mode in StrictHandling}


@pytest.mark.parametrize("kind", ["unexpected", "missing"])
@pytest.mark.parametrize("mode", STRICT)
def test_strict_modes(
    tmp_path: Path, mode: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each mode raises, logs, returns or ignores keys of one side, by name; the rest loads."""
    x, y = shard("x", torch.ones(2)), shard("yy", torch.ones(2))
    one = ShardedObject("obj", 1, (1,), (0,))
    save({"x": x} if kind == "unexpected" else {"x": x, "y": y, "o": one}, tmp_path / "c")
    request: dict[str, Any] = {"x": wanted(x)}
    if kind == "unexpected":
        request |= {"y": wanted(y), "list": [wanted(x), shard("yyy", torch.ones(1))], "o": one}
    reaction = STRICT[mode][0 if kind == "unexpected" else 1]
    names = {"yy", "obj"} | ({"yyy"} if kind == "unexpected" else set())

    def call() -> Any:
        with caplog.at_level(logging.WARNING):
            return load(request, tmp_path / "c", strict=mode, validate_access_integrity=False)

    if reaction == "raise":
        with pytest.raises(MismatchError) as caught:
            call()
        assert all(name in str(caught.value) for name in names)
        return
    result = call()
    loaded = result
    if mode.startswith("return"):
        loaded, missing, unexpected = result
        found = unexpected if kind == "unexpected" else missing
        assert found == (names if reaction == "return" else set())
        assert not (missing if kind == "unexpected" else unexpected)
    assert loaded["x"].tolist() == [1, 1]
    assert "y" not in loaded
    assert "o" not in loaded
    if kind == "unexpected":
        assert loaded["list"][0].tolist() == [1, 1]
        assert loaded["list"][1] is None
    logged = all(name in caplog.text for name in names)
    assert logged == (reaction == "log")


def test_a_missing_key_is_told_with_the_nearest_one(tmp_path: Path) -> None:
    """A typo is seen at once."""
    save({"x": shard("layer.weight", torch.ones(2))}, tmp_path / "c")

    with pytest.raises(MismatchError, match=r"'layer.wieght' is not stored \(nearest: 'layer.weig"):
        load({"x": shard("layer.wieght", torch.ones(2))}, tmp_path / "c")


def test_objects_are_reported_by_key_and_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """However many shards an object has."""

    def cells(key: str) -> list[ShardedObject]:
        return [ShardedObject(key, i, (3,), (i,)) for i in range(3)]

    save({"a": cells("stored")}, tmp_path / "c")

    _, missing, unexpected = load({"b": cells("asked")}, tmp_path / "c", strict="return_all")
    assert (missing, unexpected) == ({"stored"}, {"asked"})

    with pytest.raises(MismatchError) as caught:
        load({"b": cells("asked")}, tmp_path / "c", strict="raise_all")
    assert str(caught.value).count("'asked'") == 1
    assert "shard_" not in str(caught.value)

    load({"b": cells("asked")}, tmp_path / "c", strict="log_all")
    assert "shard_" not in caplog.text
    assert caplog.text.count("'asked' is not stored") == 1


def test_hints_compare_keys_without_the_position_of_shards(tmp_path: Path) -> None:
    """What all objects have in common does not make them near."""
    state = {"w": shard("encoder.weight", torch.ones(2)), "o": ShardedObject("opt", 1, (1,), (0,))}
    save(state, tmp_path / "c")
    rng = ShardedObject("rng", 1, (1,), (0,))
    typo = ShardedObject("encoder.wieght", 1, (1,), (0,))

    with pytest.raises(MismatchError) as caught:
        load({"r": rng, "t": typo}, tmp_path / "c")

    assert "'rng' is not stored" in str(caught.value)
    assert "'rng' is not stored (nearest" not in str(caught.value)
    assert "'encoder.wieght' is not stored (nearest: 'encoder.weight')" in str(caught.value)


@pytest.mark.parametrize("mode", STRICT)
def test_an_object_on_another_grid_is_an_error_in_every_mode(tmp_path: Path, mode: str) -> None:
    """Its key is stored: it must not be dropped as if it were not."""
    save({"o": [ShardedObject("obj", i, (2,), (i,)) for i in range(2)]}, tmp_path / "c")

    with pytest.raises(MismatchError, match="Object shard obj/shard_0_1 not found"):
        load({"o": ShardedObject("obj", None, (1,), (0,))}, tmp_path / "c", strict=mode)


@pytest.mark.parametrize("mode", STRICT)
def test_a_key_of_the_other_kind_is_an_error_in_every_mode(tmp_path: Path, mode: str) -> None:
    """A tensor where an object is stored, and the other way round."""
    save({"t": shard("t", torch.ones(2)), "o": ShardedObject("o", 1, (1,), (0,))}, tmp_path / "c")

    with pytest.raises(MismatchError, match="'o': a tensor is expected, an object is stored"):
        load({"o": shard("o", torch.ones(2))}, tmp_path / "c", strict=mode)
    with pytest.raises(MismatchError, match="'t': an object is expected, a tensor is stored"):
        load({"t": ShardedObject("t", 1, (1,), (0,))}, tmp_path / "c", strict=mode)


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    """With the names that there are."""
    with pytest.raises(ValueError, match=r"Invalid strict flag.*raise_all"):
        load({}, tmp_path / "c", strict="loudly")


def test_access_integrity_of_a_request(tmp_path: Path) -> None:
    """A request that does not cover a tensor is refused unless it is told to be partial."""
    save({"x": shard("x", torch.arange(4.0))}, tmp_path / "c")
    part = ShardedTensor("x", torch.zeros(2), torch.float32, (2,), (4,), (1,), None)
    whole = shard("x", torch.zeros(4))

    with pytest.raises(InvalidShardingError, match=r"\[0:1\] is saved by no main replica"):
        load({"x": part}, tmp_path / "c")
    with pytest.raises(InvalidShardingError, match="overlap"):
        load({"x": part, "whole": whole}, tmp_path / "c")
    loaded = load({"x": part, "w": whole}, tmp_path / "c", validate_access_integrity=False)
    assert loaded["x"].tolist() == [1, 2]
    assert loaded["w"].tolist() == [0, 1, 2, 3]


# -- what must not be saved ------------------------------------------------------------------------


def box(start: int, n: int, size: int, **options: Any) -> ShardedTensor:
    return ShardedTensor(
        "x", torch.ones(n), torch.float32, (n,), (size,), (start,), None, **options
    )


UNSTORABLE = {
    "overlap": ([box(0, 3, 4), box(1, 3, 4)], "overlap"),
    "double": ([box(0, 3, 3), shard("x", torch.ones(3, dtype=torch.int8))], "disagree on dtype"),
    "shapes": ([box(0, 2, 4), box(2, 2, 5)], "disagree on global_shape"),
    "outside": ([box(0, 5, 4, allow_shape_mismatch=True)], "outside of"),
    "no data": ([box(0, 4, 4).without_data()], "no data"),
}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("case", UNSTORABLE)
def test_what_could_not_be_read_back_is_not_saved(
    tmp_path: Path, case: str, *, check: bool
) -> None:
    """Also without ``validate_access_integrity``: an unreadable checkpoint is no checkpoint."""
    shards, message = UNSTORABLE[case]

    with pytest.raises(InvalidShardingError, match=message):
        save({"x": shards}, tmp_path / "c", validate_access_integrity=check)
    assert list(tmp_path.iterdir()) == []


def test_gaps(tmp_path: Path) -> None:
    """A gap is an error; when it is allowed, what is there loads and what is not is told."""
    with pytest.raises(InvalidShardingError, match=r"'x': \[3:4\] is saved by no main replica"):
        save({"x": box(0, 3, 4)}, tmp_path / "c")
    save({"x": box(0, 3, 4)}, tmp_path / "c", validate_access_integrity=False)

    with pytest.raises(MismatchError, match="3 of the 4 elements"):
        load_plain_tensors(tmp_path / "c")
    with pytest.raises(MismatchError, match="3 of the 4 elements"):
        load({"x": shard("x", torch.zeros(4))}, tmp_path / "c")
    loaded = load({"x": box(0, 2, 4)}, tmp_path / "c", validate_access_integrity=False)
    assert loaded["x"].tolist() == [1, 1]


def test_objects_must_be_complete(tmp_path: Path) -> None:
    """Cells that are missing or there twice are an error by name."""
    with pytest.raises(InvalidShardingError, match="1 ShardedObject are missing. Key 'o'"):
        save({"o": ShardedObject("o", 1, (2,), (0,))}, tmp_path / "c")
    twice = [ShardedObject("o", i, (1,), (0,)) for i in (1, 2)]
    with pytest.raises(InvalidShardingError, match="Duplicate ShardedObject keys"):
        save({"o": twice}, tmp_path / "c")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_is_refused_or_pickled(tmp_path: Path) -> None:
    """It has no shape to store: refused as a shard, and in the common part of the other classes."""
    data = torch.nested.nested_tensor([torch.ones(2), torch.ones(2)])

    with pytest.raises(InvalidShardingError, match="nested"):
        ShardedTensor("x", data, data.dtype, (2, 2), (2, 2), (0, 0), None)
    save({"x": data}, tmp_path / "c")
    with pytest.raises(UnsafeContentError, match="allow_pickle"):
        load({}, tmp_path / "c")


@pytest.mark.parametrize(
    "data",
    [torch.ones(2, 2).to_sparse(), torch.ones(2, 2, device="meta")],
    ids=["sparse", "meta"],
)
def test_tensors_without_plain_values_are_refused(tmp_path: Path, data: torch.Tensor) -> None:
    """Sparse and meta tensors are told by key."""
    one = ShardedTensor("x", data, data.dtype, (2, 2), (2, 2), (0, 0), None)

    with pytest.raises(InvalidShardingError, match="'x'"):
        save({"x": one}, tmp_path / "c")


# -- mismatches ------------------------------------------------------------------------------------


def test_wrong_shapes_and_dtypes_are_told_together(tmp_path: Path) -> None:
    """All of them at once, with what is expected and what is stored; nothing is filled."""
    save({"a": shard("a", torch.ones(3)), "b": shard("b", torch.ones(3))}, tmp_path / "c")
    a, b = torch.zeros(4), torch.zeros(3, dtype=torch.float64)

    with pytest.raises(MismatchError) as caught:
        load(
            {"a": shard("a", a), "b": shard("b", b)},
            tmp_path / "c",
            options=LoadOptions(cast="error"),
        )

    assert "'a': global shape (4,) is expected, (3,) is stored" in str(caught.value)
    assert "'b': float64 is expected, float32 is stored" in str(caught.value)
    assert not a.any()
    assert not b.any()


@pytest.mark.parametrize(("size", "expected"), [(3, [0, 1, 2]), (7, [0, 1, 2, 3, 4, 0, 0])])
def test_allow_shape_mismatch(tmp_path: Path, size: int, expected: list[int]) -> None:
    """The common part is loaded, padding is zero; other numbers of axes are an error."""
    save({"x": shard("x", torch.arange(5))}, tmp_path / "c")
    target = shard("x", torch.full((size,), 9), allow_shape_mismatch=True)

    assert load({"x": target}, tmp_path / "c")["x"].tolist() == expected

    with pytest.raises(MismatchError, match="global shape"):
        other = shard("x", torch.zeros(5, 1, dtype=torch.int64), allow_shape_mismatch=True)
        load({"x": other}, tmp_path / "c")


# -- places ----------------------------------------------------------------------------------------


def test_not_a_checkpoint(tmp_path: Path) -> None:
    """Nothing, a file, an empty and a foreign directory: each is told apart."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.pt").write_text("x")

    for name, message in {
        "nothing": "does not exist",
        "file": "is a file",
        "empty": "not a distributed checkpoint",
        "other": "not a distributed checkpoint",
    }.items():
        with pytest.raises(CheckpointNotFoundError, match=message):
            load({}, tmp_path / name)
        assert not check_is_distributed_checkpoint(tmp_path / name)


def test_other_peoples_directories_are_not_replaced(tmp_path: Path) -> None:
    """A save refuses a file, a link, and a directory that is not ours, and leaves them alone."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious").write_text("x")
    (tmp_path / "link").symlink_to("other")
    state = {"x": shard("x", torch.ones(2))}

    for name in ("file", "other", "link"):
        with pytest.raises(StorageError):
            save(state, tmp_path / name)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="device, pipe or socket"):
        save(state, tmp_path / "pipe", options=SaveOptions(replace="any"))
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "other" / "precious").read_text() == "x"
    save(state, tmp_path / "other", options=SaveOptions(replace="any"))
    assert (tmp_path / "other" / "precious").read_text() == "x"
    assert load_plain_tensors(tmp_path / "other")["x"].tolist() == [1, 1]
    (tmp_path / "empty").mkdir()
    save(state, tmp_path / "empty")
    assert load_plain_tensors(tmp_path / "empty")["x"].tolist() == [1, 1]


def test_strategies(tmp_path: Path) -> None:
    """The known names are accepted, others are told; a strategy that does not fit is refused."""
    state = {"x": shard("x", torch.ones(2)), "step": 3}
    save(state, tmp_path / "c", ("torch_dist", 1), ("torch", 1))
    loaded = load(state, tmp_path / "c", ("torch_dist", 1), ("torch", 1))
    assert loaded["step"] == 3

    for arguments in ((("zarr", 3), None), (None, ("zarr", 1)), (("torch_dist", 2), None)):
        with pytest.raises(UnknownStrategyError, match=r"zarr|2"):
            save(state, tmp_path / "d", *arguments)
        with pytest.raises(UnknownStrategyError, match=r"zarr|2"):
            load(state, tmp_path / "c", *arguments)
    with pytest.raises(UnknownStrategyError, match="reads 'zarr', not 'torch_dist'"):
        load(state, tmp_path / "c", ("zarr", 1))
    save(state, tmp_path / "z", ("zarr", 2))
    with pytest.raises(
        UnknownStrategyError, match=r"stored as \('zarr', 2\), not as \('zarr', 1\)"
    ):
        load(state, tmp_path / "z", ("zarr", 1))
    with pytest.raises(UnknownStrategyError, match="reads 'json', not 'torch'"):
        load(state, tmp_path / "c", None, ("json", 1))
    with pytest.raises(ConfigError, match="a strategy is a SaveShardedStrategy"):
        save(state, tmp_path / "d", "torch_dist")  # type: ignore[arg-type]
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    "make",
    [
        lambda: SaveOptions(thread_count=0),
        lambda: SaveOptions(timeout_secs=-1.0),
        lambda: LoadOptions(thread_count=-2),
        lambda: LoadOptions(timeout_secs=float("nan")),
        lambda: LoadOptions(cast="maybe"),  # type: ignore[arg-type]
    ],
    ids=["no threads", "negative timeout", "negative threads", "nan", "cast"],
)
def test_impossible_options_are_refused(make: Callable[[], object]) -> None:
    """Before any save or load begins."""
    with pytest.raises(ConfigError, match="must be"):
        make()


class Custom:
    """A class that only pickle can store."""


def test_pickled_values_need_leave(tmp_path: Path) -> None:
    """They load only when the caller says so; the rest of the checkpoint is readable."""
    save({"x": shard("x", torch.ones(2)), "custom": Custom()}, tmp_path / "c")

    with pytest.raises(UnsafeContentError, match="allow_pickle"):
        load_common_state_dict(tmp_path / "c")
    options = LoadOptions(allow_pickle=True)
    assert (
        type(load_common_state_dict(tmp_path / "c", options=options)["custom"]).__name__ == "Custom"
    )
    assert load_plain_tensors(tmp_path / "c")["x"].tolist() == [1, 1]


def test_chunks_that_overlap_in_the_index_are_corruption(tmp_path: Path) -> None:
    """Two chunks of the same rows and none of the others would leave memory unfilled."""
    first, second = box(0, 2, 4), box(2, 2, 4)
    save({"x": [first, second]}, tmp_path / "c")

    def overlap(index: Index) -> None:
        first, second = index.tensor("x").rows
        second.offset = first.offset

    edit_index(tmp_path / "c", overlap)

    with pytest.raises(CorruptedCheckpointError, match=r"overlap in 'x'"):
        load_plain_tensors(tmp_path / "c")


def test_chunks_that_share_bytes_are_corruption(tmp_path: Path) -> None:
    """Few bytes of a file could be any number of tensors."""
    save({"x": [box(0, 2, 4), box(2, 2, 4)]}, tmp_path / "c")

    def share(index: Index) -> None:
        first, second = index.tensor("x").rows
        second.file, second.position = first.file, first.position

    edit_index(tmp_path / "c", share)

    with pytest.raises(CorruptedCheckpointError, match=r"'x' and 'x' share bytes of"):
        load_plain_tensors(tmp_path / "c")


def test_validate_sharding_integrity_of_tensors() -> None:
    """The seeds' check, alone: quiet for a tiling, else every problem."""
    validate_sharding_integrity([box(0, 2, 4), box(2, 2, 4)])

    with pytest.raises(InvalidShardingError, match="saved by no main replica"):
        validate_sharding_integrity([box(0, 2, 4)])


def test_validate_sharding_integrity_of_objects() -> None:
    """As in releases whose callers pass all sharded leaves; factories are not built by it."""
    cells = [ShardedObject("o", i, (2,), (i,)) for i in range(2)]
    validate_sharding_integrity([box(0, 4, 4), *cells])

    with pytest.raises(InvalidShardingError, match="1 ShardedObject are missing"):
        validate_sharding_integrity(cells[:1])
    with pytest.raises(InvalidShardingError, match="Duplicate ShardedObject keys"):
        validate_sharding_integrity([*cells, *cells])
    factory = ShardedTensorFactory("f", torch.ones(1), lambda *_: {}, lambda _: torch.ones(1))
    with pytest.raises(InvalidShardingError, match="found ShardedTensorFactory"):
        validate_sharding_integrity([factory])  # type: ignore[list-item]


def test_large_and_many(tmp_path: Path) -> None:
    """Pieces larger than a bounce buffer, many keys, several files; strided both ways."""
    big = torch.arange(3 << 20, dtype=torch.float32).view(3, 1 << 20)
    state = {
        "big": shard("big", big.t()),
        "l": [shard(f"k{i}", torch.tensor(i)) for i in range(300)],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(state, tmp_path / "c", options=SaveOptions(thread_count=3))
    target = torch.zeros(3, 1 << 20).t()

    loaded = load(
        {"big": shard("big", target), "l": [wanted(one) for one in state["l"]]},
        tmp_path / "c",
        options=LoadOptions(thread_count=3),
    )

    assert torch.equal(target, big.t())
    assert [int(t) for t in loaded["l"]] == list(range(300))
    column = ShardedTensor("big", torch.zeros(1 << 20, 1), torch.float32, (1 << 20, 1),
                           (1 << 20, 3), (0, 1), None)  # fmt: skip
    load({"c": column}, tmp_path / "c", validate_access_integrity=False)
    assert torch.equal(column.data[:, 0], big[1])  # type: ignore[index]
