"""The two highest entries of rows of logits on a CPU, in one look at memory that the caches have lost.

A pass of a model reads all weights, so what follows it finds neither logits nor code in the caches. Three searches by
torch's operations take half a millisecond there, by numpy's, a few µs each in a loop of their own, still 200 µs; one
loop in machine code takes 100. It compares bits as whole numbers, of which a vector holds most: floats that are not
negative stand in their order, and negative ones the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.extending import intrinsic

from dfbench.workers.target import Evidence

FIELDS = 5
_BLOCK = 128


def _form(signed: Any, plain: Any, infinity: int) -> tuple[Any, Any, Any, int, int]:
    """How `_search` is told about a type: whole numbers as wide, 0 and the sign alone; the bits of -∞ and of +∞, beyond
    which, the sign aside, is NaN; and all bits but the sign."""
    size = int(np.iinfo(signed).max)
    return signed(0), plain(size + 1), plain(size + 1 + infinity), infinity, size


_FORMS = {
    torch.bfloat16: _form(np.int16, np.uint16, 0x7F80),
    torch.float16: _form(np.int16, np.uint16, 0x7C00),
    torch.float32: _form(np.int32, np.uint32, 0x7F80_0000),
    torch.float64: _form(np.int64, np.uint64, 0x7FF0_0000_0000_0000),
}


class HostTopTwo:
    """What `evidence.TopTwo` is on a device: one look at a pass's rows finds everything, and a job's numbers stay bits
    until they are read."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._found: list[list[int]] = []
        self._kept: list[list[int]] = []
        search(torch.zeros((1, 1), dtype=dtype))  # Compiles it, here and not within somebody's first step.

    def clear(self) -> None:
        """Begin a new job."""
        self._kept = []

    def look(self, rows: torch.Tensor) -> list[int]:
        """Ids of the highest entry of every row of a pass's logits [n, vocabulary], the first where several are."""
        self._dtype = rows.dtype
        self._found = search(rows)
        return [found[0] for found in self._found]

    def add(self, rows: torch.Tensor, chosen: Sequence[int]) -> None:
        """Append the rows `chosen` of the pass that was looked at last."""
        self._kept += [self._found[row] for row in chosen]

    def read(self) -> Evidence:
        """Everything added since `clear`."""
        table = np.array(self._kept, dtype=np.int64).reshape(-1, FIELDS)
        first, first_bits, second, second_bits, ties = table.T.copy()
        logits = values(first_bits, self._dtype), values(second_bits, self._dtype)
        return Evidence(first, logits[0], second, logits[1], ties.astype(np.int32))


def search(rows: torch.Tensor) -> list[list[int]]:
    """For every row [n, vocabulary]: id and bits of the highest entry, those of the highest beside it, and how many
    equal the highest.

    As by torch's `max`: the first of equal entries, and NaN before all else, which equals nothing. Where only -∞ is
    left, the second is entry 0.
    """
    count, length = rows.shape
    stride, step = rows.stride()
    if step != 1:
        return search(rows.contiguous())
    found = np.empty((count, FIELDS), dtype=np.int64)
    _search(*_FORMS[rows.dtype], rows.data_ptr(), stride * rows.itemsize, length, found)
    return found.tolist()


def values(bits: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The numbers of this type whose bits `search` found, as float32."""
    numbers = torch.from_numpy(bits.astype(_FORMS[dtype][0].dtype)).view(dtype)
    return numbers.float().numpy()


@intrinsic
def _pointer(typing: Any, form: Any, address: Any) -> Any:
    """An address as that of numbers like `form`."""
    wanted = types.CPointer(form)  # type: ignore[no-untyped-call]

    def convert(context: Any, builder: Any, _: Any, given: Any) -> Any:
        return builder.inttoptr(given[1], context.get_value_type(wanted))

    return wanted(form, address), convert


@njit(cache=True, nogil=True)
def _key(word, infinity, size):  # type: ignore[no-untyped-def]
    """A whole number in the order of the floats: zeros are equal, and NaN come last, all equal. `size`: all bits but
    the sign."""
    wide = np.int64(word)
    key = wide & size
    if key > infinity:
        return size
    return key if wide >= 0 else -key


@njit(cache=True, nogil=True)
def _reach(words, plain, sign, limit, infinity, size):  # type: ignore[no-untyped-def]
    """The highest key of a block, by what vectors tell: its extremes as numbers with and without sign."""
    high, most, least = words[0], plain[0], plain[0]
    for at in range(len(words)):
        high = max(high, words[at])
        most = max(most, plain[at])
        least = min(least, plain[at])
    if most > limit or high > infinity:
        return size
    return np.int64(high) if high >= 0 else -np.int64(least - sign)


@njit(cache=True, nogil=True)
def _search(zero, sign, limit, infinity, size, address, stride, length, found):  # type: ignore[no-untyped-def]
    """Most blocks hold nothing as high as the two highest before them."""
    for row in range(len(found)):
        words = carray(_pointer(zero, address + row * stride), (length,))  # type: ignore[call-arg]
        plain = carray(_pointer(sign, address + row * stride), (length,))
        first, second, ties = 0, 0, 0
        best = next_best = -infinity - 1
        for start in range(0, length, _BLOCK):
            block = words[start : start + _BLOCK]
            reach = _reach(block, plain[start : start + _BLOCK], sign, limit, infinity, size)
            if reach <= next_best and reach != best:
                continue
            for place in range(len(block)):
                key = _key(block[place], infinity, size)
                if key > best:
                    if ties:
                        next_best, second = best, first
                    best, first, ties = key, start + place, 1
                elif key >= best:
                    ties += 1
                    if key > next_best:
                        next_best, second = key, start + place
                elif key > next_best:
                    next_best, second = key, start + place
        found[row, 0], found[row, 1] = first, words[first]
        found[row, 2], found[row, 3] = second, words[second]
        found[row, 4] = 0 if best == size else ties
        if next_best <= -infinity:
            found[row, 2], found[row, 3] = 0, np.int64(infinity) - size - 1
