"""Where payloads lie in data files, for other alignments and buffers than those we choose."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dist_ckpt import ShardedTensor, load, save
from dist_ckpt._formats.torch_dist import sizes
from dist_ckpt._formats.torch_dist.layout import PlannedFile, plan_files
from dist_ckpt._formats.torch_dist.write import write_shards
from dist_ckpt._saving.image import FileImage
from dist_ckpt._sharding.assign import WriteItem
from dist_ckpt._sharding.table import LocalShards, local_shards
from dist_ckpt._staging_pool.arena import Arena
from dist_ckpt._staging_pool.copying import Copier
from dist_ckpt.box import split_box
from dist_ckpt.storage import open_store

COUNTS = (5, 70_000, 1, 16_384, 1_000, 33_000, 0, 20_000, 300_000, 3)
"""Elements: records below and above each of the sizes at which something changes."""


def _seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def tensors() -> dict[str, torch.Tensor]:
    """Return tensors of all sizes; some are written from their own memory, one is strided."""
    found = {f"x{i}": torch.randn(count, generator=_seeded(i)) for i, count in enumerate(COUNTS)}
    return {
        **found,
        "strided": torch.randn(400, 300, generator=_seeded(99)).t(),
        "bytes": torch.ones(7, dtype=torch.int8),
    }


def planned() -> tuple[LocalShards, list[PlannedFile]]:
    shards = local_shards(
        [ShardedTensor.from_rank_offsets(key, value) for key, value in tensors().items()]
    )
    infos = [shards.table[i] for i in range(len(shards))]
    items = [
        WriteItem(i, box)
        for i, info in enumerate(infos)
        for box in split_box(info.box, 4, 300 << 10)
        if box.numel
    ]
    return shards, plan_files(infos, items, rank=0, thread_count=2)


def files_of_image(shards: LocalShards, files: list[PlannedFile]) -> dict[str, bytes]:
    """Return the files as a background save lays them out in memory that was used before."""
    image = FileImage.of(files)
    arena = Arena(image.nbytes)
    whole = arena.view(0, (image.nbytes,), torch.uint8)
    whole.fill_(0xFF)
    image.put_frames(arena)
    copier = Copier(thread_count=1)
    copier.run(image.copies(image.targets(arena), shards))
    copier.close()
    return {
        file.name: whole[start : start + file.nbytes].numpy().tobytes()
        for file, start in zip(files, image.starts, strict=True)
    }


def files_of_stream(shards: LocalShards, files: list[PlannedFile]) -> dict[str, bytes]:
    """Return the files as they go through a memory that is smaller than they are."""
    image, arena = FileImage.of(files), Arena(sizes.PAGE_NBYTES)
    found = {file.name: bytearray(file.nbytes) for file in files}
    for run in image.stream(arena, shards, lambda: 0, sizes.PAGE_NBYTES):
        piece = arena.view(run.offset, (run.nbytes,), torch.uint8).numpy().tobytes()
        found[files[run.file].name][run.position : run.position + run.nbytes] = piece
    return {name: bytes(data) for name, data in found.items()}


@pytest.fixture(params=[64, 4096, 8192, 1 << 16, 1 << 21], ids=str)
def alignment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The alignment of large payloads; the last one is larger than the memory for padding."""
    monkeypatch.setattr(sizes, "LARGE_ALIGNMENT", request.param)
    return request.param  # type: ignore[no-any-return]


def test_all_ways_to_write_agree_on_every_byte(tmp_path: Path, alignment: int) -> None:
    """Records are where the plan says, aligned, readable by torch, with zeros between them."""
    shards, files = planned()

    write_shards(shards, files, open_store(tmp_path), thread_count=1)

    written = {file.name: (tmp_path / file.name).read_bytes() for file in files}
    assert files_of_image(shards, files) == written
    assert files_of_stream(shards, files) == written
    expected = tensors()
    for file in files:
        data, end = written[file.name], 0
        for number, (frame, payload) in enumerate(zip(file.frames, file.payloads, strict=True)):
            aligned = alignment if frame.nbytes >= sizes.LARGE_NBYTES else sizes.ALIGNMENT
            assert payload % aligned == 0
            start = payload - len(frame.head)
            assert not any(data[end:start])
            end = start + frame.total
            loaded = torch.load(io.BytesIO(data[start:end]), weights_only=True)
            box = file.items[number].box
            assert torch.equal(loaded, expected[file.key_of(number)][box.slices()])
        assert end == len(data) == file.nbytes


@pytest.mark.parametrize("gathered", [1 << 18, 1 << 20])
def test_what_is_saved_so_loads(
    tmp_path: Path, alignment: int, gathered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers go by the index, whatever the writer's numbers were."""
    monkeypatch.setattr(sizes, "GATHERED_NBYTES", gathered)
    values = tensors()
    save({k: ShardedTensor.from_rank_offsets(k, v) for k, v in values.items()}, tmp_path / "c")

    request = {k: torch.zeros(v.shape, dtype=v.dtype) for k, v in values.items()}
    loaded = load(
        {k: ShardedTensor.from_rank_offsets(k, v) for k, v in request.items()}, tmp_path / "c"
    )

    assert all(torch.equal(loaded[key], value) for key, value in values.items())


def test_a_record_that_no_memory_holds_is_no_silent_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer smaller than a small record: writing stops, and no byte is shifted or cut."""
    monkeypatch.setattr(sizes, "GATHERED_NBYTES", 1 << 14)
    shards, files = planned()

    with pytest.raises(ValueError, match="do not fit in a buffer of 16384"):
        write_shards(shards, files, open_store(tmp_path), thread_count=1)
