"""The messages between a training process and its worker.

Here: frozen dataclasses without behaviour. Not here: how they travel (``channel``), who handles
them (``link``, ``loop``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dist_ckpt import __version__

if TYPE_CHECKING:
    from dist_ckpt._saving.publish import CommitPoint
    from dist_ckpt._staging_pool.runs import Run
    from dist_ckpt._worker.hub import HubAddress
    from dist_ckpt.errors import CheckpointingException, RankFailure

__all__ = [
    "PROTOCOL",
    "Abandon",
    "AllStaged",
    "Begin",
    "Close",
    "Configure",
    "Ended",
    "ForgetArena",
    "Freed",
    "Heartbeat",
    "Hello",
    "HubServed",
    "MapArena",
    "ServeHub",
    "StagedRun",
    "Written",
]

PROTOCOL = (1, __version__)
"""Both sides must be the same release; the library may be updated while training runs."""


# -- to the worker -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Configure:
    """The first message: whose worker this is."""

    rank: int
    heartbeat_secs: float
    niceness: int
    parent_pid: int


@dataclass(frozen=True, slots=True)
class ServeHub:
    """Serve the hub of this job; answered by ``HubServed``."""

    hosts: tuple[str, ...]
    grace_secs: float


@dataclass(frozen=True, slots=True)
class MapArena:
    """Map an arena, whose descriptor is sent with this message."""

    key: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ForgetArena:
    """Unmap an arena: no further save uses it."""

    key: int


@dataclass(frozen=True, slots=True)
class Begin:
    """Begin a save. The order is pickled on its own: if it cannot be read, only this save fails.

    Attributes:
        umask: Of the training process, so that files get the permissions that it would give them.
    """

    number: int
    order: bytes
    target: str
    commits: bool
    arena_key: int | None
    nbytes: int
    point: CommitPoint | None
    umask: int


@dataclass(frozen=True, slots=True)
class StagedRun:
    """These bytes are staged and may be written."""

    number: int
    run: Run


@dataclass(frozen=True, slots=True)
class AllStaged:
    """No further runs."""

    number: int


@dataclass(frozen=True, slots=True)
class Abandon:
    """Staging failed; the save must not be committed."""

    number: int
    failure: RankFailure


@dataclass(frozen=True, slots=True)
class Close:
    """Finish saves that are staged in full, then end."""


# -- from the worker -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """The worker has started."""

    pid: int
    protocol: tuple[int, str] = PROTOCOL


@dataclass(frozen=True, slots=True)
class HubServed:
    """Where the hub is, or why there is none."""

    address: HubAddress | None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What the worker is doing, and how many bytes of it are done."""

    phase: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Freed:
    """These staged bytes may be overwritten."""

    number: int
    run: Run


@dataclass(frozen=True, slots=True)
class Written:
    """The worker no longer reads the memory of this save, whether or not writing succeeded.

    Attributes:
        number: Which save.
        secs: How long writing took.
        timings: Unix times by name.
        nbytes: Bytes that were written.
    """

    number: int
    secs: float
    timings: Mapping[str, float] = field(default_factory=dict)
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """How the save ended.

    Attributes:
        number: Which save.
        report: Pickled, for saves that do not commit.
        error: The failure, the same on all ranks; None for success.
        is_aborted: Whether the worker had an order, so that a failed attempt is removed already.
        timings: Unix times by name.
    """

    number: int
    report: bytes = b""
    error: CheckpointingException | None = None
    is_aborted: bool = True
    timings: Mapping[str, float] = field(default_factory=dict)
