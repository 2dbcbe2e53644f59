"""Who keeps which shard of a group, and how tensors are packed to travel."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt._comm import tensors as _exchange
from dist_ckpt._comm.tensors import _batches, _buffer_device, _Item, _Kind, _Link, _Offer, _plan
from dist_ckpt.errors import CoordinationError, InvalidShardingError, MismatchError
from dist_ckpt.exchange_utils import (
    EXCHANGE_ALGOS,
    ShardDistribution,
    ShardView,
    build_distribution,
    describe_shards,
    describes_rank,
    determine_main_replica_uniform_distribution,
    distribute_shards_to_ranks,
    exchange_by_distribution,
    shard_id,
)
from dist_ckpt.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor


def tensor(
    key: str, n: int, *, replica: int = 0, dtype: torch.dtype = torch.uint8
) -> ShardedTensor:
    data = torch.zeros(n, dtype=dtype)
    return ShardedTensor.from_rank_offsets(key, data, replica_id=replica)


def views_of(*ranks: list[ShardedTensor | ShardedObject]) -> list[list[ShardView]]:
    return [describe_shards(dict(enumerate(leaves))) for leaves in ranks]


# -- ids -------------------------------------------------------------------------------------------


def test_an_id_is_key_offset_and_range() -> None:
    """Replicas share it; other places, ranges and kinds do not; all of them are hashable."""
    whole = ShardedTensor.from_rank_offsets("x", torch.zeros(4), (0, 1, 2), replica_id=3)
    flat = ShardedTensor.from_rank_offsets_flat(
        "x", torch.zeros(2), (4,), (0, 1, 2), flattened_range=slice(1, 3)
    )
    one = ShardedObject("x", None, (2,), (1,))

    assert shard_id(whole) == ("x", (4,), None) == shard_id(whole.without_data())
    assert shard_id(flat) == ("x", (4,), (1, 3))
    assert shard_id(one) == ("x", (1,), ("object", 2))
    assert len({shard_id(whole), shard_id(flat), shard_id(one)}) == 3


def test_an_empty_shard_is_not_the_one_that_begins_where_it_does() -> None:
    """Uneven cuts: rank 0 holds no rows at offset 0, rank 1 all of them."""
    empty = ShardedTensor("x", torch.zeros(0, 2), torch.float32, (0, 2), (4, 2), (0, 0), None)
    full = ShardedTensor("x", torch.zeros(4, 2), torch.float32, (4, 2), (4, 2), (0, 0), None)

    distribution = build_distribution(views_of([empty], [full]), ignore_groups=False)

    assert distribution.main_rank_for_shard == {shard_id(empty): 0, shard_id(full): 1}


# -- the assignment --------------------------------------------------------------------------------


def test_the_order_of_the_assignment() -> None:
    """Few holders before many, large before small, foreign ones last; then the least loaded."""
    shards = [(name, (0,), None) for name in ("only1", "big", "mid", "small", "foreign")]
    only1, big, mid, small, foreign = shards
    ranks = {only1: [1], big: [0, 1], mid: [0, 1], small: [0, 1], foreign: [0]}
    sizes = {only1: 5, big: 10, mid: 6, small: 4, foreign: 100}

    assert distribute_shards_to_ranks(ranks, sizes, 2, {foreign}) == {
        only1: 1, big: 0, mid: 1, small: 0, foreign: 0,
    }  # fmt: skip


@given(
    sizes=st.lists(st.integers(0, 1000), min_size=1, max_size=60),
    num_ranks=st.integers(1, 9),
    chance=st.randoms(use_true_random=False),
)
def test_what_all_hold_is_shared_out_evenly(
    sizes: list[int], num_ranks: int, chance: random.Random
) -> None:
    """No two ranks differ by more than the largest shard, in whatever order shards are listed."""
    shard_to_size = {(f"k{i}", (0,), None): n for i, n in enumerate(sizes)}
    shards = list(shard_to_size)
    chance.shuffle(shards)

    mains = distribute_shards_to_ranks(
        {shard: range(num_ranks) for shard in shards}, shard_to_size, num_ranks
    )
    load = [sum(shard_to_size[s] for s in shards if mains[s] == r) for r in range(num_ranks)]

    assert set(mains) == set(shards)
    assert max(load) - min(load) <= max(sizes)
    assert mains == distribute_shards_to_ranks(
        {shard: range(num_ranks) for shard in shard_to_size}, shard_to_size, num_ranks
    )


@given(
    holders=st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=40),
    sizes=st.data(),
)
def test_each_shard_goes_to_one_rank_that_holds_it(
    holders: list[set[int]], sizes: st.DataObject
) -> None:
    """Exactly one, and never one that has no copy; nobody gets more than all."""
    ranks = {(f"k{i}", (i,), None): sorted(held) for i, held in enumerate(holders)}
    shard_to_size = {shard: sizes.draw(st.integers(0, 50)) for shard in ranks}

    mains = distribute_shards_to_ranks(ranks, shard_to_size, 5)

    assert mains.keys() == ranks.keys()
    assert all(mains[shard] in ranks[shard] for shard in ranks)


# -- a distribution from descriptions --------------------------------------------------------------


def test_the_four_fields() -> None:
    """A tuple of four, as code of others unpacks it."""
    views = views_of([tensor("a", 4), tensor("b", 8)], [tensor("a", 4, replica=1)])

    mains, ours, metadata, ranks = build_distribution(views, ignore_groups=False)

    a, b = shard_id(tensor("a", 4)), shard_id(tensor("b", 8))
    assert ShardDistribution._fields == (
        "main_rank_for_shard", "shards_in_this_group", "shard_to_metadata", "all_ranks_for_shard",
    )  # fmt: skip
    assert mains == {a: 1, b: 0}
    assert ours == {a, b}
    assert {shard: (one.key, one.data) for shard, one in metadata.items()} == {
        a: ("a", None), b: ("b", None),
    }  # fmt: skip
    assert ranks == {a: [0, 1], b: [0]}


def test_a_shard_of_another_group_is_loaded_but_not_saved() -> None:
    """Without a main replica here, another group saves it; on load it counts, but last."""
    views = views_of(*([[tensor("theirs", 9, replica=5), tensor("ours", 2)]] * 2))
    theirs = shard_id(tensor("theirs", 9))

    saving = build_distribution(views, ignore_groups=False)
    loading = build_distribution(views, ignore_groups=True)

    assert theirs not in saving.main_rank_for_shard
    assert theirs not in saving.shards_in_this_group
    assert theirs in saving.all_ranks_for_shard
    assert loading.main_rank_for_shard == {shard_id(tensor("ours", 2)): 0, theirs: 1}


def test_a_rank_without_data_does_not_save() -> None:
    """Two replicas, one of which only describes the shard."""
    views = views_of([tensor("x", 4).without_data()], [tensor("x", 4, replica=1)])

    assert list(build_distribution(views, ignore_groups=False).main_rank_for_shard.values()) == [1]
    assert list(build_distribution(views, ignore_groups=True).main_rank_for_shard.values()) == [0]


def test_replicas_that_may_differ_stay_with_the_lowest_rank() -> None:
    """``writer="first"``: another rank's copy has other values."""
    leaves = [tensor(f"k{i}", 4) for i in range(4)]
    for leaf in leaves:
        leaf.writer = "first"

    mains = build_distribution(views_of(leaves, leaves), ignore_groups=False).main_rank_for_shard

    assert set(mains.values()) == {0}


def test_replicas_must_be_alike() -> None:
    """All that differ are named, with ranks and what each has."""
    here = [tensor("a", 4), tensor("b", 4), tensor("c", 4)]
    there = [tensor("a", 4, dtype=torch.int8), tensor("b", 4), tensor("c", 5)]

    with pytest.raises(InvalidShardingError, match="'a' at .* rank 0 .* rank 1") as info:
        build_distribution(views_of(here, there), ignore_groups=True)
    assert "'c'" in str(info.value)
    assert "'b'" not in str(info.value)


@pytest.mark.parametrize("other", [tensor("a", 5, replica=1), tensor("a", 4, dtype=torch.int8)])
def test_replicas_on_one_rank_must_be_alike(other: ShardedTensor) -> None:
    """One would be given the other's place as the main one, and less or more would be saved."""
    with pytest.raises(InvalidShardingError, match=r"'a' at \(0,\) is .* on one rank"):
        describe_shards({"x": tensor("a", 4), "y": [other]})


def test_other_leaves_do_not_count() -> None:
    """Only tensors and objects are described, each shard once."""
    x = tensor("x", 3)
    tree = {
        "a": [x, x, 5],
        "b": {"c": LocalNonpersistentObject(1), "d": ShardedObject("o", 1, (1,), (0,))},
    }

    views = describe_shards(tree)

    assert [(view.shard.key, view.shard.data, view.has_data) for view in views] == [
        ("x", None, True), ("o", None, True),
    ]  # fmt: skip


def test_one_process_needs_no_distribution() -> None:
    assert determine_main_replica_uniform_distribution({"x": tensor("x", 3)}, None) is None


@pytest.mark.parametrize(
    ("leaves", "fits"),
    [
        ([tensor("a", 4), tensor("b", 2)], True),
        ([tensor("b", 2), tensor("a", 4)], True),
        ([tensor("a", 4)], False),
        ([tensor("a", 4), tensor("b", 2), tensor("c", 1)], False),
        ([tensor("a", 4), tensor("b", 3)], False),
        ([tensor("a", 4), tensor("b", 2, dtype=torch.int8)], False),
    ],
    ids=["same", "other order", "removed", "added", "reshaped", "retyped"],
)
def test_a_distribution_fits_only_the_shards_it_was_made_for(
    leaves: list[ShardedTensor], fits: bool
) -> None:
    views = views_of([tensor("a", 4), tensor("b", 2)], [tensor("a", 4, replica=1)])
    distribution = build_distribution(views, ignore_groups=True)
    state = dict(enumerate(leaves))

    assert describes_rank(distribution, state, rank=0, size=2) is fits
    assert not describes_rank(distribution, state, rank=0, size=1)


# -- what moves ------------------------------------------------------------------------------------


def kind(n: int, dtype: str = "uint8") -> _Kind:
    return _Kind(dtype, (n,))


def offer(have: dict[str, _Kind], need: dict[str, _Kind | None], algo: str = "broadcast") -> _Offer:
    def ids(kinds: dict[str, _Kind]) -> dict:
        return {(key, (0,), None): one for key, one in kinds.items()}

    return _Offer(algo, ids(have), ids(need), {"cpu"}, "cpu:gloo")


def test_only_what_is_wanted_and_not_there_moves() -> None:
    """What nobody wants stays; a shard goes to those that want it, from its main rank."""
    have = {"a": kind(4), "b": kind(4), "unwanted": kind(9)}
    offers = [offer(have, {}), offer({"b": kind(4)}, {"a": kind(4)}), offer({}, {"b": kind(4)})]

    plan = _plan(offers, {("b", (0,), None): 1}, on_host=False)

    assert [(item.shard[0], item.source, item.receivers) for item in plan.items] == [
        ("a", 0, (1,)), ("b", 1, (2,)),
    ]  # fmt: skip


def test_another_holder_stands_in_for_the_main_rank() -> None:
    offers = [offer({}, {"a": kind(4)}), offer({"a": kind(4)}, {}), offer({"a": kind(4)}, {})]

    plan = _plan(offers, {("a", (0,), None): 0}, on_host=False)

    assert [(item.source, item.receivers) for item in plan.items] == [(1, (0,))]


def test_elements_that_do_not_exist_are_not_moved() -> None:
    """An empty shard needs no source."""
    assert _plan([offer({}, {"a": kind(0)})], {}, on_host=False).items == []


def test_what_is_lacking_is_told_at_once() -> None:
    """Every shard that nobody has, and every one of another dtype or shape."""
    have = {"b": kind(4), "c": kind(4), "d": kind(4)}
    need = {"a": kind(4), "b": kind(4, "int8"), "c": kind(5), "d": kind(4)}

    with pytest.raises(MismatchError, match="Missing shards after fully parallel loading") as info:
        _plan([offer(have, {}), offer({}, need)], {}, on_host=False)
    assert [name in str(info.value) for name in ("'a'", "'b'", "'c'", "'d'")] == [True] * 3 + [
        False
    ]


def test_algorithms_are_agreed() -> None:
    with pytest.raises(CoordinationError, match="broadcast.*gather_rounds"):
        _plan([offer({}, {}), offer({}, {}, "gather_rounds")], {}, on_host=False)


@pytest.mark.parametrize("algo", ["", "all_to_all", None])
def test_an_unknown_algorithm(algo: str) -> None:
    with pytest.raises(NotImplementedError, match="broadcast, gather_rounds, gather_object"):
        exchange_by_distribution({}, {}, None, None, algo)


@pytest.mark.parametrize("algo", EXCHANGE_ALGOS)
def test_one_process_exchanges_nothing(algo: str) -> None:
    """It has what it loaded; what it lacks is an error."""
    loaded = {("x", (0,), None): torch.ones(2)}
    missing = ShardedTensor.from_rank_offsets("y", torch.zeros(2))

    assert exchange_by_distribution(loaded, {}, None, None, algo) == loaded
    with pytest.raises(MismatchError, match="'y'"):
        exchange_by_distribution(loaded, {shard_id(missing): missing}, None, None, algo)


@pytest.mark.parametrize(
    ("backends", "devices", "on_host", "expected"),
    [
        ("cpu:gloo", ["cpu"], False, "cpu"),
        ("cpu:gloo,cuda:gloo", ["cuda"], False, "cpu"),
        ("cpu:gloo,cuda:nccl", ["cuda"], False, "cuda"),
        ("cpu:gloo,cuda:nccl", ["cuda"], True, "cpu"),
        ("cpu:gloo,cuda:nccl", ["cpu", "cuda"], False, "cpu"),
        ("cuda:nccl", ["cpu"], False, "cuda"),
        ("cuda:nccl", ["cpu"], True, "cuda"),
    ],
)
def test_buffers_lie_where_the_group_moves_them(
    backends: str, devices: list[str], on_host: bool, expected: str
) -> None:
    """On the device if all tensors are there and it has a backend of its own, else on the host."""
    offers = [_Offer("broadcast", {}, {}, {device}, backends) for device in devices]

    assert _buffer_device(offers, on_host=on_host) == expected


# -- packing ---------------------------------------------------------------------------------------

DTYPES = [
    torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bool, torch.bfloat16, torch.int64,
    torch.complex64, torch.complex128,
]  # fmt: skip


@given(data=st.data(), budget=st.integers(1, 200))
def test_any_tensors_travel_in_small_buffers(data: st.DataObject, budget: int) -> None:
    """No buffer is larger than the budget (or one element), and every bit arrives."""
    shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
    kinds = data.draw(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=5))
    sources, targets, items = {}, {}, []
    for number, (shape, dtype) in enumerate(kinds):
        shard = (str(number), (0,), None)
        nbytes = math.prod(shape) * dtype.itemsize
        values = torch.randint(0, 2, (nbytes,), dtype=torch.uint8).view(dtype)
        sources[shard] = values.view(shape).mT if len(shape) > 1 else values.view(shape)
        turned = tuple(sources[shard].shape)
        targets[shard] = torch.empty(turned, dtype=dtype)
        if nbytes:
            items.append(_Item(shard, _Kind(str(dtype).removeprefix("torch."), turned), 0, (0,)))
    link = _Link(None, 0, 1, torch.device("cpu"), sources, targets)

    batches = _batches(items, budget)
    for batch in batches:
        buffer = torch.empty(batch.nbytes, dtype=torch.uint8)
        link.pack(batch, buffer)
        link.unpack(batch, buffer)

    assert all(batch.nbytes <= max(budget, 16) for batch in batches)
    for item in items:
        got, sent = targets[item.shard].contiguous(), sources[item.shard].contiguous()
        assert torch.equal(got.view(-1).view(torch.uint8), sent.view(-1).view(torch.uint8))


def test_conjugated_and_negated_views() -> None:
    """A pending operation is carried out on the way, and a target that has one gets its values."""
    values = torch.tensor([1 + 2j, 3 - 4j])
    shards = [(name, (0,), None) for name in ("conj", "neg", "into")]
    sources = dict(zip(shards, [values.conj(), values.conj().imag, values], strict=True))
    into = torch.zeros(2, dtype=values.dtype).conj()
    targets = {
        shards[0]: torch.empty(2, dtype=values.dtype), shards[1]: torch.empty(2), shards[2]: into,
    }  # fmt: skip
    items = [
        _Item(shard, _Kind(str(sources[shard].dtype).removeprefix("torch."), (2,)), 0, (0,))
        for shard in shards
    ]
    link = _Link(None, 0, 1, torch.device("cpu"), sources, targets)

    (batch,) = _batches(items, 1000)
    buffer = torch.empty(batch.nbytes, dtype=torch.uint8)
    link.pack(batch, buffer)
    link.unpack(batch, buffer)

    assert targets[shards[0]].tolist() == [1 - 2j, 3 + 4j]
    assert targets[shards[1]].tolist() == [-2.0, 4.0]
    assert into.tolist() == [1 + 2j, 3 - 4j]


def test_the_bound() -> None:
    """What may be in flight on one rank is a constant, and at most 256 MiB."""
    assert _exchange.MAX_IN_FLIGHT_NBYTES <= 256 << 20


def test_batches_keep_the_order() -> None:
    """Pieces of an item follow each other, so that both sides cut alike."""
    items = [_Item((str(i), (0,), None), kind(100), 0, (1,)) for i in range(3)]

    pieces = [piece for batch in _batches(items, 48) for piece in batch.pieces]

    for number, group in itertools.groupby(pieces, key=lambda piece: piece.item.shard[0]):
        boxes = [piece.box for piece in group]
        assert sum(box.numel for box in boxes) == 100, number
        assert boxes == sorted(boxes)
