"""What other people's classes define of the methods that a bound Trainer no longer calls.

Here: finding such definitions, and the refusal that names them. Not here: when that is done
(``_bind``), the methods that are put in their place (``_overrides``, ``_model_checkpoint``).

A class that saves or loads in its own way knows something that we do not: a layout that its tensors
do not tell, bytes that go elsewhere. To replace its methods would lose that in silence. Whoever
knows that nothing is lost says so: ``dist_ckpt_supported = True`` in a class covers what this class
and its bases define, and not what a subclass adds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from dist_ckpt.errors import ConfigError

__all__ = ["check_contract", "foreign_definitions", "is_lightnings_own"]

_OPT_IN = "dist_ckpt_supported"
_OWN = frozenset({"lightning", "pytorch_lightning", "lightning_fabric", "lightning_dist_ckpt"})


def is_lightnings_own(cls: type) -> bool:
    """Whether a class is defined in Lightning, under any of its names, or by us."""
    return cls.__module__.partition(".")[0] in _OWN


def foreign_definitions(one: object, names: Collection[str]) -> list[str]:
    """Return which of ``names`` an object has from a class that is not Lightning's, or of itself.

    Only what is in effect counts, not what stands behind Lightning's own definition.

    Returns:
        ``Class.name`` for each that nobody has opted in for.
    """
    mro = [cls for cls in type(one).__mro__ if "dist_ckpt_base" not in vars(cls)]
    # An attribute of the object itself would hide our method: no class can opt in for that.
    attributes = getattr(one, "__dict__", {})
    found = [f"{mro[0].__name__}.{name} (on the object)" for name in names if name in attributes]
    if getattr(mro[0], _OPT_IN, True) is False:
        found.append(f"{mro[0].__name__}.{_OPT_IN} = False")
    covering = [cls for cls in mro if vars(cls).get(_OPT_IN) is True]
    in_effect = set(names)
    for cls in mro[: mro.index(object)]:
        if is_lightnings_own(cls):
            in_effect -= vars(cls).keys()
        elif not any(issubclass(covered, cls) for covered in covering):
            found += [f"{cls.__name__}.{name}" for name in in_effect & vars(cls).keys()]
    return sorted(found)


def check_contract(replaced: Iterable[tuple[str, object, Collection[str]]]) -> None:
    """Refuse what we would go past.

    Args:
        replaced: What an object is, the object, and the names that we replace or do not call.

    Raises:
        ConfigError: Some of them are defined by other people; all are named.
    """
    found = [
        f"{role} {definition}"
        for role, one, names in replaced
        for definition in foreign_definitions(one, names)
    ]
    if found:
        raise ConfigError(
            "DistCkptIO saves and loads in its own way, past what is defined here: "
            f"{', '.join(dict.fromkeys(found))}.",
            hint=f"remove the definition; or, where nothing is lost without it, set {_OPT_IN} = "
            "True in its class, or in a subclass of yours; or take DistCkptIO out of the Trainer's "
            "plugins (enabled: false).",
        )
