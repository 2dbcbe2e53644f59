"""Markdown of a benchmark's JSON: medians and ranges, ratios of the same round.

Here: tables, and the line that says what they were measured on. Not here: where they go
(``report``).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from harness.rounds import ratios, seconds_of, spread, values

MIB = 1 << 20
Result = dict[str, Any]


def markdown(result: Result) -> str:
    """Return all tables of one benchmark, and what did not run."""
    if "table" in result:  # made by the benchmark itself
        parts = [result["table"]]
    else:
        parts = [
            f"**{headline}**{_pages(result, measure)}\n\n{table(result, measure)}"
            for measure, headline in result["measures"].items()
            if _has(result, measure)
        ]
    if "note" in result:
        parts.append(result["note"])
    absent = [result["contenders"][name] for name in result.get("skipped", {})]
    failed = [result["contenders"].get(name, name) for name in result.get("failed", {})]
    if absent:
        parts.append(f"Not installed, not run: {', '.join(absent)}.")
    if failed:
        parts.append(f"Failed, and shown as far as they went: {', '.join(failed)}.")
    if "environment" in result:
        parts.append(told(result))
    return "\n\n".join(parts)


def told(result: Result) -> str:
    """Return what numbers were measured on, as one paragraph."""
    at, settings = result["environment"], result["settings"]
    size = f"{settings['mib']} MiB; " if settings.get("mib") else ""
    load = ", ".join(f"{one:.1f}" for one in at["load"])
    virtual = "virtual, " if at["virtual"] else ""
    return (
        f"<sub>{size}rounds: {settings['rounds']}; {settings['threads']} threads a contender where "
        f"it has any; {virtual}{at['cpus']} cores of {at['processor']}, "
        f"{at['memory_gib']:.0f} GiB, {at['file_system']}, {at['system']}, "
        f"torch {at['packages'].get('torch', '-')}; load average before {load}.</sub>"
    )


def table(result: Result, measure: str) -> str:
    """Return the rows of one measure, a contender each, case by case."""
    columns = [column for column in COLUMNS if column.applies(result, measure)]
    several = len(result["cases"]) > 1
    heads = [*(["case"] if several else []), "", *(column.head(result) for column in columns)]
    rows = [heads, ["---"] * len(heads)]
    for case in result["cases"]:
        first = True
        for name, label in result["contenders"].items():
            if not seconds_of(result, case, name, measure):
                continue
            cells = [column.cell(result, case, name, measure) for column in columns]
            rows.append([*([case if first else ""] if several else []), label, *cells])
            first = False
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


class Seconds:
    """Median and range."""

    def head(self, _result: Result) -> str:
        return "s (min-max)"

    def applies(self, _result: Result, _measure: str) -> bool:
        return True

    def cell(self, result: Result, case: str, name: str, measure: str) -> str:
        return spread(list(seconds_of(result, case, name, measure).values())).text()


class Beside:
    """The median of the ratios to another contender, of each round."""

    def __init__(self, role: str) -> None:
        self._role = role

    def head(self, result: Result) -> str:
        names = {known[self._role] for known in result["cases"].values()}
        if len(names) > 1 or (self._role == "floor" and names <= {"floor"}):
            return f"x {self._role}"
        return f"x {result['contenders'].get(names.pop(), self._role)}"

    def applies(self, result: Result, measure: str) -> bool:
        count = len(result["contenders"])
        roles = {known[self._role] for known in result["cases"].values()}
        if count == 1 or (count == 2 and self._role == "floor" and roles == {"ours"}):
            return False  # a ratio to itself, or the inverse of the other one
        return any(
            seconds_of(result, case, known[self._role], measure)
            for case, known in result["cases"].items()
        )

    def cell(self, result: Result, case: str, name: str, measure: str) -> str:
        other = result["cases"][case][self._role]
        if other == name:
            return "1"
        mine = seconds_of(result, case, name, measure)
        found = ratios(mine, seconds_of(result, case, other, measure))
        return f"{spread(found).middle:.2f}" if found else "-"


class SameLayout:
    """The median of the ratios to the contender's own time of the reference case."""

    def head(self, _result: Result) -> str:
        return "x same layout"

    def applies(self, result: Result, _measure: str) -> bool:
        return any(known["reference"] for known in result["cases"].values())

    def cell(self, result: Result, case: str, name: str, measure: str) -> str:
        other = result["cases"][case]["reference"]
        if other is None:
            return "-"
        mine = seconds_of(result, case, name, measure)
        found = ratios(mine, seconds_of(result, other, name, measure))
        return f"{spread(found).middle:.2f}" if found else "-"


class Share:
    """One counter as a part of another: how much was read for what was needed, and the like."""

    def __init__(
        self, head: str, counter: str, whole: str, *, measures: Sequence[str] = ()
    ) -> None:
        self._head, self._counter, self._whole, self._measures = head, counter, whole, measures

    def head(self, _result: Result) -> str:
        return self._head

    def applies(self, result: Result, measure: str) -> bool:
        if self._measures and measure not in self._measures:
            return False
        several = any(known["world"] > 1 for known in result["cases"].values())
        return several and any(
            self._whole in run["measures"].get(measure, {}) for run in result["runs"]
        )

    def cell(self, result: Result, case: str, name: str, measure: str) -> str:
        part = _numbers(result, case, name, measure, self._counter)
        found = ratios(part, _numbers(result, case, name, measure, self._whole))
        # What is mapped is not counted as read.
        return f"{spread(found).middle:.2f}" if found and any(found) else "-"


class PerShard:
    """Bytes of metadata for each shard."""

    def head(self, _result: Result) -> str:
        return "bytes a shard"

    def applies(self, result: Result, measure: str) -> bool:
        return any("shards" in run["measures"].get(measure, {}) for run in result["runs"])

    def cell(self, result: Result, case: str, name: str, measure: str) -> str:
        found = ratios(
            _numbers(result, case, name, measure, "nbytes"),
            _numbers(result, case, name, measure, "shards"),
        )
        return f"{spread(found).middle:.1f}" if found else "-"


class Evenness:
    """The smallest and the largest share of a rank in what is written; 1 is even."""

    def head(self, _result: Result) -> str:
        return "shares of ranks"

    def applies(self, result: Result, measure: str) -> bool:
        return measure in ("first", "second") and any(
            "written of ranks" in run["measures"].get(measure, {}) for run in result["runs"]
        )

    def cell(self, result: Result, case: str, name: str, measure: str) -> str:
        rounds = values(
            result["runs"], case=case, contender=name, measure=measure, field="written of ranks"
        )
        found = [one / statistics.mean(ranks) for ranks in rounds.values() for one in ranks]
        return f"{min(found):.3f}-{max(found):.3f}" if found else "-"


class Peak:
    """The most memory beyond the state, of the rank that had most; the largest of all rounds."""

    def head(self, _result: Result) -> str:
        return "extra memory, MiB"

    def applies(self, result: Result, measure: str) -> bool:
        return any(
            run["measures"].get(measure, {}).get("peak") is not None for run in result["runs"]
        )

    def cell(self, result: Result, case: str, name: str, measure: str) -> str:
        found = _numbers(result, case, name, measure, "peak")
        return f"{max(found.values()) / MIB:.0f}" if found else "-"


COLUMNS = (
    Seconds(),
    Beside("floor"),
    Beside("peer"),
    SameLayout(),
    Share("read / needed", "read", "needed"),
    Share("from storage / stored", "fetched", "stored", measures=("cold",)),
    Share("stored / state", "stored", "state"),
    PerShard(),
    Evenness(),
    Peak(),
)


def _numbers(result: Result, case: str, name: str, measure: str, field: str) -> dict[int, float]:
    return values(result["runs"], case=case, contender=name, measure=measure, field=field)


def _has(result: Result, measure: str) -> bool:
    return any("seconds" in run["measures"].get(measure, {}) for run in result["runs"])


def _pages(result: Result, measure: str) -> str:
    """Say in which state pages were, and if some were not."""
    found = [run["measures"][measure] for run in result["runs"] if measure in run["measures"]]
    kinds = sorted({one["pages"] for one in found if one.get("pages")})
    stayed = max((one.get("cached", 0) for one in found if one.get("pages") == "cold"), default=0)
    said = f"; pages {', '.join(kinds)}" if kinds else ""
    return f"{said}; up to {stayed / MIB:.1f} MiB could not be dropped" if stayed else said
