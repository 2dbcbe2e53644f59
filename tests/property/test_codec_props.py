"""Whatever the table lists comes back equal and of the same type, through real JSON."""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime as dt
import json
import math
import pathlib
import types
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt._codec import decode, encode, iter_pickled
from dist_ckpt.errors import ConfigError, CorruptedCheckpointError, UnsafeContentError

OFFSETS = st.timedeltas(min_value=dt.timedelta(hours=-23), max_value=dt.timedelta(hours=23)).map(
    dt.timezone
)
ZONES = st.none() | OFFSETS
SURROGATES = st.text(st.characters(categories=["Cs", "L", "So"]), max_size=6)
HASHABLE_ATOMS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | SURROGATES
    | st.binary(max_size=6)
    | st.complex_numbers()
    | st.decimals(allow_nan=False)
    | st.fractions()
    | st.uuids()
    | st.datetimes(timezones=ZONES)
    | st.times(timezones=ZONES)
    | st.dates()
    | st.timedeltas()
    | st.sampled_from(
        [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.device("cuda", 1)]
        + [torch.Size([2, 0]), pathlib.PurePosixPath("a/b"), pathlib.Path("x"), 2**70, -(2**63)]
        + [pathlib.PureWindowsPath("c:\\x"), range(3, 9, 2), "$", "$$tensor", "\ud83d\ude00"]
    )
)
SCALARS = st.sampled_from(
    [np.float32(1.5), np.int8(-3), np.uint64(2**64 - 1), np.bool_(1), np.complex64(1j)]
    + [np.datetime64("2024-01-01T00:00:01", "ms"), np.float16("nan"), np.longdouble("0.1")]
)
ARRAYS = st.sampled_from(
    [np.arange(6).reshape(2, 3)[:, ::2], np.zeros((0, 3)), np.array(2.5), np.arange(900.0)]
    + [np.arange(4, dtype=">u2"), np.array(["2024"], "M8[D]"), np.broadcast_to(1.0, (600,))]
)
KEYS = st.recursive(
    HASHABLE_ATOMS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=3,
)  # fmt: skip
ATTRIBUTES = st.dictionaries(st.text(max_size=4), st.integers(), max_size=3)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pairs = st.dictionaries(KEYS, inner, max_size=4)
    return (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.just("$x"), inner, max_size=4)
        | pairs
        | pairs.map(collections.OrderedDict)
        | pairs.map(lambda d: collections.defaultdict(list, d))
        | pairs.map(lambda d: collections.defaultdict(None, d))
        | pairs.map(collections.Counter)
        | st.sets(KEYS, max_size=4)
        | st.builds(collections.deque, st.lists(inner, max_size=3), st.none() | st.just(5))
        | st.builds(slice, inner, inner, inner)
    )


VALUES = st.recursive(
    HASHABLE_ATOMS
    | SCALARS
    | ARRAYS
    | st.binary(max_size=4).map(bytearray)
    | ATTRIBUTES.map(lambda d: argparse.Namespace(**d))
    | ATTRIBUTES.map(lambda d: types.SimpleNamespace(**d))
    | st.sampled_from([torch.arange(3), torch.tensor(float("nan")), torch.zeros(0, 2)]),
    containers,
    max_leaves=10,
)


def same(a: Any, b: Any) -> bool:  # noqa: C901, PLR0911, PLR0912 - one line a type
    """Equal in type, value and order; any NaN equals any, -0.0 is not 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and not isinstance(a, np.generic):
        if math.isnan(a) or math.isnan(b):  # sign and payload of a NaN are not kept
            return math.isnan(a) and math.isnan(b)
        return a == b and math.copysign(1, a) == math.copysign(1, b)
    if isinstance(a, complex) and not isinstance(a, np.generic):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, np.longdouble):  # its bytes include padding, which holds anything
        return bool(a == b)
    if isinstance(a, np.ndarray | np.generic):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(
            a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)
        )
    if isinstance(a, dict):
        extra = [getattr(x, "default_factory", None) for x in (a, b)]
        return extra[0] is extra[1] and same(list(a.items()), list(b.items()))
    if isinstance(a, set | frozenset):
        rest = list(b)
        for item in a:
            hit = next((i for i, other in enumerate(rest) if same(item, other)), None)
            if hit is None:
                return False
            rest.pop(hit)
        return not rest
    if isinstance(a, collections.deque) and a.maxlen != b.maxlen:
        return False
    if isinstance(a, list | tuple | collections.deque):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, slice):
        return same([a.start, a.stop, a.step], [b.start, b.stop, b.step])
    if isinstance(a, dt.datetime | dt.time):
        return a == b and (a.fold, a.utcoffset()) == (b.fold, b.utcoffset())
    if isinstance(a, argparse.Namespace | types.SimpleNamespace):
        return same(vars(a), vars(b))
    return bool(a == b) and str(a) == str(b)


@given(VALUES)
def test_values_come_back_with_their_types(value: Any) -> None:
    """Through strict JSON text, without pickle."""
    encoded = encode(value)

    text = json.dumps(encoded.document, allow_nan=False)

    assert not list(iter_pickled(encoded.document))
    assert same(decode(json.loads(text), encoded.tensors), value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=3)
            | st.sampled_from(
                [
                    "$tuple",
                    "$dict",
                    "$ndarray",
                    "$tensor",
                    "$dtype",
                    "$set",
                    "$datetime",
                    "$parameter",
                ]
                + [
                    "$enum",
                    "$named_tuple",
                    "$config",
                    "$own",
                    "$sparse",
                    "$type",
                    "$zone",
                    "$random",
                ]
                + ["$pattern", "$timezone", "$numpy_dtype", "$array", "$known_dict", "$generator"]
                + ["$defaultdict", "$pickle", "$scalar", "$size", "$bytes", "$range", "$counter"]
            ),
            inner,
            max_size=2,
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_any_document_decodes_or_is_refused_by_name(document: Any) -> None:
    """No damage brings out another error than those of the tree.

    A time zone that the system does not have is its user's to install.
    """
    with contextlib.suppress(ConfigError, CorruptedCheckpointError, UnsafeContentError):
        decode(document, (torch.zeros(2),))
