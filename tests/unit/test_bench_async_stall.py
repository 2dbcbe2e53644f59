"""The stall benchmark: what it compares, and that it finds a save that lies."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODULES = ("async_job", "async_peers", "async_contenders", "bench_async_stall")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The script as a module, with rounds that take next to no time."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("bench_async_stall")
    monkeypatch.setattr(module, "ACCUMULATION_SECS", 0.01)
    monkeypatch.setattr(module, "STEP_SECS", 1e-5)
    monkeypatch.setattr(module, "CLEAN_STEPS", 2)
    monkeypatch.setattr(module, "allow_many_files", lambda: None)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    yield module
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def job(bench: Any) -> Any:
    return bench.Job(1)


class Fake:
    """Saves into memory; ``lie`` keeps the tensors themselves instead of copies."""

    name, lie = "fake", False

    def __init__(self, job: Any, _threads: int = 2) -> None:
        self.job, self.calls = job, []
        self.saved: dict[str, torch.Tensor] = {}

    def save(self, at: Path) -> None:
        assert at.parent.is_dir()
        assert not at.exists()
        self.calls.append("save")
        state = self.job.state
        self.saved = state if self.lie else {name: one.clone() for name, one in state.items()}

    def guard(self) -> None:
        self.calls.append("guard")

    def is_done(self) -> bool:
        self.calls.append("is_done")
        return True

    def finish(self) -> None:
        self.calls.append("finish")

    def load(self, _at: Path) -> dict[str, torch.Tensor]:
        return self.saved

    def close(self) -> None:
        self.calls.append("close")


def test_the_state_is_the_live_tensors_of_the_job(job: Any) -> None:
    parameters = {f"model.{name}": one for name, one in job.model.named_parameters()}

    assert len(job.state) == 4 * len(parameters)
    for name, parameter in parameters.items():
        assert job.state[name].data_ptr() == parameter.data_ptr()
    assert job.nbytes == sum(one.nbytes for one in job.state.values())


def test_every_tensor_changes_between_two_saves(job: Any) -> None:
    before = {name: one.clone() for name, one in job.state.items()}

    job.change()

    assert not [name for name, one in job.state.items() if torch.equal(one, before[name])]


def test_bits_are_compared_and_not_numbers(bench: Any) -> None:
    nan, zero = torch.tensor([float("nan")]), torch.tensor(0.0)
    expected = {"nan": nan, "zero": zero, "gone": zero, "short": torch.zeros(2)}
    found = {"nan": nan.clone(), "zero": -zero, "new": zero, "short": torch.zeros(1)}

    assert list(bench.differing(found, expected)) == ["gone", "new", "short", "zero"]


def test_each_round_begins_with_another_contender(bench: Any, job: Any, tmp_path: Path) -> None:
    order: list[str] = []

    class Told(Fake):
        def save(self, at: Path) -> None:
            super().save(at)
            order.append(self.name)

    contenders = [Told(job), Told(job), Told(job)]
    for contender, name in zip(contenders, "abc", strict=True):
        contender.name = name

    measured = bench.Bench(job, contenders, Fake(job), tmp_path)
    measured.run(rounds=1)

    assert "".join(order) == "abc" + "bca" + "abc"
    assert [len(one.blocked) for one in measured.times] == [1, 1, 1]
    assert [len(one.lost) for one in measured.times] == [1, 1, 1]
    assert all(one.first > 0 for one in measured.times)
    assert not list(tmp_path.iterdir())


def test_the_state_changes_only_after_the_guard(bench: Any, job: Any, tmp_path: Path) -> None:
    contender = Fake(job)

    assert bench.Bench(job, [contender], Fake(job), tmp_path).check() == {}

    assert contender.calls == ["save", "guard", "finish"]


def test_a_save_that_kept_no_copy_is_found(bench: Any, job: Any, tmp_path: Path) -> None:
    contender = Fake(job)
    contender.lie = True

    wrong = bench.Bench(job, [contender], Fake(job), tmp_path).check()

    assert wrong == {"fake": sorted(job.state)}


def test_a_memcpy_of_the_same_bytes_comes_before_each_save(
    bench: Any, job: Any, tmp_path: Path
) -> None:
    contender, floor = Fake(job), Fake(job)
    floor.calls = contender.calls = []

    measured = bench.Bench(job, [contender], floor, tmp_path)
    measured.run(rounds=1)

    assert contender.calls.count("save") == 1 + 2 * 2 + 1  # memory touched; stalls; training
    assert len(measured.floor) == 3
    assert measured.times[0].memcpy == measured.floor[2:]


def test_the_memcpy_copies_all_bits(bench: Any, job: Any, tmp_path: Path) -> None:
    memcpy = bench.Memcpy(job, 2)

    memcpy.save(tmp_path)
    expected = {name: one.clone() for name, one in job.state.items()}
    job.change()
    found = memcpy.load(tmp_path)
    memcpy.close()

    assert list(bench.differing(found, expected)) == []


def test_the_table_has_medians_ranges_and_ratios_to_the_memcpy(bench: Any) -> None:
    one = bench.Times(
        "a", first=0.5, blocked=[0.3, 0.2, 0.4], memcpy=[0.1, 0.2, 0.1], durable=[2.0],
        clean=[50.0, 60.0], in_flight=[40.0, 30.0], lost=[0.25],
    )  # fmt: skip

    head, rule, first, second = bench.table([one], [0.125, 0.1, 0.2]).splitlines()

    assert head.count("|") == rule.count("|") == first.count("|") == second.count("|") == 8
    assert first == (
        "| a | 0.500 | 0.300 (0.200-0.400) | 3.00 (1.00-4.00) | 2.00 (2.00-2.00) "
        "| 65 (50-80) % | 0.25 (0.25-0.25) |"
    )
    assert second == "| memcpy (floor) | 0.125 | 0.150 (0.100-0.200) | 1 | - | - | - |"


def test_what_is_not_installed_is_skipped_with_a_line(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    entry = importlib.import_module("async_contenders").Entry
    entries = {"fake": entry(make=Fake), "other": entry(make=Fake, needs=("no.such_module",))}
    monkeypatch.setattr(bench, "CONTENDERS", entries)

    code = bench.main(
        ["--mib", "1", "--rounds", "1", "--contenders", "fake,other", "--dir", str(tmp_path)]
    )

    assert code == 0
    assert "other: skipped, no.such_module not installed." in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_another_name_is_refused(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--contenders", "ours,nobody"])

    assert "no contenders: ['nobody']" in capsys.readouterr().err


def test_ours_and_peers_give_back_what_they_saved(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script itself, with all that needs no process that imports torch."""
    names = "ours,ours-overlap,ours-thread,dcp-thread,lightning"

    code = bench.main([
        "--mib", "1", "--rounds", "1", "--contenders", names, "--dir", str(tmp_path),
        "--json", str(tmp_path / "numbers.json"),
    ])  # fmt: skip

    out = capsys.readouterr().out
    assert code == 0, out
    numbers = json.loads((tmp_path / "numbers.json").read_bytes())
    assert numbers["wrong"] == {}
    assert len(numbers["times"]) == len(names.split(","))
    assert all(len(one["blocked"]) == 1 for one in numbers["times"].values())
    assert all(f"| {name} |" in out for name in numbers["times"])
    assert [path.name for path in tmp_path.iterdir()] == ["numbers.json"]
