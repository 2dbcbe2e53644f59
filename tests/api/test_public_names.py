"""The front door and the public modules: what they promise is there."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import dist_ckpt

PUBLIC = sorted(
    module.name
    for module in pkgutil.walk_packages(dist_ckpt.__path__, prefix="dist_ckpt.")
    if "._" not in module.name
)


def test_the_front_door_is_sorted() -> None:
    """One can find a name, and nothing stands there twice."""
    names = dist_ckpt.__all__

    assert names == sorted(set(names), key=lambda name: (not name.isupper(), name))


@pytest.mark.parametrize("name", dist_ckpt.__all__)
def test_the_front_door_opens(name: str) -> None:
    """Each name is imported on use and shows itself to dir()."""
    assert getattr(dist_ckpt, name) is not None
    assert name in dir(dist_ckpt)


def test_other_names_are_refused_as_usual() -> None:
    """A lazy module fails like any other."""
    with pytest.raises(AttributeError, match="no_such_name"):
        dist_ckpt.no_such_name  # noqa: B018


@pytest.mark.parametrize("module", PUBLIC)
def test_public_modules_say_what_is_public(module: str) -> None:
    """``__all__`` is there, has no name twice, and each of its names exists."""
    loaded = importlib.import_module(module)

    assert len(set(loaded.__all__)) == len(loaded.__all__)
    assert [name for name in loaded.__all__ if not hasattr(loaded, name)] == []
