"""A process of a job: ``python -m harness JOB.json RANK``.

Here: the group of ranks and the call of the scenario. Not here: anything that is measured.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from harness.jobs import POLL_SECS, Job
from harness.run import Run


def main(description: Path, rank: int) -> None:
    """Run the scenario and write what it measured; peers may leave threads, so nothing waits."""
    job = Job(**json.loads(description.read_text()))
    module, function = job.scenario.split(":")
    run = Run(job, rank)
    scenario = getattr(importlib.import_module(module), function)
    if job.settings.get("group", job.world > 1):
        import torch.distributed as dist

        store = _store(description.parent / "port", rank, job.world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world)
        try:
            scenario(run)
        finally:
            dist.destroy_process_group()
    else:
        scenario(run)
    out = description.parent / f"out-{rank}.json"
    out.write_text(json.dumps(run.measures))


def _store(port: Path, rank: int, world: int) -> Any:
    """Return the store that ranks meet in, as a launcher's would be; rank 0 tells its port."""
    import torch.distributed as dist

    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        port.with_suffix(".new").write_text(str(store.port))
        port.with_suffix(".new").rename(port)
        return store
    while not port.exists():
        time.sleep(POLL_SECS)
    return dist.TCPStore("127.0.0.1", int(port.read_text()), world, is_master=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
