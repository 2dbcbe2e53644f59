"""``Accelerator.save_state``: hooks, collecting, one save of the core, and only then the pruning.

Here: the order of these steps. Not here: their content (``state``, ``naming``, ``attendance``, and
``dist_ckpt``). Called on every rank; whatever fails on one is raised on all, and then the
Accelerator is as it was before.

A save in the background goes through the same steps; writing, pruning and the removal of what is
temporary come after the return. When it fails, its number is spent: a later save never gets the
name of an earlier one.
"""

from __future__ import annotations

import shutil
import uuid
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from accelerate.accelerator import Accelerator
from torch import nn

from accelerate_dist_ckpt import naming
from accelerate_dist_ckpt.attendance import Attendance, attend
from accelerate_dist_ckpt.job import Job, canonical, is_sharded
from accelerate_dist_ckpt.lifetime import Registration
from accelerate_dist_ckpt.state import FRAMEWORK, common_state, rank_state
from dist_ckpt.background import BackgroundSaver
from dist_ckpt.derive.edits import LentStateDict
from dist_ckpt.errors import ConfigError
from dist_ckpt.events import EventSink, emit_pruned
from dist_ckpt.recovery import forget_owner, record_owner, sweep_once
from dist_ckpt.serialization import all_processes, single_process
from dist_ckpt.storage.trees import make_directory
from dist_ckpt.training_state import TrainingState, save_training_state
from dist_ckpt.types import Communicator, StateDict

__all__ = ["save_state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What rank 0 decided about a save.

    Attributes:
        target: The checkpoint.
        staging_dir: Where it is prepared; not within ``checkpoints/``, of which Accelerate parses
            every entry.
        hooks_dir: Where the hooks write, if there are any.
        iteration: The number of this save.
    """

    target: Path
    staging_dir: Path
    hooks_dir: Path | None
    iteration: int


@dataclass(frozen=True, slots=True)
class _Collected:
    """What one rank gives, hooks done.

    Attributes:
        weights: For each model that the hooks left in the list: its state dict if it was changed.
    """

    common: StateDict
    per_rank: StateDict
    weights: Mapping[int, Mapping[str, Any] | None]


def save_state(accelerator: Accelerator, registration: Registration, output_dir: Any) -> Path:
    """Save all of a job's state as one checkpoint. Collective.

    With ``async_save`` it returns when the state may change; the checkpoint is there when all ranks
    have written it. Under DDP it may be called on rank 0 alone, as natively, with a warning; such a
    save blocks, and comes after those in flight.

    Raises:
        CheckpointingException: On every rank, whatever failed on any; nothing is changed then.
        AsyncSaveError: A save in the background before this one failed; this one does not begin.
        ValueError: The automatically named checkpoint exists, or is being written.
    """
    io, job = registration.io, Job.of(accelerator)
    announced = naming.announced_target(accelerator, output_dir)
    attendance = attend(
        announced,
        sharded=job.is_sharded,
        lone_rank_timeout_secs=io.lone_rank_timeout_secs,
        timeout_secs=io.config.timeout_secs,
    )
    _warn(accelerator, attendance, announced)
    if attendance == "late":
        return Path(announced)
    saver, comm = _savers(accelerator, registration, attendance)
    in_flight = () if saver is None else saver.in_flight
    plan = comm.map_reduce(
        "opening a save",
        lambda: (bool(job.save_hooks), saver is not None),
        lambda ranks: _open(accelerator, registration, Path(announced), in_flight, ranks),
    )
    discard = _remover(plan.hooks_dir if comm.rank == 0 else None)
    sinks = registration.sinks(accelerator)
    try:
        state = _training_state(accelerator, job, plan, comm)
        options = io.save_options(staging_dir=plan.staging_dir, include_dir=plan.hooks_dir)
        save_training_state(
            plan.target,
            state,
            options=options,
            communicator=comm,
            saver=saver,
            on_settled=lambda _: discard(),
            memory=registration.memory,
            sinks=sinks,
        )
    except BaseException:
        discard()
        raise
    finally:
        if saver is None:
            registration.flush(accelerator)
    accelerator.project_configuration.iteration = plan.iteration + 1
    if saver is None:
        discard()
    else:
        registration.has_saved()
    if comm.rank == 0:
        _prune(accelerator, saver, sinks)
    return plan.target


def _savers(
    accelerator: Accelerator, registration: Registration, attendance: Attendance
) -> tuple[BackgroundSaver | None, Communicator]:
    """Return the background saver, None for a save that blocks, and the ranks that take part."""
    if attendance == "alone":
        registration.drain()
        return None, single_process()
    comm = all_processes(timeout_secs=registration.io.config.timeout_secs)
    return registration.saver(accelerator), comm


def _warn(accelerator: Accelerator, attendance: Attendance, target: str) -> None:
    if attendance == "alone":
        warnings.warn(
            f"save_state({target!r}) was called on rank 0 only: what is equal on all ranks was "
            "saved, the random states and dataloaders of the other ranks were not.",
            stacklevel=4,
        )
    if attendance == "late":
        warnings.warn(
            f"save_state({target!r}): rank 0 saved without this rank, which came late.",
            stacklevel=4,
        )
    if accelerator.project_configuration.save_on_each_node and accelerator.is_main_process:
        warnings.warn(
            "save_on_each_node has no effect: all ranks write one checkpoint, on a file system "
            "that they share.",
            stacklevel=4,
        )
    if not accelerator.sync_gradients and accelerator.is_main_process:
        warnings.warn(
            "save_state() was called in the middle of accumulating gradients, which are not saved: "
            "after a resume, the first step lacks those of this step's earlier batches.",
            stacklevel=4,
        )


def _open(
    accelerator: Accelerator,
    registration: Registration,
    announced: Path,
    in_flight: Collection[Path],
    ranks: Sequence[tuple[bool, bool]],
) -> _Plan:
    """Choose the directories and make the one for hooks. Rank 0.

    Args:
        accelerator: Rank 0's.
        registration: Its IO.
        announced: Where to save, or the folder of numbered checkpoints.
        in_flight: Where saves in the background go.
        ranks: Of each rank, whether it has hooks, and whether it saves in the background.
    """
    has_hooks = any(hooks for hooks, _ in ranks)
    in_background = [rank for rank, (_, is_async) in enumerate(ranks) if is_async]
    if in_background and len(in_background) < len(ranks):
        raise ConfigError(
            f"async_save is on for {len(in_background)} of {len(ranks)} ranks only, for rank "
            f"{in_background[0]} among them.",
            hint="give all ranks the same arguments, environment and YAML.",
        )
    automatic = naming.is_automatic(accelerator)
    target = naming.next_target(accelerator, in_flight) if automatic else announced
    staging_dir = announced.parent
    for folder in {staging_dir, target.parent}:
        sweep_once(folder, registration.swept, registration.io.config.sweep_after_secs)
    hooks_dir = None
    if has_hooks:
        hooks_dir = staging_dir / f".dist-ckpt-{uuid.uuid4().hex[:12]}.hooks"
        make_directory(hooks_dir.parent)
        record_owner(hooks_dir)
        hooks_dir.mkdir()
    return _Plan(
        target=target,
        staging_dir=staging_dir,
        hooks_dir=hooks_dir,
        iteration=accelerator.save_iteration,
    )


def _prune(
    accelerator: Accelerator, saver: BackgroundSaver | None, sinks: Collection[EventSink]
) -> None:
    """Remove what is above ``total_limit``, if a save is committed; now, or when it is. Rank 0."""
    prune = naming.pruner(accelerator) if naming.is_automatic(accelerator) else None
    if prune is None:
        return
    reason = "above total_limit"
    if saver is None:
        for path in prune():
            emit_pruned(sinks, path, reason)
        return

    def remove() -> None:
        for path in prune():
            saver.pruned(path, reason)

    saver.after_commit(remove, what="removing checkpoints above total_limit", frees_space=True)


def _remover(directory: Path | None) -> Callable[[], None]:
    """Return what removes a directory, if there is one; it may be called again, on any thread."""

    def remove() -> None:
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
            forget_owner(directory)

    return remove


def _training_state(
    accelerator: Accelerator, job: Job, plan: _Plan, comm: Communicator
) -> TrainingState:
    """Run the hooks and collect. Collective: no hook's file is missing when the save begins."""
    collected: list[_Collected] = []

    def collect() -> dict[int, tuple[str, ...] | None]:
        weights = _run_hooks(job, plan.hooks_dir)
        collected.append(
            _Collected(common_state(accelerator, job), rank_state(accelerator, job), weights)
        )
        return {i: None if w is None else tuple(w) for i, w in weights.items()}

    # Hooks take weights away on rank 0 only, often: it decides for all.
    wanted = comm.map_reduce("preparing a save", collect, lambda views: views[0])
    (mine,) = collected
    replicas: Literal["equal", "differ"] | None = job.replicas
    if any(names is not None for names in wanted.values()):
        replicas = "differ"
    return TrainingState(
        models=job.models,
        optimizers=job.optimizers,
        common=mine.common,
        per_rank=mine.per_rank,
        framework=FRAMEWORK,
        replicas=replicas,
        model_values=_model_values(job, wanted, mine, rank=comm.rank),
    )


def _run_hooks(job: Job, hooks_dir: Path | None) -> dict[int, Mapping[str, Any] | None]:
    """Call the user's hooks; return which models they left, and the weights they changed."""
    if hooks_dir is None:
        return dict.fromkeys(range(len(job.models)))
    weights: list[Any] = [] if job.is_fsdp else [model.state_dict() for model in job.models]
    before = [LentStateDict(one) for one in weights]
    position = {id(one): i for i, one in enumerate(weights)}
    given = list(weights)  # kept alive, so that no other object gets one of these ids
    for hook in job.save_hooks:
        hook(list(job.models), weights, str(hooks_dir))
    if job.is_fsdp:
        return dict.fromkeys(range(len(job.models)))
    left: dict[int, Mapping[str, Any] | None] = {}
    for place, one in enumerate(weights):
        i = position.get(id(one), place)
        changed = one is not given[i] or before[i].was_edited(one)
        left[i] = one if changed else None
    return left


def _model_values(
    job: Job,
    wanted: Mapping[int, Sequence[str] | None],
    mine: _Collected,
    *,
    rank: int,
) -> dict[int, Mapping[str, Any]]:
    """Return state dicts to store in place of models' own; empty ones for those taken away."""
    values: dict[int, Mapping[str, Any]] = {}
    for i, model in enumerate(job.models):
        names = wanted.get(i, ())
        if names is None:
            continue
        values[i] = {}
        if names and (rank == 0 or is_sharded(model)):
            weights = mine.weights.get(i) or model.state_dict()
            values[i] = _chosen(weights, names, model)
    return values


def _chosen(weights: Mapping[str, Any], names: Sequence[str], model: nn.Module) -> dict[str, Any]:
    """Return the entries of these names, with the modules' metadata."""
    chosen: OrderedDict[str, Any] = OrderedDict(
        (canonical(name, model), weights[name]) for name in names if name in weights
    )
    noted = getattr(weights, "_metadata", None)
    if noted is not None:
        vars(chosen)["_metadata"] = {canonical(k, model): one for k, one in noted.items()}
    return chosen
