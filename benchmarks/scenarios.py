"""What a process of a save or load benchmark does.

Here: scenarios of one process and of ranks, common to several benchmarks. Not here: cases,
contenders, rounds.

Outside of every clock: imports (a tiny checkpoint is saved and loaded first), the state, its
description, the state of the page cache, the comparison of bits.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from contenders import make
from contenders.base import Contender
from harness import pages, states
from harness.run import Run


def save(run: Run) -> None:
    """Save twice in one process, then load what was saved last and compare it."""
    contender, shards = _begin(run)
    total = states.nbytes(shards) * (1 if run.setting("layout") == "whole" else run.job.world)
    kind = run.setting("pages", "reused")
    for step, name in enumerate(("first", "second")):
        at = run.directory / f"step_{step}"
        run.barrier()
        if run.rank == 0:
            if step:
                shutil.rmtree(run.directory / "step_0")  # its pages are the next to be taken
            elif kind == "reused":
                pages.reuse_pages(run.directory, total)
            os.sync()  # what others left to write is not ours to wait for
        run.timed(name, lambda at=at: contender.save(at), pages=kind)
        if run.rank == 0:
            run.fact(name, stored=pages.size_below(at), state=total)
    states.wipe(shards)
    run.barrier()
    if run.setting("load"):
        run.timed("load", lambda: contender.load(at), pages="as saved")
    else:
        contender.load(at)
    _check(run, shards)
    contender.close()


def store(run: Run) -> None:
    """Save what later runs load."""
    contender, _ = _begin(run)
    contender.save(Path(run.setting("stored")))
    run.barrier()
    contender.close()


def load(run: Run) -> None:
    """Load in place: from storage, then from the page cache; compare both times."""
    contender, shards = _begin(run)
    stored = Path(run.setting("stored"))
    for name in run.setting("states", ["cold", "warm"]):
        states.wipe(shards)
        run.barrier()
        cached = 0
        if run.rank == 0:
            cached = (pages.make_cold if name == "cold" else pages.make_warm)(stored)
        run.timed(name, lambda: contender.load(stored), pages=name)
        run.fact(name, cached=cached, stored=pages.size_below(stored))
        run.count(name, needed=states.nbytes(shards))
        _check(run, shards)
    contender.close()


def _begin(run: Run) -> tuple[Contender, list[states.Shard]]:
    job = run.job
    contender = make(job.contender, rank=run.rank, world=job.world, threads=job.threads)
    shapes = states.STATES[run.setting("state", "gpt")]
    size = run.setting("count") if run.setting("state") == "many" else run.setting("mib")
    layout = run.setting("layout", "whole")
    if contender.warms_up:
        _warm_up(run, contender, layout)
    shards = states.cut(shapes(size), layout=layout, part=run.rank, parts=job.world)
    states.fill(shards)
    contender.bind(shards)
    return contender, shards


def _warm_up(run: Run, contender: Contender, layout: str) -> None:
    """Save and load next to nothing: whatever is imported on use is there afterwards."""
    shapes = {"warm": (12, 12), "up": (24,)}
    shards = states.cut(shapes, layout=layout, part=run.rank, parts=run.job.world)
    states.fill(shards)
    at = run.directory / "warm-up" / "step_0"
    at.parent.mkdir(exist_ok=True)
    contender.bind(shards)
    run.barrier()
    contender.save(at)
    run.barrier()
    contender.load(at)
    _check(run, shards)
    run.barrier()


def _check(run: Run, shards: list[states.Shard]) -> None:
    differing = states.wrong(shards)
    if differing:
        raise AssertionError(
            f"{run.job.contender}: {len(differing)} tensors were loaded with other bits, "
            f"{differing[0]} among them"
        )
