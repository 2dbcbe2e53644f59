"""What a writer gives to the disk early, and what it makes of the answers."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dist_ckpt.errors import StorageError
from dist_ckpt.storage import Extent, LocalStore, _writeback, local
from dist_ckpt.storage.checksums import sum_of

RUN = 1 << 18
DATA = bytes(range(256)) * 1024 * 24  # 24 runs


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Have small runs, and write down what the system is asked for."""
    monkeypatch.setattr(_writeback, "RUN_NBYTES", RUN)
    monkeypatch.setattr(_writeback, "WINDOW_RUNS", 4)
    return answering(monkeypatch, lambda _: 0)


def answering(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[int], int]
) -> list[tuple[int, int, int]]:
    """Let the system answer with an errno, given the flags."""
    calls: list[tuple[int, int, int]] = []

    def call(_: int, position: int, nbytes: int, flags: int) -> int:
        calls.append((position, nbytes, flags))
        return answer(flags)

    monkeypatch.setattr(_writeback, "sync_file_range", lambda: call)
    return calls


def test_every_run_is_given_to_the_disk_and_the_window_is_bounded(
    tmp_path: Path, calls: list[tuple[int, int, int]]
) -> None:
    """Each run is begun once, in order; the oldest is waited for when four are under way."""
    LocalStore(tmp_path).write("f", [Extent(0, DATA)], nbytes=len(DATA))

    begun = [position for position, nbytes, flags in calls if flags == 2 and nbytes == RUN]
    ended = [position for position, nbytes, flags in calls if flags == 7 and nbytes == RUN]
    assert begun == list(range(0, len(DATA), RUN))
    assert ended == begun[: len(begun) - 4]
    assert (tmp_path / "f").read_bytes() == DATA


def test_what_comes_in_another_order_is_left_to_fsync(
    tmp_path: Path, calls: list[tuple[int, int, int]]
) -> None:
    """Nothing is told of bytes that nobody has written yet."""
    half = RUN // 2
    starts = [*range(half, len(DATA), RUN), *range(0, len(DATA), RUN)]
    extents = [Extent(start, DATA[start : start + half]) for start in starts]

    found = LocalStore(tmp_path).write("f", extents, nbytes=len(DATA))

    assert calls == []
    assert found == sum_of(DATA)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EPERM])
def test_a_file_system_that_has_no_such_call_is_asked_once(
    tmp_path: Path,
    calls: list[tuple[int, int, int]],
    monkeypatch: pytest.MonkeyPatch,
    code: int,
) -> None:
    """The file is written as if there were no such call."""
    calls = answering(monkeypatch, lambda _: code)

    found = LocalStore(tmp_path).write("f", [Extent(0, DATA)], nbytes=len(DATA))

    assert len(calls) == 1
    assert found == sum_of(DATA)
    assert (tmp_path / "f").read_bytes() == DATA


def test_a_system_without_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is missed."""
    monkeypatch.setattr(_writeback, "RUN_NBYTES", RUN)
    monkeypatch.setattr(_writeback, "sync_file_range", lambda: None)

    assert LocalStore(tmp_path).write("f", [Extent(0, DATA)], nbytes=len(DATA)) == sum_of(DATA)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("flags", [2, 7], ids=["begun", "waited for"])
def test_an_error_of_the_disk_is_never_swallowed(
    tmp_path: Path,
    calls: list[tuple[int, int, int]],
    monkeypatch: pytest.MonkeyPatch,
    flags: int,
    code: int,
) -> None:
    """The kernel tells of it once, here: fsync would succeed."""
    calls = answering(monkeypatch, lambda asked: code if asked == flags else 0)
    before = len(list(Path("/proc/self/fd").iterdir()))

    with pytest.raises(StorageError, match=f"cannot write .*f: .*{errno.errorcode[code]}"):
        LocalStore(tmp_path).write("f", [Extent(0, DATA)], nbytes=len(DATA))

    assert calls[-1][2] == flags
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_real_call_takes_a_real_file(tmp_path: Path) -> None:
    """It is there on Linux, and answers with an errno."""
    call = _writeback.sync_file_range()
    if call is None:
        pytest.skip("no sync_file_range here")
    (tmp_path / "f").write_bytes(DATA)
    descriptor = os.open(tmp_path / "f", os.O_RDWR)
    assert call(descriptor, 0, len(DATA), 7) in (0, errno.ENOSYS, errno.EPERM)
    os.close(descriptor)
    assert call(descriptor, 0, len(DATA), 7) == errno.EBADF


def test_pages_are_dropped_of_large_data_only(
    tmp_path: Path, calls: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents and small files stay in the page cache, and everything if the store keeps pages.

    The disk is given the same runs either way.
    """
    dropped: list[str] = []

    def note(descriptor: int, *_: int) -> None:
        dropped.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)

    monkeypatch.setattr(local, "drop_pages", note)
    monkeypatch.setattr(_writeback, "drop_pages", note)
    small = DATA[: (1 << 20) - 1]

    LocalStore(tmp_path).create("document", DATA)
    calls.clear()
    for keeps_pages in (False, True):
        store = LocalStore(tmp_path, keeps_pages=keeps_pages)
        store.write(f"small {keeps_pages}", [Extent(0, small)], nbytes=len(small))
        store.write(f"large {keeps_pages}", [Extent(0, DATA)], nbytes=len(DATA))

    assert set(dropped) == {"large False"}
    assert calls[: len(calls) // 2] == calls[len(calls) // 2 :]
