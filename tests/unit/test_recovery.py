"""The newest good checkpoint: what counts, what is skipped and why, what is set aside."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_ckpt import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptedCheckpointError,
    IncompleteCheckpointError,
    SaveOptions,
    ShardedTensor,
    StorageError,
    UnsafeContentError,
    load,
    save,
)
from dist_ckpt._loading import search as _searching
from dist_ckpt.errors import UnknownStrategyError
from dist_ckpt.events import Event, LoggingSink, SetAside, Skipped
from dist_ckpt.recovery import (
    forget_owner,
    latest,
    newest_good,
    record_owner,
    set_aside,
    sweep,
    verify_checkpoint,
)
from dist_ckpt.storage import commit, leftovers
from dist_ckpt.storage.commit import Attempt, attempt_prefix
from dist_ckpt.storage.local import LocalStore
from dist_ckpt.testing.world import ThreadWorld

GOLDEN = Path(__file__).parents[1] / "golden"
BACKENDS = pytest.mark.parametrize("backend", ["torch_dist", "zarr"])


def state(value: float) -> dict[str, Any]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((64,), value)), "value": value}


def saved(path: Path, value: float, backend: Any = "torch_dist") -> Path:
    save(state(value), path, options=SaveOptions(backend=backend))
    return path


def value_at(path: Path) -> float:
    found = load({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(64))}, path)
    assert torch.equal(found["w"], torch.full((64,), found["value"]))
    return float(found["value"])


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def visible(folder: Path) -> list[str]:
    return [name for name in names(folder) if not name.startswith(".")]


def flip(path: Path, position: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if position is None else position] ^= 1
    path.write_bytes(data)


def data_file(path: Path) -> Path:
    """Return the largest file of tensors."""
    files = (one for one in path.rglob("*") if one.is_file())
    data = (one for one in files if one.suffix == ".distcp" or one.name.startswith("c."))
    return max(data, key=lambda one: one.stat().st_size)


# -- one checkpoint --------------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("level", ["files", "full"])
def test_a_good_checkpoint_verifies(tmp_path: Path, backend: Any, level: Any) -> None:
    """Alone, and on more ranks than it has files."""
    saved(tmp_path / "c", 1.0, backend)

    verify_checkpoint(tmp_path / "c", level=level)
    ThreadWorld(3).run(
        lambda comm: verify_checkpoint(tmp_path / "c", level=level, communicator=comm)
    )


@BACKENDS
def test_a_flipped_bit_of_any_file_is_named_on_every_rank(tmp_path: Path, backend: Any) -> None:
    """Whichever rank looked at it; documents are found at level ``files`` too."""
    good = saved(tmp_path / "good", 1.0, backend)
    for found in sorted(good.rglob("*")):
        if not found.is_file():
            continue
        name = found.relative_to(good).as_posix()
        shutil.rmtree(tmp_path / "c", ignore_errors=True)
        shutil.copytree(good, tmp_path / "c")
        flip(tmp_path / "c" / name)

        errors = ThreadWorld(2).errors(
            lambda comm: verify_checkpoint(tmp_path / "c", communicator=comm)
        )

        assert {type(one) for one in errors.values()} == {CorruptedCheckpointError}, name
        assert len(errors) == 2
        assert all(found.name in str(one) for one in errors.values()), name
        if found.suffix == ".json" and "/" not in name:
            with pytest.raises(CorruptedCheckpointError):
                verify_checkpoint(tmp_path / "c", level="files")


def test_all_that_is_wrong_is_told(tmp_path: Path) -> None:
    """Of several damaged files, each."""
    ThreadWorld(2).run(lambda comm: save_rows(tmp_path / "c", comm))
    for rank in (0, 1):
        flip(tmp_path / "c" / f"__{rank}_0.distcp")

    with pytest.raises(CorruptedCheckpointError, match=r"__0_0.*__1_0"):
        verify_checkpoint(tmp_path / "c")


def save_rows(path: Path, comm: Any) -> None:
    rows = torch.full((4, 8), float(comm.rank))
    save(
        {"w": ShardedTensor.from_rank_offsets("w", rows, (0, comm.rank, comm.size))},
        path,
        communicator=comm,
    )


def test_a_missing_or_short_file_is_found_without_reading(tmp_path: Path) -> None:
    """Sizes are enough."""
    saved(tmp_path / "c", 1.0)
    data = data_file(tmp_path / "c")
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(CorruptedCheckpointError, match=r"bytes, not"):
        verify_checkpoint(tmp_path / "c", level="files")
    data.unlink()
    with pytest.raises(CorruptedCheckpointError, match="missing"):
        verify_checkpoint(tmp_path / "c", level="files")


def test_what_is_none_is_told_on_every_rank(tmp_path: Path) -> None:
    """Nothing there, never committed, a wrong level, no path."""
    saved(tmp_path / "c", 1.0)
    (tmp_path / "c" / "metadata.json").unlink()
    cases: list[tuple[Any, Any, type[Exception]]] = [
        (tmp_path / "nothing", "full", CheckpointNotFoundError),
        (tmp_path / "c", "full", IncompleteCheckpointError),
        (tmp_path / "c", "all", ConfigError),
        (7, "full", ConfigError),
    ]
    for path, level, expected in cases:
        errors = ThreadWorld(2).errors(
            lambda comm, p=path, lv=level: verify_checkpoint(p, level=lv, communicator=comm)  # type: ignore[misc]
        )
        assert [type(one) for one in errors.values()] == [expected] * 2


def test_one_replaced_meanwhile_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read is of two checkpoints, and says nothing of either."""
    saved(tmp_path / "c", 1.0)
    original = _searching.verify_files

    def after_a_save(*args: Any, **kwargs: Any) -> list[str]:
        saved(tmp_path / "c", 2.0)
        return original(*args, **kwargs)

    monkeypatch.setattr(_searching, "verify_files", after_a_save)

    with pytest.raises(CheckpointNotFoundError, match="replaced"):
        verify_checkpoint(tmp_path / "c")


@pytest.mark.parametrize("golden", ["mcore-main-torch_dist", "mcore-0.5.0-zarr"])
def test_checkpoints_of_others_only_open(golden: str) -> None:
    """They have no checksums."""
    (path,) = (one.parent for one in (GOLDEN / golden).rglob("metadata.json"))

    verify_checkpoint(path)
    assert newest_good(lambda: [path]) == path


# -- the newest ------------------------------------------------------------------------------------


class Listener:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


def test_the_largest_number_is_the_newest(tmp_path: Path) -> None:
    """As a number, not as text; with an extension too."""
    for name in ("step_9", "step_10.ckpt", "step_8"):
        saved(tmp_path / name, 1.0)

    assert latest(tmp_path) == tmp_path / "step_10.ckpt"
    assert latest(tmp_path, level="files") == tmp_path / "step_10.ckpt"
    assert latest(str(tmp_path)) == tmp_path / "step_10.ckpt"


def test_names_without_a_number_go_by_their_commit(tmp_path: Path) -> None:
    """And before all that have one; a loss is no number of a step."""
    for when, name in enumerate(("b", "a", "loss=0.25", "step_3")):
        saved(tmp_path / name, 1.0)
        os.utime(tmp_path / name / "manifest.json", (when, when))

    assert latest(tmp_path) == tmp_path / "loss=0.25"
    shutil.rmtree(tmp_path / "loss=0.25")
    assert latest(tmp_path) == tmp_path / "a"


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    """No folder, an empty one, files and directories that are something else."""
    assert latest(tmp_path / "nothing") is None
    assert latest(tmp_path) is None
    (tmp_path / "step_3").mkdir()
    (tmp_path / "step_4").write_text("a file")
    (tmp_path / "logs_7").mkdir()
    (tmp_path / "logs_7" / "f").write_text("x")
    attempt = Attempt.begin(tmp_path / "step_9", None)

    assert latest(tmp_path) is None
    assert latest(tmp_path / "step_4") is None
    assert newest_good(lambda: [tmp_path / "step_4", tmp_path / "gone"]) is None
    attempt.abort()


@BACKENDS
def test_a_damaged_one_is_skipped_and_set_aside(
    tmp_path: Path, backend: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Not deleted; the log and the sinks tell of it, with the file and the offset."""
    for step in (1, 2, 3):
        saved(tmp_path / f"step_{step}", float(step), backend)
    flip(data_file(tmp_path / "step_3"))
    listener = Listener()

    assert latest(tmp_path, sinks=[listener, LoggingSink()]) == tmp_path / "step_2"

    assert visible(tmp_path) == ["step_1", "step_2"]
    (aside,) = tmp_path.glob(".dist-ckpt-*.damaged")
    assert data_file(aside).exists()
    assert "step_3 is damaged and was skipped; it is now" in caplog.text
    skipped, moved = listener.events
    assert isinstance(skipped, Skipped)
    assert isinstance(moved, SetAside)
    assert skipped.path == moved.path == str(tmp_path / "step_3")
    assert moved.to == str(aside)
    assert "bytes 0 to" in skipped.reason
    caplog.clear()
    assert latest(tmp_path) == tmp_path / "step_2"
    assert caplog.text == ""


def test_it_can_be_left_where_it_is(tmp_path: Path) -> None:
    """For those who only look."""
    saved(tmp_path / "step_1", 1.0)
    saved(tmp_path / "step_2", 2.0)
    flip(data_file(tmp_path / "step_2"))

    assert latest(tmp_path, set_aside=False) == tmp_path / "step_1"
    assert names(tmp_path) == ["step_1", "step_2"]


def test_the_level_is_the_callers(tmp_path: Path) -> None:
    """A flipped bit of the data is found by reading it, only."""
    saved(tmp_path / "step_1", 1.0)
    saved(tmp_path / "step_2", 2.0)
    flip(data_file(tmp_path / "step_2"))

    assert latest(tmp_path, level="files") == tmp_path / "step_2"
    assert latest(tmp_path, level="full") == tmp_path / "step_1"


def test_an_unfinished_one_is_skipped_and_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever writes it may yet finish."""
    saved(tmp_path / "step_1", 1.0)
    saved(tmp_path / "step_2", 2.0)
    (tmp_path / "step_2" / "metadata.json").unlink()

    assert latest(tmp_path) == tmp_path / "step_1"
    assert names(tmp_path) == ["step_1", "step_2"]
    assert "step_2 is incomplete and was skipped." in caplog.text


def test_none_good_is_an_error_again_and_again(tmp_path: Path) -> None:
    """Never a silent new start: they stay, so that the next start finds them too."""
    for step in (1, 2, 3):
        saved(tmp_path / f"step_{step}", 1.0)
    flip(data_file(tmp_path / "step_1"))
    (tmp_path / "step_2" / "metadata.json").unlink()
    (tmp_path / "step_3" / "manifest.json").unlink()

    for _ in range(2):
        errors = ThreadWorld(2).errors(lambda comm: latest(tmp_path, communicator=comm))
        assert [type(one) for one in errors.values()] == [CorruptedCheckpointError] * 2
        for one in errors.values():
            assert all(f"step_{step}" in str(one) for step in (1, 2, 3))
            assert "(incomplete)" in str(one)
    assert visible(tmp_path) == ["step_1", "step_2", "step_3"]
    assert names(tmp_path) == visible(tmp_path)


def test_all_ranks_get_the_same_answer(tmp_path: Path) -> None:
    """Candidates are listed on rank 0; the bytes are shared; each rank's sinks hear."""
    ThreadWorld(3).run(lambda comm: save_rows(tmp_path / "step_1", comm))
    ThreadWorld(3).run(lambda comm: save_rows(tmp_path / "step_2", comm))
    flip(tmp_path / "step_2" / "__2_0.distcp")

    def job(comm: Any) -> tuple[Path | None, list[int]]:
        listener = Listener()

        def candidates() -> Sequence[Path]:
            assert comm.rank == 0
            return [tmp_path / "step_2", tmp_path / "gone", tmp_path / "step_1"]

        found = newest_good(candidates, communicator=comm, sinks=[listener])
        return found, [one.rank for one in listener.events]

    assert ThreadWorld(3).run(job) == [(tmp_path / "step_1", [rank] * 2) for rank in range(3)]


def test_what_candidates_raise_is_raised_everywhere(tmp_path: Path) -> None:
    """And a level that is none."""

    def broken() -> Sequence[Path]:
        raise StorageError("cannot list")

    job: Callable[[Any], Any] = lambda comm: newest_good(broken, communicator=comm)
    assert [type(one) for one in ThreadWorld(2).errors(job).values()] == [StorageError] * 2
    with pytest.raises(ConfigError):
        latest(tmp_path, level="some")  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        latest(3)  # type: ignore[arg-type]


def test_a_broken_disk_counts_as_damage_and_nothing_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """EIO on the newest: the one before is taken. Any other error of the store is raised."""
    saved(tmp_path / "step_1", 1.0)
    saved(tmp_path / "step_2", 2.0)
    code = [errno.EIO]
    original = os.preadv

    def bad_sector(fd: int, *args: Any) -> int:
        if "step_2" in os.fspath(Path(f"/proc/self/fd/{fd}").readlink()):
            raise OSError(code[0], os.strerror(code[0]))
        return original(fd, *args)

    monkeypatch.setattr(os, "preadv", bad_sector)

    assert latest(tmp_path) == tmp_path / "step_1"
    assert names(tmp_path) == ["step_1", "step_2"]
    assert "step_2 is unreadable" in caplog.text
    with pytest.raises(StorageError, match="EIO"):
        verify_checkpoint(tmp_path / "step_2")
    code[0] = errno.ESTALE
    errors = ThreadWorld(2).errors(lambda comm: latest(tmp_path, communicator=comm))
    assert [type(one) for one in errors.values()] == [StorageError] * 2


def test_a_broken_disk_under_a_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same while it is opened."""
    saved(tmp_path / "step_1", 1.0)
    saved(tmp_path / "step_2", 2.0)
    original = LocalStore.read

    def bad_sector(self: LocalStore, name: str, **kwargs: Any) -> bytes:
        if "step_2" in repr(self) and name == "index.bin":
            raise StorageError("cannot read") from OSError(errno.EIO, "broken")
        return original(self, name, **kwargs)

    monkeypatch.setattr(LocalStore, "read", bad_sector)

    assert latest(tmp_path) == tmp_path / "step_1"
    assert names(tmp_path) == ["step_1", "step_2"]


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_one_that_cannot_be_looked_at_is_not_overlooked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """EIO on the directory itself is a broken disk, anything else an error of ours."""
    saved(tmp_path / "step_1", 1.0)
    saved(tmp_path / "step_2", 2.0)
    original = os.stat

    def bad_inode(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if path == tmp_path / "step_2":
            raise OSError(code, os.strerror(code), str(path))
        return original(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", bad_inode)

    if code == errno.EIO:
        assert latest(tmp_path) == tmp_path / "step_1"
        assert "step_2 is unreadable" in caplog.text
    else:
        with pytest.raises(StorageError, match=errno.errorcode[code]):
            latest(tmp_path)
    monkeypatch.undo()
    assert names(tmp_path) == ["step_1", "step_2"]


def test_a_rank_that_does_not_see_the_files_makes_nothing_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mount is away. An older checkpoint without checksums would win, the good one be moved."""
    marker = next((GOLDEN / "mcore-main-torch_dist").rglob("metadata.json"))
    shutil.copytree(marker.parent, tmp_path / "step_1")
    saved(tmp_path / "step_2", 2.0)
    original = _searching.verify_files

    def seen(store: Any, share: Any, **kwargs: Any) -> list[str]:
        if threading.current_thread().name == "rank-1":
            return [f"{name} is missing" for name in share]
        return original(store, share, **kwargs)

    monkeypatch.setattr(_searching, "verify_files", seen)

    for look in (latest, lambda _, **kwargs: verify_checkpoint(tmp_path / "step_2", **kwargs)):
        errors = ThreadWorld(2).errors(lambda comm, look=look: look(tmp_path, communicator=comm))  # type: ignore[misc,operator]
        assert [type(one) for one in errors.values()] == [StorageError] * 2
        assert "rank 1 does not find what rank 0 finds" in str(errors[0])
    assert names(tmp_path) == ["step_1", "step_2"]


@pytest.mark.parametrize("error", [UnsafeContentError, UnknownStrategyError])
def test_what_must_not_or_cannot_be_opened_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception], caplog: Any
) -> None:
    """A hostile one, or one of a later release, stands in nobody's way, and is not touched."""
    saved(tmp_path / "step_1", 1.0)
    saved(tmp_path / "step_2", 2.0)
    original = _searching.open_checkpoint

    def refused(path: Path) -> Any:
        if path.name == "step_2":
            raise error("no")
        return original(path)

    monkeypatch.setattr(_searching, "open_checkpoint", refused)

    assert latest(tmp_path) == tmp_path / "step_1"
    assert names(tmp_path) == ["step_1", "step_2"]
    assert "was skipped. no" in caplog.text


@pytest.mark.parametrize("what", ["replaced", "removed"])
def test_one_that_changes_meanwhile_is_looked_at_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A save or a removal of another process is no damage; nothing is set aside."""
    saved(tmp_path / "step_1", 1.0)
    saved(tmp_path / "step_2", 2.0)
    original, done = _searching.verify_files, list[str]()

    def meanwhile(*args: Any, **kwargs: Any) -> list[str]:
        if not done:
            done.append(what)
            if what == "replaced":
                saved(tmp_path / "step_2", 2.5)
            else:
                commit.remove_tree(tmp_path / "step_2")
        return original(*args, **kwargs)

    monkeypatch.setattr(_searching, "verify_files", meanwhile)

    found = latest(tmp_path)

    assert found == tmp_path / ("step_2" if what == "replaced" else "step_1")
    assert value_at(found) == (2.5 if what == "replaced" else 1.0)
    assert names(tmp_path) == (["step_1", "step_2"] if what == "replaced" else ["step_1"])


def test_one_that_was_replaced_is_not_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The damaged one is gone by then; what bears its name is good."""
    saved(tmp_path / "step_1", 1.0)
    saved(tmp_path / "step_2", 2.0)
    flip(data_file(tmp_path / "step_2"))
    original = _searching.open_closely

    def meanwhile(path: Path, *args: Any) -> Any:
        if path.name == "step_1":
            saved(tmp_path / "step_2", 2.5)
        return original(path, *args)

    monkeypatch.setattr(_searching, "open_closely", meanwhile)

    assert latest(tmp_path) == tmp_path / "step_1"
    assert names(tmp_path) == ["step_1", "step_2"]
    assert value_at(tmp_path / "step_2") == 2.5


def test_a_disk_that_is_read_only_still_has_a_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Setting aside is not what matters."""
    saved(tmp_path / "step_1", 1.0)
    saved(tmp_path / "step_2", 2.0)
    flip(data_file(tmp_path / "step_2"))

    def refused(self: Path, target: Path) -> Path:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, "rename", refused)

    assert latest(tmp_path) == tmp_path / "step_1"
    assert names(tmp_path) == ["step_1", "step_2"]
    assert "was not set aside" in caplog.text


def test_what_a_crash_put_aside_counts(tmp_path: Path) -> None:
    """Between two renames the old one has no name; once the new one is there, it has none."""
    saved(tmp_path / "step_1", 1.0)
    target = saved(tmp_path / "step_2", 2.0)
    aside = tmp_path / f"{attempt_prefix(target)}0123456789ab.previous"
    target.rename(aside)

    verify_checkpoint(target)
    assert latest(tmp_path, set_aside=False) == target
    assert value_at(target) == 2.0
    assert not target.exists()
    assert latest(tmp_path) == target
    assert names(target.parent) == ["step_1", "step_2"]
    target.rename(aside)
    nameless = tmp_path / f"{attempt_prefix(tmp_path / 'other')}0123456789ab.previous"
    aside.rename(nameless)
    assert latest(tmp_path) == tmp_path / "step_1"
    shutil.rmtree(tmp_path / "step_1")
    assert latest(tmp_path) == nameless


def test_one_aside_that_does_not_tell_its_name_is_not_overlooked(tmp_path: Path) -> None:
    """If it is all there is, that is an error and no new start."""
    target = saved(tmp_path / "step_2", 2.0)
    flip(target / "manifest.json")
    target.rename(tmp_path / f"{attempt_prefix(target)}0123456789ab.previous")

    with pytest.raises(CorruptedCheckpointError, match="previous"):
        latest(tmp_path)
    saved(target, 3.0)
    assert latest(tmp_path) == target


def test_a_damaged_one_that_stands_aside_is_set_aside(tmp_path: Path) -> None:
    """It is what its name means."""
    saved(tmp_path / "step_1", 1.0)
    target = saved(tmp_path / "step_2", 2.0)
    flip(data_file(target))
    target.rename(tmp_path / f"{attempt_prefix(target)}0123456789ab.previous")

    assert latest(tmp_path) == tmp_path / "step_1"
    assert [Path(name).suffix for name in names(tmp_path)] == [".damaged", ""]


@pytest.mark.parametrize("sets_aside", [True, False])
@pytest.mark.parametrize("has_name", [True, False])
def test_what_a_damaged_one_has_replaced_may_stand_aside_yet(
    tmp_path: Path, sets_aside: bool, has_name: bool
) -> None:
    """A crash kept it from being removed: it is better than none, and gets its name again."""
    target = saved(tmp_path / "step_2", 1.5)
    aside = tmp_path / f"{attempt_prefix(target)}0123456789ab.previous"
    older = tmp_path / f"{attempt_prefix(target)}0000456789ab.previous"
    shutil.copytree(target, older)
    shutil.copytree(target, aside)
    os.utime(older, (1, 1))
    saved(tmp_path / "step_2_", 2.0)
    shutil.rmtree(target)
    (tmp_path / "step_2_").rename(target)
    flip(data_file(target))
    flip(data_file(aside))
    if not has_name:
        shutil.rmtree(target)

    found = latest(tmp_path, set_aside=sets_aside)

    assert found == (target if sets_aside else older)
    assert value_at(found) == 1.5
    if sets_aside:
        suffixes = sorted(Path(name).suffix for name in names(tmp_path))
        assert suffixes == ["", ".damaged", ".damaged"][: 3 if has_name else 2]
        assert latest(tmp_path) == target


def test_links_into_the_folder_are_no_second_checkpoint(tmp_path: Path) -> None:
    """``last`` is looked at under its real name; links to elsewhere count, and are not moved."""
    elsewhere = saved(tmp_path / "disk" / "x", 3.0)
    run = tmp_path / "run"
    saved(run / "step_1", 1.0)
    (run / "last").symlink_to("step_1")
    (run / "step_3").symlink_to(elsewhere)

    assert latest(run) == run / "step_3"
    flip(data_file(elsewhere))
    assert latest(run) == run / "step_1"
    assert names(run) == ["last", "step_1", "step_3"]
    assert names(tmp_path / "disk") == ["x"]


# -- by hand ---------------------------------------------------------------------------------------


def test_setting_aside_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths too."""
    saved(tmp_path / "step_1", 1.0)
    monkeypatch.chdir(tmp_path)

    aside = set_aside("step_1", "I do not trust it")

    assert names(tmp_path) == [aside.name]
    assert aside.parent == tmp_path
    assert latest(tmp_path) is None
    assert sweep(tmp_path, older_than_secs=-60, any_owner=True) == []


def test_sweeping_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is old: a save under way never is."""
    attempt = Attempt.begin(tmp_path / "c", None)
    hooks = tmp_path / ".dist-ckpt-0123456789ab.hooks"
    record_owner(hooks)
    hooks.mkdir()

    assert sweep(tmp_path, any_owner=True) == []
    assert sweep(tmp_path, older_than_secs=-60) == []
    monkeypatch.setattr(leftovers.Owner, "is_gone", lambda self, here: True)
    assert sweep(str(tmp_path), older_than_secs=-60) == [hooks, attempt.directory]
    assert names(tmp_path) == []
    record_owner(hooks)
    forget_owner(hooks)
    assert names(tmp_path) == []
