"""Saved under one layout, loaded under another: model and optimizer are the same, bit for bit.

What a layout holds after a load is gathered by torch's own full state dicts, so that a mistake in
our geometry cannot hide by being made twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from dist_ckpt import load_model_and_optimizer, save_model_and_optimizer
from tests.multiprocess._world import run_ranks

pytestmark = pytest.mark.multiprocess


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A way to spread the model over ranks."""

    name: str
    ranks: int


LAYOUTS = (
    Layout(name="single", ranks=1),
    Layout(name="ddp", ranks=2),
    Layout(name="fsdp1", ranks=2),
    Layout(name="fsdp2", ranks=2),
    Layout(name="fsdp2_uneven", ranks=3),
    Layout(name="tp", ranks=2),
    Layout(name="fsdp2_tp", ranks=4),
)


class Net(nn.Module):
    """Sizes that no world divides, a tied weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 10)
        self.norm = nn.LayerNorm(10)
        self.down = nn.Linear(10, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.down(self.norm(self.up(self.embed(tokens))))
        return self.head(hidden * self.scale)


def build(name: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model under a layout and its optimizer, with random weights and no state."""
    torch.manual_seed(seed)
    net = Net()
    net.scale.fill_(float(seed))
    model: nn.Module = net
    if "tp" in name:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        if name == "fsdp2_tp":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if name == "fsdp2_tp":
            fully_shard(net.up, mesh=mesh["dp"])
            fully_shard(net, mesh=mesh["dp"])
    elif name.startswith("fsdp2"):
        fully_shard(net.up)
        fully_shard(net)
    elif name == "fsdp1":
        model = FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    elif name == "ddp":
        model = DistributedDataParallel(net)
    decay = [p for p in model.parameters() if p.dim() != 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decay}, {"params": plain, "weight_decay": 0.0, "lr": 0.02}]
    if name == "fsdp1":  # flat views have no shape to tell the groups apart
        names = {n.replace("_fsdp_wrapped_module.", ""): p for n, p in model.named_parameters()}
        two = [k for k in names if k.endswith(".weight") and not k.startswith("norm")]
        groups[0]["params"] = [names[k] for k in two]
        groups[1]["params"] = [p for k, p in names.items() if k not in two]
    return model, torch.optim.AdamW(groups, lr=0.01)


def gathered(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the full model and optimizer state as torch gathers it, on rank 0."""
    if isinstance(model, FullyShardedDataParallel):
        return gathered_fsdp1(model, optimizer)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = {f"model.{k}": v for k, v in get_model_state_dict(model, options=options).items()}
    state = get_optimizer_state_dict(model, optimizer, options=options)
    for name, values in state.get("state", {}).items():  # other ranks than 0 get nothing
        full |= {f"optim.{name}.{key}": value for key, value in values.items()}
    for group in state.get("param_groups", []):
        for key in ("lr", "weight_decay", "betas", "eps"):
            value = torch.as_tensor(group[key], dtype=torch.float64)
            for name in sorted(group["params"]):
                full[f"group.{name}.{key}"] = value
    return {key: value.clone() for key, value in full.items() if isinstance(value, torch.Tensor)}


def gathered_fsdp1(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The same for FSDP1, whose own gathering crashes on CPU: rank after rank, flat ranges abut."""
    shapes = {name: parameter.shape for name, parameter in Net().named_parameters()}
    full: dict[str, torch.Tensor] = {"model.scale": model.get_buffer("_fsdp_wrapped_module.scale")}

    def joined(name: str, local: torch.Tensor) -> torch.Tensor:
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, local.detach().clone())
        return torch.cat([part.flatten() for part in parts]).view(shapes[name])

    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for raw, parameter in model.named_parameters():
        name = raw.replace("_fsdp_wrapped_module.", "")
        state = optimizer.state.get(parameter, {})
        none = torch.empty(0)
        steps: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(steps, state.get("step"))
        full[f"model.{name}"] = joined(name, parameter)
        full[f"optim.{name}.step"] = next(step for step in steps if step is not None)
        for key in ("exp_avg", "exp_avg_sq"):
            full[f"optim.{name}.{key}"] = joined(name, state.get(key, none))
        for key in ("lr", "weight_decay", "betas", "eps"):
            value = groups[id(parameter)][key]
            full[f"group.{name}.{key}"] = torch.as_tensor(value, dtype=torch.float64)
    full["model.head.weight"] = full["model.embed.weight"]
    return {key: value.clone() for key, value in full.items()}


def train_and_save(rank: int, world_size: int, path: str) -> dict[str, torch.Tensor]:
    """Train a few steps in one process and save: the reference."""
    assert (rank, world_size) == (0, 1)
    model, optimizer = build("single", seed=1)
    for _ in range(3):
        model(torch.randint(0, 11, (8,))).logsumexp(-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    save_model_and_optimizer(path, model, optimizer, common={"epoch": 3})
    return gathered(model, optimizer)


def load_all(
    rank: int, world_size: int, name: str, paths: list[str], save_to: str
) -> dict[str, dict[str, torch.Tensor]]:
    """Load each checkpoint into a fresh model of a layout; save the first one again from there."""
    del world_size
    found = {}
    for number, path in enumerate(paths):
        model, optimizer = build(name, seed=100 + number)
        assert load_model_and_optimizer(path, model, optimizer) == {"epoch": 3}
        if save_to and number == 0:
            save_model_and_optimizer(save_to, model, optimizer, common={"epoch": 3})
        result = gathered(model, optimizer)
        if rank == 0:
            found[path] = result
    return found


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a, b))


def compare(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor], what: str) -> None:
    assert expected.keys() == found.keys(), what
    wrong = [key for key in expected if not same_bits(expected[key], found[key])]
    assert not wrong, f"{what}: {wrong}"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, str]]:
    """The reference state, and a checkpoint of it saved under each layout."""
    root = tmp_path_factory.mktemp("matrix")
    reference = str(root / "reference")
    (expected,) = run_ranks(train_and_save, 1, reference)
    paths = {}
    for layout in LAYOUTS:
        paths[layout.name] = str(root / layout.name)
        found = run_ranks(load_all, layout.ranks, layout.name, [reference], paths[layout.name])[0]
        compare(expected, found[reference], f"single -> {layout.name}")
    return expected, paths


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_any_layout_loads_any_other(
    layout: Layout, checkpoints: tuple[dict[str, Any], dict[str, str]]
) -> None:
    """Checkpoints of all seven layouts load bit-exactly under this one."""
    expected, paths = checkpoints

    found = run_ranks(load_all, layout.ranks, layout.name, list(paths.values()), "")[0]

    for source, path in paths.items():
        compare(expected, found[path], f"{source} -> {layout.name}")


def test_replicas_are_spread_and_stored_once(
    checkpoints: tuple[dict[str, Any], dict[str, str]],
) -> None:
    """Under DDP both ranks write, about as much as one process alone in all."""
    _, paths = checkpoints

    sizes = {
        name: [f.stat().st_size for f in sorted(Path(path).glob("__*.distcp"))]
        for name, path in paths.items()
    }
    by_rank = {
        r: sum(f.stat().st_size for f in Path(paths["ddp"]).glob(f"__{r}_*.distcp")) for r in (0, 1)
    }

    assert abs(sum(sizes["ddp"]) - sum(sizes["single"])) < 4096 * len(sizes["ddp"])
    assert min(by_rank.values()) > 0.8 * max(by_rank.values())
