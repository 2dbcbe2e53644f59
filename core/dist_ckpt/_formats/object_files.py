"""Sharded objects in files, as Megatron-Core's common strategy leaves them.

Here: which file is which object. Not here: reading them (``torch_dist.foreign``). Runs on rank 0
when a checkpoint is opened; a strategy on its own calls it on every rank.

Layout of Megatron-Core 0.5 to 0.15 (``dist_checkpointing.strategies.common``): the cell at offset
``(0, 3)`` of an object of shape ``(1, 8)`` is the file ``<key>/shard_0.3_1.8.pt``. Up to 0.6 the
last dotted part of that name was taken for a suffix and cut off: ``<key>/shard_0.3_1.pt``.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dist_ckpt._formats.torch_dist.mcore import checked_shape
from dist_ckpt._sharding.index import StoredBytes
from dist_ckpt.errors import CorruptedCheckpointError
from dist_ckpt.storage.failures import storage_errors
from dist_ckpt.storage.paths import entries_of
from dist_ckpt.validation import shortened

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = ["FoundFile", "files_below", "objects_in_files"]

_NUMBER = r"(?:0|[1-9]\d{0,18})"
_NUMBERS = rf"({_NUMBER}(?:\.{_NUMBER})*)"
_SHARD_FILE = re.compile(rf"shard_{_NUMBERS}_{_NUMBERS}\.pt", re.ASCII)
_LOCKS = ".sync"
_MAX_ENTRIES = 1 << 24


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file, or a link to anything, in ``folder`` relative to the checkpoint; size in bytes."""

    folder: str
    name: str
    nbytes: int
    is_link: bool


@dataclass(frozen=True, slots=True)
class _ShardFile:
    """A file of one cell of an object; ``shape`` lacks its last extent if the name was cut."""

    folder: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    nbytes: int

    @property
    def is_cut(self) -> bool:
        return len(self.shape) == len(self.offset) - 1


def files_below(directory: Path) -> Iterator[FoundFile]:
    """Yield all files and links below ``directory``; links are not followed, locks left out.

    Raises:
        StorageError: The file system failed.
        CorruptedCheckpointError: There is no end to them.
    """
    folders, count = [""], 0
    while folders:
        folder = folders.pop()
        with storage_errors("list", directory / folder):
            found = entries_of(directory / folder, with_sizes=True)
            entries = sorted(found, key=lambda entry: entry.name)
            count += len(entries)
            for entry in entries:
                if not entry.is_folder:
                    yield FoundFile(folder, entry.name, entry.nbytes, entry.is_link)
                elif not entry.name.endswith(_LOCKS):
                    folders.append(f"{folder}/{entry.name}".lstrip("/"))
        if count > _MAX_ENTRIES:
            raise CorruptedCheckpointError(f"{directory}: more than {_MAX_ENTRIES} files.")


def objects_in_files(files: Iterable[FoundFile]) -> dict[str, StoredBytes]:
    """Return the objects among the files of a checkpoint, by unique key.

    Where each cut name of an object has a whole one beside it, the whole ones count: a later
    release wrote them.
    """
    objects: dict[str, StoredBytes] = {}
    families: dict[tuple[str, int, tuple[int, ...]], list[_ShardFile]] = defaultdict(list)
    for one in filter(None, map(_shard_file, files)):
        if one.is_cut:
            families[one.folder, len(one.offset), one.shape].append(one)
        else:
            objects[_unique_key(one, one.shape)] = StoredBytes(one.file, 0, one.nbytes)
    for family in families.values():
        shape = (*family[0].shape, max(one.offset[-1] for one in family) + 1)
        cut = {_unique_key(one, shape): one for one in family}
        doubt = _doubt(family, shape) or _mixture(cut, objects)
        for key, one in cut.items():
            objects.setdefault(key, StoredBytes(one.file, 0, one.nbytes, doubt=doubt))
    return objects


def _shard_file(one: FoundFile) -> _ShardFile | None:
    """Return what the name of an object's file tells; None for other files."""
    match = _SHARD_FILE.fullmatch(one.name)
    if match is None or not one.folder or one.is_link:
        return None
    try:
        offset, shape = (checked_shape(map(int, numbers.split("."))) for numbers in match.groups())
    except ValueError:
        return None
    found = _ShardFile(one.folder, offset, shape, f"{one.folder}/{one.name}", one.nbytes)
    if any(at >= size for at, size in zip(offset, shape, strict=False)):
        return None
    return found if found.is_cut or len(shape) == len(offset) else None


def _mixture(cut: Mapping[str, _ShardFile], objects: Mapping[str, StoredBytes]) -> str:
    """Return what speaks against taking some cells from whole names and some from cut ones."""
    whole = cut.keys() & objects.keys()
    if not whole:
        return ""
    return f"two saves are mixed here: {shortened(sorted(whole))} is there under its whole name too"


def _doubt(family: Sequence[_ShardFile], shape: tuple[int, ...]) -> str:
    """Return why files with cut names may not be the cells of one object of ``shape``.

    The names lack the last extent; it is known only if the cells that are there are all there are.
    """
    if len(family) == math.prod(shape):
        return ""
    return (
        f"its name does not tell the last extent of the object's shape, and the {len(family)} "
        f"files of this kind are not the {math.prod(shape)} cells of shape {shape}"
    )


def _unique_key(one: _ShardFile, shape: tuple[int, ...]) -> str:
    offset, extents = (".".join(map(str, numbers)) for numbers in (one.offset, shape))
    return f"{one.folder}/shard_{offset}_{extents}"
