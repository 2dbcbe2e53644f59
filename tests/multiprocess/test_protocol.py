"""Modules with a part of their own in the state dict, where parameters are sharded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from dist_ckpt import load_model_and_optimizer, save_model_and_optimizer
from dist_ckpt.errors import InvalidShardingError
from dist_ckpt.training_state import CheckpointView, TrainingState, save_training_state
from tests._modules import Versioned
from tests.multiprocess._world import run_ranks


def scaled() -> Versioned:
    return Versioned(torch.arange(5.0))


class Counting(nn.Module):
    """Stores a tensor, a list and extra state beside a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 5)
        self.seen, self.history, self.extra = torch.zeros(2), [1, 2], 0

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}seen"] = self.seen
        destination[f"{prefix}history"] = list(self.history)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.seen = state_dict.pop(f"{prefix}seen")
        self.history = state_dict.pop(f"{prefix}history")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def get_extra_state(self) -> int:
        return self.extra

    def set_extra_state(self, state: int) -> None:
        self.extra = state


class Halving(nn.Module):
    """Stores its weight in half precision, under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(14.0).view(7, 2))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        weight = self.weight if keep_vars else self.weight.detach()
        destination[f"{prefix}packed"] = weight.half()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}packed").float()
        super()._load_from_state_dict(state_dict, prefix, *args)


class Net(nn.Module):
    """Everything that such a model may have, and a plain layer before and after it."""

    def __init__(self, *, halving: bool = True) -> None:
        super().__init__()
        self.z = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.counting = Counting()
        self.scaled = scaled()
        if halving:
            self.halving = Halving()
        self.a = nn.Linear(5, 4)
        self.cache = torch.zeros(())
        self.register_load_state_dict_post_hook(rebuild)


def rebuild(module: Any, _: Any) -> None:
    module.cache = module.norm.running_mean.sum()


def ddp(net: Net) -> nn.Module:
    return DistributedDataParallel(net)


def fsdp1(net: Net) -> nn.Module:
    return Fsdp1(net, device_id=torch.device("cpu"), use_orig_params=True)


def fsdp1_flat(net: Net) -> nn.Module:
    net.counting = Fsdp1(net.counting, device_id=torch.device("cpu"))
    return Fsdp1(net, device_id=torch.device("cpu"))


def fsdp2(net: Net) -> nn.Module:
    fully_shard(net.counting)
    fully_shard(net)
    return net


def tp(net: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"z": ColwiseParallel(), "a": ColwiseParallel(), "counting.inner": ColwiseParallel()}
    return parallelize_module(net, mesh, plan)


WRAPS: dict[str, Callable[[Net], nn.Module]] = {
    wrap.__name__: wrap for wrap in (ddp, fsdp1, fsdp1_flat, fsdp2, tp)
}


def made(seed: int, *, halving: bool) -> Net:
    torch.manual_seed(seed)
    net = Net(halving=halving)
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor).half())  # what half precision keeps
        net.counting.seen = torch.rand(2)
        net.counting.history = [seed]
        net.counting.extra = seed
    return net


def has_halving(name: str) -> bool:
    return not name.startswith("fsdp1")  # refused there, see below


def save_and_load(rank: int, world_size: int, name: str, root: str) -> dict[str, Any]:
    """Save under one layout; load there and, on each rank for itself, into plain models."""
    halving = has_halving(name)
    expected = made(1, halving=halving)
    save_model_and_optimizer(f"{root}/new", WRAPS[name](made(1, halving=halving)))
    old = made(1, halving=halving)
    old.scaled._version = 1  # type: ignore[misc]
    save_model_and_optimizer(f"{root}/old", WRAPS[name](old))

    net = made(2, halving=halving)
    wrapped = WRAPS[name](net)
    load_model_and_optimizer(f"{root}/new", wrapped)
    save_model_and_optimizer(f"{root}/again", wrapped)

    found: dict[str, Any] = {
        "cache": torch.equal(net.cache, expected.norm.running_mean.sum()),
        "values": (net.counting.history, net.counting.extra),
        "seen": torch.equal(net.counting.seen, expected.counting.seen),
    }
    full = CheckpointView.open(f"{root}/again").full_model(0)
    theirs = expected.state_dict()
    found["order"] = list(full) == list(theirs)
    found["differs"] = [
        key
        for key, one in theirs.items()
        if isinstance(one, torch.Tensor) and not torch.equal(full[key], one)
    ]
    if not name.startswith("fsdp1"):
        migrated = WRAPS[name](made(2, halving=halving))
        load_model_and_optimizer(f"{root}/old", migrated)
        scale = next(p for n, p in migrated.named_parameters() if n.endswith("scaled.scale"))
        whole = scale.full_tensor() if isinstance(scale, DTensor) else scale
        found["migrated"] = torch.equal(whole, expected.scaled.scale * 2)
    return found


def check(outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes:
        assert outcome.pop("migrated", True)
        assert outcome == {
            "cache": True, "values": ([1], 1), "seen": True, "order": True, "differs": [],
        }  # fmt: skip


def test_ddp(tmp_path: Path) -> None:
    """Entries, versions, order and hooks survive under DDP."""
    check(run_ranks(save_and_load, 2, "ddp", str(tmp_path)))


def test_fsdp2(tmp_path: Path) -> None:
    """A module that makes DTensors of its own gets them back as DTensors."""
    check(run_ranks(save_and_load, 2, "fsdp2", str(tmp_path)))


def test_tensor_parallel(tmp_path: Path) -> None:
    """Likewise where single layers are cut."""
    check(run_ranks(save_and_load, 2, "tp", str(tmp_path)))


def test_fsdp1(tmp_path: Path) -> None:
    """Nothing is gathered, and modules' own entries are there, with and without flat names."""
    for name in ("fsdp1", "fsdp1_flat"):
        path = tmp_path / name
        path.mkdir()
        check(run_ranks(save_and_load, 2, name, str(path)))


def refuse(rank: int, world_size: int, root: str) -> tuple[str, str]:
    messages = []
    for act in (
        lambda: save_model_and_optimizer(f"{root}/packed", fsdp1(made(1, halving=True))),
        lambda: load_model_and_optimizer(f"{root}/old", fsdp1(made(1, halving=False))),
    ):
        if len(messages) == 1:
            old = made(1, halving=False)
            old.scaled._version = 1  # type: ignore[misc]
            save_model_and_optimizer(f"{root}/old", fsdp1(old))
        try:
            act()
        except Exception as error:
            messages.append(str(error))
    first, second = messages
    return first, second


def test_what_fsdp1_cannot_describe_is_refused(tmp_path: Path) -> None:
    """A module that packs or converts what FSDP1 has flattened is named, on every rank."""
    for save, load in run_ranks(refuse, 2, str(tmp_path)):
        assert "'halving.packed'" in save
        assert "module 'halving'" in save
        assert "scaled.scale" in load
        assert "FSDP2" in load
    assert not (tmp_path / "packed").exists()


class Remembering(nn.Module):
    """Keeps its weight in its extra state, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(9.0))

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight.detach()}

    def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        pass


def refuse_part(rank: int, world_size: int, root: str) -> tuple[str, str]:
    remembering = Fsdp1(Remembering(), device_id=torch.device("cpu"), use_orig_params=True)
    with pytest.raises(InvalidShardingError) as of_module:
        save_model_and_optimizer(f"{root}/c", remembering)
    average = {"ema": [parameter.detach() for parameter in fsdp2(Net()).parameters()]}
    with pytest.raises(InvalidShardingError) as of_value:
        save_model_and_optimizer(f"{root}/c", nn.Linear(1, 1), common=average)
    return str(of_module.value), str(of_value.value)


def test_a_part_of_a_parameter_among_values_is_refused(tmp_path: Path) -> None:
    """One rank's part would be stored as the whole; a DTensor says so, with a hint."""
    for of_module, of_value in run_ranks(refuse_part, 2, str(tmp_path)):
        assert "'_extra_state'" in of_module
        assert "'(root)'" in of_module
        assert "common.ema[0]: is a DTensor" in of_value
        assert "AveragedModel" in of_value


def edit_weights(module: nn.Module, entries: Any, prefix: str, _: Any) -> None:
    for i in range(4):
        weight = entries.pop(f"{prefix}{i}.weight")
        entries[f"{prefix}{i}.other"] = weight.detach().clone()
        entries[f"{prefix}{i}.bias"] = torch.full((3,), 7.0)


def hook_on_one_rank(rank: int, world_size: int, root: str) -> list[bool]:
    found = []
    for hooked in range(world_size):
        net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
        if rank == hooked:
            net.register_state_dict_post_hook(edit_weights)
        save_model_and_optimizer(f"{root}/{hooked}", DistributedDataParallel(net))
        ours, stock = CheckpointView.open(f"{root}/{hooked}").full_model(0), net.state_dict()
        same = list(ours) == list(stock) and all(torch.equal(ours[k], stock[k]) for k in stock)
        found.append(rank != 0 or same)
        view, names = CheckpointView.open(f"{root}/{hooked}"), set(stock)
        found.append(rank != 0 or names == set(view.model_names(0)))
    return found


def test_hook_on_one_rank_under_ddp(tmp_path: Path) -> None:
    """What DDP has rank 0 save is rank 0's state dict, never a mixture of two ranks'."""
    assert all(map(all, run_ranks(hook_on_one_rank, 2, str(tmp_path))))


class Seen(nn.Module):
    """Has a value and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = 0

    def get_extra_state(self) -> int:
        return self.extra

    def set_extra_state(self, state: int) -> None:
        self.extra = state


def pipeline(rank: int, world_size: int, root: str) -> dict[str, Any]:
    """Each rank has a stage of its own, under names of the whole model."""
    stage = nn.ModuleDict({str(rank): nn.ModuleDict({"s": scaled(), "c": Counting()})})
    stage[str(rank)]["c"].extra = 10 + rank
    stage[str(rank)]["s"].scale.data.fill_(rank)
    seen = nn.ModuleDict({str(rank): Seen()})
    seen[str(rank)].extra = 20 + rank
    state = TrainingState(models=[stage, seen])
    save_training_state(f"{root}/c", state)
    seen[str(rank)].extra = 0
    CheckpointView.open(f"{root}/c").load_model(1, seen)

    other = nn.ModuleDict({str(rank): nn.ModuleDict({"s": scaled(), "c": Counting()})})
    CheckpointView.open(f"{root}/c").load_model(0, other)
    whole = nn.ModuleDict(
        {str(i): nn.ModuleDict({"s": scaled(), "c": Counting()}) for i in range(world_size)}
    )
    CheckpointView.open(f"{root}/c").load_model(0, whole)
    return {
        "seen": seen[str(rank)].extra,
        "own": (other[str(rank)]["c"].extra, other[str(rank)]["s"].scale.tolist()),
        "whole": [(one["c"].extra, one["s"].scale.tolist()) for one in whole.values()],
        "order": list(CheckpointView.open(f"{root}/c").full_model(0)) == list(whole.state_dict()),
    }


def test_stages_of_a_pipeline(tmp_path: Path) -> None:
    """What only one rank has is stored of it: versions, values, extra state."""
    outcomes = run_ranks(pipeline, 3, str(tmp_path))

    every = [(10 + rank, [float(rank)] * 5) for rank in range(3)]
    for rank, outcome in enumerate(outcomes):
        assert outcome.pop("seen") == 20 + rank
        assert outcome == {"own": every[rank], "whole": every, "order": True}
