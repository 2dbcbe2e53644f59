"""The random number generators that the order of a dataloader's samples is drawn from.

Here: the generators of a dataloader, their states, and the watch on one iterable object by which
draws are recorded or repeated. Not here: epochs and their resumption (``dataloaders``). Runs on
every rank, locally.
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

_MOST_WRAPPERS: Final = 16  # objects may refer to each other in a cycle


def batches_of(loader: Any) -> Any:
    """Return the object that yields a loader's batches of indices."""
    is_sampler = isinstance(loader.sampler, BatchSampler) or loader.batch_sampler is None
    return loader.sampler if is_sampler else loader.batch_sampler


def samplers_of(loader: Any) -> list[Any]:
    """Return batch samplers and samplers of a loader, from the outermost to the innermost."""
    return _nested(batches_of(loader), ("batch_sampler", "sampler"))


def source_of(dataset: Any, batches: Any, num_workers: int) -> Any:
    """Return the user's object whose iteration draws the order; None if it is in another process.

    Args:
        dataset: The loader's dataset.
        batches: The object that yields the loader's batches of indices.
        num_workers: Number of worker processes, which iterate over iterable datasets themselves.
    """
    if not isinstance(dataset, IterableDataset):
        while isinstance(batches, BatchSamplerShard | SkipBatchSampler):
            batches = batches.batch_sampler
        return batches
    while isinstance(dataset, IterableDatasetShard):
        dataset = dataset.dataset
    return None if num_workers > 0 or isinstance(dataset, IterDataPipe) else dataset


def _nested(outermost: Any, names: tuple[str, ...]) -> list[Any]:
    objects: list[Any] = []
    inner = outermost
    while inner is not None and len(objects) < _MOST_WRAPPERS:
        objects.append(inner)
        values = (getattr(inner, name, None) for name in names)
        inner = next((value for value in values if value is not None), None)
    return objects


class Draw:
    """The states of all generators before a draw: the process's global ones and a loader's own."""

    def __init__(self, loader: Any) -> None:
        """Take the present states."""
        self._loader = loader
        self._host = host_state()
        self._own = {name: _state(generator) for name, generator in _generators(loader).items()}

    def states(self) -> dict[str, Any]:
        """Return them."""
        return {"random": self._host, "generators": self._own}

    def changes(self) -> dict[str, Any]:
        """Return the states of the generators that were used since; empty if none was."""
        now = Draw(self._loader)
        host, own = _differing(self._host, now._host), _differing(self._own, now._own)
        return {"random": host, "generators": own} if host or own else {}

    def put_back(self) -> None:
        """Set all generators to these states."""
        set_draw(self._loader, self.states())

    def put_back_host(self) -> None:
        """Set the global generators to these states."""
        set_host_state(self._host)


def set_draw(loader: Any, states: dict[str, Any], *, but: str | None = None) -> None:
    """Set generators to recorded states.

    Args:
        loader: The loader with the generators.
        states: Of ``Draw.states`` or ``Draw.changes``.
        but: Prefix of the names of generators that are not set.
    """
    set_host_state(states["random"] or {})
    generators = _generators(loader)
    kept = {id(value) for name, value in generators.items() if but and name.startswith(but)}
    for name, generator in generators.items():
        if name in states["generators"] and id(generator) not in kept:
            _set_state(generator, states["generators"][name])


def _differing(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    return {
        name: state for name, state in before.items() if name in now and not _same(state, now[name])
    }


def _generators(loader: Any) -> dict[str, Any]:
    """Return the generators that are attributes of a loader, its samplers and datasets.

    The innermost sampler and dataset have the names without a number: Accelerate's wrappers around
    them differ between a loader, the loader of ``skip_first_batches``, and other numbers of ranks.
    """
    places: dict[str, Any] = {}
    for depth, sampler in enumerate(reversed(samplers_of(loader))):
        places["sampler" if depth == 0 else f"sampler+{depth}"] = sampler
    for depth, dataset in enumerate(reversed(_nested(loader.dataset, ("dataset",)))):
        places["dataset" if depth == 0 else f"dataset+{depth}"] = dataset
    generators: dict[str, Any] = {}
    own = getattr(loader, "generator", None)
    if _is_generator(own):
        generators["loader"] = own
    for place, value in places.items():
        attributes = {"generator": getattr(value, "generator", None)}
        attributes |= getattr(value, "__dict__", {})
        for name, attribute in attributes.items():
            if _is_generator(attribute):
                generators[place if name == "generator" else f"{place}.{name}"] = attribute
    return generators


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
    if isinstance(a, tuple | list) and any(isinstance(item, np.ndarray) for item in a):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


# -- watching --------------------------------------------------------------------------------------

_Watch = Callable[[Callable[[], Iterator[Any]]], Iterator[Any]]
_WATCHES: dict[int, _Watch] = {}
_WATCHED: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def watched(target: Any, watch: _Watch) -> Iterator[None]:
    """Let ``watch`` make the iterators of one object while the context is open.

    Python looks ``__iter__`` up on the class, so the object gets another class for that time.
    Objects whose class cannot be changed (a list, for example) are not watched.

    Args:
        target: The object that is iterated over.
        watch: Gets a function that makes the object's own iterator, returns the iterator to use.
    """
    cls = type(target)
    try:
        if id(target) in _WATCHES:  # an iteration inside the beginning of another one
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
        """Make copies have the object's own class."""
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
