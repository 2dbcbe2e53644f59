"""Layouts of plain tensors: each rank holds all of it.

Here: the layout of a replicated tensor, and what ``DistributedDataParallel`` says about which
tensors are equal on all ranks. Not here: walking the model (``derive.model``). Used on every rank,
locally.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dist_ckpt.box import Box
from dist_ckpt.derive.layout import Part, TensorLayout
from dist_ckpt.types import Writer

__all__ = ["current_rank", "hides_child", "ignored_names", "keeps_equal", "replicated_layout"]


def current_rank() -> tuple[int, int]:
    """Return this process's global rank and the world size; 0 and 1 without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def replicated_layout(
    shape: tuple[int, ...], *, writer: Writer, rank: int | None = None
) -> TensorLayout:
    """Return the layout of a tensor that every rank holds entirely.

    Args:
        shape: Of the tensor.
        writer: Which rank stores it.
        rank: This rank, for callers with many tensors; None to ask.
    """
    if rank is None:
        rank, _ = current_rank()
    box = Box((0,) * len(shape), tuple(shape))
    return TensorLayout(
        global_shape=box.shape,
        local_shape=box.shape,
        parts=(Part(box=box),),
        replica_id=rank,
        writer=writer,
        whole=True,
        is_first=rank == 0,
    )


def keeps_equal(module: nn.Module) -> bool:
    """Whether ``module`` keeps the parameters below it equal on all ranks of the world."""
    if not isinstance(module, DistributedDataParallel):
        return False
    _, world_size = current_rank()
    return bool(dist.get_world_size(module.process_group) == world_size)


def ignored_names(module: nn.Module) -> frozenset[str]:
    """Return the names, within the wrapped module, that DDP leaves alone."""
    return frozenset(getattr(module, "parameters_to_ignore", ()))


def hides_child(module: nn.Module) -> bool:
    """Whether the child ``module`` of this wrapper stands for the wrapper itself in names."""
    return isinstance(module, (DistributedDataParallel, DataParallel))
