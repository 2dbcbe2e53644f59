"""A state dict handed to another process of ours: its tensors through shared memory.

Here: packing and unpacking. Not here: the pipe (``checkpoint_process``). Used locally.

The rest travels pickled. That is between a process and the child it has started itself, never from
a checkpoint.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dist_ckpt._staging_pool.arena import Arena
from dist_ckpt._staging_pool.memory import copy_bits
from dist_ckpt.errors import InvalidShardingError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Packed", "is_plain_tensor", "pack", "unpack"]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies: in which arena, and where there."""

    arena: int
    position: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Packed:
    """A value ready to travel.

    Attributes:
        data: The value, pickled, with numbers for its tensors.
        places: Where each tensor lies.
        arenas: The shared memory; whoever sends it sends the descriptors.
    """

    data: bytes
    places: tuple[_Place, ...]
    arenas: tuple[Arena, ...]


def is_plain_tensor(value: object) -> bool:
    """Whether a value is a dense tensor with data, of no class but torch's own two."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not (value.is_quantized or value.is_nested or value.is_meta)
    )


def pack(value: Any, staged: Arena | None) -> Packed:
    """Pack a value; tensors that do not lie in ``staged`` are copied to shared memory now.

    Raises:
        InvalidShardingError: Something in it cannot be pickled.
        StorageError: There is not enough memory.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump(value)
    except Exception as error:
        raise InvalidShardingError(
            f"the state dict cannot be handed to the checkpoint process: {error}",
            hint="a synchronous checkpointer tells which value it is.",
        ) from error
    places, others = [], []
    for tensor in pickler.tensors:
        position = staged.position(tensor) if staged is not None else None
        if position is None:
            others.append(tensor)
        places.append(_Place(0, position or 0, tuple(tensor.shape), tensor.dtype))
    if staged is not None and not others:
        return Packed(buffer.getvalue(), tuple(places), (staged,))
    arenas = (Arena(Arena.nbytes_for(others)), *([staged] if staged is not None else ()))
    return Packed(buffer.getvalue(), tuple(_copied(pickler.tensors, arenas)), arenas)


def unpack(data: bytes, places: Sequence[_Place], arenas: Sequence[Arena]) -> Any:
    """Return the value; its tensors share memory with the process that packed it."""
    tensors = [arenas[one.arena].view(one.position, one.shape, one.dtype) for one in places]
    return _Unpickler(io.BytesIO(data), tensors).load()


def _copied(tensors: Sequence[torch.Tensor], arenas: tuple[Arena, ...]) -> list[_Place]:
    fresh, places = arenas[0], list[_Place]()
    for tensor in tensors:
        shape, dtype = tuple(tensor.shape), tensor.dtype
        position = arenas[1].position(tensor) if len(arenas) > 1 else None
        if position is not None:
            places.append(_Place(1, position, shape, dtype))
            continue
        copy = copy_bits(fresh.take(shape, dtype), tensor)
        places.append(_Place(0, fresh.position(copy) or 0, shape, dtype))
    return places


class _Pickler(pickle.Pickler):
    """Puts numbers in place of dense tensors; the same tensor twice is the same number."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        if not is_plain_tensor(obj):
            return None
        number = self._numbers.setdefault(id(obj), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(obj)  # kept: an id is only unique while its owner lives
        return number, type(obj) is torch.nn.Parameter, obj.requires_grad


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors
        self._parameters: dict[int, torch.nn.Parameter] = {}

    def persistent_load(self, pid: Any) -> Any:
        number, is_parameter, requires_grad = pid
        tensor = self._tensors[number]
        if not is_parameter:
            return tensor
        return self._parameters.setdefault(
            number, torch.nn.Parameter(tensor, requires_grad=requires_grad)
        )
