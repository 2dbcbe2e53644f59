"""Entry points: save and load distributed checkpoints.

Here: the public functions of the seeds. Not here: the steps of a save (``_saving``) and of a load
(``_loading``). ``save`` and ``load`` are collective over all ranks of the default process group, or
local to this process if there is none.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_ckpt._comm import SingleCommunicator, default_communicator
from dist_ckpt._formats.torch_dist.contents import check_unchanged
from dist_ckpt._loading import (
    open_checkpoint,
    open_together,
    read_common,
    read_whole,
    run_load,
    stored_keys,
)
from dist_ckpt._planning.describe import local_shards
from dist_ckpt._saving import run_save
from dist_ckpt.errors import UnknownStrategyError
from dist_ckpt.mapping import ShardedTensor
from dist_ckpt.options import LoadOptions, SaveOptions, checked_path, path_to_tell
from dist_ckpt.validation import StrictHandling, StrictPolicy, check_sharding, parse_strict_flag

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dist_ckpt.mapping import ShardedObject
    from dist_ckpt.types import Communicator, PathLike, ShardedStateDict, StateDict

__all__ = [
    "LoadOptions",
    "SaveOptions",
    "StrictHandling",
    "all_processes",
    "load",
    "load_common_state_dict",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "save",
    "single_process",
    "validate_sharding_integrity",
]

_BACKENDS = (None, ("torch_dist", 1))
_COMMON_BACKENDS = (None, ("torch", 1), ("json", 1))


def save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: PathLike,
    sharded_strategy: tuple[str, int] | None = None,
    common_strategy: tuple[str, int] | None = None,
    validate_access_integrity: bool = True,  # noqa: FBT001, FBT002 - the seeds' signature
    *,
    communicator: Communicator | None = None,
    options: SaveOptions | None = None,
) -> None:
    """Save a sharded state dict as one checkpoint directory.

    Collective: all ranks of the default process group must call, with the same path.

    Sharded tensors are written by the ranks that hold them, each element once; everything else in
    the dict is the common part, of which rank 0's is stored. When this returns, the checkpoint is
    durable and visible; when it raises, it raises on every rank, nothing is committed, and an older
    checkpoint at the same path is untouched. The caller's dict is not changed.

    Args:
        sharded_state_dict: Nested dicts and lists; ``ShardedTensor`` and its like as leaves.
        checkpoint_dir: The directory to make. An older checkpoint there is replaced in one step.
        sharded_strategy: ``("torch_dist", 1)`` or None.
        common_strategy: ``("torch", 1)``, ``("json", 1)`` or None; always stored as typed JSON.
        validate_access_integrity: Check that main replicas tile every tensor exactly.
        communicator: The ranks, if not those of the default process group.
        options: Further choices.

    Raises:
        InvalidShardingError: Shards overlap, leave gaps or disagree between ranks.
        StorageError: A write failed, or the target holds something else than a checkpoint.
        CoordinationError: Ranks failed, vanished or made different calls.
    """
    options = options or SaveOptions()
    comm = communicator or default_communicator(timeout_secs=options.timeout_secs)

    def build() -> ShardedStateDict:
        _check_backend(sharded_strategy, common_strategy)
        checked_path(checkpoint_dir)  # what is no path on one rank is told to all
        return sharded_state_dict

    run_save(
        build,
        path_to_tell(checkpoint_dir),
        comm,
        options,
        check_coverage=validate_access_integrity and options.verify_sharding,
    )


def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: PathLike,
    sharded_strategy: tuple[str, int] | None = None,
    common_strategy: tuple[str, int] | None = None,
    validate_access_integrity: bool = True,  # noqa: FBT001, FBT002 - the seeds' signature
    *,
    strict: StrictHandling | str = StrictHandling.ASSUME_OK_UNEXPECTED,
    communicator: Communicator | None = None,
    options: LoadOptions | None = None,
) -> Any:
    """Load a checkpoint on any layout.

    Collective: all ranks of the default process group must call, with the same path.

    The request says which boxes of which tensors this rank wants; only those bytes are read. Data
    of a ``ShardedTensor`` is filled in place; where there is none, a CPU tensor is made.

    Args:
        sharded_state_dict: The request; its containers are not changed.
        checkpoint_dir: A committed checkpoint of ours, or one written by torch's DCP.
        sharded_strategy: ``("torch_dist", 1)`` or None.
        common_strategy: ``("torch", 1)``, ``("json", 1)`` or None.
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
    """
    options = options or LoadOptions()
    comm = communicator or default_communicator(timeout_secs=options.timeout_secs)

    def check() -> None:
        _check_backend(sharded_strategy, common_strategy)
        checked_path(checkpoint_dir)  # what is no path on one rank is told to all
        parse_strict_flag(strict)

    contents = open_together(path_to_tell(checkpoint_dir), comm, check=check)
    policy = StrictPolicy.of(parse_strict_flag(strict))
    result = run_load(
        lambda: sharded_state_dict,
        contents,
        comm,
        options,
        policy,
        check_coverage=validate_access_integrity,
    )
    if policy.reaction == "return":
        return result.state_dict, set(result.missing), set(result.unexpected)
    return result.state_dict


def load_common_state_dict(
    checkpoint_dir: PathLike, *, options: LoadOptions | None = None
) -> StateDict:
    """Return the non-sharded part of a checkpoint. Not collective.

    Raises:
        CheckpointNotFoundError: Nothing there.
        UnsafeContentError: A value needs ``LoadOptions(allow_pickle=True)``.
    """
    return read_common(open_checkpoint(Path(checkpoint_dir)), options or LoadOptions())


def load_tensors_metadata(
    checkpoint_dir: PathLike, sharded_strategy: tuple[str, int] | None = None
) -> dict[str, ShardedTensor]:
    """Return every stored tensor as an unsharded ``ShardedTensor`` without data, by key.

    Not collective.
    """
    _check_backend(sharded_strategy, None)
    found = stored_keys(open_checkpoint(Path(checkpoint_dir)))
    return {key: one for key, one in found.items() if isinstance(one, ShardedTensor)}


def load_sharded_metadata(
    checkpoint_dir: PathLike, sharded_strategy: tuple[str, int] | None = None
) -> dict[str, ShardedTensor | ShardedObject]:
    """Return every stored tensor and sharded object without data; objects by unique key.

    Not collective.
    """
    _check_backend(sharded_strategy, None)
    return stored_keys(open_checkpoint(Path(checkpoint_dir)))


def load_plain_tensors(
    checkpoint_dir: PathLike, *, options: LoadOptions | None = None
) -> StateDict:
    """Return every stored tensor, whole, on the CPU; the common part is not included.

    Not collective: each process that calls reads all of it.
    """
    contents = open_checkpoint(Path(checkpoint_dir))
    keys = [key for key, one in stored_keys(contents).items() if isinstance(one, ShardedTensor)]
    tensors = read_whole(contents, keys, options or LoadOptions())
    check_unchanged(contents)
    return dict(zip(keys, tensors, strict=True))


def validate_sharding_integrity(
    sharded_tensors: Iterable[ShardedTensor], *, communicator: Communicator | None = None
) -> None:
    """Check that the main replicas of all ranks cover each tensor once.

    Collective: all ranks must call; the verdict is raised on every rank.

    Raises:
        InvalidShardingError: With every gap, overlap and disagreement.
    """
    comm = communicator or default_communicator()
    comm.map_reduce(
        "validating the sharding",
        lambda: [s.info for s in local_shards([t.without_data() for t in sharded_tensors])],
        lambda views: check_sharding(views, coverage=True),
    )


def all_processes(*, timeout_secs: float = 1800.0) -> Communicator:
    """Return the communicator of all ranks of the job; of this process alone if there are none.

    Args:
        timeout_secs: How long ranks wait for each other in one step.
    """
    return default_communicator(timeout_secs=timeout_secs)


def single_process() -> Communicator:
    """Return the communicator of this process alone, to save or load without the other ranks."""
    return SingleCommunicator()


def _check_backend(sharded: tuple[str, int] | None, common: tuple[str, int] | None) -> None:
    if sharded not in _BACKENDS or common not in _COMMON_BACKENDS:
        raise UnknownStrategyError(
            f"Cannot find a strategy for: sharded {sharded!r}, common {common!r}.",
            hint="this release has ('torch_dist', 1).",
        )
