"""Checkpointers of one rank: what is stored and what comes back, now and in the background."""

from __future__ import annotations

import contextlib
import operator
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dist_ckpt import load, save
from dist_ckpt.barriers import (
    BarrierConfig,
    DistBarrier,
    TCPStoreBarrier,
    create_barrier_from_config,
)
from dist_ckpt.builder import make_async_checkpointer, make_sync_checkpointer
from dist_ckpt.checkpoint_process import (
    CheckpointProcess,
    CheckpointProcessConfig,
    CheckpointProcessError,
)
from dist_ckpt.checkpoint_reader import CheckpointReader
from dist_ckpt.checkpoint_writer import CheckpointWriter, CheckpointWriterConfig
from dist_ckpt.checkpointer import AsyncCheckpointer, Checkpointer, wrap_future
from dist_ckpt.dict_utils import diff
from dist_ckpt.errors import (
    BarrierTimeoutError,
    CheckpointNotFoundError,
    ConfigError,
    CoordinationError,
    CorruptedCheckpointError,
    InvalidShardingError,
    MismatchError,
    UnsafeContentError,
)
from dist_ckpt.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from dist_ckpt.options import LoadOptions
from dist_ckpt.staging import CheckpointStagerConfig, DefaultStager
from dist_ckpt.types import RankInfo
from tests._checkpoint_hooks import ByName, Fails, Gate, Recorder, note_pid_writer
from tests.multiprocess._world import run_program

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn,
    torch.float8_e8m0fnu, torch.complex64, torch.complex128, torch.bool, torch.int8, torch.uint16,
    torch.uint64,
]  # fmt: skip


SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - what a system has of it


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@contextlib.contextmanager
def background(**arguments: Any) -> Iterator[AsyncCheckpointer]:
    """Yield a checkpointer with a process, and see that the process is gone afterwards."""
    checkpointer = make_async_checkpointer(**arguments)
    try:
        yield checkpointer
    finally:
        with contextlib.suppress(Exception):  # what the test is about, it has seen
            checkpointer.close()
        process = checkpointer._checkpoint_process.process
        assert process is None or process.exitcode is not None


@pytest.fixture(params=["sync", "async"], scope="module")
def checkpointer(request: pytest.FixtureRequest) -> Iterator[Checkpointer]:
    """One for many tests: a process takes seconds to start, and is made for many saves."""
    make: Any = make_sync_checkpointer if request.param == "sync" else make_async_checkpointer
    with contextlib.closing(make()) as one:
        yield one


@pytest.fixture(scope="module")
def process_of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    pipe = tmp_path_factory.mktemp("gate") / "pipe"
    checkpointer = make_async_checkpointer(**hooked(ByName(pipe)))
    yield checkpointer._checkpoint_process, pipe
    checkpointer.close()


@pytest.fixture
def gate(process_of_all: tuple[CheckpointProcess, Path]) -> Path:
    """What to open for writing when a save to ``gated`` is to go on."""
    return process_of_all[1]


@pytest.fixture
def scripted(process_of_all: tuple[CheckpointProcess, Path]) -> AsyncCheckpointer:
    """One whose saves to ``bad`` fail and to ``gated`` wait; they share one process."""
    return AsyncCheckpointer(DefaultStager(), process_of_all[0], CheckpointReader())


def hooked(hook: Any) -> dict[str, Any]:
    return {"checkpoint_writer_init_args": {"commit_hook": hook}}


def saved(checkpointer: Checkpointer, state: dict[str, Any], path: Path) -> None:
    futures = checkpointer.save(state, path)
    if futures is not None:
        assert [future.result() for future in futures] == [None, None]


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    limit = 2 if dtype is torch.bool else 256
    return torch.randint(0, limit, (size,), dtype=torch.uint8).view(dtype).view(shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    def raw(x: torch.Tensor) -> torch.Tensor:
        return x.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)

    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))


def tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(24.0).reshape(4, 6)
    return {
        **{str(dtype): random_bits(dtype, 3, 5) for dtype in DTYPES},
        "transposed": base.t(),
        "every other": base[::2, ::3],
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.randn(1, 3).expand(5, 3),
        "conjugated": torch.randn(2, 2, dtype=torch.complex64).conj(),
        "negated": torch.randn(2, 2, dtype=torch.complex64).conj().imag,
        "no elements": torch.empty(0, 7),
        "no dimension": torch.tensor(2.5, dtype=torch.float64),
        "with a history": torch.ones(2, requires_grad=True) * 2,
    }


# -- what is stored --------------------------------------------------------------------------------


def test_every_kind_of_tensor_comes_back(checkpointer: Checkpointer, folder: Path) -> None:
    """Bit for bit, whatever dtype, strides and size, as new tensors and into old ones."""
    state = tensors()
    saved(checkpointer, state, folder / "c")

    fresh = checkpointer.load(folder / "c")
    target = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in state.items()}
    filled = checkpointer.load(folder / "c", target, strict=True)

    assert list(fresh) == list(state)
    assert [name for name, t in state.items() if not same_bits(t, fresh[name])] == []
    assert [name for name, t in state.items() if not same_bits(t, filled[name])] == []


def test_every_kind_of_value_comes_back(checkpointer: Checkpointer, folder: Path) -> None:
    """Types, order and nesting are kept; keys that look alike stay apart."""
    state: dict[Any, Any] = {
        "a": {"b": torch.ones(1)}, "a.b": torch.zeros(1), "a/b": torch.full((1,), 2.0),
        0: torch.ones(2), "0": torch.zeros(2), "#0": torch.ones(3), "[0]": 1, (1, "x"): torch.ones(4),
        "": {"": torch.ones(5)}, None: torch.ones(6), True: 1.5,
        "list": [torch.ones(1), (torch.zeros(1), {"deep": torch.ones(2)}), [], {}],
        "ordered": OrderedDict(b=1, a=torch.ones(1)), "counter": Counter("aab"),
        "default": defaultdict(list, {"x": [1]}), "size": torch.Size([1, 2]),
        "none": None, "int": 2**70, "nan": float("inf"), "bytes": b"\x00\xff", "set": {1, 2},
        "dtype": torch.bfloat16,
    }  # fmt: skip
    saved(checkpointer, state, folder / "c")

    loaded = checkpointer.load(folder / "c")

    assert diff(state, loaded) == ([], [], [])
    assert [type(value) for value in loaded.values()] == [type(value) for value in state.values()]
    assert list(loaded) == list(state)
    assert type(loaded["list"][1]) is tuple


def test_parameters_and_ties_are_kept(checkpointer: Checkpointer, folder: Path) -> None:
    """A parameter comes back as one, the same tensor in two places as one tensor, stored once."""
    weight = nn.Parameter(torch.randn(256, 256), requires_grad=False)
    state = {"w": weight, "again": weight, "data": weight.data, "row": weight.data[0]}
    saved(checkpointer, state, folder / "c")

    loaded = checkpointer.load(folder / "c")

    assert type(loaded["w"]) is nn.Parameter
    assert not loaded["w"].requires_grad
    assert type(loaded["data"]) is torch.Tensor
    assert loaded["w"].data_ptr() == loaded["again"].data_ptr() == loaded["data"].data_ptr()
    assert diff(state, loaded) == ([], [], [])
    size = sum(file.stat().st_size for file in (folder / "c").iterdir())
    assert size < 2 * weight.numel() * 4


def test_both_orders_of_arguments(checkpointer: Checkpointer, folder: Path) -> None:
    """Path and state dict are told apart by type, positionally and by name."""
    for futures in (
        checkpointer.save({"x": 1}, str(folder / "a")),
        checkpointer.save(folder / "b", {"x": 2}),  # type: ignore[arg-type]
        checkpointer.save(path=folder / "c", state_dict={"x": 3}),
    ):
        for future in futures or ():
            future.result()

    assert [checkpointer.load(folder / name)["x"] for name in "abc"] == [1, 2, 3]


@pytest.mark.parametrize(
    ("state", "path"),
    [({"x": 1}, 3), ([1], "c"), ("a", "b"), ({"x": 1}, {"y": 2})],
    ids=["no-path", "no-dict", "two-paths", "two-dicts"],
)
def test_what_cannot_be_saved_is_told(
    checkpointer: Checkpointer, state: Any, path: Any, folder: Path
) -> None:
    """Wrong arguments are an error of ours and leave nothing behind; the next save works."""
    with contextlib.chdir(folder), pytest.raises(ConfigError, match="expected"):
        for future in checkpointer.save(state, path) or ():
            future.result()
    saved(checkpointer, {"x": 1}, folder / "good")

    assert names(folder) == ["good"]


CYCLE: dict[str, Any] = {}
CYCLE["here"] = CYCLE


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"here": torch.ones(1, device="meta")}, "here.*meta device"),
        (CYCLE, "contains itself"),
        ({"here": [ShardedTensor.from_rank_offsets("checkpointer/rank_0/x", torch.ones(1))]},
         "here.0.: keys that begin with 'checkpointer/' are ours"),
        ({"here": deque([ShardedTensor.from_rank_offsets("x", torch.ones(1))])},
         "here: a ShardedTensor inside a deque"),
    ],
    ids=["meta", "cycle", "reserved", "hidden"],
)  # fmt: skip
def test_state_that_cannot_be_stored(
    state: dict[str, Any], message: str, checkpointer: Checkpointer, folder: Path
) -> None:
    """It is an error that names the place; nothing is committed, and the next save works."""
    with pytest.raises(InvalidShardingError, match=message):
        for future in checkpointer.save(state, folder / "bad") or ():
            future.result()
    saved(checkpointer, {"x": 1}, folder / "good")

    assert names(folder) == ["good"]


def test_an_older_checkpoint_is_replaced_at_once(checkpointer: Checkpointer, folder: Path) -> None:
    """A second save to a path takes the place of the first, and leaves nothing of it."""
    saved(checkpointer, {"old": torch.ones(3)}, folder / "c")
    saved(checkpointer, {"new": torch.zeros(3)}, folder / "c")

    assert list(checkpointer.load(folder / "c")) == ["new"]
    assert names(folder) == ["c"]


# -- what is loaded --------------------------------------------------------------------------------


def test_only_the_keys_of_the_template_are_read(folder: Path) -> None:
    """In place and into the same object; None takes all below; extra keys are left out."""
    checkpointer = make_sync_checkpointer()
    state = {
        "m": {"a": torch.ones(2), "b": torch.ones(3)},
        "o": {"x": [torch.ones(1), 2]},
        "step": 7,
    }
    saved(checkpointer, state, folder / "c")
    a = torch.zeros(2)
    inner = {"a": a}
    target = {"m": inner, "o": None, "step": 0}

    loaded = checkpointer.load(folder / "c", target, strict=True)

    assert loaded is target
    assert loaded["m"] is inner
    assert inner == {"a": a}
    assert torch.equal(a, torch.ones(2))
    assert diff(loaded["o"], state["o"]) == ([], [], [])
    assert loaded["step"] == 7
    assert checkpointer.load(folder / "c", {}, strict=True) == {}


def test_strided_and_empty_targets(folder: Path) -> None:
    """Sources and targets of any strides, without elements or dimensions, are exact."""
    checkpointer = make_sync_checkpointer()
    base = torch.arange(12.0).reshape(3, 4)
    state = {"t": base.t(), "cut": base[:, 1:3], "none": torch.empty(2, 0), "one": torch.tensor(5)}
    saved(checkpointer, state, folder / "c")
    wide = torch.zeros(8, 9)
    target = {
        "t": wide[::2, ::3],
        "cut": torch.zeros(2, 3).t(),
        "none": torch.empty(2, 0),
        "one": torch.tensor(0),
    }

    checkpointer.load(folder / "c", target, strict=True)

    assert diff(target, state) == ([], [], [])
    assert torch.equal(wide[::2, ::3], base.t())
    assert wide.sum() == base.sum()


def test_missing_keys_are_told_by_path(folder: Path) -> None:
    """Without strict they stay as they are; with it all of them are named in one error."""
    checkpointer = make_sync_checkpointer()
    saved(checkpointer, {"m": {"a": torch.ones(1)}, "l": [1]}, folder / "c")
    template = {
        "m": {"a": torch.zeros(1), "z": 5},
        "l": [0, torch.full((1,), 9.0)],
        "gone": {"x": 1},
    }

    state, missing = CheckpointReader().read(folder / "c", template)

    assert missing == ["m.z", "l[1]", "gone"]
    assert state["m"]["z"] == 5
    assert state["l"][0] == 1
    assert state["l"][1] == 9.0
    assert state["gone"] == {"x": 1}
    with pytest.raises(
        MismatchError, match="Checkpoint at .*/c is missing keys: .'m.z', 'l.1.', 'g"
    ) as e:
        checkpointer.load(folder / "c", template, strict=True)
    assert isinstance(e.value, RuntimeError)


def test_what_does_not_fit_is_told_before_anything_is_read(folder: Path) -> None:
    """Types, shapes and dtypes: all of them in one error, and no target has changed."""
    checkpointer = make_sync_checkpointer()
    state = {"ok": torch.ones(2), "shape": torch.ones(2), "dtype": torch.ones(2), "value": 1,
             "tensor": torch.ones(1), "dict": {"x": 1}, "list": [1]}  # fmt: skip
    saved(checkpointer, state, folder / "c")
    ok = torch.zeros(2)
    template = {"ok": ok, "shape": torch.zeros(1, 2), "dtype": torch.zeros(2, dtype=torch.int32),
                "value": torch.zeros(1), "tensor": 5, "dict": [1], "list": (1,)}  # fmt: skip

    with pytest.raises(MismatchError) as e:
        checkpointer.load(folder / "c", template)

    assert [name for name in template if f"'{name}'" in str(e.value)] == list(template)[1:]
    assert torch.equal(ok, torch.zeros(2))
    assert template["tensor"] == 5


def test_a_list_takes_the_length_that_is_stored(folder: Path) -> None:
    """A list has no keys to choose by: what is stored beyond the template is loaded too."""
    checkpointer = make_sync_checkpointer()
    saved(checkpointer, {"groups": [{"lr": 1.0}, {"lr": 2.0}], "t": (1, 2)}, folder / "c")
    groups = [{"lr": 0.0}]

    loaded = checkpointer.load(folder / "c", {"groups": groups, "t": (0, 0)})

    assert loaded["groups"] is groups
    assert groups == [{"lr": 1.0}, {"lr": 2.0}]
    assert loaded["t"] == (1, 2)


def test_targets_that_share_memory(folder: Path) -> None:
    """Equal values go to one memory; values that differ are an error, not the last one."""
    checkpointer = make_sync_checkpointer()
    state = {"a": torch.ones(3), "b": torch.ones(3), "c": torch.zeros(3), "d": torch.ones(2, 3)}
    saved(checkpointer, state, folder / "c")
    one, row = torch.zeros(3), torch.zeros(1, 3)

    checkpointer.load(folder / "c", {"a": one, "b": one, "d": row.expand(2, 3)}, strict=True)

    assert torch.equal(one, torch.ones(3))
    assert torch.equal(row, torch.ones(1, 3))
    with pytest.raises(MismatchError, match="share memory"):
        checkpointer.load(folder / "c", {"a": one, "c": one})


@pytest.mark.parametrize(
    "where",
    [
        "cpu",
        torch.device("cpu"),
        {"cpu": "cpu"},
        {"cuda:0": "cpu"},
        lambda s, _: s,
        lambda *_: None,
    ],
    ids=["text", "device", "map", "other-map", "function", "function-none"],
)
def test_map_location(where: Any, folder: Path) -> None:
    """Every form that ``torch.load`` takes is taken."""
    checkpointer = make_sync_checkpointer()
    state = {"x": torch.randn(3, 2), "l": [torch.tensor(1)]}
    saved(checkpointer, state, folder / "c")

    loaded = checkpointer.load(folder / "c", default_map_location=where)

    assert diff(loaded, state) == ([], [], [])


def test_no_checkpoint_or_no_part_of_this_rank(folder: Path) -> None:
    """Both are a FileNotFoundError that says which it is."""
    checkpointer = make_sync_checkpointer()
    saved(checkpointer, {"x": torch.ones(1)}, folder / "c")
    third = CheckpointReader(RankInfo(2, 4))

    with pytest.raises(CheckpointNotFoundError, match="does not exist") as absent:
        checkpointer.load(folder / "nothing")
    with pytest.raises(CheckpointNotFoundError, match="no part of rank 2; it has parts of 1 rank"):
        third.read(folder / "c")
    with pytest.raises(CheckpointNotFoundError, match="no part of rank 2"):
        third.read(folder / "c", {"x": torch.zeros(1)})
    assert isinstance(absent.value, FileNotFoundError)


def test_sharded_leaves_are_global(folder: Path) -> None:
    """They load by key through ``dist_ckpt.load``, in boxes, on any rank; whole without template."""
    checkpointer = make_sync_checkpointer()
    rows = torch.arange(8.0).reshape(4, 2)
    state = {
        "w": ShardedTensor.from_rank_offsets("weight", rows),
        "o": ShardedObject("thing", {"n": 1}, (1,), (0,)),
        "f": ShardedTensorFactory(
            "made",
            torch.ones(3),
            lambda key, data, replica_id: {"x": ShardedTensor.from_rank_offsets(key, data * 2)},
            lambda built: built["x"] / 2,
        ),
        "local": LocalNonpersistentObject(5),
        "step": 3,
    }
    saved(checkpointer, state, folder / "c")
    top = torch.zeros(2, 2)
    box = ShardedTensor("weight", top, top.dtype, (2, 2), (4, 2), (2, 0), None)

    by_key = load({"x": box}, folder / "c", validate_access_integrity=False)
    whole = checkpointer.load(folder / "c")
    request = {"w": box, "o": state["o"].without_data(), "f": state["f"],
               "local": LocalNonpersistentObject(6)}  # fmt: skip
    there, missing = CheckpointReader(RankInfo(5, 6)).read(folder / "c", request)

    assert torch.equal(by_key["x"], rows[2:])
    assert torch.equal(whole["w"], rows)
    assert (whole["o"], whole["local"], whole["step"]) == ({"n": 1}, None, 3)
    assert torch.equal(whole["f"]["x"], torch.full((3,), 2.0))
    assert missing == []
    assert there["w"] is top
    assert torch.equal(there["f"], torch.ones(3))
    assert (there["o"], there["local"]) == ({"n": 1}, 6)


def test_sharded_leaves_of_any_checkpoint_of_ours(folder: Path) -> None:
    """A checkpoint of ``dist_ckpt.save`` has no parts, but its sharded leaves load; others lack."""
    save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(2)), "n": 1}, folder / "c")
    request = {
        "w": ShardedTensor.from_rank_offsets("w", torch.zeros(2)),
        "deep": {"z": ShardedTensor.from_rank_offsets("z", torch.zeros(2))},
    }

    state, missing = CheckpointReader().read(folder / "c", request)

    assert torch.equal(state["w"], torch.ones(2))
    assert missing == ["deep.z"]
    with pytest.raises(CheckpointNotFoundError, match="no part of rank 0"):
        CheckpointReader().read(folder / "c")


def test_pickled_values_need_a_word(folder: Path) -> None:
    """What no table knows is pickled, and not unpickled unless the caller says so."""
    chain = ChainMap({"a": 1}, {"b": 2})
    checkpointer = make_sync_checkpointer()
    saved(checkpointer, {"where": chain, "x": 1}, folder / "c")

    with pytest.raises(UnsafeContentError, match="allow_pickle"):
        checkpointer.load(folder / "c")
    assert checkpointer.load(folder / "c", allow_pickle=True)["where"] == chain
    trusting = CheckpointReader(options=LoadOptions(allow_pickle=True))
    assert trusting.read(folder / "c")[0]["where"] == chain


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_pickled(checkpointer: Checkpointer, folder: Path) -> None:
    """They are of class ``Tensor`` and strided, but have no shape to store."""
    parts = [torch.ones(2), torch.arange(3.0)]
    saved(checkpointer, {"ragged": torch.nested.nested_tensor(parts)}, folder / "c")

    back = checkpointer.load(folder / "c", allow_pickle=True)["ragged"]
    assert diff(list(back.unbind()), parts) == ([], [], [])


@pytest.mark.parametrize(
    "cell",
    [5, {"tree": {}}, {"tree": {}, "leaves": [[0]]}, {"tree": [], "leaves": []},
     {"tree": {"x": None}, "leaves": [[0, [], None]]}, {"tree": {"x": None}, "leaves": [[0, "k", None]]}],
    ids=["number", "no-leaves", "short-entry", "list", "bad-key", "no-such-key"],
)  # fmt: skip
def test_a_part_that_is_none_of_ours(cell: Any, folder: Path) -> None:
    """Whatever stands in the place of a part is an error of ours, never followed."""
    save({"p": ShardedObject("checkpointer/rank", cell, (1,), (0,))}, folder / "c")

    with pytest.raises((CorruptedCheckpointError, MismatchError), match="part"):
        CheckpointReader().read(folder / "c")


# -- hooks -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("warm_spawn")
def test_hooks_around_the_commit(folder: Path) -> None:
    """Before, nothing is there; after, it is; what ``save`` was given reaches both."""
    expected = ["pre c [('epoch', 3)] False", "post c [('epoch', 3)] True"]

    with contextlib.closing(
        make_sync_checkpointer(commit_hook=Recorder(folder / "sync.log"))
    ) as one:
        one.save({"x": 1}, folder / "c", epoch=3)
    (folder / "c").rename(folder / "first")
    with background(**hooked(Recorder(folder / "async.log"))) as other:
        other.save({"x": 1}, folder / "c", epoch=3)[1].result()

    assert (folder / "sync.log").read_text().splitlines() == expected
    assert (folder / "async.log").read_text().splitlines() == expected


def test_a_hook_that_fails(folder: Path) -> None:
    """Before the commit nothing is committed, and the old checkpoint stays; after, it stands."""
    make_sync_checkpointer().save({"x": "old"}, folder / "before")
    checkpointer = make_sync_checkpointer(commit_hook=Fails(before=("before",), after=("after",)))

    with pytest.raises(ValueError, match="no before"):
        checkpointer.save({"x": 1}, folder / "before")
    with pytest.raises(ValueError, match="after after"):
        checkpointer.save({"x": 1}, folder / "after")

    assert checkpointer.load(folder / "before") == {"x": "old"}
    assert checkpointer.load(folder / "after") == {"x": 1}
    assert names(folder) == ["after", "before"]


# -- in the background -----------------------------------------------------------------------------


def test_training_may_change_everything_after_save(
    scripted: AsyncCheckpointer, gate: Path, folder: Path
) -> None:
    """The snapshot is taken when ``save`` returns: tensors, containers and values."""
    weight, inner, numbers = torch.ones(1000), {"n": 1}, [1, 2]
    state = {"w": weight, "d": inner, "l": numbers}
    staged, written = scripted.save(state, folder / "gated")
    assert staged.done()
    weight.zero_()
    inner["n"] = 2
    numbers.append(3)
    with gate.open("wb"):  # the process has not written anything yet
        assert not written.done()
    written.result()

    loaded = scripted.load(folder / "gated")

    assert diff(loaded, {"w": torch.ones(1000), "d": {"n": 1}, "l": [1, 2]}) == ([], [], [])


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("thread", [True, False])
def test_every_way_of_staging(
    shared: bool, thread: bool, scripted: AsyncCheckpointer, folder: Path
) -> None:
    """Defaults and all else work without an accelerator; a thread's snapshot is waited for."""
    staging = CheckpointStagerConfig(use_shared_memory=shared, use_async_staging=thread)
    state = {**tensors(), "tied": (t := torch.ones(3)), "again": t}
    with DefaultStager(staging) as stager:
        scripted._checkpoint_stager = stager
        staged, written = scripted.save(state, folder / "c", note="for the hook")
        assert staged.result() is None
        assert written.result() is None
        loaded = scripted.load(folder / "c")

    assert [name for name, t in state.items() if not same_bits(t, loaded[name])] == []
    assert loaded["tied"] is loaded["again"]


def test_the_stager_alone(folder: Path) -> None:
    """It copies everything once, keeps ties, takes any keywords, and is a context manager."""
    x = torch.ones(4)
    state = {"x": x, "again": x, "d": {"p": nn.Parameter(x)}, "n": [1]}

    with DefaultStager() as stager:
        staged = stager.stage(state, epoch=1)

    assert isinstance(staged, dict)
    assert diff(staged, state) == ([], [], [])
    assert staged["x"].data_ptr() == staged["again"].data_ptr() != x.data_ptr()
    assert type(staged["d"]["p"]) is nn.Parameter
    assert staged["n"] is not state["n"]
    with pytest.raises(ConfigError, match="closed"):
        stager.stage(state)


def file_of(staged: Any) -> int:
    return os.fstat(staged.arena.descriptor).st_ino


def test_memory_is_used_again_once_it_is_written(
    process_of_all: tuple[CheckpointProcess, Path], folder: Path
) -> None:
    """One piece does for one save after the other, and each loads as it was saved."""
    process, _ = process_of_all
    weight = torch.zeros(300_000)
    files = []
    with DefaultStager() as stager:
        for step in range(4):
            staged = stager.stage({"w": weight.fill_(step), "step": step})
            files.append(file_of(staged))
            written = process.write(staged, folder / str(step))
            del staged
            weight.fill_(-1)
            written.result()

    assert len(set(files)) == 1
    for step in range(4):
        loaded = CheckpointReader().read(folder / str(step))[0]
        assert (loaded["w"].unique().tolist(), loaded["step"]) == ([step], step)


def test_memory_that_is_read_is_not_touched(
    process_of_all: tuple[CheckpointProcess, Path], folder: Path
) -> None:
    """Snapshots may pile up, while the process reads the first and others wait."""
    process, pipe = process_of_all
    weight = torch.zeros(300_000)
    with DefaultStager() as stager:
        names_of_saves = ["gated", *map(str, range(4))]
        saves = [
            process.write(stager.stage({"w": weight.fill_(step)}), folder / name)
            for step, name in enumerate(names_of_saves)
        ]
        with pipe.open("wb"):
            assert not saves[0].done()
        for written in saves:
            written.result()

    for step, name in enumerate(names_of_saves):
        loaded = CheckpointReader().read(folder / name)[0]
        assert loaded["w"].unique().tolist() == [step]


def test_memory_of_a_failed_save_is_used_again(
    process_of_all: tuple[CheckpointProcess, Path], folder: Path
) -> None:
    """Also while somebody keeps the error."""
    process, _ = process_of_all
    errors, files = [], []
    with DefaultStager() as stager:
        for _ in range(3):
            staged = stager.stage({"w": torch.ones(300_000)})
            files.append(file_of(staged))
            written = process.write(staged, folder / "bad")
            del staged
            errors.append(written.exception())

    assert [error is not None for error in errors] == [True] * 3
    assert len(set(files)) == 1
    assert names(folder) == []


def test_snapshots_that_are_kept_stay_as_they_are() -> None:
    """However many, also when the stager is closed; a tensor alone keeps its memory too."""
    weight = torch.zeros(1000)
    used = len(names(Path("/proc/self/fd")))
    with DefaultStager() as stager:
        kept = [stager.stage({"w": weight.fill_(step)})["w"] for step in range(5)]
    assert [tensor.unique().tolist() for tensor in kept] == [[step] for step in range(5)]

    kept.clear()

    assert len(names(Path("/proc/self/fd"))) == used


def test_a_value_without_a_copy(scripted: AsyncCheckpointer, folder: Path) -> None:
    """It is named, the save does not take place, and the next one does."""
    with pytest.raises(InvalidShardingError, match="'a.lock', a lock, cannot be copied"):
        scripted.save({"a": {"lock": threading.Lock()}}, folder / "c")
    saved(scripted, {"x": 1}, folder / "good")

    assert names(folder) == ["good"]


def test_a_failure_that_was_seen_is_over(scripted: AsyncCheckpointer, folder: Path) -> None:
    """The future raises it; the next three saves know nothing of it, in the same process."""
    worker = scripted._checkpoint_process.process_creation_future.result()
    _, written = scripted.save({"x": 0}, folder / "bad")
    with pytest.raises(CheckpointProcessError, match="ValueError: no bad") as e:
        written.result()
    for n in range(3):
        saved(scripted, {"x": n}, folder / f"good{n}")

    assert scripted._checkpoint_process.process is worker.process
    assert "in pre_commit" in e.value.__notes__[0]
    assert names(folder) == ["good0", "good1", "good2"]


def test_a_failure_that_nobody_saw_is_raised_once(
    scripted: AsyncCheckpointer, folder: Path
) -> None:
    """By the next save, which does not take place; the one after works."""
    scripted.save({"x": 0}, folder / "bad")
    with pytest.raises(CheckpointProcessError, match="no bad"):
        scripted.save({"x": 1}, folder / "lost")
    saved(scripted, {"x": 2}, folder / "good")

    assert names(folder) == ["good"]


@pytest.mark.usefixtures("warm_spawn")
def test_close_reports_and_closes(folder: Path) -> None:
    """A failure nobody saw is raised by ``close``, once, and everything is closed all the same."""
    checkpointer = make_async_checkpointer(**hooked(Fails(before=("bad",))))
    checkpointer.save({"x": 0}, folder / "bad")

    with pytest.raises(CheckpointProcessError, match="no bad"):
        checkpointer.close()
    checkpointer.close()

    process = checkpointer._checkpoint_process.process
    assert process is not None
    assert process.exitcode == 0
    with pytest.raises(ConfigError, match="closed"):
        checkpointer.save({"x": 1}, folder / "late")
    assert names(folder) == []


@pytest.mark.usefixtures("warm_spawn")
def test_close_waits_for_what_was_asked_for(folder: Path) -> None:
    """A save under way is committed, not cancelled."""
    gate = Gate(folder / "gate", ("c",))
    checkpointer = make_async_checkpointer(**hooked(gate))
    _, written = checkpointer.save({"x": 1}, folder / "c")
    closing = threading.Thread(target=checkpointer.close)
    closing.start()
    with gate.pipe.open("wb"):
        assert not written.done()
        assert closing.is_alive()
    closing.join()

    assert written.result() is None
    assert CheckpointReader().read(folder / "c")[0] == {"x": 1}


def test_load_waits_for_a_save_to_its_path(
    scripted: AsyncCheckpointer, gate: Path, folder: Path
) -> None:
    """What is read is what was saved, not what was there before; another path is not waited for."""
    done: list[bool] = []

    class Probe(CheckpointReader):
        def read(self, *args: Any, **kwargs: Any) -> Any:
            done.append(written.done())
            return super().read(*args, **kwargs)

    def open_gate() -> None:
        gate.open("wb").close()

    make_sync_checkpointer().save({"x": "old"}, folder / "other")
    scripted._reader = Probe()
    _, written = scripted.save({"x": "new"}, folder / "gated")
    other = scripted.load(folder / "other")
    opening = threading.Thread(target=open_gate)
    opening.start()
    with contextlib.chdir(folder):
        Path("link").symlink_to(folder)
        loaded = scripted.load("./link/gated")
    opening.join()

    assert (other, loaded) == ({"x": "old"}, {"x": "new"})
    assert done == [False, True]


def test_relative_paths_are_those_of_the_call(scripted: AsyncCheckpointer, folder: Path) -> None:
    """The process started elsewhere, and the working directory changes while it writes."""
    with contextlib.chdir(folder):
        _, written = scripted.save({"x": 1}, "c")
    written.result()

    assert names(folder) == ["c"]


def test_load_of_a_path_whose_save_failed(scripted: AsyncCheckpointer, folder: Path) -> None:
    """It says so, instead of giving what was there before as if it were new; then it does."""
    make_sync_checkpointer().save({"x": "old"}, folder / "bad")
    scripted.save({"x": "new"}, folder / "bad")
    with pytest.raises(CheckpointProcessError, match="no bad"):
        scripted.load(folder / "bad")

    assert scripted.load(folder / "bad") == {"x": "old"}


@pytest.mark.usefixtures("warm_spawn")
def test_a_killed_process(folder: Path) -> None:
    """Its save fails with the signal's name, nothing is committed, and the next save works.

    One that dies idle is replaced without a word.
    """
    gate = Gate(folder / "gate", ("bad",))
    with background(**hooked(gate)) as checkpointer:
        _, written = checkpointer.save({"x": torch.ones(5)}, folder / "bad")
        with gate.pipe.open("wb"):
            first = checkpointer._checkpoint_process.process
            assert first is not None
            os.kill(first.pid or 0, signal.SIGKILL)
            with pytest.raises(RuntimeError, match="terminated unexpectedly .*-9, SIGKILL") as e:
                written.result()
        saved(checkpointer, {"x": torch.ones(5)}, folder / "good")
        second = checkpointer._checkpoint_process.process
        assert second is not None
        second.kill()
        second.join()
        saved(checkpointer, {"x": 2}, folder / "idle")

    assert isinstance(e.value, CoordinationError)
    assert first.pid != second.pid
    assert names(folder) == ["gate", "good", "idle"]


@pytest.mark.usefixtures("warm_spawn")
@pytest.mark.parametrize(
    ("fn", "args", "error", "message"),
    [
        (lambda: None, (), RuntimeError, "cannot be started.*must be picklable"),
        (time.sleep, (600,), TimeoutError, "did not answer within 0.3 s"),
        (operator.truediv, (1, 0), RuntimeError, "ZeroDivisionError"),
        (os._exit, (3,), RuntimeError, "terminated unexpectedly .rank 0, exit code 3"),
    ],
    ids=["lambda", "slow", "raises", "exits"],
)
def test_a_process_that_does_not_start(
    fn: Any, args: tuple[Any, ...], error: type[Exception], message: str, folder: Path
) -> None:
    """The start and every save say why; no process stays, and ``close`` has nothing to add."""
    patience = 0.3 if fn is time.sleep else 60
    process = CheckpointProcess(
        RankInfo(0, 1),
        CheckpointProcessConfig(subprocess_init_timeout_secs=patience),
        fn,
        args,
    )
    for future in (process.process_creation_future, process.write({"x": 1}, folder / "c")):
        with pytest.raises(error, match=message):
            future.result()
    assert process.process is None or process.process.exitcode is not None
    process.close()

    assert names(folder) == []


@pytest.mark.usefixtures("warm_spawn")
def test_a_writer_of_ones_own(folder: Path) -> None:
    """The function makes it in the process, with the rank; its ``write`` is what is called."""
    process = CheckpointProcess(RankInfo(0, 1), checkpoint_writer_init_fn=note_pid_writer)
    process.write({"x": 1}, folder / "c").result()
    assert process.process is not None
    pid = process.process.pid
    process.close()

    assert (folder / "c.pid").read_text() == str(pid)
    assert pid != os.getpid()


@pytest.mark.usefixtures("warm_spawn")
def test_a_process_that_does_not_end_is_killed(folder: Path) -> None:
    """``subprocess_shutdown_timeout_secs`` is honoured, and said in the log."""
    process = CheckpointProcess(
        RankInfo(0, 1),
        CheckpointProcessConfig(subprocess_shutdown_timeout_secs=0.2),
        checkpoint_writer_init_fn=stuck_writer,
    )
    worker = process.process_creation_future.result()
    process.close()

    assert worker.process.exitcode == -signal.SIGKILL


@pytest.mark.slow
def test_many_tensors_need_few_descriptors(scripted: AsyncCheckpointer, folder: Path) -> None:
    """Two thousand tensors go to the process through one descriptor; 24 may be open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    state = {str(n): torch.full((2,), float(n)) for n in range(2_000)}
    scripted._checkpoint_process.process_creation_future.result()
    used = len(names(Path("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 24, hard))
    try:
        saved(scripted, state, folder / "c")
        loaded = scripted.load(folder / "c")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    scripted._checkpoint_stager.close()  # until then it keeps its memory
    assert len(names(Path("/proc/self/fd"))) <= used
    assert diff(loaded, state) == ([], [], [])


@pytest.mark.slow
@pytest.mark.parametrize("closes", [True, False])
def test_nothing_is_left_when_a_script_ends(closes: bool, folder: Path) -> None:
    """No word on stderr, no process, no shared memory; a save under way is committed first."""
    script = folder / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import torch
        from dist_ckpt.builder import make_async_checkpointer

        if __name__ == "__main__":
            checkpointer = make_async_checkpointer()
            checkpointer.save({{"x": torch.ones(1000)}}, "c")
            print(checkpointer._checkpoint_process.process_creation_future.result().process.pid)
            if {closes}:
                checkpointer.close()
    """)
    )
    before = set(names(SHARED_MEMORY))

    if closes:
        done = run_program(script.read_text(), cwd=folder, file=script, is_strict=True)
    else:  # the harder end has a fresh interpreter, and one for the process that it spawns
        done = subprocess.run(
            [sys.executable, "-W", "error", str(script)],
            cwd=folder, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip

    assert (done.returncode, done.stderr) == (0, "")
    assert not Path(f"/proc/{int(done.stdout)}").exists()
    # `test_crash_points` works there too, maybe at the same time.
    made = {name for name in names(SHARED_MEMORY) if not name.startswith("crashes-")}
    assert made <= before
    assert torch.equal(CheckpointReader().read(folder / "c")[0]["x"], torch.ones(1000))


# -- the parts -------------------------------------------------------------------------------------


def test_wrap_future() -> None:
    """The result goes, the failure stays; what is no future is done."""
    good, bad, cancelled = Future[int](), Future[int](), Future[int]()
    wrapped = [wrap_future(one) for one in (good, bad, cancelled)]
    assert not any(one.done() for one in wrapped)
    good.set_result(5)
    bad.set_exception(OSError("full"))
    cancelled.cancel()

    assert wrapped[0].result() is None
    with pytest.raises(OSError, match="full"):
        wrapped[1].result()
    with pytest.raises(CancelledError):
        wrapped[2].result()
    assert wrap_future({"x": 1}).result() is None


def test_ranks_that_do_not_come_are_named() -> None:
    """``timeout_secs`` of a barrier is honoured, and the timeout of a writer through it too."""
    served = TCPStoreBarrier(0, 1, timeout_secs=0.2)
    port = served.point.port
    assert port == 0
    store = served._store
    alone = TCPStoreBarrier(
        0, 2, tcpstore_port=free_port(), master_address="127.0.0.1", timeout_secs=0.2
    )
    writer = CheckpointWriter(
        CheckpointWriterConfig(write_barrier_timeout_secs=0.2), RankInfo(0, 2), alone
    )

    with pytest.raises(BarrierTimeoutError, match="ranks .1. of 2 did not arrive within 0.2 s"):
        alone.execute_barrier()
    with pytest.raises(BarrierTimeoutError, match="ranks .1. of 2 did not arrive within 0.2 s"):
        writer.write({"x": 1}, "never")
    assert store is not None
    assert not Path("never").exists()


def test_a_writer_without_a_place_to_meet(folder: Path) -> None:
    """A rank of two that meets nobody is told so, before anything is written."""
    writer = CheckpointWriter(rank_info=RankInfo(0, 2))

    with pytest.raises(ConfigError, match="was told RankInfo.* but ranks meet as"):
        writer.write({"x": 1}, folder / "c")
    with pytest.raises(ConfigError, match="2 ranks have no place to meet"):
        CheckpointProcess(RankInfo(0, 2))
    assert names(folder) == []


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: RankInfo(2, 2), ConfigError, "rank 2 is not one of 2 ranks"),
        (lambda: CheckpointWriterConfig(write_barrier_timeout_secs=0), ConfigError, "positive"),
        (lambda: CheckpointProcessConfig(subprocess_init_timeout_secs=0), ConfigError, "positive"),
        (
            lambda: create_barrier_from_config(BarrierConfig("x")),
            ValueError,
            "Unknown barrier type: x",
        ),
        (
            lambda: create_barrier_from_config(BarrierConfig("tcp_store", {"port": 1})),
            ConfigError,
            "port",
        ),
        (lambda: TCPStoreBarrier(0, 2), ConfigError, "tcpstore_port"),
        (DistBarrier, CoordinationError, "needs a process group"),
        (lambda: CheckpointReader().read("c", [1]), ConfigError, "expected a dict"),  # type: ignore[arg-type]
    ],
    ids=["rank", "timeout", "init", "barrier", "barrier-args", "port", "group", "target"],
)
def test_wrong_settings(call: Any, error: type[Exception], message: str) -> None:
    """They are refused where they are made."""
    with pytest.raises(error, match=message):
        call()


def free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Stuck(CheckpointWriter):
    """Does not close."""

    def close(self) -> None:
        signal.pause()


def stuck_writer(rank_info: RankInfo) -> CheckpointWriter:
    return Stuck(rank_info=rank_info)
