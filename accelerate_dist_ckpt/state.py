"""Everything of a job besides models and optimizers, to a checkpoint and back.

Here: what is common to all ranks, what each rank has for itself, and restoring both. Not here:
files, directories and exchanges (``saving``, ``loading``). Runs on every rank for itself.

``common`` has ``schedulers`` and ``step`` at its top, where other frameworks' adapters of dist-ckpt
have them too, and the rest under ``accelerate``.
"""

from __future__ import annotations

import warnings

from accelerate.accelerator import Accelerator

from accelerate_dist_ckpt import rng
from accelerate_dist_ckpt.dataloaders import order_is_unknown, restore_dataloader, snapshot
from accelerate_dist_ckpt.job import Job
from dist_ckpt.training_state import CheckpointView
from dist_ckpt.types import StateDict

__all__ = [
    "FRAMEWORK",
    "common_state",
    "counts_problem",
    "rank_state",
    "restore_foreign",
    "restore_own",
]

FRAMEWORK = "accelerate"


def common_state(accelerator: Accelerator, job: Job) -> StateDict:
    """Return what is the same on all ranks; rank 0's is stored."""
    scaler = accelerator.scaler
    return {
        "schedulers": [scheduler.state_dict() for scheduler in job.schedulers],
        "step": _optimizer_steps(accelerator, job),
        FRAMEWORK: {
            "step": accelerator.step,
            "save_iteration": accelerator.save_iteration,
            "scaler": None if scaler is None else scaler.state_dict(),
            # A tuple is stored as it is, with whatever classes of dicts and lists are in it.
            "custom_objects": tuple(one.state_dict() for one in job.custom_objects),
            "dataloaders": tuple(snapshot(loader) for loader in job.dataloaders),
            "seed": rng.fresh_seed(),
        },
    }


def _optimizer_steps(accelerator: Accelerator, job: Job) -> int:
    """Return how many steps the optimizers made, which Accelerate itself does not count.

    ``accelerator.step`` counts batches within ``accumulate`` only, and begins anew each epoch.
    """
    counts = [
        max(
            (int(state["step"]) for state in optimizer.state.values() if "step" in state), default=0
        )
        for optimizer in job.optimizers
    ]
    return sum(counts) or accelerator.step // accelerator.gradient_accumulation_steps


def rank_state(accelerator: Accelerator, job: Job) -> StateDict:
    """Return this rank's own values."""
    for index, loader in enumerate(job.dataloaders):
        if order_is_unknown(loader) and accelerator.is_main_process:
            warnings.warn(
                f"The order of dataloader {index} was drawn when it was prepared, and the draws "
                "were not recorded: a run that resumes this epoch gets another order. Register the "
                "checkpoint IO before prepare(); with use_seedable_sampler=True, a stateful loader "
                "with workers draws its first epoch from a sampler that Accelerate then replaces.",
                stacklevel=2,
            )
    return {
        "random": rng.random_state(accelerator.device, all_devices=accelerator.num_processes == 1),
        "dataloaders": tuple(snapshot(loader) for loader in job.dataloaders),
    }


def counts_problem(view: CheckpointView, job: Job) -> str:
    """Return how the registered objects do not fit the checkpoint; empty if they do."""
    own = view.common.get(FRAMEWORK, {})
    stored = {
        "optimizers": view.num_optimizers,
        "schedulers": len(view.common.get("schedulers", ())),
        "custom objects": len(own.get("custom_objects", ())),
    }
    here = {
        "optimizers": len(job.optimizers),
        "schedulers": len(job.schedulers),
        "custom objects": len(job.custom_objects),
    }
    if view.framework != FRAMEWORK:  # has no custom objects, and perhaps no schedulers
        stored, here = {"optimizers": stored["optimizers"]}, {"optimizers": here["optimizers"]}
    # As in Accelerate itself, a program that only evaluates may leave optimizers out.
    wrong = [
        f"{name}: {stored[name]} stored, {here[name]} registered"
        for name in stored
        if here[name] > stored[name] or (name == "custom objects" and here[name] != stored[name])
    ]
    return "; ".join(wrong)


def restore_own(
    accelerator: Accelerator, job: Job, view: CheckpointView, *, rank: int, world_size: int
) -> None:
    """Restore a checkpoint of Accelerate, after models and optimizers."""
    own, mine = view.common[FRAMEWORK], view.per_rank()
    for scheduler, state in zip(job.schedulers, view.common["schedulers"], strict=False):
        scheduler.load_state_dict(state)
    for custom, state in zip(job.custom_objects, own["custom_objects"], strict=True):
        custom.load_state_dict(state)
    if accelerator.scaler is not None and own["scaler"] is not None:
        accelerator.scaler.load_state_dict(own["scaler"])
    elif accelerator.scaler is not None and rank == 0:
        warnings.warn("The checkpoint has no gradient scaler: it starts afresh.", stacklevel=5)
    accelerator.step = own.get("step", view.common["step"])
    config = accelerator.project_configuration
    config.iteration = max(config.iteration, own["save_iteration"] + 1)
    _restore_dataloaders(
        job, (mine or own)["dataloaders"], own=mine is not None and view.world_size == world_size
    )
    # Last: what was done above may have drawn random numbers.
    if mine is not None:
        rng.set_random_state(mine["random"], accelerator.device)
        return
    rng.reseed(own["seed"], rank)
    warnings.warn(
        f"Rank {rank} of {world_size} has no random state in this checkpoint of {view.world_size} "
        "rank(s): it was seeded anew, the same way each time this is loaded.",
        stacklevel=5,
    )


def restore_foreign(
    accelerator: Accelerator, job: Job, view: CheckpointView, *, rank: int, name: str
) -> None:
    """Restore schedulers and step of a checkpoint that another framework wrote."""
    schedulers = view.common.get("schedulers", ())
    fits = len(schedulers) >= len(job.schedulers)
    for scheduler, state in zip(job.schedulers, schedulers if fits else (), strict=False):
        scheduler.load_state_dict(state)
    # Others count optimizer steps; Accelerate counts batches, within accumulation of gradients.
    accelerator.step = view.common.get("step", 0) * accelerator.gradient_accumulation_steps
    if rank == 0:
        afresh = ["random state", "dataloaders", "custom objects"]
        if not fits:
            counts = f"{len(schedulers)} stored, {len(job.schedulers)} registered"
            afresh.append(f"schedulers ({counts})")
        warnings.warn(
            f"{name} was written by {view.framework or 'another program'}: models and optimizers "
            f"are loaded; {', '.join(afresh)} start afresh.",
            stacklevel=5,
        )


def _restore_dataloaders(job: Job, states: tuple[StateDict, ...], *, own: bool) -> None:
    # As natively, a program may prepare further ones, for evaluation say, after a resume.
    if len(job.dataloaders) > len(states):
        warnings.warn(
            f"{len(job.dataloaders)} dataloaders are prepared, {len(states)} are stored: the "
            "others start afresh.",
            stacklevel=6,
        )
    for loader, state in zip(job.dataloaders, states, strict=False):
        restore_dataloader(loader, state, own=own)
        if "stateful" in state and not own:
            warnings.warn(
                "The number of ranks changed: stateful dataloaders start afresh.", stacklevel=6
            )
