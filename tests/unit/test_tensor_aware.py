"""A state dict whose tensors come and go: in one process, with and without NVRx."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import types
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch

from dist_ckpt import tensor_aware_state_dict as module
from dist_ckpt.errors import InvalidShardingError, MismatchError, RankFailedError
from dist_ckpt.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from dist_ckpt.tensor_aware_state_dict import (
    MCoreTensorAwareStateDict,
    TensorAwareStateDict,
    register_with_resiliency_ext,
)
from dist_ckpt.validation import StrictHandling

NVRX = "nvidia_resiliency_ext.checkpointing.local.base_state_dict"


def sharded(key: str, data: torch.Tensor) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, data)


def halves() -> ShardedTensorFactory:
    def build(key: str, data: torch.Tensor, replica_id: int) -> dict[str, ShardedTensor]:
        return {
            name: ShardedTensor.from_rank_offsets(f"{key}.{name}", part, replica_id=replica_id)
            for name, part in zip("ab", data.chunk(2), strict=True)
        }

    data = torch.arange(4.0)
    return ShardedTensorFactory("f", data, build, lambda parts: torch.cat([parts["a"], parts["b"]]))


def state() -> dict[str, Any]:
    return {
        "w": sharded("w", torch.arange(6.0).view(2, 3)),
        "mixed": [sharded("m", torch.tensor(5)), "plain", {"deep": sharded("d", torch.ones(2))}],
        "factory": halves(),
        "object": ShardedObject("o", {"none": None}, (1,), (0,)),
        "none": ShardedObject("n", None, (1,), (0,)),
        "local": LocalNonpersistentObject("mine"),
        "step": 3,
        "counter": Counter("aab"),
        "schedule": OrderedDict(a=[1, 2]),
    }


def made(
    tree: dict[str, Any] | None = None, algo: str = "fully_parallel"
) -> MCoreTensorAwareStateDict:
    tasd, _ = MCoreTensorAwareStateDict.from_state_dict(tree or state(), algo)
    return tasd


def check_whole(loaded: dict[str, Any]) -> None:
    assert loaded.pop("w").tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    scalar, plain, below = loaded.pop("mixed")
    assert (scalar.item(), plain, below["deep"].tolist()) == (5, "plain", [1.0, 1.0])
    assert loaded.pop("factory").tolist() == [0.0, 1.0, 2.0, 3.0]
    assert loaded == {
        "object": {"none": None}, "none": None, "local": "mine", "step": 3,
        "counter": Counter("aab"), "schedule": OrderedDict(a=[1, 2]),
    }  # fmt: skip
    assert type(loaded["schedule"]) is OrderedDict


# -- there and back --------------------------------------------------------------------------------


@pytest.mark.parametrize("out", ["atomic", "fully_parallel"])
@pytest.mark.parametrize("into", ["atomic", "fully_parallel"])
def test_round_trip(into: str, out: str) -> None:
    """Tensors, objects (None too), factories, lists of both kinds, local and common values."""
    check_whole(made(algo=into).to_state_dict(state(), algo=out))


def test_the_argument_is_not_changed() -> None:
    """Factories stay factories, shards keep their data; popping empties copies only."""
    tree = state()
    before = copy.copy(tree)
    leaf = tree["w"]
    data = leaf.data

    tasd = made(tree)
    tasd.pop_tensors()

    assert tree == before
    assert tree["w"] is leaf
    assert leaf.data is data
    assert isinstance(tree["factory"], ShardedTensorFactory)
    assert tree["mixed"][2]["deep"].data is not None


def test_reading_changes_neither_side() -> None:
    """The request keeps its data, the common part its containers; it can be read again."""
    tasd, request = made(), {"w": sharded("w", torch.zeros(2, 3))}
    common = copy.deepcopy(tasd.common)

    loaded = tasd.to_state_dict(request)
    loaded["schedule"]["a"].append(9)
    loaded["new"] = 1

    assert request["w"].data.tolist() == [[0.0] * 3] * 2
    assert tasd.common == common
    check_whole(tasd.to_state_dict(state()))


def test_an_empty_request_gives_the_common_part() -> None:
    tree = {"step": 3, "w": sharded("w", torch.zeros(1)), "more": {"a": [1]}}

    loaded = made(tree).to_state_dict({})

    assert loaded == {"step": 3, "more": {"a": [1]}}


def test_common_state_dict() -> None:
    assert made({"a": 1, "w": sharded("w", torch.zeros(1))}).common_state_dict == {"a": 1}


def test_the_common_part_has_no_marks_of_shards() -> None:
    """None stands in their places; the state dict still knows what belongs there."""
    request = {"l": [1, sharded("x", torch.ones(1))]}
    kept, _ = MCoreTensorAwareStateDict.from_state_dict(request)

    assert kept.common_state_dict == {"l": [1, None]}
    assert kept.to_state_dict(request) == {"l": [1, torch.ones(1)]}


def test_what_from_state_dict_returns() -> None:
    """A pair; alone there is no distribution, and an atomic one is four times None."""
    tree = {"w": sharded("w", torch.zeros(1))}

    assert MCoreTensorAwareStateDict.from_state_dict(tree)[1] is None
    _, atomic = MCoreTensorAwareStateDict.from_state_dict(tree, "atomic")
    assert atomic == (None, None, None, None)
    tasd, again = MCoreTensorAwareStateDict.from_state_dict(tree, cached_metadata=atomic)
    assert again is None
    assert len(list(tasd.tensors)) == 1


def test_shards_without_data_cannot_be_kept() -> None:
    """Except those that have no elements."""
    empty = ShardedTensor("e", None, torch.float32, (0,), (0,), (0,), None)
    nothing = sharded("w", torch.zeros(2)).without_data()

    assert made({"e": empty}).to_state_dict({"e": empty})["e"].shape == (0,)
    assert empty.data is None
    with pytest.raises(InvalidShardingError, match="no data: w"):
        made({"w": nothing, "e": empty})


def test_gaps_are_found() -> None:
    half = ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, 0, 2))

    with pytest.raises(InvalidShardingError, match="saved by no main replica"):
        made({"w": half})
    with pytest.raises(InvalidShardingError, match="saved by no main replica"):
        made({"w": sharded("w", torch.zeros(4))}).to_state_dict({"w": half})


@pytest.mark.parametrize("algo", ["", "parallel", None])
def test_unknown_algorithms(algo: str) -> None:
    text = 'Only "atomic" and "fully_parallel" sharding algorithms are supported'
    with pytest.raises(NotImplementedError, match=text):
        made(algo=algo)
    with pytest.raises(NotImplementedError, match=text):
        made().to_state_dict(state(), algo=algo)
    with pytest.raises(NotImplementedError, match=text):
        MCoreTensorAwareStateDict._validate_params(algo)
    with pytest.raises(NotImplementedError, match="exchange_algo"):
        made().to_state_dict(state(), "fully_parallel", "telepathy")


def test_the_statics() -> None:
    """Their names and parameters are those of the lineage."""
    part = {"w": sharded("w", torch.ones(2)), "o": ShardedObject("o", 5, (1,), (0,))}
    w, o = part.values()
    cls = MCoreTensorAwareStateDict

    assert cls._get_distribution(False, part, None) == (None, None, None, None)
    assert cls._get_distribution(True, part, None, cached_distribution=None) is None
    cls._remove_redundant_data(False, part, {}, None)
    cls._remove_redundant_data(True, part, None, None)
    assert w.data is not None
    elsewhere = {module.shard_id(w): 1, module.shard_id(o): 1}
    cls._remove_redundant_data(True, part, elsewhere, None)
    assert w.data is None
    assert o.data not in (5, None)


# -- strict modes ----------------------------------------------------------------------------------


def stored() -> MCoreTensorAwareStateDict:
    return made({"a": sharded("a", torch.ones(1)), "m": sharded("m", torch.ones(1))})


def asked() -> dict[str, Any]:
    return {
        "a": sharded("a", torch.zeros(1)),
        "u": sharded("u", torch.zeros(1)),
        "list": [sharded("v", torch.zeros(1)), ShardedObject("o", None, (1,), (0,))],
    }


UNEXPECTED = {"u", "v", "o"}


@pytest.mark.parametrize("strict", list(StrictHandling))
@pytest.mark.parametrize("algo", ["atomic", "fully_parallel"])
def test_strict_modes(strict: StrictHandling, algo: str, caplog: pytest.LogCaptureFixture) -> None:
    """Unexpected keys are left out, or raise with their names; never an AssertionError."""

    def read() -> Any:
        return stored().to_state_dict(asked(), algo, strict=strict, return_mismatch_keys=True)

    if "RAISE" in strict.name or "ASSUME" in strict.name:
        with pytest.raises(MismatchError, match="Unexpected keys") as info:
            read()
        assert all(name in str(info.value) for name in ("'u'", "'v'", "'o'"))
        assert ("Missing keys" in str(info.value)) is (strict is StrictHandling.RAISE_ALL)
        return
    loaded, missing, unexpected = read()

    assert loaded["a"].tolist() == [1.0]
    assert "u" not in loaded
    assert unexpected == UNEXPECTED
    assert missing == ({"m"} if strict.name in ("LOG_ALL", "RETURN_ALL") else set())
    assert ("'u' is not stored" in caplog.text) is ("LOG" in strict.name)
    assert ("Missing" in caplog.text) is (strict is StrictHandling.LOG_ALL)


@pytest.mark.parametrize("strict", ["return_all", StrictHandling.RETURN_UNEXPECTED])
def test_strict_does_not_change_what_is_returned(strict: Any) -> None:
    assert set(stored().to_state_dict(asked(), strict=strict)) == {"a"}


def test_missing_keys_alone() -> None:
    """Requested by nobody: an error only where all keys must agree."""
    request = {"a": sharded("a", torch.zeros(1))}

    assert set(stored().to_state_dict(request)) == {"a"}
    with pytest.raises(MismatchError, match="Missing keys.*m"):
        stored().to_state_dict(request, strict=StrictHandling.RAISE_ALL)


def test_an_invalid_flag() -> None:
    with pytest.raises((ValueError, RankFailedError), match="Invalid strict flag"):
        stored().to_state_dict({}, strict="lax")


def test_a_shard_that_is_requested_in_two_forms() -> None:
    """One is kept: it must not come back for the other."""
    kept, _ = MCoreTensorAwareStateDict.from_state_dict({"x": sharded("x", torch.ones(2))})
    other = sharded("x", torch.zeros(2, dtype=torch.float64))

    with pytest.raises(InvalidShardingError, match="'x' at .* on one rank"):
        kept.to_state_dict(
            {"a": other, "b": sharded("x", torch.zeros(2))}, validate_access_integrity=False
        )


@pytest.mark.parametrize("algo", ["atomic", "fully_parallel"])
def test_shards_are_not_cut_anew(algo: str) -> None:
    """Another sharding, shape or dtype is an error that names all of them."""
    tasd = made({name: sharded(name, torch.zeros(4)) for name in "abc"})
    request = {
        "a0": ShardedTensor.from_rank_offsets("a", torch.zeros(2), (0, 0, 2)),
        "a1": ShardedTensor.from_rank_offsets("a", torch.zeros(2), (0, 1, 2)),
        "b": sharded("b", torch.zeros(4, dtype=torch.int32)),
        "c": sharded("c", torch.zeros(4)),
    }

    with pytest.raises(MismatchError, match="'a' at \\(2,\\): no such shard is kept") as info:
        tasd.to_state_dict(request, algo)
    assert "int32" in str(info.value)
    assert "'c'" not in str(info.value)


# -- hollow and back -------------------------------------------------------------------------------


def test_pop_and_insert() -> None:
    """In a fixed order; afterwards everything is as before."""
    tasd = made()
    before = list(tasd.tensors)
    assert not tasd.is_hollow

    popped = tasd.pop_tensors()

    assert tasd.is_hollow
    assert all(a is b for a, b in zip(popped, before, strict=True))
    assert len(list(tasd._sharded_tensors)) == len(popped)
    assert all(leaf.data is None for leaf in tasd._sharded_tensors)
    tasd.insert_tensors(iter(popped))
    assert not tasd.is_hollow
    assert all(a is b for a, b in zip(tasd.tensors, before, strict=True))
    check_whole(tasd.to_state_dict(state()))


def test_states_are_minded() -> None:
    """What needs tensors fails without them, and the other way round."""
    tasd = made()
    for call in (tasd.init_tensors, lambda: tasd.insert_tensors([])):
        with pytest.raises(AssertionError, match="not taken out"):
            call()
    tasd.pop_tensors()
    needs = (
        tasd.pop_tensors, tasd.copy_tensors_to_cpu, tasd.restore_tensor_device, lambda: tasd.tensors,
    )  # fmt: skip
    for call in needs:
        with pytest.raises(AssertionError, match="taken out already"):
            call()
    with pytest.raises(InvalidShardingError, match="taken out"):
        tasd.to_state_dict(state())


def test_insert_is_all_or_nothing() -> None:
    """Too few, too many or wrong tensors leave the state dict hollow."""
    tasd = made()
    tensors = tasd.pop_tensors()

    for wrong in (tensors[1:], [*tensors, torch.zeros(1)], []):
        with pytest.raises(ValueError, match=f"{len(wrong)} tensors for {len(tensors)}"):
            tasd.insert_tensors(wrong)
    with pytest.raises(InvalidShardingError, match="'w'.*'m'"):
        tasd.insert_tensors([tensors[0].double(), torch.zeros(7), *tensors[2:]])
    assert tasd.is_hollow
    assert all(leaf.data is None for leaf in tasd._sharded_tensors)
    tasd.insert_tensors(tensors)


def test_init_tensors() -> None:
    """Same shapes and dtypes, no values; flattened ranges are no larger than they are."""
    flat = ShardedTensor("f", torch.ones(4), torch.float32, (2, 2), (2, 2), (0, 0), None,
                         flattened_range=slice(0, 4))  # fmt: skip
    tasd = made({"f": flat, "b": sharded("b", torch.zeros(3, dtype=torch.bfloat16))})
    kinds = [(t.shape, t.dtype, t.device) for t in tasd.pop_tensors()]

    tasd.init_tensors()

    assert [(t.shape, t.dtype, t.device) for t in tasd.tensors] == kinds
    assert not tasd.is_hollow


def test_copies_are_out_of_reach_of_training() -> None:
    """Each call clones tensors of host memory, and just the part that is a shard."""
    whole = torch.zeros(1000)
    weight = torch.nn.Parameter(whole[:10])
    tasd = made({"w": sharded("w", weight), "x": sharded("x", whole[10:20].expand(10))})

    tasd.copy_tensors_to_cpu()
    first = list(tasd.tensors)
    with torch.no_grad():
        weight.fill_(7)
    whole.fill_(8)

    assert [t.sum().item() for t in tasd.tensors] == [0.0, 0.0]
    assert all(t.untyped_storage().nbytes() == 40 for t in first)
    assert not any(t.requires_grad for t in first)
    tasd.copy_tensors_to_cpu(non_blocking=True)
    assert not any(a is b for a, b in zip(first, tasd.tensors, strict=True))
    tasd.restore_tensor_device()
    assert all(t.device.type == "cpu" for t in tasd.tensors)


def test_devices_are_remembered() -> None:
    """What was copied from a device goes back there, also through a hollow state."""
    tasd = made({"w": sharded("w", torch.ones(3))})
    (leaf,) = tasd._sharded_tensors
    leaf.data = torch.ones(3, device="meta")

    assert tasd.pop_tensors()[0].device.type == "meta"
    tasd.insert_tensors([torch.ones(3)])
    kept = next(tasd.tensors)
    tasd.copy_tensors_to_cpu()
    assert next(tasd.tensors) is kept
    tasd = pickle.loads(pickle.dumps(tasd))
    tasd.restore_tensor_device(non_blocking=False)
    assert next(tasd.tensors).device.type == "meta"
    tasd.pop_tensors()
    tasd.init_tensors()
    assert next(tasd.tensors).device.type == "meta"


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_a_device_that_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    """What was kept on a machine with CUDA is read on one without it, in host memory."""
    tasd = made({"w": sharded("w", torch.ones(3))})
    tasd._devices[0] = "cuda"

    tasd.restore_tensor_device()
    assert next(tasd.tensors).device.type == "cpu"
    tasd.pop_tensors()
    tasd._devices[0] = "cuda"
    tasd.init_tensors()

    assert next(tasd.tensors).device.type == "cpu"
    assert "there is no cuda here" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_to_the_host_and_back() -> None:
    """A copy on the host while training goes on on the device; then everything is back there."""
    weight = torch.arange(1000.0, device="cuda")
    tasd = made({"w": sharded("w", weight)})

    tasd.copy_tensors_to_cpu(non_blocking=True)
    torch.cuda.synchronize()
    weight.zero_()
    hollow, tensors = tasd, tasd.pop_tensors()
    assert tensors[0].device.type == "cpu"
    hollow = pickle.loads(pickle.dumps(hollow))
    hollow.insert_tensors(tensors)
    hollow.restore_tensor_device(non_blocking=False)

    assert next(hollow.tensors).is_cuda
    assert hollow.to_state_dict({"w": sharded("w", weight)})["w"].tolist() == list(range(1000))


@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_hollow_state_and_tensors_travel_apart(how: str) -> None:
    """Over a pipe or through a file, as managers of local checkpoints do it."""
    tasd = made()
    tensors = tasd.pop_tensors()
    if how == "pickle":
        hollow, tensors = pickle.loads(pickle.dumps(tasd)), pickle.loads(pickle.dumps(tensors))
    else:
        file = io.BytesIO()
        torch.save((tasd, tensors), file)
        file.seek(0)
        hollow, tensors = torch.load(file, weights_only=False)
    assert hollow.is_hollow

    hollow.insert_tensors(tensors)

    check_whole(hollow.to_state_dict(state()))


def test_a_shard_that_stands_twice() -> None:
    """One object at two places is taken out once; two tensors of one storage stay two."""
    one = sharded("w", torch.ones(2))
    tied = sharded("t", one.data)
    tasd, _ = MCoreTensorAwareStateDict.from_state_dict({"t": tied, "x": [one]})
    twice = MCoreTensorAwareStateDict({}, {"a": one, "b": one})

    assert len(twice.pop_tensors()) == 1
    twice.insert_tensors([torch.zeros(2)])
    assert len(tasd.pop_tensors()) == 2


# -- NVRx ------------------------------------------------------------------------------------------


def fake_nvrx() -> types.ModuleType:
    """Return a stand-in for NVRx's module: an abstract base class, and a manager that asks for it.

    The real one cannot be installed everywhere; what counts is that its class is an ABC and that
    managers look with ``isinstance``.
    """
    found: Any = types.ModuleType(NVRX)

    class TensorAwareStateDict(ABC):
        @abstractmethod
        def pop_tensors(self) -> Any: ...

    def save(state_dict: Any) -> int:
        assert isinstance(state_dict, found.TensorAwareStateDict)
        state_dict.copy_tensors_to_cpu(non_blocking=True)
        return len(state_dict.pop_tensors())

    found.TensorAwareStateDict, found.save = TensorAwareStateDict, save
    return found


def test_without_nvrx() -> None:
    """Nothing is registered and nothing is imported."""
    assert NVRX not in sys.modules
    assert register_with_resiliency_ext() is False
    made()
    assert not any(name.startswith("nvidia_resiliency_ext") for name in sys.modules)


@pytest.mark.parametrize("when", ["before", "after", "already asked"])
def test_nvrx_takes_ours_for_its_own(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is loaded before or after a state dict is made, even if it once said no."""
    nvrx: Any = fake_nvrx()
    if when == "before":
        monkeypatch.setitem(sys.modules, NVRX, nvrx)
    tasd = made({"w": sharded("w", torch.ones(2))})
    if when == "already asked":
        assert not isinstance(tasd, nvrx.TensorAwareStateDict)
    monkeypatch.setitem(sys.modules, NVRX, nvrx)

    assert nvrx.save(tasd) == 1
    assert issubclass(MCoreTensorAwareStateDict, nvrx.TensorAwareStateDict)
    assert not isinstance({}, nvrx.TensorAwareStateDict)


def test_a_module_of_that_name_without_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, NVRX, types.ModuleType(NVRX))

    assert register_with_resiliency_ext() is False
    assert type(made()) is MCoreTensorAwareStateDict


def test_the_interface() -> None:
    """What a class of others must have; ``values`` is there for it."""
    assert TensorAwareStateDict.__abstractmethods__ == {
        "pop_tensors", "tensors", "is_hollow", "insert_tensors", "init_tensors",
        "copy_tensors_to_cpu", "restore_tensor_device",
    }  # fmt: skip
    tasd = made({"a": 1})
    assert list(tasd.values())[:3] == [{"a": 1}, {}, False]
    assert isinstance(tasd, TensorAwareStateDict)
    assert tasd.__class__ is MCoreTensorAwareStateDict
    assert copy.copy(tasd).common == {"a": 1}
