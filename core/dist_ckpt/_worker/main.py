"""Where a worker process begins.

Here: ``main``, and the command that gets there (``command``). Not here: what the worker does
(``loop``). The process is a fresh interpreter, never a fork; it does not import the user's main
module, and has a session of its own, so that Ctrl-C at the terminal does not reach it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import resource
import signal
import socket
import sys

from dist_ckpt._worker.channel import SocketChannel
from dist_ckpt._worker.loop import WorkerLoop

__all__ = ["command", "main"]

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from dist_ckpt._worker.main import main; main(int(sys.argv[1]))"
)


def command(executable: str, descriptor: int) -> list[str]:
    """Return how to start a worker that speaks through ``descriptor``.

    It gets this process's ``sys.path``, so that it imports what is imported here: the working
    directory alone would let any file there pass for a module.
    """
    path = [str(entry) or _here() for entry in sys.path]
    return [executable, "-P", "-c", _BOOT, str(descriptor), json.dumps(path)]


def _here() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - as the import system does
    except FileNotFoundError:  # it was removed: nothing can be imported from there
        return os.devnull


def main(descriptor: int) -> None:
    """Be a worker until the training process ends, or says so."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGXFSZ", "SIGPIPE"):
        # When to end is the training process's decision; a full disk is an error, not a signal.
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    with contextlib.suppress(RuntimeError, AttributeError, ValueError):
        faulthandler.enable()
    channel = SocketChannel(socket.socket(fileno=descriptor))
    try:
        received = channel.receive()
    except EOFError:
        return
    assert received is not None  # noqa: S101 - without a time-out there is a message
    config = received[0]
    with contextlib.suppress(OSError, ValueError):
        # Rank 0's worker has a connection to the worker of every rank.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with contextlib.suppress(OSError):
        os.nice(config.niceness)
    WorkerLoop(channel, config, is_process=True).run()
