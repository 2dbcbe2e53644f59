"""Entry points: save and load distributed checkpoints.

Here: the public functions of the seeds. Not here: the steps of a save (``_saving.execute``) and of
a load (``_loading.execute``). ``save`` and ``load`` are collective over all ranks of the default
process group, or local to this process if there is none.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_ckpt._comm import SingleCommunicator, default_communicator
from dist_ckpt._comm.outcome import Outcome
from dist_ckpt._formats.documents import check_unchanged
from dist_ckpt._loading.execute import (
    LoadRequest,
    read_common,
    read_leaves,
    read_whole,
    run_load,
    stored_keys,
)
from dist_ckpt._loading.open import check_indexed, open_checkpoint, open_together
from dist_ckpt._saving.execute import SaveInSteps
from dist_ckpt._saving.memory import SaveMemory
from dist_ckpt._saving.plan import Planner
from dist_ckpt._saving.request import SaveCall, SaveRequest
from dist_ckpt._saving.save import run_save
from dist_ckpt._sharding.split import split_for_load, without_marks
from dist_ckpt._sharding.table import local_shards
from dist_ckpt._worker.async_request import staged_write
from dist_ckpt.dict_utils import dict_list_map_outplace, extract_matching_values
from dist_ckpt.errors import CheckpointNotFoundError, ConfigError, InvalidShardingError
from dist_ckpt.mapping import ShardedObject, ShardedTensor
from dist_ckpt.options import LoadOptions, SaveOptions, checked_path, path_to_tell
from dist_ckpt.strategies.async_utils import AsyncRequest
from dist_ckpt.strategies.base import (
    LoadShardedStrategy,
    SaveShardedStrategy,
    StrategyAction,
    get_default_strategy,
)
from dist_ckpt.strategies.generic import StrategyFormat, async_request
from dist_ckpt.strategies.native import NativeSaveShardedStrategy
from dist_ckpt.strategies.selection import chosen_common, chosen_save, chosen_source
from dist_ckpt.validation import (
    StrictHandling,
    StrictPolicy,
    check_objects,
    check_sharding,
    parse_strict_flag,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dist_ckpt._sharding.shard_info import ShardInfo
    from dist_ckpt.strategies.base import LoadCommonStrategy, SaveCommonStrategy
    from dist_ckpt.types import Communicator, PathLike, ShardedStateDict, StateDict

__all__ = [
    "LoadOptions",
    "SaveOptions",
    "StrictHandling",
    "all_processes",
    "get_default_load_sharded_strategy",
    "get_default_save_sharded_strategy",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_sharded_objects",
    "load_tensors_metadata",
    "remove_sharded_tensors",
    "save",
    "single_process",
    "validate_sharding_integrity",
]

_CONTENT_METADATA = "content_metadata"


def save(  # noqa: PLR0913, PLR0917 - the lineage's signature
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: PathLike,
    sharded_strategy: SaveShardedStrategy | tuple[str, int] | None = None,
    common_strategy: SaveCommonStrategy | tuple[str, int] | None = None,
    validate_access_integrity: bool = True,  # noqa: FBT001, FBT002 - the seeds' signature
    async_sharded_save: bool = False,  # noqa: FBT001, FBT002 - the lineage's signature
    preprocess_common_before_consistancy_check: Callable[[StateDict], StateDict] | None = None,
    content_metadata: dict[str, Any] | None = None,
    *,
    communicator: Communicator | None = None,
    options: SaveOptions | None = None,
) -> AsyncRequest | None:
    """Save a sharded state dict as one checkpoint directory.

    Collective: all ranks of the default process group must call, with the same path.
    Sharded tensors are written by the ranks that hold them, each element once; all else in the dict
    is the common part, of which rank 0's is stored. When this returns, the checkpoint is durable
    and visible; when it raises, it raises on every rank, and nothing has changed at the path.

    Args:
        sharded_state_dict: Nested dicts and lists; ``ShardedTensor`` and its like as leaves.
        checkpoint_dir: The directory to make. An older checkpoint there is replaced in one step.
        sharded_strategy: A strategy or ``(backend, version)``, such as ``("zarr", 2)``; None for
            ``options.backend``.
        common_strategy: Likewise; None for typed JSON.
        validate_access_integrity: Check that main replicas tile every tensor exactly.
        async_sharded_save: Copy the data, return what writes and commits for ``AsyncCallsQueue``.
        preprocess_common_before_consistancy_check: Returns, of a copy of the common part, what
            should be equal on all ranks; ranks that differ from rank 0 are named in a warning.
        content_metadata: Stored beside the state, see ``load_content_metadata``.
        communicator: The ranks, if not those of the default process group.
        options: Further choices.

    Returns:
        None; the request if ``async_sharded_save``.

    Raises:
        InvalidShardingError: Shards overlap, leave gaps or disagree between ranks.
        StorageError: A write failed, or the target holds something else than a checkpoint.
        CoordinationError: Ranks failed, vanished or made different calls.
        UnknownStrategyError: Nobody handles the backend, or its package is not installed.
    """
    options, preprocess = options or SaveOptions(), preprocess_common_before_consistancy_check
    comm = communicator or default_communicator(timeout_secs=options.timeout_secs)
    coverage = validate_access_integrity and options.verify_sharding

    def build() -> SaveRequest:
        checked_path(checkpoint_dir)  # an invalid path is raised on every rank
        state = _with_content_metadata(sharded_state_dict, content_metadata)
        request = chosen_save(sharded_strategy, common_strategy, options, state)
        compares = coverage and (comm.size > 1 or preprocess is not None)
        return replace(request, compares_common=compares, preprocess=preprocess)

    target = path_to_tell(checkpoint_dir)
    call = SaveCall(build=build, target=target, comm=comm, options=options, check_coverage=coverage)
    if async_sharded_save:
        return _later(call)
    run_save(call, _memory_of(sharded_strategy))
    return None


def _memory_of(strategy: object) -> SaveMemory | None:
    """Return what was left by the save before, with the same strategy; None without one."""
    if not isinstance(strategy, NativeSaveShardedStrategy):
        return None
    if strategy.memory is None:
        strategy.memory = SaveMemory()
    memory: SaveMemory = strategy.memory
    return memory


def _later(call: SaveCall) -> AsyncRequest:
    """Plan a save, copy its data, and return the rest as a request. Collective."""
    save = SaveInSteps(call.comm, Planner(remembers=False).plan(call))
    fmt = save.planned.prepared.request.format
    if isinstance(fmt, StrategyFormat):
        return async_request(save, fmt)
    return AsyncRequest(_staged(save), (), [save.commit])


def _staged(save: SaveInSteps) -> Callable[[], None]:
    """Copy what a planned save writes; return what writes it. The commit raises what fails here."""
    try:
        write = staged_write(save)
    except Exception as error:  # noqa: BLE001 - raised on all ranks by the commit
        save.written = Outcome(error=error)
        return save.write
    if write is None:
        save.stage()
        return save.write
    save.forget_data()
    return write


def _with_content_metadata(
    state_dict: ShardedStateDict, content_metadata: dict[str, Any] | None
) -> ShardedStateDict:
    if content_metadata is None:
        return state_dict
    if _CONTENT_METADATA in state_dict:
        raise ConfigError(f"{_CONTENT_METADATA!r} is in the state dict and was given beside it.")
    return {**state_dict, _CONTENT_METADATA: content_metadata}


def load(  # noqa: PLR0917 - the lineage's signature
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: PathLike,
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None,
    common_strategy: LoadCommonStrategy | tuple[str, int] | None = None,
    validate_access_integrity: bool = True,  # noqa: FBT001, FBT002 - the seeds' signature
    strict: StrictHandling | str = StrictHandling.ASSUME_OK_UNEXPECTED,
    *,
    communicator: Communicator | None = None,
    options: LoadOptions | None = None,
) -> Any:
    """Load a checkpoint on any layout.

    Collective: all ranks of the default process group must call, with the same path.

    The request says which boxes of which tensors this rank wants; only those bytes are read. Data
    of a ``ShardedTensor`` is filled in place; where there is none, a CPU tensor is made.

    Args:
        sharded_state_dict: The request; its containers are not changed.
        checkpoint_dir: A committed checkpoint of ours, or one written by torch's DCP or by
            Megatron-Core.
        sharded_strategy: A strategy or ``(backend, version)``; None for what the checkpoint says.
        common_strategy: Likewise.
        validate_access_integrity: Check that the main replicas of all ranks' requests tile every
            tensor exactly; False for partial or overlapping reads.
        strict: What to do about keys that only one side has.
        communicator: The ranks, if not those of the default process group.
        options: Further choices.

    Returns:
        The common part with the loaded leaves in it; for the ``RETURN_*`` modes a triple of that,
        the missing and the unexpected keys.

    Raises:
        CheckpointNotFoundError: Nothing there; ``IncompleteCheckpointError`` if never committed.
        MismatchError: Keys, shapes or dtypes do not agree.
        CorruptedCheckpointError: The files are damaged.
        UnsafeContentError: A value needs ``LoadOptions(allow_pickle=True)``.
        UnknownStrategyError: Nobody reads the format, or the given strategy does not.
    """
    options = options or LoadOptions()
    comm = communicator or default_communicator(timeout_secs=options.timeout_secs)

    # A wrong path or flag on one rank is raised on every rank.
    arguments = lambda: (checked_path(checkpoint_dir), parse_strict_flag(strict))  # noqa: E731
    contents = open_together(path_to_tell(checkpoint_dir), comm, options, check=arguments)
    policy = StrictPolicy.of(parse_strict_flag(strict))

    def build() -> LoadRequest:
        source = chosen_source(sharded_strategy, common_strategy, contents, options)
        return LoadRequest(state_dict=sharded_state_dict, source=source)

    coverage = validate_access_integrity
    result = run_load(build, contents, comm, options, policy, check_coverage=coverage)
    if policy.reaction == "return":
        return result.state_dict, set(result.missing), set(result.unexpected)
    return result.state_dict


def load_common_state_dict(
    checkpoint_dir: PathLike, *, options: LoadOptions | None = None
) -> StateDict:
    """Return the non-sharded part of a checkpoint. Not collective.

    In lists, None stands in the places of sharded leaves.

    Raises:
        CheckpointNotFoundError: Nothing there.
        UnsafeContentError: A value needs ``LoadOptions(allow_pickle=True)``.
    """
    options = options or LoadOptions()
    contents = open_checkpoint(Path(checkpoint_dir))
    # The strategy of the sharded part is not needed, nor its package.
    strategy = chosen_common(None, contents, options)
    if strategy is None:
        common = read_common(contents, options)
    else:
        common = strategy.load_common(contents.directory)
    found: StateDict = without_marks(common)
    return found


def load_content_metadata(
    checkpoint_dir: PathLike | None = None, *, preloaded_state_dict: StateDict | None = None
) -> dict[str, Any] | None:
    """Return what was given to ``save`` as ``content_metadata``, or None. Not collective.

    Args:
        checkpoint_dir: The checkpoint to read it from.
        preloaded_state_dict: A state dict that was loaded, to take it from instead.

    Raises:
        ConfigError: Neither was given.
    """
    if preloaded_state_dict is None:
        if checkpoint_dir is None:
            raise ConfigError("Both checkpoint_dir and preloaded_state_dict are None.")
        preloaded_state_dict = load_common_state_dict(checkpoint_dir)
    found: dict[str, Any] | None = preloaded_state_dict.get(_CONTENT_METADATA)
    return found


def load_tensors_metadata(
    checkpoint_dir: PathLike,
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None,
) -> dict[str, ShardedTensor]:
    """Return every stored tensor as an unsharded ``ShardedTensor`` without data, by key.

    Not collective.
    """
    found = _metadata(checkpoint_dir, sharded_strategy, None, objects=())
    return {key: one for key, one in found.items() if isinstance(one, ShardedTensor)}


def load_sharded_metadata(
    checkpoint_dir: PathLike,
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None,
    common_strategy: LoadCommonStrategy | tuple[str, int] | None = None,
) -> dict[str, ShardedTensor | ShardedObject]:
    """Return every stored tensor and sharded object without data; objects by unique key.

    Not collective.
    """
    return _metadata(checkpoint_dir, sharded_strategy, common_strategy, objects=None)


def _metadata(
    checkpoint_dir: PathLike, sharded: Any, common: Any, *, objects: Sequence[ShardedObject] | None
) -> dict[str, ShardedTensor | ShardedObject]:
    """Return what is stored; ``objects`` as for ``Source.stored``."""
    contents = open_checkpoint(Path(checkpoint_dir))
    source = chosen_source(sharded, common, contents, LoadOptions())
    return dict(source.stored(objects) if source.stored else stored_keys(contents))


def load_plain_tensors(
    checkpoint_dir: PathLike, *, options: LoadOptions | None = None
) -> StateDict:
    """Return every stored tensor, whole, on the CPU; the common part is not included.

    Not collective: each process that calls reads all of it.

    Raises:
        UnknownStrategyError: The checkpoint is of a third party's format.
    """
    contents = open_checkpoint(Path(checkpoint_dir))
    check_indexed(contents)
    keys = [key for key, one in stored_keys(contents).items() if isinstance(one, ShardedTensor)]
    tensors = read_whole(contents, keys, options or LoadOptions())
    check_unchanged(contents)
    return dict(zip(keys, tensors, strict=True))


def load_sharded_objects(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: PathLike,
    *,
    options: LoadOptions | None = None,
) -> tuple[StateDict, StateDict]:
    """Load the sharded objects of a request. Not collective.

    Returns:
        The objects in the request's nesting, and the rest of the request.

    Raises:
        CheckpointNotFoundError: ``Object shard ... not found``, with all that are not there.
        UnsafeContentError: A value needs ``LoadOptions(allow_pickle=True)``.
    """
    options = options or LoadOptions()
    contents = open_checkpoint(Path(checkpoint_dir))
    objects = split_for_load(sharded_state_dict).objects
    stored = _metadata(checkpoint_dir, None, None, objects=objects)
    lacking = [one.unique_key for one in objects if one.unique_key not in stored]
    if lacking:
        raise CheckpointNotFoundError(
            f"{contents.directory}: Object shard {', '.join(lacking)} not found."
        )
    source = chosen_source(None, None, contents, options)
    read = source.read or (lambda t, o: read_leaves(t, o, contents, options))
    _, values = read([], objects)
    by_id = {id(one): value for one, value in zip(objects, values, strict=True)}
    found, rest = extract_matching_values(
        sharded_state_dict, lambda leaf: isinstance(leaf, ShardedObject)
    )
    check_unchanged(contents)
    loaded: Any = dict_list_map_outplace(lambda leaf: by_id[id(leaf)], found)
    return loaded, rest  # type: ignore[return-value]  # the request is a dict, so are its parts


def remove_sharded_tensors(checkpoint_dir: PathLike, key_prefix: str) -> None:
    """Remove all tensors whose key starts with ``key_prefix``. Call it on one rank.

    The checkpoint is replaced in one step by one without them.

    Raises:
        CheckpointNotFoundError: No checkpoint of ours is there.
    """
    contents = open_checkpoint(Path(checkpoint_dir))
    strategy = get_default_strategy(StrategyAction.LOAD_SHARDED, *contents.backend)
    strategy.remove_sharded_tensors(Path(checkpoint_dir), key_prefix)


def get_default_save_sharded_strategy(
    backend: str = "torch_dist", version: int = 1
) -> SaveShardedStrategy:
    """Return the strategy that saves the sharded part as ``backend``.

    Raises:
        UnknownStrategyError: Nobody does.
    """
    found: SaveShardedStrategy = get_default_strategy(StrategyAction.SAVE_SHARDED, backend, version)
    return found


def get_default_load_sharded_strategy(checkpoint_dir: PathLike) -> LoadShardedStrategy:
    """Return the strategy that loads the sharded part of a checkpoint. Not collective.

    Raises:
        CheckpointNotFoundError: Nothing there.
        UnknownStrategyError: Nobody reads its format.
    """
    contents = open_checkpoint(Path(checkpoint_dir))
    found: LoadShardedStrategy = get_default_strategy(
        StrategyAction.LOAD_SHARDED, *contents.backend
    )
    return found


def validate_sharding_integrity(
    sharded_tensors: Iterable[ShardedTensor | ShardedObject],
    *,
    communicator: Communicator | None = None,
) -> None:
    """Check that the main replicas of all ranks cover each tensor, and each array of objects, once.

    Collective: all ranks must call; the verdict is raised on every rank.

    Raises:
        InvalidShardingError: With every gap, overlap and disagreement, or with what is neither.
    """
    comm = communicator or default_communicator()

    def local() -> tuple[list[ShardInfo], list[ShardedObject]]:
        leaves: list[object] = list(sharded_tensors)
        tensors = [one.without_data() for one in leaves if isinstance(one, ShardedTensor)]
        objects = [one.without_data() for one in leaves if isinstance(one, ShardedObject)]
        if len(tensors) + len(objects) < len(leaves):
            known = (ShardedTensor, ShardedObject)
            odd = {type(one).__name__ for one in leaves if not isinstance(one, known)}
            raise InvalidShardingError(
                f"expected sharded tensors and objects, found {', '.join(sorted(odd))}.",
                hint="apply_factories builds what factories stand for.",
            )
        return [shard.info for shard in local_shards(tensors)], objects

    def check(views: Sequence[tuple[list[ShardInfo], list[ShardedObject]]]) -> None:
        check_objects([objects for _, objects in views])
        check_sharding([infos for infos, _ in views], coverage=True)

    comm.map_reduce("validating the sharding", local, check)


def all_processes(*, timeout_secs: float = 1800.0) -> Communicator:
    """Return the communicator of all ranks of the job; of this process alone if there are none.

    Args:
        timeout_secs: How long ranks wait for each other in one step.
    """
    return default_communicator(timeout_secs=timeout_secs)


def single_process() -> Communicator:
    """Return the communicator of this process alone, to save or load without the other ranks."""
    return SingleCommunicator()
