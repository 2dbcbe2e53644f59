"""Hooks and writers that checkpoint processes of tests import by name.

Here: stand-ins that record, wait or fail. Not here: tests. They are pickled to the process.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dist_ckpt.checkpoint_writer import CheckpointWriter, WriterHook
from dist_ckpt.types import RankInfo


class Recorder(WriterHook):
    """Appends a line to a file for each call, with whether the checkpoint was there."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def pre_commit(self, path: str, **kwargs: Any) -> None:
        self._note("pre", path, kwargs)

    def post_commit(self, path: str, **kwargs: Any) -> None:
        self._note("post", path, kwargs)

    def _note(self, what: str, path: str, kwargs: dict[str, Any]) -> None:
        there = Path(path, "metadata.json").exists()
        with self.file.open("a") as file:
            file.write(f"{what} {Path(path).name} {sorted(kwargs.items())} {there}\n")


class Quiet(WriterHook):
    """Does nothing; for hooks of which one half matters."""

    def pre_commit(self, path: str, **kwargs: Any) -> None:
        del path, kwargs

    def post_commit(self, path: str, **kwargs: Any) -> None:
        del path, kwargs


class Gate(Quiet):
    """Before the commit, waits at a pipe with a name until the test has opened and closed it."""

    def __init__(self, pipe: Path, names: tuple[str, ...]) -> None:
        self.pipe, self.names = pipe, names
        os.mkfifo(pipe)

    def pre_commit(self, path: str, **_: Any) -> None:
        if Path(path).name in self.names:
            with self.pipe.open("rb") as file:
                file.read()


class Fails(Quiet):
    """Raises before or after the commit of checkpoints with these names."""

    def __init__(self, *, before: tuple[str, ...] = (), after: tuple[str, ...] = ()) -> None:
        self.before, self.after = before, after

    def pre_commit(self, path: str, **_: Any) -> None:
        if Path(path).name in self.before:
            raise ValueError(f"no {Path(path).name}")

    def post_commit(self, path: str, **_: Any) -> None:
        if Path(path).name in self.after:
            raise ValueError(f"after {Path(path).name}")


class ByName(Gate):
    """Fails before the commit of ``bad``; waits at the pipe before that of ``gated``."""

    def __init__(self, pipe: Path) -> None:
        super().__init__(pipe, ("gated",))

    def pre_commit(self, path: str, **kwargs: Any) -> None:
        if Path(path).name == "bad":
            raise ValueError("no bad")
        super().pre_commit(path, **kwargs)


class NotePid(CheckpointWriter):
    """Writes the number of its process beside the checkpoint."""

    def write(self, state_dict: Any, path: Any, **kwargs: Any) -> None:
        Path(f"{path}.pid").write_text(str(os.getpid()))
        super().write(state_dict, path, **kwargs)


def note_pid_writer(rank_info: RankInfo) -> CheckpointWriter:
    return NotePid(rank_info=rank_info)
