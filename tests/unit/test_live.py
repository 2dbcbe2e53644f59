"""What was said of live objects is said again only if nothing about them is new."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dist_ckpt._saving.describe_live import (
    Live,
    LiveDescriptions,
    LiveObjects,
    _described,
    _signature,
    _Unfamiliar,
)
from dist_ckpt.training_state import CheckpointView, TrainingState, save_training_state


@contextmanager
def fake_world() -> Iterator[None]:
    """Be the only rank of a job."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.first(x)))


def made(optimizer: type = torch.optim.AdamW) -> tuple[Net, Any]:
    model = Net()
    made_by = optimizer(model.parameters(), lr=0.1)
    step(model, made_by)
    return model, made_by


def step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()


def objects(model: nn.Module, *optimizers: Any, **changes: Any) -> LiveObjects:
    fields = {"models": [model], "optimizers": optimizers, "replicas": None, "model_values": {}}
    return LiveObjects(**{**fields, **changes})  # type: ignore[arg-type]  # a table of fields


def same(one: Live, other: Live) -> bool:
    """Whether two descriptions say the same of the same memory."""
    shards = zip(one.shards, other.shards, strict=True)
    return (
        [shard.info for shard in one.shards] == [shard.info for shard in other.shards]
        and all(a.view.data_ptr() == b.view.data_ptr() for a, b in shards)  # type: ignore[union-attr]  # have data
        and one.parts.common == other.parts.common
        and one.documents == other.documents
        and one.steady == other.steady
    )


def test_taken_again_while_training_goes_on() -> None:
    """Steps change values in place: the description is the same object."""
    model, optimizer = made()
    descriptions = LiveDescriptions()

    first, *_ = descriptions.describe(objects(model, optimizer))
    step(model, optimizer)
    second, rests, _ = descriptions.describe(objects(model, optimizer))

    assert second is first
    assert rests == _described(objects(model, optimizer), [None])[1]


def test_groups_are_those_of_now() -> None:
    """What a scheduler changes is not remembered."""
    model, optimizer = made()
    descriptions = LiveDescriptions()
    descriptions.describe(objects(model, optimizer))
    optimizer.param_groups[0]["lr"] = 0.7

    _, (rest,), _ = descriptions.describe(objects(model, optimizer))

    assert rest["param_groups"][0]["lr"] == 0.7


def swap_data(model: Net, optimizer: Any) -> None:
    model.first.weight.data = model.first.weight.data.clone()


def new_parameter(model: Net, optimizer: Any) -> None:
    model.first.weight = nn.Parameter(torch.zeros(4, 3))


def cast(model: Net, optimizer: Any) -> None:
    model.second.to(torch.bfloat16)


def new_buffer(model: Net, optimizer: Any) -> None:
    model.norm.running_mean = torch.ones(2)


def another_buffer(model: Net, optimizer: Any) -> None:
    model.register_buffer("more", torch.ones(2))


def not_persistent(model: Net, optimizer: Any) -> None:
    model.norm._non_persistent_buffers_set.add("running_mean")


def renamed(model: Net, optimizer: Any) -> None:
    model.other = model.first
    del model.first
    model._modules = {"other": model.other, "second": model.second, "norm": model.norm}


def tied(model: Net, optimizer: Any) -> None:
    model.second.bias = model.norm.bias


def new_state(model: Net, optimizer: Any) -> None:
    optimizer.state[model.first.weight]["exp_avg"] = torch.ones(4, 3)


def less_state(model: Net, optimizer: Any) -> None:
    del optimizer.state[model.first.weight]


def another_state(model: Net, optimizer: Any) -> None:
    optimizer.state[model.first.weight]["more"] = torch.ones(4, 3)


def another_group(model: Net, optimizer: Any) -> None:
    extra = nn.Parameter(torch.zeros(2))
    model.extra = extra
    optimizer.add_param_group({"params": [extra]})


def transposed(model: Net, optimizer: Any) -> None:
    with torch.no_grad():
        model.first.weight.set_(model.first.weight.untyped_storage(), 0, (3, 4), (4, 1))


def strides(model: Net, optimizer: Any) -> None:
    with torch.no_grad():
        model.first.weight.set_(model.first.weight.untyped_storage(), 0, (4, 3), (1, 4))


def resized(model: Net, optimizer: Any) -> None:
    with torch.no_grad():
        model.norm.running_mean.resize_(5)
        model.norm.running_var.resize_(5)


def negative(model: Net, optimizer: Any) -> None:
    model.norm.running_mean = torch._neg_view(model.norm.running_mean)


def negative_data(model: Net, optimizer: Any) -> None:
    model.first.weight.data = torch._neg_view(model.first.weight.data)


def swapped_modules(model: Net, optimizer: Any) -> None:
    model.first, model.second = model.second, model.first


def swapped_buffers(model: Net, optimizer: Any) -> None:
    norm = model.norm
    norm.running_mean, norm.running_var = norm.running_var, norm.running_mean


def another_module(model: Net, optimizer: Any) -> None:
    model.norm = nn.BatchNorm1d(2)


def another_class(model: Net, optimizer: Any) -> None:
    model.first.__class__ = type("Own", (nn.Linear,), {})


def no_parameter(model: Net, optimizer: Any) -> None:
    model.first.bias = None


def another_dict(model: Net, optimizer: Any) -> None:
    model.first._parameters = {"weight": nn.Parameter(torch.zeros(4, 3)), "bias": None}


def exchanged_states(model: Net, optimizer: Any) -> None:
    state = optimizer.state[model.norm.weight]
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]


def shrunk_group(model: Net, optimizer: Any) -> None:
    optimizer.state.pop(optimizer.param_groups[0]["params"].pop())


def regrouped(model: Net, optimizer: Any) -> None:
    (group,) = optimizer.param_groups
    last = group["params"].pop()
    optimizer.param_groups.append({**group, "params": [last]})


CHANGES: tuple[Callable[[Net, Any], None], ...] = (
    swap_data, new_parameter, cast, new_buffer, another_buffer, not_persistent, renamed, tied,
    less_state, another_state, new_state, another_group, strides, resized, negative, negative_data,
    swapped_modules, swapped_buffers, another_module, another_class, no_parameter, another_dict,
    exchanged_states, shrunk_group, regrouped,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_is_new_is_noticed(change: Callable[[Net, Any], None]) -> None:
    """After a change the description is the one that would be made from nothing."""
    model, optimizer = made()
    descriptions = LiveDescriptions()
    before, *_ = descriptions.describe(objects(model, optimizer))
    change(model, optimizer)

    after, rests, _ = descriptions.describe(objects(model, optimizer))

    fresh, fresh_rests, _ = _described(objects(model, optimizer), [None])
    assert after is not before
    assert same(after, fresh)
    assert rests == fresh_rests


def test_another_shape_of_the_same_memory_is_noticed() -> None:
    """A parameter that is seen in another shape is another tensor."""
    model, _ = made()
    descriptions = LiveDescriptions()
    descriptions.describe(objects(model))
    transposed(model, None)

    after, *_ = descriptions.describe(objects(model))

    assert {s.info.global_shape for s in after.shards if s.info.key == "models.0.first.weight"} == {
        (3, 4)
    }


class Counting(torch.optim.SGD):
    """Has a number in its state that each step changes."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
        return result


def test_numbers_in_a_state_are_never_remembered() -> None:
    """They change without a sign that could be seen."""
    model, optimizer = made(Counting)
    descriptions = LiveDescriptions()
    first, *_ = descriptions.describe(objects(model, optimizer))
    step(model, optimizer)

    second, *_ = descriptions.describe(objects(model, optimizer))

    assert first.parts.common != second.parts.common
    assert same(second, _described(objects(model, optimizer), [None])[0])


def test_a_local_tensor_of_a_sharded_one_is_looked_at() -> None:
    """What a DTensor holds may be another tensor while it stays the same object."""
    with fake_world():
        mesh = init_device_mesh("cpu", (1,))
        model = nn.Linear(4, 4)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
        descriptions = LiveDescriptions()
        first, *_ = descriptions.describe(objects(model))
        assert descriptions.describe(objects(model))[0] is first

        local = model.weight._local_tensor
        model.weight._local_tensor = local.clone()
        second, *_ = descriptions.describe(objects(model))
        model.weight._spec = distribute_tensor(torch.zeros(4, 4), mesh, [Replicate()])._spec
        third, *_ = descriptions.describe(objects(model))

    assert first is not second
    assert second is not third
    assert local.data_ptr() in {one.view.data_ptr() for one in first.shards}  # type: ignore[union-attr]  # have data
    assert local.data_ptr() not in {one.view.data_ptr() for one in second.shards}  # type: ignore[union-attr]  # have data


def test_state_of_what_is_no_parameter_is_never_remembered() -> None:
    """Whose it is cannot be told."""
    model, optimizer = made()
    descriptions = LiveDescriptions()
    optimizer.state[torch.ones(2)] = {"more": torch.ones(2)}

    with pytest.raises(_Unfamiliar):
        _signature(objects(model, optimizer), [None])
    assert descriptions._live is None


def test_values_of_hooks_are_never_remembered() -> None:
    """Tensors that are given in place of a model's own are described as they come."""
    model, _ = made()
    descriptions = LiveDescriptions()
    first, *_ = descriptions.describe(objects(model))
    values = {0: {"first.weight": torch.full((4, 3), 7.0)}}

    second, *_ = descriptions.describe(objects(model, model_values=values))

    assert len(first.shards) > len(second.shards) == 1


def test_nothing_is_held_when_the_model_is_gone() -> None:
    """The memory of a model that nobody has any more is free."""
    model, optimizer = made()
    descriptions = LiveDescriptions()
    live, *_ = descriptions.describe(objects(model, optimizer))
    storage = weakref.ref(model.first.weight)
    watched = weakref.ref(live.shards[0].view)  # type: ignore[arg-type]  # has data
    del model, optimizer, live
    gc.collect()

    assert storage() is None
    assert watched() is None


def test_a_checkpoint_has_all_of_it(tmp_path: Any) -> None:
    """What is put together from a remembered part loads as what was live."""
    from dist_ckpt.background import BackgroundOptions, BackgroundSaver

    model, optimizer = made()
    with BackgroundSaver(BackgroundOptions(worker="thread")) as saver:
        for number in range(3):
            step(model, optimizer)
            optimizer.param_groups[0]["lr"] = 0.1 + number
            state = TrainingState(models=[model], optimizers=[optimizer], common={"n": number})
            save_training_state(tmp_path / f"{number}", state, saver=saver)
            saver.wait()

    other, other_optimizer = made()
    view = CheckpointView.open(tmp_path / "2")
    view.load_model(0, other)
    view.load_optimizer(0, other_optimizer, [other])

    assert view.common["n"] == 2
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)
    mine, loaded = optimizer.state_dict(), other_optimizer.state_dict()
    assert loaded["param_groups"] == mine["param_groups"]
    for index, values in mine["state"].items():
        for name, value in values.items():
            assert torch.equal(loaded["state"][index][name], value)
