"""The names in the glossary and in the way of a save and a load are names of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "core" / "dist_ckpt"
_CODE = re.compile(r"`([^`]+)`")
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
_PLAIN = re.compile(r"_*[A-Za-z]\w*")
_FILES = re.compile(r"\.?[\w-]+\.(json|bin|md)|core/dist_ckpt|\.dist-ckpt-.*|\.previous")
"""Files of a checkpoint, and the few paths that are no module."""
ELSEWHERE = {"torch.save", "pwrite"}
"""Of torch and of the system."""


def module_file(parts: list[str]) -> Path | None:
    path = CORE.joinpath(*parts)
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


@cache
def members(file: Path) -> dict[str, set[str]]:
    """Return the names of a module, each with the names inside of it if it is a class."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef):
            found[node.name] = set(names_in(node.body))
    return {name: found.get(name, set()) for name in names_in(ast.parse(file.read_text()).body)}


def names_in(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                yield node.name
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Assign(targets=targets):
                yield from (one.id for one in targets if isinstance(one, ast.Name))
            case ast.ImportFrom(names=aliases):  # a package's door
                yield from (alias.asname or alias.name for alias in aliases)


def is_known(name: str) -> bool:
    """Whether a dotted name is a module, or a name in one, or a name in a class of one."""
    parts = name.split(".")
    for depth in range(len(parts), 0, -1):
        file = module_file(parts[:depth])
        if file is None:
            continue
        rest, inside = parts[depth:], members(file)
        if len(rest) <= 1:
            return not rest or rest[0] in inside
        return len(rest) == 2 and rest[1] in inside.get(rest[0], ())
    first, *rest = parts  # a class without its module
    return any(
        rest[0] in members(file).get(first, ()) for file in CORE.rglob("*.py") if len(rest) == 1
    )


@cache
def words() -> frozenset[str]:
    text = "\n".join(file.read_text() for file in CORE.rglob("*.py"))
    return frozenset(re.findall(r"\w+", text))


def unknown_names(text: str) -> list[str]:
    names = dict.fromkeys(_CODE.findall(_FENCED.sub("", text)))
    return [
        name
        for name in names
        if name not in ELSEWHERE and not _FILES.fullmatch(name) and not exists(name)
    ]


def exists(name: str) -> bool:
    if _DOTTED.fullmatch(name):
        return is_known(name)
    if _PLAIN.fullmatch(name):
        return name in words()
    return all(word in words() for word in re.findall(r"[A-Za-z_]\w*", name))  # a call, an option


@pytest.mark.parametrize("page", ["glossary.md", "way.md"])
def test_names_are_those_of_the_code(page: str) -> None:
    """Whoever renames a function finds the page that tells of it."""
    assert unknown_names((ROOT / "docs" / page).read_text()) == []


@pytest.mark.parametrize(
    "name",
    [
        "_saving.plan.Planner.nothing",
        "_saving.nowhere.Planner",
        "_comm.store.Planner",
        "nowhere_at_all",
    ],
)
def test_a_wrong_name_is_found(name: str) -> None:
    """Also one whose parts exist elsewhere."""
    assert unknown_names(f"see `{name}` and `_saving.plan.Planner.plan`, `manifest.json`") == [name]
