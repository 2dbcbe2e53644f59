"""What a checkpoint keeps of a model beside tensors: names in order, versions, ties, values.

Here: the document's form, and reading the documents of several ranks as one. Not here: the content
of a model's state (``derive.protocol``), storing the document (``training_state``). Pure functions.

Form: ``{"names": [...], "versions": [[version, [module prefixes]], ...], "metadata": {prefix:
{...}}, "tied": {other name: name of the stored tensor}, "values": {name: value}, "whole": bool}``.
``metadata`` has only modules whose metadata is more than a version.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dist_ckpt.derive.protocol import EXTRA_STATE, ModelState
from dist_ckpt.derive.values import StoredState
from dist_ckpt.errors import CorruptedCheckpointError
from dist_ckpt.types import StateDict

__all__ = ["ModelDocument", "model_document", "read_documents", "read_early_sections"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDocument:
    """A model's document, read.

    Attributes:
        names: In the order of the state dict; empty if the checkpoint does not have them.
        metadata: Module prefix to the module's metadata; None if the checkpoint does not have it.
        tied: Other name to the name whose tensor is stored.
        values: Entries that are not stored as tensors.
        is_of_parts: Whether other ranks have stored entries that rank 0 does not have.
        is_whole: Whether ``names`` is complete: another rank's tensors under further names are not
            part of the state dict.
    """

    names: tuple[str, ...] = ()
    metadata: Mapping[str, Mapping[str, Any]] | None = None
    tied: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    is_of_parts: bool = False
    is_whole: bool = False

    def renamed(self, name: Callable[[str], str]) -> ModelDocument:
        """Return it with all names and module prefixes changed by ``name``."""
        return ModelDocument(
            names=tuple(map(name, self.names)),
            metadata=None
            if self.metadata is None
            else {
                name(f"{prefix}." if prefix else "").removesuffix("."): of_module
                for prefix, of_module in self.metadata.items()
            },
            tied={name(k): name(v) for k, v in self.tied.items()},
            values={name(k): v for k, v in self.values.items()},
            is_of_parts=self.is_of_parts,
            is_whole=self.is_whole,
        )

    def as_state_dict(self, entries: Mapping[str, Any]) -> OrderedDict[str, Any]:
        """Return ``entries`` in the stored order, with ``_metadata`` if there is any."""
        known = dict.fromkeys(name for name in self.names if name in entries)
        ordered = OrderedDict((name, entries[name]) for name in (known | dict.fromkeys(entries)))
        if self.metadata is not None:
            vars(ordered)["_metadata"] = OrderedDict(
                (prefix, dict(of_module)) for prefix, of_module in self.metadata.items()
            )
        return ordered


def model_document(state: ModelState, stored: StoredState, *, is_whole: bool) -> StateDict:
    """Return what is to be stored beside the tensors of a model; see ``ModelDocument``."""
    by_version: dict[int, list[str]] = {}
    metadata: dict[str, Any] = {}
    for prefix, of_module in state.metadata.items():
        if of_module.keys() == {"version"} and type(of_module["version"]) is int:
            by_version.setdefault(of_module["version"], []).append(prefix)
        else:
            metadata[prefix] = dict(of_module)
    return {
        "names": list(state.names),
        "versions": [[version, prefixes] for version, prefixes in by_version.items()],
        "metadata": metadata,
        "tied": dict(stored.tied),
        "values": dict(stored.values),
        "whole": is_whole,
    }


def read_documents(documents: Sequence[Any], *, where: str) -> ModelDocument:
    """Merge all documents of one model; where two differ, the first one counts.

    Args:
        documents: In the order of the ranks that wrote them.
        where: Path of the checkpoint, for errors.

    Raises:
        CorruptedCheckpointError: A document has another form.
    """
    names: dict[str, None] = {}
    metadata: dict[str, Mapping[str, Any]] = {}
    tied: dict[str, str] = {}
    values: dict[str, Any] = {}
    for document in documents:
        try:
            names |= dict.fromkeys(document["names"])
            of_modules = {
                prefix: {"version": version}
                for version, prefixes in document["versions"]
                for prefix in prefixes
            }
            of_modules |= document["metadata"]
            metadata = {**of_modules, **metadata}
            tied = {**document["tied"], **tied}
            values = {**document["values"], **values}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptedCheckpointError(
                f"{where}: the document of a model's state is malformed ({error!r}).",
                hint="use another checkpoint.",
            ) from error
    texts = (*names, *metadata, *tied, *tied.values(), *values)
    if not all(type(text) is str for text in texts) or not all(
        isinstance(of_module, dict) for of_module in metadata.values()
    ):
        raise CorruptedCheckpointError(
            f"{where}: the document of a model's state has names that are not strings, or metadata "
            "that is not a dict.",
            hint="use another checkpoint.",
        )
    return ModelDocument(
        names=tuple(names),
        metadata=metadata if documents else None,
        tied=tied,
        values=values,
        is_of_parts=bool(documents) and len(names) > len(set(documents[0]["names"])),
        is_whole=len(documents) == 1 and documents[0].get("whole") is True,
    )


def read_early_sections(tied: Mapping[str, str], extra_state: Mapping[str, Any]) -> ModelDocument:
    """Return the document of a checkpoint that has only ties and extra state (earlier versions)."""
    values = {
        f"{module}.{EXTRA_STATE}".removeprefix("."): value for module, value in extra_state.items()
    }
    return ModelDocument(tied=tied, values=values)
