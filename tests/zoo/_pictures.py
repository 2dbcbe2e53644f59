"""Comparing whole states: a picture of a value is plain data that two processes can compare.

Here: what counts as equal. Not here: whose states are compared. A picture keeps types, dtypes,
shapes, the order of keys and the bits of every tensor; tensors made of tensors (quantised ones,
sharded ones) are taken apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

_PLAIN = (str, bytes, bool, int, float, complex, type(None), torch.dtype, torch.device, torch.Size)


def picture(value: Any) -> Any:
    """Return plain data that is equal for equal values."""
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, Mapping):
        return [type(value).__name__, [(picture(k), picture(v)) for k, v in value.items()]]
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        return [type(value).__name__, [picture(item) for item in items]]
    if isinstance(value, _PLAIN):
        return (type(value).__name__, repr(value))
    return (type(value).__name__, picture(getattr(value, "__dict__", None)))


def _tensor(value: torch.Tensor) -> Any:
    kind = "Tensor" if type(value) is nn.Parameter else type(value).__name__
    head = (kind, str(value.dtype), tuple(value.shape))
    if isinstance(value, DTensor):
        return (*head, str(value.placements), _tensor(value.to_local()))
    value = value.detach()
    if value.is_quantized:
        return (*head, str(value.qscheme()), _quantisation(value), _bits(value.int_repr()))
    if hasattr(value, "__tensor_flatten__"):
        names, context = value.__tensor_flatten__()
        return (*head, [(name, _tensor(getattr(value, name))) for name in names], repr(context))
    return (*head, _bits(value))


def _quantisation(value: torch.Tensor) -> Any:
    if value.qscheme() in {torch.per_tensor_affine, torch.per_tensor_symmetric}:
        return value.q_scale(), value.q_zero_point()
    return (
        _bits(value.q_per_channel_scales()),
        _bits(value.q_per_channel_zero_points()),
        value.q_per_channel_axis(),
    )


def _bits(value: torch.Tensor) -> str:
    # A copy: a tensor that was once an array of numpy can never be resized again.
    flat = value.detach().cpu().clone().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


def state_picture(model: nn.Module, optimizer: Any, extra: Any = None) -> dict[str, Any]:
    """Return pictures of all that a resume is to restore, by names that tell what differs."""
    state = model.state_dict()
    found: dict[str, Any] = {"keys": list(state)}
    for name, version in state._metadata.items():
        found[f"metadata {name!r}"] = picture(dict(version))
    found |= {f"model {key}": picture(value) for key, value in state.items()}
    found |= {f"buffer {key}": picture(value) for key, value in model.named_buffers()}
    found |= {f"trains {key}": value.requires_grad for key, value in model.named_parameters()}
    state = optimizer.state_dict()
    found |= {f"optimizer {path}": leaf for path, leaf in leaves(state)}
    if extra is not None:
        found |= {f"companion {path}": leaf for path, leaf in leaves(extra)}
    return found


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the pictures of what is in nested dicts, with its path."""
    if isinstance(value, Mapping):
        yield f"{path}/keys of {type(value).__name__}", [repr(key) for key in value]
        for key, item in value.items():
            yield from leaves(item, f"{path}/{key}")
    else:
        yield path, picture(value)


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Return the names of what is not in both, and equal."""
    missing = object()
    return [key for key in {**a, **b} if a.get(key, missing) != b.get(key, missing)]
