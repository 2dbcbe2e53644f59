"""What a measurement was made on.

Here: processor, memory, kernel, file system, versions, load. Not here: names of machines or paths.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch", "numpy", "safetensors", "tensorstore", "zarr", "xxhash", "lightning",
    "megatron-core", "torchsnapshot", "nvidia-resiliency-ext",
)  # fmt: skip


def environment(directory: Path) -> dict[str, Any]:
    """Return what numbers of this machine, written to ``directory``, must be read with."""
    return {
        "processor": _first(Path("/proc/cpuinfo"), r"model name\s*:\s*(.+)") or platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "virtual": bool(_first(Path("/proc/cpuinfo"), r"flags\s*:.*\b(hypervisor)\b")),
        "system": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "file_system": file_system(directory),
        "free_gib": round(shutil.disk_usage(directory).free / 2**30),
        "python": platform.python_version(),
        "packages": _versions(),
        "load": load(),
    }


def load() -> list[float]:
    """Return the load averages of 1, 5 and 15 minutes."""
    return [round(one, 2) for one in os.getloadavg()]


def file_system(directory: Path) -> str:
    """Return the type of the file system that a directory is on."""
    best, kind = "", "unknown"
    place = f"{directory.resolve()}/"
    with suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, at, found, *_ = line.split()
            if place.startswith(at.rstrip("/") + "/") and len(at) >= len(best):
                best, kind = at, found
    return kind


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _first(path: Path, pattern: str) -> str | None:
    with suppress(OSError):
        match = re.search(pattern, path.read_text())
        return match[1].strip() if match else None
    return None
