"""What an Accelerator holds, read once at the beginning of a save or a load.

Here: the one place that knows Accelerate's private attributes. Not here: what is done with them.
Runs on every rank for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from accelerate.accelerator import Accelerator
from accelerate.utils.dataclasses import DistributedType
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dist_ckpt.derive import without_wrappers

__all__ = ["Job", "canonical", "is_sharded"]

_NOT_WRAPPED = frozenset({DistributedType.NO, DistributedType.FSDP})


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The prepared objects, in the order of ``prepare``.

    Attributes:
        models: As Accelerate keeps them: without the DDP wrapper it put around them.
        optimizers: Accelerate's wrappers around them.
        schedulers: Likewise.
        dataloaders: Likewise.
        custom_objects: What was given to ``register_for_checkpointing``.
        save_hooks: ``hook(models, weights, output_dir)``, in order.
        load_hooks: ``hook(models, input_dir)``, in order.
        is_fsdp: Whether hooks get no models and weights, as FSDP's are sharded.
        replicas: ``equal`` if DDP keeps all models equal on all ranks, else None.
    """

    models: tuple[nn.Module, ...]
    optimizers: tuple[Any, ...]
    schedulers: tuple[Any, ...]
    dataloaders: tuple[Any, ...]
    custom_objects: tuple[Any, ...]
    save_hooks: tuple[Callable[..., Any], ...]
    load_hooks: tuple[Callable[..., Any], ...]
    is_fsdp: bool
    replicas: Literal["equal"] | None

    @classmethod
    def of(cls, accelerator: Accelerator) -> Job:
        """Read an Accelerator."""
        models = tuple(accelerator._models)  # noqa: SLF001 - Accelerate has no public way
        return cls(
            models=models,
            optimizers=tuple(accelerator._optimizers),  # noqa: SLF001 - same
            schedulers=tuple(accelerator._schedulers),  # noqa: SLF001 - same
            dataloaders=tuple(accelerator._dataloaders),  # noqa: SLF001 - same
            custom_objects=tuple(accelerator._custom_objects),  # noqa: SLF001 - same
            save_hooks=tuple(accelerator._save_model_state_pre_hook.values()),  # noqa: SLF001
            load_hooks=tuple(accelerator._load_model_state_pre_hook.values()),  # noqa: SLF001
            is_fsdp=accelerator.distributed_type == DistributedType.FSDP,
            replicas=_replicas(accelerator, models),
        )

    @property
    def is_sharded(self) -> bool:
        """Whether no rank has all of the state."""
        return self.is_fsdp or any(is_sharded(model) for model in self.models)


def is_sharded(model: nn.Module) -> bool:
    """Whether other ranks hold parts of this model."""
    return any(isinstance(p, DTensor) for p in model.parameters()) or any(
        isinstance(module, FullyShardedDataParallel) for module in model.modules()
    )


def canonical(name: str, model: nn.Module) -> str:
    """Return a name in ``model.state_dict()`` as it is without wrappers."""
    if isinstance(model, DistributedDataParallel):
        name = name.removeprefix("module.")
    return without_wrappers(name)


def _replicas(accelerator: Accelerator, models: tuple[nn.Module, ...]) -> Literal["equal"] | None:
    """Whether DDP, whose wrapper Accelerate does not keep, holds all models equal on all ranks.

    Accelerate marks what ``prepare_model`` returns. Under DDP that is the wrapper, so the module
    inside of it goes without the mark; a module that was not wrapped (frozen, for evaluation, cut
    by tensor parallelism) bears it.
    """
    if accelerator.distributed_type in _NOT_WRAPPED:
        return None
    for model in models:
        ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        if ignored or is_sharded(model) or vars(model).get("_is_accelerate_prepared", False):
            return None
    return "equal"
