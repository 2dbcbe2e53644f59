"""How much of what is random or exhaustive a run tries: a sample, or all with ``DIST_CKPT_SOAK=1``.

``make test`` takes the sample, ``make soak`` all of it. A test whose number of rounds, examples or
cases comes from here is marked ``sampled``: ``make soak`` runs it again, with the larger number.
"""

from __future__ import annotations

import os

__all__ = ["IS_SOAK", "sample"]

# Under a name that is no field of the configuration: the adapters refuse unknown ones that begin so.
if "DIST_CKPT_SOAK" in os.environ:
    os.environ["SOAK_DIST_CKPT"] = os.environ.pop("DIST_CKPT_SOAK")

IS_SOAK = os.environ.get("SOAK_DIST_CKPT", "") not in {"", "0"}


def sample(daily: int, soak: int, *, variable: str | None = None) -> int:
    """Return how many are tried; an environment variable, where one is named, says otherwise."""
    asked = os.environ.get(variable) if variable else None
    return int(asked) if asked else soak if IS_SOAK else daily
