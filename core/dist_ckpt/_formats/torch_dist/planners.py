"""Planners of torch.distributed.checkpoint (DCP) as Megatron-Core's checkpoints need them.

Here: ``MCoreSavePlanner`` and ``MCoreLoadPlanner``. Not here: our own plans (``_sharding``), the
steps of a save through DCP (``strategies.state_dict_saver``). Called on every rank; the global plan
is made on the coordinator.

Source: names and parameters of Megatron-Core 0.12 to 0.18 ``dist_checkpointing.strategies.torch``;
hooks of DCP's planners as of torch 2.13.
"""

from __future__ import annotations

import dataclasses
import io
import math
import pickle
from collections import ChainMap
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor as TorchShardedTensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, WriteItemType
from torch.distributed.checkpoint.planner_helpers import _create_read_items
from torch.distributed.tensor import DTensor

from dist_ckpt._staging_pool.memory import fill_zero
from dist_ckpt.errors import (
    ConfigError,
    CorruptedCheckpointError,
    InvalidShardingError,
    MismatchError,
    UnsafeContentError,
)
from dist_ckpt.validation import shortened

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import ReadItem, WriteItem

    from dist_ckpt.mapping import ShardedTensor

__all__ = ["MCoreLoadPlanner", "MCoreSavePlan", "MCoreSavePlanner", "MissingKeyError"]


class MissingKeyError(MismatchError, KeyError):
    """A requested key is not in the checkpoint; a ``KeyError`` too, as in Megatron-Core."""


@dataclasses.dataclass(frozen=True)
class MCoreSavePlan(SavePlan):
    """A save plan that also carries what Megatron-Core notes of each tensor, by key."""

    mcore_data: dict[str, dict[str, Any]] | None = None


class MCoreSavePlanner(DefaultSavePlanner):
    """DCP's save planner, with objects that are bytes already and plans made rank by rank.

    Args:
        args: Arguments of ``DefaultSavePlanner``.
        dedup_replicated_tensors: Let the coordinator choose one writer for what several ranks
            plan. Off by default: who writes is decided before, by replica ids. With it, plans are
            made by the coordinator, never rank by rank.
        nd_flattened_global_shapes: Original global shapes of tensors that are stored in another
            form, by key; noted in the metadata.
        can_run_decentralized_global_plan: Whether each rank may make its final plan itself.
        kwargs: Keyword arguments of ``DefaultSavePlanner``.

    Raises:
        ConfigError: ``enable_plan_caching=True``: that cache belongs to the class, so that plans of
            one model could be taken for another's.
    """

    def __init__(
        self,
        *args: Any,
        dedup_replicated_tensors: bool | None = None,
        nd_flattened_global_shapes: Mapping[str, tuple[int, ...]] | None = None,
        can_run_decentralized_global_plan: bool = True,
        **kwargs: Any,
    ) -> None:
        """Remember the options; nothing is planned yet."""
        super().__init__(*args, **kwargs)
        if self._enable_plan_caching:
            raise ConfigError(
                "MCoreSavePlanner does not use DCP's plan cache, which all planners share.",
                hint="leave out enable_plan_caching; pass cached_ckpt_structure to "
                "save_state_dict_async_plan.",
            )
        self.dedup_replicated_tensors = bool(dedup_replicated_tensors)
        self.nd_flattened_global_shapes = dict(nd_flattened_global_shapes or {})
        self.can_run_decentralized_global_plan = (
            can_run_decentralized_global_plan and not self.dedup_replicated_tensors
        )

    def create_local_plan(self) -> SavePlan:
        """Plan every value of this rank's state dict, objects on every rank. Not collective."""
        plan = super().create_local_plan()
        noted = {
            key: {"nd_reformulated_orig_global_shape": tuple(shape)}
            for key, shape in self.nd_flattened_global_shapes.items()
        }
        for key, value in self.state_dict.items():
            # Megatron-Core hangs what it knows of a tensor on the tensor itself.
            own = getattr(value, "mcore_metadata", None)
            if isinstance(value, TorchShardedTensor) and own:
                noted[key] = {**own, **noted.get(key, {})}
        self.plan = MCoreSavePlan(plan.items, plan.storage_data, plan.planner_data, True, noted)  # noqa: FBT003 - fields of a dataclass
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Merge the plans of all ranks into metadata. On the coordinator.

        Raises:
            InvalidShardingError: Two ranks plan the same value and may not; naming keys and ranks.
        """
        plans, metadata = super().create_global_plan(all_plans)
        noted = [getattr(plan, "mcore_data", None) or {} for plan in all_plans]
        vars(metadata)["mcore_data"] = dict(ChainMap(*noted))
        return plans, metadata

    def create_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        """Return this rank's final plan: its local one, as no rank gives work to another."""
        return local_plan

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 - DCP's name
        """Leave bytes as they are; pickle any other object, as DCP does."""
        if isinstance(object, io.BytesIO):
            return object
        return super().transform_object(write_item, object)

    def _dedup_save_plans(self, all_plans: list[SavePlan]) -> list[SavePlan]:
        if self.dedup_replicated_tensors:
            plans: list[SavePlan] = super()._dedup_save_plans(all_plans)
            return plans
        holders: dict[tuple[str, Any], list[int]] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                is_shard = item.type is WriteItemType.SHARD
                if is_shard and item.tensor_data and 0 in item.tensor_data.chunk.sizes:
                    continue  # with more ranks than rows, several have the same empty one
                # What is no shard is whole: its key may be planned once only.
                place = item.index.offset if is_shard else None
                holders.setdefault((item.index.fqn, place), []).append(rank)
        twice = [
            f"{key!r}{'' if place is None else f' at {tuple(place)}'} by ranks {ranks}"
            for (key, place), ranks in holders.items()
            if len(ranks) > 1
        ]
        if twice:
            raise InvalidShardingError(
                f"planned more than once: {shortened(twice)}.",
                hint="only one rank may plan a value; or pass dedup_replicated_tensors=True.",
            )
        return all_plans


class MCoreLoadPlanner(DefaultLoadPlanner):
    """DCP's load planner, with checks of global shapes, and objects that are not trusted.

    Args:
        args: Arguments of ``DefaultLoadPlanner``.
        shapes_validation_sharded_tensors: Their global shapes must be those in the checkpoint.
        allow_shape_mismatch_sharded_tensors: By key of the state dict; of these, what the
            checkpoint has not is filled with zeros, and what it has more is left out.
        allow_pickle: Load objects that need more than tensors and plain values. This runs code
            from the checkpoint.
        kwargs: Keyword arguments of ``DefaultLoadPlanner``.
    """

    def __init__(
        self,
        *args: Any,
        shapes_validation_sharded_tensors: Iterable[ShardedTensor] = (),
        allow_shape_mismatch_sharded_tensors: Mapping[str, ShardedTensor] | None = None,
        allow_pickle: bool = False,
        **kwargs: Any,
    ) -> None:
        """Remember the options; nothing is planned yet."""
        super().__init__(*args, **kwargs)
        self.shapes_validation_sharded_tensors = tuple(shapes_validation_sharded_tensors)
        self.allow_shape_mismatch_sharded_tensors = dict(allow_shape_mismatch_sharded_tensors or {})
        self.allow_pickle = allow_pickle

    def create_local_plan(self) -> LoadPlan:
        """Plan the reads of this rank, after its checks. Not collective.

        Raises:
            MissingKeyError: Keys that the checkpoint does not have, all of them.
            MismatchError: Global shapes differ; naming keys, found and expected.
        """
        if self.metadata is None:
            raise ConfigError("a load planner needs set_up_planner with the metadata first.")
        self._check_keys(self.metadata)
        self._check_shapes(self.metadata)
        tolerant = self.state_dict.keys() & self.allow_shape_mismatch_sharded_tensors.keys()
        if not tolerant:
            plan: LoadPlan = super().create_local_plan()
            return plan
        # DCP refuses a target of another shape; what may differ is planned here, chunk by chunk.
        exact = {key: value for key, value in self.state_dict.items() if key not in tolerant}
        plan = create_default_local_load_plan(
            exact, self.metadata, strict=not self.allow_partial_load
        )
        items = [item for key in sorted(tolerant) for item in self._overlap(key)]
        return dataclasses.replace(plan, items=[*plan.items, *items])

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Unpickle an object with torch's restricted unpickler, unless the caller trusts it.

        Raises:
            UnsafeContentError: It needs more than tensors and plain values.
        """
        if self.allow_pickle:
            super().load_bytes(read_item, value)
            return
        key = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise UnsafeContentError(
                f"{key!r} holds an object that only pickle can load ({error}).",
                hint="if you trust the checkpoint, pass allow_pickle=True.",
            ) from error
        except Exception as error:  # a torn record makes torch raise almost anything
            raise CorruptedCheckpointError(f"{key!r}: no object record ({error}).") from error
        # DCP puts the object in place itself; it gets one that is safe to unpickle.
        again = io.BytesIO()
        torch.save(loaded, again)
        again.seek(0)
        super().load_bytes(read_item, again)

    def _check_keys(self, metadata: Metadata) -> None:
        stored = metadata.state_dict_metadata
        asked = [*(one.key for one in self.shapes_validation_sharded_tensors)]
        if not self.allow_partial_load:
            asked += self.state_dict
        missing = sorted({key for key in asked if key not in stored})
        if missing:
            raise MissingKeyError(f"not in the checkpoint: {shortened(missing)}.")

    def _check_shapes(self, metadata: Metadata) -> None:
        problems = []
        for tensor in self.shapes_validation_sharded_tensors:
            entry = metadata.state_dict_metadata[tensor.key]
            if isinstance(entry, BytesStorageMetadata):
                problems.append(f"an object, not a tensor, is stored for key {tensor.key}")
                continue
            loaded, expected = tuple(entry.size), _stored_shapes(tensor)
            if loaded not in expected and not tensor.allow_shape_mismatch:
                problems.append(
                    f"Global shape mismatch for loaded {loaded} and expected {expected[0]} "
                    f"tensor for key {tensor.key}"
                )
        if problems:
            raise MismatchError(f"{shortened(problems)}.")

    def _overlap(self, key: str) -> Sequence[ReadItem]:
        """Zero the target of ``key`` and return the reads of what the checkpoint has for it."""
        assert self.metadata is not None  # noqa: S101 - create_local_plan has looked
        target = self.state_dict[key]
        entry = self.metadata.state_dict_metadata.get(key)
        if entry is None:  # allow_partial_load: the target stays as it is
            return []
        if isinstance(entry, BytesStorageMetadata) or len(entry.size) != len(target.size()):
            found = "an object" if isinstance(entry, BytesStorageMetadata) else tuple(entry.size)
            raise MismatchError(
                f"Global shape mismatch for loaded {found} and expected "
                f"{tuple(target.size())} tensor for key {key}: the number of axes differs."
            )
        for local in _local_tensors(target):
            fill_zero(local)
        items: list[ReadItem] = _create_read_items(key, entry, target)
        return items


def _stored_shapes(tensor: ShardedTensor) -> list[tuple[int, ...]]:
    """Return the shapes under which a tensor may be stored, its own first.

    Megatron-Core stores flattened ranges of a grid with an axis for each axis of the grid, and one
    for the elements of a cell: ``axis_fragmentations + (elements of the local shape,)``.
    """
    shape = tuple(tensor.global_shape)
    if tensor.flattened_range is None or len(shape) <= 1 or tensor.axis_fragmentations is None:
        return [shape]
    return [shape, (*tensor.axis_fragmentations, math.prod(tensor.local_shape))]


def _local_tensors(target: Any) -> Iterator[torch.Tensor]:
    if isinstance(target, TorchShardedTensor):
        for shard in target.local_shards():
            yield shard.tensor.detach()
    elif isinstance(target, DTensor):
        yield target.to_local().detach()
    else:
        yield target.detach()
