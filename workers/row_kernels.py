"""What lies between the products of a decoder's pass, a row at a time, for numba.

Values are bfloat16, held as their 16 bits or as float32, which are rounded when they are read; they are computed in
float32 and rounded wherever torch rounds. Every function takes both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit, types
from numba.extending import overload

from dfbench.workers.vectors import intrinsic

Bits = npt.NDArray[np.uint16]
SUMS = {"reassoc", "contract"}
"""Sums in any order, so that they are vectors; infinities and NaN stay what they are."""
COMPILED: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
"""Division by zero gives what it gives in torch: a test for it would keep loops from being vectors. Only whole passes
are kept on disk: numba looks at a function's own file alone, and would go on with old ones of others."""


def bits(states: torch.Tensor) -> Bits:
    """The same memory as numpy sees it: bfloat16 values as their 16 bits."""
    return states.detach().view(torch.int16).numpy().view(np.uint16)


@intrinsic
def as_float(typing: Any, word: Any) -> Any:
    """The float32 whose bits these 32 are."""
    from llvmlite import ir

    return types.float32(types.uint32), lambda context, builder, _, given: builder.bitcast(given[0], ir.FloatType())


@intrinsic
def _as_word(typing: Any, number: Any) -> Any:
    """The 32 bits of a float32."""
    from llvmlite import ir

    return types.uint32(types.float32), lambda context, builder, _, given: builder.bitcast(given[0], ir.IntType(32))


@njit(**COMPILED)
def widened(word):  # type: ignore[no-untyped-def]
    """bfloat16 → float32, exactly."""
    return as_float(np.uint32(np.uint32(word) << np.uint32(16)))


@njit(**COMPILED)
def rounded(number):  # type: ignore[no-untyped-def]
    """float32 → the nearest bfloat16, ties to even; NaN stays NaN."""
    word = _as_word(np.float32(number))
    nearest = np.uint16((word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))
    return np.uint16(0x7FC0) if number != number else nearest


@njit(**COMPILED)
def snapped(number):  # type: ignore[no-untyped-def]
    """float32 → the nearest bfloat16, as float32."""
    return widened(rounded(number))


def value(held: Any) -> Any:
    """What is held, a bfloat16, as float32."""


def fitted(held: Any, number: Any) -> Any:
    """A float32 rounded to bfloat16, as the array `held` keeps it."""


@overload(value, inline="always")
def _value(held):  # type: ignore[no-untyped-def]
    if held == types.uint16:
        return lambda held: widened(held)
    return lambda held: snapped(held)


@overload(fitted, inline="always")
def _fitted(held, number):  # type: ignore[no-untyped-def]
    if held.dtype == types.uint16:
        return lambda held, number: rounded(number)
    return lambda held, number: snapped(number)


@njit(fastmath=SUMS, **COMPILED)
def scaled(states, weight, epsilon, out):  # type: ignore[no-untyped-def]
    """RMS norm of one row, rounded before it is scaled, as the models do. `out` may be `states`."""
    size = len(states)
    total = np.float32(0)
    for at in range(size):
        number = value(states[at])
        total += number * number
    factor = np.float32(1) / np.sqrt(total / np.float32(size) + np.float32(epsilon))
    for at in range(size):
        out[at] = fitted(out, value(weight[at]) * snapped(value(states[at]) * factor))


@njit(**COMPILED)
def added(states, delta):  # type: ignore[no-untyped-def]
    """states += delta, one row."""
    for at in range(len(states)):
        states[at] = fitted(states, value(states[at]) + value(delta[at]))


@njit(**COMPILED)
def add_norm(hidden, delta, weight, epsilon, out, first, step):  # type: ignore[no-untyped-def]
    """hidden += delta; out = its RMS norm. All [n, hidden size]; every `step`th row from `first` on."""
    for row in range(first, len(hidden), step):
        added(hidden[row], delta[row])
        scaled(hidden[row], weight, epsilon, out[row])


@njit(**COMPILED)
def turned(one, other, cos, turn, out):  # type: ignore[no-untyped-def]
    """Half of a head: one · cos + other · turn, rounded as torch rounds on the way."""
    for at in range(len(out)):
        straight, crossed = value(one[at]) * value(cos[at]), value(other[at]) * value(turn[at])
        out[at] = fitted(out, snapped(straight) + snapped(crossed))


@njit(**COMPILED)
def turn_head(states, cos, turn, out):  # type: ignore[no-untyped-def]
    """Rotate one head's states by its position. Half of `turn` carries the sign of the rotation."""
    half = len(states) // 2
    left, right = states[:half], states[half:]
    turned(left, right, cos[:half], turn[:half], out[:half])
    turned(right, left, cos[half:], turn[half:], out[half:])


@njit(**COMPILED)
def copied(states, out):  # type: ignore[no-untyped-def]
    """out = states, of which both may hold either kind."""
    for at in range(len(out)):
        out[at] = fitted(out, value(states[at]))


@njit(**COMPILED)
def turn_and_keep(  # type: ignore[no-untyped-def]
    joined, cos, turns, scales, epsilon, queries, keys, values, slot, first, step
):
    """Rotate queries and keys by their positions, and put keys and values [kv heads, capacity, head size] at `slot` on.

    `joined` [n, …]: all heads' queries, then keys, then values; `queries` [heads, n, head size]; `cos`, `turns` [n,
    head size]. `scales` [heads + kv heads, head size], or none: norms of queries and keys. Of all heads of all rows
    every `step`th from `first` on.
    """
    kv_heads, _, size = keys.shape
    heads = len(queries)
    every = heads + 2 * kv_heads
    for at in range(first, len(joined) * every, step):
        row, head = at // every, at % every
        states = joined[row, head * size : (head + 1) * size]
        if head >= heads + kv_heads:
            copied(states, values[head - heads - kv_heads, slot + row])
            continue
        if len(scales):
            scaled(states, scales[head], epsilon, states)
        if head < heads:
            turn_head(states, cos[row], turns[row], queries[head, row])
        else:
            turn_head(states, cos[row], turns[row], keys[head - heads, slot + row])


@njit(**COMPILED)
def exponential(number):  # type: ignore[no-untyped-def]
    """e to this power within two units of the last place where it fits float32, 0 below. Has no branch, so that loops
    of it are vectors: 2^k · e^r with |r| ≤ ln(2)/2, where seven terms of the series are enough."""
    within = min(max(number, np.float32(-87.0)), np.float32(88.0))
    power = np.floor(within * np.float32(1.4426950408889634) + np.float32(0.5))
    # ln(2) in two parts, the first of which has few enough bits that its product is exact.
    r = within - power * np.float32(0.693359375) - power * np.float32(-2.12194440e-4)
    series = np.float32(1 / 5040)
    series = series * r + np.float32(1 / 720)
    series = series * r + np.float32(1 / 120)
    series = series * r + np.float32(1 / 24)
    series = series * r + np.float32(1 / 6)
    series = series * r + np.float32(0.5)
    series = series * r + np.float32(1)
    series = series * r + np.float32(1)
    two = as_float(np.uint32(np.int32(power) + np.int32(127)) << np.uint32(23))
    return series * two if number >= np.float32(-87.0) else np.float32(0)


@njit(**COMPILED)
def activated(gates, ups, out):  # type: ignore[no-untyped-def]
    """out = SiLU(gates) · ups, of one row."""
    for at in range(len(out)):
        gate = value(gates[at])
        active = snapped(gate / (np.float32(1) + exponential(-gate)))
        out[at] = fitted(out, active * value(ups[at]))
