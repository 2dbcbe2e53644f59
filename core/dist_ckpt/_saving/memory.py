"""What is kept from one save for the next.

Here: ``SaveMemory``. Not here: planning (``_saving.plan``), describing (``_saving.describe_live``).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from dist_ckpt._formats.manifest import PACKED_INDEX_FILE
from dist_ckpt._saving.plan import Planner
from dist_ckpt._saving.publish import with_dcp_metadata

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dist_ckpt._saving.describe_live import LiveDescriptions

__all__ = ["SaveMemory"]


class SaveMemory:
    """What is kept from one save for the next: descriptions of models and optimizers, and the plan.

    Pass the same object to all saves of a job, on every rank. Each save compares tensor by tensor
    whether the plan still fits, and all ranks agree on it. A copy is empty.
    """

    def __init__(self) -> None:
        """Remember nothing yet."""
        self.planner = Planner()
        self._encoded: tuple[bytes, dict[str, bytes]] = (b"", {})
        self._count = 0

    @functools.cached_property
    def descriptions(self) -> LiveDescriptions:
        """Descriptions of live models; made when needed, as the import of FSDP takes a second."""
        from dist_ckpt._saving.describe_live import LiveDescriptions  # noqa: PLC0415

        return LiveDescriptions()

    def count(self) -> int:
        """Return the number of the save that begins, 1 for the first."""
        self._count += 1
        return self._count

    def with_dcp_metadata(self, documents: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the documents with DCP's ``.metadata``, which is made once for each index."""
        index = documents.get(PACKED_INDEX_FILE)
        known, encoded = self._encoded
        if index is None or known is not index:
            encoded = with_dcp_metadata(documents)
            self._encoded = index or b"", encoded
        return {**encoded, **documents}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as an empty one: the live objects of another process are others."""
        return SaveMemory, ()
