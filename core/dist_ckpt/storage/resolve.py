"""The one door: which store serves a directory.

Here: ``open_store``, and what the test kit may put in front of it. Not here: stores. Any rank, any
thread.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from dist_ckpt.storage.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from dist_ckpt.storage.base import Store

__all__ = ["open_store", "wrapped_stores"]

_wrappers: list[Callable[[Store, Path], Store]] = []


def open_store(directory: Path, *, keeps_pages: bool = False) -> Store:
    """Return the store of the files below ``directory``.

    Args:
        directory: Where they are.
        keeps_pages: Whether what is written stays in the page cache, see ``storage.page_cache``.
    """
    store: Store = LocalStore(directory, keeps_pages=keeps_pages)
    for wrap in _wrappers:
        store = wrap(store, directory)
    return store


@contextmanager
def wrapped_stores(wrap: Callable[[Store, Path], Store]) -> Iterator[None]:
    """Put something in front of every store that this process opens meanwhile: for tests."""
    _wrappers.append(wrap)
    try:
        yield
    finally:
        _wrappers.remove(wrap)
