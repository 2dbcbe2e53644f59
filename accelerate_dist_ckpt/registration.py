"""How an Accelerator comes to use our checkpoints, and how it stops.

Here: ``register_checkpoint_io``, its handle, and the dispatchers on Accelerate's classes. Not here:
what the dispatchers call (``saving``, ``loading``, ``dataloaders``). Called on every rank alike.

The dispatchers stand on the base class, once, whoever imports this how often; they act only for
instances that hold an IO, so that subclasses and their ``super()`` chains work as before.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

from accelerate.accelerator import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.utils.dataclasses import DistributedType

from accelerate_dist_ckpt.dataloaders import tracked_iteration
from accelerate_dist_ckpt.io import DistCkptIO
from accelerate_dist_ckpt.loading import load_state
from accelerate_dist_ckpt.saving import save_state
from dist_ckpt.errors import ConfigError

__all__ = ["CheckpointIOHandle", "attach_method", "register_checkpoint_io"]

_IO: Final = "_dist_ckpt_io"
_NATIVE: Final = "_dist_ckpt_native"
_METHOD: Final = "register_checkpoint_io"
_OWN_FORMAT: Final = frozenset(
    {DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA}
)


class CheckpointIOHandle:
    """Undoes one registration; a context manager that does so at its end."""

    def __init__(self, target: Accelerator, io: DistCkptIO) -> None:
        """Remember both; the target is not kept alive."""
        self._target, self._io = weakref.ref(target), io

    def remove(self) -> None:
        """Give the Accelerator its native checkpoints back. Calling it again does nothing."""
        target = self._target()
        if target is not None and vars(target).get(_IO) is self._io:
            del vars(target)[_IO]

    def __enter__(self) -> Self:
        """Return the handle."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove the registration."""
        self.remove()


def register_checkpoint_io(target: Accelerator, io: DistCkptIO) -> CheckpointIOHandle:
    """Let ``target.save_state`` and ``target.load_state`` write and read our checkpoints.

    An IO that was registered before is replaced. With ``enabled=False`` nothing happens at all.

    Args:
        target: The Accelerator; before or after ``prepare``.
        io: The choices, the same on all ranks.

    Raises:
        ConfigError: ``target`` is no Accelerator, or ``io`` no DistCkptIO.
    """
    if not isinstance(target, Accelerator):
        raise ConfigError(
            f"register_checkpoint_io() takes an Accelerator, found a {type(target).__name__}."
        )
    if not isinstance(io, DistCkptIO):
        raise ConfigError(
            f"register_checkpoint_io() takes a DistCkptIO, found a {type(io).__name__}."
        )
    if io.config.enabled:
        _install()
        vars(target)[_IO] = io
    return CheckpointIOHandle(target, io)


def attach_method() -> None:
    """Make ``accelerator.register_checkpoint_io(io)`` work, unless Accelerate has its own."""
    if not hasattr(Accelerator, _METHOD):
        setattr(Accelerator, _METHOD, register_checkpoint_io)


def _install() -> None:
    _replace(Accelerator, "save_state", _dispatched_save)
    _replace(Accelerator, "load_state", _dispatched_load)
    for cls in (DataLoaderShard, DataLoaderDispatcher):
        _replace(cls, "__iter__", tracked_iteration)


def _replace(
    cls: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    native = getattr(cls, name)
    if hasattr(native, _NATIVE):
        return
    ours = functools.wraps(native)(make(native))
    setattr(ours, _NATIVE, native)
    setattr(cls, name, ours)


def _dispatched_save(native: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch(self: Accelerator, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        io = _active_io(self)
        if io is None:
            return native(self, output_dir, *args, **kwargs)
        return save_state(self, io, output_dir)

    return dispatch


def _dispatched_load(native: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch(
        self: Accelerator, input_dir: Any = None, load_kwargs: Any = None, **kwargs: Any
    ) -> Any:
        io = _active_io(self)
        if io is None:
            return native(self, input_dir, load_kwargs, **kwargs)
        found = load_state(self, io, input_dir, **kwargs)
        if found is not None:  # a checkpoint of Accelerate's own
            native(self, found, load_kwargs, **kwargs)
        return None

    return dispatch


def _active_io(accelerator: Accelerator) -> DistCkptIO | None:
    """Return the IO that serves this call; None if it is Accelerate's own business."""
    io: DistCkptIO | None = vars(accelerator).get(_IO)
    if io is None or accelerator.distributed_type not in _OWN_FORMAT:
        return io
    name = accelerator.distributed_type.value
    if io.on_unsupported == "raise":
        raise ConfigError(
            f"{name} writes checkpoints of its own, which DistCkptIO cannot replace.",
            hint="on_unsupported='native' leaves them to Accelerate.",
        )
    if accelerator.is_main_process:
        warnings.warn(
            f"{name} writes checkpoints of its own: the registered DistCkptIO is not used.",
            stacklevel=3,
        )
    return None
