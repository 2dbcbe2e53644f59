"""Found sharding in one process: names, tied tensors, kinds of optimizer state, errors."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from dist_ckpt.box import Box
from dist_ckpt.derive import (
    Part,
    TensorLayout,
    load_optimizer_state,
    model_layout,
    optimizer_template,
    register_state_spec,
    sharded_model_state,
    sharded_optimizer_state,
    sharded_state_dict,
)
from dist_ckpt.derive.ddp import replicated_layout
from dist_ckpt.derive.slots import optimizer_slots, unwrap_optimizer
from dist_ckpt.derive.state_spec import find_state_spec, spec_layout
from dist_ckpt.errors import InvalidShardingError, MismatchError
from dist_ckpt.mapping import ShardedObject, ShardedTensor


class Buffers(nn.Module):
    """Two kinds of buffer, a missing parameter and a child called ``module``."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("dropped", torch.ones(2), persistent=False)
        self.register_buffer("none", None)
        self.register_parameter("absent", None)
        self.module = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.tensor(2.0))


def stepped(optimizer: torch.optim.Optimizer, times: int = 1) -> torch.optim.Optimizer:
    for _ in range(times):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return optimizer


def stored_form(tree: Any) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Return metadata, values and common part, as a checkpoint would have them."""
    if isinstance(tree, ShardedTensor):
        assert tree.data is not None
        return {tree.key: tree.without_data()}, {tree.key: tree.data.clone()}, None
    if isinstance(tree, ShardedObject):
        return {tree.key: replace(tree, data=None)}, {tree.key: copy.deepcopy(tree.data)}, None
    if not isinstance(tree, dict):
        return {}, {}, tree
    metadata: dict[str, Any] = {}
    values: dict[str, Any] = {}
    common = {}
    for key, value in tree.items():
        more, data, rest = stored_form(value)
        metadata |= more
        values |= data
        if not isinstance(value, (ShardedTensor, ShardedObject)):
            common[key] = rest
    return metadata, values, common


def filled(tree: Any, values: dict[str, Any]) -> Any:
    if isinstance(tree, dict):
        return {key: filled(value, values) for key, value in tree.items()}
    if isinstance(tree, ShardedTensor):
        assert tree.data is not None
        return tree.data.copy_(values[tree.key])
    return values[tree.key] if isinstance(tree, ShardedObject) else tree


def transfer(source: Any, model: nn.Module, target: Any) -> None:
    """Save ``source`` and load it into ``target``, without files."""
    tree = sharded_optimizer_state(source, [model_layout(model)], prefix="o.")
    metadata, values, common = stored_form(tree)
    layouts = [model_layout(model)]
    template = optimizer_template(target, layouts, prefix="o.", metadata=metadata, saved=common)
    load_optimizer_state(target, layouts, filled(template, values))


# -- models ----------------------------------------------------------------------------------------


def test_names_are_those_of_the_state_dict() -> None:
    """Persistent buffers count, a child named 'module' keeps its name."""
    model = Buffers()

    layout = model_layout(model)

    assert list(layout.tensors) == list(model.state_dict())
    assert layout.tensors["kept"].kind == "buffer"


# Loading its compiler, torch warns about a function of its own.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
def test_wrappers_leave_no_trace_in_names() -> None:
    """Compiled and checkpointed modules have the names of the original."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    expected = list(model.state_dict())
    model[0] = checkpoint_wrapper(model[0])

    layout = model_layout(torch.compile(nn.DataParallel(torch.compile(model))))

    assert list(layout.tensors) == expected


def test_tied_parameters_appear_once() -> None:
    """The first name in the order of state_dict wins; shared modules are tied too."""
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": shared, "b": nn.Linear(2, 2), "c": shared})
    model["b"].weight = shared.weight

    layout = model_layout(model)

    assert list(layout.tensors) == ["a.weight", "a.bias", "b.bias"]
    assert dict(layout.tied) == {
        "b.weight": "a.weight",
        "c.weight": "a.weight",
        "c.bias": "a.bias",
    }


def test_data_aliases_the_module() -> None:
    """Filling the described data fills the module; nothing requires grad."""
    model = Buffers()

    state = sharded_model_state(model_layout(model), prefix="models.0.")
    state["scale"].data.fill_(5)

    assert model.scale.item() == 5
    assert state["scale"].key == "models.0.scale"
    assert not state["scale"].data.requires_grad


def test_writers_of_plain_tensors() -> None:
    """Only equal parameters may be written by anyone; buffers may always differ."""
    model = Buffers()

    equal = model_layout(model, replicas="equal").tensors
    differ = model_layout(model, replicas="differ").tensors

    assert equal["scale"].layout.writer == "any"
    assert equal["kept"].layout.writer == "first"
    assert differ["scale"].layout.writer == "first"


def test_tensors_without_storage_are_all_named() -> None:
    """Meta and lazy tensors are refused together."""
    model = nn.ModuleDict({"meta": nn.Linear(2, 2, device="meta"), "lazy": nn.LazyLinear(3)})

    with pytest.raises(InvalidShardingError) as caught:
        model_layout(model)

    for name in ("meta.weight", "meta.bias", "lazy.weight"):
        assert name in str(caught.value)


def test_two_tensors_of_one_name_are_refused() -> None:
    """A wrapper's hidden name could make two names equal."""
    model = nn.Linear(2, 2)
    model.register_module("_orig_mod", nn.Linear(2, 2))

    with pytest.raises(InvalidShardingError, match="weight: two different tensors"):
        model_layout(model)


# -- layouts ---------------------------------------------------------------------------------------


def test_several_parts_are_cut_and_assembled() -> None:
    """A layout of two boxes gives two views, and takes them back."""
    layout = TensorLayout(
        global_shape=(6,),
        local_shape=(3,),
        parts=(
            Part(box=Box((0,), (2,)), source=Box((0,), (2,))),
            Part(box=Box((4,), (1,)), source=Box((2,), (1,))),
        ),
        replica_id=0,
        writer="main",
    )
    local = torch.tensor([1.0, 2, 3])

    first, second = layout.shard("k", local)  # type: ignore[misc]

    assert (first.global_offset, second.global_offset) == ((0,), (4,))
    assert second.data.tolist() == [3]
    assert torch.equal(layout.assemble([first.data, second.data]), local)


def test_a_wrong_local_tensor_is_refused() -> None:
    """The message has the key and both shapes."""
    layout = replicated_layout((2, 3), writer="any")

    with pytest.raises(InvalidShardingError, match=r"'k'.*\(3, 2\), expected \(2, 3\)"):
        layout.shard("k", torch.ones(3, 2))
    with pytest.raises(InvalidShardingError, match="neither"):
        layout.shard("k", None)
    assert layout.shard("k", None, dtype=torch.int8).dtype == torch.int8  # type: ignore[union-attr]


# -- optimizers ------------------------------------------------------------------------------------


def test_state_goes_by_parameter_name() -> None:
    """Another order of parameters and groups gets the right state and settings."""
    model = Buffers()
    weight, bias, scale = model.module.weight, model.module.bias, model.scale
    source = torch.optim.AdamW(
        [{"params": [weight], "lr": 0.5}, {"params": [bias, scale], "lr": 0.25}]
    )
    stepped(source, 3)
    target = torch.optim.AdamW(
        [{"params": [scale, bias], "lr": 9.0}, {"params": [weight], "lr": 9.0}]
    )

    transfer(source, model, target)

    assert [group["lr"] for group in target.param_groups] == [0.25, 0.5]
    for parameter in (weight, bias, scale):
        assert target.state[parameter].keys() == source.state[parameter].keys()
        for name, value in source.state[parameter].items():
            assert torch.equal(target.state[parameter][name], value)
    assert all(isinstance(group["betas"], tuple) for group in target.param_groups)


def test_stored_dtypes_survive() -> None:
    """Float32 moments of bfloat16 parameters are not cast to bfloat16."""
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    source = stepped(torch.optim.AdamW(model.parameters()))
    state = source.state[model.weight]
    state["exp_avg"] = state["exp_avg"].float() + 2**-20
    target = torch.optim.AdamW(model.parameters())

    transfer(source, model, target)

    assert target.state[model.weight]["exp_avg"].dtype == torch.float32
    assert torch.equal(target.state[model.weight]["exp_avg"], state["exp_avg"])
    assert target.state[model.weight]["exp_avg_sq"].dtype == torch.bfloat16


def test_hooks_of_the_optimizer_run() -> None:
    """Loading goes through load_state_dict."""
    model = nn.Linear(2, 2)
    source, target = (torch.optim.SGD(model.parameters(), momentum=0.5) for _ in range(2))
    seen = []
    target.register_load_state_dict_post_hook(seen.append)

    transfer(stepped(source), model, target)

    assert seen == [target]


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # LBFGS of torch 2.8
def test_lbfgs_state_is_kept() -> None:
    """Lists, numbers and tensors longer than the parameter come back."""
    model = nn.Linear(3, 2)
    source, target = (torch.optim.LBFGS(model.parameters(), max_iter=3) for _ in range(2))

    def loss() -> torch.Tensor:
        source.zero_grad()
        value = model(torch.arange(3.0)).square().sum()
        value.backward()
        return value

    source.step(loss)
    transfer(source, model, target)

    old, new = source.state[model.weight], target.state[model.weight]
    assert old.keys() == new.keys()
    assert torch.equal(old["d"], new["d"])
    assert [t.tolist() for t in old["old_dirs"]] == [t.tolist() for t in new["old_dirs"]]
    assert old["n_iter"] == new["n_iter"]


def test_wrong_groups_are_named() -> None:
    """Missing, unexpected and regrouped parameters are told by name."""
    model = Buffers()
    source = stepped(torch.optim.AdamW([model.module.weight, model.module.bias]))
    other = torch.optim.AdamW([model.module.weight, model.scale])
    split = torch.optim.AdamW([{"params": [model.module.weight]}, {"params": [model.module.bias]}])

    with pytest.raises(MismatchError, match=r"0\.scale.*0\.module\.bias"):
        transfer(source, model, other)
    with pytest.raises(MismatchError, match="group 0"):
        transfer(source, model, split)


def test_another_shape_is_named() -> None:
    """State of a parameter that has another shape now is refused with both shapes."""
    model, other = nn.Linear(2, 2), nn.Linear(3, 2)
    optimizer = stepped(torch.optim.AdamW(model.parameters()))
    metadata, _, common = stored_form(sharded_state_dict(model, optimizer))

    with pytest.raises(MismatchError, match=r"0\.weight.*\(2, 2\), now \(2, 3\)"):
        sharded_state_dict(
            other, torch.optim.AdamW(other.parameters()), metadata=metadata, common=common
        )


def test_a_template_needs_no_step() -> None:
    """A template has what the checkpoint has and leaves the optimizer alone."""
    model = nn.Linear(2, 2)
    metadata, _, common = stored_form(
        sharded_state_dict(model, stepped(torch.optim.AdamW(model.parameters(), amsgrad=True)))
    )
    fresh = torch.optim.AdamW(model.parameters())

    tree = sharded_state_dict(model, fresh, metadata=metadata, common=common)

    states = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    assert tree["optimizer"]["state"]["0.weight"].keys() == states
    assert not fresh.state


def test_a_template_uses_the_optimizers_own_tensors() -> None:
    """No second copy of the state is allocated where there is one."""
    model = nn.Linear(2, 2)
    optimizer = stepped(torch.optim.AdamW(model.parameters()))
    metadata, _, common = stored_form(sharded_state_dict(model, optimizer))

    tree = sharded_state_dict(model, optimizer, metadata=metadata, common=common)

    asked = tree["optimizer"]["state"]["0.weight"]["exp_avg"].data
    assert asked.data_ptr() == optimizer.state[model.weight]["exp_avg"].data_ptr()


def test_parameters_in_no_model_have_positional_names() -> None:
    """They are stored all the same."""
    lonely = nn.Parameter(torch.ones(2))
    model = nn.Linear(2, 2)
    optimizer = stepped(torch.optim.SGD([model.weight, lonely], momentum=0.5))

    tree = sharded_optimizer_state(optimizer, [model_layout(model)], prefix="o.")

    assert tree["param_groups"][0]["params"] == ["0.weight", "_.0.1"]
    assert tree["state"]["_.0.1"]["momentum_buffer"].key == "o.state.momentum_buffer._.0.1"


def test_several_models_share_an_optimizer() -> None:
    """Names begin with the index of the model."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([first.weight, second.weight])

    slots = optimizer_slots(optimizer, [model_layout(first), model_layout(second)])

    assert [slot.name for slot in slots] == ["0.weight", "1.weight"]


class Forwarding:
    """A wrapper as frameworks have them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups


def test_forwarding_wrappers_are_looked_through() -> None:
    """A wrapper with state of its own is kept."""
    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    own_state = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    own_state.optimizer = inner  # type: ignore[attr-defined]

    assert unwrap_optimizer(Forwarding(Forwarding(inner))) is inner  # type: ignore[arg-type]
    assert unwrap_optimizer(own_state) is own_state


def test_zero_redundancy_is_refused() -> None:
    """An optimizer that shards by itself cannot be described."""

    class ZeroRedundancyOptimizer(torch.optim.SGD):
        pass

    with pytest.raises(InvalidShardingError, match="FSDP"):
        unwrap_optimizer(ZeroRedundancyOptimizer([nn.Parameter(torch.ones(1))]))


def test_state_names_with_dots_survive() -> None:
    """A dot in a state's name is not confused with the parameter's name."""
    model = nn.Linear(2, 2)
    source, target = (torch.optim.SGD(model.parameters(), momentum=0.5) for _ in range(2))
    stepped(source)
    source.state[model.weight]["a.b%2E"] = torch.ones(2, 2)

    transfer(source, model, target)

    assert torch.equal(target.state[model.weight]["a.b%2E"], torch.ones(2, 2))


def test_undescribable_states_are_all_named() -> None:
    """Tensors without storage, in states, containers and groups."""
    model = nn.Linear(2, 2)
    optimizer = stepped(torch.optim.SGD(model.parameters(), momentum=0.5))
    optimizer.state[model.weight]["list"] = [torch.ones(2, device="meta")]
    optimizer.state[model.bias]["ghost"] = torch.ones(2, device="meta")

    with pytest.raises(
        InvalidShardingError,
        match=r"(?s)SGD \(o\): 2 state.*'list' of parameter '0\.weight'.*ghost",
    ):
        sharded_optimizer_state(optimizer, [model_layout(model)], prefix="o.")


def test_specs_are_inherited_and_removed() -> None:
    """A spec holds for subclasses until its handle is removed."""

    class Own(torch.optim.SGD):
        pass

    optimizer = Own([nn.Parameter(torch.ones(1))])
    handle = register_state_spec(Own, lambda _name, _shape, _ndim: None)

    assert find_state_spec(optimizer) is not None
    handle.remove()
    handle.remove()
    assert find_state_spec(optimizer) is None


def test_a_wrong_spec_is_named() -> None:
    """Axes that state or parameter do not have are refused."""
    layout = replicated_layout((2, 3), writer="any")

    with pytest.raises(InvalidShardingError, match="'rows'"):
        spec_layout(lambda _name, _shape, _ndim: (5,), name="rows", shape=(2,), layout=layout)
