"""What registering would not serve, and our directories in the hands of stock tools."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerate import Accelerator, load_checkpoint_in_model
from accelerate.utils import ProjectConfiguration, merge_fsdp_weights
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from accelerate_dist_ckpt import DistCkptIO, register_checkpoint_io
from dist_ckpt import load_plain_tensors
from dist_ckpt.errors import ConfigError
from tests.accelerate._jobs import Net, build, reset, train

if TYPE_CHECKING:
    from transformers import Trainer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

IO = "_dist_ckpt_io"


def trainer_in(folder: Path, *, is_subclass: bool = False) -> Trainer:
    """Return a Trainer, or one of a subclass, as TRL's are.

    Imported here: it takes seconds, in each process that collects tests.
    """
    from transformers import Trainer, TrainingArguments

    reset()
    arguments = TrainingArguments(str(folder), use_cpu=True, report_to=[], disable_tqdm=True)
    cls = type("OfTRL", (Trainer,), {}) if is_subclass else Trainer
    return cls(model=Net(), args=arguments)


@pytest.mark.parametrize("name", ["Trainer", "OfTRL"])
@pytest.mark.parametrize("fields", [{}, {"preemption": True}, {"async_save": True}])
def test_an_accelerator_of_a_trainer_is_refused(
    tmp_path: Path, name: str, fields: dict[str, Any]
) -> None:
    """A Trainer never calls ``save_state``; nothing is registered, started or written."""
    trainer = trainer_in(tmp_path, is_subclass=name == "OfTRL")
    with pytest.raises(ConfigError, match=f"that of a {name} of transformers.*hint: "):
        trainer.accelerator.register_checkpoint_io(DistCkptIO(**fields))
    with pytest.raises(ConfigError, match="never calls save_state"):
        register_checkpoint_io(trainer.accelerator, DistCkptIO(**fields))
    assert IO not in vars(trainer.accelerator)
    assert not list(tmp_path.iterdir())


def test_a_trainer_is_no_accelerator(tmp_path: Path) -> None:
    """The error says what serves it."""
    with pytest.raises(ConfigError, match=r"found a Trainer\. hint: the Trainer's own checkpoints"):
        register_checkpoint_io(trainer_in(tmp_path), DistCkptIO())  # type: ignore[arg-type]


def test_other_accelerators_beside_a_trainer_are_served(tmp_path: Path) -> None:
    """It is the object that counts; ``enabled=False`` is nothing at all."""
    trainer = trainer_in(tmp_path)
    trainer.accelerator.register_checkpoint_io(DistCkptIO(enabled=False))
    own = Accelerator(cpu=True)
    own.register_checkpoint_io(DistCkptIO()).remove()
    former, trainer.accelerator = trainer.accelerator, own
    former.register_checkpoint_io(DistCkptIO()).remove()


def test_registering_does_not_import_transformers() -> None:
    """Where nobody has, there is no Trainer to look for."""
    code = (
        "import sys; from accelerate import Accelerator; from accelerate_dist_ckpt import *\n"
        "Accelerator(cpu=True).register_checkpoint_io(DistCkptIO())\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_remote_places_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be folders called ``s3:`` in the working directory."""
    monkeypatch.chdir(tmp_path)
    job = build()
    with pytest.raises(ConfigError, match="s3://bucket/x: .*local or mounted"):
        job.accelerator.save_state("s3://bucket/x")
    config = ProjectConfiguration("gs://bucket/run", automatic_checkpoint_naming=True)
    job = build(project_config=config)
    with pytest.raises(ConfigError, match="gs://bucket/run: .*local or mounted"):
        job.accelerator.save_state()
    assert not list(tmp_path.iterdir())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    job = build(seed=1)
    train(job, 1)
    job.accelerator.save_state(tmp_path / "ckpt")
    return tmp_path / "ckpt"


def test_merging_weights_fails_and_says_what_to_call(saved: Path, tmp_path: Path) -> None:
    """No ``model.safetensors`` with our names and the optimizer's state in it."""
    with pytest.raises(ValueError, match=r"Key `not the weights.*dist_ckpt\.load_plain_tensors`"):
        merge_fsdp_weights(str(saved), str(tmp_path / "merged"))
    assert not list((tmp_path / "merged").iterdir())


def test_dcp_still_reads_everything(saved: Path, tmp_path: Path) -> None:
    """The note is one entry more, and no tensor of anybody."""
    dcp_to_torch_save(saved, tmp_path / "all.pt")
    whole = torch.load(tmp_path / "all.pt", weights_only=True)
    plain = load_plain_tensors(saved)
    assert plain
    assert all(torch.equal(whole[key], value) for key, value in plain.items())
    notes = [value for value in whole.values() if isinstance(value, dict)]
    assert [list(one) for one in notes] == [["note"]]


def test_other_stock_loaders_fail(saved: Path, tmp_path: Path) -> None:
    """They find no file of theirs."""
    with pytest.raises(IsADirectoryError):
        torch.load(saved)
    with pytest.raises((OSError, ValueError)):
        load_checkpoint_in_model(Net(), str(saved))
    native = build(seed=2)
    native.handle.remove()
    with pytest.raises((OSError, ValueError)):
        native.accelerator.load_state(saved)
    trainer = trainer_in(tmp_path / "run")
    with pytest.raises(ValueError, match="valid checkpoint"):
        trainer.train(resume_from_checkpoint=str(saved))
