"""What a background save may leave in a process: threads, child processes, open files.

Here: a snapshot of these, and the hold that a test can take on a worker. Not here: tests.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate import Accelerator

_OPENED = ("socket:", "pipe:", "/memfd:", "/dev/shm/", "anon_inode:")  # noqa: S108 - looked for


def traces() -> dict[str, list[str]]:
    """Return the names of threads, the children's ids, and the kinds of open files."""
    gc.collect()
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "children": sorted(_children()),
        "files": sorted(name.split(":")[0] for name in _open_files() if name.startswith(_OPENED)),
    }


def _children() -> Iterator[str]:
    for tasks in Path("/proc/self/task").glob("*/children"):
        yield from tasks.read_text().split()


def _open_files() -> Iterator[str]:
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            yield str(link.readlink())


def hidden(root: Path) -> list[str]:
    """Return what lies under a directory that no user asked for."""
    return sorted(path.name for path in root.rglob(".dist-ckpt*"))


def saver_of(accelerator: Accelerator) -> Any:
    """Return the saver of a registered Accelerator."""
    return vars(accelerator)["_dist_ckpt_io"].saver(accelerator)


def worker_pid(accelerator: Accelerator) -> int:
    """Return the process that writes, which must have had a save, or have one."""
    pid: int = saver_of(accelerator)._machinery.worker.pid
    return pid


@contextlib.contextmanager
def stopped_worker(accelerator: Accelerator) -> Iterator[int]:
    """Keep the worker from doing anything: what is saved now stays in flight."""
    pid = worker_pid(accelerator)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def full_disk(accelerator: Accelerator, nbytes: int = 16) -> Iterator[None]:
    """Let the worker write no more than some bytes to any file."""
    pid = worker_pid(accelerator)
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
