"""How an Accelerator comes to use our checkpoints, and how it stops.

Here: ``register_checkpoint_io``, its handle, and the dispatchers on Accelerate's classes. Not here:
what the dispatchers call (``saving``, ``loading``, ``dataloaders``). Called on every rank alike.

The dispatchers stand on the base class, once, whoever imports this how often; they act only for
instances that hold an IO, so that subclasses and their ``super()`` chains work as before.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from accelerate.accelerator import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.utils.dataclasses import DistributedType

from accelerate_dist_ckpt.dataloaders import (
    note_training,
    tracked_creation,
    tracked_iteration,
)
from accelerate_dist_ckpt.io import DistCkptIO
from accelerate_dist_ckpt.job import Job
from accelerate_dist_ckpt.lifetime import Registration
from accelerate_dist_ckpt.loading import load_state
from accelerate_dist_ckpt.saving import save_state
from dist_ckpt.derive import check_optimizers
from dist_ckpt.errors import ConfigError

__all__ = ["CheckpointIOHandle", "attach_method", "register_checkpoint_io"]

_IO: Final = "_dist_ckpt_io"
_NATIVE: Final = "_dist_ckpt_native"
_METHOD: Final = "register_checkpoint_io"
_TRAINER_HINT: Final = (
    "the Trainer's own checkpoints stay as they are without this call; DistCkptIO serves scripts "
    "that call accelerator.save_state and load_state."
)
_OWN_FORMAT: Final = frozenset(
    {DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA}
)


class CheckpointIOHandle:
    """Undoes one registration; a context manager that does so at its end."""

    def __init__(self, target: Accelerator, registration: Registration) -> None:
        """Remember both; the target is not kept alive."""
        self._target, self._registration = weakref.ref(target), registration

    def remove(self) -> None:
        """Give the Accelerator its native checkpoints back. Calling it again does nothing.

        What is being saved in the background ends first.

        Raises:
            AsyncSaveError: A save failed and nobody was told; the registration is removed then,
                too.
            BarrierTimeoutError: What is in flight takes longer than ``drain_timeout_secs``.
        """
        self._forget()
        self._registration.close()

    def should_stop(self) -> bool:
        """Whether the job was told to go (``preemption``): for loops that save and end themselves.

        From the first call on, nothing is done by itself. Call it equally often on all ranks, where
        the state may be saved: it is True on all at the same call, and ever after. Loops that ask a
        prepared dataloader for batches and call ``Accelerator.backward`` do without.
        """
        return self._registration.should_stop()

    def _forget(self) -> None:
        target = self._target()
        if target is not None and vars(target).get(_IO) is self._registration:
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
        """Remove the registration; beside an error, what failed is only logged."""
        self._forget()
        self._registration.close_beside(error)


def register_checkpoint_io(target: Accelerator, io: DistCkptIO) -> CheckpointIOHandle:
    """Let ``target.save_state`` and ``target.load_state`` write and read our checkpoints.

    An IO that was registered before is replaced, when its saves have ended. With ``enabled=False``
    nothing happens at all. With ``async_save`` the worker is started.

    Args:
        target: The Accelerator; before or after ``prepare``.
        io: The choices, the same on all ranks.

    Raises:
        ConfigError: ``target`` is no Accelerator, or that of a ``transformers.Trainer``, which does
            not use ``save_state``; or ``io`` is no DistCkptIO.
        AsyncSaveError: A save of the IO before failed and nobody was told; that IO stays.
        InvalidShardingError: A prepared optimizer has state that cannot be stored. ``prepare``
            raises it for those that come later.
    """
    if not isinstance(target, Accelerator):
        raise ConfigError(
            f"register_checkpoint_io() takes an Accelerator, found a {type(target).__name__}.",
            hint=_TRAINER_HINT if _is_trainers(type(target)) else None,
        )
    if not isinstance(io, DistCkptIO):
        raise ConfigError(
            f"register_checkpoint_io() takes a DistCkptIO, found a {type(io).__name__}."
        )
    if io.config.enabled:
        _refuse_trainer(target)
        if target.distributed_type not in _OWN_FORMAT:
            _check_optimizers(target)
    registration = Registration(io)
    if io.config.enabled:
        _install()
        older: Registration | None = vars(target).get(_IO)
        if older is not None:
            older.close()
        vars(target)[_IO] = registration
        if target.distributed_type not in _OWN_FORMAT:
            registration.start(target)
    return CheckpointIOHandle(target, registration)


def _refuse_trainer(accelerator: Accelerator) -> None:
    """Refuse the Accelerator of a ``transformers.Trainer``, which never calls ``save_state``.

    It has no reference to its Trainer, so the live Trainers are searched.
    """
    if "transformers.trainer" not in sys.modules:
        return
    for candidate in gc.get_objects():
        cls = type(candidate)
        if _is_trainers(cls) and vars(candidate).get("accelerator") is accelerator:
            raise ConfigError(
                f"This Accelerator is that of a {cls.__name__} of transformers, which writes "
                "checkpoints of its own and never calls save_state: the DistCkptIO would do "
                "nothing.",
                hint=_TRAINER_HINT,
            )


def _is_trainers(cls: type) -> bool:
    """Whether a class is ``transformers.Trainer`` or a subclass of it (TRL's are)."""
    module = sys.modules.get("transformers.trainer")  # not imported: then there is none
    return getattr(module, "Trainer", None) in cls.__mro__


def attach_method() -> None:
    """Make ``accelerator.register_checkpoint_io(io)`` work, unless Accelerate has its own."""
    if not hasattr(Accelerator, _METHOD):
        setattr(Accelerator, _METHOD, register_checkpoint_io)


def _install() -> None:
    _replace(Accelerator, "prepare", _dispatched_prepare)
    _replace(Accelerator, "save_state", _dispatched_save)
    _replace(Accelerator, "load_state", _dispatched_load)
    _replace(Accelerator, "backward", _dispatched_backward)
    _replace(Accelerator, "log", _dispatched_log)
    _replace(Accelerator, "join_uneven_inputs", _dispatched_join)
    _replace(Accelerator, "end_training", _dispatched_end)
    _replace(Accelerator, "free_memory", _dispatched_end)
    for cls in (DataLoaderShard, DataLoaderDispatcher):
        _replace(cls, "__init__", tracked_creation)
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


def _dispatched_prepare(native: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        prepared = native(self, *args, **kwargs)
        if _registered(self) is not None and self.distributed_type not in _OWN_FORMAT:
            _check_optimizers(self)
        return prepared

    return dispatch


def _check_optimizers(accelerator: Accelerator) -> None:
    """Refuse optimizers that no save could store, before the first step."""
    job = Job.of(accelerator)
    if job.optimizers:
        check_optimizers(job.optimizers, job.models)


def _dispatched_save(native: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch(self: Accelerator, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        registration = _active(self)
        if registration is None:
            return native(self, output_dir, *args, **kwargs)
        return _saved(self, registration, output_dir)

    return dispatch


def _saved(accelerator: Accelerator, registration: Registration, output_dir: Any) -> Path:
    """Save, within the grace of a job that was told to go."""
    chosen = registration.io
    registration.io = registration.bounded_io
    try:
        path = save_state(accelerator, registration, output_dir)
    finally:
        registration.io = chosen
    registration.was_at(path, saved=True)
    return path


def _dispatched_load(native: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch(
        self: Accelerator, input_dir: Any = None, load_kwargs: Any = None, **kwargs: Any
    ) -> Any:
        registration = _active(self)
        # Accelerate 1.6 has no such argument.
        more = () if load_kwargs is None else (load_kwargs,)
        if registration is None:
            return native(self, input_dir, *more, **kwargs)
        found = load_state(self, registration, input_dir, **kwargs)
        if input_dir is not None:
            registration.was_at(Path(input_dir).expanduser(), saved=False)
        if found is not None:  # a checkpoint of Accelerate's own
            native(self, found, *more, **kwargs)
        return None

    return dispatch


def _dispatched_backward(native: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        registration = _registered(self)
        if registration is not None:  # before the gradients meet: then no rank waits for another
            registration.before_backward(self)
            note_training()
        return native(self, *args, **kwargs)

    return dispatch


def _dispatched_log(native: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch(
        self: Accelerator, values: Any, step: int | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        registration = _registered(self)
        if registration is not None and step is not None:
            registration.step = step  # trackers refuse to go back
        return native(self, values, step, *args, **kwargs)

    return dispatch


def _dispatched_join(native: Callable[..., Any]) -> Callable[..., Any]:
    @contextlib.contextmanager
    def dispatch(self: Accelerator, *args: Any, **kwargs: Any) -> Iterator[None]:
        registration = _registered(self)
        quiet = contextlib.nullcontext() if registration is None else registration.uneven()
        with native(self, *args, **kwargs), quiet:
            yield

    return dispatch


def _dispatched_end(native: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method of the end wait for saves in flight; it is done even if one of them failed."""

    def dispatch(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        registration = _registered(self)
        try:
            if registration is not None:
                registration.close_beside(sys.exception())
        finally:
            result = native(self, *args, **kwargs)
        return result

    return dispatch


def _registered(accelerator: Accelerator) -> Registration | None:
    registration: Registration | None = vars(accelerator).get(_IO)
    return registration


def _active(accelerator: Accelerator) -> Registration | None:
    """Return what serves this call; None if it is Accelerate's own business."""
    registration = _registered(accelerator)
    if registration is None or accelerator.distributed_type not in _OWN_FORMAT:
        return registration
    name = accelerator.distributed_type.value
    if registration.io.on_unsupported == "raise":
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
