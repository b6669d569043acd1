"""A whole pass of a few rows through a decoder as one compiled function, which all threads run together.

Such a pass is bound by reading the weights, so nothing is called in between that keeps it from that. A row's sums have
one order, whatever the other rows: a token's logits are the same bits in every such pass, alone or in a draft.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numba import carray, cfunc, from_dtype, njit, types  # type: ignore[attr-defined]

from dfbench.workers import attention_kernels, product_kernels, row_kernels, team, tiles, vectors
from dfbench.workers.attention_kernels import attention
from dfbench.workers.product_kernels import DOT, TILE, TILES, product, states_at, tile_product
from dfbench.workers.row_kernels import COMPILED, activated, add_norm, turn_and_keep
from dfbench.workers.team import asked, digest, wait
from dfbench.workers.vectors import floats_at, halves_at, load, pointer_to, store_halves, words_at

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
STATES = ("normed", "attended", "inner", "queries")
"""Fields of PASS that a whole pass keeps as STATE."""
pass_at = pointer_to(from_dtype(PASS))


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


# Three of a kind: a compiled function that was handed to one of them would be another in every process, and numba would
# never find on disk what it kept.
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


_MADE_OF = (attention_kernels, product_kernels, row_kernels, team, tiles, vectors)
_SOURCES = 4 * digest(*_MADE_OF, sys.modules[__name__]) + 2 * TILES + DOT
run_pass = _compiled_pass(_SOURCES)
"""`passed`, and the other two likewise, for OpenMP: a function of the address of a PASS."""
run_segment: Any = _compiled_segment(_SOURCES) if TILES else None
run_between = _compiled_between(_SOURCES)
