"""A benchmark: its cases and contenders, run in interleaved rounds, kept as JSON.

Here: the driver of every ``bench_*.py``. Not here: scenarios, tables (``report``).
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contenders import ROSTER

from harness.environment import environment, load
from harness.jobs import Job, JobError, run_job
from harness.rounds import goes_on, in_turn, ratios, seconds_of, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One question of a benchmark.

    Attributes:
        label: What stands in tables.
        world: Ranks that are measured.
        settings: For the scenario.
        stored: The name of what is saved beforehand; None if nothing is.
        stored_world: Ranks that save it.
        stored_settings: For the scenario that saves it.
        contenders: Only these; None for all.
        floor: The contender that is the floor here, if it is another than elsewhere.
        peer: Likewise.
        reference: The label of the case whose times these are compared with; None for none.
    """

    label: str = ""
    world: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    stored: str | None = None
    stored_world: int = 1
    stored_settings: dict[str, Any] = field(default_factory=dict)
    contenders: tuple[str, ...] | None = None
    floor: str | None = None
    peer: str | None = None
    reference: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What a ``bench_*.py`` says of itself.

    Attributes:
        name: Of its JSON file and of its place in the report.
        title: A headline.
        scenario: ``module:function`` that measures.
        prepare: ``module:function`` that saves what is loaded; None if nothing is.
        measures: Name of each measure, and its headline.
        contenders: Names of the roster.
        floor: The contender that is the floor of the ratios.
        peer: The contender that the others are compared with, too.
    """

    name: str
    title: str
    scenario: str
    measures: dict[str, str]
    contenders: Sequence[str]
    prepare: str | None = None
    floor: str = "floor"
    peer: str = "dcp"


def arguments(bench: Bench, *, mib: int, rounds: int) -> argparse.ArgumentParser:
    """Return the options that all benchmarks share; scripts add their own."""
    parser = argparse.ArgumentParser(description=bench.title)
    parser.add_argument("--mib", type=int, default=mib, help="size of the state")
    parser.add_argument("--rounds", type=int, default=rounds, help="most rounds")
    parser.add_argument("--budget", type=float, help="seconds after which no round begins")
    parser.add_argument("--threads", type=int, default=2, help="of a contender, on each rank")
    parser.add_argument("--dir", type=Path, help="where to write; a temporary directory if absent")
    parser.add_argument("--contenders", help=f"some of {','.join(bench.contenders)}")
    parser.add_argument("--json", type=Path, help="a directory for all numbers")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for a run")
    return parser


def run_bench(bench: Bench, cases: Sequence[Case], asked: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds and return what was measured; say on stderr what is going on."""
    chosen = asked.contenders.split(",") if asked.contenders else list(bench.contenders)
    unknown = set(chosen) - set(ROSTER)
    if unknown:
        raise SystemExit(f"no contenders: {sorted(unknown)}; there are {', '.join(ROSTER)}")
    skipped = {name: gone for name in chosen if (gone := ROSTER[name].missing())}
    with tempfile.TemporaryDirectory(dir=asked.dir, prefix="bench-") as place:
        rounds = _Rounds(bench, cases, [c for c in chosen if c not in skipped], asked, Path(place))
        before = environment(Path(place))
        rounds.run()
    return {
        "name": bench.name,
        "title": bench.title,
        "measures": bench.measures,
        "cases": {
            case.label: {
                "floor": case.floor or bench.floor,
                "peer": case.peer or bench.peer,
                "reference": case.reference,
                "world": case.world,
            }
            for case in cases
        },
        "contenders": {name: ROSTER[name].label for name in chosen},
        "settings": {"mib": asked.mib, "threads": asked.threads, "rounds": rounds.done},
        "environment": before | {"load_after": load()},
        "skipped": skipped,
        "failed": rounds.failed,
        "runs": rounds.runs,
    }


def finish(result: dict[str, Any], asked: argparse.Namespace) -> int:
    """Print medians, keep the JSON; return 1 if ours or the floor failed."""
    print(summary(result))
    if asked.json:
        asked.json.mkdir(parents=True, exist_ok=True)
        path = asked.json / f"{result['name']}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(name.startswith(("ours", "floor")) for name in result["failed"]))


def main(bench: Bench, cases: Sequence[Case], asked: argparse.Namespace) -> int:
    """Run a benchmark as a script, print it, keep it; SIGTERM ends its processes, too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return finish(run_bench(bench, cases, asked), asked)


def summary(result: dict[str, Any]) -> str:
    """Return medians and ratios as plain text."""
    lines = [result["title"]]
    for measure, headline in result["measures"].items():
        for case, known in result["cases"].items():
            for name, label in result["contenders"].items():
                found = seconds_of(result, case, name, measure)
                if found:
                    told = spread(list(found.values())).text()
                    beside = [
                        f"{spread(pairs).middle:.2f} x {other}"
                        for other in (known["floor"], known["peer"])
                        if name != other
                        and (pairs := ratios(found, seconds_of(result, case, other, measure)))
                    ]
                    lines.append(
                        f"{headline:20} {case:24} {label:34} {told} s  {', '.join(beside)}"
                    )
    lines += [f"{name}: skipped, not installed: {gone}" for name, gone in result["skipped"].items()]
    lines += [f"{name}: FAILED: {told.splitlines()[-1]}" for name, told in result["failed"].items()]
    return "\n".join(lines)


class _Rounds:
    """The rounds of one benchmark."""

    def __init__(
        self,
        bench: Bench,
        cases: Sequence[Case],
        contenders: Sequence[str],
        asked: argparse.Namespace,
        place: Path,
    ) -> None:
        self._bench, self._cases, self._asked, self._place = bench, cases, asked, place
        self._contenders = list(contenders)
        self._stored: dict[tuple[str, str], Path] = {}
        self.runs: list[dict[str, Any]] = []
        self.failed: dict[str, str] = {}
        self.done = 0

    def run(self) -> None:
        begin = time.monotonic()
        for case in self._cases:
            for name in self._of(case):
                self._prepare(case, name)
        last = 0.0
        while goes_on(
            done=self.done,
            rounds=self._asked.rounds,
            spent_secs=time.monotonic() - begin,
            last_secs=last,
            budget_secs=self._asked.budget,
        ):
            started = time.monotonic()
            for case in self._cases:
                for name in in_turn(self._of(case), self.done):
                    self._one(case, name)
            self.done += 1
            last = time.monotonic() - started
            print(
                f"{self._bench.name}: round {self.done} took {last:.0f} s",
                file=sys.stderr,
                flush=True,
            )

    def _of(self, case: Case) -> list[str]:
        return [n for n in self._contenders if case.contenders is None or n in case.contenders]

    def _one(self, case: Case, name: str) -> None:
        settings = {"mib": self._asked.mib, **case.settings}
        if case.stored is not None:
            settings["stored"] = str(self._stored.get((case.stored, name)))
        measures = self._job(self._bench.scenario, name, case.world, settings)
        if measures is not None:
            self.runs.append(
                {"round": self.done, "case": case.label, "contender": name, "measures": measures}
            )

    def _prepare(self, case: Case, name: str) -> None:
        """Save what this case loads, unless another case has had it saved."""
        if (
            case.stored is None
            or self._bench.prepare is None
            or (case.stored, name) in self._stored
        ):
            return
        path = self._place / f"stored-{case.stored}-{name}"
        settings = {"mib": self._asked.mib, **case.stored_settings, "stored": str(path)}
        self._job(self._bench.prepare, name, case.stored_world, settings)
        self._stored[case.stored, name] = path

    def _job(
        self, scenario: str, name: str, world: int, settings: dict[str, Any]
    ) -> dict[str, dict[str, Any]] | None:
        """Run a job; None if this contender failed, now or before."""
        if name in self.failed:
            return None
        if ROSTER[name].in_group:
            settings = settings | {"group": True}
        place = Path(tempfile.mkdtemp(dir=self._place, prefix="job-"))
        (place / "files").mkdir()
        job = Job(
            scenario=scenario,
            contender=name,
            directory=str(place / "files"),
            settings=settings,
            world=world,
            threads=self._asked.threads,
            timeout_secs=self._asked.timeout,
        )
        try:
            return run_job(job, place)
        except JobError as error:
            self.failed[name] = str(error)
            print(error, file=sys.stderr, flush=True)
            return None
        finally:
            shutil.rmtree(place, ignore_errors=True)
