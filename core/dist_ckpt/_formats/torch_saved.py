"""Values as ``torch.save`` writes them, for libraries that read nothing else.

Here: one function. Not here: reading such files (``torch_dist.unpickle``).
"""

from __future__ import annotations

import io
from typing import Any

import torch

from dist_ckpt.dict_utils import dict_list_map_outplace

__all__ = ["torch_saved"]


def torch_saved(value: Any) -> bytes:
    """Return ``value`` as ``torch.save`` writes it, with tensors no larger than they are."""
    buffer = io.BytesIO()
    # A view would drag its whole storage along.
    own = dict_list_map_outplace(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, value
    )
    torch.save(own, buffer)
    return buffer.getvalue()
