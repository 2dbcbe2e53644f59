"""The pages of docs/reference are those that the data makes, and the tests they name exist."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.api._differences import DIFFERENCES
from tests.api._reference import REFERENCE, pages
from tests.api._seeds import SEEDS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", sorted(pages()))
def test_pages_are_up_to_date(name: str) -> None:
    """Who changes the data writes the pages anew: `python -m tests.api._reference`."""
    assert (REFERENCE / name).read_text(encoding="utf-8") == pages()[name]


def test_no_page_stands_there_unmade() -> None:
    """A page that is no longer made goes."""
    assert {path.name for path in REFERENCE.iterdir()} == set(pages())


@cache
def names_in(path: Path) -> set[str]:
    """Return the names of the test functions of a file."""
    if not path.is_file():
        return set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_named_tests_exist() -> None:
    """A row of differences.md whose test is gone shows nothing."""
    gone = [
        test
        for row in DIFFERENCES
        for test in row.tests
        if test.partition("::")[2] not in names_in(ROOT / test.partition("::")[0])
    ]

    assert gone == []


def test_every_difference_has_a_test() -> None:
    """One at least, and areas stand together."""
    areas = [row.area for row in DIFFERENCES]

    assert all(row.tests for row in DIFFERENCES)
    assert areas == sorted(areas, key=areas.index)


def test_cells_do_not_break_the_tables() -> None:
    """A bar would begin another column."""
    cells = [seed.difference for seed in SEEDS]
    cells += [cell for row in DIFFERENCES for cell in (row.area, row.defect, row.ours, *row.tests)]

    assert [cell for cell in cells if "|" in cell or "\n" in cell] == []
