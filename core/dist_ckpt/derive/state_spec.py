"""Declared shapes of optimizer state that does not follow its parameter element by element.

Here: registering a spec for an optimizer class, and the layout that follows from it. Not here: who
asks for it (``derive.optim``). Locally used; registering is for the start of a program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from dist_ckpt.box import Box
from dist_ckpt.derive.ddp import current_rank
from dist_ckpt.derive.layout import Part, TensorLayout
from dist_ckpt.errors import InvalidShardingError

__all__ = ["StateSpec", "StateSpecHandle", "find_state_spec", "register_state_spec", "spec_layout"]

Axes: TypeAlias = Sequence[int | None]
StateSpec: TypeAlias = Callable[[str, tuple[int, ...], int], Axes | None]
"""``spec(state_name, parameter's global shape, number of axes of the state)`` returns for each axis
of the state the axis of the parameter it follows, or None for an axis that is never cut. Returning
None altogether means that the spec does not know this state."""

_ATTRIBUTE = "_dist_ckpt_state_spec"


class StateSpecHandle:
    """Undoes one registration."""

    def __init__(self, optimizer_class: type, previous: StateSpec | None) -> None:
        """Remember what to go back to."""
        self._optimizer_class: type | None = optimizer_class
        self._previous = previous

    def remove(self) -> None:
        """Put back what was registered before; further calls do nothing."""
        if self._optimizer_class is None:
            return
        if self._previous is None:
            delattr(self._optimizer_class, _ATTRIBUTE)
        else:
            setattr(self._optimizer_class, _ATTRIBUTE, staticmethod(self._previous))
        self._optimizer_class = None


def register_state_spec(optimizer_class: type, spec: StateSpec) -> StateSpecHandle:
    """Declare how the state of an optimizer class (and its subclasses) follows its parameters.

    It is asked for state tensors of sharded parameters that have neither the parameter's shape nor
    no axes at all. Without an answer, such a state can be loaded on the same topology only.

    Example:
        An optimizer that keeps one value for each row of a matrix, of shape ``(rows, 1)``::

            register_state_spec(RowWise, lambda name, shape, ndim: (0, None))

    Returns:
        A handle whose ``remove()`` takes the declaration back.
    """
    previous = optimizer_class.__dict__.get(_ATTRIBUTE)
    if isinstance(previous, staticmethod):
        previous = previous.__func__
    setattr(optimizer_class, _ATTRIBUTE, staticmethod(spec))
    return StateSpecHandle(optimizer_class, previous)


def find_state_spec(optimizer: Any) -> StateSpec | None:
    """Return the spec registered for the optimizer's class or the nearest parent."""
    spec: StateSpec | None = getattr(type(optimizer), _ATTRIBUTE, None)
    return spec


def spec_layout(
    spec: StateSpec | None, *, name: str, shape: tuple[int, ...], layout: TensorLayout
) -> TensorLayout | None:
    """Return the layout of a state as its spec says, or None if the spec does not know it.

    Args:
        spec: What was registered.
        name: Name of the state.
        shape: Its local or global shape; only axes that follow no axis are read from it.
        layout: The parameter's layout.

    Raises:
        InvalidShardingError: The spec's answer does not fit state or parameter.
    """
    flat = any(part.flat_range is not None or part.order is not None for part in layout.parts)
    if spec is None or flat or not layout.parts:
        return None
    axes = spec(name, layout.global_shape, len(shape))
    if axes is None:
        return None
    ndim = len(layout.global_shape)
    if len(axes) != len(shape) or any(a is not None and not 0 <= a < ndim for a in axes):
        raise InvalidShardingError(
            f"The state spec for {name!r} returned axes {tuple(axes)} for a state of shape {shape} "
            f"and a parameter of shape {layout.global_shape}."
        )
    parts: dict[Box, Part] = {}
    for part in layout.parts:
        source = part.source or Box(tuple(0 for _ in part.box.shape), part.box.shape)
        box = _project(part.box, axes, shape)
        parts.setdefault(box, Part(box=box, source=_project(source, axes, shape)))
    rank, _ = current_rank()
    covers = set(axes) >= set(layout.sharded_axes)
    return replace(
        layout,
        global_shape=_pick(layout.global_shape, axes, shape),
        local_shape=_pick(layout.local_shape, axes, shape),
        parts=tuple(parts.values()),
        replica_id=layout.replica_id if covers else rank,
        writer=layout.writer if covers else "first",
    )


def _pick(sizes: tuple[int, ...], axes: Axes, shape: tuple[int, ...]) -> tuple[int, ...]:
    pairs = zip(axes, shape, strict=True)
    return tuple(own if axis is None else sizes[axis] for axis, own in pairs)


def _project(box: Box, axes: Axes, shape: tuple[int, ...]) -> Box:
    zeros = tuple(0 for _ in shape)
    return Box(_pick(box.offset, axes, zeros), _pick(box.shape, axes, shape))
