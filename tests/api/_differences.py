"""Defects of the sources that ours does not have, each with the tests that fail on it, as data.

Here: the rows of ``docs/reference/differences.md``. Not here: the page (``_reference``), the check
that the tests exist (``test_reference``). Rows of one area stand together.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DIFFERENCES", "Difference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One defect.

    Attributes:
        area: Heading it stands under.
        defect: What happens with a source.
        ours: What happens here.
        tests: Ids of tests that fail on the defect.
    """

    area: str
    defect: str
    ours: str
    tests: tuple[str, ...]


# Area -> rows of (defect, ours, test ids; the file of the one before if none is named).
_AREAS: dict[str, list[tuple[str, ...]]] = {
    "Descriptions: `mapping`": [
        (
            "`empty_from_unique_key` takes the wrong part of a key with slashes",
            "the key may contain any text",
            "tests/unit/test_mapping.py::test_unique_key_can_be_reversed",
        ),
        (
            "`from_rank_offsets` takes an axis that is given twice",
            "refused, with the axis",
            "tests/unit/test_mapping.py::test_impossible_rank_offsets_are_refused",
        ),
        (
            "fields that contradict each other are found while writing, or never",
            "refused when the object is made, all problems at once",
            "tests/unit/test_mapping.py::test_contradicting_fields_are_refused",
            "::test_all_problems_are_reported_at_once",
        ),
        (
            "`init_data` of a flattened range allocates the whole shard",
            "it allocates the range",
            "tests/unit/test_mapping.py::test_init_data",
        ),
        (
            "`local_coordinates` fails with numpy 2, and makes a mask of the whole shard before",
            "coordinates of the range alone, with any numpy",
            "tests/unit/test_mapping.py::test_coordinates_of_a_flattened_range",
            "::test_coordinates_cost_what_the_range_costs",
        ),
        (
            "a `replica_id` of numpy integers is a TypeError",
            "numpy integers are integers",
            "tests/unit/test_mapping.py::test_is_main_replica",
            "::test_fields_become_plain",
        ),
        (
            "a factory's `build_fn` gets three arguments or four, by release: functions of the other kind fail",
            "both kinds are called as they need; a flattened range is never dropped",
            "tests/unit/test_mapping.py::test_build_functions_of_all_releases_are_called",
            "::test_a_range_is_never_dropped",
        ),
    ],
    "State dicts: `dict_utils`, `utils`": [
        (
            "a sharded leaf in a tuple, set or dataclass is pickled as a plain value",
            "refused, with its path",
            "tests/unit/test_utils.py::test_hidden_leaves_are_refused",
            "tests/unit/test_serialization.py::test_shards_in_tuples_are_refused",
        ),
        (
            "a list of sharded and plain leaves cannot be merged back",
            "elements know their positions",
            "tests/unit/test_dict_utils.py::test_extract_compacts_lists_that_still_know_their_positions",
            "tests/property/test_dict_utils_props.py::test_merge_undoes_extract",
        ),
        (
            "`diff` of lists gives bare indices, and those of the left side for the right",
            "whole paths on the right side",
            "tests/unit/test_dict_utils.py::test_diff_reports_places_with_their_prefix",
        ),
        (
            "`diff` raises for tensors of different shapes, or lets them broadcast",
            "they differ",
            "tests/unit/test_dict_utils.py::test_diff_of_unequal_leaves",
        ),
        (
            "`diff` finds a tensor with NaN unlike its own copy",
            "equal bits are equal",
            "tests/unit/test_dict_utils.py::test_diff_of_equal_leaves_is_empty",
        ),
        (
            "an object that is referenced twice gets its prefix twice",
            "once",
            "tests/unit/test_utils.py::test_an_object_gets_its_prefix_once",
        ),
        (
            "`replace_prefix_for_sharding` changes some keys before it finds one that does not fit",
            "all keys are changed, or none",
            "tests/unit/test_utils.py::test_replace_prefix_changes_all_or_none",
        ),
    ],
    "Optimizer states: `optimizer`": [
        (
            "states without axes, such as Adam's step, end in an AssertionError unless they are excluded",
            "they stay in the common part",
            "tests/unit/test_optimizer.py::test_adam_state_dict_becomes_sharded_in_place",
            "::test_plain_values_and_zero_dim_states_stay_common",
        ),
        (
            "an error in the middle leaves the state dict half converted",
            "nothing is changed",
            "tests/unit/test_optimizer.py::test_unknown_parameters_are_refused_before_anything_changes",
        ),
        (
            "older releases take a DTensor for a local tensor",
            "its local part is taken",
            "tests/unit/test_optimizer.py::test_of_a_dtensor_the_local_part_is_taken",
            "::test_of_a_common_dtensor_the_local_part_is_stored",
        ),
    ],
    "The marker: `core`": [
        (
            "`check_is_distributed_checkpoint` raises for a damaged `metadata.json`",
            "it says False; `maybe_load_config` raises CorruptedCheckpointError",
            "tests/unit/test_core.py::test_something_else_is_corruption",
        ),
        (
            "a field that a release does not know is a TypeError",
            "ignored",
            "tests/unit/test_core.py::test_fields_of_other_releases",
        ),
        (
            "`save_config` writes in place: a crash leaves half a file, and an unreadable checkpoint",
            "written aside, synced and renamed",
            "tests/unit/test_core.py::test_a_failed_write_leaves_the_old_file",
            "::test_several_processes_may_write",
        ),
    ],
    "Entry points: `serialization`": [
        (
            "a check that fails on rank 0 alone leaves the other ranks in the next collective",
            "whatever fails on one rank is raised on every rank",
            "tests/faults/test_phases.py::test_one_rank_fails",
            "tests/multiprocess/test_faults.py::test_one_rank_fails_in_each_phase",
            "tests/unit/test_comm.py::test_a_wrong_path_on_one_rank_is_told_to_all",
        ),
        (
            "a failed validation leaves files in the target; a failed write leaves a torn checkpoint",
            "all files appear at once, or none",
            "tests/faults/test_disk.py::test_a_failed_save_leaves_the_directory_as_it_was",
            "::test_a_crash_at_any_point_leaves_the_old_or_the_new",
        ),
        (
            "files of an older checkpoint at the same path stay among the new ones",
            "every save replaces the whole directory",
            "tests/multiprocess/test_save_load.py::test_saving_again_and_again",
        ),
        (
            "factories are replaced in the caller's dict, data of its shards is dropped",
            "nothing of the caller is changed",
            "tests/unit/test_serialization.py::test_nothing_of_the_caller_is_changed",
        ),
        (
            "`load_common_state_dict` fails for a path that is text when there is nothing",
            "any path; the error names it",
            "tests/api/test_contract.py::test_paths_of_both_kinds",
        ),
        (
            "the validation crashes when a flattened tensor has no main replica",
            "the elements that nobody saves are named, on every rank",
            "tests/api/test_contract.py::test_validation_is_heard_on_every_rank",
        ),
        (
            "irregular grids are left out of the validation",
            "every tiling is checked, element by element",
            "tests/unit/test_coverage.py::test_an_overlap_that_makes_up_for_a_gap",
            "tests/property/test_coverage_props.py::test_a_verdict_is_that_of_counting",
        ),
        (
            "with `ASSUME_OK_UNEXPECTED`, a key that is not stored ends in an error of the backend",
            "MismatchError with the nearest key, before the first byte is read",
            "tests/unit/test_serialization.py::test_strict_modes",
        ),
    ],
    "Strategies: `strategies.base`": [
        (
            "compatibility checks accept every backend and version",
            "they raise; a checkpoint of an unknown backend is refused",
            "tests/api/test_contract.py::test_a_strategy_rejects_what_it_does_not_read",
            "::test_a_checkpoint_of_an_unknown_backend_is_refused",
        ),
        (
            "`can_handle_sharded_objects` is a method in some classes, and so always true",
            "a property everywhere",
            "tests/api/test_contract.py::test_a_strategy_rejects_what_it_does_not_read",
        ),
        (
            "a tuple given as `common_strategy` is taken for the sharded one",
            "each stays in its place",
            "tests/api/test_contract.py::test_strategies_as_none_tuple_or_object",
        ),
    ],
    "Sharded objects": [
        (
            "the name of an object's file lacks its last number: shards of arrays of different shapes collide",
            "whole names; cut ones of old checkpoints are read where they are certain",
            "tests/api/test_contract.py::test_an_object_of_another_array_shape_is_another_object",
            "tests/unit/test_megatron_zarr.py::test_names_of_shards",
            "::test_cut_names_that_do_not_tell",
        ),
    ],
    "Saving in steps: `strategies.state_dict_saver`": [
        (
            "once a plan is cached, a tensor that is added is not written, and one that is removed is a KeyError",
            "a change on any one rank is noticed by all, and all plan anew",
            "tests/multiprocess/test_state_dict_saver.py::test_a_change_on_one_rank_is_noticed_by_all",
            "::test_a_plan_is_used_again_while_nothing_changes",
        ),
        (
            "agreement needs an accelerator and its default group",
            "CPU and gloo do, and the group is that of the planning",
            "tests/multiprocess/test_state_dict_saver.py::test_plans_of_a_loaded_checkpoint",
            "::test_groups_and_coordinators",
        ),
        (
            "what failed is told on the coordinator only",
            "its text is on every rank",
            "tests/multiprocess/test_state_dict_saver.py::test_a_write_failure_is_raised_on_all_ranks_once",
        ),
        (
            "`global_metadata=None` on the coordinator is an AssertionError",
            "what the plan has kept is used, or an error with a hint is raised on all ranks",
            "tests/multiprocess/test_state_dict_saver.py::test_metadata_that_is_lost_is_told_to_all_ranks",
        ),
        (
            "the cache of metadata belongs to the class: checkpoints share it",
            "to the reader, by path and state of the file",
            "tests/unit/test_planners.py::test_caches_are_not_shared",
            "::test_metadata_is_read_once_for_each_state_of_the_file",
        ),
    ],
    "Spreading the work: `exchange_utils`, `strategies.fully_parallel`, `strategies.two_stage`": [
        (
            "a cached distribution is used for a state dict that has changed",
            "a change on one rank is noticed by all",
            "tests/multiprocess/test_fully_parallel.py::test_a_change_on_one_rank_is_noticed_by_all",
        ),
        (
            "the two-stage load needs data in every shard, and makes groups by collectives of the whole world",
            "data may be None; no group is made",
            "tests/multiprocess/test_fully_parallel.py::test_two_stages",
        ),
    ],
    "zarr": [
        (
            "a tensor without axes is created by nobody, nor is a flattened one whose first range is empty",
            "both are stored",
            "tests/unit/test_zarr_save.py::test_single_values_and_tensors_without_elements",
            "tests/api/test_contract.py::test_flattened_ranges_load_as_anything_else",
        ),
        (
            "a key with a slash is overlooked by the scan for arrays",
            "found at any depth",
            "tests/unit/test_megatron_zarr.py::test_a_key_with_folders",
        ),
        (
            "keys become paths as they are",
            "what is no safe path gets a plain name",
            "tests/unit/test_zarr_save.py::test_keys_that_are_no_path_are_stored_all_the_same",
            "tests/unit/test_zarr_names.py::test_no_array_lies_within_another",
        ),
        (
            "float8 and other dtypes without a name in numpy are a KeyError",
            "every bit of every dtype comes back",
            "tests/unit/test_zarr_save.py::test_every_bit_of_every_dtype_comes_back",
        ),
        (
            "a flattened range reads the whole slice of its shard",
            "the bytes it needs",
            "tests/unit/test_zarr_read.py::test_a_part_needs_only_its_own_chunks",
            "::test_of_plain_chunks_only_the_needed_bytes_are_read",
        ),
    ],
    "State for local checkpoints: `tensor_aware_state_dict`": [
        (
            "the module cannot be imported without another package",
            "it has an interface of its own, which that package's managers accept",
            "tests/unit/test_tensor_aware.py::test_without_nvrx",
            "::test_nvrx_takes_ours_for_its_own",
        ),
        (
            "an unexpected key that the strict mode allows is an AssertionError, or hangs the ranks for ever",
            "left out, or raised on every rank",
            "tests/unit/test_tensor_aware.py::test_strict_modes",
            "tests/multiprocess/test_tensor_aware.py::test_unexpected_keys_of_one_rank",
        ),
        (
            "a cache that is used with a changed state dict keeps the wrong shards",
            "what one rank changes is noticed by all",
            "tests/multiprocess/test_tensor_aware.py::test_a_cache_is_used_only_while_it_fits_everywhere",
        ),
        (
            "`from_state_dict` changes the state dict it is given",
            "it is as it was",
            "tests/unit/test_tensor_aware.py::test_the_argument_is_not_changed",
        ),
        (
            "replicated objects are kept on every rank",
            "once, as tensors are",
            "tests/multiprocess/test_tensor_aware.py::test_round_trip",
        ),
        (
            "`to_state_dict` synchronises with an accelerator that may not be there",
            "CPU and gloo do",
            "tests/multiprocess/test_tensor_aware.py::test_round_trip",
        ),
    ],
    "Checkpointer: `checkpointer` and its neighbours": [
        (
            "one failed write makes every later save fail",
            "it is raised once",
            "tests/unit/test_checkpointer.py::test_a_failure_that_was_seen_is_over",
            "::test_a_failure_that_nobody_saw_is_raised_once",
        ),
        (
            "a load does not wait for a save of the same path under way",
            "it waits, and says so if that save failed",
            "tests/unit/test_checkpointer.py::test_load_waits_for_a_save_to_its_path",
            "::test_load_of_a_path_whose_save_failed",
        ),
        (
            "`close` swallows the failure of a pending write",
            "it reports it, and closes everything all the same",
            "tests/unit/test_checkpointer.py::test_close_reports_and_closes",
        ),
        (
            "a partial read gives wrong bytes for strided sources, and fails for empty ones",
            "exact for any strides and sizes",
            "tests/unit/test_checkpointer.py::test_strided_and_empty_targets",
        ),
        (
            "files are written in place, without a sync",
            "an older checkpoint is replaced in one step",
            "tests/unit/test_checkpointer.py::test_an_older_checkpoint_is_replaced_at_once",
            "::test_a_killed_process",
        ),
        (
            "timeouts of writers and barriers are ignored",
            "they are used, and ranks that do not come are named",
            "tests/unit/test_checkpointer.py::test_ranks_that_do_not_come_are_named",
            "tests/multiprocess/test_checkpointer.py::test_the_writers_timeout_reaches_the_process",
        ),
        (
            "`make_async_checkpointer` leaves out writer and barrier: a checkpoint may lack a rank",
            "ranks commit together, or none does",
            "tests/multiprocess/test_checkpointer.py::test_a_killed_process_fails_the_save_on_all_ranks",
            "::test_ranks_that_are_told_where_to_meet",
        ),
        (
            "the defaults of the stager need an accelerator",
            "every way of staging works without one",
            "tests/unit/test_checkpointer.py::test_every_way_of_staging",
        ),
        (
            "keywords for the writer are a TypeError in the stager",
            "the stager takes any",
            "tests/unit/test_checkpointer.py::test_the_stager_alone",
        ),
    ],
}


def _rows(area: str) -> list[Difference]:
    rows = []
    for defect, ours, *tests in _AREAS[area]:
        ids: list[str] = []
        for test in tests:
            file, _, name = test.partition("::")
            ids.append(f"{file or ids[-1].partition('::')[0]}::{name}")
        rows.append(Difference(area=area, defect=defect, ours=ours, tests=tuple(ids)))
    return rows


DIFFERENCES: tuple[Difference, ...] = tuple(row for area in _AREAS for row in _rows(area))
