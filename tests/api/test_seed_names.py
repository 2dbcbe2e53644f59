"""The names of the seeds: where they are, parameters in order, defaults, values. They do not move.

Ours may follow: a parameter we add is keyword-only, or stands last with a default. The names
themselves are data, in ``_seeds``.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import logging
import pkgutil
from abc import ABC
from dataclasses import dataclass
from typing import Any

import pytest

import dist_ckpt
from tests.api._seeds import PAGES, SEEDS, Seed

NO = inspect.Parameter.empty
ANY = ...  # a default whose value does not count, only its being there
CALLABLES = ("function", "class", "method", "classmethod", "staticmethod")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """What a signature of the table says."""

    positional: dict[str, Any]
    keyword_only: dict[str, Any]
    var_positional: bool
    var_keyword: bool


def parameters_of(signature: str) -> Parameters:
    """Parse the parameters of a line of the table; a string with a colon names an object."""
    [function] = ast.parse(f"def f{signature}: ...").body
    assert isinstance(function, ast.FunctionDef)
    args = function.args
    names = [arg.arg for arg in args.args]
    defaults = [NO] * (len(names) - len(args.defaults)) + [_value(d) for d in args.defaults]
    return Parameters(
        positional=dict(zip(names, defaults, strict=True)),
        keyword_only={
            arg.arg: NO if default is None else _value(default)
            for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
        },
        var_positional=args.vararg is not None,
        var_keyword=args.kwarg is not None,
    )


def _value(node: ast.expr) -> Any:
    value = ast.literal_eval(node)
    return pkgutil.resolve_name(value) if isinstance(value, str) and ":" in value else value


def found(seed: Seed) -> Any:
    """Return the object that a user would get, or fail."""
    owner: Any = importlib.import_module(f"dist_ckpt.{seed.module}".rstrip("."))
    *path, last = seed.name.split(".")
    for part in path:
        owner = getattr(owner, part)
    if isinstance(owner, type) and seed.kind in ("method", "abstract method"):
        return inspect.getattr_static(owner, last)
    return getattr(owner, last)


def signature_of(seed: Seed) -> dict[str, inspect.Parameter]:
    parameters = dict(inspect.signature(found(seed)).parameters)
    if seed.kind in ("method", "abstract method"):
        parameters.pop(next(iter(parameters)))
    return parameters


def cases(*kinds: str, signature: bool = False) -> list[Any]:
    return [
        pytest.param(seed, id=f"{seed.module}.{seed.name}{'' if seed.page else '+'}")
        for seed in SEEDS
        if seed.kind.removeprefix("abstract ") in kinds
        and (not signature or seed.signature is not None)
    ]


def test_every_name_stands_once() -> None:
    """On each page; and each page has names."""
    names = [(seed.page, seed.path) for seed in SEEDS]

    assert len(set(names)) == len(names)
    assert {page for page, _ in names} == set(PAGES)


@pytest.mark.parametrize("seed", cases(*CALLABLES, signature=True))
def test_parameters_and_defaults(seed: Seed) -> None:
    """The seed's parameters come first, in its order and with its defaults; others are optional."""
    wanted, ours = parameters_of(seed.signature or "()"), signature_of(seed)
    positional = [p.name for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    var_kinds = {p.kind for p in ours.values()}

    assert positional[: len(wanted.positional)] == list(wanted.positional)
    assert set(wanted.keyword_only) <= set(ours)
    assert not wanted.var_positional or inspect.Parameter.VAR_POSITIONAL in var_kinds
    assert not wanted.var_keyword or inspect.Parameter.VAR_KEYWORD in var_kinds
    for name, default in {**wanted.positional, **wanted.keyword_only}.items():
        got = ours[name].default
        if default is ANY:
            assert got is not NO, name
        elif default is not NO or seed.page:  # off the pages, a default may be added
            assert got is default or got == default, name


@pytest.mark.parametrize("seed", cases(*CALLABLES, signature=True))
def test_our_own_parameters_are_optional(seed: Seed) -> None:
    """A call written for the seed's signature works with ours."""
    wanted = parameters_of(seed.signature or "()")
    theirs = {*wanted.positional, *wanted.keyword_only}
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

    extra = [p for p in signature_of(seed).values() if p.name not in theirs]

    assert [p.name for p in extra if p.default is NO and p.kind not in variable] == []


@pytest.mark.parametrize("seed", cases("keywords"))
def test_keywords_are_taken(seed: Seed) -> None:
    """Parameters of other releases have their names; they are optional."""
    ours = signature_of(seed)

    for name in parameters_of(seed.signature or "()").positional:
        assert ours[name].default is not NO


@pytest.mark.parametrize("seed", cases("class"))
def test_classes(seed: Seed) -> None:
    """They derive from what the seeds' derive from."""
    cls = found(seed)

    assert isinstance(cls, type)
    assert set(seed.bases) <= {base.__name__ for base in cls.__mro__}
    if "ABC" in seed.bases:
        assert issubclass(cls, ABC)


@pytest.mark.parametrize("seed", cases("method", "classmethod", "staticmethod", "property"))
def test_methods_and_properties_are_what_they_were(seed: Seed) -> None:
    """A property is none in disguise; what is abstract must be written by a subclass."""
    owner, _, name = seed.name.rpartition(".")
    cls = found(Seed(page="", module=seed.module, kind="class", name=owner, bases=(),
                     signature=None, value=None, difference=""))  # fmt: skip
    static = inspect.getattr_static(cls, name)
    kinds = {"classmethod": classmethod, "staticmethod": staticmethod, "property": property}
    kind = kinds.get(seed.kind.removeprefix("abstract "))

    assert isinstance(static, kind) if kind else inspect.isfunction(static)
    assert bool(getattr(static, "__isabstractmethod__", False)) == seed.kind.startswith("abstract")


@pytest.mark.parametrize("seed", cases("member"))
def test_members(seed: Seed) -> None:
    """Members of an enum have the seeds' values, which users write in their configuration."""
    member = found(seed)

    assert isinstance(member, enum.Enum)
    assert member.value == ast.literal_eval(seed.value or "None")


@pytest.mark.parametrize("seed", cases("attribute"))
def test_attributes(seed: Seed) -> None:
    """Fields are declared, with the seeds' defaults."""
    owner, _, name = seed.name.rpartition(".")
    cls = found(Seed(page="", module=seed.module, kind="class", name=owner, bases=(),
                     signature=None, value=None, difference=""))  # fmt: skip

    assert any(name in vars(base).get("__annotations__", {}) for base in cls.__mro__)
    if seed.value is not None:
        assert getattr(cls, name) == ast.literal_eval(seed.value)


@pytest.mark.parametrize("seed", cases("data", "function"))
def test_data_and_functions(seed: Seed) -> None:
    """Module-level names are there; loggers are loggers; constants have their value."""
    value = found(seed)

    if seed.kind == "function":
        assert inspect.isfunction(value)
    elif seed.name == "logger":
        assert isinstance(value, logging.Logger)
        assert value.name == f"dist_ckpt.{seed.module}"
    elif seed.value is not None:
        assert value == ast.literal_eval(seed.value)


def test_both_spellings_are_one_class() -> None:
    """The seeds' spelling is kept, and ours beside it."""
    mapping = importlib.import_module("dist_ckpt.mapping")

    assert mapping.LocalNonpersitentObject is mapping.LocalNonpersistentObject
    assert dist_ckpt.LocalNonpersitentObject is dist_ckpt.LocalNonpersistentObject


@pytest.mark.parametrize(
    ("signature", "positional"),
    [
        pytest.param("(a, b=1)", {"a": NO, "b": 1}, id="default"),
        pytest.param("(a=(), b='x')", {"a": (), "b": "x"}, id="literals"),
        pytest.param("(a=...)", {"a": ANY}, id="any"),
        pytest.param("(a='logging:INFO', b=None)", {"a": logging.INFO, "b": None}, id="name"),
    ],
)
def test_the_table_is_read_as_it_is_meant(signature: str, positional: dict[str, Any]) -> None:
    """Otherwise a drift would not be seen."""
    assert parameters_of(signature).positional == positional


def test_a_line_that_is_none_is_refused() -> None:
    """A misspelt kind must not take a name out of the checks."""
    from tests.api import _seeds

    with pytest.raises(ValueError, match="not a line of this table"):
        _seeds._seed("000", "core", "funktion save_config(config)")
