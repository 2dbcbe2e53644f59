"""Nested state dicts: map, walk, split, merge and compare them.

Here: functions over trees whose only containers are dicts and lists; every other object, tuples
and dataclasses included, is a leaf. Not here: anything that knows sharded objects
(``dist_ckpt.utils``, ``dist_ckpt.mapping``) or other ranks. Called on any rank, locally.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final, TypeAlias

import torch

__all__ = [
    "ListPart",
    "dict_list_map_inplace",
    "dict_list_map_outplace",
    "dict_map",
    "dict_map_with_key",
    "diff",
    "extract_matching_values",
    "find_hidden_leaves",
    "full_length",
    "inspect_types",
    "map_reduce",
    "matching_items",
    "merge",
    "nested_items_iter",
    "nested_items_with_path",
    "nested_values",
    "positions",
    "strided_parts",
]

Tree: TypeAlias = dict[Any, Any] | list[Any]
Path: TypeAlias = tuple[Any, ...]
MAX_PRINTED_CHARS = 30


class ListPart(list[Any]):
    """Some elements of a list, in order, that know where they stood.

    It compares and behaves like the plain list of its elements; ``merge`` uses ``positions`` (one
    original index per element) and ``length`` (of the original list) to put them back.
    """

    def __init__(self, elements: Iterable[Any], *, positions: Iterable[int], length: int) -> None:
        """Keep the elements with their original positions."""
        super().__init__(elements)
        self.positions = tuple(positions)
        self.length = length


def positions(x: list[Any]) -> tuple[int, ...]:
    """Return the original position of each element: its index, unless ``x`` is a ``ListPart``.

    Raises:
        ValueError: If a ``ListPart`` has grown or shrunk since it was cut out.
    """
    if not isinstance(x, ListPart):
        return tuple(range(len(x)))
    if len(x.positions) != len(x):
        raise ValueError(
            f"Part of a list has {len(x)} elements but {len(x.positions)} positions: "
            "elements were added or removed after it was extracted"
        )
    return x.positions


def full_length(x: list[Any]) -> int:
    """Return the length of the whole list that ``x`` is, or is a part of."""
    return x.length if isinstance(x, ListPart) else len(x)


def dict_list_map_inplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Replace each leaf by ``f(leaf)`` in place; return ``x`` (or ``f(x)`` if ``x`` is a leaf)."""
    if isinstance(x, dict):
        for k, v in x.items():
            x[k] = dict_list_map_inplace(f, v)
    elif isinstance(x, list):
        x[:] = [dict_list_map_inplace(f, v) for v in x]
    else:
        return f(x)
    return x


def dict_list_map_outplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Return a tree of new plain dicts and lists with each leaf replaced by ``f(leaf)``.

    Subclasses of dict and list are not kept, except ``ListPart``, which is needed to merge.
    """
    if isinstance(x, dict):
        return {k: dict_list_map_outplace(f, v) for k, v in x.items()}
    if isinstance(x, list):
        mapped = [dict_list_map_outplace(f, v) for v in x]
        if isinstance(x, ListPart):
            return ListPart(mapped, positions=positions(x), length=x.length)
        return mapped
    return f(x)


def dict_map(f: Callable[[Any], Any], d: Tree) -> None:
    """Replace each leaf of ``d`` by ``f(leaf)``, in place."""
    for container, key, value in _leaves(d):
        container[key] = f(value)


def dict_map_with_key(f: Callable[[Any, Any], Any], d: Tree) -> None:
    """Replace each leaf of ``d`` by ``f(key, leaf)``, in place.

    ``f`` takes two arguments; the key is the innermost one (in a list, the index).
    """
    for container, key, value in _leaves(d):
        container[key] = f(key, value)


def _leaves(d: Tree) -> list[tuple[Any, Any, Any]]:
    # A snapshot: a new value that is itself a container must not be walked into.
    return list(nested_items_iter(d))


def nested_items_iter(x: Tree) -> Iterator[tuple[Any, Any, Any]]:
    """Yield ``(container, key, value)`` of each leaf; ``container[key]`` is the value."""
    items = x.items() if isinstance(x, dict) else enumerate(x)
    for k, v in items:
        if isinstance(v, dict | list):
            yield from nested_items_iter(v)
        else:
            yield x, k, v


def nested_values(x: Tree) -> Iterator[Any]:
    """Yield each leaf."""
    for _, _, value in nested_items_iter(x):
        yield value


def nested_items_with_path(x: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield ``(path, value)`` of each leaf; the path holds dict keys and list positions.

    Elements of a ``ListPart`` are named by their position in the whole list.
    """
    if isinstance(x, dict):
        for k, v in x.items():
            yield from nested_items_with_path(v, (*path, k))
    elif isinstance(x, list):
        for i, v in zip(positions(x), x, strict=True):
            yield from nested_items_with_path(v, (*path, i))
    else:
        yield path, x


def find_hidden_leaves(x: Any, predicate: Callable[[Any], bool]) -> list[tuple[Path, Any]]:
    """Find objects that match but stand where no function of this module looks.

    That is inside a leaf: a tuple, namedtuple, set, deque, dataclass or a mapping other than dict,
    at any depth. Returns their paths (field names for dataclasses and namedtuples) and themselves;
    a matching object is not searched itself.
    """
    return [
        hit
        for path, leaf in nested_items_with_path(x)
        if not predicate(leaf)
        for hit in _matches_inside(leaf, predicate, path=path, parents=())
    ]


def _matches_inside(
    x: Any, predicate: Callable[[Any], bool], *, path: Path, parents: tuple[int, ...]
) -> Iterator[tuple[Path, Any]]:
    if id(x) in parents:  # a cycle
        return
    for name, value in _members(x):
        if predicate(value):
            yield (*path, name), value
        else:
            below = (*parents, id(x))
            yield from _matches_inside(value, predicate, path=(*path, name), parents=below)


_ATOMS: Final = frozenset({int, float, bool, str, bytes, type(None), torch.Tensor})
"""Leaves without anything inside; most are one of these, and that is quickly seen."""


def _members(x: Any) -> Iterable[tuple[Any, Any]]:
    if type(x) in _ATOMS:
        return ()
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return zip(x._fields, x, strict=True)
    if isinstance(x, list | tuple | set | frozenset | deque):
        return enumerate(x)
    if isinstance(x, Mapping):
        return x.items()
    if is_dataclass(x) and not isinstance(x, type):
        # A field may be unset: init=False, or a slot that was deleted.
        return [(f.name, getattr(x, f.name)) for f in fields(x) if hasattr(x, f.name)]
    return ()


def extract_matching_values(
    x: Tree,
    predicate: Callable[[Any], bool],
    return_lists_as_dicts: bool = False,  # noqa: FBT001, FBT002 - the seeds' signature
) -> tuple[Tree, Tree]:
    """Split a tree into its matching and its other leaves; both keep the hierarchy.

    Empty dicts and lists go to the second tree. A list of which only some elements go to a tree
    becomes a ``ListPart`` there: a shorter list whose elements still know their positions, so that
    ``merge`` can restore the original.

    Args:
        x: Dict or list to split; it is not changed.
        predicate: Decides for each leaf whether it matches.
        return_lists_as_dicts: Turn all lists, in both trees, into dicts from index to element.

    Returns:
        The tree of matching leaves and the tree of all others.

    Raises:
        ValueError: If ``x`` is neither a dict nor a list.
    """
    if not isinstance(x, dict | list):
        raise ValueError(f"Unexpected top-level object type: {type(x)}")  # noqa: TRY004 - contract
    matching: dict[Any, Any] = {}
    rest: dict[Any, Any] = {}
    items = x.items() if isinstance(x, dict) else zip(positions(x), x, strict=True)
    for k, v in items:
        if isinstance(v, dict | list):
            match, other = extract_matching_values(v, predicate, return_lists_as_dicts)
            if match:
                matching[k] = match
            if other or not v:
                rest[k] = other
        elif predicate(v):
            matching[k] = v
        else:
            rest[k] = v
    if isinstance(x, dict) or return_lists_as_dicts:
        return matching, rest
    return _as_list(matching, full_length(x)), _as_list(rest, full_length(x))


def _as_list(elements: dict[int, Any], length: int) -> list[Any]:
    ordered = dict(sorted(elements.items()))
    if len(ordered) == length:
        return list(ordered.values())
    return ListPart(ordered.values(), positions=ordered, length=length)


def merge(x1: Any, x2: Any, key: Path = ()) -> Any:
    """Merge ``x2`` into ``x1`` recursively; inverse of ``extract_matching_values``.

    Dicts are merged in place. Lists of equal length are merged element by element, parts of a list
    by the positions of their elements; two parts that make a whole give a new plain list, so use
    the returned value.

    Args:
        x1: Tree that receives the values.
        x2: Tree whose values are added.
        key: Path to ``x1`` and ``x2``; used in messages only.

    Returns:
        The merged tree.

    Raises:
        ValueError: If a leaf is present in both trees, a container meets a leaf or a container of
            the other kind, or two lists are not of the same length.
    """
    if isinstance(x1, dict) and isinstance(x2, dict):
        for k, v2 in x2.items():
            x1[k] = merge(x1[k], v2, (*key, k)) if k in x1 else v2
        return x1
    if isinstance(x1, list) and isinstance(x2, list):
        return _merge_lists(x1, x2, key)
    raise ValueError(
        "Duplicate non-dict and non-list values encountered: "
        f"{_brief(x1)} and {_brief(x2)} (at level {key})"
    )


def _merge_lists(x1: list[Any], x2: list[Any], key: Path) -> list[Any]:
    length = full_length(x1)
    _check_lengths(length, full_length(x2), key)
    elements = dict(zip(positions(x1), x1, strict=True))
    for i, v2 in zip(positions(x2), x2, strict=True):
        elements[i] = merge(elements[i], v2, (*key, i)) if i in elements else v2
    if not isinstance(x1, ListPart):
        x1[:] = elements.values()
        return x1
    return _as_list(elements, length)


def matching_items(x1: list[Any], x2: Tree, key: Path = ()) -> list[tuple[int, int, Any]]:
    """Find the elements of ``x1`` that those of ``x2`` belong to.

    Args:
        x1: List, or part of one.
        x2: List of the same whole length, part of one, or dict from position to element.
        key: Path to both; used in messages only.

    Returns:
        ``(index in x1, position in the whole list, element of x2)`` for each element of ``x2``.

    Raises:
        ValueError: If the lengths differ, or ``x1`` has no such element.
    """
    length = full_length(x1)
    if isinstance(x2, list):
        _check_lengths(length, full_length(x2), key)
        x2 = dict(zip(positions(x2), x2, strict=True))
    index_of = {position: index for index, position in enumerate(positions(x1))}
    for k in x2:
        if not isinstance(k, int):
            raise ValueError(  # noqa: TRY004 - contract
                f"Invalid dict key {k!r} non-integer type encountered in a list-dict merge "
                f"at level {key}"
            )
        if k not in index_of:
            raise ValueError(
                f"Dict key {k} out of bound for list of length {len(x1)} (encountered at "
                f"level {key})"
            )
    return [(index_of[k], k, v) for k, v in x2.items()]


def _check_lengths(length1: int, length2: int, key: Path) -> None:
    if length1 != length2:
        raise ValueError(
            f"Cannot merge two lists with different lengths ({length1} and {length2}, "
            f"encountered at level {key})"
        )


def _brief(x: Any) -> str:
    text = f"{type(x).__name__}"
    if isinstance(x, torch.Tensor):
        return f"{text} of shape {tuple(x.shape)}"
    return f"{text} {repr(x)[:MAX_PRINTED_CHARS]}"


def map_reduce(
    xs: Iterable[Any],
    key_fn: Callable[[Any], Hashable] = lambda x: x,
    value_fn: Callable[[Any], Any] = lambda x: x,
    reduce_fn: Callable[[list[Any]], Any] = lambda x: x,
) -> dict[Any, Any]:
    """Group ``value_fn(x)`` by ``key_fn(x)`` and apply ``reduce_fn`` to each group's list.

    Values keep their order within a group, groups that of their first values.
    """
    groups: defaultdict[Hashable, list[Any]] = defaultdict(list)
    for x in xs:
        groups[key_fn(x)].append(value_fn(x))
    return {k: reduce_fn(values) for k, values in groups.items()}


def inspect_types(x: Any, prefix: Path = (), indent: int = 4) -> None:
    """Print the tree with the type of each leaf and the beginning of its value."""
    margin = " " * (indent * len(prefix))
    if not isinstance(x, dict | list):
        text = repr(x) if not isinstance(x, torch.Tensor) else f"{x.dtype} {tuple(x.shape)}"
        shown = text if len(text) <= MAX_PRINTED_CHARS else f"{text[:MAX_PRINTED_CHARS]}..."
        print(f"{type(x)}: {shown}")  # noqa: T201 - printing is its purpose
        return
    print()  # noqa: T201 - printing is its purpose
    items = x.items() if isinstance(x, dict) else zip(positions(x), x, strict=True)
    for k, v in items:
        name = f"[{k}]" if isinstance(x, list) else str(k)
        print(f"{margin}> {name}: ", end="")  # noqa: T201 - printing is its purpose
        inspect_types(v, (*prefix, k), indent)


def diff(
    x1: Any, x2: Any, prefix: Path = ()
) -> tuple[list[Path], list[Path], list[tuple[Path, type, type]]]:
    """Compare two trees.

    Tensors differ when shape or any element does, whatever dtype they have and wherever they are
    stored: ones of two dtypes are equal. Elements with the same bits are equal, so a tensor with
    NaN does not differ from its own copy; floats compare likewise. Tuples and dataclasses are
    leaves, compared as a whole by the same rules; a ``replica_id`` does not count, because
    replicas are equal by definition.

    Args:
        x1: Left tree.
        x2: Right tree.
        prefix: Path to both; put before each reported path.

    Returns:
        Paths only in the left tree, paths only in the right tree, and
        ``(path, type on the left, type on the right)`` of each place where the values differ.
    """
    if isinstance(x1, dict) and isinstance(x2, dict):
        left, right = x1, x2
    elif isinstance(x1, list) and isinstance(x2, list):
        left, right = (dict(zip(positions(x), x, strict=True)) for x in (x1, x2))
    else:
        return [], [], [] if _leaves_equal(x1, x2) else [(prefix, type(x1), type(x2))]
    only_left = [(*prefix, k) for k in left if k not in right]
    only_right = [(*prefix, k) for k in right if k not in left]
    mismatch = []
    for k, v1 in left.items():
        if k in right:
            below = diff(v1, right[k], (*prefix, k))
            only_left += below[0]
            only_right += below[1]
            mismatch += below[2]
    return only_left, only_right, mismatch


def _leaves_equal(x1: Any, x2: Any) -> bool:
    if x1 is x2:
        return True
    if isinstance(x1, tuple) and isinstance(x2, tuple):
        return len(x1) == len(x2) and not any(any(diff(a, b)) for a, b in zip(x1, x2, strict=True))
    if type(x1) is type(x2) and _compares_by_fields(x1):
        names = (f.name for f in fields(x1) if f.compare and f.name != "replica_id")
        return not any(any(diff(getattr(x1, n, None), getattr(x2, n, None))) for n in names)
    try:
        if isinstance(x1, torch.Tensor) and isinstance(x2, torch.Tensor):
            return _tensors_equal(x1.detach(), x2.detach())
        return _compare_equal(x1, x2)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False  # not comparable, so not equal


def _compares_by_fields(x: Any) -> bool:
    # A class of dataclasses is an object like any other, and `eq=False` asks for identity.
    params = getattr(type(x), "__dataclass_params__", None)
    return params is not None and bool(params.eq)


def _compare_equal(x1: Any, x2: Any) -> bool:
    unequal = x1 != x2
    both_nan = (x1 != x1) & (x2 != x2)  # noqa: PLR0124 - only NaN is unlike itself
    if not hasattr(unequal, "any"):
        return bool(not unequal or both_nan)
    # Arrays compare element by element, and a shape may broadcast.
    same_shape = getattr(x1, "shape", ()) == getattr(x2, "shape", ())
    return bool(same_shape and not (unequal & ~both_nan).any())


def strided_parts(x: torch.Tensor) -> list[torch.Tensor] | None:
    """Return the plain tensors that a sparse, nested or quantised one consists of.

    None for a plain tensor. The bytes of the others cannot be viewed: torch refuses, or crashes.
    """
    if x.is_nested:
        return list(x.unbind())
    if x.is_quantized:
        return _quantised_parts(x)
    return None if x.layout is torch.strided else _sparse_parts(x)


def _quantised_parts(x: torch.Tensor) -> list[torch.Tensor]:
    if x.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        settings = [float(x.q_scale()), float(x.q_zero_point())]
        return [x.int_repr(), torch.tensor(settings, dtype=torch.float64)]
    axis = torch.tensor(x.q_per_channel_axis())
    return [x.int_repr(), x.q_per_channel_scales(), x.q_per_channel_zero_points(), axis]


def _sparse_parts(x: torch.Tensor) -> list[torch.Tensor]:
    if x.layout is torch.sparse_coo:
        x = x.coalesce()
        return [x.indices(), x.values()]
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [x.crow_indices(), x.col_indices(), x.values()]
    if x.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [x.ccol_indices(), x.row_indices(), x.values()]
    return [x.to_dense()]


def _parts_equal(
    x1: torch.Tensor, x2: torch.Tensor, parts1: list[torch.Tensor], parts2: list[torch.Tensor]
) -> bool:
    kinds = [(x.is_nested, x.is_quantized, x.layout) for x in (x1, x2)]
    return (
        kinds[0] == kinds[1]
        and (x1.is_nested or x1.shape == x2.shape)
        and len(parts1) == len(parts2)
        and all(_tensors_equal(a, b) for a, b in zip(parts1, parts2, strict=True))
    )


def _tensors_equal(x1: torch.Tensor, x2: torch.Tensor) -> bool:
    parts1, parts2 = strided_parts(x1), strided_parts(x2)
    if parts1 is not None or parts2 is not None:
        both = parts1 is not None and parts2 is not None
        return both and _parts_equal(x1, x2, parts1 or [], parts2 or [])
    if x1.is_meta or x2.is_meta:  # no elements that could differ, if both are
        return (x1.is_meta, x1.shape, x1.dtype) == (x2.is_meta, x2.shape, x2.dtype)
    return x1.shape == x2.shape and _elements_equal(x1, x2)


def _elements_equal(x1: torch.Tensor, x2: torch.Tensor) -> bool:
    if x1.device != x2.device:
        x1, x2 = x1.cpu(), x2.cpu()
    if x1.dtype != x2.dtype:
        return _numbers_equal(x1, x2)
    # Complex numbers are compared as pairs: not every complex type can do more than be viewed.
    dtype = x1.dtype.to_real() if x1.dtype.is_complex else x1.dtype
    a, b = _bytes_of(x1, dtype), _bytes_of(x2, dtype)
    other_bits = (a != b).any(dim=1)
    if not other_bits.any():
        return True
    if not dtype.is_floating_point or dtype == torch.float4_e2m1fn_x2:  # packed; no arithmetic
        return False
    # Other bits may still be equal numbers: 0.0 and -0.0. Any float is exact in the widest type.
    numbers = (x[other_bits].reshape(-1).view(dtype).to(torch.float64) for x in (a, b))
    return torch.equal(*numbers)


def _numbers_equal(x1: torch.Tensor, x2: torch.Tensor) -> bool:
    """Whether tensors of two dtypes have equal elements; False where torch cannot tell."""
    dtypes = (x1.dtype, x2.dtype)
    unsigned = torch.uint64 in dtypes
    if any(dtype.is_complex for dtype in dtypes):
        common = torch.complex128
    elif any(dtype.is_floating_point for dtype in dtypes):
        common = torch.float64
    else:
        common = torch.int64
    try:
        a, b = x1.to(common), x2.to(common)
    except (RuntimeError, TypeError):  # packed and quantised kinds
        return False
    equal = a == b
    if common is torch.int64 and unsigned:
        equal &= a >= 0  # beyond, a number of 64 bits without sign looks negative
    elif common is not torch.int64:
        equal |= a.isnan() & b.isnan()
    return bool(equal.all())


def _bytes_of(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    flat = x.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).reshape(-1, dtype.itemsize)
