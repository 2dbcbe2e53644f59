"""One started worker, as the training process sees it: its process or thread, and its channel.

Here: ``Link``: start a worker, receive its messages, notice its death. Not here: when another
worker is started (``worker``), one save (``saves``). Each link has a reader thread, which ends with
it.
"""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Final, Literal

from dist_ckpt._worker.channel import Channel, SocketChannel, queue_channels
from dist_ckpt._worker.loop import WorkerLoop
from dist_ckpt._worker.main import command
from dist_ckpt._worker.messages import (
    PROTOCOL,
    Close,
    Configure,
    Ended,
    Freed,
    Heartbeat,
    Hello,
    HubServed,
    Written,
)
from dist_ckpt._worker.saves import GivenUpError
from dist_ckpt.errors import AsyncSaveError, ConfigError, WorkerDiedError

if TYPE_CHECKING:
    from dist_ckpt._worker.messages import ServeHub
    from dist_ckpt._worker.saves import WorkerSave
    from dist_ckpt.errors import CheckpointingException

__all__ = ["Link"]

logger = logging.getLogger(__name__)

START_SECS = 120.0
"""How long a worker may take to say hello: a cold interpreter on a slow shared disk."""
SILENCE_SECS = 60.0
"""After so long without a heartbeat the worker counts as dead."""
_SLICE_SECS = 1.0
"""Silence is counted in slices of this length: a job that was suspended counts as one slice."""
_REAP_SECS = 10.0

_LEFT: Final[list[subprocess.Popen[bytes]]] = []
"""Workers that end on their own (``leave``); reaped when another one is started."""


class Link:
    """A worker that has been started. Any thread may call its methods.

    Args:
        kind: A process of its own, or a thread of this one.
        config: The first message to the worker.

    Raises:
        ConfigError: There is no Python to start.
        WorkerDiedError: It cannot be started.
    """

    def __init__(self, kind: Literal["process", "thread"], config: Configure) -> None:
        """Start it without waiting until it is ready."""
        self._config = config
        self._lock = threading.Lock()
        self._saves: dict[int, WorkerSave] = {}
        self.arenas: set[int] = set()
        self.hub: HubServed | None = None
        self._ready = threading.Event()
        self._hub_served = threading.Event()
        self._phase, self._nbytes = "starting", 0
        self._is_closing = self._is_left = False
        self._silence = ""
        self.death: CheckpointingException | None = None
        self._is_over = False
        self._process: subprocess.Popen[bytes] | None = None
        self._channel = self._start_process() if kind == "process" else self._start_thread()
        self._reader = threading.Thread(
            target=self._read, name=f"dist_ckpt-worker-{config.rank}-reader", daemon=True
        )
        self._reader.start()

    @property
    def pid(self) -> int | None:
        """The process, None for a thread."""
        return None if self._process is None else self._process.pid

    @property
    def owner_pid(self) -> int:
        """The process that started it; a forked child of that process must not use it."""
        return self._config.parent_pid

    @property
    def is_alive(self) -> bool:
        """Whether it can be given work."""
        return not self._is_over and not self._is_closing and self._channel.can_send

    def wait_until_ready(self, timeout_secs: float = START_SECS) -> None:
        """Wait until the worker has said hello.

        Raises:
            WorkerDiedError: It died, or does not answer.
        """
        if not self._ready.wait(timeout_secs):
            self._silence = f"did not answer within {timeout_secs:g} s"
            self._kill()
            self._ready.wait(_REAP_SECS)
        if self.death is not None:
            raise self.death

    def ask_for_hub(self, message: ServeHub) -> None:
        """Send it; ``wait_for_hub`` returns the answer."""
        self._hub_served.clear()
        self.send(message)

    def wait_for_hub(self, timeout_secs: float) -> HubServed | None:
        """Return the worker's answer to ``ServeHub``, None if there is none in time."""
        self._hub_served.wait(timeout_secs)
        return self.hub

    def register(self, save: WorkerSave) -> None:
        """Pass all messages about ``save`` to it, and the worker's death."""
        with self._lock:
            if not self._is_over:
                self._saves[save.number] = save
                return
        save.handle_death(self._ended_error())

    def send(self, message: object, descriptors: tuple[int, ...] = ()) -> None:
        """Send; ``OSError`` if the worker is gone or does not read.

        After a failed send the worker sees the end of the channel, and finishes saves that are
        staged in full.
        """
        self._channel.send(message, descriptors)

    def end_soon(self) -> None:
        """Ask it to finish the saves that are fully staged, then end; do not wait."""
        self._is_closing = True
        try:
            self.send(Close())
        except OSError:
            logger.debug("the worker had ended before it was closed")

    def leave(self) -> None:
        """Close the connection: the process finishes fully staged saves, then ends by itself."""
        with self._lock:
            self._is_closing = self._is_left = True
            self._saves = {}
        if self._process is not None:
            _LEFT.append(self._process)
        self._channel.shut_down()
        self._reader.join(_REAP_SECS)

    def close(self, timeout_secs: float) -> None:
        """Ask it to finish the saves that are fully staged, then end; kill it after the time."""
        self.end_soon()
        self._reader.join(timeout_secs)
        if not self._reader.is_alive():
            return
        self._silence = f"did not end within {timeout_secs:g} s"
        if self._process is not None:
            self._kill()
            self._reader.join(_REAP_SECS)
            return
        error = GivenUpError(f"{self._name()} {self._silence}, {self._doing()}.")
        with self._lock:
            saves, self._saves = self._saves, {}
        for save in saves.values():
            save.give_up(error)

    # -- starting ----------------------------------------------------------------------------------

    def _start_process(self) -> Channel:
        if not sys.executable:
            raise ConfigError(
                "this Python does not know its own executable: no worker process can be started.",
                hint='use worker="thread".',
            )
        _LEFT[:] = [process for process in _LEFT if process.poll() is None]
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(  # noqa: S603 - our own interpreter
                    command(sys.executable, theirs.fileno()),
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            channel = SocketChannel(ours)
        except OSError as error:
            ours.close()
            raise WorkerDiedError(
                f"{sys.executable} cannot be started as the worker of rank {self._config.rank}: "
                f"{error}.",
                hint='use worker="thread".',
            ) from error
        except BaseException:
            ours.close()
            raise
        try:
            channel.send(self._config)
        except OSError:
            logger.debug("the worker ended at once")  # the reader will see how
        return channel

    def _start_thread(self) -> Channel:
        ours, theirs = queue_channels()
        loop = WorkerLoop(theirs, self._config, is_process=False)
        name = f"dist_ckpt-worker-{self._config.rank}"
        threading.Thread(target=loop.run, name=name, daemon=True).start()
        return ours

    # -- the reader --------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            self._read_all()
        except EOFError:
            pass
        except Exception:
            logger.exception("%s cannot be understood", self._name())
            self._silence = "sent what cannot be understood"
            self._kill()
        finally:
            self._end()

    def _read_all(self) -> None:
        """Handle messages until the channel ends, or the process has ended without closing it."""
        silent_secs, has_exited = 0.0, False
        while True:
            received = self._channel.receive(0 if has_exited else _SLICE_SECS)
            if received is not None:
                silent_secs = 0.0
                self._handle(received[0])
            elif has_exited:
                return  # no end of file came: a child has inherited the worker's end
            elif self._process is not None:
                has_exited = self._process.poll() is not None
                silent_secs += _SLICE_SECS
                limit = SILENCE_SECS if self._ready.is_set() else START_SECS
                if silent_secs >= limit:
                    self._silence = f"gave no sign of life for {silent_secs:g} s"
                    self._kill()

    def _handle(self, message: object) -> None:
        match message:
            case Heartbeat():
                self._phase, self._nbytes = message.phase, message.nbytes
            case Hello():
                if message.protocol != PROTOCOL:
                    self._silence = f"is of another release of this library, {message.protocol}"
                    self._kill()
                    return
                self._phase = "waiting for a save"
                self._ready.set()
            case HubServed():
                self.hub = message
                self._hub_served.set()
            case Freed() | Written():
                if save := self._saves.get(message.number):
                    save.handle(message)
            case Ended():
                with self._lock:
                    save = self._saves.pop(message.number, None)
                if save is not None:
                    save.handle(message)

    def _end(self) -> None:
        """Reap the worker and wake everything that waits for it."""
        code = self._reap()
        with self._lock:
            is_expected = self._is_closing or not self._channel.can_send
            if self._silence or not is_expected or code not in (0, None):
                self.death = self._death(code)
            self._is_over = True
            saves, self._saves = self._saves, {}
        self._channel.close()
        if self.death is not None:
            logger.warning("%s", self.death)
        self._ready.set()
        self._hub_served.set()
        for save in saves.values():
            save.handle_death(self._ended_error())

    def _reap(self) -> int | None:
        if self._process is None or self._is_left:
            return None
        try:
            return self._process.wait(_REAP_SECS)
        except subprocess.TimeoutExpired:
            self._kill()
            return self._process.wait()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    # -- messages of errors ------------------------------------------------------------------------

    def _ended_error(self) -> CheckpointingException:
        if self.death is not None:
            return self.death
        return AsyncSaveError(f"{self._name()} was closed before this save had ended.")

    def _death(self, code: int | None) -> WorkerDiedError:
        hint = None
        if self._silence:
            how = self._silence
        elif code is None:
            how = "ended by an error, which is in the log"
        elif code < 0:
            how = f"was killed by {_signal_name(-code)}"
            if -code == signal.SIGKILL:
                hint = "this is how the system ends processes when memory runs out."
        else:
            how = f"ended with exit code {code}"
        if self._phase == "starting":
            hint = (
                f'its output has the reason; if {sys.executable} is no Python, use worker="thread".'
            )
        return WorkerDiedError(f"{self._name()} {how}, {self._doing()}.", hint=hint)

    def _name(self) -> str:
        which = f"process {self.pid}" if self._process is not None else "a thread"
        return f"the worker of rank {self._config.rank} ({which})"

    def _doing(self) -> str:
        done = f", {self._nbytes} bytes done" if self._nbytes else ""
        return f"while it was {self._phase}{done}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
