"""Position of the dataloaders: epoch, order of the samples, and the random draws of that order.

Here: the wrappers around their ``__init__`` and ``__iter__``, the snapshot of a dataloader and its
restoring. Not here: the generators and how draws are recorded (``draws``); skipping batches, which
remains ``skip_first_batches``. Runs on every rank, locally.

In the middle of an epoch the generators have left the states that its order was drawn from. So
states are recorded where something is drawn: when the iterator is made (``create``: the seeds of
worker processes), when the sampler begins (``iter``, ``first``), and before each batch that this
process fetches itself (``fetch``: the dataset's own draws). A resumed epoch draws from the same
states again; then all generators continue from their saved states.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    SeedableRandomSampler,
    SkipBatchSampler,
)
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler

from accelerate_dist_ckpt.draws import Draw, batches_of, samplers_of, set_draw, source_of, watched
from accelerate_dist_ckpt.lifetime import before_batch, before_epoch
from dist_ckpt.errors import AsyncSaveError
from dist_ckpt.preemption import Preempted

__all__ = [
    "note_training",
    "order_is_unknown",
    "restore_dataloader",
    "snapshot",
    "tracked_creation",
    "tracked_iteration",
]

_EPOCH: Final = "_dist_ckpt_epoch"
_IN_ORDER: Final = (BatchSampler, BatchSamplerShard, SkipBatchSampler, SequentialSampler)
_RUNNING: list[_Epoch] = []  # the innermost loop is the last


class _Epoch:
    """The latest iteration over one sampler, whichever loaders share it."""

    def __init__(self) -> None:
        self.latest: object = None  # the latest iteration; None if it has been exhausted
        self.was_left = False  # with break, say
        self.has_begun = False
        self.has_trained = False  # with Accelerator.backward
        self.is_resumed = False
        self.is_known = False  # whether the states at the sampler's beginning were recorded
        self.loader: Callable[[], Any] = lambda: None
        self.draws: dict[str, Any] = {}
        self.restored: dict[str, Any] | None = None  # a snapshot that no loop has resumed yet
        self.prepared: Callable[[], Any] = lambda: None  # the loader it was restored to
        self.draws_seed: bool | None = None  # whether its next iterator does, if not as usual

    def __reduce__(self) -> tuple[type[_Epoch], tuple[()]]:
        """Make copies (in worker processes, of the sampler) begin without records."""
        return _Epoch, ()

    @contextlib.contextmanager
    def beginning(self, loader: Any, iteration: object) -> Iterator[None]:
        """Record what an iteration draws before its first batch; repeat these draws in a resume."""
        repeat = self._repeat(loader)
        if repeat:  # its records stay valid: it may be saved again
            self.draws, self.is_known = dict(repeat["draws"]), True
        elif not _has_first_iterator(loader):  # else recorded when the loader was made
            self.draws, self.is_known = {}, False
        self.latest, self.was_left, self.loader = iteration, False, weakref.ref(loader)
        self.has_begun, self.has_trained = True, False
        self.is_resumed = repeat.get("has_begun", False)
        if self.is_resumed:
            loader.iteration = repeat["iteration"]
        source = source_of(loader.dataset, batches_of(loader), loader.num_workers)
        start = _Start(self, loader, source, repeat)
        with watched(loader.base_dataloader, start.create), watched(source, start.order):
            try:
                yield
            finally:
                start.go_on()

    def _repeat(self, loader: Any) -> dict[str, Any]:
        """Return the draws to repeat; empty if a new epoch begins."""
        restored, self.restored = self.restored, None
        repeat = (restored or {}).get("resume") or {}
        if repeat.get("is_over") and not _is_skipping(loader):
            return {}
        prepared = self.prepared()
        if repeat and prepared is not loader and _is_stateful(prepared):
            prepared.load_state_dict({})  # or its next epoch would begin in the middle
        return repeat

    def end(self, loader: Any, iteration: object, *, was_left: bool) -> None:
        """Record how an iteration ended, unless another one has begun since."""
        if self.latest is not iteration:
            return
        self.latest = iteration if was_left else None
        self.was_left = was_left
        prepared = self.prepared()
        if self.is_resumed and not was_left and prepared is not None:
            # The loader of skip_first_batches has counted the epoch; this one continues from there.
            prepared.iteration = max(prepared.iteration, loader.iteration)

    def is_under_way(self) -> bool:
        """Whether an uninterrupted program would get further batches of the epoch."""
        loader = self.loader()
        if self.latest is None or getattr(loader, "end_of_dataloader", False):
            return False
        # Natively a stateful loader continues where training stopped; an evaluation starts anew.
        return not self.was_left or (self.has_trained and _is_stateful(loader))


class _Start:
    """The beginning of one iteration: its draws are recorded, or repeated.

    Args:
        epoch: Where they are recorded.
        loader: The loader that is iterated over, or that is being made.
        source: The object whose iteration draws the order.
        repeat: The draws to repeat; empty in a new epoch.
    """

    def __init__(self, epoch: _Epoch, loader: Any, source: Any, repeat: dict[str, Any]) -> None:
        """Take the states to continue from."""
        self._epoch, self._loader, self._source = epoch, loader, source
        self._again: dict[str, Any] = repeat.get("draws", {})
        self._is_resume: bool = repeat.get("has_begun", False)
        self._before = Draw(loader) if repeat else None

    def create(self, native: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Make the iterator of the base dataloader."""
        epoch, loader = self._epoch, self._loader
        own = epoch.prepared() is loader
        seed: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if own and epoch.draws_seed is not None and self._before is None:
            seed = _seeded_as_before(loader.base_dataloader, draws=epoch.draws_seed)
        if own:
            epoch.draws_seed = None
        if self._before is not None and not self._is_resume:
            self._before = Draw(loader)  # Accelerate has made the ranks' generators equal by now
        if self._again.get("create"):
            set_draw(loader, self._again["create"])
        drawn = Draw(loader)
        with seed:
            iterator = native()
        if self._before is None:
            epoch.draws.setdefault("create", drawn.changes())
        elif self._is_resume:
            self._before.put_back_host()
        else:  # all of this was drawn when the loader was prepared
            self.go_on()
        return _Fetches(iterator, self)

    def order(self, native: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Make the iterator of the sampler, or of the iterable dataset."""
        iterator: Iterator[Any] = self._drawn("iter", native)
        self._epoch.is_known = True
        # An iterator that can restore itself must keep its own type.
        is_plain = iterator is not self._source and not hasattr(iterator, "state_dict")
        return self._from_first(iterator) if is_plain else iterator

    def _from_first(self, iterator: Iterator[Any]) -> Iterator[Any]:
        nothing = object()
        first = self._drawn("first", lambda: next(iterator, nothing))
        if first is not nothing:
            yield first
            yield from iterator

    def _drawn(self, name: str, draw: Callable[[], Any]) -> Any:
        before, again = Draw(self._loader), self._again.get(name)
        if again:
            set_draw(self._loader, again)
        value = draw()
        if again:
            before.put_back_host()
        elif not self._is_resume:
            self._epoch.draws[name] = before.changes()
        return value

    def before_fetch(self, index: int) -> None:
        """Record the states that a batch fetched in this process draws from, or restore them.

        The loader prefetches one batch: that one was fetched before the save, and the next one is
        the first that is fetched after it.
        """
        loader, epoch = self._loader, self._epoch
        per_batch = _fetches_per_batch(loader)
        skipped = loader.skip_batches * per_batch
        if self._before is not None and index >= skipped + per_batch:
            self.go_on()
        if self._before is not None and index >= skipped and self._again.get("fetch"):
            set_draw(loader, self._again["fetch"], but=_order_of(loader))
        if self._before is None and loader.num_workers == 0 and index % per_batch == 0:
            states = Draw(loader).states()
            if not epoch.is_known:  # the sampler begins now, in the iterator made at prepare()
                epoch.draws["first"], epoch.is_known = states, True
            epoch.draws["fetch"] = states

    def go_on(self) -> None:
        """Restore all generators to their saved states."""
        before, self._before = self._before, None
        if before is not None:
            before.put_back()


class _Fetches:
    """An iterator of a base dataloader that calls back before each batch is fetched."""

    def __init__(self, native: Iterator[Any], start: _Start) -> None:
        self._native, self._start, self._count = native, start, 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._start.before_fetch(self._count)
        self._count += 1
        return next(self._native)


def tracked_creation(native: Callable[..., None]) -> Callable[..., None]:
    """Return an ``__init__`` that records what stateful loaders draw when they are made.

    Accelerate reads the state of a stateful loader at once. That creates the iterator of its first
    epoch, whose worker processes then get their first indices.
    """

    def create(self: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_stateful_dataloader"):
            native(self, dataset, *args, **kwargs)
            return
        names = ("sampler", "batch_sampler", "generator")
        parts = types.SimpleNamespace(dataset=dataset, **{name: kwargs.get(name) for name in names})
        source = source_of(dataset, batches_of(parts), kwargs.get("num_workers", 0))
        epoch = _epoch_of(parts) or _Epoch()
        epoch.draws, epoch.is_known = {}, False
        drawn = Draw(parts)
        with watched(source, _Start(epoch, parts, source, {}).order):
            native(self, dataset, *args, **kwargs)
        epoch.draws["create"] = drawn.changes()

    return create


def tracked_iteration(native: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    """Return an ``__iter__`` that records how its epoch began, and raises failures of saves."""

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
        _RUNNING.append(epoch)
        try:
            if first is not nothing:
                yield first
                yield from _with_polls(iterator)
        except (GeneratorExit, AsyncSaveError, Preempted):
            epoch.end(self, this, was_left=True)
            raise
        finally:
            _RUNNING.remove(epoch)
        epoch.end(self, this, was_left=False)

    return iterate


def note_training() -> None:
    """Record a backward pass: the innermost loop trains."""
    if _RUNNING:
        _RUNNING[-1].has_trained = True


def _with_polls(iterator: Iterator[Any]) -> Iterator[Any]:
    """Raise failures of saves before the next batch is fetched, so that no batch is lost."""
    while True:
        before_batch()
        try:
            batch = next(iterator)
        except StopIteration:
            return
        yield batch


def snapshot(loader: Any) -> dict[str, Any]:
    """Return the position of a prepared dataloader."""
    epoch = _epoch_of(loader)
    generators = Draw(loader).states()["generators"]
    if epoch is not None and epoch.restored is not None:  # it has not moved since the load
        return {**epoch.restored, "generators": generators}
    state: dict[str, Any] = {
        "iteration": getattr(loader, "iteration", 0),
        "generators": generators,
        "epochs": tuple(_count_of(sampler) for sampler in reversed(samplers_of(loader))),
        "resume": None,
        "draws_seed": not _has_live_iterator(loader.base_dataloader),
    }
    if epoch is not None:
        state |= _snapshot_of_epoch(epoch, loader)
    sampler = samplers_of(loader)[-1:]
    if sampler and isinstance(sampler[0], SeedableRandomSampler):
        state["sampler"] = {"seed": sampler[0].initial_seed, "epoch": sampler[0].epoch}
    if _is_stateful(loader):
        state["stateful"] = loader.state_dict()
    return state


def _snapshot_of_epoch(epoch: _Epoch, loader: Any) -> dict[str, Any]:
    latest = loader if epoch.loader() is None else epoch.loader()
    state: dict[str, Any] = {}
    if epoch.draws_seed is not None and epoch.prepared() is loader:
        state["draws_seed"] = epoch.draws_seed
    draws = {name: states for name, states in epoch.draws.items() if states}
    is_over = epoch.has_begun and not epoch.is_under_way()
    is_at_end = getattr(latest, "end_of_dataloader", False)
    number = getattr(latest, "iteration", 0)
    if epoch.latest is not None:  # else the loader has counted it
        state["iteration"] = number + (is_at_end and not epoch.was_left)
    if epoch.has_begun or draws:
        state["resume"] = {
            "has_begun": epoch.has_begun,
            "is_over": is_over,
            "iteration": number if epoch.latest is not None else max(0, number - 1),
            "draws": draws,
        }
    return state


def restore_dataloader(loader: Any, state: dict[str, Any], *, own: bool) -> None:
    """Restore the position of a dataloader.

    Args:
        loader: As prepared by Accelerate.
        state: The result of ``snapshot``.
        own: Whether the same rank of an equally large world saved it. Otherwise only the parts that
            are equal on all ranks are used.
    """
    if hasattr(loader, "iteration"):
        loader.iteration = state["iteration"]
    samplers = samplers_of(loader)[::-1]
    if samplers and isinstance(samplers[0], SeedableRandomSampler) and "sampler" in state:
        samplers[0].initial_seed = state["sampler"]["seed"]
        samplers[0].set_epoch(state["sampler"]["epoch"])
    for sampler, count in zip(samplers, state.get("epochs", ()), strict=False):
        if count is not None and _count_of(sampler) is not None:
            sampler.set_epoch(count)
    set_draw(loader, {"random": {}, "generators": state["generators"]})
    resume = _resume_of(state, own=own)
    is_stateful = own and "stateful" in state and _is_stateful(loader)
    if is_stateful and (_goes_on(resume) or _restores_itself(loader)):
        loader.load_state_dict(state["stateful"])
    elif is_stateful and (resume or not _has_first_iterator(loader)):
        loader.load_state_dict({})  # starts a new epoch
    epoch = _epoch_of(loader)
    if epoch is not None:
        epoch.latest, epoch.has_begun = None, False
        epoch.draws_seed = state.get("draws_seed") if own else None
        epoch.prepared = weakref.ref(loader)
        epoch.restored = {**state, "resume": resume}


def _resume_of(state: dict[str, Any], *, own: bool) -> dict[str, Any] | None:
    """Return the epoch of a snapshot, as far as it is valid for this rank."""
    resume: dict[str, Any] | None = state["resume"]
    if resume is None:
        return None
    if own:
        return resume
    common = {
        name: {"random": {}, "generators": states["generators"]}
        for name, states in resume["draws"].items()
        if name != "fetch"
    }
    return {**resume, "draws": common, "is_over": resume["is_over"] or "stateful" in state}


def _goes_on(resume: dict[str, Any] | None) -> bool:
    return resume is not None and resume["has_begun"] and not resume["is_over"]


def order_is_unknown(loader: Any) -> bool:
    """Whether the draws of this epoch's order were not recorded, so no resume can repeat them."""
    epoch = _epoch_of(loader)
    if epoch is None or epoch.is_known or loader.num_workers == 0 or not _is_stateful(loader):
        return False
    if epoch.restored is not None or isinstance(loader.dataset, IterableDataset):
        return False
    is_in_order = all(type(sampler) in _IN_ORDER for sampler in samplers_of(loader))
    return not is_in_order and (epoch.is_under_way() or _has_first_iterator(loader))


def _is_skipping(loader: Any) -> bool:
    """Whether ``skip_first_batches`` made this loader."""
    return isinstance(batches_of(loader), SkipBatchSampler) or loader.skip_batches > 0


def _is_stateful(loader: Any) -> bool:
    return bool(getattr(loader, "use_stateful_dataloader", False))


def _restores_itself(loader: Any) -> bool:
    """Whether dataset or sampler have a state of their own that a stateful loader keeps."""
    return any(hasattr(part, "state_dict") for part in (loader.dataset, *samplers_of(loader)))


def _has_first_iterator(loader: Any) -> bool:
    """Whether a stateful loader still has the iterator that was made with it."""
    return bool(getattr(loader.base_dataloader, "_initial_iter_for_state_dict", False))


def _has_live_iterator(base: Any) -> bool:
    """Whether the next epoch uses an existing iterator, whose seed has been drawn."""
    if getattr(base, "_initial_iter_for_state_dict", False):
        return True
    is_kept = base.persistent_workers and base.num_workers > 0
    return bool(is_kept and getattr(base, "_iterator", None) is not None)


@contextlib.contextmanager
def _seeded_as_before(base: Any, *, draws: bool) -> Iterator[None]:
    """Make the creation of an iterator draw from its generator as often as in the saved run.

    A resumed process starts worker processes where the saved run had them already, and a restored
    stateful loader may create two iterators: each of them draws a seed.
    """
    own = base.generator
    if draws and not _has_live_iterator(base) and getattr(base, "next_iter_state", None) is None:
        yield  # as usual
        return
    spare = torch.Generator(device="cpu" if own is None else own.device)
    spare.set_state(torch.get_rng_state() if own is None else own.get_state())
    if draws:
        torch.empty((), dtype=torch.int64).random_(generator=own)
    base.generator = spare
    try:
        yield
    finally:
        base.generator = own


def _fetches_per_batch(loader: Any) -> int:
    """Return how many batches of the base dataloader make one batch of all ranks."""
    is_joined = isinstance(loader, DataLoaderDispatcher) and not loader.split_batches
    return int(loader.state.num_processes) if is_joined else 1


def _order_of(loader: Any) -> str:
    """Return the prefix of the names of the generators that the order is drawn from."""
    return "dataset" if isinstance(loader.dataset, IterableDataset) else "sampler"


def _count_of(sampler: Any) -> int | None:
    """Return the epoch that a sampler was set to."""
    count = getattr(sampler, "epoch", None)
    is_count = isinstance(count, int) and hasattr(sampler, "set_epoch")
    return count if is_count else None


def _epoch_of(loader: Any) -> _Epoch | None:
    """Return the records of the sampler (or the iterable dataset) that ``loader`` draws from.

    They are an attribute of that object, as ``skip_first_batches`` makes a new loader around it.
    """
    iterable = isinstance(loader.dataset, IterableDataset)
    anchors = [loader.dataset] if iterable else samplers_of(loader)[::-1]
    for anchor in anchors:
        attributes = getattr(anchor, "__dict__", None)
        if attributes is not None:
            epoch: _Epoch = attributes.setdefault(_EPOCH, _Epoch())
            return epoch
    return None
