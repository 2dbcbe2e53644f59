"""Unit tests of dist_ckpt.optimizer."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch

from dist_ckpt.errors import InvalidShardingError, OptimizerShapeError
from dist_ckpt.mapping import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory
from dist_ckpt.optimizer import (
    KEEP_VARS_HINT,
    get_optim_param_to_id_map,
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
)


def stepped(
    *shapes: tuple[int, ...], **options: Any
) -> tuple[torch.optim.Optimizer, list[torch.nn.Parameter]]:
    """Build an Adam that has taken a step, and its parameters."""
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = torch.optim.AdamW(params, **options)
    sum(param.sum() for param in params).backward()  # type: ignore[union-attr]
    optimizer.step()
    return optimizer, params


def sharded(params: list[torch.nn.Parameter]) -> dict[str, Any]:
    """Build the second of two shards of each parameter."""
    return {
        f"p{i}": ShardedTensor.from_rank_offsets(f"p{i}", p, *([(0, 1, 2)] if p.ndim else []))
        for i, p in enumerate(params)
    }


def halves(data: torch.Tensor | None) -> ShardedTensorFactory:
    """Build a factory for data."""
    return ShardedTensorFactory("f", data, lambda *_: {}, torch.cat)


def test_tied_parameters_keep_their_first_index() -> None:
    """A parameter that is listed twice has one id."""
    a, b = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))

    assert get_optim_param_to_id_map(iter([a, b, a])) == {id(a): 0, id(b): 1}


def test_sharded_params_are_found_by_identity() -> None:
    """In any nesting; factories too; the last of several; others are ignored."""
    a, b, c = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    first, last, other = (ShardedTensor.from_rank_offsets(k, p) for k, p in
                          (("1", a), ("2", a), ("3", c)))  # fmt: skip
    factory = halves(b)

    found = get_param_id_to_sharded_param_map(
        {"m": [first, {"x": last}], "f": factory, "c": other, "n": 1}, iter([a, b])
    )

    assert found == {0: last, 1: factory}
    assert found[0] is last


def test_nothing_found_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """It usually means that keep_vars was forgotten."""
    param = torch.nn.Parameter(torch.ones(2))

    with caplog.at_level(logging.WARNING):
        found = get_param_id_to_sharded_param_map(sharded([param.detach()]), [param])  # type: ignore[list-item]

    assert found == {}
    assert KEEP_VARS_HINT in caplog.text


def test_state_tensor_is_sharded_like_its_parameter() -> None:
    """With a dtype of its own."""
    model = ShardedTensor.from_rank_offsets("w", torch.ones(2, 3).bfloat16(), (0, 1, 2))
    state = torch.zeros(2, 3)

    x = make_sharded_optimizer_tensor(model, state, "optimizer.state.m")

    assert isinstance(x, ShardedTensor)
    assert (x.key, x.data, x.dtype) == ("optimizer.state.m.w", state, torch.float32)
    assert (x.global_shape, x.global_offset) == ((4, 3), (2, 0))
    assert model.key == "w"


def test_state_of_a_factory_gets_the_factory() -> None:
    """The same transformation serves the state."""
    state = torch.zeros(2)

    x = make_sharded_optimizer_tensor(halves(torch.ones(2)), state, "o")

    assert isinstance(x, ShardedTensorFactory)
    assert (x.key, x.data) == ("o.f", state)


def test_state_of_a_flattened_parameter_is_flat() -> None:
    """Its shape is compared with that of the range."""
    model = ShardedTensor.from_rank_offsets_flat(
        "w", torch.ones(4), (2, 3), flattened_range=slice(1, 5)
    )

    x = make_sharded_optimizer_tensor(model, torch.zeros(4), "o")

    assert isinstance(x, ShardedTensor)
    assert x.flattened_range == slice(1, 5)


class FakeDTensor(torch.Tensor):
    """A tensor that, like a DTensor, has a local part: its first two rows."""

    def to_local(self) -> torch.Tensor:
        """Return the local part."""
        return self.as_subclass(torch.Tensor)[:2]


def test_of_a_dtensor_the_local_part_is_taken() -> None:
    """The global shape comes from the parameter."""
    model = ShardedTensor.from_rank_offsets("w", torch.ones(2, 3), (0, 1, 2))

    x = make_sharded_optimizer_tensor(model, torch.ones(4, 3).as_subclass(FakeDTensor), "o")

    assert isinstance(x.data, torch.Tensor)
    assert type(x.data) is torch.Tensor
    assert x.data.shape == (2, 3)


def test_another_shape_is_refused() -> None:
    """The error names both shapes and the key."""
    model = ShardedTensor.from_rank_offsets("w", torch.ones(2, 3))

    with pytest.raises(AssertionError, match=r"\(\(3,\)\) does not match .*\(\(2, 3\)\).*o.w"):
        make_sharded_optimizer_tensor(model, torch.zeros(3), "o")
    assert issubclass(OptimizerShapeError, InvalidShardingError)


def test_adam_state_dict_becomes_sharded_in_place() -> None:
    """Moments are sharded, the 0-dim step stays common, params are not stored."""
    optimizer, params = stepped((2, 3), (4,), amsgrad=True)
    state_dict = optimizer.state_dict()
    id_map = get_param_id_to_sharded_param_map(sharded(params), params)

    optim_state_to_sharding_state(state_dict, id_map, exclude_keys=("max_exp_avg_sq",))

    state = state_dict["state"]
    assert set(state[0]) == {"step", "exp_avg", "exp_avg_sq"}
    assert state[0]["exp_avg"].key == "optimizer.state.exp_avg.p0"
    assert state[1]["exp_avg_sq"].global_shape == (8,)
    assert state[0]["exp_avg"].data is optimizer.state[params[0]]["exp_avg"]
    assert isinstance(state[0]["step"], torch.Tensor)
    params_entry = state_dict["param_groups"][0]["params"]
    assert isinstance(params_entry, LocalNonpersistentObject)
    assert params_entry.unwrap() == [0, 1]


def test_the_optimizer_itself_is_not_touched() -> None:
    """Groups are copied and the states are in new dicts."""
    optimizer, params = stepped((2, 3), lr=torch.tensor(0.5))
    lent = {"state": {0: dict(optimizer.state[params[0]])}, "param_groups": [
        {"lr": torch.tensor(0.5), "params": [0]}]}  # fmt: skip
    inner_state, inner_group = lent["state"], lent["param_groups"][0]  # type: ignore[index]

    optim_state_to_sharding_state(
        lent,
        get_param_id_to_sharded_param_map(sharded(params), params),  # type: ignore[arg-type]
    )

    assert isinstance(inner_state[0]["exp_avg"], torch.Tensor)  # type: ignore[index]
    assert inner_group["params"] == [0]
    assert lent["param_groups"][0]["lr"] is not inner_group["lr"]  # type: ignore[index]


def test_plain_values_and_zero_dim_states_stay_common() -> None:
    """Except that the state of a 0-dim parameter has its shape and is sharded like it."""
    scalar = ShardedTensor.from_rank_offsets("s", torch.tensor(1.0))
    weight = ShardedTensor.from_rank_offsets("w", torch.ones(2))
    zero = torch.tensor(0.0)
    state_dict = {
        "state": {
            0: {"exp_avg": zero},
            1: {"step": zero, "n": 5, "none": None},
            2: {"step": zero},
            3: {"exp_avg": zero},
            4: {"step": zero},
        },
        "param_groups": [],
    }
    factories = {2: halves(torch.ones(2)), 3: halves(zero), 4: halves(None)}

    optim_state_to_sharding_state(state_dict, {0: scalar, 1: weight, **factories})  # type: ignore[arg-type]

    state: Any = state_dict["state"]
    assert state[0]["exp_avg"].key == "optimizer.state.exp_avg.s"
    assert state[1] == {"step": zero, "n": 5, "none": None}
    assert state[2]["step"] is zero
    assert state[3]["exp_avg"].key == "optimizer.state.exp_avg.f"
    assert state[4]["step"] is zero


class ScalarDTensor(torch.Tensor):
    """A 0-dim tensor that, like a replicated DTensor, has a local part."""

    def to_local(self) -> torch.Tensor:
        """Return the local part."""
        return self.as_subclass(torch.Tensor)


def test_of_a_common_dtensor_the_local_part_is_stored() -> None:
    """A 0-dim step may be a DTensor, too."""
    weight = ShardedTensor.from_rank_offsets("w", torch.ones(2))
    step = torch.tensor(3.0).as_subclass(ScalarDTensor)
    state_dict: dict[str, Any] = {"state": {0: {"step": step}}, "param_groups": []}

    optim_state_to_sharding_state(state_dict, {0: weight})

    assert type(state_dict["state"][0]["step"]) is torch.Tensor


def test_unknown_parameters_are_refused_before_anything_changes() -> None:
    """All are named; those of which every state is excluded do not matter."""
    state_dict: dict[str, Any] = {
        "state": {3: {"m": torch.ones(1)}, 4: {"m": torch.ones(1)}, 5: {"x": 1}},
        "param_groups": [{"params": [3, 4, 5]}],
    }
    before = copy.copy(state_dict)

    with pytest.raises(ValueError, match="Param id 3, 4 does not match any model sharded param"):
        optim_state_to_sharding_state(state_dict, {}, exclude_keys=("x",))

    assert state_dict["state"] is before["state"]
    assert state_dict["param_groups"] == [{"params": [3, 4, 5]}]
