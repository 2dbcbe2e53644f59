"""The two ways between a training process and its worker: a socket, or two queues.

Here: ``Channel`` and both kinds. Not here: what is said (``messages``). Descriptors that come out
of a channel belong to whoever receives them.
"""

from __future__ import annotations

import os
import queue
import threading
from typing import TYPE_CHECKING, Any, Protocol

from dist_ckpt._worker.framing import FrameSocket

if TYPE_CHECKING:
    import socket

__all__ = ["Channel", "QueueChannel", "SocketChannel", "queue_channels"]

_SEND_SECS = 120.0
"""How long a message may wait for a reader: longer than it takes to notice that there is none."""


class Channel(Protocol):
    """One end. Any thread may send; one receives."""

    @property
    def can_send(self) -> bool:
        """Whether the other side has not been told of the end, by a failed send either."""
        ...

    def send(self, message: object, descriptors: tuple[int, ...] = ()) -> None:
        """Send; descriptors stay open here. ``OSError`` if the other side is gone."""
        ...

    def send_if_writable(self, message: object) -> None:
        """Send a small message if that takes no waiting, else drop it."""
        ...

    def receive(self, timeout_secs: float | None = None) -> tuple[Any, list[int]] | None:
        """Return message and descriptors, None after the time; ``EOFError`` at the end."""
        ...

    def shut_down(self) -> None:
        """Have both sides see the end; from any thread."""
        ...

    def close(self) -> None:
        """Let go of it. The one who receives calls this, when nobody else uses it."""
        ...


class SocketChannel:
    """One end of a socket pair between two processes.

    Args:
        stream: Ours from now on.
    """

    def __init__(self, stream: socket.socket) -> None:
        """Take the socket over."""
        self._frames = FrameSocket(stream, send_secs=_SEND_SECS)

    @property
    def can_send(self) -> bool:
        """Whether every send so far was whole."""
        return not self._frames.is_torn

    def send(self, message: object, descriptors: tuple[int, ...] = ()) -> None:
        """Send; descriptors stay open here."""
        self._frames.send(message, descriptors)

    def send_if_writable(self, message: object) -> None:
        """Send a small message if that takes no waiting, else drop it."""
        self._frames.send_if_writable(message)

    def receive(self, timeout_secs: float | None = None) -> tuple[Any, list[int]] | None:
        """Return the next message; a broken connection is an end too."""
        try:
            return self._frames.receive(timeout_secs)
        except OSError as error:
            raise EOFError from error

    def shut_down(self) -> None:
        """Have both sides see the end."""
        self._frames.shut_down()

    def close(self) -> None:
        """Let go of the socket."""
        self._frames.shut_down()
        self._frames.close()


class QueueChannel:
    """One end of a pair of queues between two threads.

    Args:
        incoming: What the other end sends.
        outgoing: What this end sends.
        ended: Set when either end is shut down.
    """

    def __init__(
        self,
        incoming: queue.SimpleQueue[tuple[Any, list[int]] | None],
        outgoing: queue.SimpleQueue[tuple[Any, list[int]] | None],
        ended: threading.Event,
    ) -> None:
        """Remember the queues."""
        self._incoming, self._outgoing, self._ended = incoming, outgoing, ended

    @property
    def can_send(self) -> bool:
        """Whether neither end is shut down."""
        return not self._ended.is_set()

    def send(self, message: object, descriptors: tuple[int, ...] = ()) -> None:
        """Send; duplicates of the descriptors go with it."""
        if self._ended.is_set():
            raise BrokenPipeError("the other side is gone")
        self._outgoing.put((message, [os.dup(descriptor) for descriptor in descriptors]))

    def send_if_writable(self, message: object) -> None:
        """Send; there is always room."""
        self.send(message)

    def receive(self, timeout_secs: float | None = None) -> tuple[Any, list[int]] | None:
        """Return the next message."""
        try:
            received = self._incoming.get(timeout=timeout_secs)
        except queue.Empty:
            return None
        if received is None:
            raise EOFError
        return received

    def shut_down(self) -> None:
        """Have both sides see the end, after what was sent before."""
        self._ended.set()
        self._incoming.put(None)
        self._outgoing.put(None)

    def close(self) -> None:
        """Give back the descriptors that nobody took."""
        self.shut_down()
        while not self._incoming.empty():
            for descriptor in (self._incoming.get_nowait() or (None, ()))[1]:
                os.close(descriptor)


def queue_channels() -> tuple[QueueChannel, QueueChannel]:
    """Return both ends."""
    one: queue.SimpleQueue[tuple[Any, list[int]] | None] = queue.SimpleQueue()
    other: queue.SimpleQueue[tuple[Any, list[int]] | None] = queue.SimpleQueue()
    ended = threading.Event()
    return QueueChannel(one, other, ended), QueueChannel(other, one, ended)
