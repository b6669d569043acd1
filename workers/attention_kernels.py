"""Attention of a few rows over kept keys and values, by all threads together."""

from __future__ import annotations

import numpy as np
from numba import carray, njit  # type: ignore[attr-defined]

from dfbench.workers.product_kernels import STATE_BYTES, TILE, product
from dfbench.workers.row_kernels import COMPILED, exponential, fitted, widened
from dfbench.workers.team import wait
from dfbench.workers.vectors import (
    LANES,
    bytes_at,
    floats_at,
    fused,
    halves_at,
    larger,
    load,
    load_halves,
    splat,
    store,
    sums,
    zeros,
)

_STEP = 2 * LANES
"""Columns of values that are mixed at a time."""


@njit(**COMPILED)
def highest(scores):  # type: ignore[no-untyped-def]
    """The maximum of a row."""
    size, start = len(scores), scores.ctypes.data
    whole = size // LANES * LANES
    tops = splat(np.float32(-np.inf))
    for at in range(0, whole, LANES):
        tops = larger(load(start + 4 * at), tops)
    lanes = np.empty(LANES, np.float32)
    store(lanes.ctypes.data, tops)
    top = np.float32(-np.inf)
    for number in lanes:
        top = max(top, number)
    for at in range(whole, size):
        top = max(top, scores[at])
    return top


@njit(**COMPILED)
def summed(scores, seen):  # type: ignore[no-untyped-def]
    """The sum of a row, of which `seen` tells which of the last ones count: the first, 17th, 33rd, … that count by
    themselves, and so on, so that those between them change nothing."""
    known, start = len(scores) - len(seen), scores.ctypes.data
    whole = known // LANES * LANES
    total, one = zeros(), splat(np.float32(1))
    for at in range(0, whole, LANES):
        total = fused(one, load(start + 4 * at), total)
    lanes = np.empty(LANES, np.float32)
    store(lanes.ctypes.data, total)
    rank = 0
    for at in range(whole, len(scores)):
        if at < known or seen[at - known]:
            lanes[rank % LANES] += scores[at]
            rank += 1
    total = load(lanes.ctypes.data)
    return sums(total, total, total, total)[0]


@njit(**COMPILED)
def weigh(scores, seen, scaling):  # type: ignore[no-untyped-def]
    """Scores of one row → e^(score - highest), 0 where hidden; returns their sum. `seen` tells of the last ones; what
    lies before is seen."""
    ends = scores[len(scores) - len(seen) :]
    for at in range(len(seen)):
        ends[at] = ends[at] if seen[at] else -np.inf
    top = highest(scores) * scaling
    for at in range(len(scores)):
        scores[at] = exponential(scores[at] * scaling - top)
    return summed(scores, seen)


@njit(**COMPILED)
def divided(states, by, out):  # type: ignore[no-untyped-def]
    """out = states / by, of one row."""
    for at in range(len(out)):
        out[at] = fitted(out, states[at] / by)


@njit(**COMPILED)
def mix(values, size, weights, lane, out):  # type: ignore[no-untyped-def]
    """out[row] = Σ weights[row, at] · values[at], for TILE rows and the columns of `out` from `lane` on, not more than
    fit two vectors. `values`: address of bfloat16 [window, size]; `weights` [TILE, window], `out` [TILE, …]."""
    window, width = weights.shape[1], min(_STEP, size - lane)
    if width == _STEP:
        a, b, c, d = zeros(), zeros(), zeros(), zeros()
        e, f, g, h = zeros(), zeros(), zeros(), zeros()
        for at in range(window):
            place = values + 2 * (at * size + lane)
            left, right = load_halves(place), load_halves(place + 2 * LANES)
            factor = splat(weights[0, at])
            a, e = fused(factor, left, a), fused(factor, right, e)
            factor = splat(weights[1, at])
            b, f = fused(factor, left, b), fused(factor, right, f)
            factor = splat(weights[2, at])
            c, g = fused(factor, left, c), fused(factor, right, g)
            factor = splat(weights[3, at])
            d, h = fused(factor, left, d), fused(factor, right, h)
        place, apart = out.ctypes.data, out.strides[0]
        store(place, a)
        store(place + apart, b)
        store(place + 2 * apart, c)
        store(place + 3 * apart, d)
        place += 4 * LANES
        store(place, e)
        store(place + apart, f)
        store(place + 2 * apart, g)
        store(place + 3 * apart, h)
        return
    held = carray(halves_at(values), (window, size))
    for column in range(width):
        for row in range(TILE):
            total = np.float32(0)
            for at in range(window):
                total += weights[row, at] * widened(held[at, lane + column])
            out[row, column] = total


@njit(**COMPILED)
def attention(it, layer, attended, number, size):  # type: ignore[no-untyped-def]
    """What each row attends to. All threads together, each with some keys, then some rows, then some columns.

    A unit is TILE rows that share a head of keys and values: rows are counted over the heads that share, row by row.
    """
    count, dim, window = it.rows, it.head_dim, it.slot + it.rows
    group = it.heads // it.kv_heads * count
    tiles = (group + TILE - 1) // TILE
    units, whole = it.kv_heads * tiles, 2 * it.capacity * dim
    seen = carray(bytes_at(it.seen), (count, count))
    scores = carray(floats_at(it.scores), (units * TILE, it.capacity))[:, :window]
    totals = carray(floats_at(it.totals), units * TILE)
    start = layer * it.kv_heads * whole
    parts = window // TILE
    begin, end = parts * number // size * TILE, window if number == size - 1 else parts * (number + 1) // size * TILE
    for unit in range(units):
        kv_head, first = unit // tiles, unit % tiles * TILE
        asked_for = it.queries + STATE_BYTES * (kv_head * group + first) * dim
        some = min(TILE, group - first)
        keys = it.keys + start + kv_head * whole
        product(keys, dim, begin, end, asked_for, some, scores[unit * TILE :])
    wait(it.barrier)
    for row in range(number, units * TILE, size):
        first = row // TILE % tiles * TILE + row % TILE
        if first < group:
            totals[row] = weigh(scores[row], seen[first % count], np.float32(it.scaling))
    wait(it.barrier)
    blocks = (dim + _STEP - 1) // _STEP
    mixed = np.empty((TILE, _STEP), np.float32)
    for part in range(number, units * blocks, size):
        unit, lane = part // blocks, part % blocks * _STEP
        kv_head, first = unit // tiles, unit % tiles * TILE
        values = it.values + start + kv_head * whole
        mix(values, dim, scores[unit * TILE : (unit + 1) * TILE], lane, mixed)
        for at in range(min(TILE, group - first)):
            head, row = (kv_head * group + first + at) // count, (first + at) % count
            column = head * dim + lane
            into = attended[row, column : column + min(_STEP, dim - lane)]
            divided(mixed[at], totals[unit * TILE + at], into)
