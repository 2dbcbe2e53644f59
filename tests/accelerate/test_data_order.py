"""The order of samples, and all that is drawn beside them, is that of the uninterrupted run."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from torch.utils.data import DataLoader, Sampler

from accelerate_dist_ckpt import DistCkptIO
from accelerate_dist_ckpt.dataloaders import restore_dataloader, snapshot
from tests.accelerate._jobs import new_accelerator
from tests.accelerate._orders import (
    FEW_MOMENTS,
    Case,
    CountedSampler,
    EagerBatches,
    Noisy,
    Numbers,
    OwnSampler,
    OwnStream,
    Program,
    RestoringStream,
    Stream,
    of_torchdata,
    uneven,
    with_generator,
    with_replacement,
)
from tests.multiprocess._world import run_ranks

pytestmark = [
    pytest.mark.sampled,
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]


def noisy(seed: int, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(Noisy(seed), batch_size=2, shuffle=True, **kwargs)


def own_sampler(seed: int, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(), batch_size=2, sampler=OwnSampler(seed), **kwargs)


def own_batches(seed: int, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(), batch_sampler=EagerBatches(seed), **kwargs)


def counted(seed: int, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(), batch_size=2, sampler=CountedSampler(), **kwargs)


def stream(seed: int, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(Stream(), batch_size=2, **kwargs)


def own_stream(seed: int, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(OwnStream(seed), batch_size=2, **kwargs)


def restoring(seed: int, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(RestoringStream(), batch_size=2, **kwargs)


SEEDABLE = {"use_seedable_sampler": True}
CASES = (
    Case(id="shuffle"),
    Case(id="stateful", stateful=True),
    Case(id="generator", make=with_generator),
    Case(id="generator, stateful", make=with_generator, stateful=True),
    Case(id="seedable", config=SEEDABLE),
    Case(id="seedable, stateful", config=SEEDABLE, stateful=True),
    Case(id="replacement", make=with_replacement),
    Case(id="replacement, stateful", make=with_replacement, stateful=True),
    Case(id="noise in this process", make=noisy),
    Case(id="noise in this process, stateful", make=noisy, stateful=True),
    Case(id="own sampler", make=own_sampler),
    Case(id="own sampler, stateful", make=own_sampler, stateful=True),
    Case(id="own batch sampler", make=own_batches),
    Case(id="own batch sampler, stateful", make=own_batches, stateful=True),
    Case(id="sampler with epochs", make=counted),
    Case(id="sampler with epochs, stateful", make=counted, stateful=True),
    Case(id="loader of torchdata", make=of_torchdata, stateful=True),
    Case(id="loader of torchdata, not kept", make=of_torchdata),
    Case(id="iterable", make=stream),
    Case(id="iterable, stateful", make=stream, stateful=True),
    Case(id="iterable with generator", make=own_stream),
    Case(id="iterable with generator, stateful", make=own_stream, stateful=True),
    Case(id="iterable with state, stateful", make=restoring, stateful=True, in_eval=False),
)
WORKERS = (
    Case(id="workers", workers=1, moments=FEW_MOMENTS),
    Case(id="workers, stateful", workers=2, stateful=True, moments=FEW_MOMENTS),
    Case(id="persistent", workers=1, persistent=True, moments=FEW_MOMENTS),
    Case(id="persistent, stateful", workers=1, persistent=True, stateful=True, moments=FEW_MOMENTS),
    Case(
        id="persistent, generator",
        make=with_generator,
        workers=1,
        persistent=True,
        in_eval=False,
        moments=("1 step 2", "1 end"),
    ),
    Case(
        id="iterable in workers",
        make=stream,
        workers=2,
        in_eval=False,
        moments=("0 begin", "1 step 2"),
    ),
    Case(
        id="own batch sampler in workers",
        make=own_batches,
        workers=1,
        stateful=True,
        in_eval=False,
        moments=("0 begin", "0 step 1", "1 step 2"),
    ),
)
DISPATCH = {"dispatch_batches": True}
RANKS = (
    Case(id="ddp"),
    Case(id="stateful", stateful=True),
    Case(id="seedable", config=SEEDABLE),
    Case(id="seedable, stateful", config=SEEDABLE, stateful=True),
    Case(id="own sampler", make=own_sampler),
    Case(id="sampler with epochs", make=counted),
    Case(id="noise in this process", make=noisy),
    Case(id="dispatched", config=DISPATCH),
    Case(id="dispatched, stateful", config=DISPATCH, stateful=True),
    Case(id="split", config={"split_batches": True}),
    Case(id="uneven", make=uneven),
    Case(id="uneven, stateful", make=uneven, config={"even_batches": False}, stateful=True),
    Case(id="iterable", make=stream, config=DISPATCH),
    Case(id="iterable, stateful", make=stream, config=DISPATCH, stateful=True),
    Case(id="iterable with generator", make=own_stream, config={"dispatch_batches": False}),
    Case(id="persistent", workers=1, persistent=True, in_eval=False, moments=("1 step 1",)),
)


def differences(straight: Program, case: Case, path: str) -> dict[str, Any]:
    """Return what each resume saw, and what it should have seen, if that is not the same."""
    found = {}
    for index, (moment, mark) in enumerate(straight.marks.items()):
        resumed = Program(case, seed=11 + index).resume(path, moment)
        if resumed.seen != straight.seen[mark:]:
            found[moment] = {"resumed": resumed.seen, "straight": straight.seen[mark:]}
    return found


def without_us(monkeypatch: pytest.MonkeyPatch) -> None:
    for cls in (DataLoaderShard, DataLoaderDispatcher):
        for name in ("__init__", "__iter__"):
            native = getattr(cls, name)
            monkeypatch.setattr(cls, name, getattr(native, "_dist_ckpt_native", native))


@pytest.mark.parametrize("case", CASES + WORKERS, ids=lambda case: case.id)
def test_resumes_see_what_the_uninterrupted_run_sees(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From each moment on: batches, evaluations and random numbers; and as without us at all."""
    path = str(tmp_path)
    straight = Program(case, seed=1).run(path)
    found = differences(straight, case, path)

    assert list(found) == []
    without_us(monkeypatch)
    assert Program(case, seed=1).run().seen == straight.seen


class Drawing(Sampler[int]):
    """Draws from a generator of the process, and keeps what it drew."""

    def __init__(self) -> None:
        self.drawn: list[float] = []

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        self.drawn.append(random.random())  # noqa: S311 - an order
        yield from range(12)


@pytest.mark.parametrize("own", [True, False])
def test_a_rank_draws_again_only_what_it_drew_itself(own: bool) -> None:
    """What another rank drew from the generators of its process is not put into those of this one."""
    saved, restored, seeded = Drawing(), Drawing(), Drawing()
    random.seed(5)
    accelerator = new_accelerator()
    loaders = (DataLoader(Numbers(), batch_size=2, sampler=one) for one in (saved, restored))
    first, second = accelerator.prepare(*loaders)
    with accelerator.register_checkpoint_io(DistCkptIO()):
        iteration = iter(first)
        next(iteration)
        state = snapshot(first)
        random.seed(7)
        next(iter(seeded))
        random.seed(7)
        restore_dataloader(second, state, own=own)
        next(iter(second))
    assert restored.drawn == (saved if own else seeded).drawn


def many_ranks(rank: int, world_size: int, path: str) -> dict[str, Any]:
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
    found = {}
    for case in RANKS:
        place = f"{path}/{case.id}"
        straight = Program(case, seed=1).run(place)
        found[case.id] = differences(straight, case, place)
        found[case.id] |= {} if straight.marks else {"nothing": "saved"}
    return found


def test_ranks_see_what_the_uninterrupted_run_sees(tmp_path: Path) -> None:
    """Each rank gets its own part of the order, however the batches are cut and sent."""
    for found in run_ranks(many_ranks, 2, str(tmp_path)):
        assert {name: list(moments) for name, moments in found.items() if moments} == {}
