"""What a format does in a save and a load: the port between their ways and what lies on disk.

Here: the protocol and the batons. Not here: formats (one package each beside this), the steps of a
save (``_saving.execute``), committing (``storage.commit``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from dist_ckpt.storage.page_cache import PagePolicy

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from dist_ckpt._sharding.index import StoredChunk, StoredTensor
    from dist_ckpt._sharding.shard_info import ShardInfo
    from dist_ckpt._sharding.split import SaveParts
    from dist_ckpt._sharding.table import LocalShards
    from dist_ckpt._sharding.together import JobTable
    from dist_ckpt.box import Box
    from dist_ckpt.storage.checksums import FileSum

__all__ = ["Destination", "SaveFormat", "SavePlan", "WriteJob", "WriteResult", "Written"]


@dataclass(frozen=True, slots=True)
class Destination:
    """``view`` (box-shaped, any device, any strides) is to hold ``box`` of the tensor ``key``."""

    key: str
    box: Box
    view: torch.Tensor


@dataclass(frozen=True, slots=True)
class WriteResult:
    """Proof that one box was written, and where.

    ``record_position`` and ``record_nbytes`` are those of the record around the payload, for
    formats that have one.
    """

    info: ShardInfo
    chunk: StoredChunk
    record_position: int = 0
    record_nbytes: int = 0


def flattened(results: Sequence[Sequence[WriteResult]]) -> list[WriteResult]:
    """Return the chunks of all ranks in one list."""
    return [result for one in results for result in one]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """What rank 0 decided.

    Attributes:
        work: For each rank what it has to do; picklable; only the format looks inside.
        num_results: How many chunks all ranks together must tell of.
        combined: Makes of what the ranks tell, rank by rank, what ``documents`` takes.
        passes_on: Whether ranks hand pieces to each other before they write.
        files: Files that planning has made already, complete and durable, with their checksums.
    """

    work: Sequence[Any]
    num_results: int
    combined: Callable[[Sequence[Any]], Any] = flattened
    passes_on: bool = False
    files: Mapping[str, FileSum] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteJob:
    """What one rank writes.

    Attributes:
        parts: This rank's state dict, taken apart.
        shards: Its shards, in the order in which they were described to rank 0.
        work: Its entry of ``SavePlan.work``.
        directory: The attempt directory.
        rank: This rank.
        thread_count: Most files or requests at a time.
        pages: What becomes of the files' pages in the page cache.
    """

    parts: SaveParts
    shards: LocalShards
    work: Any
    directory: Path
    rank: int
    thread_count: int
    pages: PagePolicy = PagePolicy()  # noqa: RUF009 - frozen


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What one rank wrote: files with their checksums, complete and durable, and the boxes in them.

    ``files`` is None if the format does not tell: rank 0 then lists the directory. ``results`` are
    in the format's own form, see ``SavePlan.combined``.
    """

    files: Mapping[str, FileSum] | None
    results: Sized = ()

    @property
    def nbytes(self) -> int:
        """Size of the files; 0 if the format does not report files."""
        return sum(file.nbytes for file in (self.files or {}).values())


class SaveFormat(Protocol):
    """How a state dict is laid out in a directory.

    Attributes:
        backend: Its name in ``metadata.json``.
        version: Its version there.
        common_backend: What ``metadata.json`` says of the common part: format and version.
        stores_common: Whether objects, and tensors in the common part, are given to it as shards.
        is_collective: Whether ``write`` exchanges with other ranks by itself.
    """

    backend: str
    version: int
    common_backend: tuple[str, int]
    stores_common: bool
    is_collective: bool

    def plan(self, job: JobTable, directory: Path) -> SavePlan:
        """Share out the work, and make what must be there before any rank writes. Rank 0."""
        ...

    def sources(self, work: Any) -> Collection[int]:
        """Return the numbers of the shards whose data ``write`` reads, given a rank's work."""
        ...

    def pass_on(self, job: WriteJob) -> None:
        """Put down the pieces that other ranks write; only if the plan says so. Every rank."""
        ...

    def write(self, job: WriteJob) -> Written:
        """Write this rank's part durably; no exchange inside. Every rank."""
        ...

    def documents(
        self, results: Any, empty: Mapping[str, StoredTensor], directory: Path
    ) -> dict[str, bytes]:
        """Return the small files that tell what lies where, by name. Rank 0.

        Args:
            results: What all ranks wrote, as ``SavePlan.combined`` returns it.
            empty: Tensors without elements, of which nothing is written.
            directory: The attempt directory; what was only for passing on is removed from it.
        """
        ...
