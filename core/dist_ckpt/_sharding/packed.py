"""``index.bin`` -> tensors and their chunks.

Here: the directory of a packed index, and the rows of its tensors, made into objects one by one
when they are asked for. Not here: where what stands (``packed_layout``), packing (``packing``),
whether what stands there is true (``_sharding.packed_check``), files
(``_formats.torch_dist.index_file``).
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import ItemsView, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dist_ckpt._sharding.chunks import ChunkRows
from dist_ckpt._sharding.index import Chunks, LazyTensors, StoredChunk, StoredTensor
from dist_ckpt._sharding.packed_layout import DTYPE, ROLES, coordinate_nbytes, read_layout
from dist_ckpt._sharding.packed_rows import row_dtype, starts_of_rows, sums_of_rows, widths_of
from dist_ckpt.box import Box
from dist_ckpt.errors import CorruptedCheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dist_ckpt._sharding.shard_info import Role

__all__ = ["Directory", "LazyChunks", "PackedTensors", "RowSource"]

_FEW = 4
"""Up to so many chunks are made at once: arrays cost more than they save."""
_KEPT = 1 << 15
"""Most tensors that are kept once they are made."""


class RowSource(Protocol):
    """Where the bytes of an index come from."""

    where: str

    def directory(self) -> bytes:
        """Return the directory, head included, whose seal has been compared."""
        ...

    def rows(self, position: int, nbytes: int, *, checksum: int | None) -> bytes:
        """Return bytes of the file that have this checksum; None if the caller compares."""
        ...


class Directory:
    """What an index tells of its tensors without their chunks.

    Args:
        data: The directory with its head; its seal is compared again.
        where: The file's path, for errors.

    Attributes:
        layout: How large everything is.
        ndim: Axes of each tensor, ``[t]``.
        first_axis: Where its shape begins in ``shapes``, ``[t + 1]``.
        shapes: Shapes of all tensors behind each other.
        widths: Bytes of a coordinate, ``[t]``.
        counts: Chunks of each tensor, ``[t]``.
        starts: Where its rows begin, in words behind the directory, ``[t + 1]``.
    """

    def __init__(self, data: bytes, *, where: str) -> None:
        """Take the sections apart; whether they are right is not looked at, but for their sizes.

        Raises:
            CorruptedCheckpointError: The directory is damaged.
            UnknownStrategyError: A newer release wrote it.
        """
        layout = self.layout = read_layout(data, where=where)

        def column(name: str, dtype: str) -> NDArray[Any]:
            return np.frombuffer(layout.section(data, name), dtype)

        self.sums = column("sums", "<u8")
        self.shapes = column("shapes", "<i8")
        self.counts = column("counts", "<u4").astype(np.int64)
        self.ndim = column("ndim", "u1").astype(np.int64)
        self.dtype, self.role = column("dtype", "u1"), column("role", "u1")
        self.key_ends, self.name_ends = column("key_ends", "<u4"), column("name_ends", "<u4")
        self._ends = memoryview(self.key_ends.astype(np.uint32))  # type: ignore[arg-type]  # an array is a buffer
        self.keys = bytes(layout.section(data, "keys"))
        self.names = bytes(layout.section(data, "names"))
        self.dtypes = [
            (name.rstrip(b"\0").decode("ascii", "replace"), itemsize)
            for name, itemsize in DTYPE.iter_unpack(layout.section(data, "dtypes"))
        ]
        self.first_axis = np.zeros(layout.tensors + 1, np.int64)
        np.cumsum(self.ndim, out=self.first_axis[1:])
        if int(self.first_axis[-1]) != layout.axes:
            raise CorruptedCheckpointError(
                f"{where}: {layout.axes} axes, and tensors with {self.first_axis[-1]}."
            )
        if int(self.counts.sum()) != layout.chunks:
            raise CorruptedCheckpointError(
                f"{where}: {layout.chunks} chunks, and tensors with {self.counts.sum()}."
            )
        self.widths = widths_of(self.ndim, self.shapes)
        self.starts = starts_of_rows(self.counts, self.ndim, self.widths)
        told = layout.directory_nbytes + 4 * int(self.starts[-1])
        if told != layout.nbytes:
            raise CorruptedCheckpointError(
                f"{where}: {layout.nbytes} bytes, and tensors that take {told}."
            )

    def key_bytes(self, number: int) -> bytes:
        """Return the key of a tensor as it is stored."""
        start = self._ends[number - 1] if number else 0
        return self.keys[start : self._ends[number]]

    def key(self, number: int) -> str:
        """Return the key of a tensor."""
        return self.key_bytes(number).decode("utf-8", "surrogatepass")

    def find(self, key: str) -> int | None:
        """Return the number of the tensor with this key."""
        wanted = key.encode("utf-8", "surrogatepass")
        number = bisect_left(range(self.layout.tensors), wanted, key=self.key_bytes)
        is_there = number < self.layout.tensors and self.key_bytes(number) == wanted
        return number if is_there else None

    def shape(self, number: int) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        start, stop = self.first_axis[number], self.first_axis[number + 1]
        return tuple(self.shapes[start:stop].tolist())

    def file_names(self) -> list[str]:
        """Return the names of all files."""
        ends = [0, *self.name_ends.tolist()]
        return [self.names[a:b].decode("utf-8", "surrogateescape") for a, b in pairwise(ends)]

    def extent(self, number: int) -> tuple[int, int]:
        """Return where in the file the rows of a tensor are, and how many bytes they take."""
        start, stop = int(self.starts[number]), int(self.starts[number + 1])
        return self.layout.directory_nbytes + 4 * start, 4 * (stop - start)


class _Items(ItemsView[str, StoredTensor]):
    """The items of a packed index, by number."""

    def __init__(self, tensors: PackedTensors) -> None:
        """Read nothing yet."""
        super().__init__(tensors)
        self._tensors = tensors

    def __iter__(self) -> Iterator[tuple[str, StoredTensor]]:
        """Yield keys and tensors."""
        return map(self._tensors.at, range(len(self._tensors)))


class PackedTensors(LazyTensors):
    """The tensors of a packed index, in the order of their keys; each is made when it is asked for.

    The directory is read at the first use, rows when the chunks of their tensor are looked at, and
    nothing is believed that does not have its checksum.

    Args:
        source: Has the bytes. With it, and nothing else, the mapping goes to other processes.
        directory: The directory, for who has read it already.
    """

    def __init__(self, source: RowSource, directory: Directory | None = None) -> None:
        """Read nothing yet."""
        self._source = source
        self._opened: tuple[Directory, list[str]] | None = None
        if directory is not None:
            self._opened = directory, directory.file_names()
        self._made: dict[str, StoredTensor] = {}

    def __reduce__(self) -> tuple[type[PackedTensors], tuple[RowSource]]:
        """Return what makes the same mapping elsewhere, where it reads for itself."""
        return PackedTensors, (self._source,)

    @property
    def directory(self) -> Directory:
        """The directory, read now if it was not yet.

        Raises:
            CorruptedCheckpointError: It is not as it was written.
            CheckpointNotFoundError: The checkpoint was replaced or removed meanwhile.
            StorageError: It cannot be read.
        """
        return self._open()[0]

    @property
    def files(self) -> list[str]:
        """The names of all files; chunks name numbers."""
        return self._open()[1]

    def _open(self) -> tuple[Directory, list[str]]:
        if self._opened is None:
            found = Directory(self._source.directory(), where=self._source.where)
            self._opened = found, found.file_names()
        return self._opened

    def load(self) -> None:
        """Read the directory now."""
        self._open()

    def __len__(self) -> int:
        """Return the number of tensors."""
        return self.directory.layout.tensors

    def __iter__(self) -> Iterator[str]:
        """Yield the keys, sorted by their bytes."""
        directory = self.directory
        return map(directory.key, range(directory.layout.tensors))

    def items(self) -> ItemsView[str, StoredTensor]:
        """Return keys and tensors in one pass, without a search for each key."""
        return _Items(self)

    def at(self, number: int) -> tuple[str, StoredTensor]:
        """Return key and tensor of this number."""
        return self.directory.key(number), self._tensor(number)

    def __contains__(self, key: object) -> bool:
        """Whether there is a tensor with this key."""
        return isinstance(key, str) and self.directory.find(key) is not None

    def __getitem__(self, key: str) -> StoredTensor:
        """Return a tensor."""
        tensor = self._made.get(key)
        if tensor is None:
            number = self.directory.find(key)
            if number is None:
                raise KeyError(key)
            if len(self._made) >= _KEPT:
                self._made.clear()
            tensor = self._made[key] = self._tensor(number)
        return tensor

    def keys_of(self, role: Role) -> list[str]:
        """Return the keys of the tensors that have this role."""
        found = np.flatnonzero(self.directory.role == ROLES.index(role))
        return [self.directory.key(number) for number in found.tolist()]

    def _tensor(self, number: int) -> StoredTensor:
        directory = self.directory
        dtype, _ = directory.dtypes[directory.dtype[number]]
        role: Any = ROLES[directory.role[number]]
        count = int(directory.counts[number])
        chunks = LazyChunks(self, number, count) if count else ()
        return StoredTensor(dtype, directory.shape(number), chunks, role)

    def rows_of(self, numbers: NDArray[np.int64]) -> bytes:
        """Return the rows of tensors as they are stored, one tensor's behind the other's.

        Args:
            numbers: Of the tensors, ascending; neighbours are read together.

        Raises:
            CheckpointingException: As ``chunks_of``.
        """
        directory = self.directory
        parts = []
        for part in np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1):
            if not len(part):
                continue
            starts = directory.starts[part[0] : part[-1] + 2]
            position = directory.layout.directory_nbytes + 4 * int(starts[0])
            rows = self._source.rows(position, 4 * int(starts[-1] - starts[0]), checksum=None)
            found = sums_of_rows(rows, starts - starts[0])
            wrong = np.flatnonzero(found != directory.sums[part[0] : part[-1] + 1])
            if len(wrong):
                self.chunks_of(int(part[wrong[0]]))  # reads it again, and tells
                raise CorruptedCheckpointError(
                    f"{self._source.where}: the chunks of {directory.key(int(part[wrong[0]]))!r} "
                    "were others when they were read before.",
                    hint="the file is being written, or the disk is broken.",
                )
            parts.append(rows)
        return b"".join(parts)

    def chunks_of(self, number: int) -> tuple[StoredChunk, ...] | ChunkRows:
        """Return the chunks of a tensor.

        Raises:
            CorruptedCheckpointError: They are not as they were written.
            CheckpointNotFoundError: The checkpoint was replaced or removed meanwhile.
            StorageError: They cannot be read.
        """
        directory = self.directory
        position, nbytes = directory.extent(number)
        data = self._source.rows(position, nbytes, checksum=int(directory.sums[number]))
        ndim, width = int(directory.ndim[number]), int(directory.widths[number])
        _, itemsize = directory.dtypes[directory.dtype[number]]
        if directory.counts[number] <= _FEW:
            return tuple(_few_chunks(data, ndim, width, itemsize, self.files))
        rows = np.frombuffer(data, row_dtype(ndim, width))
        return ChunkRows(
            self.files,
            itemsize,
            offset=rows["offset"].astype(np.int64),
            shape=rows["shape"].astype(np.int64),
            file=rows["file"].astype(np.int32),
            position=rows["position"].astype(np.int64),
        )


def _few_chunks(
    data: bytes, ndim: int, width: int, itemsize: int, files: Sequence[str]
) -> Iterator[StoredChunk]:
    letter = "I" if width == coordinate_nbytes(0) else "Q"
    for position, *place, file in struct.iter_unpack(f"<Q{2 * ndim}{letter}I", data):
        box = Box(tuple(place[:ndim]), tuple(place[ndim:]))
        yield StoredChunk(box, files[file], position, box.numel * itemsize)


class LazyChunks(Chunks):
    """The chunks of one tensor of a packed index, read when they are looked at.

    Args:
        owner: Has the index.
        number: Which tensor.
        count: How many there are.
    """

    __slots__ = ("_count", "_found", "_number", "_owner")

    def __init__(self, owner: PackedTensors, number: int, count: int) -> None:
        """Read nothing yet."""
        self._owner, self._number, self._count = owner, number, count
        self._found: tuple[StoredChunk, ...] | ChunkRows | None = None

    @property
    def rows(self) -> tuple[StoredChunk, ...] | ChunkRows:
        """The chunks, read now if they were not yet."""
        if self._found is None:
            self._found = self._owner.chunks_of(self._number)
        return self._found

    def __len__(self) -> int:
        """Return the number of chunks; nothing is read for it."""
        return self._count

    def __iter__(self) -> Iterator[StoredChunk]:
        """Yield the chunks."""
        return iter(self.rows)

    def __getitem__(self, at: Any) -> Any:
        """Return a chunk, or several."""
        return self.rows[at]

    def overlapping(self, box: Box) -> list[tuple[StoredChunk, Box]]:
        """Return the chunks that have elements of ``box``, each with the box that is common."""
        return StoredTensor("", (), self.rows).overlapping(box)

    def stored_in(self, box: Box) -> int:
        """Return how many elements of ``box`` the chunks have."""
        return StoredTensor("", (), self.rows).stored_in(box)
