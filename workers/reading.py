"""One sweep over memory on a CPU, as fast as it goes: what a pass that reads all weights could reach at best."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numba import carray, cfunc, njit, types  # type: ignore[attr-defined]

from dfbench.workers import product_kernels, team, vectors
from dfbench.workers.product_kernels import AHEAD
from dfbench.workers.team import Team, asked, digest
from dfbench.workers.vectors import LANES, floats_at, fused, load, prefetch, splat, sums, words_at, zeros

_FIELDS = ("number", "size", "start", "blocks", "totals")
_BLOCK = 8 * LANES
"""Numbers that are read between two looks at the clock of the loop: two lines of memory for each of four sums."""


@njit(nogil=True)
def added(start, first, last):  # type: ignore[no-untyped-def]
    """The sum of blocks `first` to `last` of float32 numbers."""
    a, b, c, d = zeros(), zeros(), zeros(), zeros()
    one = splat(np.float32(1))
    for block in range(first, last):
        place = start + 4 * _BLOCK * block
        for line in range(0, 4 * _BLOCK, 64):
            prefetch(place + AHEAD + line)
        for half in range(2):
            here = place + 16 * LANES * half
            a, b = fused(one, load(here), a), fused(one, load(here + 4 * LANES), b)
            c, d = fused(one, load(here + 8 * LANES), c), fused(one, load(here + 12 * LANES), d)
    one, two, three, four = sums(a, b, c, d)
    return one + two + three + four


def _compiled(sources: int) -> Any:
    @cfunc(types.void(types.intp), cache=True)
    def run(address):  # type: ignore[no-untyped-def]
        it = carray(words_at(address), 5)
        number, size = asked(it[0]), asked(it[1])
        if sources:  # See `team.digest`.
            carray(floats_at(it[4]), size)[number] = added(it[2], it[3] * number // size, it[3] * (number + 1) // size)

    return run


_run = _compiled(digest(team, vectors, product_kernels, sys.modules[__name__]))


def read(by: Team, start: int, size: int, threads: int) -> float:
    """The sum of the float32 numbers in `size` bytes from address `start` on, whole blocks of 512 bytes."""
    totals = np.zeros(threads, np.float32)
    words = np.array([by.number, by.size, start, size // (4 * _BLOCK), totals.ctypes.data], np.int64)
    by.start(_run.address, words.ctypes.data, threads)
    return float(totals.sum())
