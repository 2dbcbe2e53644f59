"""Accelerate: register once, then ``save_state`` and ``load_state`` as ever."""

from __future__ import annotations

import tempfile

import torch
from accelerate import Accelerator

from accelerate_dist_ckpt import DistCkptIO


def train(accelerator: Accelerator, model, optimizer, loader) -> None:
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    accelerator = Accelerator(cpu=True)
    accelerator.register_checkpoint_io(DistCkptIO())

    torch.manual_seed(0)
    features = torch.randn(64, 8)
    data = torch.utils.data.TensorDataset(features, features.sum(dim=1, keepdim=True))
    net = torch.nn.Linear(8, 1)
    model, optimizer, loader = accelerator.prepare(
        net,
        torch.optim.AdamW(net.parameters(), lr=0.05),
        torch.utils.data.DataLoader(data, batch_size=16),
    )

    with tempfile.TemporaryDirectory() as directory:
        train(accelerator, model, optimizer, loader)
        accelerator.save_state(f"{directory}/step_4")
        saved = net.weight.detach().clone()
        print("saved after 4 steps")

        train(accelerator, model, optimizer, loader)
        assert not torch.equal(net.weight, saved)
        accelerator.load_state(f"{directory}/step_4")
        assert torch.equal(net.weight, saved)
        print("went on for 4 steps, then back to what was saved")
