"""Records which process owns a temporary directory, so that others can tell when it is abandoned.

Here: the record of a process, and whether that process has certainly ended. Not here: what is
removed (``storage.leftovers``). Written by the process that makes the directory, read by any. No
torch: the process that writes in the background uses this too.

The record is a file beside the directory, never in it, because the directory is published as it is.
It is made before the directory and removed after it, so that a crash leaves no directory without a
record.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import socket
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path

__all__ = [
    "OWNER_SUFFIX",
    "Owner",
    "forget_owner",
    "host_identity",
    "owner_of",
    "record_of",
    "record_owner",
]

logger = logging.getLogger(__name__)

OWNER_SUFFIX = ".owner"
_MAX_NBYTES = 1 << 16
_NO_HOST = frozenset({"", "localhost", "localhost.localdomain"})
_NO_JOB = frozenset({"", "none"})
_STATE, _START = 0, 19  # fields 3 and 22 of /proc/{pid}/stat, counted behind the name


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process, described so that other processes can recognise it.

    Attributes:
        host: Name of its host.
        boot: The kernel's boot id; empty if unknown.
        space: Its PID namespace: containers number processes on their own.
        pid: Its process id.
        start: When it started, in ticks of the kernel: process ids are used again.
        job: The job it belongs to, the same in all of its processes; empty if unknown.
    """

    host: str
    boot: str
    space: str
    pid: int
    start: str
    job: str

    @classmethod
    def here(cls) -> Owner:
        """Return this process."""
        return cls(
            host=socket.gethostname(),
            boot=_line_of("/proc/sys/kernel/random/boot_id"),
            space=_link_of("/proc/self/ns/pid"),
            pid=os.getpid(),
            start=_start_of(os.getpid()),
            job=_job(),
        )

    def is_gone(self, here: Owner) -> bool:
        """Whether this process has certainly ended, judged from the process ``here``.

        It has if the host was restarted, or if its process id is free or belongs to another
        process. It also counts as ended if ``here`` belongs to the same job in another place (host,
        container), where the job was restarted. Processes of one job do run in several places, so
        ask only about leftovers that have not been touched for long.
        """
        if self.boot == here.boot and self.space == here.space and self._is_host_of(here):
            return not _is_alive(self.pid, self.start)
        if self.boot != here.boot and self.host == here.host and self.host not in _NO_HOST:
            return bool(self.boot and here.boot)
        return self.job == here.job and bool(self.job)

    def _is_host_of(self, here: Owner) -> bool:
        return bool(self.boot) or self.host == here.host


@functools.cache
def host_identity() -> str:
    """Return an identifier of this machine: its kernel's boot id, or its name."""
    return _line_of("/proc/sys/kernel/random/boot_id") or socket.gethostname()


def record_of(path: Path) -> Path:
    """Return where the owner of a temporary directory is recorded."""
    return path.with_suffix(OWNER_SUFFIX)


def record_owner(path: Path) -> None:
    """Record that ``path``, which is about to be made, belongs to this process.

    A failure is only logged: a directory without a record is never removed as a leftover.
    """
    data = json.dumps(asdict(Owner.here())).encode()
    try:
        descriptor = os.open(
            record_of(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666
        )
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)
    except OSError as error:
        logger.debug("%s has no record of its owner: %s", path, error)


def forget_owner(path: Path) -> None:
    """Remove the record of ``path``, which was removed or published."""
    try:
        record_of(path).unlink(missing_ok=True)
    except OSError as error:
        logger.debug("the owner of %s stays recorded: %s", path, error)


def owner_of(path: Path) -> Owner | None:
    """Return who owns a temporary directory; None if that is not known."""
    try:
        with record_of(path).open("rb") as file:
            found = json.loads(file.read(_MAX_NBYTES))
        values = {one.name: found[one.name] for one in fields(Owner)}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    texts = {name: value for name, value in values.items() if name != "pid"}
    if type(values["pid"]) is not int or not all(type(one) is str for one in texts.values()):
        return None
    return Owner(**values)


def _job() -> str:
    for kind, name in (("slurm", "SLURM_JOB_ID"), ("elastic", "TORCHELASTIC_RUN_ID")):
        value = os.environ.get(name, "")
        if value not in _NO_JOB:
            return f"{kind}:{value}"
    return ""


def _is_alive(pid: int, start: str) -> bool:
    """Whether the process with this number, started then, may still run."""
    if pid <= 0:
        return True  # not a process id: nothing is known
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it exists, and belongs to another user
    except OverflowError:
        return True
    fields_now = _stat_of(pid)
    if len(fields_now) <= _START:
        return True
    return fields_now[_STATE] not in ("Z", "X") and start in ("", fields_now[_START])


def _start_of(pid: int) -> str:
    found = _stat_of(pid)
    return found[_START] if len(found) > _START else ""


def _stat_of(pid: int) -> list[str]:
    # The second field, the name in parentheses, may itself contain blanks and parentheses.
    return _line_of(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _line_of(path: str) -> str:
    if sys.platform != "linux":
        return ""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _link_of(path: str) -> str:
    try:
        return os.fspath(Path(path).readlink())
    except OSError:
        return ""
