"""Where the dataloaders are: epoch, order of the samples, and the draws that made that order.

Here: the wrapper around their ``__iter__``, the snapshot of a dataloader and its restoring. Not
here: skipping batches, which stays ``skip_first_batches``. Runs on every rank for itself.

In the middle of an epoch the generators have long moved on from the state that the order was drawn
from. So that state is noted when an iterator is made; a resumed iterator is made from it, and then
the generators go on from where they were saved.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from accelerate.data_loader import SeedableRandomSampler, SkipBatchSampler
from torch.utils.data import BatchSampler, IterableDataset

from accelerate_dist_ckpt.lifetime import before_batch, before_epoch
from accelerate_dist_ckpt.rng import host_state, set_host_state
from dist_ckpt.errors import AsyncSaveError
from dist_ckpt.preemption import Preempted

__all__ = ["restore_dataloader", "snapshot", "tracked_iteration"]

_EPOCH: Final = "_dist_ckpt_epoch"


class _Epoch:
    """The latest iteration over one sampler, whichever loaders share it."""

    def __init__(self) -> None:
        self.latest: object = None  # the latest iteration; None if it came to its end
        self.was_left = False  # with break, say
        self.loader: Callable[[], Any] = lambda: None
        self.start: dict[str, Any] = {}
        self.resume: dict[str, Any] | None = None

    def __reduce__(self) -> tuple[type[_Epoch], tuple[()]]:
        """A copy in a worker process or of the sampler begins with nothing noted."""
        return _Epoch, ()

    @contextlib.contextmanager
    def beginning(self, loader: Any, iteration: object) -> Iterator[None]:
        """Note the states that an iterator is made from; they are the saved ones in a resume."""
        resume, self.resume = self.resume, None
        if resume is not None and resume["was_left"] and not _is_skipping(loader):
            resume = None  # a new epoch, of a loader that is never read to its end
        before = host_state()
        if resume is not None:
            _set_generators(loader, resume["generators"])
            set_host_state(resume["random"] or before)
        self.start = {"random": host_state(), "generators": _generator_states(loader)}
        self.latest, self.was_left, self.loader = iteration, False, weakref.ref(loader)
        try:
            yield
        finally:
            if resume is not None and resume["random"] is not None:
                set_host_state(before)

    def end(self, iteration: object, *, was_left: bool) -> None:
        """Note how an iteration ended, unless another one has begun since."""
        if self.latest is iteration:
            self.latest = iteration if was_left else None
            self.was_left = was_left

    def is_under_way(self) -> bool:
        """Whether batches of the epoch are still to come."""
        at_end = getattr(self.loader(), "end_of_dataloader", False)
        return self.latest is not None and not at_end


def tracked_iteration(native: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    """Return an ``__iter__`` that notes where its epoch began, and raises failures of saves."""

    def iterate(self: Any) -> Iterator[Any]:
        before_epoch()
        epoch = _epoch_of(self)
        iterator = native(self)
        if epoch is None:
            yield from _with_polls(iterator)
            return
        this, nothing = object(), object()
        with epoch.beginning(self, this):
            first = next(iterator, nothing)
        try:
            if first is not nothing:
                yield first
                yield from _with_polls(iterator)
        except (GeneratorExit, AsyncSaveError, Preempted):
            epoch.end(this, was_left=True)
            raise
        epoch.end(this, was_left=False)

    return iterate


def _with_polls(iterator: Iterator[Any]) -> Iterator[Any]:
    """Raise failures of saves before the next batch is taken, so that none is lost."""
    while True:
        before_batch()
        try:
            batch = next(iterator)
        except StopIteration:
            return
        yield batch


def snapshot(loader: Any) -> dict[str, Any]:
    """Return where a prepared dataloader is."""
    state: dict[str, Any] = {
        "iteration": getattr(loader, "iteration", 0),
        "generators": _generator_states(loader),
        "resume": None,
    }
    epoch = _epoch_of(loader)
    if epoch is not None and epoch.is_under_way():
        state["iteration"] = getattr(epoch.loader(), "iteration", state["iteration"])
        state["resume"] = {**epoch.start, "was_left": epoch.was_left}
    sampler = _sampler(loader)
    if isinstance(sampler, SeedableRandomSampler):
        state["sampler"] = {"seed": sampler.initial_seed, "epoch": sampler.epoch}
    if getattr(loader, "use_stateful_dataloader", False):
        state["stateful"] = loader.state_dict()
    return state


def restore_dataloader(loader: Any, state: dict[str, Any], *, own: bool) -> None:
    """Put a dataloader back.

    Args:
        loader: As prepared by Accelerate.
        state: What ``snapshot`` returned.
        own: Whether this same rank of an equally large world saved it. Otherwise only what is the
            same on all ranks is used.
    """
    if hasattr(loader, "iteration"):
        loader.iteration = state["iteration"]
    sampler = _sampler(loader)
    if isinstance(sampler, SeedableRandomSampler) and "sampler" in state:
        sampler.initial_seed = state["sampler"]["seed"]
        sampler.set_epoch(state["sampler"]["epoch"])
    _set_generators(loader, state["generators"])
    epoch, resume = _epoch_of(loader), state["resume"]
    if epoch is not None:
        epoch.latest = None
        epoch.resume = resume if own or resume is None else {**resume, "random": None}
    if own and "stateful" in state and getattr(loader, "use_stateful_dataloader", False):
        loader.load_state_dict(state["stateful"])


def _batches(loader: Any) -> Any:
    """Return what yields a loader's batches of indices."""
    is_sampler = isinstance(loader.sampler, BatchSampler) or loader.batch_sampler is None
    return loader.sampler if is_sampler else loader.batch_sampler


def _is_skipping(loader: Any) -> bool:
    """Whether ``skip_first_batches`` made this loader."""
    return isinstance(_batches(loader), SkipBatchSampler) or getattr(loader, "skip_batches", 0) > 0


def _sampler(loader: Any) -> Any:
    """Return the innermost sampler, beneath the cutting by rank and the skipping of batches."""
    outer = _batches(loader)
    while (inner := getattr(outer, "batch_sampler", None)) is not None:
        outer = inner
    return getattr(outer, "sampler", outer)


def _epoch_of(loader: Any) -> _Epoch | None:
    """Return the notes on the sampler (or the iterable dataset) that ``loader`` draws from.

    They hang on that object because ``skip_first_batches`` makes a new loader around it.
    """
    iterable = isinstance(loader.dataset, IterableDataset)
    anchor = loader.dataset if iterable else _sampler(loader)
    attributes = getattr(anchor, "__dict__", None)
    if attributes is None:
        return None
    found: _Epoch = attributes.setdefault(_EPOCH, _Epoch())
    return found


def _generators(loader: Any) -> dict[str, torch.Generator]:
    found = {
        "sampler": getattr(_sampler(loader), "generator", None),
        "loader": getattr(loader, "generator", None),
        "dataset": getattr(loader.dataset, "generator", None),
    }
    return {name: one for name, one in found.items() if isinstance(one, torch.Generator)}


def _set_generators(loader: Any, states: dict[str, torch.Tensor]) -> None:
    for name, generator in _generators(loader).items():
        if name in states:
            generator.set_state(states[name])


def _generator_states(loader: Any) -> dict[str, torch.Tensor]:
    return {name: one.get_state() for name, one in _generators(loader).items()}
