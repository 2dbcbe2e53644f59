"""What ``dcp.save`` writes of live objects loads into live objects, in the shapes that people save."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from dist_ckpt import load_model_and_optimizer
from dist_ckpt._loading.dcp_names import Roots, find_roots
from dist_ckpt.errors import MismatchError
from dist_ckpt.training_state import CheckpointView


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.optimizer = nn.Linear(4, 2)  # a name that an optimizer's dict has, too

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.optimizer(self.norm(self.inner(x)))
        return y


def made(*, lr: float = 1e-3, groups: int = 2) -> tuple[Net, torch.optim.Optimizer]:
    net = Net()
    parameters = list(net.parameters())
    split = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.25}][:groups]
    return net, torch.optim.AdamW(split if groups > 1 else parameters, lr=lr)


def trained() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net, optimizer = made(lr=0.5)
    for _ in range(2):
        net(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


class AppState(Stateful):
    """As in torch's tutorial on distributed checkpoints."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.objects = net, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optim = get_state_dict(*self.objects)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


class Wrapped(Stateful):
    """As torchtitan wraps its parts."""

    def __init__(self, state: Callable[[], dict[str, Any]]) -> None:
        self.state_dict = state  # type: ignore[method-assign]  # the one that it has

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


def flat(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return get_optimizer_state_dict(net, optimizer, options=options)


def titan(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "optimizer": Wrapped(lambda: flat(net, optimizer)),
        "lr_scheduler": Wrapped(lambda: {"last_epoch": 7}),
        "dataloader": Wrapped(lambda: {"dp_rank_0": b"opaque"}),
        "train_state": Wrapped(lambda: {"step": torch.tensor(7, dtype=torch.int32)}),
    }


Shape = Callable[[nn.Module, torch.optim.Optimizer], dict[str, Any]]


def with_keys(model: str, optimizer: str) -> Shape:
    def shape(net: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
        a, b = get_state_dict(net, optim)
        return {model: a, optimizer: b}

    return shape


SHAPES: dict[str, Shape] = {
    "torch's docs": with_keys("model", "optimizer"),
    "model and optim": with_keys("model", "optim"),
    "Lightning's FSDP": with_keys("model", "optimizer_0"),
    "AppState": lambda net, optim: {"app": AppState(net, optim)},
    "AppState, another key": lambda net, optim: {"trainer": AppState(net, optim)},
    "torchtitan, before": lambda net, optim: {
        "model": get_model_state_dict(net),
        **titan(net, optim),
    },
    "torchtitan": lambda net, optim: {**get_model_state_dict(net), **titan(net, optim)},
    "DDP's names": lambda net, optim: {
        "module": get_model_state_dict(net),
        "optimizer": get_optimizer_state_dict(net, optim),
    },
}


def written(path: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it is used without a process group
        dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def assert_same(net: nn.Module, other: nn.Module) -> None:
    assert [*net.state_dict()] == [*other.state_dict()]
    for name, value in net.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def assert_same_optimizer(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> None:
    left, right = a.state_dict(), b.state_dict()
    assert left["param_groups"] == right["param_groups"]
    assert left["state"].keys() == right["state"].keys()
    for index, state in left["state"].items():
        assert state.keys() == right["state"][index].keys()
        assert all(torch.equal(value, right["state"][index][key]) for key, value in state.items())


@pytest.mark.parametrize("shape", SHAPES)
def test_a_model_and_its_optimizer_load(shape: str, tmp_path: Path) -> None:
    """Bits, groups with their settings, and the other values, as ``dcp.load`` gives them."""
    net, optimizer = trained()
    path = written(tmp_path / "c", SHAPES[shape](net, optimizer))
    other, fresh = made()

    values = load_model_and_optimizer(path, other, fresh)

    assert_same(net, other)
    assert_same_optimizer(optimizer, fresh)
    if "titan" in shape:
        assert values["train_state"]["step"].item() == 7
        assert values["lr_scheduler"] == {"last_epoch": 7}
        assert values["dataloader"] == {"dp_rank_0": b"opaque"}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda sd: sd,
        lambda sd: {"model": sd},
        lambda sd: {f"module.{name}": value for name, value in sd.items()},
    ],
    ids=["plain", "model", "module."],
)
def test_a_state_dict_alone_loads(wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    """Under no root, the usual one, and the prefix of a wrapper."""
    net, _ = trained()
    path = written(tmp_path / "c", wrap(net.state_dict()))
    other, _ = made()
    assert load_model_and_optimizer(path, other) == {}
    assert_same(net, other)
    with pytest.raises(MismatchError, match="no optimizer 0"):
        load_model_and_optimizer(path, *made())


def test_a_model_that_has_a_model(tmp_path: Path) -> None:
    """Names that begin with ``model.`` themselves (transformers) are no root's, with and without."""

    class Lm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(2, 2)
            self.head = nn.Linear(2, 2)

    source = Lm()
    for number, state in enumerate([source.state_dict(), {"model": source.state_dict()}]):
        target = Lm()
        load_model_and_optimizer(written(tmp_path / str(number), state), target)
        assert_same(source, target)


def test_a_second_copy_beside_the_model(tmp_path: Path) -> None:
    """The documented root is the model; among others, two that fit are named, and none is taken."""
    net, _ = trained()
    average = {name: value * 2 for name, value in net.state_dict().items()}
    path = written(tmp_path / "a", {"model": net.state_dict(), "ema": average})
    other, _ = made()
    load_model_and_optimizer(path, other)
    assert_same(net, other)

    path = written(tmp_path / "b", {"raw": net.state_dict(), "ema": average})
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(MismatchError, match=r"any of ema\.inner\.bias; raw\.inner\.bias"):
        load_model_and_optimizer(path, other)
    path = written(tmp_path / "c", {"model": net.state_dict(), **net.state_dict()})
    with pytest.raises(MismatchError, match=r"any of model\.inner\.bias; inner\.bias"):
        load_model_and_optimizer(path, other)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_one_optimizer_under_two_names_is_an_error(tmp_path: Path) -> None:
    """Neither is taken."""
    net, optimizer = trained()
    a, b = get_state_dict(net, optimizer)
    path = written(tmp_path / "c", {"model": a, "optimizer": b, "optim": b})
    with pytest.raises(MismatchError, match=r"two names: .*'optim\.'.*'optimizer\.'"):
        load_model_and_optimizer(path, net, optimizer)


def test_what_is_missing_and_unexpected_is_named(tmp_path: Path) -> None:
    """A strict load compares names under the root; else they are skipped."""
    net, optimizer = trained()
    state = {**net.state_dict(), **titan(net, optimizer)}
    state["later.weight"] = torch.ones(2)
    del state["norm.bias"]
    path = written(tmp_path / "c", state)
    other, _ = made()
    with pytest.raises(MismatchError, match=r"norm\.bias"):
        load_model_and_optimizer(path, other)
    load_model_and_optimizer(path, other, strict=False)
    assert torch.equal(other.inner.weight, net.inner.weight)

    path = written(tmp_path / "d", {**net.state_dict(), "later.weight": torch.ones(2)})
    with pytest.raises(MismatchError, match=r"Unexpected .*later\.weight"):
        load_model_and_optimizer(path, other)


def test_groups_of_a_flat_optimizer_are_those_that_load(tmp_path: Path) -> None:
    """What belongs together now must have been saved with one set of settings, as in torch."""
    net, optimizer = trained()
    path = written(tmp_path / "c", {**net.state_dict(), **titan(net, optimizer)})
    other, fresh = made(groups=1)
    with pytest.raises(
        MismatchError, match=r"group 0: lr is 0\.5 for '0\.inner\.weight' and 0\.25"
    ):
        load_model_and_optimizer(path, other, fresh)
    fresh = torch.optim.AdamW(list(other.parameters())[:2])
    with pytest.raises(MismatchError, match=r"not in the optimizer: .*norm\.bias"):
        load_model_and_optimizer(path, other, fresh)


def test_a_learning_rate_that_is_a_tensor(tmp_path: Path) -> None:
    """DCP stores it apart from the other settings: it is not forgotten, flat or nested."""
    net = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.125))
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    a, b = get_state_dict(net, optimizer)
    for number, one in enumerate([b, flat(net, optimizer)]):
        path = written(tmp_path / str(number), {"model": a, "optimizer": one})
        other = nn.Linear(2, 2)
        fresh = torch.optim.AdamW(other.parameters(), lr=torch.tensor(0.5))
        load_model_and_optimizer(path, other, fresh)
        assert fresh.param_groups[0]["lr"] == 0.125


def test_large_tensors_beside_the_model_stay_in_the_checkpoint(tmp_path: Path) -> None:
    """Only small ones are read into ``common``, on every rank."""
    net, _ = trained()
    extra = {"small": torch.ones(3), "large": torch.ones(1 << 19)}
    view = CheckpointView.open(written(tmp_path / "c", {"model": net.state_dict(), **extra}))
    view.load_model(0, made()[0])
    assert [*view.common] == ["small"]


def test_roots_without_a_model() -> None:
    """Before a model is there, the optimizer's names tell which entries are it."""
    keys = {"model.w", "head.w", "optimizer.state.model.w.exp_avg", "train_state.step"}
    assert find_roots(keys, (), ()) == Roots("", ("optimizer.",))
    assert find_roots({"model.w", "ema.w"}, (), ()).model == "model."
    assert find_roots({"app.model.w", "app.optim.state.w.m"}, (), ()) == Roots(
        "app.model.", ("app.optim.",)
    )
    assert find_roots(
        {"model.w", "optimizer_1.state.w.m", "optimizer_0.state.w.m"}, (), ()
    ) == Roots("model.", ("optimizer_0.", "optimizer_1."))
