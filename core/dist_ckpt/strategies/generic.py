"""Strategies of others, driven by the way of a save and of a load.

Here: a strategy object seen as a format and as a source. Not here: our own strategies, which are
formats themselves (``strategies.native``). A strategy may exchange with other ranks on its own, so
it is called outside of our exchanges, on every rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from dist_ckpt._comm.outcome import Outcome, attempt
from dist_ckpt._comm.tensors import can_be_filled
from dist_ckpt._formats.base import SavePlan, Written
from dist_ckpt._loading.execute import Source
from dist_ckpt._saving.execute import write_common
from dist_ckpt._sharding.assign import writers_of_boxes
from dist_ckpt._sharding.table import local_shards
from dist_ckpt._staging_pool.memory import cast, copy_cast
from dist_ckpt.errors import ConfigError, CorruptedCheckpointError, MismatchError
from dist_ckpt.strategies.async_utils import AsyncRequest, staged_args
from dist_ckpt.strategies.base import AsyncSaveShardedStrategy, handles_objects

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from dist_ckpt._formats.base import WriteJob, WriteResult
    from dist_ckpt._saving.execute import SaveInSteps
    from dist_ckpt._sharding.index import StoredTensor
    from dist_ckpt._sharding.split import SaveParts
    from dist_ckpt._sharding.together import JobTable
    from dist_ckpt.box import Box
    from dist_ckpt.mapping import ShardedObject, ShardedTensor
    from dist_ckpt.strategies.base import (
        LoadCommonStrategy,
        LoadShardedStrategy,
        SaveCommonStrategy,
        SaveShardedStrategy,
    )
    from dist_ckpt.types import ShardedStateDict

__all__ = ["StrategyFormat", "async_request", "strategy_source"]


class StrategyFormat:
    """A save strategy as a format.

    Args:
        strategy: Saves the tensors, and the objects if it can.
        common: Saves the objects if ``strategy`` cannot.
    """

    common_backend = ("json", 1)
    stores_common = False
    is_collective = True

    def __init__(self, strategy: SaveShardedStrategy, common: SaveCommonStrategy) -> None:
        """Take backend and version from the strategy."""
        self.backend, self.version = strategy.backend, strategy.version
        self.strategy, self._common = strategy, common

    def plan(self, job: JobTable, directory: Path) -> SavePlan:  # noqa: ARG002 - the strategy's own business
        """Choose a main replica where none was named; the strategy plans the rest. Rank 0.

        The lowest rank is as good as any other; to spread the work is a wrapper's business.
        """
        work: list[set[int]] = [set() for _ in job.views]
        held: set[tuple[str, Box]] = set()
        for _, _, writers in writers_of_boxes(job):
            rank, index = writers[0]
            work[rank].add(index)
        for rank, view in enumerate(job.views):
            for index, info in enumerate(view):
                # Shards without elements are written by nobody else, but a strategy may note them.
                if not info.box.numel and (info.key, info.box) not in held:
                    held.add((info.key, info.box))
                    work[rank].add(index)
        return SavePlan(work=[frozenset(one) for one in work], num_results=0)

    def sources(self, work: object) -> Collection[int]:
        """Refuse: what a strategy reads is its own business.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(f"{self.strategy} saves in the caller's thread only, not {work!r} later.")

    def pass_on(self, job: WriteJob) -> None:
        """Do nothing."""

    def write(self, job: WriteJob) -> Written:
        """Let the strategy save. Every rank."""
        self.strategy.save(self.sharded(job.parts, job.work), job.directory)
        return self.write_objects(job.parts, job.directory)

    def write_objects(self, parts: Any, directory: Path) -> Written:
        """Let the common strategy save the objects, if the other one cannot. Every rank."""
        if parts.objects and not handles_objects(self.strategy):
            self._common.save_sharded_objects(_as_dict(parts.objects), directory)
        return Written(files=None)

    def sharded(self, parts: SaveParts, mains: Collection[int]) -> ShardedStateDict:
        """Return what the strategy saves.

        Args:
            parts: This rank's state dict, taken apart.
            mains: This rank's entry of the plan.
        """
        handles = handles_objects(self.strategy)
        tensors = _with_mains(parts.tensors, mains)
        return _as_dict([*tensors, *(parts.objects if handles else ())])

    def documents(
        self,
        results: Sequence[WriteResult],  # noqa: ARG002 - the strategy has written all
        empty: Mapping[str, StoredTensor],  # noqa: ARG002 - same
        directory: Path,  # noqa: ARG002 - same
    ) -> dict[str, bytes]:
        """Return nothing: the strategy has written all."""
        return {}


def _with_mains(tensors: Sequence[ShardedTensor], mains: Collection[int]) -> list[ShardedTensor]:
    """Return the tensors with a replica id that says who writes, which ``writer`` leaves open."""
    found, index = [], 0
    for tensor in tensors:
        count = len(local_shards([tensor]))
        if tensor.writer == "main":
            found.append(tensor)
        else:
            is_main = any(number in mains for number in range(index, index + count))
            found.append(replace(tensor, replica_id=0 if is_main else 1))
        index += count
    return found


def async_request(save: SaveInSteps, fmt: StrategyFormat) -> AsyncRequest:
    """Return the request of a planned save whose writing a strategy does later. Collective.

    Raises:
        ConfigError: The strategy is not asynchronous; on every rank.
    """
    strategy = fmt.strategy
    if not isinstance(strategy, AsyncSaveShardedStrategy):
        save.planned.abort()
        raise ConfigError(f"{strategy} cannot save asynchronously.")
    steps = _AsyncSteps(save, fmt)
    planned = attempt(steps.plan, strategy)
    if planned.error is not None:
        save.written = Outcome(error=planned.error)
    return AsyncRequest(steps.write, (), [steps.finish])


class _AsyncSteps:
    """The steps of an asynchronous save through a strategy; an error in one skips those after it.

    The save keeps the error, and its commit tells all ranks.
    """

    def __init__(self, save: SaveInSteps, fmt: StrategyFormat) -> None:
        self._save, self._fmt = save, fmt
        self._request: AsyncRequest | None = None
        self._args: list[Any] = []

    def plan(self, strategy: AsyncSaveShardedStrategy) -> None:
        """Let the strategy plan and copy. Every rank."""
        self._save.stage_values()
        planned = self._save.planned
        sharded = self._fmt.sharded(planned.prepared.parts, planned.work)  # type: ignore[arg-type]  # of our plan
        request = strategy.async_save(sharded, planned.directory)
        # What is to be copied to the host is copied now: the caller may go on at once.
        self._args = staged_args(request)
        self._request = request

    def write(self) -> None:
        """Let the strategy write, from any thread. Every rank."""
        self._unless_failed(self._write)

    def finish(self) -> None:
        """Let the strategy finish, then commit. Collective.

        Its functions may exchange with other ranks, so each begins when all ranks have come so far.
        """
        request = self._request
        functions = [] if request is None else request.finalize_fns
        for number in range(self._save.agree(len(functions))):
            if number < len(functions):
                self._save.written = attempt(_finalized, functions[number])
            self._save.agree()
        self._unless_failed(self._write_values)
        self._save.commit()

    def _unless_failed(self, step: Callable[[AsyncRequest], Written]) -> None:
        request = self._request
        if request is not None and not self._save.has_failed:
            self._save.written = attempt(step, request)

    def _write(self, request: AsyncRequest) -> Written:
        if request.async_fn is not None:
            request.async_fn(*self._args, **request.async_fn_kwargs)
        return Written(files=None)

    def _write_values(self, _: AsyncRequest) -> Written:
        planned = self._save.planned
        objects = self._fmt.write_objects(planned.prepared.parts, planned.directory)
        return write_common(planned, objects)


def _finalized(function: Callable[[], Any]) -> Written:
    function()
    return Written(files=None)


def strategy_source(
    sharded: LoadShardedStrategy | None,
    common: LoadCommonStrategy | None,
    directory: Path,
) -> Source:
    """Return what reads a checkpoint through strategies; None stands for our own reader."""
    read_common = None if common is None else lambda: common.load_common(directory)
    if sharded is None:
        return Source(read_common=read_common)
    return Source(
        stored=lambda objects: _stored(sharded, common, directory, objects),
        read=_reader(sharded, common, directory),
        read_common=read_common,
    )


def _stored(
    sharded: LoadShardedStrategy,
    common: LoadCommonStrategy | None,
    directory: Path,
    objects: Sequence[ShardedObject] | None,
) -> dict[str, ShardedTensor | ShardedObject]:
    found: dict[str, ShardedTensor | ShardedObject] = {}
    if common is not None and not handles_objects(sharded):
        found |= common.load_sharded_metadata(directory)
    try:
        return found | sharded.load_sharded_metadata(directory)
    except NotImplementedError:
        # The base class tells nothing of objects, nor did older releases of Megatron-Core.
        if objects is None:
            raise
    found |= {one.unique_key: one.without_data() for one in objects}
    return found | sharded.load_tensors_metadata(directory)


def _reader(
    sharded: LoadShardedStrategy, common: LoadCommonStrategy | None, directory: Path
) -> Callable[[Sequence[ShardedTensor], Sequence[ShardedObject]], tuple[list[Any], list[Any]]]:
    def read(
        tensors: Sequence[ShardedTensor], objects: Sequence[ShardedObject]
    ) -> tuple[list[Any], list[Any]]:
        handles = handles_objects(sharded)
        leaves = [*tensors, *(objects if handles else ())]
        who = type(sharded).__name__
        values = _values(leaves, sharded.load(_as_dict(leaves), directory), who)
        rest: list[Any] = values[len(tensors) :]
        if not handles and objects and common is not None:
            loaded = common.load_sharded_objects(_as_dict(objects), directory)
            rest = _values(objects, loaded, type(common).__name__)
        pairs = zip(tensors, values, strict=False)  # objects come behind
        return [_delivered(leaf, value, who) for leaf, value in pairs], rest

    return read


def _delivered(leaf: ShardedTensor, value: Any, who: str) -> torch.Tensor:
    """Return what a strategy loaded, in the shard's own memory if it has some.

    Raises:
        MismatchError: It is not what was asked for.
    """
    found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    if found != leaf.data_shape:
        raise MismatchError(
            f"{who} returned {found} for {leaf.key!r}, expected a tensor of shape "
            f"{leaf.data_shape}."
        )
    data = leaf.data
    loaded: torch.Tensor = cast(value.detach(), leaf.dtype)
    if data is None or not can_be_filled(data):
        return loaded
    if value is not data:
        copy_cast(data.detach(), loaded)
    return data


def _as_dict(leaves: Sequence[Any]) -> ShardedStateDict:
    """Return the leaves under their own keys; a key that comes again gets a number."""
    found: ShardedStateDict = {}
    for name, leaf in zip(_names(leaves), leaves, strict=True):
        found[name] = leaf
    return found


def _values(leaves: Sequence[Any], loaded: Mapping[str, Any], who: str) -> list[Any]:
    names = _names(leaves)
    lacking = [name for name in names if name not in loaded]
    if lacking:
        raise CorruptedCheckpointError(f"{who} did not return {', '.join(lacking)}.")
    return [loaded[name] for name in names]


def _names(leaves: Sequence[Any]) -> list[str]:
    names: list[str] = []
    seen: dict[str, int] = {}
    taken = {leaf.key for leaf in leaves}
    for leaf in leaves:
        number = seen.get(leaf.key, 0)
        name = leaf.key if number == 0 else f"{leaf.key}#{number}"
        while number and name in taken:
            number += 1
            name = f"{leaf.key}#{number}"
        seen[leaf.key] = number + 1
        names.append(name)
    return names
