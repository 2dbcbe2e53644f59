"""Records that torch.load reads, with the payload where we want it."""

from __future__ import annotations

import io
import math
import zipfile

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from dist_ckpt._formats.torch_dist.records import Frames, frame_of
from dist_ckpt._sharding.shard_info import dtype_name

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float8_e5m2,
    torch.bool,
    torch.complex64,
    torch.uint64,
]


@pytest.mark.parametrize("position", [0, 1, 63, 64, 4095, 1 << 33])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0, 4), (20000,)], ids=str)
def test_torch_reads_a_record(shape: tuple[int, ...], position: int) -> None:
    """At any position in a file; the payload is aligned in it."""
    x = torch.randn(shape)
    frame = frame_of("float32", shape, 4)
    start = frame.start_after(position)
    record = frame.head + x.numpy().tobytes() + frame.tail

    loaded = torch.load(io.BytesIO(record), weights_only=True)

    assert torch.equal(loaded, x)
    assert loaded.shape == x.shape
    assert len(record) == frame.total
    assert 0 <= start - position < 4096
    assert (start + len(frame.head)) % (4096 if frame.nbytes >= 1 << 16 else 64) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    """The name of the dtype is all that differs."""
    x = torch.arange(6).to(dtype).view(2, 3)
    frame = frame_of(dtype_name(dtype), (2, 3), dtype.itemsize)
    payload = x.view(torch.uint8).numpy().tobytes()

    loaded = torch.load(io.BytesIO(frame.head + payload + frame.tail), weights_only=True)

    assert loaded.dtype == dtype
    assert torch.equal(loaded.view(torch.uint8), x.view(torch.uint8))


def test_it_is_a_zip_archive() -> None:
    """For other readers: members, stored, in order."""
    frame = frame_of("int8", (4,), 1)
    with zipfile.ZipFile(io.BytesIO(frame.head + bytes(4) + frame.tail)) as archive:
        assert archive.namelist() == [
            "archive/data.pkl", "archive/byteorder", "archive/version", "archive/data/0",
        ]  # fmt: skip
        assert archive.infolist()[3].file_size == 4


def test_too_large_a_record_is_refused() -> None:
    """The sizes have 32 bits."""
    frame_of("int8", ((1 << 32) - (1 << 16),), 1)
    with pytest.raises(ValueError, match="less than 4 GiB"):
        frame_of("int8", (1 << 32,), 1)


@given(
    st.sampled_from(["float32", "bfloat16", "int8"]),
    st.lists(st.integers(0, 70000), max_size=5).map(tuple),
)
def test_a_template_gives_the_same_frame(dtype: str, shape: tuple[int, ...]) -> None:
    """Whatever was made from it before."""
    itemsize = {"float32": 4, "bfloat16": 2, "int8": 1}[dtype]
    assume(math.prod(shape) * itemsize < 1 << 31)
    frames = Frames()
    frames.of(dtype, (3,) * len(shape), itemsize)

    assert frames.of(dtype, shape, itemsize) == frame_of(dtype, shape, itemsize)


@pytest.mark.parametrize("shape", [(1 << 31,), (0, 1 << 40), (1 << 31, 1), (65535, 32769)])
def test_numbers_of_more_than_31_bits_are_made_without_a_template(shape: tuple[int, ...]) -> None:
    """Pickle writes them another way."""
    assert Frames().of("int8", shape, 1) == frame_of("int8", shape, 1)
