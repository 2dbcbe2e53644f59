"""Load in place, from storage and from the page cache: ours beside its peers and the floor.

Here: the cases. Not here: what happens in a process (``scenarios``), what the numbers mean
(docs/performance.md). Every contender loads what it has saved itself, once, before the rounds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from harness.bench import Bench, Case, arguments, main

BENCH = Bench(
    name="load",
    title="Load in place, one process",
    scenario="scenarios:load",
    prepare="scenarios:store",
    measures={"warm": "load, warm", "cold": "load, cold"},
    contenders=(
        "floor", "ours", "dcp", "torch-save", "safetensors",
        "megatron", "torchsnapshot",
    ),
)  # fmt: skip


def run(given: Sequence[str] | None = None) -> int:
    """Measure; return 1 if ours or the floor failed."""
    asked = arguments(BENCH, mib=2048, rounds=5).parse_args(given)
    settings = {"state": "gpt", "layout": "whole"}
    case = Case(label="gpt", settings=settings, stored="gpt", stored_settings=settings)
    return main(BENCH, [case], asked)


if __name__ == "__main__":
    sys.exit(run())
