"""A pass of a few rows through a decoder on a CPU: torch does the products and the attention, numba what lies between.

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

from dfbench.workers.lean_weights import times

if TYPE_CHECKING:
    from dfbench.workers.lean_weights import Block, Sizes
    from dfbench.workers.static_cache import StaticKeyValues

Bits = npt.NDArray[np.uint16]
_SUMS = {"reassoc", "contract"}  # Sums in any order, so that they are vectors; infinities and NaN stay what they are.


class Rows:
    """The pass of some tokens over static keys and values. Raises nothing: ask `fits` first."""

    def __init__(self, blocks: Sequence[Block], sizes: Sizes, norm: torch.Tensor) -> None:
        self._blocks, self._sizes = blocks, sizes
        no_scales = torch.empty((0, sizes.head_dim), dtype=torch.bfloat16)
        self._scales = [bits(no_scales if block.head_scales is None else block.head_scales) for block in blocks]
        self._norms = [(bits(block.before), bits(block.after)) for block in blocks]
        self._last_norm = bits(norm)
        self._kept: StaticKeyValues | None = None
        self._compile()

    def __call__(
        self,
        embedded: torch.Tensor,
        cos: torch.Tensor,
        turn: torch.Tensor,
        mask: torch.Tensor | None,
        kept: StaticKeyValues,
    ) -> torch.Tensor:
        """Normed hidden states [n, hidden size] of the tokens that are written at `kept.slots`, which follow one
        another. `embedded` [n, hidden size] is spoilt; `cos`, `turn` [n, head size]; `mask` as the layers take it."""
        assert kept.slots is not None, "a prompt goes through the layers"
        sizes, epsilon = self._sizes, self._sizes.epsilon
        count, window, slot = len(embedded), kept.window, int(kept.slots[0])
        keys, values = self._buffers(kept)
        normed, queries = torch.empty_like(embedded), embedded.new_empty((sizes.heads, count, sizes.head_dim))
        shared = queries.view(1, sizes.kv_heads, -1, sizes.head_dim)
        hidden, normed_bits, query_bits = bits(embedded), bits(normed), bits(queries)
        cos_bits, turn_bits = bits(cos), bits(turn)
        # What goes into the residual stream is added by the norm that follows it.
        delta = torch.zeros_like(embedded)
        for block, (before, after), scales, layer_keys, layer_values, held in zip(
            self._blocks, self._norms, self._scales, keys, values, kept.layers, strict=True
        ):
            add_norm(hidden, bits(delta), before, epsilon, normed_bits)
            joined = bits(times(normed, block.joined))
            turn_and_keep(joined, cos_bits, turn_bits, scales, epsilon, query_bits, layer_keys, layer_values, slot)
            seen = functional.scaled_dot_product_attention(
                shared, held[0][:, :, :window], held[1][:, :, :window], attn_mask=mask, scale=sizes.scaling
            )
            delta = times(seen.view(sizes.heads, count, -1).transpose(0, 1).reshape(count, -1), block.out)
            add_norm(hidden, bits(delta), after, epsilon, normed_bits)
            gate, up = times(normed, block.gated).chunk(2, -1)
            delta = times(functional.silu(gate).mul_(up), block.down)
        add_norm(hidden, bits(delta), self._last_norm, epsilon, normed_bits)
        return normed

    def _buffers(self, kept: StaticKeyValues) -> tuple[Bits, Bits]:
        """Keys and values as [layers, kv heads, capacity, head size]."""
        if self._kept is not kept:
            self._kept = kept
            shape = (kept.shape.layers, kept.shape.heads, kept.capacity, kept.shape.head_dim)
            self._held = bits(kept.keys).reshape(shape), bits(kept.values).reshape(shape)
        return self._held

    def _compile(self) -> None:
        """Once, here, and not within somebody's first step."""
        row, rows, none = np.zeros(2, np.uint16), np.zeros((1, 2), np.uint16), np.zeros((0, 2), np.uint16)
        held, joined = np.zeros((1, 1, 2), np.uint16), np.zeros((1, 6), np.uint16)
        add_norm(rows, rows, row, self._sizes.epsilon, rows)
        turn_and_keep(joined, rows, rows, none, self._sizes.epsilon, held, held, held, 0)


def fits(blocks: Sequence[Block], sizes: Sizes, activation: Any) -> bool:
    """Whether `Rows` does what the layers do: bfloat16 on a CPU, SDPA, SiLU, no biases."""
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
    word = _as_word(np.float32(number))  # type: ignore[call-arg, var-annotated]
    nearest = np.uint16((word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))
    return np.uint16(0x7FC0) if number != number else nearest


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
    """hidden += delta; out = its RMS norm. All [n, hidden size]."""
    for row in range(len(hidden)):
        for at in range(hidden.shape[1]):
            hidden[row, at] = rounded(widened(hidden[row, at]) + widened(delta[row, at]))
        scaled(hidden[row], weight, epsilon, out[row])


@njit(cache=True, nogil=True)
def turned(one, other, cos, turn):  # type: ignore[no-untyped-def]
    """One value of a rotated pair, rounded as torch rounds on the way."""
    straight = rounded(widened(one) * widened(cos))
    crossed = rounded(widened(other) * widened(turn))
    return rounded(widened(straight) + widened(crossed))


@njit(cache=True, nogil=True)
def turn_and_keep(joined, cos, turn, scales, epsilon, queries, keys, values, slot):  # type: ignore[no-untyped-def]
    """Rotate queries and keys by their positions, and put keys and values [kv heads, capacity, head size] at `slot` on.

    `joined` [n, …]: all heads' queries, then keys, then values; `queries` [heads, n, head size]; `cos`, `turn` [n, head
    size]. `scales` [heads + kv heads, head size], or none: norms of queries and keys. Half of `turn` carries the sign
    of the rotation.
    """
    kv_heads, _, size = keys.shape
    heads, half = len(queries), size // 2
    for row in range(len(joined)):
        for head in range(heads + kv_heads):
            states = joined[row, head * size : (head + 1) * size]
            if len(scales):
                scaled(states, scales[head], epsilon, states)
            into = queries[head, row] if head < heads else keys[head - heads, slot + row]
            for at in range(half):
                mirror = at + half
                into[at] = turned(states[at], states[mirror], cos[row, at], turn[row, at])
                into[mirror] = turned(states[mirror], states[at], cos[row, mirror], turn[row, mirror])
        for head in range(kv_heads):
            start = (heads + kv_heads + head) * size
            values[head, slot + row] = joined[row, start : start + size]
