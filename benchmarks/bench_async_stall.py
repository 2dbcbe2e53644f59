"""What a background save costs training: ours beside its peers and a memcpy, in one run.

Here: rounds, clocks, the check of bits, the table. Not here: the contenders
(``async_contenders``), what the numbers mean (README.md). One process, CPU tensors, AdamW.

Each round runs every contender once, beginning with another one each time, and waits until its save
is durable before the next one begins. Every save finds each tensor changed since the save before,
and comes right after a memcpy of the same bytes: the floor that it is compared with.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from async_contenders import CONTENDERS, Memcpy
from async_job import MIB, Contender, Job, differing

ACCUMULATION_SECS = 0.5
"""Forward and backward between a save and the next change of the state: what an overlap may use."""

STEP_SECS = 0.01
"""A step of the small training loop takes at least this, and hardly more than twice of it."""

CLEAN_STEPS = 50
"""Steps without a save, before each turn with one."""


@dataclass(slots=True)
class Times:
    """What one contender took, one number a round.

    Attributes:
        name: What stands in the table.
        first: How long its very first save blocked, in seconds.
        blocked: How long the later ones did: the call, and the wait before the state may change.
        memcpy: How long the memcpy right before each of these took, in seconds.
        durable: From the call until the save was durable, in seconds.
        clean: Steps per second without a save.
        in_flight: Steps per second from the end of the call until the save was durable.
        lost: Seconds of training that the save cost in all: call, waits, slower steps.
    """

    name: str
    first: float = 0.0
    blocked: list[float] = field(default_factory=list)
    memcpy: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    clean: list[float] = field(default_factory=list)
    in_flight: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """How long each save blocked, as a multiple of the memcpy before it."""
        return [one / floor for one, floor in zip(self.blocked, self.memcpy, strict=True)]

    @property
    def pace(self) -> list[float]:
        """Steps per second with a save in flight, as a share of those without."""
        return [one / clean for one, clean in zip(self.in_flight, self.clean, strict=True)]


class Bench:
    """A job, its contenders, the floor, and a place to write.

    Attributes:
        times: Of each contender.
        floor: All memcpys; the first one was into memory that had not been touched.
    """

    def __init__(
        self, job: Job, contenders: Sequence[Contender], floor: Contender, directory: Path
    ) -> None:
        self._job, self._contenders, self._directory = job, contenders, directory
        self._floor = floor
        self._rows = rows_for(job, STEP_SECS)
        self.times = [Times(one.name) for one in contenders]
        self.floor = [self._copy(directory / "nothing")]

    def run(self, rounds: int) -> None:
        """Take the times: the first saves, ``rounds`` of stalls, ``rounds`` of training."""
        for number in range(rounds + 1):
            for contender, times in self._in_turn(number):
                self._stall(contender, times, is_first=not number)
        for number in range(rounds):
            for contender, times in self._in_turn(number):
                self._train(contender, times)

    def check(self) -> dict[str, list[str]]:
        """Save once more, change the state at once, load; return the tensors that differ."""
        wrong = {}
        for contender in [*self._contenders, self._floor]:
            with self._quiet_place() as at:
                expected = {name: one.clone() for name, one in self._job.state.items()}
                contender.save(at)
                contender.guard()
                self._job.change()
                contender.finish()
                names = list(differing(contender.load(at), expected))
            if names:
                wrong[contender.name] = names
        return wrong

    def _in_turn(self, number: int) -> Iterator[tuple[Contender, Times]]:
        turn = list(zip(self._contenders, self.times, strict=True))
        start = number % len(turn)
        yield from turn[start:] + turn[:start]

    @contextmanager
    def _quiet_place(self) -> Iterator[Path]:
        """Change the state, let the disk come to rest, and yield where to save to."""
        self._job.change()
        with tempfile.TemporaryDirectory(dir=self._directory) as parent:
            os.sync()  # what others left to write is not ours to wait for
            yield Path(parent, "checkpoint")

    def _copy(self, at: Path) -> float:
        begin = time.perf_counter()
        self._floor.save(at)
        return time.perf_counter() - begin

    def _stall(self, contender: Contender, times: Times, *, is_first: bool) -> None:
        with self._quiet_place() as at:
            copied = self._copy(at)
            self.floor.append(copied)
            begin = time.perf_counter()
            contender.save(at)
            returned = time.perf_counter()
            done = 0.0
            while time.perf_counter() < returned + ACCUMULATION_SECS:
                self._job.forward_backward(self._rows)
                if not done and contender.is_done():
                    done = time.perf_counter()
            self._job.optimizer.zero_grad()
            waits = time.perf_counter()
            contender.guard()
            blocked = returned - begin + time.perf_counter() - waits
            contender.finish()
            durable = (done or time.perf_counter()) - begin
        if is_first:
            times.first = blocked
        else:
            times.blocked.append(blocked)
            times.memcpy.append(copied)
            times.durable.append(durable)

    def _train(self, contender: Contender, times: Times) -> None:
        _, clean_secs = train(self._job, self._rows, lambda steps: steps >= CLEAN_STEPS)
        with self._quiet_place() as at:
            begin = time.perf_counter()
            contender.save(at)
            steps, secs = train(
                self._job, self._rows, lambda _: contender.is_done(), contender.guard
            )
            end = time.perf_counter()
            contender.finish()
        times.clean.append(1 / clean_secs)
        times.in_flight.append(1 / secs)
        times.lost.append(end - begin - steps * clean_secs)


def train(
    job: Job,
    rows: int,
    is_over: Callable[[int], bool],
    guard: Callable[[], None] = lambda: None,
) -> tuple[int, float]:
    """Run steps until it is over, one at least; return how many, and seconds of each."""
    begin, steps = time.perf_counter(), 0
    while True:
        job.forward_backward(rows)
        guard()
        job.optimizer.step()
        job.optimizer.zero_grad()
        steps += 1
        if is_over(steps):
            return steps, (time.perf_counter() - begin) / steps


def rows_for(job: Job, step_secs: float) -> int:
    """Return a batch size with which a step takes at least ``step_secs``."""
    rows = 64
    while train(job, rows, lambda steps: steps >= 5)[1] < step_secs:
        rows *= 2
    return rows


def table(times: Sequence[Times], floor: Sequence[float]) -> str:
    """Return medians and ranges as Markdown; each ratio is to the memcpy right before."""
    heads = [
        "", "first save, s", "blocked, s (min-max)", "x memcpy", "durable, s (min-max)",
        "steps/s in flight (min-max)", "lost a save, s (min-max)",
    ]  # fmt: skip
    rows = [heads, ["---"] * len(heads)]
    for one in times:
        pace = spread([100 * share for share in one.pace], digits=0)
        rows.append([
            one.name, f"{one.first:.3f}", spread(one.blocked), spread(one.ratios, digits=2),
            spread(one.durable, digits=2), f"{pace} %", spread(one.lost, digits=2),
        ])  # fmt: skip
    rows.append(["memcpy (floor)", f"{floor[0]:.3f}", spread(floor[1:]), "1", "-", "-", "-"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Return median and range."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def allow_many_files() -> None:
    """Raise the limit of open files as far as allowed: some peers hold one a tensor."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextmanager
def process_group(directory: Path) -> Iterator[None]:
    """A group of this process alone, as torch's ``async_save`` needs one."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    with tempfile.TemporaryDirectory(dir=directory) as place:
        dist.init_process_group("gloo", init_method=f"file://{place}/g", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--mib", type=int, default=512, help="size of the state")
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds")
    parser.add_argument("--dir", type=Path, help="where to write; a temporary directory if absent")
    parser.add_argument("--threads", type=int, default=2, help="that copy and write, where any do")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="which, by commas")
    parser.add_argument("--json", type=Path, help="a file for all numbers")
    options = parser.parse_args(arguments)
    options.contenders = options.contenders.split(",")
    if unknown := set(options.contenders) - set(CONTENDERS):
        parser.error(f"no contenders: {sorted(unknown)}; there are {', '.join(CONTENDERS)}")
    return options


def settings(job: Job, options: argparse.Namespace) -> dict[str, object]:
    return {
        "MiB": round(job.nbytes / MIB, 1),
        "tensors": len(job.state),
        "rounds": options.rounds,
        "threads that copy and write": options.threads,
        "threads that compute": torch.get_num_threads(),
        "CPUs": os.cpu_count(),
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()),
        "system": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "Python": platform.python_version(),
        "torch": torch.__version__,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table; return 1 if a checkpoint was not what had been saved."""
    options = parsed(arguments)
    entries = {key: CONTENDERS[key] for key in options.contenders}
    allow_many_files()
    absent = {key: missing for key, entry in entries.items() if (missing := entry.missing())}
    job = Job(options.mib)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.dir)))
        stack.enter_context(process_group(directory))
        contenders = []
        for key, entry in entries.items():
            if key not in absent:
                contenders.append(stack.enter_context(closing(entry.make(job, options.threads))))
        floor = stack.enter_context(closing(Memcpy(job, options.threads)))
        bench = Bench(job, contenders, floor, directory)
        known = settings(job, options)
        bench.run(options.rounds)
        wrong = bench.check()
    told = "; ".join(f"{name}: {value}" for name, value in known.items())
    print(f"{told}.\n\n{table(bench.times, bench.floor)}")
    for key, modules in absent.items():
        print(f"\n{key}: skipped, {', '.join(modules)} not installed.")
    for name, tensors in wrong.items():
        print(f"\n{name}: {len(tensors)} tensors came back with other bits: {tensors[:9]}.")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        numbers = {
            "name": "stall", "table": f"{table(bench.times, bench.floor)}\n\n<sub>{told}.</sub>",
            "settings": known, "absent": absent, "wrong": wrong, "memcpy": bench.floor,
            "times": {one.name: asdict(one) for one in bench.times},
        }  # fmt: skip
        options.json.write_text(json.dumps(numbers, indent=1) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
