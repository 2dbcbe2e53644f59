"""What every store must do, as tests that its author runs; and a store in memory.

Here: ``StoreConformance``, ``MemoryStore``. Not here: stores that go wrong on purpose
(``testing.faults``). Called by pytest, which is not imported.

A store cannot vouch for itself: what it has written is compared with what a *second way in* sees,
and what it reads was put there by that second way. A subclass gives both::

    class TestMine(StoreConformance):
        def make_store(self, folder):
            return MyStore(folder)

        def put(self, name, data): ...   # not through MyStore

        def get(self, name): ...         # not through MyStore either
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
from typing import TYPE_CHECKING, Any

from dist_ckpt.errors import CheckpointNotFoundError, CorruptedCheckpointError, StorageError
from dist_ckpt.storage.base import Extent, checked_name, held
from dist_ckpt.storage.checksums import BLOCK_NBYTES, FileSum, sum_of
from dist_ckpt.testing._matrix import require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from dist_ckpt.storage import Store

__all__ = ["MemoryStore", "StoreConformance"]

_SIZES = (0, 1, 4095, BLOCK_NBYTES - 1, BLOCK_NBYTES, BLOCK_NBYTES + 1, 3 * BLOCK_NBYTES + 5)
_BAD_NAMES = ("", ".", "..", "../x", "/x", "a/../../x", "a//b", "a/", "a\0b")
_ODD_NAMES = (".hidden", "with blank", "\u00fc\u4e2d", "a" * 200, "-x", "x:y*z?")
_JOIN_SECS = 60.0


class StoreConformance:
    """All that is asked of a store. Subclass it in a test module; pytest collects the tests."""

    def make_store(self, folder: Path) -> Store:
        """Return a new, empty store; ``folder`` exists, is empty and may be used or not."""
        raise NotImplementedError

    def put(self, name: str, data: bytes) -> None:
        """Make the file ``name``, with the folders in its name, without the store."""
        raise NotImplementedError

    def get(self, name: str) -> bytes | None:
        """Return the content of ``name``, None if it is not there, without the store."""
        raise NotImplementedError

    def add_folder(self, name: str) -> None:
        """Make a folder, if files below it need one; not through the store."""

    def _store(self, tmp_path: Path) -> Store:
        folder = tmp_path / "store"
        folder.mkdir()
        return self.make_store(folder)

    # -- writing

    def test_a_file_is_what_was_written(self, tmp_path: Path) -> None:
        """Each way to write makes the bytes that were given, and returns their checksums."""
        store = self._store(tmp_path)
        for number, nbytes in enumerate(_SIZES):
            data = _bytes(nbytes)
            for way, write in _WAYS.items():
                name = f"{way}-{number}"
                told = write(store, name, data)
                found = self.get(name)
                require(found == data, f"{name}: other bytes than the {nbytes} that were given")
                require(told == sum_of(data), f"{name}: the checksums are not those of the bytes")

    def test_pieces_may_come_in_any_order(self, tmp_path: Path) -> None:
        """The file and its checksums are the same; what no piece covers is zeros."""
        store, data = self._store(tmp_path), bytearray(_bytes(2 * BLOCK_NBYTES + 100))
        cuts = [0, 10, BLOCK_NBYTES - 3, BLOCK_NBYTES + 7, 2 * BLOCK_NBYTES, len(data)]
        pieces = [Extent(a, bytes(data[a:b])) for a, b in itertools.pairwise(cuts)]
        for name, chosen in (("back", pieces[::-1]), ("mixed", pieces[1::2] + pieces[::2])):
            told = store.write(name, chosen, nbytes=len(data))
            require(self.get(name) == bytes(data), f"{name}: other bytes than were given")
            require(told == sum_of(data), f"{name}: the checksums are not those of the bytes")
        data[cuts[1] : cuts[2]] = bytes(cuts[2] - cuts[1])
        told = store.write("gap", [pieces[0], *pieces[2:]], nbytes=len(data))
        require(self.get("gap") == bytes(data), "a gap is not zeros")
        require(told == sum_of(data), "gap: the checksums are not those of the bytes")

    def test_pieces_are_taken_one_at_a_time(self, tmp_path: Path) -> None:
        """One buffer may serve for all of them."""
        store, buffer = self._store(tmp_path), bytearray(1000)

        def pieces() -> Iterator[Extent]:
            for number in range(5):
                buffer[:] = bytes([number]) * 1000
                yield Extent(number * 1000, memoryview(buffer))

        store.write("x", pieces(), nbytes=5000)
        wanted = b"".join(bytes([number]) * 1000 for number in range(5))
        require(self.get("x") == wanted, "a piece was looked at after the next one was asked for")

    def test_an_error_of_the_caller_passes_through(self, tmp_path: Path) -> None:
        """What the pieces raise is raised; the name can be removed and used again."""
        store = self._store(tmp_path)

        def pieces() -> Iterator[Extent]:
            yield Extent(0, b"ab")
            raise ZeroDivisionError("of the caller")

        error = _raised(lambda: store.write("x", pieces(), nbytes=4))
        require(isinstance(error, ZeroDivisionError), f"{error!r}")
        store.delete("x")
        store.create("x", b"good")
        require(self.get("x") == b"good", "the name could not be used again")

    def test_nothing_is_written_twice(self, tmp_path: Path) -> None:
        """A file that is there is an error that names it, and stays what it is."""
        store = self._store(tmp_path)
        self.put("x", b"old")
        for way, write in _WAYS.items():
            error = _raised(lambda write=write: write(store, "x", b"new"))  # type: ignore[misc]  # called at once
            require(isinstance(error, StorageError), f"{way} over a file: {error!r}")
            require("x" in str(error), f"{way}: the file is not named: {error}")
            require(self.get("x") == b"old", f"{way} has changed a file that was there")

    def test_one_of_many_creates_a_file(self, tmp_path: Path) -> None:
        """Of threads that create one name, exactly one succeeds, and its bytes are there."""
        store = self._store(tmp_path)
        outcomes = _together(8, lambda number: store.create("x", bytes([number]) * 100))
        good = [number for number, error in enumerate(outcomes) if error is None]
        require(len(good) == 1, f"{len(good)} threads have created one file")
        require(self.get("x") == bytes([good[0]]) * 100, "the bytes are those of another thread")
        wrong = [e for e in outcomes if e is not None and not isinstance(e, StorageError)]
        require(not wrong, f"{wrong}")

    def test_a_writer_can_be_given_up(self, tmp_path: Path) -> None:
        """``abandon`` may come at any time, and again; the name can be removed and used again."""
        store = self._store(tmp_path)
        writer = store.writer("x", nbytes=10)
        writer.write_at(0, memoryview(b"abc"))
        writer.abandon()
        writer.abandon()
        store.delete("x")
        require(self.get("x") is None, "a file that was given up cannot be removed")
        writer = store.writer("x", nbytes=3)
        writer.write_at(0, memoryview(b"abc"))
        require(writer.finish() == sum_of(b"abc"), "the checksums are not those of the bytes")
        writer.abandon()
        require(self.get("x") == b"abc", "`abandon` after `finish` has changed the file")

    # -- reading

    def test_what_is_read_is_what_is_there(self, tmp_path: Path) -> None:
        """Whole, and in ranges of any order and size, which may overlap."""
        store, data = self._store(tmp_path), _bytes(BLOCK_NBYTES + 500)
        self.put("x", data)
        require(store.read("x", max_nbytes=len(data)) == data, "`read` returns other bytes")
        spans = [(5, 5), (0, 10), (BLOCK_NBYTES - 9, BLOCK_NBYTES + 9), (3, 30), (0, len(data))]
        buffers = [bytearray(b - a) for a, b in spans]
        extents = [Extent(a, memoryview(b)) for (a, _), b in zip(spans, buffers, strict=True)]
        store.read_ranges("x", extents)
        for (a, b), found in zip(spans, buffers, strict=True):
            require(found == data[a:b], f"`read_ranges` of {a} to {b} has other bytes")

    def test_a_file_that_is_held_reads_the_same(self, tmp_path: Path) -> None:
        """A store that can keep a file open for a thread reads it as it does otherwise."""
        store, data = self._store(tmp_path), _bytes(BLOCK_NBYTES)
        self.put("x", data)
        with held(store, "x"), held(store, "x"):
            for start in (0, 100, BLOCK_NBYTES - 7):
                buffer = bytearray(7)
                store.read_ranges("x", [Extent(start, memoryview(buffer))])
                require(buffer == data[start : start + 7], f"{start}: other bytes inside `held`")
        store.delete("x")
        extent = Extent(0, memoryview(bytearray(1)))
        error = _raised(lambda: store.read_ranges("x", [extent]))
        require(isinstance(error, CheckpointNotFoundError), f"kept open after `held`: {error!r}")

    def test_empty_files_are_files(self, tmp_path: Path) -> None:
        """They have a size, are listed and can be read."""
        store = self._store(tmp_path)
        self.put("x", b"")
        require(store.nbytes("x") == 0, "an empty file has no size")
        require(store.list() == ["x"], "an empty file is not listed")
        require(store.read("x", max_nbytes=0) == b"", "an empty file cannot be read")

    def test_short_files_are_errors(self, tmp_path: Path) -> None:
        """A range that ends behind the file is damage, told by its name; so is a long text."""
        store = self._store(tmp_path)
        self.put("x", b"abcdef")
        for start, nbytes in ((0, 7), (5, 2), (6, 1), (100, 1)):
            extent = Extent(start, memoryview(bytearray(nbytes)))
            error = _raised(lambda extent=extent: store.read_ranges("x", [extent]))  # type: ignore[misc]  # called at once
            require(isinstance(error, CorruptedCheckpointError), f"{start}+{nbytes}: {error!r}")
            require("x" in str(error), f"the file is not named: {error}")
        error = _raised(lambda: store.read("x", max_nbytes=5))
        require(isinstance(error, CorruptedCheckpointError), f"longer than allowed: {error!r}")

    def test_what_is_not_there_is_told(self, tmp_path: Path) -> None:
        """Reading it is an error that names it; it has no size; removing it does nothing."""
        store = self._store(tmp_path)
        extent = Extent(0, memoryview(bytearray(1)))
        for act in (
            lambda: store.read("gone", max_nbytes=9),
            lambda: store.read_ranges("gone", [extent]),
        ):
            error = _raised(act)
            require(isinstance(error, CheckpointNotFoundError), f"{error!r}")
            require("gone" in str(error), f"the file is not named: {error}")
        require(store.nbytes("gone") is None, "a file that is not there has a size")
        store.delete("gone")
        require(store.list() == [], "there are files in an empty store")

    # -- names

    def test_names_are_listed_and_removed(self, tmp_path: Path) -> None:
        """Sorted, those directly below the root alone; a name that is removed can be used again."""
        store = self._store(tmp_path)
        for name in ("b", "a", "deep/c", ".d"):
            self.put(name, name.encode())
        require(store.list() == [".d", "a", "b"], f"{store.list()}")
        require(store.nbytes("deep/c") == 6, "a file in a folder has another size")  # noqa: PLR2004 - of its name
        store.delete("b")
        store.delete("deep/c")
        require(self.get("b") is None and self.get("deep/c") is None, "`delete` has left a file")
        require(self.get("a") == b"a", "`delete` has removed another file")
        store.create("b", b"again")
        require(self.get("b") == b"again", "a name that was removed cannot be used again")

    def test_any_name_of_a_file_is_taken(self, tmp_path: Path) -> None:
        """Blanks, dots, other alphabets, long ones, and folders."""
        store = self._store(tmp_path)
        self.add_folder("folder/deep")
        for name in (*_ODD_NAMES, "folder/deep/x"):
            store.create(name, name.encode())
            require(self.get(name) == name.encode(), f"{name!r} is not there")
            found = store.read(name, max_nbytes=1000)
            require(found == name.encode(), f"{name!r} cannot be read")
            require(store.nbytes(name) == len(name.encode()), f"{name!r} has another size")

    def test_names_do_not_leave_the_store(self, tmp_path: Path) -> None:
        """``ValueError`` for what is no plain relative name; nothing outside is read or made."""
        store = self._store(tmp_path)
        (tmp_path / "x").write_bytes(b"outside")
        for name in _BAD_NAMES:
            for what, act in _operations(store, name).items():
                error = _raised(act)
                require(isinstance(error, ValueError), f"{what} of {name!r}: {error!r}")
        require((tmp_path / "x").read_bytes() == b"outside", "a file outside was changed")
        require({path.name for path in tmp_path.iterdir()} == {"store", "x"}, "made outside")

    # -- several threads

    def test_threads_do_not_disturb_each_other(self, tmp_path: Path) -> None:
        """Each with files of its own, and all with one that they read."""
        store, shared = self._store(tmp_path), _bytes(BLOCK_NBYTES + 3)
        self.put("shared", shared)

        def work(number: int) -> None:
            for turn in range(5):
                name, data = f"{number}-{turn}", bytes([number, turn]) * (1000 + number)
                require(_WAYS["writer"](store, name, data) == sum_of(data), "other checksums")
                require(store.read(name, max_nbytes=len(data)) == data, "other bytes")
                buffer = bytearray(len(shared) - number)
                store.read_ranges("shared", [Extent(number, memoryview(buffer))])
                require(buffer == shared[number:], "other bytes of a file that all read")

        errors = [error for error in _together(6, work) if error is not None]
        require(not errors, f"{errors}")
        require(len(store.list()) == 6 * 5 + 1, "files are missing")


class MemoryStore:
    """A store in memory: the reference, and quick where no disk is on trial.

    Args:
        files: Where the files are, by name; a new dictionary if None. May be shared with others.
    """

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        """Remember the files."""
        self.files = {} if files is None else files
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        """Tell how many files there are."""
        return f"MemoryStore({len(self.files)} files)"

    def writer(self, name: str, *, nbytes: int) -> _MemoryWriter:
        """Create ``name``, empty until it is finished."""
        with self._lock:
            if checked_name(name) in self.files:
                raise _exists(name)
            self.files[name] = b""
        return _MemoryWriter(self.files, name, nbytes)

    def write(self, name: str, extents: Iterable[Extent], *, nbytes: int) -> FileSum:
        """Create ``name`` from ``extents``."""
        writer = self.writer(name, nbytes=nbytes)
        for extent in extents:
            writer.write_at(extent.position, memoryview(extent.buffer))
        return writer.finish()

    def create(self, name: str, data: bytes) -> FileSum:
        """Create ``name``."""
        return self.write(name, [Extent(0, data)], nbytes=len(data))

    def read(self, name: str, *, max_nbytes: int) -> bytes:
        """Return a file."""
        data = self._data(name)
        if len(data) > max_nbytes:
            raise CorruptedCheckpointError(f"{name}: longer than the {max_nbytes} bytes allowed.")
        return data

    def read_ranges(self, name: str, extents: Sequence[Extent]) -> None:
        """Fill the buffers of ``extents``."""
        data = self._data(name)
        for extent in extents:
            view = memoryview(extent.buffer)
            found = data[extent.position : extent.position + view.nbytes]
            if len(found) != view.nbytes:
                raise CorruptedCheckpointError(
                    f"{name}: {view.nbytes} bytes at {extent.position} of {len(data)}."
                )
            view[:] = found

    def list(self) -> list[str]:
        """Return the names directly below the root."""
        return sorted(name for name in self.files if "/" not in name)

    def delete(self, name: str) -> None:
        """Remove ``name`` if it is there."""
        self.files.pop(checked_name(name), None)

    def nbytes(self, name: str) -> int | None:
        """Return the size of ``name``, or None."""
        data = self.files.get(checked_name(name))
        return None if data is None else len(data)

    def _data(self, name: str) -> bytes:
        try:
            return self.files[checked_name(name)]
        except KeyError:
            raise CheckpointNotFoundError(f"cannot read {name}: no such file.") from None


class _MemoryWriter:
    def __init__(self, files: dict[str, bytes], name: str, nbytes: int) -> None:
        self._files, self._name, self._content = files, name, bytearray(nbytes)

    def write_at(self, position: int, data: memoryview) -> None:
        self._content[position : position + data.nbytes] = data.cast("B")

    def finish(self) -> FileSum:
        self._files[self._name] = bytes(self._content)
        return sum_of(self._content)

    def abandon(self) -> None:
        pass


def _exists(name: str) -> StorageError:
    return StorageError(f"cannot create {name}: {os.strerror(errno.EEXIST)} (EEXIST).")


def _bytes(nbytes: int) -> bytes:
    """Return bytes of which no two near blocks are equal."""
    return bytes(range(251)) * (nbytes // 251) + bytes(nbytes % 251)


def _by_writer(store: Store, name: str, data: bytes) -> FileSum:
    writer = store.writer(name, nbytes=len(data))
    try:
        middle = len(data) // 2
        writer.write_at(0, memoryview(data)[:middle])
        writer.write_at(middle, memoryview(data)[middle:])
        return writer.finish()
    finally:
        writer.abandon()


_WAYS: dict[str, Callable[[Store, str, bytes], FileSum]] = {
    "create": lambda store, name, data: store.create(name, data),
    "write": lambda store, name, data: store.write(name, [Extent(0, data)], nbytes=len(data)),
    "writer": _by_writer,
}


def _operations(store: Store, name: str) -> dict[str, Callable[[], Any]]:
    extent = Extent(0, memoryview(bytearray(1)))
    return {
        **{way: lambda write=write: write(store, name, b"z") for way, write in _WAYS.items()},  # type: ignore[misc]  # called at once
        "read": lambda: store.read(name, max_nbytes=100),
        "read_ranges": lambda: store.read_ranges(name, [extent]),
        "delete": lambda: store.delete(name),
        "nbytes": lambda: store.nbytes(name),
    }


def _raised(act: Callable[[], object]) -> BaseException | None:
    try:
        act()
    except Exception as error:  # noqa: BLE001 - which one it is, is the question
        return error
    return None


def _together(count: int, act: Callable[[int], object]) -> list[BaseException | None]:
    """Call ``act`` with each number on a thread of its own; return what they raised."""
    outcomes: list[BaseException | None] = [None] * count
    gate = threading.Barrier(count)

    def work(number: int) -> None:
        gate.wait(_JOIN_SECS)
        outcomes[number] = _raised(lambda: act(number))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_JOIN_SECS)
    require(not any(thread.is_alive() for thread in threads), "a thread does not end")
    return outcomes
