"""The model of the configuration.

Here: fields, defaults and bounds; only fields that do something. Not here: files and environment
(``load``).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["DistCkptConfig"]


class DistCkptConfig(BaseModel):
    """What a user may choose about checkpoints.

    Attributes:
        enabled: Whether checkpoints are ours at all; false leaves the framework as it is.
        backend: The format on disk: files of torch's DCP, or zarr arrays.
        thread_count: Threads that write or read files, on each rank.
        timeout_secs: How long ranks wait for each other before the missing ones are named.
        allow_pickle: Whether pickled values are loaded. They can run any code: trust the source.
        verify_sharding: Whether a save checks first that the shards cover every tensor once.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    enabled: bool = True
    backend: Literal["torch_dist", "zarr"] = "torch_dist"
    thread_count: Annotated[int, Field(ge=1, le=64)] = 2
    timeout_secs: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1800.0
    allow_pickle: bool = False
    verify_sharding: bool = True
