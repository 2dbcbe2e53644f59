"""Where the values of the configuration come from.

Here: YAML, mapping, environment and arguments, merged in that order (the last wins) and checked
with the place of each wrong value. Not here: the fields (``models``). This is the one module that
reads the environment. Called on every rank; not collective.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Unpack

import yaml
from pydantic import ValidationError

from dist_ckpt.config.fields import ConfigFields
from dist_ckpt.config.models import DistCkptConfig
from dist_ckpt.errors import ConfigError

__all__ = ["ENV_PREFIX", "SECTION", "load_config"]

ENV_PREFIX: Final = "DIST_CKPT_"
"""``DIST_CKPT_THREAD_COUNT`` sets ``thread_count``, and so on for every field."""

SECTION: Final = "dist_ckpt"
"""A YAML file may hold the fields at top level, or below this key beside other programs' keys."""

_ENV_FILE: Final = f"{ENV_PREFIX}CONFIG"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Values from one source; ``place`` turns a key into what the user would search for."""

    values: Mapping[Any, Any]
    place: Callable[[object], str]
    valid: tuple[str, ...] = tuple(DistCkptConfig.model_fields)
    strings: bool = False  # the environment has strings only


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    /,
    **overrides: Unpack[ConfigFields],
) -> DistCkptConfig:
    """Load the configuration: arguments over environment over YAML over defaults.

    Args:
        source: A YAML file, or its content as a mapping. Without it ``DIST_CKPT_CONFIG`` may name
            a file.
        **overrides: Fields given explicitly; None means not given.

    Raises:
        ConfigError: A key is unknown or a value wrong. Names each of them with its place, e.g.
            ``ckpt.yaml: dist_ckpt.tiemout_secs``, and the nearest valid key.

    Example:
        >>> load_config({"dist_ckpt": {"thread_count": 8}}, timeout_secs=60.0).thread_count
        8
    """
    environment = {k: v for k, v in os.environ.items() if k.startswith(ENV_PREFIX)}
    default_source = environment.pop(_ENV_FILE, "") or None
    layers = [
        _source_layer(default_source if source is None else source),
        _environment_layer(environment),
        _Layer(
            values={key: value for key, value in overrides.items() if value is not None},
            place=lambda key: f"argument {key!r}",
        ),
    ]
    problems = [problem for layer in layers for problem in _unknown_keys(layer)]
    merged: dict[str, Any] = {}
    for layer in layers:
        known = {key: value for key, value in layer.values.items() if key in _FIELDS}
        try:
            merged |= _validate(known, strings=layer.strings)
        except ValidationError as error:
            problems += _bad_values(layer, error)
    if problems:
        raise ConfigError("; ".join(problems) + ".")
    return DistCkptConfig(**merged)


_FIELDS: Final = frozenset(DistCkptConfig.model_fields)


def _validate(values: Mapping[str, Any], *, strings: bool) -> dict[str, Any]:
    check = DistCkptConfig.model_validate_strings if strings else DistCkptConfig.model_validate
    return check(values).model_dump(include=set(values))


def _unknown_keys(layer: _Layer) -> Iterator[str]:
    for key in layer.values:
        if key in _FIELDS:
            continue
        near = difflib.get_close_matches(str(key), layer.valid, n=1, cutoff=0.5)
        advice = f"did you mean {near[0]!r}?" if near else f"valid are {', '.join(layer.valid)}"
        yield f"{layer.place(key)}: unknown key, {advice}"


def _bad_values(layer: _Layer, error: ValidationError) -> Iterator[str]:
    for problem in error.errors(include_url=False):
        expected = problem["msg"].removeprefix("Input should be ")
        found = problem["input"]
        yield f"{layer.place(problem['loc'][0])}: expected {expected}, found {found!r}"


def _environment_layer(environment: Mapping[str, str]) -> _Layer:
    # Only upper case counts; what is left of another spelling is reported as unknown. A variable
    # that is set to nothing is not given, as in ``DIST_CKPT_ENABLED= python train.py``.
    names = {f"{ENV_PREFIX}{field.upper()}": field for field in DistCkptConfig.model_fields}
    return _Layer(
        values={
            names.get(name, name): value
            for name, value in environment.items()
            if value or name not in names
        },
        place=lambda key: f"environment variable {_variable(key)}",
        valid=(*names, _ENV_FILE),
        strings=True,
    )


def _variable(key: object) -> str:
    return f"{ENV_PREFIX}{str(key).upper()}" if key in _FIELDS else str(key)


def _source_layer(source: str | os.PathLike[str] | Mapping[str, Any] | None) -> _Layer:
    if source is None:
        return _Layer(values={}, place=str)
    if isinstance(source, Mapping):
        name = "config"
        content: object = source
    else:
        name = os.fspath(source)
        content = _read_yaml(Path(source))
    values = _mapping(content, name)
    if SECTION not in values:
        return _Layer(
            values=values,
            place=lambda key: f"{name}: {key}",
            valid=(*DistCkptConfig.model_fields, SECTION),
        )
    if beside := sorted(_FIELDS & set(values)):
        raise ConfigError(
            f"{name}: {', '.join(beside)} at top level beside '{SECTION}:'.",
            hint=f"move them below '{SECTION}:'.",
        )
    section = _mapping(values[SECTION], f"{name}: {SECTION}")
    return _Layer(values=section, place=lambda key: f"{name}: {SECTION}.{key}")


def _mapping(content: object, where: str) -> Mapping[Any, Any]:
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ConfigError(f"{where}: expected keys and values, found {content!r}.")
    return content


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key that stands twice; YAML itself does, the parser would take the last."""

    def construct_mapping(
        self,
        node: yaml.MappingNode,
        deep: bool = False,  # noqa: FBT001, FBT002 - the parent's
    ) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key, (key_node, _) in zip(keys, node.value, strict=True):
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} stands there twice", key_node.start_mark
                )
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> object:
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _UniqueKeyLoader)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: this is no YAML: {error}.") from error
