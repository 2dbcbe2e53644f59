"""Each test here starts without the singletons of Accelerate, and leaves none behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accelerate_dist_ckpt.lifetime import _OPEN
from tests.accelerate._jobs import reset
from tests.accelerate._traces import traces
from tests.multiprocess._world import start_nursery


@pytest.fixture(autouse=True)
def _no_singletons(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("ACCELERATE_USE_CPU", "ACCELERATE_USE_FSDP", "DIST_CKPT_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    reset()
    yield
    reset()


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """A test ends its savers: no process, thread, socket or memory stays."""
    start_nursery()
    before = traces()
    yield
    after, left = traces(), tuple(_OPEN)
    for registration in left:  # or the next test would fail, too
        registration.close_beside(RuntimeError("a test left it"))
    assert not left
    assert after == before
