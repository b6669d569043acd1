"""Logits on a CPU, searched with numpy's vector instructions.

torch takes some 50 µs to find the maximum of 49,000 numbers of 16 bits, numpy two, and a step needs it three times.
numpy has no bfloat16. But read as whole numbers of 16 bits, floats that are not negative stand in order, and negative
ones in the opposite order, so whole numbers are what is searched.
"""

from __future__ import annotations

import numpy as np
import torch

_INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
"""Bits of +∞: with more, the sign aside, it is NaN."""
_SIGN = 0x8000
_SIZE = 0x7FFF  # All other bits.


class HostRows:
    """The rows [n, vocabulary] of a CPU tensor, of 16 bits, float32 or float64; the same memory, so that `blank`
    changes the tensor."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._half = rows.dtype == torch.float16
        self._infinity = _INFINITY.get(rows.dtype, 0)
        self._entries: np.ndarray = (rows.view(torch.int16) if self._infinity else rows).numpy()

    def __len__(self) -> int:
        return len(self._entries)

    def highest(self, row: int) -> int:
        """Index of the row's maximum as torch's `max` finds it: the first of equal ones, NaN before all else."""
        entries, infinity = self._entries[row], self._infinity
        at = int(entries.argmax())
        if not infinity:
            return at
        words = entries.view(np.uint16)
        top = entries[at]
        # The highest word is the NaN with a sign, if there is one, and else the lowest negative number.
        if top > infinity or words[words.argmax()] > _SIGN + infinity:
            return int(((words & _SIZE) > infinity).argmax())
        if top < 0:
            return int(words.argmin())
        # Zeros of both signs are equal.
        return at if top else int(((words & _SIZE) == 0).argmax())

    def value(self, row: int, at: int) -> float:
        """One entry."""
        entry = self._entries[row, at]
        if not self._infinity:
            return float(entry)
        return float(entry.view(np.float16) if self._half else np.int32(int(entry) << 16).view(np.float32))

    def blank(self, row: int, at: int) -> None:
        """Set an entry to -∞."""
        self._entries[row, at] = self._infinity - _SIGN if self._infinity else -np.inf

    def count(self, row: int, at: int) -> int:
        """How many of the row's entries equal this one, which is no NaN."""
        entries = self._entries[row]
        if self._infinity and not entries[at] & _SIZE:
            entries = entries & _SIZE  # Zeros of both signs are equal.
        return int(np.count_nonzero(entries == entries[at]))
