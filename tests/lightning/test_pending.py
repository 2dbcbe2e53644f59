"""Operations behind saves in flight, one by one: their order, and what is dropped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from dist_ckpt.errors import BarrierTimeoutError
from dist_ckpt.events import Committed, Failed, SaveStarted, Staged, Written
from lightning_dist_ckpt._metrics import SaveMetrics
from lightning_dist_ckpt._model_checkpoint import Memory, Outcome, take_back
from lightning_dist_ckpt._pending import Pending, flip_link


class Queue:
    """Stands for a saver: keeps actions until the test lets them run."""

    def __init__(self) -> None:
        self.actions: list[Callable[[], None]] = []

    def __call__(
        self,
        action: Callable[[], None],
        *,
        what: str,  # noqa: ARG002 - the saver's
        frees_space: bool = False,  # noqa: ARG002 - likewise
    ) -> None:
        self.actions.append(action)

    def run(self) -> None:
        """Run what is there."""
        while self.actions:
            self.actions.pop(0)()


@pytest.fixture
def queue() -> Queue:
    return Queue()


@pytest.fixture
def done() -> list[str]:
    return []


def test_names_are_those_of_the_end(queue: Queue, done: list[str]) -> None:
    """Names in flight exist, names to be removed do not, others are not known; then none is."""
    pending = Pending(queue)
    number, was_link = pending.begin("a")
    pending.remove("b", lambda: done.append("b"))
    pending.link("a", "last")

    assert (number, was_link) == (1, False)
    assert [pending.exists(name) for name in ("a", "b", "last", "c")] == [True, False, True, None]
    assert pending.exists(Path("a").absolute())

    pending.end(1, None)
    assert [pending.exists(name) for name in ("a", "b")] == [None, False]


def test_a_failure_drops_what_waits_for_it(queue: Queue, done: list[str], tmp_path: Path) -> None:
    """Neither queued nor later operations of a save that failed are done; the next save's are."""
    pending = Pending(queue)
    pending.begin(tmp_path / "a")
    pending.remove("b", lambda: done.append("b"))
    pending.link(tmp_path / "a", tmp_path / "last")
    pending.end(1, OSError())
    pending.remove("c", lambda: done.append("c"))
    queue.run()

    assert pending.exists("b") is pending.exists("c") is None
    assert not done
    assert not list(tmp_path.iterdir())

    pending.begin(tmp_path / "d")
    pending.remove("b", lambda: done.append("b again"))
    pending.end(2, None)
    queue.run()
    assert done == ["b again"]


def test_a_link_is_flipped_before_its_target_goes(queue: Queue, tmp_path: Path) -> None:
    """However they were asked for: a link never leads to nothing. It is flipped once."""
    (tmp_path / "new").mkdir()
    link = tmp_path / "last"
    link.symlink_to("old")
    pending = Pending(queue)
    pending.begin(tmp_path / "new")
    seen = []
    pending.remove(tmp_path / "old", lambda: seen.append(link.readlink()))
    pending.link(tmp_path / "new", link)
    pending.end(1, None)
    queue.run()

    assert seen == [Path("new")]
    assert {path.name for path in tmp_path.iterdir()} == {"new", "last"}


def test_a_save_overtakes_what_is_queued_for_its_name(queue: Queue, done: list[str]) -> None:
    """A queued removal must not hit the newer checkpoint of the same name."""
    pending = Pending(queue)
    pending.begin("a")
    pending.remove("a", lambda: done.append("a"))
    pending.link("b", "last")
    _, was_link = pending.begin("a")
    assert not was_link
    assert pending.exists("a")
    _, was_link = pending.begin("last")
    assert was_link
    for number in (1, 2, 3):
        pending.end(number, None)
    queue.run()

    assert not done
    assert pending.exists("a") is pending.exists("last") is None


def test_a_save_waits_for_what_is_being_done_to_its_name(queue: Queue) -> None:
    """A removal that has begun is waited for; it is named if it takes too long."""
    pending = Pending(queue)
    pending.begin("a")
    begun, go_on = threading.Event(), threading.Event()

    def remove() -> None:
        begun.set()
        go_on.wait(60)

    pending.remove("a", remove)
    pending.end(1, None)
    thread = threading.Thread(target=queue.run)
    thread.start()
    begun.wait(60)
    pending.begin("a")
    with pytest.raises(BarrierTimeoutError, match="a: what an earlier save"):
        pending.wait_for("a", 0.01)
    go_on.set()
    pending.wait_for("a", 60)
    thread.join(60)
    pending.end(2, None)
    assert pending.exists("a") is None


def test_an_operation_that_fails_is_over(queue: Queue) -> None:
    """What it raises goes to the saver, which logs it; the name is free again."""
    pending = Pending(queue)
    pending.begin("a")
    pending.remove("b", lambda: (_ for _ in ()).throw(OSError("busy")))
    pending.end(1, None)

    with pytest.raises(OSError, match="busy"):
        queue.run()
    assert pending.exists("b") is None


def test_flipping_links(tmp_path: Path) -> None:
    """A link takes the place of nothing, of a link, of a file and of a directory."""
    for name in ("link", "file", "directory", "nothing"):
        (tmp_path / name).mkdir()
    (tmp_path / "link" / "x").symlink_to("elsewhere")
    (tmp_path / "file" / "x").write_text("")
    (tmp_path / "directory" / "x").mkdir()
    (tmp_path / "directory" / "x" / "y").write_text("")
    for name in ("link", "file", "directory", "nothing"):
        flip_link(tmp_path / "target", tmp_path / name / "x")

        assert (tmp_path / name / "x").readlink() == Path("../target")
        assert [path.name for path in (tmp_path / name).iterdir()] == ["x"]


def callback(**top: float) -> SimpleNamespace:
    return SimpleNamespace(
        best_k_models=dict(top), best_model_path=min(top, key=top.__getitem__), mode="min",
        best_model_score=min(top.values()), kth_best_model_path=max(top, key=top.__getitem__),
        kth_value=max(top.values()), current_score=None, last_model_path="last0",
        _last_checkpoint_saved="a", _last_global_step_saved=1,
    )  # fmt: skip


def asked(one: SimpleNamespace, path: str, score: float, *, failed: bool) -> Memory:
    """Let a callback that keeps two ask for a save."""
    memory = Memory(one, "top").of(path, Outcome())
    top = one.best_k_models
    if len(top) == 2:
        del top[one.kth_best_model_path]
    top[path] = score
    saved = one._last_global_step_saved + 1
    vars(one).update(vars(callback(**top)))
    one._last_checkpoint_saved, one._last_global_step_saved = path, saved
    memory.outcome.end(OSError() if failed else None)
    memory.outcome.end(None)  # the first time counts
    return memory


@pytest.mark.parametrize(
    ("fates", "top", "saved"),
    [
        ("b-", {"a": 5.0}, ("a", 1)),
        ("b- c-", {"a": 5.0}, ("a", 1)),
        ("b+ c-", {"a": 5.0, "b": 4.0}, ("b", 2)),
        ("b- c+", {"c": 3.0}, ("c", 3)),
        ("b+ c- d+", {"d": 2.0}, ("d", 4)),
        ("b- b+", {"b": 4.0}, ("b", 3)),
    ],
)
def test_memory_without_failed_saves(
    fates: str, top: dict[str, float], saved: tuple[str, int]
) -> None:
    """After failures a callback knows what it knew before; or all but them, if others followed."""
    one = callback(a=5.0)
    scores = {"b": 4.0, "c": 3.0, "d": 2.0}
    memories = [asked(one, f[0], scores[f[0]], failed=f[1] == "-") for f in fates.split()]
    take_back(memories)

    known = {path: one.best_k_models.get(path) for path in top}
    assert known == top
    ends = {fate[0]: fate[1] for fate in fates.split()}
    failed = {path for path, end in ends.items() if end == "-"}
    assert not failed & {*one.best_k_models, one.best_model_path, one._last_checkpoint_saved}
    assert one.best_model_path == min(one.best_k_models, key=one.best_k_models.get)
    assert (one._last_checkpoint_saved, one._last_global_step_saved) == saved
    assert one.last_model_path == "last0"


def test_one_row_for_each_committed_save() -> None:
    """Its step is that of the call; a save that fails has none, nor one that nobody asked for."""
    metrics = SaveMetrics()

    def tell(kind: type, save: int, **values: float) -> None:
        metrics.emit(kind(path="p", rank=0, save=save, is_async=True, **values))

    for save, step in ((1, 10), (2, 20)):
        metrics.step = step
        tell(SaveStarted, save)
        tell(Staged, save, stall_secs=0.5, wait_secs=0.1, copy_secs=0.2, nbytes=10)
    tell(Written, 1, secs=2.0, nbytes=4_000_000_000)
    assert not metrics.has_rows
    tell(Committed, 1, secs=3.0, nbytes=4_000_000_000)
    metrics.emit(
        Failed(path="p", rank=0, save=2, is_async=True, secs=1.0, phase="writing", error="full")
    )
    tell(Staged, 3, stall_secs=0.5, wait_secs=0.1, copy_secs=0.2, nbytes=10)

    assert metrics.has_rows
    assert metrics.take() == [
        (
            10,
            {
                "checkpoint/stall_secs": 0.5,
                "checkpoint/write_secs": 2.0,
                "checkpoint/gb_per_sec": 2.0,
            },
        )
    ]
    assert metrics.take() == []
