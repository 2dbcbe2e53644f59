"""Modules that tests of several folders share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["Versioned"]


class Versioned(nn.Module):
    """Of version 2, in which the scale is stored as it is; before, it was stored halved."""

    _version = 2

    def __init__(self, scale: torch.Tensor | None = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(3) if scale is None else scale)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[f"{prefix}scale"] = state_dict[f"{prefix}scale"] * 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
