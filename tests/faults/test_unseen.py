"""What saves and loads must do although nothing shows it as long as all goes well.

Here: lost races, syncs that only a crash would miss, descriptors, proofs and limits. Not here: what
is there after a crash (``test_crash_points``).
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.testing._internal.distributed.fake_pg import FakeStore

from dist_ckpt import InvalidShardingError, SaveOptions, ShardedObject, ShardedTensor, load, save
from dist_ckpt._comm.store import StoreCommunicator
from dist_ckpt._formats.torch_dist import write as torch_dist_write
from dist_ckpt._formats.torch_dist.format import TorchDistFormat
from dist_ckpt._formats.zarr import write as zarr_write
from dist_ckpt._sharding.assign import CHUNK_NBYTES, assign_writers
from dist_ckpt._worker import link
from dist_ckpt._worker.result import SaveInFlight, outcome
from dist_ckpt._worker.saves import GivenUpError
from dist_ckpt.background import BackgroundSaver
from dist_ckpt.derive import sharded_state_dict
from dist_ckpt.dict_utils import nested_values
from dist_ckpt.errors import AsyncSaveError, CoordinationError, StorageError
from dist_ckpt.mapping import is_main_replica
from dist_ckpt.storage import commit, local, trees
from dist_ckpt.storage.commit import Attempt
from dist_ckpt.storage.local import LocalWriter
from dist_ckpt.storage.trees import make_directory
from dist_ckpt.testing.world import ThreadWorld
from dist_ckpt.types import Communicator
from lightning_dist_ckpt._pending import flip_link
from tests.unit.test_distribution import info


def request(rank: int = 0, size: int = 1, value: float = 0.0) -> dict[str, Any]:
    rows = torch.full((2, 3), value)
    return {"w": ShardedTensor.from_rank_offsets("w", rows, (0, rank, size))}


# -- publishing ------------------------------------------------------------------------------------


def test_three_lost_races_in_a_row_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process puts the old one back between the two renames, again and again."""
    save(request(value=1.0), tmp_path / "c")
    before = sorted(tmp_path.iterdir())
    rename, lost = Path.rename, []

    def refused(a: Path, b: Path) -> None:
        raise OSError(errno.EINVAL, "no exchange")

    def raced(self: Path, target: Any) -> Path:
        if self.suffix == ".attempt" and Path(target) == tmp_path / "c":
            lost.append(self)
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        return rename(self, target)

    monkeypatch.setattr(commit, "_exchange", refused)
    monkeypatch.setattr(Path, "rename", raced)
    with pytest.raises(StorageError, match="publish"):
        save(request(value=2.0), tmp_path / "c")

    assert len(lost) == 3
    assert load(request(), tmp_path / "c")["w"].eq(1.0).all()
    assert sorted(tmp_path.iterdir()) == before


# -- syncs -----------------------------------------------------------------------------------------


def test_the_parent_of_a_new_directory_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name stands in the parent, for each of the missing ones."""
    synced: list[Path] = []
    monkeypatch.setattr(trees, "fsync_directory", synced.append)
    make_directory(tmp_path / "a" / "b")
    assert set(synced) == {tmp_path, tmp_path / "a"}


def test_a_file_that_is_copied_instead_of_linked_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's file, where the file system has no hard links: its old copy is removed soon."""
    first = Attempt.begin(tmp_path / "c", None)
    first.publish(old_files=())
    (tmp_path / "c" / "mine").write_text("x")
    second = Attempt.begin(tmp_path / "c", None)
    (second.directory / "new").write_text("y")
    fsync, synced = os.fsync, set()

    def recorded(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "link", mock.Mock(side_effect=OSError(errno.EPERM, "no links")))
    monkeypatch.setattr(os, "fsync", recorded)
    second.publish(old_files=())

    assert (tmp_path / "c" / "mine").read_text() == "x"
    assert (tmp_path / "c" / "mine").stat().st_ino in synced


@pytest.mark.parametrize(
    ("backend", "module"), [("torch_dist", torch_dist_write), ("zarr", zarr_write)]
)
def test_each_rank_syncs_the_directories_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: Any, module: Any
) -> None:
    """On a network file system no other host does it for this one."""
    synced: Counter[str] = Counter()

    def recorded(path: Path) -> None:
        synced["array" if path.name == "w" else path.suffix] += 1
        trees.fsync_directory(path)

    monkeypatch.setattr(module, "fsync_directory", recorded)

    def run(comm: Communicator) -> None:
        state, options = request(comm.rank, comm.size), SaveOptions(backend=backend)
        save(state, tmp_path / "c", options=options, communicator=comm)

    ThreadWorld(2).run(run)
    assert synced[".attempt" if backend == "torch_dist" else "array"] == 2


# -- descriptors, proofs, requests -----------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch_dist", "zarr"])
@pytest.mark.parametrize("what", ["write", "sync"])
def test_a_save_that_fails_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: Any, what: str
) -> None:
    """Of files that were begun, and of those that wait to be synced."""
    state = {f"w{i}": ShardedTensor.from_rank_offsets(f"w{i}", torch.ones(9)) for i in range(5)}
    options = SaveOptions(backend=backend, thread_count=1)
    save(state, tmp_path / "warm", options=options)
    begun: list[int] = []
    make = LocalWriter.__init__

    def recorded(self: LocalWriter, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        begun.append(self._descriptor)

    boom = mock.Mock(side_effect=OSError(errno.EIO, "boom"))
    monkeypatch.setattr(LocalWriter, "__init__", recorded)
    monkeypatch.setattr(*((local, "_write_all") if what == "write" else (os, "fsync")), boom)
    before = open_descriptors()
    with pytest.raises(StorageError, match="boom"):
        save(state, tmp_path / "c", options=options)
    assert begun
    assert open_descriptors() == before


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_chunk_without_proof_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A format that tells of one chunk fewer than was planned has not written all."""
    write = TorchDistFormat.write

    def forgetful(self: TorchDistFormat, job: Any) -> Any:
        written = write(self, job)
        assert len(written.results) == 1
        object.__setattr__(written, "results", [])
        return written

    monkeypatch.setattr(TorchDistFormat, "write", forgetful)
    with pytest.raises(CoordinationError, match="1 chunks were planned, 0 written"):
        save(request(), tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_objects_of_a_request_are_complete_and_single(tmp_path: Path) -> None:
    """A cell that two places ask for, and one that nobody does, are told at the load."""

    def cell(number: int) -> ShardedObject:
        return ShardedObject("o", {"n": number}, (2,), (number,))

    save({"a": cell(0), "b": cell(1)}, tmp_path / "c")
    with pytest.raises(InvalidShardingError, match="Duplicate ShardedObject keys: 'o/shard_0_2'"):
        load({"a": cell(0), "b": cell(1), "again": cell(0)}, tmp_path / "c")
    with pytest.raises(InvalidShardingError, match="1 ShardedObject are missing"):
        load({"a": cell(0)}, tmp_path / "c")


def test_a_worker_that_starts_slowly_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it has said hello, only the time for a start counts."""
    monkeypatch.setattr(link, "SILENCE_SECS", 0.0)
    monkeypatch.setattr(link, "_SLICE_SECS", 0.001)  # no interpreter starts within one
    handle = link.Link._handle

    def heard(self: link.Link, message: object) -> None:
        monkeypatch.setattr(link, "SILENCE_SECS", 60.0)
        handle(self, message)

    monkeypatch.setattr(link.Link, "_handle", heard)
    with BackgroundSaver() as saver:
        saver.start()
        assert saver._machinery.worker is not None
        assert saver._machinery.worker._link is not None
        saver._machinery.worker._link.wait_until_ready()


@pytest.mark.parametrize("heard", [None, "committed", "failed"])
def test_a_rank_that_gives_a_save_up_hears_its_end_or_prevents_it(
    tmp_path: Path, heard: str | None
) -> None:
    """Rank 1's thread is stuck. It was told nothing, so nothing may be committed afterwards."""
    comm = StoreCommunicator(dist.HashStore(), rank=1, size=2, timeout_secs=60)
    attempt = Attempt.begin(tmp_path / "c", None)
    planned: Any = SimpleNamespace(
        name="s/1", target=attempt.target, directory=attempt.directory, point=None
    )
    failure = AsyncSaveError("boom on rank 0")
    if heard:
        comm.duplicate("s/1", timeout_secs=1).post_note(
            "ended", failure if heard == "failed" else None
        )
    given_up = GivenUpError("closed")
    submitted: Any = SimpleNamespace(save=SimpleNamespace(outcome=Future()))
    submitted.save.outcome.set_exception(given_up)
    save = SaveInFlight(
        number=1, path=attempt.target, comm=comm, planned=planned, submitted=submitted
    )
    save.given_up.set()  # as `close` does

    ended = outcome(save)
    if heard:
        assert str(ended) == (str(failure) if heard == "failed" else "None")
        assert attempt.directory.exists()  # rank 0's affair
    else:
        assert ended is given_up
        assert "waiting was ended" in given_up.__notes__[0]
        assert not attempt.directory.exists()


# -- planning and adapters -------------------------------------------------------------------------


def test_pieces_of_what_one_rank_alone_may_write_count_for_it() -> None:
    """A box above 256 MiB is cut; what others may write, too, goes to who has less to do."""
    fixed = info("a", 3 * CHUNK_NBYTES, main=True, writer="main")
    free = [info("b", 1 << 20), info("c", 1 << 20)]
    plans = assign_writers([[fixed, *free], free])
    assert [len(plan) for plan in plans] == [3, 2]


def test_a_link_that_cannot_be_flipped_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link that should have taken its place goes."""
    (tmp_path / "a").mkdir()
    monkeypatch.setattr(Path, "replace", mock.Mock(side_effect=OSError(errno.EIO, "boom")))
    with pytest.raises(OSError, match="boom"):
        flip_link(tmp_path / "a", tmp_path / "last")
    assert [one.name for one in tmp_path.iterdir()] == ["a"]


def described_by(rank: int) -> dict[str, Any]:
    """Return the objects that one of four ranks has, by key; no other rank is needed."""
    dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = FullyShardedDataParallel(
            nn.Linear(3, 3), sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh,
            use_orig_params=True, device_id=torch.device("cpu"),
        )  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters())
        for parameter in model.parameters():
            optimizer.state[parameter]["note"] = "x"
        found = nested_values(sharded_state_dict(model, optimizer)["optimizer"])
        return {one.key: one for one in found if isinstance(one, ShardedObject)}
    finally:
        dist.destroy_process_group()


def test_one_rank_stores_what_is_no_tensor() -> None:
    """Of all groups that have the same, under hybrid sharding too."""
    found = [described_by(rank) for rank in range(4)]
    keys = {key for one in found for key in one}
    assert len(keys) == 2
    for key in keys:
        stored = [one for one in found if key in one and is_main_replica(one[key].replica_id)]
        assert len(stored) == 1, key
