"""Tensors of wrapper classes as values of a document; real classes of torchao."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from dist_ckpt._codec import decode, encode
from dist_ckpt.errors import CorruptedCheckpointError, InvalidShardingError, UnsafeContentError

torchao = pytest.importorskip("torchao")

from torchao.optim.subclass_4bit import OptimState4bit  # noqa: E402 - after the skip
from torchao.optim.subclass_8bit import OptimState8bit  # noqa: E402
from torchao.optim.subclass_fp8 import OptimStateFp8  # noqa: E402


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


def test_a_nested_wrapper_is_a_value_of_a_document() -> None:
    """A wrapper inside a wrapper comes back with the tensors of both."""
    two = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor
    nested = two(two(torch.ones(2), torch.zeros(2)), two(torch.ones(2) * 3, torch.ones(2) * 4))
    with torch.serialization.safe_globals([two]):
        again = through_json(nested)
    assert torch.equal(again.a.a, torch.ones(2))
    assert torch.equal(again.b.b, torch.ones(2) * 4)


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
    """Sizes, names and contexts that the class does not accept are reported as damage."""
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
