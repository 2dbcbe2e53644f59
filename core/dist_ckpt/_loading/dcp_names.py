"""Recognising the model and its optimizers in a checkpoint of ``dcp.save``.

Here: the documented mapping (docs/guides/core.md, With DCP) from its keys and common part to ours,
pure. Not here: reading (``_formats.torch_dist``), deciding for all ranks (``training_state``),
prefixes that only a job's model has (``_loading.names``).

``dcp.save`` flattens nested dicts to keys joined by dots, and the file does not say which dict was
a model. So a model is recognised by its root, the prefix of all of its names:

=====================  ==========================================================================
``model.``             ``{"model": ..., "optimizer": ...}``: torch's docs, Accelerate, torchtitan
``app.model.``         ``{"app": AppState}`` of torch's tutorial; any other key than ``app``, too
nothing                a plain ``model.state_dict()``; torchtitan, which has the optimizer beside it
any other              if it is the only one with which all of the job's names are stored
=====================  ==========================================================================

The optimizers are next to the root's last part: ``optimizer.``, ``optim.``, or Lightning's
``optimizer_0.``, ``optimizer_1.`` and so on. Their state is nested by name, or flat if it was saved
with ``flatten_optimizer_state_dict=True``: then each parameter has its group's settings, and the
groups are those of the optimizer that loads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dist_ckpt._loading.names import renamed_index
from dist_ckpt.errors import MismatchError
from dist_ckpt.validation import shortened

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    import torch

    from dist_ckpt._formats.documents import CheckpointContents
    from dist_ckpt.types import StateDict

__all__ = ["Roots", "adopt", "find_roots", "group_flat", "is_flat", "values_beside"]

_OPTIMIZER = re.compile(r"(?:optimizer|optim)(?:_([0-9]+))?")
_NO_MODEL = frozenset(
    {"optimizer", "optim", "lr_scheduler", "scheduler", "dataloader", "train_state"}
)
"""First parts of keys that are not parameters, unless the model has names that begin so."""
_MAX_BESIDE_NBYTES = 1 << 20
_FLAT = "flat_groups"
_GROUPS, _STATE, _EXTRA = "param_groups", "state", "_extra_state"


@dataclass(frozen=True, slots=True)
class Roots:
    """The prefixes of a model's names and of each optimizer's state.

    Attributes:
        model: Empty, or with a dot at its end.
        optimizers: In their order, with a dot at the end.
        own: The names of the job's model; empty if they are not known.
    """

    model: str
    optimizers: tuple[str, ...]
    own: frozenset[str] = frozenset()

    def model_name(self, key: str) -> str | None:
        """Return the parameter's name in a key; None if the key is not of the model."""
        if not key.startswith(self.model) or self.optimizer_of(key) is not None:
            return None
        name = key.removeprefix(self.model)
        if self.model or name in self.own:
            return name
        first = name.partition(".")[0]
        is_free = first in _NO_MODEL or _OPTIMIZER.fullmatch(first)
        return None if is_free and not _begins(self.own, first) else name

    def optimizer_of(self, key: str) -> tuple[int, str] | None:
        """Return the optimizer of a key and the rest of the key; None if it is not of one."""
        if key.removeprefix(self.model) in self.own and key.startswith(self.model):
            return None
        for j, root in enumerate(self.optimizers):
            rest = key.removeprefix(root)
            if key != rest and rest.startswith((f"{_STATE}.", f"{_GROUPS}.")):
                return j, rest
        return None

    def state_of(self, rest: str) -> tuple[str, str]:
        """Return name and state in ``state.{name}.{state}``: a state's name may have dots."""
        body = rest.removeprefix(f"{_STATE}.")
        cuts = [at for at, sign in enumerate(body) if sign == "."]
        known = [at for at in cuts if body[:at] in self.own]
        at = known[-1] if known else cuts[-1] if cuts else len(body)
        return body[:at], body[at + 1 :]

    def our_key(self, key: str) -> str:
        """Return our key; the key itself if it is neither of the model nor of an optimizer."""
        found = self.optimizer_of(key)
        if found is not None and found[1].startswith(f"{_STATE}."):
            name, state = self.state_of(found[1])
            state = state.replace("%", "%25").replace(".", "%2E")
            return f"optimizers.{found[0]}.state.{state}.0.{name}"
        name_ = self.model_name(key)
        return key if name_ is None else f"models.0.{name_}"


def _begins(names: Collection[str], first: str) -> bool:
    return any(name == first or name.startswith(f"{first}.") for name in names)


# -- which roots ---------------------------------------------------------------------------------


def find_roots(keys: Collection[str], objects: Collection[str], own: Collection[str]) -> Roots:
    """Return the roots of a checkpoint, for a model if its names are known.

    Args:
        keys: Of tensors.
        objects: Keys of other values.
        own: Names of the job's model; none before a model is there.

    Raises:
        MismatchError: Two roots fit the model, or a root has optimizers under two names.
    """
    names = frozenset(keys)
    root = _root_for(names, own) if own else _likely_root(names)
    mine = frozenset(own)
    return Roots(root, _optimizers(root, {*names, *objects} - {root + name for name in mine}), mine)


def _documented(names: Collection[str]) -> list[str]:
    apps = {key.partition(".")[0] for key in names if ".model." in key}
    nested = [f"{app}.model." for app in sorted(apps) if app != "model"]
    return ["model.", *nested, ""]


def _root_for(names: frozenset[str], own: Collection[str]) -> str:
    documented = _documented(names)
    ends = {min(own), max(own)}
    # Two of the names are enough: a root of all names is also a root of these.
    other = {
        key.removesuffix(f".{end}") + "."
        for end in ends
        for key in names
        if key.endswith(f".{end}")
    }
    fits = [root for root in dict.fromkeys((*documented, *sorted(other)))
            if all(root + name in names for name in own)]  # fmt: skip
    preferred = [root for root in fits if root in documented] or fits
    if len(preferred) > 1:
        candidates = [f"{root}{min(own)}" for root in preferred]
        raise MismatchError(
            f"{len(preferred)} models in the checkpoint fit this one: its {min(own)!r} may be any "
            f"of {shortened(candidates)}.",
            hint="load the one you want by `dist_ckpt.load` with the keys of its tensors.",
        )
    if preferred:
        return preferred[0]
    counts = {root: sum(root + name in names for name in own) for root in documented}
    best = max(counts.values())
    most = [root for root, count in counts.items() if count == best]
    if best and len(most) > 1:
        raise MismatchError(
            f"no model in the checkpoint has all names of this one, and {shortened(most)} have "
            f"{best} of {len(own)} each.",
            hint="load the one you want by `dist_ckpt.load` with the keys of its tensors.",
        )
    return most[0] if best else _likely_root(names)


def _likely_root(names: frozenset[str]) -> str:
    """Return the root without a model: by the optimizer's names, or a documented one."""
    documented = _documented(names)
    for root in documented:
        for one in _optimizers(root, names):
            states = {
                key.removeprefix(one + "state.") for key in names if key.startswith(one + "state.")
            }
            parameters = {state.rpartition(".")[0] for state in states}
            if parameters and any(root + name in names for name in parameters):
                return root
    for root in documented:
        if root and any(key.startswith(root) for key in names):
            return root
    return "" if names and not _optimizers("model.", names) else "model."


def _optimizers(root: str, keys: Collection[str]) -> tuple[str, ...]:
    """Return the prefix of each optimizer's state, next to a model's root.

    Raises:
        MismatchError: The same optimizer is there under two names.
    """
    if root.count(".") > 1:
        above = root[:-1].rpartition(".")[0] + "."
        inner = _optimizers_below(above, keys)
        # `model._orig_mod.` is next to `optimizer.`, as `model.` is.
        return inner or _optimizers(above, keys)
    return _optimizers_below("", keys)


def _optimizers_below(parent: str, keys: Collection[str]) -> tuple[str, ...]:
    found: dict[int, set[str]] = {}
    for key in keys:
        if key.startswith(parent):
            first, _, rest = key.removeprefix(parent).partition(".")
            match = _OPTIMIZER.fullmatch(first)
            if match and rest.partition(".")[0] in (_STATE, _GROUPS):
                found.setdefault(int(match[1] or 0), set()).add(f"{parent}{first}.")
    twice = [root for roots in found.values() if len(roots) > 1 for root in sorted(roots)]
    if twice:
        raise MismatchError(
            "the checkpoint has the state of one optimizer under two names: "
            f"{shortened([repr(root) for root in twice])}.",
            hint="load the one you want by `dist_ckpt.load` with the keys of its tensors.",
        )
    return tuple(next(iter(found[j])) for j in sorted(found))


# -- renamed to our keys -------------------------------------------------------------------------


def values_beside(contents: CheckpointContents, roots: Roots) -> list[str]:
    """Return the keys of tensors that belong to the common part: small ones that are not state.

    Examples: a scheduler's tensors, a step count, a learning rate that is a tensor. Large ones (a
    second copy of the model) are left out: ``load_plain_tensors`` reads them.
    """
    sizes: dict[str, int] = {}
    beside: dict[str, list[str]] = {}
    for key, stored in contents.index.tensors.items():
        optimizer = roots.optimizer_of(key)
        if roots.model_name(key) is not None and optimizer is None:
            continue
        if optimizer is not None and optimizer[1].startswith(f"{_STATE}."):
            continue
        first = key if optimizer is not None else key.partition(".")[0]
        sizes[first] = sizes.get(first, 0) + sum(chunk.nbytes for chunk in stored.chunks)
        beside.setdefault(first, []).append(key)
    return [k for first, keys in beside.items() if sizes[first] <= _MAX_BESIDE_NBYTES for k in keys]


def adopt(
    contents: CheckpointContents,
    common: StateDict,
    roots: Roots,
    beside: Mapping[str, torch.Tensor],
) -> tuple[CheckpointContents, StateDict]:
    """Return contents with our keys, and the common part as ours.

    Args:
        contents: As DCP wrote it.
        common: Its values that are not tensors, nested as they were saved.
        roots: The prefixes of the model and the optimizers.
        beside: The tensors of ``values_beside``.
    """
    rest = _copied(common)
    for key, value in beside.items():
        _place(rest, contents.paths.get(key, (key,)), value)
    tree: StateDict = {}
    optimizers: dict[str, Any] = {}
    for j, root in enumerate(roots.optimizers):
        saved = _taken(rest, root[:-1].split("."))
        if isinstance(saved, dict):
            optimizers[str(j)] = _optimizer(saved, roots)
    if optimizers:
        tree["optimizers"] = optimizers
    extra = _extra_states(rest, roots.model)
    if extra:
        tree["extra_state"] = {"0": extra}
    for root in (roots.model, *roots.optimizers):
        _prune(rest, root.split(".")[:-1])
    tree["common"] = rest
    return replace(contents, index=renamed_index(contents.index, roots.our_key)), tree


def _optimizer(saved: Mapping[str, Any], roots: Roots) -> StateDict:
    flat: dict[str, dict[str, Any]] = {}
    state: dict[str, Any] = {f"0.{name}": one for name, one in saved.get(_STATE, {}).items()}
    for key, value in saved.items():
        if key.startswith(f"{_GROUPS}."):
            name, _, setting = key.removeprefix(f"{_GROUPS}.").rpartition(".")
            flat.setdefault(f"0.{name}", {})[setting] = value
        elif key.startswith(f"{_STATE}."):
            name, one = roots.state_of(key)
            state.setdefault(f"0.{name}", {})[one] = value
    groups = [
        {**group, "params": [f"0.{name}" for name in group.get("params", ())]}
        for group in saved.get(_GROUPS, [])
    ]
    adopted: StateDict = {"state": state, "param_groups": groups}
    return adopted | ({_FLAT: flat} if flat else {})


def is_flat(saved: StateDict) -> bool:
    """Whether each parameter has settings of its own, see ``group_flat``."""
    return _FLAT in saved


def group_flat(saved: StateDict, members: Sequence[Iterable[str]]) -> StateDict:
    """Return a flat optimizer with the groups of the one that loads.

    Args:
        saved: From ``adopt``.
        members: Names of the parameters in each group of the optimizer that loads.

    Raises:
        MismatchError: Parameters of one group have been saved with different settings.
    """
    flat: dict[str, dict[str, Any]] = dict(saved[_FLAT])
    groups: list[dict[str, Any]] = []
    problems: list[str] = []
    for number, names in enumerate(members):
        params = [name for name in names if name in flat]
        settings = [(name, flat.pop(name)) for name in params]
        first, group = settings[0] if settings else ("", {})
        for name, other in settings[1:]:
            problems += [
                f"group {number}: {key} is {group.get(key)!r} for {first!r} and {other.get(key)!r} "
                f"for {name!r}"
                for key in sorted({*group, *other})
                if key not in group or key not in other or not _is_same(group[key], other[key])
            ]
        groups.append({**group, "params": params})
    if problems:
        raise MismatchError(
            "The optimizer's parameter groups do not match the checkpoint's: "
            f"{shortened(problems)}.",
            hint="give the optimizer the same parameters, in the same groups, as at saving.",
        )
    if flat:  # parameters of no group here: load_optimizer_state reports them
        groups.append({"params": sorted(flat)})
    return {k: v for k, v in saved.items() if k != _FLAT} | {"param_groups": groups}


def _is_same(a: object, b: object) -> bool:
    same: Any = a == b
    return bool(same.all()) if hasattr(same, "all") else bool(same)


def _extra_states(rest: StateDict, root: str) -> StateDict:
    """Remove the results of ``get_extra_state`` from the common part; return them by module."""
    node: Any = rest
    for part in root.split(".")[:-1]:
        node = node.get(part, {}) if isinstance(node, dict) else {}
    if not isinstance(node, dict):
        return {}
    names = [n for n in node if isinstance(n, str) and f".{n}".endswith(f".{_EXTRA}")]
    return {name.removesuffix(_EXTRA).removesuffix("."): node.pop(name) for name in names}


def _copied(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    return [_copied(value) for value in tree] if isinstance(tree, list) else tree


def _taken(tree: Any, path: Sequence[str]) -> Any:
    """Remove and return the value at a path; None if there is none."""
    for part in path[:-1]:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree.pop(path[-1], None) if isinstance(tree, dict) else None


def _prune(tree: Any, path: Sequence[str]) -> None:
    """Remove the empty dicts along a path."""
    if path and isinstance(tree, dict) and isinstance(tree.get(path[0]), dict):
        _prune(tree[path[0]], path[1:])
        if not tree[path[0]]:
            del tree[path[0]]


def _place(tree: StateDict, path: Sequence[str | int], value: object) -> None:
    """Put a tensor at its path among the other values; under its key if there is no such path."""
    node: Any = tree
    for part in path[:-1]:
        if isinstance(node, dict):
            node = node.setdefault(part, {})
        elif isinstance(node, list) and isinstance(part, int) and 0 <= part < len(node):
            node = node[part]
        else:
            node = None
    last = path[-1]
    has_place = isinstance(node, list) and isinstance(last, int) and 0 <= last < len(node)
    if isinstance(node, dict) or has_place:
        node[last] = value
    else:
        tree[".".join(map(str, path))] = value
