"""The order of a byte image: every byte once, durable, or an error and nothing."""

from __future__ import annotations

import errno
import itertools
import os
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt._comm.failures import describe_failure
from dist_ckpt._staging_pool.runs import Run
from dist_ckpt._worker import write as writing
from dist_ckpt._worker.messages import Abandon, AllStaged, Begin, Freed, StagedRun
from dist_ckpt._worker.orders import AbandonedError, FileOrder
from dist_ckpt._worker.staged import MappedArena, StagedSave
from dist_ckpt.errors import (
    BarrierTimeoutError,
    CheckpointingException,
    CoordinationError,
    StorageError,
)
from dist_ckpt.storage.checksums import sum_of_file
from tests.unit._orders import Memory, bytes_of, file_orders, runs_of


class Told:
    """What the training process would hear."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.notes: list[tuple[str, int]] = []

    def note(self, phase: str, nbytes: int) -> None:
        self.notes.append((phase, nbytes))


@contextmanager
def staged_in(data: bytes, told: Told, timeout_secs: float = 30) -> Iterator[StagedSave]:
    with Memory(data) as memory:
        arena = MappedArena(os.dup(memory.descriptor), memory.nbytes)
        begin = Begin(
            1, b"", "c", commits=True, arena_key=1, nbytes=len(data), point=None, umask=0o022
        )
        save = StagedSave(
            begin, arena, send=told.messages.append, set_state=told.note, timeout_secs=timeout_secs
        )
        try:
            yield save
        finally:
            save.release()
            arena.leave()


def write(order: FileOrder, runs: list[Run], data: bytes | None = None) -> tuple[Any, Told]:
    told = Told()
    with staged_in(bytes_of(order) if data is None else data, told) as save:
        for run in runs:
            save.take(StagedRun(1, run))
        save.take(AllStaged(1))
        report = order.write(save)
    return report, told


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def no_threads() -> bool:
    return not [t for t in threading.enumerate() if t.name.startswith("dist_ckpt-file")]


@pytest.mark.parametrize("thread_count", [1, 2, 8])
@given(seed=st.integers(0, 1 << 30), sizes=st.lists(st.integers(0, 300), max_size=5))
def test_any_order_of_runs_makes_the_files(
    tmp_path_factory: pytest.TempPathFactory, thread_count: int, seed: int, sizes: list[int]
) -> None:
    """However the bytes are cut, placed and handed over, the files are right; each run is freed."""
    rng = random.Random(seed)  # noqa: S311 - cases, not secrets
    folder = tmp_path_factory.mktemp("image")
    contents = [rng.randbytes(size) for size in sizes]
    pieces = []
    for number, content in enumerate(contents):
        cuts = sorted({0, len(content), *(rng.randint(0, len(content)) for _ in range(3))})
        pieces += [(number, a, content[a:b]) for a, b in itertools.pairwise(cuts)]
    rng.shuffle(pieces)
    arena = b"".join(piece for _, _, piece in pieces)
    runs, offset = [], 0
    for number, position, piece in pieces:
        runs.append(Run(number, position, offset, len(piece)))
        offset += len(piece)
    rng.shuffle(runs)
    files = tuple((f"f{n}", size) for n, size in enumerate(sizes))
    order = FileOrder(folder, files, 0, thread_count=thread_count)

    report, told = write(order, runs, arena)

    assert report == {name: sum_of_file(folder / name) for name, _ in files}
    assert [(folder / name).read_bytes() for name, _ in files] == contents
    assert {m.run for m in told.messages if isinstance(m, Freed)} == set(runs)
    assert no_threads()


def test_blocks_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large run is written in pieces, and progress is told after each."""
    monkeypatch.setattr(writing, "_BLOCK_NBYTES", 64)
    (order,) = file_orders(tmp_path / "c", 1, nbytes=200, files=1)

    _, told = write(order, runs_of(order))

    assert [n for phase, n in told.notes if phase == "writing c"] == [64, 128, 192, 200]
    assert told.notes[-1] == ("syncing c", 200)
    assert (order.directory / "__0_0.distcp").read_bytes() == bytes_of(order)


SHORT: dict[str, tuple[Callable[[list[Run]], list[Run]], str]] = {
    "a run is missing": (lambda runs: runs[:1], "__0_1.distcp: bytes 0 to 1000 were staged never"),
    "a run is short": (
        lambda runs: [replace(runs[0], nbytes=990), runs[1]],
        "__0_0.distcp: bytes 990 to 1000 were staged never",
    ),
    "a run is late": (
        lambda runs: [replace(runs[0], position=10, nbytes=990), runs[1]],
        "__0_0.distcp: bytes 0 to 10 were staged never",
    ),
    "a run comes twice": (
        lambda runs: [*runs, runs[0]],
        "__0_0.distcp: bytes 0 to 1000 were staged twice",
    ),
    "a run overlaps": (
        lambda runs: [*runs, Run(1, 500, 0, 10)],
        "__0_1.distcp: bytes 500 to 1000 were staged twice",
    ),
    "outside of the file": (
        lambda runs: [*runs, Run(1, 995, 0, 10)],
        "10 bytes at 995 were staged for a file of 1000 bytes",
    ),
    "outside of the arena": (
        lambda runs: [*runs, Run(1, 0, 1995, 10)],
        "10 bytes at 1995 of the arena, which has 2000 bytes",
    ),
    "of no file": (lambda runs: [*runs, Run(2, 0, 0, 1)], "a run for file 2 of 2 files"),
    "before the file": (lambda runs: [*runs, Run(0, -1, 0, 1)], "1 bytes at -1"),
}


@pytest.mark.parametrize("case", SHORT)
def test_runs_that_do_not_make_up_the_files(case: str, tmp_path: Path) -> None:
    """The error names the file and the bytes; no thread goes on."""
    change, told = SHORT[case]
    (order,) = file_orders(tmp_path / "c", 1)

    with pytest.raises(CoordinationError) as caught:
        write(order, change(runs_of(order)))

    assert told in str(caught.value)
    assert no_threads()


def test_the_directory_is_not_there(tmp_path: Path) -> None:
    """Another host may not see what rank 0 has made."""
    (order,) = file_orders(tmp_path / "c", 1)
    order.directory.rmdir()

    with pytest.raises(StorageError, match="is not there for rank 0.*that all ranks share"):
        write(order, runs_of(order))

    assert [one.suffix for one in tmp_path.iterdir()] == [".owner"]  # rank 0 removes it


def test_the_directory_vanishes(tmp_path: Path) -> None:
    """Removed while it is written into: an error, and the directory is not made again."""
    (order,) = file_orders(tmp_path / "c", 1)
    told = Told()
    with staged_in(bytes_of(order), told) as save:
        for run in runs_of(order):
            save.take(StagedRun(1, run))
        save.take(AllStaged(1))
        save.runs = remove_first(order, save.runs)  # type: ignore[method-assign]
        with pytest.raises(CheckpointingException, match="cannot sync"):
            order.write(save)

    assert list(tmp_path.iterdir()) == []


def remove_first(
    order: FileOrder, runs: Callable[[], Iterator[Run]]
) -> Callable[[], Iterator[Run]]:
    def generate() -> Iterator[Run]:
        assert order.publication is not None
        order.publication.attempt.abort()
        yield from runs()

    return generate


def test_a_rank_without_files(tmp_path: Path) -> None:
    """It need not see the directory."""
    report, _ = write(FileOrder(tmp_path / "none", (), 3), [], b"")

    assert report == {}


def test_an_existing_file_is_not_touched(tmp_path: Path) -> None:
    """A name that is taken is an error: two attempts would mix."""
    (order,) = file_orders(tmp_path / "c", 1)
    (order.directory / "__0_1.distcp").write_bytes(b"old")

    with pytest.raises(StorageError, match=r"cannot create .*__0_1.distcp.*EEXIST"):
        write(order, runs_of(order))

    assert (order.directory / "__0_1.distcp").read_bytes() == b"old"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("call", ["pwrite", "fsync", "open", "ftruncate"])
def test_what_the_disk_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: str, code: int
) -> None:
    """Each call that fails is named with file and errno; no descriptor or thread is left."""
    (order,) = file_orders(tmp_path / "c", 1)
    real = getattr(os, call)
    descriptors = num_descriptors()

    def fails(*args: Any, **options: Any) -> Any:
        if call == "open" and "distcp" not in str(args[0]):
            return real(*args, **options)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        with pytest.raises(StorageError) as caught:
            write(order, runs_of(order))

    assert errno.errorcode[code] in str(caught.value)
    assert "distcp" in str(caught.value)
    assert no_threads()
    assert num_descriptors() == descriptors


def test_a_disk_that_takes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A write of zero bytes is an error, not an endless loop."""
    (order,) = file_orders(tmp_path / "c", 1)
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)

    with pytest.raises(StorageError, match="took no bytes"):
        write(order, runs_of(order))


def test_short_writes_are_continued(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A write may take less than it is given."""
    (order,) = file_orders(tmp_path / "c", 1)
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:7], at))

    write(order, runs_of(order))

    assert (order.directory / "__0_0.distcp").read_bytes() == bytes_of(order)[:1000]


def test_a_failure_ends_the_wait_for_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A disk that fails in the midst of staging is told at once, not after the last run."""
    (order,) = file_orders(tmp_path / "c", 1)

    def fails(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwrite", fails)
    told = Told()
    with staged_in(bytes_of(order), told, timeout_secs=300) as save:
        save.take(StagedRun(1, runs_of(order)[0]))
        with pytest.raises(StorageError, match="ENOSPC"):
            order.write(save)


def test_abandoned_while_it_writes(tmp_path: Path) -> None:
    """The failure is the training process's own."""
    (order,) = file_orders(tmp_path / "c", 1)
    failure = describe_failure(ValueError("torn"))
    told = Told()
    with staged_in(bytes_of(order), told) as save:
        save.take(StagedRun(1, runs_of(order)[0]))
        save.take(Abandon(1, failure))
        save.take(Abandon(1, describe_failure(ValueError("later"))))
        with pytest.raises(AbandonedError, match="torn") as caught:
            order.write(save)
    assert caught.value.failure == failure
    assert pickle.loads(pickle.dumps(caught.value)).failure == failure


def test_staging_that_stops(tmp_path: Path) -> None:
    """A worker does not wait for ever for a training process that copies nothing."""
    (order,) = file_orders(tmp_path / "c", 1)
    with (
        staged_in(bytes_of(order), Told(), timeout_secs=0.01) as save,
        pytest.raises(BarrierTimeoutError, match="has staged nothing for 0.01 s"),
    ):
        order.write(save)


def test_nothing_is_written_into_the_arena(tmp_path: Path) -> None:
    """The worker's mapping is for reading."""
    with staged_in(b"abc", Told()) as save, pytest.raises(TypeError, match="read-only"):
        save.memory()[0] = 1


def test_files_in_folders(tmp_path: Path) -> None:
    """They are made, and made durable."""
    order = FileOrder(tmp_path, (("a/x", 3), ("y", 3)), 0)

    report, _ = write(order, runs_of(order))

    assert report == {name: sum_of_file(tmp_path / name) for name in ("a/x", "y")}
    assert (tmp_path / "a" / "x").read_bytes() == bytes_of(order)[:3]


@pytest.mark.parametrize("name", ["../x", "/x", "a//b", ""])
def test_names_stay_inside(tmp_path: Path, name: str) -> None:
    """No file is written outside of the attempt."""
    with pytest.raises(ValueError, match="unsafe file name"):
        write(FileOrder(tmp_path, ((name, 1),), 0), [Run(0, 0, 0, 1)])

    assert list(tmp_path.iterdir()) == []


def test_publication(tmp_path: Path) -> None:
    """It takes all ranks' files once, and is known to have happened."""
    orders = list(file_orders(tmp_path / "c", 2))
    reports = [write(order, runs_of(order))[0] for order in orders]
    publication = orders[0].publication
    assert publication is not None

    with pytest.raises(CoordinationError, match="1 ranks have written, not 2"):
        orders[0].publish(reports[:1])
    with pytest.raises(
        CoordinationError, match=r"__0_0.distcp, __0_1.distcp of rank 1 was written"
    ):
        orders[0].publish([reports[0], reports[0]])
    with pytest.raises(CoordinationError, match="rank 1 has nothing to publish"):
        orders[1].publish(reports)
    assert not publication.is_published()
    orders[0].publish(reports)

    assert publication.is_published()
    assert orders[0].target == str(tmp_path / "c")
    (later, _) = file_orders(tmp_path / "c", 2)
    assert later.publication is not None
    assert not later.publication.is_published()
    later.abort()
    orders[1].abort()
