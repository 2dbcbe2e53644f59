"""The commit protocol: how the workers of all ranks agree whether a save is committed.

Here: the protocol over the hub. Not here: the hub, the commit itself (``Order.publish``). Runs in
the workers, and in the training process of a rank whose worker died (``report_dead_worker``).

1. Each rank sets a report key once: what it has written, or why it failed.
2. Rank 0 waits for the reports of all ranks. If all succeeded, it claims the decision key with
   ``set_if_absent``, publishes, and sets the verdict key; otherwise it aborts.
3. Every other rank waits for the verdict. If it does not come in time, the rank claims the decision
   key itself and fails. The first claim decides, so no rank reports a failure of a save that is
   committed afterwards.

Rank 0 removes an attempt only after every rank has reported or counts as gone: until then that rank
may still write into it. Once ``publish`` has returned, nothing turns the save into a failure.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dist_ckpt._comm.failures import describe_failure, merged_error
from dist_ckpt._worker.hub_client import HubClient, HubLostError
from dist_ckpt.errors import ErrorKind, RankFailure

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dist_ckpt._saving.publish import CommitPoint
    from dist_ckpt._worker.hub import HubAddress
    from dist_ckpt._worker.orders import Order

__all__ = ["CommitParticipant", "commit", "report_dead_worker"]

logger = logging.getLogger(__name__)

_GRACE_SECS = 30.0
"""How much longer the others wait than rank 0, so that its verdict reaches them first."""
_NUM_KEPT_VERDICTS = 8
"""More than the saves in flight: some rank may still have to read the verdict of each."""


@dataclass(frozen=True, slots=True)
class _RankReport:
    """How one rank's part ended: its pickled report, or its failure."""

    report: bytes = b""
    failure: RankFailure | None = None


@dataclass(frozen=True, slots=True)
class _Verdict:
    """How the save ended: committed, unless there are failures."""

    phase: str = ""
    failures: Mapping[int, RankFailure] | None = None

    def check(self) -> None:
        if self.failures:
            raise merged_error(self.phase, self.failures, None)


def commit(
    point: CommitPoint | None,
    order: Order | None,
    report: Any = None,
    failure: RankFailure | None = None,
) -> None:
    """Agree on one save over a new connection; see ``CommitParticipant.commit``."""
    with contextlib.closing(CommitParticipant()) as seat:
        seat.commit(point, order, report, failure)


def report_dead_worker(
    point: CommitPoint, failure: RankFailure, client: HubClient | None = None
) -> None:
    """Report a failure for a rank whose worker died, and wait for the verdict.

    A report that the worker had set itself is kept. Returns if the save is committed: the worker
    had done its part.

    Raises:
        CheckpointingException: The save failed; as on all ranks.
        HubLostError: Rank 0's worker is gone, so the outcome is not known here.
    """
    own = client or HubClient(point.address, point.rank)
    try:
        own.set_if_absent(
            _report_key(point, point.rank), pickle.dumps(_RankReport(failure=failure))
        )
        _await_verdict(point, own, _target_of(point))
    finally:
        if client is None:
            own.close()


class CommitParticipant:
    """One process that takes part in commits; keeps its connection between saves. One thread."""

    def __init__(self) -> None:
        """Connect at the first save."""
        self._client: HubClient | None = None
        self._address: HubAddress | None = None
        self._recent_points: deque[CommitPoint] = deque()

    def connect(self, point: CommitPoint | None) -> None:
        """Connect now, so that the hub notices if this rank disappears while it writes.

        Raises:
            HubLostError: The hub cannot be reached.
        """
        if point is not None:
            self._client_of(point)

    def commit(
        self,
        point: CommitPoint | None,
        order: Order | None,
        report: Any = None,
        failure: RankFailure | None = None,
    ) -> None:
        """Agree with all ranks; return when the save is committed.

        Args:
            point: Where the ranks meet; None for a job of one rank.
            order: What rank 0 publishes or aborts; None if it could not be unpickled.
            report: What this rank has written.
            failure: Why this rank failed; then ``report`` is not used.

        Raises:
            CheckpointingException: It failed on some rank, or ranks are missing; the same error on
                every rank. Nothing is committed and the attempt is removed.
            HubLostError: Rank 0's worker is gone, so the outcome is not known here.
        """
        if point is None:
            _publish_or_abort(order, {0: report}, {} if failure is None else {0: failure}).check()
            return
        client = self._client_of(point)
        if point.rank == 0:
            verdict = _collect_and_decide(point, client, order, report, failure)
            self._post_verdict(point, client, verdict)
            verdict.check()
            return
        rank_report = _RankReport(failure=failure) if failure else _rank_report(report)
        client.set_if_absent(_report_key(point, point.rank), pickle.dumps(rank_report))
        _await_verdict(point, client, order.target if order else _target_of(point))

    def linger(self, timeout_secs: float) -> None:
        """Wait until the other ranks have read the last verdict; then the hub may close. Rank 0."""
        if not self._recent_points or self._client is None:
            return
        point = self._recent_points[-1]
        with contextlib.suppress(HubLostError):
            others = [rank for rank in self._client.present() if rank != point.rank]
            self._client.wait({_ack_key(point, rank): rank for rank in others}, timeout_secs)

    def close(self) -> None:
        """End the connection."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _client_of(self, point: CommitPoint) -> HubClient:
        if self._client is None or self._address != point.address:
            self.close()
            self._recent_points.clear()
            self._client = HubClient(_address_seen_by(point), point.rank)
            self._address = point.address
        return self._client

    def _post_verdict(self, point: CommitPoint, client: HubClient, verdict: _Verdict) -> None:
        try:
            client.set(_verdict_key(point), pickle.dumps(verdict))
            client.delete_prefix(_report_key(point, None))
            self._recent_points.append(point)
            self._delete_old_keys(client)
        except HubLostError:
            # The save is committed. A rank that gets no verdict looks at the target itself.
            logger.warning("%s: the verdict was not told to all ranks", point.name, exc_info=True)

    def _delete_old_keys(self, client: HubClient) -> None:
        """Delete keys that no rank will read again, so that the hub does not grow."""
        while len(self._recent_points) > _NUM_KEPT_VERDICTS:
            client.delete_prefix(f"{self._recent_points.popleft().name}/")


def _collect_and_decide(
    point: CommitPoint,
    client: HubClient,
    order: Order | None,
    report: Any,
    failure: RankFailure | None,
) -> _Verdict:
    """Collect the reports of all ranks, then publish or abort. Rank 0."""
    reports: dict[int, Any] = {0: report}
    failures: dict[int, RankFailure] = {} if failure is None else {0: failure}
    try:
        rank_reports, missing = _collect_reports(point, client)
    except HubLostError as error:
        rank_reports, missing = {}, {}
        failures.setdefault(0, describe_failure(error))
    failures |= missing
    for rank, rank_report in rank_reports.items():
        if rank_report.failure is not None:
            failures[rank] = rank_report.failure
            continue
        try:
            # A report of a peer of this job, which knew the token; never bytes of a checkpoint.
            reports[rank] = pickle.loads(rank_report.report)  # noqa: S301 - see above
        except Exception as error:  # noqa: BLE001 - whatever it is, the save fails
            failures[rank] = describe_failure(error)
    if not failures:
        failures = _claim_commit(point, client)
    return _publish_or_abort(order, reports, failures)


def _claim_commit(point: CommitPoint, client: HubClient) -> dict[int, RankFailure]:
    """Claim the decision; return the failure of a rank that gave up first. Rank 0."""
    if point.size == 1:
        return {}
    try:
        if client.set_if_absent(_decision_key(point), b"0"):
            return {}
        rank = int(client.get(_decision_key(point)) or b"0")
    except HubLostError as error:
        return {0: describe_failure(error)}
    message = f"it waited for rank 0 for {point.timeout_secs + _GRACE_SECS:g} s and gave up"
    return {rank: _timed_out(message)}


def _publish_or_abort(
    order: Order | None, reports: Mapping[int, Any], failures: Mapping[int, RankFailure]
) -> _Verdict:
    """Publish if nothing failed, otherwise abort; return the verdict. Rank 0."""
    target = order.target if order is not None else "the checkpoint"
    if failures or order is None:
        _abort(order)
        return _Verdict(f"writing {target}", failures)
    try:
        order.publish([reports[rank] for rank in sorted(reports)])
    except BaseException as error:  # noqa: BLE001 - sent to all ranks in the verdict
        _abort(order)
        return _Verdict(f"committing {target}", {0: describe_failure(error)})
    return _Verdict()


def _abort(order: Order | None) -> None:
    if order is None:
        return
    try:
        order.abort()
    except Exception:
        # The save has failed anyway, and of something else.
        logger.warning(
            "%s: what a failed save has left was not removed", order.target, exc_info=True
        )


def _collect_reports(
    point: CommitPoint, client: HubClient
) -> tuple[dict[int, _RankReport], dict[int, RankFailure]]:
    """Return the reports of the other ranks, and a failure for each missing one. Rank 0."""
    keys: dict[str, int | None] = {_report_key(point, r): r for r in range(1, point.size)}
    if not keys:
        return {}, {}
    missing_keys = set(client.wait(keys, point.timeout_secs))
    gone = set(client.absent()) if missing_keys else set()
    rank_reports, missing = {}, {}
    for key, rank in keys.items():
        data = None if key in missing_keys else client.get(key)
        if data is not None and rank is not None:
            rank_reports[rank] = pickle.loads(data)  # noqa: S301 - of a peer that knew the token
        elif rank is not None:
            missing[rank] = _missing(point, is_gone=rank in gone)
    return rank_reports, missing


def _missing(point: CommitPoint, *, is_gone: bool) -> RankFailure:
    found = (
        "its connection to the hub is gone"
        if is_gone
        else f"it did not report within {point.timeout_secs:g} s"
    )
    return _timed_out(f"{found}. hint: it died, or is stuck elsewhere.")


def _timed_out(message: str) -> RankFailure:
    kind = ErrorKind.BARRIER_TIMEOUT.value
    return RankFailure(error="BarrierTimeoutError", kind=kind, message=message, traceback="")


def _await_verdict(point: CommitPoint, client: HubClient, target: str) -> None:
    """Wait for rank 0's verdict and acknowledge it; raise if the save failed."""
    key = _verdict_key(point)
    # No rank is named for this key: rank 0's worker serves the hub, so its death breaks the
    # connection.
    is_missing = bool(client.wait({key: None}, point.timeout_secs + _GRACE_SECS))
    if is_missing and not client.set_if_absent(_decision_key(point), str(point.rank).encode()):
        # Rank 0 has claimed the decision to publish, or another rank gave up: the verdict follows.
        is_missing = bool(client.wait({key: None}, point.timeout_secs))
    data = None if is_missing else client.get(key)
    if data is None:
        failures = {0: _missing(point, is_gone=False)}
        raise merged_error(f"committing {target}", failures, None)
    with contextlib.suppress(HubLostError):
        client.set(_ack_key(point, point.rank), b"")
    verdict: _Verdict = pickle.loads(data)  # noqa: S301 - of a peer that knew the token
    verdict.check()


def _address_seen_by(point: CommitPoint) -> HubAddress:
    """Return the hub's address for this rank: rank 0's worker reaches its own hub by loopback."""
    if point.rank:
        return point.address
    return replace(point.address, hosts=("127.0.0.1", *point.address.hosts))


def _rank_report(report: Any) -> _RankReport:
    try:
        return _RankReport(pickle.dumps(report))
    except Exception as error:  # noqa: BLE001 - a report that cannot travel is a failure
        return _RankReport(failure=describe_failure(error))


def _target_of(point: CommitPoint) -> str:
    return f"save {point.name}"


def _report_key(point: CommitPoint, rank: int | None) -> str:
    return f"{point.name}/in/{'' if rank is None else rank}"


def _verdict_key(point: CommitPoint) -> str:
    return f"{point.name}/verdict"


def _decision_key(point: CommitPoint) -> str:
    return f"{point.name}/decision"


def _ack_key(point: CommitPoint, rank: int) -> str:
    return f"{point.name}/heard/{rank}"
