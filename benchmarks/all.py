"""All benchmarks, one after another, into one directory of JSON.

Here: what runs, how large, and how long. Not here: the benchmarks, the report.

``--small`` takes minutes on two cores and shows that everything works; ``--full`` takes half
an hour on a quiet machine, or ``--minutes``, and is what docs/performance.md is made of. A
benchmark begins no round that would not end within its share of the time, so that less time and a
slow machine have fewer rounds, never other sizes.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
MINUTES = 30.0
"""What the shares of ``PARTS``, with the stall benchmark, add up to."""


@dataclass(frozen=True, slots=True)
class Part:
    """One call of a benchmark: its options in both sizes, and its share of the full time."""

    script: str
    small: str
    full: str
    budget_secs: int


PARTS = (
    Part("bench_import.py", "--rounds 3", "--rounds 9", 10),
    Part(
        "bench_save.py",
        "--mib 64 --rounds 1 --contenders floor,floor-direct,ours,ours-manager,dcp,torch-save,"
        "safetensors,experimental",
        "--mib 512 --rounds 5",
        330,
    ),
    Part(
        "bench_load.py",
        "--mib 64 --rounds 1 --contenders floor,ours,dcp,torch-save,safetensors",
        "--mib 512 --rounds 5",
        240,
    ),
    Part(
        "bench_many.py",
        "--count 2000 --rounds 1 --contenders floor,ours,ours-manager,dcp,safetensors",
        "--count 8000 --rounds 5",
        240,
    ),
    Part(
        "bench_zarr.py",
        "--mib 48 --rounds 1 --contenders ours,ours-zarr3,tensorstore",
        "--mib 256 --rounds 5",
        110,
    ),
    Part(
        "bench_reshard.py",
        "--mib 48 --rounds 1 --states warm --cases columns --contenders floor,ours,dcp",
        "--mib 128 --rounds 5",
        140,
    ),
    Part(
        "bench_ranks.py",
        "--mib 48 --rounds 1 --worlds 2 --contenders floor,ours,dcp",
        "--mib 128 --rounds 5",
        75,  # for saves, and as much for loads
    ),
    Part(
        "bench_plan.py",
        "--ranks 16,64 --tensors 250 --dcp-up-to 64",
        "--ranks 64,256,1024 --tensors 1000 --rounds 5",
        200,
    ),
    Part("bench_checksums.py", "--mib 64 --rounds 1", "--mib 256 --rounds 5", 40),
    Part("bench_device.py", "--mib 64 --rounds 1", "--mib 1024 --rounds 3", 15),
)
STALL = {
    "small": "--mib 32 --rounds 1 --contenders ours,ours-overlap,dcp-thread",
    "full": "--mib 256 --rounds 5",
}


def commands(
    size: str, out: Path, directory: Path | None, *, minutes: float = MINUTES
) -> list[list[str]]:
    """Return the command lines of all parts."""
    import shlex

    where = [] if directory is None else ["--dir", str(directory)]
    found = []
    for part in PARTS:
        options = shlex.split(part.small if size == "small" else part.full)
        budget = (
            ["--budget", f"{part.budget_secs * minutes / MINUTES:.0f}"] if size == "full" else []
        )
        script = [sys.executable, str(HERE / part.script)]
        found.append([*script, *options, *budget, *where, "--json", str(out)])
    stall = [sys.executable, str(HERE / "bench_async_stall.py"), *shlex.split(STALL[size])]
    return [*found, [*stall, *where, "--json", str(out / "stall.json")]]


def called(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Return the exit code of a command that is not left behind."""
    with subprocess.Popen(command, env=environment) as process:
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            raise


def main(given: Sequence[str] | None = None) -> int:
    """Run all; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--small", dest="size", action="store_const", const="small")
    size.add_argument("--full", dest="size", action="store_const", const="full")
    parser.add_argument("--out", type=Path, default=HERE.parent / "build" / "bench")
    parser.add_argument("--dir", type=Path, help="where to write checkpoints")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all of --full")
    parser.add_argument("--only", help="names of scripts, by commas: save,load")
    asked = parser.parse_args(given)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    asked.out.mkdir(parents=True, exist_ok=True)
    failed, begin = [], time.monotonic()
    for command in commands(asked.size, asked.out.resolve(), asked.dir, minutes=asked.minutes):
        name = Path(command[1]).stem.removeprefix("bench_")
        if asked.only and name not in asked.only.split(","):
            continue
        print(f"\n== {name} ({time.monotonic() - begin:.0f} s)", flush=True)
        # The stall benchmark computes in its own process: one core is left to what it measures.
        threads = {"OMP_NUM_THREADS": "1"} if name == "async_stall" else {}
        if called(command, os.environ | threads):
            failed.append(name)
    print(f"\n{time.monotonic() - begin:.0f} s; JSON in {asked.out}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
