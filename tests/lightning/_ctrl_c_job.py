"""A job of two ranks that Lightning starts itself, and that a user stops while a save is in flight.

Here: the program; ``test_async`` runs it as ``python -m``, with a folder. Not here: tests.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import lightning as L  # noqa: N812 - as its documents write it

from lightning_dist_ckpt import _fit_saves
from tests.lightning._flight import At, make_async, tell_worker, wait_until_idle, worker_pid
from tests.lightning._training import Tiny, every_3_steps, loader


def main(root: str) -> None:
    """Train until rank 0 is interrupted in step 7."""
    # A shell has what it starts in the background ignore Ctrl-C, and that is inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def at_step_6(trainer: L.Trainer) -> None:
        if trainer.global_step == 6:
            wait_until_idle(trainer)
            trainer.strategy.barrier()  # the other rank hears of its end from this one's worker
            Path(root, f"worker-{trainer.global_rank}").write_text(str(worker_pid(trainer)))
            if trainer.is_global_zero:
                tell_worker(trainer, signal.SIGSTOP)

    def in_step_7(trainer: L.Trainer) -> None:
        if trainer.global_step == 6 and trainer.is_global_zero:
            os.kill(os.getpid(), signal.SIGINT)

    hooks = At(
        batch_end=at_step_6,
        batch_start=in_step_7,
        exception=lambda trainer: tell_worker(trainer, signal.SIGCONT),
    )
    callbacks = [hooks, every_3_steps(Path(root, "c"))]
    _fit_saves._INTERRUPT_SECS = 240.0  # a worker has less of a busy machine than training
    make_async("ddp", root, callbacks=callbacks, max_steps=9).fit(Tiny(), loader("ddp"))


if __name__ == "__main__":
    main(sys.argv[1])
