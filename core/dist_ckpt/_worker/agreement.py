"""How the workers of all ranks agree that a save is committed, or is not.

Here: the commit protocol over the hub. Not here: the hub, the commit itself (``Order.publish``).
Runs in the workers, and in the training process of a rank whose worker died (``stand_in``).

Each rank posts once how its part ended. Rank 0 waits for all posts, publishes or aborts, and posts
the verdict, which every rank waits for. Before rank 0 publishes it says that it will; a rank that
waited too long says that it gives up. Whoever says so first decides, so that no rank reports a
failure of what is then committed. The other laws: rank 0 removes an attempt only when it has heard
the end of every rank, or has given that rank up, so that nobody writes into what is removed; and
after ``publish`` has returned, nothing turns the save into a failure.
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

__all__ = ["CommitParticipant", "commit", "stand_in"]

logger = logging.getLogger(__name__)

_GRACE_SECS = 30.0
"""How much longer the others wait than rank 0, so that its verdict reaches them first."""
_NUM_KEPT_VERDICTS = 8
"""More than there are saves in flight: some rank may still have to hear each of them."""


@dataclass(frozen=True, slots=True)
class _Post:
    """How one rank's part ended: its pickled report, or what failed."""

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
    """Agree on one save, with a connection of its own; see ``CommitParticipant.commit``."""
    with contextlib.closing(CommitParticipant()) as seat:
        seat.commit(point, order, report, failure)


def stand_in(point: CommitPoint, failure: RankFailure, client: HubClient | None = None) -> None:
    """Say for a rank whose worker died that it failed, unless it had said how it ended; and wait.

    Returns if the save was committed all the same: the worker had done its part.

    Raises:
        CheckpointingException: The save failed; as on all ranks.
        HubLostError: Rank 0's worker is gone, so that this cannot be known here.
    """
    own = client or HubClient(point.address, point.rank)
    try:
        own.set_if_absent(_post_key(point, point.rank), pickle.dumps(_Post(failure=failure)))
        _await_verdict(point, own, _target_of(point))
    finally:
        if client is None:
            own.close()


class CommitParticipant:
    """One process among those that agree: keeps its connection from save to save. One thread."""

    def __init__(self) -> None:
        """Nothing is connected yet."""
        self._client: HubClient | None = None
        self._address: HubAddress | None = None
        self._kept: deque[CommitPoint] = deque()

    def connect(self, point: CommitPoint | None) -> None:
        """Connect, so that rank 0 sees that this rank is there, or that it is gone.

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
            point: Where; None for one rank alone.
            order: What rank 0 publishes or aborts; None if it could not be made out.
            report: What this rank has written.
            failure: What this rank failed with, instead.

        Raises:
            CheckpointingException: It failed on some rank, or ranks are missing; the same error on
                every rank. Nothing is committed and the attempt is removed.
            HubLostError: Rank 0's worker is gone; how the save ended is not known here.
        """
        if point is None:
            _close_case(order, {0: report}, {} if failure is None else {0: failure}).check()
            return
        client = self._client_of(point)
        if point.rank == 0:
            verdict = _judge(point, client, order, report, failure)
            self._announce(point, client, verdict)
            verdict.check()
            return
        post = _Post(failure=failure) if failure else _posted(report)
        client.set_if_absent(_post_key(point, point.rank), pickle.dumps(post))
        _await_verdict(point, client, order.target if order else _target_of(point))

    def linger(self, timeout_secs: float) -> None:
        """Wait until the other ranks have heard the last verdict: the hub may end then. Rank 0."""
        if not self._kept or self._client is None:
            return
        point = self._kept[-1]
        with contextlib.suppress(HubLostError):
            others = [rank for rank in self._client.present() if rank != point.rank]
            self._client.wait({_heard_key(point, rank): rank for rank in others}, timeout_secs)

    def close(self) -> None:
        """End the connection."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _client_of(self, point: CommitPoint) -> HubClient:
        if self._client is None or self._address != point.address:
            self.close()
            self._kept.clear()
            self._client = HubClient(_nearest(point), point.rank)
            self._address = point.address
        return self._client

    def _announce(self, point: CommitPoint, client: HubClient, verdict: _Verdict) -> None:
        try:
            client.set(_verdict_key(point), pickle.dumps(verdict))
            client.delete_prefix(_post_key(point, None))
            self._kept.append(point)
            self._forget_old(client)
        except HubLostError:
            # Committed is committed; whoever did not hear it will find it at the target.
            logger.warning("%s: the verdict was not told to all ranks", point.name, exc_info=True)

    def _forget_old(self, client: HubClient) -> None:
        """Delete what nobody will ask for, so that the hub does not grow."""
        while len(self._kept) > _NUM_KEPT_VERDICTS:
            client.delete_prefix(f"{self._kept.popleft().name}/")


def _judge(
    point: CommitPoint,
    client: HubClient,
    order: Order | None,
    report: Any,
    failure: RankFailure | None,
) -> _Verdict:
    """Hear all ranks, then publish or abort. Rank 0."""
    reports: dict[int, Any] = {0: report}
    failures: dict[int, RankFailure] = {} if failure is None else {0: failure}
    try:
        posts, missing = _hear_all(point, client)
    except HubLostError as error:
        posts, missing = {}, {}
        failures.setdefault(0, describe_failure(error))
    failures |= missing
    for rank, post in posts.items():
        if post.failure is not None:
            failures[rank] = post.failure
            continue
        try:
            # A report of a peer of this job, which knew the token; never bytes of a checkpoint.
            reports[rank] = pickle.loads(post.report)  # noqa: S301 - see above
        except Exception as error:  # noqa: BLE001 - whatever it is, the save fails
            failures[rank] = describe_failure(error)
    if not failures:
        failures = _withdrawn(point, client)
    return _close_case(order, reports, failures)


def _withdrawn(point: CommitPoint, client: HubClient) -> dict[int, RankFailure]:
    """Decide to publish, unless a rank has given up before: then return that. Rank 0."""
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


def _close_case(
    order: Order | None, reports: Mapping[int, Any], failures: Mapping[int, RankFailure]
) -> _Verdict:
    """Publish, or abort, and return how it ended. Rank 0."""
    target = order.target if order is not None else "the checkpoint"
    if failures or order is None:
        _abort(order)
        return _Verdict(f"writing {target}", failures)
    try:
        order.publish([reports[rank] for rank in sorted(reports)])
    except BaseException as error:  # noqa: BLE001 - told to all ranks
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


def _hear_all(
    point: CommitPoint, client: HubClient
) -> tuple[dict[int, _Post], dict[int, RankFailure]]:
    """Return the posts of the other ranks, and a failure for each that is missing. Rank 0."""
    keys: dict[str, int | None] = {_post_key(point, r): r for r in range(1, point.size)}
    if not keys:
        return {}, {}
    missing_keys = set(client.wait(keys, point.timeout_secs))
    gone = set(client.absent()) if missing_keys else set()
    posts, missing = {}, {}
    for key, rank in keys.items():
        data = None if key in missing_keys else client.get(key)
        if data is not None and rank is not None:
            posts[rank] = pickle.loads(data)  # noqa: S301 - of a peer that knew the token
        elif rank is not None:
            missing[rank] = _missing(point, is_gone=rank in gone)
    return posts, missing


def _missing(point: CommitPoint, *, is_gone: bool) -> RankFailure:
    found = (
        "its connection to the hub is gone"
        if is_gone
        else f"it did not tell how its part ended within {point.timeout_secs:g} s"
    )
    return _timed_out(f"{found}. hint: it died, or is stuck elsewhere.")


def _timed_out(message: str) -> RankFailure:
    kind = ErrorKind.BARRIER_TIMEOUT.value
    return RankFailure(error="BarrierTimeoutError", kind=kind, message=message, traceback="")


def _await_verdict(point: CommitPoint, client: HubClient, target: str) -> None:
    """Wait for what rank 0 says, and say that it was heard."""
    key = _verdict_key(point)
    # Whether rank 0 is there shows in the connection: its worker serves the hub.
    is_missing = bool(client.wait({key: None}, point.timeout_secs + _GRACE_SECS))
    if is_missing and not client.set_if_absent(_decision_key(point), str(point.rank).encode()):
        # Rank 0 has decided to publish, or another rank has given up: the verdict is on its way.
        is_missing = bool(client.wait({key: None}, point.timeout_secs))
    data = None if is_missing else client.get(key)
    if data is None:
        failures = {0: _missing(point, is_gone=False)}
        raise merged_error(f"committing {target}", failures, None)
    with contextlib.suppress(HubLostError):
        client.set(_heard_key(point, point.rank), b"")
    verdict: _Verdict = pickle.loads(data)  # noqa: S301 - of a peer that knew the token
    verdict.check()


def _nearest(point: CommitPoint) -> HubAddress:
    """Return the hub's address as seen from this rank: rank 0's worker serves it itself."""
    if point.rank:
        return point.address
    return replace(point.address, hosts=("127.0.0.1", *point.address.hosts))


def _posted(report: Any) -> _Post:
    try:
        return _Post(pickle.dumps(report))
    except Exception as error:  # noqa: BLE001 - a report that cannot travel is a failure
        return _Post(failure=describe_failure(error))


def _target_of(point: CommitPoint) -> str:
    return f"save {point.name}"


def _post_key(point: CommitPoint, rank: int | None) -> str:
    return f"{point.name}/in/{'' if rank is None else rank}"


def _verdict_key(point: CommitPoint) -> str:
    return f"{point.name}/verdict"


def _decision_key(point: CommitPoint) -> str:
    return f"{point.name}/decision"


def _heard_key(point: CommitPoint, rank: int) -> str:
    return f"{point.name}/heard/{rank}"
