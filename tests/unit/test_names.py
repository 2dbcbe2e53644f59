"""Checkpoints under other names: a model that is an attribute on one side only."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from dist_ckpt import load_model_and_optimizer, save_model_and_optimizer
from dist_ckpt._loading.names import Prefixes, find_prefixes


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def trained(model: nn.Module, net: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    net(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return optimizer


def assert_same(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> None:
    left, right = a.state_dict(), b.state_dict()
    assert left["param_groups"] == right["param_groups"]
    for index, state in left["state"].items():
        assert all(torch.equal(value, right["state"][index][key]) for key, value in state.items())


def test_an_outer_model_loads_into_its_bare_attribute(tmp_path: Path) -> None:
    """``net.0.weight`` of the checkpoint is ``0.weight`` of the bare net, optimizer included."""
    outer = Outer()
    optimizer = trained(outer, outer.net)
    save_model_and_optimizer(tmp_path / "c", outer, optimizer)
    bare = Outer().net
    other = torch.optim.AdamW(bare.parameters())

    load_model_and_optimizer(tmp_path / "c", bare, other)

    assert all(
        torch.equal(a, b) for a, b in zip(outer.net.parameters(), bare.parameters(), strict=True)
    )
    assert_same(optimizer, other)


def test_a_bare_model_loads_into_an_attribute(tmp_path: Path) -> None:
    """The other way round."""
    bare = Outer().net
    optimizer = trained(bare, bare)
    save_model_and_optimizer(tmp_path / "c", bare, optimizer)
    outer = Outer()
    other = torch.optim.AdamW(outer.parameters())

    load_model_and_optimizer(tmp_path / "c", outer, other)

    assert all(
        torch.equal(a, b) for a, b in zip(outer.net.parameters(), bare.parameters(), strict=True)
    )
    assert_same(optimizer, other)


def test_prefixes_are_found_only_where_they_are_certain() -> None:
    """No renaming when a name agrees, when one does not fit, or when two prefixes would."""
    assert find_prefixes({"a.w", "b.w"}, {"net.a.w", "net.b.w", "other"}) == Prefixes("net.", "")
    assert find_prefixes({"net.a", "net.b"}, {"a", "b"}) == Prefixes("", "net.")
    assert find_prefixes({"a", "b"}, {"a", "net.a", "net.b"}) is None
    assert find_prefixes({"a", "c"}, {"net.a", "net.b"}) is None
    assert find_prefixes({"a"}, {"x.a", "y.a"}) is None
    assert find_prefixes(set(), {"x.a"}) is None
