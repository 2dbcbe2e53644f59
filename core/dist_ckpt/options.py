"""What a caller may choose about saves and loads.

Here: frozen option classes with their defaults. Not here: YAML and environment (``config``).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from dist_ckpt.errors import ConfigError

if TYPE_CHECKING:
    from dist_ckpt.storage.commit import Replace

__all__ = [
    "BackgroundOptions",
    "LoadOptions",
    "PageCache",
    "SaveOptions",
    "checked_path",
    "path_to_tell",
]

PageCache: TypeAlias = Literal["auto", "keep", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """Choices of one save.

    Attributes:
        thread_count: Files that this rank writes at a time.
        timeout_secs: How long ranks wait for each other in one step.
        verify_sharding: Whether to check that the shards of all ranks tile every tensor exactly.
        replace: ``checkpoint``: the target may be an older checkpoint, or not be there; anything
            else is an error. ``any``: whatever stands there is replaced; files of a directory that
            no checkpoint of ours wrote are kept beside the new one.
        staging_dir: Where the attempt directory is made; beside the target if None. Must be on the
            same file system.
        backend: The format: ``torch_dist``, or ``zarr`` (zarr v3) for what reads arrays by itself.
        include_dir: Its entries are moved into the checkpoint before it is committed (rank 0's).
        dcp_metadata: Whether a torch_dist checkpoint has the ``.metadata`` by which
            torch.distributed.checkpoint reads it, too. We do not need it; it grows with the number
            of shards (160 bytes each).
        page_cache: Whether the pages of what was written stay in the page cache, so that a load on
            the same host reads memory: ``keep``, ``drop``, or ``auto``: those of the newest
            checkpoint stay if all of it that this host writes takes at most a quarter of the memory
            that is available.
    """

    thread_count: int = 2
    timeout_secs: float = 1800.0
    verify_sharding: bool = True
    replace: Replace = "checkpoint"
    backend: Literal["torch_dist", "zarr"] = "torch_dist"
    staging_dir: Path | None = None
    include_dir: Path | None = None
    dcp_metadata: bool = True
    page_cache: PageCache = "auto"

    def __post_init__(self) -> None:
        """Refuse values that no save can work with."""
        _check_positive(thread_count=self.thread_count, timeout_secs=self.timeout_secs)
        if self.backend not in ("torch_dist", "zarr"):
            raise ConfigError(f"backend must be 'torch_dist' or 'zarr', not {self.backend!r}.")
        if self.page_cache not in ("auto", "keep", "drop"):
            raise ConfigError(
                f"page_cache must be 'auto', 'keep' or 'drop', not {self.page_cache!r}."
            )

    @property
    def format(self) -> tuple[str, int]:
        """Backend and version of the format."""
        return self.backend, 2 if self.backend == "zarr" else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Choices of one load.

    Attributes:
        thread_count: Reads at a time on this rank.
        timeout_secs: How long ranks wait for each other in one step.
        allow_pickle: Whether values that were pickled may be loaded. That runs code from the
            checkpoint: only for checkpoints you trust.
        cast: What to do if stored and requested dtype differ: ``allow``, convert as
            ``Tensor.copy_`` does, with one warning of rank 0 that names keys and dtypes;
            ``error``, raise on every rank before anything is filled.
        verify: What is compared with the checksums of the checkpoint: ``read``, what is read, block
            by block; ``full``, every byte of all files, by all ranks together, before anything is
            filled; ``off``, nothing but sizes.
    """

    thread_count: int = 2
    timeout_secs: float = 1800.0
    allow_pickle: bool = False
    cast: Literal["allow", "error"] = "allow"
    verify: Literal["read", "full", "off"] = "read"

    def __post_init__(self) -> None:
        """Refuse values that no load can work with."""
        _check_positive(thread_count=self.thread_count, timeout_secs=self.timeout_secs)
        if self.cast not in ("allow", "error"):
            raise ConfigError(f"cast must be 'allow' or 'error', not {self.cast!r}.")
        if self.verify not in ("read", "full", "off"):
            raise ConfigError(f"verify must be 'read', 'full' or 'off', not {self.verify!r}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundOptions:
    """How to save in the background.

    Attributes:
        worker: Who writes: a process of its own for each rank, or a thread of this one, for where
            processes are unwelcome.
        overlap: Copy parameters and optimizer state while training goes on, until the optimizer's
            next step, which waits for the rest. All else is copied before the save returns. Do not
            change a parameter in another way meanwhile: what is noticed fails the save, writing
            through ``.data`` is not noticed.
        max_in_flight: How many saves may be under way; the next waits.
        staging_budget: Most bytes of host memory to stage in, for each save in flight; None for
            what there is. A larger state is streamed through it.
        copy_threads: Threads that copy.
        drain_timeout_secs: How long to wait at the end for what is in flight.
    """

    worker: Literal["process", "thread"] = "process"
    overlap: bool = False
    max_in_flight: int = 1
    staging_budget: int | None = None
    copy_threads: int = 2
    drain_timeout_secs: float = 600.0

    def __post_init__(self) -> None:
        """Refuse what no save can work with.

        Raises:
            ConfigError: A value is wrong.
        """
        if self.worker not in ("process", "thread"):
            raise ConfigError(f"worker must be 'process' or 'thread', not {self.worker!r}.")
        _check_positive(
            max_in_flight=self.max_in_flight,
            copy_threads=self.copy_threads,
            drain_timeout_secs=self.drain_timeout_secs,
            staging_budget=1 if self.staging_budget is None else self.staging_budget,
        )


def _check_positive(**values: float) -> None:
    wrong = [f"{name} must be positive, not {n!r}" for name, n in values.items() if not n > 0]
    if wrong:
        raise ConfigError(f"{'; '.join(wrong)}.")


def checked_path(path: object) -> Path:
    """Return ``path`` as a path; call it inside of an exchange, so that all ranks hear of it.

    Raises:
        ConfigError: It is none.
    """
    try:
        found = Path(path)  # type: ignore[arg-type]  # just what is to be found out
        found.as_posix().encode()
    except (TypeError, UnicodeEncodeError) as error:
        raise ConfigError(f"expected the path of a checkpoint, found {path!r}.") from error
    if "\0" in str(found) or path == "":
        raise ConfigError(f"expected the path of a checkpoint, found {path!r}.")
    return found


def path_to_tell(path: object) -> Path:
    """Return ``path`` as a path, for messages too when it is none; never raises."""
    try:
        return checked_path(path)
    except ConfigError:
        return Path(ascii(path))
