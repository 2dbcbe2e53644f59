"""How much of what is random or exhaustive a run tries: a sample, or all with ``SOAK=1``.

``make test`` takes the sample, ``make soak`` all of it. A test whose number of rounds, examples or
cases comes from here is marked ``sampled``: ``make soak`` runs it again, with the larger number.
"""

from __future__ import annotations

import os

__all__ = ["IS_SOAK", "sample"]

# Not DIST_CKPT_...: that prefix is the configuration's, which refuses names that are no field.
IS_SOAK = os.environ.get("SOAK", "") not in {"", "0"}


def sample(daily: int, soak: int, *, variable: str | None = None) -> int:
    """Return how many are tried; an environment variable, where one is named, says otherwise."""
    asked = os.environ.get(variable) if variable else None
    return int(asked) if asked else soak if IS_SOAK else daily
