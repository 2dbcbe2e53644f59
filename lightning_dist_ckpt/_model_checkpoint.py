"""``ModelCheckpoint`` while saves are in flight: names, links, loggers, and what it remembers.

Here: the methods that it gets for the time of one fit, by a subclass of its own class, and its
memory. Not here: when (``_fit_saves``), the order of file operations (``_pending``). On every rank,
in the thread that trains.

Lightning's callback acts as if a save were done when ``Trainer.save_checkpoint`` returns.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any, Literal

__all__ = [
    "REPLACED",
    "Memory",
    "Outcome",
    "forget_name",
    "is_lightnings",
    "still_needed",
    "take_back",
    "unwatch",
    "watch",
]

_TOP = (
    "best_k_models",
    "best_model_path",
    "best_model_score",
    "current_score",
    "kth_best_model_path",
    "kth_value",
)
_NAMES = {"top": _TOP, "last": ("last_model_path",)}
_LAST_SAVED = ("_last_checkpoint_saved", "_last_global_step_saved")


class Outcome:
    """How a save ended.

    Attributes:
        has_failed: Whether it has ended, and is not there.
        is_good: Whether it has ended, and is there.
    """

    def __init__(self) -> None:
        """Not yet."""
        self.has_failed, self.is_good = False, False

    def end(self, failure: BaseException | None) -> None:
        """Note how the save ended, from any thread. The first time counts."""
        if not (self.has_failed or self.is_good):
            self.has_failed, self.is_good = failure is not None, failure is None


class Memory:
    """What a callback knew before it asked for a save, or for a link to one.

    Args:
        callback: The callback.
        kind: Which of its checkpoints it is about to save.

    Attributes:
        outcome: How the save ended.
        owner: Equal for saves that replace each other.
        path: Where the checkpoint or the link to it shall be.
    """

    def __init__(self, callback: Any, kind: Literal["top", "last"]) -> None:
        """Take a copy of what it knows."""
        self.callback, self.owner = callback, (id(callback), kind)
        self.outcome = Outcome()
        values = vars(callback)
        self._before = {name: copy.copy(values[name]) for name in _NAMES[kind] if name in values}
        self._last_saved = {name: values[name] for name in _LAST_SAVED if name in values}
        self.path = ""

    def of(self, path: str, outcome: Outcome) -> Memory:
        """Return one for ``path``, which will be there if a save ends well."""
        one = copy.copy(self)
        one.path, one.outcome = path, outcome
        return one

    def restore(self) -> None:
        """Let the callback know again what it knew."""
        vars(self.callback).update(self._before)
        self._forget_last_saved()

    def forget(self) -> None:
        """Let the callback not know this save any more, but all that came after."""
        forget_name(self.callback, self.path)
        self._forget_last_saved()

    def _forget_last_saved(self) -> None:
        if getattr(self.callback, _LAST_SAVED[0], None) == self.path:
            vars(self.callback).update(self._last_saved)


def forget_name(callback: Any, path: str) -> None:
    """Let a callback not know the checkpoint ``path``, but all others."""
    models = callback.best_k_models
    was_known = models.pop(path, None) is not None
    if was_known and models:
        best, worst = (min, max) if callback.mode == "min" else (max, min)
        callback.best_model_path = best(models, key=models.get)
        callback.best_model_score = models[callback.best_model_path]
        callback.kth_best_model_path = worst(models, key=models.get)
        callback.kth_value = models[callback.kth_best_model_path]
    elif was_known:
        callback.best_model_score = None
    for name in ("best_model_path", "kth_best_model_path", "last_model_path"):
        if getattr(callback, name) == path:
            setattr(callback, name, "")


def take_back(memories: Sequence[Memory]) -> None:
    """Let callbacks not know saves that failed.

    What a failed save would have replaced is still there: so who asked for no other since knows
    again what it knew before.

    Args:
        memories: Of saves in the order in which they were asked for.
    """
    good = set()
    for one in reversed(still_needed(memories)):
        if one.outcome.is_good:
            good.add(one.owner)
        elif one.outcome.has_failed and one.owner in good:
            one.forget()
        elif one.outcome.has_failed:
            one.restore()  # the oldest comes last


def still_needed(memories: Sequence[Memory]) -> list[Memory]:
    """Return those that ``take_back`` may want, in their order.

    Of those that came through, the newest is enough; what failed is made good by a later one to the
    same place.
    """
    needed: list[Memory] = []
    owners, places = set(), set()
    for one in reversed(memories):
        place = (one.owner, one.path)
        is_settled = one.outcome.is_good or one.outcome.has_failed
        if not (is_settled and place in places) and not (
            one.outcome.is_good and one.owner in owners
        ):
            needed.append(one)
        if one.outcome.is_good:
            owners.add(one.owner)
            places.add(place)
    return needed[::-1]


def watch(callback: Any) -> bool:
    """Give a callback of Lightning's ``ModelCheckpoint`` class, or a subclass, our methods.

    Returns:
        Whether it did: not to other callbacks, nor to one that another fit watches.
    """
    base = type(callback)
    if not is_lightnings(callback, "ModelCheckpoint") or _ours(callback) is not None:
        return False
    own = {name: value for name, value in vars(_Watched).items() if name in _OVERRIDDEN}
    if base._save_checkpoint.__module__.partition(".")[0] not in _LIGHTNING:  # noqa: SLF001 - Lightning's
        del own["_save_checkpoint"]  # what a user's own does comes in its order
    names = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    callback.__class__ = type(base.__name__, (base,), {**own, **names, "dist_ckpt_base": base})
    return True


def unwatch(callback: Any) -> None:
    """Give a callback that was watched its own class back; others are not touched."""
    if _ours(callback) is type(callback):
        callback.__class__ = type(callback).dist_ckpt_base


def _ours(callback: Any) -> Any:
    """Return the class that ``watch`` made for a callback; None if it did not."""
    made = (cls for cls in type(callback).__mro__ if "dist_ckpt_base" in vars(cls))
    return next(made, None)


_LIGHTNING = frozenset({"lightning", "pytorch_lightning"})
_OVERRIDDEN = frozenset(
    {
        "__reduce_ex__",
        "_link_checkpoint",
        "_save_checkpoint",
        "_save_last_checkpoint",
        "_save_topk_checkpoint",
        "file_exists",
    }
)
REPLACED = frozenset(
    {"__class__", "__reduce__", "__reduce_ex__", "_link_checkpoint", "file_exists"}
)
"""What a watched callback has of ours alone; the rest is called around its own."""


def is_lightnings(callback: object, name: str) -> bool:
    """Whether an object is of the class of this name in Lightning, under either of its names."""
    return any(
        base.__name__ == name and base.__module__.partition(".")[0] in _LIGHTNING
        for base in type(callback).__mro__
    )


def _saves(trainer: Any) -> Any:
    """Return the background saves of a Trainer's fit; None if there are none."""
    return getattr(getattr(trainer.strategy, "dist_ckpt_binding", None), "saves", None)


def _stock(callback: Any) -> Any:
    """Return the callback as Lightning has it: what ``super()`` would be."""
    return super(_ours(callback), callback)


@contextlib.contextmanager
def _remembering(callback: Any, trainer: Any, kind: Literal["top", "last"]) -> Iterator[None]:
    """Keep what the callback knows now with each save that it asks for in this block."""
    saves = _saves(trainer)
    if saves is None:
        yield
        return
    with saves.asked_by(Memory(callback, kind)):
        yield


class _Watched:
    """Methods for ``watch``; never an object of its own. ``self`` is a ``ModelCheckpoint``."""

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Pickle by the class that can be imported."""
        del protocol
        return object.__new__, (type(self).dist_ckpt_base,), self.__getstate__()

    def file_exists(self: Any, filepath: str, trainer: Any) -> bool:
        """Whether the name is taken, also by what is in flight. Collective."""
        saves = _saves(trainer)
        will_exist = None if saves is None else saves.pending.exists(filepath)
        if will_exist is None or not trainer.is_global_zero:
            return bool(_stock(self).file_exists(filepath, trainer))
        return bool(trainer.strategy.reduce_boolean_decision(will_exist, all=False))

    def _save_topk_checkpoint(self: Any, trainer: Any, monitor_candidates: dict[str, Any]) -> None:
        with _remembering(self, trainer, "top"):
            _stock(self)._save_topk_checkpoint(trainer, monitor_candidates)  # noqa: SLF001 - Lightning's

    def _save_last_checkpoint(self: Any, trainer: Any, monitor_candidates: dict[str, Any]) -> None:
        with _remembering(self, trainer, "last"):
            _stock(self)._save_last_checkpoint(trainer, monitor_candidates)  # noqa: SLF001 - Lightning's

    def _save_checkpoint(self: Any, trainer: Any, filepath: str) -> None:
        """Save, and tell the loggers when it is committed: they may upload it."""
        saves = _saves(trainer)
        if saves is None:
            _stock(self)._save_checkpoint(trainer, filepath)  # noqa: SLF001 - Lightning's
            return
        trainer.save_checkpoint(filepath, self.save_weights_only)
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath
        saves.tell_loggers_of(self)

    def _link_checkpoint(self: Any, trainer: Any, filepath: str, linkpath: str) -> None:
        """Let the link lead to a save when that is committed."""
        saves = _saves(trainer)
        if saves is None:
            _stock(self)._link_checkpoint(trainer, filepath, linkpath)  # noqa: SLF001 - Lightning's
        else:
            saves.link(filepath, linkpath)
