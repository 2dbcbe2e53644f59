"""Registering and removing, directories and their names, hooks, and the configuration."""

from __future__ import annotations

import importlib
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, ProjectConfiguration
from torch.testing._internal.two_tensor import TwoTensor

import accelerate_dist_ckpt
from accelerate_dist_ckpt import DistCkptIO, register_checkpoint_io
from dist_ckpt.errors import (
    CheckpointNotFoundError,
    ConfigError,
    InvalidShardingError,
    MismatchError,
)
from dist_ckpt.training_state import is_checkpoint
from tests.accelerate._jobs import (
    Net,
    build,
    differing,
    new_accelerator,
    reset,
    state_of,
    train,
)
from tests.multiprocess._world import run_program


def is_native(path: Path) -> bool:
    return (path / "model.safetensors").exists() and not is_checkpoint(path)


# -- registration ----------------------------------------------------------------------------------


def test_remove_gives_the_native_checkpoints_back(tmp_path: Path) -> None:
    """Each registration ends with its handle; others in the process never notice."""
    job = build(seed=1)
    train(job, 1)
    job.accelerator.save_state(tmp_path / "ours")
    job.handle.remove()
    job.handle.remove()
    job.accelerator.save_state(tmp_path / "native")
    with job.accelerator.register_checkpoint_io(DistCkptIO()) as handle:
        job.accelerator.save_state(tmp_path / "again")
        newer = job.accelerator.register_checkpoint_io(DistCkptIO())
        handle.remove()  # the newer registration stays
        job.accelerator.save_state(tmp_path / "newer")
        newer.remove()
    other = Accelerator(cpu=True)
    other.prepare(Net())
    other.save_state(tmp_path / "other")

    assert is_checkpoint(tmp_path / "ours")
    assert is_native(tmp_path / "native")
    assert is_checkpoint(tmp_path / "again")
    assert is_checkpoint(tmp_path / "newer")
    assert is_native(tmp_path / "other")


def test_native_checkpoints_load_as_before(tmp_path: Path) -> None:
    """With an IO registered, a directory that Accelerate wrote is read by Accelerate."""
    job = build(seed=1)
    train(job, 2)
    job.handle.remove()
    job.accelerator.save_state(tmp_path / "native")
    expected = state_of(job)

    job = build(seed=2)
    train(job, 1)
    job.accelerator.load_state(tmp_path / "native")

    assert differing(expected, state_of(job)) == []


def test_a_newer_native_checkpoint_in_the_same_place_is_not_ignored(tmp_path: Path) -> None:
    """Ours, then Accelerate's, in one directory: silently going back in time is no option."""
    job = build(seed=1)
    job.accelerator.save_state(tmp_path / "last")
    job.handle.remove()
    train(job, 1)
    job.accelerator.save_state(tmp_path / "last")
    job.accelerator.register_checkpoint_io(DistCkptIO())

    with pytest.raises(MismatchError, match="newer one that Accelerate itself wrote"):
        job.accelerator.load_state(tmp_path / "last")
    job.accelerator.save_state(tmp_path / "last")
    job.accelerator.load_state(tmp_path / "last")


def test_importing_and_registering_again_does_nothing_more() -> None:
    """The dispatcher stands on the class once; an upstream method of that name would stay."""
    build()
    before = Accelerator.save_state, Accelerator.load_state, Accelerator.register_checkpoint_io

    importlib.reload(sys.modules["accelerate_dist_ckpt.registration"])
    importlib.reload(accelerate_dist_ckpt)
    accelerate_dist_ckpt.register_checkpoint_io(
        new_accelerator(), accelerate_dist_ckpt.DistCkptIO()
    )

    after = Accelerator.save_state, Accelerator.load_state, Accelerator.register_checkpoint_io
    assert before == after


class Chatty(Accelerator):
    """A user's subclass."""

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        self.said = "saving"
        return super().save_state(*args, **kwargs)


def test_subclasses_keep_their_chain(tmp_path: Path) -> None:
    """An override that calls super() is called, and reaches us."""
    reset()
    accelerator = Chatty(cpu=True)
    accelerator.register_checkpoint_io(DistCkptIO())
    accelerator.prepare(Net())

    assert accelerator.save_state(output_dir=tmp_path / "ckpt") == tmp_path / "ckpt"
    assert accelerator.said == "saving"
    assert is_checkpoint(tmp_path / "ckpt")


def test_only_an_accelerator_and_our_io_can_be_registered() -> None:
    """Anything else is refused, by name."""
    with pytest.raises(ConfigError, match="takes an Accelerator, found a str"):
        register_checkpoint_io("trainer", DistCkptIO())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="takes a DistCkptIO, found a int"):
        register_checkpoint_io(new_accelerator(), 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [DistributedType.MEGATRON_LM, DistributedType.DEEPSPEED])
def test_formats_of_their_own_are_left_alone_or_refused(kind: Any, tmp_path: Path) -> None:
    """DeepSpeed and Megatron-LM: native with a warning, or an error, by choice."""
    accelerator = new_accelerator()
    accelerator.register_checkpoint_io(DistCkptIO())
    accelerator.state.distributed_type = kind
    with pytest.warns(UserWarning, match="writes checkpoints of its own"):
        accelerator.save_state(tmp_path / "native")
    assert (tmp_path / "native" / "random_states_0.pkl").exists()

    accelerator.register_checkpoint_io(DistCkptIO(on_unsupported="raise"))
    with pytest.raises(ConfigError, match="which DistCkptIO cannot replace"):
        accelerator.save_state(tmp_path / "refused")
    with pytest.raises(ConfigError, match="which DistCkptIO cannot replace"):
        accelerator.load_state(tmp_path / "native")


# -- configuration ---------------------------------------------------------------------------------


def test_values_come_from_arguments_environment_and_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this order; unknown keys are refused with their place."""
    file = tmp_path / "ckpt.yaml"
    file.write_text("dist_ckpt:\n  thread_count: 3\n  timeout_secs: 60\n")
    monkeypatch.setenv("DIST_CKPT_TIMEOUT_SECS", "90")

    io = DistCkptIO.from_yaml(file, allow_pickle=True, lone_rank_timeout_secs=2.0)
    assert (io.config.thread_count, io.config.timeout_secs) == (3, 90.0)
    assert io.config.allow_pickle
    assert io.lone_rank_timeout_secs == 2.0
    assert DistCkptIO(timeout_secs=5.0).config.timeout_secs == 5.0
    monkeypatch.setenv("DIST_CKPT_CONFIG", str(file))
    assert DistCkptIO().config.thread_count == 3
    assert "thread_count=3" in repr(DistCkptIO())

    file.write_text("dist_ckpt:\n  tread_count: 3\n")
    with pytest.raises(ConfigError, match=r"dist_ckpt\.tread_count.*did you mean 'thread_count'"):
        DistCkptIO.from_yaml(file)
    monkeypatch.delenv("DIST_CKPT_CONFIG")
    with pytest.raises(ConfigError, match="lone_rank_timeout_secs"):
        DistCkptIO(lone_rank_timeout_secs=0)
    with pytest.raises(ConfigError, match="on_unsupported"):
        DistCkptIO(on_unsupported="maybe")  # type: ignore[arg-type]


def test_enabled_false_is_nothing_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same script writes native checkpoints."""
    monkeypatch.setenv("DIST_CKPT_ENABLED", "false")
    job = build()

    job.accelerator.save_state(tmp_path / "ckpt")
    job.handle.remove()

    assert is_native(tmp_path / "ckpt")


# -- names -----------------------------------------------------------------------------------------


def project(tmp_path: Path, *, total_limit: int | None = None, seed: int = 0) -> Any:
    config = ProjectConfiguration(
        project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=total_limit
    )
    return build(seed=seed, project_config=config)


def names_in(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "checkpoints").iterdir())


def test_automatic_names_and_their_limit(tmp_path: Path) -> None:
    """The oldest go once the new one is committed; a resume counts on; attempts are not believed."""
    job = project(tmp_path, total_limit=2)
    for _ in range(4):
        train(job, 1)
        job.accelerator.save_state()
    expected = state_of(job)
    assert names_in(tmp_path) == ["checkpoint_2", "checkpoint_3"]
    dead = tmp_path / "checkpoints" / "checkpoint_4"
    dead.mkdir()
    (dead / "model.safetensors").write_text("half")  # a native save that was killed
    (tmp_path / ".dist-ckpt-0123456789-0123456789ab.attempt").mkdir()
    (tmp_path / "checkpoints" / "notes.txt").write_text("a user's file")

    job = project(tmp_path, total_limit=2, seed=9)
    job.accelerator.load_state()
    assert differing(expected, state_of(job)) == []
    assert job.accelerator.save_iteration == 4
    job.accelerator.save_state()
    assert is_checkpoint(dead)
    assert names_in(tmp_path) == ["checkpoint_3", "checkpoint_4", "notes.txt"]


@pytest.mark.parametrize("limit", [-1, 0, 1])
def test_a_limit_leaves_what_it_leaves_natively(tmp_path: Path, limit: int) -> None:
    """The newest stays, whatever the limit: 0 does not mean that all are kept, nor none."""
    left = {}
    for kind in ("native", "ours"):
        job = project(tmp_path / kind, total_limit=limit)
        if kind == "native":
            job.handle.remove()
        left[kind] = []
        for _ in range(3):
            job.accelerator.save_state()
            left[kind].append(names_in(tmp_path / kind))
    assert left["ours"] == left["native"] == [[f"checkpoint_{n}"] for n in range(3)]


def test_a_finished_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    """Accelerate's own ValueError; the number can be given by hand, as natively."""
    job = project(tmp_path)
    job.accelerator.save_state()
    job = project(tmp_path)

    with pytest.raises(ValueError, match="already exists"):
        job.accelerator.save_state()
    job.accelerator.project_configuration.iteration = 7
    assert job.accelerator.save_state().name == "checkpoint_7"


def test_no_finished_checkpoint_is_told(tmp_path: Path) -> None:
    """Automatic loading finds nothing, or no name to save to."""
    job = project(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="no finished checkpoint"):
        job.accelerator.load_state()
    job.accelerator.project_configuration.project_dir = None
    with pytest.raises(ConfigError, match="project_dir"):
        job.accelerator.save_state()
    job.accelerator.project_configuration.automatic_checkpoint_naming = False
    with pytest.raises(ConfigError, match="no output_dir"):
        job.accelerator.save_state()


def test_native_checkpoints_count_among_ours(tmp_path: Path) -> None:
    """A project that began natively goes on: its newest loads, and its oldest are removed."""
    job = project(tmp_path, total_limit=2)
    job.handle.remove()
    job.accelerator.save_state()
    train(job, 1)
    job.accelerator.save_state()
    expected = state_of(job)

    job = project(tmp_path, total_limit=2, seed=9)
    job.accelerator.load_state()
    assert differing(expected, state_of(job)) == []
    job.accelerator.project_configuration.iteration = 2
    job.accelerator.save_state()

    assert names_in(tmp_path) == ["checkpoint_1", "checkpoint_2"]


# -- hooks and other files -------------------------------------------------------------------------


def test_hooks_run_in_order_and_their_files_join_the_commit(tmp_path: Path) -> None:
    """Save hooks see models, weights and a directory; load hooks may take models away."""
    job = build(seed=1)
    said: list[Any] = []

    def first(models: list[Any], weights: list[Any], output_dir: str) -> None:
        said.append(("first", len(models), min(weights[0])))
        assert "checkpoint" not in Path(output_dir).name
        Path(output_dir, "unet").mkdir()
        Path(output_dir, "unet", "config.json").write_text("{}")

    def second(models: list[Any], weights: list[Any], output_dir: str) -> None:
        said.append(("second", Path(output_dir, "unet", "config.json").exists()))

    job.accelerator.register_save_state_pre_hook(first)
    job.accelerator.register_save_state_pre_hook(second)
    job.accelerator.save_state(tmp_path / "ckpt")
    expected = state_of(job)

    assert said == [("first", 1, "count"), ("second", True)]
    assert (tmp_path / "ckpt" / "unet" / "config.json").read_text() == "{}"
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]

    job.accelerator.register_load_state_pre_hook(lambda _, input_dir: said.append(input_dir))
    removable = job.accelerator.register_load_state_pre_hook(lambda models, _: models.clear())
    train(job, 1)
    moved = {k: v.clone() for k, v in job.model.state_dict().items()}
    job.accelerator.load_state(tmp_path / "ckpt")
    assert said[-1] == str(tmp_path / "ckpt")
    assert differing(moved, dict(job.model.state_dict())) == []  # the model was taken away
    removable.remove()
    job.accelerator.load_state(tmp_path / "ckpt")
    assert differing(expected, state_of(job)) == []


def test_hooks_may_replace_weights(tmp_path: Path) -> None:
    """A whole dict put in place of the model's own is what is stored; popped ones are not."""
    accelerator = new_accelerator()
    accelerator.register_checkpoint_io(DistCkptIO())
    kept, gone = accelerator.prepare(torch.nn.Linear(2, 2), torch.nn.Linear(3, 3))

    def edit(models: list[Any], weights: list[Any], output_dir: str) -> None:
        weights.pop()
        weights[0] = {"weight": torch.full((2, 2), 5.0), "bias": torch.zeros(2)}

    accelerator.register_save_state_pre_hook(edit)
    accelerator.save_state(tmp_path / "ckpt")
    accelerator.register_load_state_pre_hook(lambda models, _: models.pop())
    before = gone.weight.clone()
    accelerator.load_state(tmp_path / "ckpt")

    assert torch.equal(kept.weight, torch.full((2, 2), 5.0))
    assert torch.equal(gone.weight, before)


def test_overwriting_keeps_a_users_files(tmp_path: Path) -> None:
    """Saving to the same place again replaces our files only."""
    job = build()
    job.accelerator.save_state(tmp_path / "last")
    (tmp_path / "last" / "notes.txt").write_text("mine")
    train(job, 1)
    job.accelerator.save_state(tmp_path / "last")
    expected = state_of(job)

    train(job, 1)
    job.accelerator.load_state(tmp_path / "last")
    assert (tmp_path / "last" / "notes.txt").read_text() == "mine"
    assert differing(expected, state_of(job)) == []


def test_nothing_is_shared_between_nodes_is_said(tmp_path: Path) -> None:
    """save_on_each_node has no meaning here."""
    job = build(project_config=ProjectConfiguration(save_on_each_node=True))
    with pytest.warns(UserWarning, match="save_on_each_node has no effect"):
        job.accelerator.save_state(tmp_path / "ckpt")


FULL_DISK = """
import resource, signal, sys
from tests.accelerate._jobs import build, differing, state_of, train
from dist_ckpt.errors import StorageError

path = sys.argv[1]
job = build(seed=1)
train(job, 1)
job.accelerator.save_state(path)
expected, optimizers = state_of(job), list(job.accelerator._optimizers)
train(job, 1)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
try:
    job.accelerator.save_state(path)
except StorageError as error:
    print(type(error).__name__)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
assert job.accelerator._optimizers == optimizers
assert job.accelerator.save_iteration == 1
job.accelerator.load_state(path)
assert differing(expected, state_of(job)) == []
"""


KILLED = """
import os, signal, sys
from accelerate.utils import ProjectConfiguration
from tests.accelerate._jobs import build, train

config = ProjectConfiguration(sys.argv[1], automatic_checkpoint_naming=True)
job = build(seed=1, project_config=config)
for _ in range(2):
    train(job, 1)
    job.accelerator.save_state()
train(job, 1)
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
job.accelerator.save_state()
"""


def test_a_full_disk_costs_nothing(tmp_path: Path) -> None:
    """The save raises; the previous checkpoint, the lists and the counter are intact."""
    done = run_program(FULL_DISK, str(tmp_path / "last"))

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "StorageError"
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def test_a_job_killed_in_a_save_resumes_from_the_one_before(tmp_path: Path) -> None:
    """What the dead save left is not believed, and not in the way."""
    done = run_program(KILLED, str(tmp_path))
    assert done.returncode == -signal.SIGKILL, done.stderr
    kinds = sorted(path.suffix for path in tmp_path.iterdir())
    assert kinds == ["", ".attempt", ".owner"]  # checkpoints, what is left of the save, and whose
    assert names_in(tmp_path) == ["checkpoint_0", "checkpoint_1"]
    job = project(tmp_path, seed=1)
    train(job, 2)
    expected = state_of(job)

    job = project(tmp_path, seed=9)
    job.accelerator.load_state()

    assert differing(expected, state_of(job)) == []
    assert job.accelerator.save_state().name == "checkpoint_2"


# -- optimizers that cannot be saved ---------------------------------------------------------------


def test_an_optimizer_that_cannot_be_saved_is_refused_before_training() -> None:
    """At ``prepare``, and at the registration if that comes later; the older one stays then."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters())
    optimizer.param_groups[0]["pair"] = TwoTensor(torch.ones(1), torch.ones(1))
    what = r"optimizer 0: SGD.*param_groups\[0\]\['pair'\] is a .*TwoTensor"

    early = new_accelerator()
    handle = early.register_checkpoint_io(DistCkptIO())
    with pytest.raises(InvalidShardingError, match=what):
        early.prepare(net, optimizer)
    handle.remove()
    late = new_accelerator()
    late.prepare(net, optimizer)
    with pytest.raises(InvalidShardingError, match=what):
        late.register_checkpoint_io(DistCkptIO())
    late.register_checkpoint_io(DistCkptIO(enabled=False))
