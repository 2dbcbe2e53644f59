"""Which pages of a save stay in the page cache: the policy, and what is really there afterwards."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch

from dist_ckpt import SaveOptions, ShardedTensor, save
from dist_ckpt.background import BackgroundSaver
from dist_ckpt.errors import ConfigError
from dist_ckpt.manager import CheckpointManager
from dist_ckpt.options import BackgroundOptions, PageCache
from dist_ckpt.retention import KeepLast
from dist_ckpt.storage import local, page_cache
from dist_ckpt.storage.page_cache import PagePolicy, num_writers_by_rank, should_keep
from dist_ckpt.training_state import TrainingState, save_training_state

MIB = 1 << 20
GIB = 1 << 30


# -- the policy ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A host and a checkpoint."""

    id: str
    keeps: bool
    choice: PageCache = "auto"
    nbytes: int = GIB
    available: int | None = 64 * GIB
    num_writers: int = 1


CASES = [
    Case("small against the memory", keeps=True),
    Case("just a quarter", keeps=True, available=4 * GIB),
    Case("more than a quarter", keeps=False, available=4 * GIB - 1),
    Case("larger than the memory", keeps=False, nbytes=65 * GIB),
    Case("eight ranks share the memory", keeps=True, num_writers=8, available=32 * GIB),
    Case("and it is too little", keeps=False, num_writers=8, available=32 * GIB - 1),
    Case("nothing to write", keeps=True, nbytes=0, available=0),
    Case("the system does not say", keeps=False, available=None),
    Case("keep, whatever there is", keeps=True, choice="keep", available=0),
    Case("drop, whatever there is", keeps=False, choice="drop"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_policy(case: Case) -> None:
    """``auto`` keeps what takes at most a quarter of what is available to a host."""
    found = should_keep(
        case.choice, nbytes=case.nbytes, available=case.available, num_writers=case.num_writers
    )

    assert found == case.keeps


def test_only_ranks_of_the_same_host_that_write_share_its_memory() -> None:
    """Replicas that write nothing do not count; other hosts have memory of their own."""
    hosts = ["a", "a", "b", "a", "c", "b"]
    work = [[1], [], [1], [2], [], [3]]

    assert num_writers_by_rank(hosts, work) == [2, 2, 2, 2, 1, 2]


def test_a_wrong_choice_is_refused() -> None:
    """With the valid ones."""
    with pytest.raises(ConfigError, match="'auto', 'keep' or 'drop', not 'yes'"):
        SaveOptions(page_cache="yes")  # type: ignore[arg-type]


# -- what is there ---------------------------------------------------------------------------------


def cached(path: Path) -> float:
    """Return which part of a file is in the page cache."""
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE) as mapped:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(mapped)
        libc = ctypes.CDLL(None, use_errno=True)
        code = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), pages)
        del first
    if code:
        pytest.skip(f"no mincore here: {os.strerror(ctypes.get_errno())}")
    return sum(one & 1 for one in bytes(pages)) / len(pages)


def is_cached(checkpoint: Path) -> bool:
    """Return whether most of the large files of a checkpoint is in the page cache.

    Not all or none: the kernel may take single pages, and keep single ones.
    """
    files = [one for one in checkpoint.rglob("*") if one.is_file() and one.stat().st_size >= MIB]
    assert files
    return sum(map(cached, files)) / len(files) > 1 / 2


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """Return a directory whose files leave the page cache when the kernel is told so."""
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(MIB))
    descriptor = os.open(probe, os.O_RDONLY)
    os.fsync(descriptor)
    before = cached(probe)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    if before != 1.0 or cached(probe) != 0.0:
        pytest.skip("this file system is memory, or does not tell what is cached")
    return tmp_path


@pytest.fixture(autouse=True)
def no_save_before() -> Iterator[None]:
    """Begin as a new process does: it has kept nothing."""
    PagePolicy("drop").begin([])
    yield
    PagePolicy("drop").begin([])


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Say how much memory there is."""
    return lambda nbytes: monkeypatch.setattr(page_cache, "available_nbytes", lambda: nbytes)


def state() -> dict[str, ShardedTensor]:
    """Return 6 MiB in three tensors."""
    return {
        key: ShardedTensor.from_rank_offsets(key, torch.randn(MIB // 2)) for key in ("a", "b", "c")
    }


BACKENDS: list[Literal["torch_dist", "zarr"]] = ["torch_dist", "zarr"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_small_checkpoint_stays_and_a_large_one_does_not(
    disk: Path, available: Callable[[int], None], backend: Literal["torch_dist", "zarr"]
) -> None:
    """By the memory that there is when it is written; a field says otherwise."""
    for name, choice, memory in (
        ("small", "auto", GIB), ("large", "auto", 8 * MIB), ("kept", "keep", 0), ("dropped", "drop", GIB),
    ):  # fmt: skip
        available(memory)
        options = SaveOptions(backend=backend, page_cache=choice)  # type: ignore[arg-type]
        save(state(), disk / name, options=options)

        assert is_cached(disk / name) == (name in ("small", "kept")), name


def test_the_newest_checkpoint_stays_alone(disk: Path, available: Callable[[int], None]) -> None:
    """The one before leaves the page cache, under whichever name; one that is gone is no error."""
    available(GIB)
    found = []
    for step in range(3):
        save(state(), disk / f"{step}")
        found.append([is_cached(disk / f"{one}") for one in range(step + 1)])
    (disk / "2").rename(disk / "moved")
    save(state(), disk / "3")

    assert found == [[True], [False, True], [False, False, True]]
    assert is_cached(disk / "3")


def test_what_is_dropped_of_the_one_before(
    tmp_path: Path, available: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are large enough to be dropped when they are written; nothing that links name."""
    available(GIB)
    dropped: list[Path] = []
    monkeypatch.setattr(
        local,
        "drop_pages",
        lambda file: dropped.append(Path(f"/proc/self/fd/{file}").readlink()),
    )
    for name in ("a user's", "small", "large"):
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to("a user's")
    files = [("small", MIB - 1), ("large", MIB), ("link", MIB), ("gone", MIB)]
    PagePolicy(target=tmp_path).begin(files)
    assert dropped == []
    PagePolicy("drop").begin([])
    assert dropped == [tmp_path / "large"]


def test_what_takes_the_place_of_a_checkpoint_stays(
    disk: Path, available: Callable[[int], None]
) -> None:
    """Files of the same names at the same path: the old ones are dropped, the new ones not."""
    available(GIB)
    for _ in range(3):
        save(state(), disk / "latest")

        assert is_cached(disk / "latest")


def test_keep_leaves_all_to_the_kernel(disk: Path, available: Callable[[int], None]) -> None:
    """Nothing that ``keep`` has written is dropped by a later save."""
    available(GIB)
    save(state(), disk / "0", options=SaveOptions(page_cache="keep"))
    save(state(), disk / "1", options=SaveOptions(page_cache="keep"))
    save(state(), disk / "2")

    assert [is_cached(disk / name) for name in "012"] == [True, True, True]


@pytest.mark.parametrize("worker", ["process", "thread"])
def test_a_background_save_follows_the_same_rule(
    disk: Path, worker: Literal["process", "thread"]
) -> None:
    """Its worker keeps the newest; this machine is taken to have some tens of megabytes."""
    model = torch.nn.Linear(1 << 10, 1 << 10)
    with BackgroundSaver(BackgroundOptions(worker=worker)) as saver:
        for step, choice in enumerate(("auto", "auto", "drop", "keep")):
            options = SaveOptions(page_cache=choice)  # type: ignore[arg-type]
            save_training_state(
                disk / f"{step}", TrainingState(models=[model]), saver=saver, options=options
            )
    found = [is_cached(disk / f"{step}") for step in range(4)]

    assert found == [False, False, False, True]


def test_a_manager_keeps_its_newest_step(disk: Path, available: Callable[[int], None]) -> None:
    """With remembered plans, and when older steps are removed."""
    available(GIB)
    held = TrainingState(models=[torch.nn.Linear(1 << 10, 1 << 10)])
    with CheckpointManager(disk / "run", retention=KeepLast(2)) as manager:
        paths = [manager.save(step, held) for step in range(4)]

    assert [path.exists() for path in paths] == [False, False, True, True]
    assert [is_cached(path) for path in paths[2:]] == [False, True]
