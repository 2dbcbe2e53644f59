"""One rank's state dict, read from its part of a checkpoint.

Here: ``CheckpointReader``. Not here: the key space (``_saving.rank_state``), how bytes are read
(``_loading.execute``), where loaded values go (``_loading.rank_request``). The names are those of
torch's ``_experimental`` checkpointer (torch 2.13).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dist_ckpt._comm import SingleCommunicator
from dist_ckpt._loading.execute import LoadRequest, read_object, run_load, stored_keys
from dist_ckpt._loading.open import open_checkpoint
from dist_ckpt._loading.rank_request import RankRequest, is_all_global
from dist_ckpt._saving.rank_state import PART_KEY, thawed
from dist_ckpt.checkpoint_writer import default_rank_info
from dist_ckpt.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptedCheckpointError,
    MismatchError,
)
from dist_ckpt.mapping import ShardedObject
from dist_ckpt.options import LoadOptions, checked_path
from dist_ckpt.validation import StrictPolicy, shortened

if TYPE_CHECKING:
    from dist_ckpt._formats.documents import CheckpointContents
    from dist_ckpt.types import STATE_DICT, PathLike, RankInfo

__all__ = ["CheckpointReader"]

logger = logging.getLogger(__name__)


class CheckpointReader:
    """Reads this rank's part, and what is global. Not collective: each rank reads for itself.

    Args:
        rank_info: Which rank this is; that of the default process group if None. The checkpoint may
            have been written by more or fewer ranks.
        options: How to read.
    """

    def __init__(
        self, rank_info: RankInfo | None = None, *, options: LoadOptions | None = None
    ) -> None:
        """Remember what is given; nothing is read yet."""
        self._rank_info = rank_info or default_rank_info()
        self._options = options or LoadOptions()

    def read(
        self,
        path: PathLike,
        state_dict: STATE_DICT | None = None,
        *,
        map_location: Any = None,
        allow_pickle: bool = False,
        **kwargs: Any,
    ) -> tuple[STATE_DICT, list[str]]:
        """Return the state dict, and the keys of the request that are not stored.

        Args:
            path: Directory of the checkpoint.
            state_dict: What to read: only its keys, tensors in place, None for all that is stored
                there. The same object is returned, changed. None to read everything.
            map_location: Where tensors that are made anew go, as in ``torch.load``; None is the
                CPU.
            allow_pickle: Whether values that were pickled may be loaded; that runs code from the
                checkpoint.
            kwargs: Without effect, as in torch: they are for readers of other libraries.

        Raises:
            CheckpointNotFoundError: No checkpoint there, or none that has a part of this rank.
            MismatchError: Types, shapes or dtypes do not agree; nothing has been read then.
            UnsafeContentError: A value needs ``allow_pickle=True``.
        """
        if kwargs:
            logger.info("reading %s: %s have no effect", path, sorted(kwargs))
        if state_dict is not None and not isinstance(state_dict, dict):
            raise ConfigError(f"expected a dict to load into, found {type(state_dict).__name__}.")
        options = replace(self._options, allow_pickle=allow_pickle or self._options.allow_pickle)
        contents = open_checkpoint(checked_path(path))
        part = self._part(contents, options, needed=not is_all_global(state_dict))
        request = RankRequest(stored_keys(contents), map_location)
        finish = request.place(state_dict, part, ())
        if request.problems:
            raise MismatchError(f"{contents.directory}: {shortened(request.problems)}.")
        loaded = run_load(
            lambda: LoadRequest(state_dict={"leaves": dict(request.wanted)}),
            contents,
            SingleCommunicator(),
            options,
            StrictPolicy(reaction="raise", check_missing=False),
            check_coverage=False,
            common={},
        )
        result = finish(loaded.state_dict.get("leaves", {}))
        if request.missing:
            logger.warning("%s has no %s", contents.directory, shortened(request.missing))
        return result, request.missing

    def _part(self, contents: CheckpointContents, options: LoadOptions, *, needed: bool) -> Any:
        """Return the tree of this rank's part with ``StoredLeaf`` leaves; ``{}`` if not needed."""
        rank = self._rank_info.global_rank
        sizes = {
            one.global_shape[0]
            for one in stored_keys(contents).values()
            if isinstance(one, ShardedObject) and one.key == PART_KEY and one.global_shape
        }
        size = max(sizes, default=0)
        if rank >= size:
            if not needed:
                return {}
            raise CheckpointNotFoundError(
                f"{contents.directory} has no part of rank {rank}; it has parts of {size} ranks.",
                hint="sharded leaves alone can be loaded on any number of ranks.",
            )
        cell = read_object(ShardedObject(PART_KEY, None, (size,), (rank,)), contents, options)
        try:
            tree = thawed(cell)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptedCheckpointError(
                f"{contents.directory}: the part of rank {rank} is not one of ours ({error!r})."
            ) from error
        if not isinstance(tree, Mapping):
            raise CorruptedCheckpointError(
                f"{contents.directory}: the part of rank {rank} is a {type(tree).__name__}."
            )
        return tree
