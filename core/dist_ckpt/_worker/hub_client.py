"""A rank's connection to the hub.

Here: ``HubClient`` and ``HubLostError``. Not here: the hub (``hub``), the commit protocol
(``agreement``). Used by a worker, and by a training process that reports for its dead worker.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dist_ckpt._worker.framing import FrameSocket
from dist_ckpt._worker.hub import (
    NONCE_NBYTES,
    RANK,
    answer,
    receive_exactly,
    set_keepalive,
)
from dist_ckpt.errors import CoordinationError

if TYPE_CHECKING:
    from dist_ckpt._worker.hub import HubAddress

__all__ = ["HubClient", "HubLostError"]

_TRY_SECS = 5.0
"""How long to try one name of the host before the next one."""
_ANSWER_SECS = 30.0
"""How long the hub may take for a request that involves no waiting."""


class HubLostError(CoordinationError):
    """The hub, and with it rank 0's worker, cannot be reached."""


class HubClient:
    """A client of the hub. Any thread may use it; requests are made one after the other.

    A broken connection is made again once for each request; then the hub counts as lost.

    Args:
        address: Where the hub is.
        rank: The client's rank.
        connect_secs: How long to try to connect.

    Raises:
        HubLostError: It cannot be reached, or another server listens there.
    """

    def __init__(self, address: HubAddress, rank: int, connect_secs: float = 30.0) -> None:
        """Connect."""
        self._address, self._rank, self._connect_secs = address, rank, connect_secs
        self._lock = threading.Lock()
        self._is_closed = False
        self._frames: FrameSocket | None = None
        self._frames = self._connect()

    def set(self, key: str, value: bytes) -> None:
        """Set a key."""
        self._ask(_ANSWER_SECS, "set", key, value)

    def set_if_absent(self, key: str, value: bytes) -> bool:
        """Set a key unless it exists; return whether it was set."""
        return bool(self._ask(_ANSWER_SECS, "set_if_absent", key, value))

    def get(self, key: str) -> bytes | None:
        """Return the value of a key, None if it does not exist."""
        value: bytes | None = self._ask(_ANSWER_SECS, "get", key)
        return value

    def wait(self, keys: Mapping[str, int | None], timeout_secs: float) -> list[str]:
        """Wait until all keys are set; return those that were not in time.

        Args:
            keys: Each with the rank that sets it, so that no wait is spent on a rank that is gone;
                None for a key that any rank may set.
            timeout_secs: How long to wait.
        """
        found = self._ask(timeout_secs + _ANSWER_SECS, "wait", dict(keys), timeout_secs)
        missing: list[str] = found
        return missing

    def absent(self) -> list[int]:
        """Return the ranks whose connection is gone."""
        ranks: list[int] = self._ask(_ANSWER_SECS, "absent")
        return ranks

    def present(self) -> list[int]:
        """Return the ranks that have been connected and are not absent."""
        ranks: list[int] = self._ask(_ANSWER_SECS, "present")
        return ranks

    def delete_prefix(self, prefix: str) -> None:
        """Delete all keys that begin with ``prefix``."""
        self._ask(_ANSWER_SECS, "delete_prefix", prefix)

    def close(self) -> None:
        """Close the connection; a request in another thread raises ``HubLostError``."""
        self._is_closed = True
        frames = self._frames
        if frames is not None:
            frames.shut_down()
        with self._lock:
            self._drop()

    def _ask(self, timeout_secs: float, *request: Any) -> Any:
        with self._lock:
            for is_last in (False, True):
                try:
                    if self._frames is None:
                        self._frames = self._connect()
                    self._frames.send(request)
                    received = self._frames.receive(timeout_secs)
                    if received is None:
                        raise TimeoutError(f"no answer within {timeout_secs:g} s")
                except (OSError, EOFError) as error:
                    self._drop()
                    if is_last or self._is_closed:
                        raise self._lost(error) from error
                else:
                    return received[0]
        raise AssertionError  # pragma: no cover - the loop returns or raises

    def _drop(self) -> None:
        if self._frames is not None:
            self._frames.close()
            self._frames = None

    def _connect(self) -> FrameSocket:
        deadline = time.monotonic() + self._connect_secs
        while not self._is_closed:
            is_refused = True
            error: Exception = OSError("no host")
            for host in self._address.hosts:
                left = max(deadline - time.monotonic(), 0.1)
                try:
                    return self._greet(host, min(left, _TRY_SECS))
                except ConnectionRefusedError as refused:
                    error = refused
                except (OSError, EOFError) as failed:
                    is_refused, error = False, failed
            # Refused under all names: the hub has closed its port, and never opens it again.
            if is_refused or time.monotonic() >= deadline:
                raise self._lost(error) from error
            threading.Event().wait(0.1)
        raise self._lost(EOFError("closed"))

    def _greet(self, host: str, timeout_secs: float) -> FrameSocket:
        stream = socket.create_connection((host, self._address.port), timeout_secs)
        try:
            set_keepalive(stream)
            token = self._address.token
            nonce = receive_exactly(stream, NONCE_NBYTES)
            ours = secrets.token_bytes(NONCE_NBYTES)
            stream.sendall(answer(token, nonce, b"client") + RANK.pack(self._rank) + ours)
            try:
                proof = receive_exactly(stream, NONCE_NBYTES)
            except EOFError:
                proof = b""  # the server rejected our proof
            if not hmac.compare_digest(proof, answer(token, ours, b"server")):
                raise ConnectionRefusedError(f"{host} is not the hub")
            return FrameSocket(stream, send_secs=_ANSWER_SECS)
        except BaseException:
            stream.close()
            raise

    def _lost(self, error: Exception) -> HubLostError:
        where = ", ".join(f"{host}:{self._address.port}" for host in self._address.hosts)
        return HubLostError(
            f"rank {self._rank} cannot reach the hub of rank 0's worker at {where}: "
            f"{str(error) or type(error).__name__}.",
            hint="rank 0's worker has died, or a firewall is between the hosts.",
        )
