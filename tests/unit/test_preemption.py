"""The guard in one process, and how ranks agree, with ranks that are threads."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dist_ckpt import SaveOptions
from dist_ckpt.errors import ConfigError
from dist_ckpt.preemption import Preempted, PreemptionGuard, shield_worker
from dist_ckpt.testing import ThreadWorld
from dist_ckpt.types import Communicator
from tests.multiprocess._world import run_program

WAIT_SECS = 60.0


def to_self(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def _handlers_are_back() -> Iterator[None]:
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)}
    others = set(threading.enumerate())
    yield
    assert {one: signal.getsignal(one) for one in before} == before
    left = set(threading.enumerate()) - others
    assert not [one for one in left if one.name.startswith("dist_ckpt-")]


# -- one process -----------------------------------------------------------------------------------


def test_a_signal_is_seen_at_the_next_poll_and_ever_after() -> None:
    with PreemptionGuard() as guard:
        assert [guard.poll() for _ in range(3)] == [False] * 3
        assert (guard.deadline, guard.remaining_secs) == (None, 30.0)
        to_self()
        assert guard.is_asked
        assert [guard.poll() for _ in range(3)] == [True] * 3
        assert guard.exit_code == 143


def test_a_second_signal_changes_nothing() -> None:
    with PreemptionGuard(["SIGTERM", signal.SIGUSR1]) as guard:
        to_self(signal.SIGUSR1)
        first = guard.deadline
        to_self()
        to_self(signal.SIGUSR1)
        assert guard.poll()
        assert guard.deadline == first
        assert guard.exit_code == 128 + signal.SIGUSR1


def test_the_grace_is_counted_from_the_signal() -> None:
    with PreemptionGuard(grace_secs=7.0) as guard:
        before = time.monotonic()
        to_self()
        after = time.monotonic()
        assert guard.deadline is not None
        assert before + 7.0 <= guard.deadline <= after + 7.0
        assert 0 < guard.remaining_secs <= 7.0
        assert 0 < guard.bounded().timeout_secs <= 7.0
        kept = guard.bounded(SaveOptions(timeout_secs=2.0, backend="zarr"))
        assert (kept.timeout_secs, kept.backend) == (2.0, "zarr")


def test_a_save_gets_a_second_even_when_the_grace_is_over() -> None:
    with PreemptionGuard(grace_secs=1e-6) as guard:
        guard.request()
        while guard.remaining_secs > 0:
            pass
        assert guard.bounded().timeout_secs == 1.0


def test_earlier_handlers_are_not_called_and_come_back() -> None:
    seen = []
    earlier = signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
    try:
        with PreemptionGuard() as guard:
            to_self()
            assert guard.poll()
            assert not seen
        to_self()
        assert seen == [1]
    finally:
        signal.signal(signal.SIGTERM, earlier)


def test_a_handler_that_was_set_later_stays() -> None:
    before = signal.getsignal(signal.SIGTERM)
    guard = PreemptionGuard().install()
    later = lambda *_: None
    signal.signal(signal.SIGTERM, later)
    guard.close()
    assert signal.getsignal(signal.SIGTERM) is later
    signal.signal(signal.SIGTERM, before)


def test_install_and_close_may_be_called_again() -> None:
    guard = PreemptionGuard()
    assert guard.install() is guard.install()
    guard.close()
    guard.close()
    with pytest.raises(ConfigError, match="is closed: make another"):
        guard.install()


def test_it_must_be_installed_in_the_main_thread() -> None:
    errors: list[BaseException] = []

    def install() -> None:
        try:
            PreemptionGuard().install()
        except ConfigError as error:
            errors.append(error)

    thread = threading.Thread(target=install, name="side")
    thread.start()
    thread.join()
    (error,) = errors
    assert "in thread 'side': Python handles signals in the main thread" in str(error)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP", "SIGNONE", 4711])
def test_a_signal_that_nobody_can_handle_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match=f"found {name!r}"):
        PreemptionGuard([name])


@pytest.mark.parametrize("grace_secs", [0, -1.0, float("nan"), float("inf")])
def test_a_grace_must_be_positive_and_finite(grace_secs: float) -> None:
    with pytest.raises(ConfigError, match="grace_secs: expected more than 0"):
        PreemptionGuard(grace_secs=grace_secs)


def test_a_forked_child_dies_of_the_signal_as_before() -> None:
    """Pools and workers of the user's program can be terminated while a guard is installed."""
    with PreemptionGuard() as guard:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, b"x")
            # Not `pause`: a signal just before it would be waited for in vain.
            for _ in range(600):
                select.select([], [], [], 0.1)
            os._exit(1)
        os.read(reader, 1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
        assert not guard.poll()


def test_a_worker_of_a_dataloader_can_be_shielded() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        shield_worker(0)
        to_self()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_preempted_ends_a_program_with_its_code() -> None:
    assert issubclass(Preempted, SystemExit)
    assert Preempted(143).code == 143


_LATE = """
import os, signal, sys, threading
from dist_ckpt.preemption import PreemptionGuard
guard = PreemptionGuard(grace_secs=0.3, ends_process=True).install()
os.kill(os.getpid(), signal.SIGTERM)
assert guard.poll()
if sys.argv[1] == "closed":
    guard.close()
    sys.exit(7)
try:
    threading.Event().wait()  # the storage hangs
finally:
    print("never")
"""


@pytest.mark.parametrize(("how", "code"), [("hangs", 143), ("closed", 7)])
def test_a_process_that_hangs_is_ended_after_the_grace(how: str, code: int) -> None:
    done = run_program(_LATE, how)
    assert done.returncode == code, done.stderr
    assert not done.stdout
    assert ("the grace is over, and this process has not stopped" in done.stderr) == (code == 143)
    assert ("in wait" in done.stderr) == (code == 143), "it shows where it hung"


# -- ranks that are threads, which can be asked but get no signal -----------------------------------


def begun(comm: Communicator, grace_secs: float = WAIT_SECS) -> PreemptionGuard:
    """Return a guard of a rank that is a thread: all of it but the handlers."""
    guard = PreemptionGuard(grace_secs=grace_secs)
    guard._agreement = guard._begin(comm)
    return guard


def end(guard: PreemptionGuard) -> None:
    assert guard._agreement is not None
    guard._agreement.close()


def steps() -> Iterator[int]:
    """Yield the steps of a training that would never end by itself."""
    deadline = time.monotonic() + WAIT_SECS
    step = 0
    while time.monotonic() < deadline:
        step += 1
        yield step
    raise AssertionError("never stopped")


@pytest.mark.parametrize("asked", [0, 1, 2])
def test_all_ranks_stop_at_the_same_poll(asked: int) -> None:
    """Whoever was asked, ranks that wait for each other in every step stop after the same one."""
    gradients = threading.Barrier(3)

    def train(comm: Communicator) -> int:
        guard = begun(comm)
        for step in steps():
            gradients.wait(WAIT_SECS)
            if step == 10 and comm.rank == asked:
                guard.request()
            if guard.poll():
                assert guard.poll()
                assert guard.deadline is not None
                end(guard)
                return step
        return 0

    found = ThreadWorld(3).run(train)
    assert len(set(found)) == 1, found
    assert found[0] in (10, 11)


def test_a_rank_that_lags_behind_does_what_the_others_have_done() -> None:
    """The rank that is asked in its 3rd step does not stop there: another has passed 7 polls."""
    passed_seven, asked = threading.Event(), threading.Event()

    def train(comm: Communicator) -> int:
        guard = begun(comm)
        for step in steps():
            if comm.rank == 1 and step == 8:
                passed_seven.set()
                asked.wait(WAIT_SECS)
            if comm.rank == 0 and step == 3:
                passed_seven.wait(WAIT_SECS)
                guard.request()
                asked.set()
            if guard.poll():
                end(guard)
                return step
        return 0

    found = ThreadWorld(2).run(train)
    assert len(set(found)) == 1, found
    assert found[0] >= 8


def test_all_are_asked_at_once() -> None:
    gradients = threading.Barrier(3)

    def train(comm: Communicator) -> int:
        guard = begun(comm)
        for step in steps():
            gradients.wait(WAIT_SECS)
            if step in (5 + comm.rank, 6 + comm.rank):
                guard.request()
            if guard.poll():
                end(guard)
                return step
        return 0

    found = ThreadWorld(3).run(train)
    assert len(set(found)) == 1, found
    assert found[0] in (5, 6)


@pytest.mark.parametrize("gone", [0, 1])
def test_without_an_answer_each_rank_stops_for_itself(
    gone: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The others wait a part of the grace, are told who is missing, and go on to save."""

    def train(comm: Communicator) -> None:
        if comm.rank == gone:
            comm.number_of("preemption")  # type: ignore[attr-defined]
            return
        guard = begun(comm, grace_secs=2.0)
        assert not guard.poll()
        if comm.rank == 2:
            guard.request()
        deadline = time.monotonic() + WAIT_SECS
        while not guard.is_asked and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        assert guard.poll()
        end(guard)

    ThreadWorld(3).run(train)
    assert f"ranks [{gone}] of 3 did not tell how far they are" in caplog.text


def test_guards_one_after_the_other_do_not_hear_each_other() -> None:
    def train(comm: Communicator) -> None:
        first = begun(comm)
        first.request()
        while not first.poll():
            pass
        end(first)
        second = begun(comm)
        assert not any(second.poll() for _ in range(100))
        end(second)

    ThreadWorld(2).run(train)


def test_ranks_that_meet_in_no_store_are_refused() -> None:
    class Others:
        rank, size = 0, 2

    with pytest.raises(ConfigError, match="ranks that meet in a store"):
        PreemptionGuard(communicator=Others()).install()  # type: ignore[arg-type]
