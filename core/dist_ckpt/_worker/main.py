"""The entry point of a worker process.

Here: ``main``, and the command line that runs it (``command``). Not here: what the worker does
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
    """Return the command line of a worker whose channel is ``descriptor``.

    It gets this process's ``sys.path``, so that both import the same modules, and ``-P``, so that
    no file in the working directory is taken for a module.
    """
    path = [str(entry) or _here() for entry in sys.path]
    return [executable, "-P", "-c", _BOOT, str(descriptor), json.dumps(path)]


def _here() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - as the import system does
    except FileNotFoundError:  # the directory was removed: nothing can be imported from it
        return os.devnull


def main(descriptor: int) -> None:
    """Run a worker until the training process ends or sends ``Close``."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGXFSZ", "SIGPIPE"):
        # The training process decides when this ends; a full disk or a closed pipe is an error to
        # handle, not a signal to die of.
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
