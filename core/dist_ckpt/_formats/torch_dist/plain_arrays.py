"""What stands for numpy's values in a record's pickle until it is complete.

Here: dtypes, arrays and numbers of plain kinds. Not here: the other names (``plain_types``). Called
on every rank.

numpy's own functions would believe a dtype that calls any bytes objects; these check everything.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from dist_ckpt._formats.torch_dist.inert import Refused
from dist_ckpt._formats.torch_dist.mcore import checked_shape

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

__all__ = ["Array", "Dtype", "Made", "scalar"]

_KINDS = re.compile(r"([biufc]\d{1,2}|[SU]\d{1,9})", re.ASCII)


class Made:
    """Holds a value that a pickle must not get at: it could call what pickles call of it."""

    def __init__(self, value: Any) -> None:
        """Keep the value."""
        self.value = value


class Dtype(Made):
    """Stands for a ``numpy.dtype`` of numbers or text."""

    def __init__(self, name: str, _align: object = None, _copy: object = None) -> None:
        """Check the name."""
        if not _KINDS.fullmatch(name):
            raise Refused(f"numpy dtype {name!r}")
        super().__init__(_dtype("=" + name))
        self._name = name

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Take the byte order."""
        _, order, subarray, names, fields, *_ = state
        if order not in ("<", ">", "=", "|") or (subarray, names, fields) != (None, None, None):
            raise Refused("numpy dtype of several parts")
        self.value = _dtype(order + self._name)


def _dtype(name: str) -> np.dtype[Any]:
    import numpy as np  # noqa: PLC0415 - only where a record holds its values

    return np.dtype(name)


class Array(Made):
    """Stands for a ``numpy.ndarray`` of numbers or text; ``pay`` is charged what it takes."""

    def __init__(self, pay: Callable[[int], None]) -> None:
        """Begin without a value."""
        super().__init__(None)
        self._pay = pay

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Make the array of its shape, dtype and bytes."""
        import numpy as np  # noqa: PLC0415 - only where a record holds its arrays

        _, shape, dtype, is_fortran, data = state
        if not isinstance(dtype, Dtype) or not isinstance(data, bytes):
            raise Refused("numpy array of objects")
        resolved, shape = dtype.value, checked_shape(shape)
        if len(data) != math.prod(shape) * resolved.itemsize:
            raise ValueError(f"{len(data)} bytes for an array of shape {shape}, {resolved}")
        self._pay(len(data))
        flat = np.frombuffer(data, resolved) if data else np.empty(0, resolved)
        self.value = flat.reshape(shape, order="F" if is_fortran else "C").copy()


def scalar(dtype: Any, data: Any) -> Made:
    """Return what stands for a number of numpy."""
    import numpy as np  # noqa: PLC0415 - only where a record holds its numbers

    if not isinstance(dtype, Dtype) or not isinstance(data, bytes):
        raise Refused("numpy scalar of objects")
    (value,) = np.frombuffer(data, dtype.value)
    return Made(value)
