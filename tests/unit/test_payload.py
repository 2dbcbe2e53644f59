"""Records of ``torch.save``: only the bytes that are wanted are read, and nothing is believed."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from dist_ckpt import CorruptedCheckpointError, StorageError
from dist_ckpt._formats.base import Destination
from dist_ckpt._formats.torch_dist.payload import Record, find_payload
from dist_ckpt._formats.torch_dist.read import read_into
from dist_ckpt._sharding.index import CheckpointIndex, StoredChunk, StoredTensor
from dist_ckpt.box import Box
from dist_ckpt.storage import Extent, LocalStore

BEFORE = b"x" * 77
NAME = "data"


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def find(data: bytes, tensor: torch.Tensor, tmp_path: Path) -> int | None:
    (tmp_path / NAME).write_bytes(BEFORE + data + b"behind")
    dtype = str(tensor.dtype).removeprefix("torch.")
    record = Record(len(BEFORE), len(data), tuple(tensor.shape), dtype)
    return find_payload(LocalStore(tmp_path), NAME, record)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64,
        torch.uint64, torch.complex64, torch.complex128,
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("shape", [(3, 4), (12,), (), (2, 1, 6)])
def test_the_payload_is_found(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    """Every kind of plain tensor, anywhere in a file."""
    tensor = torch.arange(12)[: torch.Size(shape).numel()].reshape(shape).to(dtype)

    position = find(saved(tensor), tensor, tmp_path)

    assert position is not None
    data = (tmp_path / NAME).read_bytes()[position : position + tensor.nbytes]
    expected = tensor.reshape(-1).view(torch.uint8)
    assert list(data) == expected.tolist()


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(nn.Parameter(torch.ones(3, 4)), id="parameter"),
        pytest.param(torch.arange(20.0).reshape(5, 4)[1:3], id="rows-of-a-storage"),
        pytest.param(torch.arange(4.0).reshape(4, 1).t(), id="strides-of-one-element"),
    ],
)
def test_it_lies_within_its_storage(tensor: torch.Tensor, tmp_path: Path) -> None:
    """The offset in the storage counts; strides along axes of one element do not."""
    position = find(saved(tensor), tensor, tmp_path)

    assert position is not None
    data = (tmp_path / NAME).read_bytes()[position : position + tensor.nbytes]
    assert torch.equal(
        torch.frombuffer(bytearray(data), dtype=tensor.dtype).view(tensor.shape), tensor
    )


TENSOR = torch.arange(12.0).reshape(3, 4)


def rezipped(change: Callable[[str, bytes], bytes], *, method: int = zipfile.ZIP_STORED) -> bytes:
    """Return the record of TENSOR with other contents of its members."""
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(saved(TENSOR))) as old,
        zipfile.ZipFile(buffer, "w", method) as new,
    ):
        for info in old.infolist():
            new.writestr(info.filename, change(info.filename, old.read(info)))
    return buffer.getvalue()


def with_pickle(data: bytes) -> bytes:
    return rezipped(lambda name, old: data if name.endswith("data.pkl") else old)


def moved_directory(data: bytes) -> bytes:
    """Return the record with a directory that points behind its end."""
    at = data.rindex(b"archive/data/0") - 46
    offset = struct.pack("<I", 1 << 20)
    return data[: at + 42] + offset + data[at + 46 :]


UNUSUAL = {
    "transposed": saved(TENSOR.t().contiguous().t()),
    "expanded": saved(torch.ones(1).expand(3, 4)),
    "sparse": saved(TENSOR.to_sparse()),
    "conjugated": saved(torch.ones(3, 4, dtype=torch.complex64).conj()),
    "other-shape": saved(TENSOR.reshape(4, 3)),
    "other-dtype": saved(TENSOR.double()),
    "a-list": saved([TENSOR]),
    "no-tensor": saved({"a": 1}),
    "old-format": b"",
    "compressed": rezipped(lambda name, data: data, method=zipfile.ZIP_DEFLATED),
    "other-byte-order": rezipped(lambda name, data: b"big" if "byteorder" in name else data),
    "storage-too-short": rezipped(lambda name, data: data[:-1] if "data/0" in name else data),
    "no-zip": b"PK" + bytes(2000),
    "directory-behind-the-end": moved_directory(saved(TENSOR)),
    "code": with_pickle(b"cos\nsystem\n(S'true'\ntR."),
    "memo": with_pickle(b"\x80\x02Nr\x00\x00\x00\x70."),
    "long-pickle": with_pickle(bytes(1 << 17)),
    "function-with-attributes": with_pickle(
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(N}U\x01aK\x01s\x86tb."
    ),
}
OLD = io.BytesIO()
torch.save(TENSOR, OLD, _use_new_zipfile_serialization=False)
UNUSUAL["old-format"] = OLD.getvalue()


@pytest.mark.parametrize("data", UNUSUAL.values(), ids=UNUSUAL.keys())
def test_what_is_unusual_is_left_to_torch(data: bytes, tmp_path: Path) -> None:
    """Nothing is guessed: whatever is not the plainest form has no known payload."""
    expected = torch.ones(3, 4, dtype=torch.complex64) if data is UNUSUAL["conjugated"] else TENSOR

    assert find(data, expected, tmp_path) is None


def test_two_members_of_one_name(tmp_path: Path) -> None:
    """Which of them counts is not for us to say."""
    buffer = io.BytesIO(saved(TENSOR))
    with zipfile.ZipFile(buffer, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("archive/data/0", bytes(48))

    assert find(buffer.getvalue(), TENSOR, tmp_path) is None


def test_a_failing_store_is_no_unusual_record(tmp_path: Path) -> None:
    """An error of the disk is told as such."""

    class Failing(LocalStore):
        def read_ranges(self, name: str, extents: Sequence[Extent]) -> None:
            raise StorageError(f"{name}: input/output error at {extents[0].position}")

    with pytest.raises(StorageError, match="input/output"):
        find_payload(Failing(tmp_path), NAME, Record(0, 1000, (3,), "float32"))


class Counting(LocalStore):
    """Counts what is read."""

    nbytes_read = 0

    def read_ranges(self, name: str, extents: Sequence[Extent]) -> None:
        self.nbytes_read += sum(len(memoryview(extent.buffer)) for extent in extents)
        super().read_ranges(name, extents)


def stored(tmp_path: Path, tensor: torch.Tensor) -> tuple[CheckpointIndex, Counting]:
    data = saved(tensor)
    (tmp_path / NAME).write_bytes(BEFORE + data)
    shape = tuple(tensor.shape)
    whole = Box((0,) * len(shape), shape)
    chunk = StoredChunk(whole, NAME, len(BEFORE), len(data), "torch_zip")
    return CheckpointIndex({"w": StoredTensor("float32", shape, (chunk,))}), Counting(tmp_path)


LARGE = torch.arange(1 << 16, dtype=torch.float32).reshape(256, 256)


def test_a_slice_reads_its_own_bytes(tmp_path: Path) -> None:
    """Some rows of a large record cost these rows and the record's directory."""
    index, store = stored(tmp_path, LARGE)
    rows = torch.zeros(3, 256)

    read_into([Destination("w", Box((7, 0), (3, 256)), rows)], index, store, thread_count=1)

    assert torch.equal(rows, LARGE[7:10])
    assert store.nbytes_read < rows.nbytes + 8192


def test_columns_of_a_record(tmp_path: Path) -> None:
    """Strided reads from within a record, cast on the way."""
    index, store = stored(tmp_path, LARGE)
    columns = torch.zeros(256, 2, dtype=torch.float64)

    read_into([Destination("w", Box((0, 9), (256, 2)), columns)], index, store, thread_count=1)

    assert torch.equal(columns, LARGE[:, 9:11].double())
    assert store.nbytes_read < LARGE.nbytes // 2


def test_an_unusual_record_is_read_whole(tmp_path: Path) -> None:
    """A transposed tensor comes out right; it takes the whole record."""
    index, store = stored(tmp_path, LARGE.t())
    rows = torch.zeros(3, 256)

    read_into([Destination("w", Box((7, 0), (3, 256)), rows)], index, store, thread_count=1)

    assert torch.equal(rows, LARGE.t()[7:10])
    assert store.nbytes_read > LARGE.nbytes


def test_a_large_record_that_is_none(tmp_path: Path) -> None:
    """Garbage of any size is damage of the checkpoint, told with key and place."""
    index, store = stored(tmp_path, LARGE)
    path = tmp_path / NAME
    path.write_bytes(BEFORE + bytes(path.stat().st_size - len(BEFORE)))
    rows = torch.zeros(3, 256)

    with pytest.raises(CorruptedCheckpointError, match="'w': data: no tensor record at byte 77"):
        read_into([Destination("w", Box((7, 0), (3, 256)), rows)], index, store, thread_count=1)
    assert not rows.any()
