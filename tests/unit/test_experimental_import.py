"""Programs for torch's ``_experimental`` checkpointer, run with torch's import and with ours.

Each test is one program, without a word about whose names it uses: what it asserts holds for both.
"""

from __future__ import annotations

import importlib
import os
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

THEIRS, OURS = "torch.distributed.checkpoint._experimental", "dist_ckpt"


@pytest.fixture(params=[THEIRS, OURS], ids=["torch", "ours"])
def package(request: pytest.FixtureRequest) -> ModuleType:
    """Return the package that a program imports from."""
    return importlib.import_module(request.param)


def part(package: ModuleType, module: str) -> ModuleType:
    return importlib.import_module(f"{package.__name__}.{module}")


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "model": dict(torch.nn.Linear(4, 3).state_dict()),
        "optimizer": {"param_groups": [{"lr": 0.01, "betas": (0.9, 0.99)}]},
        "list": [torch.arange(3), {"deep": torch.ones(2, dtype=torch.bfloat16)}],
        "epoch": 5,
    }


def test_every_name_of_the_package_is_here() -> None:
    """By the package, and by the module that torch has it in."""
    theirs, ours = importlib.import_module(THEIRS), importlib.import_module(OURS)

    assert [name for name in theirs.__all__ if not hasattr(ours, name)] == []
    assert set(theirs.__all__) <= set(ours.__all__)
    classes = [getattr(theirs, name) for name in theirs.__all__ if name != "STATE_DICT"]
    for one in classes:
        home = one.__module__.rpartition(".")[2]
        assert hasattr(importlib.import_module(f"{OURS}.{home}"), one.__name__), one
    for module, name in [("config", "CheckpointerConfig"), ("utils", "wrap_future"),
                         ("types", "STATE_DICT"), ("types", "RankInfo"),
                         ("builder", "default_writer_init_fn"),
                         ("builder", "default_subprocess_init_fn"),
                         ("barriers", "register_barrier"), ("barriers", "DistBarrier"),
                         ("barriers", "BARRIER_REGISTRY")]:  # fmt: skip
        assert hasattr(importlib.import_module(f"{OURS}.{module}"), name)


def test_configs_can_be_changed(package: ModuleType) -> None:
    """Each field of each config, after it was made."""
    config = part(package, "config").CheckpointerConfig()
    config.writer_config.write_barrier_timeout_secs = 300
    config.process_config.subprocess_init_timeout_secs = 100
    config.process_config.subprocess_shutdown_timeout_secs = 30
    config.staging_config.use_pinned_memory = False
    config.staging_config.use_async_staging = True
    config.barrier_config.barrier_type = "tcp_store"
    config.barrier_config.barrier_args["tcpstore_port"] = 1
    config.staging_config = package.CheckpointStagerConfig(use_shared_memory=False)
    config.writer_config = package.CheckpointWriterConfig()
    config.barrier_config = package.BarrierConfig()
    config.process_config = part(package, "checkpoint_process").CheckpointProcessConfig(10, 20)
    rank_info = package.RankInfo(0, 1)
    rank_info.global_world_size = 2

    assert not config.staging_config.use_shared_memory
    assert config.writer_config.write_barrier_timeout_secs == 600
    assert config.barrier_config.barrier_type is None
    assert rank_info == package.RankInfo(global_rank=0, global_world_size=2)
    assert package.CheckpointerConfig().barrier_config.barrier_args == {}


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # torch's own
def test_writer_reader_and_kwargs(package: ModuleType, tmp_path: Path) -> None:
    """The writer takes path and state dict; hooks get what they are given; readers take more."""
    seen: list[tuple[str, str, dict[str, Any]]] = []

    class Hook(package.WriterHook):  # type: ignore[misc, name-defined]  # of either package
        def pre_commit(self, path: str, **kwargs: Any) -> None:
            seen.append(("pre", path, kwargs))

        def post_commit(self, path: str, **kwargs: Any) -> None:
            seen.append(("post", path, kwargs))

    rank_info = package.RankInfo(global_world_size=1, global_rank=0)
    writer = package.CheckpointWriter(
        config=package.CheckpointWriterConfig(), rank_info=rank_info, commit_hook=Hook()
    )
    reader = package.CheckpointReader(rank_info=rank_info)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")

    assert writer.write(a, state(), step=3) is None
    assert writer.write(state_dict=state(), path=b) is None
    assert seen == [("pre", a, {"step": 3}), ("post", a, {"step": 3}),
                    ("pre", b, {}), ("post", b, {})]  # fmt: skip
    writer.close()

    for path in (a, b):
        loaded, missing = reader.read(path, extra="value")
        assert missing == []
        assert loaded["optimizer"] == state()["optimizer"]
        assert torch.equal(loaded["model"]["weight"], state()["model"]["weight"])
    some = {"epoch": None, "model": {"bias": torch.zeros(3), "no": None}, "other": {"deep": None}}
    loaded, missing = reader.read(a, some, map_location="cpu", extra="value")
    assert loaded is some
    assert missing == ["model.no", "other"]
    assert loaded["epoch"] == 5
    assert torch.equal(loaded["model"]["bias"], state()["model"]["bias"])
    with pytest.raises(FileNotFoundError):
        reader.read(str(tmp_path / "nowhere"))
    with pytest.raises(RuntimeError):
        reader.read(a, {"model": {"bias": torch.zeros(4)}})
    with pytest.raises(RuntimeError):
        reader.read(a, {"model": {"bias": torch.zeros(3, dtype=torch.float64)}})


def test_a_barrier_of_a_program(package: ModuleType, tmp_path: Path) -> None:
    """A class of its own, registered and named by a config, holds each save once."""
    barriers = part(package, "barriers")
    held: list[str] = []

    @barriers.register_barrier
    class Mine(package.Barrier):  # type: ignore[misc, name-defined]  # of either package
        barrier_type = "mine"

        def __init__(self, name: str = "none") -> None:
            self.name = name

        def execute_barrier(self) -> None:
            held.append(self.name)

    try:
        config = package.CheckpointerConfig(
            barrier_config=package.BarrierConfig("mine", {"name": "one"})
        )
        checkpointer = package.make_sync_checkpointer(config, package.RankInfo(0, 1))
        checkpointer.save(str(tmp_path / "c"), state())
        checkpointer.close()
    finally:
        del barriers.BARRIER_REGISTRY["mine"]

    assert held == ["one"]
    with pytest.raises(ValueError, match="Unknown barrier type: mine"):
        package.create_barrier_from_config(package.BarrierConfig("mine"))


def test_a_synchronous_checkpointer(package: ModuleType, tmp_path: Path) -> None:
    """Made by the factory or by hand, with a writer and a reader of the program's own."""
    told: list[str] = []

    class Writer(package.CheckpointWriter):  # type: ignore[misc, name-defined]  # of either
        def write(self, path: str, state_dict: dict[str, Any], **kwargs: Any) -> Any:
            told.append(f"write {os.path.basename(path)} {min(state_dict)}")  # noqa: PTH119
            return super().write(path, state_dict, **kwargs)

    class Reader(package.CheckpointReader):  # type: ignore[misc, name-defined]  # of either
        def read(self, path: str, state_dict: Any = None, **kwargs: Any) -> Any:
            told.append(f"read {sorted(kwargs)}")
            return super().read(path, state_dict, **kwargs)

    rank_info = package.RankInfo(0, 1)
    made = package.make_sync_checkpointer(rank_info=rank_info)
    assert isinstance(made, package.SyncCheckpointer)
    assert made.save(str(tmp_path / "c"), state()) is None
    assert made.load(str(tmp_path / "c"))["epoch"] == 5
    with pytest.raises(RuntimeError, match="missing keys"):
        made.load(str(tmp_path / "c"), {"no": None}, strict=True)
    made.close()

    config = package.CheckpointWriterConfig()
    mine = package.SyncCheckpointer(Writer(config, rank_info), Reader(rank_info))
    mine.save(str(tmp_path / "d"), state())
    assert mine.load(str(tmp_path / "d"), default_map_location="cpu", more=1)["epoch"] == 5
    mine.close()
    assert told == ["write d epoch", "read ['map_location', 'more']"]


def make_writer(module: str, rank_info: Any, note: str) -> Any:
    """Return, in the checkpoint process, a writer that leaves a note beside the checkpoint."""
    package = importlib.import_module(module)

    class Noting(package.CheckpointWriter):  # type: ignore[misc, name-defined]  # of either package
        def write(self, path: str, state_dict: dict[str, Any], **kwargs: Any) -> Any:
            with open(f"{path}.note", "w") as file:  # noqa: PTH123
                file.write(f"{note} {sorted(state_dict)} {kwargs}")
            return super().write(path, state_dict, **kwargs)

    return Noting(package.CheckpointWriterConfig(), rank_info)


def greet(path: str) -> None:
    """Leave a file, in the checkpoint process."""
    with open(path, "w") as file:  # noqa: PTH123
        file.write(str(os.getppid()))


def test_an_asynchronous_checkpointer(package: ModuleType, tmp_path: Path) -> None:
    """Futures of snapshot and commit; the process runs the program's functions and ends."""
    config = package.CheckpointerConfig()
    config.staging_config = package.CheckpointStagerConfig(
        use_pinned_memory=False, use_non_blocking_copy=False, use_async_staging=True
    )
    hello = str(tmp_path / "hello")
    checkpointer = package.make_async_checkpointer(
        config=config,
        rank_info=package.RankInfo(0, 1),
        subprocess_init_fn=greet,
        subprocess_init_args=(hello,),
        checkpoint_writer_init_fn=make_writer,
        checkpoint_writer_init_args={"module": package.__name__, "note": "mine"},
    )
    process = checkpointer._checkpoint_process
    try:
        staged, written = checkpointer.save(str(tmp_path / "c"), state())
        assert isinstance(staged, Future)
        assert staged.result() is None
        assert written.result() is None
        assert process.process.processes[0].is_alive()
        assert checkpointer.load(str(tmp_path / "c"))["epoch"] == 5
    finally:
        checkpointer.close()

    assert not process.process.processes[0].is_alive()
    assert (tmp_path / "hello").read_text() == str(os.getpid())
    assert (tmp_path / "c.note").read_text().startswith("mine ['epoch', ")


def test_a_future_is_wrapped(package: ModuleType) -> None:
    """Its end is passed on, not its result."""
    wrap_future = part(package, "utils").wrap_future
    original: Future[int] = Future()
    wrapped = wrap_future(original)
    original.set_result(3)

    assert wrapped.result() is None
    assert wrap_future({"no": "future"}).result() is None
    failed: Future[int] = Future()
    failed.set_exception(KeyError("x"))
    with pytest.raises(KeyError):
        wrap_future(failed).result()
