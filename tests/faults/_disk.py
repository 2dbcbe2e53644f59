"""A disk under watch: called after each operation that changes it, or failing at the n-th one.

Here: the hook on ``os`` and on the exchange of names. Not here: tests. Used by tests of crashes and
of input/output errors, in one process and one thread at a time.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dist_ckpt.storage import commit

CHANGES = (
    "open", "pwrite", "ftruncate", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir", "link",
)  # fmt: skip


class Disk:
    """Hooks the operations; ``after`` is called behind each, ``fail_at`` makes the n-th fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put the hooks in; they do nothing outside of ``watched``."""
        self.after: Callable[[str], None] = lambda _: None
        self.fail_at: int | None = None
        self.code = errno.EIO
        self.done: list[str] = []
        self._on = False
        for name in CHANGES:
            # A copy of the tree sees what was written, synced or not: no need to wait for the disk.
            original = getattr(os, name) if name != "fsync" else lambda _: None
            monkeypatch.setattr(os, name, self._hooked(name, original))
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(commit, "_exchange", self._hooked("exchange", commit._exchange))

    def without_exchange(self) -> None:
        """Be a file system that cannot exchange two names."""

        def refused(a: object, b: object) -> None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

        self._monkeypatch.setattr(commit, "_exchange", refused)

    @contextlib.contextmanager
    def watched(self, *, fail_at: int | None = None, code: int = errno.EIO) -> Iterator[None]:
        """Watch what happens inside."""
        self.done, self.fail_at, self.code, self._on = [], fail_at, code, True
        try:
            yield
        finally:
            self._on = False

    def _hooked(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._on:
                return original(*args, **kwargs)
            if self.fail_at == len(self.done):
                self.done.append(name)
                raise OSError(self.code, os.strerror(self.code), args[0])
            result = original(*args, **kwargs)
            self.done.append(name)
            self._on = False
            try:
                self.after(name)
            finally:
                self._on = True
            return result

        return call
