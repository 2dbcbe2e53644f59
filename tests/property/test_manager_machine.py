"""A folder of checkpoints against a model in memory: whatever is done to it, the newest is found.

The rules save, save again, prune, damage, die (of a kill at any operation that changes the disk, or
between two renames) and sweep, in any order. The invariant: ``latest`` is the newest good step of the
model, with the very bytes that were saved.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dist_ckpt import CorruptedCheckpointError, SaveOptions, ShardedTensor
from dist_ckpt.manager import CheckpointManager
from dist_ckpt.recovery import sweep
from dist_ckpt.retention import AnyOf, CheckpointInfo, KeepBest, KeepLast
from dist_ckpt.storage import commit
from dist_ckpt.storage.commit import Attempt, attempt_prefix, locate
from tests._samples import sample

POLICY = AnyOf(KeepLast(2), KeepBest(1, "loss"))
STEPS = st.integers(0, 5)
LOSSES = st.one_of(st.none(), st.integers(0, 3).map(float))
CHANGES = (
    "open", "pwrite", "ftruncate", "mkdir", "rename", "replace", "unlink", "rmdir", "link",
)  # fmt: skip
ONE_THREAD = SaveOptions(thread_count=1)

# What is done to a file, and what finds it: opening it, reading all of it; or it is not committed.
DAMAGES: dict[str, tuple[str, str]] = {
    "flip data": ("__0_0.distcp", "full"),
    "cut data": ("__0_0.distcp", "open"),
    "lose data": ("__0_0.distcp", "open"),
    "flip index": ("index.bin", "open"),
    "flip common": ("common.json", "open"),
    "flip manifest": ("manifest.json", "open"),
    "lose manifest": ("manifest.json", "open"),
    "cut marker": ("metadata.json", "open"),
    "lose marker": ("metadata.json", "marker"),
    "lose metrics": ("step.json", "open"),
}


@dataclass(frozen=True)
class Entry:
    """A checkpoint of the model."""

    value: float
    loss: float | None
    damage: str = ""
    has_name: bool = True  # in its manifest, by which it is known when it stands aside

    @property
    def is_found_by_files(self) -> bool:
        return self.damage in ("open", "marker")


class Killed(BaseException):
    """The process is gone: nothing it would do happens any more."""


class Disk:
    """Kills at the n-th operation that changes the disk; without an exchange of names if told."""

    def __init__(self) -> None:
        self.countdown: int | None = None
        self.exchanges = True
        self._patch = pytest.MonkeyPatch()
        for name in CHANGES:
            self._patch.setattr(os, name, self._watched(getattr(os, name)))
        self._patch.setattr(os, "fsync", lambda _: None)
        self._patch.setattr(commit, "_exchange", self._watched(self._exchange(commit._exchange)))

    def close(self) -> None:
        self._patch.undo()

    @contextlib.contextmanager
    def killed_after(self, count: int) -> Iterator[None]:
        """Kill behind ``count`` operations of what is done inside, if there are as many."""
        self.countdown = count
        try:
            yield
        except Killed:
            pass
        finally:
            self.countdown = None

    def _exchange(self, original: Callable[..., None]) -> Callable[..., None]:
        def exchange(a: Path, b: Path) -> None:
            if not self.exchanges:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            original(a, b)

        return exchange

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            reads = original is OPEN and not args[1] & (os.O_WRONLY | os.O_RDWR)
            if self.countdown is not None and not reads:
                if self.countdown == 0:
                    raise Killed
                self.countdown -= 1
            return original(*args, **kwargs)

        return call


OPEN = os.open


def state(value: float) -> dict[str, Any]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((3,), value)), "value": value}


class Folder(RuleBasedStateMachine):
    """``steps`` is what bears a name, ``aside`` what an old save left behind a newer one."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="machine-"))
        self.folder = self.root / "run"
        self.disk = Disk()
        self.steps: dict[int, Entry] = {}
        self.aside: dict[int, Entry] = {}
        self.clock = 0.0

    def teardown(self) -> None:
        self.disk.close()
        shutil.rmtree(self.root)

    @initialize(exchanges=st.booleans())
    def choose_the_file_system(self, exchanges: bool) -> None:
        self.disk.exchanges = exchanges

    def manager(self, *, prunes: bool = False) -> CheckpointManager:
        """A process started anew has a manager of its own."""
        retention = POLICY if prunes else None
        return CheckpointManager(self.folder, retention=retention, save_options=ONE_THREAD)

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step}"

    def new_entry(self, loss: float | None) -> Entry:
        self.clock += 1.0
        return Entry(self.clock, loss)

    # -- what is done, and what becomes of the model

    @rule(step=STEPS, loss=LOSSES, prunes=st.booleans())
    def save(self, step: int, loss: float | None, prunes: bool) -> None:
        entry = self.new_entry(loss)
        metrics = {} if loss is None else {"loss": loss}

        self.manager(prunes=prunes).save(step, state(entry.value), metrics=metrics)

        self.steps[step] = entry
        self.aside.pop(step, None)
        if prunes:
            self.expect_pruned(step)

    @rule(step=STEPS, loss=LOSSES, count=st.integers(0, 40))
    def save_and_be_killed(self, step: int, loss: float | None, count: int) -> None:
        old = self.steps.get(step)
        if old is not None and old.is_found_by_files:
            return  # is set aside first: another story
        entry = self.new_entry(loss)
        with self.disk.killed_after(count):
            self.manager().save(
                step, state(entry.value), metrics={} if loss is None else {"loss": loss}
            )

        found = self.value_at(step)
        assert found in (None if old is None else old.value, entry.value)
        if found == entry.value:
            self.steps[step] = entry
            leftover = self.aside.pop(step, None)
            if list(self.folder.glob(f"{attempt_prefix(self.path(step))}*.previous")):
                self.aside[step] = self.newest_aside(step, old, leftover)

    def newest_aside(self, step: int, old: Entry | None, older: Entry | None) -> Entry:
        for one in (old, older):
            if one is not None and self.value_in(self.asides(step)[-1]) == one.value:
                return one
        raise AssertionError("what stands aside was never saved")

    def asides(self, step: int) -> list[Path]:
        return commit.asides_of(self.path(step))

    @rule(count=st.integers(0, 30))
    def prune_and_be_killed(self, count: int) -> None:
        doomed = self.doomed(None)
        with self.disk.killed_after(count):
            self.manager(prunes=True).prune()

        for step in doomed:
            if not os.path.lexists(locate(self.path(step))):
                del self.steps[step]
                self.aside.pop(step, None)
            elif not self.asides(step):
                self.aside.pop(step, None)

    @rule()
    def prune(self) -> None:
        expected = self.doomed(None)

        assert self.manager(prunes=True).prune() == expected

        self.expect_pruned(None)

    @precondition(lambda self: self.steps)
    @rule(data=st.data(), how=st.sampled_from(sorted(DAMAGES)))
    def damage(self, data: st.DataObject, how: str) -> None:
        step = data.draw(st.sampled_from(sorted(self.steps)))
        if self.steps[step].damage:
            return
        name, found_by = DAMAGES[how]
        file = locate(self.path(step)) / name
        content = bytearray(file.read_bytes())
        if how.startswith("lose"):
            file.unlink()
        elif how.startswith("cut"):
            file.write_bytes(content[:-1])
        else:
            position = data.draw(st.integers(0, len(content) - 1))
            content[position] ^= 1 << data.draw(st.integers(0, 7))
            file.write_bytes(content)
        entry = replace(self.steps[step], damage=found_by)
        self.steps[step] = replace(
            entry,
            loss=None if name == "step.json" else entry.loss,
            has_name=name != "manifest.json",
        )

    @precondition(lambda self: self.steps)
    @rule(data=st.data())
    def die_between_two_renames(self, data: st.DataObject) -> None:
        """The name is gone, and the checkpoint stands aside: it is the same one still."""
        step = data.draw(st.sampled_from(sorted(self.steps)))
        path = self.path(step)
        if path.is_dir() and step not in self.aside:
            path.rename(path.with_name(f"{attempt_prefix(path)}{os.urandom(6).hex()}.previous"))

    @precondition(lambda self: self.steps)
    @rule(data=st.data())
    def die_behind_two_renames(self, data: st.DataObject) -> None:
        """The new one has the name, and the old one still stands aside: it must not come back."""
        step = data.draw(st.sampled_from(sorted(self.steps)))
        old, path = self.steps[step], self.path(step)
        if old.is_found_by_files:
            return  # is set aside first: another story
        shutil.copytree(locate(path), self.root / "old")
        entry = self.new_entry(None)
        self.manager().save(step, state(entry.value))
        name = f"{attempt_prefix(path)}{os.urandom(6).hex()}.previous"
        (self.root / "old").rename(path.with_name(name))
        self.steps[step], self.aside[step] = entry, old

    @rule(step=STEPS)
    def leave_an_attempt(self, step: int) -> None:
        attempt = Attempt.begin(self.path(step), None)
        (attempt.directory / "__0_0.distcp").write_bytes(b"half of it")

    @rule()
    def sweep(self) -> None:
        sweep(self.folder, older_than_secs=-60)  # this process lives: nothing is its leftover
        sweep(self.folder, older_than_secs=-60, any_owner=True)

        self.aside.clear()

    @rule()
    def find_the_newest(self) -> None:
        skipped: list[int] = []
        expected = None
        named = [step for step in sorted(self.steps, reverse=True) if self.is_named(step)]
        for step in named:
            if self.is_good(step):
                expected = step
                break
            skipped.append(step)
        manager = self.manager()
        if self.steps and expected is None:
            with pytest.raises(CorruptedCheckpointError):
                manager.latest()
            return

        found = manager.latest()

        assert found == (None if expected is None else self.path(expected))
        assert found is None or found.is_dir()
        for step in skipped:
            if self.steps[step].damage != "marker":
                del self.steps[
                    step
                ]  # set aside, with what stood behind it: that was no good either
                self.aside.pop(step, None)
        if expected is not None and self.steps[expected].damage:
            self.steps[expected] = self.aside.pop(expected)

    # -- the model

    def is_good(self, step: int) -> bool:
        """Whether it is, or is damaged and what it has replaced still stands aside and is."""
        damage, behind = self.steps[step].damage, self.aside.get(step)
        is_behind = behind is not None and not behind.damage
        return not damage or (damage != "marker" and is_behind)

    def is_named(self, step: int) -> bool:
        return self.steps[step].has_name or self.path(step).is_dir()

    def is_listed(self, step: int) -> bool:
        return self.steps[step].damage != "marker" and self.is_named(step)

    def doomed(self, saved: int | None) -> list[int]:
        """What a pruning removes."""
        infos = [
            CheckpointInfo(step=step, metrics={} if one.loss is None else {"loss": one.loss})
            for step, one in sorted(self.steps.items())
            if self.is_listed(step)
        ]
        while infos and self.steps[infos[-1].step].is_found_by_files:
            infos.pop()
        if not infos:
            return []
        kept = {*POLICY.keep(infos), infos[-1].step, saved}
        return [one.step for one in infos if one.step not in kept]

    def expect_pruned(self, saved: int | None) -> None:
        for step in self.doomed(saved):
            del self.steps[step]
            self.aside.pop(step, None)

    def value_at(self, step: int) -> float | None:
        where = locate(self.path(step))
        return self.value_in(where) if where.is_dir() else None

    def value_in(self, directory: Path) -> float:
        """Read the common part behind the library's back."""
        import json

        value: float = json.loads((directory / "common.json").read_text())["document"]["value"]
        return value

    @invariant()
    def the_newest_good_one_is_found_and_true(self) -> None:
        """Without setting anything aside: that is a rule of its own."""
        good = [step for step, entry in self.steps.items() if not entry.damage]
        if not good:
            return
        manager = self.manager()
        request = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(3))}

        loaded = manager.load(request, step=max(good))

        value = self.steps[max(good)].value
        assert loaded["value"] == value
        assert torch.equal(loaded["w"], torch.full((3,), value))

    @invariant()
    def what_is_committed_is_listed(self) -> None:
        assert self.manager().steps() == sorted(filter(self.is_listed, self.steps))


Folder.TestCase.settings = settings(
    max_examples=sample(15, 160),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestFolder = Folder.TestCase
