"""Who imports the library pays only for what is used."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

WEIGHTS = {
    "dist_ckpt": {"torch", "numpy", "pydantic", "yaml", "tensorstore", "lightning", "accelerate"},
    "dist_ckpt.errors": {"torch", "numpy", "pydantic", "yaml", "tensorstore"},
    "dist_ckpt.mapping": {"pydantic", "yaml", "tensorstore", "torch.distributed.checkpoint"},
    "dist_ckpt.serialization": {"pydantic", "yaml", "tensorstore", "torch.distributed.checkpoint"},
    "dist_ckpt.config": {"torch", "tensorstore"},
    "dist_ckpt.strategies.base": {
        "pydantic",
        "yaml",
        "tensorstore",
        "torch.distributed.checkpoint",
    },
    "dist_ckpt.strategies.zarr": {"pydantic", "yaml", "tensorstore", "zarr"},
    "dist_ckpt.strategies.state_dict_saver": {"pydantic", "yaml", "tensorstore"},
    "dist_ckpt.tensor_aware_state_dict": {
        "pydantic",
        "yaml",
        "tensorstore",
        "nvidia_resiliency_ext",
    },
    "dist_ckpt.checkpointer": {"pydantic", "yaml", "tensorstore"},
    "dist_ckpt._comm.failures": {"torch", "numpy"},
    "dist_ckpt._publishing": {"torch", "numpy"},
    # The worker process: a fresh interpreter that must be there quickly, and stay small.
    "dist_ckpt._background.process": {"torch", "numpy", "multiprocessing", "asyncio", "pydantic"},
    "dist_ckpt._background.worker": {"torch", "numpy", "multiprocessing"},
}


@pytest.mark.parametrize("module", WEIGHTS)
def test_modules_not_loaded(module: str) -> None:
    """In a fresh interpreter, importing this leaves those alone."""
    code = f"import json, sys; import {module}; print(json.dumps(sorted(sys.modules)))"
    process = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=300
    )

    loaded = set(json.loads(process.stdout))

    assert module in loaded
    assert loaded & WEIGHTS[module] == set()
