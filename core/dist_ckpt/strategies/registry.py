"""Which class handles which backend.

Here: the table of built-in strategies, and the entry points of installed packages. Not here: what a
process registered (``strategies.base``). Nothing is imported before it is asked for.

A package adds a backend by entry points in the group ``dist_ckpt.strategies``, named
``{action}.{backend}.{version}``, for example ``save_sharded.npz.1``. Each is a class, or a function
that returns a strategy: for the save actions it is called with backend and version, for the load
actions without arguments.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from dist_ckpt.errors import UnknownStrategyError

__all__ = ["ENTRY_POINTS", "find_strategy"]

ENTRY_POINTS = "dist_ckpt.strategies"
_HERE = "dist_ckpt.strategies"
_BUILT_IN = {
    ("save_sharded", "torch_dist", 1): f"{_HERE}.torch:TorchDistSaveShardedStrategy",
    ("load_sharded", "torch_dist", 1): f"{_HERE}.torch:TorchDistLoadShardedStrategy",
    ("save_sharded", "zarr", 1): f"{_HERE}.zarr:ZarrSaveShardedStrategy",
    ("load_sharded", "zarr", 1): f"{_HERE}.zarr:ZarrLoadShardedStrategy",
    ("save_sharded", "zarr", 2): f"{_HERE}.zarr:ZarrSaveShardedStrategy",
    ("load_sharded", "zarr", 2): f"{_HERE}.zarr:ZarrLoadShardedStrategy",
    ("save_common", "torch", 1): f"{_HERE}.common:TorchCommonSaveStrategy",
    ("load_common", "torch", 1): f"{_HERE}.common:TorchCommonLoadStrategy",
    ("save_common", "json", 1): f"{_HERE}.common:JsonCommonSaveStrategy",
    ("load_common", "json", 1): f"{_HERE}.common:JsonCommonLoadStrategy",
}


def find_strategy(action: str, backend: str, version: int) -> Any:
    """Return a new strategy, or None if nobody has one.

    Raises:
        UnknownStrategyError: It is there, but its module cannot be imported, or several packages
            have it.
    """
    point = _entry_point(action, backend, version)
    if point is None:
        return None
    try:
        factory = point.load()
    except Exception as error:  # the import of another package may raise anything
        raise _not_imported(action, backend, version, point, error) from error
    try:
        return factory(backend, version) if action.startswith("save") else factory()
    except ImportError as error:  # of what is imported only when it is needed
        raise _not_imported(action, backend, version, point, error) from error


def _not_imported(
    action: str, backend: str, version: int, point: EntryPoint, error: Exception
) -> UnknownStrategyError:
    return UnknownStrategyError(
        f"Cannot import a default strategy for: {action}, {backend}, {version}. "
        f"Error: {point.value}: {type(error).__name__}: {error}.",
        hint="install what the message names; zarr needs `tensorstore`.",
    )


def _entry_point(action: str, backend: str, version: int) -> EntryPoint | None:
    name = f"{action}.{backend}.{version}"
    home = _BUILT_IN.get((action, backend, version))
    if home is not None:
        return EntryPoint(name, home, ENTRY_POINTS)
    found = entry_points(group=ENTRY_POINTS, name=name)
    if len(found) > 1:
        homes = ", ".join(sorted(point.value for point in found))
        raise UnknownStrategyError(
            f"Several packages have a strategy for: {action}, {backend}, {version}: {homes}.",
            hint="uninstall one, or call register_default_strategy.",
        )
    return next(iter(found), None)
