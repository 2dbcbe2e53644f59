"""Optimizers of real libraries on two ranks: as stock resumes, or refused with their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dist_ckpt import load_model_and_optimizer, save_model_and_optimizer
from dist_ckpt.derive import check_optimizers
from dist_ckpt.errors import InvalidShardingError, MismatchError
from tests.multiprocess._world import RankOutcome, run_ranks

pytestmark = pytest.mark.multiprocess


def make(kind: str, layout: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 2))
    if layout == "ddp":
        model = DistributedDataParallel(model)
    elif layout == "fsdp2":
        fully_shard(model)
    if kind == "torchao":
        from torchao.optim import AdamW8bit

        return model, AdamW8bit(model.parameters())
    from pytorch_optimizer import Lookahead

    return model, Lookahead(torch.optim.AdamW(model.parameters()), k=2)


def train(model: nn.Module, optimizer: Any, seed: int) -> list[list[float]]:
    """Return the losses and local parameters of three steps."""
    generator = torch.Generator().manual_seed(seed)
    seen = []
    for _ in range(3):
        loss = model(torch.randn(8, 128, generator=generator)).square().mean()
        loss.backward()
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.tolist())
    local = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return [seen, *(one.detach().flatten().tolist() for one in local)]


def resume(rank: int, world_size: int, kind: str, layout: str, path: str) -> bool:
    """Train, save, go on; the same from the checkpoint."""
    model, optimizer = make(kind, layout)
    train(model, optimizer, 1)
    save_model_and_optimizer(path, model, optimizer)
    uninterrupted = train(model, optimizer, 2)
    again, resumed = make(kind, layout)
    load_model_and_optimizer(path, again, resumed)
    return train(again, resumed, 2) == uninterrupted


@pytest.mark.parametrize(
    ("kind", "layout"), [("torchao", "ddp"), ("torchao", "fsdp2"), ("Lookahead", "ddp")]
)
def test_a_resume_goes_on_bit_for_bit(kind: str, layout: str, tmp_path: Path) -> None:
    """States of several tensors, sharded too, and a wrapper with a state dict of its own."""
    pytest.importorskip("torchao" if kind == "torchao" else "pytorch_optimizer")
    path = tmp_path / "ck"
    assert run_ranks(resume, 2, kind, layout, str(path)) == [True, True]
    if layout == "fsdp2":
        model, optimizer = make(kind, "single")
        with pytest.raises(MismatchError, match=r"'0\.0\.weight': its state of undeclared shape"):
            load_model_and_optimizer(path, model, optimizer)


def refused(rank: int, world_size: int, path: str) -> str:
    """Return what the check says; a save must not write anything."""
    model, optimizer = make("Lookahead", "fsdp2")
    try:
        check_optimizers([optimizer], [model])
    except InvalidShardingError as error:
        found = str(error)
    save_model_and_optimizer(path, model, optimizer)
    return found


def checked(rank: int, world_size: int) -> str:
    model, optimizer = make("Lookahead", "fsdp2")
    try:
        check_optimizers([optimizer], [model])
    except InvalidShardingError as error:
        return str(error)
    return ""


def test_a_wrapper_is_refused_where_parameters_are_sharded(tmp_path: Path) -> None:
    """Before the first step, and at the save, on every rank; nothing is written."""
    pytest.importorskip("pytorch_optimizer")
    path = tmp_path / "ck"
    for text in run_ranks(checked, 2):
        assert "Lookahead" in text
        assert "'base_optimizer', 'lookahead_state'" in text
        assert "parameters are sharded" in text
    outcomes: list[RankOutcome] = run_ranks(refused, 2, str(path), expect_errors=True)
    assert all("Lookahead (optimizers.0)" in str(one.error) for one in outcomes)
    assert not path.exists()


def unsharded_to_sharded(rank: int, world_size: int, path: str) -> None:
    model, optimizer = make("torchao", "fsdp2")
    load_model_and_optimizer(path, model, optimizer)


def test_a_state_of_an_unsharded_parameter_is_no_state_of_a_sharded_one(tmp_path: Path) -> None:
    """Its blocks do not follow the shards: refused with all names."""
    pytest.importorskip("torchao")
    model, optimizer = make("torchao", "single")
    train(model, optimizer, 1)
    path = tmp_path / "ck"
    save_model_and_optimizer(path, model, optimizer)
    for one in run_ranks(unsharded_to_sharded, 2, str(path), expect_errors=True):
        assert "state 'exp_avg' of parameter '0.0.weight'" in str(one.error)
        assert "state 'exp_avg_sq' of parameter '0.0.weight'" in str(one.error)


def extras(rank: int, world_size: int) -> str:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.param_groups[0]["table"] = torch.ones(4)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    optimizer.state["global"] = {"average": torch.ones(3)}  # type: ignore[index]
    try:
        check_optimizers([optimizer], [model])
    except InvalidShardingError as error:
        return str(error)
    return ""


def test_tensors_of_no_parameter_are_refused_beside_shards() -> None:
    """Nobody knows what the other rank has in them; numbers are taken for equal."""
    for text in run_ranks(extras, 2):
        assert "2 state(s)" in text
        assert "param_groups[0]['table'] has shape (4,)" in text
        assert "entry 'other_state'['global']['average'] has shape (3,)" in text
