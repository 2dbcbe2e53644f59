"""Events of saves: what a line of JSON holds, what the log says, and that no sink harms a save."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt import events
from dist_ckpt.errors import StorageError
from dist_ckpt.events import (
    Committed,
    Event,
    Failed,
    JsonLinesSink,
    LoggingSink,
    Pruned,
    SaveStarted,
    Staged,
    Written,
    emit_to,
    json_line,
)

KINDS = (SaveStarted, Staged, Written, Committed, Failed, Pruned)
LOG = "dist_ckpt.events"

_SECS = st.floats(min_value=0, allow_infinity=False, allow_nan=False)
_VALUES = {
    "str": st.text(st.characters(codec=None)),  # lone surrogates too: names of files have them
    "int": st.integers(min_value=0),
    "bool": st.booleans(),
    "float": _SECS,
}


def any_event() -> st.SearchStrategy[Event]:
    def of(kind: type[Event]) -> st.SearchStrategy[Event]:
        return st.builds(kind, **{f.name: _VALUES[str(f.type)] for f in dataclasses.fields(kind)})

    return st.one_of([of(kind) for kind in KINDS])


def from_line(line: bytes) -> Event:
    values = json.loads(line)
    kind: type[Event] = getattr(events, values.pop("event"))
    return kind(**values)


def committed(**values: Any) -> Committed:
    given_values = {"path": "/c/step-3", "rank": 0, "save": 3, "is_async": True, "time": 5.0}
    return Committed(**{**given_values, "secs": 2.0, "nbytes": 3_000_000_000, **values})


def staged(**values: Any) -> Staged:
    times = {"stall_secs": 0.25, "wait_secs": 0.125, "copy_secs": 0.5}
    common = {"path": "/c/step-3", "rank": 0, "save": 3, "is_async": True}
    return Staged(**{**common, **times, "nbytes": 1500, **values})


# ------------------------------------------------------------------------------------- the events


@given(any_event())
def test_an_event_is_one_line_of_ascii_json_and_comes_back_from_it(event: Event) -> None:
    line = json_line(event)

    assert line.isascii()
    assert line.endswith(b"\n")
    assert len(line.splitlines()) == 1
    assert from_line(line) == event


def test_a_line_names_the_event_first_and_has_all_of_its_fields() -> None:
    values = json.loads(json_line(committed()))

    assert values == {
        "event": "Committed", "path": "/c/step-3", "rank": 0, "save": 3, "is_async": True,
        "time": 5.0, "secs": 2.0, "nbytes": 3_000_000_000,
    }  # fmt: skip
    assert next(iter(values)) == "event"


def test_what_json_cannot_say_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_line(committed(secs=float("inf")))


def test_events_are_values() -> None:
    assert committed() == committed()
    with pytest.raises(dataclasses.FrozenInstanceError):
        committed().rank = 1  # type: ignore[misc]


def test_an_event_is_of_now_unless_told_otherwise() -> None:
    first = SaveStarted(path="p", rank=0, save=1, is_async=False)
    second = SaveStarted(path="p", rank=0, save=1, is_async=False)

    assert 1.6e9 < first.time <= second.time


# ------------------------------------------------------------------------------------- JSON lines


def test_the_file_and_its_directory_are_made_with_the_first_event(tmp_path: Path) -> None:
    path = tmp_path / "new" / "deep" / "events.jsonl"
    sink = JsonLinesSink(path)
    assert not (tmp_path / "new").exists()

    sink.emit(committed())
    sink.emit(staged(time=6.0))

    assert [from_line(line) for line in path.read_bytes().splitlines()] == [
        committed(),
        staged(time=6.0),
    ]


def test_a_file_that_is_there_is_appended_to(tmp_path: Path) -> None:
    JsonLinesSink(tmp_path / "e").emit(committed(save=1))
    JsonLinesSink(tmp_path / "e").emit(committed(save=2))

    lines = (tmp_path / "e").read_bytes().splitlines()
    assert [json.loads(line)["save"] for line in lines] == [1, 2]


def test_a_file_that_was_moved_away_is_begun_anew_and_no_descriptor_stays(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    sink = JsonLinesSink(tmp_path / "e")

    sink.emit(committed(save=1))
    (tmp_path / "e").rename(tmp_path / "e.1")
    sink.emit(committed(save=2))

    assert json.loads((tmp_path / "e.1").read_bytes())["save"] == 1
    assert json.loads((tmp_path / "e").read_bytes())["save"] == 2
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def append_many(path: Path, rank: int, count: int) -> None:
    sink = JsonLinesSink(path)
    for save in range(count):
        sink.emit(Failed(
            path="p" * 300, rank=rank, save=save, is_async=True, secs=1.0, phase="x", error="e" * 999
        ))  # fmt: skip


def test_lines_of_several_threads_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "e"
    threads = [threading.Thread(target=append_many, args=(path, rank, 100)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    found = [from_line(line) for line in path.read_bytes().splitlines()]
    assert {(event.rank, event.save) for event in found} == {
        (rank, save) for rank in range(4) for save in range(100)
    }
    assert len(found) == 400


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "e"
    code = """if True:
        import sys
        from dist_ckpt.events import Failed, JsonLinesSink
        path, rank = sys.argv[1], int(sys.argv[2])
        common = {"path": "p" * 300, "rank": rank, "is_async": True}
        sink = JsonLinesSink(path)
        for save in range(200):
            sink.emit(Failed(save=save, secs=1.0, phase="x", error="e" * 999, **common))
    """
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, str(path), str(rank)]) for rank in range(2)
    ]
    assert [process.wait(60) for process in ranks] == [0, 0]

    found = [from_line(line) for line in path.read_bytes().splitlines()]
    assert len(found) == 400
    for rank in range(2):
        assert [event.save for event in found if event.rank == rank] == list(range(200))


@pytest.mark.parametrize("cut", [1, 40])
def test_a_torn_line_is_told_and_the_next_event_begins_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    """As on a full disk: a part of the line gets through."""
    path, write = tmp_path / "e", os.write
    sink = JsonLinesSink(path)
    sink.emit(committed(save=1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:cut]))
        with pytest.raises(StorageError, match=rf"wrote {cut} of the \d+ bytes"):
            sink.emit(committed(save=2))
    sink.emit(committed(save=3))
    sink.emit(committed(save=4))

    first, torn, *rest = path.read_bytes().splitlines()
    assert from_line(first) == committed(save=1)
    assert len(torn) == cut
    assert [from_line(line) for line in rest] == [committed(save=3), committed(save=4)]


def test_a_line_whose_break_alone_got_through_leaves_nothing_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "e", os.write
    sink = JsonLinesSink(path)
    for cut in (5, 0, 1):  # a torn line; nothing at all; the break that ends the torn line
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda fd, data, cut=cut: write(fd, data[:cut]))
            with pytest.raises(StorageError):
                sink.emit(committed())
    sink.emit(committed(save=3))

    torn, whole = path.read_bytes().splitlines()
    assert len(torn) == 5
    assert from_line(whole) == committed(save=3)


# ---------------------------------------------------------------------------------------- the log


def test_a_commit_is_logged_with_size_speed_and_stall(caplog: pytest.LogCaptureFixture) -> None:
    sink = LoggingSink()
    with caplog.at_level(logging.INFO, logger=LOG):
        sink.emit(staged())
        sink.emit(committed())

    message = (
        "rank 0, /c/step-3: background save 3 committed 3.00 GB in 2.000 s (1.500 GB/s); "
        "blocked the caller for 0.250 s"
    )
    assert caplog.record_tuples == [(LOG, logging.INFO, message)]


def test_a_commit_in_no_time_and_without_a_stall_is_logged_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger=LOG):
        LoggingSink().emit(committed(secs=0.0, nbytes=12, is_async=False))

    assert caplog.messages == ["rank 0, /c/step-3: save 3 committed 12 B in 0.000 s"]


@pytest.mark.parametrize(
    ("event", "level", "text"),
    [
        (SaveStarted(path="p", rank=1, save=2, is_async=True), logging.DEBUG, "started"),
        (staged(), logging.DEBUG, "staged 1.50 kB in 0.500 s; blocked the caller for 0.250 s, 0.125 s of it for saves before"),
        (Written(path="p", rank=1, save=2, is_async=True, secs=0.5, nbytes=2 * 10**6), logging.DEBUG, "wrote 2.00 MB in 0.500 s (0.004 GB/s)"),
        (Failed(path="p", rank=1, save=2, is_async=True, secs=0.5, phase="writing", error="no room"), logging.WARNING, "failed after 0.500 s (writing): no room"),
        (Pruned(path="p", rank=1, save=2, is_async=True, reason="keep_last=3"), logging.DEBUG, "rank 1, p: removed (keep_last=3)."),
        (Event(path="p", rank=1, save=2, is_async=False), logging.DEBUG, "save 2 Event"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Event) else "",
)  # fmt: skip
def test_each_event_has_its_level_and_its_words(
    caplog: pytest.LogCaptureFixture, event: Event, level: int, text: str
) -> None:
    with caplog.at_level(logging.DEBUG, logger=LOG):
        LoggingSink().emit(event)

    (record,) = caplog.records
    assert (record.name, record.levelno) == (LOG, level)
    assert record.getMessage().endswith(text)


def test_a_stall_is_told_with_its_own_save_only(caplog: pytest.LogCaptureFixture) -> None:
    sink = LoggingSink()
    with caplog.at_level(logging.INFO, logger=LOG):
        sink.emit(staged(save=1))
        sink.emit(committed(save=2))
        sink.emit(committed(save=1, rank=1))
        sink.emit(committed(save=1, path="/other"))
        sink.emit(committed(save=1))
        sink.emit(committed(save=1))

    assert ["blocked" in message for message in caplog.messages] == [False] * 3 + [True, False]


def test_saves_that_never_end_are_not_remembered_forever() -> None:
    sink = LoggingSink()
    for save in range(1000):
        sink.emit(staged(save=save))

    assert len(sink._stalls) == LoggingSink._MOST_KEPT
    assert ("/c/step-3", 0, 999, True) in sink._stalls


# ------------------------------------------------------------------------------------ telling all


class Collecting:
    def __init__(self, error: BaseException | None = None) -> None:
        self.seen: list[Event] = []
        self.error = error

    def emit(self, event: Event) -> None:
        self.seen.append(event)
        if self.error is not None:
            raise self.error


def test_a_sink_that_fails_is_logged_and_the_others_hear(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Collecting(OSError("disk full")), Collecting()

    emit_to([bad, good], committed())

    assert good.seen == bad.seen == [committed()]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "lost Committed" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[1] is bad.error


def test_an_interrupt_is_not_a_sinks_failure() -> None:
    with pytest.raises(KeyboardInterrupt):
        emit_to([Collecting(KeyboardInterrupt())], committed())


def test_a_file_that_cannot_be_made_is_logged_with_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()

    emit_to([JsonLinesSink(tmp_path / "file" / "e")], committed())

    assert str(tmp_path / "file" / "e") in caplog.text
