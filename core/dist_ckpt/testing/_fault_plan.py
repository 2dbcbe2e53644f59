"""When an operation of a store goes wrong, and how; who counts is who knows.

Here: ``FaultPlan``. Not here: the stores that ask it (``testing.faults``). Any thread.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import signal
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from dist_ckpt.errors import StorageError
from dist_ckpt.storage.failures import hint_of_errno

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["READS", "WRITES", "Call", "FaultPlan", "Mode"]

Mode: TypeAlias = Literal["fail", "hang", "tear", "cut", "lie", "kill"]
"""What goes wrong.

- ``fail``: nothing is done, the error is raised.
- ``hang``: nothing is done before ``release``; then it goes on. If nobody releases it in time, the
  error is raised.
- ``tear``: a part is done, then the error is raised.
- ``cut``: a part is done, and success is claimed.
- ``lie``: success is claimed: nothing is written, or other bytes are read.
- ``kill``: this process dies of SIGKILL.
"""

WRITES = frozenset({"writer", "write_at", "finish", "write", "create", "delete"})
READS = frozenset({"read", "read_ranges", "list", "nbytes"})


@dataclass(frozen=True, slots=True)
class Call:
    """One operation of a store: its name, and of which file."""

    operation: str
    name: str


class FaultPlan:
    """When something goes wrong, and what; counts the operations of all stores that share it.

    Args:
        fail_at: At which operation, counted from 1; None for never.
        mode: What goes wrong.
        code: The ``errno`` of the error.
        times: How many operations go wrong, from ``fail_at`` on; None for all of them.
        only: Names of the operations that count; all if None. See ``WRITES`` and ``READS``.
        files: Pattern of the names of files that count, such as ``"*.json"``.
        timeout_secs: How long an operation hangs at most.
    """

    def __init__(
        self,
        fail_at: int | None = None,
        mode: Mode = "fail",
        *,
        code: int = errno.EIO,
        times: int | None = 1,
        only: Collection[str] | None = None,
        files: str = "*",
        timeout_secs: float = 60.0,
    ) -> None:
        """Count from nothing."""
        self.mode, self.code = mode, code
        self._fail_at, self._times, self._only, self._files = fail_at, times, only, files
        self._timeout_secs = timeout_secs
        self._lock = threading.Lock()
        self._calls: list[Call] = []
        self._fired: list[Call] = []
        self._hanging = threading.Event()
        self._released = threading.Event()

    @property
    def calls(self) -> list[Call]:
        """The operations that counted, in the order in which they began."""
        with self._lock:
            return list(self._calls)

    @property
    def fired(self) -> list[Call]:
        """Those that went wrong."""
        with self._lock:
            return list(self._fired)

    def wait_until_hanging(self, timeout_secs: float = 60.0) -> bool:
        """Wait until an operation hangs; False if none did in time."""
        return self._hanging.wait(timeout_secs)

    def release(self) -> None:
        """Let what hangs, now or later, go on."""
        self._released.set()

    def strikes(self, operation: str, name: str) -> bool:
        """Count an operation; return whether it is to tear, to cut or to lie.

        Raises:
            StorageError: It fails, or has hung for too long.
        """
        with self._lock:
            if not self._counts(operation, name):
                return False
            self._calls.append(Call(operation, name))
            if not self._is_due(len(self._calls)):
                return False
            self._fired.append(Call(operation, name))
        if self.mode == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.mode == "fail":
            raise self.error(operation, name)
        if self.mode == "hang":
            self._hanging.set()
            if not self._released.wait(self._timeout_secs):
                raise self.error(operation, name, code=errno.ETIMEDOUT)
            return False
        return True

    def _counts(self, operation: str, name: str) -> bool:
        is_asked = self._only is None or operation in self._only
        return is_asked and fnmatch.fnmatchcase(name, self._files)

    def _is_due(self, number: int) -> bool:
        if self._fail_at is None or number < self._fail_at:
            return False
        return self._times is None or number < self._fail_at + self._times

    def error(self, operation: str, name: str, *, code: int | None = None) -> StorageError:
        """Return what a failing operation raises, with the error of the system as its cause."""
        cause = OSError(code or self.code, os.strerror(code or self.code), name)
        told = errno.errorcode.get(cause.errno or 0, "?")
        error = StorageError(
            f"cannot {operation} {name}: {cause.strerror} ({told}).",
            hint=hint_of_errno(cause.errno or 0),
        )
        error.__cause__ = cause
        return error
