"""A save and an in-place load need next to no memory beyond the state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dist_ckpt import ShardedTensor, load, save
from tests.multiprocess._world import run_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

MIB = 1 << 20


def memory(field: str) -> int:
    """Return ``VmRSS`` or ``VmHWM`` (its peak) of this process, bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def extra_peak_nbytes(rank: int, world_size: int, path: str) -> tuple[int, int]:
    """Return by how much a save and a load of 1 GiB raise the peak of the resident set."""
    del rank, world_size
    tensors = [torch.full((64 * MIB // 4,), float(i)) for i in range(12)]
    # 64 MiB each, and not what lies in memory.
    tensors += [torch.full((64 * MIB // 8,), i, dtype=torch.cfloat).conj() for i in (12, 13, 14)]
    tensors.append(torch.full((4096, 4096), 15.0).t())
    state = {
        str(i): ShardedTensor.from_rank_offsets(f"t{i}", tensor) for i, tensor in enumerate(tensors)
    }
    small = {"x": ShardedTensor.from_rank_offsets("x", torch.ones(4))}
    save(small, f"{path}/warm-up")  # imports and thread pools are not what is measured
    load(small, f"{path}/warm-up")
    peaks = []
    for call in (save, load):
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before = memory("VmRSS")
        call(state, f"{path}/big")
        peaks.append(memory("VmHWM") - before)
    assert all(bool((tensor == float(i)).all()) for i, tensor in enumerate(tensors))
    return peaks[0], peaks[1]


def test_a_gibibyte_needs_less_than_64_mebibytes_more(tmp_path: Path) -> None:
    """Neither contiguous nor transposed nor conjugated tensors are held a second time."""
    ((saving, loading),) = run_ranks(extra_peak_nbytes, 1, str(tmp_path))

    print(f"extra peak RSS: save {saving / MIB:.1f} MiB, load {loading / MIB:.1f} MiB")
    assert saving < 64 * MIB
    assert loading < 64 * MIB
