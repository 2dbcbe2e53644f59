"""The core in ten lines: save a model and its optimizer, or tensors described by hand."""

from __future__ import annotations

import contextlib
import tempfile

import torch

from dist_ckpt import (
    ShardedTensor,
    load,
    load_model_and_optimizer,
    save,
    save_model_and_optimizer,
)


def model_and_optimizer() -> None:
    """However the model is wrapped (DDP, FSDP, tensor parallelism), these two calls stay."""
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    save_model_and_optimizer("ckpt/step_1", model, optimizer, common={"step": 1})

    other = torch.nn.Linear(8, 4)
    other_optimizer = torch.optim.AdamW(other.parameters())
    common = load_model_and_optimizer("ckpt/step_1", other, other_optimizer)
    assert torch.equal(model.weight, other.weight)
    print(f"a model and its optimizer are back, at step {common['step']}")


def tensors() -> None:
    """Below that: a nested dict; tensors that are cut over ranks stand in it as ShardedTensor."""
    weight = torch.arange(12.0).reshape(3, 4)
    save({"w": ShardedTensor.from_rank_offsets("w", weight), "note": "any value"}, "ckpt/tensors")

    target = torch.empty(3, 4)
    loaded = load({"w": ShardedTensor.from_rank_offsets("w", target)}, "ckpt/tensors")
    assert loaded["w"] is target
    assert torch.equal(target, weight)
    print(f"a tensor was filled in place, beside the note {loaded['note']!r}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        model_and_optimizer()
        tensors()
