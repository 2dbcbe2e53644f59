"""What other people's classes define is not gone past in silence, nor are wrong places and tools."""
# ruff: noqa: ARG002 - the arguments of hooks are Lightning's

from __future__ import annotations

import os
from argparse import Namespace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning as L  # noqa: N812 - as its documents write it
import pytest
import torch
from lightning.fabric.utilities.consolidate_checkpoint import _process_cli_args
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy

from dist_ckpt.errors import CheckpointingException, ConfigError
from dist_ckpt.training_state import is_checkpoint
from lightning_dist_ckpt import DistCkptIO
from lightning_dist_ckpt._bind import bind
from lightning_dist_ckpt._folders import _folders, _problem
from lightning_dist_ckpt._model_checkpoint import unwatch, watch
from lightning_dist_ckpt._overrides import OVERRIDDEN
from lightning_dist_ckpt._preempt import _keeper, _path_beside
from tests.lightning._training import Tiny, every_3_steps, loader, make_trainer, names
from tests.multiprocess._world import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def make(strategy: Any, root: Path, **kwargs: Any) -> L.Trainer:
    return make_trainer("single", root, strategy=strategy, accelerator="auto", **kwargs)


def anything(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand for a method of a user's."""


# -- strategies ------------------------------------------------------------------------------------


class Saving:
    """A mixin with a save of its own."""

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Would be gone past."""


class Megatron(Saving, SingleDeviceStrategy):
    """A strategy that saves and loads in its own way."""

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}


def test_a_strategy_of_its_own_is_refused_by_class_and_method(tmp_path: Path) -> None:
    """All that it defines is named, with the class that has it, before anything is trained."""
    trainer = make(Megatron("cpu"), tmp_path)
    with pytest.raises(ConfigError) as caught:
        trainer.fit(module := Tiny(), loader())

    for name in (
        "Saving.save_checkpoint",
        "Megatron.load_checkpoint",
        "Megatron.restore_checkpoint_after_setup",
        "dist_ckpt_supported = True",
    ):
        assert name in str(caught.value)
    assert trainer.global_step == 0
    assert type(trainer.strategy) is Megatron
    with pytest.raises(ConfigError, match=r"Megatron\.load_checkpoint"):
        make(Megatron("cpu"), tmp_path).validate(module, loader())


@pytest.mark.parametrize("name", sorted(OVERRIDDEN | {"__reduce__", "checkpoint_io"}))
def test_each_method_that_is_bound_counts(tmp_path: Path, name: str) -> None:
    """Whatever a bound strategy has of ours may not be a user's."""
    cls = type("Mine", (SingleDeviceStrategy,), {name: property(anything, anything)})
    strategy = cls.__new__(cls)
    SingleDeviceStrategy.__init__(strategy, "cpu")
    io = DistCkptIO()
    vars(strategy)["_checkpoint_io"] = io
    trainer = make_trainer("single", tmp_path, plugins=None)
    trainer._accelerator_connector.strategy = strategy
    with pytest.raises(ConfigError, match=rf"strategy Mine\.{name}\b"):
        bind(trainer)


def test_a_plugin_that_a_strategy_hides_is_not_forgotten(tmp_path: Path) -> None:
    """A ``checkpoint_io`` of its own could keep the plugin away from us."""

    class Hiding(SingleDeviceStrategy):
        checkpoint_io = property(lambda _: TorchCheckpointIO(), lambda *_: None)

    with pytest.raises(ConfigError, match=r"Hiding\.checkpoint_io"):
        make(Hiding("cpu"), tmp_path).fit(Tiny(), loader())


def test_attributes_of_the_object_count_and_cannot_be_opted_in(tmp_path: Path) -> None:
    """They would hide our methods."""

    class Supported(SingleDeviceStrategy):
        dist_ckpt_supported = True

    strategy = Supported("cpu")
    strategy.save_checkpoint = anything
    trainer = make(strategy, tmp_path)
    with pytest.raises(ConfigError, match=r"Supported\.save_checkpoint \(on the object\)"):
        trainer.fit(Tiny(), loader())
    del strategy.save_checkpoint
    trainer.fit(Tiny(), loader())

    strategy.load_checkpoint = anything
    with pytest.raises(ConfigError, match=r"load_checkpoint \(on the object\)"):
        trainer.fit(Tiny(), loader())  # bound since the fit before


def test_what_opting_in_covers(tmp_path: Path) -> None:
    """A class and its bases, not what a subclass adds; False refuses."""

    class Ours(Megatron):
        dist_ckpt_supported = True
        restore_checkpoint_after_setup = False

    trainer = make(Ours("cpu"), tmp_path)
    trainer.fit(Tiny(), loader())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert is_checkpoint(tmp_path / "x.ckpt")

    class More(Ours):
        def teardown(self) -> None:
            super().teardown()

    with pytest.raises(ConfigError, match=r"here: strategy More\.teardown\."):
        make(More("cpu"), tmp_path).fit(Tiny(), loader())
    never = type("Never", (Ours,), {"dist_ckpt_supported": False})
    with pytest.raises(ConfigError, match="Never.dist_ckpt_supported = False"):
        make(never("cpu"), tmp_path).fit(Tiny(), loader())


def test_subclasses_that_define_nothing_of_it_are_bound(tmp_path: Path) -> None:
    """Other overrides, and a mixin behind Lightning's own methods, are a user's business."""

    class Fine(SingleDeviceStrategy, Saving):
        def setup(self, trainer: L.Trainer) -> None:
            super().setup(trainer)

    trainer = make(Fine("cpu"), tmp_path)
    trainer.fit(Tiny(), loader())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert is_checkpoint(tmp_path / "x.ckpt")


def test_a_strategy_that_gets_another_plugin_is_given_back(tmp_path: Path) -> None:
    """In the next Trainer it saves as that one's plugin says."""
    io = DistCkptIO()
    strategy = SingleDeviceStrategy("cpu")
    first = make(strategy, tmp_path, plugins=[io])
    first.fit(Tiny(), loader())
    assert type(strategy) is not SingleDeviceStrategy

    strategy._checkpoint_io = other = DistCkptIO(thread_count=1)
    make(strategy, tmp_path, plugins=None).fit(Tiny(), loader())
    assert strategy.dist_ckpt_binding.io is other

    strategy._checkpoint_io = None
    stock = make(strategy, tmp_path, plugins=[TorchCheckpointIO()])
    stock.fit(Tiny(), loader())
    stock.save_checkpoint(tmp_path / "stock.ckpt")
    assert type(strategy) is SingleDeviceStrategy
    assert not hasattr(strategy, "dist_ckpt_binding")
    assert (tmp_path / "stock.ckpt").is_file()


# -- plugins ---------------------------------------------------------------------------------------


class Uploading(_WrappingCheckpointIO):
    """A wrapper that does something of its own."""

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(*args, **kwargs)


class Keeping(TorchCheckpointIO):
    """A wrapper that Lightning does not know."""

    def __init__(self, inner: DistCkptIO) -> None:
        self.inner = inner

    def remove_checkpoint(self, path: Any) -> None:
        """Would be gone past."""


class Logging(DistCkptIO):
    """A plugin of ours with a save of its own."""

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(*args, **kwargs)


def test_plugins_with_methods_of_their_own(tmp_path: Path) -> None:
    """A bound Trainer calls neither wrappers nor the plugin's save: those are refused."""
    cases = {
        r"plugin Uploading\.save_checkpoint": Uploading(DistCkptIO()),
        r"plugin Keeping\.remove_checkpoint": Keeping(DistCkptIO()),
        r"plugin Logging\.save_checkpoint": Logging(),
    }
    for text, io in cases.items():
        with pytest.raises(ConfigError, match=text):
            make_trainer("single", tmp_path, plugins=[io]).fit(Tiny(), loader())

    agreed = type("Agreed", (Logging,), {"dist_ckpt_supported": True})()
    make_trainer("single", tmp_path, plugins=[agreed]).fit(Tiny(), loader())


# -- callbacks -------------------------------------------------------------------------------------


def test_callbacks_that_were_never_watched_are_not_touched(tmp_path: Path) -> None:
    """A stand-in stays what it says it is, whatever a fit does."""
    callback = Mock(spec=ModelCheckpoint)
    for one in (watch, unwatch):
        one(callback)
        assert isinstance(callback, ModelCheckpoint)

    own = every_3_steps(tmp_path)
    assert watch(own)
    bound = type(own)
    assert not watch(own)  # by a second fit, which must not take it from the first

    class Onto(bound):  # type: ignore[misc,valid-type]
        """What another library puts on top."""

    own.__class__ = Onto
    unwatch(own)
    assert type(own) is Onto
    own.__class__ = bound
    unwatch(own)
    unwatch(own)
    assert type(own) is ModelCheckpoint


def test_a_stand_in_among_the_callbacks(tmp_path: Path) -> None:
    """A Trainer with one trains, saves in the background, and leaves it as it was."""
    io = DistCkptIO(async_save=True, preemption=True, worker="thread")
    trainer = make_trainer("single", tmp_path, callbacks=[], plugins=[io])
    values = {
        "state_dict": dict,
        "state_key": "mine",
        "dirpath": Mock(),
        "save_weights_only": False,
    }
    callback = Mock(spec=ModelCheckpoint, **values)
    trainer.callbacks.insert(0, callback)
    before = type(callback)
    trainer.fit(Tiny(), loader())
    assert isinstance(callback, ModelCheckpoint)
    assert type(callback) is before
    assert _keeper(trainer) is trainer.checkpoint_callbacks[-1]  # Lightning's default
    assert _path_beside(trainer) == tmp_path / "checkpoints" / "last-preempted.ckpt"


class Overwriting(ModelCheckpoint):
    """Takes every name for free."""

    def file_exists(self, filepath: Any, trainer: L.Trainer) -> bool:
        return False


class Pretending(ModelCheckpoint):
    """Its class is not what it says."""

    @property
    def __class__(self) -> Any:
        return ModelCheckpoint


@pytest.mark.parametrize("cls", [Overwriting, Pretending])
def test_callbacks_with_methods_of_their_own(tmp_path: Path, cls: type) -> None:
    """What background saves put in its place is refused; synchronous saves put nothing there."""
    trainer = make_trainer("single", tmp_path, callbacks=[cls(tmp_path)])
    trainer.fit(Tiny(), loader())
    assert names(tmp_path)

    io = DistCkptIO(async_save=True, worker="thread")
    trainer = make_trainer("single", tmp_path, callbacks=[cls(tmp_path)], plugins=[io])
    with pytest.raises(ConfigError, match=rf"callback {cls.__name__}\.(file_exists|__class__)"):
        trainer.fit(Tiny(), loader())


# -- places ----------------------------------------------------------------------------------------


@pytest.fixture
def a_file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("")
    return tmp_path / "file"


URLS = ["s3://bucket/run", "gs://bucket/run", "hdfs://host/run", "memory://run"]


def remote(kind: str, place: str) -> dict[str, Any]:
    """Return what makes a Trainer save somewhere, in one of several ways."""
    return {
        "dirpath": {"callbacks": [ModelCheckpoint(place)]},
        "second": {"callbacks": [ModelCheckpoint("fine"), ModelCheckpoint(place, monitor="x")]},
        "exception": {"callbacks": [OnExceptionCheckpoint(place)]},
        "root": {"callbacks": [ModelCheckpoint()], "default_root_dir": place},
        "logger": {"callbacks": [ModelCheckpoint()], "logger": CSVLogger(place)},
        "preemption": {"default_root_dir": place, "plugins": [DistCkptIO(preemption=True)]},
        "finder": {"callbacks": [LearningRateFinder()], "default_root_dir": place},
        "slurm": {
            "default_root_dir": place,
            "plugins": [DistCkptIO(), SLURMEnvironment(auto_requeue=True)],
        },
    }[kind] | ({"enable_checkpointing": False} if kind == "finder" else {})


@pytest.mark.parametrize("place", URLS)
def test_remote_folders_are_refused_in_setup(tmp_path: Path, place: str) -> None:
    """Not at the first save, an epoch later."""
    trainer = make_trainer("single", tmp_path, callbacks=[ModelCheckpoint(tmp_path)])
    trainer.checkpoint_callback.dirpath = place  # no need for its file system to be installed
    with pytest.raises(ConfigError, match=f"dirpath of ModelCheckpoint {place}.*rank 0"):
        trainer.fit(Tiny(), loader())
    assert trainer.global_step == 0


@pytest.mark.parametrize(
    "kind", ["dirpath", "second", "exception", "root", "preemption", "finder", "slurm"]
)
def test_folders_that_cannot_be_made_are_refused_in_setup(a_file: Path, kind: str) -> None:
    """Whoever of a Trainer's parts would save there."""
    trainer = make_trainer("single", a_file.parent, **remote(kind, str(a_file / "run")))
    with pytest.raises(CheckpointingException) as caught:
        trainer.fit(Tiny(), loader())
    # OnExceptionCheckpoint saves then, so its error comes last.
    error = caught.value.__context__ if kind == "exception" else caught.value
    while not isinstance(error, ConfigError):
        assert error is not None
        error = error.__context__
    assert f"{a_file} is no directory (rank 0)" in str(error)
    assert trainer.global_step == 0
    assert names(a_file.parent) <= {"file", "fine"}


def test_folders_that_are_not_used_do_not_matter(a_file: Path, tmp_path: Path) -> None:
    """``default_root_dir`` beside a ``dirpath``; a dry run; an evaluation."""
    bad = a_file / "run"
    used = make_trainer("single", bad, callbacks=[every_3_steps(tmp_path / "run")])
    used.fit(module := Tiny(), loader())
    assert names(tmp_path / "run") == {"step=3.ckpt", "step=6.ckpt"}
    places = {str(tmp_path / "run")}  # a job that is told to go has its last checkpoint there, too
    assert {folder for _, folder in _folders(used, preemption=True)} == places
    dry = make_trainer("single", bad, callbacks=[ModelCheckpoint(bad)], fast_dev_run=True)
    dry.fit(Tiny(), loader())
    make_trainer("single", bad, callbacks=[ModelCheckpoint(bad)]).validate(module, loader())


def test_folders_without_permission(tmp_path: Path) -> None:
    """Whoever the process acts as decides."""
    (tmp_path / "locked").mkdir(mode=0o500)
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)  # root may write everywhere
    try:
        found = _problem(str(tmp_path / "locked" / "run"))
    finally:
        os.seteuid(was)
    assert found is not None
    assert found.endswith(" is not writable")


def test_a_read_only_file_system() -> None:
    """Told from a missing permission."""
    if os.access("/proc/sys", os.W_OK) or not os.statvfs("/proc/sys").f_flag & os.ST_RDONLY:
        pytest.skip("no read-only file system at hand")
    assert _problem("/proc/sys/run") == "/proc/sys is on a read-only file system"


def fit_where_rank_1_cannot_save(rank: int, world_size: int, root: str) -> str:
    folder = Path(root, "file" if rank == 1 else "folder")
    trainer = make_trainer("ddp", root, callbacks=[ModelCheckpoint(folder)])
    with pytest.raises(ConfigError) as caught:
        trainer.fit(Tiny(), loader("ddp"))
    return str(caught.value)


def test_every_rank_refuses_what_one_cannot_make(a_file: Path) -> None:
    """With the rank, at once: nobody waits for it."""
    told = run_ranks(fit_where_rank_1_cannot_save, 2, str(a_file.parent))
    assert told[0] == told[1]
    assert f"{a_file} is no directory (rank 1)" in told[0]


def test_local_urls_are_local(tmp_path: Path) -> None:
    """``file://`` is where it says, as in stock Lightning."""
    trainer = make_trainer("single", tmp_path)
    trainer.fit(Tiny(), loader())
    trainer.save_checkpoint(f"file://{tmp_path}/x.ckpt")
    assert is_checkpoint(tmp_path / "x.ckpt")
    again = make_trainer("single", tmp_path, max_steps=9)
    again.fit(Tiny(), loader(), ckpt_path=f"file://{tmp_path}/x.ckpt")
    assert again.global_step == 9


# -- a directory of ours in other hands ------------------------------------------------------------


@pytest.mark.parametrize("how", ["fit", "validate", "test", "predict"])
def test_a_trainer_without_the_plugin_says_what_to_call(
    run: Path, tmp_path: Path, how: str
) -> None:
    """Wherever a plugin exists in the process; also if it is switched off there."""
    keep = DistCkptIO()
    stock = make_trainer("single", tmp_path, plugins=None)
    with pytest.raises(ConfigError, match=r"step=3.ckpt is a .*plugins=\[DistCkptIO.*export_to"):
        getattr(stock, how)(Tiny(), loader(), ckpt_path=str(run / "step=3.ckpt"))
    off = make_trainer("single", tmp_path, plugins=[DistCkptIO(enabled=False)])
    with pytest.raises(ConfigError, match=r"step=3.ckpt is a checkpoint directory of DistCkptIO"):
        getattr(off, how)(Tiny(), loader(), ckpt_path=run / "step=3.ckpt")
    del keep


def test_stock_tools_fail(run: Path) -> None:
    """Where none of our code runs, they say that it is a directory, and write nothing."""
    path = run / "step=3.ckpt"
    with pytest.raises(IsADirectoryError):
        torch.load(path)
    with pytest.raises(IsADirectoryError):
        Tiny.load_from_checkpoint(path)
    before = names(run)
    with pytest.raises(SystemExit):
        _process_cli_args(Namespace(checkpoint_folder=str(path), output_file=None))
    assert names(run) == before


# -- Fabric ----------------------------------------------------------------------------------------


def fabric_with(**fields: Any) -> L.Fabric:
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=[DistCkptIO(**fields)])
    fabric.launch()
    return fabric


@pytest.mark.parametrize("field", ["async_save", "preemption"])
def test_fabric_refuses_what_it_would_ignore(tmp_path: Path, field: str) -> None:
    """When a module is set up; without one, at the save."""
    if not entry_points(group="lightning.fabric.callbacks_factory", name="dist_ckpt"):
        pytest.fail("the installed entry points are not those of pyproject.toml (pip install -e .)")
    fabric = fabric_with(**{field: True})
    with pytest.raises(ConfigError, match=rf"DistCkptIO\({field}=True\) in Fabric"):
        fabric.setup(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=f"{field}=True"):
        fabric.save(tmp_path / "x", {"a": 1})
    assert not names(tmp_path)


def test_fabric_saves_and_loads(tmp_path: Path) -> None:
    """All else works: one process for itself."""
    fabric = fabric_with()
    module = fabric.setup(torch.nn.Linear(2, 2))
    fabric.save(tmp_path / "x", {"module": module, "step": 3})
    assert is_checkpoint(tmp_path / "x")
    loaded = fabric.load(tmp_path / "x")
    assert loaded["step"] == 3
    assert torch.equal(loaded["module"]["weight"], module.weight)
