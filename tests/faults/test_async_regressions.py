"""What went wrong elsewhere with saving in the background, and does not here.

Here: a test for each complaint that no other test answers, and torn snapshots. Not here: the rest::

    Complaint                                               Shown by
    ------------------------------------------------------  ------------------------------------------
    background collectives deadlock with training's         multiprocess/test_background.py, stand still
    only rank 0 raises, the others wait                     multiprocess/test_background.py, cannot do
    training is slowed by the interpreter's lock            multiprocess/test_background.py, interpreter
    a dead worker is not noticed, a job hangs               multiprocess/test_background.py, killed
    "saved" is said before it is                            unit/test_background_saver.py, events
    one failed save poisons later ones                      unit/test_background_saver.py, in the middle
    a failure is raised again and again, or never           unit/test_background_saver.py, raised once
    killed by the end of the program while it writes        unit/test_background_saver.py, program ends
    a saver that is closed is unusable, or hangs            unit/test_background_saver.py, closing
    a retained copy is deleted before its successor is      unit/test_background_saver.py, queued behind
    the writer thread's error is lost                       faults/test_background_faults.py, disk full
    leaked shared memory, processes, descriptors            faults/test_background_faults.py, no_leaks
    a buffer is overwritten before the worker has read it   unit/test_staging_pool.py, and below
    an exception cannot be pickled                          unit/test_background_worker.py
    defaults need a GPU                                     every test here: they run without one
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from torch import nn

from dist_ckpt import load_plain_tensors
from dist_ckpt.background import BackgroundOptions, BackgroundSaver
from dist_ckpt.errors import AsyncSaveError, CheckpointingException
from dist_ckpt.events import Event, LoggingSink
from dist_ckpt.training_state import (
    CheckpointView,
    TrainingState,
    is_checkpoint,
    save_training_state,
)
from tests.faults._background import Job, same_bits, worker_pid
from tests.faults._leaks import descendants

Kind = Literal["process", "thread"]
both_kinds = pytest.mark.parametrize("worker", ["process", "thread"])
WIDTH = 300
"""A matrix of so many rows and columns is large enough to be copied in the background."""


@pytest.fixture
def saver() -> Iterator[BackgroundSaver]:
    with BackgroundSaver(BackgroundOptions(overlap=True), timeout_secs=60) as made:
        yield made


class Gate:
    """Keeps a saver's copies from beginning: the worst moment for whoever changes a tensor.

    Args:
        saver: It saves once, so that it has its copier.
        model: What.
        folder: Where.
    """

    def __init__(self, saver: BackgroundSaver, model: nn.Module, folder: Path) -> None:
        save_training_state(folder / "warm", TrainingState(models=[model]), saver=saver)
        saver.drain()
        self._opened = threading.Event()
        assert saver._machinery.copier is not None
        for _ in range(saver.options.copy_threads):
            saver._machinery.copier._executor.submit(self._opened.wait, 30)

    def open(self) -> None:
        self._opened.set()


def matrix(*, value: float | None = None) -> nn.Linear:
    torch.manual_seed(1)
    model = nn.Linear(WIDTH, WIDTH)
    if value is not None:
        nn.init.constant_(model.weight, value)
    return model


def stored(path: Path) -> torch.Tensor:
    return load_plain_tensors(path)["models.0.weight"]


def save(saver: BackgroundSaver, path: Path, model: nn.Module, *optimizers: Any) -> torch.Tensor:
    """Save with overlap; return the weight at the call."""
    now = next(model.parameters()).detach().clone()
    state = TrainingState(models=[model], optimizers=optimizers)
    save_training_state(path, state, saver=saver)
    return now


# -- torn snapshots: a state in which some tensors are older than others ---------------------------


class Own(torch.optim.Optimizer):
    """Somebody's own optimizer, which steps as it likes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0})

    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(1.0)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "one by one": lambda p: torch.optim.AdamW(p, foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "closure": lambda p: torch.optim.LBFGS(p, max_iter=2),
    "own": Own,
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_waits_until_all_is_copied(
    kind: str, saver: BackgroundSaver, tmp_path: Path
) -> None:
    """No copy has even begun when the optimizer steps: what is stored is from before the step."""
    model = matrix()
    optimizer = OPTIMIZERS[kind](model.parameters())
    batch = torch.ones(2, WIDTH)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found = model(batch).square().sum()
        found.backward()
        return found

    loss()
    optimizer.step(loss)
    gate = Gate(saver, model, tmp_path)
    loss()
    expected = save(saver, tmp_path / "c", model, optimizer)
    with mock.patch.object(
        saver._machinery, "finish_staging", side_effect=_first(gate.open, saver)
    ):
        optimizer.step(loss)
    saver.drain()

    assert not torch.equal(model.weight, expected)
    assert torch.equal(stored(tmp_path / "c"), expected)


def _first(call: Callable[[], None], saver: BackgroundSaver) -> Callable[[], None]:
    finish = saver._machinery.finish_staging

    def both() -> None:
        call()
        finish()

    return both


def test_a_step_inside_of_the_backward_pass_waits_too(
    saver: BackgroundSaver, tmp_path: Path
) -> None:
    """Optimizers that step in a hook, as soon as a gradient is there."""
    model = matrix()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    gate = Gate(saver, model, tmp_path)
    expected = save(saver, tmp_path / "c", model, optimizer)
    with mock.patch.object(
        saver._machinery, "finish_staging", side_effect=_first(gate.open, saver)
    ):
        model(torch.ones(1, WIDTH)).sum().backward()
    saver.drain()

    assert not torch.equal(model.weight, expected)
    assert torch.equal(stored(tmp_path / "c"), expected)


def _in_place(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.add_(1)


def _one_element(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight[WIDTH // 2, 7] = 5.0


def _copied_into(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.copy_(torch.zeros_like(weight))


def _fused(weight: nn.Parameter) -> None:
    state = [torch.zeros_like(weight.data) for _ in range(3)]
    torch._fused_adamw_(
        [weight.data], [torch.ones_like(weight.data)], [state[0]], [state[1]], [],
        [torch.ones(())], lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-8,
        amsgrad=False, maximize=False,
    )  # fmt: skip


NOTICED: dict[str, Callable[[nn.Parameter], object]] = {
    "in place": _in_place,
    "one element": _one_element,
    "a restart from other weights": _copied_into,
    "all of it through .data": lambda weight: weight.data.mul_(2),
    "all of it through numpy": lambda weight: weight.data.numpy().fill(3),
    "a fused kernel called by hand": _fused,
}
"""Not among them: a few elements through ``.data``. Torch does not count that, and samples may not
hold them; the guide says so."""


@pytest.mark.parametrize("change", NOTICED.values(), ids=NOTICED.keys())
def test_a_change_by_nobody_s_optimizer_fails_the_save(
    change: Callable[[nn.Parameter], object], saver: BackgroundSaver, tmp_path: Path
) -> None:
    """Between the save and the next step: it is told by name, and nothing torn is stored."""
    model = matrix()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gate = Gate(saver, model, tmp_path)
    save(saver, tmp_path / "c", model, optimizer)
    change(model.weight)
    gate.open()

    with pytest.raises(AsyncSaveError, match=r"changed while .*'models\.0\.weight'"):
        saver.drain()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["warm"]
    expected = save(saver, tmp_path / "c", model, optimizer)
    saver.drain()
    assert torch.equal(stored(tmp_path / "c"), expected)


def test_weights_that_are_swapped_are_stored_as_they_were(
    saver: BackgroundSaver, tmp_path: Path
) -> None:
    """Averages put in place for an evaluation, by exchange of memory: the save keeps the old."""
    model = matrix()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gate = Gate(saver, model, tmp_path)
    expected = save(saver, tmp_path / "c", model, optimizer)
    model.weight.data = torch.zeros(WIDTH, WIDTH)
    gate.open()
    saver.drain()
    assert torch.equal(stored(tmp_path / "c"), expected)


def test_nan_and_signed_zero_are_no_change(saver: BackgroundSaver, tmp_path: Path) -> None:
    """They are not equal to themselves, or are to others: bits are compared."""
    model = matrix()
    with torch.no_grad():
        model.weight.fill_(float("nan"))
        model.weight[::2] = -0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = save(saver, tmp_path / "c", model, optimizer)
    saver.drain()
    assert torch.equal(stored(tmp_path / "c").view(torch.int32), expected.view(torch.int32))


def test_what_a_forward_pass_changes_is_copied_before_the_save_returns(
    saver: BackgroundSaver, tmp_path: Path
) -> None:
    """Buffers, and parameters that no optimizer holds, are not copied in the background."""
    model = nn.Sequential(nn.BatchNorm1d(100_000), nn.PReLU())
    model(torch.randn(2, 100_000))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save(saver, tmp_path / "c", model, optimizer)
    model(torch.randn(2, 100_000))
    with torch.no_grad():
        model[0].weight.fill_(9)
    saver.drain()
    found = load_plain_tensors(tmp_path / "c")
    assert all(torch.equal(found[f"models.0.{name}"], one) for name, one in expected.items())


# -- complaints ------------------------------------------------------------------------------------


@both_kinds
def test_tensors_changed_after_the_save_returned(worker: Kind, tmp_path: Path) -> None:
    """Persistent workers stored the values of later: CPU tensors were lent, not copied."""
    model = matrix(value=1.0)
    with BackgroundSaver(BackgroundOptions(worker=worker)) as saver:
        for n in range(3):
            nn.init.constant_(model.weight, float(n))
            save(saver, tmp_path / str(n), model)
            nn.init.constant_(model.weight, -1.0)
    for n in range(3):
        assert torch.equal(stored(tmp_path / str(n)), torch.full((WIDTH, WIDTH), float(n)))


def test_later_checkpoints_are_not_copies_of_the_first(tmp_path: Path) -> None:
    """Cached handles of memory made each later checkpoint equal to the first, bit for bit.

    Here parameters move to other memory between saves, and the model is one of several.
    """
    models = [matrix(value=float(n)) for n in range(2)]
    with BackgroundSaver() as saver:
        for n in range(6):
            model = models[n % 2]
            model.weight.data = torch.full((WIDTH, WIDTH), float(n))
            save(saver, tmp_path / str(n), model)
    found = [stored(tmp_path / str(n))[0, 0].item() for n in range(6)]
    assert found == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_what_is_new_since_the_plan_was_made_is_stored(tmp_path: Path) -> None:
    """A plan that is reused left tensors out that came later, without an error."""
    model = nn.ModuleDict({"a": nn.Linear(3, 3)})
    with BackgroundSaver() as saver:
        for n in range(6):
            if n == 3:
                model["b"] = nn.Linear(4, 4)
            if n == 5:
                del model["a"]
            save_training_state(tmp_path / str(n), TrainingState(models=[model]), saver=saver)
    found = [
        sorted({key.split(".")[2] for key in load_plain_tensors(tmp_path / str(n))})
        for n in range(6)
    ]
    assert found == [["a"]] * 3 + [["a", "b"]] * 2 + [["b"]]


def test_a_tensor_that_changed_its_shape_or_dtype_is_stored_as_it_is(tmp_path: Path) -> None:
    """The same for a plan that fits by name only."""
    model = nn.Module()
    shapes = [(3, 4), (3, 4), (4, 3), (2,), (2,)]
    dtypes = [torch.float32, torch.float32, torch.float32, torch.float32, torch.bfloat16]
    with BackgroundSaver() as saver:
        for n, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
            model.w = nn.Parameter(torch.full(shape, float(n), dtype=dtype))
            save_training_state(tmp_path / str(n), TrainingState(models=[model]), saver=saver)
    for n, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        found = load_plain_tensors(tmp_path / str(n))["models.0.w"]
        assert (tuple(found.shape), found.dtype) == (shape, dtype)
        assert found.flatten()[0].item() == n


@both_kinds
def test_thousands_of_small_tensors_need_no_descriptor_each(worker: Kind, tmp_path: Path) -> None:
    """20,000 small tensors ended in "too many open files": a segment of shared memory for each."""
    model = nn.Module()
    model.many = nn.ParameterList(torch.full((8,), float(n)) for n in range(3000))
    with BackgroundSaver(BackgroundOptions(worker=worker)) as saver:
        save(saver, tmp_path / "1", model)
        saver.drain()
        used = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count is all
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 24, hard))
        try:
            save(saver, tmp_path / "2", model)
            saver.drain()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    found = load_plain_tensors(tmp_path / "2")
    assert len(found) == 3000
    assert found["models.0.many.2999"].tolist() == [2999.0] * 8


def test_staging_memory_is_made_once(tmp_path: Path) -> None:
    """Gigabytes were kept for each save, and pages were new each time, which is slow."""
    model = matrix()
    seen = set()
    before = staged_mappings()
    with BackgroundSaver(BackgroundOptions(max_in_flight=2)) as saver:
        for n in range(8):
            save(saver, tmp_path / "c", model)
            if n >= 1:
                pool: Any = saver._machinery.pool
                seen.add(tuple((one.key, one.nbytes) for one in pool._generations))
        saver.drain()
        assert staged_mappings() - before <= 2
    assert len(seen) <= 2  # the second generation is made once two are in flight
    assert staged_mappings() == before


def staged_mappings() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:dist_ckpt")


def test_state_larger_than_the_budget_is_streamed(tmp_path: Path) -> None:
    """Hundreds of gigabytes of a host's memory went to staging, without a bound."""
    model = nn.Linear(3000, 2500)
    with BackgroundSaver(BackgroundOptions(staging_budget=16 << 20)) as saver:
        expected = save(saver, tmp_path / "c", model)
        pool: Any = saver._machinery.pool
        assert sum(one.nbytes for one in pool._generations) <= 16 << 20 < expected.nbytes
        nn.init.zeros_(model.weight)
    assert torch.equal(stored(tmp_path / "c"), expected)


def test_the_worker_does_not_grow_from_save_to_save(tmp_path: Path) -> None:
    """A persistent worker ran out of memory after some hours; and it holds no framework."""
    model = matrix()
    with BackgroundSaver() as saver:
        sizes = []
        for n in range(40):
            save(saver, tmp_path / "c", model)
            saver.drain()
            if n >= 10:
                sizes.append(_private_kib(worker_pid(saver)))
    assert max(sizes) - min(sizes) < 2048
    assert max(sizes) < 60 * 1024


def _private_kib(pid: int | None) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    kinds = ("Private_Clean:", "Private_Dirty:")
    return sum(int(line.split()[1]) for line in lines if line.startswith(kinds))


def test_neither_processes_nor_threads_grow_in_number(tmp_path: Path) -> None:
    """One worker and its threads for a whole run: no process, thread or pool for each save."""
    model, before = matrix(), len(descendants())
    with BackgroundSaver(BackgroundOptions(overlap=True)) as saver:
        counts = set()
        for n in range(12):
            save(saver, tmp_path / "c", model)
            saver.drain()
            if n >= 2:
                files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count is all
                counts.add((len(descendants()), threading.active_count(), files))
    assert len(counts) == 1
    assert {processes - before for processes, _, _ in counts} == {1}


def test_a_worker_is_no_fork(tmp_path: Path) -> None:
    """Forks of a process with threads or a GPU crash, and copy each page that training writes.

    It does not run the program's main module either, which has no guard against that here.
    """
    model = matrix()
    with BackgroundSaver() as saver:
        save(saver, tmp_path / "c", model)
        saver.drain()
        pid = worker_pid(saver)
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        maps = Path(f"/proc/{pid}/maps").read_text()
    assert b"dist_ckpt._worker" in command
    assert b"pytest" not in command.split(b"\0")[:3]
    assert "libtorch" not in maps
    assert sys.executable.encode() in command


def test_a_kept_error_keeps_no_staged_memory(tmp_path: Path) -> None:
    """Whoever keeps an exception keeps the frames it came through, and all that is in them."""
    before = staged_mappings()
    saver = BackgroundSaver()
    save(saver, tmp_path / "1", matrix())
    saver.drain()
    with mock.patch("dist_ckpt._worker.submit._stage", side_effect=OSError(5, "boom")):
        save(saver, tmp_path / "2", matrix())
    with pytest.raises(AsyncSaveError) as caught:
        saver.close()
    kept = caught.value
    assert "boom" in str(kept)
    assert staged_mappings() == before
    assert "boom" in "".join(one.message for one in kept.failures.values())


def test_a_model_is_not_kept_alive_by_a_finished_save(tmp_path: Path) -> None:
    """Old models stayed in memory behind caches of what was saved last."""
    with BackgroundSaver() as saver:
        model = matrix()
        memory = model.weight.untyped_storage()
        save(saver, tmp_path / "c", model)
        saver.drain()
        save(saver, tmp_path / "d", nn.Linear(2, 2))
        saver.drain()
        del model
        gc.collect()
        holders = [
            one
            for one in gc.get_objects()
            if type(one) in (torch.Tensor, nn.Parameter)
            and one.device.type == "cpu"
            and one.layout is torch.strided  # other tests may leave others
            and one.untyped_storage().data_ptr() == memory.data_ptr()
        ]
    assert holders == []


def test_nobody_is_told_of_a_checkpoint_before_it_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log said "saved" when a save had only been begun; uploads found half a directory."""
    path = tmp_path / "c"
    seen: list[tuple[str, bool]] = []

    class Sink:
        def emit(self, event: Event) -> None:
            seen.append((type(event).__name__, is_checkpoint(path)))

    caplog.set_level(logging.INFO, "dist_ckpt")
    with BackgroundSaver(sinks=[Sink(), LoggingSink()]) as saver:
        save_training_state(
            path,
            TrainingState(models=[matrix()]),
            saver=saver,
            on_settled=lambda _: seen.append(("settled", is_checkpoint(path))),
        )
        saver.after_commit(lambda: seen.append(("behind", is_checkpoint(path))), what="a test")
        saver.drain()
    told = [(what, there) for what, there in seen if what in ("Committed", "settled", "behind")]
    assert told == [("Committed", True), ("settled", True), ("behind", True)]
    assert dict(seen)["SaveStarted"] is False
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "committed" in caplog.text


def test_loading_a_path_in_flight_waits_for_it(tmp_path: Path) -> None:
    """A checkpoint was read, or taken for missing, while it was being written over."""
    path, model = tmp_path / "c", matrix(value=1.0)
    with BackgroundSaver() as saver:
        save(saver, path, model)
        nn.init.constant_(model.weight, 2.0)
        save(saver, path, model)
        saver.wait(path)
        target = matrix(value=0.0)
        CheckpointView.open(path).load_model(0, target)
    assert torch.equal(target.weight, torch.full((WIDTH, WIDTH), 2.0))


def test_a_reader_never_sees_half_of_a_checkpoint(tmp_path: Path) -> None:
    """Metadata stood there before the data: here a path is the old one or the new one, whole."""
    path, model = tmp_path / "c", matrix(value=0.0)
    seen = set()
    with BackgroundSaver() as saver:
        save(saver, path, model)
        saver.drain()
        for n in range(1, 5):
            nn.init.constant_(model.weight, float(n))
            save(saver, path, model)
            while saver.in_flight:
                assert is_checkpoint(path)
                seen.add(_value(path))
    assert seen <= {0.0, 1.0, 2.0, 3.0, 4.0}
    assert _value(path) == 4.0


def _value(path: Path) -> float:
    for _ in range(50):
        try:
            values = stored(path).unique().tolist()
        except CheckpointingException as error:
            if "replaced" in str(error) or "changed" in str(error):
                continue  # told, and read again
            raise
        assert len(values) == 1
        return float(values[0])
    raise AssertionError("it is replaced all the time")


def test_the_collector_may_run_at_any_time(tmp_path: Path) -> None:
    """Finalizers that took locks deadlocked when the collector ran inside of a save."""
    model, thresholds = matrix(), gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        with BackgroundSaver(BackgroundOptions(worker="thread", overlap=True)) as saver:
            for _ in range(3):
                expected = save(saver, tmp_path / "c", model)
            saver.drain()
    finally:
        gc.set_threshold(*thresholds)
    assert torch.equal(stored(tmp_path / "c"), expected)


def test_a_save_does_not_pause_training_for_the_disk(tmp_path: Path) -> None:
    """The call took as long as the disk: here it returns though no byte can be written."""
    job = Job(0, 1)
    with BackgroundSaver() as saver:
        save_training_state(tmp_path / "warm", job.state, saver=saver)
        saver.drain()
        pid = worker_pid(saver)
        assert pid is not None
        os.kill(pid, 19)  # SIGSTOP
        try:
            begun = time.monotonic()
            job.step()
            expected = job.bits()
            save_training_state(tmp_path / "c", job.state, saver=saver)
            returned = time.monotonic() - begun
            assert not is_checkpoint(tmp_path / "c")
        finally:
            os.kill(pid, 18)  # SIGCONT
    assert returned < 10
    assert same_bits(job.loaded(tmp_path / "c"), expected) == []
