"""Loads that compare: a wrong block never reaches the caller, whatever reads it."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from dist_ckpt import (
    CorruptedCheckpointError,
    LoadOptions,
    SaveOptions,
    ShardedObject,
    ShardedTensor,
    load,
    load_common_state_dict,
    load_plain_tensors,
    save,
)
from dist_ckpt._formats.manifest import read_manifest
from dist_ckpt._formats.verification import VerifiedStore
from dist_ckpt.errors import ConfigError
from dist_ckpt.storage import Extent, LocalStore
from dist_ckpt.storage.checksums import BLOCK_NBYTES, sum_of
from dist_ckpt.testing import RankErrors, ThreadWorld

BACKENDS = pytest.mark.parametrize("backend", ["torch_dist", "zarr"])


def whole(key: str, tensor: torch.Tensor) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, tensor)


def saved(path: Path, backend: Literal["torch_dist", "zarr"] = "torch_dist") -> torch.Tensor:
    """Save 5 MiB in two tensors and some values; return the large tensor."""
    tensor = torch.randn(1 << 20)
    state = {
        "w": whole("w", tensor),
        "b": whole("b", torch.arange(1000)),
        "rng": ShardedObject("rng", {"state": [1, 2]}, (1,), (0,)),
        "step": 3,
        "plain": torch.ones(3),
    }
    save(state, path, options=SaveOptions(backend=backend))
    return tensor


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def largest(path: Path) -> Path:
    return max(
        (one for one in path.rglob("*") if one.is_file()), key=lambda one: one.stat().st_size
    )


def test_every_file_is_in_the_manifest(tmp_path: Path) -> None:
    """With the marker, and nothing else is there but the manifest."""
    saved(tmp_path / "c")

    manifest = read_manifest(tmp_path / "c")

    found = {one.relative_to(tmp_path / "c").as_posix() for one in (tmp_path / "c").rglob("*")}
    assert found - {"manifest.json"} == manifest.files.keys()
    assert manifest.name == "c"
    assert manifest.nbytes == sum((tmp_path / "c" / name).stat().st_size for name in manifest.files)


@BACKENDS
def test_a_flipped_byte_is_named_and_never_delivered(
    tmp_path: Path, backend: Literal["torch_dist", "zarr"]
) -> None:
    """With file, offset, key, what is expected and what is found; the other tensor still loads."""
    tensor = saved(tmp_path / "c", backend)
    file = largest(tmp_path / "c")
    flip(file, 3 * BLOCK_NBYTES + 77)
    target = torch.zeros(1 << 20)

    with pytest.raises(CorruptedCheckpointError) as caught:
        load({"w": whole("w", target)}, tmp_path / "c")

    text = str(caught.value)
    assert "'w'" in text
    assert file.relative_to(tmp_path / "c").as_posix() in text
    assert f"bytes {3 * BLOCK_NBYTES} to {4 * BLOCK_NBYTES}" in text
    assert len(re.findall(r"\b[0-9a-f]{16}\b", text)) == 2
    wrong = ~((target == tensor) | (target == 0) | target.isnan())
    assert not wrong.any(), "neither old nor new nor no number at all"
    loaded = load({"b": whole("b", torch.zeros(1000, dtype=torch.int64))}, tmp_path / "c")
    assert torch.equal(loaded["b"], torch.arange(1000))


@BACKENDS
def test_off_reads_what_is_there(tmp_path: Path, backend: Literal["torch_dist", "zarr"]) -> None:
    """Who switches it off gets the other number."""
    tensor = saved(tmp_path / "c", backend)
    flip(largest(tmp_path / "c"), 3 * BLOCK_NBYTES + 77)

    loaded = load(
        {"w": whole("w", torch.zeros(1 << 20))}, tmp_path / "c", options=LoadOptions(verify="off")
    )

    assert (loaded["w"] != tensor).sum() == 1


@BACKENDS
def test_full_finds_damage_that_nobody_reads(
    tmp_path: Path, backend: Literal["torch_dist", "zarr"]
) -> None:
    """Before anything is filled."""
    saved(tmp_path / "c", backend)
    flip(largest(tmp_path / "c"), 3 * BLOCK_NBYTES + 77)
    target = torch.zeros(1000, dtype=torch.int64)
    request = {"b": whole("b", target)}

    with pytest.raises(CorruptedCheckpointError, match=largest(tmp_path / "c").name):
        load(request, tmp_path / "c", options=LoadOptions(verify="full"))

    assert not target.any()
    load(request, tmp_path / "c")
    assert target[1] == 1


def test_full_is_shared_and_told_to_all(tmp_path: Path) -> None:
    """Three ranks look through all files; each raises."""
    saved(tmp_path / "c")
    flip(tmp_path / "c" / ".metadata", 5)

    def rank(comm: Any) -> None:
        options = LoadOptions(verify="full")
        request = {"w": whole("w", torch.zeros(1 << 20))}
        load(request, tmp_path / "c", options=options, communicator=comm)

    with pytest.raises(RankErrors) as caught:
        ThreadWorld(3).run(rank)

    assert {type(error) for error in caught.value.errors.values()} == {CorruptedCheckpointError}
    assert len(caught.value.errors) == 3
    assert all(".metadata: bytes 0 to" in str(error) for error in caught.value.errors.values())


def test_ranks_agree_on_how_much_is_verified(tmp_path: Path) -> None:
    """Else one would wait for the others."""
    saved(tmp_path / "c")

    def rank(comm: Any) -> None:
        options = LoadOptions(verify="full" if comm.rank else "read")
        load({}, tmp_path / "c", options=options, communicator=comm)

    with pytest.raises(RankErrors) as caught:
        ThreadWorld(2).run(rank)

    assert {type(error) for error in caught.value.errors.values()} == {ConfigError}


@pytest.mark.parametrize("document", ["common", "index", "manifest"])
@BACKENDS
def test_documents_are_always_compared(
    tmp_path: Path, backend: Literal["torch_dist", "zarr"], document: str
) -> None:
    """Whatever is read, and also if data is not compared."""
    name = "index.bin" if (backend, document) == ("torch_dist", "index") else f"{document}.json"
    saved(tmp_path / "c", backend)
    flip(tmp_path / "c" / name, 40)

    for read in (load_common_state_dict, load_plain_tensors):
        with pytest.raises(CorruptedCheckpointError, match=name):
            read(tmp_path / "c", options=LoadOptions(verify="off"))


@pytest.mark.parametrize(("old", "new"), [("torch_dist", "zarr"), ('"json"', '"torch"')])
def test_the_marker_is_the_manifests(tmp_path: Path, old: str, new: str) -> None:
    """A format that the checkpoint was not saved in is refused."""
    saved(tmp_path / "c")
    marker = tmp_path / "c" / "metadata.json"
    marker.write_text(marker.read_text().replace(old, new))

    with pytest.raises(CorruptedCheckpointError, match=r"metadata\.json"):
        load_plain_tensors(tmp_path / "c")


def test_files_of_another_step_are_not_believed(tmp_path: Path) -> None:
    """They have the same name and the same size."""
    saved(tmp_path / "a")
    saved(tmp_path / "b")
    for name in ("__0_0.distcp", "__0_1.distcp"):
        (tmp_path / "b" / name).replace(tmp_path / "a" / name)

    with pytest.raises(CorruptedCheckpointError, match="have the checksum"):
        load_plain_tensors(tmp_path / "a")


def test_included_files_are_verified(tmp_path: Path) -> None:
    """What hooks put into the checkpoint belongs to it."""
    (tmp_path / "extra" / "deep").mkdir(parents=True)
    (tmp_path / "extra" / "deep" / "notes.bin").write_bytes(bytes(1000))
    options = SaveOptions(include_dir=tmp_path / "extra")
    save({"w": whole("w", torch.ones(4))}, tmp_path / "c", options=options)
    assert "deep/notes.bin" in read_manifest(tmp_path / "c").files
    flip(tmp_path / "c" / "deep" / "notes.bin", 10)

    with pytest.raises(CorruptedCheckpointError, match=r"deep/notes\.bin"):
        load({}, tmp_path / "c", options=LoadOptions(verify="full"))


@pytest.mark.parametrize("name", ["manifest.json", "metadata.json", "index.bin"])
def test_a_damaged_checkpoint_can_be_saved_over(tmp_path: Path, name: str) -> None:
    """It must not keep a job from saving to the same path."""
    saved(tmp_path / "c")
    flip(tmp_path / "c" / name, 40)

    tensor = saved(tmp_path / "c")

    assert torch.equal(load_plain_tensors(tmp_path / "c")["w"], tensor)


class Counting(LocalStore):
    """Counts the bytes that are read."""

    nbytes_read = 0

    def read_ranges(self, name: str, extents: Any) -> None:
        self.nbytes_read += sum(memoryview(one.buffer).nbytes for one in extents)
        super().read_ranges(name, extents)


def test_blocks_at_the_edges_are_read_once(tmp_path: Path) -> None:
    """Neighbours share them; whole blocks go straight to the caller."""
    data = bytes(range(256)) * 8192  # 2 MiB
    (tmp_path / "f").write_bytes(data)
    counting = Counting(tmp_path)
    store = VerifiedStore(counting, {"f": sum_of(data)})
    buffer = bytearray(len(data))
    cuts = [0, 10, 300_000, 300_001, 1_000_000, 2_000_000, len(data)]

    for start, stop in itertools.pairwise(cuts):
        store.read_ranges("f", [Extent(start, memoryview(buffer)[start:stop])])

    assert buffer == data
    assert counting.nbytes_read == len(data)


def test_a_request_beyond_the_file_is_refused(tmp_path: Path) -> None:
    """No block has a checksum for it."""
    (tmp_path / "f").write_bytes(b"abc")
    store = VerifiedStore(LocalStore(tmp_path), {"f": sum_of(b"abc")})

    with pytest.raises(CorruptedCheckpointError, match="bytes 1 to 4 of a file of 3"):
        store.read_ranges("f", [Extent(1, memoryview(bytearray(3)))])
