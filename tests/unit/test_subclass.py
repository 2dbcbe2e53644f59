"""Tensors of wrapper classes: taken apart, compared, rebuilt; real classes of torchao."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from dist_ckpt._codec import decode, encode
from dist_ckpt.derive.subclass import check_form, flatten, is_wrapper, rebuild
from dist_ckpt.errors import (
    CorruptedCheckpointError,
    InvalidShardingError,
    MismatchError,
    UnsafeContentError,
)

torchao = pytest.importorskip("torchao")

from torchao.optim.subclass_4bit import OptimState4bit  # noqa: E402 - after the skip
from torchao.optim.subclass_8bit import OptimState8bit  # noqa: E402
from torchao.optim.subclass_fp8 import OptimStateFp8  # noqa: E402
from torchao.quantization import Int8WeightOnlyConfig, quantize_  # noqa: E402


def states() -> list[torch.Tensor]:
    made = [
        OptimState8bit.zeros((64, 64), signed=True),
        OptimState8bit.zeros((64, 64), signed=False, dtype=torch.bfloat16),
        OptimState4bit.zeros((64, 64), signed=True),
        OptimStateFp8.zeros((64, 64)),
    ]
    for one in made:
        one.copy_(torch.linspace(0.1, 1, 4096).view(64, 64))
    return made


def quantised_weight() -> torch.Tensor:
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    quantize_(model, Int8WeightOnlyConfig(version=2))
    weight: torch.Tensor = model[0].weight
    return weight


@pytest.mark.parametrize("number", range(4))
def test_a_flattened_tensor_aliases_and_is_rebuilt_bit_for_bit(number: int) -> None:
    """To fill what ``flatten`` gives fills the tensor; ``rebuild`` gives an equal one."""
    value = states()[number]
    parts = flatten(value)
    again = rebuild(value, {name: one.clone() for name, one in parts.tensors.items()})
    assert type(again) is type(value)
    assert again.dtype == value.dtype
    assert torch.equal(again.dequantize(), value.dequantize())  # type: ignore[operator]
    before = value.dequantize().clone()  # type: ignore[operator]
    parts.tensors["scale"].mul_(2)
    assert not torch.equal(value.dequantize(), before)  # type: ignore[operator]


def test_forms_survive_json_and_name_what_differs() -> None:
    """A form is compared after JSON; signedness, class and block size are told apart."""
    signed, unsigned, four, _ = states()
    check_form(signed, json.loads(json.dumps(flatten(signed).form)), name="w")
    with pytest.raises(MismatchError, match=r"'w'.*context: stored \[False, 'torch.bfloat16'\]"):
        check_form(signed, flatten(unsigned).form, name="w")
    with pytest.raises(MismatchError, match="OptimState4bit"):
        check_form(signed, flatten(four).form, name="w")
    with pytest.raises(MismatchError, match="stored a plain tensor, now a torchao"):
        check_form(signed, None, name="w")


def test_a_quantised_parameter_is_taken_apart() -> None:
    """What ``quantize_`` makes of a weight has plain tensors and a comparable context."""
    weight = quantised_weight()
    assert is_wrapper(weight)
    parts = flatten(weight)
    assert parts.tensors
    assert all(type(one) is torch.Tensor for one in parts.tensors.values())
    json.dumps(parts.form)
    again = rebuild(weight, parts.tensors)
    assert type(again) is type(weight)


def test_rebuilding_from_other_tensors_is_refused() -> None:
    """Names and shapes that differ are all named."""
    value = states()[0]
    parts = dict(flatten(value).tensors)
    parts["scale"] = torch.ones(3)
    del parts["codes"]
    with pytest.raises(MismatchError, match=r"codes: expected \(64, 64\).*scale: .*found \(3,\)"):
        rebuild(value, parts)


def test_a_nested_wrapper_keeps_its_path() -> None:
    """A wrapper inside of a wrapper is flattened, too."""
    two = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor
    nested = two(two(torch.ones(2), torch.zeros(2)), two(torch.ones(2) * 3, torch.ones(2) * 4))
    parts = flatten(nested)
    assert sorted(parts.tensors) == ["a/a", "a/b", "b/a", "b/b"]
    again = rebuild(nested, parts.tensors)
    assert torch.equal(again.b.b, torch.ones(2) * 4)


def test_a_class_that_does_not_tell_is_refused() -> None:
    """A subclass without ``__tensor_flatten__`` cannot be described."""

    class Silent(torch.Tensor):
        pass

    with pytest.raises(InvalidShardingError, match="Silent"):
        flatten(torch.ones(2).as_subclass(Silent))


# -- as values of a document -------------------------------------------------------------------------


def through_json(value: object) -> Any:
    encoded = encode(value)
    assert not encoded.has_pickles
    return decode(
        json.loads(json.dumps(encoded.document)), [one.clone() for one in encoded.tensors]
    )


@pytest.mark.parametrize("number", range(4))
def test_a_wrapper_is_a_value_of_a_document(number: int) -> None:
    """It comes back with class, appearance dtype and bits, wherever it stands."""
    value = states()[number]
    again = through_json({"deep": [(value, 1)]})["deep"][0][0]
    assert type(again) is type(value)
    assert again.dtype == value.dtype
    assert torch.equal(again.dequantize(), value.dequantize())  # type: ignore[operator]


def test_a_parameter_of_a_wrapper_class_stays_one() -> None:
    """A quantised weight is a parameter again, with its ``requires_grad``."""
    value = nn.Parameter(states()[0], requires_grad=False)
    again = through_json([value])[0]
    assert isinstance(again, nn.Parameter)
    assert type(again) is OptimState8bit
    assert not again.requires_grad


def test_only_admitted_classes_are_stored_and_rebuilt() -> None:
    """A class that torch.load would not rebuild either is refused, at both ends."""
    two = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor
    value = two(torch.ones(2), torch.zeros(2))
    with pytest.raises(InvalidShardingError, match=r"state: is a .*TwoTensor.*add_safe_globals"):
        encode({"state": value})
    with torch.serialization.safe_globals([two]):
        encoded = encode({"state": value})
        again = decode(encoded.document, encoded.tensors)["state"]
        assert torch.equal(again.b, torch.zeros(2))
    with pytest.raises(UnsafeContentError, match="TwoTensor"):
        decode(encoded.document, encoded.tensors)


def test_altered_documents_of_wrappers_are_corrupt() -> None:
    """Sizes, names and contexts that the class does not take are told as damage."""
    encoded = encode(states()[0])
    document = json.loads(json.dumps(encoded.document))
    name, sizes, inner, context = document["$subclass"]
    for altered in (
        [name, [[1, 2], [2, 1]], inner, context],
        [name, [[-1], [1]], inner, context],
        [name, sizes, inner[:1], context],
        [name, sizes, inner, [1, 2, 3, 4]],
        [name, sizes, [[one, 5] for one, _ in inner], context],
        [name, sizes, [inner[1], ["codes", inner[1][1]], inner[2]], context],
        [[], sizes, inner, context],
        7,
    ):
        with pytest.raises(CorruptedCheckpointError):
            decode({"$subclass": altered}, encoded.tensors)
