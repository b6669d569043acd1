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
from numba.extending import overload

from dfbench.workers import row_kernels, team, tiles, vectors
from dfbench.workers.row_kernels import (
    COMPILED,
    activated,
    add_norm,
    exponential,
    fitted,
    rounded,
    turn_and_keep,
    value,
    widened,
)
from dfbench.workers.team import asked, digest, wait
from dfbench.workers.vectors import (
    LANES,
    Made,
    fused,
    intrinsic,
    larger,
    load,
    load_halves,
    load_pairs,
    paired,
    pairs_are_multiplied,
    prefetch,
    splat,
    store,
    store_four,
    store_four_halves,
    store_halves,
    sums,
    zeros,
)

AHEAD = 4096
"""Bytes between what a product reads and what it asks for, at least."""
DOT, TILES = pairs_are_multiplied(), tiles.available()
COVER = 2 * LANES if DOT else LANES
"""Columns that a product takes at a time."""
STATE = np.dtype(np.uint16 if DOT else np.float32)
"""What is multiplied by weights: bfloat16 as they are where the processor takes them so, else widened."""
STATE_BYTES = STATE.itemsize
STATES = ("normed", "attended", "inner", "queries")
"""Fields of PASS that a whole pass keeps so."""
load_weights = load_pairs if DOT else load_halves
load_states = load_pairs if DOT else load
added = paired if DOT else fused
TILE = 4
"""Rows of weights, and rows of states, that are multiplied at a time."""
_STEP = 2 * LANES

PASS = np.dtype(
    [
        *((name, np.int64) for name in ("barrier", "number", "size", "tiles")),
        *((name, np.int64) for name in ("rows", "slot", "capacity", "layers", "vocab", "layer", "step")),
        *((name, np.int64) for name in ("hidden_size", "inner_size", "heads", "kv_heads", "head_dim")),
        *((name, np.float64) for name in ("epsilon", "scaling")),
        *((name, np.int64) for name in ("blocks", "last_norm", "head")),
        *((name, np.int64) for name in ("keys", "values", "cos", "turn", "seen")),
        *((name, np.int64) for name in ("states", "delta", "normed", "joined", "queries")),
        *((name, np.int64) for name in ("scores", "totals", "attended", "gated", "inner", "logits")),
    ]
)
"""What a pass is told. From `blocks` on these are addresses; the functions give the arrays' shapes. `head` may be 0.
`tiles`: address of a `tiles.configuration`, where the weights are laid out so; else 0."""
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
states_at = halves_at if DOT else floats_at


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


@njit(**COMPILED)
def multiply(it, weight, size, first, last, states, out):  # type: ignore[no-untyped-def]
    """`product` of all rows with weights as they are laid out for this pass. `out`: float32."""
    if TILES and it.tiles:
        for at in range(first, last, tiles.SIDE):
            into = out.ctypes.data + 4 * at
            tile_product(weight + 2 * size * at, size, states, it.rows, into, out.strides[0])
        return
    product(weight, size, first, last, states, it.rows, out)


@njit(**COMPILED)
def project(it, first, last):  # type: ignore[no-untyped-def]
    """Logits `first` to `last` of all rows."""
    size, logits = it.hidden_size, carray(halves_at(it.logits), (it.rows, it.vocab))
    if TILES and it.tiles:
        rows = (it.rows + tiles.SIDE - 1) // tiles.SIDE * tiles.SIDE
        some = np.empty((rows, tiles.SIDE), np.float32)
        line = some.strides[0]
        for at in range(first, last, tiles.SIDE):
            tile_product(it.head + 2 * size * at, size, it.normed, it.rows, some.ctypes.data, line)
            for row in range(it.rows):
                into = logits.ctypes.data + 2 * (row * it.vocab + at)
                store_halves(into, load(some.ctypes.data + line * row))
        return
    product(it.head, size, first, last, it.normed, it.rows, logits)


@njit(**COMPILED)
def share(it, count, number, size):  # type: ignore[no-untyped-def]
    """The part of `count` outputs that thread `number` of `size` takes: whole tiles, but for the last one's."""
    grain = tiles.SIDE if it.tiles else TILE
    whole = count // grain
    last = count if number == size - 1 else whole * (number + 1) // size * grain
    return whole * number // size * grain, last


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


@njit(**COMPILED)
def activate(gated, inner, first, last):  # type: ignore[no-untyped-def]
    """inner = SiLU(gate) · up, columns `first` to `last`. `gated` [n, 2 · inner size]: gates, then ups."""
    size = inner.shape[1]
    for row in range(len(inner)):
        activated(gated[row, first:last], gated[row, size + first : size + last], inner[row, first:last])


@njit(**COMPILED)
def norm(it, weight, number, size):  # type: ignore[no-untyped-def]
    """`delta` goes into the residual stream, whose norm goes into `normed`."""
    shape = (it.rows, it.hidden_size)
    states, delta = carray(floats_at(it.states), shape), carray(floats_at(it.delta), shape)
    normed, weights = carray(states_at(it.normed), shape), carray(halves_at(weight), it.hidden_size)
    add_norm(states, delta, weights, it.epsilon, normed, number, size)


@njit(**COMPILED)
def enter(it, layer, number, size):  # type: ignore[no-untyped-def]
    """A layer up to what attention needs. All threads together."""
    every = (it.heads + 2 * it.kv_heads) * it.head_dim
    joined = carray(floats_at(it.joined), (it.rows, every))
    queries = carray(states_at(it.queries), (it.heads, it.rows, it.head_dim))
    block = carray(words_at(it.blocks), (it.layers, 7))[layer]
    norm(it, block[0], number, size)
    wait(it.barrier)
    first, last = share(it, every, number, size)
    multiply(it, block[1], it.hidden_size, first, last, it.normed, joined)
    wait(it.barrier)
    prepare(it, layer, joined, queries, number, size)


@njit(**COMPILED)
def leave(it, layer, number, size):  # type: ignore[no-untyped-def]
    """A layer from what attention gives on. All threads together."""
    count, wide, inner_size = it.rows, it.hidden_size, it.inner_size
    delta = carray(floats_at(it.delta), (count, wide))
    gated = carray(floats_at(it.gated), (count, 2 * inner_size))
    inner = carray(states_at(it.inner), (count, inner_size))
    block = carray(words_at(it.blocks), (it.layers, 7))[layer]
    first, last = share(it, wide, number, size)
    multiply(it, block[3], it.heads * it.head_dim, first, last, it.attended, delta)
    wait(it.barrier)
    norm(it, block[4], number, size)
    wait(it.barrier)
    some, more = share(it, inner_size, number, size)
    multiply(it, block[5], wide, some, more, it.normed, gated)
    multiply(it, block[5], wide, inner_size + some, inner_size + more, it.normed, gated)
    activate(gated, inner, some, more)
    wait(it.barrier)
    multiply(it, block[6], inner_size, first, last, it.inner, delta)


@njit(**COMPILED)
def finish(it, number, size):  # type: ignore[no-untyped-def]
    """From the last layer to the logits, or to the normed hidden states. All threads together."""
    norm(it, it.last_norm, number, size)
    wait(it.barrier)
    if it.head:
        first, last = share(it, it.vocab, number, size)
        project(it, first, last)


@njit(**COMPILED)
def passed(it):  # type: ignore[no-untyped-def]
    """One thread's part of a whole pass."""
    number, size = asked(it.number), asked(it.size)
    attended = carray(states_at(it.attended), (it.rows, it.heads * it.head_dim))
    if TILES and it.tiles:
        tiles.configure(it.tiles)
    for layer in range(it.layers):
        enter(it, layer, number, size)
        wait(it.barrier)
        attention(it, layer, attended, number, size)
        wait(it.barrier)
        leave(it, layer, number, size)
        wait(it.barrier)
    finish(it, number, size)
    if TILES and it.tiles:
        tiles.release()


@njit(**COMPILED)
def segment(it):  # type: ignore[no-untyped-def]
    """One thread's part of what lies between two layers' attention, where others make that: `layer` is the second."""
    number, size = asked(it.number), asked(it.size)
    if TILES:
        tiles.configure(it.tiles)
        if it.layer:
            leave(it, it.layer - 1, number, size)
            wait(it.barrier)
        if it.layer < it.layers:
            enter(it, it.layer, number, size)
        else:
            finish(it, number, size)
        tiles.release()


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
        first, last = share(it, it.inner_size, number, size)
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


def _compiled_segment(sources: int) -> Any:
    @cfunc(types.void(types.intp), cache=True)
    def run(address):  # type: ignore[no-untyped-def]
        if sources:
            segment(carray(pass_at(address), 1)[0])

    return run


def _compiled_between(sources: int) -> Any:
    @cfunc(types.void(types.intp), cache=True)
    def run(address):  # type: ignore[no-untyped-def]
        if sources:
            between(carray(pass_at(address), 1)[0])

    return run


_SOURCES = 4 * digest(row_kernels, team, tiles, vectors, sys.modules[__name__]) + 2 * TILES + DOT
run_pass = _compiled_pass(_SOURCES)
"""`passed`, and the other two likewise, for OpenMP: a function of the address of a PASS."""
run_segment: Any = _compiled_segment(_SOURCES) if TILES else None
run_between = _compiled_between(_SOURCES)
