"""After a crash or an error of the disk during a zarr save, the old checkpoint is there, or the new."""

from __future__ import annotations

import errno
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dist_ckpt import (
    CheckpointNotFoundError,
    SaveOptions,
    ShardedObject,
    ShardedTensor,
    StorageError,
    load,
    save,
)
from tests.faults._disk import Disk

BOTH = pytest.mark.parametrize("version", [1, 2], ids=["zarr2", "zarr3"])
ONE_THREAD = SaveOptions(thread_count=1)


def state(value: float) -> dict[str, object]:
    tensors = {
        k: ShardedTensor.from_rank_offsets(k, torch.full((64,), value)) for k in ("a", "n/b")
    }
    return {**tensors, "value": value, "rng": ShardedObject("rng", [value], (1,), (0,))}


def value_at(path: Path) -> float | None:
    """Return what stands at ``path``, all of one piece; None if no checkpoint is committed."""
    try:
        loaded = load(state(-1.0), path)
    except CheckpointNotFoundError:
        return None
    values = {float(v) for k in ("a", "n/b") for v in loaded[k]} | {loaded["value"], *loaded["rng"]}
    assert len(values) == 1, f"a mixture: {values}"
    return values.pop()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@BOTH
def test_a_crash_at_any_point_leaves_the_old_or_the_new(
    tmp_path: Path, disk: Disk, version: int
) -> None:
    """A copy of the disk after each operation loads as one of the two."""
    home = tmp_path / "home"
    home.mkdir()
    save(state(1.0), home / "c", sharded_strategy=("zarr", version), options=ONE_THREAD)
    seen: list[float | None] = []

    def crash(operation: str) -> None:
        copy = tmp_path / "copy"
        shutil.copytree(home, copy)
        seen.append(value_at(copy / "c"))
        assert seen[-1] in (1.0, 2.0), operation
        shutil.rmtree(copy)

    disk.after = crash
    with disk.watched():
        save(state(2.0), home / "c", sharded_strategy=("zarr", version), options=ONE_THREAD)

    assert seen[0] == 1.0
    assert seen[-1] == 2.0
    assert seen.index(2.0) + seen.count(2.0) == len(seen)
    assert [entry.name for entry in home.iterdir()] == ["c"]


@BOTH
def test_an_error_at_any_operation_leaves_the_old_and_nothing_else(
    tmp_path: Path, disk: Disk, version: int
) -> None:
    """Making arrays, writing documents: a storage error of ours, until the rename is done."""
    save(state(1.0), tmp_path / "c", sharded_strategy=("zarr", version), options=ONE_THREAD)

    raised = 0
    for number in range(200):
        value, failed = 2.0 + number, False
        with disk.watched(fail_at=number):
            try:
                save(
                    state(value),
                    tmp_path / "c",
                    sharded_strategy=("zarr", version),
                    options=ONE_THREAD,
                )
            except StorageError:
                failed = True
        raised += failed
        if len(disk.done) <= number:
            break
        if failed:
            assert value_at(tmp_path / "c") == 1.0
            assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
            continue
        # What failed was not needed: the removal of what is old, say.
        assert value_at(tmp_path / "c") == value
        save(state(1.0), tmp_path / "c", sharded_strategy=("zarr", version), options=ONE_THREAD)
        for left in tmp_path.glob(".dist-ckpt*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    else:
        pytest.fail("the failing operation was never past the end of a save")
    assert raised > 20


@pytest.mark.slow
def test_names_and_bytes_are_durable(tmp_path: Path) -> None:
    """Every file below the checkpoint was synced after its last write, and so was its folder."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    if subprocess.run(["strace", "true"], check=False, capture_output=True).returncode:
        pytest.skip("strace does not run here")
    script = (
        "import sys, torch\n"
        "from dist_ckpt import ShardedObject, ShardedTensor, save\n"
        "x = {k: ShardedTensor.from_rank_offsets(k, torch.ones(8)) for k in ('a', 'n/b')}\n"
        "x['o'] = ShardedObject('deep/rng', [1], (1,), (0,))\n"
        "save(x, sys.argv[1] + '/1', sharded_strategy=('zarr', 1))\n"
        "save(x, sys.argv[1] + '/2', sharded_strategy=('zarr', 2))\n"
    )
    log = tmp_path / "log"
    command = ["strace", "-f", "-y", "-e", "trace=fsync,fdatasync,mkdir", "-o", str(log)]
    done = subprocess.run(
        [*command, sys.executable, "-c", script, str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    made = list(
        dict.fromkeys(re.findall(r'mkdir\(".*(\.dist-ckpt[^"/]+attempt)"', log.read_text()))
    )
    synced = set(re.findall(r"sync\(\d+<([^>]+)>", log.read_text()))
    for attempt, target in zip(made, ("1", "2"), strict=True):
        for path in (tmp_path / target).rglob("*"):
            name = str(tmp_path / attempt / path.relative_to(tmp_path / target))
            assert name in synced or f"{name}.__lock" in synced, path


@BOTH
def test_a_full_disk_is_told_with_a_hint(tmp_path: Path, disk: Disk, version: int) -> None:
    """Wherever the space ends: the error names a key and what can be done."""
    hints = 0
    for number in range(100):
        with disk.watched(fail_at=number, code=errno.ENOSPC):
            try:
                save(
                    state(2.0), tmp_path / f"{number}", sharded_strategy=("zarr", version),
                    options=ONE_THREAD,
                )  # fmt: skip
            except StorageError as error:
                hints += "hint: the disk is full" in str(error)
        if len(disk.done) <= number:
            break
    assert hints > 20
