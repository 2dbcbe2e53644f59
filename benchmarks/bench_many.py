"""Many small tensors, where a library's work for each tensor shows: save, save again, load.

Here: the cases. Not here: what happens in a process (``scenarios``), what the numbers mean
(docs/performance.md).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from harness.bench import Bench, Case, arguments, main

BENCH = Bench(
    name="many",
    title="Many tensors of 1 to 16 KB, one process",
    scenario="scenarios:save",
    measures={"first": "first save", "second": "second save", "load": "load, just written"},
    contenders=(
        "floor", "floor-direct", "ours", "ours-manager", "ours-described", "dcp", "torch-save",
        "safetensors", "megatron", "torchsnapshot",
    ),
)  # fmt: skip


def run(given: Sequence[str] | None = None) -> int:
    """Measure; return 1 if ours or the floor failed."""
    parser = arguments(BENCH, mib=0, rounds=5)
    parser.add_argument("--count", type=int, default=20_000, help="number of tensors")
    asked = parser.parse_args(given)
    settings = {"state": "many", "layout": "whole", "count": asked.count, "load": True}
    return main(BENCH, [Case(label=f"{asked.count} tensors", settings=settings)], asked)


if __name__ == "__main__":
    sys.exit(run())
