"""Configuration: where values come from, and what a wrong one is told."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from dist_ckpt.config import DistCkptConfig, load_config
from dist_ckpt.errors import CheckpointingException, ConfigError


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in (*DistCkptConfig.model_fields, "config"):
        monkeypatch.delenv(f"DIST_CKPT_{field.upper()}", raising=False)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults() -> None:
    """Without any source the defaults stand; those users rely on do not change unseen."""
    config = load_config()

    users_rely_on = {
        "enabled": True,
        "backend": "torch_dist",
        "thread_count": 2,
        "timeout_secs": 1800.0,
        "allow_pickle": False,
        "verify_sharding": True,
        "async_save": False,
        "overlap": False,
        "worker": "process",
        "max_in_flight": 1,
        "staging_budget_mib": None,
        "drain_timeout_secs": 600.0,
        "events_file": None,
        "log_metrics": True,
        "page_cache": "auto",
        "cast": "allow",
        "verify": "read",
        "verify_newest": "full",
        "preemption": False,
        "grace_secs": 30.0,
        "sweep_after_secs": 86400.0,
    }
    assert config == DistCkptConfig()
    assert config.model_dump() | users_rely_on == config.model_dump()


def test_frozen() -> None:
    """A configuration does not change once it is made."""
    with pytest.raises(ValidationError, match="frozen"):
        load_config().thread_count = 3


def test_each_source_wins_over_the_one_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Argument over environment over YAML over default."""
    path = write(tmp_path / "ckpt.yaml", "thread_count: 3\ntimeout_secs: 3\nallow_pickle: true\n")
    monkeypatch.setenv("DIST_CKPT_THREAD_COUNT", "4")
    monkeypatch.setenv("DIST_CKPT_TIMEOUT_SECS", "4.5")

    config = load_config(path, thread_count=5)

    assert (config.thread_count, config.timeout_secs, config.allow_pickle) == (5, 4.5, True)
    assert config.verify_sharding is True


def test_none_is_not_given() -> None:
    """An override of None leaves the value of the source below."""
    assert load_config({"thread_count": 7}, thread_count=None).thread_count == 7


@pytest.mark.parametrize(
    "text", ["dist_ckpt:\n  thread_count: 9\ntrainer: {x: 1}\n", "thread_count: 9"]
)
def test_fields_at_top_level_or_below_their_section(tmp_path: Path, text: str) -> None:
    """Both places count; beside the section other programs have their own keys."""
    assert load_config(write(tmp_path / "a.yaml", text)).thread_count == 9


@pytest.mark.parametrize("text", ["", "# nothing\n", "dist_ckpt:\n"])
def test_an_empty_file_is_the_defaults(tmp_path: Path, text: str) -> None:
    """No keys, no changes."""
    assert load_config(str(write(tmp_path / "a.yaml", text))) == DistCkptConfig()


def test_the_environment_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DIST_CKPT_CONFIG counts when no source is given, and only then."""
    monkeypatch.setenv("DIST_CKPT_CONFIG", str(write(tmp_path / "a.yaml", "thread_count: 11")))

    assert load_config().thread_count == 11
    assert load_config({}).thread_count == 2

    monkeypatch.setenv("DIST_CKPT_CONFIG", "")
    assert load_config().thread_count == 2


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("1", True), ("0", False), ("off", False)]
)
def test_environment_booleans(monkeypatch: pytest.MonkeyPatch, text: str, value: bool) -> None:
    """The usual spellings of yes and no are understood."""
    monkeypatch.setenv("DIST_CKPT_ENABLED", text)

    assert load_config().enabled is value


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A wrong file and what its error must say."""

    id: str
    text: str
    says: tuple[str, ...]


CASES = (
    Case(id="misspelt-key", text="dist_ckpt:\n  tiemout_secs: 3",
         says=("{path}: dist_ckpt.tiemout_secs", "did you mean 'timeout_secs'?")),
    Case(id="misspelt-key-at-top", text="thread_cuont: 3",
         says=("{path}: thread_cuont", "did you mean 'thread_count'?")),
    Case(id="misspelt-section", text="dist_ckptt:\n  enabled: true",
         says=("{path}: dist_ckptt", "did you mean 'dist_ckpt'?")),
    Case(id="nothing-near", text="zzz: 3", says=("{path}: zzz", "valid are enabled, backend")),
    Case(id="key-no-string", text="7: 3", says=("{path}: 7: unknown key",)),
    Case(id="too-large", text="thread_count: 65",
         says=("{path}: thread_count", "expected less than or equal to 64", "found 65")),
    Case(id="too-small", text="dist_ckpt: {timeout_secs: 0}",
         says=("{path}: dist_ckpt.timeout_secs", "expected greater than 0", "found 0")),
    Case(id="infinite", text="timeout_secs: .inf", says=("timeout_secs", "finite", "found inf")),
    Case(id="wrong-type", text="enabled: 'yes'", says=("enabled", "a valid boolean", "found 'yes'")),
    Case(id="bool-is-no-count", text="thread_count: true", says=("a valid integer", "found True")),
    Case(id="null", text="thread_count:", says=("thread_count", "found None")),
    Case(id="unknown-backend", text="backend: zip", says=("backend", "'torch_dist'", "found 'zip'")),
    Case(id="all-at-once", text="dist_ckpt: {enabeld: true, thread_count: 0, timeout_secs: -1}",
         says=("'enabled'", "found 0", "found -1")),
    Case(id="no-mapping", text="- enabled", says=("{path}: expected keys and values", "['enabled']")),
    Case(id="section-no-mapping", text="dist_ckpt: 3",
         says=("{path}: dist_ckpt: expected keys and values", "found 3")),
    Case(id="beside-the-section", text="dist_ckpt: {}\nthread_count: 3",
         says=("{path}: thread_count at top level", "move them below 'dist_ckpt:'")),
    Case(id="no-yaml", text="a: [", says=("{path}: this is no YAML", "line 1")),
    Case(id="key-twice", text="enabled: true\nenabled: false",
         says=("{path}", "'enabled' stands there twice", "line 1")),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_wrong_file_is_told_where(tmp_path: Path, case: Case) -> None:
    """File, YAML path, expected and found; for a misspelt key the nearest valid one."""
    path = write(tmp_path / "ckpt.yaml", case.text)

    with pytest.raises(ConfigError) as caught:
        load_config(path)

    for text in case.says:
        assert text.format(path=path) in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, CheckpointingException)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("thread_count", 0), ("thread_count", 65), ("timeout_secs", 0.0), ("max_in_flight", 0),
        ("max_in_flight", 17), ("staging_budget_mib", 0), ("drain_timeout_secs", 0.0),
        ("grace_secs", 0.0), ("sweep_after_secs", 0.0), ("sweep_after_secs", float("inf")),
    ],
)  # fmt: skip
def test_bounds(field: str, value: float) -> None:
    """The first value beyond what a field may have is refused."""
    with pytest.raises(ConfigError, match=f"argument '{field}': expected .*, found {value}"):
        load_config(**{field: value})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file, and one that is no text."""
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot read .*No such file"):
        load_config(tmp_path / "none.yaml")

    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="this is no YAML"):
        load_config(tmp_path / "b.yaml")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("DIST_CKPT_THREAD_CUONT", "3", "THREAD_CUONT: unknown key, did you mean 'DIST_CKPT_THREAD_COUNT'?"),
        ("DIST_CKPT_thread_count", "3", "DIST_CKPT_thread_count: unknown key"),
        ("DIST_CKPT_THREAD_COUNT", "many", "DIST_CKPT_THREAD_COUNT: expected a valid integer"),
        ("DIST_CKPT_CONFIG", "/does/not/exist.yaml", "/does/not/exist.yaml: cannot read"),
    ],
)  # fmt: skip
def test_a_wrong_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    """The environment is checked like a file."""
    monkeypatch.setenv(name, value)

    with pytest.raises(ConfigError) as caught:
        load_config()

    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"tread_count": 3}, "argument 'tread_count': unknown key, did you mean 'thread_count'?"),
        ({"thread_count": "3"}, "argument 'thread_count': expected a valid integer, found '3'"),
    ],
)
def test_a_wrong_argument_is_named(overrides: dict[str, Any], says: str) -> None:
    """Arguments are checked strictly: nothing is converted."""
    with pytest.raises(ConfigError) as caught:
        load_config(**overrides)

    assert says in str(caught.value)


def test_the_library_loads_without_it() -> None:
    """Only who configures pays for pydantic and yaml."""
    code = "import sys, dist_ckpt; print({'pydantic', 'yaml'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert result.stdout.strip() == "set()"


@pytest.mark.parametrize("text", ["off", "Off", "OFF", "false", '"off"'])
def test_off_needs_no_quotes_in_yaml(tmp_path: Path, text: str) -> None:
    """YAML reads off as False; it means what is written."""
    config = load_config(write(tmp_path / "a.yaml", f"verify: {text}"))

    assert config.verify == "off"


def test_on_is_no_level_of_verification(tmp_path: Path) -> None:
    """Which of the two levels it would be, nobody has said."""
    with pytest.raises(ConfigError, match="expected 'read', 'full' or 'off', found True"):
        load_config(write(tmp_path / "a.yaml", "verify: on"))


@pytest.mark.parametrize("field", sorted(DistCkptConfig.model_fields))
def test_an_empty_variable_is_not_given(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    """A shell that sets a variable to nothing clears it."""
    monkeypatch.setenv(f"DIST_CKPT_{field.upper()}", "")

    assert load_config() == DistCkptConfig()


def test_an_empty_variable_with_a_wrong_name_is_still_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A typing error is one, whatever the value."""
    monkeypatch.setenv("DIST_CKPT_ENABELD", "")

    with pytest.raises(ConfigError, match="DIST_CKPT_ENABELD: unknown key"):
        load_config()
