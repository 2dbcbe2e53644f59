"""Looking at checkpoints closely: one by all ranks together, several until one is good.

Here: what each rank looks through, what the findings amount to, the way through the candidates. Not
here: the collective functions (``recovery``), how a file is compared (``_formats.verification``).
Decisions are rank 0's; every rank looks through its share.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from dist_ckpt._formats.documents import OWN_DOCUMENTS, check_unchanged, read_manifest
from dist_ckpt._formats.verification import shared_out, verify_files
from dist_ckpt._loading.open import open_checkpoint
from dist_ckpt.errors import (
    CheckpointingException,
    CheckpointNotFoundError,
    ConfigError,
    CorruptedCheckpointError,
    IncompleteCheckpointError,
    StorageError,
    UnknownStrategyError,
    UnsafeContentError,
)
from dist_ckpt.storage import open_store
from dist_ckpt.storage.checksums import FileSum
from dist_ckpt.storage.commit import (
    ASIDE_SUFFIX,
    asides_of,
    attempt_prefix,
    locate,
    put_back,
)
from dist_ckpt.storage.failures import storage_errors
from dist_ckpt.storage.leftovers import has_target, move_aside
from dist_ckpt.storage.paths import (
    absolute,
    entries_of,
    is_directory,
    is_link_to_sibling,
    is_taken,
    stamp_of,
)
from dist_ckpt.validation import shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dist_ckpt._formats.documents import CheckpointContents
    from dist_ckpt.options import LoadOptions
    from dist_ckpt.types import PathLike

__all__ = [
    "Bad",
    "Findings",
    "Opened",
    "Search",
    "Share",
    "Step",
    "VerifyLevel",
    "checked_level",
    "checkpoint_names",
    "judge",
    "look_through",
    "open_closely",
]

logger = logging.getLogger(__name__)

VerifyLevel: TypeAlias = Literal["files", "full"]
"""How closely a checkpoint is looked at. ``files``: its marker, its manifest and its documents with
their checksums, and every file with its size. ``full``: every byte too."""

Share: TypeAlias = Mapping[str, FileSum]
"""Files that one rank looks through."""

Kind: TypeAlias = Literal["damaged", "incomplete", "unreadable", "unsafe", "unknown"]


# -- one checkpoint ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint that opens, on rank 0, and which files each rank is to look through."""

    contents: CheckpointContents
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class Findings:
    """What one rank found in its share: damage, and files that the disk does not give back."""

    problems: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()


def checked_level(level: VerifyLevel) -> None:
    """Raise if ``level`` is none.

    Raises:
        ConfigError: It is none.
    """
    if level not in ("files", "full"):
        raise ConfigError(f"level must be 'files' or 'full', not {level!r}.")


def open_closely(path: Path, level: VerifyLevel, size: int, options: LoadOptions) -> Opened:
    """Open a checkpoint, check what can be checked at once and share out the rest. Rank 0.

    A checkpoint of another library has no checksums: nothing is shared out then.
    """
    contents = open_checkpoint(path)
    if level == "full":
        return Opened(contents, tuple(shared_out(contents.files, size)))
    opened = Opened(contents, ({},) * size)
    # Not all of them are needed to open it.
    documents = {name: one for name, one in contents.files.items() if _is_document(name)}
    judge(opened, [look_through(contents.directory, documents, options)], options)
    return opened


def _is_document(name: str) -> bool:
    """Whether a file is one of the small ones that tell what is in the others."""
    return "/" not in name and (name.endswith(".json") or name in OWN_DOCUMENTS)


def look_through(directory: Path, share: Share, options: LoadOptions) -> Findings:
    """Compare this rank's files with their checksums. Every rank.

    Raises:
        StorageError: A file cannot be read, for another reason than a broken disk.
    """
    problems: list[str] = []
    unreadable: list[str] = []
    try:
        store = open_store(directory)
        problems += verify_files(store, share, thread_count=options.thread_count)
    except StorageError as error:
        if not _is_broken_disk(error):
            raise
        unreadable.append(str(error))
    except CheckpointNotFoundError as error:
        problems.append(str(error))
    return Findings(tuple(problems), tuple(unreadable))


def judge(opened: Opened, found: Sequence[Findings], options: LoadOptions) -> None:
    """Raise what the findings of all ranks amount to. Rank 0.

    Damage is what rank 0 finds too: a rank that sees another file system, or an old picture of this
    one, says nothing of the checkpoint.

    Raises:
        CheckpointNotFoundError: It was replaced or removed meanwhile: they are of no checkpoint.
        CorruptedCheckpointError: It is damaged.
        StorageError: It cannot be read.
    """
    where = opened.contents.directory
    problems = [problem for one in found for problem in one.problems]
    unreadable = [f"rank {rank}: {s}" for rank, one in enumerate(found) for s in one.unreadable]
    blind = _blind_rank(opened, found, options) if problems else None
    if opened.contents.checkpoint_id:
        check_unchanged(opened.contents)
    if blind is not None:
        raise StorageError(
            f"{where}: rank {blind} does not find what rank 0 finds: "
            f"{shortened(found[blind].problems)}.",
            hint="all ranks must see the same files: is the file system mounted there?",
        )
    if problems:
        raise CorruptedCheckpointError(
            f"{where}: {shortened([*problems, *unreadable])}.", hint="use another checkpoint."
        )
    if unreadable:
        cause = OSError(errno.EIO, os.strerror(errno.EIO), os.fspath(where))
        raise StorageError(f"{where}: {shortened(unreadable)}") from cause


def _blind_rank(opened: Opened, found: Sequence[Findings], options: LoadOptions) -> int | None:
    """Return a rank that found damage where rank 0, which looks once more, finds none."""
    for rank, one in enumerate(found):
        if rank and one.problems:
            again = look_through(opened.contents.directory, opened.shares[rank], options)
            if again == Findings():
                return rank
    return None


def _is_broken_disk(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno == errno.EIO:
            return True
        error = error.__cause__
    return False


# -- the newest of several -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bad:
    """A candidate that does not count, why, and where it was put (empty if it was not)."""

    path: Path
    kind: Kind
    reason: str
    moved_to: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """What rank 0 tells a rank: what to look through next, or, without that, the answer."""

    directory: Path | None = None
    share: Share = field(default_factory=dict)
    found: Path | None = None
    bad: tuple[Bad, ...] = ()


@dataclass(slots=True)
class Search:
    """Goes through the candidates, newest first. Rank 0."""

    list_candidates: Callable[[], Sequence[PathLike]]
    level: VerifyLevel
    sets_aside: bool
    size: int
    options: LoadOptions
    todo: list[Path] | None = None
    current: Path | None = None
    opened: Opened | None = None
    identity: tuple[int, int] | None = None
    tried: set[Path] = field(default_factory=set)
    stands_for: dict[Path, Path] = field(default_factory=dict)
    bad: list[tuple[Bad, tuple[int, int] | None]] = field(default_factory=list)

    def advance(self, findings: Sequence[Findings]) -> list[Step]:
        """Judge the candidate that was looked through, and go on to the next that opens."""
        if self.todo is None:
            self.todo = [absolute(one) for one in self.list_candidates()]
        opened, path = self.opened, self.current
        if opened is not None and path is not None:
            self.opened = None
            if self._survives(path, lambda: judge(opened, findings, self.options)):
                return self._end(path)
        while self.todo:
            path = self.current = self.todo.pop(0)
            self.identity = _identity(path)
            if not self._survives(path, functools.partial(self._open, path)):
                continue
            if self.level == "files":
                return self._end(path)
            assert self.opened is not None  # noqa: S101 - `_open` did
            directory = self.opened.contents.directory
            return [Step(directory, share) for share in self.opened.shares]
        return self._end(None)

    def _open(self, path: Path) -> None:
        self.opened = open_closely(path, self.level, self.size, self.options)

    def _survives(self, path: Path, look: Callable[[], None]) -> bool:
        """Whether a candidate is not found bad; what is bad about it is kept."""
        try:
            look()
        except IncompleteCheckpointError as error:
            self._skip(path, "incomplete", error)
        except CheckpointNotFoundError as error:
            # Replaced or removed while one looked: what stands there now is another one.
            logger.debug("%s is no candidate: %s", path, error)
            if self.todo is not None and path not in self.tried and is_taken(locate(path)):
                self.tried.add(path)
                self.todo.insert(0, path)
        except CorruptedCheckpointError as error:
            self._skip(path, "damaged", error)
        except UnsafeContentError as error:
            self._skip(path, "unsafe", error)
        except UnknownStrategyError as error:  # of a later release, or of a package that is missing
            self._skip(path, "unknown", error)
        except StorageError as error:
            if not _is_broken_disk(error):
                raise
            self._skip(path, "unreadable", error)
        else:
            return True
        return False

    def _skip(self, path: Path, kind: Kind, error: Exception) -> None:
        self.bad.append((Bad(path, kind, str(error)), self.identity))
        if kind != "damaged" or self.todo is None:
            return
        # What it has replaced may stand aside yet, if a crash kept it from being removed.
        for aside in asides_of(path):
            if aside != locate(path):
                self.stands_for[aside] = path
                self.todo.insert(0, aside)

    def _end(self, found: Path | None) -> list[Step]:
        """Return the answer for all ranks; only now, with a good one in hand, is a bad one moved.

        Raises:
            CorruptedCheckpointError: There are candidates, and none is good. They stay where they
                are: the next start must find them too, and not begin anew.
        """
        if found is None and self.bad:
            told = "\n".join(f"  {bad.path} ({bad.kind}): {bad.reason}" for bad, _ in self.bad)
            raise CorruptedCheckpointError(
                f"none of {len(self.bad)} checkpoint(s) is good:\n{told}\n",
                hint="to start anew, move them away.",
            )
        bad = tuple(self._moved(one, identity) for one, identity in self.bad)
        if found is not None and self.sets_aside:
            found = self._named(found)
        for one in bad:
            aside = f"; it is now {one.moved_to}" if one.moved_to else ""
            logger.warning("%s is %s and was skipped%s. %s", one.path, one.kind, aside, one.reason)
        return [Step(found=found, bad=bad)] * self.size

    def _named(self, found: Path) -> Path:
        """Give what stands aside its name, if that is free: who asked may look for files in it."""
        name = self.stands_for.get(found, found)
        put_back(name)
        return name if _identity(name) == self.identity else found

    def _moved(self, bad: Bad, identity: tuple[int, int] | None) -> Bad:
        """Set a damaged candidate aside, unless another one stands there by now."""
        if bad.kind != "damaged" or not self.sets_aside or _identity(bad.path) != identity:
            return bad
        try:
            return replace(bad, moved_to=os.fspath(move_aside(bad.path, bad.reason)))
        except CheckpointingException as error:
            # The good one is what counts: on a disk that is read-only, damaged ones stay.
            logger.warning("%s was not set aside: %s", bad.path, error)
            return bad


def _identity(path: Path) -> tuple[int, int] | None:
    """Return which directory bears a name; None if none does, or if it is a link."""
    try:
        found = stamp_of(locate(path), follow_links=False)
    except (OSError, StorageError):
        return None
    return found.device, found.inode


# -- the names in a folder -------------------------------------------------------------------------


def checkpoint_names(folder: Path) -> set[str]:
    """Return all names in ``folder`` that may be checkpoints'.

    What a crash has put aside counts under the name it had, if it tells; else under its own.

    Raises:
        StorageError: The folder is there and cannot be listed.
    """
    if not is_directory(folder):
        return set()
    with storage_errors("list", folder):
        entries = [folder / entry.name for entry in entries_of(folder)]
        names = {entry.name for entry in entries if _may_be_checkpoint(entry)}
        return names | {name for entry in entries if (name := _name_of_aside(entry))}


def _may_be_checkpoint(entry: Path) -> bool:
    if entry.name.startswith("."):
        return False
    try:
        if not is_directory(entry):
            return False
    except StorageError as error:
        logger.debug("%s may be a checkpoint: %s", entry, error)
        return True  # to be reported, not overlooked
    # A link to another name in this folder would only be looked at twice.
    return not is_link_to_sibling(entry)


def _name_of_aside(entry: Path) -> str | None:
    """Return whose checkpoint a ``.previous`` is; None if it was replaced, or is something else.

    If it does not tell, its own name: what cannot be read is to be reported, not overlooked.
    """
    is_aside = entry.suffix == ASIDE_SUFFIX and entry.name.startswith(".dist-ckpt-")
    if not is_aside or not is_directory(entry) or has_target(entry):
        return None
    try:
        name = read_manifest(entry).name
    except CheckpointingException as error:
        logger.debug("%s does not tell its name: %s", entry, error)
        return entry.name
    is_plain = bool(name) and os.path.basename(name) == name  # noqa: PTH119 - a name, no path
    is_its = is_plain and entry.name.startswith(attempt_prefix(entry.with_name(name)))
    return name if is_its else entry.name
