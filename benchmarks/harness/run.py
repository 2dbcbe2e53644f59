"""What a scenario measures with, inside of one process of a job.

Here: clock, counters, peak memory, the group of ranks. Not here: states, page states, contenders.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.jobs import Job

_KIB = 1024


class Run:
    """One rank of a job.

    Attributes:
        job: The job.
        rank: The number of this process.
        directory: Where to write.
        measures: What was measured, by name; becomes JSON.
    """

    def __init__(self, job: Job, rank: int) -> None:
        """Nothing has been measured."""
        self.job, self.rank = job, rank
        self.directory = Path(job.directory)
        self.measures: dict[str, dict[str, Any]] = {}

    def setting(self, name: str, default: Any = None) -> Any:
        """Return a setting of the job."""
        return self.job.settings.get(name, default)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.job.world > 1:
            import torch.distributed as dist

            dist.barrier()

    def timed(self, name: str, do: Callable[[], object], *, pages: str = "") -> None:
        """Measure ``do`` as ``name``; all ranks begin together.

        Args:
            name: Of the measure.
            do: What takes time.
            pages: In which state files or memory were.
        """
        self.barrier()
        resident = reset_peak()
        counted, begin = io_counters(), time.perf_counter()
        do()
        end = time.perf_counter()
        moved = {key: value - counted[key] for key, value in io_counters().items()}
        peak = peak_rss()
        self.measures[name] = {
            "begin": begin,
            "end": end,
            "peak": None if resident is None or peak is None else max(0, peak - resident),
            "counts": moved,
            "pages": pages,
        }
        self.barrier()

    def fact(self, name: str, /, **facts: Any) -> None:
        """Keep something about a measure; the first rank's stays."""
        self.measures.setdefault(name, {}).setdefault("facts", {}).update(facts)

    def count(self, name: str, /, **counts: float) -> None:
        """Keep a number of this rank; those of all ranks are summed."""
        self.measures.setdefault(name, {}).setdefault("counts", {}).update(counts)


def io_counters() -> dict[str, int]:
    """Return bytes that went through system calls, and bytes that storage delivered.

    Memory that is mapped from a file is in the second only; sockets that are read and written are
    in the first, too.
    """
    fields = {"rchar": "read", "wchar": "written", "read_bytes": "fetched"}
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(": ") for line in lines)
    return {fields[key]: int(value) for key, value in pairs if key in fields}


def reset_peak() -> int | None:
    """Let the peak begin anew; return how much is resident now, None if that cannot be told."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    return None


def peak_rss() -> int | None:
    """Return the most bytes that were resident since ``reset_peak``."""
    return _status("VmHWM")


def _status(name: str) -> int | None:
    with suppress(OSError):
        found = re.search(
            rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE
        )
        return int(found[1]) * _KIB if found else None
    return None
