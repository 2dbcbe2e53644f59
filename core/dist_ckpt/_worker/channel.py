"""Channels between a training process and its worker: a socket for a process, queues for a thread.

Here: ``Channel`` and both kinds. Not here: the messages (``messages``). A descriptor that is
received is owned by the receiver, which closes it.
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
    """One end. Any thread may send; one thread receives."""

    @property
    def can_send(self) -> bool:
        """Whether neither ``shut_down`` nor a failed send has ended this direction."""
        ...

    def send(self, message: object, descriptors: tuple[int, ...] = ()) -> None:
        """Send; descriptors stay open here. ``OSError`` if the other side is gone."""
        ...

    def send_if_writable(self, message: object) -> None:
        """Send a small message if that does not block, otherwise drop it."""
        ...

    def receive(self, timeout_secs: float | None = None) -> tuple[Any, list[int]] | None:
        """Return message and descriptors, None after the timeout; ``EOFError`` at the end."""
        ...

    def shut_down(self) -> None:
        """End the channel for both sides; from any thread."""
        ...

    def close(self) -> None:
        """Release it. Called by the receiving thread, when no other thread uses it."""
        ...


class SocketChannel:
    """One end of a socket pair between two processes.

    Args:
        stream: Owned by this object from now on.
    """

    def __init__(self, stream: socket.socket) -> None:
        """Wrap the socket."""
        self._frames = FrameSocket(stream, send_secs=_SEND_SECS)

    @property
    def can_send(self) -> bool:
        """Whether every send so far was whole."""
        return not self._frames.is_torn

    def send(self, message: object, descriptors: tuple[int, ...] = ()) -> None:
        """Send; descriptors stay open here."""
        self._frames.send(message, descriptors)

    def send_if_writable(self, message: object) -> None:
        """Send a small message if that does not block, otherwise drop it."""
        self._frames.send_if_writable(message)

    def receive(self, timeout_secs: float | None = None) -> tuple[Any, list[int]] | None:
        """Return the next message; a broken connection ends the channel too."""
        try:
            return self._frames.receive(timeout_secs)
        except OSError as error:
            raise EOFError from error

    def shut_down(self) -> None:
        """End the channel for both sides."""
        self._frames.shut_down()

    def close(self) -> None:
        """Close the socket."""
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
        """Store the queues."""
        self._incoming, self._outgoing, self._ended = incoming, outgoing, ended

    @property
    def can_send(self) -> bool:
        """Whether neither end is shut down."""
        return not self._ended.is_set()

    def send(self, message: object, descriptors: tuple[int, ...] = ()) -> None:
        """Send, with duplicates of the descriptors."""
        if self._ended.is_set():
            raise BrokenPipeError("the other side is gone")
        self._outgoing.put((message, [os.dup(descriptor) for descriptor in descriptors]))

    def send_if_writable(self, message: object) -> None:
        """Send; a queue never blocks."""
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
        """End the channel for both sides, after the messages that were sent before."""
        self._ended.set()
        self._incoming.put(None)
        self._outgoing.put(None)

    def close(self) -> None:
        """Close the descriptors of messages that were not received."""
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
