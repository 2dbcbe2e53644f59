"""Whenever the power fails, the newest checkpoint is whole: the old one or the new one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from unittest import mock

import pytest

from dist_ckpt.testing.crashes import (
    Operation,
    Recording,
    RecordingError,
    crash_states,
    explore,
    has_strace,
    mark,
    materialise,
    record,
)
from tests._samples import IS_SOAK, sample
from tests.faults import _crash_points
from tests.faults._crash_points import IN_ONE_PROCESS, SECTIONS, Law

pytestmark = [pytest.mark.slow, pytest.mark.sampled]

SCRIPT = Path(_crash_points.__file__)
SAMPLES = sample(1, 20, variable="DIST_CKPT_CRASH_SAMPLES")
"""How many random combinations are tried after each operation."""
FEW = ["torch_dist in a thread", "zarr without exchange"]
DAILY = ["torch_dist", "zarr", "torch_dist in a process", "managed"]
"""What is tried besides where the soak run tries all."""
TRACED = [name for name in SECTIONS if name not in FEW and (IS_SOAK or name in DAILY)]
WATCHED = [
    name
    for name in IN_ONE_PROCESS
    if name in FEW or (not has_strace() and (IS_SOAK or name in DAILY))
]
"""What is recorded the second way: little where the first one works, all where it does not."""
MEMORY = Path("/dev/shm")  # noqa: S108 - thousands of small trees: quickest in memory
RECORDERS = [
    pytest.param(
        "strace", marks=pytest.mark.skipif(not has_strace(), reason="strace cannot trace here")
    ),
    "python",
]


@dataclass(frozen=True, slots=True)
class Recorded:
    """What was done, and the folder as it was left."""

    recording: Recording
    root: Path


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    folder = MEMORY if os.access(MEMORY, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(prefix="crashes-", dir=folder) as name:
        yield Path(name) / "states"


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    if not has_strace():
        pytest.skip("strace is not there or may not trace: the other recorder sees all it can")
    root = tmp_path_factory.mktemp("traced")
    return Recorded(record(SCRIPT, str(root), *TRACED, root=root, recorder="strace"), root)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    root = tmp_path_factory.mktemp("watched")
    return Recorded(record(SCRIPT, str(root), *WATCHED, root=root, recorder="python"), root)


def hold(recorded: Recorded, section: str, scratch: Path) -> None:
    recording = recorded.recording.below(section)
    check_last_state(recording, recorded.root / section)

    report = explore(recording, Law(section).check, scratch=scratch, samples=SAMPLES)

    print(f"\n{section}: {report}")
    assert not report.problems, "\n\n".join(report.problems)
    assert report.tried > 1000
    assert report.distinct > 200


def check_last_state(recording: Recording, folder: Path) -> None:
    """What is recorded leads to what the program has left: no operation was overlooked."""
    *_, last = (state for state in crash_states(recording, samples=0) if not state.fates)
    found = {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
             for path in folder.rglob("*")}  # fmt: skip
    assert last.tree == found


@pytest.mark.parametrize("section", TRACED)
def test_after_any_system_call(section: str, traced: Recorded, scratch: Path) -> None:
    """Saves, a save to the same path and a removal, as the kernel has seen them."""
    hold(traced, section, scratch)


@pytest.mark.parametrize("section", WATCHED)
def test_after_any_call_of_os(section: str, watched: Recorded, scratch: Path) -> None:
    """The same, as the interpreter has seen them: where nothing can be traced, this is left."""
    hold(watched, section, scratch)


SABOTAGE: dict[str, Callable[[Operation], bool]] = {
    "files are never synced": lambda one: one.kind == "sync" and "." in Path(one.path).name[1:],
    "directories are never synced": lambda one: one.kind == "sync" and one.path == ".",
    "attempts are never synced": lambda one: one.kind == "sync" and one.path.endswith(".attempt"),
    "the manifest is not synced": lambda one: one.kind == "sync" and "manifest" in one.path,
}
"""Which syncs a careless library would leave out."""


@pytest.mark.parametrize("name", SABOTAGE)
def test_a_sync_that_is_left_out_is_found(name: str, watched: Recorded, scratch: Path) -> None:
    """The law is not kept by chance: without these syncs there are states that break it."""
    section = WATCHED[0]
    whole = watched.recording.below(section)
    # An operation that does nothing in place of each: the others keep their numbers.
    careless = [
        Operation(kind="mark", path="-") if SABOTAGE[name](one) else one for one in whole.operations
    ]
    assert careless != whole.operations

    report = explore(
        replace(whole, operations=careless), Law(section).check, scratch=scratch, max_problems=1
    )

    assert len(report.problems) == 1


# -- the kit itself --------------------------------------------------------------------------------

PROGRAM = """
import os, sys
from pathlib import Path
from dist_ckpt.testing.crashes import mark
folder = Path(sys.argv[1])
def written(path, data, *, sync):
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    os.write(fd, data[:2]); os.pwrite(fd, data[2:], 2)
    if sync: os.fsync(fd)
    os.close(fd)
def synced(path):
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY); os.fsync(fd); os.close(fd)
(folder / "a").mkdir(); (folder / "b").mkdir()
written(folder / "a/x", b"1234", sync=True)
synced(folder / "a"); synced(folder)
mark("durable")
written(folder / "b/y", b"5678", sync=False)
os.rename(folder / "a/x", folder / "a/z")
os.link(folder / "a/z", folder / "linked")
os.symlink("a/z", folder / "soft")
os.unlink(folder / "linked")
mark("end")
"""


def trees_of(recording: Recording, mark: str) -> list[dict[str, bytes | str | None]]:
    """Return the different states with this mark as the last one."""
    found: list[dict[str, bytes | str | None]] = []
    for state in crash_states(recording):
        if state.marks[-1:] == (mark,) and dict(state.tree) not in found:
            found.append(dict(state.tree))
    return found


@pytest.fixture(scope="module", params=RECORDERS)
def simple(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    home = tmp_path_factory.mktemp("simple")
    script, root = home / "program.py", home / "root"
    script.write_text(PROGRAM)
    root.mkdir()
    recorder: Literal["strace", "python"] = request.param
    recording = record(script, str(root), root=root, recorder=recorder)
    assert recording.recorder == recorder
    return Recorded(recording, root)


def test_what_is_recorded_is_what_was_done(simple: Recorded, tmp_path: Path) -> None:
    """With nothing lost, the operations lead to the folder that the program has left."""
    *_, last = (state for state in crash_states(simple.recording) if not state.fates)
    materialise(last.tree, tmp_path / "again")

    for root in (simple.root, tmp_path / "again"):
        assert sorted(str(path.relative_to(root)) for path in root.rglob("*")) == [
            "a", "a/z", "b", "b/y", "soft",
        ]  # fmt: skip
        assert (root / "b/y").read_bytes() == b"5678"
        assert (root / "soft").readlink() == Path("a/z")


def test_what_was_synced_is_in_every_state(simple: Recorded) -> None:
    """Neither its name nor its bytes are ever lost; a rename that was not synced may be."""
    trees = trees_of(simple.recording, "end")

    assert len(trees) > 10
    for tree in trees:
        assert {"a", "b"} <= tree.keys()
        assert [tree[name] for name in ("a/x", "a/z") if name in tree] == [b"1234"]
    assert {"b/y" in tree for tree in trees} == {True, False}
    assert {"soft" in tree for tree in trees} == {True, False}


def test_what_was_not_synced_may_be_anything_in_part(simple: Recorded) -> None:
    """A name without data, a size without data, a torn write: all of these are tried."""
    found = {tree.get("b/y") for tree in trees_of(simple.recording, "end")}

    assert {None, b"", b"5678", b"56\0\0"} <= found, found


def test_a_sync_promises_what_was_there_when_it_began() -> None:
    """A write that ends while the file is synced may be lost."""
    create = Operation(kind="create", path="x")
    name = Operation(kind="sync", path=".", begun=1)
    write = Operation(kind="write", path="x", data=b"ab", begun=2)
    for begun, may_be_lost in ((2, True), (3, False)):
        sync = Operation(kind="sync", path="x", begun=begun)
        recording = Recording(operations=[create, name, write, sync], recorder="strace")
        after = [state.tree["x"] for state in crash_states(recording) if state.after == 4]
        assert (b"" in after) == may_be_lost


def test_a_rename_between_folders_needs_both_to_be_synced() -> None:
    """After the new folder alone is synced, the file may still be in the old one too."""
    kinds = [("mkdir", "a"), ("mkdir", "b"), ("create", "a/x"), ("sync", "a"), ("sync", ".")]
    before = [Operation(kind=kind, path=path, begun=n) for n, (kind, path) in enumerate(kinds)]  # type: ignore[arg-type]
    moved = [*before, Operation(kind="rename", path="a/x", other="b/x", begun=5)]

    def states(*synced: str) -> set[tuple[str, ...]]:
        syncs = [Operation(kind="sync", path=path, begun=6) for path in synced]
        recording = Recording(operations=[*moved, *syncs], recorder="strace")
        last = [s.tree for s in crash_states(recording) if s.after == len(recording.operations)]
        return {tuple(name for name in tree if "/" in name) for tree in last}

    assert states() == {("a/x",), ("b/x",), ("a/x", "b/x"), ()}
    assert states("b") == {("b/x",), ("a/x", "b/x")}
    assert states("b", "a") == {("b/x",)}


def test_an_exchange_is_seen_whole_or_not_at_all() -> None:
    """Two names in one folder: never the same thing under both, never one of them missing."""
    operations = [
        Operation(kind="create", path="a"),
        Operation(kind="write", path="a", data=b"A", begun=1),
        Operation(kind="sync", path="a", begun=2),
        Operation(kind="create", path="b", begun=3),
        Operation(kind="sync", path=".", begun=4),
        Operation(kind="exchange", path="a", other="b", begun=5),
    ]
    recording = Recording(operations=operations, recorder="strace")

    last = [dict(state.tree) for state in crash_states(recording) if state.after == 6]

    assert last == [{"a": b"", "b": b"A"}, {"a": b"A", "b": b""}, *last[2:]]
    assert all(tree in last[:2] for tree in last)


def test_a_wrong_state_is_reported_with_its_story(tmp_path: Path) -> None:
    """What was lost, what is left, and what the check raised or returned; the states are removed."""
    operations = [
        Operation(kind="create", path="a"),
        Operation(kind="write", path="a", data=b"abcd", begun=1),
    ]
    recording = Recording(operations=operations, recorder="python")

    def check(folder: Path, marks: tuple[str, ...]) -> str | None:
        assert marks == ()
        data = (folder / "a").read_bytes() if (folder / "a").exists() else b""
        assert data != b"ab\0\0", "a half"
        return "all of it" if data == b"abcd" else None

    report = explore(recording, check, scratch=tmp_path / "states")

    assert len(report.problems) == 2
    assert "all of it" in report.problems[0]
    assert "AssertionError: a half" in report.problems[1]
    assert "torn: 1. write 4 bytes at 0 of a" in report.problems[1]
    assert not (tmp_path / "states").exists()


def test_a_program_that_fails_is_told(tmp_path: Path) -> None:
    """With what it has printed."""
    script, root = tmp_path / "program.py", tmp_path / "root"
    script.write_text("raise SystemExit('no such luck')")
    root.mkdir()

    with pytest.raises(RecordingError, match="no such luck"):
        record(script, root=root, recorder="python")


def test_a_mark_without_a_recorder_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that marks can run by itself; with a recorder each mark is a line of its file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DIST_CKPT_CRASH_MARKS", raising=False)
    with mock.patch.object(os, "open", side_effect=AssertionError("a file is opened")):
        mark("x")
    assert list(tmp_path.iterdir()) == []

    monkeypatch.setenv("DIST_CKPT_CRASH_MARKS", str(tmp_path / "marks"))
    mark("y")
    mark("z")
    assert (tmp_path / "marks").read_text() == "y\nz\n"
