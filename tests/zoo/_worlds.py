"""Running the cases: many in one world, one after the other.

Here: what a rank does, and what it reports of each case. Not here: what is expected. Only ranks
import the libraries, so that collecting the tests is cheap.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.zoo._pictures import differing

__all__ = ["Attempt", "Outcome", "judged", "run_cases"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one rank saw of one case.

    Attributes:
        kind: ``equal``: ours is equal to stock; ``restored``: stock fails or loses something, and
            ours is equal to a run that was never interrupted; ``refused``: an error of ours, before
            any damage; ``library``: it does not train under this layout at all; ``differs`` and
            ``failed`` are bugs.
        stock: Why stock failed, as text; empty if it did not.
        ours: The same of ours.
        differs: What is not equal.
        detail: Where it failed, for a report.
        secs: Processor time of the case.
    """

    kind: str
    stock: str = ""
    ours: str = ""
    differs: tuple[str, ...] = ()
    detail: str = ""
    secs: float = 0.0


def run_cases(
    rank: int, world_size: int, cases: list[tuple[str, str, str]], root: str
) -> list[Outcome]:
    """Return the outcome of each case: (workload, API, layout)."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    if world_size == 1:  # a script that nobody launched
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    apis: Any = importlib.import_module("tests.zoo._apis")
    outcomes = []
    with apis.eager():
        for number, (name, api, layout) in enumerate(cases):
            folder = Path(root, f"{number}-{layout}")
            folder.mkdir(exist_ok=True)
            print(name, api, layout, flush=True)  # the last line of a rank that died
            began = time.process_time()
            run = functools.partial(apis.run, name, api, layout, rank, folder)
            outcome = judged(Attempt.of(run, how) for how in ("stock", "ours", "uninterrupted"))
            outcomes.append(replace(outcome, secs=time.process_time() - began))
    return outcomes


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What one way of saving came to: pictures by name, or an error."""

    found: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    detail: str = ""
    refused: bool = False

    @classmethod
    def of(cls, run: Callable[..., dict[str, Any]], how: str) -> Attempt:
        """Run it."""
        from dist_ckpt.errors import CheckpointingException

        try:
            return cls(found=run(how=how))
        except BaseException as error:  # torch's own CheckpointException is no Exception
            return cls(
                text=f"{type(error).__name__}: {error}",
                detail=traceback.format_exc(),
                refused=isinstance(error, CheckpointingException),
            )


def judged(tries: Iterator[Attempt]) -> Outcome:
    """Return what stock and ours came to; only if they differ, train on without an interruption."""
    stock, ours = next(tries), next(tries)
    differs = tuple(differing(stock.found, ours.found))
    told = Outcome(
        kind="equal",
        stock=stock.text,
        ours=ours.text,
        detail=stock.detail + ours.detail,
    )
    if not (stock.text or ours.text or differs):
        return told
    straight = next(tries)
    if straight.text:
        return replace(told, kind="library", stock=straight.text, ours="")
    if ours.text:
        as_stock = stock.text and stock.text.split(":")[0] == ours.text.split(":")[0]
        return replace(told, kind="refused" if ours.refused or as_stock else "failed")
    if lost := tuple(differing(straight.found, ours.found)):
        return replace(told, kind="differs", differs=lost if stock.text else differs)
    return replace(told, kind="restored", differs=() if stock.text else differs)
