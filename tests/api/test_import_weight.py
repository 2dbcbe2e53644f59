"""Who imports the library pays only for what is used."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import pytest

WEIGHTS = {
    "dist_ckpt": {"torch", "numpy", "pydantic", "yaml", "tensorstore", "lightning", "accelerate"},
    "dist_ckpt.errors": {"torch", "numpy", "pydantic", "yaml", "tensorstore"},
    "dist_ckpt.mapping": {"pydantic", "yaml", "tensorstore", "torch.distributed.checkpoint"},
    "dist_ckpt.serialization": {
        "pydantic",
        "yaml",
        "tensorstore",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
    },
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
    "dist_ckpt._saving.publish": {"torch", "numpy"},
    # The worker process: a fresh interpreter that must be there quickly, and stay small.
    "dist_ckpt._worker.main": {"torch", "numpy", "multiprocessing", "asyncio", "pydantic"},
    "dist_ckpt._worker.worker": {"torch", "numpy", "multiprocessing"},
    "dist_ckpt.config": {"torch", "tensorstore"},
}
"""What each module leaves alone. Lighter ones first, among those with torch and those without."""


@functools.cache
def loaded_after(*modules: str) -> dict[str, set[str]]:
    """Import modules in this order in one fresh interpreter; return what is loaded after each."""
    code = f"""if True:
        import importlib, json, sys
        loaded = {{}}
        for name in {modules!r}:
            importlib.import_module(name)
            loaded[name] = sorted(sys.modules)
        print(json.dumps(loaded))
    """
    process = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=300
    )
    return {name: set(loaded) for name, loaded in json.loads(process.stdout).items()}


@pytest.mark.parametrize("module", WEIGHTS)
def test_modules_not_loaded(module: str) -> None:
    """Importing this leaves those alone: together with lighter modules, or by itself."""
    needs_torch = "torch" not in WEIGHTS[module]
    together = [name for name in WEIGHTS if ("torch" not in WEIGHTS[name]) == needs_torch]

    loaded = loaded_after(*together)[module]
    if loaded & WEIGHTS[module]:  # of a module before this one
        loaded = loaded_after(module)[module]

    assert module in loaded
    assert loaded & WEIGHTS[module] == set()
