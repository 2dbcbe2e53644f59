"""The plugin that users give to the Trainer.

Here: ``DistCkptIO``: its configuration, and what it does when it is called directly (by user code,
by the launcher of ``ddp_spawn``): that is one process for itself. Not here: the collective saves
and loads of a Trainer, which go past these methods (``_bind``, ``_overrides``).
"""

from __future__ import annotations

import os
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dist_ckpt.config import DistCkptConfig, load_config
from dist_ckpt.errors import ConfigError
from dist_ckpt.options import LoadOptions, SaveOptions
from dist_ckpt.serialization import single_process
from dist_ckpt.training_state import (
    TrainingState,
    is_checkpoint,
    remove_checkpoint,
    save_training_state,
)
from lightning_dist_ckpt._document import DIRECT, FRAMEWORK
from lightning_dist_ckpt._fabric import check_holder
from lightning_dist_ckpt._folders import is_url, without_scheme
from lightning_dist_ckpt.export import is_stock, whole_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO

    from dist_ckpt.types import PathLike
elif "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
    from lightning_fabric.plugins import CheckpointIO, TorchCheckpointIO
else:
    try:
        from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
    except ImportError:  # only the package under its other name is installed
        from lightning_fabric.plugins import CheckpointIO, TorchCheckpointIO

__all__ = ["DistCkptIO", "any_enabled"]

# Lightning asks for callbacks without telling for which Trainer. So as not to touch the Trainers of
# processes that do not use the plugin, it is known here whether there is one.
_LIVE: weakref.WeakSet[DistCkptIO] = weakref.WeakSet()


class DistCkptIO(CheckpointIO):
    """Save and load a Trainer's checkpoints as sharded directories, under every layout.

    Give it to ``Trainer(plugins=[DistCkptIO()])``. A field that is not given comes from the
    environment (``DIST_CKPT_<FIELD>``), from the YAML file that ``DIST_CKPT_CONFIG`` names, or has
    its default.

    Args:
        enabled: False leaves Lightning as it is.
        backend: The format on disk: files of torch's DCP, or zarr arrays.
        thread_count: Threads that write or read files, on each rank.
        timeout_secs: How long ranks wait for each other before the missing ones are named.
        allow_pickle: Whether pickled values are loaded. They can run any code: trust the source.
        verify_sharding: Whether a save checks first that the shards cover every tensor once.
        async_save: Whether training goes on while a checkpoint is written.
        overlap: Whether parameters and optimizer state are copied under the next forward and
            backward, too; the optimizer's step waits for the rest.
        worker: Who writes in the background: a process of its own for each rank, or a thread.
        max_in_flight: How many saves may be under way; the next waits.
        staging_budget_mib: Most memory for a copy, in MiB, on each rank and for each save in
            flight; what is larger is streamed through it.
        drain_timeout_secs: How long the end of a fit waits for what is in flight.
        events_file: Where to append what happens to saves of both kinds, as JSON lines; ranks
            other than 0 put their number into the name.
        log_metrics: Whether the Trainer's loggers get stall, writing time and speed of each save.
        page_cache: Whether the pages of a checkpoint stay in the page cache when it is on disk, so
            that a restart on the same host reads memory; ``auto`` keeps the newest one if it is
            small against the memory that is available.
        cast: What a load does where stored and requested dtype differ: convert, with one warning
            that names keys and dtypes (``allow``), or raise (``error``).
        verify: What a load compares with the checksums: what it reads, everything before anything
            is filled, or nothing.
        verify_newest: How closely a checkpoint is looked at before it counts as the newest one:
            its documents and the sizes of all files, or every byte.
        preemption: Whether SIGTERM leads to one more save and a clean stop.
        grace_secs: How long after SIGTERM the process may go on.
        sweep_after_secs: How old leftovers of this job's dead saves must be to be removed.

    Raises:
        ConfigError: A value is wrong, wherever it comes from.
    """

    def __init__(  # noqa: PLR0913 - one for each field of the configuration
        self,
        *,
        enabled: bool | None = None,
        backend: Literal["torch_dist", "zarr"] | None = None,
        thread_count: int | None = None,
        timeout_secs: float | None = None,
        allow_pickle: bool | None = None,
        verify_sharding: bool | None = None,
        async_save: bool | None = None,
        overlap: bool | None = None,
        worker: Literal["process", "thread"] | None = None,
        max_in_flight: int | None = None,
        staging_budget_mib: int | None = None,
        drain_timeout_secs: float | None = None,
        events_file: str | None = None,
        log_metrics: bool | None = None,
        page_cache: Literal["auto", "keep", "drop"] | None = None,
        cast: Literal["allow", "error"] | None = None,
        verify: Literal["read", "full", "off"] | None = None,
        verify_newest: Literal["files", "full"] | None = None,
        preemption: bool | None = None,
        grace_secs: float | None = None,
        sweep_after_secs: float | None = None,
    ) -> None:
        """Load the configuration."""
        super().__init__()
        self.config: DistCkptConfig = load_config(
            enabled=enabled,
            backend=backend,
            thread_count=thread_count,
            timeout_secs=timeout_secs,
            allow_pickle=allow_pickle,
            verify_sharding=verify_sharding,
            async_save=async_save,
            overlap=overlap,
            worker=worker,
            max_in_flight=max_in_flight,
            staging_budget_mib=staging_budget_mib,
            drain_timeout_secs=drain_timeout_secs,
            events_file=events_file,
            log_metrics=log_metrics,
            page_cache=page_cache,
            cast=cast,
            verify=verify,
            verify_newest=verify_newest,
            preemption=preemption,
            grace_secs=grace_secs,
            sweep_after_secs=sweep_after_secs,
        )
        self._announce()

    @classmethod
    def from_yaml(cls, path: PathLike) -> DistCkptIO:
        """Make one from a YAML file; the environment is over the file.

        Raises:
            ConfigError: The file cannot be read, or a key or value in it is wrong.
        """
        io = cls.__new__(cls)
        CheckpointIO.__init__(io)
        io.config = load_config(path)
        io._announce()  # noqa: SLF001 - our own
        return io

    def _announce(self) -> None:
        """Make it known that this plugin exists, to our callback factories and to Lightning."""
        for name in ("lightning.fabric.plugins", "lightning_fabric.plugins"):
            # The package has two names, each with a class of its own to be recognised by.
            if name in sys.modules:
                sys.modules[name].CheckpointIO.register(DistCkptIO)
        if self.config.enabled:
            _LIVE.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Be known in the process it was sent to, too (``ddp_spawn``)."""
        self.__dict__.update(state)
        self._announce()

    def save_options(self, path: Path) -> SaveOptions:
        """Return the options of a save to ``path``."""
        # Lightning replaces the files and links that it made itself; nothing else is overwritten.
        replaceable = path.is_symlink() or path.is_file() or is_stock(path)
        return SaveOptions(
            thread_count=self.config.thread_count,
            timeout_secs=self.config.timeout_secs,
            verify_sharding=self.config.verify_sharding,
            backend=self.config.backend,
            page_cache=self.config.page_cache,
            replace="any" if replaceable else "checkpoint",
        )

    def load_options(self, *, weights_only: bool | None = None) -> LoadOptions:
        """Return the options of a load; ``weights_only`` as Lightning has it decides, if given."""
        return LoadOptions(
            thread_count=self.config.thread_count,
            timeout_secs=self.config.timeout_secs,
            verify=self.config.verify,
            allow_pickle=self.config.allow_pickle if weights_only is None else not weights_only,
            cast=self.config.cast,
        )

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: PathLike,
        storage_options: Any | None = None,
    ) -> None:
        """Save whole values of this process alone, as a checkpoint directory. Not collective.

        Raises:
            ConfigError: Fabric calls, and the plugin has fields that have no effect there.
            CheckpointingException: It failed; what stood at ``path`` is still there.
        """
        if not self.config.enabled:
            TorchCheckpointIO().save_checkpoint(checkpoint, os.fspath(path), storage_options)
            return
        check_holder(self)
        target = checked_target(path, storage_options)
        state = TrainingState(common={DIRECT: checkpoint}, framework=FRAMEWORK)
        save_training_state(
            target, state, options=self.save_options(target), communicator=single_process()
        )

    def load_checkpoint(
        self,
        path: PathLike,
        map_location: Callable[..., Any] | None = None,
        weights_only: bool | None = None,  # noqa: FBT001 - Lightning's signature
    ) -> dict[str, Any]:
        """Load a checkpoint, whole and on the CPU, as stock Lightning has it. Not collective.

        Raises:
            CheckpointingException: It is no complete checkpoint of ours.
        """
        if not self.config.enabled and not is_stock(path) and is_checkpoint(path):
            raise ConfigError(
                f"{path} is a checkpoint directory of DistCkptIO, which is switched off.",
                hint="enabled: true; or make a file for stock Lightning: "
                "lightning_dist_ckpt.export_to_file().",
            )
        if not self.config.enabled or is_stock(path):
            stock = TorchCheckpointIO()
            # Only what was asked for: Lightning 2.4 and 2.5 know no `weights_only`.
            given = {"map_location": map_location, "weights_only": weights_only}
            asked: dict[str, Any] = {k: value for k, value in given.items() if value is not None}
            return stock.load_checkpoint(os.fspath(path), **asked)
        return whole_checkpoint(
            Path(without_scheme(path)), self.load_options(weights_only=weights_only)
        )

    def remove_checkpoint(self, path: PathLike) -> None:
        """Remove a checkpoint, file or link. Call it on one rank."""
        if self.config.enabled and not is_url(path):
            remove_checkpoint(without_scheme(path))
        else:
            TorchCheckpointIO().remove_checkpoint(os.fspath(path))


def any_enabled() -> bool:
    """Whether this process has a DistCkptIO that is not switched off."""
    return bool(_LIVE)


def checked_target(path: PathLike, storage_options: object) -> Path:
    """Return where to save.

    Raises:
        ConfigError: ``path`` is no local path, or options are given that nobody would follow.
    """
    if is_url(path):
        raise ConfigError(
            f"{path}: checkpoints are saved to local or mounted file systems only.",
            hint="save to a local folder, and upload what is committed from there.",
        )
    if storage_options is not None:
        raise ConfigError(
            f"storage_options={storage_options!r}: DistCkptIO has no options for a single save.",
            hint="give them to DistCkptIO(...).",
        )
    return Path(without_scheme(path))
