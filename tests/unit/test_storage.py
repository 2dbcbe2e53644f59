"""Files of a directory: bytes at positions, names that stay inside, errors that name the file."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dist_ckpt import (
    CheckpointNotFoundError,
    CorruptedCheckpointError,
    ShardedTensor,
    StorageError,
    load_plain_tensors,
    save,
)
from dist_ckpt.storage import Extent, LocalStore
from dist_ckpt.storage.base import checked_name
from dist_ckpt.storage.failures import storage_errors


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def test_bytes_at_positions(store: LocalStore, tmp_path: Path) -> None:
    """In any order, with holes; read back by ranges."""
    store.write("f", [Extent(6, b"xyz"), Extent(0, memoryview(b"abc"))], nbytes=12)

    assert (tmp_path / "f").read_bytes() == b"abc\0\0\0xyz\0\0\0"
    first, second = bytearray(2), bytearray(4)
    store.read_ranges("f", [Extent(7, memoryview(first)), Extent(0, memoryview(second))])
    assert (bytes(first), bytes(second)) == (b"yz", b"abc\0")
    assert store.nbytes("f") == 12
    assert store.read("f", max_nbytes=12) == (tmp_path / "f").read_bytes()


def test_short_writes_and_reads_go_on(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels move less than they are asked for."""
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, bytes(data[:3]), at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:2]], at))
    data = bytes(range(50))

    store.write("f", [Extent(5, data)], nbytes=55)
    back = bytearray(50)
    store.read_ranges("f", [Extent(5, memoryview(back))])

    assert bytes(back) == data


def test_a_file_that_takes_no_bytes_is_an_error(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be an endless loop."""
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)

    with pytest.raises(StorageError, match="took no bytes"):
        store.write("f", [Extent(0, b"abc")], nbytes=3)


def test_a_short_file_is_corruption(store: LocalStore) -> None:
    """With the file, its end, and what was expected."""
    store.create("f", b"abc")

    with pytest.raises(CorruptedCheckpointError, match="f: ends at byte 3; 2 more bytes"):
        store.read_ranges("f", [Extent(1, memoryview(bytearray(4)))])
    with pytest.raises(CorruptedCheckpointError, match="longer than the 2 bytes"):
        store.read("f", max_nbytes=2)


def test_nothing_is_overwritten(store: LocalStore) -> None:
    """Two writers of one name are an error."""
    store.create("f", b"abc")

    for call in (
        lambda: store.create("f", b"x"),
        lambda: store.write("f", [Extent(0, b"x")], nbytes=1),
    ):
        with pytest.raises(StorageError, match=r"f.*EEXIST"):
            call()
    assert store.read("f", max_nbytes=9) == b"abc"


def test_what_is_not_there(store: LocalStore, tmp_path: Path) -> None:
    """Reading is an error of its own; asking and deleting are not."""
    assert store.nbytes("f") is None
    store.delete("f")
    for call in (
        lambda: store.read("f", max_nbytes=1),
        lambda: store.read_ranges("f", []),
    ):
        with pytest.raises(CheckpointNotFoundError, match=r"cannot read .*f: no such file"):
            call()
    (tmp_path / "folder").mkdir()
    store.create("b", b"")
    store.create("a", b"")
    assert store.list() == ["a", "b"]
    store.delete("a")
    assert store.list() == ["b"]


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/../../x", "/etc/passwd", "a//b", "a\0b"]
)
def test_names_stay_inside(store: LocalStore, name: str) -> None:
    """No name of a file leads out of the root."""
    with pytest.raises(ValueError, match="unsafe file name"):
        checked_name(name)
    with pytest.raises(ValueError, match="unsafe"):
        store.nbytes(name)
    assert checked_name("a/b.c") == "a/b.c"


def test_errors_tell_and_travel(tmp_path: Path) -> None:
    """Action, path, errno and hint; also after pickling."""
    with pytest.raises(StorageError) as caught, storage_errors("write", tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    text = str(pickle.loads(pickle.dumps(caught.value)))
    assert text.startswith(f"cannot write {tmp_path}: No space left on device (ENOSPC).")
    assert "hint: the disk is full" in text
    assert isinstance(caught.value.__cause__, OSError)


# -- real file systems -----------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs to be root with the right to mount")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def of_size(nbytes: int, value: float) -> dict[str, ShardedTensor]:
    data = torch.full((nbytes // 4,), value)
    return {"x": ShardedTensor.from_rank_offsets("the.key", data)}


def test_a_full_disk(small_disk: Path) -> None:
    """Clear error with key and file, nothing left over, the old one intact; then it works again."""
    save(of_size(300 << 10, 1.0), small_disk / "c")

    with pytest.raises(StorageError, match=r"'the.key'.*distcp.*ENOSPC.*disk is full"):
        save(of_size(900 << 10, 2.0), small_disk / "c")

    assert [entry.name for entry in small_disk.iterdir()] == ["c"]
    assert load_plain_tensors(small_disk / "c")["the.key"][0] == 1.0
    save(of_size(300 << 10, 3.0), small_disk / "c")
    assert load_plain_tensors(small_disk / "c")["the.key"][0] == 3.0


def test_a_read_only_disk(small_disk: Path) -> None:
    """A clear error; what is there still loads."""
    save(of_size(1 << 10, 1.0), small_disk / "c")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)

    for name in ("c", "d"):
        with pytest.raises(StorageError, match=r"EROFS.*read-only"):
            save(of_size(1 << 10, 2.0), small_disk / name)
    assert load_plain_tensors(small_disk / "c")["the.key"][0] == 1.0


def test_a_limit_of_the_file_size(tmp_path: Path) -> None:
    """What a full disk is without being root: clear error, the old one intact, nothing left."""
    save(of_size(400, 1.0), tmp_path / "c")
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, old[1]))
    try:
        with pytest.raises(StorageError, match=r"'the.key'.*distcp.*EFBIG.*file-size limit"):
            save(of_size(4 << 20, 2.0), tmp_path / "c")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)

    assert load_plain_tensors(tmp_path / "c")["the.key"][0] == 1.0
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
