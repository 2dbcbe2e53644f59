"""Real libraries under the three APIs, ours beside stock: equal bits, or a refusal that says why.

The cases stand in ``_cases.py``. All of one world run in it one after the other, so that a world is
started, and the libraries are imported, once. Those marked ``soak`` are left to ``make soak``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.multiprocess._world import run_ranks
from tests.zoo import table
from tests.zoo._cases import Case, cases
from tests.zoo._worlds import Outcome, run_cases

_TIMEOUT_SECS = 600.0

Outcomes = Callable[[Case], list[Outcome]]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Return what gives the outcomes of a case, by rank; runs all that were selected with it."""
    selected = [
        item.callspec.params["case"]
        for item in request.session.items
        if item.path == request.path
        and hasattr(item, "callspec")
        and "case" in item.callspec.params
    ]
    worlds: dict[bool, dict[tuple[str, str, str], list[Outcome]]] = {}

    def of(case: Case) -> list[Outcome]:
        alone = case.layout == "single"
        if alone not in worlds:
            keys = [one.key for one in selected if (one.layout == "single") is alone]
            found = run_ranks(
                run_cases,
                1 if alone else 2,
                keys,
                str(tmp_path_factory.mktemp("zoo")),
                timeout_secs=_TIMEOUT_SECS,
                init_process_group=not alone,
                preload="tests.zoo._apis",
            )
            worlds[alone] = {key: list(ranks) for key, *ranks in zip(keys, *found, strict=True)}
        return worlds[alone][case.key]

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
