"""The names of the seeds: modules, parameters in order, defaults. They do not move.

Ours may follow: a parameter we add is keyword-only, or stands last with a default.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch

NO = inspect.Parameter.empty
ANY = object()  # a default that is a function: only its being there counts
_STRATEGIES = {"sharded_strategy": None, "common_strategy": None, "validate_access_integrity": True}
_MAP = {"f": NO, "x": NO}
_TENSOR = {
    "key": NO, "data": NO, "dtype": NO, "local_shape": NO, "global_shape": NO,
    "global_offset": NO, "axis_fragmentations": NO, "replica_id": 0, "prepend_axis_num": 0,
    "allow_shape_mismatch": False, "flattened_range": None,
}  # fmt: skip
_STATE = {"sharded_state_dict": NO}

SEEDS: dict[str, dict[str, dict[str, Any]]] = {
    "serialization": {
        "load": {"sharded_state_dict": NO, "checkpoint_dir": NO, **_STRATEGIES},
        "load_common_state_dict": {"checkpoint_dir": NO},
        "load_plain_tensors": {"checkpoint_dir": NO},
        "load_sharded_objects": {"sharded_state_dict": NO, "checkpoint_dir": NO},
        "load_tensors_metadata": {"checkpoint_dir": NO, "sharded_strategy": None},
        "save": {"sharded_state_dict": NO, "checkpoint_dir": NO, **_STRATEGIES},
        "validate_sharding_integrity": {"sharded_tensors": NO},
    },
    "mapping": {
        "LocalNonpersitentObject": {"obj": NO},
        "LocalNonpersitentObject.unwrap": {},
        "ShardedObject": {
            "key": NO, "data": NO, "global_shape": NO, "global_offset": NO, "replica_id": 0,
        },
        "ShardedObject.without_data": {},
        "ShardedTensor": _TENSOR,
        "ShardedTensor.from_rank_offsets": {
            "key": NO, "data": NO, "rank_offsets": NO, "replica_id": 0, "prepend_axis_num": 0,
            "allow_shape_mismatch": False,
        },
        "ShardedTensor.global_coordinates": {},
        "ShardedTensor.global_slice": {},
        "ShardedTensor.init_data": {"device": NO, "init_fn": torch.empty},
        "ShardedTensor.local_coordinates": {},
        "ShardedTensor.max_allowed_chunks": {},
        "ShardedTensor.without_data": {},
        "ShardedTensorFactory": {
            "key": NO, "data": NO, "build_fn": NO, "merge_fn": NO, "replica_id": 0,
        },
        "ShardedTensorFactory.build": {},
        "apply_factories": _STATE,
        "apply_factory_merges": {"x1": NO, "x2": NO, "key": ()},
        "is_main_replica": {"replica_id": NO},
    },
    "optimizer": {
        "get_optim_param_to_id_map": {"optim_params_iter": NO},
        "get_param_id_to_sharded_param_map": {
            "model_sharded_state_dict": NO, "optim_params_iter": NO,
        },
        "make_sharded_optimizer_tensor": {"model_param": NO, "optim_param": NO, "prefix": NO},
        "optim_state_to_sharding_state": {
            "optim_state_dict": NO, "id_to_sharded_param_map": NO, "exclude_keys": (),
        },
    },
    "core": {
        "CheckpointingConfig": {
            "sharded_backend": NO, "sharded_backend_version": 1, "common_backend": "torch",
            "common_backend_version": 1,
        },
        "CheckpointingException": {"message": ""},
        "check_is_distributed_checkpoint": {"checkpoint_dir": NO},
        "maybe_load_config": {"checkpoint_dir": NO},
        "save_config": {"config": NO, "checkpoint_dir": NO},
    },
    "dict_utils": {
        "dict_list_map_inplace": _MAP,
        "dict_list_map_outplace": _MAP,
        "dict_map": {"f": NO, "d": NO},
        "dict_map_with_key": {"f": NO, "d": NO},
        "diff": {"x1": NO, "x2": NO, "prefix": ()},
        "extract_matching_values": {"x": NO, "predicate": NO, "return_lists_as_dicts": False},
        "inspect_types": {"x": NO, "prefix": (), "indent": 4},
        "map_reduce": {"xs": NO, "key_fn": ANY, "value_fn": ANY, "reduce_fn": ANY},
        "merge": {"x1": NO, "x2": NO, "key": ()},
        "nested_items_iter": {"x": NO},
        "nested_values": {"x": NO},
    },
    "utils": {
        "add_prefix_for_sharding": {"sharded_state_dict": NO, "prefix": NO},
        "apply_prefix_mapping": {"sharded_state_dict": NO, "prefix_map": NO},
        "extract_nonpersistent": _STATE,
        "extract_sharded_base": _STATE,
        "extract_sharded_tensors": _STATE,
        "extract_sharded_tensors_and_factories": _STATE,
        "extract_sharded_tensors_or_nonpersistent": _STATE,
        "replace_prefix_for_sharding": {
            "sharded_state_dict": NO, "old_prefix": NO, "new_prefix": NO,
        },
    },
}  # fmt: skip

# Named by the seeds, built by a later change; the day one of them is there it leaves this list.
PENDING = frozenset({"serialization.load_sharded_objects"})

CASES = [
    pytest.param(module, name, parameters, id=f"{module}.{name}")
    for module, names in SEEDS.items()
    for name, parameters in names.items()
    if f"{module}.{name}" not in PENDING
]


def find(module: str, name: str) -> Any:
    found = importlib.import_module(f"dist_ckpt.{module}")
    for part in name.split("."):
        found = getattr(found, part)
    return found


def parameters_of(function: Any) -> dict[str, inspect.Parameter]:
    parameters = dict(inspect.signature(function).parameters)
    parameters.pop("self", None)
    return parameters


@pytest.mark.parametrize(("module", "name", "seed"), CASES)
def test_parameters_and_defaults(module: str, name: str, seed: dict[str, Any]) -> None:
    """The seed's parameters come first, in its order and with its defaults."""
    parameters = parameters_of(find(module, name))

    assert list(parameters)[: len(seed)] == list(seed)
    for parameter, default in seed.items():
        found = parameters[parameter].default
        assert found is not NO if default is ANY else found == default, parameter


@pytest.mark.parametrize(("module", "name", "seed"), CASES)
def test_our_own_parameters_are_optional(module: str, name: str, seed: dict[str, Any]) -> None:
    """A call written for the seed's signature works with ours."""
    extra = list(parameters_of(find(module, name)).values())[len(seed) :]

    for parameter in extra:
        assert parameter.default is not NO or parameter.kind is parameter.VAR_KEYWORD, parameter


@pytest.mark.parametrize("pending", sorted(PENDING))
def test_pending_names_are_pending(pending: str) -> None:
    """The list of what is not there yet does not outlive its truth."""
    module, name = pending.split(".")

    assert not hasattr(importlib.import_module(f"dist_ckpt.{module}"), name)


def test_both_spellings_are_one_class() -> None:
    """The seeds' spelling is kept, and ours beside it."""
    assert find("mapping", "LocalNonpersitentObject") is find("mapping", "LocalNonpersistentObject")
