"""A state dict whose tensors can be taken out and put back: what local checkpoints are made of.

Here: the interface ``TensorAwareStateDict``, and ``MCoreTensorAwareStateDict``, which keeps the
shards of one rank. Not here: where they are stored. ``from_state_dict`` and ``to_state_dict`` are
collective over all ranks of the job; everything else is local.

Source of the names: the API documentation of Megatron-Core 0.12 and newer, and of NVIDIA's
resiliency extension (NVRx); neither is needed. If NVRx is loaded, its managers take our objects for
state dicts of its own: see ``register_with_resiliency_ext``.
"""

from __future__ import annotations

import copy
import logging
import sys
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Iterable, Iterator, ValuesView
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch

from dist_ckpt._comm import default_communicator, group_communicator
from dist_ckpt._comm.outcome import attempt, reduce
from dist_ckpt._comm.tensors import (
    EXCHANGE_ALGOS,
    ShardId,
    exchange_objects,
    exchange_tensors,
)
from dist_ckpt._sharding.split import (
    merge_after_load,
    split_for_load,
    split_for_save,
    without_marks,
)
from dist_ckpt.dict_utils import nested_values
from dist_ckpt.errors import InvalidShardingError, MismatchError
from dist_ckpt.exchange_utils import (
    ShardDistribution,
    agree_on_cached,
    determine_main_replica_uniform_distribution,
    shard_id,
    without_data,
)
from dist_ckpt.mapping import ShardedObject, ShardedTensor
from dist_ckpt.tensor_aware_state_dict._ranks import (
    ELSEWHERE,
    HERE,
    Ask,
    Choices,
    Taken,
    ask_for,
    check_algo,
    check_taken,
    check_views,
    copied_containers,
    data_by_id,
    fitting_cache,
    match_together,
    own_leaves,
    present_device,
    view_of,
)
from dist_ckpt.validation import StrictHandling, StrictPolicy, parse_strict_flag, shortened

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from dist_ckpt._sharding.split import LoadParts
    from dist_ckpt.types import ShardedStateDict, StateDict

__all__ = [
    "MCoreTensorAwareStateDict",
    "TensorAwareStateDict",
    "register_with_resiliency_ext",
]

logger = logging.getLogger(__name__)

_NVRX_MODULE = "nvidia_resiliency_ext.checkpointing.local.base_state_dict"


def register_with_resiliency_ext() -> bool:
    """Make our classes count as NVRx's ``TensorAwareStateDict``, if NVRx is loaded.

    Called by itself when a state dict is made, and whenever somebody asks an instance for its
    class, as ``isinstance`` with NVRx's class does, so the order of imports does not matter.
    Nothing is imported. Returns whether NVRx is loaded.
    """
    theirs: Any = getattr(sys.modules.get(_NVRX_MODULE), "TensorAwareStateDict", None)
    if not isinstance(theirs, ABCMeta):
        return False
    theirs.register(cast("Any", TensorAwareStateDict))
    return True


class TensorAwareStateDict(ABC):
    """What a manager of local checkpoints needs of a state dict: tensors apart from the rest.

    A state dict is *hollow* while its tensors are taken out.
    """

    @property  # type: ignore[misc]  # nobody sets it
    def __class__(self) -> type:
        """The class itself; asking makes it known to NVRx, if that is loaded."""
        register_with_resiliency_ext()
        return type(self)

    @abstractmethod
    def pop_tensors(self) -> Sequence[torch.Tensor]:
        """Take all tensors out and return them; the state dict is hollow after that."""

    @property
    @abstractmethod
    def tensors(self) -> Iterable[torch.Tensor]:
        """All tensors."""

    @property
    @abstractmethod
    def is_hollow(self) -> bool:
        """Whether the tensors are taken out."""

    @abstractmethod
    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put tensors back, in the order in which ``pop_tensors`` returned them."""

    @abstractmethod
    def init_tensors(self) -> None:
        """Put uninitialized tensors in the places of those that were taken out."""

    @abstractmethod
    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:  # noqa: FBT001, FBT002 - signature of NVRx
        """Replace all tensors by copies in host memory; devices are remembered."""

    @abstractmethod
    def restore_tensor_device(self, non_blocking: bool = True) -> None:  # noqa: FBT001, FBT002 - signature of NVRx
        """Move tensors back to the devices that they were copied from."""

    def values(self) -> ValuesView[Any]:
        """Return the values of all attributes."""
        return vars(self).values()


@dataclass(eq=False)
class MCoreTensorAwareStateDict(TensorAwareStateDict):
    """The state of one rank: its shards and its common part.

    Args:
        common: The part that is not sharded.
        sharded_state_dict: Sharded tensors and objects, in the nesting of the state dict.
        _is_hollow: Whether the tensors are taken out.
    """

    common: StateDict
    sharded_state_dict: ShardedStateDict
    _is_hollow: bool = False
    _devices: dict[int, str] = field(default_factory=dict, init=False, repr=False)
    """Type of the device that a tensor was taken from, by its position among the shards."""

    def __post_init__(self) -> None:
        """Make the class known to NVRx, if that is loaded."""
        register_with_resiliency_ext()

    @staticmethod
    def _validate_params(algo: str) -> None:
        check_algo(algo)

    @staticmethod
    def _get_distribution(
        fully_parallel: bool,  # noqa: FBT001 - signature of Megatron-Core
        sharded_part: ShardedStateDict,
        parallelization_group: ProcessGroup | None,
        cached_distribution: ShardDistribution | None = None,
    ) -> ShardDistribution | None:
        """Return who keeps what; collective over the group if ``fully_parallel``.

        A cached distribution counts only if it fits the shards of every rank of the group.
        """
        if not fully_parallel:
            return cast("ShardDistribution", (None, None, None, None))
        if group_communicator(parallelization_group).size == 1:
            return None
        usable = fitting_cache(cached_distribution, sharded_part, parallelization_group)
        if agree_on_cached(usable, parallelization_group):
            return usable
        if cached_distribution is not None:
            logger.warning("the cached distribution is out of date; a new one is made.")
        return determine_main_replica_uniform_distribution(
            sharded_part, parallelization_group, ignore_groups=True
        )

    @staticmethod
    def _remove_redundant_data(
        fully_parallel: bool,  # noqa: FBT001 - signature of Megatron-Core
        sharded_part: ShardedStateDict,
        shard_to_saving_rank: dict[ShardId, int] | None,
        parallelization_group: ProcessGroup | None,
    ) -> None:
        """Drop the data that another rank keeps, in the leaves of ``sharded_part``."""
        if not fully_parallel or shard_to_saving_rank is None:
            return
        rank = group_communicator(parallelization_group).rank
        for leaf in nested_values(sharded_part):
            if isinstance(leaf, ShardedTensor | ShardedObject):
                if shard_to_saving_rank[shard_id(leaf)] == rank:
                    continue
                is_tensor = isinstance(leaf, ShardedTensor)
                leaf.data = None if is_tensor else ELSEWHERE

    @classmethod
    def from_state_dict(
        cls,
        sharded_state_dict: ShardedStateDict,
        algo: str = "fully_parallel",
        parallelization_group: ProcessGroup | None = None,
        cached_metadata: ShardDistribution | None = None,
    ) -> tuple[MCoreTensorAwareStateDict, ShardDistribution | None]:
        """Take a sharded state dict apart and keep what is this rank's to keep. Collective.

        The tensors are those of the argument, which is not changed itself: call
        ``copy_tensors_to_cpu`` before training goes on.

        Args:
            sharded_state_dict: As for ``dist_ckpt.save``.
            algo: ``fully_parallel``: of equal shards and objects one rank of the group keeps the
                data. ``atomic``: each rank keeps all of its own.
            parallelization_group: Ranks that hold the same shards; None is the default group.
            cached_metadata: What an earlier call returned. It spares the exchange of descriptions
                and the check of all shards; if the shards of any rank have changed since, it is
                not used.

        Returns:
            The state dict, and what to pass as ``cached_metadata`` next time.

        Raises:
            NotImplementedError: Another algorithm; on all ranks.
            InvalidShardingError: Shards overlap, leave gaps, have no data, or ranks disagree.
            CoordinationError: Ranks failed, vanished or asked for different algorithms.
        """
        world = default_communicator()
        fully_parallel = algo == "fully_parallel"

        def take() -> tuple[StateDict, ShardedStateDict]:
            tree = split_for_load(sharded_state_dict).template
            return split_for_save(tree).common, own_leaves(tree)

        def described(taken: tuple[StateDict, ShardedStateDict]) -> Taken:
            cache = fitting_cache(cached_metadata, taken[1], parallelization_group)
            usable = fully_parallel and cache is not None
            return Taken(algo, None if usable else view_of(taken[1], with_data=True))

        phase = "taking a state dict apart"
        own = attempt(take)
        verdict = reduce(world, phase, own.then(described), check_taken)
        cls._validate_params(verdict.algo)
        common, part = own.get()
        if verdict.is_partial:
            # Some caches are out of date: then all shards are looked at, as without any cache.
            world.map_reduce(f"{phase} anew", lambda: view_of(part, with_data=True), check_views)
        distribution = cls._get_distribution(
            fully_parallel, part, parallelization_group, cached_metadata
        )
        if distribution is not None:
            main_ranks = distribution.main_rank_for_shard if fully_parallel else None
            cls._remove_redundant_data(fully_parallel, part, main_ranks, parallelization_group)
        return cls(common, part), distribution

    @property
    def is_hollow(self) -> bool:
        """True iff tensors had been taken out and have not been put back yet."""
        return self._is_hollow

    @property
    def _sharded_tensors(self) -> Iterator[ShardedTensor]:
        """The sharded tensors that have data here, or had it before they were taken out."""
        return (leaf for _, leaf in self._held())

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors kept here; AssertionError if they are taken out."""
        self._expect(hollow=False)
        return (cast("torch.Tensor", leaf.data) for _, leaf in self._held())

    @property
    def common_state_dict(self) -> StateDict:
        """The part that is not sharded; None stands in the places that lists have for shards."""
        return cast("StateDict", without_marks(self.common))

    def pop_tensors(self) -> list[torch.Tensor]:
        """Take all tensors out and return them, in a fixed order.

        Raises:
            AssertionError: They are taken out already.
        """
        self._expect(hollow=False)
        tensors = []
        for position, leaf in self._held():
            data = cast("torch.Tensor", leaf.data)
            self._devices.setdefault(position, data.device.type)
            tensors.append(data)
        for leaf in self._leaves():
            leaf.data = None
        self._is_hollow = True
        return tensors

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put tensors back, all or none; they may lie on another device than before.

        Raises:
            AssertionError: No tensors are taken out.
            ValueError: There are more or fewer than were taken out.
            InvalidShardingError: Some have another shape or dtype.
        """
        self._expect(hollow=True)
        tensors, held = list(tensor_data), list(self._held())
        if len(tensors) != len(held):
            raise ValueError(f"{len(tensors)} tensors for {len(held)} places of {HERE}.")
        problems = [
            f"{leaf.key!r}: {tensor.dtype} of shape {tuple(tensor.shape)} for {leaf.dtype} of "
            f"shape {leaf.data_shape}"
            for tensor, (_, leaf) in zip(tensors, held, strict=True)
            if (tensor.dtype, tuple(tensor.shape)) != (leaf.dtype, leaf.data_shape)
        ]
        if problems:
            raise InvalidShardingError(f"tensors do not fit: {shortened(problems)}.")
        for tensor, (position, leaf) in zip(tensors, held, strict=True):
            leaf.data = tensor
            if tensor.device.type == self._devices[position]:
                del self._devices[position]
        self._is_hollow = False

    def init_tensors(self) -> None:
        """Put uninitialized tensors in the places, on the devices that the others came from.

        Raises:
            AssertionError: No tensors are taken out.
        """
        self._expect(hollow=True)
        for position, leaf in list(self._held()):
            leaf.init_data(present_device(self._devices.pop(position)))
        self._is_hollow = False

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:  # noqa: FBT001, FBT002 - signature of NVRx
        """Replace all tensors by copies in host memory; the originals are left alone.

        Tensors in host memory are copied too, unless they were copied or put back here from another
        device: whatever training does after this, the copies stay as they are.

        Args:
            non_blocking: Return before the copies are made; synchronize before they are used.

        Raises:
            AssertionError: The tensors are taken out.
        """
        self._expect(hollow=False)
        for position, leaf in self._held():
            data = cast("torch.Tensor", leaf.data).detach()
            if data.device.type != "cpu":
                self._devices[position] = data.device.type
                leaf.data = data.to("cpu", non_blocking=non_blocking)
            elif position not in self._devices:
                leaf.data = data.clone()

    def restore_tensor_device(self, non_blocking: bool = True) -> None:  # noqa: FBT001, FBT002 - signature of NVRx
        """Move tensors back to the type of device that they came from, as far as it is there.

        Raises:
            AssertionError: The tensors are taken out.
        """
        self._expect(hollow=False)
        for position, leaf in self._held():
            data = cast("torch.Tensor", leaf.data)
            kind = self._devices.pop(position, data.device.type)
            if kind != data.device.type:
                leaf.data = data.to(present_device(kind), non_blocking=non_blocking)

    def _expect(self, *, hollow: bool) -> None:
        if self._is_hollow is not hollow:
            state = "not taken out" if hollow else "taken out already"
            raise AssertionError(f"the tensors of {HERE} are {state}.")

    def _leaves(self) -> list[ShardedTensor]:
        leaves = (x for x in nested_values(self.sharded_state_dict) if isinstance(x, ShardedTensor))
        return list({id(leaf): leaf for leaf in leaves}.values())

    def _held(self) -> Iterator[tuple[int, ShardedTensor]]:
        """Yield the shards with data, or that had it, by their position among all."""
        for position, leaf in enumerate(self._leaves()):
            if (position in self._devices) if self._is_hollow else (leaf.data is not None):
                yield position, leaf

    def _insert_sharded_data(
        self,
        fully_parallel: bool,  # noqa: FBT001 - signature of Megatron-Core
        sharded_part: ShardedStateDict,
        parallelization_group: ProcessGroup | None,
        exchange_algo: str,
    ) -> None:
        """Give the leaves of ``sharded_part`` the data kept here or by the group, by shard id.

        Collective over the group if ``fully_parallel``.

        Raises:
            MismatchError: A shard or object is kept by nobody.
        """
        tensors, objects = data_by_id(self.sharded_state_dict)
        leaves = list(nested_values(sharded_part))
        wanted = {shard_id(x): x for x in leaves if isinstance(x, ShardedTensor)}
        wanted_objects = {shard_id(x) for x in leaves if isinstance(x, ShardedObject)}
        device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
        if fully_parallel:
            need = {shard: without_data(leaf) for shard, leaf in wanted.items()}
            tensors = exchange_tensors(
                tensors, need, {}, parallelization_group, exchange_algo=exchange_algo, device=device
            )
            objects = exchange_objects(
                objects, wanted_objects, {}, parallelization_group, exchange_algo=exchange_algo
            )
        found: dict[ShardId, Any] = {**tensors, **objects}
        for shard, leaf in wanted.items():
            if 0 in leaf.data_shape and shard not in found:
                found[shard] = torch.empty(leaf.data_shape, dtype=leaf.dtype, device=device)
        lacking = [shard[0] for shard in (*wanted, *wanted_objects) if shard not in found]
        if lacking:
            raise MismatchError(f"{HERE} has no data of {shortened(lacking)}.")
        for leaf in leaves:
            if isinstance(leaf, ShardedTensor | ShardedObject):
                leaf.data = found[shard_id(leaf)]

    def to_state_dict(  # noqa: PLR0917 - signature of Megatron-Core
        self,
        sharded_state_dict: ShardedStateDict,
        algo: str = "atomic",
        exchange_algo: str = "broadcast",
        validate_access_integrity: bool = True,  # noqa: FBT001, FBT002 - signature of Megatron-Core
        parallelization_group: ProcessGroup | None = None,
        strict: StrictHandling | str = StrictHandling.ASSUME_OK_UNEXPECTED,
        return_mismatch_keys: bool = False,  # noqa: FBT001, FBT002 - signature of Megatron-Core
    ) -> Any:
        """Return the original state dict. Collective.

        The shards must be those that were kept: nothing is cut anew. The tensors are those kept
        here where there are any; data of the argument is not looked at.

        Args:
            sharded_state_dict: The request; it is not changed.
            algo: ``atomic``: each rank finds all it wants in its own state dict.
                ``fully_parallel``: ranks of the group give each other what only one of them keeps.
            exchange_algo: ``broadcast``, ``gather_rounds`` or ``gather_object``.
            validate_access_integrity: Check that main replicas of the request tile every tensor.
            parallelization_group: As in ``from_state_dict``.
            strict: What to do about keys that only one side has; unexpected keys are left out
                unless it raises.
            return_mismatch_keys: Whether to return a triple: state dict, missing keys, unexpected
                keys. ``strict`` does not change what is returned.

        Raises:
            NotImplementedError: Another algorithm; on all ranks.
            MismatchError: A shard is kept by nobody or in another shape or dtype, or keys differ
                and ``strict`` says so.
            InvalidShardingError: The request is wrong, or the tensors are taken out.
            CoordinationError: Ranks failed, vanished or asked for different things.
        """
        world = default_communicator()
        parts: list[LoadParts] = []
        fully_parallel = algo == "fully_parallel"

        def ask() -> Ask:
            if self._is_hollow:
                raise InvalidShardingError(f"the tensors of {HERE} are taken out.")
            policy = StrictPolicy.of(parse_strict_flag(strict))
            parts.append(split_for_load(sharded_state_dict))
            exchange = exchange_algo if fully_parallel else EXCHANGE_ALGOS[0]
            choices = Choices(algo, exchange, policy, validate_access_integrity)
            kept, request = self.sharded_state_dict, parts[0].template
            return ask_for(request, kept, choices, world, parallelization_group)

        answer = match_together(ask, world)
        leaves: list[ShardedTensor | ShardedObject] = [*parts[0].tensors, *parts[0].objects]
        wanted = {id(leaf): copy.copy(leaf) for leaf in leaves if leaf.key not in answer.unexpected}
        part: ShardedStateDict = {str(number): leaf for number, leaf in wanted.items()}
        self._insert_sharded_data(fully_parallel, part, parallelization_group, exchange_algo)
        values = {number: leaf.data for number, leaf in wanted.items()}
        state_dict = merge_after_load(parts[0], copied_containers(self.common), values, values)
        if return_mismatch_keys:
            return state_dict, set(answer.missing), set(answer.unexpected)
        return state_dict
