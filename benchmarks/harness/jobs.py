"""Jobs: one scenario of one contender in fresh processes, as many as it has ranks.

Here: what is told to a process, how processes are started and ended, how the numbers of ranks
become one. Not here: what they do (``run``, scenarios).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1]
GRACE_SECS = 10.0
POLL_SECS = 0.02
TAIL_CHARS = 2000

Measures = dict[str, dict[str, Any]]


class JobError(Exception):
    """A rank failed, or did not end in time; the message has the end of what it said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a process has to know.

    Attributes:
        scenario: ``module:function`` beside the harness, called with a ``Run``.
        contender: A name of the roster.
        directory: Where to write; exists.
        settings: Anything that JSON can hold.
        world: Number of ranks.
        threads: What a contender may use on each rank, where it lets one choose.
        timeout_secs: After which all ranks are ended.
    """

    scenario: str
    contender: str
    directory: str
    settings: dict[str, Any] = field(default_factory=dict)
    world: int = 1
    threads: int = 2
    timeout_secs: float = 600.0


def run_job(job: Job, place: Path) -> Measures:
    """Run a job and return its measures, those of all ranks made one.

    Args:
        job: What to run.
        place: An empty directory for descriptions, answers and logs.

    Raises:
        JobError: A rank failed or was late. No process of the job is left.
    """
    description = place / "job.json"
    description.write_text(json.dumps(asdict(job)))
    with ExitStack() as stack:
        ranks = [_start(description, rank, job, stack) for rank in range(job.world)]
        try:
            failed = _wait(ranks, job.timeout_secs)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    if failed is not None:
        told = (place / f"log-{failed}.txt").read_text(errors="replace")[-TAIL_CHARS:]
        raise JobError(f"{job.contender}: rank {failed} of {job.scenario} failed: {told.strip()}")
    return merged(
        [json.loads((place / f"out-{rank}.json").read_text()) for rank in range(job.world)]
    )


def _start(description: Path, rank: int, job: Job, stack: ExitStack) -> subprocess.Popen[bytes]:
    log = stack.enter_context((description.parent / f"log-{rank}.txt").open("wb"))
    compute = max(1, (os.cpu_count() or 1) // job.world)
    return subprocess.Popen(
        [sys.executable, "-m", "harness", str(description), str(rank)],
        cwd=BENCHMARKS,
        env=os.environ | {"OMP_NUM_THREADS": str(compute), "PYTHONWARNINGS": "ignore"},
        stdout=log,
        stderr=subprocess.STDOUT,
    )


def _wait(ranks: Sequence[subprocess.Popen[bytes]], timeout_secs: float) -> int | None:
    """Return the rank that failed first, None if all succeeded; the others get a little longer."""
    deadline, failed = time.monotonic() + timeout_secs, None
    while True:
        codes = [process.poll() for process in ranks]
        bad = [rank for rank, code in enumerate(codes) if code]
        if bad and failed is None:
            failed, deadline = bad[0], min(deadline, time.monotonic() + GRACE_SECS)
        running = [rank for rank, code in enumerate(codes) if code is None]
        if not running:
            return failed
        if time.monotonic() > deadline:
            return running[0] if failed is None else failed
        time.sleep(POLL_SECS)


def merged(ranks: Sequence[Mapping[str, Mapping[str, Any]]]) -> Measures:
    """Make one of what ranks measured: from the first begin to the last end.

    Clocks are monotonic and of one machine. Counters are summed, the largest peak is kept, and what
    each rank wrote and read stays beside the sums.
    """
    whole: Measures = {}
    for name in ranks[0]:
        each = [rank[name] for rank in ranks]
        one: dict[str, Any] = {"pages": each[0].get("pages")}
        if "begin" in each[0]:
            one["seconds"] = max(e["end"] for e in each) - min(e["begin"] for e in each)
        peaks = [e["peak"] for e in each if e.get("peak") is not None]
        one["peak"] = max(peaks) if peaks else None
        for counter in sorted({key for e in each for key in e.get("counts", {})}):
            values = [e["counts"][counter] for e in each if counter in e["counts"]]
            one[counter] = sum(values)
            if len(ranks) > 1:
                one[f"{counter} of ranks"] = values
        one |= each[0].get("facts", {})
        whole[name] = one
    return whole
