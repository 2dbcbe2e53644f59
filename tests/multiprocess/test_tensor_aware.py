"""Tensor-aware state dicts of several ranks: who keeps what, and everybody gets it all back."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_ckpt import exchange_utils
from dist_ckpt import tensor_aware_state_dict as module
from dist_ckpt.exchange_utils import EXCHANGE_ALGOS, ShardDistribution
from dist_ckpt.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor
from dist_ckpt.tensor_aware_state_dict import MCoreTensorAwareStateDict
from dist_ckpt.tensor_aware_state_dict._ranks import ELSEWHERE
from dist_ckpt.validation import StrictHandling
from tests.multiprocess._world import run_ranks

pytestmark = pytest.mark.multiprocess

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e5m2, torch.bool, torch.complex64)


def values(number: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the same random bits on every rank; for bool, only those that a bool may have."""
    generator = torch.Generator().manual_seed(number)
    high = 2 if dtype == torch.bool else 256
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, high, (nbytes,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def bits_of(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def state(rank: int, size: int, *, filled: bool = True) -> dict[str, Any]:
    """Return replicated tensors of many kinds, rows that are cut, objects and common values."""

    def one(key: str, data: torch.Tensor, *cuts: tuple[int, int, int], replica: int) -> Any:
        leaf = ShardedTensor.from_rank_offsets(key, data, *cuts, replica_id=replica)
        return leaf if filled else leaf.without_data()

    replicated = [
        one(f"r{i}", values(i, shape, dtype), replica=rank)
        for i, (dtype, shape) in enumerate(
            (dtype, shape) for dtype in DTYPES for shape in ((4, 3), (), (0, 2))
        )
    ]
    uneven = slice(0, 0) if rank == 0 else slice(rank - 1, rank)
    rows = values(99, (max(size - 1, 1), 2), torch.float32)[uneven if size > 1 else slice(0, 1)]
    flat = values(98, (8 * size,), torch.float32)[8 * rank : 8 * rank + 8]
    return {
        "replicated": replicated,
        "mixed": [one("cut", values(50 + rank, (3,), torch.float32), (0, rank, size), replica=0), rank],
        "rows": ShardedTensor(
            "rows", rows if filled else None, torch.float32, tuple(rows.shape),
            (max(size - 1, 1), 2), (max(rank - 1, 0), 0), None,
        ),
        "flat": ShardedTensor(
            "flat", flat if filled else None, torch.float32, (2 * size, 4), (2 * size, 4), (0, 0),
            None, flattened_range=slice(8 * rank, 8 * rank + 8),
        ),
        "same": ShardedObject("same", {"of": "all"} if filled else None, (1,), (0,), rank),
        "nothing": ShardedObject("nothing", None, (1,), (0,), rank),
        "own": ShardedObject("own", [rank] if filled else None, (size,), (rank,)),
        "local": LocalNonpersistentObject(rank),
        "step": 3 if filled else None,
    }  # fmt: skip


def plain(tree: Any) -> Any:
    """Return a state dict with bits in place of tensors, to compare."""
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [plain(value) for value in tree]
    if isinstance(tree, ShardedTensor):
        tree = tree.data
    if isinstance(tree, ShardedObject):
        return tree.data
    if isinstance(tree, torch.Tensor):
        return bits_of(tree), tuple(tree.shape), tree.dtype
    return tree.obj if isinstance(tree, LocalNonpersistentObject) else tree


def copied(value: Any) -> Any:
    """Return what another process or a file would make of ``value``."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def outcome(call: Any) -> tuple[str, str]:
    """Return the class and text of what ``call`` raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def round_trip(rank: int, size: int, into: str, out: str, exchange_algo: str) -> tuple[Any, ...]:
    original = state(rank, size)
    before = repr(original)
    tasd, _ = MCoreTensorAwareStateDict.from_state_dict(original, into)
    assert repr(original) == before
    assert original["same"].data == {"of": "all"}
    tensors = tasd.pop_tensors()
    hollow = pickle.loads(pickle.dumps(tasd))
    hollow.insert_tensors(copied(tensors))
    request = state(rank, size, filled=False)
    before = repr(request)

    loaded = hollow.to_state_dict(request, out, exchange_algo)

    assert repr(request) == before
    kept = [leaf.key for leaf in tasd.sharded_state_dict["replicated"] if leaf.data is None]
    assert len(kept) == 15  # all of them are taken out
    nbytes = sum(t.nbytes for t, leaf in zip(tensors, tasd._sharded_tensors, strict=True)
                 if leaf.key.startswith("r") and leaf.key != "rows")  # fmt: skip
    objects = [
        tasd.sharded_state_dict[name].data is not ELSEWHERE for name in ("same", "nothing", "own")
    ]
    return plain(loaded) == plain(original), nbytes, objects


TOTAL = sum((12 + 1) * dtype.itemsize for dtype in DTYPES)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("exchange_algo", EXCHANGE_ALGOS)
def test_round_trip(exchange_algo: str, size: int) -> None:
    """Bit for bit; each shard and object is kept once, and every rank keeps about as much."""
    results = run_ranks(round_trip, size, "fully_parallel", "fully_parallel", exchange_algo)

    assert all(same for same, _, _ in results)
    sizes = [nbytes for _, nbytes, _ in results]
    assert sum(sizes) == TOTAL
    assert max(sizes) - min(sizes) <= 12 * 8 if size > 1 else True
    for position in (0, 1):
        assert sum(objects[position] for *_, objects in results) == 1
    assert all(objects[2] for *_, objects in results)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("out", ["atomic", "fully_parallel"])
def test_atomic(size: int, out: str) -> None:
    """Every rank keeps all of its own, and can be read in both ways."""
    results = run_ranks(round_trip, size, "atomic", out, "gather_rounds")

    assert results == [(True, TOTAL, [True, True, True])] * size


def read_alone(rank: int, size: int) -> tuple[str, str]:
    tasd, _ = MCoreTensorAwareStateDict.from_state_dict(state(rank, size))
    return outcome(lambda: tasd.to_state_dict(state(rank, size, filled=False)))


def test_the_defaults_differ() -> None:
    """What was kept fully parallel is not to be had one by one; the error says how it is."""
    for name, message in run_ranks(read_alone, 2):
        assert name == "MismatchError"
        assert "no such shard is kept" in message
        assert "same algo and group" in message


def round_trip_in_halves(rank: int, size: int) -> tuple[bool, int]:
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = halves[rank % 2]
    tasd, cached = MCoreTensorAwareStateDict.from_state_dict(
        state(rank, size), parallelization_group=group
    )
    again, same = MCoreTensorAwareStateDict.from_state_dict(
        state(rank, size), parallelization_group=group, cached_metadata=cached
    )
    assert same is cached
    loaded = again.to_state_dict(
        state(rank, size, filled=False), "fully_parallel", parallelization_group=group
    )
    return plain(loaded) == plain(state(rank, size)), sum(t.nbytes for t in tasd.tensors)


def test_groups() -> None:
    """Each group of two keeps all replicas once among its ranks."""
    results = run_ranks(round_trip_in_halves, 4)

    assert all(same for same, _ in results)
    own = 3 * 4 + 8 * 4
    halves = [sum(results[i][1] - own for i in ranks) for ranks in ((0, 2), (1, 3))]
    rows = [8, 16]  # rank 0 has none
    assert halves == [TOTAL + n for n in rows]


def round_trip_twisted(rank: int, size: int) -> bool:
    """A rank asks for a shard that only another rank of the group ever had."""

    def tree(number: int, *, filled: bool) -> dict[str, Any]:
        leaf = ShardedTensor.from_rank_offsets("x", torch.full((2,), number), (0, number, size))
        one = ShardedObject("o", number if filled else None, (size,), (number,))
        return {"x": leaf if filled else leaf.without_data(), "o": one}

    tasd, _ = MCoreTensorAwareStateDict.from_state_dict(tree(rank, filled=True))
    wanted = (rank + 1) % size
    loaded = tasd.to_state_dict(tree(wanted, filled=False), "fully_parallel")
    return loaded["x"].tolist() == [wanted] * 2 and loaded["o"] == wanted


def test_a_shard_of_another_rank() -> None:
    assert run_ranks(round_trip_twisted, 3) == [True] * 3


# -- keys that only one side has -------------------------------------------------------------------


def read_strictly(rank: int, size: int, algo: str, strict: str) -> Any:
    """Rank 1 asks for keys that nobody stored; key ``extra`` is asked for by nobody."""
    tree = state(rank, size)
    tree["extra"] = ShardedTensor.from_rank_offsets("extra", torch.ones(2), replica_id=rank)
    tasd, _ = MCoreTensorAwareStateDict.from_state_dict(tree, algo)
    request = state(rank, size, filled=False)
    if rank == 1:
        request["odd"] = ShardedTensor.from_rank_offsets("odd", torch.ones(1))
        request["odd object"] = ShardedObject("odd", None, (1,), (0,))
    try:
        loaded, missing, unexpected = tasd.to_state_dict(
            request, algo, strict=strict, return_mismatch_keys=True,
            validate_access_integrity=False,
        )  # fmt: skip
    except Exception as error:
        return type(error).__name__, str(error)
    return plain(loaded) == plain(state(rank, size)), missing, unexpected


@pytest.mark.parametrize("strict", [flag.value for flag in StrictHandling])
@pytest.mark.parametrize("algo", ["atomic", "fully_parallel"])
def test_unexpected_keys_of_one_rank(algo: str, strict: str) -> None:
    """They are left out or raised on every rank; no mode leaves the others waiting."""
    results = run_ranks(read_strictly, 3, algo, strict)

    if strict.startswith(("raise", "assume")):
        assert {name for name, _ in results} == {"MismatchError"}
        assert all("'odd'" in text and "odd/shard" not in text for _, text in results)
        assert all(("extra" in text) is (strict == "raise_all") for _, text in results)
        return
    missing = {"extra"} if strict in ("log_all", "return_all") else set()
    odd = {"odd"}
    assert results == [(True, missing, set()), (True, missing, odd), (True, missing, set())]


# -- caches ----------------------------------------------------------------------------------------


def keep_again(rank: int, size: int, change: str) -> tuple[int, bool, list[Any]]:
    """Return how many distributions were made for the second state dict, and what came back."""
    tree = state(rank, size)
    _, cached = MCoreTensorAwareStateDict.from_state_dict(tree)
    other = state(rank, size)
    extra: Any = cached
    if rank == 1:
        if change == "added":
            other["new"] = ShardedTensor.from_rank_offsets("new", torch.ones(50))
        if change == "object":
            other["new"] = ShardedObject("new", 5, (1,), (0,))
        if change == "removed":
            del other["replicated"][0]
        if change == "lost":
            extra = None
    if change == "retyped":
        other["replicated"][0] = ShardedTensor.from_rank_offsets(
            "r0", torch.ones(4, 3, dtype=torch.float64), replica_id=rank
        )
    if change == "swapped" and rank == 1:
        # It fits this rank's shards, but is not what the others have.
        mains = {shard: 1 - main if main < 2 else main for shard, main in cached[0].items()}
        extra = ShardDistribution(mains, *cached[1:])
    made: list[int] = []
    make = exchange_utils.determine_main_replica_uniform_distribution

    def counting(*args: Any, **rest: Any) -> Any:
        made.append(1)
        return make(*args, **rest)

    module.determine_main_replica_uniform_distribution = counting
    tasd, fresh = MCoreTensorAwareStateDict.from_state_dict(other, cached_metadata=extra)
    request = {
        name: [leaf.without_data() for leaf in value] if name == "replicated" else value
        for name, value in other.items()
    }
    if "new" in request:
        request["new"] = request["new"].without_data()
    loaded = tasd.to_state_dict(request, "fully_parallel")
    kept = [leaf for leaf in tasd._sharded_tensors if leaf.key == "r3"]
    return len(made), fresh is cached, [plain(loaded) == plain(other), len(kept)]


@pytest.mark.parametrize(
    "change", ["none", "added", "object", "removed", "retyped", "lost", "swapped"]
)
def test_a_cache_is_used_only_while_it_fits_everywhere(change: str) -> None:
    """What one rank changes is noticed by all; nothing is lost and nothing is kept twice."""
    results = run_ranks(keep_again, 3, change)

    assert {made for made, *_ in results} == {0 if change == "none" else 1}
    assert {same for _, same, _ in results} == {change == "none"}
    assert all(equal for *_, (equal, _) in results)
    assert sum(kept for *_, (_, kept) in results) == 1


def keep_with_a_gap(rank: int, size: int) -> tuple[str, str]:
    _, cached = MCoreTensorAwareStateDict.from_state_dict(state(rank, size))
    other = state(rank, size)
    if rank == 1:
        del other["mixed"]
    return outcome(lambda: MCoreTensorAwareStateDict.from_state_dict(other, cached_metadata=cached))


def test_a_cache_does_not_hide_a_gap() -> None:
    """One rank's shards have changed: then those of all are checked again."""
    for name, message in run_ranks(keep_with_a_gap, 3):
        assert name == "InvalidShardingError"
        assert "'cut'" in message


def keep_of_two_times(rank: int, size: int) -> tuple[str, str]:
    def tree(dtype: torch.dtype) -> dict[str, Any]:
        data = torch.ones(6, dtype=dtype)
        return {"x": ShardedTensor.from_rank_offsets("x", data, replica_id=rank)}

    dtype = torch.int32 if rank == 1 else torch.float32
    _, first = MCoreTensorAwareStateDict.from_state_dict(tree(torch.float32))
    _, second = MCoreTensorAwareStateDict.from_state_dict(tree(torch.int32))
    cached = second if rank == 1 else first
    return outcome(
        lambda: MCoreTensorAwareStateDict.from_state_dict(tree(dtype), cached_metadata=cached)
    )


def test_caches_of_different_times_are_not_taken_for_one() -> None:
    """Each fits its rank, and the same ranks keep the same shards, but of another dtype."""
    for name, message in run_ranks(keep_of_two_times, 2):
        assert name == "InvalidShardingError"
        assert "'x'" in message


# -- failures --------------------------------------------------------------------------------------


def go_wrong_keeping(rank: int, size: int, how: str) -> tuple[str, str]:
    """Rank 1 does something else than the others when it is kept."""
    tree = state(rank, size)
    algo = "fully_parallel"
    if rank == 1:
        algo = {"unknown": "telepathic", "mixed": "atomic"}.get(how, algo)
        cut = tree["mixed"]
        changed = {"gap": {"mixed": None}, "hidden": {"tuple": tuple(cut)}}.get(how, {})
        tree |= changed
    return outcome(lambda: MCoreTensorAwareStateDict.from_state_dict(tree, algo))


def go_wrong_reading(rank: int, size: int, how: str) -> tuple[str, str]:
    """Rank 1 does something else than the others when it is read."""
    tasd, _ = MCoreTensorAwareStateDict.from_state_dict(state(rank, size))
    arguments: dict[str, Any] = {"algo": "fully_parallel", "exchange_algo": "broadcast"}
    arguments["validate_access_integrity"] = how == "double"
    request = state(rank, size, filled=False)
    if rank == 1:
        wrong = {
            "unknown": {"exchange_algo": "telepathy"}, "mixed": {"strict": "return_all"},
            "flag": {"strict": "lax"},
        }  # fmt: skip
        arguments |= wrong.get(how, {})
        if how == "hollow":
            tasd.pop_tensors()
        if how == "cut anew":
            request["mixed"][0] = ShardedTensor.from_rank_offsets("cut", torch.zeros(1), (0, 4, 9))
        if how == "double":
            request["same"].replica_id = 0
    return outcome(lambda: tasd.to_state_dict(request, **arguments))


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("gap", "InvalidShardingError", "'cut'"),
        ("hidden", "InvalidShardingError", "rank 1: sharded leaves stand inside tuples"),
        ("unknown", "NotImplementedError", 'Only "atomic" and "fully_parallel"'),
        ("mixed", "CoordinationError", "different algorithms"),
    ],
)
def test_what_one_rank_keeps_wrongly(how: str, error: str, text: str) -> None:
    """The same class and the same story everywhere; nobody waits."""
    for name, message in run_ranks(go_wrong_keeping, 3, how):
        assert name == error
        assert text in message


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("hollow", "InvalidShardingError", "rank 1: the tensors"),
        ("unknown", "NotImplementedError", "exchange_algo must be one of"),
        ("mixed", "CoordinationError", "choose differently"),
        ("cut anew", "MismatchError", "'cut' at (4,): no such shard is kept"),
        ("flag", "RankFailedError", "Invalid strict flag: 'lax'"),
        ("double", "InvalidShardingError", "Duplicate ShardedObject keys"),
    ],
)
def test_what_one_rank_reads_wrongly(how: str, error: str, text: str) -> None:
    """The same class and the same story everywhere; nobody waits."""
    for name, message in run_ranks(go_wrong_reading, 3, how):
        assert name == error
        assert text in message
