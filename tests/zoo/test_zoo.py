"""Real libraries under the three APIs, ours beside stock: equal bits, or a refusal that says why.

The cases stand in ``_cases.py``. Some dozens run in one world, one after the other, and the libraries
are imported once for all worlds. Those marked ``soak`` are left to ``make soak``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.multiprocess._world import run_ranks
from tests.zoo import table
from tests.zoo._cases import Case, cases
from tests.zoo._worlds import Attempt, Outcome, judged, run_cases

_TIMEOUT_SECS = 600.0
_CASES_OF_A_WORLD = 24  # one call must be far from pytest's faulthandler_timeout on a busy machine

Outcomes = Callable[[Case], list[Outcome]]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Return what gives the outcomes of a case, by rank; runs the selected ones after it as well."""
    selected = [
        item.callspec.params["case"]
        for item in request.session.items
        if item.path == request.path
        and hasattr(item, "callspec")
        and "case" in item.callspec.params
    ]
    found: dict[tuple[str, str, str], list[Outcome]] = {}

    def of(case: Case) -> list[Outcome]:
        if case.key not in found:
            start, alone = selected.index(case), case.layout == "single"
            keys = [
                one.key
                for one in selected[start : start + _CASES_OF_A_WORLD]
                if (one.layout == "single") is alone
            ]
            ranks = run_ranks(
                run_cases,
                1 if alone else 2,
                keys,
                str(tmp_path_factory.mktemp("zoo")),
                timeout_secs=_TIMEOUT_SECS,
                init_process_group=not alone,
                preload="tests.zoo._apis",
            )
            found.update((key, list(of_ranks)) for key, *of_ranks in zip(keys, *ranks, strict=True))
        return found[case.key]

    return of


def _parameter(case: Case) -> object:
    marks = [] if case.is_daily else [pytest.mark.soak]
    if case.layout != "single":
        marks.append(pytest.mark.multiprocess)
    if case.expected.pending:
        marks.append(pytest.mark.xfail(strict=True, reason=case.expected.pending))
    return pytest.param(case, id=case.id, marks=marks)


@pytest.mark.parametrize("case", [_parameter(case) for case in cases()])
def test_case(case: Case, outcomes: Outcomes) -> None:
    """Model, optimizer and what stands beside them: loaded, and two steps later."""
    expected = case.expected
    for rank, outcome in enumerate(outcomes(case)):
        assert outcome.kind == expected.kind, f"rank {rank}: {outcome}"
        text = outcome.ours if expected.kind == "refused" else outcome.stock
        assert expected.text in text, f"rank {rank}: {text}"


_GOOD, _OTHER = Attempt(found={"a": 1}), Attempt(found={"a": 2})
_ERROR, _OURS = Attempt(text="KeyError: 'x'"), Attempt(text="MismatchError: x", refused=True)


@pytest.mark.parametrize(
    ("stock", "ours", "straight", "kind"),
    [
        pytest.param(_OTHER, _OTHER, _GOOD, "equal", id="ours loses what stock loses"),
        pytest.param(_GOOD, _OTHER, _GOOD, "differs", id="ours loses what stock keeps"),
        pytest.param(_OTHER, _GOOD, _GOOD, "restored", id="ours keeps what stock loses"),
        pytest.param(_ERROR, _GOOD, _GOOD, "restored", id="ours works where stock fails"),
        pytest.param(_ERROR, _OTHER, _GOOD, "differs", id="ours loses where stock fails"),
        pytest.param(_GOOD, _OURS, _GOOD, "refused", id="an error of ours"),
        pytest.param(_GOOD, _ERROR, _GOOD, "failed", id="an error that went through"),
        pytest.param(_ERROR, _ERROR, _GOOD, "refused", id="the same error as stock"),
        pytest.param(_ERROR, _ERROR, _ERROR, "library", id="nothing works"),
    ],
)
def test_what_attempts_come_to(stock: Attempt, ours: Attempt, straight: Attempt, kind: str) -> None:
    """A silent loss is never taken for a result that may be expected."""
    assert judged(iter((stock, ours, straight))).kind == kind


def test_the_table_is_what_the_cases_declare() -> None:
    """docs/zoo.md is written by ``python -m tests.zoo.table``, and not by hand."""
    assert table.PAGE.read_text() == table.page()


def test_no_case_is_declared_in_vain(tmp_path: Path) -> None:
    """Names are unique, and every exception belongs to a case."""
    found = list(cases())

    assert len({case.key for case in found}) == len(found)
    for row in {case.row.name: case.row for case in found}.values():
        for api, layout in row.expected:
            assert api in {"*", *row.apis}, row.name
            assert layout in {"*", *row.layouts}, row.name
