"""Which random numbers the order of a dataloader's samples is drawn from.

Here: the generators that hang on a dataloader, their states, and the watch on one iterable object
that lets a draw be noted or repeated. Not here: epochs and their resumption (``dataloaders``).
Runs on every rank for itself.
"""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import torch
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard, SkipBatchSampler
from torch.utils.data import BatchSampler, IterableDataset, IterDataPipe

from accelerate_dist_ckpt.rng import host_state, set_host_state

__all__ = ["Draw", "batches_of", "samplers_of", "set_draw", "source_of", "watched"]

_MOST_WRAPPERS: Final = 16  # objects may refer to each other in a circle


def batches_of(loader: Any) -> Any:
    """Return what yields a loader's batches of indices."""
    is_sampler = isinstance(loader.sampler, BatchSampler) or loader.batch_sampler is None
    return loader.sampler if is_sampler else loader.batch_sampler


def samplers_of(loader: Any) -> list[Any]:
    """Return batch samplers and samplers of a loader, from the outermost to the innermost."""
    return _nested(batches_of(loader), ("batch_sampler", "sampler"))


def source_of(dataset: Any, batches: Any, num_workers: int) -> Any:
    """Return the object of the user's whose iteration draws the order; None if it is not here.

    Args:
        dataset: The loader's.
        batches: What yields the loader's batches of indices.
        num_workers: Worker processes iterate over iterable datasets themselves.
    """
    if not isinstance(dataset, IterableDataset):
        while isinstance(batches, BatchSamplerShard | SkipBatchSampler):
            batches = batches.batch_sampler
        return batches
    while isinstance(dataset, IterableDatasetShard):
        dataset = dataset.dataset
    return None if num_workers > 0 or isinstance(dataset, IterDataPipe) else dataset


def _nested(outermost: Any, names: tuple[str, ...]) -> list[Any]:
    found: list[Any] = []
    inner = outermost
    while inner is not None and len(found) < _MOST_WRAPPERS:
        found.append(inner)
        values = (getattr(inner, name, None) for name in names)
        inner = next((value for value in values if value is not None), None)
    return found


class Draw:
    """The states of all generators before something is drawn, in this process and by a loader."""

    def __init__(self, loader: Any) -> None:
        """Take the states of now."""
        self._loader = loader
        self._host = host_state()
        self._own = {name: _state(one) for name, one in _generators(loader).items()}

    def states(self) -> dict[str, Any]:
        """Return them."""
        return {"random": self._host, "generators": self._own}

    def changes(self) -> dict[str, Any]:
        """Return those of them that something was drawn from since; empty if nothing was."""
        now = Draw(self._loader)
        host, own = _differing(self._host, now._host), _differing(self._own, now._own)
        return {"random": host, "generators": own} if host or own else {}

    def put_back(self) -> None:
        """Set all generators to these states."""
        set_draw(self._loader, self.states())

    def put_back_host(self) -> None:
        """Set the generators that are not the loader's."""
        set_host_state(self._host)


def set_draw(loader: Any, states: dict[str, Any], *, but: str | None = None) -> None:
    """Set generators to states that were noted.

    Args:
        loader: Whose generators are meant.
        states: Of ``Draw.states`` or ``Draw.changes``.
        but: How the names of those begin that are left as they are.
    """
    set_host_state(states["random"] or {})
    generators = _generators(loader)
    kept = {id(one) for name, one in generators.items() if but and name.startswith(but)}
    for name, generator in generators.items():
        if name in states["generators"] and id(generator) not in kept:
            _set_state(generator, states["generators"][name])


def _differing(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    return {
        name: state for name, state in before.items() if name in now and not _same(state, now[name])
    }


def _generators(loader: Any) -> dict[str, Any]:
    """Return the generators that are attributes of a loader, its samplers and datasets.

    The innermost sampler and dataset have the plain names: what Accelerate puts around them differs
    between a loader, what ``skip_first_batches`` makes of it, and other numbers of ranks.
    """
    places: dict[str, Any] = {}
    for depth, sampler in enumerate(reversed(samplers_of(loader))):
        places["sampler" if depth == 0 else f"sampler+{depth}"] = sampler
    for depth, dataset in enumerate(reversed(_nested(loader.dataset, ("dataset",)))):
        places["dataset" if depth == 0 else f"dataset+{depth}"] = dataset
    found: dict[str, Any] = {}
    own = getattr(loader, "generator", None)
    if _is_generator(own):
        found["loader"] = own
    for place, value in places.items():
        attributes = {"generator": getattr(value, "generator", None)}
        attributes |= getattr(value, "__dict__", {})
        for name, one in attributes.items():
            if _is_generator(one):
                found[place if name == "generator" else f"{place}.{name}"] = one
    return found


def _is_generator(value: Any) -> bool:
    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    return isinstance(value, kinds) and not isinstance(value, random.SystemRandom)


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(value, b[key]) for key, value in a.items())
    if isinstance(a, tuple | list) and any(isinstance(one, np.ndarray) for one in a):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


# -- watching --------------------------------------------------------------------------------------

_Watch = Callable[[Callable[[], Iterator[Any]]], Iterator[Any]]
_WATCHES: dict[int, _Watch] = {}
_WATCHED: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def watched(target: Any, watch: _Watch) -> Iterator[None]:
    """Let ``watch`` make the iterators of one object, for as long as the context is open.

    Python looks ``__iter__`` up on the class, so the object gets another class for that time.
    Objects whose class cannot be changed, a list say, are not watched.

    Args:
        target: What is iterated over.
        watch: Gets the object's own way to make an iterator, and returns the iterator to use.
    """
    cls = type(target)
    try:
        if id(target) in _WATCHES:  # an iteration within the beginning of another one
            raise TypeError
        target.__class__ = _watched_class(cls)
    except (TypeError, AttributeError):
        yield
        return
    _WATCHES[id(target)] = watch
    try:
        yield
    finally:
        del _WATCHES[id(target)]
        target.__class__ = cls


def _watched_class(cls: type) -> type:
    known = _WATCHED.get(cls)
    if known is not None:
        return known
    native: Any = getattr(cls, "__iter__")  # noqa: B009 - of any class

    def iterate(self: Any) -> Iterator[Any]:
        watch = _WATCHES.get(id(self))
        iterator: Iterator[Any] = native(self) if watch is None else watch(lambda: native(self))
        return iterator

    def reduce(self: Any, protocol: Any) -> Any:
        """A copy is of the object's own class."""
        ours = type(self)
        self.__class__ = cls
        try:
            return self.__reduce_ex__(protocol)
        finally:
            self.__class__ = ours

    space = {
        "__slots__": (),
        "__iter__": iterate,
        "__reduce_ex__": reduce,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    made: type = type(cls)(cls.__name__, (cls,), space)
    _WATCHED[cls] = made
    return made
