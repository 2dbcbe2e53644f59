"""What a pickle may cost: checked on its opcodes before anything is made of it.

Here: one pass over the opcodes. Not here: unpickling. Called on every rank.

A few bytes of a pickle can ask for any time and memory: an index into the unpickler's memo, which
is an array as long as its highest index; a length that the bytes behind it do not have; a tuple of
two references to a tuple of two references and so on, whose hash visits all 2^n; a tuple in a tuple
and so on, whose hash overflows the stack. So each immutable value is weighed with all that it
refers to, as often as it does; and whatever visits a value (a call, a key of a dict, an item of a
set) is charged its weight. Both are bounded by the length of the pickle: what a program pickles
honestly is spelled out once, or nearly so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

__all__ = ["check_pickle"]

_ATOMS: Final = dict.fromkeys(b"N)]}\x88\x89\x8f\x97", 0) | {
    ord("K"): 1, ord("M"): 2, ord("J"): 4, ord("G"): 8, 0x82: 1, 0x83: 2, 0x84: 4,
}  # fmt: skip
"""Opcodes that push something small -> length of their argument."""
_LINES: Final = {**dict.fromkeys(b"FILSVP", 1), ord("c"): 2}
"""Opcodes that push something written in so many lines."""
_COUNTED: Final = {
    ord("U"): 1, ord("C"): 1, 0x8C: 1, 0x8A: 1,
    ord("T"): 4, ord("X"): 4, ord("B"): 4, 0x8B: 4, 0x8D: 8, 0x8E: 8, 0x96: 8,
}  # fmt: skip
"""Opcodes that push bytes, text or a number -> width of the length before it."""
_LONGS: Final = frozenset((0x8A, 0x8B))
_BINPUT: Final = ord("q")
_BINGET: Final = ord("h")
_MEMOIZE: Final = 0x94
_SHORT_TEXT: Final = 0x8C
_STOP: Final = ord(".")
_ATOM: Final = (1, 0)
_DIGIT_NBYTES: Final = 8
_MAX_LINE_NBYTES: Final = 1 << 16
_FREE: Final = 1 << 16
_MAX_DEPTH: Final = 1 << 10


def check_pickle(data: bytes) -> None:
    """Raise if unpickling ``data`` could take more than in proportion to its length.

    Raises:
        ValueError: It could, or this is no pickle.
    """
    _Scan(data).run()


class _Scan:
    """One pass: a stack of weights and depths in place of values."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._limit = 4 * len(data) + _FREE
        self._spent = 0
        self._stack: list[tuple[int, int]] = []
        self._below: list[list[tuple[int, int]]] = []
        self._memo: dict[int, tuple[int, int]] = {}
        self._steps = self._table()

    def run(self) -> None:
        """Go through all opcodes; what most of them are is done here, without a call."""
        data, end, memo, steps = self._data, len(self._data), self._memo, self._steps
        stack, at = self._stack, 0
        while at < end:
            opcode = data[at]
            at += 1
            if opcode == _MEMOIZE and stack:
                memo[len(memo)] = stack[-1]
            elif opcode == _BINGET and at < end and data[at] in memo:
                stack.append(memo[data[at]])
                at += 1
            elif opcode in _ATOMS:
                at += _ATOMS[opcode]
                stack.append(_ATOM)
            elif opcode == _BINPUT and at < end and stack:
                memo[data[at]] = stack[-1]
                at += 1
            elif opcode == _SHORT_TEXT and at < end:
                at += 1 + data[at]
                stack.append(_ATOM)
            elif opcode == _STOP:
                return
            else:
                self._at = at
                step = steps.get(opcode)
                try:
                    self._push(opcode) if step is None else step()
                except (IndexError, KeyError) as error:
                    raise ValueError(f"no pickle: opcode {opcode} at {at - 1}") from error
                stack, at = self._stack, self._at
        raise ValueError("no pickle: it has no end")

    def _push(self, opcode: int) -> None:
        """Push bytes, text or a number of any length."""
        weight = 1
        if (width := _COUNTED.get(opcode)) is not None:
            nbytes = self._number(width)
            self._skip(nbytes)
            if opcode in _LONGS:
                weight += nbytes // _DIGIT_NBYTES
        else:
            self._skip_lines(_LINES[opcode])
        self._stack.append((weight, 0))

    def _skip(self, nbytes: int) -> None:
        self._at += nbytes
        if self._at > len(self._data):
            raise ValueError(f"no pickle: {nbytes} bytes are told of that are not there")

    def _number(self, width: int) -> int:
        start = self._at
        self._skip(width)
        return int.from_bytes(self._data[start : self._at], "little")

    def _line(self) -> bytes:
        start = self._at
        end = self._data.find(b"\n", start, start + _MAX_LINE_NBYTES)
        if end < 0:
            raise ValueError("no pickle: a line has no end")
        self._at = end + 1
        return self._data[start:end]

    def _skip_lines(self, count: int) -> None:
        for _ in range(count):
            self._line()

    def _pop_mark(self) -> list[tuple[int, int]]:
        items, self._stack = self._stack, self._below.pop()
        return items

    def _push_all(self, items: list[tuple[int, int]]) -> None:
        """Push what holds ``items`` and is hashed with them."""
        weight, depth = 1, 0
        for its_weight, its_depth in items:
            weight += its_weight
            depth = max(depth, its_depth)
        if weight > self._limit or depth >= _MAX_DEPTH:
            raise ValueError("a pickle that unfolds to much more than its own length")
        self._stack.append((weight, depth + 1))

    def _charge(self, items: list[tuple[int, int]]) -> None:
        for weight, _ in items:
            self._spent += weight
        if self._spent > self._limit:
            raise ValueError("a pickle that would take much longer than its own length")

    def _pop(self, count: int) -> list[tuple[int, int]]:
        stack = self._stack
        if len(stack) < count:
            raise IndexError
        items = stack[-count:]
        del stack[-count:]
        return items

    def _call(self, items: list[tuple[int, int]]) -> None:
        self._charge(items)
        self._push_all(items)

    def _get(self, number: int) -> None:
        self._stack.append(self._memo[number])

    def _put(self, number: int) -> None:
        if not 0 <= number <= len(self._data):
            raise ValueError(f"memo index {number} in a pickle of {len(self._data)} bytes")
        self._memo[number] = self._stack[-1]

    def _mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _set_items(self, items: list[tuple[int, int]]) -> None:
        self._charge(items[::2])

    def _new(self, items: list[tuple[int, int]]) -> None:
        """Push a list, dict or set: whatever visits it meets it once, and it has no hash."""
        del items
        self._stack.append((1, 0))

    def _set(self, items: list[tuple[int, int]]) -> None:
        self._charge(items)
        self._push_all(items)

    def _pop_any(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._pop_mark()

    def _dict(self) -> None:
        items = self._pop_mark()
        self._set_items(items)
        self._new(items)

    def _instance(self) -> None:
        self._skip_lines(2)
        self._call(self._pop_mark())

    def _table(self) -> dict[int, Callable[[], object]]:
        return {
            ord("("): self._mark,
            ord("0"): self._pop_any,
            ord("1"): self._pop_mark,
            ord("2"): lambda: self._stack.append(self._stack[-1]),
            ord("Q"): lambda: self._call(self._pop(1)),
            ord("R"): lambda: self._call(self._pop(2)),
            0x81: lambda: self._call(self._pop(2)),
            0x92: lambda: self._call(self._pop(3)),
            0x93: lambda: self._call(self._pop(2)),
            ord("o"): lambda: self._call(self._pop_mark()),
            ord("i"): self._instance,
            ord("a"): lambda: self._pop(1),
            ord("b"): lambda: self._pop(1),
            ord("e"): self._pop_mark,
            ord("u"): lambda: self._set_items(self._pop_mark()),
            0x90: lambda: self._charge(self._pop_mark()),
            ord("s"): lambda: self._set_items(self._pop(2)),
            ord("d"): self._dict,
            ord("l"): lambda: self._new(self._pop_mark()),
            ord("t"): lambda: self._push_all(self._pop_mark()),
            0x85: lambda: self._push_all(self._pop(1)),
            0x86: lambda: self._push_all(self._pop(2)),
            0x87: lambda: self._push_all(self._pop(3)),
            0x91: lambda: self._set(self._pop_mark()),
            ord("g"): lambda: self._get(int(self._line())),
            ord("h"): lambda: self._get(self._number(1)),
            ord("j"): lambda: self._get(self._number(4)),
            ord("p"): lambda: self._put(int(self._line())),
            ord("q"): lambda: self._put(self._number(1)),
            ord("r"): lambda: self._put(self._number(4)),
            0x94: lambda: self._put(len(self._memo)),
            0x80: lambda: self._skip(1),
            0x95: self._frame,
            0x98: lambda: None,
        }

    def _frame(self) -> None:
        nbytes = self._number(8)
        if self._at + nbytes > len(self._data):
            raise ValueError(f"no pickle: a frame of {nbytes} bytes that are not there")
