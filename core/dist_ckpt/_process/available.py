"""How much memory this process can still allocate.

Here: the kernel's and the control groups' numbers. Not here: allocating it (``host_memory``).
Local; no torch: the process that writes in the background uses it too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

__all__ = ["available_nbytes", "cgroup_nbytes", "meminfo_nbytes"]


def available_nbytes() -> int | None:
    """Return how many bytes this process can still allocate; None if the system does not say."""
    limits = (meminfo_nbytes(), cgroup_nbytes())
    return min((limit for limit in limits if limit is not None), default=None)


def meminfo_nbytes(path: Path = Path("/proc/meminfo")) -> int | None:
    """Return the kernel's ``MemAvailable`` in bytes; None if it does not say."""
    with suppress(OSError, ValueError, IndexError):
        for line in path.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def cgroup_nbytes(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return what the control groups of this process leave, of both versions; None without limit.

    Pages of files that nobody uses are counted as free: the kernel gives them up first.
    """
    rooms: list[int] = []
    with suppress(OSError):
        for line in membership.read_text(encoding="utf-8").splitlines():
            _, controllers, group = line.split(":", 2)
            if not controllers:
                rooms += _rooms(root, group, _VERSION_2)
            elif "memory" in controllers.split(","):
                rooms += _rooms(root / "memory", group, _VERSION_1)
    return min(rooms, default=None)


_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _rooms(root: Path, group: str, names: tuple[str, str, str]) -> Iterator[int]:
    """Yield what is left in a group and in each above it: the least of them is what counts.

    In a container the group's own path may be one of the host; then the root is what is seen.
    """
    limit_name, usage_name, idle_name = names
    parts = [part for part in group.split("/") if part not in ("", "..")]
    for count in range(len(parts), -1, -1):
        folder = root.joinpath(*parts[:count])
        # "max" is no number: no limit here.
        with suppress(OSError, ValueError):
            limit = int((folder / limit_name).read_text(encoding="ascii"))
            usage = int((folder / usage_name).read_text(encoding="ascii"))
            idle = int(_statistics(folder / "memory.stat").get(idle_name, 0))
            yield max(limit - max(usage - idle, 0), 0)


def _statistics(path: Path) -> Mapping[str, str]:
    with suppress(OSError, ValueError):
        return dict(line.split(" ", 1) for line in path.read_text(encoding="ascii").splitlines())
    return {}
