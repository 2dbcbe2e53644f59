"""The semantics of ``model.load_state_dict()``: hooks, versions, missing and unexpected names.

Here: ``plan_load``, the request for a checkpoint, and passing the result to the modules. Not here:
reading (``dist_ckpt._loading.execute``), what a save stores (``derive.protocol``). On every rank,
locally: no communication, except by modules' own hooks.

Three kinds of modules:

* *plain*: parameters and buffers are filled in place; names are compared here;
* *light*: as plain, and ``set_extra_state`` or post-hooks are called in PyTorch's order;
* *own*: with load pre-hooks, a ``_load_from_state_dict`` of its own, or tensors that are not dense
  (quantised, sparse, of a wrapper class). It may rename, resize or convert any entry below its
  prefix, so these entries are read into new tensors, in the stored dtype, and the module and all
  modules below it load them by PyTorch's own code.

The order of the walk and of the calls is that of ``torch.nn.Module.load_state_dict`` (torch 2.13).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys  # what post-hooks are given

from dist_ckpt.derive.ddp import replicated_layout
from dist_ckpt.derive.dtensor import dtensor_layout, local_of, wrap_like
from dist_ckpt.derive.fsdp import is_flat_parameter
from dist_ckpt.derive.layout import LocalTensor, ModelLayout
from dist_ckpt.derive.model import (
    Place,
    bare_module,
    is_hidden,
    model_layout,
    places,
    without_wrappers,
)
from dist_ckpt.derive.protocol import (
    EXTRA_STATE,
    deepest_prefix,
    has_odd_tensors,
    is_of_wrapper,
    own_entries,
    own_versions,
    owned_by,
)
from dist_ckpt.derive.values import copy_box, fill_shared, is_plain_tensor
from dist_ckpt.errors import InvalidShardingError, MismatchError
from dist_ckpt.mapping import ShardedTensor
from dist_ckpt.types import ShardedStateDict

__all__ = [
    "STORED",
    "LoadReport",
    "ModelLoad",
    "load_whole_model",
    "merge_reports",
    "plan_load",
]


class _Stored:
    """Placeholder of an entry that is still in the checkpoint; compared by identity."""

    def __repr__(self) -> str:
        return "STORED"


STORED: Final = _Stored()

_CHECKPOINTED = "_checkpoint_wrapped_module"

Metadata = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """Missing and unexpected names, as the modules of a rank reported them.

    Attributes:
        missing: Names that only the model has.
        unexpected: Names that only the checkpoint has.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    def describe(self, model: nn.Module) -> str:
        """Return the error text of ``load_state_dict`` for these names."""
        kinds = (("Unexpected", self.unexpected), ("Missing", self.missing))
        lines = [
            f"{kind} key(s) in state_dict: " + ", ".join(f'"{name}"' for name in names) + ". "
            for kind, names in kinds
            if names
        ]
        return _error_text(model, lines)


def merge_reports(reports: Sequence[LoadReport]) -> LoadReport:
    """Return the names that are missing on any rank, and those that are unexpected on all ranks.

    Ranks may hold different parts of a model: a name that one of them has loaded is not unexpected.
    """
    missing = dict.fromkeys(name for report in reports for name in report.missing)
    everywhere = set(reports[0].unexpected).intersection(*(r.unexpected for r in reports))
    return LoadReport(
        missing=tuple(missing),
        unexpected=tuple(name for name in reports[0].unexpected if name in everywhere),
    )


def plan_load(
    model: nn.Module, layout: ModelLayout, given: Mapping[str, Any], metadata: Metadata | None
) -> ModelLoad:
    """Decide for each entry of a state dict how it is loaded into ``model``.

    Args:
        model: The live model, wrapped or not.
        layout: Its layout.
        given: Entries by canonical name; ``STORED`` for those to be read.
        metadata: The modules' metadata when they were saved. If it is None, entries are taken to
            have the modules' present versions, as in ``torch.distributed.checkpoint``.
    """
    return ModelLoad(
        model=model,
        layout=layout,
        given=given,
        metadata=own_versions(model) if metadata is None else metadata,
        places=tuple(places(model)),
    )


def load_whole_model(model: nn.Module, state_dict: Mapping[str, Any], *, strict: bool) -> None:
    """Load a whole state dict into a model that may be sharded, as ``load_state_dict`` does.

    Each rank copies its part of every tensor. Not collective, unless a module's own hooks are.

    Args:
        model: The live model, wrapped or not.
        state_dict: Names to whole tensors and other entries; ``_metadata`` counts, as in torch.
        strict: Whether names that only one side has are an error; else they are skipped.

    Raises:
        MismatchError: Names or shapes do not agree, or a module could not load its entries.
    """
    metadata = getattr(state_dict, "_metadata", {})
    plan = plan_load(
        model,
        model_layout(model),
        {without_wrappers(name): value for name, value in state_dict.items()},
        {without_wrappers(prefix): of_module for prefix, of_module in metadata.items()},
    )
    report = plan.fill({}, strict=strict)
    if strict and (report.missing or report.unexpected):
        raise MismatchError(report.describe(bare_module(model)))


class ModelLoad:
    """One load of one model on one rank: the request, then filling."""

    def __init__(
        self,
        *,
        model: nn.Module,
        layout: ModelLayout,
        given: Mapping[str, Any],
        metadata: Metadata,
        places: Sequence[Place],
    ) -> None:
        """Determine which modules load their entries themselves."""
        self._model, self._layout, self._given = model, layout, given
        self._metadata = metadata
        self._root = bare_module(model)
        self._is_whole = _overrides_load_state_dict(self._root)
        own = [place.prefix for place in places if _is_own(place.module)]
        self._scopes = [""] if self._is_whole else _topmost(own)
        # Extra state that was saved as a tensor is read, too, if its module sets extra state.
        self._extras = {
            name
            for place in places
            if _sets_extra(place.module)
            and given.get(name := f"{place.prefix}{EXTRA_STATE}") is STORED
        }
        beside = self._scopes or self._extras
        self._made = _distributed_entries(model, layout) if beside else {}
        self._others: dict[str, list[str]] = {}
        for other, first in layout.tied.items():
            self._others.setdefault(first, []).append(other)
        self._has_light = any(_is_light(place.module) for place in places)
        self._prefixes = {place.prefix for place in places}
        if self._is_whole and any(place.in_fsdp for place in places):
            raise InvalidShardingError(
                f"{type(self._root).__name__} overrides load_state_dict(), and FSDP1 shards its "
                "parameters into ranges that this method cannot be given.",
                hint="use FSDP2 (fully_shard).",
            )

    def request(self, stored: Callable[[str], ShardedTensor | None]) -> ShardedStateDict:
        """Return what to read: ``{name: ShardedTensor or list}``.

        Args:
            stored: Returns how the entry of a name is stored, without data; None if it is not
                stored as a tensor.
        """
        request: ShardedStateDict = {}
        for name, item in self._layout.tensors.items():
            source = self._source_of(name)
            if source is None or self._given[source] is not STORED:
                continue
            entry = stored(source)
            if entry is None or (self._is_aside(name) and not _is_range(item)):
                continue
            request[name] = item.layout.shard(entry.key, item.local)
        for name, value in self._given.items():
            entry = stored(name) if value is STORED else None
            if entry is not None and self._is_aside(name) and name not in request:
                request[name] = self._aside(name, entry)
        return request

    def check_dtypes(self, stored: Callable[[str], ShardedTensor | None]) -> None:
        """Refuse entries that a module's load code would cast; others are compared when read.

        Raises:
            MismatchError: All such entries are named.
        """
        problems = []
        for name, item in self._layout.tensors.items():
            entry = stored(name) if self._is_read_aside(name) else None
            if entry is not None and entry.dtype != item.local.dtype:
                problems.append(
                    f"{name!r}: {item.local.dtype} is expected, {entry.dtype} is stored"
                )
        if problems:
            raise MismatchError("; ".join(problems), hint='cast="allow" converts.')

    def fill(self, loaded: Mapping[str, Any], *, strict: bool = False) -> LoadReport:
        """Load what was read into the modules, and call their hooks as PyTorch does.

        Args:
            loaded: What was read of the request.
            strict: Passed to a ``load_state_dict`` that the model overrides. If True, that method
                judges missing and unexpected names, and none are reported.

        Raises:
            MismatchError: A tensor does not fit, or a module could not load its entries.
        """
        direct = {name: value for name, value in loaded.items() if not self._is_read_aside(name)}
        fill_shared(self._layout, direct)
        errors = self._fill_given()
        values = self._entries(loaded)
        if self._is_whole:
            report = self._load_whole(values, strict=strict)
        else:
            report = self._visit_all(values, errors)
        if errors:
            raise MismatchError(_error_text(self._root, errors))
        return report

    # -- how an entry is loaded

    def _like(self, name: str) -> LocalTensor | None:
        """Return the live tensor of this name, or the DTensor that a module makes for it."""
        return owned_by(self._layout, name) or self._made.get(name)

    def _is_aside(self, name: str) -> bool:
        return name in self._extras or any(name.startswith(scope) for scope in self._scopes)

    def _is_read_aside(self, name: str) -> bool:
        item = self._layout.tensors.get(name)
        return self._is_aside(name) and (item is None or not _is_range(item))

    def _source_of(self, name: str) -> str | None:
        """Return the name under which a (tied) tensor is given; None if it is not given.

        If there are several, the last one counts, as when module after module copies its entry.
        """
        names = (name, *self._others.get(name, ()))
        return next((other for other in reversed(names) if other in self._given), None)

    def _aside(self, name: str, stored: ShardedTensor) -> ShardedTensor | list[ShardedTensor]:
        """Return a request with new memory, cut as the live tensor if that has the same shape."""
        item, shape = self._like(name), tuple(stored.global_shape)
        if item is not None and item.layout.global_shape == shape:
            local = torch.empty(
                item.layout.local_shape, dtype=stored.dtype, device=item.local.device
            )
            return item.layout.shard(stored.key, local)
        layout = replicated_layout(shape, writer="first")
        return layout.shard(stored.key, torch.empty(shape, dtype=stored.dtype, device="cpu"))

    # -- filling

    def _fill_given(self) -> list[str]:
        """Copy whole tensors that a caller gave into the parameters that are filled in place."""
        errors = []
        for name, item in self._layout.tensors.items():
            source = self._source_of(name)
            value = STORED if source is None else self._given[source]
            if value is STORED or self._is_read_aside(name):
                continue
            if not isinstance(value, torch.Tensor):
                errors.append(
                    f'While copying the parameter named "{name}", expected torch.Tensor, '
                    f"received {type(value).__name__}."
                )
            elif tuple(value.shape) != item.layout.global_shape:
                errors.append(_size_mismatch(name, value, item))
            elif isinstance(value, DTensor):
                with torch.no_grad():
                    item.owner.copy_(value)
            else:
                _fill_boxes(item, value)
        return errors

    def _entries(self, loaded: Mapping[str, Any]) -> OrderedDict[str, Any]:
        """Return the state dict that the modules see, in the given order.

        An entry that was filled in place is the live tensor; one that no module has is ``STORED``.
        """
        entries: OrderedDict[str, Any] = OrderedDict()
        names = dict.fromkeys(self._given)
        for name in self._layout.order:
            if name not in names and self._source_of(self._layout.tied.get(name, name)) is not None:
                names[name] = None
        for name in names:
            item = self._like(name)
            if not self._is_aside(name):
                value = self._given.get(name, STORED)
                entries[name] = value if value is not STORED or item is None else item.owner
            elif item is not None and _is_range(item):
                entries[name] = item.owner
            else:
                entries[name] = self._as_module_sees(name, item, loaded)
        return entries

    def _as_module_sees(
        self, name: str, item: LocalTensor | None, loaded: Mapping[str, Any]
    ) -> Any:
        """Return an entry for a module that loads it itself, distributed as the live tensor is."""
        source = name
        if name not in self._given:
            source = self._source_of(self._layout.tied.get(name, name)) or name
        value: Any = self._given[source]
        pattern = item.owner if item is not None and isinstance(item.owner, DTensor) else None
        if value is STORED:
            value = loaded.get(source)
            if isinstance(value, list) and item is not None:
                value = item.layout.assemble(value)
            local = value
        elif is_plain_tensor(value) and item is not None and pattern is not None:
            local = None if isinstance(value, DTensor) else _own_part(item, value)
        else:
            return value
        if pattern is None or item is None or not isinstance(local, torch.Tensor):
            return value
        fits = tuple(local.shape) == item.layout.local_shape
        return wrap_like(local, pattern) if fits else value

    def _load_whole(self, entries: OrderedDict[str, Any], *, strict: bool) -> LoadReport:
        """Load everything by the ``load_state_dict`` that the model overrides."""
        # A wrapper and the module in it have the same prefix: the inner one comes last and counts.
        paths = {place.prefix: place.path for place in places(self._root)}
        own_name = {
            # Activation checkpointing removes its name from state dicts and adds it at a load.
            name: paths[prefix].replace(f"{_CHECKPOINTED}.", "") + name.removeprefix(prefix)
            for prefix, names in _by_module(entries, paths.keys()).items()
            for name in names
        }
        given: OrderedDict[str, Any] = OrderedDict((own_name[n], v) for n, v in entries.items())
        vars(given)["_metadata"] = OrderedDict(
            (paths.get(f"{prefix}." if prefix else "", f"{prefix}.").removesuffix("."), dict(value))
            for prefix, value in self._metadata.items()
        )
        loader: Any = self._root
        try:
            # Not every override knows `strict`, and some have another default.
            keys = loader.load_state_dict(given, **({} if strict else {"strict": False}))
        except RuntimeError as error:
            raise MismatchError(str(error)) from error
        if strict:
            return LoadReport(missing=(), unexpected=())
        name_of = {own: name for name, own in own_name.items()}
        missing, unexpected = (
            tuple(name_of.get(name, name) for name in getattr(keys, kind, ()))
            for kind in ("missing_keys", "unexpected_keys")
        )
        return LoadReport(missing=missing, unexpected=unexpected)

    def _visit_all(self, entries: OrderedDict[str, Any], errors: list[str]) -> LoadReport:
        missing: list[str] = []
        unexpected: list[str] = []
        if not self._scopes and not self._has_light:
            known = {*self._layout.order}
            missing += [name for name in self._layout.order if name not in entries]
            unexpected += [name for name in entries if name not in known]
            return LoadReport(missing=tuple(missing), unexpected=tuple(unexpected))
        before = self._ranges_before()
        visit = _Visit(
            metadata=self._metadata,
            layout=self._layout,
            names_in=_by_module(self._layout.order, self._prefixes),
            by_module=_by_module(entries, self._prefixes),
            missing=missing,
            unexpected=unexpected,
            errors=errors,
        )
        visit.module(self._model, "", entries, is_aside=False)
        errors += self._ranges_changed(before)
        return LoadReport(
            missing=tuple(dict.fromkeys(missing)), unexpected=tuple(dict.fromkeys(unexpected))
        )

    def _ranges_before(self) -> dict[str, torch.Tensor]:
        return {
            name: item.local.clone()
            for name, item in self._layout.tensors.items()
            if _is_range(item) and self._is_aside(name)
        }

    def _ranges_changed(self, before: Mapping[str, torch.Tensor]) -> Iterator[str]:
        """Yield an error for each FSDP1 parameter that a module has changed from a range of it."""
        for name, value in before.items():
            now = self._layout.tensors[name].local
            if not torch.equal(_bits(now), _bits(value)):
                yield (
                    f"{name}: its module converts entries when it loads them, and FSDP1 has only a "
                    "range of the flattened parameter here; use FSDP2, or load without FSDP."
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Visit:
    """A walk over the modules in the order of ``load_state_dict``."""

    metadata: Metadata
    layout: ModelLayout
    names_in: Mapping[str, Sequence[str]]
    by_module: Mapping[str, Sequence[str]]
    missing: list[str]
    unexpected: list[str]
    errors: list[str]

    def module(
        self, module: nn.Module, prefix: str, entries: Mapping[str, Any], *, is_aside: bool
    ) -> None:
        """Load one module and those below it.

        Args:
            module: The module.
            prefix: Its canonical prefix.
            entries: Outside of modules with load code of their own all entries; inside those that
                begin with ``prefix``, as the modules above have left them.
            is_aside: Whether a module above has load code of its own.
        """
        if not is_aside and _is_own(module):
            is_aside = True
            entries = _below(entries, prefix)
        if is_aside:
            self._by_itself(module, prefix, entries)
        else:
            self._in_place(module, prefix, entries)
        for name, child in module._modules.items():  # noqa: SLF001 - the protocol's own walk
            if child is None:
                continue
            below = prefix if is_hidden(module, name) else f"{prefix}{name}."
            passed = _below(entries, below) if is_aside and below != prefix else entries
            self.module(child, below, passed, is_aside=is_aside)
        report = _IncompatibleKeys(self.missing, self.unexpected)
        for hook in module._load_state_dict_post_hooks.values():  # noqa: SLF001
            if not is_of_wrapper(hook) and hook(module, report) is not None:
                raise MismatchError(
                    f"the load_state_dict post-hook of {prefix or '(root)'!r} returned a value.",
                    hint="change the given lists in place and return None.",
                )

    def _by_itself(self, module: nn.Module, prefix: str, entries: Mapping[str, Any]) -> None:
        if any(is_hidden(module, name) for name in module._modules):  # noqa: SLF001
            return  # a wrapper of torch: it has no entries, and what it wraps has its prefix
        local = dict(entries)
        for name in self._flattened(module, prefix):
            if local.pop(name, None) is None:
                self.missing.append(name)
        # A flat parameter is filled already: given to itself, it is neither missing nor copied.
        held = module._parameters.items()  # noqa: SLF001
        flat = {f"{prefix}{n}": p for n, p in held if p is not None and is_flat_parameter(p)}
        local |= flat
        metadata = dict(self.metadata.get(prefix.removesuffix("."), {}))
        loader: Any = module._load_from_state_dict  # noqa: SLF001 - the protocol itself
        loader(local, prefix, metadata, True, self.missing, self.unexpected, self.errors)  # noqa: FBT003
        for name in flat:
            local.pop(name, None)
        if isinstance(entries, dict):  # the modules below it see the entries that it renamed
            entries.clear()
            entries.update(local)

    def _flattened(self, module: nn.Module, prefix: str) -> list[str]:
        """Return the names of the parameters that FSDP1 has removed from the module."""
        names = []
        for name in self.names_in.get(prefix, ()):
            item = owned_by(self.layout, name)
            is_flat = item is not None and is_flat_parameter(item.owner)
            if is_flat and name.removeprefix(prefix) not in module._parameters:  # noqa: SLF001
                names.append(name)
        return names

    def _in_place(self, module: nn.Module, prefix: str, entries: Mapping[str, Any]) -> None:
        if any(is_hidden(module, name) for name in module._modules):  # noqa: SLF001
            return
        own = self.names_in.get(prefix, ())
        self.missing.extend(name for name in own if name not in entries)
        extra = f"{prefix}{EXTRA_STATE}"
        sets_extra = _sets_extra(module)
        if sets_extra and extra in entries:
            module.set_extra_state(entries[extra])
        elif sets_extra:
            self.missing.append(extra)
        self.unexpected.extend(
            name
            for name in self.by_module.get(prefix, ())
            if name not in own and not (sets_extra and name == extra)
        )


def _distributed_entries(model: nn.Module, layout: ModelLayout) -> dict[str, LocalTensor]:
    """Return the DTensors that modules make for their state dict: stored entries are cut alike."""
    if not any(isinstance(item.owner, DTensor) for item in layout.tensors.values()):
        return {}
    entries = own_entries(model)
    made = {}
    for name, value in {} if entries is None else entries.values.items():
        if isinstance(value, DTensor) and owned_by(layout, name) is None:
            made[name] = LocalTensor(
                local=local_of(value),
                layout=dtensor_layout(value, name=name),
                owner=value,
                kind="buffer",
            )
    return made


def _is_own(module: nn.Module) -> bool:
    cls: Any = type(module)
    if cls._load_from_state_dict is not nn.Module._load_from_state_dict:  # noqa: SLF001
        return True
    if "_load_from_state_dict" in vars(module) or has_odd_tensors(module):
        return True
    hooks = module._load_state_dict_pre_hooks.values()  # noqa: SLF001
    return any(not is_of_wrapper(hook) for hook in hooks)


def _sets_extra(module: nn.Module) -> bool:
    return type(module).set_extra_state is not nn.Module.set_extra_state


def _is_light(module: nn.Module) -> bool:
    if _sets_extra(module):
        return True
    hooks = module._load_state_dict_post_hooks.values()  # noqa: SLF001
    return any(not is_of_wrapper(hook) for hook in hooks)


def _overrides_load_state_dict(module: nn.Module) -> bool:
    overrides = type(module).load_state_dict is not nn.Module.load_state_dict
    return overrides or "load_state_dict" in vars(module)


def _topmost(prefixes: Sequence[str]) -> list[str]:
    topmost: list[str] = []
    for prefix in prefixes:  # a module comes before those below it
        if not any(prefix.startswith(above) for above in topmost):
            topmost.append(prefix)
    return topmost


def _below(entries: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return OrderedDict((name, value) for name, value in entries.items() if name.startswith(prefix))


def _by_module(names: Iterable[str], prefixes: AbstractSet[str]) -> dict[str, list[str]]:
    """Return the names by the deepest module whose prefix they begin with."""
    by_module: dict[str, list[str]] = {}
    for name in names:
        by_module.setdefault(deepest_prefix(name, prefixes), []).append(name)
    return by_module


def _is_range(item: LocalTensor) -> bool:
    """Whether FSDP1 holds a range of the flattened parameter here."""
    return any(part.flat_range is not None or part.order is not None for part in item.layout.parts)


def _own_part(item: LocalTensor, whole: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's part of a whole tensor in new memory; None if its shape differs."""
    if tuple(whole.shape) != item.layout.global_shape:
        return None
    local = torch.empty(item.layout.local_shape, dtype=whole.dtype, device=item.local.device)
    _fill_boxes(replace(item, local=local), whole)
    return local


def _fill_boxes(item: LocalTensor, whole: torch.Tensor) -> None:
    pieces = item.layout.shard("", item.local)
    for piece in pieces if isinstance(pieces, list) else [pieces]:
        copy_box(piece, whole)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _size_mismatch(name: str, value: torch.Tensor, item: LocalTensor) -> str:
    return (
        f"size mismatch for {name}: copying a param with shape {tuple(value.shape)} from "
        f"checkpoint, the shape in current model is {item.layout.global_shape}."
    )


def _error_text(model: nn.Module, lines: Sequence[str]) -> str:
    text = "\n\t".join(lines)
    return f"Error(s) in loading state_dict for {type(model).__name__}:\n\t{text}"
