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

from dist_ckpt.derive import check_optimizers
from dist_ckpt.errors import ConfigError, InvalidShardingError
from dist_ckpt.training_state import is_checkpoint
from lightning_dist_ckpt import _preempt
from lightning_dist_ckpt._candidates import model_checkpoints
from lightning_dist_ckpt._contract import check_contract, foreign_definitions, is_lightnings_own
from lightning_dist_ckpt._fit_saves import FitSaves
from lightning_dist_ckpt._folders import check_folders
from lightning_dist_ckpt._model_checkpoint import REPLACED
from lightning_dist_ckpt._overrides import OVERRIDDEN, Binding, bound_class
from lightning_dist_ckpt._requests import noted_path
from lightning_dist_ckpt._resuming import bind_connector
from lightning_dist_ckpt.export import is_stock
from lightning_dist_ckpt.io import DistCkptIO

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

__all__ = ["bind", "check_saved_optimizers"]

_SUPPORTED = frozenset(
    {"SingleDeviceStrategy", "DDPStrategy", "FSDPStrategy", "ModelParallelStrategy"}
)
_UNSUPPORTED = frozenset({"DeepSpeedStrategy", "XLAStrategy", "SingleDeviceXLAStrategy"})
_RELIED_ON = frozenset(
    {"__class__", "__reduce__", "checkpoint_io", "restore_checkpoint_after_setup"}
)
"""Further names of a strategy that binding, pickling or loading rely on."""
_NOT_CALLED = frozenset({"load_checkpoint", "save_checkpoint"})
"""Methods of a plugin that a bound Trainer does not call."""


def bind(trainer: Any, callback: Any = None) -> None:
    """Let a Trainer that has an enabled DistCkptIO save and load collectively; else do nothing.

    If it is about to fit, and saves shall go on in the background, they can from now on.

    Args:
        trainer: The Trainer.
        callback: Ours.

    Raises:
        ConfigError: Its strategy is not supported; a third-party class defines what is replaced; a
            folder of checkpoints cannot be written to; or it has no DistCkptIO and is to load a
            checkpoint of ours.
    """
    strategy = trainer.strategy
    chain = list(_plugins(trainer))
    io = chain[-1] if chain else None
    if not isinstance(io, DistCkptIO) or not io.config.enabled:
        _unbind(trainer)
        _refuse_ours(trainer)
        return
    _check_supported(type(strategy))
    fits = trainer.state.fn == "fit"
    check_contract(_replaced(trainer, chain, watches=fits and io.config.async_save))
    if fits:
        check_folders(trainer, io)
    if _is_bound(strategy):
        strategy.dist_ckpt_binding.io = io
    else:
        if len(chain) > 1:
            _warn_of_wrapper(chain[0], io)
        strategy.dist_ckpt_binding = Binding(io=io)
        strategy.__class__ = bound_class(type(strategy))
    bind_connector(trainer._checkpoint_connector)  # noqa: SLF001 - Lightning's
    if io.config.async_save and fits:
        _begin_saves(trainer, io, callback)
    if io.config.preemption and fits and callback is not None:
        _preempt.begin(trainer, io, callback)


def _is_bound(strategy: Any) -> bool:
    return isinstance(vars(strategy).get("dist_ckpt_binding"), Binding)


def _unbind(trainer: Any) -> None:
    """Undo ``bind`` on a strategy that has got another plugin since."""
    if not _is_bound(trainer.strategy):
        return
    del trainer.strategy.dist_ckpt_binding
    for one in (trainer.strategy, trainer._checkpoint_connector):  # noqa: SLF001 - Lightning's
        base = vars(type(one)).get("dist_ckpt_base")
        if base is not None:
            one.__class__ = base


def _replaced(
    trainer: Any, chain: Sequence[Any], *, watches: bool
) -> Iterator[tuple[str, object, Collection[str]]]:
    """Yield what is replaced or not called any more: role, object, names."""
    yield "strategy", trainer.strategy, OVERRIDDEN | _RELIED_ON
    *wrappers, io = chain
    for wrapper in wrappers:
        yield "plugin", wrapper, _NOT_CALLED | {"remove_checkpoint"}
    yield "plugin", io, _NOT_CALLED
    for callback in model_checkpoints(trainer) if watches else ():
        yield "callback", callback, REPLACED


def _refuse_ours(trainer: Any) -> None:
    """Refuse to let Lightning load a checkpoint of ours, which it cannot read."""
    path = noted_path(trainer._checkpoint_connector)  # noqa: SLF001 - Lightning's
    if path is not None and not is_stock(path) and is_checkpoint(path):
        raise ConfigError(
            f"{path} is a checkpoint directory of DistCkptIO, and this Trainer has no such plugin.",
            hint="use Trainer(plugins=[DistCkptIO()]), or make a file for stock Lightning: "
            "lightning_dist_ckpt.export_to_file().",
        )


def check_saved_optimizers(trainer: Any) -> None:
    """Raise if a callback is going to save optimizers that cannot be stored.

    Where the module edits what is saved, and so may leave them out, this is a warning.

    Raises:
        InvalidShardingError: The state of an optimizer cannot be stored.
    """
    is_bound = isinstance(getattr(trainer.strategy, "dist_ckpt_binding", None), Binding)
    callbacks = trainer.checkpoint_callbacks
    if not is_bound or all(getattr(callback, "save_weights_only", False) for callback in callbacks):
        return
    try:
        check_optimizers(trainer.strategy.optimizers, [trainer.strategy.model])
    except InvalidShardingError as error:
        hook = type(trainer.lightning_module).on_save_checkpoint
        if is_lightnings_own(hook):
            raise
        warnings.warn(
            f"saves fail unless on_save_checkpoint leaves optimizers out: {error}", stacklevel=2
        )


def _begin_saves(trainer: Any, io: DistCkptIO, callback: Any) -> None:
    binding: Binding = trainer.strategy.dist_ckpt_binding
    if binding.saves is not None:  # an exception has left a fit without its teardown
        binding.saves.interrupted(SystemExit())
        binding.saves.close()
    binding.saves = FitSaves(trainer, io, binding.memory)
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


def _plugins(trainer: Any) -> Iterator[Any]:
    """Yield the strategy's CheckpointIO and, if that wraps another, the inner ones."""
    strategy = trainer.strategy
    # Not the property `checkpoint_io`: it makes a stock one, and writes to wrapping ones.
    io = vars(strategy).get("_checkpoint_io")
    if io is None and foreign_definitions(strategy, {"checkpoint_io"}):
        io = trainer._accelerator_connector.checkpoint_io  # noqa: SLF001 - Lightning's
    while io is not None:
        yield io
        io = None if isinstance(io, DistCkptIO) else _wrapped_by(io)


def _wrapped_by(io: Any) -> Any:
    attributes = getattr(io, "__dict__", {})
    ours = (value for value in attributes.values() if isinstance(value, DistCkptIO))
    return next(ours, getattr(io, "_checkpoint_io", None))


def _check_supported(cls: type) -> None:
    known = {base.__name__ for base in cls.__mro__ if is_lightnings_own(base)}
    if known & _UNSUPPORTED or not known & _SUPPORTED:
        raise ConfigError(
            f"DistCkptIO does not support {cls.__name__}.",
            hint="use single-device, DDP, FSDP or ModelParallelStrategy; or take DistCkptIO out of "
            "the Trainer's plugins (enabled: false).",
        )
