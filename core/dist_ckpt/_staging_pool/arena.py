"""A staging buffer that two processes share, and tensors in it.

Here: ``Arena``. Not here: where the memory comes from (``host_memory``), which save uses it
(``pool``), what is copied into it (``staging``), how it is sent (``handover``). Local.

All tensors of a save lie in one unnamed file, because file descriptors are limited. An unnamed file
leaves nothing behind, whichever process dies.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from typing import TYPE_CHECKING, Self

import torch

from dist_ckpt._staging_pool.host_memory import MAKERS, grow, make_file, pin, unpin
from dist_ckpt.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from dist_ckpt._staging_pool.host_memory import Maker

__all__ = ["Arena"]

_ALIGNMENT = 64
"""Bytes. A cache line; and a tensor of any dtype must begin at a multiple of its element size."""


class Arena:
    """Shared memory from which tensors are cut, one after the other.

    The memory lives as long as any tensor in it, in either process.

    Args:
        nbytes: Size.
        descriptor: The file, if another process has made it; owned by the arena from now on.
        use_pinned: Lock the pages for the GPU, in a process that uses one; until ``close``.
        makers: The ways to get memory, tried in this order.

    Attributes:
        source: Which way it was got; "" if another process has made it.
        is_pinned: Whether its pages are locked for the GPU.

    Raises:
        StorageError: There is not enough memory.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        descriptor: int | None = None,
        use_pinned: bool = False,
        makers: Mapping[str, Maker] = MAKERS,
    ) -> None:
        """Map the file; make it first if there is none."""
        self.nbytes, self.source = nbytes, ""
        self._used = 0
        if descriptor is None:
            descriptor, self.source = make_file(max(nbytes, 1), makers)
        self.descriptor = descriptor
        self._close: Callable[[], object] = weakref.finalize(self, os.close, descriptor)
        self._unpin: Callable[[], object] = _nothing
        try:
            self._mapping = mmap.mmap(descriptor, max(nbytes, 1))
        except OSError as error:
            self._close()
            raise StorageError(f"cannot map {nbytes} bytes of shared memory: {error}") from error
        self._bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self.is_pinned = use_pinned and pin(self._bytes.data_ptr(), nbytes)
        if self.is_pinned:
            self._unpin = weakref.finalize(self, unpin, self._bytes.data_ptr())

    @staticmethod
    def nbytes_for(tensors: Iterable[torch.Tensor]) -> int:
        """Return the size of an arena that holds contiguous copies of ``tensors``."""
        return sum(_aligned(t.numel() * t.element_size()) for t in tensors)

    def grown(self, nbytes: int, *, use_pinned: bool = False) -> Arena:
        """Return a larger arena: the same memory, and more behind it. This one may be closed then.

        What is there stays, and is warm; a second arena would need the memory of both.

        Raises:
            StorageError: There is not enough memory; this arena is as it was.
        """
        grow(self.descriptor, max(self.nbytes, 1), nbytes)
        self._unpin()  # a page is locked by one registration at a time
        self.is_pinned = False
        larger = Arena(nbytes, descriptor=os.dup(self.descriptor), use_pinned=use_pinned)
        larger.source = self.source
        return larger

    def lent(self, when_free: Callable[[], object]) -> Self:
        """Return this memory as an arena that tells when nobody uses it any more.

        Args:
            when_free: Called once, in any thread, when the arena that is returned and all tensors
                cut from it are gone.
        """
        other = object.__new__(type(self))
        other.nbytes, other.source, other._used = self.nbytes, self.source, 0
        other.descriptor, other.is_pinned = self.descriptor, self.is_pinned
        other._mapping, other._close, other._unpin = self._mapping, _nothing, _nothing
        # A buffer of its own: each tensor's storage holds it, and nothing else does.
        buffer = memoryview(self._mapping)
        weakref.finalize(buffer, when_free).atexit = False
        other._bytes = torch.frombuffer(buffer, dtype=torch.uint8)
        return other

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the next free piece as a contiguous tensor; its values are undefined."""
        tensor = self.view(self._used, shape, dtype)
        self._used += _aligned(math.prod(shape) * dtype.itemsize)
        return tensor

    def view(self, position: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor at a byte position, which is a multiple of the element's size.

        Raises:
            StorageError: It does not lie within the arena.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if position < 0 or position + nbytes > self.nbytes:
            raise StorageError(
                f"{nbytes} bytes at {position} do not fit an arena of {self.nbytes} bytes"
            )
        return self._bytes[position : position + nbytes].view(dtype).view(shape)

    def position(self, tensor: torch.Tensor) -> int | None:
        """Return the byte position of a contiguous tensor within the arena, None if outside."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            return None
        if not tensor.numel():
            return 0
        start = tensor.data_ptr() - self._bytes.data_ptr()
        inside = start >= 0 and start + tensor.numel() * tensor.element_size() <= self.nbytes
        return start if inside else None

    def close(self) -> None:
        """Let go of the file, unless it was lent; the memory stays for tensors in use."""
        self._unpin()
        self._close()
        self.is_pinned = False


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _nothing() -> None:
    """Close nothing: the memory is somebody else's."""
