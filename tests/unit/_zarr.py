"""Saves and loads through the zarr formats alone, all ranks one after the other.

Here: the steps that ``_saving.save.run_save`` takes with a format, without documents of others, commit
or exchanges. Not here: tests.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from dist_ckpt import ShardedTensor
from dist_ckpt._formats.base import Destination, SaveFormat, WriteJob
from dist_ckpt._formats.verification import VerifiedStore
from dist_ckpt._formats.zarr.format import ZarrFormat
from dist_ckpt._formats.zarr.index import zarr_index_from_json
from dist_ckpt._formats.zarr.read import read_into
from dist_ckpt._sharding.index import CheckpointIndex, StoredTensor
from dist_ckpt._sharding.split import SaveParts
from dist_ckpt._sharding.table import local_shards
from dist_ckpt._sharding.together import JobTable
from dist_ckpt.box import Box
from dist_ckpt.storage import open_store
from dist_ckpt.storage.checksums import sum_of_file

THREADS = 2


def save_ranks(
    directory: Path, ranks: Sequence[Sequence[ShardedTensor]], version: int
) -> CheckpointIndex:
    """Save what each rank holds; return the index as a load finds it."""
    directory.mkdir(parents=True, exist_ok=True)
    shards = [local_shards(tensors) for tensors in ranks]
    views = [[shard.info for shard in held] for held in shards]
    formats: list[SaveFormat] = [ZarrFormat(version) for _ in ranks]
    plan = formats[0].plan(JobTable(views), directory)
    jobs = [
        WriteJob(
            parts=SaveParts(common={}, tensors=(), objects=()),
            shards=held,
            work=pickle.loads(pickle.dumps(plan.work[rank])),
            directory=directory,
            rank=rank,
            thread_count=THREADS,
        )
        for rank, held in enumerate(shards)
    ]
    if plan.passes_on:
        for one, job in zip(formats, jobs, strict=True):
            one.pass_on(job)
    written = [one.write(job) for one, job in zip(formats, jobs, strict=True)]
    results = [result for of_rank in written for result in of_rank.results]
    assert len(results) == plan.num_results
    empty = {
        info.key: StoredTensor(info.dtype, info.global_shape, (), info.role)
        for view in views
        for info in view
        if 0 in info.global_shape
    }
    documents = formats[0].documents(results, empty, directory)
    files = dict(plan.files)
    for of_rank in written:
        assert of_rank.files is not None
        assert not files.keys() & of_rank.files.keys(), "two ranks wrote one file"
        files |= of_rank.files
    assert files == {name: sum_of_file(directory / name) for name in files_of(directory)}, (
        "every file is told, with its checksums, and nothing else is there"
    )
    (directory / "index.json").write_bytes(documents["index.json"])
    return zarr_index_from_json(
        documents["index.json"], where="index.json", sizes=files_of(directory)
    )


def files_of(directory: Path) -> dict[str, int]:
    """Return the files below a directory with their sizes."""
    return {
        path.relative_to(directory).as_posix(): path.stat().st_size
        for path in directory.rglob("*")
        if path.is_file()
    }


def read_box(
    directory: Path, index: CheckpointIndex, key: str, box: Box, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return a box of a stored tensor, read into fresh memory full of ones."""
    stored = getattr(torch, index.tensors[key].dtype)
    nbytes = box.numel * (dtype or stored).itemsize
    view = torch.full((nbytes,), 255, dtype=torch.uint8).view(dtype or stored).view(box.shape)
    unverified = VerifiedStore(open_store(directory), {})
    read_into([Destination(key, box, view)], index, directory, unverified, thread_count=THREADS)
    return view


def read_whole(directory: Path, index: CheckpointIndex, key: str) -> torch.Tensor:
    """Return a stored tensor."""
    shape = index.tensors[key].shape
    return read_box(directory, index, key, Box((0,) * len(shape), shape))


def values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor whose elements differ, as far as the dtype can tell them apart."""
    numel = torch.Size(shape).numel()
    return torch.arange(numel, dtype=torch.float64).remainder(120).reshape(shape).to(dtype)


def boxes_of(
    tensor: torch.Tensor, key: str, boxes: Mapping[Box, int] | Sequence[Box]
) -> list[ShardedTensor]:
    """Return one sharded tensor for each box of a whole tensor."""
    return [
        ShardedTensor(
            key=key,
            data=tensor[box.slices()],
            dtype=tensor.dtype,
            local_shape=box.shape,
            global_shape=tuple(tensor.shape),
            global_offset=box.offset,
            axis_fragmentations=None,
            replica_id=0,
        )
        for box in boxes
    ]
