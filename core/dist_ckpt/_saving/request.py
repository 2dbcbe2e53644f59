"""The inputs of a save.

Here: ``SaveCall``, equal on all ranks, and ``SaveRequest``, the state of one rank. Not here: how
they are carried out (``_saving.plan``, ``_saving.execute``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dist_ckpt._formats.base import SaveFormat
    from dist_ckpt._saving.describe_live import Live
    from dist_ckpt.options import SaveOptions
    from dist_ckpt.types import Communicator, ShardedStateDict, StateDict

__all__ = ["CommonWriter", "SaveCall", "SaveRequest"]


@dataclass(frozen=True, slots=True)
class CommonWriter:
    """A strategy's way to store the common part; called on rank 0 with part and directory."""

    backend: str
    version: int
    write: Callable[[StateDict, Path], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """What one rank saves.

    Attributes:
        state_dict: Nested dicts and lists with sharded leaves.
        format: How the checkpoint is laid out.
        common: Another way to store the common part.
        thread_count: Files or requests at a time; None for what the options say.
        live: Models and optimizers that are described already; their shards come before those of
            ``state_dict``.
        compares_common: Whether to warn if the ranks' common parts differ.
        preprocess: Applied to a copy of the common part before it is compared.
    """

    state_dict: ShardedStateDict
    format: SaveFormat
    common: CommonWriter | None = None
    thread_count: int | None = None
    live: Live | None = None
    compares_common: bool = False
    preprocess: Callable[[StateDict], StateDict] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCall:
    """The arguments of one collective save, equal on all ranks.

    Attributes:
        build: Makes this rank's request. What it raises on one rank is raised on all.
        target: The path of the checkpoint.
        comm: The ranks.
        options: Choices.
        check_coverage: Whether main replicas must tile every tensor.
        shards_only: Whether ``target`` is a directory of the caller's, into which the sharded part
            is written: without common part, manifest and marker.
    """

    build: Callable[[], SaveRequest]
    target: Path
    comm: Communicator
    options: SaveOptions
    check_coverage: bool
    shards_only: bool = False
