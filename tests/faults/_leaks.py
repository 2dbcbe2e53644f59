"""What a process holds, before and after: processes, threads, files, memory, temporary names.

Here: ``no_leaks``. Not here: tests. Linux: it reads ``/proc``. Called in the process on trial; what
ends by itself is waited for, by its own means and with a deadline, so that a leak is a leak.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Holdings", "descendants", "hidden_entries", "no_leaks"]

_SHARED_DIR = Path("/dev/shm")  # noqa: S108 - looked at, not written to
_OURS = ("memfd:", "/dev/shm/", "/dist_ckpt", ".dist-ckpt-")  # noqa: S108 - looked for


@dataclass(frozen=True, slots=True)
class Holdings:
    """What this process holds now.

    Attributes:
        processes: Descendants, also dead ones that nobody has reaped: pid and command line.
        threads: Of Python, by name.
        files: Open descriptors with what they are.
        mappings: Shared memory that is mapped, and how often.
        shared: Names in ``/dev/shm``.
        entries: Hidden names of ours, and all names in the temporary directories asked for.
    """

    processes: frozenset[tuple[int, str]]
    threads: frozenset[threading.Thread]
    files: frozenset[tuple[int, str]]
    mappings: Counter[str]
    shared: frozenset[str]
    entries: frozenset[str]

    @classmethod
    def now(cls, directories: Sequence[Path] = ()) -> Holdings:
        """Look."""
        return cls(
            processes=frozenset(descendants().items()),
            threads=frozenset(threading.enumerate()),
            files=frozenset(_files()),
            mappings=_mappings(),
            shared=frozenset(_names_in(_SHARED_DIR)),
            entries=frozenset(hidden_entries(directories)),
        )

    def beyond(self, before: Holdings) -> list[str]:
        """Return what is held now and was not held ``before``, by name."""
        known = {pid for pid, _ in before.processes}
        return [
            *(f"process {pid}: {what}" for pid, what in self.processes if pid not in known),
            *(f"thread {one.name}" for one in self.threads - before.threads),
            *(f"descriptor {fd}: {what}" for fd, what in self.files - before.files),
            *(f"mapping {what} x {n}" for what, n in (self.mappings - before.mappings).items()),
            *(f"shared memory {name}" for name in self.shared - before.shared if _is_ours(name)),
            *(f"left behind: {name}" for name in self.entries - before.entries),
        ]


@contextlib.contextmanager
def no_leaks(*directories: Path, timeout_secs: float = 10.0) -> Iterator[None]:
    """Raise if more is held after the block than before it; names all of that.

    Args:
        directories: Where hidden names of ours are looked for, at any depth.
        timeout_secs: How long what is ending may take to end.

    Raises:
        AssertionError: Something leaked. Not when the block raises: that comes first.
    """
    gc.collect()
    before = Holdings.now(directories)
    yield
    gc.collect()
    deadline = time.monotonic() + timeout_secs
    while leaked := Holdings.now(directories).beyond(before):
        if not _wait_for_an_end(before, deadline):
            raise AssertionError("leaked:\n  " + "\n  ".join(sorted(leaked)))


def descendants(pid: int | None = None) -> dict[int, str]:
    """Return children, their children and so on, with command lines; ``Z`` marks unreaped ones."""
    children: dict[int, list[int]] = {}
    states: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError):
            # The name of the program may hold anything, also brackets and blanks.
            state, parent = (
                (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            )
            children.setdefault(int(parent), []).append(int(entry.name))
            states[int(entry.name)] = state
    found: dict[int, str] = {}
    todo = [pid or os.getpid()]
    while todo:
        for child in children.get(todo.pop(), ()):
            found[child] = f"{states[child]} {_command(child)}"
            todo.append(child)
    return found


def hidden_entries(directories: Sequence[Path]) -> list[str]:
    """Return the names that attempts and what they replace have, at any depth."""
    return [str(path) for directory in directories for path in directory.rglob(".dist-ckpt-*")]


def _wait_for_an_end(before: Holdings, deadline: float) -> bool:
    """Wait until a new process or thread has ended; False if there is nothing to wait for."""
    left = deadline - time.monotonic()
    if left <= 0:
        return False
    known = {pid for pid, _ in before.processes}
    running = [pid for pid, what in descendants().items() if pid not in known and what[0] != "Z"]
    if running:
        return _wait_for_exit(running[0], left)
    for thread in threading.enumerate():
        if thread not in before.threads and thread is not threading.current_thread():
            thread.join(left)
            return not thread.is_alive()
    # Descriptors, memory and reaping: whoever does that has ended, or will never do it. One more
    # look, as a thread of C++ may close what it holds a moment after Python's has ended.
    threading.Event().wait(min(left, 0.02))
    return True


def _wait_for_exit(pid: int, timeout_secs: float) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return True  # it is gone
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(timeout_secs * 1000))
    finally:
        os.close(descriptor)


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        return text.decode(errors="replace")[:160]
    return "?"


def _files() -> Iterator[tuple[int, str]]:
    folder = "/proc/self/fd"
    for name in os.listdir(folder):  # noqa: PTH208 - its own descriptor must be told apart
        with contextlib.suppress(OSError):
            target = os.readlink(f"{folder}/{name}")  # noqa: PTH115 - what it is may be no path
            if target != f"/proc/{os.getpid()}/fd":
                yield int(name), target


def _mappings() -> Counter[str]:
    found: Counter[str] = Counter()
    with Path("/proc/self/maps").open(errors="replace") as lines:
        for line in lines:
            what = line.split(maxsplit=5)[5].strip() if line.count(" ") > 5 else ""
            if _is_ours(what):
                found[what] += 1
    return found


def _is_ours(what: str) -> bool:
    return any(one in what for one in _OURS) or what.startswith(("dist_ckpt", "torch_"))


def _names_in(directory: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return [entry.name for entry in directory.iterdir()]
    return []
