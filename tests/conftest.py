"""What every test has: quiet threads, few hypothesis surprises, markers by folder."""

from __future__ import annotations

import gc
import os
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests._samples import sample
from tests.multiprocess._spawn import warm_popen
from tests.multiprocess._world import start_nursery

# Before torch is imported anywhere, the ranks' processes included.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Machines of CI are slow and shared: examples are bounded in number, not in time.
settings.register_profile(
    "default",
    deadline=None,
    max_examples=sample(40, 400),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("default")

_TESTS = Path(__file__).parent
_FOLDER_MARKERS = ("multiprocess", "lightning", "accelerate")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by the folder they are in: ``-m 'not multiprocess'`` is the quick suite.

    What is marked ``soak`` runs only where ``-m`` names it. The zoo, whose worlds take longest, is
    first and the many short files of ``unit`` are last, so that all workers end at the same time.
    """
    order = {"zoo": -1, "unit": 1}
    items.sort(key=lambda item: order.get(item.path.parent.name, 0))
    if "soak" not in config.option.markexpr:
        left = [item for item in items if item.get_closest_marker("soak")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
    for item in items:
        if item.path.is_relative_to(_TESTS):
            folder = item.path.relative_to(_TESTS).parts[0]
            if folder in _FOLDER_MARKERS:
                item.add_marker(folder)


def pytest_collection_finish() -> None:
    """Keep what is imported out of collections, of which some tests ask for several."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def warm_spawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes that this test spawns be forks of a process that has imported torch."""
    monkeypatch.setattr(SpawnProcess, "_Popen", warm_popen(start_nursery()))
