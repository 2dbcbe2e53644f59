"""``Accelerator.load_state``: choose, hooks, models, optimizers, and the rest, in this order.

Here: the order of these steps. Not here: their content (``choosing``, ``state``, ``dist_ckpt``).
Called on every rank; whatever fails on one is raised on all.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate.accelerator import Accelerator

from accelerate_dist_ckpt.choosing import choose, count_on
from accelerate_dist_ckpt.job import Job
from accelerate_dist_ckpt.lifetime import Registration
from accelerate_dist_ckpt.state import FRAMEWORK, counts_problem, restore_foreign, restore_own
from dist_ckpt.errors import MismatchError
from dist_ckpt.serialization import all_processes
from dist_ckpt.training_state import CheckpointView

__all__ = ["load_state"]


def load_state(
    accelerator: Accelerator,
    registration: Registration,
    input_dir: Any,
    *,
    strict: bool = True,
    map_location: str | None = None,
) -> str | None:
    """Load a checkpoint, from whatever layout it was saved in. Collective.

    Saves in flight end first, with what is queued behind them: it is found what would be there if
    they had blocked.

    Args:
        accelerator: All of its objects are filled in place.
        registration: The IO and its saver.
        input_dir: The checkpoint; None for the newest good one with automatic naming.
        strict: Whether names that only one side has are an error.
        map_location: Accelerate's own; everything is loaded to where it lives in any case.

    Returns:
        None; or the directory, if a checkpoint of Accelerate's own stands there.

    Raises:
        AsyncSaveError: A save in the background failed and nobody was told; nothing is loaded then.
        CheckpointNotFoundError: There is none; ``IncompleteCheckpointError`` if never committed.
        CorruptedCheckpointError: It is damaged; without ``input_dir``, all of them are.
        MismatchError: The checkpoint holds other models, optimizers or objects.
        UnsafeContentError: A value, mostly of a custom object, needs ``allow_pickle=True``.
    """
    if map_location not in {None, "cpu", "on_device"}:
        raise TypeError(
            "Unsupported optimizer map location passed, please choose one of `None`, `'cpu'`, or "
            "`'on_device'`"
        )
    registration.drain()
    io = registration.io
    comm = all_processes(timeout_secs=io.config.timeout_secs)
    path, is_ours = choose(accelerator, io, input_dir, comm)
    if input_dir is None:
        count_on(accelerator, comm)
    if not is_ours:
        return str(path)
    view = CheckpointView.open(path, options=io.load_options(), communicator=comm)
    job = Job.of(accelerator)
    run_hooks = lambda: _run_hooks(job, view, path)  # noqa: E731 - of this step alone
    for i in comm.map_reduce("preparing a load", run_hooks, lambda views: views[0]):
        view.load_model(i, job.models[i], strict=strict)
    for j, optimizer in enumerate(job.optimizers):
        view.load_optimizer(j, optimizer, job.models)

    def restore() -> None:
        if view.framework == FRAMEWORK:
            restore_own(accelerator, job, view, rank=comm.rank, world_size=comm.size)
        else:
            restore_foreign(accelerator, job, view, rank=comm.rank, name=str(path))

    comm.map_reduce("restoring what is no tensor", restore, lambda _: None)
    return None


def _run_hooks(job: Job, view: CheckpointView, path: Path) -> Sequence[int]:
    """Check that the objects fit, call the user's hooks, return which models they left to us."""
    problem = counts_problem(view, job)
    if problem:
        raise MismatchError(
            f"{path}: {problem}.",
            hint="prepare and register the same objects, in the same order, as at saving.",
        )
    models = [] if job.is_fsdp else list(job.models)
    for hook in job.load_hooks:
        hook(models, str(path))
    if job.is_fsdp:
        return range(len(job.models))
    left = {id(model) for model in models}
    return [i for i, model in enumerate(job.models) if id(model) in left]
