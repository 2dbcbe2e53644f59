"""Copies by the usual tools: what they lose, add and change, and what becomes of it at a load.

The table "Copies" of docs/format.md, row by row. Each case copies a real checkpoint as a tool would,
and says whether the copy is whole, whole with a note, or damaged, and what the error names.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import subprocess
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dist_ckpt import (
    ConfigError,
    CorruptedCheckpointError,
    IncompleteCheckpointError,
    LoadOptions,
    SaveOptions,
    ShardedTensor,
    load,
    save,
)
from dist_ckpt._formats.opening import open_contents
from dist_ckpt.errors import UnknownStrategyError
from dist_ckpt.recovery import latest, restore_dcp_metadata, verify_checkpoint
from dist_ckpt.serialization import remove_sharded_tensors

WEIGHT = torch.arange(64.0)
NOTE = ".metadata is missing"


def state(values: torch.Tensor) -> dict[str, Any]:
    upper = torch.zeros_like(values)
    return {
        "w": ShardedTensor.from_rank_offsets("part/w", values),
        "W": ShardedTensor.from_rank_offsets("part/W", upper),
        "step": 7,
    }


def saved(path: Path, backend: Any = ("torch_dist", 1), **options: Any) -> Path:
    save(state(WEIGHT), path, sharded_strategy=backend, options=SaveOptions(**options))
    return path


def run(command: str, folder: Path) -> None:
    subprocess.run(  # noqa: S602 - a shell's glob is the subject
        command, shell=True, check=True, cwd=folder, timeout=300
    )


def is_whole(path: Path) -> None:
    """Verify every byte, load, and find it as the newest."""
    verify_checkpoint(path)
    for verify in ("read", "full", "off"):
        found = load(state(torch.empty(64)), path, options=LoadOptions(verify=verify))  # type: ignore[arg-type]  # each of them
        assert torch.equal(found["w"], WEIGHT)
        assert found["step"] == 7
    assert latest(path.parent) == path
    assert path.is_dir()


def extras(folder: Path) -> None:
    """Write what desktops, network file systems and editors leave behind, also inside of arrays."""
    names = (
        ".DS_Store",
        "Thumbs.db",
        "desktop.ini",
        ".nfs000000000001",
        "index.bin~",
        "._index.bin",
    )
    for place in (folder, *(one for one in folder.rglob("*") if one.is_dir())):
        for name in names:
            (place / name).write_bytes(b"not ours")
    (folder / "@eaDir").mkdir()
    (folder.parent / ".DS_Store").write_bytes(b"not ours")
    (folder.parent / "__MACOSX").mkdir()
    (folder.parent / "__MACOSX" / "._step_1").write_bytes(b"not ours")


def read_only(folder: Path) -> None:
    for one in (*folder.rglob("*"), folder):
        one.chmod(0o555 if one.is_dir() else 0o444)


def old_times(folder: Path) -> None:
    for one in (*folder.rglob("*"), folder):
        os.utime(one, (1e9, 1e9))


def through_zip(source: Path, target: Path) -> None:
    """Keep names and bytes only, and no directory of its own that is empty."""
    with zipfile.ZipFile(source.parent / "all.zip", "w") as archive:
        for one in sorted(source.rglob("*")):
            if one.is_file():
                archive.write(one, one.relative_to(source))
    with zipfile.ZipFile(source.parent / "all.zip") as archive:
        archive.extractall(target)


def through_git(source: Path, target: Path) -> None:
    """Check out what was committed: no times, no empty directories, one bit of permissions."""
    run(
        "git init -q . && git add -A . && git -c user.name=a -c user.email=a@b commit -qm a", source
    )
    run(f"git clone -q '{source}' '{target}'", source.parent)


WHOLE: dict[str, Callable[[Path, Path], object]] = {
    "cp -r": lambda a, b: run(f"cp -r '{a}' '{b}'", a.parent),
    "cp -r ckpt/.": lambda a, b: run(f"mkdir '{b}' && cp -r '{a}'/. '{b}'", a.parent),
    "hard links": lambda a, b: run(f"cp -al '{a}' '{b}'", a.parent),
    "holes": lambda a, b: run(f"cp -r --sparse=always '{a}' '{b}'", a.parent),
    "tar": lambda a, b: run(f"mkdir '{b}' && tar c -C '{a}' . | tar x -C '{b}'", a.parent),
    "zip": through_zip,
    "git": through_git,
    "another name": lambda a, b: a.rename(b),
    "read-only": lambda a, b: (shutil.copytree(a, b), read_only(b)),
    "times": lambda a, b: (shutil.copytree(a, b), old_times(b)),
    "added files": lambda a, b: (shutil.copytree(a, b), extras(b)),
}


@pytest.mark.parametrize("backend", [("torch_dist", 1), ("zarr", 1), ("zarr", 2)], ids=str)
@pytest.mark.parametrize("tool", WHOLE)
def test_what_these_tools_make_is_whole(
    tool: str, backend: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither times, permissions, links between files, names nor additional files matter."""
    (tmp_path / "b").mkdir()
    WHOLE[tool](saved(tmp_path / "a" / "step_1", backend), tmp_path / "b" / "step_1")
    is_whole(tmp_path / "b" / "step_1")
    assert not caplog.records


def globbed(source: Path, target: Path) -> Path:
    """Copy as ``cp -r ckpt/* target``: hidden files at the top are left out."""
    target.mkdir(parents=True)
    run(f"cp -r '{source}'/* '{target}'", source.parent)
    return target


def without_hidden(source: Path, target: Path) -> Path:
    """Copy as tools that skip hidden files do (upload-artifact, ``rsync --exclude '.*'``)."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(".*"))
    return target


@pytest.mark.parametrize("copy", [globbed, without_hidden])
def test_a_copy_without_dcps_metadata_is_whole_with_one_note(
    copy: Callable[[Path, Path], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It loads, verifies, and is the newest good one; one warning says what is missing."""
    copied = copy(saved(tmp_path / "a" / "step_1"), tmp_path / "b" / "step_1")
    assert not (copied / ".metadata").exists()
    is_whole(copied)
    notes = [record for record in caplog.records if NOTE in record.message]
    assert [record.levelno for record in notes] == [logging.WARNING]
    assert "restore_dcp_metadata" in notes[0].message
    assert len(caplog.records) == 1


def test_other_ranks_do_without_dcps_metadata_too(tmp_path: Path) -> None:
    """What is sent to another rank is read from the manifest there, without what is absent."""
    copied = globbed(saved(tmp_path / "a"), tmp_path / "b")
    contents = open_contents(copied)
    assert ".metadata" not in pickle.loads(pickle.dumps(contents)).files
    assert len(pickle.loads(pickle.dumps(contents)).files) == len(contents.files)


def test_dcps_metadata_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte for byte what the save wrote; DCP reads the copy then, and nothing else changes."""
    original = saved(tmp_path / "a")
    copied = globbed(original, tmp_path / "b")
    synced: list[tuple[Path, bool]] = []
    monkeypatch.setattr(
        "dist_ckpt.storage.replace.fsync_directory",
        lambda path: synced.append((path, (path / ".metadata").is_file())),
    )
    assert restore_dcp_metadata(copied) == copied / ".metadata"
    assert (copied, True) in synced  # its name, too, is there after a crash
    assert (copied / ".metadata").read_bytes() == (original / ".metadata").read_bytes()
    assert sorted(one.name for one in copied.iterdir()) == sorted(
        one.name for one in original.iterdir()
    )
    found = {"part/w": torch.empty(64)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, checkpoint_id=copied, no_dist=True)
    assert torch.equal(found["part/w"], WEIGHT)
    before = (copied / ".metadata").stat().st_mtime_ns
    restore_dcp_metadata(copied)
    assert (copied / ".metadata").stat().st_mtime_ns == before


def test_dcps_metadata_is_written_where_the_save_left_it_out(tmp_path: Path) -> None:
    """A save with ``dcp_metadata=False`` is opened to DCP's tools later."""
    path = saved(tmp_path / "a", dcp_metadata=False)
    restore_dcp_metadata(path)
    found = {"part/w": torch.empty(64)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, checkpoint_id=path, no_dist=True)
    assert torch.equal(found["part/w"], WEIGHT)
    verify_checkpoint(path)


def test_dcps_metadata_of_another_release_is_not_imitated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A document that differs from the manifest's would turn a whole checkpoint into a damaged one."""
    copied = globbed(saved(tmp_path / "a"), tmp_path / "b")
    monkeypatch.setattr("dist_ckpt.recovery.encode_metadata", lambda _: b"something else")
    with pytest.raises(UnknownStrategyError, match="wrote another .metadata"):
        restore_dcp_metadata(copied)
    assert not (copied / ".metadata").exists()
    with pytest.raises(ConfigError, match="no index.bin"):
        restore_dcp_metadata(saved(tmp_path / "z", ("zarr", 2)))


def test_tensors_are_removed_from_a_copy_without_dcps_metadata(tmp_path: Path) -> None:
    """What the save wrote is written again, from the new index."""
    copied = globbed(saved(tmp_path / "a"), tmp_path / "b")
    remove_sharded_tensors(str(copied), "part/W")
    verify_checkpoint(copied)
    assert (copied / ".metadata").is_file()


def linked(folder: Path) -> None:
    """Turn files into links to a store beside, as model hubs and data version controls do."""
    store = folder.parent / "blobs"
    store.mkdir()
    for one in sorted(folder.rglob("*")):
        if one.is_file():
            blob = store / str(len(list(store.iterdir())))
            one.rename(blob)
            one.symlink_to(blob)


def folded(folder: Path) -> None:
    """Let names that differ in case only be one, of which the last that was copied is left."""
    for one in (folder / "part" / "W").iterdir():
        shutil.copy(one, folder / "part" / "w" / one.name)


def crlf(folder: Path) -> None:
    """Change line ends, as git does with ``core.autocrlf`` and FTP in text mode."""
    for one in folder.glob("*.json"):
        one.write_bytes(one.read_bytes().replace(b"\n", b"\r\n"))


def without(name: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        (folder / name).unlink()

    return remove


def shortened_zarray(folder: Path) -> None:
    for one in folder.rglob(".zarray"):
        one.unlink()


DAMAGED: dict[str, tuple[Any, Callable[[Path], None], str]] = {
    "links in place of files": (("torch_dist", 1), linked, "a link or something else.*cp -rL"),
    "one case": (("zarr", 1), folded, "checksum"),
    "one case, zarr 2": (("zarr", 2), folded, "checksum"),
    "line ends": (("torch_dist", 1), crlf, "manifest.json"),
    "*.bin ignored": (("torch_dist", 1), without("index.bin"), "index.bin is missing"),
    "no common.json": (("torch_dist", 1), without("common.json"), "common.json is missing"),
    "no manifest": (("torch_dist", 1), without("manifest.json"), "manifest.json is missing"),
    "no .zarray": (("zarr", 1), shortened_zarray, r".zarray is missing.*copy the directory itself"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_what_these_tools_make_is_refused(case: str, tmp_path: Path) -> None:
    """It is named what is wrong, by a load too, and the one before is found."""
    backend, change, told = DAMAGED[case]
    saved(tmp_path / "run" / "step_1", backend)
    change(saved(tmp_path / "run" / "step_2", backend))
    with pytest.raises(CorruptedCheckpointError, match=told):
        load(state(torch.empty(64)), tmp_path / "run" / "step_2")
    with pytest.raises(CorruptedCheckpointError, match=told):
        verify_checkpoint(tmp_path / "run" / "step_2")
    assert latest(tmp_path / "run") == tmp_path / "run" / "step_1"


def test_a_damaged_dcp_metadata_is_damage(tmp_path: Path) -> None:
    """What is there and wrong would be read by DCP's tools; and the disk that did it is not well."""
    path = saved(tmp_path / "a")
    (path / ".metadata").write_bytes(b"x")
    with pytest.raises(CorruptedCheckpointError, match=r"\.metadata has 1 bytes"):
        load(state(torch.empty(64)), path)


def test_a_copy_that_is_not_finished_is_incomplete(tmp_path: Path) -> None:
    """The marker comes last in the order of names too; without it nothing is set aside."""
    path = saved(tmp_path / "run" / "step_2")
    (path / "metadata.json").unlink()
    saved(tmp_path / "run" / "step_1")
    with pytest.raises(IncompleteCheckpointError, match=r"not copied\s+as a whole"):
        load(state(torch.empty(64)), path)
    assert latest(tmp_path / "run") == tmp_path / "run" / "step_1"
    assert path.is_dir()


def test_dcps_own_checkpoints_do_not_go_without_their_metadata(tmp_path: Path) -> None:
    """There is nothing that it could be made of; the message says what may have lost it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": WEIGHT}, checkpoint_id=tmp_path / "a", no_dist=True)
    copied = globbed(tmp_path / "a", tmp_path / "b")
    with pytest.raises(IncompleteCheckpointError, match=r"\.metadata.*`cp ckpt/\*`"):
        load({"w": ShardedTensor.from_rank_offsets("w", torch.empty(64))}, copied)
