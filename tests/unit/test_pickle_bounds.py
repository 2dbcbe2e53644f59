"""What a pickle may cost: honest ones pass, bombs do not, and neither takes long to tell."""

from __future__ import annotations

import collections
import contextlib
import pickle
import random
import struct
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt._formats.torch_dist.pickle_bounds import check_pickle

SHARED = (1, 2, 3)
HONEST = {
    "plain": [1, -5, 2**70, 1.5, None, True, "text", b"bytes", bytearray(b"x")],
    "nested": {"a": [{"b": ({1, 2}, frozenset({3}))}], ("k", (1, 2)): [[[]]]},
    "shared": [SHARED] * 1000,
    "keys": {(i, (i, "x")): i for i in range(2000)},
    "instances": [PurePosixPath("a/b"), collections.OrderedDict(a=1), complex(1, 2), range(3)],
    "numpy": [np.arange(100), np.float32(1), np.random.RandomState(1).get_state()],
    "torch": [torch.float32, torch.Size([2, 3])],
    "random": random.Random(1).getstate(),  # noqa: S311 - no secret
    "long": list(range(20_000)),
}


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("value", HONEST.values(), ids=HONEST.keys())
def test_honest_pickles_pass(value: Any, protocol: int) -> None:
    """Whatever a program pickles, in every protocol."""
    check_pickle(pickle.dumps(value, protocol))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.tuples(st.integers(), st.text()), inner)
    ),
    max_leaves=30,
)


@given(VALUES, st.integers(0, 5))
def test_any_value_passes(value: Any, protocol: int) -> None:
    """Shared or not, large or small."""
    check_pickle(pickle.dumps([value, value], protocol))


@given(VALUES, st.integers(0, 5), st.integers(0), st.integers(1, 255))
def test_damage_is_told_or_passes(value: Any, protocol: int, at: int, change: int) -> None:
    """Nothing but ValueError comes out of a changed pickle."""
    data = bytearray(pickle.dumps(value, protocol))
    data[at % len(data)] ^= change
    with contextlib.suppress(ValueError):
        check_pickle(bytes(data))


def doubled(count: int, end: bytes) -> bytes:
    """Return a pickle of 2^count references, ended in some way that visits them."""
    return b"\x80\x02}K\x01\x85" + b"2\x86" * count + end


BOMBS = {
    "wide-key": doubled(64, b"K\x01s."),
    "wide-keys": b"\x80\x02}(K\x01\x85" + b"2\x86" * 64 + b"K\x01u.",
    "wide-set": b"\x80\x04\x8f(K\x01\x85" + b"2\x86" * 64 + b"\x90.",
    "wide-frozenset": b"\x80\x04(K\x01\x85" + b"2\x86" * 64 + b"\x91.",
    "wide-call": b"\x80\x02ca\nb\nK\x01\x85" + b"2\x86" * 64 + b"R.",
    "wide-instances": b"\x80\x02ca\nb\nq\x00K\x01\x85" + b"h\x00)R\x85" + b"2\x86" * 64 + b".",
    "by-memo": b"\x80\x02)" + b"".join(b"q%ch%ch%c\x86" % (i, i, i) for i in range(64)) + b".",
    "deep-tuple": b"\x80\x02)" + b"\x85" * 5000 + b".",
    "deep-call": b"\x80\x02" + b"ca\nb\n" * 5000 + b")" + b"R\x85" * 4999 + b"R.",
    "one-key-often": b"\x80\x02}(" + b"K\x01" * 20_000 + b"tq\x00" + b"0" + b"h\x00Ns" * 20_000 + b".",
    "long-number-often": (
        b"\x80\x02}\x8b" + struct.pack("<I", 1 << 16) + b"\x01" * (1 << 16) + b"q\x000"
        + b"h\x00Ns" * 60_000 + b"."
    ),
    "memo": b"\x80\x02Nr\x00\x00\x00\x70.",
    "memo-in-text": b"Np1000000000\n.",
    "memo-below": b"Np-1\n.",
    "nothing-there": b"h\x07.",
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".",
    "text": b"X\xff\xff\xff\xffab.",
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"N.",
    "line": b"I" + b"1" * 100_000,
    "opcode": b"\x01.",
    "no-end": b"N",
    "nothing": b"",
    "no-mark": b"t.",
    "no-value": b"a.",
    "memo-of-nothing": b"q\x00.",
}  # fmt: skip


@pytest.mark.parametrize("data", BOMBS.values(), ids=BOMBS.keys())
def test_bombs_are_refused(data: bytes) -> None:
    """Few bytes, much time or memory; and pickles that are none."""
    with pytest.raises(ValueError, match="pickle"):
        check_pickle(data)
