"""Every crash point of a program: what may be on the disk if the power fails at any moment.

Here: ``record`` runs a program and lists what it does to a folder; ``crash_states`` makes of that
list every state which a crash may leave; ``explore`` puts each state on a disk and asks whether it
is as it should be. Not here: reading traces (``testing._recording``), the model of the disk
(``testing._durability``). Called by tests.

The program is a Python script in a process of its own. It calls ``mark`` where it has got something
done, so that the check knows what must be there::

    # script.py
    save(state, folder / "step_1")
    mark("saved 1")

    # the test
    recording = record(Path("script.py"), str(folder), root=folder)
    report = explore(recording, check, scratch=tmp_path / "states")
    assert not report.problems
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dist_ckpt.testing._durability import Disk, Fate, Tree
from dist_ckpt.testing._recording import (
    CALLS,
    Operation,
    Recording,
    RecordingError,
    read_trace,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = [
    "CrashState",
    "Operation",
    "Recording",
    "RecordingError",
    "Report",
    "crash_states",
    "explore",
    "has_strace",
    "mark",
    "materialise",
    "record",
]

_MARKS_VARIABLE = "DIST_CKPT_CRASH_MARKS"
_MAX_STRING_NBYTES = 1 << 26
_TRACED = f"trace={','.join(f'?{name}' for name in CALLS)}"


def mark(name: str) -> None:
    """Note that the program has come to this point; without effect if nobody records it."""
    path = os.environ.get(_MARKS_VARIABLE)
    if path is None:
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, f"{name}\n".encode())
    finally:
        os.close(descriptor)


def has_strace() -> bool:
    """Return whether system calls of a child can be recorded on this machine."""
    return bool(_strace())


@functools.cache
def _strace() -> tuple[str, ...]:
    """Return the command that traces, without what it traces; empty if nothing can be traced."""
    program = shutil.which("strace")
    if program is None:
        return ()
    # With the filter, calls of no interest are not stopped at: much faster, if it is supported.
    for options in (("-f", "--seccomp-bpf"), ("-f",)):
        command = (program, *options, "-y", "-xx", "-s", str(_MAX_STRING_NBYTES))
        done = subprocess.run(  # noqa: S603 - found by its name
            [*command, "-o", os.devnull, "-e", _TRACED, sys.executable, "-c", ""],
            capture_output=True,
            timeout=60,
            check=False,
        )
        if done.returncode == 0:
            return command
    return ()


def record(
    script: Path,
    *args: str,
    root: Path,
    recorder: Literal["auto", "strace", "python"] = "auto",
    timeout_secs: float = 300.0,
) -> Recording:
    """Run a script and return what it and its children do below ``root``.

    Args:
        script: A Python program.
        args: Its arguments.
        root: An existing, empty directory.
        recorder: ``auto`` is ``strace`` where that works, else ``python``: see ``Recording``.
        timeout_secs: How long it may run.

    Raises:
        RecordingError: The program failed, or did something that is not modelled.
    """
    root = root.resolve()
    if recorder == "auto":
        recorder = "strace" if has_strace() else "python"
    with tempfile.TemporaryDirectory(prefix="recording-") as scratch:
        trace, marks = Path(scratch).resolve() / "trace", Path(scratch).resolve() / "marks"
        command = [sys.executable, os.fspath(script), *args]
        if recorder == "strace":
            command = [*_strace(), "-o", os.fspath(trace), "-e", _TRACED, *command]
        else:
            watcher = "dist_ckpt.testing._watched"
            command[1:1] = ["-m", watcher, os.fspath(trace), os.fspath(root), os.fspath(marks)]
        environment = {**os.environ, _MARKS_VARIABLE: os.fspath(marks)}
        done = subprocess.run(  # noqa: S603 - the script is the caller's
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_secs,
            check=False,
        )
        if done.returncode != 0:
            raise RecordingError(f"{script} ended with {done.returncode}:\n{done.stderr[-8000:]}")
        with trace.open(encoding="utf-8") as lines:
            if recorder == "strace":
                found = read_trace(lines, os.fspath(root), os.fspath(marks))
            else:
                found = [_operation(json.loads(line)) for line in lines]
    return Recording(operations=found, recorder=recorder)


def _operation(entry: dict[str, str | int]) -> Operation:
    return Operation(**{**entry, "data": bytes.fromhex(str(entry["data"]))})  # type: ignore[arg-type]  # as it was written


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashState:
    """What may be on the disk after a crash.

    Attributes:
        after: How many operations had ended.
        marks: What the program had told by then.
        fates: What became of effects that were not durable, as text; all else was kept.
        tree: The files: by relative path their bytes, None for a directory, text for a link.
    """

    after: int
    marks: tuple[str, ...]
    fates: tuple[str, ...]
    tree: Tree

    @property
    def digest(self) -> str:
        """The same for states that no check can tell apart."""
        found = hashlib.sha256(repr(self.marks).encode())
        for path, content in self.tree.items():
            found.update(f"{path}\0{type(content).__name__}\0".encode(errors="surrogateescape"))
            data = content.encode() if isinstance(content, str) else content or b""
            found.update(hashlib.sha256(data).digest())
        return found.hexdigest()

    def describe(self, recording: Recording) -> str:
        """Return how this state comes about, for a failure report."""
        last = [f"    {one}" for one in recording.operations[max(0, self.after - 8) : self.after]]
        gone = [f"    {fate}" for fate in self.fates]
        files = [f"    {path}" for path, content in self.tree.items() if content is not None]
        return "\n".join([
            f"after {self.after} operations, the last of which are", *last,
            "  of which the crash has made", *(gone or ["    all durable"]),
            "  which leaves", *files,
        ])  # fmt: skip


def crash_states(
    recording: Recording, *, samples: int = 3, seed: int = 0, dense: int = 3
) -> Iterator[CrashState]:
    """Yield what a crash may leave, after each of the operations; equal states more than once.

    Of what is not durable at that moment: all is kept; nothing is; each effect alone is lost, or
    alone is kept, and so for a write whose size alone or whose first half has reached the disk; all
    combinations if there are few; and ``samples`` random ones.

    Args:
        recording: Of a folder that was empty in the beginning.
        samples: How many random combinations are added at each point.
        seed: Makes these repeatable.
        dense: Up to how many effects all combinations of kept and lost are tried.
    """
    disk = Disk(recording.operations)
    dice = random.Random(seed)  # noqa: S311 - repeatable
    marks: list[str] = []
    for count in range(len(recording.operations) + 1):
        if count and recording.operations[count - 1].kind == "mark":
            marks.append(recording.operations[count - 1].path)
        pending = {one.index: one.fates for one in disk.pending(count)}
        for fates in _combinations(pending, dice, samples=samples, dense=dense):
            gone = [(index, fate) for index, fate in sorted(fates.items()) if fate != "kept"]
            yield CrashState(
                after=count,
                marks=tuple(marks),
                fates=tuple(f"{fate}: {disk.effects[index]}" for index, fate in gone),
                tree=disk.tree(count, fates),
            )


def _combinations(
    pending: Mapping[int, tuple[Fate, ...]], dice: random.Random, *, samples: int, dense: int
) -> Iterator[dict[int, Fate]]:
    lost: dict[int, Fate] = dict.fromkeys(pending, "lost")
    yield {}
    if not pending:
        return
    yield lost
    for number, fates in pending.items():
        for fate in fates:
            if fate != "kept":
                yield {number: fate}
            if fate != "lost":
                yield {**lost, number: fate}
    if len(pending) <= dense:
        for bits in range(1, 2 ** len(pending) - 1):
            yield {n: "lost" for i, n in enumerate(pending) if bits >> i & 1}
    for _ in range(samples):
        yield {number: dice.choice(fates) for number, fates in pending.items()}


def materialise(tree: Tree, directory: Path) -> None:
    """Make ``directory`` and put the files of a state into it."""
    directory.mkdir(parents=True)
    for path, content in tree.items():
        where = directory / path
        if content is None:
            where.mkdir()
        elif isinstance(content, str):
            where.symlink_to(content)
        else:
            where.write_bytes(content)


@dataclass(slots=True, kw_only=True)
class Report:
    """What ``explore`` has found.

    Attributes:
        operations: How many operations were recorded.
        tried: How many crashes were tried.
        distinct: How many different states they have left; each was looked at once.
        problems: What was wrong, with how the state comes about.
        recorder: Who has seen the operations.
    """

    recorder: str
    operations: int = 0
    tried: int = 0
    distinct: int = 0
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Tell the numbers in a line."""
        return (
            f"{self.operations} operations ({self.recorder}), {self.tried} crashes, "
            f"{self.distinct} different states, {len(self.problems)} wrong"
        )


def explore(
    recording: Recording,
    check: Callable[[Path, tuple[str, ...]], str | None],
    *,
    scratch: Path,
    samples: int = 3,
    seed: int = 0,
    max_problems: int = 5,
) -> Report:
    """Check every state that a crash may leave.

    Args:
        recording: What was done.
        check: Is given a folder in such a state, which it may change, and the marks that the
            program had told; returns what is wrong, or None. What it raises is wrong too.
        scratch: A directory that is not there yet; it is removed in the end.
        samples: See ``crash_states``.
        seed: See ``crash_states``.
        max_problems: After so many, stop.
    """
    report = Report(recorder=recording.recorder, operations=len(recording.operations))
    seen: set[str] = set()
    scratch.mkdir(parents=True)
    try:
        for state in crash_states(recording, samples=samples, seed=seed):
            report.tried += 1
            if state.digest in seen:
                continue
            seen.add(state.digest)
            report.distinct += 1
            problem = _problem(state, check, scratch / str(report.distinct))
            if problem is not None:
                report.problems.append(f"{problem}\n  {state.describe(recording)}")
                if len(report.problems) >= max_problems:
                    break
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return report


def _problem(
    state: CrashState, check: Callable[[Path, tuple[str, ...]], str | None], folder: Path
) -> str | None:
    materialise(state.tree, folder)
    try:
        return check(folder, state.marks)
    except Exception as error:  # noqa: BLE001 - reported with the state that it came from
        return f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
