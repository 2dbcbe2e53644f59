"""What both frameworks train: a small decoder-only transformer on text that ships with Python."""

from __future__ import annotations

import json
import math
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional

CONTEXT, WIDTH, LAYERS, HEADS, VOCABULARY = 48, 256, 4, 4, 256
GLOBAL_BATCH = 6  # sequences a step, shared by all ranks: 1, 2 or 3 of them
WARMUP, STEPS = 8, 48


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class LanguageModel(nn.Module):
    """3.3 million parameters, no dropout; the head shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of predicting each token of a batch from those before it."""
    logits = model(batch[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def make_optimizer(
    model: nn.Module,
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """Return AdamW with two groups, and a schedule with warm-up and cosine decay."""
    decay = [p for n, p in model.named_parameters() if "norm" not in n and not n.endswith("bias")]
    plain = [p for n, p in model.named_parameters() if "norm" in n or n.endswith("bias")]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))

    def rate(step: int) -> float:
        if step < WARMUP:
            return (step + 1) / WARMUP
        return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


class Text:
    """The batches: a function of the step alone, cut evenly over however many ranks there are."""

    def __init__(self) -> None:
        data = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
        self.tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()

    def batch(self, step: int, rank: int, world_size: int) -> torch.Tensor:
        """Return this rank's sequences of a step, each one token longer than the context."""
        generator = torch.Generator().manual_seed(step)
        high = len(self.tokens) - CONTEXT - 1
        starts = torch.randint(0, high, (GLOBAL_BATCH,), generator=generator).tolist()
        share = GLOBAL_BATCH // world_size
        mine = starts[rank * share : (rank + 1) * share]
        return torch.stack([self.tokens[at : at + CONTEXT + 1] for at in mine])


class LossLog:
    """Appends the mean loss of each step to a file, from rank 0."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def add(self, step: int, loss: torch.Tensor, world_size: int) -> None:
        total = loss.detach().double().clone()
        if world_size > 1:
            torch.distributed.all_reduce(total)
        if world_size == 1 or torch.distributed.get_rank() == 0:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": step, "loss": total.item() / world_size}) + "\n")
