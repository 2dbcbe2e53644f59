"""How a Trainer comes to save and load with all of its ranks.

Here: ``bind``, which our callback calls in ``setup()``: after the process group exists, before
anything is saved or loaded. Not here: how the callback gets there (``binding``), and what the bound
strategy does (``_overrides``). On every rank alike.

Lightning calls a CheckpointIO on rank 0 only, and under FSDP not at all. So the strategy of this
one Trainer is given a subclass of its own class; every other Trainer stays as it is.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from dist_ckpt.errors import ConfigError
from lightning_dist_ckpt import _preempt
from lightning_dist_ckpt._fit_saves import FitSaves
from lightning_dist_ckpt._overrides import Binding, bound_class
from lightning_dist_ckpt._resuming import bind_connector
from lightning_dist_ckpt.io import DistCkptIO

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["bind"]

_SUPPORTED = frozenset(
    {"SingleDeviceStrategy", "DDPStrategy", "FSDPStrategy", "ModelParallelStrategy"}
)
_UNSUPPORTED = frozenset({"DeepSpeedStrategy", "XLAStrategy", "SingleDeviceXLAStrategy"})


def bind(trainer: Any, callback: Any = None) -> None:
    """Let a Trainer that has an enabled DistCkptIO save and load collectively; else do nothing.

    If it is about to fit, and saves shall go on in the background, they can from now on.

    Args:
        trainer: The Trainer.
        callback: Ours.

    Raises:
        ConfigError: Its strategy is not supported.
    """
    strategy = trainer.strategy
    chain = list(_plugins(strategy))
    io = chain[-1] if chain else None
    if not isinstance(io, DistCkptIO) or not io.config.enabled:
        return
    if not isinstance(getattr(strategy, "dist_ckpt_binding", None), Binding):
        _check_supported(type(strategy))
        if len(chain) > 1:
            _warn_of_wrapper(chain[0], io)
        strategy.dist_ckpt_binding = Binding(io=io)
        strategy.__class__ = bound_class(type(strategy))
    bind_connector(trainer._checkpoint_connector)  # noqa: SLF001 - Lightning's
    if io.config.async_save and trainer.state.fn == "fit":
        _begin_saves(trainer, io, callback)
    if io.config.preemption and trainer.state.fn == "fit" and callback is not None:
        _preempt.begin(trainer, io, callback)


def _begin_saves(trainer: Any, io: DistCkptIO, callback: Any) -> None:
    binding: Binding = trainer.strategy.dist_ckpt_binding
    if binding.saves is not None:  # an exception has left a fit without its teardown
        binding.saves.interrupted(SystemExit())
        binding.saves.close()
    binding.saves = FitSaves(trainer, io)
    if io.config.overlap and callback in trainer.callbacks:
        # Copies must end before another callback exchanges weights.
        others = [one for one in trainer.callbacks if one is not callback]
        trainer.callbacks = [callback, *others]


def _warn_of_wrapper(wrapper: Any, io: DistCkptIO) -> None:
    name = type(wrapper).__name__
    hint = ""
    if "Async" in name:
        hint = (
            " It saves in the background already."
            if io.config.async_save
            else " Use DistCkptIO(async_save=True) to save in the background."
        )
    warnings.warn(
        f"{name} around DistCkptIO has no effect: saving is collective and goes past it.{hint}",
        stacklevel=3,
    )


def _plugins(strategy: Any) -> Iterator[Any]:
    """Yield the strategy's CheckpointIO and, if that wraps another, the inner ones."""
    # Not the property `checkpoint_io`: it makes a stock one, and writes to wrapping ones.
    io = vars(strategy).get("_checkpoint_io")
    while io is not None:
        yield io
        io = None if isinstance(io, DistCkptIO) else getattr(io, "_checkpoint_io", None)


def _check_supported(cls: type) -> None:
    known = {
        base.__name__
        for base in cls.__mro__
        if base.__module__.partition(".")[0] in {"lightning", "pytorch_lightning"}
    }
    if known & _UNSUPPORTED or not known & _SUPPORTED:
        raise ConfigError(
            f"DistCkptIO does not support {cls.__name__}.",
            hint="use single-device, DDP, FSDP or ModelParallelStrategy; or take DistCkptIO out of "
            "the Trainer's plugins (enabled: false).",
        )
