"""TensorStore: arrays opened, and boxes moved between them and memory.

Here: the only calls of TensorStore, and its errors in our tree. Not here: which boxes (``plan``,
``read``). Called from transfer threads on every rank; nothing here meets other ranks.
"""

from __future__ import annotations

import re
import threading
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dist_ckpt._formats.zarr.metadata import array_dtype
from dist_ckpt._sharding.shard_info import dtype_name
from dist_ckpt._staging_pool.memory import bits
from dist_ckpt.errors import CorruptedCheckpointError, StorageError, UnknownStrategyError
from dist_ckpt.storage.failures import hint_of_errno

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import ModuleType

    import numpy as np
    import torch

    from dist_ckpt.box import Box

__all__ = ["Arrays", "host_array", "tensorstore"]

_FAILURES = (ValueError, TypeError, IndexError, KeyError, RuntimeError, OSError, OverflowError)
"""What TensorStore makes of a status, whose name its text begins with, or of a number too large."""

_ERRNO = re.compile(r"os_error_code='(\d{1,4})'")

_DAMAGE = ("DATA_LOSS", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "NOT_FOUND", "OUT_OF_RANGE")
"""What reading a missing, truncated or altered chunk ends with; all else is the file system's."""


def tensorstore() -> ModuleType:
    """Return the package, imported on first use.

    Raises:
        UnknownStrategyError: It is not installed.
    """
    try:
        import tensorstore as package
    except ImportError as error:
        raise UnknownStrategyError(
            f"zarr arrays that are not plain need TensorStore, which cannot be imported ({error}).",
            hint="install the extra `zarr`: pip install 'dist-ckpt[zarr]'.",
        ) from error
    module: ModuleType = package
    return module


class Arrays:
    """The arrays of one checkpoint, each opened once; for several threads.

    Args:
        directory: The checkpoint.
        file_count: Most files at a time. Nothing is cached.
    """

    def __init__(self, directory: Path, file_count: int) -> None:
        """Open nothing yet."""
        self._directory, self._file_count = directory.absolute(), file_count
        self._opened: dict[str, Any] = {}
        self._lock = threading.Lock()

    @cached_property
    def _package(self) -> Any:
        return tensorstore()

    @cached_property
    def _context(self) -> Any:
        limit = {"limit": self._file_count}
        return self._package.Context(
            {
                "cache_pool": {"total_bytes_limit": 0},
                "data_copy_concurrency": limit,
                "file_io_concurrency": limit,
            }
        )

    def open(self, path: str, document: dict[str, Any], *, key: str) -> Any:
        """Return the array at ``path``, taking ``document`` for its metadata; reads no file.

        A chunk that is not there is damage, never a block of fill values.

        Raises:
            CorruptedCheckpointError: The document describes no array.
        """
        with self._lock:
            if path in self._opened:
                return self._opened[path]
        where = self._directory / path
        spec = {
            "driver": "zarr" if document.get("zarr_format") == 2 else "zarr3",  # noqa: PLR2004
            "kvstore": {"driver": "file", "path": f"{where}/"},
            "metadata": document,
            "assume_metadata": True,
            "store_data_equal_to_fill_value": True,
            "fill_missing_data_reads": False,
        }
        try:
            array = self._package.open(spec, context=self._context).result()
        except _FAILURES as error:
            raise CorruptedCheckpointError(
                f"{key!r}: {where} cannot be opened as an array ({_told(error)})."
            ) from error
        with self._lock:
            return self._opened.setdefault(path, array)

    def read(self, array: Any, box: Box, target: np.ndarray[Any, Any], *, key: str) -> None:
        """Fill ``target``, of any strides, from ``box`` of ``array``.

        Raises:
            CorruptedCheckpointError: A chunk is missing, cut short or altered.
            StorageError: The file system failed.
        """
        source = array[box.slices()][self._package.d[:].translate_to[0]] if box.shape else array
        with _errors(f"{key!r} at {box.offset}", written=False):
            self._package.array(target, context=self._context, copy=False, write=True).write(
                source
            ).result()


@contextmanager
def _errors(what: str, *, written: bool) -> Iterator[None]:
    try:
        yield
    except _FAILURES as error:
        told = _told(error)
        if not written and told.startswith(_DAMAGE):
            raise CorruptedCheckpointError(
                f"{what}: {told}.", hint="use another checkpoint."
            ) from error
        code = _ERRNO.search(told)
        hint = hint_of_errno(int(code[1])) if code else None
        raise StorageError(f"{what}: {told}.", hint=hint) from error


def _told(error: BaseException) -> str:
    """Return TensorStore's message without the dump of its spec."""
    return str(error).split(" [tensorstore_spec=", maxsplit=1)[0].split(" [source locations", 1)[0]


def host_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the memory of a host tensor without pending conjugation, seen as array elements.

    Strides are kept and nothing is copied: only bits ever move. The tensor must have a dtype that
    ``metadata.array_dtype`` knows.
    """
    import ml_dtypes  # noqa: F401, PLC0415 - gives numpy bfloat16 and the fp8 kinds; not light
    import numpy as np  # noqa: PLC0415 - torch has loaded it, but not at import for mypy's sake

    seen = bits(tensor.detach()).numpy()
    dtype = np.dtype(array_dtype(dtype_name(tensor.dtype)))
    return seen if seen.dtype == dtype else seen.view(dtype)
