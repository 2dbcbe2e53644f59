"""A local tensor as a part of a global one, and its checks on one rank.

Here: ``ShardedBase`` and ``ShardedTensor``; users import them from ``dist_ckpt.mapping``. Not here:
objects and factories (``dist_ckpt.mapping``), checks across ranks (``dist_ckpt.validation``).
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from dist_ckpt.box import Box, boxes_of_flat_range, is_regular_place
from dist_ckpt.errors import InvalidShardingError
from dist_ckpt.mapping._fields import place_in_grid, plain_ints, plain_range, plain_replica_id
from dist_ckpt.types import ReplicaId, Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np

__all__ = ["ShardedBase", "ShardedTensor", "is_main_replica", "plain_ints", "plain_replica_id"]

_TENSORS = (torch.Tensor, torch.nn.Parameter)
_WRITERS = ("main", "any", "first")


class ShardedBase(ABC):
    """A leaf of a sharded state dict that stands for a part of something global."""

    key: str
    data: object
    replica_id: ReplicaId

    @abstractmethod
    def validate_metadata_integrity(self) -> None:
        """Raise InvalidShardingError if the fields contradict each other."""

    @abstractmethod
    def without_data(self) -> ShardedBase:
        """Return a copy whose ``data`` is None."""


@dataclass
class ShardedTensor(ShardedBase):
    """A local tensor as a part of a global tensor that lies on several ranks.

    Shapes and offsets are in elements. The local tensor, with ``prepend_axis_num`` axes of extent 1
    put in front, is the box of the global tensor that begins at ``global_offset``.

    Args:
        key: Name of the global tensor; equal keys mean the same global tensor.
        data: Local tensor; None to describe a shard only, or to load into a fresh tensor.
        dtype: Type of the elements.
        local_shape: Shape of the local tensor, before flattening.
        global_shape: Shape of the global tensor.
        global_offset: Where the local tensor begins in the global one.
        axis_fragmentations: Number of shards on each axis; None if the shards are no regular grid.
        replica_id: Tells equal shards of several ranks apart; 0 or all zeros is the main one.
        prepend_axis_num: Number of global axes that the local tensor does not have.
        allow_shape_mismatch: On load, accept another stored global shape, e.g. with more padding:
            the common part is loaded.
        flattened_range: ``data`` holds only this slice of the flattened local tensor.
        writer: Which rank stores the shard if several hold it (see ``dist_ckpt.types.Writer``).

    Raises:
        InvalidShardingError: If the fields contradict each other; the message lists all points.
    """

    key: str
    data: torch.Tensor | None = field(repr=False)
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None
    writer: Writer = field(default="main", kw_only=True)

    def __post_init__(self) -> None:
        """Turn the fields into plain tuples and ints, then check them."""
        if self._is_common_case():
            return
        where = f"ShardedTensor {self.key!r}"
        self.local_shape = plain_ints(self.local_shape, where, "local_shape")
        self.global_shape = plain_ints(self.global_shape, where, "global_shape")
        self.global_offset = plain_ints(self.global_offset, where, "global_offset")
        if self.axis_fragmentations is not None:
            self.axis_fragmentations = plain_ints(
                self.axis_fragmentations, where, "axis_fragmentations"
            )
        if self.flattened_range is not None:
            self.flattened_range = plain_range(self.flattened_range, self.local_shape, where)
        self.replica_id = plain_replica_id(self.replica_id, where)
        self.validate_metadata_integrity()

    def _is_common_case(self) -> bool:
        """Whether all is in order, by a quick look that says no where a closer one is needed."""
        data, local = self.data, self.local_shape
        return (
            type(self.replica_id) is int
            and self.prepend_axis_num == 0
            and self.flattened_range is None
            and is_regular_place(
                local, self.global_shape, self.global_offset, self.axis_fragmentations
            )
            and type(self.dtype) is torch.dtype
            and (
                data is None
                or (
                    type(data) in _TENSORS
                    and data.dtype == self.dtype
                    and not data.is_nested
                    and data.shape == local
                )
            )
            and self.writer in _WRITERS
        )

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: torch.Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        allow_shape_mismatch: bool = False,
        flattened_range: None = None,
        writer: Writer = "main",
    ) -> ShardedTensor:
        """Describe a shard of a regular grid by its place in the grid.

        Each of ``rank_offsets`` is ``(axis, offset, fragments)``: the global ``axis`` (prepended
        ones count) is cut into ``fragments`` equal shards and this is the one with index
        ``offset``. ``flattened_range`` must be None; the rest is as in the class.

        Raises:
            InvalidShardingError: If a rank offset is impossible or an axis is given twice.
        """
        if flattened_range is not None:
            raise InvalidShardingError(
                f"ShardedTensor {key!r}: from_rank_offsets got flattened_range={flattened_range}.",
                hint="use from_rank_offsets_flat for flattened tensors.",
            )
        shape = tuple(data.shape)
        grid = place_in_grid(key, shape, rank_offsets, prepend_axis_num=prepend_axis_num)
        options = (replica_id, prepend_axis_num, allow_shape_mismatch)
        return cls(key, data, data.dtype, shape, *grid, *options, writer=writer)

    @classmethod
    def from_rank_offsets_flat(
        cls,
        key: str,
        data: torch.Tensor,
        non_flat_local_shape: tuple[int, ...],
        *rank_offsets: tuple[int, int, int],
        flattened_range: slice | None = None,
        **options: Any,
    ) -> ShardedTensor:
        """Describe a shard of which this rank holds only a range of its flattened elements.

        ``data`` is 1-D and holds the range; ``non_flat_local_shape`` is the shard's shape before
        flattening; ``options`` are the other fields of the class.

        Raises:
            InvalidShardingError: If there is no range, or data or offsets do not fit it.
        """
        if flattened_range is None:
            raise InvalidShardingError(
                f"Cannot instantiate a non-flat ShardedTensor {key!r}: flattened_range is missing.",
                hint="use from_rank_offsets for tensors that are not flattened.",
            )
        if data.ndim != 1:
            raise InvalidShardingError(
                f"Flattened ShardedTensor requires 1D data: {key!r} has shape {tuple(data.shape)}."
            )
        shape = plain_ints(non_flat_local_shape, f"ShardedTensor {key!r}", "non_flat_local_shape")
        grid = place_in_grid(
            key, shape, rank_offsets, prepend_axis_num=options.get("prepend_axis_num", 0)
        )
        return cls(key, data, data.dtype, shape, *grid, flattened_range=flattened_range, **options)

    @property
    def has_regular_grid(self) -> bool:
        """Whether all shards of the global tensor have the same shape, in a full grid."""
        return self.axis_fragmentations is not None

    def global_slice(self) -> tuple[int | slice, ...]:
        """Return the index of the shard in the global tensor: ints for the prepended axes."""
        head = self.global_offset[: self.prepend_axis_num]
        tail = self.global_offset[self.prepend_axis_num :]
        return (*head, *(slice(o, o + n) for o, n in zip(tail, self.local_shape, strict=True)))

    def global_coordinates(self) -> tuple[np.ndarray[Any, Any], ...]:
        """Return the coordinates, in the global tensor, of each element of a flattened range.

        Raises:
            InvalidShardingError: If there is no ``flattened_range``.
        """
        import numpy as np  # noqa: PLC0415 - the module must not load numpy

        start, stop = self._range("global_coordinates")
        head = (np.zeros(stop - start, dtype=np.int64) for _ in range(self.prepend_axis_num))
        local = (*head, *self.local_coordinates())
        return tuple(c + o for c, o in zip(local, self.global_offset, strict=True))

    def local_coordinates(self) -> tuple[np.ndarray[Any, Any], ...]:
        """Return the coordinates, in the local tensor, of each element of a flattened range.

        Raises:
            InvalidShardingError: If there is no ``flattened_range``.
        """
        import numpy as np  # noqa: PLC0415 - the module must not load numpy

        start, stop = self._range("local_coordinates")
        if not self.local_shape:
            return ()
        return tuple(np.unravel_index(np.arange(start, stop), self.local_shape))

    def _range(self, name: str) -> tuple[int, int]:
        if self.flattened_range is None:
            raise InvalidShardingError(
                f"`{name}` is undefined for ShardedTensor {self.key!r} without `flattened_range`."
            )
        return self.flattened_range.start, self.flattened_range.stop

    def local_chunk_offset_in_global(self) -> tuple[int, ...]:
        """Return the index of the shard in the (regular) grid of shards, per global axis."""
        self._fragmentations("local_chunk_offset_in_global")
        return tuple(
            o // n if n else 0 for o, n in zip(self.global_offset, self._extents(), strict=True)
        )

    def max_allowed_chunks(self) -> tuple[int, ...]:
        """Return the largest chunk shape of which each shard holds a whole number.

        Raises:
            InvalidShardingError: If the grid is irregular, or an axis is not divisible by its
                number of shards (and ``allow_shape_mismatch`` is False).
        """
        fragmentations = self._fragmentations("max_allowed_chunks")
        uneven = [s % f for s, f in zip(self.global_shape, fragmentations, strict=True)]
        if any(uneven) and not self.allow_shape_mismatch:
            raise InvalidShardingError(
                f"Axis shape ({self.global_shape}) not divisible by axis fragmentation "
                f"({fragmentations}) in ShardedTensor {self.key!r}."
            )
        return tuple(s // f for s, f in zip(self.global_shape, fragmentations, strict=True))

    def _fragmentations(self, name: str) -> tuple[int, ...]:
        if self.axis_fragmentations is None:
            raise InvalidShardingError(
                f"`{name}` is undefined for ShardedTensor {self.key!r}: its grid is irregular "
                "(axis_fragmentations is None)."
            )
        return self.axis_fragmentations

    def init_data(
        self, device: torch.device | str, init_fn: Callable[..., torch.Tensor] = torch.empty
    ) -> None:
        """Create ``data``, no larger than this rank's part, unless there is some.

        ``init_fn`` is called with the shape, ``dtype`` and ``device``.
        """
        if self.data is None:
            self.data = init_fn(self.data_shape, dtype=self.dtype, device=device)

    def without_data(self) -> ShardedTensor:
        """Return a copy whose ``data`` is None."""
        if type(self) is not ShardedTensor:
            return replace(self, data=None)
        return ShardedTensor(
            self.key,
            None,
            self.dtype,
            self.local_shape,
            self.global_shape,
            self.global_offset,
            self.axis_fragmentations,
            self.replica_id,
            self.prepend_axis_num,
            self.allow_shape_mismatch,
            self.flattened_range,
            writer=self.writer,
        )

    def pieces(self) -> Iterator[tuple[Box, torch.Tensor | None]]:
        """Yield this rank's boxes of the global tensor, each with its view of ``data``.

        One box of the whole shard (which may be empty), or the boxes that make up the flattened
        range, in order. The views share memory with ``data``, have the shape of their box, and are
        detached: writing to them is no operation of autograd. They are None if ``data`` is.
        """
        data = None if self.data is None else self.data.detach()
        ones = (1,) * self.prepend_axis_num
        if self.flattened_range is None:
            view = data[(None,) * len(ones)] if ones and data is not None else data
            yield Box(self.global_offset, self._extents()), view
            return
        start, stop = self.flattened_range.start, self.flattened_range.stop
        for position, inner in boxes_of_flat_range(self.local_shape, start, stop):
            local_offset = (*(0 for _ in ones), *inner.offset)
            offset = (a + b for a, b in zip(self.global_offset, local_offset, strict=True))
            box = Box(tuple(offset), ones + inner.shape)
            # One dimension of any stride can be split into several: `view` never has to copy.
            part = None if data is None else data.narrow(0, position, box.numel).view(box.shape)
            yield box, part

    def narrow(self, dim: int, start: int, length: int) -> list[ShardedTensor]:
        """Narrow the local tensor on each rank alike, as ``torch.narrow`` does.

        The global shape shrinks in proportion. ``dim`` is an axis of the local tensor; prepended
        axes do not count. Returns one shard, or none if its flattened range has nothing left.

        Raises:
            InvalidShardingError: If the axis or the range does not exist, the shards differ in size
                there, or a flattened tensor is narrowed on another axis than the first.
        """
        dim = self._check_narrow(dim, start, length)
        local, axis = self.local_shape[dim], dim + self.prepend_axis_num

        def scaled(values: tuple[int, ...]) -> tuple[int, ...]:
            # An empty local tensor stays as it is; its axis cannot get shorter.
            new = values[axis] // local * length if local else values[axis]
            return (*values[:axis], new, *values[axis + 1 :])

        data, flattened_range = self.data, self.flattened_range
        if flattened_range is not None:
            row = math.prod(self.local_shape[1:])
            first = max(flattened_range.start, start * row)
            last = min(flattened_range.stop, (start + length) * row)
            if last <= first:
                return []
            if data is not None:
                data = data.narrow(0, first - flattened_range.start, last - first)
            flattened_range = slice(first - start * row, last - start * row)
        elif data is not None:
            data = data.narrow(dim, start, length)
        narrowed = replace(
            self.without_data(),
            local_shape=(*self.local_shape[:dim], length, *self.local_shape[dim + 1 :]),
            global_shape=scaled(self.global_shape),
            global_offset=scaled(self.global_offset),
            flattened_range=flattened_range,
        )
        return [replace(narrowed, data=data)]

    def _check_narrow(self, dim: int, start: int, length: int) -> int:
        where = f"Cannot narrow ShardedTensor {self.key!r} to {length} elements from {start} of"
        ndim = len(self.local_shape)
        if not -ndim <= dim < ndim:
            raise InvalidShardingError(
                f"{where} axis {dim}: its local shape is {self.local_shape}.",
                hint="prepended axes do not count and cannot be narrowed.",
            )
        dim %= ndim
        local, axis = self.local_shape[dim], dim + self.prepend_axis_num
        if start < 0 or length < 0 or start + length > local:
            raise InvalidShardingError(f"{where} axis {dim}: it has {local}.")
        if self.flattened_range is not None and dim != 0:
            raise InvalidShardingError(
                f"{where} axis {dim}: a flattened tensor can only be narrowed on axis 0."
            )
        offset, size = self.global_offset[axis], self.global_shape[axis]
        if local and (offset % local or size % local):
            raise InvalidShardingError(
                f"{where} axis {dim}: offset {offset} and global size {size} are not multiples of "
                f"the local size {local}, so the other shards differ in size."
            )
        return dim

    def validate_metadata_integrity(self) -> None:
        """Check that the fields fit each other.

        Raises:
            InvalidShardingError: With everything that does not fit.
        """
        problems = [*self._shape_problems(), *self._data_problems()]
        if self.writer not in _WRITERS:
            problems.append(f"writer must be 'main', 'any' or 'first', not {self.writer!r}")
        if problems:
            hint = None
            if hasattr(self.data, "to_local"):
                hint = "describe a model with DTensors by dist_ckpt.derive.sharded_state_dict."
            raise InvalidShardingError(
                f"ShardedTensor {self.key!r} is invalid: {'; '.join(problems)}.", hint=hint
            )

    def _extents(self) -> tuple[int, ...]:
        return (1,) * self.prepend_axis_num + self.local_shape

    @property
    def data_shape(self) -> tuple[int, ...]:
        """Shape of ``data``: that of the shard, or 1-D for a flattened range."""
        if self.flattened_range is None:
            return self.local_shape
        return (self.flattened_range.stop - self.flattened_range.start,)

    def _shape_problems(self) -> Iterator[str]:
        ndim = len(self.global_shape)
        if self.prepend_axis_num < 0 or len(self._extents()) != ndim:
            yield (
                f"global_shape {self.global_shape} needs as many axes as prepend_axis_num "
                f"{self.prepend_axis_num} and local_shape {self.local_shape} together"
            )
            return
        fragmentations = self.axis_fragmentations
        for name, values in (
            ("global_offset", self.global_offset),
            (
                "axis_fragmentations",
                (1,) * ndim if fragmentations is None else fragmentations,
            ),
        ):
            if len(values) != ndim:
                yield f"{name} {values} needs as many axes as global_shape {self.global_shape}"
                return
        if min((*self.local_shape, *self.global_shape, *self.global_offset), default=0) < 0:
            yield "shapes and offsets must not be negative"
            return
        if fragmentations is not None and min(fragmentations, default=1) < 1:
            yield f"axis_fragmentations {fragmentations} must be positive"
        for axis, (o, n, size) in enumerate(
            zip(self.global_offset, self._extents(), self.global_shape, strict=True)
        ):
            if o + n > size and not self.allow_shape_mismatch:
                yield f"axis {axis}: offset {o} + extent {n} exceeds the global size {size}"
            if fragmentations is not None and n and o % n:
                yield (
                    f"axis {axis}: offset {o} is not a multiple of the extent {n} "
                    "(axis_fragmentations=None describes irregular grids)"
                )

    def _data_problems(self) -> Iterator[str]:
        # As objects: whatever the annotations say, users pass what they have.
        data, dtype = cast("object", self.data), cast("object", self.dtype)
        if not isinstance(dtype, torch.dtype):
            yield f"dtype must be a torch.dtype, not {dtype!r}"
        if hasattr(data, "to_local"):
            yield "data is a DTensor, which is not a local tensor"
        elif isinstance(data, torch.Tensor):
            if data.dtype != dtype:
                yield f"dtype is {dtype} but data has {data.dtype}"
            if data.is_nested:
                yield "data is a nested tensor, which has no shape"
            elif tuple(data.shape) != self.data_shape:
                yield f"data has shape {tuple(data.shape)}, expected {self.data_shape}"
        elif data is not None:
            yield f"data must be a tensor, not {type(data).__name__}"


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Return whether ``replica_id`` is the main one: 0, or only zeros (also none at all).

    Exactly one replica of each shard should be; choosing the ids is up to the caller.
    """
    try:
        return operator.index(replica_id) == 0  # type: ignore[arg-type]  # numpy ints have it too
    except TypeError:
        return all(operator.index(n) == 0 for n in replica_id)  # type: ignore[union-attr]
