"""From 4 ranks to 2: FSDP2 saves on four processes, two others go on with it."""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dist_ckpt import load_model_and_optimizer, save_model_and_optimizer


def build(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model that is sharded over all ranks; 10 rows do not divide by 4: that is fine."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.GELU(), torch.nn.Linear(10, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Train one step, on the same batch on every rank, and return the loss before it."""
    loss = (model(torch.linspace(-1, 1, 24).reshape(4, 6)) - 1.0).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def first_job(path: str) -> None:
    """Train two steps, save, and train a third one to see its loss."""
    model, optimizer = build(seed=0)
    losses = [step(model, optimizer), step(model, optimizer)]
    save_model_and_optimizer(path, model, optimizer, common={"losses": losses})
    third = step(model, optimizer)
    if dist.get_rank() == 0:
        print(f"4 ranks: losses {losses[0]:.6f}, {losses[1]:.6f}, saved; then {third:.6f}")


def second_job(path: str) -> None:
    """Start with other weights, load on this layout, and train the third step."""
    model, optimizer = build(seed=1)
    common = load_model_and_optimizer(path, model, optimizer)
    third = step(model, optimizer)
    if dist.get_rank() == 0:
        first, second = common["losses"]
        print(f"2 ranks: losses {first:.6f}, {second:.6f}, loaded; then {third:.6f}")


def run_rank(rank: int, job: str, world_size: int, port: int, path: str) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    {"first": first_job, "second": second_job}[job](path)
    dist.destroy_process_group()


def launch(job: str, world_size: int, path: str) -> None:
    """Run ``job`` on so many processes of this machine, as torchrun would."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(run_rank, (job, world_size, store.port, path), nprocs=world_size)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        launch("first", 4, f"{directory}/step_2")
        launch("second", 2, f"{directory}/step_2")
