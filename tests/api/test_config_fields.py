"""The fields of the configuration stand once, in the model; whatever else names them follows it.

Here: what is made of the model, and what both plugins show of it. Not here: where values come from
(``tests/unit/test_config``), LightningCLI (``tests/lightning/test_config``), what a type checker
sees (``typing_config``, which mypy reads).
"""

from __future__ import annotations

import copy
import inspect
import pickle
import pkgutil
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from dist_ckpt.config import DistCkptConfig
from dist_ckpt.config.arguments import keyword_parameters
from dist_ckpt.config.fields import ConfigFields
from dist_ckpt.errors import ConfigError
from dist_ckpt.options import BackgroundOptions, LoadOptions, SaveOptions
from tests.api._config import ROOT, files

FIELDS = DistCkptConfig.model_fields
PLUGINS = {
    "lightning_dist_ckpt:DistCkptIO": {},
    "accelerate_dist_ckpt:DistCkptIO": {"on_unsupported": "native", "lone_rank_timeout_secs": 30.0},
}
"""Each plugin with its own arguments and their defaults."""


@pytest.fixture(params=PLUGINS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def plugin(name: str) -> Any:
    return pkgutil.resolve_name(name)


def words(text: str) -> str:
    """Return a text without its line breaks."""
    return " ".join(text.split())


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_made_of_the_model_is_up_to_date(path: Path) -> None:
    """Who changes a field writes these files anew: `make pages`."""
    assert path.read_text(encoding="utf-8") == files()[path]


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_is_described(field: str) -> None:
    """In a sentence that names the values to choose from."""
    text = FIELDS[field].description or ""
    choices = [value for value in get_args(FIELDS[field].annotation) if isinstance(value, str)]

    assert text.endswith(".")
    assert [value for value in choices if f"``{value}``" not in text] == []


def test_type_checkers_see_the_fields_of_the_model() -> None:
    """By the same names and types as the run time; none is required."""
    assert get_type_hints(ConfigFields) == {p.name: p.annotation for p in keyword_parameters()}
    assert ConfigFields.__required_keys__ == frozenset()


def test_every_field_is_a_keyword(name: str, plugin: Any) -> None:
    """A plugin shows what the configuration has, by the same types; not given means None."""
    shown = dict(inspect.signature(plugin).parameters)

    own = {key: shown.pop(key).default for key in PLUGINS[name]}
    assert own == PLUGINS[name]
    assert list(shown.values()) == keyword_parameters()
    for key, field in FIELDS.items():
        assert shown[key].kind is inspect.Parameter.KEYWORD_ONLY
        assert shown[key].default is None
        assert shown[key].annotation == get_type_hints(DistCkptConfig)[key] | None
        assert f"{key}: {words(field.description or '')}" in words(plugin.__doc__)


def test_every_field_can_be_given(plugin: Any) -> None:
    """As an argument, one at a time; None leaves the default."""
    for key, field in FIELDS.items():
        assert getattr(plugin(**{key: field.default}).config, key) == field.default
        assert plugin(**{key: None}).config == plugin().config


def test_a_wrong_argument_is_named(plugin: Any) -> None:
    """With the nearest right one."""
    with pytest.raises(ConfigError, match=r"argument 'tread_count'.*did you mean 'thread_count'\?"):
        plugin(tread_count=4)
    with pytest.raises(TypeError, match="positional"):
        plugin(True)


def test_copies_keep_their_settings(plugin: Any) -> None:
    """Pickled (ddp_spawn) or copied (the CLI), it is the same plugin."""
    io = plugin(thread_count=5)

    for other in (pickle.loads(pickle.dumps(io)), copy.copy(io), copy.deepcopy(io)):
        assert other.config == io.config


@pytest.mark.parametrize("options", [SaveOptions, LoadOptions, BackgroundOptions])
def test_options_of_the_same_name_have_the_same_default(options: type[Any]) -> None:
    """A program that uses the core alone gets what a plugin gets."""
    defaults = {key: getattr(options(), key) for key in options.__dataclass_fields__}
    common = defaults.keys() & FIELDS.keys()

    assert common
    assert {key: defaults[key] for key in common} == {key: FIELDS[key].default for key in common}
