"""Found sharding on real ranks: the pieces of all ranks together are the whole model and optimizer.

Each case builds the same small model with known values, wraps it, steps its optimizer by a gradient
that is computed element by element (so that the result is the same, bit for bit, under every
sharding), and compares the union of all ranks' pieces with the model that was never wrapped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.tensor import DTensor

from dist_ckpt.derive import (
    load_optimizer_state,
    model_layout,
    optimizer_template,
    register_state_spec,
    sharded_model_state,
    sharded_optimizer_state,
    sharded_state_dict,
)
from dist_ckpt.errors import InvalidShardingError, MismatchError
from dist_ckpt.mapping import ShardedObject, ShardedTensor
from tests.multiprocess._derive_cases import (
    Piece,
    adafactor,
    adamw,
    adamw_groups,
    assemble,
    box_in,
    leaves,
    make_net,
    muon,
    pieces_of,
    sgd,
    step,
    train,
    wrap_compiled,
    wrap_ddp,
    wrap_ddp_tp,
    wrap_fsdp1,
    wrap_fsdp1_bf16,
    wrap_fsdp1_flat,
    wrap_fsdp2,
    wrap_fsdp2_kept,
    wrap_fsdp2_tp,
    wrap_hsdp2,
    wrap_plain,
    wrap_tp,
)
from tests.multiprocess._world import run_ranks

pytestmark = pytest.mark.multiprocess


def describe(
    rank: int,
    world_size: int,
    wrap: Callable[..., nn.Module],
    make: Callable[..., Any],
    *extra: Any,
) -> dict[str, Any]:
    """Wrap, step, derive; return pieces, tied table and names."""
    model = wrap(make_net(), *extra)
    optimizer = make(model)
    step(optimizer)
    tree = sharded_state_dict(model, optimizer)
    return {
        "pieces": pieces_of(tree),
        "tied": tree["tied"],
        "groups": tree["optimizer"]["param_groups"],
        "aliases": _aliases(model),
    }


def _aliases(model: nn.Module) -> bool:
    """Whether writing through the description changes the model."""
    layout = model_layout(model)
    before = [item.local.clone() for item in layout.tensors.values()]
    for leaf in leaves(sharded_model_state(layout, prefix="")):
        leaf.data.add_(1)
    again = [item.local for item in model_layout(model).tensors.values()]
    return all(torch.equal(old + 1, new) for old, new in zip(before, again, strict=True))


def reference(make: Callable[..., Any]) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    net = make_net()
    optimizer = make(net)
    step(optimizer)
    tree = sharded_state_dict(net, optimizer)
    return {p.key: p.data for p in pieces_of(tree)}, tree["optimizer"]["param_groups"]


@dataclass(frozen=True)
class Case:
    """One wrapping on one world."""

    id: str
    wrap: Callable[..., nn.Module]
    world_size: int = 2
    extra: tuple[Any, ...] = ()


CASES = [
    Case("plain", wrap_plain),
    Case("ddp", wrap_ddp),
    Case("compiled", wrap_compiled),
    Case("fsdp1", wrap_fsdp1, 3),
    Case("fsdp1-flat", wrap_fsdp1_flat, 3),
    Case("fsdp1-grad-op", wrap_fsdp1, 2, ("SHARD_GRAD_OP",)),
    Case("fsdp1-no-shard", wrap_fsdp1, 2, ("NO_SHARD",)),
    Case("fsdp1-flat-no-shard", wrap_fsdp1_flat, 2, ("NO_SHARD",)),
    Case("fsdp1-hybrid", wrap_fsdp1, 4, ("HYBRID_SHARD",)),
    Case("fsdp1-flat-hybrid", wrap_fsdp1_flat, 4, ("_HYBRID_SHARD_ZERO2",)),
    Case("fsdp1-low-precision", wrap_fsdp1_bf16),
    Case("fsdp2", wrap_fsdp2, 2),
    Case("fsdp2-uneven", wrap_fsdp2, 4),
    Case("hsdp2", wrap_hsdp2, 4),
    Case("tp", wrap_tp, 2),
    Case("tp-uneven", wrap_tp, 4),
    Case("fsdp2-tp", wrap_fsdp2_tp, 4),
    Case("tp-within-dp", wrap_ddp_tp, 4),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_union_of_all_ranks_is_the_whole(case: Case) -> None:
    """Model and AdamW state come together bit for bit, under canonical names; data is aliased."""
    # One flat parameter is in one group, so there the reference has one group too.
    make = adamw if case.id.startswith("fsdp1-flat") else adamw_groups
    expected, groups = reference(make)

    results = run_ranks(describe, case.world_size, case.wrap, make, *case.extra)

    found = assemble([result["pieces"] for result in results])
    assert found.keys() == expected.keys()
    wrong = [key for key, value in expected.items() if not torch.equal(value, found[key])]
    assert not wrong
    assert all(result["tied"] == {"head.weight": "embed.weight"} for result in results)
    assert all(result["aliases"] for result in results)
    for result in results:
        names = [sorted(group["params"]) for group in result["groups"]]
        assert names == [sorted(group["params"]) for group in groups]


@pytest.mark.parametrize("make", [sgd, adafactor, muon], ids=lambda make: make.__name__)
@pytest.mark.parametrize("wrap", [wrap_ddp, wrap_fsdp2], ids=lambda wrap: wrap.__name__)
def test_other_optimizers(wrap: Callable[..., nn.Module], make: Callable[..., Any]) -> None:
    """States of every shape are found; Muon and Adafactor compute across elements."""
    if make is adafactor and wrap is wrap_fsdp2:
        pytest.skip("Adafactor cannot step on DTensors")
    expected, _ = reference(make)

    results = run_ranks(describe, 2, wrap, make)

    found = assemble([result["pieces"] for result in results])
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if make is muon and key.startswith("models."):
            continue  # orthogonalised together: not bit for bit
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-2)


# -- loading ---------------------------------------------------------------------------------------


def checkpoint_of(make: Callable[..., Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return what a checkpoint of the reference has: full tensors by key, and the common part."""
    net = make_net()
    optimizer = make(net)
    step(optimizer)
    tree = sharded_state_dict(net, optimizer)
    common = {"optimizer": {"param_groups": tree["optimizer"]["param_groups"]}}
    return {p.key: p.data for p in pieces_of(tree)}, common


def described(full: dict[str, torch.Tensor]) -> dict[str, ShardedTensor]:
    """Return the metadata of a checkpoint."""
    return {
        key: ShardedTensor(
            key, None, t.dtype, tuple(t.shape), tuple(t.shape), (0,) * t.ndim, (1,) * t.ndim
        )
        for key, t in full.items()
    }


def fill(tree: Any, full: dict[str, torch.Tensor]) -> Any:
    """Replace the leaves of a template by what is stored, in place where there is a tensor."""
    if isinstance(tree, dict):
        return {key: fill(value, full) for key, value in tree.items()}
    if isinstance(tree, list):
        return [fill(value, full) for value in tree]
    if not isinstance(tree, ShardedTensor):
        return tree
    assert tree.data is not None
    box = box_in(full[tree.key], tree)
    tree.data.copy_(box if tree.flattened_range is None else box.reshape(-1)[tree.flattened_range])
    return tree.data


def load_and_describe(
    rank: int,
    world_size: int,
    wrap: Callable[..., nn.Module],
    make: Callable[..., Any],
    fresh: bool,
    full: dict[str, torch.Tensor],
    common: dict[str, Any],
    *extra: Any,
) -> dict[str, Any]:
    model = wrap(make_net(), *extra)
    optimizer = make(model)
    if not fresh:
        step(optimizer, 5)
    tree = sharded_state_dict(model, optimizer, metadata=described(full), common=common)
    load_optimizer_state(optimizer, [model_layout(model)], fill(tree, full)["optimizer"])
    again = sharded_state_dict(model, optimizer)
    pieces = pieces_of(again)
    step(optimizer)
    return {
        "pieces": pieces,
        "later": pieces_of(sharded_state_dict(model, optimizer)),
        "groups": again["optimizer"]["param_groups"],
    }


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "stepped"])
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.id not in {"compiled", "fsdp1-low-precision"}],
    ids=lambda case: case.id,
)
def test_optimizer_state_goes_to_every_layout(case: Case, fresh: bool) -> None:
    """State of the unwrapped model loads under every wrapping, and training goes on as it would."""
    full, common = checkpoint_of(adamw)
    net = make_net()
    optimizer = adamw(net)
    step(optimizer, 4)
    later = {p.key: p.data for p in pieces_of(sharded_state_dict(net, optimizer))}

    results = run_ranks(
        load_and_describe, case.world_size, case.wrap, adamw, fresh, full, common, *case.extra
    )

    found = assemble([result["pieces"] for result in results])
    went_on = assemble([result["later"] for result in results])
    assert found.keys() == full.keys()
    assert [key for key, value in full.items() if not torch.equal(value, found[key])] == []
    assert [key for key, value in later.items() if not torch.equal(value, went_on[key])] == []


# -- FSDP's own states -----------------------------------------------------------------------------


def after_forward_only(rank: int, world_size: int, wrap: Callable[..., nn.Module]) -> list[Piece]:
    model = wrap(make_net()).eval()
    with torch.no_grad():
        model(torch.arange(4))
    if isinstance(model, FSDPModule):
        model.unshard()
    tree = sharded_model_state(model_layout(model), prefix="models.0.")
    for leaf in leaves(tree):
        leaf.data.mul_(2)
    with torch.no_grad():
        doubled = model(torch.arange(4))
    other = make_net().eval()
    with torch.no_grad():
        for tensor in (*other.parameters(), *other.buffers()):
            tensor.mul_(2)
    torch.testing.assert_close(doubled, other(torch.arange(4)))
    return pieces_of(tree)


@pytest.mark.parametrize(
    "wrap", [wrap_fsdp1, wrap_fsdp1_flat, wrap_fsdp2_kept], ids=lambda wrap: wrap.__name__
)
def test_gathered_parameters_are_freed_first(wrap: Callable[..., nn.Module]) -> None:
    """After an evaluation, shards are found and what is loaded into them is used at once."""
    results = run_ranks(after_forward_only, 2, wrap)

    found = assemble(results)
    expected = {f"models.0.{n}": t * 2 for n, t in make_net().state_dict().items()}
    del expected["models.0.head.weight"]
    assert {p.writer for p in results[0] if p.key.endswith(".weight")} == {"main"}
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def _small_net() -> nn.Module:
    """Return the model with values that training can bear."""
    net = make_net()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(0.005)
    return net


def trained(rank: int, world_size: int, wrap: Callable[..., nn.Module]) -> list[Piece]:
    model = wrap(_small_net())
    optimizer = sgd(model)
    train(model, optimizer)
    return pieces_of(sharded_state_dict(model, optimizer))


@pytest.mark.parametrize(
    "wrap", [wrap_ddp, wrap_fsdp1, wrap_fsdp1_flat, wrap_fsdp2], ids=lambda wrap: wrap.__name__
)
def test_after_real_training(wrap: Callable[..., nn.Module]) -> None:
    """With gradients from autograd, all state is found too, and is that of one process."""
    expected = assemble(run_ranks(trained, 1, wrap_plain))

    found = assemble(run_ranks(trained, 2, wrap))

    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def inside_summon(rank: int, world_size: int) -> str:
    model = wrap_fsdp1(make_net())
    with Fsdp1.summon_full_params(model), pytest.raises(InvalidShardingError) as caught:
        model_layout(model)
    return str(caught.value)


def test_fsdp_units_in_use_are_refused() -> None:
    """Within summon_full_params the shards are not the truth."""
    messages = run_ranks(inside_summon, 2)

    assert all("SUMMON_FULL_PARAMS" in message for message in messages)


class Channels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)


def channels_last(rank: int, world_size: int) -> list[Piece]:
    model = Channels()
    with torch.no_grad():
        model.conv.weight.copy_(torch.arange(60.0).view(5, 3, 2, 2))
        model.conv.bias.zero_()
    return pieces_of(sharded_state_dict(Fsdp1(model, device_id=torch.device("cpu"))))


def test_fsdp1_flattens_in_memory_order() -> None:
    """A channels-last weight is found in its logical order."""
    found = assemble(run_ranks(channels_last, 3))

    assert torch.equal(found["models.0.conv.weight"], torch.arange(60.0).view(5, 3, 2, 2))


# -- states of other shapes ------------------------------------------------------------------------


class RowWise(torch.optim.Optimizer):
    """Keeps one value for each row, a plain number and a list."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            local = parameter.grad
            local = local.to_local() if isinstance(local, DTensor) else local
            self.state[parameter]["rows"] = local.sum(tuple(range(1, local.ndim)), keepdim=True)
            self.state[parameter]["count"] = 3


class RowWiseDeclared(RowWise):
    """The same, with a declared shape."""


def rowwise(rank: int, world_size: int, declared: bool) -> dict[str, Any]:
    cls = RowWiseDeclared if declared else RowWise
    handle = register_state_spec(
        RowWiseDeclared, lambda _name, _shape, ndim: (0, *[None] * (ndim - 1))
    )
    model = nn.Linear(5, 7)
    with torch.no_grad():
        model.weight.copy_(torch.arange(35.0).view(7, 5))
    fully_shard(model)
    optimizer = cls([model.weight])
    step(optimizer, 1)
    layouts = [model_layout(model)]
    tree = sharded_optimizer_state(optimizer, layouts, prefix="o.")
    objects = {leaf.key: leaf.data for leaf in leaves(tree) if isinstance(leaf, ShardedObject)}
    mains = [
        leaf.key for leaf in leaves(tree) if isinstance(leaf, ShardedObject) and not leaf.replica_id
    ]
    pieces = pieces_of(tree)

    # The same topology takes it back.
    metadata = {leaf.key: leaf for leaf in leaves(tree) if isinstance(leaf, ShardedObject)}
    if declared:
        metadata |= described({"o.state.rows.0.weight": torch.zeros(7, 1)})
    other = cls([model.weight])
    saved = {"param_groups": tree["param_groups"]}
    template = optimizer_template(other, layouts, prefix="o.", metadata=metadata, saved=saved)
    loaded = _fill_objects(template, objects)
    if declared:
        loaded["state"]["0.weight"]["rows"].data.copy_(optimizer.state[model.weight]["rows"])
        loaded["state"]["0.weight"]["rows"] = loaded["state"]["0.weight"]["rows"].data
    load_optimizer_state(other, layouts, loaded)
    same = torch.equal(other.state[model.weight]["rows"], optimizer.state[model.weight]["rows"])
    handle.remove()
    return {"pieces": pieces, "objects": objects, "mains": mains, "same": same}


def _fill_objects(tree: Any, objects: dict[str, Any]) -> Any:
    if isinstance(tree, dict):
        return {key: _fill_objects(value, objects) for key, value in tree.items()}
    return objects[tree.key] if isinstance(tree, ShardedObject) else tree


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "opaque"])
def test_states_of_other_shapes(declared: bool) -> None:
    """With a spec they are cut like the parameter; without, each rank keeps its own."""
    results = run_ranks(rowwise, 2, declared)

    assert all(result["same"] for result in results)
    mains = [key for result in results for key in result["mains"]]
    assert mains.count("o.state.count.0.weight") == 1
    opaque = [key for key in mains if key.startswith("o.opaque.0.weight@")]
    assert len(set(opaque)) == (0 if declared else 2)
    if declared:
        found = assemble([result["pieces"] for result in results])
        rows = (torch.arange(35.0).view(7, 5) * 0.5 + 1).sum(1, keepdim=True)
        assert torch.equal(found["o.state.rows.0.weight"], rows)


def opaque_elsewhere(rank: int, world_size: int, key: str) -> str:
    model = nn.Linear(5, 7)
    fully_shard(model)
    optimizer = RowWise([model.weight])
    metadata = {key: ShardedObject(key, None, (1,), (0,))}
    with pytest.raises(MismatchError) as caught:
        optimizer_template(
            optimizer, [model_layout(model)], prefix="o.", metadata=metadata, saved={}
        )
    return str(caught.value)


def test_opaque_state_needs_its_topology() -> None:
    """Loading opaque state on another topology says so."""
    messages = run_ranks(opaque_elsewhere, 2, "o.opaque.0.weight@4[S(0)] of 4@0")

    assert all("4[S(0)] of 4" in m and "register_state_spec" in m for m in messages)
