"""Checksums of blocks: the same whatever the order and the cuts in which a file is written."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from dist_ckpt.errors import CorruptedCheckpointError
from dist_ckpt.storage import Extent, LocalStore
from dist_ckpt.storage.checksums import (
    BLOCK_NBYTES,
    BlockSums,
    FileSum,
    digest,
    sum_of,
    sum_of_file,
)
from dist_ckpt.storage.sealed import parse_document, sealed, unsealed

SIZES = (0, 1, BLOCK_NBYTES - 1, BLOCK_NBYTES, BLOCK_NBYTES + 1, 3 * BLOCK_NBYTES + 5)


def data_of(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)  # noqa: S311 - no secrets


@pytest.mark.parametrize("nbytes", SIZES)
def test_sums_of_memory_and_of_a_file_are_the_same(tmp_path: Path, nbytes: int) -> None:
    """One number a block, the last one shorter."""
    data = data_of(nbytes)
    (tmp_path / "f").write_bytes(data)

    found = sum_of(data)

    assert found == sum_of_file(tmp_path / "f")
    assert len(found.blocks) == 8 * -(-nbytes // BLOCK_NBYTES)
    for number in range(len(found.blocks) // 8):
        start, count = found.extent(number)
        assert found.block(number) == xxh3_64_intdigest(data[start : start + count])


def test_an_empty_block_has_the_published_checksum() -> None:
    """XXH3 of nothing with seed 0, as xxHash's own tests have it."""
    assert digest(b"") == 0x2D06800538D394C2


@given(
    nbytes=st.sampled_from(SIZES),
    cuts=st.lists(st.integers(0, 3 * BLOCK_NBYTES + 5), max_size=8),
    order=st.randoms(use_true_random=False),
    in_order=st.booleans(),
)
def test_pieces_in_any_order_make_the_same_sums(
    nbytes: int, cuts: list[int], order: random.Random, in_order: bool
) -> None:
    """What does not come in the order of the file is read back, and only that."""
    data = data_of(nbytes)
    edges = sorted({0, nbytes, *(cut for cut in cuts if cut < nbytes)})
    pieces = list(itertools.pairwise(edges))
    if not in_order:
        order.shuffle(pieces)
    sums, read_back = BlockSums(), []

    def read(position: int, count: int) -> bytes:
        read_back.append(position)
        return data[position : position + count]

    for start, stop in pieces:
        sums.add(start, memoryview(data)[start:stop])

    assert sums.finish(nbytes, read) == sum_of(data)
    if in_order:
        assert not read_back


def test_holes_and_a_longer_end_are_summed_up_as_zeros(tmp_path: Path) -> None:
    """A file is what it is on disk, not what was handed in."""
    store = LocalStore(tmp_path)
    nbytes = 2 * BLOCK_NBYTES + 100

    found = store.write("f", [Extent(10, b"abc"), Extent(BLOCK_NBYTES + 7, b"x")], nbytes=nbytes)

    assert found == sum_of_file(tmp_path / "f")
    assert found.nbytes == nbytes
    assert store.create("g", b"abc") == sum_of(b"abc")


def test_a_large_file_is_sent_to_the_disk_early_and_is_the_same(tmp_path: Path) -> None:
    """In pieces that fit no block; the hint changes nothing in it."""
    data = data_of(20 << 20)
    edges = [*range(0, len(data), 700_001), len(data)]
    extents = (Extent(a, data[a:b]) for a, b in itertools.pairwise(edges))

    found = LocalStore(tmp_path).write("f", extents, nbytes=len(data))

    assert (tmp_path / "f").read_bytes() == data
    assert found == sum_of(data)


@pytest.mark.parametrize(("nbytes", "blocks"), [(0, b"12345678"), (1, b""), (1, b"1234567")])
def test_sums_fit_the_size(nbytes: int, blocks: bytes) -> None:
    """A manifest that says otherwise is refused when it is read."""
    with pytest.raises(ValueError, match=f"a file of {nbytes} bytes"):
        FileSum(nbytes, blocks)


def test_a_sealed_document_is_believed_only_as_it_was_written() -> None:
    """Every single byte changed, every length cut, anything appended."""
    data = sealed({"a": 1, "b": [{}, "é"]})

    assert unsealed(data, where="d") == {"xxh3_64": data[12:28].decode(), "a": 1, "b": [{}, "é"]}
    for at in range(len(data)):
        for other in (data[at] ^ 1, data[at] ^ 0x20, 0):
            changed = data[:at] + bytes([other]) + data[at + 1 :]
            if changed != data:
                with pytest.raises(CorruptedCheckpointError, match=r"^d: "):
                    unsealed(changed, where="d")
        with pytest.raises(CorruptedCheckpointError):
            unsealed(data[:at], where="d")
    with pytest.raises(CorruptedCheckpointError):
        unsealed(data + b" ", where="d")


@pytest.mark.parametrize(
    "text", ['{"a": 1, "a": 1}', '{"x": {"b": 1, "b": 2}}', "[]", "1", "", "[" * 100_000]
)
def test_json_that_is_no_plain_object_is_refused(text: str) -> None:
    """Two parsers would read two different things."""
    with pytest.raises(CorruptedCheckpointError, match="not a document of ours"):
        parse_document(text.encode(), where="d")
