"""What the tests of found sharding share: a model, its wrappings, and pieces put together.

Here: a small model with known values, ways to wrap it, optimizers, ``assemble``. Not here: tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from dist_ckpt.mapping import ShardedTensor

# -- the model and its wrappings -------------------------------------------------------------------


class Net(nn.Module):
    """Sizes that no world divides, a tied weight and buffers."""

    def __init__(self, *, norm: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.up = nn.Linear(5, 9)
        self.norm = nn.BatchNorm1d(9) if norm else nn.LayerNorm(9)
        self.down = nn.Linear(9, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.norm(self.up(self.embed(tokens)))))


def make_net(dtype: torch.dtype = torch.float32) -> Net:
    net = Net()
    with torch.no_grad():
        for index, parameter in enumerate(net.parameters()):
            values = torch.arange(parameter.numel()).view(parameter.shape)
            parameter.copy_(values / 8 + 100 * index)
    return net.to(dtype)


def wrap_plain(net: Net) -> nn.Module:
    return net


def wrap_ddp(net: Net) -> nn.Module:
    return DistributedDataParallel(net)


def wrap_compiled(net: Net) -> nn.Module:
    net.up = checkpoint_wrapper(net.up)
    return torch.compile(DistributedDataParallel(torch.compile(net)))


def wrap_fsdp1(
    net: Net,
    strategy: str = "FULL_SHARD",
    *,
    use_orig_params: bool = True,
    low_precision: bool = False,
) -> nn.Module:
    options: dict[str, Any] = {
        "sharding_strategy": ShardingStrategy[strategy],
        "use_orig_params": use_orig_params,
        "device_id": torch.device("cpu"),
    }
    if "HYBRID" in strategy:
        options["device_mesh"] = init_device_mesh("cpu", (2, 2))
    if low_precision:
        options["mixed_precision"] = MixedPrecision(param_dtype=torch.bfloat16)
    net.up = checkpoint_wrapper(Fsdp1(net.up, **options))
    return Fsdp1(net, **options)


def wrap_fsdp1_flat(net: Net, strategy: str = "FULL_SHARD") -> nn.Module:
    return wrap_fsdp1(net, strategy, use_orig_params=False)


def wrap_fsdp1_bf16(net: Net) -> nn.Module:
    return wrap_fsdp1(net, low_precision=True)


def wrap_fsdp2(net: Net) -> nn.Module:
    fully_shard(net.up)
    fully_shard(net)
    return net


def wrap_fsdp2_kept(net: Net) -> nn.Module:
    """Keep gathered parameters after a forward pass."""
    fully_shard(net.up, reshard_after_forward=False)
    return fully_shard(net, reshard_after_forward=False)


def wrap_hsdp2(net: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(net.up, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def wrap_tp(net: Net) -> nn.Module:
    return _parallelize(net, init_device_mesh("cpu", (dist.get_world_size(),)))


def wrap_fsdp2_tp(net: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    _parallelize(net, mesh["tp"])
    fully_shard(net.up, mesh=mesh["dp"])
    fully_shard(net, mesh=mesh["dp"])
    return net


def wrap_ddp_tp(net: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return _parallelize(net, mesh["tp"])


def _parallelize(net: Net, mesh: Any) -> nn.Module:
    return parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


# -- optimizers ------------------------------------------------------------------------------------


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.125, amsgrad=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return torch.optim.Muon(matrices, lr=0.125)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.125)


def adamw_groups(model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2], "lr": 0.5}, {"params": parameters[2:]}]
    return torch.optim.AdamW(groups, lr=0.125, weight_decay=0.25)


def step(optimizer: torch.optim.Optimizer, times: int = 2) -> None:
    """Step by a gradient that depends on each element alone."""
    for _ in range(times):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, DTensor) or parameter.numel():
                    parameter.grad = parameter.detach() * 0.5 + 1
        optimizer.step()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Step by the gradient of a loss, the same on all ranks."""
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.arange(6)).square().mean().backward()
        optimizer.step()


# -- pieces and wholes -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A ShardedTensor as it travels from a rank to the test."""

    key: str
    data: torch.Tensor
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    offset: tuple[int, ...]
    flat: tuple[int, int] | None
    writer: str
    replica_id: Any


def leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from leaves(value)
    else:
        yield tree


def pieces_of(tree: Any) -> list[Piece]:
    return [
        Piece(
            key=leaf.key,
            data=leaf.data.clone(),
            global_shape=leaf.global_shape,
            local_shape=leaf.local_shape,
            offset=leaf.global_offset,
            flat=leaf.flattened_range and (leaf.flattened_range.start, leaf.flattened_range.stop),
            writer=leaf.writer,
            replica_id=leaf.replica_id,
        )
        for leaf in leaves(tree)
        if isinstance(leaf, ShardedTensor)
    ]


def box_in(whole: torch.Tensor, leaf: Piece | ShardedTensor) -> torch.Tensor:
    """Return the box of ``whole`` that a shard speaks about, as a view."""
    offset = leaf.offset if isinstance(leaf, Piece) else leaf.global_offset
    return whole[tuple(slice(o, o + n) for o, n in zip(offset, leaf.local_shape, strict=True))]


def put(whole: torch.Tensor, piece: Piece, values: torch.Tensor) -> None:
    box = box_in(whole, piece)
    if piece.flat is None:
        box.copy_(values)
    else:
        flat = box.reshape(-1).clone()
        flat[slice(*piece.flat)] = values
        box.copy_(flat.view(box.shape))


def assemble(ranks: list[list[Piece]]) -> dict[str, torch.Tensor]:
    """Put all pieces together; every element must be there, and once only where one rank writes."""
    wholes: dict[str, torch.Tensor] = {}
    seen: dict[str, torch.Tensor] = {}
    for piece in (piece for pieces in ranks for piece in pieces):
        whole = wholes.setdefault(
            piece.key, torch.zeros(piece.global_shape, dtype=piece.data.dtype)
        )
        count = seen.setdefault(piece.key, torch.zeros(piece.global_shape))
        assert whole.dtype == piece.data.dtype
        assert whole.shape == piece.global_shape
        put(whole, piece, piece.data)
        old = torch.zeros(piece.global_shape)
        put(old, piece, torch.ones(piece.data.shape))
        count += old
        if piece.writer == "main":
            assert piece.replica_id == 0
            assert bool((count <= 1).all()), piece.key
    missing = [key for key, count in seen.items() if not bool((count >= 1).all())]
    assert not missing
    return wholes
