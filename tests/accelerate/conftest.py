"""Each test here starts without the singletons of Accelerate, and leaves none behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.accelerate._jobs import reset


@pytest.fixture(autouse=True)
def _no_singletons(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("ACCELERATE_USE_CPU", "ACCELERATE_USE_FSDP", "DIST_CKPT_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    reset()
    yield
    reset()
