"""What several test files of this folder use.

They need the package to be installed: Lightning finds it by entry point.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.lightning._training import Tiny, every_3_steps, loader, make_trainer


@pytest.fixture(scope="session", autouse=True)
def _installed() -> None:
    group = "lightning.pytorch.callbacks_factory"
    if not entry_points(group=group, name="dist_ckpt"):
        pytest.fail("dist-ckpt is not installed (pip install -e .): Lightning would not find it")


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with ``step=3.ckpt`` and ``step=6.ckpt`` of one uninterrupted run."""
    folder = tmp_path_factory.mktemp("run")
    make_trainer("single", folder, callbacks=[every_3_steps(folder)]).fit(Tiny(), loader())
    return folder
