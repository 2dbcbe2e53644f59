"""Detection of third-party methods that a bound Trainer would no longer call.

Here: finding such definitions, and the error that names them. Not here: when they are looked for
(``_bind``), the methods that replace them (``_overrides``, ``_model_checkpoint``).

A class that saves or loads in its own way may rely on something that we cannot see: a layout that
its tensors do not describe, files that it writes elsewhere. Replacing its methods would lose that
silently. An author who knows that nothing is lost opts in: ``dist_ckpt_supported = True`` in a
class covers the definitions of this class and its bases, not those of a subclass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from dist_ckpt.errors import ConfigError

__all__ = ["check_contract", "foreign_definitions", "is_lightnings_own"]

_OPT_IN = "dist_ckpt_supported"
_OWN = frozenset({"lightning", "pytorch_lightning", "lightning_fabric", "lightning_dist_ckpt"})


def is_lightnings_own(definition: Any) -> bool:
    """Whether a class or function is defined in Lightning, under any of its names, or by us."""
    return definition.__module__.partition(".")[0] in _OWN


def foreign_definitions(one: object, names: Collection[str]) -> list[str]:
    """Return which of ``names`` an object has from a third-party class or as an attribute.

    Only definitions in effect count, not those that Lightning's own definition overrides.

    Returns:
        ``Class.name`` for each definition without an opt-in.
    """
    mro = [cls for cls in type(one).__mro__ if "dist_ckpt_base" not in vars(cls)]
    # An attribute of the object itself would hide our method: no class can opt in for that.
    attributes = getattr(one, "__dict__", {})
    definitions = [
        f"{mro[0].__name__}.{name} (on the object)" for name in names if name in attributes
    ]
    if getattr(mro[0], _OPT_IN, True) is False:
        definitions.append(f"{mro[0].__name__}.{_OPT_IN} = False")
    covering = [cls for cls in mro if vars(cls).get(_OPT_IN) is True]
    in_effect = set(names)
    for cls in mro[: mro.index(object)]:
        if is_lightnings_own(cls):
            in_effect -= vars(cls).keys()
        elif not any(issubclass(covered, cls) for covered in covering):
            definitions += [f"{cls.__name__}.{name}" for name in in_effect & vars(cls).keys()]
    return sorted(definitions)


def check_contract(replaced: Iterable[tuple[str, object, Collection[str]]]) -> None:
    """Refuse third-party definitions that would not be called.

    Args:
        replaced: Role of an object, the object, and the names that we replace or do not call.

    Raises:
        ConfigError: Third-party classes define some of them; all are named.
    """
    definitions = [
        f"{role} {definition}"
        for role, one, names in replaced
        for definition in foreign_definitions(one, names)
    ]
    if definitions:
        raise ConfigError(
            "DistCkptIO saves and loads in its own way, past what is defined here: "
            f"{', '.join(dict.fromkeys(definitions))}.",
            hint=f"remove the definition; or, where nothing is lost without it, set {_OPT_IN} = "
            "True in its class, or in a subclass of yours; or take DistCkptIO out of the Trainer's "
            "plugins (enabled: false).",
        )
