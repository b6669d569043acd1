"""A decoder's forward in few kernels: for Llama, Mistral, Qwen2 and Qwen3 as transformers 5.24 defines them.

transformers spends some fifty small kernels a layer on what needs fifteen, and where a pass takes milliseconds that is
a good part of them. Here the projections of queries, keys and values are one product, and so are the two halves of the
MLP; the weights are joined in place and the model's own modules keep working on views of them. Rounding follows the
model's own code step by step, but for the order of sums within a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from dfbench.workers import row_pass
from dfbench.workers.lean_weights import (
    Block,
    Layout,
    Sizes,
    attend,
    block_of,
    for_heads,
    layout_of,
    linears_of,
    product_of,
    times,
)
from dfbench.workers.loading import output_head
from dfbench.workers.pages import Pages
from dfbench.workers.row_pass import RowPass
from dfbench.workers.static_cache import StaticKeyValues, write

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class Lean:
    """The forward of one model. Raises nothing: ask `fits` first."""

    def __init__(self, model: PreTrainedModel, compiler: Callable[[Any], Any] | None = None) -> None:
        inner: Any = model.model
        attention = inner.layers[0].self_attn
        self._head = output_head(model)
        plain = type(self._head) is torch.nn.Linear
        parts = [part for layer in inner.layers for part in linears_of(layer)]
        self._embedding = inner.embed_tokens.weight
        self._rotary = inner.rotary_emb
        self._norm = inner.norm.weight
        self._activation = inner.layers[0].mlp.act_fn
        config = model.config
        self._sizes = Sizes(
            config.num_attention_heads,
            config.num_key_value_heads,
            attention.head_dim,
            config.rms_norm_eps,
            attention.scaling,
            config._attn_implementation == "eager",
        )
        rows = not compiler and row_pass.fits(parts, self._sizes, self._activation)
        # What is compiled is given plain weights: inductor lays them out itself, and refuses those that are.
        layout: Layout = "plain" if compiler else layout_of([*parts, self._head] if plain else parts, rows)
        pages = Pages()
        self._blocks = [block_of(layer, layout, pages) for layer in inner.layers]
        self._head_product = product_of(self._head, layout=layout, pages=pages) if plain else None
        self._layer = compiler(layer_forward) if compiler else layer_forward
        self._rows = RowPass(self._blocks, self._sizes, self._norm, self._head_product) if rows else None

    @property
    def row_kernels(self) -> bool:
        """Whether passes over kept tokens have kernels of their own."""
        return self._rows is not None

    @property
    def compile_s(self) -> float:
        """Seconds that those took to compile, or to be read from disk."""
        return self._rows.compile_s if self._rows else 0.0

    @property
    def packed_bytes(self) -> int:
        """Bytes of weights that exist twice, in the layout of what multiplies them."""
        products = [self._head_product, *(p for b in self._blocks for p in (b.joined, b.out, b.gated, b.down))]
        return sum(product.size for product in products if product)

    def __call__(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        kept: StaticKeyValues,
        last: int,
    ) -> torch.Tensor:
        """Logits [last, vocabulary] of the last rows. `ids`, `positions` [1, n]; `mask` [1, 1, n, window] or None:
        a prompt attends causally to itself, a lone token to everything."""
        sizes = self._sizes
        hidden = functional.embedding(ids[0], self._embedding)
        cos, sin = (part[0] for part in self._rotary(hidden[None], positions))
        half = sizes.head_dim // 2
        turn = torch.cat((-sin[:, :half], sin[:, half:]), -1)
        if self._rows and kept.slots is not None:
            found, projected = self._rows(hidden, cos, turn, mask, kept)
            return found[-last:] if projected else self._logits(found[-last:])
        mask = for_heads(mask, sizes)
        # Prompts have every length; compiling for each would take longer than it saves.
        layer = layer_forward if kept.slots is None else self._layer
        for block, held in zip(self._blocks, kept.layers, strict=True):
            hidden = layer(
                hidden, block, sizes, self._activation, cos[:, None], turn[:, None], mask, held, kept.slots, kept.window
            )
        return self._logits(_normed(hidden[-last:], self._norm, sizes.epsilon))

    def _logits(self, normed: torch.Tensor) -> torch.Tensor:
        return times(normed, self._head_product) if self._head_product else self._head(normed)


def fits(model: PreTrainedModel) -> bool:
    """Whether this is one of the families, with plain weights and nothing unusual about them."""
    if type(model).__name__ not in FAMILIES or not type(model).__module__.startswith("transformers.models."):
        return False
    inner: Any = model.model
    # A quantised weight is a tensor of another class in an ordinary Linear.
    plain = all(
        type(part) is torch.nn.Linear and type(part.weight) is torch.nn.Parameter
        for layer in inner.layers
        for part in linears_of(layer)
    )
    hooked = any(getattr(module, "_hf_hook", None) is not None for module in model.modules())
    return plain and not hooked and model.config._attn_implementation in ("sdpa", "eager")


def layer_forward(
    hidden: torch.Tensor,
    block: Block,
    sizes: Sizes,
    activation: Callable[[torch.Tensor], torch.Tensor],
    cos: torch.Tensor,
    turn: torch.Tensor,
    mask: torch.Tensor | None,
    held: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor | None,
    window: int,
) -> torch.Tensor:
    """One layer on hidden states [n, hidden size]. The same code object for all layers: it is compiled once."""
    count = hidden.shape[0]
    heads, kv_heads = sizes.heads, sizes.kv_heads
    every = times(_normed(hidden, block.before, sizes.epsilon), block.joined)
    every = every.view(count, heads + 2 * kv_heads, sizes.head_dim)
    turned = every[:, : heads + kv_heads]
    if block.head_scales is not None:
        turned = _normed(turned, block.head_scales, sizes.epsilon)
    turned = turned * cos + turned.roll(sizes.head_dim // 2, -1) * turn
    queries, keys = turned[:, :heads].transpose(0, 1), turned[:, heads:].transpose(0, 1)[None]
    values = every[:, heads + kv_heads :].transpose(0, 1)[None]
    keys, values = write(held, slots, window, keys, values)
    seen = _attention(queries, keys, values, mask, sizes, slots is None)
    hidden = hidden + times(seen, block.out)
    gate, up = times(_normed(hidden, block.after, sizes.epsilon), block.gated).chunk(2, -1)
    return hidden + times(activation(gate) * up, block.down)


def _attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    sizes: Sizes,
    causal: bool,
) -> torch.Tensor:
    """[n, heads · head size] from queries [heads, n, head size] and keys and values [1, kv heads, m, head size]."""
    count = queries.shape[1]
    if causal:
        seen = functional.scaled_dot_product_attention(
            queries[None], keys, values, is_causal=True, scale=sizes.scaling, enable_gqa=sizes.heads != sizes.kv_heads
        )[0]
        return seen.transpose(0, 1).reshape(count, -1)
    if sizes.additive:
        shared = queries.reshape(1, sizes.kv_heads, -1, sizes.head_dim)
        scores = torch.matmul(shared, keys.transpose(2, 3)) * sizes.scaling
        if mask is not None:
            scores = scores + mask
        seen = torch.matmul(scores.softmax(-1, dtype=torch.float32).to(shared.dtype), values).view(queries.shape)
    else:
        seen = attend(queries, keys, values, mask, sizes)
    return seen.transpose(0, 1).reshape(count, -1)


def _normed(states: torch.Tensor, scale: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMS norm over the last dimension, in float32 and rounded before it is scaled, as the models do."""
    wide = states.float() if states.dtype == torch.float64 else states  # 16-bit input is widened inside.
    return scale * functional.rms_norm(wide, (states.shape[-1],), None, epsilon).to(states.dtype)
