"""Save to durable, and load what was just saved: ours beside its peers and the floor.

Here: the cases. Not here: what happens in a process (``scenarios``), what the numbers mean
(docs/performance.md).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from harness.bench import Bench, Case, arguments, main

BENCH = Bench(
    name="save",
    title="Save to durable, one process",
    scenario="scenarios:save",
    measures={"first": "first save", "second": "second save", "load": "load right after"},
    contenders=(
        "floor", "floor-direct", "ours", "ours-verify-off", "ours-drop", "ours-manager", "dcp",
        "torch-save", "safetensors", "experimental", "megatron", "torchsnapshot",
    ),
)  # fmt: skip


def run(given: Sequence[str] | None = None) -> int:
    """Measure; return 1 if ours or the floor failed."""
    parser = arguments(BENCH, mib=2048, rounds=5)
    parser.add_argument("--pages", default="reused", choices=["reused", "fresh"])
    asked = parser.parse_args(given)
    settings = {"state": "gpt", "layout": "whole", "pages": asked.pages, "load": True}
    return main(BENCH, [Case(label="gpt", settings=settings)], asked)


if __name__ == "__main__":
    sys.exit(run())
