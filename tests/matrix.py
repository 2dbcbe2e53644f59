"""Run a part of the suite on other versions of torch, Lightning and Accelerate.

Here: the rows, how their environments are made, and the table of docs/compatibility.md. Not here:
the tests. ``make matrix`` runs all rows; ``python tests/matrix.py --rows torch-2.8`` some of them.

Each row is the locked environment with a few packages replaced, so that a failure is theirs. An
environment is removed after its row: torch for CUDA takes some gigabytes.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "matrix"
PAGE = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- matrix -->\n", "<!-- /matrix -->\n"
SHOWN = ("torch", "lightning", "accelerate")
MOST_NAMES = 6

SUITES = {
    "core": (
        "tests/unit/test_serialization.py", "tests/unit/test_records.py",
        "tests/unit/test_payload.py", "tests/unit/test_unpickle.py", "tests/unit/test_derive.py",
        "tests/unit/test_planners.py", "tests/unit/test_dcp_metadata.py",
        "tests/unit/test_filling.py", "tests/unit/test_objects.py", "tests/unit/test_optimizer.py",
    ),
    "ranks": ("tests/multiprocess/test_interop_dcp.py",),
    "lightning": ("tests/lightning/test_trainer.py",),
    "accelerate": ("tests/accelerate/test_single.py", "tests/accelerate/test_registration.py"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """What is installed over the locked environment, and what is run."""

    name: str
    packages: tuple[str, ...]
    suites: tuple[str, ...] = tuple(SUITES)


ROWS = (
    Row("locked", ()),
    Row("torch-newest", ("torch",)),
    Row("torch-2.10", ("torch==2.10.0",)),
    Row("torch-2.9", ("torch==2.9.1",)),
    Row("torch-2.8", ("torch==2.8.0",)),
    Row("lightning-2.5", ("lightning==2.5.6", "pytorch-lightning==2.5.6"), ("lightning",)),
    Row("lightning-2.4", ("lightning==2.4.0", "pytorch-lightning==2.4.0"), ("lightning",)),
    Row("accelerate-1.10", ("accelerate==1.10.1",), ("accelerate",)),
    Row("accelerate-1.6", ("accelerate==1.6.0",), ("accelerate",)),
)


def run(row: Row, base: Path) -> bool:
    """Make the environment of a row, run its suites, remove it; return whether all passed."""
    place = OUT / row.name
    shutil.rmtree(place, ignore_errors=True)
    try:
        # Links: pip replaces files, it does not write into them.
        shutil.copytree(base, place, symlinks=True, copy_function=os.link)
        python = place / "bin" / "python"
        if row.packages:
            subprocess.run(
                [python, "-m", "pip", "install", "--quiet", "--upgrade", *row.packages], check=True
            )
        versions = {name: _version(python, name) for name in SHOWN}
        when = f"{datetime.now(UTC):%Y-%m-%d}, {_commit()}"
        suites: dict[str, dict[str, object]] = {}
        for name in row.suites:
            suites[name] = _suite(python, name, place)
            found = {"name": row.name, "ran": when, "versions": versions, "suites": suites}
            (OUT / f"{row.name}.json").write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps(found), flush=True)
        return not any(suite["failed"] for suite in suites.values())
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _version(python: Path, name: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    return subprocess.run(
        [python, "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


def _commit() -> str:
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip


def _suite(python: Path, name: str, place: Path) -> dict[str, object]:
    report, started = place / f"{name}.xml", time.monotonic()
    with (OUT / f"{place.name}-{name}.log").open("w") as log:
        subprocess.run(
            [python, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider",
             f"--junitxml={report}", *SUITES[name]],
            cwd=ROOT, check=False, stdout=log, stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "JSONARGPARSE_DEPRECATION_WARNINGS": "off"},
        )  # fmt: skip
    if not report.exists():
        return {"passed": 0, "failed": ["nothing ran"], "skipped": 0, "secs": 0}
    cases = list(ET.parse(report).getroot().iter("testcase"))  # noqa: S314 - our own
    failed = [
        f"{case.get('classname', '').rsplit('.', 1)[-1]}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "passed": len(cases) - len(failed) - skipped,
        "failed": failed,
        "skipped": skipped,
        "secs": round(time.monotonic() - started),
    }


def table() -> str:
    """Return the table of all rows that were run."""
    lines = [
        f"| row | {' | '.join(SHOWN)} | {' | '.join(SUITES)} | failed | ran |",
        "|---" * (len(SHOWN) + len(SUITES) + 3) + "|",
    ]
    for row in ROWS:
        path = OUT / f"{row.name}.json"
        if not path.exists():
            continue
        found = json.loads(path.read_text())
        suites = found["suites"]
        cells = [_cell(suites.get(name)) for name in SUITES]
        failed = [f"`{one}`" for suite in suites.values() for one in suite["failed"]]
        more = f" and {len(failed) - MOST_NAMES} more" if len(failed) > MOST_NAMES else ""
        told = ", ".join(failed[:MOST_NAMES]) + more if failed else "none"
        versions = [found["versions"][name] for name in SHOWN]
        lines.append(f"| {' | '.join([row.name, *versions, *cells, told, found['ran']])} |")
    return "\n".join(lines) + "\n"


def _cell(suite: dict[str, object] | None) -> str:
    if suite is None:
        return "not run"
    failed = suite["failed"]
    assert isinstance(failed, list)
    return f"{suite['passed']} passed" + (f", **{len(failed)} failed**" if failed else "")


def write_table() -> None:
    """Put the table between the markers of the page."""
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(before + BEGIN + table() + END + after)


def main() -> int:
    """Run rows; return 1 if a test failed in one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", help=f"some of {','.join(row.name for row in ROWS)}")
    parser.add_argument("--base", type=Path, default=ROOT / ".venv", help="locked environment")
    parser.add_argument("--table", action="store_true", help="write the table of what was run")
    asked = parser.parse_args()
    chosen = asked.rows.split(",") if asked.rows else [row.name for row in ROWS]
    if unknown := set(chosen) - {row.name for row in ROWS}:
        parser.error(f"no rows: {sorted(unknown)}")
    OUT.mkdir(parents=True, exist_ok=True)
    # A second run would remove an environment under the tests of the first.
    with (OUT / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            parser.error(f"another run uses {OUT}: wait for its end")
        return _rows(chosen, asked)


def _rows(chosen: list[str], asked: argparse.Namespace) -> int:
    failed = False
    for row in ROWS if not asked.table else ():
        if row.name in chosen:
            failed |= not run(row, asked.base)
    write_table()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
