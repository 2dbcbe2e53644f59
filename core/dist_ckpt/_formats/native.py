"""Our own formats by backend and version.

Here: which class writes a format. Not here: the formats. Third parties' formats are strategies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dist_ckpt._formats.torch_dist.format import TorchDistFormat
from dist_ckpt.errors import UnknownStrategyError

if TYPE_CHECKING:
    from dist_ckpt._formats.base import SaveFormat

__all__ = ["NATIVE", "new_format"]

NATIVE = (("torch_dist", 1), ("zarr", 1), ("zarr", 2))


def new_format(backend: str, version: int, *, separation_hint: str | None = None) -> SaveFormat:
    """Return a format of ours to save with.

    Raises:
        UnknownStrategyError: There is none, or a package that it needs is not installed.
    """
    if (backend, version) == ("torch_dist", 1):
        return TorchDistFormat(separation_hint)
    if (backend, version) == ("zarr", 2):
        from dist_ckpt._formats.zarr.format import ZarrFormat  # noqa: PLC0415 - heavy

        return ZarrFormat(2)
    if (backend, version) == ("zarr", 1):
        from dist_ckpt._formats.zarr.megatron import MegatronZarrFormat  # noqa: PLC0415 - heavy

        return MegatronZarrFormat()
    raise UnknownStrategyError(
        f"Cannot find a format for: {backend}, {version}.",
        hint=f"this release writes {', '.join(map(str, NATIVE))}.",
    )
