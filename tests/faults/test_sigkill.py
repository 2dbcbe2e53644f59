"""Ranks and workers that are killed at any time: after a restart, the newest checkpoint is true."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import math
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dist_ckpt import LoadOptions, SaveOptions
from dist_ckpt._worker.worker import Worker
from dist_ckpt.background import BackgroundOptions, BackgroundSaver
from dist_ckpt.errors import CheckpointingException
from dist_ckpt.recovery import latest
from dist_ckpt.serialization import all_processes, load_plain_tensors
from dist_ckpt.testing.faults import Kill, kill_after
from dist_ckpt.training_state import (
    CheckpointView,
    TrainingState,
    remove_checkpoint,
    save_training_state,
)
from tests._samples import sample
from tests.faults._background import worker_pid
from tests.multiprocess._world import RankOutcome, run_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.sampled]

ROUNDS = sample(20, 120, variable="DIST_CKPT_KILL_ROUNDS")
"""How many rounds all teams make together."""
SEED = int(os.environ.get("DIST_CKPT_KILL_SEED", "20261"))

PATIENCE_SECS = {"sync": 2.0, "async": 4.0}
"""How long ranks wait for one that does not come, once somebody may be killed."""
START_SECS = 60.0
"""How long before: what is called for the first time imports much, and thirty processes do."""
GRACE_SECS = 0.5
LATE_SECS = 20.0
"""How much later than that an error may come on a machine that runs thirty processes at once."""
SAVES = {"sync": 30, "async": 12}
LENGTH = 2
"""How many rounds follow each other."""

Victim = Literal["rank", "worker"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """Ranks that make one job, and who of them dies. Several teams live at a time.

    Attributes:
        number: Which.
        first: Its first process.
        size: How many ranks it has.
        is_async: Whether it saves in the background.
        backend: Its format.
    """

    number: int
    first: int
    size: int
    is_async: bool
    backend: Literal["torch_dist", "zarr"]

    @property
    def patience_secs(self) -> float:
        return PATIENCE_SECS["async" if self.is_async else "sync"]

    @property
    def saves(self) -> int:
        return SAVES["async" if self.is_async else "sync"]


def teams(sizes: tuple[int, ...], *, is_async: bool) -> tuple[Team, ...]:
    """Return teams of these sizes; each fourth one saves as zarr."""
    return tuple(
        Team(
            number=number,
            first=sum(sizes[:number]),
            size=size,
            is_async=is_async,
            backend="zarr" if number % 4 == 3 else "torch_dist",
        )
        for number, size in enumerate(sizes)
    )


TEAMS = {
    "sync": teams((2, 3, 2, 2, 3, 2, 2, 3, 2, 2, 2, 3), is_async=False),
    "async": teams((2, 2, 3, 2, 2, 2, 2), is_async=True),
}
SHARES = {"sync": 0.8, "async": 0.2}
"""How the rounds are shared out: what waits in the background for the dead takes longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a rank that survived has seen of a round.

    Attributes:
        resumed: Step that the round began from; 0 for none.
        victim: Who was to die, and which rank it was or belonged to.
        has_killed: Whether this rank did it.
        error: What was raised here at last.
        late_secs: How long after the kill that was; 0 for all but the killer.
    """

    resumed: int
    victim: tuple[Victim, int] | None = None
    has_killed: bool = False
    error: str | None = None
    late_secs: float = 0.0


class Round:
    """One life of one rank: resume, then save until somebody is killed."""

    def __init__(self, team: Team, rank: int, folder: Path, seed: int) -> None:
        self.team, self.rank, self.folder = team, rank, folder
        self.dice = random.Random(seed)  # noqa: S311 - repeatable; alike on all ranks
        self.comm = all_processes(timeout_secs=START_SECS)
        self.model = torch.nn.Linear(40, 30)
        self.options = SaveOptions(timeout_secs=START_SECS, thread_count=1, backend=team.backend)
        self.saver: BackgroundSaver | None = None

    def resume(self) -> int:
        """Return the newest step, after a look at every value of it."""
        found = latest(self.folder, communicator=self.comm, options=LoadOptions(thread_count=1))
        known = max((int(line) for path in self.folder.glob("ledger-*")
                     for line in path.read_text().splitlines()), default=0)  # fmt: skip
        if found is None:
            assert known == 0, f"no checkpoint, and {known} was committed"
            return 0
        step = int(found.name.removeprefix("step_"))
        assert step >= known, f"{found.name}, and {known} was committed"
        tensors = load_plain_tensors(found)
        values = {v for one in tensors.values() for v in one.unique().tolist()}
        assert values == {float(step)}, f"{found.name} has {values}"
        assert CheckpointView.open(found, communicator=self.comm).common == {"step": step}
        assert not list(self.folder.glob("*.damaged"))
        return step

    def run(self) -> Seen:
        """Live until somebody is killed, or the saves are made. Collective."""
        resumed = self.resume()
        kinds: tuple[Victim, ...] = ("rank", "worker") if self.team.is_async else ("rank",)
        victim = self.dice.choice(kinds), self.dice.randrange(self.team.size)
        killer = (victim[1] + self.dice.randrange(1, self.team.size)) % self.team.size
        part = self.dice.random()
        with contextlib.ExitStack() as stack:
            if self.team.is_async:
                options = BackgroundOptions(drain_timeout_secs=20)
                self.saver = BackgroundSaver(options, timeout_secs=20)
                stack.callback(self._close)
            secs = self._warm_up(resumed + 1)
            pid = self._agree_on(victim)
            self.comm = all_processes(timeout_secs=self.team.patience_secs)
            self.options = dataclasses.replace(self.options, timeout_secs=self.team.patience_secs)
            kill, error = Kill(), None
            if killer == self.rank:
                kill = stack.enter_context(kill_after(pid, part * 3 * secs))
            try:
                for step in range(resumed + 1, resumed + self.team.saves):
                    self._save(step)
                    self._tidy_up(step)
                if self.saver is not None:
                    self.saver.drain()
            except CheckpointingException as caught:
                error = f"{type(caught).__name__}: {caught}"
            late = time.monotonic() - kill.at if kill.at and error else 0.0
        return Seen(
            resumed=resumed,
            victim=victim,
            has_killed=kill.at is not None,
            error=error,
            late_secs=late,
        )

    def _warm_up(self, step: int) -> float:
        """Save twice; return how long the second save took."""
        self._save(step)
        started = time.monotonic()
        self._save(step)
        if self.saver is not None:
            self.saver.drain()
        return time.monotonic() - started

    def _agree_on(self, victim: tuple[Victim, int]) -> int:
        kind, rank = victim
        own = worker_pid(self.saver) if kind == "worker" and self.saver else os.getpid()
        pids: list[int] = self.comm.map_reduce("choosing", lambda: own or 0, list)
        return pids[rank]

    def _save(self, step: int) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(step)
        save_training_state(
            self.folder / f"step_{step}",
            TrainingState(models=[self.model], common={"step": step}, replicas="equal"),
            options=self.options,
            communicator=self.comm,
            saver=self.saver,
            on_settled=lambda error: self._note(step) if error is None else None,
        )
        if self.saver is None:
            self._note(step)

    def _note(self, step: int) -> None:
        """Write down that a step is committed: what is written survives this process."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        descriptor = os.open(self.folder / f"ledger-{self.rank}", flags)
        os.write(descriptor, f"{step}\n".encode())
        os.close(descriptor)

    def _tidy_up(self, step: int) -> None:
        """Remove what is old enough to be replaced for certain, behind the commit."""
        if self.rank == 0 and self.saver is None:
            remove_checkpoint(self.folder / f"step_{step - 2}")
        elif self.saver is not None:
            old = self.folder / f"step_{step - 3}"
            if self.rank == 0:
                self.saver.after_commit(lambda: remove_checkpoint(old), what="removing")
            self.saver.poll()

    def _close(self) -> None:
        assert self.saver is not None
        with contextlib.suppress(CheckpointingException):
            self.saver.close()


@contextlib.contextmanager
def joined(team: Team, rank: int) -> Iterator[None]:
    """Be a rank of the team's process group."""
    limit = dt.timedelta(seconds=60)
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    prefixed = dist.PrefixStore(f"team{team.number}", store)
    dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=team.size, timeout=limit)
    yield


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """Wait for the dead as briefly as a test can afford."""
    with (
        mock.patch("dist_ckpt._comm.store._GRACE_SECS", GRACE_SECS),
        mock.patch("dist_ckpt._worker.queue._AGREE_SECS", PATIENCE_SECS["async"]),
        mock.patch.dict(Worker.__init__.__kwdefaults__, hub_grace_secs=PATIENCE_SECS["sync"]),
    ):
        yield


def live(process: int, _: int, group: str, folder: str, seed: int) -> Seen:
    """Be a rank of a team for one round; without a seed, just resume."""
    team = next(team for team in TEAMS[group] if 0 <= process - team.first < team.size)
    rank, home = process - team.first, Path(folder) / f"team{team.number}"
    home.mkdir(exist_ok=True)
    with joined(team, rank), impatient():
        one = Round(team, rank, home, seed * 100 + team.number)
        return one.run() if seed else Seen(resumed=one.resume())


def check_team(team: Team, outcomes: Sequence[RankOutcome], tally: Counter[str]) -> None:
    """Who was to die is dead, all others live, and are told who is missing, in time."""
    for one in outcomes:
        assert one.ok or (not one.finished and one.exit_code == -signal.SIGKILL), one.describe()
    seen = {one.rank - team.first: one.value for one in outcomes if one.ok}
    dead = [number for number in range(team.size) if number not in seen]
    ((kind, rank),) = {one.victim for one in seen.values()}
    # Whoever has told how it was, and dies then, was not killed at work.
    is_due = kind == "worker" or dead == [rank]
    has_killed = is_due and any(one.has_killed for one in seen.values())
    told = {number: one.error for number, one in seen.items()}
    tally["rounds"] += 1
    tally[f"{kind} killed" if has_killed else "nobody killed"] += 1
    tally["raised"] += any(told.values())
    assert dead == ([rank] if has_killed and kind == "rank" else []), outcomes
    # Who has made all its saves before owes no error. Of a worker that dies between two saves, and
    # is replaced, nobody is told; else all are, or none.
    assert dead or len({error is None for error in told.values()}) == 1, told
    for error in told.values():
        assert error is None or not has_killed or names(error, rank), told
    assert max(one.late_secs for one in seen.values()) < team.patience_secs + LATE_SECS


def names(error: str, rank: int) -> bool:
    """Whether an error says of a rank that it is missing, or its worker."""
    missing = re.search(r"ranks \[([\d, ]+)\] of \d+ did not arrive", error)
    is_missing = missing is not None and str(rank) in missing[1].split(", ")
    return is_missing or f"rank {rank}" in error


def chains() -> list[tuple[str, int]]:
    """Return what is run: a group of teams, and a seed; each for some rounds, one behind the other.

    Few rounds in one test: what hangs is to be found soon.
    """
    return [
        (group, SEED + number * LENGTH)
        for group, members in TEAMS.items()
        for number in range(math.ceil(SHARES[group] * ROUNDS / len(members) / LENGTH))
    ]


@pytest.mark.parametrize(("group", "seed"), chains())
def test_the_newest_checkpoint_survives_any_kill(group: str, seed: int, tmp_path: Path) -> None:
    """Each round resumes from what the one before has left, and is the judge of it."""
    tally, members = Counter[str](), TEAMS[group]

    def one_round(seed: int) -> list[RankOutcome]:
        return run_ranks(
            live, sum(team.size for team in members), group, str(tmp_path), seed,
            expect_errors=True, init_process_group=False, timeout_secs=300,
        )  # fmt: skip

    for number in range(LENGTH):
        outcomes = one_round(seed + number)
        for team in members:
            check_team(team, outcomes[team.first : team.first + team.size], tally)
    for one in one_round(0):
        assert one.ok, one.describe()

    print(f"\n{group}: {dict(tally)}")
    # That it kills at work at all: how often depends on how busy the machine is.
    assert tally["rank killed"] + tally["worker killed"] > tally["rounds"] // 4
    assert tally["raised"] > tally["rounds"] // 6
