"""How one tensor is copied into staging memory, and whether it can be.

Here: the checks of a copy, each way to make one, what is watched meanwhile. Not here: which thread
does it (``copying``). Used locally.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dist_ckpt._staging_pool.memory import bits, copy_bits, is_plain
from dist_ckpt.box import Box, split_box
from dist_ckpt.errors import InvalidShardingError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "BLOCK_NBYTES",
    "Copy",
    "Watched",
    "check_copy",
    "copy_batch",
    "copy_blocking",
    "copy_on_stream",
    "copy_piece",
    "is_ordinary",
    "move",
    "pieces",
]

BLOCK_NBYTES = 8 << 20
"""One piece of work of a thread."""

_DEVICE_PIECE_NBYTES = 64 << 20
"""Most memory of a device that is taken to put a strided tensor in order."""

_SAMPLE_STEP_NBYTES = 64 << 10
"""One element in so many bytes is looked at before and after the copies."""

_SAMPLES_OF_AXIS = 8
"""The same for tensors that are not contiguous: about so many along each axis."""

_NO_DATA_BELOW = 1 << 40
"""Memory that was given up has an address near zero; below this one it is looked at closely."""

_WORD_NBYTES = 8

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)

_ORDINARY_DTYPES = frozenset({
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
})  # fmt: skip
"""Those that torch copies as they are, on every machine."""

move = ctypes.memmove
"""Copies memory while other threads run Python: ``move(target, source, nbytes)``."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One tensor to copy.

    Attributes:
        source: On any device, of any strides; conjugated, expanded, empty or a scalar too.
        target: Of the same shape and dtype, contiguous, in host memory.
        name: For messages.
    """

    source: torch.Tensor
    target: torch.Tensor
    name: str


class Watched:
    """Sources as they were when their copies were asked for; ``copies`` keep that memory.

    Two witnesses, as neither is enough. Torch counts a tensor's version up *after* a change, and
    some changes it does not count: those of fused optimizers and through ``.data``. Samples are
    taken before anything is copied: whoever changes all elements changes them.
    """

    def __init__(self) -> None:
        """Watch nothing yet."""
        self._copies: list[Copy] = []
        self._versions: list[int | None] = []
        self._sampled: list[int] = []
        self._views: list[torch.Tensor] = []
        self._samples: list[torch.Tensor] = []

    def __len__(self) -> int:
        """Return how many sources are watched."""
        return len(self._copies)

    def add(self, copy: Copy) -> Copy:
        """Watch the source of a copy; return the copy to make in its place."""
        # An alias: `.data` of the source may be set to other memory meanwhile.
        copy = Copy(_without_class(copy.source), copy.target, copy.name)
        view = _sampled(copy.source) if copy.source.is_cpu else None
        if view is not None:
            self._sampled.append(len(self._copies))
            self._views.append(view)
            self._samples.append(torch.empty_like(view, memory_format=torch.contiguous_format))
        self._copies.append(copy)
        return copy

    def note(self) -> None:
        """Note versions and samples, now."""
        self._versions = [_version(copy.source) for copy in self._copies]
        with torch.no_grad():
            if self._views:
                torch._foreach_copy_(self._samples, self._views)

    def changed(self) -> list[str]:
        """Return the names of sources that are known to have changed since."""
        found = {
            number
            for number, (copy, version) in enumerate(zip(self._copies, self._versions, strict=True))
            if _version(copy.source) != version
        }
        for number, view, sample in zip(self._sampled, self._views, self._samples, strict=True):
            if number not in found and not torch.equal(view, sample):
                found.add(number)
        return [self._copies[number].name for number in sorted(found)]


def check_copy(copy: Copy) -> None:
    """Check that a copy can be made.

    Raises:
        InvalidShardingError: The source has no data of its own, or the target does not fit it.
    """
    source, target = copy.source, copy.target
    if not _has_elements(source):
        raise InvalidShardingError(
            f"{copy.name!r} has no data that can be copied: a {type(source).__name__} on "
            f"{source.device}, {source.layout}.",
            hint="give what the rank itself holds: a dense tensor on a device.",
        )
    if source.dtype is not target.dtype or source.shape != target.shape:
        raise InvalidShardingError(
            f"{copy.name!r} does not fit its place: expected {tuple(target.shape)} of "
            f"{target.dtype}, found {tuple(source.shape)} of {source.dtype}."
        )
    if not target.is_contiguous() or not target.is_cpu:
        raise InvalidShardingError(f"the place of {copy.name!r} is no contiguous host memory.")
    if source.is_cpu and 0 <= source.data_ptr() < _NO_DATA_BELOW:
        _check_memory(copy)


def is_ordinary(copy: Copy) -> bool:
    """Whether torch itself copies this exactly, from host memory; what it refuses, it may."""
    source, target = copy.source, copy.target
    dtype = source.dtype
    try:
        return (
            type(source) in _PLAIN_TYPES
            and source.is_cpu
            and dtype in _ORDINARY_DTYPES
            and dtype is target.dtype
            and source.shape == target.shape
            and source.data_ptr() >= _NO_DATA_BELOW
        )
    except RuntimeError:  # sparse, nested: they have no such thing
        return False


def copy_batch(copies: Sequence[Copy]) -> None:
    """Make ordinary copies in one call, during which other threads run Python."""
    if not copies:
        return  # torch refuses to do nothing
    with torch.no_grad():
        torch._foreach_copy_([one.target for one in copies], [one.source for one in copies])


def pieces(copy: Copy, nbytes: int = BLOCK_NBYTES) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield ``(target, source)`` of parts that together are the copy."""
    source, target = _without_class(copy.source), copy.target
    # A transposed matrix has a way of its own in torch's copy on the host, many times faster and
    # only as a whole.
    is_transposed = source.is_cpu and source.dim() == 2 and source.stride(0) == 1  # noqa: PLR2004 - a matrix
    if target.nbytes <= nbytes or is_transposed:
        yield target, source
        return
    whole = Box((0,) * target.dim(), tuple(target.shape))
    for box in split_box(whole, target.element_size(), nbytes):
        yield target[box.slices()], source[box.slices()]


def copy_piece(target: torch.Tensor, source: torch.Tensor, name: str) -> None:
    """Copy one part by torch, on the current stream of its device.

    Raises:
        StorageError: The device has no memory left to put it in order.
        InvalidShardingError: It cannot be copied.
    """
    try:
        copy_bits(target, source, non_blocking=True)
    except torch.OutOfMemoryError as error:
        raise StorageError(f"{name!r} cannot be copied from {source.device}: {error}") from error
    except (RuntimeError, NotImplementedError) as error:
        raise InvalidShardingError(f"{name!r} cannot be copied: {error}") from error


def copy_blocking(copies: Sequence[Copy]) -> None:
    """Copy from a device without streams of its own."""
    for copy in copies:
        for target, source in pieces(copy, _DEVICE_PIECE_NBYTES):
            copy_piece(target, source, copy.name)
    torch.accelerator.synchronize(copies[0].source.device)


def copy_on_stream(
    stream: torch.cuda.Stream, ready: torch.cuda.Event, copies: Sequence[Copy]
) -> None:
    """Copy from a GPU on a stream of our own, once ``ready`` has come; return when all is there."""
    done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    try:
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            for copy in copies:
                # Whoever frees the source meanwhile gives its memory to nobody before the copy.
                copy.source.record_stream(stream)
                whole = copy.source.nbytes if is_plain(copy.source) else _DEVICE_PIECE_NBYTES
                for target, source in pieces(copy, whole):
                    copy_piece(target, source, copy.name)
    finally:
        # Also when one failed: the targets are written until then.
        done.record(stream)
        done.synchronize()


def _version(tensor: torch.Tensor) -> int | None:
    # A tensor made in inference mode has none.
    return None if tensor.is_inference() else tensor._version  # noqa: SLF001 - its only name


def _sampled(plain: torch.Tensor) -> torch.Tensor | None:
    """Return some elements of a host tensor as integers, without a copy."""
    if plain.is_conj() or plain.is_neg():
        return None
    if plain.is_contiguous():
        flat = plain.view(-1)
        words = bits(flat) if flat.element_size() <= _WORD_NBYTES else flat.view(torch.int64)
        return words[:: max(_SAMPLE_STEP_NBYTES // words.element_size(), 1)]
    if plain.element_size() > _WORD_NBYTES:
        return None
    return bits(plain)[tuple(slice(None, None, n // _SAMPLES_OF_AXIS + 1) for n in plain.shape)]


def _has_elements(source: torch.Tensor) -> bool:
    kind = type(source)
    # A class that takes over torch's operations may have no memory of its own.
    is_own = kind in _PLAIN_TYPES or kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return (
        is_own
        and source.layout is torch.strided
        and not source.is_meta
        and not source.is_nested
        and not source.is_quantized
    )


def _check_memory(copy: Copy) -> None:
    source = copy.source
    if not source.numel():
        return
    span = 1 + sum((n - 1) * s for n, s in zip(source.shape, source.stride(), strict=True))
    needed = (source.storage_offset() + span) * source.element_size()
    there = source.untyped_storage().nbytes()
    if needed > there:
        raise InvalidShardingError(
            f"{copy.name!r} has no data: its storage was resized to {there} bytes, {needed} are "
            "needed.",
            hint="sharded parameters must be described by what the rank holds, not as gathered.",
        )


def _without_class(source: torch.Tensor) -> torch.Tensor:
    if type(source) is torch.Tensor:
        return source.detach()
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch's own way, without a name
        return source.detach().as_subclass(torch.Tensor)
