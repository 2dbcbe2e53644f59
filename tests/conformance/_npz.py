"""A backend of somebody else: one ``.npz`` file a rank, and a JSON that tells what is in it.

Here: its strategies; they use public names only and exchange nothing with other ranks. Not here:
tests. Sharded objects are left to the common strategy.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dist_ckpt.dict_utils import dict_list_map_outplace, nested_values
from dist_ckpt.errors import CorruptedCheckpointError, UnknownStrategyError
from dist_ckpt.mapping import ShardedTensor, is_main_replica
from dist_ckpt.strategies.async_utils import AsyncRequest
from dist_ckpt.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
    SaveShardedStrategy,
)

PARSING = (
    threading.Lock()
)  # numpy reads headers with `ast`, which threads of Python 3.11 cannot share
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def collected(state: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return this rank's arrays, copied, and one entry for each of them."""
    arrays: dict[str, Any] = {}
    entries = []
    for tensor in nested_values(state):
        if not is_main_replica(tensor.replica_id):
            continue
        entry = {"key": tensor.key, "dtype": str(tensor.dtype)[6:], "shape": tensor.global_shape}
        entries.append(entry | {"array": None})
        for box, view in tensor.pieces():
            name = f"a{len(arrays)}"
            arrays[name] = view.detach().clone().view(BITS[view.element_size()]).numpy()
            entries.append(entry | {"array": name, "offset": box.offset})
    return arrays, entries


def write(arrays: dict[str, Any], entries: list[dict[str, Any]], directory: Path) -> None:
    name = uuid.uuid4().hex
    np.savez(directory / f"{name}.npz", **arrays)
    (directory / f"{name}.index.json").write_text(json.dumps(entries))


class NpzSaveStrategy(SaveShardedStrategy):
    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        write(*collected(sharded_state_dict), Path(checkpoint_dir))


class NpzAsyncSaveStrategy(AsyncSaveShardedStrategy):
    def async_save(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path
    ) -> AsyncRequest:
        arrays, entries = collected(sharded_state_dict)
        return AsyncRequest(write, (arrays, entries, Path(checkpoint_dir)), [])


class NpzLoadStrategy(LoadShardedStrategy):
    def check_backend_compatibility(self, loaded_backend: str) -> None:
        if loaded_backend != "npz":
            raise UnknownStrategyError(f"not npz: {loaded_backend}")

    def check_version_compatibility(self, loaded_version: int) -> None:
        if loaded_version != 1:
            raise UnknownStrategyError(f"not version 1 of npz: {loaded_version}")

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> Any:
        stored = list(entries_of(Path(checkpoint_dir)))

        def fill(wanted: ShardedTensor) -> torch.Tensor:
            # As it is stored: `load` converts it if that was allowed.
            dtype = next(entry["dtype"] for entry, _ in stored if entry["key"] == wanted.key)
            data = torch.empty(wanted.data_shape, dtype=getattr(torch, dtype))
            for box, view in replace(wanted, data=data, dtype=data.dtype).pieces():
                for entry, array in stored:
                    if entry["key"] == wanted.key and array is not None:
                        copy_common(array, entry, view, box.offset, BITS[data.element_size()])
            return data

        return dict_list_map_outplace(fill, sharded_state_dict)

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> dict[str, ShardedTensor]:
        found = {}
        for entry, _ in entries_of(Path(checkpoint_dir), data=False):
            shape = tuple(entry["shape"])
            zeros, ones = (0,) * len(shape), (1,) * len(shape)
            dtype = getattr(torch, entry["dtype"])
            found[entry["key"]] = ShardedTensor(
                entry["key"], None, dtype, shape, shape, zeros, ones
            )
        return found

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        raise NotImplementedError


def entries_of(directory: Path, *, data: bool = True) -> Iterator[tuple[dict[str, Any], Any]]:
    for path in sorted(directory.glob("*.index.json")):
        try:
            arrays = np.load(path.with_name(path.name.replace("index.json", "npz")))
        except (OSError, ValueError) as error:
            raise CorruptedCheckpointError(f"{path}: {error}") from error
        for entry in json.loads(path.read_text()):
            wanted = data and entry["array"] is not None
            with PARSING:
                array = torch.from_numpy(arrays[entry["array"]]) if wanted else None
            yield entry, array
        arrays.close()


def copy_common(
    array: torch.Tensor, entry: dict[str, Any], view: torch.Tensor, offset: Any, bits: torch.dtype
) -> None:
    pairs = list(zip(offset, view.shape, entry["offset"], array.shape, strict=True))
    starts = [max(a, b) for a, _, b, _ in pairs]
    stops = [min(a + n, b + m) for a, n, b, m in pairs]
    if all(start < stop for start, stop in zip(starts, stops, strict=True)):
        spans = list(zip(starts, stops, offset, entry["offset"], strict=True))
        here = tuple(slice(start - o, stop - o) for start, stop, o, _ in spans)
        there = tuple(slice(start - o, stop - o) for start, stop, _, o in spans)
        view.view(bits)[here] = array[there]
