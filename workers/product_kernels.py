"""Products of a few rows with the rows of a weight, as fast as the weight can be read.

Such a product is bound by reading, so what matters is that reading never stops: it asks for the weights that it will
need some kilobytes later, as a processor by itself does not across the ends of rows and pages. The sums of a row have
one order, whatever the other rows (see `vectors`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.extending import overload

from dfbench.workers import tiles
from dfbench.workers.row_kernels import COMPILED, rounded, value, widened
from dfbench.workers.vectors import (
    LANES,
    floats_at,
    fused,
    halves_at,
    load,
    load_halves,
    load_pairs,
    paired,
    pairs_are_multiplied,
    prefetch,
    store_four,
    store_four_halves,
    sums,
    zeros,
)

AHEAD = 4096
"""Bytes between what a product reads and what it asks for, at least."""
TILE = 4
"""Rows of weights, and rows of states, that are multiplied at a time."""
DOT, TILES = pairs_are_multiplied(), tiles.available()
"""What this processor has: products of bfloat16 as they are; tile registers. Numba leaves out what is not there."""
COVER = 2 * LANES if DOT else LANES
"""Columns that a product takes at a time."""
STATE = np.dtype(np.uint16 if DOT else np.float32)
"""What is multiplied by weights: bfloat16 as they are where the processor takes them so, else widened."""
STATE_BYTES = STATE.itemsize
states_at = halves_at if DOT else floats_at
load_weights = load_pairs if DOT else load_halves
load_states = load_pairs if DOT else load
added = paired if DOT else fused


@njit(**COMPILED)
def rest(weight, states, first, size):  # type: ignore[no-untyped-def]
    """The end of a product of two rows that no whole vectors cover."""
    total = np.float32(0)
    row, factors = carray(halves_at(weight), size), carray(states_at(states), size)
    for at in range(first, size):
        total += widened(row[at]) * value(factors[at])
    return total


@njit(**COMPILED)
def four(weight, stride, size, states, ahead):  # type: ignore[no-untyped-def]
    """Products of four rows of weights, `stride` bytes apart, with one row of states."""
    a, b, c, d = zeros(), zeros(), zeros(), zeros()
    whole = size // COVER * COVER
    for at in range(0, whole, COVER):
        place = weight + 2 * at
        if ahead:
            for row in range(TILE):
                prefetch(place + row * stride + ahead)
        factors = load_states(states + STATE_BYTES * at)
        a = added(load_weights(place), factors, a)
        b = added(load_weights(place + stride), factors, b)
        c = added(load_weights(place + 2 * stride), factors, c)
        d = added(load_weights(place + 3 * stride), factors, d)
    one, two, three, last = sums(a, b, c, d)
    if whole < size:
        one += rest(weight, states, whole, size)
        two += rest(weight + stride, states, whole, size)
        three += rest(weight + 2 * stride, states, whole, size)
        last += rest(weight + 3 * stride, states, whole, size)
    return one, two, three, last


@njit(**COMPILED)
def sixteen(weight, stride, size, states, ahead):  # type: ignore[no-untyped-def]
    """The same with four rows of states, which follow one another: each weight is loaded once for all four. `size` is a
    multiple of COVER."""
    a, b, c, d = zeros(), zeros(), zeros(), zeros()
    e, f, g, h = zeros(), zeros(), zeros(), zeros()
    i, j, k, l = zeros(), zeros(), zeros(), zeros()  # noqa: E741
    m, n, o, p = zeros(), zeros(), zeros(), zeros()
    apart = STATE_BYTES * size
    for at in range(0, size, COVER):
        place, factor = weight + 2 * at, states + STATE_BYTES * at
        if ahead:
            for row in range(TILE):
                prefetch(place + row * stride + ahead)
        one, two = load_weights(place), load_weights(place + stride)
        three, last = load_weights(place + 2 * stride), load_weights(place + 3 * stride)
        factors = load_states(factor)
        a, b = added(one, factors, a), added(two, factors, b)
        c, d = added(three, factors, c), added(last, factors, d)
        factors = load_states(factor + apart)
        e, f = added(one, factors, e), added(two, factors, f)
        g, h = added(three, factors, g), added(last, factors, h)
        factors = load_states(factor + 2 * apart)
        i, j = added(one, factors, i), added(two, factors, j)
        k, l = added(three, factors, k), added(last, factors, l)  # noqa: E741
        factors = load_states(factor + 3 * apart)
        m, n = added(one, factors, m), added(two, factors, n)
        o, p = added(three, factors, o), added(last, factors, p)
    return sums(a, b, c, d), sums(e, f, g, h), sums(i, j, k, l), sums(m, n, o, p)


def put_four(out: Any, address: Any, numbers: Any) -> Any:
    """Put four numbers at an address within `out`, rounded where it holds bfloat16."""


@overload(put_four, inline="always")
def _put_four(out, address, numbers):  # type: ignore[no-untyped-def]
    if out.dtype == types.uint16:
        return lambda out, address, numbers: store_four_halves(address, numbers)
    return lambda out, address, numbers: store_four(address, numbers)


def put(out: Any, number: Any) -> Any:
    """A number as `out` holds it."""


@overload(put, inline="always")
def _put(out, number):  # type: ignore[no-untyped-def]
    if out.dtype == types.uint16:
        return lambda out, number: rounded(number)
    return lambda out, number: number


@njit(**COMPILED)
def product(weight, size, first, last, states, count, out):  # type: ignore[no-untyped-def]
    """out[row, at] = weight[at] · states[row], for `first` ≤ at < `last` and all `count` rows.

    `weight`, `states`: addresses of bfloat16 [.., size] and STATE [count, size], where rows up to a multiple of TILE
    may be read.
    """
    stride, apart = 2 * size, STATE_BYTES * size
    ahead = max(AHEAD, TILE * stride)
    start, line = out.ctypes.data, out.strides[0]
    whole = first + (last - first) // TILE * TILE
    for at in range(first, whole, TILE):
        place, row = weight + stride * at, 0
        while row < count:
            factors, into, left = states + apart * row, start + line * row + out.itemsize * at, count - row
            asks = ahead if row == 0 else 0
            if left > 2 and size % COVER == 0:
                a, b, c, d = sixteen(place, stride, size, factors, asks)
                put_four(out, into, a)
                put_four(out, into + line, b)
                put_four(out, into + 2 * line, c)
                if left > 3:
                    put_four(out, into + 3 * line, d)
                row += TILE
            else:
                put_four(out, into, four(place, stride, size, factors, asks))
                row += 1
    for at in range(whole, last):
        for row in range(count):
            out[row, at] = put(out, four(weight + stride * at, 0, size, states + apart * row, 0)[0])


@njit(**COMPILED)
def tile_product(weight, size, states, count, out, line):  # type: ignore[no-untyped-def]
    """Sixteen outputs of all rows, which begin at the address `out` and lie `line` bytes apart, float32. All but `line`
    and `count` as in `tiles`."""
    row, steps, apart = 0, size // tiles.DEPTH, 2 * size
    while row < count:
        some = min(tiles.MOST, (count - row + tiles.SIDE - 1) // tiles.SIDE)
        rows, into = states + apart * row, out + line * row
        if some == 1:
            tiles.one(weight, rows, apart, into, line, steps)
        elif some == 2:
            tiles.two(weight, rows, apart, into, line, steps)
        elif some == 3:
            tiles.three(weight, rows, apart, into, line, steps)
        elif some == 4:
            tiles.four(weight, rows, apart, into, line, steps)
        elif some == 5:
            tiles.five(weight, rows, apart, into, line, steps)
        else:
            tiles.six(weight, rows, apart, into, line, steps)
        row += some * tiles.SIDE
