"""Children that ``multiprocessing`` spawns, as forks of a process that has imported torch.

Here: ``warm_popen``, which puts them in place of the interpreters that ``spawn`` starts, and
the server that forks them. Not here: the nursery, of which the server is a fork (``_world``).

A start costs milliseconds in place of seconds of imports. All else is as with ``spawn``: what
crosses is pickled, the main module is imported, and the working directory, environment, output,
umask and process group are those of the parent. What a cold start alone can show needs a real one.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import pickle
import socket
import sys
import traceback
from multiprocessing import context, forkserver, popen_forkserver, resource_tracker, spawn, util
from multiprocessing.connection import wait
from typing import Any, NoReturn

__all__ = ["serve", "warm_popen"]

_MOST_FDS = 64


def warm_popen(address: str) -> Any:
    """Return a value of ``SpawnProcess._Popen``: children are forks of the server at ``address``."""
    return staticmethod(type("WarmPopen", (_WarmPopen,), {"address": address}))


class _WarmPopen(popen_forkserver.Popen):
    """A process forked by the server, which stays its parent and reports how it ended."""

    method = "spawn"
    address = ""

    def _launch(self, process_obj: Any) -> None:
        data = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            context.reduction.dump(spawn.get_preparation_data(process_obj.name), data)
            context.reduction.dump(process_obj, data)
        finally:
            context.set_spawning_popen(None)
        umask = os.umask(0o77)
        os.umask(umask)
        theirs, ours = os.pipe()
        self.sentinel, status = os.pipe()
        # Open as long as this process object lives: by its end the child sees its parent's.
        self.finalizer = util.Finalize(self, util.close_fds, (os.dup(ours), self.sentinel))
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(self.address)
            fds = [theirs, status, 1, 2, resource_tracker.getfd(), *self._fds]
            socket.send_fds(client, [b"S"], fds)
            os.close(theirs)
            os.close(status)
            client.sendall(pickle.dumps((dict(os.environ), umask, os.getpgrp())))
        self.pid = forkserver.read_signed(self.sentinel)
        # A child that is killed while it starts is news by its exit code only.
        with contextlib.suppress(BrokenPipeError), os.fdopen(ours, "wb") as file:
            file.write(data.getbuffer())


def serve(listener: socket.socket, alive: int) -> NoReturn:
    """Fork for each request, until nobody holds the other end of the pipe ``alive``."""
    gc.freeze()  # else a collection in a fork copies the pages of all that is imported here
    while alive not in wait([listener, alive]):
        connection, _ = listener.accept()
        with connection:
            if os.fork() == 0:
                listener.close()
                os.close(alive)
                _guard(connection)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    os._exit(0)


def _guard(connection: socket.socket) -> NoReturn:
    """Fork the process, wait for it and report its exit code."""
    _, fds, _, _ = socket.recv_fds(connection, 1, _MOST_FDS)
    with connection.makefile("rb") as file:
        environment, umask, group = pickle.load(file)
    connection.close()
    data, status, stdout, stderr, tracker, *inherited = fds
    pid = os.fork()
    if pid == 0:
        os.close(status)
        os.setpgid(0, group)
        os.umask(umask)
        os.environ.clear()
        os.environ.update(environment)
        for number, descriptor in enumerate((stdout, stderr), start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)
        resource_tracker._resource_tracker._fd = tracker
        forkserver._forkserver._inherited_fds = inherited
        code = 1
        try:
            code = spawn._main(data, os.dup(data))
            atexit._run_exitfuncs()
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # Not through the end of the interpreter, which takes apart all that was imported.
        os._exit(code)
    for descriptor in (0, 1, 2, data, stdout, stderr, tracker, *inherited):
        os.close(descriptor)
    with contextlib.suppress(BrokenPipeError):  # nobody wants to know
        forkserver.write_signed(status, pid)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        forkserver.write_signed(status, code)
    os._exit(0)
