"""Memory of every kind is filled in place; fresh memory is made where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from dist_ckpt import LoadOptions, ShardedTensor, load, save
from dist_ckpt._formats import reading
from dist_ckpt._formats.opening import open_contents
from dist_ckpt._loading.fill import fill_tensors, read_whole
from dist_ckpt.errors import CheckpointNotFoundError, InvalidShardingError, MismatchError

WHOLE = torch.arange(24, dtype=torch.float32).view(4, 6)


def shard(key: str, data: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> ShardedTensor:
    return ShardedTensor(key, data, dtype, (4, 6), (4, 6), (0, 0), (1, 1))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A checkpoint of one tensor, in two chunks."""
    halves = [
        ShardedTensor.from_rank_offsets("x", WHOLE[n : n + 2].clone(), (0, n // 2, 2))
        for n in (0, 2)
    ]
    save({"x": halves}, tmp_path / "c")
    return tmp_path / "c"


@pytest.fixture
def by_pieces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys that were not read straight into memory."""
    found: list[str] = []
    original = reading.read_from_files

    def noted(destinations: Any, *args: Any, **kwargs: Any) -> Any:
        found.extend(one.key for one in destinations)
        return original(destinations, *args, **kwargs)

    monkeypatch.setattr(reading, "read_from_files", noted)
    return found


@pytest.mark.parametrize("verify", ["read", "off"])
def test_plain_memory_is_read_straight_into(
    target: Path, by_pieces: list[str], verify: Any
) -> None:
    """Of tensors and parameters, and of slices that are one run."""
    large = torch.zeros(6, 6)
    request = {
        "tensor": shard("x", torch.zeros(4, 6)),
        "parameter": shard("x", torch.nn.Parameter(torch.zeros(4, 6))),
        "slice": shard("x", large[1:5]),
        "fresh": shard("x", None),
    }

    loaded = load(
        request, target, validate_access_integrity=False, options=LoadOptions(verify=verify)
    )

    for name, one in request.items():
        assert torch.equal(loaded[name], WHOLE)
        assert one.data is None or loaded[name] is one.data
    assert request["fresh"].data is None
    assert large[0].sum() == large[5].sum() == 0
    assert by_pieces == []


def test_other_memory_is_filled_by_pieces(target: Path, by_pieces: list[str]) -> None:
    """Strides, pending negation and conversion: the values are the same, in the same tensor."""
    wide, negative = torch.zeros(4, 12), torch.zeros(4, 6, dtype=torch.complex64)
    request = {
        "columns": shard("x", wide[:, ::2]),
        "transposed": shard("x", torch.zeros(6, 4).T),
        "negative": shard("x", negative.conj().imag),
        "cast": shard("x", torch.zeros(4, 6, dtype=torch.float64), torch.float64),
    }

    for name, one in request.items():
        loaded = load({"x": one}, target, options=LoadOptions(cast="allow"))["x"]
        assert loaded is one.data
        assert torch.equal(loaded.to(torch.float32), WHOLE), name
    assert wide[:, 1::2].sum() == 0
    assert torch.equal(negative.imag, -WHOLE)
    assert by_pieces == ["x"] * 4


@pytest.mark.parametrize("strategy", [("torch_dist", 1), ("zarr", 1)])
def test_negated_memory_gets_values_of_another_dtype(
    tmp_path: Path, strategy: tuple[str, int]
) -> None:
    """Torch casts past the sign of such a view, some dtypes, and not others."""
    save({"x": shard("x", WHOLE.clone())}, tmp_path / "c", strategy)
    negated = torch._neg_view(torch.zeros(4, 6, dtype=torch.float16))

    load(
        {"x": shard("x", negated, torch.float16)}, tmp_path / "c", options=LoadOptions(cast="allow")
    )

    assert torch.equal(negated.resolve_neg(), WHOLE.half())


def test_memory_that_overlaps_itself_is_not_used(target: Path) -> None:
    """Fresh memory is; the caller's stays as it was."""
    expanded = torch.zeros(1, 6).expand(4, 6)

    loaded = load({"x": shard("x", expanded)}, target)["x"]

    assert torch.equal(loaded, WHOLE)
    assert expanded.sum() == 0


@pytest.mark.parametrize("kind", ["freed", "view of freed", "wrapper", "fake", "meta"])
@pytest.mark.parametrize("does_save", [True, False])
def test_data_without_memory_is_refused(target: Path, kind: str, *, does_save: bool) -> None:
    """Its address is no address: to read or write there would end the process."""
    whole = torch.zeros(34)
    data = {
        "freed": whole[:24].view(4, 6),
        "view of freed": whole[10:].view(4, 6),
        "wrapper": TwoTensor(torch.zeros(4, 6), torch.zeros(4, 6)),
        "fake": FakeTensorMode().from_tensor(torch.zeros(4, 6)),
        "meta": torch.empty(4, 6, device="meta"),
    }[kind]
    whole.untyped_storage().resize_(0)

    with pytest.raises(InvalidShardingError, match="'x': .*(no memory|no values)"):
        save({"x": shard("x", data)}, target) if does_save else load(
            {"x": shard("x", data)}, target
        )

    assert torch.equal(load({"x": shard("x", None)}, target)["x"], WHOLE)


def test_flat_ranges_and_boxes_of_one_request(target: Path, by_pieces: list[str]) -> None:
    """Several boxes of one tensor's data, beside tensors of one box."""
    flat = ShardedTensor(
        "x", torch.zeros(14), torch.float32, (4, 6), (4, 6), (0, 0), None,
        flattened_range=slice(5, 19),
    )  # fmt: skip
    nothing = ShardedTensor(
        "x", torch.zeros(0), torch.float32, (4, 6), (4, 6), (0, 0), None,
        flattened_range=slice(7, 7),
    )  # fmt: skip
    whole = shard("x", torch.zeros(4, 6))

    found = fill_tensors([nothing, flat, whole], open_contents(target), LoadOptions())

    assert torch.equal(found[1], WHOLE.flatten()[5:19])
    assert torch.equal(found[2], WHOLE)
    assert by_pieces == []


def test_an_empty_range_of_a_value_without_axes(tmp_path: Path) -> None:
    """One rank has the value, the others nothing of it; neither claims the other's part."""
    memory = torch.full((3,), 7.0)

    def ranges(value: torch.Tensor) -> list[ShardedTensor]:
        parts = (memory[1:1], slice(0, 0)), (value, slice(0, 1)), (memory[2:2], slice(1, 1))
        return [
            ShardedTensor("s", data, torch.float32, (), (), (), (), flattened_range=part)
            for data, part in parts
        ]

    save({"s": ranges(torch.tensor([3.0]))}, tmp_path / "c")
    loaded = load({"s": ranges(torch.zeros(1))}, tmp_path / "c")["s"]

    assert [one.tolist() for one in loaded] == [[], [3.0], []]
    assert memory.tolist() == [7.0] * 3


def test_whole_tensors(target: Path) -> None:
    """In the order of the keys, each read once; keys that are not stored are told."""
    contents = open_contents(target)

    one, same = read_whole(contents, ["x", "x"], LoadOptions())

    assert torch.equal(one, WHOLE)
    assert torch.equal(same, WHOLE)
    assert one.data_ptr() != same.data_ptr()
    assert read_whole(contents, [], LoadOptions()) == []
    with pytest.raises(CheckpointNotFoundError, match="y; z not stored"):
        read_whole(contents, ["y", "x", "z"], LoadOptions())


def test_a_part_is_no_whole_tensor(tmp_path: Path) -> None:
    """What is missing is counted."""
    half = ShardedTensor.from_rank_offsets("x", WHOLE[:2].clone(), (0, 0, 2))
    save({"x": half}, tmp_path / "c", validate_access_integrity=False)

    with pytest.raises(MismatchError, match="12 of the 24 elements"):
        read_whole(open_contents(tmp_path / "c"), ["x"], LoadOptions())
