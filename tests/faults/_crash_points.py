"""What is recorded for the crash points, and what must be true in every state a crash leaves.

Here: the program that saves (run as a script), ``SECTIONS`` and ``Law``. Not here: tests. Every
section makes a history in a folder of its own: two saves, a save again to the second path, where a
user has left a file, and the removal of the first checkpoint; or the second path alone. All values
of save n are n.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch

from dist_ckpt import LoadOptions, SaveOptions, ShardedTensor, save
from dist_ckpt.background import BackgroundOptions, BackgroundSaver
from dist_ckpt.errors import CorruptedCheckpointError
from dist_ckpt.manager import CheckpointManager
from dist_ckpt.recovery import latest, verify_checkpoint
from dist_ckpt.retention import KeepLast
from dist_ckpt.serialization import load_common_state_dict, load_plain_tensors
from dist_ckpt.storage.trees import fsync_directory
from dist_ckpt.testing import ThreadWorld
from dist_ckpt.testing.crashes import mark
from dist_ckpt.training_state import TrainingState, remove_checkpoint, save_training_state

__all__ = ["IN_ONE_PROCESS", "SECTIONS", "Law"]

NAMES = {1: "step_1", 2: "step_2", 3: "step_2"}
"""Where each save goes."""
AGAIN = (2, 3)
"""Saves to one path."""
NOTES = "notes.txt"
ONE_THREAD = LoadOptions(thread_count=1)


def synchronous(
    backend: Any, numbers: Sequence[int] = tuple(NAMES), **options: Any
) -> Callable[[Path], None]:
    """Return a history of two ranks."""

    def run(folder: Path) -> None:
        chosen = SaveOptions(backend=backend, **_options(folder, options))

        def save_one(number: int) -> None:
            world = ThreadWorld(2)
            world.run(lambda comm: save(_state(comm, number), folder / NAMES[number],
                                        communicator=comm, options=chosen))  # fmt: skip

        _history(folder, save_one, numbers)

    return run


def without_exchange(backend: Any) -> Callable[[Path], None]:
    """Return a history on a file system that cannot exchange two names in one step."""

    def run(folder: Path) -> None:
        refused = OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        with mock.patch("dist_ckpt.storage.commit._exchange", side_effect=refused):
            synchronous(backend, AGAIN)(folder)

    return run


def background(backend: Any, worker: Any) -> Callable[[Path], None]:
    """Return a history that a worker writes while the caller goes on."""

    def run(folder: Path) -> None:
        options = SaveOptions(backend=backend)
        model = torch.nn.Linear(3, 4)
        with BackgroundSaver(BackgroundOptions(worker=worker)) as saver:

            def save_one(number: int) -> None:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.fill_(number)
                state = TrainingState(models=[model], common={"value": number})
                save_training_state(folder / NAMES[number], state, options=options, saver=saver)
                saver.drain(timeout_secs=60)

            _history(folder, save_one)

    return run


def managed(folder: Path) -> None:
    """Two ranks save three steps; each save is followed by the removal of what is old."""

    def live(comm: Any) -> None:
        manager = CheckpointManager(folder, retention=KeepLast(1), communicator=comm)
        with manager:
            for number in NAMES:
                if comm.rank == 0:
                    mark(f"{folder.name}: begin {number}")
                manager.save(number, _state(comm, number), metrics={"loss": 1 / number})
                if comm.rank == 0:
                    mark(f"{folder.name}: saved {number}")

    ThreadWorld(2).run(live)


SECTIONS: dict[str, Callable[[Path], None]] = {
    "torch_dist": synchronous("torch_dist"),
    "zarr": synchronous("zarr"),
    "torch_dist without exchange": without_exchange("torch_dist"),
    "zarr without exchange": without_exchange("zarr"),
    "torch_dist from another folder": synchronous("torch_dist", AGAIN, staging_dir="staging"),
    "torch_dist in a process": background("torch_dist", "process"),
    "zarr in a process": background("zarr", "process"),
    "torch_dist in a thread": background("torch_dist", "thread"),
    "managed": managed,
}
IN_ONE_PROCESS = [name for name in SECTIONS if "a process" not in name]
"""What can be recorded without strace."""


def _options(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    return {name: folder / value if name == "staging_dir" else value
            for name, value in options.items()}  # fmt: skip


def _state(comm: Any, number: int) -> dict[str, Any]:
    data = torch.full((4,), float(number))
    return {
        "a": ShardedTensor.from_rank_offsets("a", data, (0, comm.rank, comm.size)),
        "value": number,
    }


def _history(
    folder: Path, save_one: Callable[[int], None], numbers: Sequence[int] = tuple(NAMES)
) -> None:
    for number in numbers:
        mark(f"{folder.name}: begin {number}")
        save_one(number)
        mark(f"{folder.name}: saved {number}")
        if number == 2:
            _leave_a_note(folder / NAMES[number])
            mark(f"{folder.name}: noted")
    mark(f"{folder.name}: remove")
    remove_checkpoint(folder / "step_1")
    mark(f"{folder.name}: removed")


def _leave_a_note(directory: Path) -> None:
    with (directory / NOTES).open("w") as file:
        file.write("mine")
        file.flush()
        os.fsync(file.fileno())
    fsync_directory(directory)


@dataclass(slots=True)
class Law:
    """In every state: ``latest`` gives a true checkpoint, the old or the new one; see ``check``.

    Attributes:
        section: Whose marks count.
        contents: What was found in a checkpoint with exactly these files, so that each is loaded
            once.
    """

    section: str
    names: ClassVar[Mapping[int | str, str]] = {**NAMES}
    contents: dict[str, int | str] = field(default_factory=dict)

    def check(self, folder: Path, marks: tuple[str, ...]) -> str | None:
        """Return what is wrong in a folder after a crash, or None."""
        told = [one.removeprefix(f"{self.section}: ") for one in marks]
        saved = max((int(one[6:]) for one in told if one.startswith("saved ")), default=0)
        begun = max((int(one[6:]) for one in told if one.startswith("begin ")), default=0)
        problem = self._check_each(folder, removed="removed" in told)
        if problem is not None:
            return problem
        found = latest(folder, options=ONE_THREAD)
        if found is None:
            return f"no checkpoint, and {saved} had been saved" if saved else None
        value = self._content(found)
        if value not in {saved, begun} - {0}:
            return f"{found.name} has {value}; {saved} was saved, {begun} begun"
        noted = "noted" in told and found.name != "step_1"
        if noted and (_where(found) / NOTES).read_text() != "mine":
            return f"{found.name} lost {NOTES}"
        damaged = [path.name for path in folder.rglob("*.damaged")]
        return f"set aside: {damaged}" if damaged else None

    def _check_each(self, folder: Path, *, removed: bool) -> str | None:
        """Nothing that looks like a checkpoint is half of one, or another one."""
        for path in sorted(folder.iterdir()):
            if path.name.startswith("step_") and (path / "metadata.json").exists():
                value = self._content(path)
                if path.name not in (self.names.get(value), f"step_{value}"):
                    return f"{path.name} has {value}"
        is_back = removed and (folder / "step_1").exists()
        return "step_1 was removed and is back" if is_back else None

    def _content(self, path: Path) -> int | str:
        digest = _digest(_where(path))
        if digest not in self.contents:
            try:
                verify_checkpoint(path, options=ONE_THREAD)
                self.contents[digest] = _value(path)
            except CorruptedCheckpointError as error:
                self.contents[digest] = f"damage: {error}"
        return self.contents[digest]


def _where(path: Path) -> Path:
    """Return where a checkpoint lies: there, or aside after a crash between two renames."""
    if path.exists():
        return path
    (aside,) = path.parent.glob("*.previous")
    return aside


def _value(path: Path) -> int:
    """Load all of a checkpoint; return the one value that everything in it has."""
    tensors = load_plain_tensors(path)
    values = {element for tensor in tensors.values() for element in tensor.flatten().tolist()}
    values |= set(_values_in(load_common_state_dict(path)))
    if len(values) != 1 or not tensors:
        raise AssertionError(f"a mixture: {values} in {sorted(tensors)}")
    return int(values.pop())


def _values_in(node: Any) -> Iterator[int]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from [value] if key == "value" else _values_in(value)


def _digest(directory: Path) -> str:
    found = hashlib.sha256(directory.name.encode())
    for path in sorted(directory.rglob("*")):
        found.update(f"{path.relative_to(directory)}\0".encode())
        if path.is_file():
            found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def main(folder: Path, *sections: str) -> None:
    for section in sections:
        (folder / section).mkdir()
        SECTIONS[section](folder / section)
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
