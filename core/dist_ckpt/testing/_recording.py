"""What a program does to a folder, as a list of file-system operations in the order they ended.

Here: ``Operation``, ``Recording``, and the reading of a trace of system calls. Not here: what a
crash leaves of them (``testing._durability``), running the program (``testing.crashes``), the
second recorder (``testing._watched``).
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["CALLS", "Kind", "Operation", "Recording", "RecordingError", "read_trace"]

Kind: TypeAlias = Literal[
    "create", "mkdir", "write", "truncate", "sync", "rename", "exchange", "link", "unlink", "rmdir",
    "symlink", "mark",
]  # fmt: skip

CALLS = (
    "open", "openat", "creat", "write", "pwrite64", "writev", "pwritev", "pwritev2", "truncate",
    "ftruncate", "fallocate", "copy_file_range", "sendfile", "fsync", "fdatasync", "mkdir",
    "mkdirat", "rename", "renameat", "renameat2", "link", "linkat", "symlink", "symlinkat",
    "unlink", "unlinkat", "rmdir",
)  # fmt: skip
"""System calls that change files or make changes durable."""

_LINE = re.compile(r"(?P<pid>\d+) +(?P<call>\w+)\((?P<args>.*)\) += (?P<result>.*)")
_BEGUN = re.compile(r"(?P<pid>\d+) +(?P<head>\w+\(.*?),? <unfinished \.\.\.>")
_RESUMED = re.compile(r"(?P<pid>\d+) +<\.\.\. \w+ resumed>,? ?(?P<tail>.*)")
_BYTE = re.compile(r"\\x([0-9a-f]{2})")
_BASE = re.compile(r'iov_base="([^"]*)"')


class RecordingError(RuntimeError):
    """The program failed, or did something to the folder that is not modelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One change of a folder, or a promise of the file system about changes before.

    Attributes:
        kind: What was done; ``sync`` for fsync of a file or directory, ``mark`` for a point that
            the program has told.
        path: Of what, relative to the folder; the name of a mark.
        other: The second name of a rename, exchange or link; what a symlink leads to.
        position: Where a write begins; the size of a truncation.
        data: What was written.
        begun: How many operations had ended when this one began: a sync promises these alone.
    """

    kind: Kind
    path: str
    other: str = ""
    position: int = 0
    data: bytes = b""
    begun: int = 0

    def __str__(self) -> str:
        """Tell it in a line."""
        if self.kind == "write":
            return f"write {len(self.data)} bytes at {self.position} of {self.path}"
        return " ".join(part for part in (self.kind, self.path, self.other) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What a program has done.

    Attributes:
        operations: In the order in which they ended.
        recorder: Who has seen them: ``strace``, all that a process and its children do; ``python``,
            what this one process does through ``os``: files that other code makes are taken as
            durable from the moment they are seen.
    """

    operations: Sequence[Operation]
    recorder: Literal["strace", "python"]

    def below(self, folder: str) -> Recording:
        """Return what was done below ``folder``, with names relative to it; marks stay.

        Raises:
            RecordingError: Something was moved into the folder or out of it.
        """
        kept: list[Operation] = []
        numbers: list[int] = []
        for one in self.operations:
            numbers.append(len(kept))
            moved = self._moved(one, folder)
            if moved is not None:
                kept.append(replace(moved, begun=numbers[one.begun]))
        return Recording(operations=kept, recorder=self.recorder)

    @staticmethod
    def _moved(one: Operation, folder: str) -> Operation | None:
        if one.kind == "mark":
            return one
        path = _relative(one.path, folder)
        if one.kind not in ("rename", "exchange", "link"):
            # The folder itself is there from the beginning.
            is_inside = path is not None and (path != "." or one.kind == "sync")
            return replace(one, path=path) if path is not None and is_inside else None
        other = _relative(one.other, folder)
        if path is None and other is None:
            return None
        if path is None or other is None:
            raise RecordingError(f"{one}: across the border of {folder!r}")
        return replace(one, path=path, other=other)


def _relative(path: str, folder: str) -> str | None:
    if path == folder:
        return "."
    return path.removeprefix(f"{folder}/") if path.startswith(f"{folder}/") else None


def read_trace(lines: Iterable[str], root: str, marks: str) -> list[Operation]:
    """Return what a trace of system calls says about the files below ``root``.

    Args:
        lines: What ``strace -f -y -xx`` wrote, of the calls in ``CALLS``.
        root: An absolute path, as the kernel knows it.
        marks: The file into which the program writes its marks.

    Raises:
        RecordingError: A call that is not modelled has changed something there.
    """
    reader = _TraceReader(root, marks)
    for call in _calls(lines, reader):
        reader.take(call)
    return reader.operations


@dataclass(frozen=True, slots=True)
class _Call:
    name: str
    args: str
    result: str
    process: str
    begun: int

    @property
    def returned(self) -> int:
        return int(self.result.split("<")[0].split(" ")[0])

    @property
    def parts(self) -> list[str]:
        return self.args.split(", ")


def _calls(lines: Iterable[str], reader: _TraceReader) -> Iterator[_Call]:
    """Yield the calls that succeeded, in the order of their ends."""
    open_calls: dict[str, tuple[str, int]] = {}
    for line in lines:
        begun = len(reader.operations)
        text = line.rstrip("\n")
        if found := _BEGUN.fullmatch(text):
            open_calls[found["pid"]] = (found["head"], begun)
            continue
        if found := _RESUMED.fullmatch(text):
            if found["pid"] not in open_calls:
                continue  # of a call that is not asked for
            head, begun = open_calls.pop(found["pid"])
            tail = found["tail"]
            joint = "" if tail.startswith(")") or head.endswith("(") else ", "
            text = f"{found['pid']} {head}{joint}{tail}"
        call = _LINE.fullmatch(text)
        if call and not call["result"].startswith(("-1", "?")):
            yield _Call(call["call"], call["args"], call["result"], call["pid"], begun)


class _TraceReader:
    """Makes operations of calls: knows where a descriptor stands in its file."""

    def __init__(self, root: str, marks: str) -> None:
        self.operations: list[Operation] = []
        self._root, self._marks = root, marks
        self._positions: dict[tuple[str, str], int | None] = {}

    def take(self, call: _Call) -> None:
        do = getattr(self, f"_on_{call.name}", None) or self._on_other
        do(call)

    def _add(self, kind: Kind, path: str, call: _Call, **more: object) -> None:
        inside = _relative(path, self._root)
        if inside is None:
            return
        other = more.pop("other", "")
        if kind in ("rename", "exchange", "link"):
            found = _relative(str(other), self._root)
            if found is None:
                raise RecordingError(f"{call.name} of {path} to {other}: out of the folder")
            other = found
        operation = Operation(kind=kind, path=inside, other=str(other), begun=call.begun)
        self.operations.append(replace(operation, **more))  # type: ignore[arg-type]  # by kind

    def _on_openat(self, call: _Call) -> None:
        self._opened(call, _joined(call.parts[0], call.parts[1]), call.parts[2])

    def _on_open(self, call: _Call) -> None:
        self._opened(call, _text(call.parts[0]), call.parts[1])

    def _on_creat(self, call: _Call) -> None:
        self._opened(call, _text(call.parts[0]), "O_CREAT|O_TRUNC")

    def _opened(self, call: _Call, path: str, flags: str) -> None:
        number, real = _descriptor(call.result)
        is_appending = "O_APPEND" in flags
        self._positions[number, real] = None if is_appending else 0
        if "O_CREAT" in flags:
            self._add("create", path, call)
        if "O_TRUNC" in flags:
            self._add("truncate", path, call, position=0)

    def _on_write(self, call: _Call) -> None:
        number, path = _descriptor(call.args)
        data = _bytes(_text_of(call.args, 1))[: call.returned]
        if path == self._marks:
            mark = Operation(kind="mark", path=data.decode().strip(), begun=call.begun)
            self.operations.append(mark)
            return
        self._written(number, path, data, call)

    def _on_writev(self, call: _Call) -> None:
        number, path = _descriptor(call.args)
        self._written(number, path, _gathered(call), call)

    def _written(self, number: str, path: str, data: bytes, call: _Call) -> None:
        if _relative(path, self._root) is None:
            return
        position = self._positions.get((number, path), 0)
        if position is None:
            raise RecordingError(f"{call.name} to {path}: appending is not modelled")
        self._positions[number, path] = position + len(data)
        self._add("write", path, call, position=position, data=data)

    def _on_pwrite64(self, call: _Call) -> None:
        data = _bytes(_text_of(call.args, 1))[: call.returned]
        position = int(call.parts[-1])
        self._add("write", _descriptor(call.args)[1], call, position=position, data=data)

    def _on_pwritev(self, call: _Call) -> None:
        position = int(call.parts[-1])
        path = _descriptor(call.args)[1]
        self._add("write", path, call, position=position, data=_gathered(call))

    def _on_pwritev2(self, call: _Call) -> None:
        position = int(call.parts[-2])
        path = _descriptor(call.args)[1]
        self._add("write", path, call, position=position, data=_gathered(call))

    def _on_ftruncate(self, call: _Call) -> None:
        path = _descriptor(call.args)[1]
        self._add("truncate", path, call, position=int(call.parts[-1]))

    def _on_fsync(self, call: _Call) -> None:
        self._add("sync", _descriptor(call.args)[1], call)

    _on_fdatasync = _on_fsync

    def _on_mkdir(self, call: _Call) -> None:
        self._add("mkdir", _text(call.parts[0]), call)

    def _on_mkdirat(self, call: _Call) -> None:
        self._add("mkdir", _joined(*call.parts[:2]), call)

    def _on_rename(self, call: _Call) -> None:
        self._add("rename", _text(call.parts[0]), call, other=_text(call.parts[1]))

    def _on_renameat2(self, call: _Call) -> None:
        parts = call.parts
        kind: Kind = "exchange" if "RENAME_EXCHANGE" in parts[-1] else "rename"
        self._add(kind, _joined(*parts[:2]), call, other=_joined(*parts[2:4]))

    _on_renameat = _on_renameat2

    def _on_link(self, call: _Call) -> None:
        self._add("link", _text(call.parts[0]), call, other=_text(call.parts[1]))

    def _on_linkat(self, call: _Call) -> None:
        self._add("link", _joined(*call.parts[:2]), call, other=_joined(*call.parts[2:4]))

    def _on_symlink(self, call: _Call) -> None:
        self._add("symlink", _text(call.parts[1]), call, other=_text(call.parts[0]))

    def _on_symlinkat(self, call: _Call) -> None:
        self._add("symlink", _joined(*call.parts[1:3]), call, other=_text(call.parts[0]))

    def _on_unlink(self, call: _Call) -> None:
        self._add("unlink", _text(call.parts[0]), call)

    def _on_unlinkat(self, call: _Call) -> None:
        kind: Kind = "rmdir" if "AT_REMOVEDIR" in call.parts[2] else "unlink"
        self._add(kind, _joined(*call.parts[:2]), call)

    def _on_rmdir(self, call: _Call) -> None:
        self._add("rmdir", _text(call.parts[0]), call)

    def _on_other(self, call: _Call) -> None:
        if _hex(self._root) in call.args:
            raise RecordingError(f"{call.name} is not modelled: {_bytes(call.args)!r}")


def _hex(text: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in text.encode())


def _bytes(text: str) -> bytes:
    return bytes(int(found, 16) for found in _BYTE.findall(text))


def _text(part: str) -> str:
    """Return a path that is an argument; relative ones are told as they are."""
    return posixpath.normpath(_bytes(part).decode(errors="surrogateescape"))


def _text_of(args: str, number: int) -> str:
    return args.split(", ")[number]


def _gathered(call: _Call) -> bytes:
    return b"".join(_bytes(base) for base in _BASE.findall(call.args))[: call.returned]


def _descriptor(text: str) -> tuple[str, str]:
    """Return number and path of a descriptor; an empty path for what is deleted or no file."""
    number, _, rest = text.partition("<")
    path, _, behind = rest.partition(">")
    return number, "" if behind.startswith("(deleted)") else _bytes(path).decode()


def _joined(directory: str, name: str) -> str:
    return posixpath.normpath(posixpath.join(_descriptor(directory)[1], _text(name)))
