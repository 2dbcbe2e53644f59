"""The second recorder: a program whose calls of ``os`` are watched, where there is no strace.

Here: the hooks, and the comparison of the folder before and after each call. Not here: reading the
result (``testing.crashes``). Run as ``python -m dist_ckpt.testing._watched TRACE ROOT MARKS SCRIPT
ARGS...``; writes one operation a line.

Every call that makes something durable or changes a name is hooked; before and after it the folder
is compared with what was known of it, so writes are seen too, if not one by one. Files that were
not opened through ``os`` are those of other languages, whose syncs cannot be seen: they are taken
as durable. Processes that the program starts are not watched.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Watch"]

_HOOKED = (
    "open", "write", "pwrite", "pwritev", "ftruncate", "fsync", "fdatasync", "mkdir", "rename",
    "replace", "link", "symlink", "unlink", "remove", "rmdir",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Seen:
    """What stands under a name."""

    number: int  # of the inode
    content: bytes | str | None


class Watch:
    """Compares the folder with what is known of it, and writes down what has changed.

    Args:
        trace: Where to write.
        root: The folder.
        marks: The file of the marks.
    """

    def __init__(self, trace: Path, root: Path, marks: Path) -> None:
        """Begin with an empty folder."""
        self._trace = trace.open("w", encoding="utf-8")
        self._root, self._marks = os.fspath(root), os.fspath(marks)
        self._known: dict[str, _Seen] = {}
        self._own: set[str] = set()
        self._count = 0
        self._lock = threading.RLock()

    def install(self) -> None:
        """Hook the calls, for as long as the process lives."""
        for name in _HOOKED:
            setattr(os, name, self._hooked(name, getattr(os, name)))

    def _hooked(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self._look()
                path = self._path(args[0]) if args else ""
                result = original(*args, **kwargs)
                self._note(name, path, args, kwargs)
                return result

        return call

    def _note(self, name: str, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name in ("fsync", "fdatasync"):
            self._tell("sync", path)
        elif name == "write" and path == self._marks:
            self._write("mark", bytes(args[1]).decode().strip())
        elif name == "open" and kwargs.get("dir_fd") is None:
            self._own.add(os.path.realpath(os.fspath(args[0])))
        self._look()

    def _path(self, what: Any) -> str:
        if isinstance(what, int):
            return os.readlink(f"/proc/self/fd/{what}")  # noqa: PTH115 - what it is may be no path
        return str(os.path.realpath(os.fspath(what)))

    def _look(self) -> None:
        """Write down how the folder differs from what is known of it."""
        found = dict(self._scan(self._root, ""))
        known = self._known
        self._note_moves(found, known)
        for path in sorted(known.keys() - found.keys(), reverse=True):
            self._write("rmdir" if known.pop(path).content is None else "unlink", path)
        for path in sorted(found):
            before, now = known.get(path), found[path]
            if before != now:
                self._note_change(path, before, now)
        self._known = found

    def _note_moves(self, found: dict[str, _Seen], known: dict[str, _Seen]) -> None:
        """Find names of things that had another name before."""
        while True:
            names = {seen.number: path for path, seen in sorted(known.items(), reverse=True)}
            moved = [
                (names[seen.number], path)
                for path, seen in sorted(found.items())
                if seen.number in names
                and (path not in known or known[path].number != seen.number)
                and not (names[seen.number] in found
                         and found[names[seen.number]].number == seen.number)
            ]  # fmt: skip
            if not moved:
                break
            old, new = moved[0]
            swapped = new in known and old in found and found[old].number == known[new].number
            self._write("exchange" if swapped else "rename", old, other=new)
            _rename(known, old, new, swapped=swapped)
        for path, seen in sorted(found.items()):
            if path not in known and isinstance(seen.content, bytes) and seen.number in names:
                self._write("link", names[seen.number], other=path)
                known[path] = known[names[seen.number]]

    def _note_change(self, path: str, before: _Seen | None, now: _Seen) -> None:
        if before is not None and before.number != now.number:
            self._write("unlink", path)
            before = None
        if now.content is None:
            self._write("mkdir", path)
        elif isinstance(now.content, str):
            self._write("symlink", path, other=now.content)
        else:
            old = before.content if before is not None else b""
            self._note_content(path, old if isinstance(old, bytes) else b"", now, before is None)

    def _note_content(self, path: str, old: bytes, now: _Seen, is_new: bool) -> None:  # noqa: FBT001 - private
        content = now.content if isinstance(now.content, bytes) else b""
        if is_new:
            self._write("create", path)
        start = next((i for i, (a, b) in enumerate(zip(old, content, strict=False)) if a != b),
                     min(len(old), len(content)))  # fmt: skip
        if content[start:]:
            self._write("write", path, position=start, data=content[start:].hex())
        if len(content) < len(old):
            self._write("truncate", path, position=len(content))
        if os.path.join(self._root, path) not in self._own:  # noqa: PTH118 - text as it was opened
            self._write("sync", path)
            self._write("sync", os.path.dirname(path) or ".")  # noqa: PTH120 - text

    def _scan(self, folder: str, prefix: str) -> Iterator[tuple[str, _Seen]]:
        for entry in os.scandir(folder):
            path = f"{prefix}{entry.name}"
            try:
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    yield path, _Seen(status.st_ino, None)
                    yield from self._scan(entry.path, f"{path}/")
                elif stat.S_ISLNK(status.st_mode):
                    yield path, _Seen(status.st_ino, os.readlink(entry.path))  # noqa: PTH115 - text
                else:
                    yield path, _Seen(status.st_ino, Path(entry.path).read_bytes())
            except FileNotFoundError:
                continue  # of another language's thread, which has just renamed it

    def _tell(self, kind: str, path: str) -> None:
        """Write down an operation on what has an absolute path, if it is in the folder."""
        if path == self._root:
            self._write(kind, ".")
        elif path.startswith(f"{self._root}/"):
            self._write(kind, path.removeprefix(f"{self._root}/"))

    def _write(self, kind: str, path: str, **more: Any) -> None:
        entry = {"other": "", "position": 0, "data": "", **more, "begun": self._count}
        self._trace.write(json.dumps({"kind": kind, "path": path, **entry}) + "\n")
        self._trace.flush()
        self._count += 1


def _rename(known: dict[str, _Seen], old: str, new: str, *, swapped: bool) -> None:
    def below(path: str) -> dict[str, _Seen]:
        names = [name for name in known if name == path or name.startswith(f"{path}/")]
        return {name.removeprefix(path): known.pop(name) for name in names}

    taken, other = below(old), below(new)
    known |= {f"{new}{name}": seen for name, seen in taken.items()}
    if swapped:
        known |= {f"{old}{name}": seen for name, seen in other.items()}


def _main(trace: str, root: str, marks: str, script: str, *args: str) -> None:
    Watch(Path(trace), Path(root), Path(marks)).install()
    sys.argv = [script, *args]
    sys.path[0] = os.path.dirname(os.path.abspath(script))  # noqa: PTH100, PTH120 - as python does
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    _main(*sys.argv[1:])
