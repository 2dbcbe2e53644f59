"""What every backend must do, as tests that its author runs.

Here: ``StrategyConformance``. Not here: the matrix of states and ranks (``testing._matrix``), ranks
(``testing.world``). Called by pytest, which is not imported.

A backend that passes can stand wherever ours do: on any layout, under every strict mode, and with
nothing committed when a rank fails. docs/extending.md shows a whole one.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from typing import TYPE_CHECKING, Any

import torch

from dist_ckpt.core import CONFIG_FNAME
from dist_ckpt.errors import (
    CheckpointingException,
    CheckpointNotFoundError,
    InvalidShardingError,
    MismatchError,
)
from dist_ckpt.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from dist_ckpt.options import LoadOptions
from dist_ckpt.serialization import (
    get_default_load_sharded_strategy,
    load_common_state_dict,
    load_content_metadata,
    load_sharded_metadata,
    load_tensors_metadata,
)
from dist_ckpt.strategies.base import AsyncSaveShardedStrategy, StrategyAction, get_default_strategy
from dist_ckpt.testing._matrix import StrategyMatrix, require
from dist_ckpt.testing._states import CASES, cleared, differences, expected, random_bits
from dist_ckpt.validation import StrictHandling

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from dist_ckpt.strategies.base import SaveShardedStrategy
    from dist_ckpt.types import Communicator, ShardedStateDict

__all__ = ["StrategyConformance", "StrategyMatrix"]

_DAMAGES = ("removed", "cut short", "emptied")


class StrategyConformance(StrategyMatrix):
    """All that is asked of a backend: the matrix, values, strict modes, failures and damage.

    Attributes:
        dtypes: Element types that it stores.
        strict_flags: What is tried of ``StrictHandling``.
        damages: What is done to files: each of ``removed``, ``cut short`` and ``emptied``.
        dispensable: Names of files without which a checkpoint is whole.
    """

    dtypes: Sequence[torch.dtype] = (
        torch.bool,
        torch.uint8,
        torch.int16,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    )
    strict_flags = tuple(StrictHandling)
    damages: Sequence[str] = _DAMAGES
    dispensable: Sequence[str] = ()

    def test_every_dtype_to_the_bit(self, tmp_path: Path) -> None:
        """Any bits of each type survive."""
        self._all_ok(functools.partial(self._every_dtype, tmp_path / "c"), 2)

    def _every_dtype(self, target: Path, comm: Communicator) -> None:
        wholes = {str(dtype): random_bits(dtype, 4, 3) for dtype in self.dtypes}

        def state() -> ShardedStateDict:
            return {
                name: ShardedTensor.from_rank_offsets(
                    name, whole.chunk(comm.size)[comm.rank].clone(), (0, comm.rank, comm.size)
                )
                for name, whole in wholes.items()
            }

        self._save(state(), target, comm)
        loaded = self._load(cleared(state()), target, comm)
        problems = differences(expected(state()), loaded)
        require(not problems, f"rank {comm.rank}: {problems}")

    def test_no_axes_and_no_elements(self, tmp_path: Path) -> None:
        """A tensor without axes has one value; one without elements has a shape and a type."""
        self._all_ok(functools.partial(self._odd_shapes, tmp_path / "c"), 2)

    def _odd_shapes(self, target: Path, comm: Communicator) -> None:
        def state() -> ShardedStateDict:
            make, replica_id = ShardedTensor.from_rank_offsets, comm.rank
            return {
                "scalar": make("scalar", torch.tensor(2.5), replica_id=replica_id),
                "any scalar": make("any scalar", torch.tensor(3), replica_id=9, writer="any"),
                "empty": make("empty", torch.empty(0, 4), replica_id=replica_id),
                "any empty": make("any empty", torch.empty(3, 0), replica_id=9, writer="any"),
            }

        self._save(state(), target, comm)
        loaded = self._load(cleared(state()), target, comm)
        problems = differences(expected(state()), loaded)
        require(not problems, f"rank {comm.rank}: {problems}")

    def test_common_values_keep_their_types(self, tmp_path: Path) -> None:
        """Rank 0's values come back on every rank as what they were."""
        target = tmp_path / "c"
        self._all_ok(functools.partial(self._common_values, target), 2)
        found = load_common_state_dict(target)
        problems = differences({**_values(0), "content_metadata": {"kind": 1}}, found)
        require(not problems, str(problems))
        require(load_content_metadata(target) == {"kind": 1}, "content_metadata was lost")

    def _common_values(self, target: Path, comm: Communicator) -> None:
        state = {**_values(comm.rank), "x": _whole("x", 1.0, comm)}
        self._save(state, target, comm, content_metadata={"kind": 1})
        loaded = self._load({"x": _whole("x", 0.0, comm)}, target, comm)
        wanted = {**_values(0), "content_metadata": {"kind": 1}, "x": torch.full((4,), 1.0)}
        problems = differences(wanted, loaded)
        require(not problems, f"rank {comm.rank}: {problems}")

    def test_strict_modes(self, tmp_path: Path, strict: StrictHandling) -> None:
        """A key that only one side has is ignored, told, returned or refused, as asked."""
        self._all_ok(functools.partial(self._saved, tmp_path / "c", ("a", "b"), 1.0), 2)
        self._all_ok(functools.partial(self._strictly, tmp_path / "c", strict), 2)

    def _strictly(self, target: Path, strict: StrictHandling, comm: Communicator) -> None:
        whole = functools.partial(_whole, comm=comm)
        only = {"a": whole("a", 0.0)}
        # `c` is asked for by the last rank alone: what is unexpected is its own business.
        is_last = comm.rank == comm.size - 1
        more = {**only, "c": whole("c", 0.0, replica_id=0)} if is_last else dict(only)
        word, _, what = strict.value.partition("_")
        if word in ("assume", "raise"):
            told = _raised(lambda: self._load(more, target, comm, strict=strict))
            require(isinstance(told, MismatchError) and "'c'" in str(told), f"{told!r}")
        if strict.value == "raise_all":
            told = _raised(lambda: self._load(only, target, comm, strict=strict))
            require(isinstance(told, MismatchError) and "b" in str(told), f"{told!r}")
            return
        request = only if word in ("assume", "raise") else more
        loaded = self._load(request, target, comm, strict=strict)
        if word == "return":
            loaded, missing, unexpected = loaded
            lacking = {"b"} if what == "all" else set()
            require(missing == lacking, f"missing: {missing}, expected {lacking}")
            odd = {"c"} if is_last else set()
            require(unexpected == odd, f"unexpected: {unexpected}, expected {odd}")
        problems = differences({"a": torch.full((4,), 1.0), "step": 1.0}, loaded)
        require(not problems, f"rank {comm.rank}: {problems}")

    def _saved(self, target: Path, keys: Sequence[str], value: float, comm: Communicator) -> None:
        state = {key: _whole(key, value, comm) for key in keys}
        self._save({**state, "step": value}, target, comm)

    def _read(self, target: Path, keys: Sequence[str], comm: Communicator) -> set[float]:
        loaded = self._load({key: _whole(key, -1.0, comm) for key in keys}, target, comm)
        return {loaded["step"], *(float(v) for key in keys for v in loaded[key])}

    def test_another_shape_or_type_is_refused(self, tmp_path: Path) -> None:
        """What is asked for is not what is stored: told on every rank, with the key."""
        target = tmp_path / "c"
        self._all_ok(functools.partial(self._saved, target, ("a",), 1.0), 2)
        options = LoadOptions(cast="error")
        for other in (torch.zeros(5), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32)):
            job = functools.partial(self._ask, target, other, options=options)
            for error in self._all_raise(job, 2):
                require(isinstance(error, MismatchError) and "'a'" in str(error), f"{error!r}")

    def _ask(
        self, target: Path, tensor: torch.Tensor, comm: Communicator, **more: Any
    ) -> torch.Tensor:
        shard = ShardedTensor.from_rank_offsets("a", tensor.clone(), replica_id=comm.rank)
        found: torch.Tensor = self._load({"a": shard}, target, comm, **more)["a"]
        return found

    def test_another_type_is_converted_unless_that_is_an_error(self, tmp_path: Path) -> None:
        """The values are those that are stored, in the type that is asked for."""
        self._all_ok(functools.partial(self._saved, tmp_path / "c", ("a",), 1.5), 2)
        for dtype in (torch.float64, torch.bfloat16):
            wanted = torch.zeros(4, dtype=dtype)
            job = functools.partial(self._ask, tmp_path / "c", wanted)
            for found in self._all_ok(job, 2):
                problems = differences(torch.full((4,), 1.5, dtype=dtype), found)
                require(not problems, f"{dtype}: {problems}")

    def test_what_is_stored_is_told(self, tmp_path: Path) -> None:
        """Shapes, types and objects can be read without data, and without other ranks."""
        self._all_ok(functools.partial(self._save_case, tmp_path / "c", "replicated"), 2)
        found = load_tensors_metadata(tmp_path / "c", self.load_strategy)
        shapes = {"main": (3, 4), "late main": (4,), "any": (9, 2), "first": (2, 2)}
        shapes["pairs"] = (12, 2)
        require({key: one.global_shape for key, one in found.items()} == shapes, f"{found}")
        require(all(one.dtype == torch.float32 for one in found.values()), f"{found}")
        require(all(one.data is None for one in found.values()), "data was read")
        if "objects" not in self.cases:
            return
        self._all_ok(functools.partial(self._save_case, tmp_path / "o", "objects"), 2)
        stored = load_sharded_metadata(tmp_path / "o", self.load_strategy)
        keys = {one.unique_key for one in stored.values() if isinstance(one, ShardedObject)}
        cells = {f"some/cells/shard_{n}_12" for n in range(12)} | {"shared/shard_0_1"}
        require(keys == cells, f"objects: {keys}")

    def test_a_second_save_replaces_the_first(self, tmp_path: Path) -> None:
        """Nothing of the old checkpoint is left: no key, no file beside it."""
        target = tmp_path / "c"
        self._all_ok(functools.partial(self._saved, target, ("a", "b"), 1.0), 4)
        self._all_ok(functools.partial(self._saved, target, ("b",), 2.0), 2)
        (values,) = self._all_ok(functools.partial(self._read, target, ("b",)))
        require(values == {2.0}, f"{values}")
        require(set(load_tensors_metadata(target, self.load_strategy)) == {"b"}, "old keys")
        require([path.name for path in tmp_path.iterdir()] == ["c"], "left over")

    def test_a_rank_that_fails_fails_the_save(self, tmp_path: Path) -> None:
        """Every rank is told; nothing is committed, and an older checkpoint is as it was."""
        for target, old in ((tmp_path / "new", False), (tmp_path / "c", True)):
            if old:
                self._all_ok(functools.partial(self._saved, target, ("a",), 1.0), 2)
            for error in self._all_raise(functools.partial(self._fail_to_save, target), 2):
                require("of no use" in str(error), f"the cause is not told: {error!r}")
            require((target / CONFIG_FNAME).exists() == old, "a marker of a failed save")
        require([path.name for path in tmp_path.iterdir()] == ["c"], "left over")
        (values,) = self._all_ok(functools.partial(self._read, tmp_path / "c", ("a",)))
        require(values == {1.0}, f"{values}")

    def _fail_to_save(self, target: Path, comm: Communicator) -> Any:
        factory = ShardedTensorFactory("f", torch.ones(1), _of_no_use, lambda loaded: loaded)
        state: ShardedStateDict = {"a": _whole("a", 2.0, comm), "step": 2.0}
        return self._save(state | ({"f": factory} if comm.rank == 1 else {}), target, comm)

    def test_shards_that_do_not_tile_are_refused(self, tmp_path: Path) -> None:
        """Two main replicas, or none, are an error on every rank before anything is stored."""
        for replica_id in (0, 1):
            job = functools.partial(self._save_replicas, tmp_path / "c", replica_id)
            self._all_raise(job, 2, InvalidShardingError)
        require(list(tmp_path.iterdir()) == [], "left over")

    def _save_replicas(self, target: Path, replica_id: int, comm: Communicator) -> Any:
        shard = ShardedTensor.from_rank_offsets("a", torch.ones(3), replica_id=replica_id)
        return self._save({"a": shard}, target, comm)

    def test_a_rank_that_fails_fails_the_load(self, tmp_path: Path) -> None:
        """What one rank raises while it loads is raised on all of them."""
        self._all_ok(functools.partial(self._save_case, tmp_path / "c", "factories"), 2)
        job = functools.partial(self._fail_to_load, tmp_path / "c")
        for error in self._all_raise(job, 2):
            require("of no use" in str(error), f"the cause is not told: {error!r}")

    def _fail_to_load(self, target: Path, comm: Communicator) -> Any:
        request = cleared(CASES["factories"](comm.rank, comm.size))
        if comm.rank == 1:
            request["fc"] = dataclasses.replace(request["fc"], merge_fn=_of_no_use)
        return self._load(request, target, comm)

    def test_damage_is_an_error(self, tmp_path: Path, damage: str) -> None:
        """A data file that is gone or cut short is told on every rank; no wrong value comes out."""
        whole = tmp_path / "whole"
        self._all_ok(functools.partial(self._saved, whole, ("a",), 1.0), 2)
        files = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())
        # Without the manifest nothing tells of files that are gone; with it, all do.
        for number, name in enumerate(file for file in files if file.name != "manifest.json"):
            target = tmp_path / str(number)
            shutil.copytree(whole, target)
            path = target / name
            if damage == "removed" and path.name in self.dispensable:
                continue
            nbytes = path.stat().st_size
            if damage == "removed" or nbytes == 0:
                path.unlink()
            else:
                path.write_bytes(path.read_bytes()[: 0 if damage == "emptied" else nbytes // 2])
            self._all_raise(functools.partial(self._read, target, ("a",)), 2)

    def test_a_checkpoint_without_marker_is_none(self, tmp_path: Path) -> None:
        """``metadata.json`` alone makes a checkpoint one."""
        self._all_ok(functools.partial(self._saved, tmp_path / "c", ("a",), 1.0), 2)
        (tmp_path / "c" / CONFIG_FNAME).unlink()
        job = functools.partial(self._read, tmp_path / "c", ("a",))
        self._all_raise(job, 2, CheckpointNotFoundError)

    def test_other_backends_and_versions_are_refused(self, tmp_path: Path) -> None:
        """The load strategy says no to what it does not read, and so does ``load``."""
        target = tmp_path / "c"
        self._all_ok(functools.partial(self._saved, target, ("a",), 1.0), 2)
        marker = json.loads((target / CONFIG_FNAME).read_bytes())
        backend, version = marker["sharded_backend"], marker["sharded_backend_version"]
        _check_identity(self.save_strategy, backend, version)
        strategy = self.load_strategy
        if strategy is None:
            strategy = get_default_load_sharded_strategy(target)
        elif isinstance(strategy, tuple):
            strategy = get_default_strategy(StrategyAction.LOAD_SHARDED, *strategy)
        strategy.check_backend_compatibility(backend)
        strategy.check_version_compatibility(version)
        for check in (
            lambda: strategy.check_backend_compatibility("of nobody"),
            lambda: strategy.check_version_compatibility(999),
        ):
            told = _raised(check)
            require(isinstance(told, CheckpointingException), f"not refused: {told!r}")
        for change in ({"sharded_backend": "of nobody"}, {"sharded_backend_version": 999}):
            (target / CONFIG_FNAME).write_text(json.dumps(marker | change))
            self._all_raise(functools.partial(self._read, target, ("a",)), 2)

    def test_an_asynchronous_save_stores_what_was_there(self, tmp_path: Path) -> None:
        """Later changes do not reach the checkpoint; nothing is visible before it is finished."""
        strategy = self.save_strategy
        if isinstance(strategy, tuple):
            strategy = get_default_strategy(StrategyAction.SAVE_SHARDED, *strategy)
        if isinstance(strategy, AsyncSaveShardedStrategy):
            self._all_ok(functools.partial(self._save_and_change, tmp_path / "c"), 2)
            (values,) = self._all_ok(functools.partial(self._read, tmp_path / "c", ("a",)))
            require(values == {1.0}, f"changed after the call: {values}")
            require([path.name for path in tmp_path.iterdir()] == ["c"], "left over")

    def _save_and_change(self, target: Path, comm: Communicator) -> None:
        data, common = torch.full((4,), 1.0), {"kept": [1.0, torch.ones(1)]}
        shard = ShardedTensor.from_rank_offsets("a", data, replica_id=comm.rank)
        state = {"a": shard, "common": common, "step": 1.0}
        request = self._save(state, target, comm, async_sharded_save=True)
        data.fill_(5.0)
        common["kept"][1].fill_(5.0)  # type: ignore[attr-defined]  # a tensor
        common["kept"].append(5.0)
        comm.broadcast("looking", lambda: require(not target.exists(), "visible too early"))
        request.execute_sync()
        found = load_common_state_dict(target)["common"]
        problems = differences({"kept": [1.0, torch.ones(1)]}, found)
        require(not problems, f"changed after the call: {problems}")


def _raised(do: Callable[[], object]) -> BaseException | None:
    try:
        do()
    except CheckpointingException as error:
        return error
    return None


def _of_no_use(*_: Any) -> Any:
    raise ZeroDivisionError("of no use")


def _whole(key: str, value: float, comm: Communicator, **options: Any) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(
        key, torch.full((4,), value), **{"replica_id": comm.rank, **options}
    )


def _values(rank: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "none": None,
        "numbers": [True, -1, 2**70, 0.1, float("inf"), float("nan"), 1 + 2j],
        "text": "\u00fc",
        "raw": b"\x00\xff",
        "pair": ("x", (1, 2)),
        "by number": {1: "one", 2: {"deep": []}},
        "tensor": torch.arange(3, dtype=torch.bfloat16),
    }


def _check_identity(
    strategy: SaveShardedStrategy | tuple[str, int], backend: str, version: int
) -> None:
    told: Mapping[str, Any] = (
        {"backend": strategy[0], "version": strategy[1]}
        if isinstance(strategy, tuple)
        else {"backend": strategy.backend, "version": strategy.version}
    )
    require(told == {"backend": backend, "version": version}, f"{told} is stored otherwise")
    if not isinstance(strategy, tuple):
        name = f"{type(strategy).__name__}({backend}, {version})"
        require(str(strategy) == name, f"{strategy} is told as {strategy}, not {name}")
