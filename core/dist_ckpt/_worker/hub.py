"""The rendezvous of the workers: a small key-value server in rank 0's worker.

Here: ``Hub`` (the server), ``HubAddress``. Not here: its client (``hub_client``), the commit
protocol (``agreement``). Torch's store cannot be used: its client would import torch into the
workers.

Client and hub prove to each other that they know the job's token, without sending it (an HMAC of
the other side's nonce). Only after that are messages read, because they are unpickled.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from dataclasses import dataclass, field

from dist_ckpt._worker.framing import FrameSocket

__all__ = ["Hub", "HubAddress", "answer", "receive_exactly", "set_keepalive"]

NONCE_NBYTES = 32
_GREETING_SECS = 10.0
"""How long the authentication of a connection may take."""
_SEND_SECS = 60.0
_BACKLOG = 4096
_LOOK_SECS = 1.0
"""How often a wait checks for ranks whose connection is gone."""
RANK = struct.Struct("!q")


@dataclass(frozen=True, slots=True)
class HubAddress:
    """Where the hub is.

    Attributes:
        hosts: Names or addresses of its host, the most likely one first.
        port: Its port.
        token: The secret of the job that its clients must know.
    """

    hosts: tuple[str, ...]
    port: int
    token: bytes = field(repr=False)


def answer(token: bytes, nonce: bytes, role: bytes) -> bytes:
    """Return the proof that ``role`` knows the token: an HMAC of the other side's nonce."""
    return hmac.digest(token, role + nonce, "sha256")


def receive_exactly(stream: socket.socket, nbytes: int) -> bytes:
    """Return exactly ``nbytes`` bytes, or raise ``EOFError`` or ``OSError``."""
    data = b""
    while len(data) < nbytes:
        more = stream.recv(nbytes - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def set_keepalive(stream: socket.socket) -> None:
    """Let the kernel notice within half a minute that the other host is gone."""
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Hub:
    """Serves from threads of its own until ``close``.

    Args:
        hosts: Names under which clients may reach this host.
        grace_secs: How long a rank may be disconnected before it counts as gone.

    Raises:
        OSError: No port can be bound.
    """

    def __init__(self, hosts: tuple[str, ...], *, grace_secs: float = 30.0) -> None:
        """Listen on a port that the system chooses, on all interfaces."""
        self._listener = _listen()
        port: int = self._listener.getsockname()[1]
        self.address = HubAddress(hosts, port, secrets.token_bytes(32))
        self._table = _Table(grace_secs)
        self._lock = threading.Lock()
        self._connections: dict[threading.Thread, socket.socket] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="dist_ckpt-hub", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections and threads."""
        with self._lock:
            self._closed.set()
            connections = dict(self._connections)
        self._table.close()
        for stream in (self._listener, *connections.values()):
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for thread in connections:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                stream, _ = self._listener.accept()
            except OSError:
                # The listener was shut down, the connection was dropped, or there is no descriptor.
                self._closed.wait(0.05)
                continue
            thread = threading.Thread(
                target=self._serve, args=(stream,), name="dist_ckpt-hub-client", daemon=True
            )
            with self._lock:
                if self._closed.is_set():
                    stream.close()
                    return
                self._connections[thread] = stream
                thread.start()

    def _serve(self, stream: socket.socket) -> None:
        try:
            with stream, contextlib.suppress(OSError, EOFError):
                greeted = self._greet(stream)
                if greeted is None:
                    return
                rank, proof = greeted
                self._table.connected(rank)  # before the client sees that it is connected
                try:
                    stream.sendall(proof)
                    self._answer_all(FrameSocket(stream, send_secs=_SEND_SECS))
                finally:
                    self._table.disconnected(rank)
        finally:
            with self._lock:
                self._connections.pop(threading.current_thread(), None)

    def _greet(self, stream: socket.socket) -> tuple[int, bytes] | None:
        """Return the client's rank and our proof, or None if it does not know the token."""
        stream.settimeout(_GREETING_SECS)
        set_keepalive(stream)
        nonce = secrets.token_bytes(NONCE_NBYTES)
        stream.sendall(nonce)
        proof = receive_exactly(stream, NONCE_NBYTES)
        (rank,) = RANK.unpack(receive_exactly(stream, RANK.size))
        theirs = receive_exactly(stream, NONCE_NBYTES)
        token = self.address.token
        if not hmac.compare_digest(proof, answer(token, nonce, b"client")):
            return None
        return int(rank), answer(token, theirs, b"server")

    def _answer_all(self, frames: FrameSocket) -> None:
        while (received := frames.receive()) is not None:
            (name, *args), _ = received
            frames.send(getattr(self._table, name)(*args) if name in _REQUESTS else None)


_REQUESTS = frozenset({"set", "set_if_absent", "get", "wait", "absent", "present", "delete_prefix"})


@dataclass(eq=False, slots=True)
class _Waiter:
    """One wait: the keys that are still missing, and the event that ends it."""

    missing: set[str]
    event: threading.Event = field(default_factory=threading.Event)


class _Table:
    """The keys, the waits for them, and the connections of the ranks."""

    def __init__(self, grace_secs: float) -> None:
        self._grace_secs = grace_secs
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._waiters: dict[str, list[_Waiter]] = {}
        self._num_connections: dict[int, int] = {}
        self._gone_since: dict[int, float] = {}
        self._is_closed = False

    def set(self, key: str, value: bytes) -> None:
        with self._lock:
            self._set(key, value)

    def set_if_absent(self, key: str, value: bytes) -> bool:
        with self._lock:
            if key in self._values:
                return False
            self._set(key, value)
            return True

    def get(self, key: str) -> bytes | None:
        with self._lock:
            return self._values.get(key)

    def delete_prefix(self, prefix: str) -> None:
        with self._lock:
            for key in [key for key in self._values if key.startswith(prefix)]:
                del self._values[key]

    def wait(self, keys: dict[str, int | None], timeout_secs: float) -> list[str]:
        """Return the keys that were not set in time. ``keys``: each with the rank that sets it."""
        begun = time.monotonic()
        deadline = begun + timeout_secs
        with self._lock:
            waiter = _Waiter({key for key in keys if key not in self._values})
            for key in waiter.missing:
                self._waiters.setdefault(key, []).append(waiter)
        try:
            while waiter.missing and not self._is_closed:
                left = deadline - time.monotonic()
                gone = set(self.absent(since=begun))
                if left <= 0 or all(keys[key] in gone for key in tuple(waiter.missing)):
                    break
                waiter.event.wait(min(left, _LOOK_SECS, self._grace_secs or _LOOK_SECS))
        finally:
            with self._lock:
                missing = sorted(waiter.missing)
                for key in missing:
                    self._waiters[key].remove(waiter)
                    if not self._waiters[key]:
                        del self._waiters[key]
        return missing

    def absent(self, since: float = 0.0) -> list[int]:
        """Return the ranks that have been disconnected for longer than ``grace_secs``.

        Args:
            since: The earliest time from which a disconnection counts: a worker that died long ago
                may have a successor that is just starting.
        """
        end = time.monotonic() - self._grace_secs
        with self._lock:
            return [rank for rank, gone in self._gone_since.items() if max(gone, since) < end]

    def present(self) -> list[int]:
        """Return the ranks that have ever connected and are not absent."""
        gone = set(self.absent())
        with self._lock:
            return sorted(self._num_connections.keys() - gone)

    def connected(self, rank: int) -> None:
        with self._lock:
            self._num_connections[rank] = self._num_connections.get(rank, 0) + 1
            self._gone_since.pop(rank, None)

    def disconnected(self, rank: int) -> None:
        with self._lock:
            self._num_connections[rank] -= 1
            if not self._num_connections[rank]:
                self._gone_since[rank] = time.monotonic()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for waiters in self._waiters.values():
                for waiter in waiters:
                    waiter.event.set()

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for waiter in self._waiters.pop(key, ()):
            waiter.missing.discard(key)
            if not waiter.missing:
                waiter.event.set()


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
            )
    return socket.create_server(("", 0), backlog=_BACKLOG)
