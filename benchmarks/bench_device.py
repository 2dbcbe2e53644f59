"""An accelerator's state: how fast it comes to the host, and what a save of it stalls.

Here: copies to pageable and to pinned memory, background saves of a model on the device. Not here:
files. Where there is no accelerator, the benchmark says so.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from harness.bench import Bench, Case, arguments, finish, run_bench
from harness.run import Run

MIB = 1 << 20
BENCH = Bench(
    name="device",
    title="From the device to the host",
    scenario="bench_device:measure",
    measures={
        "pageable": "copy to pageable memory that was touched",
        "pinned": "copy to pinned memory",
        "stall": "background save: blocked",
        "overlap": "background save with overlap: blocked",
    },
    contenders=("ours",),
    floor="ours",
)
NONE = "There was no accelerator where this was measured: nothing of this section has been."


def measure(run: Run) -> None:
    """Copy, then save twice in the background in each way; the second save counts."""
    import torch

    if not torch.cuda.is_available():
        run.fact("device", name=None)
        return
    _copies(run)
    for name, overlap in (("stall", False), ("overlap", True)):
        _stall(run, name, overlap=overlap)
    run.fact("device", name=torch.cuda.get_device_name())


def _copies(run: Run) -> None:
    import torch

    count = run.setting("mib") * MIB // 4
    source = torch.randn(count, device="cuda")
    for name, is_pinned in (("pageable", False), ("pinned", True)):
        target = torch.zeros(count, pin_memory=is_pinned)

        def copy(target: torch.Tensor = target) -> None:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()

        copy()
        run.timed(name, copy)
        if not torch.equal(target.cuda(), source):
            raise AssertionError("the copy has other bits")


def _stall(run: Run, name: str, *, overlap: bool) -> None:
    """Save a model and its AdamW; what blocks is the call, and the wait after half a second."""
    import time

    import torch
    from async_job import Job

    import dist_ckpt
    from dist_ckpt.background import BackgroundOptions, BackgroundSaver
    from dist_ckpt.training_state import TrainingState, save_training_state

    with torch.device("cuda"):
        job = Job(run.setting("mib"))
    with BackgroundSaver(BackgroundOptions(overlap=overlap)) as saver:
        for number in range(3):
            at = run.directory / f"{name}-{number}"
            job.change()
            expected = {key: one.clone() for key, one in job.state.items()}
            torch.cuda.synchronize()
            begin = time.perf_counter()
            state = TrainingState(models=[job.model], optimizers=[job.optimizer])
            save_training_state(at, state, saver=saver)
            called = time.perf_counter() - begin
            time.sleep(0.5)  # forward and backward, in which an overlap hides
            run.timed(name, saver.finish_staging)
            run.measures[name]["begin"] -= called
            job.change()
            saver.wait(timeout_secs=600)
        from async_contenders import our_key

        loaded = {key: torch.full_like(one, -1.0) for key, one in expected.items()}
        shard = dist_ckpt.ShardedTensor.from_rank_offsets
        dist_ckpt.load({key: shard(our_key(key), one) for key, one in loaded.items()}, at)
    if not all(torch.equal(loaded[key], one) for key, one in expected.items()):
        raise AssertionError("the checkpoint has other bits")


def bandwidths(result: dict[str, Any]) -> str:
    """Return a line for the copies."""
    devices = {run["measures"]["device"]["name"] for run in result["runs"]}
    return f"On {', '.join(sorted(devices))}; {result['settings']['mib']} MiB a copy and a state."


def run(given: Sequence[str] | None = None) -> int:
    """Measure, or say that there is no accelerator; return 1 if ours failed."""
    asked = arguments(BENCH, mib=1024, rounds=3).parse_args(given)
    result = run_bench(BENCH, [Case()], asked)
    if all(run["measures"]["device"]["name"] is None for run in result["runs"]):
        result["table"] = NONE
        print(NONE)
    elif result["runs"]:
        result["note"] = bandwidths(result)
    return finish(result, asked)


if __name__ == "__main__":
    sys.exit(run())
