"""Saving in the background with one process: what is visible when, failures, names."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch.utils.data import DataLoader

from accelerate_dist_ckpt import DistCkptIO
from dist_ckpt import background
from dist_ckpt.errors import (
    AsyncSaveError,
    WorkerDiedError,
)
from dist_ckpt.training_state import is_checkpoint
from tests._peaks import Peak
from tests.accelerate._async_jobs import async_job, fail_one, loaded_from, wait_settled
from tests.accelerate._jobs import (
    build,
    differing,
    new_accelerator,
    state_of,
    train,
)
from tests.accelerate._traces import (
    full_disk,
    hidden,
    saver_of,
    stopped_worker,
    traces,
)

pytestmark = pytest.mark.usefixtures("nothing_left")


def project(tmp_path: Path, *, total_limit: int | None = None, **fields: Any) -> Any:
    config = ProjectConfiguration(
        project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=total_limit
    )
    job = build(seed=1, io=DistCkptIO(async_save=True, **fields), project_config=config)
    train(job, 1)
    job.accelerator.save_state()
    saver_of(job.accelerator).drain()
    return job


def names_in(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "checkpoints").iterdir())


# -- what is visible when --------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_training_goes_on_while_a_save_is_written(tmp_path: Path, overlap: bool) -> None:
    """save_state returns with nothing there yet; what is committed is the state at its call."""
    job = async_job(tmp_path, overlap=overlap)
    with stopped_worker(job.accelerator):
        job.accelerator.save_state(tmp_path / "ckpt")
        expected = state_of(job)
        train(job, 3)
        assert not (tmp_path / "ckpt").exists()
        assert saver_of(job.accelerator).in_flight == (tmp_path / "ckpt",)
    job.accelerator.load_state(tmp_path / "ckpt")  # waits for it

    assert differing(expected, state_of(job)) == []
    assert hidden(tmp_path) == []
    job.accelerator.end_training()
    assert differing(expected, loaded_from(tmp_path / "ckpt")) == []


def test_a_thread_can_write_as_well(tmp_path: Path) -> None:
    """worker="thread" starts no process; the same comes out."""
    children = traces()["children"]
    job = async_job(tmp_path, worker="thread")
    job.accelerator.save_state(tmp_path / "ckpt")
    expected = state_of(job)
    train(job, 2)
    assert traces()["children"] == children
    job.handle.remove()

    assert differing(expected, loaded_from(tmp_path / "ckpt")) == []


def test_hooks_files_are_in_the_checkpoint(tmp_path: Path) -> None:
    """Their directory is there until the save has ended, well or badly, and gone afterwards."""
    job = async_job(tmp_path)
    seen: list[Path] = []

    def hook(models: Any, weights: Any, output_dir: str) -> None:
        Path(output_dir, "unet.json").write_text("{}")
        seen.append(Path(output_dir))

    job.accelerator.register_save_state_pre_hook(hook)
    with stopped_worker(job.accelerator):
        job.accelerator.save_state(tmp_path / "ckpt")
        assert (seen[0] / "unet.json").exists()
    saver_of(job.accelerator).drain()
    assert (tmp_path / "ckpt" / "unet.json").read_text() == "{}"
    assert hidden(tmp_path) == []

    with full_disk(job.accelerator):
        job.accelerator.save_state(tmp_path / "bad")
        with pytest.raises(AsyncSaveError):
            job.accelerator.end_training()
    assert hidden(tmp_path) == []
    assert not (tmp_path / "bad").exists()


# -- overlap ---------------------------------------------------------------------------------------


def scaled(accelerator: Accelerator) -> None:
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)


@contextlib.contextmanager
def copies_held_back(until: threading.Event) -> Iterator[None]:
    """Let copies that go on in the background begin only when something has happened."""
    from dist_ckpt._staging_pool.copying import Copier, CopyTask

    start, work, has_begun = Copier.start, CopyTask.work, threading.Event()

    def begin(copier: Copier, copies: Any) -> CopyTask:
        has_begun.set()  # what is copied before the call returns has been copied by now
        return start(copier, copies)

    def hold_back(task: CopyTask) -> None:
        if has_begun.is_set():
            assert until.wait(60)
        work(task)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Copier, "start", begin)
        patch.setattr(CopyTask, "work", hold_back)
        yield
    assert has_begun.is_set()


@pytest.mark.parametrize("setup", [lambda _: None, scaled], ids=["plain", "with a gradient scaler"])
def test_an_optimizers_step_waits_for_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setup: Any
) -> None:
    """Accelerate's wrapper steps through torch's: the copy is held back until just then."""
    asked, finish = threading.Event(), background._Machinery.finish_staging

    def asking(machinery: Any) -> None:
        asked.set()
        finish(machinery)

    accelerator = new_accelerator()
    accelerator.register_checkpoint_io(DistCkptIO(async_save=True, overlap=True))
    setup(accelerator)
    net = torch.nn.Linear(128, 256)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5))
    saved = net.weight.detach().clone()
    monkeypatch.setattr(background._Machinery, "finish_staging", asking)
    with copies_held_back(asked):
        accelerator.save_state(tmp_path / "ckpt")
        accelerator.backward(model(torch.ones(4, 128)).square().mean())
        assert not asked.is_set()
        optimizer.step()
    assert asked.is_set()
    assert not torch.equal(net.weight, saved)

    accelerator.load_state(tmp_path / "ckpt")
    assert torch.equal(net.weight, saved)
    accelerator.end_training()


def test_a_parameter_changed_by_hand_fails_the_save(tmp_path: Path) -> None:
    """Overlap's contract: a change that no optimizer made is told, with the names; none is kept."""
    changed = threading.Event()
    accelerator = new_accelerator()
    accelerator.register_checkpoint_io(DistCkptIO(async_save=True, overlap=True))
    net = torch.nn.Linear(128, 256)
    accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5))
    with copies_held_back(changed):
        accelerator.save_state(tmp_path / "ckpt")
        with torch.no_grad():
            net.weight.add_(1.0)
        changed.set()
        with pytest.raises(AsyncSaveError, match=r"changed while.*models\.0\.weight"):
            saver_of(accelerator).drain()

    assert list(tmp_path.iterdir()) == []
    accelerator.end_training()


# -- failures --------------------------------------------------------------------------------------


def test_a_failed_save_is_raised_once_in_the_loop(tmp_path: Path) -> None:
    """The next backward pass raises; then training, saving and loading go on."""
    job = async_job(tmp_path)
    kept = state_of(job)
    train(job, 1)
    fail_one(job, tmp_path / "first")
    before = state_of(job)

    with pytest.raises(AsyncSaveError, match="SIGKILL") as caught:
        train(job, 1)
    assert isinstance(caught.value.__cause__, WorkerDiedError)
    assert differing(before, state_of(job)) == []  # it came before the gradients
    train(job, 1)
    assert hidden(tmp_path) == []
    assert differing(kept, loaded_from(tmp_path / "first")) == []
    job.accelerator.save_state(tmp_path / "next")
    expected = state_of(job)
    job.accelerator.end_training()
    assert differing(expected, loaded_from(tmp_path / "next")) == []


def test_a_full_disk_costs_nothing(tmp_path: Path) -> None:
    """The error names the cause; the checkpoint that was to be replaced is intact."""
    job = async_job(tmp_path)
    kept = state_of(job)
    with full_disk(job.accelerator):
        train(job, 1)
        job.accelerator.save_state(tmp_path / "first")
        wait_settled(job.accelerator)
        with pytest.raises(AsyncSaveError, match="File too large"):
            train(job, 1)
    assert differing(kept, loaded_from(tmp_path / "first")) == []
    assert hidden(tmp_path) == []
    job.accelerator.save_state(tmp_path / "first")
    expected = state_of(job)
    job.accelerator.end_training()
    assert differing(expected, loaded_from(tmp_path / "first")) == []


@pytest.mark.parametrize("touch", ["save_state", "load_state"])
def test_the_next_touch_raises_before_it_begins(tmp_path: Path, touch: str) -> None:
    """A save or load after a failed save does nothing but tell; the one after that works."""
    job = async_job(tmp_path)
    hooks: list[Any] = []
    fail_one(job, tmp_path / "bad")
    job.accelerator.register_save_state_pre_hook(lambda *args: hooks.append(args[2]))
    before = state_of(job)

    with pytest.raises(AsyncSaveError, match="bad"):
        getattr(job.accelerator, touch)(tmp_path / "first")
    assert differing(before, state_of(job)) == []
    assert hidden(tmp_path) == []
    getattr(job.accelerator, touch)(tmp_path / "first")
    job.accelerator.end_training()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first"]


def test_a_loop_without_accelerates_backward_is_told_by_its_dataloader(tmp_path: Path) -> None:
    """Batches count where there are no backward passes, from the first save on."""
    job = build(seed=1, io=DistCkptIO(async_save=True))
    loader = job.accelerator.prepare(DataLoader(torch.arange(6.0)))
    assert len(list(loader)) == 6
    job.accelerator.save_state(tmp_path / "first")
    saver_of(job.accelerator).wait()
    seen = []

    def loop() -> None:
        for data in loader:
            seen.append(float(data))
            if len(seen) == 2:
                fail_one(job, tmp_path / "bad")

    with pytest.raises(AsyncSaveError, match="bad"):
        loop()
    assert seen == [0.0, 1.0]
    assert len(list(loader)) == 6
    job.accelerator.end_training()


def test_batches_do_not_count_beside_backward_passes(tmp_path: Path) -> None:
    """An evaluation, perhaps on rank 0 alone, raises nothing; the next backward pass does."""
    job = async_job(tmp_path)
    loader = job.accelerator.prepare(DataLoader(torch.arange(6.0)))
    fail_one(job, tmp_path / "bad")

    assert len(list(loader)) == 6
    with pytest.raises(AsyncSaveError):
        train(job, 1)
    job.accelerator.end_training()


def test_uneven_inputs_are_left_alone(tmp_path: Path) -> None:
    """Where ranks have different numbers of batches, nothing is raised until after it."""
    job = async_job(tmp_path)
    fail_one(job, tmp_path / "bad")
    with job.accelerator.join_uneven_inputs([job.model]):
        train(job, 2)

    with pytest.raises(AsyncSaveError):
        train(job, 1)
    job.accelerator.end_training()


# -- names, limits and order -----------------------------------------------------------------------


def test_the_last_checkpoint_stays_until_its_replacement_is_there(tmp_path: Path) -> None:
    """total_limit=1: the old one goes when the new one is committed, and its removal is told."""
    events = tmp_path / "events.jsonl"
    job = project(tmp_path, total_limit=1, events_file=str(events))
    with stopped_worker(job.accelerator):
        job.accelerator.save_state()
        expected = state_of(job)
        train(job, 1)
        assert names_in(tmp_path) == ["checkpoint_0"]
        assert is_checkpoint(tmp_path / "checkpoints" / "checkpoint_0")
        assert job.accelerator.save_iteration == 2
    job.accelerator.load_state()  # the newest, which was in flight

    assert differing(expected, state_of(job)) == []
    assert names_in(tmp_path) == ["checkpoint_1"]
    job.accelerator.end_training()
    told = [json.loads(line) for line in events.read_text().splitlines()]
    kinds = ["SaveStarted", "Staged", "Written", "Committed"]
    assert [one["event"] for one in told] == [*kinds, *kinds, "Pruned"]
    assert told[-1]["path"].endswith("checkpoint_0")


def test_a_failed_number_is_spent(tmp_path: Path) -> None:
    """No name is used twice in a run; nothing is removed for a save that failed."""
    job = project(tmp_path, total_limit=1)
    kept = state_of(job)
    fail_one(job)
    with pytest.raises(AsyncSaveError, match="checkpoint_1"):
        train(job, 1)
    assert names_in(tmp_path) == ["checkpoint_0"]
    assert differing(kept, loaded_from(tmp_path / "checkpoints" / "checkpoint_0")) == []

    assert job.accelerator.save_state().name == "checkpoint_2"
    job.accelerator.end_training()
    assert names_in(tmp_path) == ["checkpoint_2"]

    job = project_again(tmp_path)
    assert job.accelerator.save_iteration == 3
    job.handle.remove()


def project_again(tmp_path: Path) -> Any:
    config = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    job = build(seed=2, io=DistCkptIO(async_save=True), project_config=config)
    job.accelerator.load_state()
    return job


def test_a_name_in_flight_is_taken(tmp_path: Path) -> None:
    """A number given by hand that is being written is refused, as one that is there."""
    job = project(tmp_path)
    with stopped_worker(job.accelerator):
        job.accelerator.save_state()
        job.accelerator.project_configuration.iteration = 1
        with pytest.raises(ValueError, match="checkpoint_1.*already exists"):
            job.accelerator.save_state()
    job.accelerator.end_training()
    assert names_in(tmp_path) == ["checkpoint_0", "checkpoint_1"]


def test_two_saves_to_one_place_are_committed_in_order(tmp_path: Path) -> None:
    """Both are in flight; the later one stands there in the end."""
    job = async_job(tmp_path, max_in_flight=2)
    with stopped_worker(job.accelerator):
        for _ in range(2):
            train(job, 1)
            job.accelerator.save_state(tmp_path / "last")
        assert saver_of(job.accelerator).in_flight == (tmp_path / "last",) * 2
    expected = state_of(job)
    job.accelerator.end_training()
    assert differing(expected, loaded_from(tmp_path / "last")) == []
    assert hidden(tmp_path) == []


def test_background_saves_need_no_more_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``total_limit=1``: two copies at most, as with saves that block."""
    counts = []
    for is_async in (False, True):
        root = tmp_path / str(is_async)
        config = ProjectConfiguration(
            project_dir=str(root), automatic_checkpoint_naming=True, total_limit=1
        )
        io = DistCkptIO(async_save=is_async, **({"worker": "thread"} if is_async else {}))
        job = build(seed=1, io=io, project_config=config)
        with monkeypatch.context() as patch:
            peak = Peak(root, patch)
            for _ in range(4):
                train(job, 1)
                job.accelerator.save_state()
            job.accelerator.end_training()
        last = root / "checkpoints" / "checkpoint_3"
        counts.append(round(peak.nbytes / sum(file.stat().st_size for file in last.iterdir()), 1))
    assert counts == [2.0, 2.0]
