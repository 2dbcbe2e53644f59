"""A job of two ranks that Lightning starts itself, and that a scheduler tells to go.

Here: the program; ``test_preemption`` runs it as ``python -m``, with a folder, and sends the
signal. Not here: tests.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import lightning as L  # noqa: N812 - as its documents write it

from lightning_dist_ckpt import DistCkptIO
from tests.lightning._flight import At
from tests.lightning._training import Tiny, loader, make_trainer


def main(root: str) -> None:
    """Train for longer than anybody waits, and say when it has begun."""

    def begun(trainer: L.Trainer) -> None:
        if trainer.global_step == 3:
            Path(root, f"rank-{trainer.global_rank}").write_text(str(os.getpid()))

    make_trainer(
        "ddp",
        root,
        callbacks=[At(batch_end=begun), L.pytorch.callbacks.ModelCheckpoint(Path(root, "c"))],
        plugins=[DistCkptIO(timeout_secs=60, preemption=True)],
        max_steps=1_000_000,
    ).fit(Tiny(), loader("ddp"))


if __name__ == "__main__":
    main(sys.argv[1])
