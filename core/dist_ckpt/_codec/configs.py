"""Containers of OmegaConf, which need not be installed.

Here: ``DictConfig`` and ``ListConfig`` as plain containers with their flags, interpolations as
they are written. Not here: other classes (``classes``). Configs that are made from a dataclass have
types of their own and are left to pickle.

Nothing is interpolated here: that is OmegaConf's work when the program reads a value, with the
resolvers that the program has registered.
"""

from __future__ import annotations

import enum
import logging
import pathlib
import sys
from typing import Any, Final

__all__ = ["config_package", "dump_config", "is_config", "load_config"]

logger = logging.getLogger(__name__)

_FLAGS: Final = ("readonly", "struct")
_LEAVES: Final = (bool, int, float, str, bytes, type(None))
_KEYS: Final = (bool, int, float, str, bytes)


def config_package() -> Any:
    """Return OmegaConf if the program has imported it."""
    return sys.modules.get("omegaconf")


def is_config(value: object) -> bool:
    """Whether this is a ``DictConfig`` or a ``ListConfig``, of exactly these classes."""
    package = config_package()
    return package is not None and type(value) in (package.DictConfig, package.ListConfig)


def dump_config(value: Any) -> Any:
    """Return ``[plain container, flags by path]``."""
    package = config_package()
    flags: list[list[Any]] = []
    if not _is_plain(value, package) or not _collect_flags(value, (), {}, flags, package):
        return NotImplemented
    content = package.OmegaConf.to_container(value, resolve=False)
    return [content, flags] if _is_loadable(content) else NotImplemented


def _is_plain(value: Any, package: Any) -> bool:
    kind = package.OmegaConf.get_type(value)
    return kind in (dict, list)


def _collect_flags(
    value: Any,
    path: tuple[Any, ...],
    above: dict[str, bool],
    flags: list[list[Any]],
    package: Any,
) -> bool:
    """Note where a flag differs from that of the container around; false if something is typed."""
    conf = package.OmegaConf
    own = {"readonly": bool(conf.is_readonly(value)), "struct": bool(conf.is_struct(value))}
    changed = {name: on for name, on in own.items() if on != above.get(name, False)}
    if changed:
        flags.append([list(path), changed])
    keys = value.keys() if isinstance(value, package.DictConfig) else range(len(value))
    for key in keys:
        if conf.is_missing(value, key) or conf.is_interpolation(value, key):
            continue
        inner = value[key]
        if not conf.is_config(inner):
            continue
        is_whole = is_config(inner) and _is_plain(inner, package)
        if not is_whole or not _collect_flags(inner, (*path, key), own, flags, package):
            return False
    return True


def _is_loadable(content: Any) -> bool:
    if type(content) is dict:
        return all(_is_key(key) and _is_loadable(inner) for key, inner in content.items())
    if type(content) is list:
        return all(map(_is_loadable, content))
    return type(content) in _LEAVES or isinstance(content, enum.Enum | pathlib.Path)


def _is_key(key: object) -> bool:
    return type(key) in _KEYS or isinstance(key, enum.Enum)


def load_config(payload: list[Any]) -> Any:
    """Return the config, or its plain containers where OmegaConf is not installed."""
    content, flags = payload
    if type(content) not in (dict, list) or type(flags) is not list:
        raise ValueError("no config")
    try:
        import omegaconf  # noqa: PLC0415 - a fixed name, and only where a checkpoint has a config
    except ImportError:
        logger.warning("omegaconf is not installed: its containers are loaded as plain ones")
        return content
    make = omegaconf.DictConfig if type(content) is dict else omegaconf.ListConfig
    try:
        try:
            value = make(content)
        except omegaconf.errors.UnsupportedValueType:  # what stands for an enum that is not here
            value = make(content, flags={"allow_objects": True})
        for path, changed in flags:
            _set_flags(value, path, changed, omegaconf.OmegaConf)
    except omegaconf.errors.OmegaConfBaseException as error:
        raise ValueError(f"no config: {error}") from error
    return value


def _set_flags(value: Any, path: Any, changed: Any, conf: Any) -> None:
    inner = value
    for step in path:
        inner = inner[step]
    if not conf.is_config(inner) or type(changed) is not dict or not set(changed) <= set(_FLAGS):
        raise ValueError(f"no flags: {changed!r}")
    if "readonly" in changed:
        conf.set_readonly(inner, bool(changed["readonly"]))
    if "struct" in changed:
        conf.set_struct(inner, bool(changed["struct"]))
