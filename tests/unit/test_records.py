"""Records that torch.load reads, with the payload where we want it."""

from __future__ import annotations

import io
import zipfile

import pytest
import torch

from dist_ckpt._formats.torch_dist.records import frame_record
from dist_ckpt._planning.describe import dtype_name

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float8_e5m2,
    torch.bool,
    torch.complex64,
    torch.uint64,
]


@pytest.mark.parametrize("start", [0, 1, 63, 64, 4095, 1 << 33])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0, 4), (20000,)], ids=str)
def test_torch_reads_a_record(shape: tuple[int, ...], start: int) -> None:
    """At any position in a file; the payload is aligned in it."""
    x = torch.randn(shape)
    frame = frame_record("float32", shape, 4, start=start)
    record = frame.head + x.numpy().tobytes() + frame.tail

    loaded = torch.load(io.BytesIO(record), weights_only=True)

    assert torch.equal(loaded, x)
    assert loaded.shape == x.shape
    assert len(record) == frame.total
    assert (start + len(frame.head)) % (4096 if frame.nbytes >= 1 << 16 else 64) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    """The name of the dtype is all that differs."""
    x = torch.arange(6).to(dtype).view(2, 3)
    frame = frame_record(dtype_name(dtype), (2, 3), dtype.itemsize, start=7)
    payload = x.view(torch.uint8).numpy().tobytes()

    loaded = torch.load(io.BytesIO(frame.head + payload + frame.tail), weights_only=True)

    assert loaded.dtype == dtype
    assert torch.equal(loaded.view(torch.uint8), x.view(torch.uint8))


def test_it_is_a_zip_archive() -> None:
    """For other readers: members, stored, in order."""
    frame = frame_record("int8", (4,), 1, start=0)
    with zipfile.ZipFile(io.BytesIO(frame.head + bytes(4) + frame.tail)) as archive:
        assert archive.namelist() == [
            "archive/data.pkl", "archive/byteorder", "archive/version", "archive/data/0",
        ]  # fmt: skip
        assert archive.infolist()[3].file_size == 4


def test_too_large_a_record_is_refused() -> None:
    """The sizes have 32 bits."""
    frame_record("int8", ((1 << 32) - (1 << 16),), 1, start=0)
    with pytest.raises(ValueError, match="less than 4 GiB"):
        frame_record("int8", (1 << 32,), 1, start=0)
