"""DCP's file writer, cut into preparing, writing and committing, for saves in the background.

Here: ``FileSystemWriterAsync``. Not here: plans (``planners``), the order of the steps
(``strategies.state_dict_saver``), who runs the writing (``strategies.async_utils``), which bytes a
bucket becomes (``buckets``). Preparing and committing run on the thread that saves, on every rank
and on the coordinator; writing runs in a worker and makes no exchange.

What is written: records as torch.distributed.checkpoint (DCP, torch 2.13) reads them, in files
``__{rank}_{n}.distcp``, and its ``.metadata``, which is the commit.

Source of the names: Megatron-Core 0.7 to 0.18 ``dist_checkpointing.strategies.filesystem_async``.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import pickle
import queue
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import _is_wrapped_exception, _wrap_exception
from torch.distributed.checkpoint.filesystem import (
    DEFAULT_SUFFIX,
    FileSystemWriter,
    SerializationFormat,
    _split_by_size_and_type,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.futures import Future

from dist_ckpt._formats.torch_dist.buckets import (
    WriteBucket,
    WriteEntry,
    snapshot,
    stage_buckets,
    write_buckets,
)
from dist_ckpt._formats.torch_dist.cached_reader import metadata_name, read_metadata_file
from dist_ckpt.errors import CheckpointingException, ConfigError, StorageError
from dist_ckpt.storage import open_store
from dist_ckpt.storage.page_cache import PagePolicy
from dist_ckpt.storage.paths import exists
from dist_ckpt.storage.replace import delete_quietly, publish_file
from dist_ckpt.storage.trees import make_directory
from dist_ckpt.validation import shortened

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
    from torch.distributed.checkpoint.storage import WriteResult

__all__ = ["FileSystemWriterAsync"]

logger = logging.getLogger(__name__)

_OWN_MANIFEST = "manifest.json"


class FileSystemWriterAsync(FileSystemWriter):
    """Writes one save through DCP's interface; one object for each save.

    The steps: ``prepare_write_data``; ``get_save_function_and_args``, whose function does the
    writing, anywhere and at any time; ``retrieve_write_results``; ``finish`` on the coordinator.
    Also a plain DCP writer: ``torch.distributed.checkpoint.save(..., storage_writer=...)``.

    Args:
        path: Directory of the checkpoint. An older checkpoint there stays whole and readable until
            ``finish`` replaces it; then its files are removed. Files of a save that was never
            committed are left alone, and read by nobody.
        args: Arguments of ``FileSystemWriter``.
        separation_hint: Values whose key begins with it go to files of their own, whose names
            begin with it too.
        use_msc: Not supported; for the lineage's signature.
        kwargs: Keyword arguments of ``FileSystemWriter``. ``sync_files`` has no effect: what is
            committed is always durable. ``overwrite=False`` refuses an older checkpoint.

    Raises:
        ConfigError: An option that is not supported.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *args: Any,
        separation_hint: str | None = None,
        use_msc: bool = False,
        **kwargs: Any,
    ) -> None:
        """Remember the options; nothing is made yet."""
        super().__init__(path, *args, **kwargs)
        if use_msc:
            raise ConfigError("use_msc=True is not supported: paths are local or mounted.")
        if self.serialization_format is not SerializationFormat.TORCH_SAVE:
            raise ConfigError(f"{self.serialization_format} is not supported: use TORCH_SAVE.")
        if separation_hint is not None and ({"/", "\0"} & {*separation_hint}):
            raise ConfigError(f"separation_hint {separation_hint!r} cannot begin a file name.")
        self.checkpoint_dir = path
        self.separation_hint = separation_hint
        self.rank: int | None = None
        self.use_collectives = True
        self.can_run_decentralized_global_plan = True
        self.write_buckets: list[WriteBucket] | None = None
        self.results_queue: queue.SimpleQueue[Any] | None = None

    def set_up_storage_writer(
        self,
        is_coordinator: bool,  # noqa: ARG002, FBT001 - DCP's signature
        *args: Any,  # noqa: ARG002
        **kwargs: Any,
    ) -> None:
        """Learn the rank, and whether ranks plan together. torch 2.8 says neither: they do."""
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the directory, and refuse one where the save could do harm. Every rank.

        Raises:
            StorageError: A checkpoint is there that may not be replaced, or no directory can be.
        """
        directory = self._directory
        make_directory(directory)
        if exists(directory / _OWN_MANIFEST):
            raise StorageError(
                f"{directory} holds a checkpoint of dist_ckpt, whose documents would be wrong.",
                hint="save to another directory, or use dist_ckpt.save.",
            )
        if exists(directory / self._metadata_name()):
            if not self.overwrite:
                raise StorageError(f"{directory} holds a checkpoint already, and overwrite=False.")
            logger.info("%s: the checkpoint there will be replaced", directory)
        if self.rank is not None and not self.use_collectives:
            plan = self.prepare_decentralized_global_plan(plan)
        return plan

    def prepare_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        """Return the plan with this rank's file names, without asking other ranks."""
        return dataclasses.replace(local_plan, storage_data=_StoragePrefix(f"__{self._rank()}_"))

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Take what this rank writes out of the state dict. Every rank; not collective.

        Tensors in host memory are copied: training may change them as soon as this returns. Those
        on other devices are copied by the preload function of ``get_save_function_and_args``.
        """
        self._prepare(plan, planner, copies=True)

    def get_save_function_and_args(
        self,
    ) -> tuple[Callable[..., None] | None, Callable[[], Any] | None, list[Any]]:
        """Return what an ``AsyncRequest`` needs to write what was prepared.

        Returns:
            The function that writes, the function that copies to the host what is not there yet
            (its result takes the place of the second argument), and the arguments: rank, buckets,
            and the queue for the results. ``(None, None, [])`` if this rank has nothing to write.
        """
        if not self.write_buckets:
            return None, None, []
        write = partial(
            write_buckets,
            directory=self._directory,
            thread_count=self.thread_count,
            transforms=self.transforms,
            # Which ranks share this host's memory was never exchanged: as if all did.
            pages=PagePolicy(num_writers=self._world_size(), target=self._directory),
        )
        stage = partial(stage_buckets, self.write_buckets)
        return write, stage, [self._rank(), self.write_buckets, self.results_queue]

    def retrieve_write_results(self) -> Any:
        """Return what was written, or the failure as DCP's ``WRAPPED_EXCEPTION``. Once.

        Raises:
            StorageError: The function that writes has not been run to its end.
        """
        if not self.write_buckets:
            return []
        assert self.results_queue is not None  # noqa: S101 - made with the buckets
        try:
            results = self.results_queue.get_nowait()
        except queue.Empty:
            raise StorageError(
                f"{self._directory}: nothing was written yet.",
                hint="run the function of get_save_function_and_args first.",
            ) from None
        expected = sum(len(bucket.entries) for bucket in self.write_buckets)
        self.write_buckets = None
        if not _is_wrapped_exception(results) and len(results) != expected:
            error = StorageError(f"{len(results)} of {expected} values were written.")
            return _wrap_exception(error)
        return results

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write at once, without a copy: what DCP's own saves call. Every rank.

        Raises:
            CheckpointingException: Nothing of it is swallowed, whichever thread failed.
        """
        self._prepare(plan, planner, copies=False)
        write, _, args = self.get_save_function_and_args()
        if write is not None:
            write(*args)
        results = self.retrieve_write_results()
        if _is_wrapped_exception(results):
            error: Exception = results[0]
            raise error
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit: put ``.metadata`` in its place in one step. On the coordinator.

        Raises:
            StorageError: Something of the plan was not written; nothing is committed.
        """
        written = {result.index: result.storage_data for one in results for result in one}
        missing = [_named(place) for place in _places(metadata) if place not in written]
        if missing:
            raise StorageError(f"{self._directory}: not written: {shortened(missing)}.")
        # A copy: the caller may use its metadata for the next save.
        document = copy.copy(metadata)
        if hasattr(filesystem, "CURRENT_DCP_VERSION"):  # torch 2.8 writes no version
            document.version = filesystem.CURRENT_DCP_VERSION
        document.storage_data = written
        document.storage_meta = self.storage_meta()
        name = self._metadata_name()
        old = self._files_named_by(name)
        store = open_store(self._directory)
        publish_file(store, self._directory, name, pickle.dumps(document))
        delete_quietly(store, old - {info.relative_path for info in written.values()})

    @property
    def _directory(self) -> Path:
        return Path(self.path)

    def _rank(self) -> int:
        if self.rank is not None:
            return self.rank
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    def _world_size(self) -> int:
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

    def _prepare(self, plan: SavePlan, planner: SavePlanner, *, copies: bool) -> None:
        buckets = []
        for number, (group, items) in enumerate(self._groups(plan.items)):
            name = self._free_name(f"{group}{plan.storage_data.prefix}{number}")
            entries = (WriteEntry(item, planner.resolve_data(item)) for item in items)
            buckets.append(
                WriteBucket(name, tuple(snapshot(one) if copies else one for one in entries))
            )
        self.write_buckets = buckets
        self.results_queue = queue.SimpleQueue()

    def _groups(self, items: list[WriteItem]) -> Iterator[tuple[str, list[WriteItem]]]:
        """Yield what goes into each file, with the beginning of its name."""
        hint = self.separation_hint
        apart = [one for one in items if hint is not None and one.index.fqn.startswith(hint)]
        rest = [one for one in items if hint is None or not one.index.fqn.startswith(hint)]
        for prefix, group in (("", rest), (hint or "", apart)):
            if self.single_file_per_rank:
                # DCP's function sorts what it is given; the plan is not ours to change.
                parts = _split_by_size_and_type(self.thread_count, list(group))
            else:
                parts = [[item] for item in group]
            yield from ((prefix, part) for part in parts if part)

    def _free_name(self, stem: str) -> str:
        """Return a name that no file has: an older checkpoint stays whole until the commit.

        So does what another save has written here and not committed yet.
        """
        name = f"{stem}{DEFAULT_SUFFIX}"
        if exists(self._directory / name):
            name = f"{stem}_{self.save_id[:8]}{DEFAULT_SUFFIX}"
        return name

    def _metadata_name(self) -> str:
        per_rank = not self.use_collectives and self.rank is not None
        return metadata_name(self.rank if per_rank else None)

    def _files_named_by(self, name: str) -> set[str]:
        """Return the files of the checkpoint that will be replaced; none if it is unreadable."""
        path = self._directory / name
        if not exists(path):
            return set()
        try:
            storage = read_metadata_file(path).storage_data or {}
            names = {Path(info.relative_path).name for info in storage.values()}
        except (CheckpointingException, AttributeError, TypeError) as error:
            logger.warning("%s: the files of the old checkpoint are left behind: %s", path, error)
            return set()
        # The old metadata may name anything; what is removed is data files.
        return {one for one in names if one.endswith(DEFAULT_SUFFIX)}


def _places(metadata: Metadata) -> Iterator[MetadataIndex]:
    """Yield where the storage data of every chunk and object must be found."""
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            for chunk in entry.chunks:
                yield MetadataIndex(key, chunk.offsets)
        else:
            yield MetadataIndex(key)


def _named(place: MetadataIndex) -> str:
    return f"{place.fqn!r}" + (f" at {tuple(place.offset)}" if place.offset else "")
