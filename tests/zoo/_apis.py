"""The three APIs (core, Lightning, Accelerate), each with ours and with stock checkpoints.

Here: for each API one function that trains, saves, resumes and trains on; ``how`` selects stock
checkpoints, ours, or none (an uninterrupted run). Not here: the workloads and what is expected of
them. Importing this takes seconds: only ranks do, see ``_worlds.py``.
"""
# ruff: noqa: ARG002 - the arguments of hooks are Lightning's

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning as L  # noqa: N812 - as its documents write it
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import accelerate_dist_ckpt  # noqa: F401 - attaches the method
from accelerate_dist_ckpt import DistCkptIO as AccelerateIO
from dist_ckpt import load_model_and_optimizer, save_model_and_optimizer
from dist_ckpt.options import LoadOptions, SaveOptions
from lightning_dist_ckpt import DistCkptIO as LightningIO
from tests.accelerate._jobs import new_accelerator, reset
from tests.lightning._training import make_trainer
from tests.zoo import _loaders, _strategies
from tests.zoo._pictures import state_picture
from tests.zoo._workloads import WORKLOADS, Workload

How = Literal["stock", "ours", "uninterrupted"]

TIMEOUT_SECS = 300.0  # for hangs, not for busy machines
SAVED_AT = 3
LAST = 5


@dataclass
class Job:
    """What a script would have in its variables."""

    workload: Workload
    model: nn.Module
    optimizer: Any
    inputs: list[Any]
    bare: nn.Module
    companion: Any = None

    def train(self, steps: range, backward: Any = None) -> None:
        for step in steps:
            loss = self.workload.loss(self.model, self.inputs[step])
            (backward or torch.Tensor.backward)(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.follow()

    def follow(self) -> None:
        self.workload.after_step(self.bare)
        if self.companion is not None:
            self.workload.follow(self.companion, self.bare)

    def picture(self, when: str) -> dict[str, Any]:
        extra = None if self.companion is None else self.companion.state_dict()
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # Accelerate's wrapper
        found = state_picture(self.bare, optimizer, extra)
        return {f"{when}: {key}": value for key, value in found.items()}


def _go_on(job: Job, backward: Any = None) -> dict[str, Any]:
    found = job.picture("saved") | job.picture("loaded")
    job.train(range(SAVED_AT, LAST), backward)
    return found | job.picture("resumed")


def seeded(make: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    return make()


def batches(workload: Workload, layout: str, rank: int) -> list[Any]:
    """Return a batch for each step; replicas see different ones."""
    torch.manual_seed(1000 + (rank if layout == "ddp" else 0))
    return [workload.inputs() for _ in range(LAST)]


# -- the core --------------------------------------------------------------------------------------


def _core_job(workload: Workload, layout: str, rank: int, seed: int) -> Job:
    bare = seeded(workload.build, seed)
    if layout == "fsdp2":
        fully_shard(bare)
    model = DistributedDataParallel(bare) if layout == "ddp" else bare
    companion = workload.companion(bare) if workload.companion else None
    inputs = batches(workload, layout, rank)
    return Job(workload, model, workload.optimizer(bare), inputs, bare, companion)


def core(workload: Workload, layout: str, rank: int, root: Path, *, how: How) -> dict[str, Any]:
    """torch.save and torch.load of state_dicts, by each rank for itself if it has its own part."""
    job = _core_job(workload, layout, rank, seed=1)
    job.train(range(SAVED_AT))
    found = job.picture("trained")
    if how == "uninterrupted":
        return found | _go_on(job)
    extra = {} if job.companion is None else {"companion": job.companion.state_dict()}
    path = root / "ours"
    if how == "ours":
        options = SaveOptions(timeout_secs=TIMEOUT_SECS)
        save_model_and_optimizer(path, job.model, job.optimizer, common=extra, options=options)
    else:
        path = root / (f"stock-{rank}" if layout == "fsdp2" else "stock")
        whole = {"model": job.bare.state_dict(), "optimizer": job.optimizer.state_dict(), **extra}
        if layout == "fsdp2" or rank == 0:
            torch.save(whole, path)
    if layout != "single":
        dist.barrier()
    found |= job.picture("saved")

    again = _core_job(workload, layout, rank, seed=2)
    if how == "ours":
        options = LoadOptions(timeout_secs=TIMEOUT_SECS)
        extra = load_model_and_optimizer(path, again.model, again.optimizer, options=options)
    else:
        extra = torch.load(path, weights_only=False)
        again.bare.load_state_dict(extra["model"])
        again.optimizer.load_state_dict(extra["optimizer"])
    if again.companion is not None:
        again.companion.load_state_dict(extra["companion"])
    found |= again.picture("loaded")
    again.train(range(SAVED_AT, LAST))
    return found | again.picture("resumed")


# -- Lightning -------------------------------------------------------------------------------------


class Lit(L.LightningModule):
    """A workload as a LightningModule."""

    def __init__(self, workload: Workload, layout: str, rank: int, seed: int) -> None:
        super().__init__()
        self.workload = workload
        self.net = seeded(workload.build, seed)
        self.inputs = batches(workload, layout, rank)
        self.companion: Any = None
        self.is_sharded = False
        self.found: dict[str, Any] = {}

    def configure_model(self) -> None:
        if self.device_mesh is not None and not self.is_sharded:
            self.is_sharded = True
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        if self.workload.companion and self.companion is None:
            self.companion = self.workload.companion(self.net)
        return self.workload.optimizer(self.net)

    def on_train_start(self) -> None:
        if self.trainer.global_step == SAVED_AT:
            self.look("loaded")

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.workload.loss(self.net, self.inputs[self.trainer.global_step])

    def on_train_batch_end(self, *args: Any) -> None:
        self.workload.after_step(self.net)
        if self.companion is not None:
            self.workload.follow(self.companion, self.net)
        if self.trainer.global_step == SAVED_AT:
            for when in ("trained", "saved", "loaded"):
                self.look(when)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.companion is not None:
            checkpoint["companion"] = self.companion.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.companion is None and self.workload.companion:
            self.companion = self.workload.companion(self.net)
        if self.companion is not None:
            self.companion.load_state_dict(checkpoint["companion"])

    def look(self, when: str) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        extra = None if self.companion is None else self.companion.state_dict()
        found = state_picture(self.net, optimizer, extra)
        self.found |= {f"{when}: {key}": value for key, value in found.items()}


def lightning(
    workload: Workload, layout: str, rank: int, root: Path, *, how: How
) -> dict[str, Any]:
    """Trainer.save_checkpoint and fit(ckpt_path=...), with our plugin and without."""

    def trainer(steps: int) -> L.Trainer:
        return make_trainer(
            layout,
            root,
            plugins=[LightningIO(timeout_secs=TIMEOUT_SECS)] if how == "ours" else None,
            max_steps=steps,
        )

    data = torch.utils.data.DataLoader(torch.arange(64))
    path = root / f"{how}.ckpt"
    module = Lit(workload, layout, rank, seed=1)
    if how == "uninterrupted":
        trainer(LAST).fit(module, data)
        module.look("resumed")
        return module.found

    first = trainer(SAVED_AT)
    first.fit(module, data)
    first.save_checkpoint(path)
    module.look("saved")

    again = Lit(workload, layout, rank, seed=2)
    trainer(LAST).fit(again, data, ckpt_path=path, weights_only=False)
    again.look("resumed")
    return module.found | again.found


# -- Accelerate ------------------------------------------------------------------------------------


def _accelerate_job(workload: Workload, layout: str, rank: int, seed: int) -> tuple[Any, Job]:
    accelerator = new_accelerator(layout)
    bare = seeded(workload.build, seed)
    model, optimizer = accelerator.prepare(bare, workload.optimizer(bare))
    bare = accelerator.unwrap_model(model)
    companion = workload.companion(bare) if workload.companion else None
    if companion is not None:
        accelerator.register_for_checkpointing(companion)
    inputs = batches(workload, layout, rank)
    return accelerator, Job(workload, model, optimizer, inputs, bare, companion)


def accelerate(
    workload: Workload, layout: str, rank: int, root: Path, *, how: How
) -> dict[str, Any]:
    """save_state and load_state, with our IO registered and without."""

    def start(seed: int) -> tuple[Any, Job]:
        accelerator, job = _accelerate_job(workload, layout, rank, seed)
        if how == "ours":
            accelerator.register_checkpoint_io(AccelerateIO(timeout_secs=TIMEOUT_SECS))
        return accelerator, job

    path = str(root / how)
    try:
        accelerator, job = start(1)
        job.train(range(SAVED_AT), accelerator.backward)
        found = job.picture("trained")
        if how == "uninterrupted":
            return found | _go_on(job, accelerator.backward)
        # A file of safetensors has no versions of modules, and no values that are not tensors.
        accelerator.save_state(path, **({} if how == "ours" else {"safe_serialization": False}))
        found |= job.picture("saved")

        accelerator, again = start(2)
        accelerator.load_state(path)
        found |= again.picture("loaded")
        again.train(range(SAVED_AT, LAST), accelerator.backward)
        return found | again.picture("resumed")
    finally:
        reset()


_OTHERS: dict[str, Any] = {
    "torchdata StatefulDataLoader": _loaders.APIS,
    "Lightning strategy with save and load": _strategies.APIS,
}
APIS = {"core": core, "lightning": lightning, "accelerate": accelerate}


@contextmanager
def eager() -> Iterator[None]:
    """Let torch.compile do nothing: torchao's optimizers would call a compiler for seconds."""
    torch.compiler.set_stance("force_eager")
    try:
        yield
    finally:
        torch.compiler.set_stance("default")


def run(name: str, api: str, layout: str, rank: int, root: Path, *, how: How) -> dict[str, Any]:
    """Return pictures of what a workload was, is after a resume, and becomes."""
    if name in _OTHERS:
        return _OTHERS[name][api](layout, rank, root, how=how)
    return APIS[api](WORKLOADS[name], layout, rank, root, how=how)
