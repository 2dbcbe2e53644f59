"""A program that trains and evaluates in loops, saves at many moments, and resumes from each.

Here: the program, its datasets and samplers. Not here: tests. Runs in the test process or on ranks
of ``tests.multiprocess._world``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate import DataLoaderConfiguration
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    get_worker_info,
)

from accelerate_dist_ckpt import DistCkptIO
from tests._samples import IS_SOAK
from tests.accelerate._jobs import new_accelerator

EPOCHS = 3


class Numbers(Dataset[torch.Tensor]):
    """The numbers from 0 on."""

    def __init__(self, length: int = 12) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


class Noisy(Numbers):
    """Numbers with noise from four generators, drawn when an item is asked for."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = np.random.default_rng(seed)

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(()) + random.random() + np.random.rand() + self.rng.random()  # noqa: S311 - all are looked at
        return index + noise.float() / 10


class OwnSampler(Sampler[int]):
    """Draws from a generator of numpy, at its first index."""

    def __init__(self, seed: int, length: int = 12) -> None:
        self.rng, self.length = np.random.default_rng(seed), length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        yield from self.rng.permutation(self.length).tolist()


class EagerBatches(Sampler[list[int]]):
    """A batch sampler without a sampler, which draws as soon as it is iterated over."""

    def __init__(self, seed: int) -> None:
        self.batch_size, self.drop_last = 2, False
        self.mine = random.Random(seed)  # noqa: S311 - no cryptography

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(12).tolist()
        self.mine.shuffle(order)
        return iter([order[i : i + 2] for i in range(0, 12, 2)])


class CountedSampler(Sampler[int]):
    """Seeds itself from its epoch, as DistributedSampler does."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        yield from torch.randperm(12, generator=generator).tolist()


class Stream(IterableDataset[torch.Tensor]):
    """Draws its order from the global generator when it begins; each worker takes its part."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        step, first = (1, 0) if worker is None else (worker.num_workers, worker.id)
        for index in torch.randperm(12)[first::step]:
            yield index.float()


class OwnStream(Stream):
    """Draws its order from a generator of its own."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in torch.randperm(12, generator=self.generator):
            yield index.float()


class RestoringStream(IterableDataset[torch.Tensor]):
    """Is its own iterator and has a state of its own, as stateful loaders like it."""

    def __init__(self) -> None:
        self.epoch, self.position = -1, 0

    def __iter__(self) -> RestoringStream:
        if self.position in {0, 12}:
            self.epoch, self.position = self.epoch + 1, 0
        return self

    def __next__(self) -> torch.Tensor:
        if self.position == 12:
            raise StopIteration
        self.position += 1
        return torch.tensor(100.0 * self.epoch + self.position)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


def shuffled(seed: int, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(), batch_size=2, shuffle=True, **kwargs)


def uneven(seed: int, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(11), batch_size=2, shuffle=True, **kwargs)


def with_generator(seed: int, **kwargs: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(Numbers(), batch_size=2, shuffle=True, generator=generator, **kwargs)


def with_replacement(seed: int, **kwargs: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)  # is drawn from again after 32 samples
    sampler = RandomSampler(Numbers(), replacement=True, num_samples=72, generator=generator)
    return DataLoader(Numbers(), batch_size=12, sampler=sampler, **kwargs)


def of_torchdata(seed: int, **kwargs: Any) -> DataLoader[Any]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    made: DataLoader[Any] = StatefulDataLoader(Numbers(), batch_size=2, shuffle=True, **kwargs)
    return made


Make = Callable[..., DataLoader[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is iterated over, and how."""

    id: str
    make: Make = shuffled
    stateful: bool = False
    workers: int = 0
    persistent: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    batches: int = 6
    in_eval: bool = True
    noise: bool = True
    moments: tuple[str, ...] = field(default_factory=lambda: MOMENTS)


FEW_MOMENTS = ("0 begin", "0 step 1", "0 after eval", "1 step 2", "1 end")
ALL_MOMENTS = (
    "0 begin",
    "0 step 0",
    "0 step 1",
    "0 eval 0",
    "0 after eval",
    "0 last",
    "0 end",
    "1 step 3",
    "1 eval 0",
    "1 last",
    "1 end",
)
MOMENTS = ALL_MOMENTS if IS_SOAK else ("0 step 1", "0 eval 0", "0 last", "0 end", "1 step 3")


class Program:
    """One run; ``seen`` is all that it ever draws.

    Args:
        case: Which loaders.
        seed: Of all generators.
    """

    def __init__(self, case: Case, seed: int) -> None:
        self.case = case
        config = DataLoaderConfiguration(use_stateful_dataloader=case.stateful, **case.config)
        self.accelerator = new_accelerator(dataloader_config=config)
        self.accelerator.register_checkpoint_io(DistCkptIO())
        self.seed(seed)
        more: dict[str, Any] = {}
        if case.workers:
            more = {"num_workers": case.workers, "persistent_workers": case.persistent}
        loaders = (case.make(seed, **more), case.make(seed + 1, **more))
        self.train, self.eval = self.accelerator.prepare(*loaders)
        self.batches = case.batches // (1 if case.config.get("split_batches") else self.ranks)
        self.seen: list[Any] = []
        self.path = ""
        self.marks: dict[str, int] = {}

    @property
    def ranks(self) -> int:
        return self.accelerator.num_processes

    def seed(self, seed: int) -> None:
        seed = 10 * seed + self.accelerator.process_index
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    def run(self, path: str = "") -> Program:
        """Run from the begin; save at all moments if there is a path."""
        self.path = path
        self.at("0 begin")
        for epoch in range(EPOCHS):
            self.train_on(epoch)
        return self

    def resume(self, path: str, moment: str) -> Program:
        """Load what was saved at a moment, and run to the end."""
        self.accelerator.load_state(f"{path}/{moment}")
        epoch, place, *rest = moment.split()
        first, done = int(epoch), -1
        if place == "step":
            done = int(rest[0])
        elif place in {"eval", "after"}:
            done = 1
        elif place == "last":
            done = self.batches - 1
        if place == "eval":
            self.evaluate(first, int(rest[0]) + 1)
        elif (place, done) == ("step", 1):
            self.evaluate(first)
        # Accelerate's dispatcher fails where nothing is left to be sent.
        has_no_rest = self.case.stateful or "dispatch_batches" in self.case.config
        if place == "end" or (place == "last" and has_no_rest):
            first, done = first + 1, -1
        for epoch_number in range(first, EPOCHS):
            self.train_on(epoch_number, (done if epoch_number == first else -1) + 1)
        return self

    def train_on(self, epoch: int, done: int = 0) -> None:
        for index, batch in enumerate(self.rest_of(self.train, done), done):
            self.see("train", batch)
            self.at(f"{epoch} step {index}")
            if index == 1:
                self.evaluate(epoch)
            if index == self.batches - 1:
                self.at(f"{epoch} last")
        self.at(f"{epoch} end")

    def evaluate(self, epoch: int, done: int = 0) -> None:
        """Look at two batches of a loader that is never read to its end."""
        if not self.case.in_eval:
            return
        for index, batch in enumerate(self.rest_of(self.eval, done), done):
            self.see("eval", batch)
            self.at(f"{epoch} eval {index}")
            if index == 1:
                break
        self.at(f"{epoch} after eval")

    def rest_of(self, loader: Any, done: int) -> Any:
        if not done or self.case.stateful:
            return loader
        # Batches that rank 0 puts together are skipped before that, unless the dataset is iterable.
        is_joined = self.case.config.get("dispatch_batches")
        is_joined = is_joined and not isinstance(loader.dataset, IterableDataset)
        skipped = done * (self.ranks if is_joined else 1)
        return self.accelerator.skip_first_batches(loader, skipped)

    def see(self, what: str, batch: torch.Tensor) -> None:
        drawn = ()
        if self.case.noise:
            drawn = (float(torch.rand(())), random.random(), float(np.random.rand()))  # noqa: S311
        self.seen.append((what, batch.tolist(), *drawn))

    def at(self, moment: str) -> None:
        if self.path and moment in self.case.moments:
            self.accelerator.save_state(f"{self.path}/{moment}")
            self.marks[moment] = len(self.seen)
