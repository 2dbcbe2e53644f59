"""What a crash may leave of recorded operations: a file system with volatile and durable state.

Here: ``Disk``, which turns operations into effects and effects into trees. Not here: which of the
possible states are tried (``testing.crashes``). Pure: no file is touched.

The model is POSIX without favours. Data of a file is durable after its fsync, what a directory
lists after the fsync of that directory. All else may or may not have reached the disk, each effect
on its own and in any order: a file may have its new size without its data, or a part of it. A
rename within a directory is one effect; between two of them it is two, one in each, so that what is
moved may be found at both names, or at none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from dist_ckpt.testing._recording import Operation, RecordingError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["Disk", "Effect", "Fate", "Tree"]

Tree: TypeAlias = "Mapping[str, bytes | str | None]"
"""By relative path: bytes of a file, where a symlink leads, or None for a directory."""

Fate: TypeAlias = Literal["kept", "lost", "size only", "torn"]
"""What became of an effect that was not made durable."""

_ROOT = 0


@dataclass(frozen=True, slots=True)
class _Entry:
    """A directory lists ``name`` as ``node`` from now on; not any more if that is None."""

    directory: int
    name: str
    node: int | None


@dataclass(slots=True)
class Effect:
    """One change, and when it became durable.

    Attributes:
        index: Its number among the effects.
        number: Of the operation that made it.
        operation: That operation.
        entries: What directories list.
        node: The file whose data changes, if it is that.
        durable_from: After how many operations it is durable; None for never.
    """

    index: int
    number: int
    operation: Operation
    entries: tuple[_Entry, ...] = ()
    node: int | None = None
    durable_from: int | None = None

    def __str__(self) -> str:
        """Tell it in a line."""
        names = ", ".join(entry.name for entry in self.entries)
        return f"{self.number}. {self.operation}" + (f" (the name {names})" if names else "")

    @property
    def fates(self) -> tuple[Fate, ...]:
        """What may become of it in a crash."""
        if self.operation.kind == "write":
            return ("kept", "lost", "size only", "torn")
        return ("kept", "lost")


class Disk:
    """A folder that was empty, and all that was done to it.

    Args:
        operations: Relative to the folder, in the order in which they ended.

    Raises:
        RecordingError: They do not fit together.
    """

    def __init__(self, operations: Sequence[Operation]) -> None:
        """Take the operations one after the other."""
        self.effects: list[Effect] = []
        self._directories: dict[int, dict[str, int]] = {_ROOT: {}}
        self._files: set[int] = set()
        self._links: dict[int, str] = {}
        for number, one in enumerate(operations):
            try:
                self._take(number, one)
            except KeyError as error:
                raise RecordingError(f"operation {number}, {one}: no {error}") from error

    def pending(self, count: int) -> list[Effect]:
        """Return the effects among the first ``count`` operations that are not durable by then."""
        return [
            one
            for one in self.effects
            if one.number < count and (one.durable_from is None or one.durable_from > count)
        ]

    def tree(self, count: int, fates: Mapping[int, Fate]) -> Tree:
        """Return what is on the disk after ``count`` operations and a crash.

        Args:
            count: How many operations had ended.
            fates: By index of the effect; ``kept`` if it is not there.
        """
        listed: dict[int, dict[str, int]] = {}
        contents: dict[int, bytearray] = {}
        for one in self.effects:
            fate = fates.get(one.index, "kept")
            if one.number >= count or fate == "lost":
                continue
            for entry in one.entries:
                if entry.node is None:
                    listed.setdefault(entry.directory, {}).pop(entry.name, None)
                else:
                    listed.setdefault(entry.directory, {})[entry.name] = entry.node
            if one.node is not None:
                _apply(one.operation, contents.setdefault(one.node, bytearray()), fate)
        return dict(self._walk(_ROOT, "", listed, contents))

    def _walk(
        self,
        directory: int,
        prefix: str,
        listed: Mapping[int, Mapping[str, int]],
        contents: Mapping[int, bytearray],
    ) -> Iterator[tuple[str, bytes | str | None]]:
        for name, node in sorted(listed.get(directory, {}).items()):
            if node in self._directories:
                yield f"{prefix}{name}", None
                yield from self._walk(node, f"{prefix}{name}/", listed, contents)
            elif node in self._links:
                yield f"{prefix}{name}", self._links[node]
            else:
                yield f"{prefix}{name}", bytes(contents.get(node, b""))

    # -- operations, on the volatile state

    def _take(self, number: int, one: Operation) -> None:
        if one.kind == "sync":
            self._sync(number, self._node(one.path), one.begun)
        elif one.kind in ("write", "truncate"):
            self._add(number, one, node=self._node(one.path))
        elif one.kind != "mark":
            entries = list(self._entries(one))
            for entry in entries:
                names = self._directories[entry.directory]
                if entry.node is None:
                    del names[entry.name]
                else:
                    names[entry.name] = entry.node
            for directory in {entry.directory: None for entry in entries}:
                found = [entry for entry in entries if entry.directory == directory]
                self._add(number, one, entries=tuple(found))

    def _add(self, number: int, one: Operation, **what: Any) -> None:
        self.effects.append(Effect(len(self.effects), number, one, **what))

    def _entries(self, one: Operation) -> Iterator[_Entry]:
        directory, name = self._parent(one.path)
        found = self._directories[directory].get(name)
        if one.kind in ("create", "mkdir", "symlink"):
            if found is None or one.kind != "create":
                yield _Entry(directory, name, self._new(one))
            return
        if found is None:
            raise KeyError(one.path)
        if one.kind in ("unlink", "rmdir"):
            yield _Entry(directory, name, None)
            return
        there, other_name = self._parent(one.other)
        if one.kind == "exchange":
            yield _Entry(directory, name, self._directories[there][other_name])
        elif one.kind == "rename":
            yield _Entry(directory, name, None)
        yield _Entry(there, other_name, found)

    def _new(self, one: Operation) -> int:
        node = len(self._directories) + len(self._files) + len(self._links)
        if one.kind == "mkdir":
            self._directories[node] = {}
        elif one.kind == "symlink":
            self._links[node] = one.other
        else:
            self._files.add(node)
        return node

    def _sync(self, number: int, node: int, begun: int) -> None:
        for one in self.effects:
            place = one.node if one.node is not None else one.entries[0].directory
            if one.durable_from is None and one.number < begun and place == node:
                one.durable_from = number + 1

    def _node(self, path: str) -> int:
        if path == ".":
            return _ROOT
        directory, name = self._parent(path)
        return self._directories[directory][name]

    def _parent(self, path: str) -> tuple[int, str]:
        *folders, name = path.split("/")
        node = _ROOT
        for folder in folders:
            node = self._directories[node][folder]
        return node, name


def _apply(one: Operation, content: bytearray, fate: Fate) -> None:
    if one.kind == "truncate":
        del content[one.position :]
        content.extend(bytes(one.position - len(content)))
        return
    end = one.position + len(one.data)
    content.extend(bytes(max(0, end - len(content))))
    if fate == "size only":
        return
    length = len(one.data) if fate == "kept" else len(one.data) // 2
    content[one.position : one.position + length] = one.data[:length]
