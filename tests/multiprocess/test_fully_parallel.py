"""Exchanges in groups, and the wrappers that share out replicas, among real processes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_ckpt._comm import tensors as _exchange
from dist_ckpt.errors import (
    CheckpointingException,
    ConfigError,
    CoordinationError,
    InvalidShardingError,
    MismatchError,
    UnknownStrategyError,
)
from dist_ckpt.exchange_utils import (
    EXCHANGE_ALGOS,
    determine_main_replica_uniform_distribution,
    exchange_by_distribution,
    shard_id,
)
from dist_ckpt.mapping import ShardedObject, ShardedTensor, is_main_replica
from dist_ckpt.strategies import fully_parallel
from dist_ckpt.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
    SaveShardedStrategy,
)
from dist_ckpt.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from dist_ckpt.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy
from tests.multiprocess._world import run_ranks

pytestmark = pytest.mark.multiprocess

DTYPES = (
    torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.uint8,
    torch.int64, torch.complex64, torch.complex128,
)  # fmt: skip


def bits_of(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def values(number: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the same random bits on every rank; for bool, only those that a bool may have."""
    generator = torch.Generator().manual_seed(number)
    high = 2 if dtype == torch.bool else 256
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, high, (nbytes,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def everything() -> list[ShardedTensor]:
    """Return tensors of all kinds of dtypes and shapes, replicated on all ranks."""
    shapes = [(5, 3), (), (0, 4), (17,)]
    cases = [(dtype, shape) for dtype in DTYPES for shape in shapes]
    return [
        ShardedTensor.from_rank_offsets(f"t{i}", values(i, shape, dtype))
        for i, (dtype, shape) in enumerate(cases)
    ]


def outcome(call: Any) -> tuple[str, str]:
    """Return the class and text of what ``call`` raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


# -- exchange_by_distribution ----------------------------------------------------------------------


class Wire:
    """Notes what goes through torch.distributed, in bytes a step."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int]] = []
        for name in ("broadcast", "send", "recv", "all_gather"):
            setattr(dist, name, self._noting(name, getattr(dist, name)))
        gather_object = dist.all_gather_object

        def noting(found: list[Any], mine: Any, **rest: Any) -> None:
            self.steps.append(("all_gather_object", len(mine)))
            gather_object(found, mine, **rest)

        dist.all_gather_object = noting  # type: ignore[assignment]

    def _noting(self, name: str, call: Any) -> Any:
        def noting(first: Any, *more: Any, **rest: Any) -> Any:
            buffers = [*(first if isinstance(first, list) else [first]), *more]
            self.steps.append((name, sum(buffer.numel() for buffer in buffers)))
            return call(first, *more, **rest)

        return noting

    @property
    def kinds(self) -> set[str]:
        return {name for name, _ in self.steps}


def exchange_all(rank: int, size: int, algo: str, limit: int) -> tuple[list[bool], set[str], int]:
    """Each rank has what it is the main rank of, and wants all the rest."""
    _exchange.MAX_IN_FLIGHT_NBYTES = limit
    state = {leaf.key: leaf for leaf in everything()}
    distribution = determine_main_replica_uniform_distribution(state, None)
    mains = distribution.main_rank_for_shard if distribution else {}
    mine = {shard_id(x): x.data for x in state.values() if mains.get(shard_id(x), 0) == rank}
    theirs = {shard_id(x): x.without_data() for x in state.values() if shard_id(x) not in mine}
    wire = Wire()

    found = exchange_by_distribution(mine, theirs, distribution, None, algo)

    same = [
        bits_of(found[shard_id(leaf)]) == bits_of(leaf.data)
        and found[shard_id(leaf)].shape == leaf.data.shape
        and found[shard_id(leaf)].dtype == leaf.dtype
        for leaf in state.values()
    ]
    assert all(leaf.data is None for leaf in theirs.values())
    return same, wire.kinds, max((n for _, n in wire.steps), default=0)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("algo", EXCHANGE_ALGOS)
@pytest.mark.parametrize("limit", [256, 256 << 20])
def test_every_rank_gets_everything(algo: str, size: int, limit: int) -> None:
    """Bit for bit, any dtype, 0-dim and empty; no step is larger than what may be in flight."""
    for same, kinds, most in run_ranks(exchange_all, size, algo, limit):
        assert all(same)
        assert most <= limit
        expected = {"broadcast": "broadcast", "gather_rounds": "all_gather"}
        assert kinds == ({expected.get(algo, "all_gather_object")} if size > 1 else set())


def exchange_some(rank: int, size: int, algo: str) -> tuple[Any, ...]:
    """Rank 0 has a, which rank 2 wants; rank 1 has b, which nobody wants; d goes in place."""
    leaves = {
        key: ShardedTensor.from_rank_offsets(key, torch.full((6,), ord(key))) for key in "abd"
    }
    a, b, d = (shard_id(leaf) for leaf in leaves.values())
    distribution = determine_main_replica_uniform_distribution(leaves, None)
    have = {0: {a: leaves["a"].data, d: leaves["d"].data}, 1: {b: leaves["b"].data}}.get(rank, {})
    strided = torch.zeros(12, dtype=torch.int64)[::2]
    want = {}
    if rank == 2:
        want = {a: leaves["a"].without_data()}
        want[d] = ShardedTensor.from_rank_offsets("d", strided)
    wire = Wire()
    found = exchange_by_distribution(have, want, distribution, None, algo)
    in_place = rank != 2 or (found[d] is strided and strided.tolist() == [ord("d")] * 6)
    return sorted(shard[0] for shard in found), wire.kinds, in_place


@pytest.mark.parametrize("algo", EXCHANGE_ALGOS)
def test_only_what_is_needed_moves(algo: str) -> None:
    """One receiver of three: nothing is broadcast, and rank 1 has no part in it."""
    results = run_ranks(exchange_some, 3, algo)

    assert [found for found, _, _ in results] == [["a", "d"], ["b"], ["a", "d"]]
    assert all(in_place for *_, in_place in results)
    if algo == "broadcast":
        assert [kinds for _, kinds, _ in results] == [{"send"}, set(), {"recv"}]


def exchange_in_halves(rank: int, size: int, algo: str) -> list[int]:
    """Two groups at once, each of two ranks that are not neighbours."""
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = halves[rank % 2]
    x = ShardedTensor.from_rank_offsets("x", torch.full((3,), rank % 2), replica_id=rank // 2)
    distribution = determine_main_replica_uniform_distribution({"x": x}, group)
    assert distribution is not None
    main = distribution.main_rank_for_shard[shard_id(x)] == dist.get_rank(group)
    have = {shard_id(x): x.data} if main else {}
    want = {} if main else {shard_id(x): x.without_data()}
    return exchange_by_distribution(have, want, distribution, group, algo)[shard_id(x)].tolist()


@pytest.mark.parametrize("algo", EXCHANGE_ALGOS)
def test_groups_do_not_mix(algo: str) -> None:
    assert run_ranks(exchange_in_halves, 4, algo) == [[0] * 3, [1] * 3, [0] * 3, [1] * 3]


def exchange_badly(rank: int, size: int, how: str) -> tuple[str, str]:
    x = ShardedTensor.from_rank_offsets("x", torch.zeros(3))
    distribution = determine_main_replica_uniform_distribution({"x": x}, None)
    algo = "broadcast"
    have: Any = {shard_id(x): x.data} if rank == 0 else {}
    want: Any = {} if rank == 0 else {shard_id(x): x.without_data()}
    if how == "nobody":
        have = {}
    if how == "shape" and rank == 1:
        want = {shard_id(x): ShardedTensor.from_rank_offsets("x", torch.zeros(4))}
    if how == "unknown" and rank == 1:
        algo = "telepathy"
    if how == "mixed" and rank == 1:
        algo = "gather_rounds"
    if how == "no tensor" and rank == 1:
        have = {("y", (0,), None): "not a tensor"}
    return outcome(lambda: exchange_by_distribution(have, want, distribution, None, algo))


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("nobody", "MismatchError", "Missing shards after fully parallel loading: 'x'"),
        ("shape", "MismatchError", "rank 1 wants float32 of shape (4,)"),
        ("unknown", "NotImplementedError", "telepathy"),
        ("mixed", "CoordinationError", "different exchange_algo"),
        ("no tensor", "RankFailedError", "rank 1"),
    ],
)
def test_what_one_rank_does_wrong_is_raised_on_all(how: str, error: str, text: str) -> None:
    """Before anything moves, so that nobody waits."""
    for name, message in run_ranks(exchange_badly, 3, how):
        assert name == error
        assert text in message


def exchange_and_die(rank: int, size: int, algo: str) -> tuple[str, str]:
    """Rank 1 dies in the middle, while it has something to give."""
    state = {leaf.key: leaf for leaf in everything()}
    distribution = determine_main_replica_uniform_distribution(state, None)
    assert distribution is not None
    mains = distribution.main_rank_for_shard
    mine = {shard_id(x): x.data for x in state.values() if mains[shard_id(x)] == rank}
    theirs = {shard_id(x): x.without_data() for x in state.values() if shard_id(x) not in mine}
    if rank == 1:
        _exchange._Link.pack = lambda *_: os._exit(9)
    return outcome(lambda: exchange_by_distribution(mine, theirs, distribution, None, algo))


@pytest.mark.parametrize("algo", EXCHANGE_ALGOS)
def test_a_rank_that_dies_on_the_way(algo: str) -> None:
    """The others are told that it broke off; they do not wait for the time-out."""
    first, died, last = run_ranks(exchange_and_die, 3, algo, expect_errors=True, timeout_secs=60)

    assert died.exit_code == 9
    for survivor in (first, last):
        assert survivor.value[0] == CoordinationError.__name__
        assert "broke off" in survivor.value[1]


def ask_as_stranger(rank: int, size: int) -> tuple[str, str]:
    group = dist.new_group([0, 1])
    state = {"x": ShardedTensor.from_rank_offsets("x", torch.zeros(3))}
    return outcome(lambda: determine_main_replica_uniform_distribution(state, group))


def test_a_rank_outside_of_the_group_is_told() -> None:
    first, second, stranger = run_ranks(ask_as_stranger, 3)

    assert first == second == ("", "")
    assert stranger[0] == CoordinationError.__name__
    assert "rank 2 is not in the process group" in stranger[1]


# -- a strategy of a third party -------------------------------------------------------------------


class OneFileEach(SaveShardedStrategy):
    """Writes each main replica to a file of its own; notes what it was given."""

    def __init__(self) -> None:
        super().__init__("one_file_each", 1)
        self.written: list[str] = []
        self.given: list[ShardedTensor] = []

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        self.given = list(sharded_state_dict.values())
        for leaf in self.given:
            if is_main_replica(leaf.replica_id):
                self.written.append(leaf.key)
                torch.save(leaf.data, Path(checkpoint_dir) / leaf.key)
        dist.barrier()


class OneFileEachLoad(LoadShardedStrategy):
    """Reads them; notes what it read, makes new tensors, and fails for keys it is told to."""

    def __init__(self, *, broken: str = "", silent: str = "") -> None:
        self.read: list[str] = []
        self.replicas: list[Any] = []
        self._broken, self._silent = broken, silent

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        loaded = {}
        self.replicas += [leaf.replica_id for leaf in sharded_state_dict.values()]
        for name, leaf in sharded_state_dict.items():
            if isinstance(leaf, ShardedObject):
                loaded[name] = leaf.unique_key
                continue
            if leaf.key == self._broken:
                raise OSError(f"cannot read {leaf.key}")
            if leaf.key != self._silent:
                self.read.append(leaf.key)
                loaded[name] = torch.load(Path(checkpoint_dir) / leaf.key)
        return loaded

    def load_tensors_metadata(self, checkpoint_dir: Any) -> dict[str, ShardedTensor]:
        return {checkpoint_dir: ShardedTensor.from_rank_offsets("x", torch.zeros(1)).without_data()}

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        raise UnknownStrategyError(loaded_backend)

    def check_version_compatibility(self, loaded_version: int) -> None:
        raise UnknownStrategyError(str(loaded_version))

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True


def replicated(rank: int, num: int = 12, *, filled: bool = True) -> dict[str, Any]:
    """Return a state that all ranks hold, with rank 0 as the main replica of all of it."""

    def one(i: int) -> ShardedTensor:
        data = values(i, (8, 1 + i % 3), torch.float32)
        data = data if filled else torch.zeros_like(data)
        return ShardedTensor.from_rank_offsets(f"k{i}", data, replica_id=(0, rank))

    return {"layers": [one(i) for i in range(num)]}


def load_in_parallel(rank: int, size: int, path: str) -> tuple[list[Any], int, Any]:
    """Load halves of what is stored, as float64; return what the base strategy was shown."""
    loading = OneFileEachLoad()
    state = flat(replicated(rank, filled=False))
    for leaf in state.values():
        leaf.data, leaf.dtype = leaf.data.double(), torch.float64
    state["o"] = ShardedObject("o", None, (1,), (0,), (0, rank))
    loaded = FullyParallelLoadStrategyWrapper(loading).load(state, path)
    same = all(
        loaded[name].equal(leaf.data.double()) for name, leaf in flat(replicated(rank)).items()
    )
    return loading.replicas, len(loading.read), same


def test_a_base_strategy_reads_main_replicas(tmp_path: Path) -> None:
    """``replica_id`` is 0 for what a rank reads; what it gives is cast for all who asked."""
    for name, leaf in flat(replicated(0)).items():
        torch.save(leaf.data, tmp_path / leaf.key)
        assert name in leaf.key

    results = run_ranks(load_in_parallel, 2, str(tmp_path))

    assert all(set(replicas) == {0} for replicas, _, _ in results)
    assert sum(read for _, read, _ in results) == 12
    assert all(same for _, _, same in results)


def flat(state: dict[str, Any]) -> dict[str, Any]:
    return {str(i): leaf for i, leaf in enumerate(state["layers"])}


def save_and_load(rank: int, size: int, path: str, algo: str) -> tuple[Any, ...]:
    saving, loading = OneFileEach(), OneFileEachLoad()
    state = flat(replicated(rank))
    before = repr(state)
    FullyParallelSaveStrategyWrapper(saving).save(state, path)
    assert repr(state) == before
    wrapper = FullyParallelLoadStrategyWrapper(loading, exchange_algo=algo)
    empty = replicated(rank, filled=False)
    empty["layers"][3].data = None
    targets = [leaf.data for leaf in empty["layers"]]
    object_leaf = ShardedObject("o", None, (1,), (0,), rank)

    loaded = wrapper.load({**empty, "more": {"o": object_leaf}}, path)

    same = [
        bits_of(tensor) == bits_of(leaf.data)
        for tensor, leaf in zip(loaded["layers"], replicated(rank)["layers"], strict=True)
    ]
    in_place = [tensor is target for tensor, target in zip(loaded["layers"], targets, strict=True)]
    assert empty["layers"][3].data is None
    assert loaded["more"] == {"o": object_leaf.unique_key}
    return saving.written, loading.read, same, in_place


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("algo", EXCHANGE_ALGOS)
def test_each_shard_is_written_and_read_once(tmp_path: Path, algo: str, size: int) -> None:
    """Shares are even; every rank gets all, in its own tensors; the caller's shards stay."""
    keys = sorted(f"k{i}" for i in range(12))

    results = run_ranks(save_and_load, size, str(tmp_path), algo)

    for position in (0, 1):
        shares = [result[position] for result in results]
        assert sorted(key for share in shares for key in share) == keys
        nbytes = [sum(1 + int(key[1:]) % 3 for key in share) for share in shares]
        assert max(nbytes) - min(nbytes) <= 3
    for _, _, same, in_place in results:
        assert all(same)
        assert in_place == [i != 3 for i in range(12)]


def load_from_broken(rank: int, size: int, path: str, how: str) -> tuple[Any, ...]:
    FullyParallelSaveStrategyWrapper(OneFileEach()).save(flat(replicated(rank)), path)
    broken = {"raises": {"broken": "k5"}, "silent": {"silent": "k5"}}[how]
    wrapper = FullyParallelLoadStrategyWrapper(OneFileEachLoad(**broken))
    return outcome(lambda: wrapper.load(replicated(rank, filled=False), path))


@pytest.mark.parametrize("how", ["raises", "silent"])
def test_a_strategy_that_fails_on_one_rank(tmp_path: Path, how: str) -> None:
    """Only one rank reads k5; all of them hear of it."""
    for name, message in run_ranks(load_from_broken, 3, str(tmp_path), how):
        if how == "raises":
            assert name == "RankFailedError"
            assert "cannot read k5" in message
        else:
            assert name == "MismatchError"
            assert "Missing shards after fully parallel loading" in message
            assert "k5" in message


class Interrupted(OneFileEachLoad):
    """Ends by Ctrl-C on rank 1."""

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        if dist.get_rank() == 1:
            raise KeyboardInterrupt
        return super().load(sharded_state_dict, checkpoint_dir)


def load_interrupted(rank: int, size: int, path: str) -> None:
    FullyParallelSaveStrategyWrapper(OneFileEach()).save(flat(replicated(rank)), path)
    FullyParallelLoadStrategyWrapper(Interrupted()).load(replicated(rank, filled=False), path)


def test_an_interrupt_of_one_rank_ends_the_load_on_all(tmp_path: Path) -> None:
    """The others are told instead of waiting for it."""
    told = run_ranks(load_interrupted, 3, str(tmp_path), expect_errors=True, timeout_secs=60)

    kinds = [one.error_type for one in told]
    assert kinds == ["RankFailedError", "KeyboardInterrupt", "RankFailedError"]
    assert "rank 1: KeyboardInterrupt" in told[0].message


def save_with_disagreement(rank: int, size: int, path: str) -> tuple[Any, ...]:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    saving = OneFileEach()
    leaf = ShardedTensor.from_rank_offsets(
        "k", torch.zeros(4 if rank == 3 else 5), replica_id=rank % 2
    )
    wrapper = FullyParallelSaveStrategyWrapper(saving, halves[rank // 2])
    return (*outcome(lambda: wrapper.save({"k": leaf}, path)), saving.given)


def test_what_fails_in_one_group_is_raised_in_all(tmp_path: Path) -> None:
    """The other group would wait in the wrapped strategy for ever."""
    for name, message, given in run_ranks(save_with_disagreement, 4, str(tmp_path)):
        assert name == InvalidShardingError.__name__
        assert "'k' at (0,)" in message
        assert given == []


def save_in_groups(rank: int, size: int, path: str) -> list[Any]:
    """Two groups hold the same; rank 0 has the main replicas, so its group saves."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    saving = OneFileEach()
    state = {
        str(i): ShardedTensor.from_rank_offsets(f"k{i}", torch.full((4,), i), replica_id=rank)
        for i in range(4)
    }
    state["first"] = ShardedTensor.from_rank_offsets(
        "first", torch.full((4,), rank), replica_id=rank, writer="first"
    )
    FullyParallelSaveStrategyWrapper(saving, halves[rank // 2]).save(state, path)
    return saving.written


def test_a_group_saves_what_its_main_replicas_are_of(tmp_path: Path) -> None:
    """Ranks of the other group write nothing; replicas that may differ stay where they were."""
    one, two, *others = run_ranks(save_in_groups, 4, str(tmp_path))

    assert others == [[], []]
    assert sorted([*one, *two]) == ["first", "k0", "k1", "k2", "k3"]
    assert "first" in one
    assert torch.load(tmp_path / "first").tolist() == [0] * 4
    assert len(two) == 2


class Slow(OneFileEach, AsyncSaveShardedStrategy):
    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        return "request", sharded_state_dict, checkpoint_dir


def save_later(rank: int, size: int) -> tuple[Any, ...]:
    state = flat(replicated(rank, 2))
    request = FullyParallelSaveStrategyWrapper(Slow()).async_save(state, "there")
    mains = [is_main_replica(leaf.replica_id) for leaf in request[1].values()]
    wrapper = FullyParallelSaveStrategyWrapper(OneFileEach())
    return request[0], mains, request[2], outcome(lambda: wrapper.async_save(state, "there"))


def test_async_save_is_passed_on() -> None:
    """The request is the wrapped strategy's; one that has none is refused."""
    results = run_ranks(save_later, 2)

    assert [result[:3] for result in results] == [
        ("request", [False, True], "there"), ("request", [True, False], "there"),
    ]  # fmt: skip
    assert all(error == ConfigError.__name__ for *_, (error, _) in results)
    assert all("non-async base strategy" in text for *_, (_, text) in results)


def test_a_wrapper_is_what_it_wraps() -> None:
    """Backend, version, objects, metadata and checks are the wrapped strategy's."""
    saving = FullyParallelSaveStrategyWrapper(OneFileEach())
    loading = FullyParallelLoadStrategyWrapper(OneFileEachLoad())

    assert (saving.backend, saving.version) == ("one_file_each", 1)
    assert not saving.can_handle_sharded_objects
    assert loading.can_handle_sharded_objects
    assert list(loading.load_tensors_metadata("x")) == ["x"]
    with pytest.raises(UnknownStrategyError, match="zarr"):
        loading.check_backend_compatibility("zarr")
    with pytest.raises(UnknownStrategyError, match="9"):
        loading.check_version_compatibility(9)
    with pytest.raises(NotImplementedError, match="prefix"):
        loading.remove_sharded_tensors("x", "prefix")


# -- cached distributions --------------------------------------------------------------------------


def save_again_and_again(rank: int, size: int, path: str) -> list[tuple[int, list[str]]]:
    """Return for each save how often a distribution was made so far, and what was written."""
    made = 0
    make = determine_main_replica_uniform_distribution

    def counting(*args: Any) -> Any:
        nonlocal made
        made += 1
        return make(*args)

    fully_parallel.determine_main_replica_uniform_distribution = counting
    saving = OneFileEach()
    wrapper = FullyParallelSaveStrategyWrapper(saving, do_cache_distribution=True)
    history = []
    for change in ("none", "none", "values", "new", "gone", "dtype", "replica", "replica"):
        state = flat(replicated(rank, 4))
        one = state["1"]
        if change == "values":
            one.data += 1
        if change == "new" and rank == 1:
            state["new"] = ShardedTensor.from_rank_offsets("new", torch.zeros(100))
        if change == "gone" and rank == 0:
            del state["0"]  # rank 1 still has it, but is not the main replica
            state["0"] = ShardedTensor.from_rank_offsets("k0b", torch.zeros(8, 1))
        if change == "dtype":
            state["1"] = ShardedTensor.from_rank_offsets("k1", one.data.double(), replica_id=rank)
        if change == "replica" and rank < 2:
            one.replica_id = 1 - rank
        saving.written.clear()
        wrapper.save(state, path)
        history.append((made, sorted(saving.written)))
    return history


def test_a_change_on_one_rank_is_noticed_by_all(tmp_path: Path) -> None:
    """A shard that one rank adds is written at once; only equal shards use the kept distribution."""
    zero, one = run_ranks(save_again_and_again, 2, str(tmp_path))

    assert [made for made, _ in zero] == [1, 1, 1, 2, 3, 4, 5, 5]
    assert [made for made, _ in one] == [made for made, _ in zero]
    together = [sorted([*a, *b]) for (_, a), (_, b) in zip(zero, one, strict=True)]
    keys = ["k0", "k1", "k2", "k3"]
    assert together[:4] == [keys, keys, keys, [*keys, "new"]]
    assert "k0b" in together[4]
    assert together[5:] == [keys, keys, keys]


def save_in_turn(rank: int, size: int, path: str) -> list[int]:
    """Return how often a distribution was made, after each of several saves."""
    made: list[int] = []
    make = determine_main_replica_uniform_distribution

    def counting(*args: Any) -> Any:
        made.append(1)
        return make(*args)

    fully_parallel.determine_main_replica_uniform_distribution = counting
    wrapper = FullyParallelSaveStrategyWrapper(OneFileEach(), do_cache_distribution=True)
    history = []
    for num in (2, 3, 2, 3, *range(4, 12), 2, 11):
        wrapper.save(flat(replicated(rank, num)), path)
        history.append(len(made))
    assert wrapper.cached_distribution is not None
    assert len(wrapper.cached_distribution.main_rank_for_shard) == 11
    return history


def test_states_that_are_saved_in_turn(tmp_path: Path) -> None:
    """Each has its own kept distribution; only a few are kept."""
    histories = run_ranks(save_in_turn, 2, str(tmp_path))

    assert histories == [[1, 2, 2, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 11]] * 2


# -- two stages ------------------------------------------------------------------------------------


def save_natively(rank: int, size: int, path: str) -> None:
    from dist_ckpt import save

    state = replicated(rank)
    for leaf in state["layers"]:
        leaf.replica_id = rank
    save({**state, "o": ShardedObject("o", {"a": 1}, (1,), (0,), rank), "step": 3}, path)


def load_in_two_stages(rank: int, size: int, path: str, cpu_transfer: bool) -> tuple[Any, ...]:
    """Return what arrived, how much of each file this rank read, and how many groups there are."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])] if size == 4 else [None]
    groups = len(dist.distributed_c10d._world.pg_map)
    strategy = TwoStageDataParallelLoadShardedStrategy(
        halves[rank * len(halves) // size], cpu_transfer
    )
    empty = replicated(rank, filled=False)
    empty["layers"][0].data = None
    read = []
    from dist_ckpt.strategies.torch import TorchDistLoadShardedStrategy

    native = TorchDistLoadShardedStrategy.load

    def noting(self: Any, state: Any, directory: Any) -> Any:
        read.extend(leaf.key for leaf in state.values())
        return native(self, state, directory)

    TorchDistLoadShardedStrategy.load = noting
    loaded = strategy.load({**empty, "o": ShardedObject("o", None, (1,), (0,), rank)}, path)
    assert len(dist.distributed_c10d._world.pg_map) == groups
    same = [
        bits_of(tensor) == bits_of(leaf.data)
        for tensor, leaf in zip(loaded["layers"], replicated(rank)["layers"], strict=True)
    ]
    return (
        all(same),
        loaded["o"],
        sorted(key for key in read if key != "o"),
        [loaded["layers"][5] is empty["layers"][5].data],
    )


@pytest.mark.parametrize("cpu_transfer", [True, False])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_two_stages(tmp_path: Path, size: int, cpu_transfer: bool) -> None:
    """Read once in each group and handed on; data may be None; no group is made for it."""
    path = str(tmp_path / "ckpt")
    run_ranks(save_natively, size, path)
    keys = sorted(f"k{i}" for i in range(12))

    results = run_ranks(load_in_two_stages, size, path, cpu_transfer)

    assert [(same, found, place) for same, found, _, place in results] == [
        (True, {"a": 1}, [True])
    ] * size
    for group in (results[:2], results[2:]) if size == 4 else (results,):
        assert sorted(key for _, _, read, _ in group for key in read) == keys


def test_two_stages_reject_what_nobody_handles() -> None:
    """Backends and versions alike; what is handled passes."""
    strategy = TwoStageDataParallelLoadShardedStrategy(None)

    for backend, version in (("torch_dist", 1), ("zarr", 2)):
        strategy.check_backend_compatibility(backend)
        strategy.check_version_compatibility(version)
        with pytest.raises(UnknownStrategyError, match=f"{backend}, 999"):
            strategy.check_version_compatibility(999)
    with pytest.raises(UnknownStrategyError, match="papyrus"):
        strategy.check_backend_compatibility("papyrus")


def load_unknown(rank: int, size: int, path: str) -> tuple[str, str]:
    strategy = TwoStageDataParallelLoadShardedStrategy(None)
    return outcome(lambda: strategy.load(replicated(rank), path))


def test_two_stages_of_an_unknown_backend(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text(json.dumps({"sharded_backend": "papyrus"}))

    for name, message in run_ranks(load_unknown, 2, str(tmp_path)):
        assert name == UnknownStrategyError.__name__
        assert "papyrus" in message


# -- with save and load ----------------------------------------------------------------------------


def wrapped_round_trip(rank: int, size: int, path: str, algo: str) -> tuple[Any, ...]:
    from dist_ckpt import load, save
    from dist_ckpt.strategies.torch import (
        TorchDistLoadShardedStrategy,
        TorchDistSaveShardedStrategy,
    )

    def state(*, filled: bool) -> dict[str, Any]:
        tree = replicated(rank, filled=filled)
        for leaf in tree["layers"]:
            leaf.replica_id = rank
        row = torch.full((1, 3), rank + 1) if filled else torch.zeros(1, 3, dtype=torch.int64)
        tree["rows"] = ShardedTensor.from_rank_offsets("rows", row, (0, rank, size))
        tree["o"] = ShardedObject("o", {"n": 1} if filled else None, (1,), (0,), rank)
        tree["step"] = 7 if filled else None
        return tree

    saver: Any = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy("torch_dist", 1))
    save(state(filled=True), path, saver)
    loader: Any = FullyParallelLoadStrategyWrapper(
        TorchDistLoadShardedStrategy(), exchange_algo=algo
    )
    loaded = load(state(filled=False), path, loader)
    plain = load(state(filled=False), path)
    pairs = zip(loaded["layers"], plain["layers"], strict=True)

    def forms() -> dict[str, ShardedTensor]:
        box = ((size, 3), (size, 3), (0, 0), None, rank)
        wide = ((size + 1, 3), (size + 1, 3), (0, 0), None, rank, 0, True)
        return {
            "coarse": ShardedTensor("rows", None, torch.bool, *box),
            "exact": ShardedTensor("rows", torch.zeros(size, 3), torch.float32, *box),
            "padded": ShardedTensor("rows", None, torch.int64, *wide),
            "again": ShardedTensor("rows", None, torch.bool, *box),
        }

    found = load(forms(), path, loader, validate_access_integrity=False)
    assert found["coarse"].data_ptr() != found["again"].data_ptr()
    for name in forms():
        leaf = found[name]
        alone = load({name: forms()[name]}, path, validate_access_integrity=False)
        assert (leaf.dtype, leaf.tolist()) == (alone[name].dtype, alone[name].tolist()), name
    return (
        all(bits_of(a) == bits_of(b) for a, b in pairs),
        loaded["rows"].tolist(),
        loaded["o"],
        loaded["step"],
    )


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_wrappers_in_save_and_load(tmp_path: Path, size: int) -> None:
    """What they save loads with and without them, also one shard in several forms at once."""
    for rank, result in enumerate(
        run_ranks(wrapped_round_trip, size, str(tmp_path / "c"), "gather_rounds")
    ):
        assert result == (True, [[rank + 1] * 3], {"n": 1}, 7)


def test_errors_are_of_the_tree() -> None:
    """Whoever catches the base class catches what a missing shard raises."""
    assert issubclass(MismatchError, CheckpointingException)
