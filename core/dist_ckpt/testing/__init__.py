"""Tools for tests of code that saves and loads: ranks, backends and stores on trial, and faults.

Here: ``ThreadWorld`` (several ranks in one process), ``StrategyConformance`` and
``StoreConformance`` (what every backend and every store must do), ``MemoryStore``, ``FaultyStore``
and ``faulty_stores`` (disks that fail, hang, tear and lie), ``KillSwitch`` and ``kill_after``
(processes that die). Beside them ``testing.crashes``: every state that a crash may leave. Not here:
ranks as processes (the library's own tests start those). Nothing in the library imports this
package. See docs/guides/testing.md.
"""

from __future__ import annotations

from dist_ckpt.testing._matrix import StrategyMatrix
from dist_ckpt.testing.faults import (
    FaultPlan,
    FaultyStore,
    KillSwitch,
    faulty_stores,
    kill_after,
)
from dist_ckpt.testing.stores import MemoryStore, StoreConformance
from dist_ckpt.testing.strategies import StrategyConformance
from dist_ckpt.testing.world import RankErrors, ThreadWorld

__all__ = [
    "FaultPlan",
    "FaultyStore",
    "KillSwitch",
    "MemoryStore",
    "RankErrors",
    "StoreConformance",
    "StrategyConformance",
    "StrategyMatrix",
    "ThreadWorld",
    "faulty_stores",
    "kill_after",
]
