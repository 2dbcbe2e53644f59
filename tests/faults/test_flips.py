"""Damage of every kind and place: a load raises an error of ours, or what it returns is true.

Every byte of every file of a small checkpoint is changed (a seeded sample of them; all in the
soak run and with ``DIST_CKPT_FLIPS=all``, or a number of them), files are cut, lengthened, emptied, removed, swapped,
and taken from another step. What became of them is printed.
"""

from __future__ import annotations

import collections
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_ckpt import (
    CheckpointingException,
    LoadOptions,
    SaveOptions,
    ShardedObject,
    ShardedTensor,
    load,
    save,
)
from dist_ckpt.recovery import verify_checkpoint
from dist_ckpt.serialization import single_process
from tests._samples import IS_SOAK, sample

pytestmark = pytest.mark.sampled

FORMATS = {"torch_dist": ("torch_dist", 1), "zarr 1": ("zarr", 1), "zarr 2": ("zarr", 2)}
SEED = 20260
FLIPS = 500
"""Of each format, unless told otherwise."""
PARTS = sample(2, 8)
"""Tests that they are shared among: also all of them take no test longer than it may."""
VERIFIED = 8
"""One in so many flips is also shown to ``verify_checkpoint``, which reads everything."""
CUTS = sample(15, 40)
"""Lengths that a file is cut to, if it has more."""

State = dict[str, Any]


def state(step: int) -> State:
    generator = torch.Generator().manual_seed(step)
    return {
        "w": torch.randn(6, 5, generator=generator),
        "h": torch.randn(7, generator=generator).to(torch.bfloat16),
        "n": torch.tensor(step),
        "o": {"seed": step, "at": (1, b"xyz")},
        "common": {"step": step, "t": torch.arange(step, step + 3), "lr": 0.25},
    }


def request(values: State) -> State:
    asked: State = {
        key: ShardedTensor.from_rank_offsets(key, torch.full_like(value, -1))
        for key, value in values.items()
        if isinstance(value, torch.Tensor)
    }
    return asked | {"o": ShardedObject("o", None, (1,), (0,))}


def saved(path: Path, form: str, step: int) -> State:
    values = state(step)
    sharded: State = {
        key: ShardedTensor.from_rank_offsets(key, value)
        for key, value in values.items()
        if isinstance(value, torch.Tensor)
    }
    sharded |= {"o": ShardedObject("o", values["o"], (1,), (0,)), "common": values["common"]}
    save(sharded, path, FORMATS[form], options=SaveOptions())
    return values


def same(a: Any, b: Any) -> bool:
    """Bit by bit, type by type."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        is_alike = (a.shape, a.dtype) == (b.shape, b.dtype)
        return is_alike and torch.equal(
            a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)
        )
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


class Damaged:
    """A checkpoint that is damaged and mended again and again; counts what became of it."""

    def __init__(self, root: Path, form: str) -> None:
        self.path = root / "step_1"
        self.values = saved(self.path, form, 1)
        self.other = root / "step_2"
        saved(self.other, form, 2)
        self.files = sorted(one for one in self.path.rglob("*") if one.is_file())
        self.ends: collections.Counter[str] = collections.Counter()

    def name(self, file: Path) -> str:
        return file.relative_to(self.path).as_posix()

    def loaded(self, what: str) -> None:
        """Load all there is; anything but the truth or an error of ours fails the test."""
        try:
            found = load(request(self.values), self.path, options=LoadOptions(thread_count=1))
        except CheckpointingException as error:
            self.ends[type(error).__name__] += 1
            return
        assert same(found, self.values), f"{what}: loaded something else"
        self.ends["unaffected"] += 1

    def verified(self, what: str) -> None:
        """Look at every byte: whatever is changed must be found."""
        with pytest.raises(CheckpointingException):
            verify_checkpoint(self.path, communicator=single_process())
            pytest.fail(f"{what}: not found by verify_checkpoint")

    def tell(self, title: str) -> None:
        told = ", ".join(f"{count} {end}" for end, count in self.ends.most_common())
        print(f"{title}: {self.ends.total()} tried: {told}")


@pytest.fixture(params=FORMATS)
def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Damaged]:
    one = Damaged(tmp_path, request.param)
    one.loaded("nothing")
    verify_checkpoint(one.path, communicator=single_process())
    assert one.ends == {"unaffected": 1}
    one.ends.clear()
    yield one
    one.tell(f"{request.node.name}")


def places(one: Damaged, part: int) -> list[tuple[Path, int]]:
    """Return which bytes are changed: a part of all, or of a sample of them."""
    everything = [(file, at) for file in one.files for at in range(file.stat().st_size)]
    asked = os.environ.get("DIST_CKPT_FLIPS", "all" if IS_SOAK else str(FLIPS))
    count = len(everything) if asked == "all" else min(int(asked), len(everything))
    chosen = sorted(random.Random(SEED).sample(everything, count))  # noqa: S311 - no secret
    return chosen[part::PARTS]


@pytest.mark.parametrize("part", range(PARTS))
def test_every_flipped_byte(damaged: Damaged, part: int) -> None:
    """None changes what is loaded, and none ends in anything but an error of ours."""
    rng = random.Random(part)  # noqa: S311 - no secret
    chosen = places(damaged, part)
    for number, (file, at) in enumerate(chosen):
        what = f"{damaged.name(file)}, byte {at}"
        with file.open("r+b", buffering=0) as opened:
            byte = os.pread(opened.fileno(), 1, at)
            os.pwrite(opened.fileno(), bytes([byte[0] ^ rng.randrange(1, 256)]), at)
            damaged.loaded(what)
            if number % VERIFIED == 0:
                damaged.verified(what)
            os.pwrite(opened.fileno(), byte, at)
    damaged.loaded("mended")
    assert damaged.ends.total() == len(chosen) + 1
    assert damaged.ends["CorruptedCheckpointError"] > len(chosen) // 4


def changed(
    one: Damaged, file: Path, data: bytes | None, what: str, *, verify: bool = True
) -> None:
    """Try a file with another content, None for none, and put the old one back."""
    old = file.read_bytes()
    if data is None:
        file.unlink()
    else:
        file.write_bytes(data)
    try:
        one.loaded(f"{one.name(file)} {what}")
        if verify and data != old:
            one.verified(f"{one.name(file)} {what}")
    finally:
        file.write_bytes(old)


def test_every_length(damaged: Damaged) -> None:
    """Files that are cut anywhere, and files with something behind their end."""
    for file in damaged.files:
        data = file.read_bytes()
        lengths = list(range(len(data)))
        if len(lengths) > CUTS:
            rng = random.Random(SEED)  # noqa: S311 - no secret
            lengths = sorted({0, 1, len(data) - 1, *rng.sample(lengths, CUTS)})
        for length in lengths:
            changed(damaged, file, data[:length], f"cut to {length}", verify=length % 4 == 0)
        for more in (b"\0", b" ", b"\n", b"}", data):
            changed(damaged, file, data + more, f"with {len(more)} bytes more")
    assert damaged.ends["CorruptedCheckpointError"]


def test_files_that_are_other_files(damaged: Damaged) -> None:
    """Swapped, removed, emptied, one in the place of another, or of another step's checkpoint."""
    contents = {file: file.read_bytes() for file in damaged.files}
    for file in damaged.files:
        # Nothing of ours is in .metadata that is not in the index: without it all is whole.
        is_needed = file.name != ".metadata"
        changed(damaged, file, None, "removed", verify=is_needed)
        changed(damaged, file, b"", "emptied")
        changed(damaged, file, bytes(len(contents[file])), "zeroed")
        theirs = damaged.other / damaged.name(file)
        if theirs.exists():
            changed(damaged, file, theirs.read_bytes(), "of another step")
        for other, data in contents.items():
            if other != file and data != contents[file]:
                changed(damaged, file, data, f"is {damaged.name(other)}", verify=False)
    assert damaged.ends["CorruptedCheckpointError"]


def test_pairs_of_files_that_are_swapped(damaged: Damaged) -> None:
    """Two files have each other's names."""
    for i, first in enumerate(damaged.files):
        for second in damaged.files[:i]:
            one, two = first.read_bytes(), second.read_bytes()
            if one == two:
                continue
            second.write_bytes(one)
            try:
                changed(damaged, first, two, f"swapped with {damaged.name(second)}", verify=False)
            finally:
                second.write_bytes(two)
    assert set(damaged.ends) == {"CorruptedCheckpointError"}


MIXTURES: dict[str, Callable[[str], bool]] = {
    "data": lambda name: not name.endswith(".json") or "/" in name,
    "documents": lambda name: name in ("index.json", "index.bin", "common.json", ".metadata"),
    "all but the manifest": lambda name: name != "manifest.json",
    "manifest": lambda name: name == "manifest.json",
}


@pytest.mark.parametrize("mixture", MIXTURES)
def test_mixtures_of_two_steps(damaged: Damaged, mixture: str) -> None:
    """Several files of another step at once: neither of the two is told as the other."""
    for file in damaged.files:
        theirs = damaged.other / damaged.name(file)
        if MIXTURES[mixture](damaged.name(file)) and theirs.exists():
            shutil.copyfile(theirs, file)

    damaged.loaded(mixture)
    damaged.verified(mixture)

    assert "unaffected" not in damaged.ends
