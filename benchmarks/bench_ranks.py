"""Replicated state, as under DDP: who writes what, and whether all is read by each rank.

Here: the cases of saves and loads. Not here: what happens in a process (``scenarios``), what the
numbers mean (docs/performance.md).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from harness.bench import Bench, Case, arguments, main

SAVE = Bench(
    name="ranks-save",
    title="Save replicated state",
    scenario="scenarios:save",
    measures={"first": "first save", "second": "second save"},
    contenders=("floor", "ours", "dcp", "megatron-parallel"),
)
LOAD = Bench(
    name="ranks-load",
    title="Load replicated state on every rank",
    scenario="scenarios:load",
    prepare="scenarios:store",
    measures={"warm": "load, warm", "cold": "load, cold"},
    contenders=("floor", "floor-exchange", "ours", "dcp", "megatron"),
)


def run(given: Sequence[str] | None = None) -> int:
    """Measure; return 1 if ours or the floor failed."""
    parser = arguments(SAVE, mib=768, rounds=3)
    parser.add_argument("--worlds", default="2,4", help="numbers of ranks, by commas")
    parser.add_argument("--only", choices=["save", "load"], help="one of both")
    asked = parser.parse_args(given)
    settings = {"state": "gpt", "layout": "whole"}
    worlds = [int(one) for one in asked.worlds.split(",")]
    saves = [Case(label=f"{n} ranks", world=n, settings=settings) for n in worlds]
    loads = [
        Case(
            label=f"{n} ranks",
            world=n,
            settings=settings,
            stored=f"ranks-{n}",
            stored_world=n,
            stored_settings=settings,
        )
        for n in worlds
    ]
    failed = main(SAVE, saves, asked) if asked.only != "load" else 0
    return failed | (main(LOAD, loads, asked) if asked.only != "save" else 0)


if __name__ == "__main__":
    sys.exit(run())
