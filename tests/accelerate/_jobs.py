"""Small real jobs under Accelerate, on the CPU, in each mode that we serve.

Here: building and training them, and looking at their whole state. Not here: tests. Runs in the
test process or on ranks of ``tests.multiprocess._world``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

import accelerate_dist_ckpt  # noqa: F401 - attaches the method
from accelerate_dist_ckpt import DistCkptIO


class Net(nn.Module):
    """A few layers, dropout and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 10)
        self.drop = nn.Dropout(0.3)
        self.down = nn.Linear(10, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(self.up(self.norm(x)))).square().mean()


@dataclass
class Job:
    """What a script would have in its variables."""

    accelerator: Accelerator
    model: Any
    optimizer: Any
    scheduler: Any
    loader: Any = None
    handle: Any = None
    extra: dict[str, Any] = field(default_factory=dict)


def reset() -> None:
    """Forget the singletons of an earlier Accelerator in this process."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def new_accelerator(mode: str = "single", **kwargs: Any) -> Accelerator:
    """Return a fresh Accelerator; Accelerate refuses FSDP on CPU, so it is told afterwards."""
    reset()
    accelerator = Accelerator(cpu=True, **kwargs)
    if mode.startswith("fsdp"):
        version = int(mode[4])
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=version, cpu_ram_efficient_loading=False
        )
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
        accelerator.state.device_mesh = None
    return accelerator


def new_net(mode: str) -> nn.Module:
    net: nn.Module = Net()
    if mode == "tp":
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if mode == "fsdp1":
        net = FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    return net


def build(
    mode: str = "single", *, seed: int = 0, io: DistCkptIO | None = None, **kwargs: Any
) -> Job:
    """Return a prepared job with an IO registered; ``kwargs`` are the Accelerator's."""
    accelerator = new_accelerator(mode, **kwargs)
    handle = accelerator.register_checkpoint_io(io or DistCkptIO())
    torch.manual_seed(seed)
    net = new_net(mode)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3, 6, 9])
    if mode == "tp":  # with a mesh Accelerate would not wrap in DDP; it refuses meshes on CPU
        model = accelerator.prepare_model(net, evaluation_mode=True)
        optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    else:
        model, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
    return Job(accelerator, model, optimizer, scheduler, handle=handle)


def add_loader(job: Job, *, batch_size: int = 1, length: int = 12, **kwargs: Any) -> None:
    """Prepare a shuffled dataloader for the job."""
    data = torch.arange(4.0 * length).view(length, 4)
    loader = DataLoader(data, batch_size=batch_size, shuffle=True, **kwargs)
    job.loader = job.accelerator.prepare(loader)


def step(job: Job, batch: torch.Tensor) -> float:
    """Do one training step."""
    with job.accelerator.accumulate(job.model):
        loss = job.model(batch)
        job.accelerator.backward(loss)
        job.optimizer.step()
        job.scheduler.step()
        job.optimizer.zero_grad()
    return float(loss.detach())


def train(job: Job, steps: int) -> None:
    """Train on the same batch everywhere, without a dataloader."""
    for _ in range(steps):
        step(job, torch.arange(8.0).view(2, 4))


def run_epochs(
    job: Job,
    *,
    epochs: int,
    first_epoch: int = 0,
    skip: int = 0,
    save_after: int = -1,
    path: str = "",
) -> list[tuple[float, float, float]]:
    """Train over epochs; return (first element of the batch, loss, learning rate) of each step."""
    seen = []
    for epoch in range(first_epoch, epochs):
        loader = job.loader
        if skip and epoch == first_epoch:
            loader = job.accelerator.skip_first_batches(job.loader, skip)
        for batch in loader:
            loss = step(job, batch)
            seen.append((float(batch.flatten()[0]), loss, job.scheduler.get_last_lr()[0]))
            if len(seen) == save_after:
                job.accelerator.save_state(path)
    return seen


def whole(value: Any) -> Any:
    """Return a tensor as all ranks together hold it."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def state_of(job: Job) -> dict[str, Any]:
    """Return model, optimizer and scheduler as one flat dict, independent of the layout."""
    model = job.accelerator.unwrap_model(job.model)
    names = {id(p): name for name, p in model.named_parameters()}
    found = {f"model.{name}": whole(value) for name, value in model.state_dict().items()}
    inner = job.optimizer.optimizer
    for parameter, state in inner.state.items():
        found |= {f"{names[id(parameter)]}.{key}": whole(value) for key, value in state.items()}
    found["lr"] = inner.param_groups[0]["lr"]
    found["last_epoch"] = job.scheduler.scheduler.last_epoch
    return found


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Return the keys whose values are not equal to the bit."""
    wrong = sorted(a.keys() ^ b.keys())
    for key in a.keys() & b.keys():
        same = torch.equal(a[key], b[key]) if isinstance(a[key], torch.Tensor) else a[key] == b[key]
        if not same:
            wrong.append(key)
    return wrong
