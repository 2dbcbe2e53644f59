"""Many pieces of a file into memory: every byte right, nothing unchecked, few reads."""

from __future__ import annotations

import ctypes
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_ckpt._formats.spans import READ_NBYTES, Spans, Windows
from dist_ckpt._formats.verification import VerifiedStore
from dist_ckpt.errors import CheckpointNotFoundError, CorruptedCheckpointError
from dist_ckpt.storage import Extent, LocalStore
from dist_ckpt.storage.checksums import BLOCK_NBYTES, sum_of
from tests._samples import sample

NBYTES = 3 * READ_NBYTES + 12_345
BLOCK = BLOCK_NBYTES
DATA = bytes(7 * at % 251 for at in range(250_007)) * (NBYTES // 250_007 + 1)
DATA = DATA[:NBYTES]  # no two blocks are alike


class Counting(LocalStore):
    """Writes down what is read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: list[tuple[int, int]] = []

    def read_ranges(self, name: str, extents: Any) -> None:
        self.reads += [(one.position, memoryview(one.buffer).nbytes) for one in extents]
        super().read_ranges(name, extents)


class Target:
    """Memory for pieces, one behind the other with guards between them; to be kept while read."""

    def __init__(self, pieces: list[tuple[int, int]]) -> None:
        self._pieces = pieces
        self._memory = bytearray(b"\xaa" * (sum(n for _, n in pieces) + 8 * (len(pieces) + 1)))
        base, at = ctypes.addressof(ctypes.c_char.from_buffer(self._memory)), 8
        self._starts = []
        for _, nbytes in pieces:
            self._starts.append(at)
            at += nbytes + 8
        self.spans = Spans(
            [p for p, _ in pieces], [n for _, n in pieces], [base + at for at in self._starts]
        )

    def piece(self, number: int) -> bytes:
        start = self._starts[number]
        return bytes(self._memory[start : start + self._pieces[number][1]])

    def check(self, data: bytes = DATA) -> None:
        at = 0
        for number, (position, nbytes) in enumerate(self._pieces):
            assert self._memory[at : at + 8] == b"\xaa" * 8, "beyond the piece"
            assert self.piece(number) == data[position : position + nbytes], number
            at = self._starts[number] + nbytes
        assert self._memory[at:] == b"\xaa" * 8, "beyond the last piece"


def filled(tmp_path: Path, *flipped: int) -> Path:
    """Write the file, with some of its bytes flipped, and return the folder."""
    data = bytearray(DATA)
    for at in flipped:
        data[at] ^= 0x40
    (tmp_path / "f").write_bytes(data)
    return tmp_path


@st.composite
def pieces(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Pieces small and large, neighbours and strangers, in the file's order or in none."""
    found = []
    for _ in range(draw(st.integers(1, 12))):
        near = draw(st.sampled_from([0, BLOCK, 2 * BLOCK, READ_NBYTES, NBYTES - 1, NBYTES]))
        position = min(max(near + draw(st.integers(-5000, 5000)), 0), NBYTES)
        large = draw(st.sampled_from([0, 100, 70_000, BLOCK, 2 * BLOCK, NBYTES]))
        found.append((position, min(draw(st.integers(0, 3000)) + large, NBYTES - position)))
    return sorted(found) if draw(st.booleans()) else found


@given(pieces(), st.booleans())
@settings(max_examples=sample(30, 320), deadline=None)
def test_every_byte_goes_where_it_belongs(wanted: list[tuple[int, int]], is_summed: bool) -> None:
    """With checksums and without, by one call, by several, and through buffers."""
    with tempfile.TemporaryDirectory() as folder:
        store = VerifiedStore(
            LocalStore(filled(Path(folder))), {"f": sum_of(DATA)} if is_summed else {}
        )
        at_once, one_by_one = Target(wanted), Target(wanted)

        store.read_spans("f", at_once.spans)
        for columns in zip(
            one_by_one.spans.positions,
            one_by_one.spans.nbytes,
            one_by_one.spans.addresses,
            strict=True,
        ):
            store.read_spans("f", Spans(*([one] for one in columns)))
        buffers = [bytearray(nbytes) for _, nbytes in wanted]
        store.read_ranges(
            "f",
            [
                Extent(position, memoryview(buffer))
                for (position, _), buffer in zip(wanted, buffers, strict=True)
            ],
        )

        at_once.check()
        one_by_one.check()
        assert buffers == [DATA[position : position + nbytes] for position, nbytes in wanted]


def test_neighbours_come_with_one_read(tmp_path: Path) -> None:
    """Thousands of small pieces with gaps between them: as many reads as megabytes, each once."""
    wanted = [(at, 500) for at in range(600, NBYTES - 2000, 900)]
    counting, target = Counting(filled(tmp_path)), Target(wanted)

    VerifiedStore(counting, {"f": sum_of(DATA)}).read_spans("f", target.spans)

    target.check()
    assert sum(nbytes for _, nbytes in counting.reads) == NBYTES
    assert len(counting.reads) == -(-NBYTES // READ_NBYTES)


def test_without_checksums_nothing_is_read_that_lies_far_from_what_is_wanted(
    tmp_path: Path,
) -> None:
    """Small gaps are read along, large ones are not; large pieces are read as they are."""
    wanted = [(0, 100), (1000, 100), (200_000, 100), (300_000, 900_000), (1_300_000, 1)]
    counting, target = Counting(filled(tmp_path)), Target(wanted)

    VerifiedStore(counting, {}).read_spans("f", target.spans)

    target.check()
    assert counting.reads == [(0, 1100), (200_000, 100), (300_000, 900_000), (1_300_000, 1)]


def test_with_checksums_whole_blocks_are_read_and_no_others(tmp_path: Path) -> None:
    """Far pieces do not bring what is between them."""
    wanted = [(10, 5), (5 * BLOCK + 3, 2 * BLOCK), (11 * BLOCK, 7)]
    counting, target = Counting(filled(tmp_path)), Target(wanted)

    VerifiedStore(counting, {"f": sum_of(DATA)}).read_spans("f", target.spans)

    target.check()
    blocks = [
        number for at, n in counting.reads for number in range(at // BLOCK, -(-(at + n) // BLOCK))
    ]
    assert blocks == [0, 5, 6, 7, 11]


@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK + 5, 5 * BLOCK + 1, NBYTES - 1])
@pytest.mark.parametrize("cut", [700, 90_000, 900_000, NBYTES])
def test_a_wrong_byte_never_arrives(tmp_path: Path, at: int, cut: int) -> None:
    """The call raises, and no piece has the wrong block: old bytes, right ones or ones."""
    filled(tmp_path, at)
    wrong = (tmp_path / "f").read_bytes()
    wanted = [(start, min(cut, NBYTES - start)) for start in range(0, NBYTES, cut)]
    target = Target(wanted)
    store = VerifiedStore(LocalStore(tmp_path), {"f": sum_of(DATA)}, tmp_path)

    for _ in range(2):  # nothing wrong is kept, either
        with pytest.raises(
            CorruptedCheckpointError, match=rf"{tmp_path}/f: bytes {at // BLOCK * BLOCK} to"
        ):
            store.read_spans("f", target.spans)

    for number, (position, nbytes) in enumerate(wanted):
        if position <= at < position + nbytes:
            assert target.piece(number)[at - position] != wrong[at]


def test_all_wrong_blocks_of_a_read_are_overwritten(tmp_path: Path) -> None:
    """The first is told of; the second did not get through beside it."""
    filled(tmp_path, 3, 2 * BLOCK)
    target = Target([(0, READ_NBYTES)])

    with pytest.raises(CorruptedCheckpointError, match="bytes 0 to"):
        VerifiedStore(LocalStore(tmp_path), {"f": sum_of(DATA)}).read_spans("f", target.spans)

    found = target.piece(0)
    assert found[:BLOCK] == found[2 * BLOCK : 3 * BLOCK] == b"\xff" * BLOCK
    assert found[BLOCK : 2 * BLOCK] == DATA[BLOCK : 2 * BLOCK]


def test_memory_that_somebody_else_writes_to_is_no_damage(tmp_path: Path) -> None:
    """A tensor of the same request may share it: the file is looked at again before it is blamed."""

    class Shared(Counting):
        def read_ranges(self, name: str, extents: Any) -> None:
            super().read_ranges(name, extents)
            for extent in extents[: len(self.reads) == 1]:
                memoryview(extent.buffer)[BLOCK + 7] ^= 0xFF

    shared, target = Shared(filled(tmp_path)), Target([(0, READ_NBYTES)])

    VerifiedStore(shared, {"f": sum_of(DATA)}).read_spans("f", target.spans)

    target.check()
    assert len(shared.reads) == 2


@pytest.mark.parametrize("piece", [(NBYTES, 1), (NBYTES - 3, 4), (-1, 2), (5, NBYTES)])
def test_a_piece_beyond_the_file_is_refused(tmp_path: Path, piece: tuple[int, int]) -> None:
    """No block has a checksum for it; nothing is read."""
    counting, target = Counting(filled(tmp_path)), Target([piece])

    with pytest.raises(CorruptedCheckpointError, match=f"of a file of {NBYTES}"):
        VerifiedStore(counting, {"f": sum_of(DATA)}).read_spans("f", target.spans)

    assert counting.reads == []


def test_a_file_that_is_gone_is_told(tmp_path: Path) -> None:
    target = Target([(0, 4)])
    with pytest.raises(CheckpointNotFoundError, match="cannot read .*/gone"):
        VerifiedStore(LocalStore(tmp_path), {}).read_spans("gone", target.spans)


def test_windows_are_few() -> None:
    """Whoever reads here and there keeps a bounded part of the files."""
    windows = Windows()
    for number in range(100):
        windows.give(windows.take(f"f{number}", 0))
    taken = {id(windows.take("f", 0)) for _ in range(1)}
    assert len(taken) == 1
    assert len(windows._idle) <= 8


def test_threads_share_a_store(tmp_path: Path) -> None:
    """Each has a window and a descriptor of its own, and none is left open."""
    counting = Counting(filled(tmp_path))
    store = VerifiedStore(counting, {"f": sum_of(DATA)})
    wanted = [(at, 3000) for at in range(0, NBYTES - 3000, 3100)]
    targets = [Target(wanted[number::4]) for number in range(4)]
    threads = [
        threading.Thread(target=store.read_spans, args=("f", target.spans)) for target in targets
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for target in targets:
        target.check()
    assert counting._held == {}


def test_a_file_is_opened_once_for_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And once for all that is read of it inside ``held``."""
    store = LocalStore(filled(tmp_path))
    opened: list[str] = []
    original = store._open
    monkeypatch.setattr(store, "_open", lambda name: opened.append(name) or original(name))

    target = Target([(5, NBYTES - 9)])
    VerifiedStore(store, {"f": sum_of(DATA)}).read_spans("f", target.spans)
    target.check()
    assert opened == ["f"]
    with store.held("f"), store.held("f"):
        for position in range(4):
            store.read_ranges("f", [Extent(position, memoryview(bytearray(2)))])
    assert opened == ["f", "f"]
    assert store._held == {}
