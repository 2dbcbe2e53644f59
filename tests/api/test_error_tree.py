"""The error tree: as drawn, and the same on both sides of a process border."""

from __future__ import annotations

import pickle
import re

import pytest

from dist_ckpt import errors

CLASSES = sorted(
    (
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.CheckpointingException)
    ),
    key=lambda cls: cls.__name__,
)


def drawn() -> dict[str, tuple[str | None, str | None]]:
    """Parse the drawing: class -> (parent above it, builtin in brackets)."""
    tree: dict[str, tuple[str | None, str | None]] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if line.strip().startswith("CheckpointingException("):
            tree["CheckpointingException"] = (None, "Exception")
            above = ["CheckpointingException"]
        elif match := re.match(r"\s{4}([│ ]*[├└]── )(\w+)\s+(?:\(also (\w+)\))?", line):
            branch, name, builtin = match.groups()
            depth = len(branch) // 4
            tree[name] = (above[depth - 1], builtin)
            above[depth:] = [name]
    return tree


def actual() -> dict[str, tuple[str | None, str | None]]:
    tree: dict[str, tuple[str | None, str | None]] = {}
    for cls in CLASSES:
        ours = [base.__name__ for base in cls.__bases__ if base in CLASSES]
        others = [base.__name__ for base in cls.__bases__ if base not in CLASSES]
        tree[cls.__name__] = (ours[0] if ours else None, others[0] if others else None)
    return tree


def test_the_drawing_is_the_tree() -> None:
    """Every class stands in the module's docstring, below its parent, with its builtin."""
    assert drawn() == actual()


def test_all_names_are_exported() -> None:
    """The classes are public."""
    assert {cls.__name__ for cls in CLASSES} <= set(errors.__all__)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_pickling_keeps_everything(cls: type[errors.CheckpointingException]) -> None:
    """Class, message with hint, kind, failures and attributes of a builtin parent survive."""
    error = cls("'a.weight': rows are missing.", hint="look at replica_id.")
    failure = errors.RankFailure(error="OSError", kind="storage", message="full", traceback="T")
    error.failures = {3: failure}

    back = pickle.loads(pickle.dumps(error))

    assert type(back) is cls
    assert str(back) == "'a.weight': rows are missing. hint: look at replica_id."
    assert back.kind is cls.kind
    assert back.failures == {3: failure}


def test_every_leaf_has_a_kind_of_its_own() -> None:
    """A code names one class; only the base is of unknown kind, and coordination is a branch."""
    kinds = [cls.kind for cls in CLASSES]

    assert len(set(kinds)) == len(kinds)
    assert set(kinds) == set(errors.ErrorKind)
