"""Accelerate in one process: resume, objects, and what stands in a checkpoint."""

from __future__ import annotations

import collections
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, IterableDataset

from accelerate_dist_ckpt import DistCkptIO
from dist_ckpt import load_common_state_dict
from dist_ckpt.errors import (
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    MismatchError,
    UnsafeContentError,
)
from dist_ckpt.training_state import TrainingState, save_training_state
from tests.accelerate._jobs import (
    Net,
    add_loader,
    build,
    differing,
    new_accelerator,
    run_epochs,
    state_of,
    step,
    train,
)


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: S311 - the state is looked at


# -- resume ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """How the data is shuffled, and after how many of its 12 steps an epoch is interrupted."""

    id: str
    seedable: bool = False
    generator: bool = False
    after: int = 5
    workers: int = 0


CASES = (
    Case(id="global generator"),
    Case(id="own generator", generator=True),
    Case(id="seedable sampler", seedable=True),
    Case(id="first batch", after=1),
    Case(id="between epochs", after=12),
    Case(id="in the second epoch", after=15),
    Case(id="own generator, in the second epoch", generator=True, after=15),
    Case(id="worker processes", workers=1),
)


def shuffled_job(case: Case, *, seed: int) -> Any:
    config = DataLoaderConfiguration(use_seedable_sampler=case.seedable)
    job = build(seed=seed, dataloader_config=config)
    own = torch.Generator().manual_seed(seed) if case.generator else None
    torch.manual_seed(17)  # a script seeds once, at its beginning
    add_loader(job, generator=own, num_workers=case.workers)
    random.seed(seed)
    np.random.seed(seed)
    return job


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_resume_goes_on_as_if_nothing_had_been(case: Case, tmp_path: Path) -> None:
    """Data, dropout, losses, learning rate, generators and weights are equal to the bit."""
    path = str(tmp_path / "ckpt")
    job = shuffled_job(case, seed=1)
    straight = run_epochs(job, epochs=3, save_after=case.after, path=path)[case.after :]
    expected, drawn = state_of(job), draws()

    job = shuffled_job(case, seed=1)
    torch.manual_seed(1234)
    job.accelerator.load_state(path)
    epoch, skip = divmod(case.after, 12)
    resumed = []
    for e in range(epoch, 3):
        if case.seedable:
            job.loader.set_epoch(e)
        resumed += run_epochs(job, epochs=e + 1, first_epoch=e, skip=skip if e == epoch else 0)

    assert resumed == straight
    assert draws() == drawn
    assert differing(expected, state_of(job)) == []


def evaluate_a_little(job: Any, evaluation: Any) -> list[float]:
    seen = []
    for batch in evaluation:
        seen.append(float(batch))
        if len(seen) == 2:
            break
    return seen


def test_loaders_that_are_never_read_to_the_end_begin_anew(tmp_path: Path) -> None:
    """An evaluation on a few batches has a new order each time, after a resume as well."""
    runs = []
    for resume in (False, True):
        job = build()
        evaluation = job.accelerator.prepare(
            DataLoader(torch.arange(50.0), batch_size=1, shuffle=True)
        )
        seen = []
        if resume:
            job.accelerator.load_state(tmp_path / "ckpt")
        else:
            seen.append(evaluate_a_little(job, evaluation))
            job.accelerator.save_state(tmp_path / "ckpt")
        seen.append(evaluate_a_little(job, evaluation))
        runs.append((seen[-2:], draws()))

    assert runs[1][0][-1] == runs[0][0][-1] != runs[0][0][0]
    assert runs[1][1] == runs[0][1]


class Shuffled(IterableDataset):
    """An iterable dataset that draws its order from a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in torch.randperm(10, generator=self.generator):
            yield torch.full((4,), float(index))


def test_iterable_datasets_go_on_in_their_order(tmp_path: Path) -> None:
    """The dataset's generator is put back to the begin of the epoch, so that skipping fits."""
    job = build()
    job.loader = job.accelerator.prepare(DataLoader(Shuffled(), batch_size=1))
    straight = run_epochs(job, epochs=2, save_after=4, path=str(tmp_path / "ckpt"))[4:]

    job = build()
    job.loader = job.accelerator.prepare(DataLoader(Shuffled(), batch_size=1))
    job.accelerator.load_state(tmp_path / "ckpt")

    assert run_epochs(job, epochs=2, skip=4) == straight


def test_a_stop_in_mid_epoch_is_a_mid_epoch(tmp_path: Path) -> None:
    """Leaving the loop with break and saving then is the same as saving within the loop."""
    path = str(tmp_path / "ckpt")
    job = shuffled_job(CASES[0], seed=1)
    orders = []
    for batch in job.loader:
        orders.append(float(batch[0, 0]))
        if len(orders) == 4:
            break
    job.accelerator.save_state(path)

    job = shuffled_job(CASES[0], seed=1)
    job.accelerator.load_state(path)
    rest = [float(b[0, 0]) for b in job.accelerator.skip_first_batches(job.loader, 4)]

    assert sorted(orders + rest) == [4.0 * i for i in range(12)]


def test_accumulation_goes_on_at_its_step(tmp_path: Path) -> None:
    """The counter of batches is kept; saving amid an accumulation warns of the lost gradients."""
    job = build(gradient_accumulation_steps=4)
    train(job, 6)
    with pytest.warns(UserWarning, match="in the middle of accumulating gradients"):
        job.accelerator.save_state(tmp_path / "ckpt")
    train(job, 2)
    job.accelerator.save_state(tmp_path / "whole")  # nothing to warn of

    job = build(gradient_accumulation_steps=4)
    job.accelerator.load_state(tmp_path / "ckpt")

    assert job.accelerator.step == 6
    syncs = []
    for _ in range(2):
        step(job, torch.ones(2, 4))
        syncs.append(job.accelerator.sync_gradients)
    assert syncs == [False, True]


# -- objects ---------------------------------------------------------------------------------------


def two_of_each(seed: int) -> tuple[Any, list[Any], list[Any]]:
    accelerator = new_accelerator()
    accelerator.register_checkpoint_io(DistCkptIO())
    torch.manual_seed(seed)
    a, b = Net(), Net()
    over_both = torch.optim.AdamW([*a.up.parameters(), *b.down.parameters()], lr=0.1)
    rest = torch.optim.SGD([*b.up.parameters(), *a.down.parameters()], lr=0.01, momentum=0.9)
    prepared = accelerator.prepare(a, b, over_both, rest)
    return accelerator, list(prepared[:2]), list(prepared[2:])


def test_an_optimizer_may_hold_parameters_of_any_model(tmp_path: Path) -> None:
    """Two models, two optimizers across them."""
    accelerator, models, optimizers = two_of_each(0)
    for _ in range(2):
        for model in models:
            accelerator.backward(model(torch.ones(2, 4)))
        for optimizer in optimizers:
            optimizer.step()
    accelerator.save_state(tmp_path / "ckpt")

    _, others, loaded = others_state = two_of_each(9)
    others_state[0].load_state(tmp_path / "ckpt")

    for model, other in zip(models, others, strict=True):
        assert differing(dict(model.state_dict()), dict(other.state_dict())) == []
    for one, other in zip(optimizers, loaded, strict=True):
        assert one.state_dict().keys() == other.state_dict().keys()
        for index, state in one.state_dict()["state"].items():
            assert differing(state, other.state_dict()["state"][index]) == []


class Counter:
    """A custom object with a state of its own classes."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Opaque:
    """What can only be pickled."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque)

    __hash__ = None  # type: ignore[assignment]


def save_custom(path: Path, state: Any) -> None:
    job = build()
    job.accelerator.register_for_checkpointing(Counter(state))
    job.accelerator.save_state(path)


def load_custom(path: Path, *, io: DistCkptIO | None = None) -> Any:
    job = build(io=io)
    counter = Counter({})
    job.accelerator.register_for_checkpointing(counter)
    job.accelerator.load_state(path)
    return counter.state


def test_custom_objects_keep_their_types(tmp_path: Path) -> None:
    """Dicts of all kinds, tuples, numpy and tensors come back as what they were."""
    state = {
        "ordered": collections.OrderedDict(b=1, a=(2, 3)),
        "counts": collections.Counter("aab"),
        5: np.arange(3),
        "tensor": torch.ones(2, dtype=torch.bfloat16),
    }

    save_custom(tmp_path / "ckpt", state)
    found = load_custom(tmp_path / "ckpt")

    assert list(found) == ["ordered", "counts", 5, "tensor"]
    assert type(found["ordered"]) is collections.OrderedDict
    assert found["ordered"] == state["ordered"]
    assert type(found["counts"]) is collections.Counter
    assert np.array_equal(found[5], state[5])
    assert torch.equal(found["tensor"], state["tensor"])


def test_what_is_pickled_needs_trust(tmp_path: Path) -> None:
    """A pickled value is refused, with its place, unless allow_pickle=True."""
    save_custom(tmp_path / "ckpt", {"odd": Opaque()})

    with pytest.raises(UnsafeContentError, match=r"(?s)odd.*allow_pickle"):
        load_custom(tmp_path / "ckpt")
    assert load_custom(tmp_path / "ckpt", io=DistCkptIO(allow_pickle=True)) == {"odd": Opaque()}


def test_other_objects_than_saved_are_named(tmp_path: Path) -> None:
    """Counts of objects, parameters of an optimizer, names of a model: a MismatchError tells."""
    save_custom(tmp_path / "ckpt", {})
    with pytest.raises(MismatchError, match="custom objects: 1 stored, 0 registered"):
        build().accelerator.load_state(tmp_path / "ckpt")

    job = build()
    job.accelerator.save_state(tmp_path / "plain")
    accelerator = new_accelerator()
    accelerator.register_checkpoint_io(DistCkptIO())
    net = Net()
    accelerator.prepare(net, torch.optim.AdamW([*net.up.parameters()]))
    with pytest.raises(MismatchError, match=r"(?s)parameter groups.*not in the optimizer.*down"):
        accelerator.load_state(tmp_path / "plain")

    accelerator = new_accelerator()
    accelerator.register_checkpoint_io(DistCkptIO())
    accelerator.prepare(torch.nn.Linear(3, 3))
    with pytest.raises(MismatchError, match="weight"):
        accelerator.load_state(tmp_path / "plain")
    accelerator.load_state(tmp_path / "plain", strict=False)


def test_a_program_that_only_evaluates_needs_no_optimizer(tmp_path: Path) -> None:
    """As natively: fewer optimizers and schedulers than stored are fine."""
    job = build(seed=1)
    train(job, 1)
    job.accelerator.save_state(tmp_path / "ckpt")
    expected = job.model.state_dict()

    accelerator = new_accelerator()
    accelerator.register_checkpoint_io(DistCkptIO())
    model = accelerator.prepare(Net())
    accelerator.load_state(tmp_path / "ckpt")

    assert differing(dict(expected), dict(model.state_dict())) == []


@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # SequentialLR of torch 2.8
def test_schedulers_keep_the_classes_of_their_state(tmp_path: Path) -> None:
    """MultiStepLR after a warm-up asks its Counter for more than a dict can."""
    rates = []
    for resume in (False, True):
        accelerator = new_accelerator()
        accelerator.register_checkpoint_io(DistCkptIO())
        optimizer = torch.optim.SGD(Net().parameters(), lr=1.0)
        kinds = torch.optim.lr_scheduler
        parts = [kinds.LinearLR(optimizer, total_iters=3), kinds.MultiStepLR(optimizer, [2, 4])]
        scheduler = kinds.SequentialLR(optimizer, parts, [3])
        optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
        if resume:
            accelerator.load_state(tmp_path / "ckpt")
        for _ in range(7 - resume):
            optimizer.step()
            scheduler.step()
            rates.append(scheduler.get_last_lr()[0])
            if len(rates) == 1:
                accelerator.save_state(tmp_path / "ckpt")

    assert rates[1:7] == rates[7:]


def test_the_scaler_is_kept(tmp_path: Path) -> None:
    """Its state comes back; a checkpoint without one leaves a scaler as it is, with a warning."""
    job = build()
    job.accelerator.save_state(tmp_path / "none")
    job.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    job.accelerator.save_state(tmp_path / "some")

    job = build()
    job.accelerator.load_state(tmp_path / "some")  # nobody asks for it
    job.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with pytest.warns(UserWarning, match="no gradient scaler"):
        job.accelerator.load_state(tmp_path / "none")
    assert job.accelerator.scaler.get_scale() == 2.0
    job.accelerator.load_state(tmp_path / "some")
    assert job.accelerator.scaler.get_scale() == 8.0


def test_further_dataloaders_start_afresh(tmp_path: Path) -> None:
    """A dataloader that the checkpoint does not know is told of, no more."""
    build().accelerator.save_state(tmp_path / "ckpt")
    job = build()
    job.accelerator.prepare(DataLoader([1.0, 2.0]))

    with pytest.warns(UserWarning, match="1 dataloaders are prepared, 0 are stored"):
        job.accelerator.load_state(tmp_path / "ckpt")


# -- what is loaded --------------------------------------------------------------------------------


def test_what_is_no_checkpoint_says_so(tmp_path: Path) -> None:
    """Not there, empty, half: three clear errors."""
    job = build()
    job.accelerator.save_state(tmp_path / "half")
    (tmp_path / "half" / "metadata.json").unlink()
    (tmp_path / "empty").mkdir()

    with pytest.raises(ValueError, match="folder does not exist"):
        job.accelerator.load_state(tmp_path / "nowhere")
    with pytest.raises(CheckpointNotFoundError):
        job.accelerator.load_state(tmp_path / "empty")
    with pytest.raises(IncompleteCheckpointError):
        job.accelerator.load_state(tmp_path / "half")
    with pytest.raises(ValueError, match="No input_dir"):
        job.accelerator.load_state()


def test_map_location_is_checked_as_natively(tmp_path: Path) -> None:
    """Accelerate's three values are accepted, others are its TypeError."""
    job = build()
    job.accelerator.save_state(tmp_path / "ckpt")

    job.accelerator.load_state(tmp_path / "ckpt", map_location="on_device")
    with pytest.raises(TypeError, match="Unsupported optimizer map location"):
        job.accelerator.load_state(tmp_path / "ckpt", map_location="cuda")


def test_a_checkpoint_of_lightning_loads(tmp_path: Path) -> None:
    """Models, optimizers, schedulers and step; one warning tells what starts afresh."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.3)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2])
    for _ in range(3):
        net(torch.ones(2, 4)).backward()
        optimizer.step()
        scheduler.step()
    common = {"schedulers": [scheduler.state_dict()], "step": 3, "lightning": {"epoch": 1}}
    state = TrainingState(
        models=[net],
        optimizers=[optimizer],
        common=common,
        per_rank={"x": 1},
        framework="lightning",
    )
    save_training_state(tmp_path / "ckpt", state)

    job = build(seed=5)
    add_loader(job)
    job.accelerator.register_for_checkpointing(Counter({"kept": 1}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job.accelerator.load_state(tmp_path / "ckpt")

    assert differing(dict(net.state_dict()), dict(job.model.state_dict())) == []
    for index, one in optimizer.state_dict()["state"].items():
        assert differing(one, job.optimizer.state_dict()["state"][index]) == []
    assert job.scheduler.scheduler.last_epoch == 3
    assert job.accelerator.step == 3
    (warning,) = caught
    assert "written by lightning" in str(warning.message)
    assert "random state, dataloaders, custom objects start afresh" in str(warning.message)


def test_shared_step_counts_optimizer_steps(tmp_path: Path) -> None:
    """Lightning resumes at the number of optimizer steps, whatever Accelerate itself counts."""
    accelerator = Accelerator(cpu=True)
    accelerator.register_checkpoint_io(DistCkptIO())
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(3):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()

    accelerator.save_state(tmp_path / "c")

    assert load_common_state_dict(tmp_path / "c")["common"]["step"] == 3
