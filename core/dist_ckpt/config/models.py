"""The model of the configuration.

Here: fields, defaults and bounds; only fields that do something. Not here: files and environment
(``load``).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

__all__ = ["DistCkptConfig"]


def _off(value: object) -> object:
    """Return what was written: YAML 1.1 reads an unquoted ``off`` as False."""
    return "off" if value is False else value


class DistCkptConfig(BaseModel):
    """What a user may choose about checkpoints.

    Attributes:
        enabled: Whether checkpoints are ours at all; false leaves the framework as it is.
        backend: The format on disk: files of torch's DCP, or zarr arrays.
        thread_count: Threads that write or read files, on each rank.
        timeout_secs: How long ranks wait for each other before the missing ones are named.
        allow_pickle: Whether pickled values are loaded. They can run any code: trust the source.
        verify_sharding: Whether a save checks first that the shards cover every tensor once.
        async_save: Whether training goes on while a checkpoint is written.
        overlap: Whether parameters and optimizer state are copied under the next forward and
            backward, too; the optimizer's step waits for the rest.
        worker: Who writes in the background: a process of its own for each rank, or a thread.
        max_in_flight: How many saves may be under way; the next waits.
        staging_budget_mib: Most memory for a copy, in MiB, on each rank and for each save in
            flight; what is larger is streamed through it. None for what there is.
        drain_timeout_secs: How long to wait at the end for what is in flight.
        events_file: Where to append what happens to saves, in the background or not, as JSON lines;
            ranks other than 0 put their number into the name.
        log_metrics: Whether the framework's loggers get stall, writing time and speed of each save.
        page_cache: Whether the pages of a checkpoint stay in the page cache when it is on disk, so
            that a restart on the same host reads memory; ``auto`` keeps the newest one if it is
            small against the memory that is available.
        cast: What a load does where stored and requested dtype differ: convert, with one warning
            that names keys and dtypes, or raise.
        verify: What a load compares with the checksums: what it reads, everything before anything
            is filled, or nothing.
        verify_newest: How closely a checkpoint is looked at before it counts as the newest one:
            its documents and the sizes of all files, or every byte.
        preemption: Whether SIGTERM leads to one more save and a clean stop.
        grace_secs: How long after SIGTERM the process may go on.
        sweep_after_secs: How old leftovers of this job's dead saves must be to be removed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    enabled: bool = True
    backend: Literal["torch_dist", "zarr"] = "torch_dist"
    thread_count: Annotated[int, Field(ge=1, le=64)] = 2
    timeout_secs: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1800.0
    allow_pickle: bool = False
    verify_sharding: bool = True
    async_save: bool = False
    overlap: bool = False
    worker: Literal["process", "thread"] = "process"
    max_in_flight: Annotated[int, Field(ge=1, le=16)] = 1
    staging_budget_mib: Annotated[int, Field(ge=1)] | None = None
    drain_timeout_secs: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    events_file: str | None = None
    log_metrics: bool = True
    page_cache: Literal["auto", "keep", "drop"] = "auto"
    cast: Literal["allow", "error"] = "allow"
    verify: Annotated[Literal["read", "full", "off"], BeforeValidator(_off)] = "read"
    verify_newest: Literal["files", "full"] = "full"
    preemption: bool = False
    grace_secs: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0
    sweep_after_secs: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 86400.0
