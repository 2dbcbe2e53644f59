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
from typing import TYPE_CHECKING, Any, Unpack

from dist_ckpt.config import DistCkptConfig, load_config
from dist_ckpt.config.arguments import takes_fields
from dist_ckpt.config.fields import ConfigFields
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


@takes_fields
class DistCkptIO(CheckpointIO):
    """Save and load a Trainer's checkpoints as sharded directories, under every layout.

    Give it to ``Trainer(plugins=[DistCkptIO()])``. A field that is not given comes from the
    environment (``DIST_CKPT_<FIELD>``), from the YAML file that ``DIST_CKPT_CONFIG`` names, or has
    its default.

    Args:
        **fields: Those of ``dist_ckpt.config.DistCkptConfig``.

    Raises:
        ConfigError: A value is wrong, wherever it comes from.
    """

    def __init__(self, **fields: Unpack[ConfigFields]) -> None:
        """Load the configuration."""
        super().__init__()
        self.config: DistCkptConfig = load_config(**fields)
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
