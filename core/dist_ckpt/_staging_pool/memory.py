"""Tensors as bytes: the memory of host tensors, and the two ways to copy one tensor to another.

Here: views, ``copy_bits`` (exact) and ``copy_cast`` (another dtype), bounded pieces for files. Not
here: copies by several threads (``copying``), files (``storage``), what to move (``_sharding``).
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
    "can_cast",
    "cast",
    "copy_bits",
    "copy_cast",
    "fill_zero",
    "host_bytes",
    "host_copy",
    "is_plain",
    "is_plain_memory",
    "pieces_for_write",
]

PIECE_NBYTES = 8 << 20
"""Largest bounce buffer of one transfer thread."""


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the elements of a strided tensor are one run of its memory, bit for bit."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements are one run of host memory, bit for bit."""
    return tensor.device.type == "cpu" and is_plain(tensor)


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


def copy_bits(dst: torch.Tensor, src: torch.Tensor, *, non_blocking: bool = False) -> torch.Tensor:
    """Copy a tensor of any strides and device exactly, to one of its shape and dtype.

    Args:
        dst: Gets the elements; returned.
        src: Where they are.
        non_blocking: Return when the copy from or to another device is enqueued.
    """
    with torch.no_grad():
        src = src.detach()
        if not src.is_cpu:
            # torch resolves these in the target when a copy is enqueued, before it is there.
            src = src.resolve_conj().resolve_neg()
        if any(one.is_conj() or one.is_neg() for one in (dst, src)):
            dst.copy_(src)  # resolves them on the way: no memory is taken for it
        else:
            bits(dst).copy_(bits(src), non_blocking=non_blocking)
    return dst


def copy_cast(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Copy exactly; where the dtypes differ, cast as ``Tensor.copy_`` does.

    Raises:
        MismatchError: torch has no conversion between the two dtypes.
    """
    if dst.dtype is src.dtype:
        copy_bits(dst, src)
        return
    with torch.no_grad():
        if src.dtype.is_complex and not (dst.dtype.is_complex or dst.dtype is torch.bool):
            # As copy_ does, without its Python warning: this runs in threads.
            src = src.real
        try:
            # In two steps: torch casts float32 to float16 past the sign of a negated view.
            dst.copy_(src.to(dst.dtype) if dst.is_neg() else src)
        except RuntimeError as error:
            raise MismatchError(
                f"{src.dtype} cannot be converted to {dst.dtype} ({error})."
            ) from error


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor itself if it has that dtype, else a copy on its device that does.

    Raises:
        MismatchError: torch has no conversion between the two dtypes.
    """
    if tensor.dtype is dtype:
        return tensor
    copy = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    copy_cast(copy, tensor)
    return copy


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return an exact, contiguous copy of a strided tensor in host memory of its own."""
    memory = torch.empty(tensor.nbytes, dtype=torch.uint8)  # of some dtypes, torch warns
    return copy_bits(memory.view(tensor.dtype).view(tensor.shape), tensor)


@functools.cache
def can_cast(src: torch.dtype, dst: torch.dtype) -> bool:
    """Whether ``copy_cast`` converts from ``src`` to ``dst``."""
    try:
        copy_cast(torch.empty(1, dtype=dst), torch.empty(1, dtype=src))
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
        piece = copy_bits(scratch.take("piece", box.shape, tensor.dtype), view)
        yield position, piece
        position += piece.numel() * piece.element_size()
