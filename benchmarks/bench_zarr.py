"""Zarr: ours beside torch_dist, and beside TensorStore with the same arrays and chunks.

Here: the cases. Not here: what happens in a process (``scenarios``), what the numbers mean
(docs/performance.md).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from harness.bench import Bench, Case, arguments, main

BENCH = Bench(
    name="zarr",
    title="Zarr, one process",
    scenario="scenarios:save",
    measures={"first": "first save", "second": "second save", "load": "load, just written"},
    contenders=("ours", "ours-zarr3", "ours-zarr2", "tensorstore"),
    floor="ours",
    peer="tensorstore",
)


def run(given: Sequence[str] | None = None) -> int:
    """Measure; return 1 if ours failed."""
    asked = arguments(BENCH, mib=1024, rounds=3).parse_args(given)
    settings = {"state": "gpt", "layout": "whole", "load": True}
    return main(BENCH, [Case(label="gpt", settings=settings)], asked)


if __name__ == "__main__":
    sys.exit(run())
