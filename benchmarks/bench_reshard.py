"""Load on another layout than was saved: more ranks, fewer ranks, columns in place of rows.

Here: the cases. Not here: what happens in a process (``scenarios``), what the numbers mean
(docs/performance.md). All ranks together load the whole state in every case, so that their times
can be compared with the same layout's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from harness.bench import Bench, Case, arguments, main

BENCH = Bench(
    name="reshard",
    title="Load on another layout",
    scenario="scenarios:load",
    prepare="scenarios:store",
    measures={"warm": "load, warm", "cold": "load, cold"},
    contenders=("floor", "ours", "dcp", "megatron"),
)

CASES = (
    # saved by, loaded by, layout, compared with the same layout on
    (2, 2, "rows", None),
    (4, 4, "rows", 2),
    (4, 2, "rows", 2),
    (2, 3, "rows", 2),
    (2, 2, "columns", 2),
    (2, 1, "whole", 2),
)


def cases(chosen: Sequence[str] | None, states: Sequence[str]) -> Iterable[Case]:
    """Yield the cases whose label holds one of the words."""
    for saved, loaded, layout, same in CASES:
        label = f"rows on {saved} to {layout} on {loaded}"
        if chosen and not any(word in label for word in chosen):
            continue
        yield Case(
            label=label,
            world=loaded,
            settings={"state": "divisible", "layout": layout, "states": list(states)},
            stored=f"rows-{saved}",
            stored_world=saved,
            stored_settings={"state": "divisible", "layout": "rows"},
            reference=None if same is None else f"rows on {same} to rows on {same}",
        )


def run(given: Sequence[str] | None = None) -> int:
    """Measure; return 1 if ours or the floor failed."""
    parser = arguments(BENCH, mib=768, rounds=3)
    parser.add_argument("--cases", help="words of labels, by commas; all if absent")
    parser.add_argument("--states", default="warm,cold", help="of the page cache")
    asked = parser.parse_args(given)
    chosen = asked.cases.split(",") if asked.cases else None
    return main(BENCH, list(cases(chosen, asked.states.split(","))), asked)


if __name__ == "__main__":
    sys.exit(run())
