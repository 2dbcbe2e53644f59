"""The newest checkpoint that is complete and true, and what becomes of the others.

Here: verifying a checkpoint, finding the newest good one, setting damaged ones aside, writing again
what a copy has lost, sweeping what dead saves left. Not here: how one looks closely
(``_loading.search``), keeping and removing checkpoints (``retention``, ``manager``). Collective
where it says so: the answer is decided once, on rank 0, and is the same on all ranks. See
docs/guides/recovery.md.
"""

from __future__ import annotations

import functools
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING

from dist_ckpt._comm import default_communicator
from dist_ckpt._formats.documents import (
    MANIFEST_FILE,
    MAX_DOCUMENT_NBYTES,
    METADATA_FILE,
    PACKED_INDEX_FILE,
    read_manifest,
)
from dist_ckpt._formats.torch_dist.dcp_metadata import encode_metadata
from dist_ckpt._formats.verification import VerifiedStore
from dist_ckpt._loading.open import open_checkpoint
from dist_ckpt._loading.search import (
    Bad,
    Findings,
    Opened,
    Search,
    Step,
    VerifyLevel,
    checked_level,
    checkpoint_names,
    judge,
    look_through,
    open_closely,
)
from dist_ckpt.errors import ConfigError, UnknownStrategyError
from dist_ckpt.events import Event, SetAside, Skipped, emit_to
from dist_ckpt.options import LoadOptions, checked_path, path_to_tell
from dist_ckpt.storage import open_store, owners
from dist_ckpt.storage.checksums import sum_of
from dist_ckpt.storage.commit import locate
from dist_ckpt.storage.leftovers import move_aside, sweep_leftovers
from dist_ckpt.storage.paths import absolute, stamp_of
from dist_ckpt.storage.replace import replace_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dist_ckpt.events import EventSink
    from dist_ckpt.types import Communicator, PathLike

__all__ = [
    "VerifyLevel",
    "forget_owner",
    "latest",
    "newest_good",
    "record_owner",
    "restore_dcp_metadata",
    "set_aside",
    "sweep",
    "sweep_once",
    "verify_checkpoint",
]

logger = logging.getLogger(__name__)

_NUMBER = re.compile(r"(?<![0-9.])([0-9]+)(\.[A-Za-z]\w*)?$")


def verify_checkpoint(
    path: PathLike,
    *,
    level: VerifyLevel = "full",
    options: LoadOptions | None = None,
    communicator: Communicator | None = None,
) -> None:
    """Raise, on every rank, unless a checkpoint is whole and as it was written. Collective.

    The ranks share the bytes. A checkpoint of another library has no checksums: of one, this says
    only that it opens.

    Args:
        path: The checkpoint.
        level: How closely to look.
        options: How many files at a time, and how long ranks wait for each other.
        communicator: The ranks, if not those of the default process group.

    Raises:
        CorruptedCheckpointError: It is damaged; names each file that is, the offset, and what was
            expected and found.
        CheckpointNotFoundError: Nothing is there; ``IncompleteCheckpointError`` if it was never
            committed.
        StorageError: It cannot be read.
    """
    options = options or LoadOptions()
    comm = communicator or default_communicator(timeout_secs=options.timeout_secs)
    target, opened = path_to_tell(path), list[Opened]()

    def check() -> None:
        checked_path(path)
        checked_level(level)

    def open_it(_: Sequence[None]) -> list[Step]:
        opened.append(open_closely(target, level, comm.size, options))
        # It may stand aside: not all that is asked for bears its name.
        directory = opened[0].contents.directory
        return [Step(directory, share) for share in opened[0].shares]

    step = comm.map_scatter(f"opening {target}", check, open_it)
    comm.map_reduce(
        f"verifying {target}",
        lambda: _reported(level, step, options),
        lambda found: judge(opened[0], found, options),
    )


def newest_good(
    candidates: Callable[[], Sequence[PathLike]],
    *,
    level: VerifyLevel = "full",
    set_aside: bool = True,
    options: LoadOptions | None = None,
    communicator: Communicator | None = None,
    sinks: Iterable[EventSink] = (),
) -> Path | None:
    """Return the first candidate that is good, the same one on all ranks. Collective.

    Damaged and incomplete candidates are skipped; what is skipped is logged with its reason, and
    told to ``sinks`` as ``Skipped`` and ``SetAside``. What is no checkpoint at all is no candidate.
    A candidate that is replaced or removed while it is verified is looked at once more. What a
    crash between two renames left aside gets its name again.

    Args:
        candidates: Returns where to look, newest first. Called on rank 0.
        level: How closely to look at one before it counts.
        set_aside: Whether names are changed, once a good one is found: those of damaged ones.
        options: How many files at a time, and how long ranks wait for each other.
        communicator: The ranks, if not those of the default process group.
        sinks: Take the events, on every rank.

    Returns:
        Its absolute path; None if there are no candidates.

    Raises:
        CorruptedCheckpointError: There are candidates, and none is good; names all of them. They
            stay where they are.
        StorageError: A candidate cannot be read, for another reason than a broken disk.
    """
    options = options or LoadOptions()
    comm = communicator or default_communicator(timeout_secs=options.timeout_secs)
    search = Search(candidates, level, set_aside, comm.size, options)
    step = Step()
    while True:
        report = functools.partial(_reported, level, step, options)
        step = comm.map_scatter("looking for the newest checkpoint", report, search.advance)
        if step.directory is None:
            break
    _tell(step.bad, sinks, comm.rank)
    return step.found


def _reported(level: VerifyLevel, step: Step, options: LoadOptions) -> Findings:
    checked_level(level)
    if step.directory is None:
        return Findings()
    return look_through(step.directory, step.share, options)


def _tell(bad: Sequence[Bad], sinks: Iterable[EventSink], rank: int) -> None:
    events: list[Event] = []
    for one in bad:
        common = {"path": str(one.path), "rank": rank, "save": 0, "is_async": False}
        events.append(Skipped(**common, reason=f"{one.kind}: {one.reason}"))  # type: ignore[arg-type]  # as it says
        if one.moved_to:
            events.append(SetAside(**common, reason=one.reason, to=one.moved_to))  # type: ignore[arg-type]  # likewise
    for event in events:
        emit_to(sinks, event)


def latest(
    folder: PathLike,
    *,
    level: VerifyLevel = "full",
    set_aside: bool = True,
    options: LoadOptions | None = None,
    communicator: Communicator | None = None,
    sinks: Iterable[EventSink] = (),
) -> Path | None:
    """Return the newest good checkpoint directly in ``folder``. Collective.

    The newest is the one with the largest number at the end of its name (``step_20``); names
    without a number count as newer than all of these; the same number, by the time of the commit.
    What a crash has left aside counts under its own name.

    Args:
        folder: Need not exist.
        level: How closely to look at a checkpoint before it counts.
        set_aside: Whether damaged ones are renamed, once a good one is found.
        options: How many files at a time, and how long ranks wait for each other.
        communicator: The ranks, if not those of the default process group.
        sinks: Take the events, on every rank.

    Returns:
        Its absolute path; None if there is none at all.

    Raises:
        CorruptedCheckpointError: There are checkpoints, and none is good.
    """
    return newest_good(
        lambda: _newest_first(checked_path(folder)),
        level=level,
        set_aside=set_aside,
        options=options,
        communicator=communicator,
        sinks=sinks,
    )


def _newest_first(folder: Path) -> list[Path]:
    """Return all names in ``folder`` that may be checkpoints, by age. Rank 0."""
    return sorted((folder / name for name in checkpoint_names(folder)), key=_age, reverse=True)


def _age(path: Path) -> tuple[bool, bool, int, int, str]:
    """Return what sorts by age; what a crash left without its name is the last resort."""
    found = _NUMBER.search(path.name)
    where = locate(path)
    try:
        committed = stamp_of(where / MANIFEST_FILE).mtime_ns
    except OSError:
        committed = 0
    has_name = not path.name.startswith(".")
    return has_name, found is None, int(found[1]) if found else 0, committed, path.name


# -- what a copy has lost --------------------------------------------------------------------------


def restore_dcp_metadata(path: PathLike) -> Path:
    """Write ``.metadata`` of a torch_dist checkpoint again, from its index; return where it is.

    Only tools of torch.distributed.checkpoint need it. ``cp ckpt/* dst/`` loses it, and a save with
    ``dcp_metadata=False`` leaves it out. One that is there and belongs to the checkpoint stays.
    Not collective: call it on one rank.

    Raises:
        CheckpointNotFoundError: Nothing is there.
        CorruptedCheckpointError: The checkpoint is damaged in another way.
        ConfigError: It has no index that ``.metadata`` can be made of: it is zarr, or another
            library wrote it.
        UnknownStrategyError: What would be written is not what the checkpoint's save wrote; another
            release did.
        StorageError: It cannot be written.
    """
    contents = open_checkpoint(path_to_tell(path))
    target = contents.directory / METADATA_FILE
    if METADATA_FILE in contents.files:
        return target
    if PACKED_INDEX_FILE not in contents.files:
        raise ConfigError(
            f"{contents.directory}: no {PACKED_INDEX_FILE}, of which {METADATA_FILE} is made.",
            hint="only torch_dist checkpoints that dist-ckpt saved have one; copy it again from "
            "the original, hidden files included.",
        )
    store = VerifiedStore(open_store(contents.directory), contents.files, contents.directory)
    index = store.read(PACKED_INDEX_FILE, max_nbytes=MAX_DOCUMENT_NBYTES)
    data = encode_metadata(index)
    expected = read_manifest(contents.directory).files.get(METADATA_FILE)
    if expected not in (None, sum_of(data)):
        raise UnknownStrategyError(
            f"{contents.directory}: the save wrote another {METADATA_FILE} than this one.",
            hint="call this with the release of dist-ckpt that saved it.",
        )
    # By a rename: after a crash no part of it may have the name that the manifest lists.
    replace_file(store, contents.directory, METADATA_FILE, data)
    return target


# -- what is left over -----------------------------------------------------------------------------


def set_aside(path: PathLike, reason: str) -> Path:
    """Rename a damaged checkpoint so that nothing takes it for one; return where it is now.

    Not collective: call it on one rank. ``damaged.json`` inside tells its name and what was wrong.
    Nothing removes it but you.

    Raises:
        CheckpointNotFoundError: Nothing is there.
        StorageError: It cannot be renamed, or is no directory.
    """
    return move_aside(absolute(path), reason)


def sweep(
    folder: PathLike, *, older_than_secs: float = 86400.0, any_owner: bool = False
) -> list[Path]:
    """Remove what dead saves and removals left in ``folder``; return what was removed.

    Not collective: call it on one rank. Only what bears a temporary name of this library, has not
    been touched for ``older_than_secs``, and whose owner is gone for sure: its process has ended on
    this host, the host was started anew, or this very job was started again in another place. A
    checkpoint that a crash left aside is never removed while nothing has its name, one that is
    damaged never.

    Args:
        folder: Where checkpoints are saved, or their ``staging_dir``; need not exist.
        older_than_secs: What was touched since stays.
        any_owner: Whether to remove what is old enough whoever made it, owner known or not.
    """
    return sweep_leftovers(
        checked_path(folder), older_than_secs=older_than_secs, any_owner=any_owner
    )


def sweep_once(folder: Path, swept: set[Path], older_than_secs: float) -> None:
    """Remove what dead saves left in a folder, if that was not done yet. Rank 0.

    For adapters: what goes wrong is logged, as the save that comes next is what matters.

    Args:
        folder: Where a save goes, or is prepared.
        swept: The folders that were swept; this one is added.
        older_than_secs: What was touched since stays.
    """
    if folder in swept:
        return
    swept.add(folder)
    try:
        sweep(folder, older_than_secs=older_than_secs)
    except Exception:
        logger.exception("%s: what dead saves left there was not removed", folder)


def record_owner(path: PathLike) -> None:
    """Say that a temporary directory, about to be made, is this process's, so that ``sweep`` knows.

    For adapters, which make some of their own (``.dist-ckpt-{12 hex digits}.hooks``). Local.
    """
    owners.record_owner(Path(path))


def forget_owner(path: PathLike) -> None:
    """Take back ``record_owner``, once the directory is gone. Local."""
    owners.forget_owner(Path(path))
