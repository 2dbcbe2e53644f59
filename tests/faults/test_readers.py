"""A re-save between any two steps of a reader: the old, the new, or an error that says so."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_ckpt import (
    CheckpointNotFoundError,
    LoadOptions,
    SaveOptions,
    ShardedTensor,
    load,
    load_common_state_dict,
    load_plain_tensors,
    save,
)
from dist_ckpt.storage import LocalStore, commit


def state(value: float, size: int = 64) -> dict[str, Any]:
    # Sizes differ between steps, so that files of the two cannot be taken for each other by luck.
    extra = "x" * int(value * 100)
    tensors = {
        k: ShardedTensor.from_rank_offsets(k, torch.full((size,), value)) for k in ("a", "b", "c")
    }
    return {**tensors, "value": value, "extra": extra, "plain": torch.full((3,), value)}


def by_load(path: Path) -> set[float]:
    loaded = load(state(0.0), path, options=LoadOptions(thread_count=1))
    tensors = {float(v) for k in ("a", "b", "c", "plain") for v in loaded[k]}
    return tensors | {loaded["value"], len(loaded["extra"]) / 100}


def by_common(path: Path) -> set[float]:
    common = load_common_state_dict(path)
    return {common["value"], len(common["extra"]) / 100, *map(float, common["plain"])}


def by_plain(path: Path) -> set[float]:
    return {float(v) for tensor in load_plain_tensors(path).values() for v in tensor}


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
@pytest.mark.parametrize("read", [by_load, by_plain, by_common])
def test_a_save_between_any_two_steps_of_a_reader(  # noqa: C901 - hook, saves and reader in one
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    read: Callable[[Path], set[float]],
    *,
    exchange: bool,
) -> None:
    """Never a mixture, and never corruption that is none."""
    if not exchange:

        def refused(a: Path, b: Path) -> None:
            raise OSError(errno.EINVAL, "no exchange")

        monkeypatch.setattr(commit, "_exchange", refused)
    path = tmp_path / "c"
    steps: list[str] = []
    when = -1
    busy = False

    def hooked(name: str) -> None:
        original = getattr(LocalStore, name)

        def call(self: LocalStore, *args: Any, **kwargs: Any) -> Any:
            nonlocal busy
            if not busy:
                steps.append(name)
                if len(steps) - 1 == when:
                    busy = True
                    save(state(2.0), path, options=SaveOptions(thread_count=1))
                    busy = False
            return original(self, *args, **kwargs)

        monkeypatch.setattr(LocalStore, name, call)

    for name in ("read", "read_ranges", "nbytes"):
        hooked(name)
    outcomes = []
    for number in range(60):
        busy, when = True, number
        save(state(1.0), path, options=SaveOptions(thread_count=1))
        busy = False
        steps.clear()
        try:
            values = read(path)
        except CheckpointNotFoundError as error:
            assert "was replaced" in str(error)  # noqa: PT017 - either outcome is right
            outcomes.append("replaced")
            continue
        assert values in ({1.0}, {2.0}), (number, steps)
        outcomes.append(str(values.pop()))
        if len(steps) <= number:
            break

    assert outcomes[0] == "2.0"
    assert outcomes[-1] == "1.0"
    assert len(outcomes) < 60
