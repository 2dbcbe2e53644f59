"""Planners, writer and reader for DCP in one process; real ranks are in the multiprocess tests."""

from __future__ import annotations

import io
import os
import pickle
import queue
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, SerializationFormat
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from dist_ckpt import load_common_state_dict, load_plain_tensors, save
from dist_ckpt._formats.torch_dist.cached_reader import CachedMetadataFileSystemReader
from dist_ckpt._formats.torch_dist.planners import (
    MCoreLoadPlanner,
    MCoreSavePlan,
    MCoreSavePlanner,
    MissingKeyError,
)
from dist_ckpt._formats.torch_dist.plans import WriteFailedError, differences
from dist_ckpt._formats.torch_dist.writer_async import FileSystemWriterAsync
from dist_ckpt.errors import (
    CheckpointingException,
    CheckpointNotFoundError,
    ConfigError,
    CorruptedCheckpointError,
    MismatchError,
    StorageError,
    UnsafeContentError,
)
from dist_ckpt.mapping import ShardedTensor
from dist_ckpt.storage import LocalStore
from dist_ckpt.strategies.state_dict_saver import (
    _compare_dataclasses,
    logger,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)

GRID = torch.arange(24, dtype=torch.float32).view(4, 6)


def write(path: Path | str, state: dict[str, Any], **options: Any) -> None:
    """Save in one process through the three steps."""
    writer = FileSystemWriterAsync(path, **options)
    ret, *_ = save_state_dict_async_plan(state, writer)
    fn, _, args = writer.get_save_function_and_args()
    if fn is not None:
        fn(*args)
    save_state_dict_async_finalize(*ret)


def read(path: Path | str, state: dict[str, Any], planner: Any = None) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP says that there is no process group
        dcp.load(state, storage_reader=FileSystemReader(path), planner=planner, no_dist=True)
    return state


def assert_read(path: Path, expected: dict[str, torch.Tensor]) -> None:
    """Assert that DCP and this library read the same."""
    ours = load_plain_tensors(path)
    theirs = read(path, {key: torch.full_like(value, 9) for key, value in expected.items()})
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(ours[key], value)
        assert torch.equal(theirs[key], value)


def cause(error: CheckpointException) -> BaseException:
    """Return what a planner raised inside of DCP."""
    return error.failures[0][0]


def described(shape: tuple[int, ...], key: str = "grid", **options: Any) -> ShardedTensor:
    data = torch.zeros(shape)
    return ShardedTensor.from_rank_offsets(key, data, **options)


# -- loading: shapes, keys, objects ----------------------------------------------------------------


def test_a_global_shape_that_differs_is_named_with_its_key(tmp_path: Path) -> None:
    """All of them, with what is stored and what is asked for."""
    write(tmp_path, {"grid": GRID, "other": torch.ones(3)})
    planner = MCoreLoadPlanner(
        shapes_validation_sharded_tensors=[described((4, 5)), described((4,), "other")]
    )
    with pytest.raises(CheckpointException) as caught:
        read(tmp_path, {"grid": torch.zeros(4, 6)}, planner)
    error = cause(caught.value)
    assert isinstance(error, MismatchError)
    assert "Global shape mismatch for loaded (4, 6) and expected (4, 5) tensor for key grid" in str(
        error
    )
    assert "loaded (3,) and expected (4,) tensor for key other" in str(error)


def test_equal_shapes_pass_and_values_are_read(tmp_path: Path) -> None:
    """As with DCP's own planner."""
    write(tmp_path, {"grid": GRID})
    planner = MCoreLoadPlanner(shapes_validation_sharded_tensors=[described((4, 6))])
    assert torch.equal(read(tmp_path, {"grid": torch.zeros(4, 6)}, planner)["grid"], GRID)


def test_a_reformulated_shape_is_the_same_tensor() -> None:
    """Flattened ranges are stored by the lineage as grid and cell."""
    tensor = ShardedTensor(
        "flat", torch.zeros(5), torch.float32, (2, 3), (4, 6), (0, 0), (2, 2), 0, 0,
        flattened_range=slice(0, 5),
    )  # fmt: skip
    for shape, fits in (((2, 2, 6), True), ((4, 6), True), ((2, 2, 5), False)):
        planner = MCoreLoadPlanner(shapes_validation_sharded_tensors=[tensor])
        plan = DefaultSavePlanner()
        plan.set_up_planner({"flat": torch.zeros(shape)}, is_coordinator=True)
        _, metadata = plan.create_global_plan([plan.create_local_plan()])
        planner.set_up_planner({}, metadata)
        if fits:
            planner.create_local_plan()
        else:
            with pytest.raises(MismatchError, match="expected \\(4, 6\\) tensor for key flat"):
                planner.create_local_plan()


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("shape", [(6, 6), (4, 8), (3, 9), (2, 2)], ids=str)
def test_allowed_mismatch_fills_with_zeros(
    tmp_path: Path, shape: tuple[int, int], flatten: bool
) -> None:
    """What is stored and asked for is read, the rest is zero; the metadata is not changed."""
    write(tmp_path, {"grid": GRID, "exact": torch.ones(2)})
    planner = MCoreLoadPlanner(
        flatten_state_dict=flatten,
        allow_shape_mismatch_sharded_tensors={
            "grid": described(shape, allow_shape_mismatch=True),
            "not asked for": described((1,)),
        },
    )
    found = read(tmp_path, {"grid": torch.full(shape, 9.0), "exact": torch.zeros(2)}, planner)
    expected = torch.zeros(shape)
    rows, columns = min(shape[0], 4), min(shape[1], 6)
    expected[:rows, :columns] = GRID[:rows, :columns]
    assert torch.equal(found["grid"], expected)
    assert torch.equal(found["exact"], torch.ones(2))
    assert planner.metadata is not None
    assert tuple(planner.metadata.state_dict_metadata["grid"].size) == (4, 6)


def test_another_number_of_axes_is_never_allowed(tmp_path: Path) -> None:
    """No zeros can make up for it."""
    write(tmp_path, {"grid": GRID})
    planner = MCoreLoadPlanner(allow_shape_mismatch_sharded_tensors={"grid": described((24,))})
    with pytest.raises(CheckpointException) as caught:
        read(tmp_path, {"grid": torch.zeros(24)}, planner)
    assert "number of axes differs" in str(cause(caught.value))


def test_missing_keys_are_all_named(tmp_path: Path) -> None:
    """A KeyError too; not if partial loads are allowed."""
    write(tmp_path, {"grid": GRID})
    with pytest.raises(CheckpointException) as caught:
        read(tmp_path, {"a": torch.zeros(1), "b": torch.zeros(1)}, MCoreLoadPlanner())
    error = cause(caught.value)
    assert isinstance(error, MissingKeyError)
    assert isinstance(error, KeyError | MismatchError)
    assert str(error) == "not in the checkpoint: a; b."
    planner = MCoreLoadPlanner(
        allow_partial_load=True, allow_shape_mismatch_sharded_tensors={"a": described((1,), "a")}
    )
    state = read(tmp_path, {"a": torch.full((1,), 5.0), "grid": torch.zeros(4, 6)}, planner)
    assert state["a"].item() == 5.0
    assert torch.equal(state["grid"], GRID)


class _Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("must-not-exist",)


def test_objects_are_not_unpickled_unguarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain values come back; what would run code is an error unless the caller trusts it."""
    monkeypatch.chdir(tmp_path)
    write("good", {"object": {"a": [1, 2.5, "x", None]}})
    assert read("good", {"object": {"a": 0}}, MCoreLoadPlanner())["object"]["a"] is not None
    write("evil", {"object": _Evil()})
    with pytest.raises(CheckpointException) as caught:
        read("evil", {"object": None}, MCoreLoadPlanner())
    error = cause(caught.value)
    assert isinstance(error, UnsafeContentError)
    assert "'object'" in str(error)
    assert "allow_pickle=True" in str(error)
    assert not Path("must-not-exist").exists()
    read("evil", {"object": None}, MCoreLoadPlanner(allow_pickle=True))
    assert Path("must-not-exist").exists()


# -- saving: plans ---------------------------------------------------------------------------------


def planned(state: dict[str, Any], **options: Any) -> tuple[MCoreSavePlanner, SavePlan]:
    planner = MCoreSavePlanner(**options)
    planner.set_up_planner(state, is_coordinator=True)
    return planner, planner.create_local_plan()


def test_bytes_are_written_as_they_are(tmp_path: Path) -> None:
    """Objects that the caller has packed are not packed again."""
    packed = io.BytesIO()
    torch.save({"x": 1}, packed)
    writer = FileSystemWriterAsync(tmp_path / "c")
    ret, *_ = save_state_dict_async_plan(
        {"object": packed, "plain": 5}, writer, planner=MCoreSavePlanner()
    )
    packed.seek(0)
    packed.truncate()
    fn, _, args = writer.get_save_function_and_args()
    assert fn is not None
    fn(*args)
    save_state_dict_async_finalize(*ret)
    assert load_common_state_dict(tmp_path / "c") == {"object": {"x": 1}, "plain": 5}


def test_original_shapes_are_noted_in_the_metadata() -> None:
    """They travel in the local plans."""
    planner, plan = planned({"a": torch.ones(2)}, nd_flattened_global_shapes={"a": (1, 2)})
    assert isinstance(plan, MCoreSavePlan)
    _, metadata = planner.create_global_plan([plan])
    assert vars(metadata)["mcore_data"] == {"a": {"nd_reformulated_orig_global_shape": (1, 2)}}


def test_who_may_plan_alone() -> None:
    """Not where a coordinator has to choose between replicas."""
    assert MCoreSavePlanner().can_run_decentralized_global_plan
    assert not MCoreSavePlanner(
        can_run_decentralized_global_plan=False
    ).can_run_decentralized_global_plan
    assert not MCoreSavePlanner(dedup_replicated_tensors=True).can_run_decentralized_global_plan
    planner, plan = planned({"a": torch.ones(2)})
    assert planner.create_decentralized_global_plan(plan) is plan


def test_replicas_are_refused_or_deduplicated() -> None:
    """By choice of the caller."""
    planner, plan = planned({"a": torch.ones(2)})
    with pytest.raises(CheckpointingException, match=r"'a' by ranks \[0, 1\]"):
        planner.create_global_plan([plan, plan])
    planner, plan = planned({"a": torch.ones(2)}, dedup_replicated_tensors=True)
    plans, _ = planner.create_global_plan([plan, plan])
    assert sorted(len(one.items) for one in plans) == [0, 1]


def test_the_cache_that_all_planners_share_is_refused() -> None:
    """One model's plan must not be taken for another's."""
    with pytest.raises(ConfigError, match="cached_ckpt_structure"):
        MCoreSavePlanner(enable_plan_caching=True)


@pytest.mark.parametrize(
    ("other", "fields"),
    [
        ({"a": torch.ones(2)}, []),
        ({"a": torch.ones(3)}, ["items"]),
        ({"a": torch.ones(2, dtype=torch.float64)}, ["items"]),
        ({"a": torch.ones(2), "b": 1}, ["items", "planner_data"]),
        ({}, ["items", "planner_data"]),
        ({"a": 1}, ["items"]),
    ],
    ids=["same", "reshaped", "retyped", "added", "removed", "object"],
)
def test_differences_of_plans(other: dict[str, Any], fields: list[str]) -> None:
    """Everything counts but the values and where they go."""
    _, plan = planned({"a": torch.zeros(2)})
    _, changed = planned(other)
    assert differences(plan, changed) == fields
    plain = SavePlan(plan.items, "elsewhere", plan.planner_data)
    assert differences(plan, plain) == []


def test_compare_dataclasses() -> None:
    """The three answers of the lineage, and its TypeError."""
    plan = SavePlan([], "a")
    assert _compare_dataclasses(plan, SavePlan([], "a")) == "All fields are equal"
    assert _compare_dataclasses(plan, SavePlan([], "b")) == ["storage_data: a != b"]
    text = _compare_dataclasses(plan, 1)
    assert text == f"Objects are of different types: {SavePlan} and {int}"
    with pytest.raises(TypeError):
        _compare_dataclasses(1, 2)
    assert logger.name == "dist_ckpt.strategies.state_dict_saver"


# -- the writer ------------------------------------------------------------------------------------

DTYPES = [
    torch.bool, torch.uint8, torch.int64, torch.uint16, torch.float16, torch.bfloat16,
    torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e8m0fnu,
]  # fmt: skip


def test_bits_of_all_dtypes_and_forms_survive(tmp_path: Path) -> None:
    """NaN payloads, strided, expanded, conjugated, sliced and empty ones too."""
    raw = torch.arange(256, dtype=torch.uint8).repeat(2)
    state: dict[str, torch.Tensor] = {
        str(dtype): (raw % 2).view(torch.bool) if dtype is torch.bool else raw.view(dtype)
        for dtype in DTYPES
    }
    state |= {
        "expanded": torch.ones(1, 3).expand(4, 3),
        "strided": GRID.t(),
        "sliced": torch.arange(1000.0)[::7],
        "conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "negated": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "zero": torch.tensor(7),
        "empty": torch.empty(3, 0, 2),
        "parameter": torch.nn.Parameter(torch.ones(2)).data,
    }
    write(tmp_path / "c", state, thread_count=3)
    found = load_plain_tensors(tmp_path / "c")
    assert found.keys() == state.keys()
    for key, value in state.items():
        plain = value.resolve_conj().resolve_neg().contiguous()
        assert (found[key].dtype, found[key].shape) == (plain.dtype, plain.shape), key
        assert (
            found[key].reshape(-1).view(torch.uint8).equal(plain.reshape(-1).view(torch.uint8))
        ), key
    assert len(list((tmp_path / "c").glob("*.distcp"))) == 3


def test_a_slice_does_not_take_its_storage_along(tmp_path: Path) -> None:
    """Ten of a million floats are some hundred bytes."""
    write(tmp_path, {"slice": torch.zeros(1_000_000)[:10]})
    assert sum(file.stat().st_size for file in tmp_path.glob("*.distcp")) < 2000


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
def test_what_cannot_be_framed_is_written_by_torch(tmp_path: Path) -> None:
    """Other layouts go through ``torch.save``, as DCP writes them."""
    write(tmp_path, {"sparse": torch.eye(3).to_sparse(), "dense": torch.ones(2)})
    storage = FileSystemReader(tmp_path).read_metadata().storage_data
    (info,) = (info for place, info in storage.items() if place.fqn == "sparse")
    data = (tmp_path / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
    assert torch.equal(torch.load(io.BytesIO(data), weights_only=True).to_dense(), torch.eye(3))
    assert torch.equal(read(tmp_path, {"dense": torch.zeros(2)})["dense"], torch.ones(2))


def test_a_tensor_too_large_to_be_framed_is_written_by_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is 4 GiB; here it is some bytes."""
    monkeypatch.setattr("dist_ckpt._formats.torch_dist.sizes.MAX_RECORD_NBYTES", 50)
    write(tmp_path, {"small": torch.ones(2), "large": GRID.t()})
    assert_read(tmp_path, {"small": torch.ones(2), "large": GRID.t()})


_FLIP = bytes(255 - byte for byte in range(256))


class _Inverted(StreamTransformExtension):
    """Inverts every bit."""

    @staticmethod
    def registry_name() -> str:
        return "test.inverted"

    @staticmethod
    def from_descriptor(version: str) -> _Inverted:  # noqa: ARG004 - DCP's signature
        return _Inverted()

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"

    def transform_to(self, output: Any) -> Any:
        class Writer(io.RawIOBase):
            def write(self, data: Any) -> int:
                output.write(bytes(data).translate(_FLIP))
                return len(bytes(data))

        return Writer()

    def transform_from(self, input: Any) -> Any:  # noqa: A002 - DCP's signature
        return io.BytesIO(input.read().translate(_FLIP))


def test_stream_extensions_of_dcp(tmp_path: Path) -> None:
    """They are applied to every record, and DCP's reader undoes them."""
    write(tmp_path, {"grid": GRID, "text": "plain"}, _extensions=[_Inverted()])
    registry = ExtensionRegistry()
    registry.register(_Inverted)
    reader = FileSystemReader(tmp_path, _extension_registry=registry)
    state = {"grid": torch.zeros(4, 6), "text": ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP says that there is no process group
        dcp.load(state, storage_reader=reader, no_dist=True)
    assert torch.equal(state["grid"], GRID)
    assert state["text"] == "plain"


def test_separated_keys_get_files_of_their_own(tmp_path: Path) -> None:
    """Whatever the number of threads; options are left as they were."""
    writer = FileSystemWriterAsync(tmp_path, separation_hint="optim")
    assert writer.thread_count == 1
    write(tmp_path, {"optim.a": torch.ones(2), "model.a": torch.ones(3)}, separation_hint="optim")
    assert sorted(p.name for p in tmp_path.glob("*.distcp")) == [
        "__0_0.distcp",
        "optim__0_1.distcp",
    ]
    assert load_plain_tensors(tmp_path).keys() == {"optim.a", "model.a"}


def test_a_file_for_each_value(tmp_path: Path) -> None:
    """DCP's option works."""
    write(tmp_path, {"a": torch.ones(2), "b": torch.ones(3), "c": 5}, single_file_per_rank=False)
    assert len(list(tmp_path.glob("*.distcp"))) == 3
    assert load_plain_tensors(tmp_path).keys() == {"a", "b"}


@pytest.mark.parametrize(
    "options",
    [
        {"use_msc": True},
        {"separation_hint": "a/b"},
        {"serialization_format": SerializationFormat.SAFETENSORS},
    ],
    ids=str,
)
def test_options_that_are_not_supported(tmp_path: Path, options: dict[str, Any]) -> None:
    """They are refused, not ignored."""
    with pytest.raises(ConfigError):
        FileSystemWriterAsync(tmp_path, **options)


def test_nothing_to_write(tmp_path: Path) -> None:
    """No function, no arguments, no results."""
    writer = FileSystemWriterAsync(tmp_path)
    ret, *_ = save_state_dict_async_plan({}, writer)
    assert writer.get_save_function_and_args() == (None, None, [])
    assert writer.retrieve_write_results() == []
    save_state_dict_async_finalize(*ret)
    assert load_plain_tensors(tmp_path) == {}


def test_finalizing_before_writing_is_told(tmp_path: Path) -> None:
    """It does not wait, and commits nothing."""
    writer = FileSystemWriterAsync(tmp_path)
    ret, *_ = save_state_dict_async_plan({"a": torch.ones(1)}, writer)
    with pytest.raises(WriteFailedError, match="nothing was written yet"):
        save_state_dict_async_finalize(*ret)
    assert not (tmp_path / ".metadata").exists()


def failing_write(name_part: str) -> Any:
    real = LocalStore.write

    def write(self: Any, name: str, extents: Any, *, nbytes: int) -> None:
        if name_part in name:
            raise StorageError(f"no space for {name}")
        real(self, name, extents, nbytes=nbytes)

    return write


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_failure_in_any_thread_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Nothing is committed, and the files of the rank that failed are gone."""
    state = {f"t{i}": torch.ones(10) for i in range(6)}
    monkeypatch.setattr(LocalStore, "write", failing_write(f"_{number}.distcp"))
    with pytest.raises(WriteFailedError, match=f"no space for __0_{number}.distcp") as caught:
        write(tmp_path, state, thread_count=3)
    assert isinstance(caught.value, CheckpointException)
    assert caught.value.failures[0].error == "StorageError"
    assert list(tmp_path.iterdir()) == []
    writer = FileSystemWriterAsync(tmp_path, thread_count=3)
    with pytest.raises(CheckpointException, match="no space"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=writer, no_dist=True)
    assert list(tmp_path.iterdir()) == []


def test_a_commit_needs_every_result(tmp_path: Path) -> None:
    """What the plan has and nobody wrote is named."""
    writer = FileSystemWriterAsync(tmp_path)
    state = {"a": torch.ones(2), "b": torch.ones(2), "object": 5}
    (_, metadata, _), *_ = save_state_dict_async_plan(state, writer)
    fn, _, args = writer.get_save_function_and_args()
    assert fn is not None
    fn(*args)
    results = writer.retrieve_write_results()
    assert metadata is not None
    with pytest.raises(StorageError, match=r"not written: 'b' at \(0,\)"):
        writer.finish(metadata, [[one for one in results if one.index.fqn != "b"]])
    with pytest.raises(StorageError, match="not written: 'object'"):
        writer.finish(metadata, [[one for one in results if one.index.fqn != "object"]])
    assert not list(tmp_path.glob(".metadata*"))
    writer.finish(metadata, [results])
    assert metadata.storage_data is None  # what was lent is as it was
    assert load_plain_tensors(tmp_path).keys() == {"a", "b"}


@pytest.mark.parametrize("step", ["create", "replace", "fsync"])
def test_a_commit_that_fails_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Whole and readable; with nothing beside it that DCP would take for metadata."""
    write(tmp_path, {"a": torch.ones(2)})
    writer = FileSystemWriterAsync(tmp_path)
    ret, *_ = save_state_dict_async_plan({"a": torch.zeros(2)}, writer)
    fn, _, args = writer.get_save_function_and_args()
    assert fn is not None
    fn(*args)
    with monkeypatch.context() as patch:
        calls: list[int] = []

        def fail(*_: Any) -> None:
            calls.append(1)
            if step != "fsync" or len(calls) > 1:
                raise OSError(5, f"broken {step}")

        module = "dist_ckpt.storage.replace"
        if step == "create":
            patch.setattr(LocalStore, "create", fail)
        elif step == "fsync":
            patch.setattr(f"{module}.fsync_directory", fail)
        else:
            real = Path.replace
            patch.setattr(Path, "replace", lambda *a: fail() if not calls else real(*a))
        with pytest.raises(WriteFailedError, match=f"broken {step}"):
            save_state_dict_async_finalize(*ret)
    assert torch.equal(load_plain_tensors(tmp_path)["a"], torch.ones(2))
    assert [p.name for p in tmp_path.glob(".metadata*")] == [".metadata"]


def test_older_checkpoints(tmp_path: Path) -> None:
    """They are replaced, or refused by option; one of our own format is never mixed with."""
    write(tmp_path / "c", {"a": torch.ones(2), "b": torch.ones(2)}, thread_count=2)
    with pytest.raises(CheckpointingException, match="overwrite=False"):
        write(tmp_path / "c", {"a": torch.ones(2)}, overwrite=False)
    write(tmp_path / "c", {"a": torch.zeros(2)})
    assert load_plain_tensors(tmp_path / "c").keys() == {"a"}
    assert len(list((tmp_path / "c").iterdir())) == 2
    metadata = FileSystemReader(tmp_path / "c").read_metadata()
    (info,) = metadata.storage_data.values()
    info.relative_path = "notes.txt"
    (tmp_path / "c" / "notes.txt").touch()
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata))
    write(tmp_path / "c", {"a": torch.zeros(2)})
    assert (tmp_path / "c" / "notes.txt").exists()  # only data files are removed
    save({"a": described((2,), "a")}, tmp_path / "own")
    with pytest.raises(CheckpointingException, match="holds a checkpoint of dist_ckpt"):
        write(tmp_path / "own", {"a": torch.ones(2)})
    assert torch.equal(load_plain_tensors(tmp_path / "own")["a"], torch.zeros(2))


def test_files_of_a_save_that_is_not_committed_are_left_alone(tmp_path: Path) -> None:
    """It may be under way; two saves to one path end with the last one, whole."""
    writers = [FileSystemWriterAsync(tmp_path) for _ in range(2)]
    ends = []
    for number, writer in enumerate(writers):
        state = {"a": torch.full((2,), float(number))}
        ret, *_ = save_state_dict_async_plan(state, writer)
        fn, _, args = writer.get_save_function_and_args()
        assert fn is not None
        fn(*args)
        ends.append(ret)
    for number, ret in enumerate(ends):
        save_state_dict_async_finalize(*ret)
        assert torch.equal(load_plain_tensors(tmp_path)["a"], torch.full((2,), float(number)))
    assert len(list(tmp_path.iterdir())) == 2


def test_results_that_do_not_cover_the_plan_are_a_failure(tmp_path: Path) -> None:
    """Whoever runs the function cannot lose a file unnoticed."""
    writer = FileSystemWriterAsync(tmp_path)
    ret, *_ = save_state_dict_async_plan({"a": torch.ones(2)}, writer)
    assert isinstance(writer.results_queue, queue.SimpleQueue)
    writer.results_queue.put([])
    with pytest.raises(WriteFailedError, match="0 of 1 values were written"):
        save_state_dict_async_finalize(*ret)


# -- the reader ------------------------------------------------------------------------------------


def test_metadata_is_read_once_for_each_state_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replaced file is read again; what callers do to their copy is not seen by others."""
    write(tmp_path, {"a": torch.ones(2)})
    reads: list[str] = []
    real = LocalStore.read
    monkeypatch.setattr(
        LocalStore, "read", lambda self, name, **kw: reads.append(name) or real(self, name, **kw)
    )
    reader = CachedMetadataFileSystemReader(tmp_path)
    first = reader.read_metadata()
    first.state_dict_metadata.clear()
    assert reader.read_metadata().state_dict_metadata.keys() == {"a"}
    assert reads == [".metadata"]
    write(tmp_path, {"b": torch.ones(2)})
    reads.clear()
    assert reader.read_metadata().state_dict_metadata.keys() == {"b"}
    assert reads == [".metadata"]


def test_caches_are_not_shared(tmp_path: Path) -> None:
    """Neither between checkpoints nor between readers, with and without a cache."""
    for name in ("one", "two"):
        write(tmp_path / name, {name: torch.ones(2)})
    for cache in (True, False):
        for name in ("one", "two", "one"):
            reader = CachedMetadataFileSystemReader(tmp_path / name, cache)
            assert reader.read_metadata().state_dict_metadata.keys() == {name}
    reader = CachedMetadataFileSystemReader(tmp_path / "one")
    reader.read_metadata()
    reader.reset(tmp_path / "two")
    assert reader.read_metadata().state_dict_metadata.keys() == {"two"}


def test_dcp_loads_through_the_reader(tmp_path: Path) -> None:
    """It is DCP's reader otherwise."""
    write(tmp_path, {"grid": GRID})
    state = {"grid": torch.zeros(4, 6)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=CachedMetadataFileSystemReader(tmp_path), no_dist=True)
    assert torch.equal(state["grid"], GRID)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (None, CheckpointNotFoundError),
        (b"", CorruptedCheckpointError),
        (b"\x80\x04torn", CorruptedCheckpointError),
        (pickle.dumps({"no": "metadata"}), CorruptedCheckpointError),
        (pickle.dumps(Metadata("no dict")), CorruptedCheckpointError),
        (pickle.dumps(os.system), UnsafeContentError),
    ],
    ids=["missing", "empty", "torn", "other", "malformed", "hostile"],
)
def test_metadata_is_not_believed(
    tmp_path: Path, data: bytes | None, error: type[Exception]
) -> None:
    """Nothing but the classes of metadata is ever named."""
    if data is not None:
        (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(error):
        CachedMetadataFileSystemReader(tmp_path).read_metadata()
