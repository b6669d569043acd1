"""Where the n-grams of one growing text occurred, for several n at once, in hash tables that compile (numba).

A table entry is only the position after an occurrence; the n-gram itself is read back from the text. That is a tenth of
the memory of a dictionary of tuples, so that a look-up costs nearly the same in a text of 100,000 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit


class NgramIndex:
    """Reads tokens; after each `read`, `n` and `end` say what the text's last tokens repeat.

    n: the longest of the lengths for which the last n tokens occurred before, 0 for none. end: the position after the
    first such occurrence, or after the latest where `recent` is set. For each n in `lengths` (longest first), an
    occurrence counts once so many tokens follow it as `delays` says (at least 1).
    """

    def __init__(self, lengths: Sequence[int], delays: Sequence[int], recent: bool, room: int) -> None:
        self.n = self.end = 0
        self._length = 0
        self._rules = np.array([lengths, delays], np.int64)
        self._recent = recent
        self._allocate(room)

    def read(self, tokens: Sequence[int]) -> None:
        """Append these tokens."""
        before, after = self._length, self._length + len(tokens)
        if after > self._room:
            old = self._text[:before]
            self._allocate(2 * after)
            self._text[:before] = old
            index(self._text, self._tables, self._rules, self._recent, 0, before)
        text = self._text
        if after - before > 64:
            text[before:after] = tokens
        else:
            for i, token in enumerate(tokens, before):
                text[i] = token
        self._length = after
        self.n, self.end = index(text, self._tables, self._rules, self._recent, before, after)

    def nbytes(self) -> int:
        """Bytes held by the arrays."""
        return self._text.nbytes + self._tables.nbytes

    def _allocate(self, room: int) -> None:
        self._room = room
        self._text = np.zeros(room, np.int32)
        self._tables = np.zeros((self._rules.shape[1], 1 << (2 * room).bit_length()), np.int32)


@njit(cache=True, nogil=True)
def index(text, tables, rules, recent, before, after):  # type: ignore[no-untyped-def]
    """Enter what the tokens from `before` to `after` complete; returns n and end for the text's last tokens."""
    for length in range(before + 1, after + 1):
        for row in range(len(tables)):
            n, end = rules[0, row], length - rules[1, row]
            if end >= n:
                slot = find(text, tables[row], n, end)
                if recent or tables[row, slot] == 0:
                    tables[row, slot] = end
    for row in range(len(tables)):
        n = rules[0, row]
        if n < after:
            end = tables[row, find(text, tables[row], n, after)]
            if end > 0:
                return n, end
    return 0, 0


@njit(cache=True, nogil=True)
def find(text, table, n, end):  # type: ignore[no-untyped-def]
    """The slot of the n-gram that ends before `end`: its own, or the free one where it belongs."""
    mixed = np.uint64(n)
    for i in range(end - n, end):
        mixed = (mixed ^ np.uint64(text[i])) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    mask = len(table) - 1
    slot = np.int64(mixed & np.uint64(mask))
    while table[slot] != 0:
        other, same = table[slot], True
        for i in range(1, n + 1):
            if text[other - i] != text[end - i]:
                same = False
                break
        if same:
            break
        slot = (slot + 1) & mask
    return slot
