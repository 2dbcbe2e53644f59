"""Messages over a stream socket: a length, then a pickle; file descriptors as ancillary data.

Here: ``FrameSocket``. Not here: what the messages are. What is received is unpickled, so this is
only for a process and its own child, and for ranks that have proven to know the job's token
(``hub``).
"""

from __future__ import annotations

import array
import contextlib
import pickle
import select
import socket
import struct
import threading
from typing import Any

__all__ = ["FrameSocket"]

_HEAD = struct.Struct("!QB")
_MAX_DESCRIPTORS = 4
_SMALL_NBYTES = 1 << 16


class FrameSocket:
    """A connected stream socket that carries whole objects.

    Any thread may send; one thread receives.

    Args:
        stream: Owned by this object from now on.
        send_secs: How long a send may wait for the other side to read.
    """

    def __init__(self, stream: socket.socket, *, send_secs: float) -> None:
        """Wrap the socket."""
        stream.setblocking(True)  # noqa: FBT003 - its signature
        secs, micros = int(send_secs), int(send_secs % 1 * 1e6)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", secs, micros))
        self._stream = stream
        self._lock = threading.Lock()
        self.is_torn = False

    def send(self, message: object, descriptors: tuple[int, ...] = ()) -> None:
        """Send one object, and file descriptors, which stay open here.

        Raises:
            OSError: The other side is gone, or does not read.
        """
        self._send(pickle.dumps(message), descriptors)

    def send_if_writable(self, message: object) -> bool:
        """Send one small object if that does not block; return whether it was sent.

        Raises:
            OSError: The other side is gone.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._stream.fileno() < 0:
                raise BrokenPipeError("closed")
            poll = select.poll()
            poll.register(self._stream, select.POLLOUT)
            # A stream counts as writable only while a good part of its buffer is free: a small
            # message needs less, so the send below does not block.
            if not poll.poll(0):
                return False
            self._send_locked(pickle.dumps(message), ())
        finally:
            self._lock.release()
        return True

    def receive(self, timeout_secs: float | None = None) -> tuple[Any, list[int]] | None:
        """Return the next object with its file descriptors, or None if none begins in time.

        Raises:
            EOFError: The other side has closed, or this one has.
            OSError: The connection is broken.
        """
        if timeout_secs is not None:
            poll = select.poll()
            try:
                poll.register(self._stream, select.POLLIN)
            except ValueError as error:
                raise EOFError from error
            if not poll.poll(timeout_secs * 1000):
                return None
        head, descriptors = self._receive_head()
        (nbytes, _) = _HEAD.unpack(head)
        return pickle.loads(self._receive_exactly(nbytes)), descriptors  # noqa: S301 - see above

    def shut_down(self) -> None:
        """End the connection: sends and receives on both sides fail or see the end."""
        self._shut_down(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket; no thread may be receiving any more."""
        self.shut_down()
        # Under the lock: a thread may be sending, and a closed descriptor's number may be given to
        # another file at once.
        with self._lock:
            self._stream.close()

    def _send(self, data: bytes, descriptors: tuple[int, ...]) -> None:
        with self._lock:
            self._send_locked(data, descriptors)

    def _send_locked(self, data: bytes, descriptors: tuple[int, ...]) -> None:
        head = _HEAD.pack(len(data), len(descriptors))
        sent = 0
        try:
            if descriptors:
                sent = socket.send_fds(self._stream, [head], list(descriptors))
            if len(data) < _SMALL_NBYTES:
                self._stream.sendall(head[sent:] + data)
            else:
                self._stream.sendall(head[sent:])
                self._stream.sendall(data)
        except BaseException:
            # Half a message may have been sent (also after Ctrl-C): no other may follow it.
            self.is_torn = True
            self._shut_down(socket.SHUT_WR)
            raise

    def _shut_down(self, how: int) -> None:
        with contextlib.suppress(OSError):  # it is already
            self._stream.shutdown(how)

    def _receive_head(self) -> tuple[bytes, list[int]]:
        if self._stream.family != socket.AF_UNIX:
            return bytes(self._receive_exactly(_HEAD.size)), []
        head, found = b"", array.array("i")
        space = socket.CMSG_SPACE(_MAX_DESCRIPTORS * found.itemsize)
        while len(head) < _HEAD.size:
            data, ancillary, _, _ = self._stream.recvmsg(
                _HEAD.size - len(head), space, socket.MSG_CMSG_CLOEXEC
            )
            if not data:
                raise EOFError
            head += data
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    found.frombytes(payload[: len(payload) - len(payload) % found.itemsize])
        return head, found.tolist()

    def _receive_exactly(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        view = memoryview(data)
        while view.nbytes:
            count = self._stream.recv_into(view)
            if not count:
                raise EOFError
            view = view[count:]
        return data
