"""Loads into another dtype than the stored one: converted, and told once."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING

import pytest
import torch

from dist_ckpt import LoadOptions, MismatchError, ShardedTensor, load, save
from dist_ckpt.strategies.torch import TorchDistLoadShardedStrategy
from dist_ckpt.strategies.zarr import ZarrLoadShardedStrategy
from dist_ckpt.training_state import load_model_and_optimizer, save_model_and_optimizer
from dist_ckpt.validation import warn_of_casts

if TYPE_CHECKING:
    from pathlib import Path

BACKENDS = [("torch_dist", 1), ("zarr", 1), ("zarr", 2)]


def shard(key: str, data: torch.Tensor) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, data)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings of casts, and forget them."""
    found = [one.getMessage() for one in caplog.records if "values are converted" in one.message]
    caplog.clear()
    return found


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize(
    ("stored", "requested"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float64),
        (torch.float32, torch.int64),
        (torch.int64, torch.uint8),
        (torch.complex64, torch.float32),
        (torch.complex64, torch.bool),
        (torch.float32, torch.complex64),
    ],
    ids=str,
)
def test_values_are_those_of_load_state_dict(
    tmp_path: Path, backend: tuple[str, int], stored: torch.dtype, requested: torch.dtype
) -> None:
    """Whole, in any strides and without axes: the same elements as ``Tensor.copy_`` gives."""
    values = (torch.arange(6.0) + 0.75).to(stored)
    if stored.is_complex:
        values += 2j
    save(
        {"x": shard("x", values.view(2, 3)), "s": shard("s", values[3].clone())},
        tmp_path / "c",
        backend,
    )
    target, strided = torch.zeros(2, 3, dtype=requested), torch.zeros(3, 2, dtype=requested).t()

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing of torch's in the threads of a load
        loaded = load(
            {"x": shard("x", target), "s": shard("s", torch.zeros((), dtype=requested))},
            tmp_path / "c",
        )
        load({"x": shard("x", strided)}, tmp_path / "c", validate_access_integrity=False)

    expected = torch.zeros(6, dtype=requested)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of complex values
        expected.copy_(values)
    assert loaded["x"] is target
    assert torch.equal(target, expected.view(2, 3))
    assert torch.equal(strided, expected.view(2, 3))
    assert torch.equal(loaded["s"], expected[3])


def test_one_warning_names_keys_dtypes_and_losses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One for a load, however many tensors differ; none if none does."""
    state = {key: shard(key, torch.ones(3)) for key in ("a", "b", "n", "same")}
    save(state, tmp_path / "c")

    load({k: shard(k, torch.zeros(3)) for k in state}, tmp_path / "c")
    assert told(caplog) == []

    request = {k: shard(k, torch.zeros(3, dtype=torch.bfloat16)) for k in ("a", "b")}
    request |= {"n": shard("n", torch.zeros(3, dtype=torch.int32)), "same": state["same"]}
    load(request, tmp_path / "c")

    (message,) = told(caplog)
    assert "float32 -> bfloat16: 'a'; 'b'" in message
    assert "float32 -> int32 (fractions are dropped" in message
    assert "'same'" not in message
    assert str(tmp_path / "c") in message


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_error_refuses_before_anything_is_filled(
    tmp_path: Path, backend: tuple[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    """``cast="error"`` names all keys, with both dtypes."""
    save({"a": shard("a", torch.ones(3)), "b": shard("b", torch.ones(3))}, tmp_path / "c", backend)
    a, b = torch.zeros(3, dtype=torch.float64), torch.zeros(3)

    with pytest.raises(MismatchError, match="'a': float64 is expected, float32 is stored"):
        load(
            {"a": shard("a", a), "b": shard("b", b)},
            tmp_path / "c",
            options=LoadOptions(cast="error"),
        )

    assert not a.any()
    assert not b.any()
    assert told(caplog) == []


@pytest.mark.parametrize(
    ("backend", "strategy"),
    [
        (("torch_dist", 1), TorchDistLoadShardedStrategy),
        (("zarr", 2), ZarrLoadShardedStrategy),
    ],
    ids=["torch_dist", "zarr"],
)
def test_a_strategy_that_refuses_casts_is_heard(
    tmp_path: Path,
    backend: tuple[str, int],
    strategy: type[TorchDistLoadShardedStrategy | ZarrLoadShardedStrategy],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its own choice holds, given to ``load`` or called by itself."""
    save({"a": shard("a", torch.ones(3))}, tmp_path / "c", backend)
    request = {"a": shard("a", torch.zeros(3, dtype=torch.float64))}

    with pytest.raises(MismatchError, match="'a'"):
        load(request, tmp_path / "c", strategy(cast="error"))
    with pytest.raises(MismatchError, match="'a'"):
        strategy(cast="error").load(request, tmp_path / "c")

    assert strategy().load(request, tmp_path / "c")["a"].dtype is torch.float64
    assert len(told(caplog)) == 1


def test_what_torch_cannot_convert_is_refused_before_anything_is_filled(tmp_path: Path) -> None:
    """By key, with both dtypes: stock raises in the middle of it."""
    save({"a": shard("a", torch.ones(3)), "x": shard("x", torch.ones(2, 3))}, tmp_path / "c")
    a = torch.zeros(3)
    odd = torch.zeros(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).view(2, 3)

    with pytest.raises(MismatchError, match=r"'x': float32 is stored, float4_e2m1fn_x2 is"):
        load({"a": shard("a", a), "x": shard("x", odd)}, tmp_path / "c")

    assert not a.any()


def test_models_are_cast_and_optimizer_state_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A model of another precision gets converted values; Adam's moments keep their own."""

    def made(dtype: torch.dtype) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(3, 2).to(dtype)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 3, dtype=dtype)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = made(torch.float32)
    save_model_and_optimizer(tmp_path / "c", model, optimizer)
    other, its_optimizer = made(torch.bfloat16)
    load_model_and_optimizer(tmp_path / "c", other, its_optimizer)

    stock = torch.nn.Linear(3, 2).bfloat16()
    stock.load_state_dict(model.state_dict())
    assert torch.equal(other.weight, stock.weight)
    moments = its_optimizer.state[other.weight]["exp_avg"]
    assert moments.dtype is torch.float32
    assert torch.equal(moments, optimizer.state[model.weight]["exp_avg"])
    (message,) = told(caplog)
    assert "float32 -> bfloat16" in message
    assert "weight" in message


def test_warnings_can_be_silenced_by_their_logger(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are of ``dist_ckpt.validation``, as those of strict handling."""
    save({"a": shard("a", torch.ones(3))}, tmp_path / "c")
    with caplog.at_level(logging.ERROR, logger="dist_ckpt.validation"):
        load({"a": shard("a", torch.zeros(3, dtype=torch.float64))}, tmp_path / "c")
    assert told(caplog) == []


@pytest.mark.parametrize(
    ("stored", "requested", "wraps"),
    [
        ("int16", "int8", True),
        ("int8", "uint8", True),
        ("uint8", "int8", True),
        ("uint8", "int16", False),
        ("int8", "int64", False),
    ],
)
def test_integers_that_may_not_fit_are_told(
    caplog: pytest.LogCaptureFixture, stored: str, requested: str, wraps: bool
) -> None:
    """At either end of the range."""
    warn_of_casts([{"k": (stored, requested)}], "c")
    assert ("what is out of range wraps around" in caplog.text) == wraps
