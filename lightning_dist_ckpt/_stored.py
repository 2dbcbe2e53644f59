"""Parts of a checkpoint that have not been read yet, in the dict that user hooks may edit.

Here: ``StoredModel`` and ``StoredOptimizer``. Not here: when they are made and used
(``_overrides``), reading (``dist_ckpt.training_state``). On every rank alike.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dist_ckpt.training_state import STORED

if TYPE_CHECKING:
    from dist_ckpt.training_state import CheckpointView

__all__ = ["StoredModel", "StoredOptimizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredOptimizer:
    """Stands in ``checkpoint["optimizer_states"]`` for the state of optimizer ``index``."""

    view: CheckpointView
    index: int

    def __getitem__(self, key: object) -> Any:
        """Refuse, with a reason that helps the author of a hook."""
        raise TypeError(
            f"checkpoint['optimizer_states'][{self.index}][{key!r}]: the state goes straight into "
            "the optimizer and is not here. Change the optimizer in on_train_start instead; "
            "assign [] to checkpoint['optimizer_states'] to load none."
        )


class StoredModel(MutableMapping[str, Any]):
    """Stands for ``checkpoint["state_dict"]`` of a sharded model.

    Names are known, and may be deleted, at no cost. At the first access to a value all of them are
    read, whole and on the CPU; from then on this is an ordinary dict. Untouched, it costs nothing:
    each rank reads straight into its own shards.

    Args:
        view: The open checkpoint.
    """

    def __init__(self, view: CheckpointView) -> None:
        """Note the names; nothing is read."""
        self.view = view
        self._entries: dict[str, Any] = dict.fromkeys(view.model_names(0), STORED)
        self._is_edited = False

    @property
    def entries(self) -> dict[str, Any] | None:
        """All entries, ``STORED`` for those that were not read; None if none was read or edited."""
        return dict(self._entries) if self._is_edited else None

    def __getitem__(self, name: str) -> Any:
        """Return an entry, tensors whole; reads all of them the first time."""
        if self._entries[name] is STORED:
            full = self.view.full_model(0)
            self._entries |= {n: full[n] for n, one in self._entries.items() if one is STORED}
            self._is_edited = True  # tensors can be changed in place
        return self._entries[name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Put an entry, in place of a stored one or beside them."""
        self._entries[name] = value
        self._is_edited = True

    def __delitem__(self, name: str) -> None:
        """Leave an entry out."""
        del self._entries[name]
        self._is_edited = True

    def __contains__(self, name: object) -> bool:
        """Whether there is such a name; reads nothing."""
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        """Yield the names in the stored order."""
        yield from tuple(self._entries)

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self._entries)
