"""A save through torch.distributed.checkpoint (DCP) in three steps: plan, write, finalize.

Here: the first and the last step, with plans used again where nothing has changed. Not here: the
writing between them (``filesystem_async``), who runs it (``async_utils``), planners
(``strategies.torch``). Called on every rank of the process group, from the thread that saves.

Every step is one exchange, in which a failure of any rank is raised on all of them; waiting for a
rank that does not come ends with an error that names it. Planning exchanges the local plans of all
ranks, or some bytes a rank where all use their plans again; it takes one more exchange if only some
could, and each step takes one more if the coordinator is not the first rank of the group. See
docs/decisions/0012-plan-reuse.md.

Source of the names: the API documentation of Megatron-Core 0.15 and later,
``dist_checkpointing.strategies.state_dict_saver``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from logging import getLogger
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from dist_ckpt._comm.failures import describe_failure
from dist_ckpt._formats.torch_dist.coordination import PlanningRanks
from dist_ckpt._formats.torch_dist.plans import (
    Settings,
    WriteFailedError,
    default_planner,
    differences,
    noted_for_later,
    planner_settings,
    recall,
    remember,
)
from dist_ckpt.errors import CheckpointingException, ConfigError, CoordinationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.distributed.checkpoint.utils import _DistWrapper

    from dist_ckpt.strategies.filesystem_async import FileSystemWriterAsync

__all__ = [
    "save_state_dict_async_finalize",
    "save_state_dict_async_plan",
    "verify_global_md_reuse",
]

logger = getLogger(__name__)

_Reuse: TypeAlias = Literal["cached", "loaded", "nothing"]
_Way: TypeAlias = Literal["cached", "loaded", "again", "decentralized", "central"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    """What a rank brings: the plan that it can use again, by name, or a new local plan."""

    reuse: _Reuse
    decentralized: bool
    plan: SavePlan | None


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a rank is told: which way all ranks go, and its final plan if the way is central."""

    way: _Way
    plan: SavePlan | None = None


def save_state_dict_async_plan(  # noqa: PLR0917 - the lineage's signature
    state_dict: dict[str, Any],
    storage_writer: FileSystemWriterAsync,
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    planner: SavePlanner | None = None,
    cached_ckpt_structure: tuple[SavePlan, SavePlan, bool] | None = None,
    loaded_all_plans: list[SavePlan] | None = None,
) -> tuple[
    tuple[FileSystemWriterAsync, Metadata | None, _DistWrapper], SavePlan, SavePlan, bool, bool
]:
    """Plan a save and copy what is to be written. Collective over the process group.

    The local plan is made anew in every save; cached plans are used only if no rank has found a
    difference to its cached one.

    Args:
        state_dict: What DCP can save, by flat key.
        storage_writer: A new writer.
        process_group: The ranks that save; None for all.
        coordinator_rank: Global rank that makes the metadata and commits. In a group without rank
            0, the default stands for its first rank.
        planner: DCP's ``DefaultSavePlanner`` if left out.
        cached_ckpt_structure: Central plan, local plan and validity that the last save returned.
        loaded_all_plans: ``all_local_plans`` of a loaded checkpoint's metadata.

    Returns:
        ``(storage_writer, global_metadata, dist_wrapper)`` for ``save_state_dict_async_finalize``,
        with None for metadata on all but the coordinator, and if plans are used again; this rank's
        central and local plan, to be cached; whether the central plan is the cached one; whether
        the loaded plans are used.

    Raises:
        CheckpointingException: Planning failed on some rank. What fails in copying is raised by
            ``save_state_dict_async_finalize``.
    """
    ranks = PlanningRanks.of_group(process_group, coordinator_rank)
    planner = default_planner() if planner is None else planner
    planning = _Planning(
        state_dict=state_dict,
        writer=storage_writer,
        planner=planner,
        ranks=ranks,
        cached=cached_ckpt_structure or (None, None, False),
        loaded=loaded_all_plans,
        settings=planner_settings(planner, ranks.ranks, ranks.coordinator_rank),
    )
    way, central_plan, metadata = planning.run()
    planning.copy_values(central_plan)
    assert planning.local_plan is not None  # noqa: S101 - run has made it
    return (
        (storage_writer, metadata, ranks),
        central_plan,
        planning.local_plan,
        planning.cached[0] == central_plan,
        way == "loaded",
    )


def verify_global_md_reuse(
    loaded_all_plans: list[SavePlan],
    local_plan: SavePlan,
    rank: int,
    dist_wrapper: _DistWrapper,
) -> bool:
    """Return whether every rank's plan is the one in the loaded checkpoint. Collective.

    One small exchange, whatever was loaded.

    Args:
        loaded_all_plans: ``all_local_plans`` of the loaded metadata; may be empty.
        local_plan: This rank's plan.
        rank: Its place in ``loaded_all_plans``: this rank within the group.
        dist_wrapper: The ranks, as planning returned them or as DCP makes them.
    """
    ranks = PlanningRanks.of_wrapper(dist_wrapper)
    same = _matches_loaded(loaded_all_plans, local_plan, rank, ranks.get_world_size())
    return ranks.map_reduce("reuse of loaded plans", lambda: same, all)


def save_state_dict_async_finalize(
    storage_writer: FileSystemWriterAsync,
    global_metadata: Metadata | None,
    dist_wrapper: _DistWrapper,
) -> None:
    """Commit what all ranks have written, or raise on all of them. Collective over the group.

    One exchange; one more if the coordinator is not the first rank of the group.

    Args:
        storage_writer: The writer that was planned with; its writing is done.
        global_metadata: As planning returned it. None on the coordinator stands for the metadata of
            the plan that was used again.
        dist_wrapper: As planning returned it.

    Raises:
        WriteFailedError: Some rank failed; with its message, on every rank. Nothing is committed.
        CoordinationError: Ranks did not come, or are somewhere else.
    """
    ranks = PlanningRanks.of_wrapper(dist_wrapper)

    def local() -> list[Any]:
        if ranks.failure is not None:
            raise ranks.failure
        results = storage_writer.retrieve_write_results()
        if isinstance(results, list):
            return results
        error: Exception = results[0]
        raise error

    def commit(all_results: Sequence[list[Any]]) -> None:
        metadata = global_metadata
        if metadata is None and ranks.kept_metadata is not None:
            metadata = ranks.kept_metadata()
        if metadata is None:
            raise ConfigError(
                "the coordinator has no metadata for this save.",
                hint="pass what save_state_dict_async_plan returned first, as it is.",
            )
        storage_writer.finish(metadata, list(all_results))

    try:
        ranks.map_reduce("write", local, commit)
    except CheckpointingException as error:
        failures = error.failures
        if not failures and isinstance(error, CoordinationError):
            raise
        raise _write_failed(error, failures) from error
    except Exception as error:  # one process: raised as it is
        raise _write_failed(error, {}) from error


def _write_failed(error: Exception, failures: Any) -> WriteFailedError:
    failed = WriteFailedError(str(error) or repr(error))
    failed.failures = dict(failures) or {0: describe_failure(error)}
    return failed


@dataclass(kw_only=True)
class _Planning:
    """One planning on one rank: the batons between its steps."""

    state_dict: dict[str, Any]
    writer: FileSystemWriterAsync
    planner: Any
    ranks: PlanningRanks
    cached: tuple[SavePlan | None, SavePlan | None, bool]
    loaded: Sequence[SavePlan] | None
    settings: Settings
    local_plan: SavePlan | None = None
    metadata: Metadata | None = None

    def run(self) -> tuple[_Way, SavePlan, Metadata | None]:
        """Agree on a way, and return it with this rank's final plan and the metadata made."""
        answer = self.ranks.map_scatter("plan", self._offer, self._answers)
        if answer.way == "again":
            answer = self.ranks.map_scatter("full plan", self._full_offer, self._answers)
        logger.debug("rank %d plans: %s", self.ranks.rank, answer.way)
        try:
            chosen = self._final_plan(answer)
            plan = self.planner.finish_plan(chosen)
        except Exception as error:  # noqa: BLE001 - told to all ranks when the save is finalized
            assert self.local_plan is not None  # noqa: S101 - an offer has made it
            self._postpone("the plan could not be finished", error)
            return answer.way, self.local_plan, self.metadata
        kept = self.metadata
        if answer.way == "cached":
            kept = recall(chosen, self.settings)[1]
            self.ranks.kept_metadata = lambda: kept
        elif answer.way == "loaded":
            self.ranks.kept_metadata = self._metadata_of_loaded
        remember(plan, self.settings, kept)
        return answer.way, plan, self.metadata

    def copy_values(self, plan: SavePlan) -> None:
        """Let the writer take what it writes. A failure is kept until the save is finalized."""
        if self.ranks.failure is not None:
            return
        try:
            self.writer.prepare_write_data(plan, self.planner)
        except Exception as error:  # noqa: BLE001 - told to all ranks when the save is finalized
            self._postpone("the values to save could not be copied", error)

    def _postpone(self, what: str, error: Exception) -> None:
        """Keep a failure: other ranks have planned well, and learn of it where they meet again."""
        logger.error("%s", what, exc_info=error)
        self.ranks.failure = error

    def _offer(self) -> _Offer:
        is_coordinator = self.ranks.is_coordinator
        self.planner.set_up_planner(self.state_dict, is_coordinator=is_coordinator)
        self.writer.set_up_storage_writer(
            is_coordinator, rank=self.ranks.rank, use_collectives=True
        )
        plan = self.writer.prepare_local_plan(self.planner.create_local_plan())
        self.local_plan = plan
        reuse = self._reusable(plan)
        return _Offer(
            reuse=reuse,
            decentralized=self._is_decentralized(plan),
            plan=plan if reuse == "nothing" else None,
        )

    def _full_offer(self) -> _Offer:
        plan = self.local_plan
        assert plan is not None  # noqa: S101 - the first offer has made it
        return _Offer(reuse="nothing", decentralized=self._is_decentralized(plan), plan=plan)

    def _is_decentralized(self, plan: SavePlan) -> bool:
        both = (self.planner, self.writer)
        # A plan that stands for one in DCP's cache says nothing by itself.
        return plan.usable and all(
            getattr(one, "can_run_decentralized_global_plan", False) for one in both
        )

    def _reusable(self, plan: SavePlan) -> _Reuse:
        central, local, validated = self.cached
        if validated and central is not None and local is not None:
            known, metadata = recall(central, self.settings)
            usable = known and (metadata is not None or not self.ranks.is_coordinator)
            changed = differences(plan, local)
            if usable and not changed:
                return "cached"
            logger.debug("rank %d cannot use its plan again: %s", self.ranks.rank, changed)
        if self._is_decentralized(plan) and _matches_loaded(
            self.loaded, plan, self.ranks.rank, self.ranks.get_world_size()
        ):
            return "loaded"
        return "nothing"

    def _answers(self, offers: Sequence[_Offer]) -> list[_Answer]:
        """Choose the way for all ranks. On the coordinator."""
        kinds = {offer.reuse for offer in offers}
        if len(kinds) == 1 and (way := kinds.pop()) != "nothing":
            return [_Answer(way)] * len(offers)
        plans = [offer.plan for offer in offers if offer.plan is not None]
        if len(plans) < len(offers):
            return [_Answer("again")] * len(offers)
        central, self.metadata = self.planner.create_global_plan(plans)
        if all(offer.decentralized for offer in offers):
            vars(self.metadata)["all_local_plans"] = [noted_for_later(plan) for plan in plans]
            return [_Answer("decentralized")] * len(offers)
        return [_Answer("central", plan) for plan in self.writer.prepare_global_plan(central)]

    def _final_plan(self, answer: _Answer) -> SavePlan:
        if answer.way == "cached":
            assert self.cached[0] is not None  # noqa: S101 - it was offered
            return self.cached[0]
        if answer.plan is not None:
            return answer.plan
        plan = self.planner.create_decentralized_global_plan(self.local_plan)
        self.local_plan = self.writer.prepare_decentralized_global_plan(plan)
        return self.local_plan

    def _metadata_of_loaded(self) -> Metadata:
        loaded = list(self.loaded or ())
        metadata: Metadata
        _, metadata = self.planner.create_global_plan(loaded)
        vars(metadata)["all_local_plans"] = [noted_for_later(plan) for plan in loaded]
        return metadata


def _matches_loaded(
    loaded: Sequence[SavePlan] | None, plan: SavePlan, rank: int, size: int
) -> bool:
    if not loaded:
        logger.debug("no loaded plans to use again")
        return False
    if len(loaded) != size:
        logger.debug("%d ranks have planned the loaded checkpoint, %d this one", len(loaded), size)
        return False
    changed = differences(plan, loaded[rank])
    if changed:
        logger.debug("the loaded plan of rank %d differs in %s", rank, changed)
    return not changed


def _compare_dataclasses(obj1: Any, obj2: Any) -> str | list[str]:
    """Tell in which fields two dataclasses of one type differ; for logs.

    Raises:
        TypeError: They are no dataclasses.
    """
    if type(obj1) is not type(obj2):
        return f"Objects are of different types: {type(obj1)} and {type(obj2)}"
    pairs = ((f.name, getattr(obj1, f.name), getattr(obj2, f.name)) for f in fields(obj1))
    different = [f"{name}: {one} != {other}" for name, one, other in pairs if one != other]
    return different or "All fields are equal"
