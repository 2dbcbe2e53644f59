"""Background saves among faults: what is committed is exact, what fails is absent and told once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal
from unittest import mock

import pytest

from dist_ckpt.background import BackgroundOptions
from tests._samples import sample
from tests.faults._background import Fault, Job, Record, Run, schedule, shown
from tests.faults._leaks import no_leaks
from tests.multiprocess._world import run_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.sampled]

SAVES = sample(80, 800, variable="DIST_CKPT_FAULT_SAVES")
"""How many saves all runs make together."""
SEED = int(os.environ.get("DIST_CKPT_FAULT_SEED", "20260"))

RUNS: list[tuple[Literal["process", "thread"], bool, int | None, int]] = [
    ("process", False, None, 1),
    ("process", True, None, 3),
    ("process", False, 32 << 10, 3),
    ("process", True, 32 << 10, 1),
    ("thread", False, None, 3),
    ("thread", True, None, 1),
    ("thread", False, 32 << 10, 1),
    ("thread", True, 32 << 10, 3),
]


def faulty(
    rank: int,
    size: int,
    folder: str,
    seed: int,
    count: int,
    options: BackgroundOptions,
) -> Record:
    home = Path(folder)
    job = Job(rank, size)
    warm_up = Run(job, home / "warm", options)
    warm_up.make(Fault(name="none", rank=0, delay=0, steps=1, path="a"))
    warm_up.finish()
    faults = schedule(seed, count, size=size, worker=options.worker, overlap=options.overlap)
    with no_leaks(home), mock.patch("dist_ckpt._staging_pool.pool.BLOCK_NBYTES", 4096):
        run = Run(job, home / "saves", options)
        for fault in faults:
            run.make(fault)
        run.finish()
    problems = [*run.verify(), *run.unreported()]
    assert problems == [], (problems, run.record.ended, run.record.raised)
    run.record.bits.clear()
    return run.record


@pytest.mark.parametrize(("worker", "overlap", "budget", "max_in_flight"), RUNS)
def test_saves_among_faults(
    worker: Literal["process", "thread"],
    overlap: bool,
    budget: int | None,
    max_in_flight: int,
    tmp_path: Path,
) -> None:
    """Two ranks, a changing state, random faults: exact or absent, told once, nothing leaks."""
    options = BackgroundOptions(
        worker=worker,
        overlap=overlap,
        staging_budget=budget,
        max_in_flight=max_in_flight,
        drain_timeout_secs=60,
    )
    count = -(-SAVES // len(RUNS))
    seed = SEED + RUNS.index((worker, overlap, budget, max_in_flight))

    records = run_ranks(
        faulty, 2, str(tmp_path), seed, count, options, timeout_secs=300 + 3 * count
    )

    print(shown(records))
    first = records[0]
    for other in records[1:]:
        assert other.raised == first.raised
        assert other.refused == first.refused
        assert {n: (f, p, e is None) for n, (f, p, e) in other.ended.items()} == {
            n: (f, p, e is None) for n, (f, p, e) in first.ended.items()
        }
    assert len(first.ended) + len(first.refused) == count
