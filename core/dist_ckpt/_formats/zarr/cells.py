"""The bytes of a cell, from the tensors that have its elements.

Here: a cell put together from several ranks' pieces, and its bytes in the order of its file. Not
here: files and threads (``write``), how a cell lies in its file (``layout``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dist_ckpt._formats.zarr.names import pieces_name
from dist_ckpt._sharding.shard_info import dtype_from_name
from dist_ckpt._staging_pool.memory import (
    PIECE_NBYTES,
    Scratch,
    copy_bits,
    fill_zero,
    host_bytes,
    pieces_for_write,
)
from dist_ckpt.box import Box, split_box
from dist_ckpt.storage import Extent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dist_ckpt._formats.base import WriteJob
    from dist_ckpt._formats.zarr.plan import SharedCell
    from dist_ckpt.storage import Store

__all__ = ["cell_bytes", "shared_cell"]


def cell_bytes(
    view: torch.Tensor, stored: tuple[int, ...], scratch: Scratch
) -> Iterator[tuple[int, memoryview]]:
    """Yield ``(byte position, bytes)`` of a cell row by row; each is void when the next comes.

    Args:
        view: What the tensor has of the cell: its first elements on each axis.
        stored: Extents of what the file holds; where the tensor ends before, it holds zeros.
        scratch: Memory for what is not plain host memory.
    """
    if view.shape == stored:
        yield from _plain(view, 0, scratch)
        return
    itemsize = view.element_size()
    held, position = Box((0,) * view.dim(), tuple(view.shape)), 0
    for box in split_box(Box(held.offset, stored), itemsize, PIECE_NBYTES):
        part = box.intersect(held)
        nbytes = box.numel * itemsize
        if part == box:
            yield from _plain(view[box.slices()], position, scratch)
        else:
            piece = scratch.take("padded", box.shape, view.dtype)
            fill_zero(piece)
            if part is not None:
                copy_bits(_inside(piece, part, box), view[part.slices()])
            yield position, host_bytes(piece)
        position += nbytes


def _plain(view: torch.Tensor, position: int, scratch: Scratch) -> Iterator[tuple[int, memoryview]]:
    for offset, piece in pieces_for_write(view, scratch):
        yield position + offset, host_bytes(piece)


def shared_cell(job: WriteJob, shared: SharedCell, store: Store) -> torch.Tensor:
    """Return a cell put together from this rank's shards and from what other ranks put down.

    What nobody has is zero.

    Raises:
        StorageError: What was put down cannot be read.
    """
    cell = torch.empty(shared.box.shape, dtype=dtype_from_name(shared.array.dtype))
    fill_zero(cell)
    for item in shared.own:
        copy_bits(_inside(cell, item.box, shared.box), job.shards.part(item.shard, item.box))
    for received in shared.received:
        piece = torch.empty(received.box.shape, dtype=cell.dtype)
        extent = Extent(received.position, host_bytes(piece))
        store.read_ranges(pieces_name(received.rank), [extent])
        copy_bits(_inside(cell, received.box, shared.box), piece)
    return cell


def _inside(view: torch.Tensor, box: Box, outer: Box) -> torch.Tensor:
    return view[box.relative_to(outer).slices()] if box.shape else view
