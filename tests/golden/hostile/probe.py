"""Opens checkpoints in every way, one after the other, with limits; tells what became of each.

Here: a process of its own, so that a crash, a hang or too much memory is somebody else's end. Not
here: what must become of them (``test_hostile.py``). ``probe.py RESULTS PATH...`` appends a line of
JSON to RESULTS before and after each checkpoint.
"""

from __future__ import annotations

import faulthandler
import json
import resource
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dist_ckpt import (
    CheckpointingException,
    ShardedObject,
    ShardedTensor,
    check_is_distributed_checkpoint,
    load,
    load_common_state_dict,
    load_plain_tensors,
)
from dist_ckpt.serialization import load_tensors_metadata, single_process
from dist_ckpt.training_state import CheckpointView

MEMORY_NBYTES = 3 << 30
"""What all of this process may take beyond what it has when it begins."""
LIMIT_SECS = 120
"""For one checkpoint in all ways; only what hangs comes near it."""
CPU_SECS = 600
"""For all of them."""


def request() -> dict[str, Any]:
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.full((4, 2), -1.0)),
        "v": ShardedTensor.from_rank_offsets("v", torch.full((3,), -1.0)),
        "o": ShardedObject("o", None, (1,), (0,)),
    }


def foreign_request() -> dict[str, Any]:
    return {key: one for key, one in request().items() if key != "o"}


def loaded(path: Path) -> object:
    is_own = any((path / name).is_symlink() or (path / name).exists() for name in
                 ("index.bin", "index.json", "manifest.json"))  # fmt: skip
    return load(request() if is_own else foreign_request(), path)


def view(path: Path) -> object:
    found = CheckpointView.open(path, communicator=single_process())
    return found.common, found.framework, found.world_size, found.num_optimizers


WAYS: dict[str, Callable[[Path], object]] = {
    "check": check_is_distributed_checkpoint,
    "metadata": load_tensors_metadata,
    "common": load_common_state_dict,
    "plain": load_plain_tensors,
    "load": loaded,
    "view": view,
}


def text_of(value: object) -> str:
    """Return what was read, so that it can be compared."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{value.tolist()}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {text_of(one)}" for key, one in value.items()) + "}"
    if isinstance(value, ShardedTensor):
        return f"{value.key} {value.global_shape} {value.dtype}"
    return repr(value)


def tried(way: Callable[[Path], object], path: Path) -> list[str]:
    try:
        return ["value", text_of(way(path))[:2000]]
    except CheckpointingException as error:
        return [type(error).__name__, str(error)[:1000]]
    except Exception as error:  # no error of ours: that is what is looked for
        return [f"!{type(error).__name__}", f"{error}"[:1000]]


def peak_nbytes() -> int:
    """Return the most memory that this process had at one time since the last reset."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results = Path(sys.argv[1])
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_NBYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECS, CPU_SECS))
    with results.open("a") as told:
        for name in sys.argv[2:]:
            path = Path(name)
            faulthandler.dump_traceback_later(LIMIT_SECS, exit=True)
            Path("/proc/self/clear_refs").write_text("5")
            before = peak_nbytes()
            print(json.dumps({"begun": path.name}), file=told, flush=True)
            found: dict[str, Any] = {way: tried(call, path) for way, call in WAYS.items()}
            found["nbytes"] = peak_nbytes() - before
            print(json.dumps({"done": path.name, "found": found}), file=told, flush=True)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
