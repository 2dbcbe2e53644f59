"""Planning at scale, simulated in one process: the coordinator of thousands of ranks.

Here: what rank 0 computes for a first save, what a load opens, what one loading rank reads of the
index; DCP's planner beside ours. Not here: bytes of tensors, the network (what ranks send is made
beforehand, unpickling it is in the clock), what the numbers mean (docs/performance.md).
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from harness.bench import Bench, Case, arguments, main
from harness.run import Run

BENCH = Bench(
    name="plan",
    title="Planning, simulated in one process",
    scenario="bench_plan:measure",
    measures={
        "coordinator": "first save: coordinator",
        "open": "load: opening",
        "rank": "load: one rank finds its chunks",
        "again": "third save of a job: planning on one rank, all tensors as before",
    },
    contenders=("ours", "dcp"),
    floor="ours",
)

ROWS, COLUMNS, ITEMSIZE = 4, 1024, 4
"""Each rank has as many rows of each tensor, of float32."""


def measure(run: Run) -> None:
    """Simulate a save and a load by one planner; or plan again what is planned already."""
    if run.setting("again"):
        plan_again(run, run.setting("tensors"))
        return
    ranks, tensors = run.setting("ranks"), run.setting("tensors")
    planner = (Ours if run.job.contender == "ours" else Dcp)(run.directory, ranks, tensors)
    plans: list[Any] = []
    run.timed("coordinator", lambda: plans.append(planner.coordinate()))
    run.fact("coordinator", nbytes=planner.stored(), shards=ranks * tensors)
    run.timed("open", planner.open)
    run.timed("rank", planner.find)


def plan_again(run: Run, tensors: int) -> None:
    """Save three times through a manager; what counts is the planning of the last one."""
    import torch
    from contenders.ours import Bag

    from dist_ckpt._saving.plan import Planner
    from dist_ckpt.manager import CheckpointManager
    from dist_ckpt.training_state import TrainingState

    model = Bag({_key(n): torch.zeros(ROWS, COLUMNS) for n in range(tensors)})
    plan = Planner.plan

    def timed(*given: Any, **named: Any) -> Any:
        planned: list[Any] = []
        run.timed("again", lambda: planned.append(plan(*given, **named)))
        return planned[0]

    with (
        mock.patch.object(Planner, "plan", timed),
        CheckpointManager(run.directory / "job") as manager,
    ):
        for step in range(3):
            manager.save(step, TrainingState(models=[model]))


class Ours:
    """Rank 0's part of ``save`` with ``torch_dist``, then the index as a load reads it."""

    def __init__(self, directory: Path, ranks: int, tensors: int) -> None:
        """Describe all ranks' shards, as each of them would have sent it."""
        import torch

        from dist_ckpt._formats.torch_dist.format import TorchDistFormat
        from dist_ckpt._sharding.table import local_shards
        from dist_ckpt.mapping import ShardedTensor
        from dist_ckpt.validation import RankView

        self._directory, self._ranks, self._tensors = directory, ranks, tensors
        self._format, data = TorchDistFormat(), torch.empty(ROWS, COLUMNS)
        self._index = directory / "index.bin"
        self._table = local_shards(
            ShardedTensor.from_rank_offsets(_key(n), data, (0, 0, ranks)) for n in range(tensors)
        ).table
        self._sent = [
            pickle.dumps(
                RankView(self._of(rank), (), (("torch_dist", 1), ("json", 1))),
                pickle.HIGHEST_PROTOCOL,
            )
            for rank in range(ranks)
        ]

    def coordinate(self) -> None:
        """Check, plan, answer; then gather what was written, and make the index."""
        from dist_ckpt._saving.describe import check_views

        views = [pickle.loads(data) for data in self._sent]
        plan = self._format.plan(check_views(views, check_coverage=True), self._directory)
        answers = [pickle.dumps(work, pickle.HIGHEST_PROTOCOL) for work in plan.work]
        assert len(answers) == self._ranks
        results = [pickle.loads(data) for data in self._written(plan.work[0])]
        documents = self._format.documents(plan.combined(results), {}, self._directory)
        for name, data in documents.items():
            (self._directory / name).write_bytes(data)

    def stored(self) -> int:
        """Return the size of the index."""
        return self._index.stat().st_size

    def open(self) -> None:
        """Read and check the whole index, as rank 0 does."""
        from dist_ckpt._formats.torch_dist.index_file import read_packed_index
        from dist_ckpt.storage import open_store

        sizes = {f"__{r}_{n}.distcp": 1 << 40 for r in range(self._ranks) for n in (0, 1)}
        self._opened = read_packed_index(self._directory, open_store(self._directory), sizes=sizes)

    def find(self) -> None:
        """Read what another rank reads: it is told where the index is and its checksum."""
        from dist_ckpt.box import Box

        index = pickle.loads(pickle.dumps(self._opened, pickle.HIGHEST_PROTOCOL))
        rows = ROWS * self._ranks // max(1, self._ranks - 1)  # of another layout
        for number in range(self._tensors):
            wanted = Box((rows, 0), (min(rows, ROWS * self._ranks - rows), COLUMNS))
            found = index.tensors[_key(number)].overlapping(wanted)
            assert found

    def _of(self, rank: int) -> Any:
        """A rank's shards: those of rank 0, further down."""
        from dist_ckpt._sharding.table import ShardTable

        base = self._table
        sizes = base.sizes.copy()
        sizes[0, :, 0] = rank * ROWS
        columns = (base.key, base.dtype, base.ndim, base.flags)
        return ShardTable(base.keys, base.dtypes, columns, sizes)

    def _written(self, work: Any) -> list[bytes]:
        """What ranks tell of their files: alike, but for the names."""
        from dist_ckpt._formats.torch_dist.layout import rank_chunks

        planned = self._format.files(self._table, work, rank=0, thread_count=2)
        chunks = rank_chunks(planned)
        return [
            pickle.dumps(
                replace(chunks, files=tuple(n.replace("__0_", f"__{rank}_") for n in chunks.files)),
                pickle.HIGHEST_PROTOCOL,
            )
            for rank in range(self._ranks)
        ]


class Dcp:
    """The coordinator's part of ``dcp.save``, and ``.metadata`` as each loading rank reads it."""

    def __init__(self, directory: Path, ranks: int, tensors: int) -> None:
        """Plan on all ranks, as each of them would have sent it."""
        import torch
        from torch.distributed.checkpoint import metadata as meta
        from torch.distributed.checkpoint import planner

        self._path, self._ranks, self._tensors = directory / ".metadata", ranks, tensors
        self._sent: list[bytes] = []
        paths = {_key(n): (_key(n),) for n in range(tensors)}
        properties = meta.TensorProperties(dtype=torch.float32)
        for rank in range(ranks):
            offset = torch.Size((rank * ROWS, 0))
            chunk = meta.ChunkStorageMetadata(offset, torch.Size((ROWS, COLUMNS)))
            whole = torch.Size((ROWS * ranks, COLUMNS))
            items = [
                planner.WriteItem(
                    index=meta.MetadataIndex(_key(n), offset),
                    type=planner.WriteItemType.SHARD,
                    tensor_data=planner.TensorWriteData(chunk, properties, whole),
                )
                for n in range(tensors)
            ]
            self._sent.append(
                pickle.dumps(planner.SavePlan(items, planner_data=paths), pickle.HIGHEST_PROTOCOL)
            )

    def coordinate(self) -> None:
        """Plan for all, answer; then gather what was written, and make ``.metadata``."""
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        plans = [pickle.loads(data) for data in self._sent]
        planner = DefaultSavePlanner()
        planner.set_up_planner({}, is_coordinator=True)
        plans, metadata = planner.create_global_plan(plans)
        answers = [pickle.dumps(plan, pickle.HIGHEST_PROTOCOL) for plan in plans]
        assert len(answers) == self._ranks
        metadata.storage_data = {
            item.index: _StorageInfo(f"__{rank}_0.distcp", number * 20_000, 20_000)
            for rank, plan in enumerate(plans)
            for number, item in enumerate(plan.items)
        }
        self._path.write_bytes(pickle.dumps(metadata))

    def stored(self) -> int:
        """Return the size of ``.metadata``."""
        return self._path.stat().st_size

    def open(self) -> None:
        """Unpickle it."""
        self._metadata = pickle.loads(self._path.read_bytes())

    def find(self) -> None:
        """Compare what a rank wants with all chunks of each of its tensors."""
        rows = ROWS * self._ranks // max(1, self._ranks - 1)
        for number in range(self._tensors):
            chunks = self._metadata.state_dict_metadata[_key(number)].chunks
            wanted = range(rows, 2 * rows)
            found = [c for c in chunks if c.offsets[0] < wanted.stop and c.offsets[0] + ROWS > rows]
            assert found


def _key(number: int) -> str:
    return f"model.layers.{number // 8}.block.{number % 8}.weight"


def run(given: Sequence[str] | None = None) -> int:
    """Measure; return 1 if ours failed."""
    parser = arguments(BENCH, mib=0, rounds=1)
    parser.add_argument("--ranks", default="64,256,1024,4096", help="numbers of ranks, by commas")
    parser.add_argument("--tensors", type=int, default=1000, help="on each rank")
    parser.add_argument("--dcp-up-to", type=int, default=256, help="most ranks of DCP's planner")
    asked = parser.parse_args(given)
    cases = [
        Case(
            label=f"{ranks} ranks",
            settings={"ranks": ranks, "tensors": asked.tensors},
            contenders=("ours", "dcp") if ranks <= asked.dcp_up_to else ("ours",),
        )
        for ranks in map(int, asked.ranks.split(","))
    ]
    again = {"again": True, "tensors": asked.tensors}
    cases.append(Case(label=f"{asked.tensors} tensors", settings=again, contenders=("ours",)))
    return main(BENCH, cases, asked)


if __name__ == "__main__":
    sys.exit(run())
