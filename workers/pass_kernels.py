"""A whole pass of a few rows through a decoder as one compiled function, which all threads run together.

Such a pass is bound by reading the weights, so what matters is that reading never stops: nothing is called in between,
and every product asks for the weights that it will need some kilobytes later, as a processor by itself does not across
the ends of rows and pages. A row's sums have one order, whatever the other rows (see `vectors`): a token's logits are
the same bits in every such pass, alone or at the end of a draft.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numba import carray, cfunc, from_dtype, njit, types  # type: ignore[attr-defined]

from dfbench.workers import row_kernels, team, vectors
from dfbench.workers.row_kernels import COMPILED, activated, add_norm, exponential, fitted, turn_and_keep, widened
from dfbench.workers.team import asked, digest, wait
from dfbench.workers.vectors import (
    LANES,
    Made,
    fused,
    intrinsic,
    load,
    load_halves,
    prefetch,
    splat,
    store,
    sums,
    zeros,
)

AHEAD = 4096
"""Bytes between what a product reads and what it asks for, at least."""
TILE = 4
"""Rows of weights, and rows of states, that are multiplied at a time."""
_STEP = 2 * LANES

PASS = np.dtype(
    [
        *((name, np.int64) for name in ("barrier", "number", "size")),
        *((name, np.int64) for name in ("rows", "slot", "capacity", "layers", "vocab", "layer", "step")),
        *((name, np.int64) for name in ("hidden_size", "inner_size", "heads", "kv_heads", "head_dim")),
        *((name, np.float64) for name in ("epsilon", "scaling")),
        *((name, np.int64) for name in ("blocks", "last_norm", "head")),
        *((name, np.int64) for name in ("keys", "values", "cos", "turn", "seen")),
        *((name, np.int64) for name in ("states", "delta", "normed", "joined", "queries")),
        *((name, np.int64) for name in ("scores", "attended", "gated", "inner", "logits")),
    ]
)
"""What a pass is told. From `blocks` on these are addresses; `passed` gives the arrays' shapes. `head` may be 0."""
BLOCK = ("before", "joined", "scales", "out", "after", "gated", "down")
"""A row of `blocks`: addresses of one layer's weights; `scales` may be 0."""


def _pointer_to(kind: Any) -> Any:
    """A function for compiled code: an address as a pointer to values of a type."""

    target: Any = types.CPointer(kind)  # type: ignore[no-untyped-call]

    def pointer(typing: Any, address: Any) -> Made:
        def make(context: Any, builder: Any, _: Any, given: Any) -> Any:
            return builder.inttoptr(given[0], context.get_value_type(target))

        return target(types.intp), make

    return intrinsic(pointer)


pass_at = _pointer_to(from_dtype(PASS))
halves_at = _pointer_to(types.uint16)
floats_at = _pointer_to(types.float32)
words_at = _pointer_to(types.int64)
bytes_at = _pointer_to(types.uint8)


@njit(**COMPILED)
def rest(weight, states, first, size):  # type: ignore[no-untyped-def]
    """The end of a product of two rows that no whole vectors cover."""
    total = np.float32(0)
    row, factors = carray(halves_at(weight), size), carray(floats_at(states), size)
    for at in range(first, size):
        total += widened(row[at]) * factors[at]
    return total


@njit(**COMPILED)
def four(weight, stride, size, states, ahead):  # type: ignore[no-untyped-def]
    """Products of four rows of weights, `stride` bytes apart, with one row of states."""
    a, b, c, d = zeros(), zeros(), zeros(), zeros()
    whole = size // _STEP * _STEP
    for at in range(0, whole, _STEP):
        here, there = weight + 2 * at, states + 4 * at
        if ahead:
            for row in range(TILE):
                prefetch(here + row * stride + ahead)
        for half in range(2):
            factors = load(there + 4 * LANES * half)
            place = here + 2 * LANES * half
            a = fused(load_halves(place), factors, a)
            b = fused(load_halves(place + stride), factors, b)
            c = fused(load_halves(place + 2 * stride), factors, c)
            d = fused(load_halves(place + 3 * stride), factors, d)
    one, two, three, last = sums(a, b, c, d)
    if whole < size:
        one += rest(weight, states, whole, size)
        two += rest(weight + stride, states, whole, size)
        three += rest(weight + 2 * stride, states, whole, size)
        last += rest(weight + 3 * stride, states, whole, size)
    return one, two, three, last


@njit(**COMPILED)
def sixteen(weight, stride, size, states, ahead):  # type: ignore[no-untyped-def]
    """The same with four rows of states, which follow one another: each weight is widened once for all four."""
    a, b, c, d = zeros(), zeros(), zeros(), zeros()
    e, f, g, h = zeros(), zeros(), zeros(), zeros()
    i, j, k, l = zeros(), zeros(), zeros(), zeros()  # noqa: E741
    m, n, o, p = zeros(), zeros(), zeros(), zeros()
    whole, apart = size // _STEP * _STEP, 4 * size
    for at in range(0, whole, _STEP):
        here, there = weight + 2 * at, states + 4 * at
        if ahead:
            for row in range(TILE):
                prefetch(here + row * stride + ahead)
        for half in range(2):
            place, factor = here + 2 * LANES * half, there + 4 * LANES * half
            one, two = load_halves(place), load_halves(place + stride)
            three, last = load_halves(place + 2 * stride), load_halves(place + 3 * stride)
            factors = load(factor)
            a, b = fused(one, factors, a), fused(two, factors, b)
            c, d = fused(three, factors, c), fused(last, factors, d)
            factors = load(factor + apart)
            e, f = fused(one, factors, e), fused(two, factors, f)
            g, h = fused(three, factors, g), fused(last, factors, h)
            factors = load(factor + 2 * apart)
            i, j = fused(one, factors, i), fused(two, factors, j)
            k, l = fused(three, factors, k), fused(last, factors, l)  # noqa: E741
            factors = load(factor + 3 * apart)
            m, n = fused(one, factors, m), fused(two, factors, n)
            o, p = fused(three, factors, o), fused(last, factors, p)
    return sums(a, b, c, d), sums(e, f, g, h), sums(i, j, k, l), sums(m, n, o, p)


@njit(**COMPILED)
def put(out, row, column, number, exact):  # type: ignore[no-untyped-def]
    """out[row, column] = number, as it is or rounded."""
    if exact:
        out[row, column] = number
    else:
        out[row, column] = fitted(out, number)


@njit(**COMPILED)
def product(weight, size, first, last, states, count, out, exact):  # type: ignore[no-untyped-def]
    """out[row, at] = weight[at] · states[row], for `first` ≤ at < `last` and all `count` rows.

    `weight`, `states`: addresses of bfloat16 [.., size] and float32 [count, size], where rows up to a multiple of TILE
    may be read. `exact`: not rounded.
    """
    ahead = max(AHEAD, 2 * TILE * size)
    for at in range(first, last, TILE):
        here = weight + 2 * size * at
        tile = min(TILE, last - at)
        stride = 2 * size if tile == TILE else 0  # What is left is multiplied row by row.
        for single in range(1 if tile == TILE else tile):
            place, column = here + 2 * size * single, at + single
            width = TILE if tile == TILE else 1
            row = 0
            while row < count:
                address, asks = states + 4 * size * row, ahead if row == 0 else 0
                if count - row > 2 and size % _STEP == 0:
                    found = sixteen(place, stride, size, address, asks)
                    for more in range(min(TILE, count - row)):
                        for part in range(width):
                            put(out, row + more, column + part, found[more][part], exact)
                    row += TILE
                else:
                    alone = four(place, stride, size, address, asks)
                    for part in range(width):
                        put(out, row, column + part, alone[part], exact)
                    row += 1


@njit(**COMPILED)
def share(count, number, size):  # type: ignore[no-untyped-def]
    """The part of `count` rows that thread `number` of `size` takes: whole tiles, but for the last one's."""
    tiles = count // TILE
    last = count if number == size - 1 else tiles * (number + 1) // size * TILE
    return tiles * number // size * TILE, last


@njit(fastmath={"nnan", "nsz"}, **COMPILED)
def highest(scores):  # type: ignore[no-untyped-def]
    """The maximum of numbers, none of which is NaN."""
    top = np.float32(-np.inf)
    for at in range(len(scores)):
        top = max(top, scores[at])
    return top


@njit(**COMPILED)
def weigh(scores, seen, scaling):  # type: ignore[no-untyped-def]
    """Scores of one row → e^(score - highest), 0 where hidden; returns their sum. `seen` tells of the last ones; what
    lies before is seen. The sum is taken in the order of the slots, so that hidden ones among them change nothing."""
    ends = scores[len(scores) - len(seen) :]
    for at in range(len(seen)):
        ends[at] = ends[at] if seen[at] else -np.inf
    top = highest(scores) * scaling
    for at in range(len(scores)):
        scores[at] = exponential(scores[at] * scaling - top)
    total = np.float32(0)
    for at in range(len(scores)):
        total += scores[at]
    return total


@njit(**COMPILED)
def divided(states, by, out):  # type: ignore[no-untyped-def]
    """out = states / by, of one row."""
    for at in range(len(out)):
        out[at] = fitted(out, states[at] / by)


@njit(**COMPILED)
def mix(values, size, weights, out):  # type: ignore[no-untyped-def]
    """out[row] = Σ weights[row, at] · values[at], for TILE rows. `values`: address of bfloat16 [window, size];
    `weights` [TILE, window], `out` [TILE, size]."""
    whole = size // _STEP * _STEP
    window, apart = weights.shape[1], 4 * size
    for lane in range(0, whole, _STEP):
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
        place = out.ctypes.data + 4 * lane
        store(place, a)
        store(place + apart, b)
        store(place + 2 * apart, c)
        store(place + 3 * apart, d)
        place += 4 * LANES
        store(place, e)
        store(place + apart, f)
        store(place + 2 * apart, g)
        store(place + 3 * apart, h)
    held = carray(halves_at(values), (window, size))
    for lane in range(whole, size):
        for row in range(TILE):
            total = np.float32(0)
            for at in range(window):
                total += weights[row, at] * widened(held[at, lane])
            out[row, lane] = total


@njit(**COMPILED)
def attend(it, layer, unit, scores, mixed, seen, queries, attended):  # type: ignore[no-untyped-def]
    """Attention of TILE rows that share a head of keys and values: `unit` counts them, heads first."""
    group = it.heads // it.kv_heads * it.rows
    tiles = (group + TILE - 1) // TILE
    kv_head, begin = unit // tiles, unit % tiles * TILE
    count, window = min(TILE, group - begin), it.slot + it.rows
    start = 2 * (layer * it.kv_heads + kv_head) * it.capacity * it.head_dim
    first = kv_head * group + begin
    asked_for = queries.ctypes.data + 4 * first * it.head_dim
    rows = scores[:, :window]
    product(it.keys + start, it.head_dim, 0, window, asked_for, count, rows, True)
    totals = np.zeros(TILE, np.float32)
    for at in range(count):
        totals[at] = weigh(rows[at], seen[(first + at) % it.rows], np.float32(it.scaling))
    mix(it.values + start, it.head_dim, rows, mixed)
    for at in range(count):
        head, row = (first + at) // it.rows, (first + at) % it.rows
        divided(mixed[at], totals[at], attended[row, head * it.head_dim : (head + 1) * it.head_dim])


@njit(**COMPILED)
def prepare(it, layer, joined, queries, number, size):  # type: ignore[no-untyped-def]
    """Queries, keys and values of all rows, `joined`, to where attention wants them. All threads together."""
    count, heads, kv_heads, dim = it.rows, it.heads, it.kv_heads, it.head_dim
    start, shape = 2 * layer * kv_heads * it.capacity * dim, (kv_heads, it.capacity, dim)
    keys = carray(halves_at(it.keys + start), shape)
    values = carray(halves_at(it.values + start), shape)
    cos, turns = carray(halves_at(it.cos), (count, dim)), carray(halves_at(it.turn), (count, dim))
    scales = carray(words_at(it.blocks), (it.layers, 7))[layer, 2]
    norms = carray(halves_at(scales), (heads + kv_heads if scales else 0, dim))
    turn_and_keep(joined, cos, turns, norms, it.epsilon, queries, keys, values, it.slot, number, size)


@njit(**COMPILED)
def attention(it, layer, queries, attended, number, size):  # type: ignore[no-untyped-def]
    """What each row attends to. All threads together."""
    count, heads, kv_heads, dim = it.rows, it.heads, it.kv_heads, it.head_dim
    seen = carray(bytes_at(it.seen), (count, count))
    scores = carray(floats_at(it.scores), (size, TILE, it.capacity))[number]
    mixed = np.empty((TILE, dim), np.float32)
    for unit in range(number, kv_heads * ((heads // kv_heads * count + TILE - 1) // TILE), size):
        attend(it, layer, unit, scores, mixed, seen, queries, attended)


@njit(**COMPILED)
def activate(gated, inner, first, last):  # type: ignore[no-untyped-def]
    """inner = SiLU(gate) · up, columns `first` to `last`. `gated` [n, 2 · inner size]: gates, then ups."""
    size = inner.shape[1]
    for row in range(len(inner)):
        activated(gated[row, first:last], gated[row, size + first : size + last], inner[row, first:last])


@njit(**COMPILED)
def passed(it):  # type: ignore[no-untyped-def]
    """One thread's part of a whole pass."""
    number, size, count = asked(it.number), asked(it.size), it.rows
    wide, inner_size, mixed_size = it.hidden_size, it.inner_size, it.heads * it.head_dim
    every = mixed_size + 2 * it.kv_heads * it.head_dim
    states = carray(floats_at(it.states), (count, wide))
    delta = carray(floats_at(it.delta), (count, wide))
    normed = carray(floats_at(it.normed), (count, wide))
    joined = carray(floats_at(it.joined), (count, every))
    queries = carray(floats_at(it.queries), (it.heads, count, it.head_dim))
    attended = carray(floats_at(it.attended), (count, mixed_size))
    gated = carray(floats_at(it.gated), (count, 2 * inner_size))
    inner = carray(floats_at(it.inner), (count, inner_size))
    for layer in range(it.layers):
        before, joins, _, out, after, gates, down = carray(words_at(it.blocks), (it.layers, 7))[layer]
        add_norm(states, delta, carray(halves_at(before), wide), it.epsilon, normed, number, size)
        wait(it.barrier)
        first, last = share(every, number, size)
        product(joins, wide, first, last, it.normed, count, joined, False)
        wait(it.barrier)
        prepare(it, layer, joined, queries, number, size)
        wait(it.barrier)
        attention(it, layer, queries, attended, number, size)
        wait(it.barrier)
        first, last = share(wide, number, size)
        product(out, mixed_size, first, last, it.attended, count, delta, False)
        wait(it.barrier)
        add_norm(states, delta, carray(halves_at(after), wide), it.epsilon, normed, number, size)
        wait(it.barrier)
        first, last = share(inner_size, number, size)
        product(gates, wide, first, last, it.normed, count, gated, False)
        product(gates, wide, inner_size + first, inner_size + last, it.normed, count, gated, False)
        activate(gated, inner, first, last)
        wait(it.barrier)
        first, last = share(wide, number, size)
        product(down, inner_size, first, last, it.inner, count, delta, False)
        wait(it.barrier)
    add_norm(states, delta, carray(halves_at(it.last_norm), wide), it.epsilon, normed, number, size)
    wait(it.barrier)
    if it.head:
        logits = carray(halves_at(it.logits), (count, it.vocab))
        first, last = share(it.vocab, number, size)
        product(it.head, wide, first, last, it.normed, count, logits, False)


@njit(**COMPILED)
def between(it):  # type: ignore[no-untyped-def]
    """One thread's part of what lies before and behind a layer's products, where others make them: step 0 norm, 1 heads
    turned and kept, 2 norm, 3 activation. Past the last layer: the last norm."""
    number, size, count, wide = asked(it.number), asked(it.size), it.rows, it.hidden_size
    if it.step == 1:
        joined = carray(halves_at(it.joined), (count, (it.heads + 2 * it.kv_heads) * it.head_dim))
        queries = carray(halves_at(it.queries), (it.heads, count, it.head_dim))
        prepare(it, it.layer, joined, queries, number, size)
    elif it.step == 3:
        gated = carray(halves_at(it.gated), (count, 2 * it.inner_size))
        inner = carray(halves_at(it.inner), (count, it.inner_size))
        first, last = share(it.inner_size, number, size)
        activate(gated, inner, first, last)
    else:
        weight = it.last_norm
        if it.layer < it.layers:
            weight = carray(words_at(it.blocks), (it.layers, 7))[it.layer, 0 if it.step == 0 else 4]
        states, delta = carray(floats_at(it.states), (count, wide)), carray(halves_at(it.delta), (count, wide))
        normed = carray(halves_at(it.normed), (count, wide))
        add_norm(states, delta, carray(halves_at(weight), wide), it.epsilon, normed, number, size)


def _compiled_pass(sources: int) -> Any:
    @cfunc(types.void(types.intp), cache=True)
    def run(address):  # type: ignore[no-untyped-def]
        if sources:  # See `team.digest`.
            passed(carray(pass_at(address), 1)[0])

    return run


def _compiled_between(sources: int) -> Any:
    @cfunc(types.void(types.intp), cache=True)
    def run(address):  # type: ignore[no-untyped-def]
        if sources:
            between(carray(pass_at(address), 1)[0])

    return run


_SOURCES = digest(row_kernels, team, vectors, sys.modules[__name__])
run_pass, run_between = _compiled_pass(_SOURCES), _compiled_between(_SOURCES)
"""`passed` and `between` for OpenMP: functions of one address, that of a PASS."""
