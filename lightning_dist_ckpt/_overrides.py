"""What a bound strategy does differently: all ranks save, all ranks load.

Here: the overriding methods, and the class made of them for one strategy. Not here: when a strategy
is bound (``_bind``). Called by Lightning, on every rank, in the main thread.

The order is the same for every strategy: ``load_checkpoint``, then the user's hooks, which may edit
the dict, then ``load_model_state_dict``, then ``load_optimizer_state_dict``.
"""

from __future__ import annotations

import functools
import logging
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from dist_ckpt.derive import load_whole_model, local_state_dict, model_layout
from dist_ckpt.derive.edits import LentStateDict
from dist_ckpt.errors import CheckpointingException, ConfigError, MismatchError
from dist_ckpt.events import emit_pruned
from dist_ckpt.recovery import sweep_once
from dist_ckpt.serialization import all_processes
from dist_ckpt.training_state import (
    CheckpointView,
    SaveMemory,
    TrainingState,
    save_training_state,
)
from dist_ckpt.validation import casts_into, check_casts, warn_of_casts
from lightning_dist_ckpt._document import (
    DIRECT,
    FRAMEWORK,
    common_of,
    lightning_dict,
    named_as_in,
)
from lightning_dist_ckpt._folders import without_scheme
from lightning_dist_ckpt._metrics import OTHERS_KEPT, SaveEvents
from lightning_dist_ckpt._plain import load_whole_optimizer
from lightning_dist_ckpt._retention import may_go
from lightning_dist_ckpt._stored import StoredModel, StoredOptimizer
from lightning_dist_ckpt.export import is_stock
from lightning_dist_ckpt.io import checked_target

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from dist_ckpt.types import PathLike, StateDict
    from lightning_dist_ckpt._fit_saves import FitSaves
    from lightning_dist_ckpt._preempt import Preemption
    from lightning_dist_ckpt.io import DistCkptIO

__all__ = ["LOADING_MODEL", "OVERRIDDEN", "Binding", "FailedDump", "bound_class"]


logger = logging.getLogger(__name__)

_LOOPS = ("fit_loop", "validate_loop", "test_loop", "predict_loop")

LOADING_MODEL = "preparing the load of the model"
"""The step in which ranks tell whether a hook has failed before the model is loaded."""


@dataclass(slots=True, kw_only=True)
class Binding:
    """What a bound strategy knows besides Lightning's own.

    Attributes:
        io: The plugin.
        restores: Whether we restore the checkpoint that was opened last; else Lightning does.
        source: The checkpoint that was opened last.
        hooks_are_done: Whether all ranks know that their hooks have prepared the load of the model.
        resumed_from: What it is called without links.
        saves: Those of the fit that is running, if they go on in the background.
        preemption: Of the fit that is running, if it stops when it is told to.
        state_dict: The model's state dict that Lightning got for the save in preparation: any
            difference was made by a hook.
        swept: Folders in which this Trainer has removed leftovers of dead saves.
        memory: The plan that saves that block reuse, until the end of the run.
    """

    io: DistCkptIO
    restores: bool = False
    source: str = ""
    hooks_are_done: bool = False
    resumed_from: Path | None = None
    saves: FitSaves | None = None
    preemption: Preemption | None = None
    state_dict: LentStateDict = field(default_factory=functools.partial(LentStateDict, {}))
    swept: set[Path] = field(default_factory=set)
    memory: SaveMemory = field(default_factory=SaveMemory)


class FailedDump(dict[str, Any]):
    """Stands for Lightning's dict on a rank where it could not be made: the save tells all ranks.

    Args:
        error: Why not.
    """

    def __init__(self, error: Exception) -> None:
        """Keep the error; there is no content."""
        super().__init__()
        self.error = error

    def __missing__(self, key: object) -> Any:
        """Raise the error to whoever looks into it."""
        raise self.error


class LiveOptimizerState(dict[str, Any]):
    """Stands for an optimizer's state in the dict; what is stored is the live optimizer's."""

    @classmethod
    def of(cls, optimizer: Any) -> LiveOptimizerState:
        """Return the stand-in, with the settings of the groups to look at."""
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        return cls(state={}, param_groups=groups)

    def is_untouched(self, optimizer: Any) -> bool:
        """Whether nobody has changed it since."""
        now = self.of(optimizer)
        pairs = zip(self.get("param_groups", ()), now["param_groups"], strict=False)
        return (
            self.keys() == now.keys()
            and not self["state"]
            and len(self["param_groups"]) == len(now["param_groups"])
            and all(a.keys() == b.keys() and all(a[k] is b[k] for k in a) for a, b in pairs)
        )


def bound_class(base: type) -> type:
    """Return a subclass of ``base``, a strategy's class, that saves and loads collectively.

    It has one base only: an object's class can be exchanged for no other kind of subclass.
    """
    own = {name: value for name, value in vars(_Overrides).items() if name in OVERRIDDEN}
    names = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(base.__name__, (base,), {**own, **names, "dist_ckpt_base": base})


OVERRIDDEN = frozenset(
    {
        "__reduce_ex__",
        "barrier",
        "lightning_module_state_dict",
        "lightning_restore_optimizer",
        "load_checkpoint",
        "load_model_state_dict",
        "load_optimizer_state_dict",
        "on_train_end",
        "on_train_start",
        "optimizer_state",
        "remove_checkpoint",
        "save_checkpoint",
        "teardown",
    }
)


def _rebuilt(base: type) -> Any:
    """Return an empty bound strategy, to be unpickled into."""
    bound: Any = bound_class(base)
    return bound.__new__(bound)


def _stock(strategy: Any) -> Any:
    """Return the strategy as Lightning has it: what ``super()`` would be."""
    bound = next(cls for cls in type(strategy).__mro__ if "dist_ckpt_base" in vars(cls))
    return super(bound, strategy)


class _Overrides:
    """Methods for ``bound_class``; never an object of its own. ``self`` is a strategy."""

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Pickle by the class that can be imported (``ddp_spawn``)."""
        del protocol
        return _rebuilt, (type(self).dist_ckpt_base,), self.__getstate__()

    def barrier(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Meet. At the first barrier of a run Lightning has just put its handlers in place."""
        preemption = self.dist_ckpt_binding.preemption
        if preemption is not None and "run-stage" in args:
            preemption.install()
        return _stock(self).barrier(*args, **kwargs)

    # -- save

    def lightning_module_state_dict(self: Any) -> StateDict:
        """Return what this rank holds of the model; nothing is gathered."""
        state_dict: StateDict
        if isinstance(self.model, FullyShardedDataParallel):
            state_dict = local_state_dict(self.model, model_layout(self.model))
        elif self.restore_checkpoint_after_setup:
            model_layout(self.model)  # brings FSDP2 back to its shards
            state_dict = self.lightning_module.state_dict()
        else:
            state_dict = _stock(self).lightning_module_state_dict()
        self.dist_ckpt_binding.state_dict = LentStateDict(state_dict)
        return state_dict

    def optimizer_state(self: Any, optimizer: Any) -> StateDict:
        """Return a stand-in: the state itself is stored from the live optimizer."""
        return LiveOptimizerState.of(optimizer)

    def save_checkpoint(
        self: Any,
        checkpoint: dict[str, Any],
        filepath: PathLike,
        storage_options: Any | None = None,
    ) -> None:
        """Save with all ranks. Collective."""
        binding: Binding = self.dist_ckpt_binding
        target = checked_target(self.broadcast(str(filepath)), storage_options)
        # What hooks did, often on rank 0 only; what this raises on one rank is raised on all.
        comm = all_processes(timeout_secs=binding.io.config.timeout_secs)
        given, binding.state_dict = binding.state_dict, LentStateDict({})
        edits = functools.cache(lambda: _edits(self, checkpoint, given))
        if self.is_global_zero:
            sweep_once(target.parent, binding.swept, binding.io.config.sweep_after_secs)
        first = comm.map_reduce(
            f"preparing the save to {target}",
            lambda: edits().summary,
            lambda summaries: summaries[0],
        )
        # Ranks that hold all of the state are replicas: as in Lightning, rank 0's dict is stored.
        by_rank_0 = not self.restore_checkpoint_after_setup
        state = functools.partial(
            _training_state,
            self,
            checkpoint,
            edits(),
            first if by_rank_0 else edits().summary,
            only_rank_0=by_rank_0,
        )
        if binding.saves is not None:
            binding.saves.save(target, state)
        else:
            events = SaveEvents(self.lightning_module.trainer, binding.io.config)
            events.begin()
            save_training_state(
                target, state, options=binding.io.save_options(target), memory=binding.memory,
                sinks=events.sinks,
            )  # fmt: skip
            events.log()

    def remove_checkpoint(self: Any, filepath: PathLike) -> None:
        """Remove a checkpoint on rank 0.

        Not the one that was resumed from through a link, and not the last good one.
        """
        binding: Binding = self.dist_ckpt_binding
        if not self.is_global_zero:
            return
        # ModelCheckpoint spares what `trainer.ckpt_path` names, but does not look through links.
        resumed = self.lightning_module.trainer.ckpt_path and binding.resumed_from
        if resumed and Path(filepath).resolve() == resumed:
            return
        saves, trainer = binding.saves, self.lightning_module.trainer

        def is_doomed(path: Path) -> bool:
            return saves is not None and saves.pending.exists(path) is False

        def remove() -> bool:
            if not may_go(trainer, filepath, is_doomed):
                return False
            try:
                binding.io.remove_checkpoint(filepath)
            except (OSError, CheckpointingException) as error:
                # What replaces it is safe: one too many is no failure of rank 0 alone.
                logger.warning("%s could not be removed: %s", filepath, error)
                return False
            return True

        if saves is not None:
            saves.remove(filepath, remove)
            return
        is_checkpoint = Path(filepath).is_dir() and not Path(filepath).is_symlink()
        if remove() and is_checkpoint:
            emit_pruned(SaveEvents(trainer, binding.io.config).sinks, filepath, OTHERS_KEPT)

    # -- load

    @property
    def lightning_restore_optimizer(self: Any) -> bool:
        """Whether Lightning calls ``load_optimizer_state_dict``."""
        binding: Binding = self.dist_ckpt_binding
        return binding.restores or bool(_stock(self).lightning_restore_optimizer)

    def load_checkpoint(
        self: Any,
        checkpoint_path: PathLike,
        weights_only: bool | None = None,  # noqa: FBT001 - Lightning's signature
    ) -> dict[str, Any]:
        """Open a checkpoint with all ranks and return Lightning's dict. Collective."""
        binding: Binding = self.dist_ckpt_binding
        if binding.saves is not None:
            binding.saves.drain()  # what it names may be in flight
        found = without_scheme(checkpoint_path)
        comm = all_processes(timeout_secs=binding.io.config.timeout_secs)
        found, stock = comm.broadcast(f"looking at {found}", lambda: (found, is_stock(found)))
        binding.source = found
        path, sharded = Path(found), bool(self.restore_checkpoint_after_setup)
        is_file = stock and path.is_file()
        binding.restores, binding.resumed_from = not stock or (sharded and is_file), None
        if sharded and is_file:
            if weights_only is None and binding.io.config.allow_pickle:
                weights_only = False
            whole: dict[str, Any] = torch.load(
                path, map_location="cpu", mmap=True, weights_only=weights_only
            )
            return whole
        if stock:
            # Only what was asked for: Lightning 2.4 and 2.5 know no `weights_only`.
            asked = {} if weights_only is None else {"weights_only": weights_only}
            native: dict[str, Any] = _stock(self).load_checkpoint(found, **asked)
            return native
        if self.lightning_module.trainer.state.fn == "fit" and path.is_symlink():
            binding.resumed_from = path.resolve()
        return _open(self, path, weights_only=weights_only)

    def load_model_state_dict(
        self: Any,
        checkpoint: Mapping[str, Any],
        strict: bool = True,  # noqa: FBT001, FBT002 - Lightning's signature
    ) -> None:
        """Fill the model. Collective."""
        binding: Binding = self.dist_ckpt_binding
        if not binding.restores:
            _stock(self).load_model_state_dict(checkpoint, strict=strict)
            return
        config = binding.io.config
        comm = all_processes(timeout_secs=config.timeout_secs)
        binding.hooks_are_done = True  # what is raised from here on, all ranks raise
        comm.map_reduce(LOADING_MODEL, lambda: None, lambda _: None)
        if self.restore_checkpoint_after_setup:
            state_dict = checkpoint["state_dict"]
            if isinstance(state_dict, StoredModel):
                state_dict.view.load_model(0, self.model, strict=strict, values=state_dict.entries)
            else:
                load_whole_model(self.model, state_dict, strict=strict)
        else:
            module, where = self.lightning_module, binding.source
            values = named_as_in(module, checkpoint["state_dict"])
            comm.map_reduce(
                "filling the model",
                lambda: _load_replica(module, values, strict=strict, cast=config.cast, where=where),
                lambda casts: warn_of_casts(casts, where),
            )

    def load_optimizer_state_dict(self: Any, checkpoint: Mapping[str, Any]) -> None:
        """Fill the optimizers. Collective."""
        binding: Binding = self.dist_ckpt_binding
        if not binding.restores:
            _stock(self).load_optimizer_state_dict(checkpoint)
            return
        states = checkpoint["optimizer_states"]
        if states and len(states) != len(self.optimizers):
            raise MismatchError(
                f"The checkpoint has {len(states)} optimizer(s), the module configures "
                f"{len(self.optimizers)}."
            )
        for optimizer, state in zip(self.optimizers, states, strict=False):  # [] loads none
            if isinstance(state, StoredOptimizer):
                state.view.load_optimizer(state.index, optimizer, [self.model])
            elif self.restore_checkpoint_after_setup:
                load_whole_optimizer(optimizer, self.model, state)
            else:
                _stock(self).load_optimizer_state_dict({"optimizer_states": states})
                return

    # -- the course of a fit

    def on_train_start(self: Any) -> None:
        """From now on, saves go on in the background."""
        _stock(self).on_train_start()
        if self.dist_ckpt_binding.saves is not None:
            self.dist_ckpt_binding.saves.is_training = True

    def on_train_end(self: Any) -> None:
        """Wait for saves in flight, after the callbacks' last ones. Collective then."""
        _stock(self).on_train_end()
        if self.dist_ckpt_binding.saves is not None:
            self.dist_ckpt_binding.saves.finish()

    def teardown(self: Any) -> None:
        """End what saves in the background, before the model leaves its place."""
        binding: Binding = self.dist_ckpt_binding
        saves, binding.saves = binding.saves, None
        preemption, binding.preemption = binding.preemption, None
        try:
            if saves is not None:
                saves.close()
        finally:
            if preemption is not None:
                preemption.close()
            binding.memory = SaveMemory()  # the old one refers to the model's memory
            _stock(self).teardown()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Edits:
    """What hooks left in this rank's dict.

    Attributes:
        state_dict: Of the model, if a hook has changed it.
        has_optimizers: Whether optimizers are to be stored.
    """

    state_dict: Mapping[str, Any] | None
    has_optimizers: bool

    @property
    def summary(self) -> tuple[bool, bool]:
        """Whether there is a state dict in place of the model's own, and whether optimizers."""
        return self.state_dict is not None, self.has_optimizers


def _edits(strategy: Any, checkpoint: Mapping[str, Any], given: LentStateDict) -> _Edits:
    if isinstance(checkpoint, FailedDump):
        raise checkpoint.error
    states = checkpoint.get("optimizer_states") or []
    if states and not _are_live(states, strategy.optimizers):
        raise ConfigError(
            "A hook has edited checkpoint['optimizer_states'], which would be lost: optimizers are "
            "stored from the live objects.",
            hint="leave the list alone, or empty it to store no optimizer.",
        )
    now = checkpoint["state_dict"]
    return _Edits(
        state_dict=now if given.was_edited(now) else None,
        # Where a module configures none, Lightning has a stand-in without groups.
        has_optimizers=any(one.param_groups for one in strategy.optimizers) and bool(states),
    )


def _training_state(
    strategy: Any,
    checkpoint: Mapping[str, Any],
    edits: _Edits,
    agreed: tuple[bool, bool],
    *,
    only_rank_0: bool,
) -> TrainingState:
    is_edited, has_optimizers = agreed
    state_dict = edits.state_dict
    if is_edited and state_dict is None:  # a hook on another rank has edited its own
        state_dict = checkpoint["state_dict"]
    if only_rank_0 and is_edited and not strategy.is_global_zero:
        state_dict = {}
    return TrainingState(
        models=[strategy.model],
        optimizers=strategy.optimizers if has_optimizers else [],
        common=common_of(checkpoint)
        | (
            {"no_optimizers": True}
            if "optimizer_states" in checkpoint and not has_optimizers
            else {}
        ),
        framework=FRAMEWORK,
        replicas="differ" if only_rank_0 and is_edited else None,
        model_values={0: state_dict} if is_edited and state_dict is not None else {},
    )


def _are_live(states: Sequence[Any], optimizers: Sequence[Any]) -> bool:
    return len(states) == len(optimizers) and all(
        isinstance(state, LiveOptimizerState) and state.is_untouched(optimizer)
        for state, optimizer in zip(states, optimizers, strict=True)
    )


def _open(strategy: Any, path: Path, *, weights_only: bool | None) -> dict[str, Any]:
    binding: Binding = strategy.dist_ckpt_binding
    options = binding.io.load_options(weights_only=weights_only)
    view = CheckpointView.open(path, options=options)
    common = view.common
    if DIRECT in common:
        direct: dict[str, Any] = common[DIRECT]
        return direct
    if "lightning" not in common and strategy.is_global_zero:
        warnings.warn(
            f"{path} was saved by {view.framework or 'another program'}: models, optimizers, "
            "schedulers and the step are restored; loops and callbacks start afresh.",
            stacklevel=2,
        )
    trainer = strategy.lightning_module.trainer
    loops = {name: getattr(trainer, name).state_dict() for name in _LOOPS}
    checkpoint = lightning_dict(common, version=_version(trainer), loops=loops)
    if strategy.restore_checkpoint_after_setup:
        checkpoint["state_dict"] = StoredModel(view)
    else:
        whole = functools.cache(lambda: view.full_model(0, like=strategy.lightning_module))
        comm = all_processes(timeout_secs=binding.io.config.timeout_secs)
        # What cannot be read on one rank is raised on all.
        comm.map_reduce(f"reading {path}", lambda: whole() is None, lambda _: None)
        checkpoint["state_dict"] = whole()
    count = view.num_optimizers
    if count or common.get("no_optimizers"):
        checkpoint["optimizer_states"] = [
            StoredOptimizer(view=view, index=index) for index in range(count)
        ]
    return checkpoint


def _load_replica(
    module: nn.Module, values: Mapping[str, Any], *, strict: bool, cast: str, where: str
) -> dict[str, tuple[str, str]]:
    """Load whole values into a module that is not sharded; return what was converted."""
    casts = casts_into(module, values)
    if cast == "error":
        check_casts(casts, where)
    try:
        module.load_state_dict(values, strict=strict)
    except RuntimeError as error:
        raise MismatchError(f"{where}: {error}") from error
    return casts


def _version(trainer: Any) -> str:
    """Return the version of the Lightning that a Trainer, or a subclass of it, comes from."""
    roots = (base.__module__.partition(".")[0] for base in type(trainer).__mro__)
    names = (root for root in roots if root in {"lightning", "pytorch_lightning"})
    return str(sys.modules[next(names)].__version__)
