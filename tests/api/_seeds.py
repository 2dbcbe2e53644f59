"""The names that code written for other checkpoint libraries imports, as data.

Here: five pages of documentation - Megatron-Core's ``dist_checkpointing`` at several releases, and
torch's ``_experimental`` checkpointer - and the names that stand on no page but belong to them. One
line is one name::

    KIND NAME[BASES](PARAMETERS) = VALUE | how ours differs

A default of ``...`` is any default; a string with a colon names an object, as
``pkgutil.resolve_name`` finds it.
Not here: the checks (``test_seed_names``), the table for readers (``_reference``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["PAGES", "SEEDS", "Seed"]

PAGES = {
    "000": "Megatron-Core 0.16 to 0.18, `strategies.base`",
    "001": "Megatron-Core 0.15 and later, `strategies.state_dict_saver`",
    "002": "Megatron-Core 0.6, the whole package",
    "003": "Megatron-Core 0.12 and later, `tensor_aware_state_dict`",
    "004": "torch of July 2025, `_experimental/checkpointer.py`",
    "": "on no page: other releases, or types that the pages name",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seed:
    """One name.

    Attributes:
        page: Key of ``PAGES``.
        module: Our module, below ``dist_ckpt``; empty for the front door.
        kind: What it is; ``abstract`` stands before the kind of a method.
        name: Dotted, within the module.
        bases: Names of classes that it derives from.
        signature: Parameters as Python writes them, or None where there are none to check.
        value: As Python writes it, or None.
        difference: How ours differs from its source; empty if it does not.
    """

    page: str
    module: str
    kind: str
    name: str
    bases: tuple[str, ...]
    signature: str | None
    value: str | None
    difference: str

    @property
    def path(self) -> str:
        """Where it is imported from."""
        return ".".join(filter(None, ("dist_ckpt", self.module, self.name)))


_LINE = re.compile(
    r"(?P<kind>(abstract )?\w+) (?P<name>[\w.]+)(\[(?P<bases>[\w, ]+)\])?"
    r"(?P<signature>\(.*\))?( = (?P<value>.+))?"
)
_KINDS = {
    "function", "class", "member", "method", "classmethod", "staticmethod", "property",
    "attribute", "data", "keywords", "abstract method", "abstract property",
}  # fmt: skip


def _seed(page: str, module: str, line: str) -> Seed:
    declared, _, difference = line.partition(" | ")
    match = _LINE.fullmatch(declared.strip())
    if match is None or match["kind"] not in _KINDS:
        raise ValueError(f"not a line of this table: {line!r}")
    return Seed(
        page=page,
        module=module,
        kind=match["kind"],
        name=match["name"],
        bases=tuple((match["bases"] or "").replace(",", " ").split()),
        signature=match["signature"],
        value=match["value"],
        difference=difference.strip(),
    )


def _seeds(page: str, module: str, table: str) -> list[Seed]:
    return [_seed(page, module, line) for line in table.strip().splitlines() if line.strip()]


_STRATEGIES_BASE = """
data logger
class StrategyAction[Enum]
member StrategyAction.LOAD_COMMON = 'load_common'
member StrategyAction.LOAD_SHARDED = 'load_sharded'
member StrategyAction.SAVE_COMMON = 'save_common'
member StrategyAction.SAVE_SHARDED = 'save_sharded'
function get_default_strategy(action, backend, version) | every action and backend has a strategy; an unknown one is refused, not replaced
class LoadStrategyBase[ABC]
abstract method LoadStrategyBase.check_backend_compatibility(loaded_backend) | the built-in strategies raise for another backend
abstract method LoadStrategyBase.check_version_compatibility(loaded_version) | the built-in strategies raise for a version they do not read
property LoadStrategyBase.can_handle_sharded_objects | a property in every subclass, too
class SaveStrategyBase[ABC](backend, version)
property SaveStrategyBase.can_handle_sharded_objects | a property in every subclass, too
method SaveStrategyBase.__str__()
class LoadShardedStrategy[LoadStrategyBase]
abstract method LoadShardedStrategy.load(sharded_state_dict, checkpoint_dir)
abstract method LoadShardedStrategy.load_tensors_metadata(checkpoint_dir)
method LoadShardedStrategy.load_sharded_metadata(checkpoint_dir)
method LoadShardedStrategy.remove_sharded_tensors(checkpoint_dir, key_prefix)
class SaveShardedStrategy[SaveStrategyBase](backend, version)
abstract method SaveShardedStrategy.save(sharded_state_dict, checkpoint_dir)
class AsyncSaveShardedStrategy[SaveShardedStrategy](backend, version)
abstract method AsyncSaveShardedStrategy.async_save(sharded_state_dict, checkpoint_dir)
method AsyncSaveShardedStrategy.save(sharded_state_dict, checkpoint_dir)
"""

_STRATEGIES_BASE_MORE = """
function register_default_strategy(action, backend, version, strategy)
data default_strategies
class LoadCommonStrategy[LoadStrategyBase]
abstract method LoadCommonStrategy.load_common(checkpoint_dir)
abstract method LoadCommonStrategy.load_sharded_objects(sharded_objects_state_dict, checkpoint_dir)
method LoadCommonStrategy.load_sharded_metadata(checkpoint_dir)
class SaveCommonStrategy[SaveStrategyBase](backend, version)
abstract method SaveCommonStrategy.save_common(common_state_dict, checkpoint_dir)
method SaveCommonStrategy.save_sharded_objects(sharded_objects_state_dict, checkpoint_dir)
"""

_STATE_DICT_SAVER = """
data logger
function _compare_dataclasses(obj1, obj2)
function save_state_dict_async_plan(state_dict, storage_writer, process_group=None, coordinator_rank=0, planner=None, cached_ckpt_structure=None, loaded_all_plans=None) | a cached plan is compared with the state dict on every rank, and the ranks agree
function verify_global_md_reuse(loaded_all_plans, local_plan, rank, dist_wrapper) | needs no accelerator; the group is that of the planning
function save_state_dict_async_finalize(storage_writer, global_metadata, dist_wrapper) | the cause of a failure is raised on every rank; needs no accelerator
"""

_SERIALIZATION = """
function load(sharded_state_dict, checkpoint_dir, sharded_strategy=None, common_strategy=None, validate_access_integrity=True) | errors are raised on every rank; the request is not changed; another dtype than the stored one is told in one warning
function load_common_state_dict(checkpoint_dir) | any kind of path; what is pickled needs allow_pickle
function load_plain_tensors(checkpoint_dir) | the common part is not included, as the page says
function load_sharded_objects(sharded_state_dict, checkpoint_dir) | the shard of another global shape is not taken for the wanted one
function load_tensors_metadata(checkpoint_dir, sharded_strategy=None)
function save(sharded_state_dict, checkpoint_dir, sharded_strategy=None, common_strategy=None, validate_access_integrity=True) | checks come before the first byte; all files or none; the caller's dict is not changed
function validate_sharding_integrity(sharded_tensors) | raises on every rank, with every problem
"""

_SERIALIZATION_MORE = """
keywords save(async_sharded_save, preprocess_common_before_consistancy_check, content_metadata)
keywords load(strict)
function load_sharded_metadata(checkpoint_dir)
function load_content_metadata(checkpoint_dir=None, *, preloaded_state_dict=None)
function remove_sharded_tensors(checkpoint_dir, key_prefix)
function get_default_save_sharded_strategy
function get_default_load_sharded_strategy
"""

# What `from megatron.core import dist_checkpointing` gives.
_FRONT_DOOR = """
function check_is_distributed_checkpoint(checkpoint_dir)
class LocalNonpersistentObject(obj)
class ShardedObject
class ShardedTensor
function load
function load_common_state_dict
function load_content_metadata
function load_plain_tensors
function load_tensors_metadata
function remove_sharded_tensors
function save
"""

_MAPPING = """
class LocalNonpersitentObject(obj) | one class with LocalNonpersistentObject
method LocalNonpersitentObject.unwrap()
class ShardedBase[ABC]
attribute ShardedBase.data
attribute ShardedBase.key
attribute ShardedBase.replica_id
class ShardedObject[ShardedBase](key, data, global_shape, global_offset, replica_id=0) | an offset that is no index is refused
attribute ShardedObject.data
attribute ShardedObject.global_offset
attribute ShardedObject.global_shape
attribute ShardedObject.key
attribute ShardedObject.replica_id = 0
property ShardedObject.unique_key
method ShardedObject.without_data()
class ShardedTensor[ShardedBase](key, data, dtype, local_shape, global_shape, global_offset, axis_fragmentations, replica_id=0, prepend_axis_num=0, allow_shape_mismatch=False, flattened_range=None) | fields that contradict each other are refused, all at once
attribute ShardedTensor.allow_shape_mismatch = False
attribute ShardedTensor.axis_fragmentations
attribute ShardedTensor.data
attribute ShardedTensor.dtype
attribute ShardedTensor.flattened_range = None
classmethod ShardedTensor.from_rank_offsets(key, data, *rank_offsets, replica_id=0, prepend_axis_num=0, allow_shape_mismatch=False) | an axis given twice is refused
method ShardedTensor.global_coordinates() | no array of the size of the whole shard
attribute ShardedTensor.global_offset
attribute ShardedTensor.global_shape
method ShardedTensor.global_slice()
method ShardedTensor.init_data(device, init_fn='torch:empty') | a flattened range gets its own size, not that of the shard
attribute ShardedTensor.key
method ShardedTensor.local_coordinates() | no array of the size of the whole shard
attribute ShardedTensor.local_shape
method ShardedTensor.max_allowed_chunks()
attribute ShardedTensor.prepend_axis_num = 0
attribute ShardedTensor.replica_id = 0
method ShardedTensor.without_data()
class ShardedTensorFactory[ShardedBase](key, data, build_fn, merge_fn, replica_id=0)
method ShardedTensorFactory.build() | functions of three and of four arguments are called as they need
attribute ShardedTensorFactory.build_fn
attribute ShardedTensorFactory.data
attribute ShardedTensorFactory.key
attribute ShardedTensorFactory.merge_fn
attribute ShardedTensorFactory.replica_id = 0
function apply_factories(sharded_state_dict)
function apply_factory_merges(x1, x2, key=())
function is_main_replica(replica_id) | integers of numpy are integers
"""

_MAPPING_MORE = """
class LocalNonpersistentObject(obj)
data ReplicaId
data StateDict
data ShardedStateDict
abstract method ShardedBase.validate_metadata_integrity()
abstract method ShardedBase.without_data()
classmethod ShardedObject.empty_from_unique_key(unique_key, replica_id=0) | the key may contain slashes
method ShardedObject.validate_metadata_integrity()
property ShardedTensor.has_regular_grid
classmethod ShardedTensor.from_rank_offsets_flat(key, data, non_flat_local_shape, *rank_offsets, flattened_range=None, **kwargs)
method ShardedTensor.local_chunk_offset_in_global()
method ShardedTensor.narrow(dim, start, length)
method ShardedTensor.validate_metadata_integrity()
attribute ShardedTensorFactory.flattened_range = None
"""

_OPTIMIZER = """
function get_optim_param_to_id_map(optim_params_iter)
function get_param_id_to_sharded_param_map(model_sharded_state_dict, optim_params_iter)
function make_sharded_optimizer_tensor(model_param, optim_param, prefix)
function optim_state_to_sharding_state(optim_state_dict, id_to_sharded_param_map, exclude_keys=()) | states without axes stay common; nothing is changed on an error
"""

_CORE = """
class CheckpointingConfig(sharded_backend, sharded_backend_version=1, common_backend='torch', common_backend_version=1)
attribute CheckpointingConfig.common_backend = 'torch'
attribute CheckpointingConfig.common_backend_version = 1
attribute CheckpointingConfig.sharded_backend
attribute CheckpointingConfig.sharded_backend_version = 1
class CheckpointingException[Exception]
function check_is_distributed_checkpoint(checkpoint_dir) | False for a damaged file, as the page says
function maybe_load_config(checkpoint_dir) | a damaged file is CorruptedCheckpointError; unknown fields are ignored
function save_config(config, checkpoint_dir) | durable, and never half a file
"""

_CORE_MORE = """
data CONFIG_FNAME = 'metadata.json'
"""

_DICT_UTILS = """
function dict_list_map_inplace(f, x)
function dict_list_map_outplace(f, x)
function dict_map(f, d)
function dict_map_with_key(f, d)
function diff(x1, x2, prefix=()) | paths in lists are whole and on the right side; NaN equals itself in any dtype; other shapes differ, they do not raise
function extract_matching_values(x, predicate, return_lists_as_dicts=False) | elements of a list keep their positions, so that merge restores it
function inspect_types(x, prefix=(), indent=4)
function map_reduce(xs, key_fn=..., value_fn=..., reduce_fn=...)
function merge(x1, x2, key=()) | parts of one list are put together by position
function nested_items_iter(x)
function nested_values(x)
"""

_UTILS = """
function add_prefix_for_sharding(sharded_state_dict, prefix) | an object referenced twice gets the prefix once
function apply_prefix_mapping(sharded_state_dict, prefix_map) | an object referenced twice is renamed once
function extract_nonpersistent(sharded_state_dict) | a leaf hidden in a tuple or dataclass is refused
function extract_sharded_base(sharded_state_dict) | a leaf hidden in a tuple or dataclass is refused
function extract_sharded_tensors(sharded_state_dict) | a leaf hidden in a tuple or dataclass is refused
function extract_sharded_tensors_and_factories(sharded_state_dict) | a leaf hidden in a tuple or dataclass is refused
function extract_sharded_tensors_or_nonpersistent(sharded_state_dict) | a leaf hidden in a tuple or dataclass is refused
function replace_prefix_for_sharding(sharded_state_dict, old_prefix, new_prefix) | all keys are changed, or none
"""

_TENSOR_AWARE = """
data logger
class MCoreTensorAwareStateDict[TensorAwareStateDict](common, sharded_state_dict, _is_hollow=False) | needs no other package
attribute MCoreTensorAwareStateDict.common
attribute MCoreTensorAwareStateDict.sharded_state_dict
attribute MCoreTensorAwareStateDict._is_hollow = False
staticmethod MCoreTensorAwareStateDict._validate_params(algo)
staticmethod MCoreTensorAwareStateDict._get_distribution(fully_parallel, sharded_part, parallelization_group, cached_distribution=None)
staticmethod MCoreTensorAwareStateDict._remove_redundant_data(fully_parallel, sharded_part, shard_to_saving_rank, parallelization_group) | replicated objects are kept once, too
classmethod MCoreTensorAwareStateDict.from_state_dict(sharded_state_dict, algo='fully_parallel', parallelization_group=None, cached_metadata=None) | the input is not changed; a cache that no longer fits is noticed by all ranks
property MCoreTensorAwareStateDict.is_hollow
property MCoreTensorAwareStateDict._sharded_tensors
property MCoreTensorAwareStateDict.tensors
property MCoreTensorAwareStateDict.common_state_dict
method MCoreTensorAwareStateDict.pop_tensors()
method MCoreTensorAwareStateDict.insert_tensors(tensor_data)
method MCoreTensorAwareStateDict.init_tensors()
method MCoreTensorAwareStateDict.copy_tensors_to_cpu(non_blocking=False)
method MCoreTensorAwareStateDict.restore_tensor_device(non_blocking=True)
method MCoreTensorAwareStateDict._insert_sharded_data(fully_parallel, sharded_part, parallelization_group, exchange_algo) | needs no accelerator
method MCoreTensorAwareStateDict.to_state_dict(sharded_state_dict, algo='atomic', exchange_algo='broadcast', validate_access_integrity=True, parallelization_group=None, strict='dist_ckpt.validation:StrictHandling.ASSUME_OK_UNEXPECTED', return_mismatch_keys=False) | every strict mode drops what it allows to be absent; never a hang
"""

_TENSOR_AWARE_MORE = """
class TensorAwareStateDict[ABC]
abstract method TensorAwareStateDict.pop_tensors()
abstract property TensorAwareStateDict.tensors
abstract property TensorAwareStateDict.is_hollow
abstract method TensorAwareStateDict.insert_tensors(tensor_data)
abstract method TensorAwareStateDict.init_tensors()
abstract method TensorAwareStateDict.copy_tensors_to_cpu(non_blocking=False)
abstract method TensorAwareStateDict.restore_tensor_device(non_blocking=True)
"""

_CHECKPOINTER = """
data logger
data LOG_INTERVAL = 60
data T
class Checkpointer[ABC]
abstract method Checkpointer.save(state_dict, path, **kwargs) | the order of later releases, path first, is understood, too
abstract method Checkpointer.load(path, state_dict=None, *, default_map_location=None, strict=False, **kwargs)
abstract method Checkpointer.close()
class SyncCheckpointer[Checkpointer](writer, reader)
method SyncCheckpointer.save(state_dict, path, **kwargs) | one committed directory for all ranks: all of it or nothing
method SyncCheckpointer.load(path, state_dict=None, *, default_map_location=None, strict=False, **kwargs) | targets of any stride and size
method SyncCheckpointer.close()
class AsyncCheckpointer[Checkpointer](checkpoint_stager, checkpoint_process, reader)
method AsyncCheckpointer.save(state_dict, path, **kwargs) | a failed save is raised once and does not fail the next
method AsyncCheckpointer.load(path, state_dict=None, *, default_map_location=None, strict=False, **kwargs) | waits for a save of the same path
method AsyncCheckpointer.close() | raises the failure of a pending save
"""

# Names of torch's neighbours of the checkpointer; their modules are ours under the same names.
_CHECKPOINTER_NEIGHBOURS = {
    "checkpointer": "function wrap_future(original_result)",
    "types": """
class RankInfo(global_rank, global_world_size)
data STATE_DICT
""",
    "checkpoint_writer": """
class WriterHook[ABC]
abstract method WriterHook.pre_commit(path, **kwargs)
abstract method WriterHook.post_commit(path, **kwargs)
class CheckpointWriterConfig(write_barrier_timeout_secs=600) | the timeout is used
class CheckpointWriter(config, rank_info, barrier=None, commit_hook=None) | all files or none, on disk when it returns
method CheckpointWriter.close()
""",
    "checkpoint_reader": """
class CheckpointReader(rank_info)
method CheckpointReader.read(path, state_dict=None, *, map_location=None)
""",
    "checkpoint_process": """
class CheckpointProcessConfig(subprocess_init_timeout_secs=30, subprocess_shutdown_timeout_secs=60)
class CheckpointProcess(rank_info, config, subprocess_init_fn, subprocess_init_args, checkpoint_writer_init_fn, checkpoint_writer_init_args)
method CheckpointProcess.write(state_dict, path, **kwargs)
method CheckpointProcess.close()
""",
    "staging": """
class CheckpointStagerConfig(use_pinned_memory=..., use_shared_memory=..., use_async_staging=..., use_non_blocking_copy=...) | the defaults work without an accelerator
class CheckpointStager[ABC]
abstract method CheckpointStager.stage(state_dict, **kwargs)
abstract method CheckpointStager.close()
class DefaultStager[CheckpointStager](config=...)
method DefaultStager.stage(state_dict, **kwargs)
method DefaultStager.close()
""",
    "barriers": """
class Barrier[ABC]
abstract method Barrier.execute_barrier()
class DistBarrier[Barrier]()
class TCPStoreBarrier[Barrier] | the timeout is used
""",
    "builder": """
keywords make_sync_checkpointer(config, rank_info, commit_hook)
keywords make_async_checkpointer(config, rank_info, subprocess_init_fn, subprocess_init_args, checkpoint_writer_init_fn, checkpoint_writer_init_args) | every part of the config is used
""",
}

_VALIDATION = """
class StrictHandling[Enum]
member StrictHandling.ASSUME_OK_UNEXPECTED = 'assume_ok_unexpected'
member StrictHandling.LOG_UNEXPECTED = 'log_unexpected'
member StrictHandling.LOG_ALL = 'log_all'
member StrictHandling.RAISE_UNEXPECTED = 'raise_unexpected'
member StrictHandling.RAISE_ALL = 'raise_all'
member StrictHandling.RETURN_UNEXPECTED = 'return_unexpected'
member StrictHandling.RETURN_ALL = 'return_all'
member StrictHandling.IGNORE_ALL = 'ignore_all'
staticmethod StrictHandling.requires_explicit_ckpt_mismatch_check(val)
staticmethod StrictHandling.requires_global_app_metadata(val)
staticmethod StrictHandling.requires_returning_mismatch_keys(val)
function parse_strict_flag(strict)
"""

_ASYNC_UTILS = """
class AsyncRequest[tuple](async_fn, async_fn_args, finalize_fns, async_fn_kwargs=..., preload_fn=None, is_frozen=False, call_idx=0)
method AsyncRequest.add_finalize_fn(fn)
method AsyncRequest.execute_sync()
method AsyncRequest.freeze()
class AsyncCaller[ABC]
class TemporalAsyncCaller[AsyncCaller] | never forks
class PersistentAsyncCaller[AsyncCaller] | never forks
class AsyncCallsQueue(persistent=False)
method AsyncCallsQueue.schedule_async_request(async_request)
method AsyncCallsQueue.maybe_finalize_async_calls(blocking=False, no_dist=False) | an error of the call is raised once, on every rank
method AsyncCallsQueue.get_num_unfinalized_calls()
method AsyncCallsQueue.close(abort=False)
"""

_EXCHANGE_UTILS = """
class ShardDistribution[tuple](main_rank_for_shard, shards_in_this_group, shard_to_metadata, all_ranks_for_shard)
function determine_main_replica_uniform_distribution(sharded_state_dict, parallelization_group, ignore_groups=False)
function exchange_by_distribution(loaded_tensors, unloaded_shards, shard_distribution, parallelization_group, exchange_algo='broadcast') | bounded pieces, and only what a rank lacks
"""

_FULLY_PARALLEL = """
class FullyParallelSaveStrategyWrapper[AsyncSaveShardedStrategy](strategy, parallelization_group=None, do_cache_distribution=False) | a cached distribution that no longer fits is noticed by all ranks
method FullyParallelSaveStrategyWrapper.async_save(sharded_state_dict, checkpoint_dir)
class FullyParallelLoadStrategyWrapper[LoadShardedStrategy](strategy, parallelization_group=None, do_cache_distribution=False, exchange_algo='broadcast')
method FullyParallelLoadStrategyWrapper.load(sharded_state_dict, checkpoint_dir)
"""

# Module -> names of other strategies that the pages mention by type, or that old code constructs.
_STRATEGIES = {
    "async_utils": _ASYNC_UTILS,
    "fully_parallel": _FULLY_PARALLEL,
    "two_stage": "class TwoStageDataParallelLoadShardedStrategy[LoadShardedStrategy](data_parallel_group, cpu_transfer=True) | data may be None; no collective of the whole world",
    "torch": """
class TorchDistSaveShardedStrategy[SaveShardedStrategy]
class TorchDistLoadShardedStrategy[LoadShardedStrategy]
class MCoreSavePlanner
class MCoreLoadPlanner
""",
    "common": """
class TorchCommonSaveStrategy[SaveCommonStrategy]
class TorchCommonLoadStrategy[LoadCommonStrategy] | what is pickled needs allow_pickle
""",
    "zarr": """
class ZarrSaveShardedStrategy[SaveShardedStrategy] | tensors without axes, keys with slashes, every dtype
class ZarrLoadShardedStrategy[LoadShardedStrategy] | reads the chunks it needs
""",
    "tensorstore": "class TensorStoreLoadShardedStrategy[LoadShardedStrategy](load_directly_on_device=False)",
    "filesystem_async": "class FileSystemWriterAsync(path, *args, separation_hint=None, use_msc=False, **kwargs)",
    "cached_metadata_filesystem_reader": "class CachedMetadataFileSystemReader(path, cache_metadata=True) | a cache of the object, not of the class",
}

_ALL = [
    ("000", "strategies.base", _STRATEGIES_BASE),
    ("001", "strategies.state_dict_saver", _STATE_DICT_SAVER),
    ("002", "serialization", _SERIALIZATION),
    ("002", "mapping", _MAPPING),
    ("002", "optimizer", _OPTIMIZER),
    ("002", "core", _CORE),
    ("002", "dict_utils", _DICT_UTILS),
    ("002", "utils", _UTILS),
    ("003", "tensor_aware_state_dict", _TENSOR_AWARE),
    ("004", "checkpointer", _CHECKPOINTER),
    ("", "", _FRONT_DOOR),
    ("", "strategies.base", _STRATEGIES_BASE_MORE),
    ("", "serialization", _SERIALIZATION_MORE),
    ("", "mapping", _MAPPING_MORE),
    ("", "core", _CORE_MORE),
    ("", "validation", _VALIDATION),
    ("", "exchange_utils", _EXCHANGE_UTILS),
    ("", "tensor_aware_state_dict", _TENSOR_AWARE_MORE),
    *(("", f"strategies.{module}", table) for module, table in _STRATEGIES.items()),
    *(("", module, table) for module, table in _CHECKPOINTER_NEIGHBOURS.items()),
]

SEEDS: tuple[Seed, ...] = tuple(seed for entry in _ALL for seed in _seeds(*entry))
