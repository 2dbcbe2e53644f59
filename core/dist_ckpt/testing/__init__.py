"""Tools for tests of code that saves and loads: several ranks in one process, backends on trial.

Here: ``ThreadWorld``, ``StrategyConformance``. Not here: real processes (the library's own tests
start those). Nothing in the library imports this package.
"""

from __future__ import annotations

from dist_ckpt.testing._matrix import StrategyMatrix
from dist_ckpt.testing.strategies import StrategyConformance
from dist_ckpt.testing.world import RankErrors, ThreadWorld

__all__ = ["RankErrors", "StrategyConformance", "StrategyMatrix", "ThreadWorld"]
