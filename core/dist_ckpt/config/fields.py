"""The fields of the configuration as keyword arguments, for type checkers and editors.

``make pages`` writes this file from ``models``, which has defaults, bounds and checks; do not edit
it. A function takes the fields by ``**fields: Unpack[ConfigFields]``. None is as good as not given.
"""

from __future__ import annotations

from typing import Literal, TypedDict

__all__ = ["ConfigFields"]


class ConfigFields(TypedDict, total=False):
    """The fields of ``DistCkptConfig``, none of them required."""

    enabled: bool | None
    """Whether this library saves and loads checkpoints; false leaves the framework as it is."""

    backend: Literal["torch_dist", "zarr"] | None
    """The format on disk: files of torch's DCP (``torch_dist``), or an array for each tensor
    (``zarr``)."""

    thread_count: int | None
    """Threads that write or read files, on each rank."""

    timeout_secs: float | None
    """How long ranks wait for each other in one step before the missing ones are named."""

    allow_pickle: bool | None
    """Whether pickled values are loaded. They can run any code: trust the source."""

    verify_sharding: bool | None
    """Whether a save first checks that the shards of all ranks cover every tensor exactly once."""

    async_save: bool | None
    """Whether training goes on while a checkpoint is written in the background."""

    overlap: bool | None
    """Whether parameters and optimizer state are copied during the next forward and backward, too;
    the optimizer's step waits for the rest."""

    worker: Literal["process", "thread"] | None
    """What writes in the background: a ``process`` of its own for each rank, or a ``thread``."""

    max_in_flight: int | None
    """How many background saves may be in flight; the next one waits."""

    staging_budget_mib: int | None
    """Most memory for a copy, in MiB, on each rank and for each save in flight; a larger state is
    streamed through it. Without a value there is no limit."""

    drain_timeout_secs: float | None
    """How long the end of training waits for saves in flight."""

    events_file: str | None
    """Where the events of all saves, in the background or not, are appended as JSON lines; ranks
    other than 0 put their number into the name."""

    log_metrics: bool | None
    """Whether the framework's loggers or trackers get stall, writing time and speed of each
    save."""

    page_cache: Literal["auto", "keep", "drop"] | None
    """Whether the pages of a checkpoint stay in the page cache when it is on disk, so that a
    restart on the same host reads memory: ``keep``, ``drop``, or ``auto``, which keeps those of the
    newest checkpoint while they take at most a quarter of the available memory."""

    cast: Literal["allow", "error"] | None
    """What a load does where stored and requested dtype differ: convert, with one warning that
    names keys and dtypes (``allow``), or raise (``error``)."""

    verify: Literal["read", "full", "off"] | None
    """What a load compares with the checksums: what it reads (``read``), everything before anything
    is filled (``full``), or nothing (``off``)."""

    verify_newest: Literal["files", "full"] | None
    """How closely a checkpoint is checked before it counts as the newest one: its documents and the
    sizes of all files (``files``), or every byte (``full``)."""

    preemption: bool | None
    """Whether SIGTERM leads to one more save, at the same step on every rank, and a clean stop."""

    grace_secs: float | None
    """How long the process may go on after SIGTERM."""

    sweep_after_secs: float | None
    """How old the leftovers of this job's dead saves must be to be removed."""
