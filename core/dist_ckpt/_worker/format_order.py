"""An order for formats that need tensors, not only bytes, to write their files.

Here: ``FormatOrder``. Not here: orders of plain bytes (``_worker.orders``), the format. Unpickling
one in the worker imports torch and what the format needs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dist_ckpt._saving.describe import Prepared
from dist_ckpt._saving.execute import finish, write_part
from dist_ckpt._sharding.split import SaveParts
from dist_ckpt._staging_pool.arena import Arena
from dist_ckpt._staging_pool.handover import pack, unpack

if TYPE_CHECKING:
    from dist_ckpt._formats.base import Written
    from dist_ckpt._saving.plan import PlannedSave
    from dist_ckpt._worker.orders import Staged

__all__ = ["FormatOrder"]


class FormatOrder:
    """Writes a planned save from staged tensors.

    Args:
        planned: The save; the data of its shards lies in ``arena``.
        arena: The staging memory; None if nothing is left to write.
        written: What the training process has written itself, if there was no memory to stage in.

    Raises:
        InvalidShardingError: Something in it cannot be pickled.
    """

    commits = True

    def __init__(
        self, planned: PlannedSave, arena: Arena | None, written: Written | None = None
    ) -> None:
        """Pickle the save; only descriptions and positions in ``arena`` are kept."""
        self.target = str(planned.target)
        self._attempt = planned.attempt
        self.written = written
        packed = pack(replace(planned, prepared=_reduced(planned.prepared)), arena)
        self._data, self._places = packed.data, packed.places
        self._planned: PlannedSave | None = None

    def write(self, staged: Staged) -> Written:
        """Write this rank's part. Every rank."""
        for _ in staged.runs():
            pass  # wait until all is staged
        memory = staged.memory()
        arena = Arena(len(memory), descriptor=os.dup(staged.descriptor()))
        planned = self._planned = unpack(self._data, self._places, [arena])
        arena.close()
        written = write_part(planned) if self.written is None else self.written
        staged.progress("writing", written.nbytes)
        return written

    def publish(self, reports: Sequence[Written]) -> None:
        """Commit. Rank 0."""
        if self._planned is None:  # `write` has not run in this process
            self._planned = unpack(self._data, (), ())
        finish(self._planned, reports)

    def abort(self) -> None:
        """Remove the attempt. Rank 0."""
        # Kept outside of the pickled save: that it could not be unpickled may be the failure.
        if self._attempt is not None:
            self._attempt.abort()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the unpacked save."""
        return {**self.__dict__, "_planned": None}


def _reduced(prepared: Prepared) -> Prepared:
    """Return only what the format writes: all else would be pickled for nothing."""
    request = replace(prepared.request, state_dict={}, live=None)
    parts = SaveParts(common={}, tensors=(), objects=())
    shards = prepared.shards.with_data(prepared.shards.data)
    return replace(prepared, request=request, parts=parts, shards=shards)
