"""A lone row's pass through a decoder on a CPU: torch does the products and the attention, numba all that lies between.

A plain step of a small model takes some 25 ms, of which a third went into the eager norms, rotations and sums of thirty
layers: each is a dozen kernels of a few microseconds for 576 numbers. Here each is one loop. Values are bfloat16 held
as their 16 bits, computed in float32 and rounded wherever torch rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit, types
from numba.extending import intrinsic
from torch.nn import functional

if TYPE_CHECKING:
    from dfbench.workers.lean_weights import Block, Sizes
    from dfbench.workers.static_cache import StaticKeyValues

Bits = npt.NDArray[np.uint16]
_SUMS = {"reassoc", "contract"}  # Sums in any order, so that they are vectors; infinities and NaN stay what they are.


class Row:
    """The pass of one token over static keys and values. Raises nothing: ask `fits` first."""

    def __init__(self, blocks: Sequence[Block], sizes: Sizes, norm: torch.Tensor) -> None:
        self._blocks, self._sizes = blocks, sizes
        hidden, inner = blocks[0].down.weight.shape
        heads = sizes.heads + 2 * sizes.kv_heads
        self._hidden, self._delta, self._normed = (_empty(hidden) for _ in range(3))
        self._joined, self._gated = _empty(heads * sizes.head_dim), _empty(2 * inner)
        self._queries = _empty(sizes.heads * sizes.head_dim)
        self._shared = self._queries.view(1, sizes.kv_heads, -1, sizes.head_dim)
        no_scales = torch.empty((0, sizes.head_dim), dtype=torch.bfloat16)
        self._scales = [bits(no_scales if block.head_scales is None else block.head_scales) for block in blocks]
        # What goes into the residual stream is added by the norm that follows it: norms[i] is read after layer i - 1.
        self._norms = [(bits(block.before), bits(block.after)) for block in blocks]
        self._last_norm = bits(norm)
        self._kept: StaticKeyValues | None = None
        self._compile()

    def __call__(self, embedded: torch.Tensor, cos: torch.Tensor, turn: torch.Tensor, kept: StaticKeyValues) -> Any:
        """Normed hidden state [1, hidden size] of the token that is written at slot `window` - 1."""
        sizes, end = self._sizes, kept.window
        keys, values = self._buffers(kept)
        hidden, delta, normed = bits(self._hidden), bits(self._delta), bits(self._normed)
        joined, queries, cos_bits, turn_bits = bits(self._joined), bits(self._queries), bits(cos), bits(turn)
        halves = self._gated.chunk(2)
        hidden[:], delta[:] = bits(embedded), 0
        for at, block in enumerate(self._blocks):
            before, after = self._norms[at]
            add_norm(hidden, delta, before, sizes.epsilon, normed)
            torch.mv(block.joined.weight, self._normed, out=self._joined)
            turn_and_keep(
                joined, cos_bits, turn_bits, self._scales[at], sizes.epsilon, queries, keys[at], values[at], end - 1
            )
            held_keys, held_values = kept.layers[at]
            seen = functional.scaled_dot_product_attention(
                self._shared, held_keys[:, :, :end], held_values[:, :, :end], scale=sizes.scaling
            )
            torch.mv(block.out.weight, seen.reshape(-1), out=self._delta)
            add_norm(hidden, delta, after, sizes.epsilon, normed)
            torch.mv(block.gated.weight, self._normed, out=self._gated)
            torch.mv(block.down.weight, functional.silu(halves[0]).mul_(halves[1]), out=self._delta)
        add_norm(hidden, delta, self._last_norm, sizes.epsilon, normed)
        return self._normed[None]

    def _buffers(self, kept: StaticKeyValues) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
        """Keys and values as [layers, kv heads, capacity, head size]."""
        if self._kept is not kept:
            self._kept = kept
            shape = (kept.shape.layers, kept.shape.heads, kept.capacity, kept.shape.head_dim)
            self._held = bits(kept.keys).reshape(shape), bits(kept.values).reshape(shape)
        return self._held

    def _compile(self) -> None:
        """Once, here, and not within somebody's first step."""
        row, none = np.zeros(2, np.uint16), np.zeros((0, 2), np.uint16)
        held = np.zeros((1, 1, 2), np.uint16)
        add_norm(row, row, row, self._sizes.epsilon, row)
        turn_and_keep(np.zeros(6, np.uint16), row, row, none, self._sizes.epsilon, row, held, held, 0)


def fits(blocks: Sequence[Block], sizes: Sizes, activation: Any) -> bool:
    """Whether `Row` does what the layers do: bfloat16 on a CPU, SDPA, SiLU, no biases."""
    products = [part for block in blocks for part in (block.joined, block.out, block.gated, block.down)]
    return (
        not sizes.additive
        and type(activation).__name__ in ("SiLU", "SiLUActivation")
        and all(part.bias is None for part in products)
        and all(part.weight.dtype == torch.bfloat16 and part.weight.device.type == "cpu" for part in products)
    )


def bits(states: torch.Tensor) -> Bits:
    """The same memory as numpy sees it: bfloat16 values as their 16 bits."""
    return states.detach().view(torch.int16).numpy().view(np.uint16)


def _empty(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.bfloat16)


@intrinsic
def _as_float(typing: Any, word: Any) -> Any:
    """The float32 whose bits these 32 are."""
    from llvmlite import ir

    return types.float32(types.uint32), lambda context, builder, _, given: builder.bitcast(given[0], ir.FloatType())


@intrinsic
def _as_word(typing: Any, number: Any) -> Any:
    """The 32 bits of a float32."""
    from llvmlite import ir

    return types.uint32(types.float32), lambda context, builder, _, given: builder.bitcast(given[0], ir.IntType(32))


@njit(cache=True, nogil=True)
def widened(word):  # type: ignore[no-untyped-def]
    """bfloat16 → float32, exactly."""
    return _as_float(np.uint32(np.uint32(word) << np.uint32(16)))  # type: ignore[call-arg]


@njit(cache=True, nogil=True)
def rounded(number):  # type: ignore[no-untyped-def]
    """float32 → the nearest bfloat16, ties to even; NaN stays NaN."""
    word: Any = _as_word(np.float32(number))  # type: ignore[call-arg]
    if number != number:
        return np.uint16(0x7FC0)
    return np.uint16((word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@njit(cache=True, nogil=True, fastmath=_SUMS)
def scaled(states, weight, epsilon, out):  # type: ignore[no-untyped-def]
    """RMS norm of one row, rounded before it is scaled, as the models do. `out` may be `states`."""
    size = len(states)
    total = np.float32(0)
    for at in range(size):
        value = widened(states[at])
        total += value * value
    factor = np.float32(1) / np.sqrt(total / np.float32(size) + np.float32(epsilon))
    for at in range(size):
        out[at] = rounded(widened(weight[at]) * widened(rounded(widened(states[at]) * factor)))


@njit(cache=True, nogil=True)
def add_norm(hidden, delta, weight, epsilon, out):  # type: ignore[no-untyped-def]
    """hidden += delta; out = its RMS norm."""
    for at in range(len(hidden)):
        hidden[at] = rounded(widened(hidden[at]) + widened(delta[at]))
    scaled(hidden, weight, epsilon, out)


@njit(cache=True, nogil=True)
def turn_and_keep(joined, cos, turn, scales, epsilon, queries, keys, values, slot):  # type: ignore[no-untyped-def]
    """Rotate queries and keys by the position, and put keys and values [kv heads, capacity, head size] at `slot`.

    `joined`: all heads' queries, then keys, then values. `scales` [heads + kv heads, head size], or none: norms of
    queries and keys. Half of `turn` carries the sign of the rotation.
    """
    kv_heads, _, size = keys.shape
    heads = len(queries) // size
    half = size // 2
    for head in range(heads + kv_heads):
        row = joined[head * size : (head + 1) * size]
        if len(scales):
            scaled(row, scales[head], epsilon, row)
        into = queries[head * size : (head + 1) * size] if head < heads else keys[head - heads, slot]
        for at in range(size):
            straight = widened(rounded(widened(row[at]) * widened(cos[at])))
            crossed = widened(rounded(widened(row[(at + half) % size]) * widened(turn[at])))
            into[at] = rounded(straight + crossed)
    for head in range(kv_heads):
        start = (heads + kv_heads + head) * size
        values[head, slot] = joined[start : start + size]
