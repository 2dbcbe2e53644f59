"""What dead processes left is swept, by age and owner; what anybody may still need stays."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dist_ckpt import CheckpointNotFoundError, StorageError
from dist_ckpt.storage import leftovers, owners
from dist_ckpt.storage.commit import Attempt, attempt_prefix, remove_tree
from dist_ckpt.storage.leftovers import move_aside, sweep_leftovers
from dist_ckpt.storage.owners import Owner, forget_owner, owner_of, record_of, record_owner
from tests.multiprocess._world import run_program

DAY = 86400.0
LONG_AGO = time.time() - 2 * DAY


def dead_process() -> tuple[int, str]:
    """Return number and start of a process that has ended and been waited for."""
    code = "import dist_ckpt.storage.owners as o, os; print(os.getpid(), o.Owner.here().start)"
    done = run_program(code)
    pid, start = done.stdout.split()
    return int(pid), start


@pytest.fixture(scope="module")
def dead() -> Owner:
    pid, start = dead_process()
    return replace(Owner.here(), pid=pid, start=start)


def aged(path: Path, when: float = LONG_AGO) -> Path:
    """Let all of it, and its record, be from then."""
    for one in [*path.rglob("*"), path, record_of(path)]:
        if os.path.lexists(one):
            os.utime(one, (when, when), follow_symlinks=False)
    return path


def left(folder: Path, suffix: str, owner: Owner | None, *, target: str = "c") -> Path:
    """Leave something behind: a directory with a file in a folder."""
    stem = f"{attempt_prefix(folder / target)}{os.urandom(6).hex()}"
    path = folder / f"{stem}{suffix}"
    (path / "inner").mkdir(parents=True)
    (path / "inner" / "f").write_text("x")
    if owner is not None:
        record_of(path).write_text(json.dumps(asdict(owner)))
    return aged(path)


def swept(folder: Path, *, any_owner: bool = False) -> list[Path]:
    return sweep_leftovers(folder, older_than_secs=DAY, any_owner=any_owner)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize("suffix", [".attempt", ".trash"])
def test_what_the_dead_left_goes(
    tmp_path: Path, dead: Owner, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With its record; the log says what, and whose it was."""
    caplog.set_level(logging.INFO)
    path = left(tmp_path, suffix, dead)

    assert swept(tmp_path) == [path]

    assert names(tmp_path) == []
    assert f"removed {path}, which process {dead.pid} on {dead.host} left behind" in caplog.text
    assert swept(tmp_path) == []
    assert swept(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    "touch",
    [
        pytest.param(lambda path: path / "inner" / "f", id="file"),
        pytest.param(lambda path: path / "inner", id="folder"),
        pytest.param(lambda path: path, id="itself"),
        pytest.param(record_of, id="record"),
    ],
)
def test_what_was_touched_lately_stays(
    tmp_path: Path, dead: Owner, touch: Callable[[Path], Path]
) -> None:
    """Other ranks may still write for a rank 0 that is gone."""
    path = left(tmp_path, ".attempt", dead)
    os.utime(touch(path))

    assert swept(tmp_path) == []
    assert swept(tmp_path, any_owner=True) == []
    assert path.is_dir()


def test_what_has_a_living_owner_stays(tmp_path: Path) -> None:
    """However old; this process's too."""
    left(tmp_path, ".attempt", Owner.here())
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True
    ) as other:
        start = owners._start_of(other.pid)
        left(tmp_path, ".trash", replace(Owner.here(), pid=other.pid, start=start))

        assert swept(tmp_path) == []

        other.communicate("\n")
    assert len(swept(tmp_path)) == 1


@pytest.mark.parametrize(
    ("change", "is_gone"),
    [
        pytest.param({}, True, id="dead"),
        pytest.param({"pid": os.getpid()}, True, id="number-used-again"),
        pytest.param({"pid": os.getpid(), "start": ""}, False, id="start-unknown"),
        pytest.param({"boot": "before"}, True, id="host-restarted"),
        pytest.param({"boot": "before", "host": "localhost"}, False, id="host-without-name"),
        pytest.param({"boot": ""}, False, id="boot-unknown"),
        pytest.param({"boot": "b", "host": "other"}, False, id="other-host"),
        pytest.param({"space": "pid:[1]"}, False, id="other-container"),
        pytest.param({"boot": "b", "host": "other", "job": "slurm:7"}, True, id="job-moved"),
        pytest.param({"space": "pid:[1]", "job": "slurm:7"}, True, id="job-in-new-container"),
        pytest.param({"boot": "b", "host": "other", "job": "slurm:8"}, False, id="other-job"),
        pytest.param({"pid": os.getpid(), "start": "", "job": "slurm:7"}, False, id="job-is-here"),
        pytest.param({"pid": 0}, False, id="no-pid"),
        pytest.param({"pid": 10**30}, False, id="absurd-pid"),
    ],
)
def test_who_is_gone(dead: Owner, change: dict[str, object], is_gone: bool) -> None:
    """Only who is gone for sure: unknown is alive, and another job is nobody's business."""
    here = replace(Owner.here(), job="slurm:7")

    assert replace(dead, **change).is_gone(here) == is_gone  # type: ignore[arg-type]


def test_processes_without_jobs_are_no_job(dead: Owner) -> None:
    """Two empty names are not the same job."""
    here = replace(Owner.here(), job="")

    assert not replace(dead, boot="b", host="other", job="").is_gone(here)


def test_without_proc_the_host_counts(dead: Owner) -> None:
    """Where the system does not tell which start of the kernel it is."""
    here = replace(Owner.here(), boot="", space="")

    assert replace(dead, boot="", space="").is_gone(here)
    assert not replace(dead, boot="", space="", host="other").is_gone(here)
    assert not here.is_gone(here)


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({"SLURM_JOB_ID": "12", "TORCHELASTIC_RUN_ID": "x"}, "slurm:12"),
        ({"TORCHELASTIC_RUN_ID": "x"}, "elastic:x"),
        ({"TORCHELASTIC_RUN_ID": "none"}, ""),
        ({}, ""),
    ],
)
def test_the_job_is_named(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], job: str
) -> None:
    """By whoever started it."""
    for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert Owner.here().job == job


@pytest.mark.parametrize(
    "record", ["", "{", "[]", '{"pid": "1"}', "[" * 5000, '{"host": 1, "pid": 1}']
)
def test_what_has_no_record_stays(tmp_path: Path, record: str) -> None:
    """Or one that says nothing; unless the caller says that no other job works here."""
    path = left(tmp_path, ".attempt", None)
    if record:
        record_of(path).write_text(record)
        aged(path)

    assert owner_of(path) is None
    assert swept(tmp_path) == []
    assert swept(tmp_path, any_owner=True) == [path]
    assert names(tmp_path) == []


def test_a_checkpoint_aside_stays_while_nothing_has_its_name(
    tmp_path: Path, dead: Owner, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the checkpoint then. Once it is replaced, it goes; by a rename first."""
    path = left(tmp_path, ".previous", dead)
    # A rename makes it new, whatever is in it.
    assert swept(tmp_path) == []
    monkeypatch.setattr(leftovers, "_is_untouched", lambda path, limit: True)

    assert swept(tmp_path, any_owner=True) == []
    assert "only copy" in caplog.text
    (tmp_path / "c").mkdir()
    renamed: list[str] = []
    original = Path.rename
    monkeypatch.setattr(
        Path, "rename", lambda self, to: renamed.append(to.suffix) or original(self, to)
    )

    assert swept(tmp_path) == [path]
    assert renamed == [".trash"]
    assert names(tmp_path) == ["c"]


def test_one_record_serves_all_of_one_save(
    tmp_path: Path, dead: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who died between two renames left two directories; the record goes with the second."""
    attempt = left(tmp_path, ".attempt", dead)
    attempt.with_suffix(".previous").mkdir()
    monkeypatch.setattr(leftovers, "_is_untouched", lambda path, limit: True)

    assert swept(tmp_path) == [attempt]
    assert owner_of(attempt) == dead
    (tmp_path / "c").mkdir()
    assert swept(tmp_path) == [attempt.with_suffix(".previous")]
    assert names(tmp_path) == ["c"]


def test_damaged_checkpoints_and_strangers_stay(tmp_path: Path, dead: Owner) -> None:
    """Whatever a user may still look at, and whatever is not of our making."""
    kept = [
        left(tmp_path, ".damaged", dead),
        left(tmp_path, ".other", dead),
        aged(tmp_path / ".dist-ckpt-note.attempt"),
    ]
    kept[2].mkdir()
    aged(kept[2])
    (tmp_path / "step_1.attempt").mkdir()
    stem = ".dist-ckpt-0123456789-0123456789ab"
    (tmp_path / f"{stem}.attempt").symlink_to(kept[0])
    (tmp_path / f"{stem}.trash").write_text("a file")
    os.utime(tmp_path / f"{stem}.attempt", (1, 1), follow_symlinks=False)
    before = names(tmp_path)

    assert swept(tmp_path, any_owner=True) == []
    assert names(tmp_path) == before


def test_records_without_anything_go(tmp_path: Path, dead: Owner) -> None:
    """A crash between the record and what it is of, on either side."""
    path = left(tmp_path, ".attempt", dead)
    (path / "inner" / "f").unlink()
    (path / "inner").rmdir()
    path.rmdir()
    alive = left(tmp_path, ".attempt", Owner.here())

    assert swept(tmp_path) == [record_of(path)]
    assert names(tmp_path) == sorted([alive.name, record_of(alive).name])


def test_what_the_adapters_leave(tmp_path: Path, dead: Owner) -> None:
    """Directories of hooks by their owner; links and files that were to replace others have none."""
    hooks = tmp_path / ".dist-ckpt-0123456789ab.hooks"
    hooks.mkdir()
    record_of(hooks).write_text(json.dumps(asdict(dead)))
    aged(hooks)
    (tmp_path / ".last.ckpt.0123456789ab.link").symlink_to("nowhere")
    (tmp_path / ".model.ckpt.0123456789ab.part").write_text("x")
    for path in tmp_path.glob(".*.0123456789ab.*"):
        os.utime(path, (LONG_AGO, LONG_AGO), follow_symlinks=False)

    assert swept(tmp_path) == [hooks]
    assert len(swept(tmp_path, any_owner=True)) == 2
    assert names(tmp_path) == []


def test_what_cannot_be_removed_is_told(
    tmp_path: Path, dead: Owner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And is left with its record, for the next time; one that another swept meanwhile is nothing."""
    path = left(tmp_path, ".attempt", dead)

    def fails(code: int) -> Callable[[Path], None]:
        def fail(path: Path) -> None:
            raise OSError(code, os.strerror(code), str(path))

        return fail

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", fails(errno.EACCES))
        assert swept(tmp_path) == []
    assert "cannot be removed" in caplog.text
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", fails(errno.ENOENT))
        assert swept(tmp_path) == []

    assert swept(tmp_path) == [path]


# -- records of attempts ---------------------------------------------------------------------------


def test_an_attempt_has_an_owner_until_it_ends(tmp_path: Path) -> None:
    """Beside it, never in it; committed or given up, the record goes."""
    for end in ("publish", "abort"):
        attempt = Attempt.begin(tmp_path / "c", tmp_path / "staging")
        assert owner_of(attempt.directory) == Owner.here()
        assert names(attempt.directory) == []
        if end == "publish":
            attempt.publish(old_files=())
        else:
            attempt.abort()
            attempt.abort()
        assert names(tmp_path / "staging") == []


def test_a_removal_has_an_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of it can be swept."""
    (tmp_path / "c").mkdir()
    found: list[Owner | None] = []

    def dies(path: Path, **_: object) -> None:
        found.append(owner_of(path))
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="broken"):
        patch.setattr("shutil.rmtree", dies)
        remove_tree(tmp_path / "c")

    assert found == [Owner.here()]
    assert {Path(name).suffix for name in names(tmp_path)} == {".trash", ".owner"}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full")])
def test_beginning_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """An interrupt behind each step of it, or a full disk."""
    original = Path.mkdir

    def before(self: Path, *args: object, **kwargs: object) -> None:
        raise error

    def behind(self: Path, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)  # type: ignore[arg-type]
        if self.suffix == ".attempt":
            raise error

    (tmp_path / "home").mkdir()
    for mkdir in (before, behind):
        with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, StorageError)):
            patch.setattr(Path, "mkdir", mkdir)
            Attempt.begin(tmp_path / "home" / "c", None)
        assert names(tmp_path / "home") == []


def test_a_record_that_cannot_be_made_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of a save, and not of a removal, which may be what frees the disk."""
    original = os.open

    def full(path: object, *args: int, **kwargs: int) -> int:
        if str(path).endswith(".owner"):
            raise OSError(errno.ENOSPC, "full", str(path))
        return original(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", full)

    attempt = Attempt.begin(tmp_path / "c", None)
    assert owner_of(attempt.directory) is None
    attempt.publish(old_files=())
    remove_tree(tmp_path / "c")

    assert names(tmp_path) == []


def test_a_record_is_forgotten_twice_without_harm(tmp_path: Path) -> None:
    """And one that cannot be removed stays."""
    path = tmp_path / ".dist-ckpt-0123456789ab.hooks"
    record_owner(path)
    record_owner(path)
    assert owner_of(path) == Owner.here()
    forget_owner(path)
    forget_owner(path)
    assert names(tmp_path) == []
    record_of(path).mkdir()
    forget_owner(path)
    assert names(tmp_path) == [record_of(path).name]


# -- damaged checkpoints ---------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_renamed(tmp_path: Path) -> None:
    """Under a name that nothing takes for a checkpoint's, with its story."""
    (tmp_path / "step_3").mkdir()
    (tmp_path / "step_3" / "f").write_text("x")

    aside = move_aside(tmp_path / "step_3", "a flipped bit")

    assert names(tmp_path) == [aside.name]
    assert aside.name.startswith(attempt_prefix(tmp_path / "step_3"))
    assert aside.suffix == ".damaged"
    assert names(aside) == ["damaged.json", "f"]
    story = json.loads((aside / "damaged.json").read_text())
    assert (story["name"], story["reason"]) == ("step_3", "a flipped bit")
    assert abs(story["time"] - time.time()) < 600


def test_the_rename_is_durable_before_the_story(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The name counts; the story is worth a warning."""
    (tmp_path / "c").mkdir()
    synced: list[list[str]] = []
    monkeypatch.setattr(leftovers, "fsync_directory", lambda path: synced.append(names(path)))

    def full(self: Path, *_: object) -> Iterator[None]:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(Path, "open", full)

    aside = move_aside(tmp_path / "c", "x")

    assert synced == [[aside.name]]
    assert names(aside) == []
    assert "could not be noted" in caplog.text


def test_what_stands_aside_already_is_found(tmp_path: Path) -> None:
    """The old one of a crashed save is what its name means."""
    previous = tmp_path / f"{attempt_prefix(tmp_path / 'c')}0123456789ab.previous"
    previous.mkdir()

    move_aside(tmp_path / "c", "x")

    assert [Path(name).suffix for name in names(tmp_path)] == [".damaged"]


def test_what_is_no_directory_is_not_set_aside(tmp_path: Path) -> None:
    """Nor is nothing, nor a link, behind which others may stand."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    before = names(tmp_path)

    with pytest.raises(StorageError, match="no directory"):
        move_aside(tmp_path / "file", "x")
    with pytest.raises(StorageError, match="no directory"):
        move_aside(tmp_path / "link", "x")
    with pytest.raises(CheckpointNotFoundError):
        move_aside(tmp_path / "nothing", "x")
    assert names(tmp_path) == before
