"""The model of the configuration: the only list of its fields.

Here: fields, types, bounds, defaults and what each field means; only fields that do something. Not
here: where values come from (``load``), how a class shows the fields as its arguments
(``arguments``).

To add a field, add it here with a docstring and run ``make pages``. That writes the keyword
arguments that type checkers read (``fields``) and the table in README.md; everything else reads the
model.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

__all__ = ["DistCkptConfig"]


def _off(value: object) -> object:
    """Return what was written: YAML 1.1 reads an unquoted ``off`` as False."""
    return "off" if value is False else value


_Secs = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class DistCkptConfig(BaseModel):
    """What a user may choose about checkpoints."""

    # The docstring of a field is its description: in help texts and in the documentation.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )

    enabled: bool = True
    """Whether this library saves and loads checkpoints; false leaves the framework as it is."""

    backend: Literal["torch_dist", "zarr"] = "torch_dist"
    """The format on disk: files of torch's DCP (``torch_dist``), or an array for each tensor
    (``zarr``)."""

    thread_count: Annotated[int, Field(ge=1, le=64)] = 2
    """Threads that write or read files, on each rank."""

    timeout_secs: _Secs = 1800.0
    """How long ranks wait for each other in one step before the missing ones are named."""

    allow_pickle: bool = False
    """Whether pickled values are loaded. They can run any code: trust the source."""

    verify_sharding: bool = True
    """Whether a save first checks that the shards of all ranks cover every tensor exactly once."""

    async_save: bool = False
    """Whether training goes on while a checkpoint is written in the background."""

    overlap: bool = False
    """Whether parameters and optimizer state are copied during the next forward and backward, too;
    the optimizer's step waits for the rest."""

    worker: Literal["process", "thread"] = "process"
    """What writes in the background: a ``process`` of its own for each rank, or a ``thread``."""

    max_in_flight: Annotated[int, Field(ge=1, le=16)] = 1
    """How many background saves may be in flight; the next one waits."""

    staging_budget_mib: Annotated[int, Field(ge=1)] | None = None
    """Most memory for a copy, in MiB, on each rank and for each save in flight; a larger state is
    streamed through it. Without a value there is no limit."""

    drain_timeout_secs: _Secs = 600.0
    """How long the end of training waits for saves in flight."""

    events_file: str | None = None
    """Where the events of all saves, in the background or not, are appended as JSON lines; ranks
    other than 0 put their number into the name."""

    log_metrics: bool = True
    """Whether the framework's loggers or trackers get stall, writing time and speed of each
    save."""

    page_cache: Literal["auto", "keep", "drop"] = "auto"
    """Whether the pages of a checkpoint stay in the page cache when it is on disk, so that a
    restart on the same host reads memory: ``keep``, ``drop``, or ``auto``, which keeps those of the
    newest checkpoint while they take at most a quarter of the available memory."""

    cast: Literal["allow", "error"] = "allow"
    """What a load does where stored and requested dtype differ: convert, with one warning that
    names keys and dtypes (``allow``), or raise (``error``)."""

    verify: Annotated[Literal["read", "full", "off"], BeforeValidator(_off)] = "read"
    """What a load compares with the checksums: what it reads (``read``), everything before anything
    is filled (``full``), or nothing (``off``)."""

    verify_newest: Literal["files", "full"] = "full"
    """How closely a checkpoint is checked before it counts as the newest one: its documents and the
    sizes of all files (``files``), or every byte (``full``)."""

    preemption: bool = False
    """Whether SIGTERM leads to one more save, at the same step on every rank, and a clean stop."""

    grace_secs: _Secs = 30.0
    """How long the process may go on after SIGTERM."""

    sweep_after_secs: _Secs = 86400.0
    """How old the leftovers of this job's dead saves must be to be removed."""
