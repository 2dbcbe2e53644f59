"""Accelerate on several ranks: DDP, FSDP2, tensor parallelism, and ranks that fail or are missing."""

from __future__ import annotations

import random
import resource
import signal
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from torch.distributed.tensor import DTensor

from accelerate_dist_ckpt import DistCkptIO
from dist_ckpt.serialization import load_tensors_metadata
from dist_ckpt.training_state import CheckpointView, is_checkpoint, load_model_and_optimizer
from tests.accelerate._jobs import (
    add_loader,
    build,
    differing,
    new_accelerator,
    new_net,
    run_epochs,
    state_of,
    train,
)
from tests.multiprocess._world import run_ranks

pytestmark = pytest.mark.multiprocess


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: S311 - the state is looked at


def outcome(call: Any) -> str:
    """Return what a call raised, as text; ranks are compared by it."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# -- any mode loads any other ----------------------------------------------------------------------


def train_under_ddp(rank: int, world_size: int, path: str) -> dict[str, Any]:
    job = build("ddp", seed=1)
    with torch.no_grad():
        job.model.module.count.fill_(10.0 + rank)  # buffers differ between ranks under DDP
    train(job, 4)
    job.accelerator.save_state(path)
    return state_of(job)


def load_and_save(rank: int, world_size: int, mode: str, path: str, save_to: str) -> Any:
    job = build(mode, seed=100)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ranks without random states are another test
        job.accelerator.load_state(path)
    found = state_of(job)
    job.accelerator.save_state(save_to)
    weight = job.accelerator.unwrap_model(job.model).up.weight
    rows = weight.to_local().detach().clone() if mode == "tp" else None
    train(job, 1)  # it goes on
    return found, rows


def test_each_mode_loads_the_one_before(tmp_path: Path) -> None:
    """DDP-2 -> 1 -> FSDP2-2 -> TP-2 -> FSDP1-2 -> 1: model, optimizer, schedule equal to the bit."""
    paths = [str(tmp_path / str(i)) for i in range(6)]
    expected = run_ranks(train_under_ddp, 2, paths[0])[0]

    for source, target, mode in zip(
        paths, paths[1:], ("single", "fsdp2", "tp", "fsdp1", "single"), strict=False
    ):
        results = run_ranks(load_and_save, 1 if mode == "single" else 2, mode, source, target)
        if mode != "fsdp1":  # its state has no shape to compare with; the next mode shows it
            assert differing(expected, results[0][0]) == [], f"loaded under {mode}"
        if mode == "tp":  # natively, rank 1 silently gets the rows of rank 0
            whole = expected["model.up.weight"]
            assert torch.equal(results[0][1], whole[:5])
            assert torch.equal(results[1][1], whole[5:])
    names = load_tensors_metadata(paths[0])
    assert "models.0.up.weight" in names
    assert not [name for name in names if "module" in name]


# -- resume ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """How two ranks train and get their data."""

    id: str
    mode: str = "ddp"
    seedable: bool = False
    dispatch: bool = False


RESUMES = (
    Resume(id="ddp"),
    Resume(id="ddp, seedable sampler", seedable=True),
    Resume(id="ddp, batches dispatched by rank 0", dispatch=True),
    Resume(id="fsdp2", mode="fsdp2"),
)


def resume_job(rank: int, world_size: int, path: str, case: Resume, resume: bool) -> Any:
    config = DataLoaderConfiguration(
        use_seedable_sampler=case.seedable, dispatch_batches=case.dispatch or None
    )
    job = build(case.mode, seed=5, dataloader_config=config)
    add_loader(job)
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    if not resume:
        seen = run_epochs(job, epochs=2, save_after=3, path=path)[3:]
    else:
        job.accelerator.load_state(path)
        seen = run_epochs(job, epochs=1, skip=3 * (world_size if case.dispatch else 1))
        if case.seedable:
            job.loader.set_epoch(1)  # as Accelerate tells its users to do
        seen += run_epochs(job, epochs=2, first_epoch=1)
    return seen, draws(), state_of(job)


@pytest.mark.parametrize("case", RESUMES, ids=lambda case: case.id)
def test_a_resume_is_equal_to_the_bit(tmp_path: Path, case: Resume) -> None:
    """Order of the data, dropout, losses, and each rank's generators go on as uninterrupted."""
    path = str(tmp_path / "ckpt")
    straight = run_ranks(resume_job, 2, path, case, False)

    resumed = run_ranks(resume_job, 2, path, case, True)

    for (seen, drawn, state), (seen2, drawn2, state2) in zip(straight, resumed, strict=True):
        assert seen == seen2
        assert drawn == drawn2
        assert differing(state, state2) == []
    assert len(straight[0][0]) == 9
    assert straight[0][1] != straight[1][1]  # ranks draw different numbers


def save_alone_job(rank: int, world_size: int, path: str) -> None:
    job = build("single", seed=1)
    torch.manual_seed(3)
    job.accelerator.save_state(path)


def load_on_more(rank: int, world_size: int, path: str) -> Any:
    found = []
    for _ in range(2):
        job = build("ddp")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            job.accelerator.load_state(path)
        found.append((draws(), [str(w.message) for w in caught]))
    return found


def test_more_ranks_than_saved_are_seeded_anew(tmp_path: Path) -> None:
    """The rank without a random state warns, and gets the same numbers at each load."""
    path = str(tmp_path / "ckpt")
    run_ranks(save_alone_job, 1, path)

    first, second = run_ranks(load_on_more, 2, path)

    assert first[0][0] == first[1][0]
    assert second[0][0] == second[1][0]
    assert first[0][0] != second[0][0]
    assert not [text for text in first[0][1] if "random state" in text]
    assert any("Rank 1 of 2 has no random state" in text for text in second[0][1])


# -- who is here -----------------------------------------------------------------------------------


def save_on_main(rank: int, world_size: int, root: str) -> Any:
    job = build("ddp", seed=1, io=DistCkptIO(lone_rank_timeout_secs=1.0))
    train(job, 2)
    said = []
    for number in range(2):
        if job.accelerator.is_main_process:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                job.accelerator.save_state(f"{root}/alone{number}")
            said += [str(w.message) for w in caught]
        dist.barrier()
    job.accelerator.save_state(f"{root}/all")  # and all together, as if nothing had been
    expected = state_of(job)
    wrong = []
    for name in ("alone0", "alone1", "all"):
        train(job, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            job.accelerator.load_state(f"{root}/{name}")
        wrong += differing(expected, state_of(job))
    view = CheckpointView.open(f"{root}/all")
    return said, wrong, view.world_size


def test_rank_0_alone_saves_under_ddp(tmp_path: Path) -> None:
    """`if accelerator.is_main_process: save_state()` warns and works; later saves are unharmed."""
    results = run_ranks(save_on_main, 2, str(tmp_path))

    assert [text.count("rank 0 only") for text in results[0][0]] == [1, 1]
    assert [wrong for _, wrong, _ in results] == [[], []]
    assert results[0][2] == 2


def lone_sharded(rank: int, world_size: int, root: str) -> Any:
    job = build("fsdp2", seed=1, io=DistCkptIO(lone_rank_timeout_secs=1.0))
    told = ""
    if rank == 0:
        told = outcome(lambda: job.accelerator.save_state(f"{root}/ckpt"))
    dist.barrier()
    late = ""
    if rank == 1:
        late = outcome(lambda: job.accelerator.save_state(f"{root}/ckpt"))
    dist.barrier()
    job.accelerator.save_state(f"{root}/ckpt2")
    return told, late, Path(root, "ckpt").exists(), is_checkpoint(f"{root}/ckpt2")


def test_rank_0_alone_with_sharded_state_is_told(tmp_path: Path) -> None:
    """No hang: a clear error within the timeout, for the rank that comes too late as well."""
    first, second = run_ranks(lone_sharded, 2, str(tmp_path), timeout_secs=60)

    assert first[0].startswith("CoordinationError")
    assert "ranks [1] did not enter it within 1 s, and the state is sharded" in first[0]
    assert second[1].startswith("CoordinationError")
    assert first[2:] == (False, True)


def late_and_lost(rank: int, world_size: int, root: str) -> Any:
    io = DistCkptIO(lone_rank_timeout_secs=0.5)
    job = build("ddp", seed=1, io=io)
    told = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if rank == 0:
            job.accelerator.save_state(f"{root}/late")
        dist.barrier()
        if rank == 1:
            job.accelerator.save_state(f"{root}/late")
        dist.barrier()
        said = [str(w.message) for w in caught]
    told.append(outcome(lambda: job.accelerator.save_state(f"{root}/of-rank-{rank}")))
    told.append(outcome(lambda: job.accelerator.save_state(f"{root}/fine")))
    return said, told


def test_late_ranks_and_different_places(tmp_path: Path) -> None:
    """A rank that comes late goes on; ranks that save to different places are all told so."""
    first, second = run_ranks(late_and_lost, 2, str(tmp_path), timeout_secs=60)

    assert any("rank 0 only" in text for text in first[0])
    assert any("came late" in text for text in second[0])
    for _, (different, fine) in (first, second):
        assert "rank 0 saves to" in different
        assert "of-rank-1" in different
        assert fine == ""
    assert is_checkpoint(tmp_path / "fine")
    assert not (tmp_path / "of-rank-0").exists()


def some_missing(rank: int, world_size: int, root: str) -> Any:
    io = DistCkptIO(lone_rank_timeout_secs=0.5, timeout_secs=1.5)
    job = build("ddp", seed=1, io=io)
    told = []
    if rank != 2:
        told.append(outcome(lambda: job.accelerator.save_state(f"{root}/two")))
    dist.barrier()
    if rank == 2:
        told.append(outcome(lambda: job.accelerator.save_state(f"{root}/two")))
    dist.barrier()
    if rank == 1:
        told.append(outcome(lambda: job.accelerator.save_state(f"{root}/one")))
    dist.barrier()
    told.append(outcome(lambda: job.accelerator.save_state(f"{root}/all")))
    return told


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    """Two of three ranks, then rank 1 alone: errors that name who is missing; then all save."""
    results = run_ranks(some_missing, 3, str(tmp_path), timeout_secs=60)

    assert all("ranks [2] did not enter it" in told[0] for told in results)
    assert results[1][1].startswith("BarrierTimeoutError")
    assert "rank 0 did not enter it within 1.5 s" in results[1][1]
    assert [told[-1] for told in results] == ["", "", ""]
    assert [path.name for path in tmp_path.iterdir()] == ["all"]


# -- failures --------------------------------------------------------------------------------------


def fail_in_turn(rank: int, world_size: int, root: str) -> Any:
    config = ProjectConfiguration(project_dir=root, automatic_checkpoint_naming=True)
    job = build("ddp", seed=1, project_config=config)
    train(job, 2)
    job.accelerator.save_state()
    expected = state_of(job)
    objects = [job.accelerator._optimizers[0], job.accelerator._models[0]]
    train(job, 1)

    def broken(models: Any, weights: Any, output_dir: str) -> None:
        Path(output_dir, f"note{rank}").write_text("x")
        if rank == 1:
            raise RuntimeError("only rank 1")

    hook = job.accelerator.register_save_state_pre_hook(broken)
    told = [outcome(job.accelerator.save_state)]
    hook.remove()

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:  # as good as a full disk, for this rank alone
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, unlimited[1]))
    told.append(outcome(job.accelerator.save_state))
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)

    iteration = job.accelerator.save_iteration
    same = objects == [job.accelerator._optimizers[0], job.accelerator._models[0]]
    job.accelerator.load_state()
    wrong = differing(expected, state_of(job))
    job.accelerator.save_state()
    return told, iteration, same, wrong


def test_what_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    """A hook, then a write: both ranks raise, and everything is as before; then a save works."""
    results = run_ranks(fail_in_turn, 2, str(tmp_path))

    for told, iteration, same, wrong in results:
        assert "rank 1" in told[0]
        assert "only rank 1" in told[0]
        assert "rank 1" in told[1]
        assert "checkpoint_1" in told[1]
        assert (iteration, same, wrong) == (1, True, [])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints"]
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["checkpoint_0", "checkpoint_1"]


def hooks_by_rank(rank: int, world_size: int, root: str) -> Any:
    job = build("ddp", seed=1)
    train(job, 1)

    def own_format(models: Any, weights: list[Any], output_dir: str) -> None:
        Path(output_dir, f"by-{rank}.txt").write_text("hook")
        if job.accelerator.is_main_process:  # as in the training scripts of diffusers
            torch.save(weights.pop(), Path(output_dir, "mine.pt"))

    job.accelerator.register_save_state_pre_hook(own_format)
    job.accelerator.save_state(f"{root}/ckpt")
    expected = state_of(job)

    def own_load(models: list[Any], input_dir: str) -> None:
        model = models.pop()
        model.load_state_dict(torch.load(Path(input_dir, "mine.pt")))

    job.accelerator.register_load_state_pre_hook(own_load)
    train(job, 2)
    job.accelerator.load_state(f"{root}/ckpt")
    return differing(expected, state_of(job))


def test_hooks_that_pop_on_rank_0_decide_for_all(tmp_path: Path) -> None:
    """Weights taken away by rank 0 are not stored by any rank; all hooks' files are kept."""
    assert run_ranks(hooks_by_rank, 2, str(tmp_path)) == [[], []]

    names = {p.name for p in (tmp_path / "ckpt").iterdir()}
    assert {"by-0.txt", "by-1.txt", "mine.pt"} <= names
    keys = load_tensors_metadata(tmp_path / "ckpt")
    assert not [key for key in keys if key.startswith("models.")]
    assert any(key.startswith("optimizers.0.state.exp_avg.0.") for key in keys)


def add_sum(module: Any, entries: dict[str, Any]) -> None:
    entries["sum"] = module.up.weight.detach().sum()


def edit_by_rank(rank: int, world_size: int, root: str) -> None:
    job = build("ddp", seed=1)

    def edit(models: Any, weights: list[Any], output_dir: str) -> None:
        if rank == 0:
            weights[0]["up.weight"] = torch.full((10, 4), 7.0)

    def edit_in_place(models: Any, weights: list[Any], output_dir: str) -> None:
        weights[0]["sum"].fill_(7)  # no memory of the model's

    net = job.model.module
    net.register_state_dict_post_hook(lambda module, entries, *_: add_sum(module, entries))
    handle = job.accelerator.register_save_state_pre_hook(edit_in_place)
    job.accelerator.save_state(f"{root}/in-place")
    assert CheckpointView.open(f"{root}/in-place").full_model(0)["sum"] == 7
    handle.remove()
    net._state_dict_hooks.clear()
    job.accelerator.register_save_state_pre_hook(edit)
    job.accelerator.save_state(f"{root}/ckpt")
    job.accelerator.load_state(f"{root}/ckpt")
    assert torch.equal(job.model.module.up.weight, torch.full((10, 4), 7.0))


def test_weights_edited_by_a_hook_are_stored(tmp_path: Path) -> None:
    """What rank 0's hook put into the weights is what the checkpoint has."""
    run_ranks(edit_by_rank, 2, str(tmp_path))


def lone_naming(rank: int, world_size: int, root: str) -> Any:
    config = ProjectConfiguration(project_dir=root, automatic_checkpoint_naming=True, total_limit=2)
    job = build("ddp", project_config=config, io=DistCkptIO(lone_rank_timeout_secs=0.5))
    for _ in range(2):
        if rank == 0:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                job.accelerator.save_state()
        dist.barrier()
    saved = job.accelerator.save_state()
    return saved.name, job.accelerator.save_iteration


def test_rank_0_numbers_the_checkpoints(tmp_path: Path) -> None:
    """After rank 0 saved alone, all ranks agree on the next number."""
    assert run_ranks(lone_naming, 2, str(tmp_path)) == [("checkpoint_2", 3)] * 2

    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["checkpoint_1", "checkpoint_2"]


def no_ddp(rank: int, world_size: int, root: str) -> Any:
    """Ranks that nothing keeps equal: rank 0's values are the ones to store."""
    accelerator = new_accelerator("ddp")
    accelerator.register_checkpoint_io(DistCkptIO())
    model = torch.nn.Linear(300, 300)
    torch.nn.init.constant_(model.weight, float(rank))
    accelerator.prepare_model(model, evaluation_mode=True)
    accelerator.save_state(f"{root}/ckpt")
    accelerator.load_state(f"{root}/ckpt")
    return float(model.weight.min()), float(model.weight.max())


def test_models_without_ddp_are_rank_0s(tmp_path: Path) -> None:
    """A model for evaluation is not wrapped: what is stored is rank 0's."""
    assert run_ranks(no_ddp, 2, str(tmp_path)) == [(0.0, 0.0)] * 2


def save_natively(rank: int, world_size: int, root: str) -> dict[str, torch.Tensor]:
    """Train and save by Accelerate's own ``save_state``, sharded; return what was saved."""
    accelerator = new_accelerator("fsdp2")
    torch.manual_seed(0)
    net = new_net("fsdp2")
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    loss = net(torch.arange(8.0).view(2, 4))
    accelerator.backward(loss)
    optimizer.step()
    accelerator.save_state(root)
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in net.state_dict().items()
    }


def test_what_accelerate_itself_saved_sharded_loads_into_live_objects(tmp_path: Path) -> None:
    """``pytorch_model_fsdp_0`` and ``optimizer_0`` are DCP's: each loads by its own."""
    saved = run_ranks(save_natively, 2, str(tmp_path / "c"))[0]
    net = new_net("single")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1.0)

    load_model_and_optimizer(tmp_path / "c" / "pytorch_model_fsdp_0", net)
    view = CheckpointView.open(tmp_path / "c" / "optimizer_0")
    view.load_optimizer(0, optimizer, [net])

    assert net.state_dict().keys() == saved.keys()
    assert all(torch.equal(value, saved[name]) for name, value in net.state_dict().items())
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert {int(one["step"]) for one in optimizer.state.values()} == {1}
    assert all(one["exp_avg"].any() for one in optimizer.state.values())
