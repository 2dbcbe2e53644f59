"""Orders: what a worker does with the staged bytes of one save.

Here: the ports ``Order`` and ``Staged``, and the order for a byte image (``FileOrder``). Not here:
how files are written (``write``), rank 0's part of a commit (``_saving.publish``), the commit
protocol (``agreement``). Orders are made in the training process, pickled, and carried out in the
worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dist_ckpt._worker.write import write_files
from dist_ckpt.errors import CoordinationError
from dist_ckpt.storage.page_cache import PagePolicy
from dist_ckpt.storage.paths import check_is_shared

if TYPE_CHECKING:
    from dist_ckpt._saving.publish import Publication
    from dist_ckpt._staging_pool.runs import Run
    from dist_ckpt.errors import RankFailure
    from dist_ckpt.storage.checksums import FileSum

__all__ = ["AbandonedError", "FileOrder", "Order", "Staged"]


class AbandonedError(CoordinationError):
    """The training process gave this save up during staging; ``failure`` says why."""

    def __init__(self, message: str = "", *, failure: RankFailure | None = None) -> None:
        """Keep the failure."""
        super().__init__(message)
        self.failure = failure


class Staged(Protocol):
    """The staged bytes of one save, as its order sees them in the worker."""

    def memory(self) -> memoryview:
        """Return the memory of this save; not to be used after ``Order.write`` has returned."""
        ...

    def descriptor(self) -> int:
        """Return the descriptor of the arena, for orders that map it; do not close it."""
        ...

    def runs(self) -> Iterator[Run]:
        """Yield each run once it is staged, until all runs are.

        Raises:
            AbandonedError: The training process gave the save up, or has ended.
        """
        ...

    def stop(self) -> None:
        """End ``runs`` now: nothing more will be written. From any thread."""
        ...

    def freed(self, run: Run) -> None:
        """Allow the training process to overwrite these bytes. From any thread."""
        ...

    def progress(self, phase: str, nbytes: int) -> None:
        """Report what is being done, and how many bytes are done in all. From any thread."""
        ...


class Order(Protocol):
    """What to do with one rank's staged bytes. Picklable; unpickling it imports what it needs.

    Attributes:
        target: What is saved, for messages.
        commits: Whether all ranks commit what they have written; if not, the report of ``write`` is
            the outcome.
    """

    @property
    def target(self) -> str:
        """What is saved, for messages."""
        ...

    @property
    def commits(self) -> bool:
        """Whether all ranks commit what they have written; if not, the report is the outcome."""
        ...

    def write(self, staged: Staged) -> Any:
        """Write this rank's bytes durably and return a picklable report. Every rank."""
        ...

    def publish(self, reports: Sequence[Any]) -> None:
        """Publish the checkpoint; ``reports`` are those of all ranks, in their order. Rank 0."""
        ...

    def abort(self) -> None:
        """Remove what was written; called when no rank writes any more. Rank 0."""
        ...


@dataclass(frozen=True, slots=True)
class FileOrder:
    """Writes a byte image: every byte of every file comes from exactly one run.

    Attributes:
        directory: The attempt's directory, made by rank 0.
        files: Name and size of each file of this rank.
        rank: This rank.
        publication: Rank 0's part of the commit; None elsewhere.
        commits: Whether all ranks commit what they have written.
        thread_count: Most files that are written at a time.
        destination: What is saved, for messages; the directory if empty.
        pages: What becomes of the files' pages in the page cache.
    """

    directory: Path
    files: tuple[tuple[str, int], ...]
    rank: int
    publication: Publication | None = None
    commits: bool = True
    thread_count: int = 2
    destination: str = ""
    pages: PagePolicy = PagePolicy()  # noqa: RUF009 - frozen

    @property
    def target(self) -> str:
        """What is saved, for messages."""
        if self.publication is not None:
            return str(self.publication.attempt.target)
        return self.destination or str(self.directory)

    def write(self, staged: Staged) -> dict[str, FileSum]:
        """Write the files durably; return them with their checksums. Every rank.

        Raises:
            StorageError: The directory is not there, or a file could not be written.
            CoordinationError: The runs do not make up the files.
            AbandonedError: The save was given up while it was staged.
        """
        if self.files:
            check_is_shared(self.directory, self.rank)
        return write_files(
            self.directory,
            self.files,
            staged,
            thread_count=self.thread_count,
            keeps_pages=self.pages.begin(self.files),
        )

    def publish(self, reports: Sequence[Mapping[str, FileSum]]) -> None:
        """Make the attempt the checkpoint. Rank 0."""
        if self.publication is None:
            raise CoordinationError(f"{self.target}: rank {self.rank} has nothing to publish")
        self.publication.publish(reports)

    def abort(self) -> None:
        """Remove the attempt. Rank 0."""
        if self.publication is not None:
            self.publication.attempt.abort()
