"""Tensors as bytes: the memory of host tensors, without a copy.

Here: views and bounded staging pieces. Not here: files (``storage``) or what to move
(``_sharding``).
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import TYPE_CHECKING

import torch

from dist_ckpt.box import Box, split_box
from dist_ckpt.errors import MismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "PIECE_NBYTES",
    "Scratch",
    "bits",
    "converted",
    "copy_converted",
    "fill_zero",
    "has_conversion",
    "host_bytes",
    "is_plain_memory",
    "pieces_for_write",
]

PIECE_NBYTES = 8 << 20
"""Largest bounce buffer of one transfer thread."""


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements are its own contiguous host memory, bit for bit."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a plain host tensor as writable bytes.

    The view borrows the memory: the caller keeps ``tensor`` alive while it is used.
    """
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())).cast("B")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor seen as integers of the same width: copies then never touch a bit.

    Integers because some dtypes (fp8 kinds, fp4) lack kernels, and casts may change NaN payloads.
    """
    integer = _INTEGERS.get(tensor.element_size())
    return tensor if integer is None else tensor.view(integer)


def copy_converted(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy the bits of ``source``; where the dtypes differ, convert as ``Tensor.copy_`` does.

    Raises:
        MismatchError: torch has no conversion between the two dtypes.
    """
    same = target.dtype == source.dtype and not any(
        tensor.is_conj() or tensor.is_neg() for tensor in (target, source)
    )
    with torch.no_grad():
        if same:
            bits(target).copy_(bits(source))
            return
        if source.dtype.is_complex and not (target.dtype.is_complex or target.dtype is torch.bool):
            # As copy_ does, without its Python warning: this runs in threads.
            source = source.real
        try:
            # In two steps: torch casts float32 to float16 past the sign of a negated view.
            target.copy_(source.to(target.dtype) if target.is_neg() else source)
        except RuntimeError as error:
            raise MismatchError(
                f"{source.dtype} cannot be converted to {target.dtype} ({error})."
            ) from error


def converted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor itself if it has that dtype, else a converted copy on its device.

    Raises:
        MismatchError: torch has no conversion between the two dtypes.
    """
    if tensor.dtype is dtype:
        return tensor
    copy = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    copy_converted(copy, tensor)
    return copy


@functools.cache
def has_conversion(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether ``copy_converted`` can convert from ``source`` to ``target``."""
    try:
        copy_converted(torch.empty(1, dtype=target), torch.empty(1, dtype=source))
    except (MismatchError, RuntimeError):  # torch cannot make some dtypes, either
        return False
    return True


def fill_zero(tensor: torch.Tensor) -> None:
    """Set all bits of a tensor to zero, whatever its dtype."""
    with torch.no_grad():
        # Conjugated and negated views cannot be seen as integers; their dtypes have the kernel.
        plain = not tensor.is_conj() and not tensor.is_neg()
        (bits(tensor) if plain else tensor).zero_()


class Scratch:
    """Bounce memory of one job: taken once, used for piece after piece.

    Fresh memory for each piece would leave the heaps of several threads behind, as large as the
    tensors. Not for use by two threads.
    """

    def __init__(self) -> None:
        """Take nothing yet."""
        self._blocks: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous host tensor; what was taken under this name before is void."""
        nbytes = math.prod(shape) * dtype.itemsize
        block = self._blocks.get(name)
        if block is None or block.numel() < nbytes:
            block = torch.empty(max(nbytes, PIECE_NBYTES), dtype=torch.uint8)
            self._blocks[name] = block
        return block[:nbytes].view(dtype).view(shape)


def pieces_for_write(tensor: torch.Tensor, scratch: Scratch) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield ``(byte position, plain tensor)`` pieces that together are ``tensor``, row-major.

    Plain host memory comes out as it is, in one piece. Anything else (strided views, expanded
    tensors, other devices, pending conjugation) is copied piece by piece, at most ``PIECE_NBYTES``
    at a time, so that the copy never grows with the tensor; each is void when the next comes.
    """
    if is_plain_memory(tensor):
        yield 0, tensor
        return
    whole = Box((0,) * tensor.dim(), tuple(tensor.shape))
    position = 0
    for box in split_box(whole, tensor.element_size(), PIECE_NBYTES):
        view = tensor[box.slices()] if box.shape else tensor
        # Resolving by itself would take fresh memory for each piece; the copy does it on the way.
        source = view if view.is_conj() or view.is_neg() else bits(view)
        piece = scratch.take("piece", box.shape, source.dtype)
        with torch.no_grad():
            piece.copy_(source)
        yield position, piece
        position += piece.numel() * piece.element_size()
