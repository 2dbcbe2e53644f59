"""What our callback does in the course of a Trainer's run.

Here: its hooks, for either name that Lightning is installed under. Not here: the classes
(``_callback_*``), what is called (``_bind``, ``_fit_saves``). On every rank, in the main thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from lightning_dist_ckpt._bind import bind, check_saved_optimizers
from lightning_dist_ckpt._requests import note_requests

if TYPE_CHECKING:
    from lightning_dist_ckpt._fit_saves import FitSaves
    from lightning_dist_ckpt._preempt import StopHooks

__all__ = ["Hooks"]


class Hooks:
    """Hooks of a callback without state, as it may be in several Trainers, and is pickled.

    Attributes:
        connector: Class of the Trainers' checkpoint connectors, under the callback's namespace.
        stopper: Class of the callback that stops a Trainer whose job is told to go.
    """

    connector: ClassVar[type]
    stopper: ClassVar[type[StopHooks]]

    def __init__(self) -> None:
        """Let Trainers note, from now on, what they are asked to resume from."""
        super().__init__()
        note_requests(self.connector)

    def __reduce__(self) -> tuple[type[Hooks], tuple[()]]:
        """Be made anew in another process (``ddp_spawn``)."""
        return type(self), ()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Bind the Trainer before it saves or loads anything."""
        del pl_module, stage
        bind(trainer, self)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse optimizers that no save could store, before the first step."""
        del pl_module
        check_saved_optimizers(trainer)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Raise what failed in the background."""
        saves = _saves(trainer)
        if saves is not None:
            saves.is_training = True  # a fit within this one, to find a learning rate, ended it
            saves.poll()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Raise what failed in the background."""
        saves = _saves(trainer)
        if saves is not None:
            saves.poll()

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        """Let copies end before callbacks may exchange weights."""
        _finish_staging(trainer)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        """Let copies end before callbacks may exchange weights."""
        _finish_staging(trainer)

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        """Let copies end before callbacks may exchange weights."""
        _finish_staging(trainer)

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        """Let copies end before callbacks may exchange weights."""
        _finish_staging(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Let saves in flight end, before rank 0 may kill the others."""
        del pl_module
        saves = _saves(trainer)
        if saves is not None:
            saves.interrupted(exception)


def _saves(trainer: Any) -> FitSaves | None:
    binding = getattr(trainer.strategy, "dist_ckpt_binding", None)
    found: FitSaves | None = None if binding is None else binding.saves
    return found


def _finish_staging(trainer: Any) -> None:
    saves = _saves(trainer)
    if saves is not None:
        saves.finish_staging()
