"""Where the plugin's settings come from: arguments, YAML files, the environment, LightningCLI."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI

from dist_ckpt.config import DistCkptConfig
from dist_ckpt.errors import ConfigError
from dist_ckpt.training_state import is_checkpoint
from lightning_dist_ckpt import DistCkptIO
from tests.lightning._training import Tiny, loader

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Loaded(Tiny):
    """Brings its data."""

    def train_dataloader(self) -> Any:
        return loader()


def test_arguments_over_environment_over_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nearest source wins, field by field."""
    file = tmp_path / "ckpt.yaml"
    file.write_text("dist_ckpt:\n  thread_count: 3\n  timeout_secs: 30\n  allow_pickle: true\n")
    assert DistCkptIO.from_yaml(file).config.thread_count == 3

    monkeypatch.setenv("DIST_CKPT_CONFIG", str(file))
    monkeypatch.setenv("DIST_CKPT_THREAD_COUNT", "4")
    config = DistCkptIO(timeout_secs=5).config
    assert (config.thread_count, config.timeout_secs, config.allow_pickle) == (4, 5.0, True)
    assert DistCkptIO.from_yaml(file).config.thread_count == 4


def test_wrong_settings(tmp_path: Path) -> None:
    """What is wrong is named with its place, wherever it stands."""
    file = tmp_path / "ckpt.yaml"
    file.write_text("tiemout_secs: 3\n")
    with pytest.raises(ConfigError, match=r"ckpt\.yaml: tiemout_secs.*timeout_secs"):
        DistCkptIO.from_yaml(file)
    with pytest.raises(ConfigError, match="thread_count"):
        DistCkptIO(thread_count=0)


@pytest.mark.parametrize("enabled", ["true", "false"])
def test_lightning_cli(tmp_path: Path, enabled: str) -> None:
    """The plugin stands in the CLI's YAML, and a flag can switch it off."""
    file = tmp_path / "run.yaml"
    file.write_text(
        f"""
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 3
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
  default_root_dir: {tmp_path}
  plugins:
    - class_path: lightning_dist_ckpt.DistCkptIO
      init_args:
        {{enabled: {enabled}, timeout_secs: 30, backend: torch_dist, async_save: true,
         worker: thread, max_in_flight: 2, drain_timeout_secs: 60, staging_budget_mib: 64,
         page_cache: drop, events_file: {tmp_path}/events.jsonl}}
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {{dirpath: {tmp_path}, filename: one}}
"""
    )
    LightningCLI(Loaded, save_config_callback=None, args=["fit", "--config", str(file)])

    assert is_checkpoint(tmp_path / "one.ckpt") is (enabled == "true")
    assert (tmp_path / "one.ckpt").is_dir() is (enabled == "true")
    assert (tmp_path / "events.jsonl").exists() is (enabled == "true")  # only background saves tell


def test_lightning_cli_flags(tmp_path: Path) -> None:
    """The same on the command line."""
    cli = LightningCLI(
        Loaded,
        save_config_callback=None,
        run=False,
        args=[
            "--trainer.accelerator=cpu",
            "--trainer.logger=false",
            f"--trainer.default_root_dir={tmp_path}",
            "--trainer.plugins+=lightning_dist_ckpt.DistCkptIO",
            "--trainer.plugins.thread_count=7",
            "--trainer.plugins.async_save=true",
            "--trainer.plugins.overlap=true",
        ],
    )
    io = cli.trainer.strategy.checkpoint_io
    assert isinstance(io, DistCkptIO)
    assert io.config.thread_count == 7
    assert io.config.async_save
    assert io.config.overlap


class WithArgument(DistCkptIO):
    """A plugin with an argument of its own.

    Args:
        extra: Its own.
    """

    def __init__(self, extra: int = 1, **fields: Any) -> None:
        super().__init__(**fields)
        self.extra = extra


def cli(*args: str) -> LightningCLI:
    """Parse a command line, without a fit."""
    return LightningCLI(Loaded, save_config_callback=None, run=False, args=list(args))


@pytest.mark.parametrize("plugin", ["lightning_dist_ckpt.DistCkptIO", f"{__name__}.WithArgument"])
def test_lightning_cli_help(plugin: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every field with its description and choices, for a subclass of the plugin, too."""
    with pytest.raises(SystemExit):
        cli(f"--trainer.plugins.help={plugin}")

    shown = " ".join(capsys.readouterr().out.split())
    for name, field in DistCkptConfig.model_fields.items():
        description = " ".join((field.description or "").split())
        assert re.search(rf"plugins\.{name} \S+ {re.escape(description)} \(type: ", shown)
    assert "Literal['process', 'thread']" in shown
    assert ("--trainer.plugins.extra" in shown) == plugin.endswith("WithArgument")


@pytest.mark.parametrize("wrong", ["thread_cuont=4", "thread_count=many", "backend=zip"])
def test_lightning_cli_refuses(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong names and types, before anything is made."""
    with pytest.raises(SystemExit):
        cli("--trainer.plugins+=lightning_dist_ckpt.DistCkptIO", f"--trainer.plugins.{wrong}")

    assert wrong.partition("=")[0] in capsys.readouterr().err


def test_lightning_cli_prints_what_it_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The YAML of --print_config gives the same plugin; fields that were not given stay open."""
    given = "--trainer.plugins+=lightning_dist_ckpt.DistCkptIO", "--trainer.plugins.thread_count=7"
    with pytest.raises(SystemExit):
        cli(*given, "--print_config")
    file = tmp_path / "run.yaml"
    file.write_text(capsys.readouterr().out)
    fields = yaml.safe_load(file.read_text())["trainer"]["plugins"][0]["init_args"]

    again = cli("--config", str(file), "--trainer.accelerator=cpu", "--trainer.logger=false")

    assert fields == dict.fromkeys(DistCkptConfig.model_fields) | {"thread_count": 7}
    assert again.trainer.strategy.checkpoint_io.config == DistCkptIO(thread_count=7).config


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        (
            "from lightning_dist_ckpt.binding import lightning_callbacks as f; assert f() == []",
            "torch",
        ),
        (
            "import pytorch_lightning; from lightning_dist_ckpt import DistCkptIO as f; f()",
            "lightning",
        ),
    ],
    ids=["not-used", "other-name"],
)
def test_nothing_needless_is_imported(code: str, absent: str) -> None:
    """Programs that only have us installed pay nothing; each name of Lightning does alone."""
    check = f"{code}; import sys; assert {absent!r} not in sys.modules"
    subprocess.run([sys.executable, "-W", "ignore", "-c", check], check=True, timeout=300)
