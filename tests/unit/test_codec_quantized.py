"""Quantised tensors in values: integers, scales and zero points, without pickle."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from dist_ckpt._codec import decode, encode
from dist_ckpt.errors import CorruptedCheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions")

KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "quint8": lambda: torch.quantize_per_tensor(torch.rand(2, 3), 0.25, 3, torch.quint8),
    "qint8": lambda: torch.quantize_per_tensor(torch.rand(()), 0.5, 0, torch.qint8),
    "qint32": lambda: torch.quantize_per_tensor(torch.rand(0, 2), 1e-9, 7, torch.qint32),
    "channels": lambda: torch.quantize_per_channel(
        torch.rand(2, 3), torch.rand(3, dtype=torch.double), torch.arange(3), 1, torch.qint8
    ),
    "float_channels": lambda: torch.quantize_per_channel(
        torch.rand(2, 3), torch.rand(2), torch.rand(2), 0, torch.quint8
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(kind: str) -> None:
    """Bits, scheme and dtype come back; nothing is pickled."""
    value = KINDS[kind]()

    encoded = encode({"v": value})
    document = json.loads(json.dumps(encoded.document))
    back = decode(document, encoded.tensors, allow_pickle=False, where="x")["v"]

    assert not encoded.has_pickles
    assert (back.dtype, back.qscheme(), back.shape) == (value.dtype, value.qscheme(), value.shape)
    assert torch.equal(back.int_repr(), value.int_repr())
    assert torch.equal(back.dequantize(), value.dequantize())


@pytest.mark.parametrize(
    "payload",
    [
        [{"$tensor": 0}, 1, 0, None],
        [{"$tensor": 0}, 1.0, 0.5, None],
        [{"$tensor": 1}, 1.0, 0, None],
        [{"$tensor": 0}, {"$tensor": 1}, {"$tensor": 1}, 5],
        [{"$tensor": 0}, {"$tensor": 1}, 3, 0],
        [{"$tensor": 0}, 1.0, 0],
        "text",
    ],
    ids=["scale", "zero_point", "dtype", "axis", "mixed", "short", "text"],
)
def test_malformed(payload: object) -> None:
    """What no save writes is damage, not another tensor."""
    tensors = (torch.zeros(2, dtype=torch.int8), torch.ones(2))

    with pytest.raises(CorruptedCheckpointError):
        decode({"$quantized": payload}, tensors, allow_pickle=False, where="x")
