"""Save and load of one training state: ours beside its peers and the floor, in one run.

Here: the state, the contenders, the rounds, the table. Not here: what the numbers mean (README.md).
One process, CPU tensors. Each round runs every contender once, beginning with another one each
time, so that slow drifts of the machine fall on all alike.

Save is durable: it ends when the files are synced. Load is in place: it ends when the bytes are in
tensors that existed before.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from dist_ckpt import LoadOptions, SaveOptions, ShardedTensor, load, save

MIB = 1 << 20
THREADS = 2
State = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A way to save a state to a directory, and to load it into the tensors of another one."""

    name: str
    save: Callable[[State, Path], None]
    load: Callable[[State, Path], None]


def gpt_like_state(mib: int) -> State:
    """Return fp32 parameters of a decoder and the two Adam moments of each, about ``mib`` MiB."""
    width, vocabulary = (512, 8192) if mib >= 96 else (128, 2048)
    layer = {
        "attn.qkv.weight": (3 * width, width), "attn.qkv.bias": (3 * width,),
        "attn.proj.weight": (width, width), "attn.proj.bias": (width,),
        "mlp.up.weight": (4 * width, width), "mlp.up.bias": (4 * width,),
        "mlp.down.weight": (width, 4 * width), "mlp.down.bias": (width,),
        "ln_1.weight": (width,), "ln_1.bias": (width,),
        "ln_2.weight": (width,), "ln_2.bias": (width,),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (vocabulary, width)}
    nbytes = 12 * vocabulary * width
    per_layer = 12 * sum(torch.Size(shape).numel() for shape in layer.values())
    for number in range(max(1, round((mib * MIB - nbytes) / per_layer))):
        shapes |= {f"h.{number}.{name}": shape for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(0)
    return {
        f"{part}.{name}": torch.randn(shape, generator=generator)
        for part in ("model", "exp_avg", "exp_avg_sq")
        for name, shape in shapes.items()
    }


def ours() -> Contender:
    def sharded(state: State) -> dict[str, ShardedTensor]:
        return {key: ShardedTensor.from_rank_offsets(key, data) for key, data in state.items()}

    return Contender(
        name="dist-ckpt",
        save=lambda state, at: save(
            sharded(state), at / "c", options=SaveOptions(thread_count=THREADS)
        ),
        load=lambda state, at: load(
            sharded(state), at / "c", options=LoadOptions(thread_count=THREADS)
        ),
    )


def torch_dcp() -> Contender:
    import torch.distributed.checkpoint as dcp

    def save_dcp(state: State, at: Path) -> None:
        writer = dcp.FileSystemWriter(at / "c", thread_count=THREADS, sync_files=True)
        dcp.save(state, storage_writer=writer, no_dist=True)

    return Contender(
        name="torch DCP",
        save=save_dcp,
        load=lambda state, at: dcp.load(
            state, storage_reader=dcp.FileSystemReader(at / "c"), no_dist=True
        ),
    )


def torch_save() -> Contender:
    def save_file(state: State, at: Path) -> None:
        torch.save(state, at / "c.pt")
        sync(at / "c.pt")

    return Contender(
        name="torch.save",
        save=save_file,
        load=lambda state, at: copy_into(state, torch.load(at / "c.pt", mmap=True)),
    )


def safetensors() -> Contender:
    from safetensors.torch import load_file, save_file

    def save_tensors(state: State, at: Path) -> None:
        save_file(state, at / "c.safetensors")
        sync(at / "c.safetensors")

    return Contender(
        name="safetensors",
        save=save_tensors,
        load=lambda state, at: copy_into(state, load_file(at / "c.safetensors")),
    )


def floor() -> Contender:
    """The same bytes by pwrite and preadv, in as many files and threads; no format at all."""

    def groups(state: State) -> list[list[memoryview]]:
        views = [memoryview(t.reshape(-1).view(torch.uint8).numpy()) for t in state.values()]
        return [views[number::THREADS] for number in range(THREADS)]

    def write(path: Path, views: list[memoryview]) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        position = 0
        for view in views:
            while view.nbytes:
                done = os.pwrite(fd, view, position)
                view, position = view[done:], position + done  # noqa: PLW2901 - the rest of it
        os.fsync(fd)
        os.close(fd)

    def read(path: Path, views: list[memoryview]) -> None:
        fd = os.open(path, os.O_RDONLY)
        position = 0
        for view in views:
            while view.nbytes:
                done = os.preadv(fd, [view], position)
                view, position = view[done:], position + done  # noqa: PLW2901 - the rest of it
        os.close(fd)

    def run(job: Callable[[Path, list[memoryview]], None], state: State, at: Path) -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            paths = [at / f"{number}.raw" for number in range(THREADS)]
            list(pool.map(job, paths, groups(state)))

    def save_raw(state: State, at: Path) -> None:
        run(write, state, at)
        sync(at)

    return Contender(name="floor", save=save_raw, load=lambda state, at: run(read, state, at))


def sync(path: Path) -> None:
    """Make a file durable, and its name."""
    for one in (path, path.parent):
        fd = os.open(one, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def copy_into(state: State, loaded: State) -> None:
    for key, tensor in state.items():
        tensor.copy_(loaded[key])


def drop_from_cache(directory: Path) -> None:
    """Ask the kernel to forget the pages of all files below ``directory``."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


@contextmanager
def timed(times: list[float]) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    times.append(time.perf_counter() - begin)


def run_rounds(
    contenders: list[Contender], state: State, directory: Path, *, rounds: int, cold: bool
) -> dict[str, tuple[list[float], list[float]]]:
    """Return the save and load times of each contender. An extra first round is not counted."""
    times: dict[str, tuple[list[float], list[float]]] = {one.name: ([], []) for one in contenders}
    for number in range(rounds + 1):
        start = number % len(contenders)
        for contender in contenders[start:] + contenders[:start]:
            saves, loads = times[contender.name] if number else ([], [])
            at = directory / f"{number}-{contender.name.replace(' ', '-')}"
            at.mkdir()
            target = {key: torch.full_like(tensor, -1.0) for key, tensor in state.items()}
            os.sync()  # what others left to write is not ours to wait for
            with timed(saves):
                contender.save(state, at)
            if cold:
                drop_from_cache(at)
            with timed(loads):
                contender.load(target, at)
            assert all(torch.equal(target[key], tensor) for key, tensor in state.items())
            shutil.rmtree(at)
    return times


def table(times: dict[str, tuple[list[float], list[float]]], nbytes: int) -> str:
    """Return the medians as a Markdown table; the ratio is to the floor of the same run."""
    lines = [
        "| | save, s (min-max) | MiB/s | x floor | load, s (min-max) | MiB/s | x floor |",
        "|---|---|---|---|---|---|---|",
    ]
    floors = [statistics.median(one) for one in times["floor"]]
    for name, both in times.items():
        cells = [name]
        for seconds, base in zip(both, floors, strict=True):
            median = statistics.median(seconds)
            cells += [
                f"{median:.3f} ({min(seconds):.3f}-{max(seconds):.3f})",
                f"{nbytes / MIB / median:.0f}",
                f"{median / base:.2f}",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--mib", type=int, default=256, help="size of the state")
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds")
    parser.add_argument("--dir", type=Path, help="where to write; a temporary directory if absent")
    parser.add_argument("--cold", action="store_true", help="drop files from the page cache first")
    options = parser.parse_args()

    contenders = [ours(), torch_dcp(), torch_save()]
    if importlib.util.find_spec("safetensors"):
        contenders.append(safetensors())
    contenders.append(floor())
    state = gpt_like_state(options.mib)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        times = run_rounds(
            contenders, state, Path(directory), rounds=options.rounds, cold=options.cold
        )
    cache = "dropped by posix_fadvise before each load" if options.cold else "warm: just written"
    print(
        f"{nbytes / MIB:.0f} MiB in {len(state)} fp32 tensors, one process, {THREADS} threads a "
        f"contender where it has any; medians of {options.rounds} interleaved rounds; page cache "
        f"{cache}; torch {torch.__version__}, Python {platform.python_version()}, "
        f"{os.cpu_count()} CPUs, {platform.system()} {platform.release()}.\n"
    )
    print(table(times, nbytes))


if __name__ == "__main__":
    main()
