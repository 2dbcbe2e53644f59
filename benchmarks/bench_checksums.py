"""What checksums cost a save and a load: ours with and without them.

Here: the cases. Not here: what happens in a process (``scenarios``), what the numbers mean
(docs/performance.md). A save cannot do without checksums: its write loop stands for it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from harness.bench import Bench, Case, arguments, main

SAVE = Bench(
    name="checksums-save",
    title="Checksums: writing one file",
    scenario="scenarios:save",
    measures={"first": "write, synced", "second": "write again, synced"},
    contenders=("loop", "loop-no-sums"),
    floor="loop-no-sums",
)
LOAD = Bench(
    name="checksums-load",
    title="Checksums: loading",
    scenario="scenarios:load",
    prepare="scenarios:store",
    measures={"warm": "load, warm", "cold": "load, cold"},
    contenders=("ours", "ours-verify-off", "ours-verify-full", "dcp"),
    floor="ours-verify-off",
)


def run(given: Sequence[str] | None = None) -> int:
    """Measure; return 1 if ours failed."""
    asked = arguments(SAVE, mib=1024, rounds=5).parse_args(given)
    settings = {"state": "gpt", "layout": "whole"}
    load = Case(label="gpt", settings=settings, stored="gpt", stored_settings=settings)
    return main(SAVE, [Case(label="gpt", settings=settings)], asked) | main(LOAD, [load], asked)


if __name__ == "__main__":
    sys.exit(run())
