"""Shared memory: where it comes from, what is left of it, and how much there is."""

from __future__ import annotations

import errno
import gc
import logging
import mmap
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_ckpt._process import available
from dist_ckpt._process.available import available_nbytes, cgroup_nbytes, meminfo_nbytes
from dist_ckpt._staging_pool.arena import Arena
from dist_ckpt._staging_pool.host_memory import MAKERS, make_file
from dist_ckpt._staging_pool.pool import StagingPool
from dist_ckpt.errors import StorageError
from tests.multiprocess._world import run_program

PAGE = mmap.PAGESIZE


def descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def refuses(nbytes: int) -> int:
    raise OSError(errno.EPERM, "not here")


# -- what it is ------------------------------------------------------------------------------------


def test_two_processes_see_the_same_bytes() -> None:
    """What one maps through the descriptor, the other has written."""
    arena = Arena(2 * PAGE)
    arena.view(PAGE, (4,), torch.int64).copy_(torch.arange(4))
    other = Arena(2 * PAGE, descriptor=os.dup(arena.descriptor))

    assert other.view(PAGE, (4,), torch.int64).tolist() == [0, 1, 2, 3]
    assert other.source == ""
    arena.close()
    other.close()


def test_nothing_is_inherited_and_nothing_has_a_name() -> None:
    """The descriptor is closed on exec; no directory shows the memory, whichever way it was got."""
    for name, make in MAKERS.items():
        descriptor, source = make_file(PAGE, {name: make})

        assert source == name
        assert not os.get_inheritable(descriptor)
        assert "deleted" in os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - no path
        assert os.fstat(descriptor).st_size == PAGE
        os.close(descriptor)


def test_closing_leaves_tensors_alone_and_no_descriptor() -> None:
    """Twice is once. The memory goes with the last tensor."""
    before = descriptors()
    arena = Arena(PAGE)
    tensor = arena.view(0, (8,), torch.uint8).fill_(7)
    arena.close()
    arena.close()
    del arena

    assert tensor.tolist() == [7] * 8
    del tensor
    gc.collect()
    assert descriptors() == before


def test_growing_keeps_the_memory() -> None:
    """The old bytes are there, at the same places; the new ones are zero."""
    before = descriptors()
    arena = Arena(PAGE)
    arena.view(0, (4,), torch.uint8).copy_(torch.tensor([1, 2, 3, 4]))
    larger = arena.grown(3 * PAGE)
    arena.close()

    assert larger.nbytes == 3 * PAGE
    assert larger.source == "memfd"
    assert larger.view(0, (4,), torch.uint8).tolist() == [1, 2, 3, 4]
    assert larger.view(PAGE, (2 * PAGE,), torch.uint8).count_nonzero() == 0
    larger.close()
    del arena, larger
    gc.collect()
    assert descriptors() == before


def test_who_borrowed_memory_is_noticed_when_gone() -> None:
    """After the arena and every tensor of it, views and numpy arrays too; exactly once."""
    told: list[int] = []
    arena = Arena(PAGE)
    lent = arena.lent(lambda: told.append(1))
    array = lent.view(0, (8,), torch.uint8)[2:4].numpy()
    assert lent.position(lent.view(64, (8,), torch.uint8)) == 64
    lent.close()  # it is not its to close
    del lent
    assert told == []

    del array

    assert told == [1]
    assert arena.view(0, (1,), torch.uint8).tolist() == [0]
    arena.close()


# -- where it comes from ---------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [1, 2])
def test_the_next_way_is_taken(missing: int, caplog: pytest.LogCaptureFixture) -> None:
    """A pool tells of it once, however often it makes memory."""
    names = list(MAKERS)
    makers = {name: refuses if names.index(name) < missing else MAKERS[name] for name in names}
    pool = StagingPool(makers=makers)

    with caplog.at_level(logging.WARNING):
        leases = [pool.acquire(PAGE, timeout_secs=0) for _ in range(2)]

    assert [lease.arena.source for lease in leases] == [names[missing]] * 2
    assert [record.getMessage() for record in caplog.records] == [
        f"staging memory is made through {names[missing]}: it may be slow."
    ]
    for lease in leases:
        lease.release()
    pool.close()


def test_a_process_without_memfd() -> None:
    """The real way in a process of its own whose system refuses the call, as some sandboxes do."""
    script = """
        import os
        def refuses(*_):
            raise PermissionError(1, "seccomp")
        os.memfd_create = refuses
        from dist_ckpt._staging_pool.arena import Arena
        print(Arena(1 << 20).source)
        os.statvfs = lambda path: os.statvfs_result((4096, 4096, 100, 100, 100, 0, 0, 0, 0, 255))
        print(Arena(1 << 20).source)
        del os.memfd_create
        print(Arena(1 << 20).source)
    """

    done = run_program(textwrap.dedent(script), is_strict=True)

    _, shared_memory, file = MAKERS
    assert done.stdout.splitlines() == [shared_memory, file, file]


def test_no_way_at_all() -> None:
    """Each is told with its reason; no descriptor is left."""
    before = descriptors()
    with pytest.raises(StorageError, match="a: .*not here; b: .*not here") as caught:
        Arena(PAGE, makers={"a": refuses, "b": refuses})

    assert "hint" in str(caught.value)
    assert descriptors() == before


def test_more_than_there_is() -> None:
    """An error before anything is taken, not a killed process; growing leaves what was there."""
    before = descriptors()
    arena = Arena(PAGE)
    arena.view(0, (1,), torch.uint8).fill_(9)

    with pytest.raises(StorageError, match="bytes are available"):
        Arena(1 << 50)
    with pytest.raises(StorageError, match=f"{PAGE} are there"):
        arena.grown(1 << 50)

    assert os.fstat(arena.descriptor).st_size == PAGE
    assert arena.view(0, (1,), torch.uint8).tolist() == [9]
    arena.close()
    del arena
    assert descriptors() == before


def test_a_size_that_is_refused_late(tmp_path: Path) -> None:
    """A limit of file sizes is told as what it is; nothing is left of the attempts."""
    script = """
        import os, resource, signal
        from dist_ckpt._staging_pool.arena import Arena
        from dist_ckpt.errors import StorageError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        arena = Arena(1 << 16)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))
        before = len(os.listdir("/proc/self/fd"))
        for make in (lambda: Arena(1 << 20), lambda: arena.grown(1 << 20)):
            try:
                make()
            except StorageError as error:
                print("too large" in str(error), os.fstat(arena.descriptor).st_size)
        print(len(os.listdir("/proc/self/fd")) - before)
    """

    done = run_program(textwrap.dedent(script), cwd=tmp_path, is_strict=True)

    assert done.stdout.splitlines() == ["True 65536", "True 65536", "0"]


# -- how much there is -----------------------------------------------------------------------------


def test_what_the_kernel_takes_for_available(tmp_path: Path) -> None:
    """Kibibytes become bytes; a system that does not say is no error."""
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:      64 kB\n")
    (tmp_path / "old").write_text("MemTotal: 100 kB\n")

    assert meminfo_nbytes(tmp_path / "meminfo") == 64 << 10
    assert meminfo_nbytes(tmp_path / "old") is None
    assert meminfo_nbytes(tmp_path / "none") is None


def group(folder: Path, limit: str, usage: str, statistics: str, *, version: int = 2) -> None:
    names = ("memory.max", "memory.current")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in zip((*names, "memory.stat"), (limit, usage, statistics), strict=True):
        (folder / name).write_text(text)


def test_groups_of_version_2(tmp_path: Path) -> None:
    """The least room of the group and those above counts; idle pages of files are room."""
    group(tmp_path / "a" / "b", "1000\n", "900\n", "anon 1\ninactive_file 300\n")
    group(tmp_path / "a", "max\n", "5\n", "inactive_file 0\n")
    group(tmp_path, "500\n", "200\n", "")
    member = tmp_path / "cgroup"

    member.write_text("0::/a/b\n")
    assert cgroup_nbytes(member, tmp_path) == 300
    member.write_text("0::/a\n")
    assert cgroup_nbytes(member, tmp_path) == 300
    group(tmp_path, "max", "200", "")
    assert cgroup_nbytes(member, tmp_path) is None
    member.write_text("0::/../../of/the/host\n")  # as seen from inside a container
    group(tmp_path, "700", "800", "")
    assert cgroup_nbytes(member, tmp_path) == 0


def test_groups_of_version_1(tmp_path: Path) -> None:
    """The controller of memory alone, by its own file names."""
    group(tmp_path / "memory" / "job", "1000", "700", "total_inactive_file 100\n", version=1)
    member = tmp_path / "cgroup"
    member.write_text("9:name=systemd:/job\n4:cpu,memory:/job\n0::/\n")

    assert cgroup_nbytes(member, tmp_path) == 400
    assert cgroup_nbytes(tmp_path / "none", tmp_path) is None


@pytest.mark.parametrize(
    ("machine", "group_of_ours", "expected"),
    [(5, None, 5), (None, 7, 7), (5, 7, 5), (7, 0, 0), (None, None, None)],
)
def test_the_least_that_is_told_counts(
    monkeypatch: pytest.MonkeyPatch, machine: Any, group_of_ours: Any, expected: Any
) -> None:
    """Nothing is known only where nobody tells."""
    monkeypatch.setattr(available, "meminfo_nbytes", lambda: machine)
    monkeypatch.setattr(available, "cgroup_nbytes", lambda: group_of_ours)
    assert available_nbytes() == expected


def test_this_machine_tells() -> None:
    """In bytes, and no more than it has."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found, free = available_nbytes(), meminfo_nbytes()

    assert found is not None
    assert free is not None
    assert 0 <= found <= whole
    assert whole >> 20 < free <= whole  # KiB taken for bytes would be less


# -- with a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pages_are_locked_and_unlocked() -> None:
    """Torch sees pinned memory until it is closed; growing locks the larger piece."""
    torch.ones(1, device="cuda")
    arena = Arena(16 * PAGE, use_pinned=True)
    view = arena.view(0, (16,), torch.uint8)
    assert arena.is_pinned
    assert view.is_pinned()

    larger = arena.grown(64 * PAGE, use_pinned=True)
    arena.close()
    tail = larger.view(63 * PAGE, (16,), torch.uint8)
    assert larger.is_pinned
    assert tail.is_pinned()

    larger.close()
    assert not tail.is_pinned()


def test_no_driver_is_started_for_pinning() -> None:
    """A process that has not used a GPU does not begin to."""
    was = torch.cuda.is_initialized()
    arena = Arena(PAGE, use_pinned=True)

    assert torch.cuda.is_initialized() == was
    assert arena.is_pinned == was
    arena.close()
