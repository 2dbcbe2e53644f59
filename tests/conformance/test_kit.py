"""The conformance kit finds what is wrong: each broken backend fails the test made for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_ckpt.mapping import ShardedTensor, is_main_replica
from dist_ckpt.strategies.async_utils import AsyncRequest
from dist_ckpt.testing import StrategyConformance
from dist_ckpt.validation import StrictHandling
from tests.conformance._npz import (
    NpzAsyncSaveStrategy,
    NpzLoadStrategy,
    NpzSaveStrategy,
    collected,
    write,
)


class Kit(StrategyConformance):
    save_strategy: Any = NpzSaveStrategy("npz", 1)
    load_strategy: Any = NpzLoadStrategy()


class OneReplicaOnly(NpzSaveStrategy):
    """Saves what has an offset of 0: the rest of each tensor is missing."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        kept = {k: t for k, t in sharded_state_dict.items() if not any(t.global_offset)}
        super().save(kept, checkpoint_dir)


class Unaligned(NpzSaveStrategy):
    """Stores flattened ranges as if they began at 0."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        arrays, entries = collected(sharded_state_dict)
        flat = {t.key for t in sharded_state_dict.values() if t.flattened_range is not None}
        for entry in entries:
            if entry["key"] in flat and entry["array"] is not None:
                entry["offset"] = [0] * len(entry["shape"])
        write(arrays, entries, Path(checkpoint_dir))


class Narrow(NpzSaveStrategy):
    """Stores every value as bfloat16 would."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        for tensor in sharded_state_dict.values():
            if tensor.dtype == torch.float32:
                tensor.data = tensor.data.bfloat16().float()
        super().save(sharded_state_dict, checkpoint_dir)


class Shares(NpzAsyncSaveStrategy):
    """Copies only when it writes."""

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> AsyncRequest:
        directory = Path(checkpoint_dir)
        return AsyncRequest(lambda: write(*collected(sharded_state_dict), directory), (), [])


class ForgetsEmpty(NpzSaveStrategy):
    """Stores nothing of a tensor that has no elements."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        kept = {k: t for k, t in sharded_state_dict.items() if t.data.numel()}
        super().save(kept, checkpoint_dir)


class AcceptsAll(NpzLoadStrategy):
    def check_backend_compatibility(self, loaded_backend: str) -> None: ...
    def check_version_compatibility(self, loaded_version: int) -> None: ...


class Overlooks(NpzLoadStrategy):
    """Does not tell one of the tensors."""

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> dict[str, ShardedTensor]:
        found = super().load_tensors_metadata(checkpoint_dir)
        return dict(sorted(found.items())[:-1])


BROKEN = {
    "a part of each tensor": (
        {"save_strategy": OneReplicaOnly("npz", 1)},
        lambda kit, path: kit.test_any_layout_loads_any_other(path, "plain", (2, 4)),
    ),
    "flattened ranges in a wrong place": (
        {"save_strategy": Unaligned("npz", 1)},
        lambda kit, path: kit.test_any_layout_loads_any_other(path, "flattened", (2, 4)),
    ),
    "fewer bits": (
        {"save_strategy": Narrow("npz", 1)},
        lambda kit, path: kit.test_every_dtype_to_the_bit(path),
    ),
    "no empty tensors": (
        {"save_strategy": ForgetsEmpty("npz", 1)},
        lambda kit, path: kit.test_no_axes_and_no_elements(path),
    ),
    "copied too late": (
        {"save_strategy": Shares("npz", 1)},
        lambda kit, path: kit.test_an_asynchronous_save_stores_what_was_there(path),
    ),
    "every version accepted": (
        {"load_strategy": AcceptsAll()},
        lambda kit, path: kit.test_other_backends_and_versions_are_refused(path),
    ),
    "another name than the stored one": (
        {"save_strategy": type("Named", (NpzSaveStrategy,), {"__str__": lambda s: "x"})("npz", 1)},
        lambda kit, path: kit.test_other_backends_and_versions_are_refused(path),
    ),
    "a key not told": (
        {"load_strategy": Overlooks()},
        lambda kit, path: kit.test_what_is_stored_is_told(path),
    ),
    "missing keys not told": (
        {"load_strategy": Overlooks()},
        lambda kit, path: kit.test_strict_modes(path, StrictHandling.RETURN_ALL),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_backend_fails(tmp_path: Path, name: str) -> None:
    """The same test passes with the backend as it should be."""
    wrong, test = BROKEN[name]
    run: Callable[[Any, Path], None] = test
    (tmp_path / "good").mkdir()
    (tmp_path / "bad").mkdir()

    run(Kit(), tmp_path / "good")
    with pytest.raises(AssertionError):
        run(type("Broken", (Kit,), wrong)(), tmp_path / "bad")


def test_the_parameters_are_those_of_the_subclass() -> None:
    """Cases that are left out make no tests."""

    class Asked:
        fixturenames = ("tmp_path", "case", "world")

        def __init__(self) -> None:
            self.found: dict[str, Any] = {}

        def parametrize(self, name: str, values: Any, ids: Any) -> None:
            self.found[name] = dict(zip(ids, values, strict=True))

    class Few(Kit):
        cases = ("plain",)
        worlds = ((1, 3),)

    asked = Asked()
    Few().pytest_generate_tests(asked)

    assert asked.found == {"case": {"plain": "plain"}, "world": {"1to3": (1, 3)}}


def test_main_replicas_of_the_cases_are_complete() -> None:
    """Each case has something to save on every number of ranks that the kit uses."""
    from dist_ckpt.testing._states import CASES

    for name, case in CASES.items():
        for size in (1, 2, 3, 4):
            leaves = [
                leaf
                for rank in range(size)
                for value in case(rank, size).values()
                for leaf in (value if isinstance(value, list) else [value])
                if hasattr(leaf, "replica_id")
            ]
            assert any(is_main_replica(leaf.replica_id) for leaf in leaves), (name, size)
