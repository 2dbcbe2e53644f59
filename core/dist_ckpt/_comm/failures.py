"""Errors of one rank as text, and one error for all ranks made from them.

Here: pure functions between exceptions and ``RankFailure``. Not here: sending them.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

from dist_ckpt import errors
from dist_ckpt.errors import CheckpointingException, ErrorKind, RankFailedError, RankFailure

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["describe_failure", "merged_error"]


def describe_failure(error: BaseException) -> RankFailure:
    """Return ``error`` as plain text, which can be pickled and unpickled in any process."""
    kind = error.kind if isinstance(error, CheckpointingException) else ErrorKind.UNKNOWN
    message = str(error) or repr(error)
    return RankFailure(
        error=type(error).__name__,
        kind=kind.value,
        message=message,
        traceback="".join(traceback.format_exception(error)),
    )


def merged_error(
    phase: str, failures: Mapping[int, RankFailure], cause: BaseException | None
) -> CheckpointingException:
    """Return the one error that every rank raises for ``failures``.

    Failures of one class of our tree keep that class, so that a handler written for one process
    works for many; anything else becomes a ``RankFailedError``. The message lists each rank.
    """
    names = {failure.error for failure in failures.values()}
    found = getattr(errors, next(iter(names)), None) if len(names) == 1 else None
    same = isinstance(found, type) and issubclass(found, CheckpointingException)
    cls: type[CheckpointingException] = found if same and found is not None else RankFailedError
    by_text: dict[str, list[int]] = {}
    for rank, failure in sorted(failures.items()):
        text = failure.message if same else f"{failure.error}: {failure.message}"
        by_text.setdefault(text, []).append(rank)
    told = "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in by_text.items())
    error = cls(f"{phase} failed on {_ranks(sorted(failures))}. {told}")
    error.failures = dict(failures)
    error.__cause__ = cause
    return error


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:16])
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""  # noqa: PLR2004 - line length
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
