"""Copies into staging memory: the same bits, nothing torn, no thread left."""

from __future__ import annotations

import gc
import math
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from dist_ckpt._staging_pool import copying
from dist_ckpt._staging_pool.copying import Copier, Copy
from dist_ckpt._staging_pool.memory import (
    Scratch,
    copy_bits,
    copy_cast,
    host_copy,
    pieces_for_write,
)
from dist_ckpt.errors import (
    AsyncSaveError,
    BarrierTimeoutError,
    ConfigError,
    InvalidShardingError,
)
from tests.multiprocess._world import run_program

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.complex32, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
]  # fmt: skip

SIZES = {"small": (5, 7), "batched": (130, 192), "blocks": (1100, 2048)}
"""Of a copy made at once, one of a batch and one of several blocks, for most dtypes."""


@contextmanager
def a_copier(thread_count: int = 2) -> Iterator[Copier]:
    copier = Copier(thread_count=thread_count)
    try:
        yield copier
    finally:
        copier.close()


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bits: NaNs with payloads, infinities and denormals too."""
    size = math.prod(shape) * dtype.itemsize
    limit = 2 if dtype is torch.bool else 256
    return torch.randint(0, limit, (size,), dtype=torch.uint8).view(dtype).view(shape)


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a contiguous tensor, through no kernel of its dtype."""
    return tensor.detach().flatten().view(torch.uint8).numpy().tobytes()


def in_order(tensor: torch.Tensor) -> bytes:
    """The bytes of a strided tensor, element by element."""
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    elements = memory.view(-1, tensor.element_size())
    places = torch.arange(len(elements)).as_strided(
        tensor.shape, tensor.stride(), tensor.storage_offset()
    )
    return elements[places.flatten()].numpy().tobytes()


def target_for(source: torch.Tensor) -> torch.Tensor:
    """Memory full of something else."""
    memory = torch.full((source.numel() * source.element_size(),), 0xA5, dtype=torch.uint8)
    return memory.view(source.dtype).view(source.shape)


def copied(copier: Copier, sources: list[torch.Tensor], way: str) -> list[torch.Tensor]:
    copies = [Copy(s, target_for(s), f"t{n}") for n, s in enumerate(sources)]
    if way == "run":
        copier.run(copies)
    else:
        copier.start(copies).wait(60)
    return [copy.target for copy in copies]


# -- bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["run", "start"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_of_every_dtype(dtype: torch.dtype, size: str, way: str) -> None:
    """Whatever the values, as they are and through strides."""
    source = random_bits(dtype, *SIZES[size])
    with a_copier() as copier:
        whole, turned, part = copied(copier, [source, source.t(), source[1:, ::2]], way)

    assert raw(whole) == raw(source)
    assert raw(turned) == in_order(source.t())
    assert raw(part) == in_order(source[1:, ::2])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("rows", [3, 2000])
def test_pending_conjugations_and_signs(dtype: torch.dtype, rows: int) -> None:
    """The values are stored that the tensor stands for."""
    source = torch.randn(rows, 512, dtype=dtype)
    with a_copier() as copier:
        conjugated, imaginary = copied(copier, [source.conj(), source.conj().imag], "run")

    assert torch.equal(conjugated, torch.complex(source.real, -source.imag))
    assert torch.equal(imaginary, -source.imag)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_tensor_is_copied_exactly_in_each_way(dtype: torch.dtype) -> None:
    """``copy_bits``, ``copy_cast`` to the same dtype, ``host_copy`` and pieces for a file agree."""
    source = random_bits(dtype, 40, 30).t()[1:, ::2]
    by_bits, by_cast = target_for(source), target_for(source)

    assert copy_bits(by_bits, source) is by_bits
    copy_cast(by_cast, source)

    expected = in_order(source)
    assert raw(by_bits) == raw(by_cast) == raw(host_copy(source)) == expected
    pieces = [(at, raw(piece)) for at, piece in pieces_for_write(source, Scratch())]
    assert pieces == [(0, expected)]


@pytest.mark.parametrize("of_source", [torch.clone, torch.conj], ids=["plain", "conjugated"])
@pytest.mark.parametrize(
    "of_target", [torch.Tensor.detach, torch.conj], ids=["plain", "conjugated"]
)
@pytest.mark.parametrize("part", [torch.clone, torch.real, torch.imag], ids=["all", "real", "imag"])
def test_one_tensor_with_a_pending_conjugation(
    of_source: Callable[[Any], Any], of_target: Callable[[Any], Any], part: Callable[[Any], Any]
) -> None:
    """In the source, in the target, or in both: the target stands for the same values after it."""
    source = part(of_source(torch.randn(3, 4, dtype=torch.complex64)))
    memory = torch.zeros(3, 4, dtype=torch.complex64)
    target = of_target(memory)
    target = target if part is torch.clone else part(target)

    copy_bits(target, source)

    assert torch.equal(target, source)
    assert torch.equal(host_copy(source), source)


@pytest.mark.parametrize("way", ["run", "start"])
def test_shapes_at_the_edge(way: str) -> None:
    """Scalars, nothing at all, one row many times over, other orders of memory."""
    images = torch.randn(64, 3, 65, 65).to(memory_format=torch.channels_last)
    sources = [
        torch.tensor(3.5),
        torch.empty(0),
        torch.empty(4, 0, 2),
        torch.arange(4096.0).expand(700, 4096),
        torch.tensor(2.0).expand(30, 30),
        images,
        torch.arange(12).as_strided((3, 3), (2, 1)),
        nn_parameter := torch.nn.Parameter(torch.randn(3, 4)),
    ]

    with a_copier() as copier:
        targets = copied(copier, list(sources), way)

    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(source.detach(), target)
        assert target.is_contiguous()
        assert not target.requires_grad
    assert nn_parameter.grad_fn is None


@given(
    sizes=st.lists(st.integers(0, 3_000_000), max_size=8),
    threads=st.integers(1, 4),
    block=st.sampled_from([4096, 100_000, 8 << 20]),
)
def test_any_mixture_of_sizes(sizes: list[int], threads: int, block: int) -> None:
    """However it is cut into pieces and shared out; neighbours are left alone."""
    sources = [random_bits(torch.uint8, size) for size in sizes]
    memory = torch.zeros(sum(sizes) + 64 * len(sizes), dtype=torch.uint8)
    targets, position = [], 0
    for size in sizes:
        targets.append(memory[position : position + size])
        position += size + 64

    with pytest.MonkeyPatch.context() as patch, a_copier(threads) as copier:
        patch.setattr(copying, "BLOCK_NBYTES", block)
        copier.run([Copy(s, t, "t") for s, t in zip(sources, targets, strict=True)])

    expected = b"".join(raw(source) + bytes(64) for source in sources)
    assert raw(memory) == expected


# -- threads ---------------------------------------------------------------------------------------


def copying_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("staging-copy")]


def test_threads_are_kept_and_end_at_close() -> None:
    """The caller is one of them; torch's own number of threads is its own business."""
    before = torch.get_num_threads()
    sources = [torch.ones(1 << 22) for _ in range(4)]
    with a_copier(3) as copier:
        assert copying_threads() == []
        copied(copier, sources, "run")
        assert len(copying_threads()) <= 2
        for _ in range(5):
            copied(copier, sources, "run")
            copied(copier, sources, "start")
        assert 1 <= len(copying_threads()) <= 3

    assert copying_threads() == []
    assert torch.get_num_threads() == before
    with pytest.raises(ConfigError, match="closed"):
        copier.run([])
    with pytest.raises(ConfigError, match="closed"):
        copier.start([])
    copier.close()


def test_small_copies_start_no_thread() -> None:
    """Nor do none at all."""
    with a_copier() as copier:
        copied(copier, [torch.ones(10)] * 100, "run")
        copied(copier, [torch.ones(10)] * 100, "start")
        copier.run([])
        copier.start([]).wait(0)

        assert copying_threads() == []


def test_one_thread_is_the_callers() -> None:
    with a_copier(1) as copier:
        copied(copier, [torch.ones(1 << 22)] * 2, "run")

        assert copying_threads() == []


def test_wrong_settings() -> None:
    with pytest.raises(ConfigError, match="thread_count"):
        Copier(thread_count=0)


def test_copies_at_the_end_of_a_script() -> None:
    """Where the interpreter starts no threads any more, the caller's copies."""
    script = """
        import atexit, torch
        from dist_ckpt._staging_pool.copying import Copier, Copy
        def last():
            for way in ("run", "start"):
                target = torch.zeros(1 << 22)
                copies = [Copy(torch.ones(1 << 22), target, "t")]
                (copier.run(copies) if way == "run" else copier.start(copies).wait(60))
                print(int(target.sum()) == 1 << 22)
        atexit.register(last)
        copier = Copier()
    """

    done = run_program(textwrap.dedent(script), is_strict=True)

    assert (done.stdout.split(), done.stderr) == (["True", "True"], "")


# -- in the background -----------------------------------------------------------------------------


class Held:
    """A copier whose threads wait, so that something can happen between asking and copying."""

    def __init__(self, copier: Copier) -> None:
        self._go = threading.Event()
        for _ in range(copier._thread_count):
            copier._executor.submit(self._go.wait, 60)

    def go(self) -> None:
        self._go.set()


BIG = 1 << 20
"""Elements of a tensor that is copied by a thread."""

MIDDLE = 20_000
"""Elements of one that is copied in a batch."""


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.add_(1),
        lambda t: t[0].zero_(),
        lambda t: t[-1].fill_(3),
        lambda t: torch._foreach_add_([t], 1.0),
    ],
    ids=["all", "first", "last", "foreach"],
)
@pytest.mark.parametrize("size", [BIG, MIDDLE], ids=["blocks", "batch"])
def test_a_change_before_the_copy_is_an_error(change: Callable[[Any], Any], size: int) -> None:
    """All such tensors are named, and no other; the task says so as often as it is asked."""
    names = ["a", "b", "c", "d"]
    tensors = {name: torch.randn(4, size // 4) for name in names}
    tensors["d"] = tensors["d"].t()
    with a_copier() as copier:
        held = Held(copier)
        task = copier.start([Copy(t, target_for(t), name) for name, t in tensors.items()])
        change(tensors["b"])
        change(tensors["d"])
        assert not task.is_done
        held.go()

        for _ in range(2):
            with pytest.raises(AsyncSaveError, match="2 tensors changed .*: 'b', 'd'. hint"):
                task.wait(60)


def test_fused_and_hidden_changes_of_all_elements() -> None:
    """Neither counts the version up: samples find them."""
    parameter = torch.nn.Parameter(torch.randn(BIG))
    parameter.grad = torch.randn(BIG)
    fused = torch.optim.AdamW([parameter], fused=True)
    fused.step()
    hidden = torch.randn(BIG)
    with a_copier() as copier:
        held = Held(copier)
        task = copier.start(
            [Copy(t, target_for(t), n) for n, t in {"p": parameter, "h": hidden}.items()]
        )
        fused.step()
        hidden.data.mul_(2)
        held.go()

        with pytest.raises(AsyncSaveError, match="'p', 'h'"):
            task.wait(60)


def test_a_change_after_the_wait_is_none() -> None:
    """What was copied stays."""
    source = torch.ones(BIG)
    with a_copier() as copier:
        target = target_for(source)
        task = copier.start([Copy(source, target, "t")])
        task.wait(60)
        source.zero_()
        task.wait(0)

    assert task.is_done
    assert torch.equal(target, torch.ones(BIG))


def test_small_sources_may_change_at_once() -> None:
    """They are copied when ``start`` returns."""
    source = torch.ones(100)
    with a_copier() as copier:
        target = target_for(source)
        task = copier.start([Copy(source, target, "t")])
        source.zero_()
        task.wait(60)

    assert torch.equal(target, torch.ones(100))


def test_tensors_of_inference_mode() -> None:
    """They have no version, so none is compared."""
    with torch.inference_mode():
        source = torch.ones(BIG)
    with a_copier() as copier:
        (target,) = copied(copier, [source], "start")

    assert torch.equal(target, source)


@pytest.mark.parametrize("size", [BIG, MIDDLE], ids=["blocks", "batch"])
def test_sources_live_until_they_are_copied(size: int) -> None:
    """Also if their owner lets go, or gives a parameter other data; and no longer."""
    lost, swapped = torch.ones(size), torch.nn.Parameter(torch.full((size,), 2.0))
    turned = torch.nn.Parameter(torch.full((4, size // 4), 3.0).t())
    memory = lost.numpy()
    gone = weakref.ref(memory)
    lost = torch.from_numpy(memory)
    targets = [target_for(one) for one in (lost, swapped, turned)]
    with a_copier() as copier:
        held = Held(copier)
        sources = zip((lost, swapped, turned), targets, strict=True)
        task = copier.start([Copy(source, target, "t") for source, target in sources])
        del lost, memory, sources
        swapped.data = torch.zeros(size)
        turned.data = torch.zeros(size // 4, 4)
        gc.collect()
        assert gone() is not None
        held.go()
        task.wait(60)
        del task, held
        gc.collect()
        assert gone() is None

    assert [target.unique().tolist() for target in targets] == [[1.0], [2.0], [3.0]]


def test_a_wait_has_an_end() -> None:
    """The copies go on; the next wait may see them done."""
    source = torch.ones(4 * BIG)
    with a_copier() as copier:
        held = Held(copier)
        task = copier.start([Copy(source, target_for(source), "t")])
        with pytest.raises(BarrierTimeoutError, match="longer than 0.01 s: 2 pieces"):
            task.wait(0.01)
        held.go()
        task.wait(60)


def test_abandoned_copies_are_not_made() -> None:
    """After it returns nobody writes; a task that was done stays done."""
    source = torch.ones(BIG)
    target = torch.zeros(BIG)
    with a_copier() as copier:
        done = copier.start([Copy(source, target_for(source), "t")])
        done.wait(60)
        held = Held(copier)
        task = copier.start([Copy(source, target, "t")])
        abandoning = threading.Thread(target=task.abandon)
        abandoning.start()
        while task._jobs:  # it clears them before it waits
            pass
        held.go()
        abandoning.join(60)
        done.abandon()
        done.wait(0)

        with pytest.raises(AsyncSaveError, match="given up"):
            task.wait(0)

    assert target.count_nonzero() == 0


def test_who_wants_to_know_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Before the wait ends, or at once; with what failed. What they raise is logged."""
    told: list[str] = []
    source = torch.ones(BIG)
    with a_copier() as copier:
        held = Held(copier)
        task = copier.start([Copy(source, target_for(source), "t")])
        task.add_done_callback(lambda error: told.append(f"first {error}"))
        task.add_done_callback(lambda error: 1 // 0)
        task.add_done_callback(lambda error: told.append(f"third {error}"))
        assert told == []
        held.go()
        task.wait(60)
        assert told == ["first None", "third None"]

        held = Held(copier)
        task = copier.start([Copy(source, target_for(source), "t")])
        source.zero_()
        held.go()
        with pytest.raises(AsyncSaveError):
            task.wait(60)
        task.add_done_callback(lambda error: told.append(type(error).__name__))
        assert told[2:] == ["AsyncSaveError"]

    assert [record.exc_info is not None for record in caplog.records] == [True]


def test_a_torn_copy_never_counts() -> None:
    """Changes at any moment: either the bits are those before, or the task fails."""
    counts = {"whole": 0, "failed": 0}
    source = torch.zeros(2 * BIG)
    target = torch.empty(2 * BIG)
    with a_copier() as copier:
        for turn in range(60):
            source.fill_(turn)
            task = copier.start([Copy(source, target, "t")])
            for _ in range(turn * 20):  # a little later each time
                pass
            source.add_(0.5)
            try:
                task.wait(60)
            except AsyncSaveError:
                counts["failed"] += 1
            else:
                counts["whole"] += 1
                assert target.unique().tolist() == [turn]

    assert counts["failed"] > 0


# -- what cannot be copied -------------------------------------------------------------------------


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(4)


def freed() -> torch.Tensor:
    source = torch.ones(4)
    source.untyped_storage().resize_(0)
    return source


class Wrapper(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def wrapper() -> torch.Tensor:
    return torch.Tensor._make_wrapper_subclass(Wrapper, (4,))  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (fake, "has no data that can be copied: a FakeTensor"),
        (lambda: torch.ones(4, device="meta"), "has no data that can be copied: a Tensor on meta"),
        (lambda: torch.ones(4).to_sparse(), "has no data .*torch.sparse_coo"),
        (wrapper, "has no data that can be copied: a Wrapper"),
        (freed, "its storage was resized to 0 bytes, 16 are needed"),
        (lambda: torch.ones(5), r"expected \(4,\) of torch.float32, found \(5,\) of"),
        (lambda: torch.ones(4, 1), r"expected \(4,\) of torch.float32, found \(4, 1\) of"),
        (lambda: torch.ones(1), r"expected \(4,\) of torch.float32, found \(1,\) of"),
        (lambda: torch.ones(4).double(), "expected .* torch.float32, found .* torch.float64"),
    ],
    ids=["fake", "meta", "sparse", "wrapper", "freed", "size", "rank", "broadcast", "dtype"],
)
@pytest.mark.parametrize("way", ["run", "start"])
def test_what_has_no_such_data_is_refused(
    make: Callable[[], torch.Tensor], message: str, way: str
) -> None:
    """With its name; the next copies are made."""
    target = torch.zeros(4)
    with a_copier() as copier:
        with pytest.raises(InvalidShardingError, match=f"'bad'.*{message}"):
            getattr(copier, way)([Copy(make(), target, "bad")])
        assert copied(copier, [torch.ones(BIG)], way)[0].sum() == BIG

    assert target.count_nonzero() == 0


def test_a_place_that_is_none() -> None:
    with a_copier() as copier, pytest.raises(InvalidShardingError, match="the place of 't'"):
        copier.run([Copy(torch.ones(300, 300), torch.zeros(300, 600)[:, ::2], "t")])


def test_a_class_of_ones_own_is_copied() -> None:
    """One that has its data like any tensor; its ways with functions are not asked."""

    class Named(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is not torch.Tensor.as_subclass and "copy" in str(func):
                raise AssertionError(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    for shape in ((3, 4), (1000, 300)):
        source = torch.randn(shape)
        with a_copier() as copier:
            targets = copied(
                copier, [source.as_subclass(Named), source.t().as_subclass(Named)], "run"
            )
        assert torch.equal(targets[0], source)
        assert torch.equal(targets[1], source.t())


def test_a_failure_in_a_thread_stops_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised where the copies were asked for, when no thread copies any more."""
    made: list[int] = []

    def breaks(*_: Any) -> None:
        made.append(1)
        raise InvalidShardingError("'t3' cannot be copied")

    monkeypatch.setattr(copying, "move", breaks)
    sources = [torch.ones(BIG) for _ in range(50)]
    with a_copier() as copier:
        for way in ("run", "start"):
            with pytest.raises(InvalidShardingError, match="t3"):
                copied(copier, sources, way)

    assert len(made) <= 4


# -- with a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("way", ["run", "start"])
def test_copies_from_a_gpu(way: str, pinned: bool) -> None:
    """In order of the stream: what was enqueued before is in, what comes after is not."""
    sources = [torch.randn(4096, 4096, device="cuda") for _ in range(4)]
    sources += [sources[0].t(), sources[1][:, ::3], torch.tensor(3.0, device="cuda")]
    complex_one = torch.randn(512, 512, dtype=torch.complex64, device="cuda").conj()
    everything = [*sources, complex_one, torch.ones(5)]
    with a_copier() as copier:
        for one in sources[:4]:
            one.mul_(1.5)
        expected = [one.cpu() for one in everything]
        copies = [
            Copy(s, torch.empty(s.shape, dtype=s.dtype, pin_memory=pinned), str(n))
            for n, s in enumerate(everything)
        ]
        if way == "run":
            copier.run(copies)
        else:
            copier.start(copies).wait(60)
        for one in sources[:4]:
            one.zero_()

    for copy, right in zip(copies, expected, strict=True):
        assert torch.equal(copy.target, right.resolve_conj())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_change_on_a_gpu_is_an_error() -> None:
    """By the version: the host has asked for it before the copy was done."""
    source = torch.randn(1 << 28, device="cuda")
    with a_copier() as copier:
        held = Held(copier)
        task = copier.start([Copy(source, torch.empty(1 << 28, pin_memory=True), "t")])
        source.add_(1)
        held.go()
        with pytest.raises(AsyncSaveError, match="'t'"):
            task.wait(60)
