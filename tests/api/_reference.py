"""The pages of ``docs/reference``, made from the data that the tests use.

Here: their text. Not here: the names (``_seeds``) and the defects (``_differences``). Run this as a
module to write the pages anew: ``python -m tests.api._reference``.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from tests.api._differences import DIFFERENCES, Difference
from tests.api._seeds import PAGES, SEEDS, Seed

__all__ = ["REFERENCE", "pages"]

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"

_NAMES_HEAD = """\
# Names from elsewhere, and where they are here

Code that was written for Megatron-Core's `dist_checkpointing` (0.5 to today) or for torch's
`_experimental` checkpointer runs on this library by changing the import:

| Instead of | Import from |
|---|---|
| `megatron.core.dist_checkpointing.X` | `dist_ckpt.X` |
| `torch.distributed.checkpoint._experimental.X` | `dist_ckpt.X` |

A name keeps its module, its parameters in order and its defaults. Parameters that only we have are
keyword-only, or stand last with a default. What a source does wrong is not copied: the last column
says so, and [differences.md](differences.md) names the test that shows it.

This page is made from the table that `tests/api/test_seed_names.py` checks the code against; write
it anew by `python -m tests.api._reference`.

Sources:

"""

_DIFFERENCES_HEAD = """\
# Defects of the sources that are not copied

Each row names a test that fails on the defect. The rows are checked: a test that is renamed or
removed takes this page out of date, and `tests/api/test_reference.py` says so. The page is made
from data, by `python -m tests.api._reference`. The names themselves are in
[seed_names.md](seed_names.md).
"""


def pages() -> dict[str, str]:
    """Return the text of each page, by file name."""
    return {"differences.md": _differences(), "seed_names.md": _names()}


def _names() -> str:
    sources = "".join(f"- {page or 'none'}: {text}\n" for page, text in PAGES.items())
    ordered = sorted(SEEDS, key=lambda seed: seed.module)
    modules = (_module(name, list(seeds)) for name, seeds in groupby(ordered, lambda s: s.module))
    return "\n".join([f"{_NAMES_HEAD}{sources}", *modules])


def _module(name: str, seeds: list[Seed]) -> str:
    rows = (
        f"| `{seed.name}` | {_kind(seed)} | {seed.page or 'none'} | {seed.difference} |\n"
        for seed in seeds
    )
    head = "| Name | What | Source | How ours differs |\n|---|---|---|---|\n"
    title = f"dist_ckpt.{name}".rstrip(".")
    return f"## `{title}`\n\n{head}{''.join(rows)}"


def _kind(seed: Seed) -> str:
    if seed.kind == "keywords":
        return f"parameters `{(seed.signature or '').strip('()')}`"
    return seed.kind


def _differences() -> str:
    areas = groupby(DIFFERENCES, lambda one: one.area)
    return "\n".join([_DIFFERENCES_HEAD, *(_area(area, list(rows)) for area, rows in areas)])


def _area(area: str, rows: list[Difference]) -> str:
    lines = (
        f"| {row.defect} | {row.ours} | {'<br>'.join(f'`{test}`' for test in row.tests)} |\n"
        for row in rows
    )
    head = "| The defect | Here | Test |\n|---|---|---|\n"
    return f"## {area}\n\n{head}{''.join(lines)}"


def main() -> None:
    """Write the pages."""
    REFERENCE.mkdir(exist_ok=True)
    for name, text in pages().items():
        (REFERENCE / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
