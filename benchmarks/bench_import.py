"""What ``import dist_ckpt`` takes in a bare interpreter, and that it imports no torch.

Here: the measurement. Not here: what other modules import (tests/api).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from harness.bench import Bench, Case, arguments, main
from harness.run import Run

BENCH = Bench(
    name="import",
    title="import dist_ckpt",
    scenario="bench_import:measure",
    measures={"import": "import dist_ckpt"},
    contenders=("ours",),
    floor="ours",
)

CODE = """
import sys, time
begin = time.perf_counter()
import dist_ckpt
end = time.perf_counter()
import json
print(json.dumps({"begin": begin, "end": end, "torch": "torch" in sys.modules}))
"""


def measure(run: Run) -> None:
    """Import in an interpreter of its own; once before, so that bytecode is there."""
    for _ in range(2):
        told = subprocess.run(
            [sys.executable, "-c", CODE], check=True, capture_output=True, text=True
        ).stdout
    found = json.loads(told)
    if found.pop("torch"):
        raise AssertionError("import dist_ckpt imported torch")
    run.measures["import"] = found


def run(given: Sequence[str] | None = None) -> int:
    """Measure; return 1 if it failed."""
    return main(BENCH, [Case()], arguments(BENCH, mib=0, rounds=9).parse_args(given))


if __name__ == "__main__":
    sys.exit(run())
