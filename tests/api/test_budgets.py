"""What a file and a function may weigh before somebody asks why."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("core/dist_ckpt", "lightning_dist_ckpt", "accelerate_dist_ckpt")
MAX_FILE_LINES = 700
MEDIAN_FILE_LINES = 200
MAX_FUNCTION_LINES = 60
P90_FUNCTION_LINES = 35


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
            yield name, (node.end_lineno or node.lineno) - node.lineno + 1


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_there_is_something_to_measure() -> None:
    """A moved folder must not make the budgets pass by measuring nothing."""
    assert sources("core/dist_ckpt")


@pytest.mark.parametrize("package", PACKAGES)
def test_files(package: str) -> None:
    """No file is longer than the limit for review; half of them are much shorter."""
    sizes = {str(path.relative_to(ROOT)): num_lines(path) for path in sources(package)}

    assert {name: n for name, n in sizes.items() if n > MAX_FILE_LINES} == {}
    assert statistics.median(sizes.values() or [0]) <= MEDIAN_FILE_LINES


@pytest.mark.parametrize("package", PACKAGES)
def test_functions(package: str) -> None:
    """No function is longer than the limit for review; nine of ten fit on half a screen."""
    sizes = dict(item for path in sources(package) for item in functions(path))

    assert {name: n for name, n in sizes.items() if n > MAX_FUNCTION_LINES} == {}
    if len(sizes) > 1:
        assert statistics.quantiles(sizes.values(), n=10)[-1] <= P90_FUNCTION_LINES
