"""Our stores do what the kit asks of every store; the kit finds stores that do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt.errors import CorruptedCheckpointError
from dist_ckpt.storage import Extent, LocalStore, Store
from dist_ckpt.storage.checksums import FileSum, sum_of
from dist_ckpt.testing import MemoryStore, StoreConformance
from dist_ckpt.testing.faults import FaultyStore


class TestLocalStore(StoreConformance):
    def make_store(self, folder: Path) -> Store:
        self.folder = folder
        return LocalStore(folder)

    def put(self, name: str, data: bytes) -> None:
        self.add_folder(str(Path(name).parent))
        (self.folder / name).write_bytes(data)

    def get(self, name: str) -> bytes | None:
        path = self.folder / name
        return path.read_bytes() if path.exists() else None

    def add_folder(self, name: str) -> None:
        (self.folder / name).mkdir(parents=True, exist_ok=True)

    def test_links_are_not_followed(self, tmp_path: Path) -> None:
        """Neither of a file nor of a folder: what lies outside is not read."""
        store = self._store(tmp_path)
        (tmp_path / "secret").write_bytes(b"outside")
        (self.folder / "link").symlink_to(tmp_path / "secret")
        (self.folder / "folder").symlink_to(tmp_path)

        for name in ("link", "folder/secret"):
            for act in (
                lambda n=name: store.read(n, max_nbytes=99),
                lambda n=name: store.nbytes(n),
            ):
                with pytest.raises(CorruptedCheckpointError, match="expected a regular file"):
                    act()
        assert store.list() == []


class TestLocalStoreBehindAFaultyOneThatWorks(TestLocalStore):
    """What the fault kit puts in front changes nothing, as long as nothing is to fail."""

    def make_store(self, folder: Path) -> Store:
        return FaultyStore(super().make_store(folder), mode="lie")


class TestMemoryStore(StoreConformance):
    store: Callable[[dict[str, bytes]], Any] = MemoryStore

    def make_store(self, folder: Path) -> Store:
        del folder
        self.files: dict[str, bytes] = {}
        made: Store = type(self).store(self.files)
        return made

    def put(self, name: str, data: bytes) -> None:
        self.files[name] = data

    def get(self, name: str) -> bytes | None:
        return self.files.get(name)


# -- stores that the kit must not let pass -----------------------------------------------------------


class Overwrites(MemoryStore):
    """Creates what is there already."""

    def create(self, name: str, data: bytes) -> FileSum:
        self.files.pop(name, None)
        return super().create(name, data)


class SumsOfNothing(MemoryStore):
    """Claims the checksums of another file."""

    def write(self, name: str, extents: Iterable[Extent], *, nbytes: int) -> FileSum:
        super().write(name, extents, nbytes=nbytes)
        return sum_of(bytes(nbytes))


class TakesAllFirst(MemoryStore):
    """Looks at the pieces when all of them are made."""

    def write(self, name: str, extents: Iterable[Extent], *, nbytes: int) -> FileSum:
        return super().write(name, list(extents), nbytes=nbytes)


class ReadsShort(MemoryStore):
    """Does not tell that a file ends too early."""

    def read_ranges(self, name: str, extents: Sequence[Extent]) -> None:
        for extent in extents:
            found = self._data(name)[extent.position :][: len(extent.buffer)]
            memoryview(extent.buffer)[: len(found)] = found


class Unsorted(MemoryStore):
    """Lists all names as they come."""

    def list(self) -> list[str]:
        return list(self.files)


class Believes(MemoryStore):
    """Takes any name."""

    def nbytes(self, name: str) -> int | None:
        return len(self.files[name]) if name in self.files else None


class ReadsItself(MemoryStore):
    """Keeps what it has written to itself: it agrees with itself, and with nobody else."""

    def __init__(self, files: dict[str, bytes]) -> None:
        del files
        super().__init__({})


BROKEN: dict[str, tuple[type, str]] = {
    "overwrites": (Overwrites, "test_nothing_is_written_twice"),
    "overwrites in a race": (Overwrites, "test_one_of_many_creates_a_file"),
    "other checksums": (SumsOfNothing, "test_a_file_is_what_was_written"),
    "other checksums of pieces": (SumsOfNothing, "test_pieces_may_come_in_any_order"),
    "late pieces": (TakesAllFirst, "test_pieces_are_taken_one_at_a_time"),
    "short reads": (ReadsShort, "test_short_files_are_errors"),
    "names unsorted": (Unsorted, "test_names_are_listed_and_removed"),
    "names unchecked": (Believes, "test_names_do_not_leave_the_store"),
    "agrees with itself": (ReadsItself, "test_what_is_read_is_what_is_there"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_store_fails(name: str, tmp_path: Path) -> None:
    """The same test passes with the store as it should be."""
    broken, test = BROKEN[name]
    (tmp_path / "good").mkdir()
    (tmp_path / "bad").mkdir()

    getattr(TestMemoryStore(), test)(tmp_path / "good")
    with pytest.raises((AssertionError, CorruptedCheckpointError, FileNotFoundError)):
        getattr(type("Broken", (TestMemoryStore,), {"store": broken})(), test)(tmp_path / "bad")
