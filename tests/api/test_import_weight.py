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
"""What each module leaves alone. Those that do not leave torch alone are tried where it is."""


PROGRAM = """if True:
    import importlib, json, os, sys
    first, *modules = sys.argv[1:]
    importlib.import_module(first)
    for name in modules:
        if os.fork() == 0:
            importlib.import_module(name)
            print(json.dumps([name, sorted(sys.modules)]), flush=True)
            os._exit(0)
        assert os.wait()[1] == 0, name
"""


@functools.cache
def loaded_after(first: str) -> dict[str, set[str]]:
    """Import each module where ``first`` alone is imported; return what is loaded then.

    One fresh interpreter has ``first``, and is forked for each module.
    """
    modules = [name for name in WEIGHTS if ("torch" in WEIGHTS[name]) == (first != "torch")]
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, first, *modules],
        check=True, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return {name: set(loaded) for name, loaded in map(json.loads, process.stdout.splitlines())}


@pytest.mark.parametrize("module", WEIGHTS)
def test_modules_not_loaded(module: str) -> None:
    """Importing this leaves those alone."""
    first = "sys" if "torch" in WEIGHTS[module] else "torch"

    loaded = loaded_after(first)[module]

    assert module in loaded
    assert loaded & WEIGHTS[module] == set()
