"""Real processes for tests: run one function as N ranks over gloo.

Here: ``run_ranks`` and what stands behind it. Not here: tests, or fakes of several ranks in one
process. Called by tests, from the main thread of a test process.

How it works. The first call starts a *nursery*: a process that has imported torch and waits. For
each call it imports the test module (once) and forks one child for every rank, so a rank costs some
milliseconds and starts clean: no process group, cache or changed global survives from the test
before. The nursery itself computes nothing and keeps one thread, which is what makes the fork safe.
The store that the ranks meet in lives in the test process, on a port the system chose.
Processes that ranks and programs spawn are forks as well (``_spawn``).

Usage::

    def save_it(rank: int, world_size: int, path: str) -> int:
        ...

    def test_save(tmp_path):
        assert run_ranks(save_it, 2, str(tmp_path)) == [0, 1]
"""

from __future__ import annotations

import atexit
import contextlib
import datetime as dt
import faulthandler
import gc
import importlib
import importlib.util
import multiprocessing.context
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from dataclasses import fields as fields_of
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["RankOutcome", "WorldError", "run_file", "run_program", "run_ranks", "start_nursery"]

GRACE_SECS = 5.0
"""How long the other ranks may still run after one of them failed unexpectedly."""

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Asking for devices through NVML does not initialise CUDA, which could not be forked.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
_PRELOAD = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint.state_dict",
    "torch.nn.parallel",
    "torch._dynamo",  # torch.compile and some optimizers import it: seconds for each rank otherwise
    "torch.optim",
    "dist_ckpt.builder",  # what checkpoint processes import
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutcome:
    """What became of one rank.

    ``error`` is the exception itself where it survived pickling, else None; ``error_type`` and
    ``message`` always tell. A rank that was killed or did not finish has ``finished=False``.
    """

    rank: int
    value: Any = None
    finished: bool = True
    error: BaseException | None = None
    error_type: str | None = None
    message: str = ""
    traceback: str = ""
    exit_code: int | None = None
    log: str = field(default="", repr=False)

    @property
    def ok(self) -> bool:
        """Whether the function returned."""
        return self.finished and self.error_type is None

    def describe(self) -> str:
        """Return the story of this rank, for a failure report."""
        if self.ok:
            return f"--- rank {self.rank}: returned"
        if self.finished:
            head = f"--- rank {self.rank}: {self.error_type}: {self.message}\n{self.traceback}"
        else:
            head = f"--- rank {self.rank}: {self.message}"
        return f"{head}\n[output of rank {self.rank}]\n{self.log[-8000:]}"


class WorldError(AssertionError):
    """Some ranks failed, died or hung. ``outcomes`` has one entry for each rank."""

    def __init__(self, message: str, outcomes: Sequence[RankOutcome] = ()) -> None:
        """Store the outcomes beside the message."""
        super().__init__(message)
        self.outcomes = tuple(outcomes)


def start_nursery() -> str:
    """Start the nursery now, if there is none; return the address for ``_spawn.warm_popen``."""
    return _Nursery.get().spawns_at


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_secs: float = 300,
    expect_errors: bool = False,
    init_process_group: bool = True,
    env: Mapping[str, str] | None = None,
    preload: str = "",
) -> list[Any]:
    """Run ``fn(rank, world_size, *args)`` in ``world_size`` processes; return the results by rank.

    Args:
        fn: A module-level function. Arguments and results are pickled.
        world_size: Number of ranks.
        args: Further arguments, the same for every rank.
        timeout_secs: After this, ranks that still run dump their stacks and are killed.
        expect_errors: Return a ``RankOutcome`` for each rank, whatever happened, except for a hang.
        init_process_group: Make the default (gloo) process group first. Without it, ``env://``
            works all the same: MASTER_ADDR, MASTER_PORT, RANK, LOCAL_RANK and WORLD_SIZE are set.
        env: Further environment variables of the ranks.
        preload: A module that is imported before the ranks are forked: once for all of them, and
            for those of later calls.

    Raises:
        WorldError: a rank hung or, unless ``expect_errors``, raised or died.
    """
    task = _Task(
        module=fn.__module__,
        file=str(Path(sys.modules[fn.__module__].__file__ or "").resolve()),
        qualname=fn.__qualname__,
        world_size=world_size,
        timeout_secs=timeout_secs,
        init_process_group=init_process_group,
        path=tuple(sys.path),
        env=dict(env or {}),
        preload=preload,
    )
    with tempfile.TemporaryDirectory(prefix="ranks-") as scratch:
        outcomes, hung = _run(task, pickle.dumps(args), Path(scratch), expect_errors=expect_errors)
    failed = [outcome for outcome in outcomes if not outcome.ok]
    if hung or (failed and not expect_errors):
        what = f"rank(s) {hung} did not finish" if hung else f"rank(s) {_ranks(failed)} failed"
        report = "\n".join(outcome.describe() for outcome in failed)
        raise WorldError(f"{fn.__qualname__} on {world_size} ranks: {what}\n{report}", outcomes)
    return outcomes if expect_errors else [outcome.value for outcome in outcomes]


def run_program(
    source: str,
    *arguments: str,
    cwd: Path | None = None,
    file: Path | None = None,
    is_strict: bool = False,
    timeout_secs: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run a program in a fork of the nursery: as an interpreter of its own, with torch imported.

    It is ``__main__``, and it ends as any interpreter does: threads, ``atexit``, exit code. What
    needs a start of its own (which modules are imported, flags of the interpreter) is for
    ``subprocess``.

    Args:
        source: The text of the program.
        arguments: ``sys.argv[1:]``.
        cwd: Where it runs.
        file: The file that ``source`` is from; its folder is the first entry of ``sys.path``.
        is_strict: Whether warnings are errors, as with ``python -W error``.
        timeout_secs: After this it is killed.

    Raises:
        WorldError: It did not end in time.
    """
    task = _Task(
        world_size=1,
        timeout_secs=timeout_secs,
        path=tuple(sys.path) if file is None else (str(file.parent), *sys.path),
        env={"CUDA_VISIBLE_DEVICES": ""},
        program=_Program(
            source, (str(file or "-c"), *arguments), str(cwd or Path.cwd()), is_strict
        ),
    )
    nursery = _Nursery.get()
    pipes = [os.pipe() for _ in range(2)]
    (connection,), pids = nursery.start(task, b"", [write_end for _, write_end in pipes])
    for _, write_end in pipes:
        os.close(write_end)
    texts, readers = _read_all([read_end for read_end, _ in pipes])
    # As with `subprocess.run`: over when nobody has its output open any more, its children included.
    deadline = time.monotonic() + timeout_secs
    for reader in readers:
        reader.join(max(0.0, deadline - time.monotonic()))
    hangs = any(reader.is_alive() for reader in readers)
    if hangs:
        _dump_stacks(pids)
        _kill(pids)
    (code,) = nursery.finish(pids)
    connection.close()
    if hangs:
        raise WorldError(f"the program did not end in {timeout_secs:g} s:\n{texts}")
    return subprocess.CompletedProcess([], code, *texts)


def run_file(
    script: Path, *, cwd: Path, is_fresh: bool, timeout_secs: float
) -> subprocess.CompletedProcess[str]:
    """Run a script in an interpreter of its own, or as ``run_program`` does: seconds less of CPU."""
    if not is_fresh:
        return run_program(script.read_text(), cwd=cwd, file=script, timeout_secs=timeout_secs)
    return subprocess.run(
        [sys.executable, str(script)],
        cwd=cwd,
        env={**os.environ, **_ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=timeout_secs,
        check=False,
    )


def _read_all(descriptors: Sequence[int]) -> tuple[list[str], list[threading.Thread]]:
    """Return what is read, and the threads that read it."""
    texts = ["" for _ in descriptors]

    def read(number: int, descriptor: int) -> None:
        with open(descriptor, encoding="utf-8", errors="replace") as file:
            texts[number] = file.read()

    readers = [
        threading.Thread(target=read, args=each, daemon=True) for each in enumerate(descriptors)
    ]
    for reader in readers:
        reader.start()
    return texts, readers


# -- the test process ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Program:
    source: str
    argv: tuple[str, ...]
    cwd: str
    is_strict: bool

    def run(self) -> None:
        os.chdir(self.cwd)
        if self.is_strict:
            warnings.simplefilter("error")
        sys.argv = list(self.argv)
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        main.__file__ = self.argv[0]
        exec(compile(self.source, self.argv[0], "exec"), main.__dict__)  # noqa: S102 - a test's


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    module: str = ""
    file: str = ""
    qualname: str = ""
    world_size: int
    timeout_secs: float
    init_process_group: bool = False
    path: tuple[str, ...]
    env: dict[str, str]
    preload: str = ""
    program: _Program | None = None
    port: int = 0
    scratch: str = ""


def _ranks(outcomes: Iterable[RankOutcome]) -> list[int]:
    return [outcome.rank for outcome in outcomes]


def _run(
    task: _Task, args: bytes, scratch: Path, *, expect_errors: bool
) -> tuple[list[RankOutcome], list[int]]:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    task = replace(task, port=store.port, scratch=str(scratch))
    nursery = _Nursery.get()
    connections, pids = nursery.start(task, args)
    grace = None if expect_errors else GRACE_SECS
    reports, hung = _collect(connections, task.timeout_secs, grace)
    if hung:
        _dump_stacks([pids[rank] for rank in hung])
    else:
        for connection in connections:  # nobody leaves while another may still talk to it
            with contextlib.suppress(OSError):
                connection.send_bytes(b"bye")
    if hung or any(report is None for report in reports):
        _kill(pids)
    exit_codes = nursery.finish(pids)
    for connection in connections:
        connection.close()
    outcomes = [
        _outcome(
            rank, reports[rank], exit_code=exit_codes[rank], scratch=scratch, hung=rank in hung
        )
        for rank in range(task.world_size)
    ]
    del store
    # Ranks that hang only because another one failed are not the news.
    blamed = [] if any(_failed_alone(outcome) for outcome in outcomes) and grace else hung
    return outcomes, blamed


def _failed_alone(outcome: RankOutcome) -> bool:
    return outcome.finished and not outcome.ok


def _collect(
    connections: Sequence[Connection], timeout_secs: float, grace: float | None
) -> tuple[list[bytes | None], list[int]]:
    """Wait for one report from each rank; return them with the ranks that never gave one.

    A rank that closed its pipe without a report died; its report is None but it did not hang.
    """
    reports: list[bytes | None] = [None] * len(connections)
    pending = dict(enumerate(connections))
    deadline = time.monotonic() + timeout_secs
    while pending and (left := deadline - time.monotonic()) > 0:
        ready = wait(list(pending.values()), timeout=left)
        for rank in [rank for rank, connection in pending.items() if connection in ready]:
            connection = pending.pop(rank)
            try:
                reports[rank] = connection.recv_bytes()
                bad = reports[rank][:1] != b"+"  # type: ignore[index]
            except (EOFError, OSError):
                bad = True
            if bad and grace is not None:
                deadline = min(deadline, time.monotonic() + grace)
    return reports, sorted(pending)


def _outcome(
    rank: int, report: bytes | None, *, exit_code: int, scratch: Path, hung: bool
) -> RankOutcome:
    log_file = scratch / f"rank{rank}.log"
    log = log_file.read_text(errors="replace") if log_file.exists() else ""
    if report is None:
        how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
        message = "did not finish in time; its stacks are below" if hung else f"died with {how}"
        return RankOutcome(rank=rank, finished=False, message=message, exit_code=exit_code, log=log)
    return RankOutcome(rank=rank, exit_code=exit_code, log=log, **pickle.loads(report[1:]))


def _dump_stacks(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(0.5)  # the handlers write from the ranks, which cannot tell when they are done


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class _Nursery:
    """The process that forks ranks, seen from the test process."""

    _current: _Nursery | None = None

    def __init__(self) -> None:
        """Start it; it imports torch while we go on."""
        ours, theirs = socket.socketpair()
        self._socket = ours
        self._connection = Connection(os.dup(ours.fileno()))
        self.spawns_at = f"\0dist_ckpt-tests-{os.getpid()}-{ours.fileno()}"
        with theirs, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.spawns_at)
            listener.listen()
            fds = [theirs.fileno(), listener.fileno()]
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), *map(str, fds)],
                pass_fds=fds,
                env={**os.environ, **_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
            )
        atexit.register(self.close)

    @classmethod
    def get(cls) -> _Nursery:
        """Return the live nursery of this process, or start one."""
        if cls._current is None or cls._current._process.poll() is not None:
            cls._current = cls()
        return cls._current

    def start(
        self, task: _Task, args: bytes, output: Sequence[int] = ()
    ) -> tuple[list[Connection], list[int]]:
        """Fork the ranks; return a pipe to each of them and their process ids.

        ``output``: descriptors that a program has for its output and its errors.
        """
        pipes = [Pipe() for _ in range(task.world_size)]
        fields = {one.name: getattr(task, one.name) for one in fields_of(task)}
        if task.program is not None:  # plain: the nursery's own classes have another module
            fields["program"] = astuple(task.program)
        self._connection.send_bytes(pickle.dumps((fields, args)))
        theirs_all = [theirs.fileno() for _, theirs in pipes]
        socket.send_fds(self._socket, [b"F"], [*theirs_all, *output])
        for _, theirs in pipes:
            theirs.close()
        reply = self._receive()
        if "failure" in reply:
            raise WorldError(f"the ranks could not be started:\n{reply['failure']}")
        return [ours for ours, _ in pipes], reply["pids"]

    def finish(self, pids: Sequence[int]) -> list[int]:
        """Return the exit codes, negative for signals; kills what does not leave by itself."""
        if not self._connection.poll(GRACE_SECS):
            _kill(pids)
        codes: list[int] = self._receive()["exit_codes"]
        return codes

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _receive(self) -> dict[str, Any]:
        try:
            reply: dict[str, Any] = pickle.loads(self._connection.recv_bytes())
        except EOFError:
            raise WorldError(f"the nursery ended with code {self._process.wait()}") from None
        return reply


# -- the nursery -----------------------------------------------------------------------------------


def _nursery_main(descriptor: int, listener: int) -> None:
    for name in _PRELOAD:
        importlib.import_module(name)
    _serve_spawns(socket.socket(fileno=listener), descriptor)
    channel = socket.socket(fileno=descriptor)
    connection = Connection(os.dup(descriptor))
    while True:
        try:
            fields, args = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        given = fields.pop("program")
        task = _Task(**fields, program=_Program(*given) if given else None)
        # One pipe for each rank; a program has its output and its errors besides.
        _, fds, _, _ = socket.recv_fds(channel, 1, 3 if given else task.world_size)
        try:
            sys.path[:] = task.path
            if task.module:
                _load_module(task)
            if task.preload:
                importlib.import_module(task.preload)
        except BaseException:
            _reply(connection, failure=traceback.format_exc())
            for fd in fds:
                os.close(fd)
            continue
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()  # else a collection in a rank copies the pages of all that is imported here
        ours = (channel, connection)
        pids = [_fork_rank(task, args, rank, fds=fds, ours=ours) for rank in range(task.world_size)]
        for fd in fds:
            os.close(fd)
        _reply(connection, pids=pids)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        _reply(connection, exit_codes=codes)


def _serve_spawns(listener: socket.socket, descriptor: int) -> None:
    """Fork the server of spawned processes, before there is anything of a test here."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tests.multiprocess._spawn import serve, warm_popen

    multiprocessing.context.SpawnProcess._Popen = warm_popen(listener.getsockname().decode())
    alive, held = os.pipe()  # it ends with this process and its forks
    with listener:
        if os.fork() == 0:
            os.close(held)
            os.close(descriptor)
            serve(listener, alive)
    os.close(alive)


def _reply(connection: Connection, **reply: Any) -> None:
    connection.send_bytes(pickle.dumps(reply))


def _load_module(task: _Task) -> Any:
    known = sys.modules.get(task.module)
    if known is not None and str(Path(known.__file__ or "").resolve()) == task.file:
        return known
    with contextlib.suppress(ImportError):
        module = importlib.import_module(task.module)
        if str(Path(module.__file__ or "").resolve()) == task.file:
            return module
    spec = importlib.util.spec_from_file_location(task.module, task.file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{task.file} is not a python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[task.module] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[task.module]
        raise
    return module


def _fork_rank(
    task: _Task, args: bytes, rank: int, *, fds: Sequence[int], ours: Iterable[Any]
) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        for item in ours:
            item.close()
        if task.program is None:
            for other, fd in enumerate(fds):
                if other != rank:
                    os.close(fd)
            _rank_main(task, args, rank, connection=Connection(fds[rank]))
        _prepare_program(task, *fds[1:])
    except BaseException:
        traceback.print_exc()
        os._exit(70)  # only reached when the lines above themselves broke
    assert task.program is not None
    raise _BecomeProgram(task.program)


class _BecomeProgram(BaseException):
    """Leaves the nursery's own frames, in a fork of it."""

    def __init__(self, program: _Program) -> None:
        super().__init__()
        self.program = program


def _prepare_program(task: _Task, stdout: int, stderr: int) -> None:
    os.setpgid(0, 0)
    for number, descriptor in enumerate((stdout, stderr), start=1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.update(task.env)


# -- a rank ----------------------------------------------------------------------------------------


def _rank_main(task: _Task, args: bytes, rank: int, *, connection: Connection) -> NoReturn:
    os.setpgid(0, 0)
    _redirect_output(Path(task.scratch) / f"rank{rank}.log")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # Should the test process be gone by then, nobody else ends this one.
    faulthandler.dump_traceback_later(task.timeout_secs + 60, exit=True)
    os.environ.update(_environment(task, rank))
    report = b"+"
    try:
        value = _call(task, args, rank)
        report += pickle.dumps({"value": value})
    except BaseException as error:
        report = b"-" + _pickled_error(error)
    connection.send_bytes(report)
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(EOFError, OSError):
        connection.recv_bytes()
    os._exit(0)


def _environment(task: _Task, rank: int) -> dict[str, str]:
    size = str(task.world_size)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(task.port),
        # The store already runs in the test process: with this, env:// joins it on every rank.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
        **task.env,
    }


def _call(task: _Task, args: bytes, rank: int) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    timeout = dt.timedelta(seconds=task.timeout_secs)
    if task.init_process_group:
        store = dist.TCPStore("127.0.0.1", task.port, is_master=False, timeout=timeout)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=task.world_size, timeout=timeout
        )
    fn: Any = _load_module(task)
    for name in task.qualname.split("."):
        fn = getattr(fn, name)
    return fn(rank, task.world_size, *pickle.loads(args))


def _pickled_error(error: BaseException) -> bytes:
    told = {
        "error_type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
    }
    try:
        whole = pickle.dumps({**told, "error": error})
        pickle.loads(whole)
    except Exception:
        return pickle.dumps(told)
    return whole


def _redirect_output(file: Path) -> None:
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


if __name__ == "__main__":
    _program = None
    try:
        _nursery_main(*map(int, sys.argv[1:]))
    except _BecomeProgram as _forked:
        _program = _forked.program
    if _program is not None:
        _program.run()
