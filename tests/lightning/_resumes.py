"""Runs that save at each third step, and runs that go on from them.

Here: what the tests of resuming share. Not here: tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_dist_ckpt import DistCkptIO
from tests.lightning._training import Tiny, loader, make_trainer


def keeping(folder: Path | str, *, save_last: Any = "link", **kwargs: Any) -> ModelCheckpoint:
    """Return a callback that keeps ``step=3.ckpt`` and so on, and a last one."""
    settings = {"save_top_k": -1, "every_n_train_steps": 3} | kwargs
    return ModelCheckpoint(folder, "{step}", save_last=save_last, **settings)


def train(folder: Path | str, layout: str = "single", steps: int = 9, **kwargs: Any) -> Any:
    """Train afresh; return the Trainer."""
    trainer = make_trainer(layout, folder, max_steps=steps, callbacks=[keeping(folder, **kwargs)])
    trainer.fit(Tiny(), loader(layout))
    return trainer


def resume(
    folder: Path | str,
    ckpt_path: Any = "last",
    layout: str = "single",
    io: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Train on until step 12; return the Trainer."""
    trainer = make_trainer(
        layout,
        folder,
        max_steps=12,
        plugins=[DistCkptIO(timeout_secs=60, **(io or {}))],
        callbacks=[keeping(folder, **kwargs)],
    )
    trainer.fit(Tiny(7), loader(layout), ckpt_path=ckpt_path)
    return trainer


def newest(folder: Path) -> Path:
    """Return the checkpoint of step 12."""
    return max(folder.glob("step=12*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
