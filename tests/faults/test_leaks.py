"""The leak check sees what it is for: otherwise no test that uses it says anything."""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults._leaks import no_leaks


@contextlib.contextmanager
def a_process(_: Path) -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield
        process.communicate()


@contextlib.contextmanager
def an_unreaped_process(_: Path) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield
    process.wait()


@contextlib.contextmanager
def a_thread(_: Path) -> Iterator[None]:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="left")
    thread.start()
    yield
    end.set()
    thread.join()


@contextlib.contextmanager
def a_descriptor(folder: Path) -> Iterator[None]:
    with (folder / "left").open("w"):
        yield


@contextlib.contextmanager
def shared_memory(_: Path) -> Iterator[None]:
    descriptor = os.memfd_create("left")
    os.ftruncate(descriptor, 4096)
    mapping = mmap.mmap(descriptor, 4096)
    os.close(descriptor)
    yield
    mapping.close()


@contextlib.contextmanager
def an_attempt(folder: Path) -> Iterator[None]:
    (folder / "deep" / ".dist-ckpt-1-left.attempt").mkdir(parents=True)
    yield


LEAKS: dict[str, Callable[[Path], contextlib.AbstractContextManager[None]]] = {
    r"process \d+: [^Z] ": a_process,
    r"process \d+: Z ": an_unreaped_process,
    "thread left": a_thread,
    r"descriptor \d+: .*/left": a_descriptor,
    r"mapping /memfd:left .*x 1": shared_memory,
    r"left behind: .*deep/\.dist-ckpt-1-left\.attempt": an_attempt,
}


@pytest.mark.parametrize("told", LEAKS)
def test_what_is_left_is_named(told: str, tmp_path: Path) -> None:
    """Each kind, after the time that endings are given."""
    leak = LEAKS[told](tmp_path)
    with pytest.raises(AssertionError, match=told), no_leaks(tmp_path, timeout_secs=0.2):
        leak.__enter__()
    leak.__exit__(None, None, None)


def test_what_ends_by_itself_is_waited_for(tmp_path: Path) -> None:
    """A process and a thread that end a little later are no leak; nor is what was there before."""
    with a_thread(tmp_path), a_descriptor(tmp_path), no_leaks(tmp_path):
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        threading.Thread(target=process.communicate).start()


def test_an_error_inside_comes_through(tmp_path: Path) -> None:
    """It is the news, not what it left."""
    with pytest.raises(ZeroDivisionError), no_leaks(tmp_path, timeout_secs=0):
        (tmp_path / ".dist-ckpt-1").mkdir()
        raise ZeroDivisionError
