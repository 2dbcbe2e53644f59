"""``index.bin`` of a checkpoint as a file that several processes read parts of.

Here: reading its directory and its rows, each compared with its checksum. Not here: what they mean
(``_sharding.packed``), checking that it is true (``_sharding.packed_check``). Rank 0 reads and
checks the whole; the other ranks are told path and seal, and read for themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dist_ckpt._formats.manifest import MAX_DOCUMENT_NBYTES, PACKED_INDEX_FILE, check_same
from dist_ckpt._sharding.index import CheckpointIndex
from dist_ckpt._sharding.packed import PackedTensors
from dist_ckpt._sharding.packed_check import check_packed
from dist_ckpt._sharding.packed_layout import read_layout, seal_of
from dist_ckpt.errors import CheckpointingException, CorruptedCheckpointError
from dist_ckpt.storage import Extent, open_store
from dist_ckpt.storage.checksums import digest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dist_ckpt.storage import Store

__all__ = ["IndexFile", "read_packed_index"]

_PAGE_NBYTES = 1 << 20
"""Rows are read at least so many bytes at a time."""
_KEPT_NBYTES = 8 << 20
"""An index up to this size stays in the memory of who has read it."""


def read_packed_index(
    directory: Path, store: Store, *, sizes: Mapping[str, int], checkpoint_id: str = ""
) -> CheckpointIndex:
    """Read and check a whole index. Rank 0.

    Args:
        directory: The checkpoint.
        store: What reads its files.
        sizes: Its files with their sizes.
        checkpoint_id: Unique name of the save; empty if it is not known.

    Raises:
        CorruptedCheckpointError: Anything is not as it must be.
        UnknownStrategyError: A newer release wrote it.
    """
    data = store.read(PACKED_INDEX_FILE, max_nbytes=MAX_DOCUMENT_NBYTES)
    found = check_packed(data, where=str(directory / PACKED_INDEX_FILE), sizes=sizes)
    source = IndexFile(directory, checkpoint_id, seal_of(data), found.layout.directory_nbytes)
    source.keep(data)
    return CheckpointIndex(PackedTensors(source, found))


class IndexFile:
    """The file, for ``PackedTensors``.

    Args:
        directory: The checkpoint.
        checkpoint_id: Unique name of the save; empty if it is not known.
        seal: The checksum that its directory has.
        nbytes: Size of its directory.
    """

    def __init__(self, directory: Path, checkpoint_id: str, seal: int, nbytes: int) -> None:
        """Read nothing yet."""
        self.where = str(directory / PACKED_INDEX_FILE)
        self._directory, self._checkpoint_id = directory, checkpoint_id
        self._seal, self._nbytes = seal, nbytes
        self._page: tuple[int, bytes] = (0, b"")

    def __getstate__(self) -> dict[str, Any]:
        """Return all but what was read."""
        return self.__dict__ | {"_page": (0, b"")}

    def keep(self, data: bytes) -> None:
        """Keep the whole file in memory, unless it is large."""
        if len(data) <= _KEPT_NBYTES:
            self._page = (0, data)

    def directory(self) -> bytes:
        """Return the directory.

        Raises:
            CheckpointNotFoundError: The checkpoint was replaced or removed meanwhile.
            CorruptedCheckpointError: It is not the directory that rank 0 has checked.
            StorageError: It cannot be read.
        """
        data = self._bytes(0, self._nbytes)
        try:
            read_layout(data, where=self.where, seal=self._seal)
        except CorruptedCheckpointError:
            check_same(self._directory, self._checkpoint_id)  # what was replaced is no damage
            raise
        return data

    def rows(self, position: int, nbytes: int, *, checksum: int | None) -> bytes:
        """Return bytes of the file that have this checksum; None if the caller compares.

        Raises:
            CheckpointNotFoundError: The checkpoint was replaced or removed meanwhile.
            CorruptedCheckpointError: They have another checksum.
            StorageError: They cannot be read.
        """
        data = self._bytes(position, nbytes)
        if checksum is not None and (found := digest(data)) != checksum:
            check_same(self._directory, self._checkpoint_id)
            raise CorruptedCheckpointError(
                f"{self.where}: bytes {position} to {position + nbytes} have the checksum "
                f"{found:016x}, {checksum:016x} is expected.",
                hint="the file was altered after it was written; use another checkpoint.",
            )
        return data

    def _bytes(self, position: int, nbytes: int) -> bytes:
        if not nbytes:
            return b""
        start, page = self._page
        if start <= position and position + nbytes <= start + len(page):
            return page[position - start : position - start + nbytes]
        try:
            return self._read(position, nbytes)
        except CheckpointingException:
            check_same(self._directory, self._checkpoint_id)
            raise

    def _read(self, position: int, nbytes: int) -> bytes:
        store = open_store(self._directory)
        size = store.nbytes(PACKED_INDEX_FILE) or 0
        buffer = bytearray(max(nbytes, min(_PAGE_NBYTES, size - position)))
        store.read_ranges(PACKED_INDEX_FILE, [Extent(position, memoryview(buffer))])
        data = bytes(buffer)
        if nbytes <= _PAGE_NBYTES:
            self._page = (position, data)
        return data[:nbytes]
