"""One piece of memory that two processes share, and tensors in it.

Here: ``Arena``, and exact copies. Not here: what is copied into it (``staging``), how it travels
(``_engine.handover``). Used locally.

One anonymous file for all tensors of a save, never one for each: file descriptors are few. It has
no name, so nothing is left behind whichever process dies, and it does not count against the size of
``/dev/shm``, which is small in containers.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import weakref
from typing import TYPE_CHECKING

import torch

from dist_ckpt._engine.memory import bits
from dist_ckpt.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Arena", "copy_bits"]

_ALIGNMENT = 64
"""Bytes; a cache line, and enough for the elements of any dtype."""


class Arena:
    """Shared memory from which tensors are cut, one after the other.

    The memory lives as long as any tensor in it, in either process.

    Args:
        nbytes: Size.
        descriptor: The file, if another process has made it; it is ours from now on.

    Raises:
        StorageError: There is not enough memory.
    """

    def __init__(self, nbytes: int, *, descriptor: int | None = None) -> None:
        """Map the file; make it first if there is none."""
        self.nbytes = nbytes
        self._used = 0
        self.descriptor = _anonymous_file(max(nbytes, 1)) if descriptor is None else descriptor
        self._close = weakref.finalize(self, os.close, self.descriptor)
        self._bytes = torch.frombuffer(
            mmap.mmap(self.descriptor, max(nbytes, 1)), dtype=torch.uint8
        )

    @staticmethod
    def nbytes_for(tensors: Iterable[torch.Tensor]) -> int:
        """Return the size of an arena that holds contiguous copies of ``tensors``."""
        return sum(_aligned(t.numel() * t.element_size()) for t in tensors)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the next free piece as a contiguous tensor; its values are undefined."""
        tensor = self.view(self._used, shape, dtype)
        self._used += _aligned(math.prod(shape) * dtype.itemsize)
        return tensor

    def view(self, position: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor at a byte position.

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
        """Let go of the file; the memory stays for tensors that are in use."""
        self._close()


def copy_bits(
    target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False
) -> torch.Tensor:
    """Copy ``source``, of any strides and device, to ``target``, bit for bit; return ``target``."""
    with torch.no_grad():
        plain = source.detach().resolve_conj().resolve_neg()
        bits(target).copy_(bits(plain), non_blocking=non_blocking)
    return target


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _anonymous_file(nbytes: int) -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("dist_ckpt", os.MFD_CLOEXEC)
    else:  # no Linux: an unlinked file in the directory for temporary ones
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        os.ftruncate(descriptor, nbytes)
        if hasattr(os, "posix_fallocate"):
            # Asked for now: memory that lacks later would end the process by a signal.
            os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        os.close(descriptor)
        raise StorageError(
            f"cannot get {nbytes} bytes of shared memory: {error}",
            hint="free memory, or save synchronously.",
        ) from error
    return descriptor
