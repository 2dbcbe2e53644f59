"""The benchmarks' harness: turns, ratios, page states, states, tables, and one run of all of it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Import what lies in benchmarks/, and forget it afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        home = getattr(sys.modules[name], "__file__", None) or ""
        if home.startswith(str(BENCHMARKS)):
            del sys.modules[name]


def result_of(times: dict[str, list[float]], **more: Any) -> dict[str, Any]:
    """A benchmark's JSON with one case and one measure."""
    runs = [
        {
            "round": number,
            "case": "gpt",
            "contender": name,
            "measures": {"first": {"seconds": secs, "peak": 3 << 20, "pages": "reused"}},
        }
        for name, all_secs in times.items()
        for number, secs in enumerate(all_secs)
    ]
    known = {"floor": "floor", "peer": "dcp", "reference": None, "world": 1}
    return {
        "name": "save",
        "title": "Save",
        "measures": {"first": "first save"},
        "cases": {"gpt": known},
        "contenders": {name: name.upper() for name in times},
        "runs": runs,
    } | more


def test_each_round_begins_with_another_contender(module: Callable[[str], Any]) -> None:
    in_turn = module("harness.rounds").in_turn

    turns = [in_turn("abc", number) for number in range(4)]

    assert turns == [list("abc"), list("bca"), list("cab"), list("abc")]
    assert in_turn([], 3) == []


@pytest.mark.parametrize(
    ("done", "spent", "last", "budget", "more"),
    [
        (0, 0.0, 0.0, 1.0, True),
        (0, 9.0, 0.0, 1.0, True),
        (1, 5.0, 3.0, 8.0, True),
        (1, 5.0, 3.1, 8.0, False),
        (2, 1.0, 9.0, None, True),
        (3, 1.0, 0.1, None, False),
        (3, 1.0, 0.1, 9.0, False),
    ],
)
def test_no_round_begins_that_would_not_end_in_time(
    module: Callable[[str], Any],
    done: int,
    spent: float,
    last: float,
    budget: float | None,
    more: bool,
) -> None:
    """There is always one round; a further one must fit, as long as the last one took."""
    goes_on = module("harness.rounds").goes_on

    found = goes_on(done=done, rounds=3, spent_secs=spent, last_secs=last, budget_secs=budget)
    assert found is more


def test_ratios_are_of_the_same_round(module: Callable[[str], Any]) -> None:
    """A round in which one of both is missing has none."""
    rounds = module("harness.rounds")

    assert rounds.ratios({0: 2.0, 1: 9.0, 2: 8.0}, {0: 1.0, 2: 2.0, 3: 5.0}) == [2.0, 4.0]
    assert rounds.spread([3.0, 1.0, 2.0]).text() == "2.000 (1.000-3.000)"
    assert rounds.spread([0.01]).text() == "0.0100"


def test_numbers_of_ranks_become_one(module: Callable[[str], Any]) -> None:
    """From the first begin to the last end; counters are summed, the largest peak is kept."""
    merged = module("harness.jobs").merged
    ranks = [
        {"first": {"begin": 1.0, "end": 3.0, "peak": 5, "counts": {"read": 1}, "pages": "warm"}},
        {"first": {"begin": 1.5, "end": 4.0, "peak": 7, "counts": {"read": 2}, "pages": "warm"}},
    ]

    assert merged(ranks) == {
        "first": {
            "pages": "warm", "seconds": 3.0, "peak": 7, "read": 3, "read of ranks": [1, 2],
        }
    }  # fmt: skip
    assert merged(ranks[:1])["first"]["read"] == 1
    assert merged([{"device": {"facts": {"name": None}}}]) == {
        "device": {"pages": None, "peak": None, "name": None}
    }


def test_a_rank_that_fails_ends_the_others(module: Callable[[str], Any], tmp_path: Path) -> None:
    """The error has what the rank said; no process is left, and none is waited for in vain."""
    jobs = module("harness.jobs")
    job = jobs.Job(
        scenario="no_such_module:run", contender="floor", directory=str(tmp_path), world=2
    )

    with pytest.raises(jobs.JobError, match=r"(?s)rank [01] .*No module named 'no_such_module'"):
        jobs.run_job(job, tmp_path)

    assert not list(tmp_path.glob("out-*"))


def test_pages_are_dropped_and_read_again(module: Callable[[str], Any], tmp_path: Path) -> None:
    """What the kernel has in its cache is asked, not assumed."""
    pages = module("harness.pages")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "f").write_bytes(os.urandom(3 * 4096 + 1))
    (tmp_path / "empty").touch()

    assert pages.make_warm(tmp_path) == 4 * 4096
    assert pages.make_cold(tmp_path) in (0, 4 * 4096)  # a tmpfs drops nothing, and says so
    assert pages.make_warm(tmp_path) == 4 * 4096
    assert pages.size_below(tmp_path) == 3 * 4096 + 1


def test_a_scratch_file_does_not_stay(module: Callable[[str], Any], tmp_path: Path) -> None:
    module("harness.pages").reuse_pages(tmp_path, 100_001)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("layout", ["whole", "rows", "columns"])
def test_a_shard_of_any_layout_has_the_same_elements(
    module: Callable[[str], Any], layout: str
) -> None:
    """Parts put together are the whole; one wrong bit is found."""
    states = module("harness.states")
    shapes = {"m": (12, 24), "v": (12,), "n": (4, 12)}
    whole = states.cut(shapes)
    states.fill(whole)

    parts = [states.cut(shapes, layout=layout, part=part, parts=2) for part in range(2)]
    for shards in parts:
        assert states.wrong(shards) == ["m", "v", "n"]
        states.fill(shards)
        assert states.wrong(shards) == []

    for number, one in enumerate(whole):
        if parts[0][number].axis is not None:
            both = [shards[number].data for shards in parts]
            assert torch.equal(torch.cat(both, dim=parts[0][number].axis), one.data)
        else:
            assert torch.equal(parts[1][number].data, one.data)
    parts[1][0].data.view(torch.int32)[-1, -1] ^= 1
    assert states.wrong(parts[1]) == ["m"]
    states.wipe(whole)
    assert states.wrong(whole) == ["m", "v", "n"]


def test_states_have_the_sizes_that_are_told(module: Callable[[str], Any]) -> None:
    """2048 MiB of gpt are 2.15 GB in 876 tensors; a state to reshard can be cut by 2, 3 and 4."""
    states = module("harness.states")

    gpt = states.gpt(2048)
    assert len(gpt) == 876
    assert 2.1e9 < sum(4 * torch.Size(shape).numel() for shape in gpt.values()) < 2.2e9
    assert all(n % 12 == 0 for shape in states.divisible(768).values() for n in shape)
    assert all(n % 12 == 0 for shape in states.divisible(24).values() for n in shape)
    many = states.many(500)
    assert len(many) == 500
    assert {1024 <= 4 * shape[0] <= 16384 for shape in many.values()} == {True}


def test_text_between_markers_is_replaced(module: Callable[[str], Any]) -> None:
    """Only there, and only where there is something new; what has no place is told apart."""
    replaced = module("report").replaced
    page = (
        "a\n<!-- bench:one -->\nold\n<!-- /bench:one -->\nb\n"
        "<!-- bench:two-2 -->\nkept\n<!-- /bench:two-2 -->\n"
    )

    text, found = replaced(page, {"one": "new\n", "three": "homeless"})

    assert found == {"one"}
    assert text == page.replace("old", "new")
    assert replaced(text, {"one": "new"})[0] == text


def test_a_table_has_medians_and_ratios_of_rounds(module: Callable[[str], Any]) -> None:
    result = result_of({"floor": [1.0, 2.0], "ours": [2.0, 2.0], "dcp": [4.0, 8.0]})

    text = module("harness.tables").markdown(result)

    assert text.splitlines() == [
        "**first save**; pages reused",
        "",
        "|  | s (min-max) | x floor | x DCP | extra memory, MiB |",
        "| --- | --- | --- | --- | --- |",
        "| FLOOR | 1.500 (1.000-2.000) | 1 | 0.25 | 3 |",
        "| OURS | 2.000 | 1.50 | 0.38 | 3 |",
        "| DCP | 6.000 (4.000-8.000) | 4.00 | 1 | 3 |",
    ]


def test_what_did_not_run_is_said(module: Callable[[str], Any]) -> None:
    result = result_of(
        {"floor": [1.0], "ours": [2.0], "other": []},
        skipped={"other": ["no.such_module"]},
        failed={"ours": "it broke"},
    )

    text = module("harness.tables").markdown(result)

    assert "Not installed, not run: OTHER." in text
    assert "Failed, and shown as far as they went: OURS." in text
    assert "| OTHER |" not in text


def test_bars_of_the_plot_are_multiples_of_the_floor(module: Callable[[str], Any]) -> None:
    """A group that was not measured has no bar, and neither has who took no part."""
    results = {"save": result_of({"floor": [1.0, 2.0], "ours": [2.0, 2.0]})}

    assert module("harness.plot").bars(results) == {"ours": [1.5, None, None, None, None, None]}


def test_each_entry_of_the_roster_has_a_home(module: Callable[[str], Any]) -> None:
    roster = module("contenders").ROSTER

    for entry in roster.values():
        home, kind = entry.home.split(":")
        text = (BENCHMARKS / "contenders" / f"{home}.py").read_text()
        assert f"class {kind}(" in text
        assert entry.missing() == [] or entry.needs


def test_both_sizes_call_scripts_that_are_there(
    module: Callable[[str], Any], tmp_path: Path
) -> None:
    all_of_them = module("all")

    for size in ("small", "full"):
        for command in all_of_them.commands(size, tmp_path, None):
            assert Path(command[1]).is_file()
    assert sum(part.budget_secs for part in all_of_them.PARTS) <= 60 * all_of_them.MINUTES


@pytest.mark.slow
def test_a_benchmark_runs_end_to_end(tmp_path: Path) -> None:
    """A tiny state, one round: the numbers mean nothing, the comparison of bits does."""
    out, where = tmp_path / "out", tmp_path / "where"
    where.mkdir()

    done = subprocess.run(
        [sys.executable, BENCHMARKS / "bench_save.py", "--mib", "4", "--rounds", "1",
         "--contenders", "floor,ours", "--dir", where, "--json", out],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip

    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert list(where.iterdir()) == []
    result = json.loads((out / "save.json").read_text())
    assert result["failed"] == {}
    assert [run["contender"] for run in result["runs"]] == ["floor", "ours"]
    for run in result["runs"]:
        assert run["measures"].keys() == {"first", "second", "load"}
        assert run["measures"]["first"]["stored"] >= run["measures"]["first"]["state"] > 4e6
