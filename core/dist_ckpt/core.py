"""The small file that says: this is a distributed checkpoint, of this format.

Here: ``CheckpointingConfig`` and ``metadata.json``, whose presence is the commit marker. Not here:
the rest of a checkpoint's documents (``serialization``, ``storage.commit``).
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dist_ckpt.errors import CheckpointingException, CorruptedCheckpointError
from dist_ckpt.storage import open_store
from dist_ckpt.storage.paths import is_directory
from dist_ckpt.storage.replace import replace_file
from dist_ckpt.storage.sealed import parse_document

if TYPE_CHECKING:
    from dist_ckpt.types import PathLike

__all__ = [
    "CONFIG_FNAME",
    "CheckpointingConfig",
    "CheckpointingException",
    "check_is_distributed_checkpoint",
    "maybe_load_config",
    "save_config",
]

CONFIG_FNAME = "metadata.json"
_MAX_NBYTES = 1 << 20


@dataclass
class CheckpointingConfig:
    """Names the formats of a checkpoint.

    The versions are those of the format, not of the content.

    Attributes:
        sharded_backend: Format of sharded tensors, ``torch_dist``.
        sharded_backend_version: Its version.
        common_backend: Format of the rest: ``json`` (ours) or ``torch`` (``common.pt``).
        common_backend_version: Its version.
    """

    sharded_backend: str
    sharded_backend_version: int = 1
    common_backend: str = "torch"
    common_backend_version: int = 1

    def to_json(self) -> bytes:
        """Return the file's content."""
        return json.dumps(dataclasses.asdict(self)).encode()


def check_is_distributed_checkpoint(checkpoint_dir: PathLike) -> bool:
    """Return whether ``metadata.json`` is there and is a valid config; never raises for content."""
    try:
        return maybe_load_config(checkpoint_dir) is not None
    except CorruptedCheckpointError:
        return False


def maybe_load_config(checkpoint_dir: PathLike) -> CheckpointingConfig | None:
    """Return the config of a checkpoint, or None if ``checkpoint_dir`` is none. Not collective.

    Fields that this release does not know are ignored. No path at all (``""`` or None) is no
    checkpoint.

    Raises:
        CorruptedCheckpointError: ``metadata.json`` is there but is no config.
    """
    if not checkpoint_dir:
        return None
    directory = Path(checkpoint_dir)
    store = open_store(directory)
    if not is_directory(directory) or store.nbytes(CONFIG_FNAME) is None:
        return None
    data = store.read(CONFIG_FNAME, max_nbytes=_MAX_NBYTES)
    try:
        fields = parse_document(data, where=str(directory / CONFIG_FNAME))
        known = {f.name: f.type for f in dataclasses.fields(CheckpointingConfig)}
        config = CheckpointingConfig(**{k: v for k, v in fields.items() if k in known})
        problems = [
            name for name in known if type(getattr(config, name)).__name__ != str(known[name])
        ]
        if problems:
            raise TypeError(f"wrong type of {', '.join(problems)}")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptedCheckpointError(
            f"{directory / CONFIG_FNAME}: not a checkpoint config ({error})."
        ) from error
    return config


def save_config(config: CheckpointingConfig, checkpoint_dir: PathLike) -> None:
    """Write ``metadata.json`` durably, replacing an old one at once. Not collective.

    ``save`` does this by itself, last of all; call it only for a checkpoint of your own making.
    Several processes may call it with the same config.

    Raises:
        CheckpointNotFoundError: There is no such directory.
        StorageError: It could not be written; an older file is as it was.
    """
    directory = Path(checkpoint_dir)
    replace_file(open_store(directory), directory, CONFIG_FNAME, config.to_json())
