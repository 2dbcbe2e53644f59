"""The random number generators of this process: python, numpy, torch and CUDA.

Here: taking and setting their states, and seeding anew where there is none to set. Not here:
generators of dataloaders (``dataloaders``). Runs on every rank for itself.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

__all__ = [
    "fresh_seed",
    "host_state",
    "random_state",
    "reseed",
    "set_host_state",
    "set_random_state",
]


def host_state() -> dict[str, Any]:
    """Return the states of the generators that live on the host."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 - the global generator is what users draw from
        "torch": torch.get_rng_state(),
    }


def set_host_state(state: dict[str, Any]) -> None:
    """Set what ``host_state`` returned, or a part of it."""
    if "python" in state:
        random.setstate(state["python"])
    if "numpy" in state:
        np.random.set_state(state["numpy"])  # noqa: NPY002 - same
    if "torch" in state:
        torch.set_rng_state(state["torch"])


def random_state(device: torch.device, *, all_devices: bool) -> dict[str, Any]:
    """Return the states of all generators of this rank.

    Args:
        device: The device this rank computes on.
        all_devices: Whether the process has all CUDA devices for itself.
    """
    state = host_state()
    if device.type == "cuda":
        states = (
            torch.cuda.get_rng_state_all() if all_devices else [torch.cuda.get_rng_state(device)]
        )
        state["cuda"] = states
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Set what ``random_state`` returned, as far as this process has such devices."""
    set_host_state(state)
    if device.type != "cuda":
        return
    states = state.get("cuda", [])
    if len(states) == 1:
        torch.cuda.set_rng_state(states[0], device)
        return
    for index in range(min(len(states), torch.cuda.device_count())):
        torch.cuda.set_rng_state(states[index], index)


def fresh_seed() -> int:
    """Return a seed that follows from the present states; none of them moves."""
    state = host_state()
    digest = hashlib.sha256(state["torch"].numpy().tobytes())
    digest.update(repr(state["python"]).encode())
    return int.from_bytes(digest.digest()[:7], "big")


def reseed(seed: int, rank: int) -> None:
    """Seed all generators from a stored seed, differently on each rank."""
    digest = hashlib.sha256(f"{seed}:{rank}".encode()).digest()
    own = int.from_bytes(digest[:7], "big")
    random.seed(own)
    np.random.seed(own % 2**32)  # noqa: NPY002 - same
    torch.manual_seed(own)
