"""A job that saves in the background while its state changes, and what may go wrong meanwhile.

Here: ``Job`` (models and optimizers whose every bit is known by step), ``Told`` (events), the
faults and ``Run``, which makes saves among faults and keeps a record. Not here: tests. One for each
rank, alike on all.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from dist_ckpt import SaveOptions
from dist_ckpt.background import BackgroundOptions, BackgroundSaver
from dist_ckpt.errors import AsyncSaveError, CheckpointingException
from dist_ckpt.events import Event
from dist_ckpt.training_state import CheckpointView, TrainingState, save_training_state

__all__ = [
    "FAULTS",
    "Fault",
    "Job",
    "Record",
    "Run",
    "Told",
    "bits",
    "same_bits",
    "schedule",
    "shown",
    "worker_pid",
]

_LIMIT_NBYTES = 16 << 10
"""More than the documents of a checkpoint, less than any data file of a ``Job``."""


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of what this rank holds, as bytes: NaN equals NaN, and -0.0 is not 0.0."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().contiguous().flatten().view(torch.uint8).clone()


def same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Return the names that differ."""
    names = found.keys() ^ expected.keys()
    both = found.keys() & expected.keys()
    return sorted(
        {*names, *(name for name in both if not torch.equal(found[name], expected[name]))}
    )


def worker_pid(saver: BackgroundSaver) -> int | None:
    """Return the saver's worker process; None for a thread, or when there is none."""
    worker = saver._machinery.worker
    return None if worker is None else worker.pid


class Told:
    """A sink that keeps the events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def kinds(self, save: int) -> list[str]:
        return [type(one).__name__ for one in self.events if one.save == save]


class Job:
    """Replicated parameters, buffers and, on several ranks, sharded parameters; with AdamW."""

    def __init__(self, rank: int, size: int, *, width: int = 200) -> None:
        self.rank, self.size, self.step_number = rank, size, 0
        self.body = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12))
        self.models: list[nn.Module] = [self.body]
        if size > 1:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            head = nn.Linear(width, width)
            self.models.append(fully_shard(head, mesh=init_device_mesh("cpu", (size,))))
        else:
            self.models.append(nn.Linear(width, width))
        self.optimizers = [torch.optim.AdamW(m.parameters(), foreach=True) for m in self.models]

    def step(self) -> None:
        """Change every tensor; the same replicated values on all ranks, nothing is exchanged."""
        self.step_number += 1
        random_bits = torch.Generator().manual_seed(self.step_number)
        for model in self.models:
            for parameter in model.parameters():
                grad = torch.randn(parameter.shape, generator=random_bits)
                parameter.grad = self._like(parameter, grad)
        for optimizer in self.optimizers:
            optimizer.step()
        with torch.no_grad():
            for buffer in self.body.buffers():
                buffer.add_(1)

    def _like(self, parameter: nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
        if not hasattr(parameter, "to_local"):
            return grad
        from torch.distributed.tensor import DTensor

        local = parameter.to_local()
        rows = grad[: local.shape[0]] + self.rank
        return DTensor.from_local(
            rows, parameter.device_mesh, parameter.placements, shape=grad.shape,
            stride=grad.stride(),
        )  # fmt: skip

    def state(self) -> TrainingState:
        return TrainingState(
            models=self.models,
            optimizers=self.optimizers,
            common={"step": self.step_number, "values": list(range(self.step_number % 7))},
            per_rank={"rank": self.rank, "noise": torch.full((5,), float(self.step_number))},
            replicas="equal",
        )

    def bits(self) -> dict[str, torch.Tensor]:
        """Return every bit of the state, by name."""
        found = {"step": torch.tensor(self.step_number)}
        for i, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            for name, tensor in model.state_dict().items():
                found[f"{i}.{name}"] = bits(tensor)
            for j, state in optimizer.state_dict()["state"].items():
                for name, value in state.items():
                    found[f"{i}.{j}.{name}"] = bits(torch.as_tensor(value))
        return found

    def loaded(self, path: Path) -> dict[str, torch.Tensor]:
        """Load a checkpoint into this job and return its bits. Collective."""
        with torch.no_grad():
            for model in self.models:
                for tensor in (*model.parameters(), *model.buffers()):
                    tensor.fill_(77)
        view = CheckpointView.open(path)
        for i, model in enumerate(self.models):
            view.load_model(i, model)
        for j, optimizer in enumerate(self.optimizers):
            view.load_optimizer(j, optimizer, self.models)
        self.step_number = view.common["step"]
        assert view.common["values"] == list(range(self.step_number % 7))
        own = view.per_rank()
        assert own["rank"] == self.rank
        assert own["noise"].tolist() == [float(self.step_number)] * 5
        return self.bits()


# -- faults ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens around one save, on one rank.

    Attributes:
        name: Which.
        rank: Where.
        delay: At which training step after the save, or after how many microseconds.
        steps: Training steps until the next save.
        path: Name of the checkpoint.
    """

    name: str
    rank: int
    delay: int
    steps: int
    path: str


@dataclass(slots=True)
class Record:
    """What one rank has seen. All but ``bits`` and ``seconds`` is the same on all ranks.

    Attributes:
        ended: By number of the save: its fault, its path, and what failed.
        raised: In which order failures were raised: where, at which touch, and for which paths.
        refused: Saves that could not even be planned, with what was raised.
        bits: Of each save, the state at the call.
    """

    ended: dict[int, tuple[str, str, str | None]] = field(default_factory=dict)
    raised: list[tuple[str, int, tuple[str, ...]]] = field(default_factory=list)
    refused: list[tuple[int, str, str]] = field(default_factory=list)
    bits: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)


FAULTS: dict[str, tuple[str, ...]] = {
    "process": ("killed", "killed at once", "killed before", "stopped", "disk full"),
    "thread": ("disk full", "slow sync"),
    "any": (
        *["none"] * 8,
        *("describing", "planning", "staging", "no memory", "busy", "attempt gone", "asleep"),
    ),
    "overlap": ("changed meanwhile",),
}
"""What may happen, by the kind of worker."""


def schedule(seed: int, count: int, *, size: int, worker: str, overlap: bool) -> list[Fault]:
    """Return what happens around each of ``count`` saves; the same on all ranks."""
    dice = random.Random(seed)  # noqa: S311 - repeatable
    names = FAULTS["any"] + FAULTS[worker] + (FAULTS["overlap"] if overlap else ())
    return [
        Fault(
            name=dice.choice(names),
            rank=dice.randrange(size),
            delay=dice.randrange(60_000),
            steps=dice.randrange(12),
            path="last" if dice.random() < 0.3 else f"step-{n}",
        )
        for n in range(count)
    ]


class Run:
    """One rank's saves among faults.

    Args:
        job: What is saved.
        folder: Where.
        options: How to save.
    """

    def __init__(self, job: Job, folder: Path, options: BackgroundOptions) -> None:
        self.job, self.folder = job, folder
        self.told = Told()
        self.saver = BackgroundSaver(options, sinks=[self.told], timeout_secs=60)
        self.record = Record()
        self.number = 0
        self.touches = 0

    def make(self, fault: Fault) -> None:
        """Save once, with what goes wrong; then train. Collective."""
        self.job.step()
        saved = self.job.bits()
        # What replicas hold is equal on all ranks, also when it changes.
        here = fault.rank == self.job.rank or fault.name == "changed meanwhile"
        settled = threading.Event()
        with contextlib.ExitStack() as stack:
            after = _arrange(self, fault, stack, settled) if here else None
            if not self._save(fault, saved, settled):
                return
            if after is not None:
                after()
            self._train(fault, settled)

    def finish(self) -> None:
        """Wait for all, and end the saver. Collective."""
        try:
            self.saver.drain(timeout_secs=60)
        except AsyncSaveError as error:
            self._note("drain", error)
        self.saver.close()

    def _save(self, fault: Fault, saved: dict[str, torch.Tensor], settled: threading.Event) -> bool:
        """Return whether the save has begun; a failure of one before does not let it."""
        number = self.number = self.number + 1

        def end(error: BaseException | None) -> None:
            told = None if error is None else f"{type(error).__name__}: {error}"
            self.record.ended[number] = (fault.name, fault.path, told)
            settled.set()

        while True:
            try:
                save_training_state(
                    self.folder / fault.path,
                    lambda: self._state(fault),
                    options=SaveOptions(timeout_secs=30, thread_count=2),
                    saver=self.saver,
                    on_settled=end,
                )
            except AsyncSaveError as error:
                if "the background save to" not in str(error):
                    raise
                self._note("save", error)
            except CheckpointingException as error:
                self.record.refused.append((number, fault.name, f"{error}"))
                return False
            else:
                self.record.bits[number] = saved
                return True

    def _state(self, fault: Fault) -> TrainingState:
        if fault.name == "describing" and fault.rank == self.job.rank:
            raise ValueError("boom in describing")
        return self.job.state()

    def _train(self, fault: Fault, settled: threading.Event) -> None:
        for n in range(fault.steps):
            if n:
                self.job.step()
            self._poll()
        if fault.name == "asleep":
            settled.wait(30)  # no poll, no step: what is in flight ends all the same

    def _poll(self) -> None:
        self.touches += 1
        try:
            self.saver.poll()
        except AsyncSaveError as error:
            self._note("poll", error)

    def _note(self, where: str, error: AsyncSaveError) -> None:
        told = [str(error), *getattr(error, "__notes__", ())]
        prefix = f"the background save to {self.folder}/"
        paths = tuple(one.partition(prefix)[2].split(" failed, ")[0] for one in told)
        assert all(paths), told
        self.record.raised.append((where, self.touches, paths))

    # -- what the test asks for

    def verify(self) -> list[str]:
        """Load all that is committed, and compare. Collective. Returns what is wrong."""
        problems = []
        good = {n: path for n, (_, path, error) in self.record.ended.items() if error is None}
        newest = {path: n for n, path in sorted(good.items())}
        for path, number in newest.items():
            differing = same_bits(self.job.loaded(self.folder / path), self.record.bits[number])
            if differing:
                problems.append(f"save {number} at {path}: {differing[:5]}")
        present = {entry.name for entry in self.folder.iterdir()}
        if present != set(newest):
            problems.append(f"{sorted(present ^ set(newest))} should be absent, or is missing")
        return problems

    def unreported(self) -> list[str]:
        """Return what failed and was not raised exactly once, or was raised and did not fail."""
        failed = sorted(path for _, path, error in self.record.ended.values() if error is not None)
        raised = sorted(path for _, _, paths in self.record.raised for path in paths)
        return [] if failed == raised else [f"failed {failed}, raised {raised}"]


_Stack = contextlib.ExitStack
_After = Callable[[], None]
"""What is to be done once the save has begun."""


def _arrange(run: Run, fault: Fault, stack: _Stack, settled: threading.Event) -> _After | None:
    """Prepare a fault of this rank; return what is to be done once the save has begun."""
    match fault.name:
        case "killed before":
            _kill(run)
        case "disk full":
            _limit_files(run, stack, settled)
        case "slow sync":
            return lambda: _hold_syncs(stack)
        case "planning" | "staging" | "no memory":
            _fail_in(fault, stack)
        case _:
            return _AFTER.get(fault.name, lambda *_: None)(run, fault)
    return None


_AFTER: dict[str, Callable[[Run, Fault], _After | None]] = {
    "killed at once": lambda run, _: lambda: _kill(run),
    "killed": lambda run, fault: lambda: _later(fault.delay, lambda: _kill(run)),
    "stopped": lambda run, fault: lambda: _stop_for_a_while(run, fault),
    "busy": lambda *_: _hold_the_interpreter,
    "attempt gone": lambda run, _: lambda: _remove_attempts(run.folder),
    "changed meanwhile": lambda run, _: lambda: _change(run.job),
}


def _later(micros: int, act: Callable[[], None]) -> None:
    """Train until some microseconds have passed, then act: training is what takes the time."""
    until = time.perf_counter() + micros / 1e6
    weights = torch.ones(50, 50)
    while time.perf_counter() < until:
        weights = weights @ weights / 50
    act()


def _kill(run: Run) -> None:
    pid = worker_pid(run.saver)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _stop_for_a_while(run: Run, fault: Fault) -> None:
    """The worker stands still, as on a disk that does not answer; training goes on."""
    pid = worker_pid(run.saver)
    if pid is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        _later(fault.delay, lambda: os.kill(pid, signal.SIGCONT))


def _limit_files(run: Run, stack: contextlib.ExitStack, settled: threading.Event) -> None:
    """The kernel refuses to let files of whoever writes grow, until this save has ended."""
    run.saver.start()
    pid = worker_pid(run.saver) or os.getpid()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (_LIMIT_NBYTES, hard))

    def lift() -> None:
        settled.wait(60)
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))

    stack.callback(lift)


def _hold_syncs(stack: contextlib.ExitStack) -> None:
    """No file is durable before training has gone on for some steps."""
    gate = threading.Event()
    sync = os.fsync

    def slow(descriptor: int) -> None:
        if threading.current_thread().name.startswith("dist_ckpt"):
            gate.wait(20)
        sync(descriptor)

    stack.enter_context(mock.patch.object(os, "fsync", slow))
    stack.callback(gate.set)


def _fail_in(fault: Fault, stack: contextlib.ExitStack) -> None:
    target = {
        # On rank 0 while it plans; on any other rank in the same exchange.
        "planning": "dist_ckpt._saving.plan.prepare",
        "staging": "dist_ckpt._worker.submit._stage",
        "no memory": "dist_ckpt._staging_pool.pool.StagingPool.acquire",
    }[fault.name]
    error = OSError(12, f"boom in {fault.name}")
    stack.enter_context(mock.patch(target, side_effect=error))


def _hold_the_interpreter() -> None:
    """One call that keeps the interpreter's lock: no other thread of this process runs."""
    assert pow(7, 150_000) % 2


def _remove_attempts(folder: Path) -> None:
    """Somebody tidies up. In one step: a tree that is removed bit by bit may be committed half."""
    for attempt in folder.glob(".dist-ckpt-*.attempt"):
        taken = folder.parent / f"taken-{attempt.name}"
        with contextlib.suppress(FileNotFoundError):
            attempt.rename(taken)
            shutil.rmtree(taken, ignore_errors=True)


def _change(job: Job) -> None:
    with torch.no_grad():
        for model in job.models:
            for parameter in model.parameters():
                parameter.add_(1)


def shown(records: list[Record]) -> str:
    """Return one line: how many saves were made, and how they ended by fault."""
    first = records[0]
    num_good = sum(error is None for _, _, error in first.ended.values())
    bad: dict[str, int] = {}
    for fault, _, error in first.ended.values():
        if error is not None:
            bad[fault] = bad.get(fault, 0) + 1
    for _, fault, _ in first.refused:
        bad[fault] = bad.get(fault, 0) + 1
    count = len(first.ended) + len(first.refused)
    told = ", ".join(f"{fault} {n}" for fault, n in sorted(bad.items()))
    return f"{count} saves, {num_good} committed, {sum(bad.values())} failed: {told or 'none'}"
