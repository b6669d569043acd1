"""The weights of the short forward: projections that belong together as one, in the place of the model's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional

from dfbench.workers import tiles
from dfbench.workers.pages import Pages

Layout = Literal["plain", "onednn", "tiles"]
"""In what form weights are held beside their own: in none, in oneDNN's, in that of `tiles`."""


class Product(NamedTuple):
    """One projection. `packed`: the weight in the layout that its products take."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    packed: torch.Tensor | None
    layout: Layout

    @property
    def size(self) -> int:
        """Bytes of the second form."""
        return 0 if self.packed is None else self.weight.numel() * self.weight.element_size()


class Block(NamedTuple):
    """One layer's weights. `head_scales`: [heads + kv heads, head size], Qwen3's norms of queries and keys."""

    before: torch.Tensor
    joined: Product
    head_scales: torch.Tensor | None
    out: Product
    after: torch.Tensor
    gated: Product
    down: Product


class Sizes(NamedTuple):
    """What the layers have in common."""

    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    scaling: float
    additive: bool  # attention as two products with a mask that is added, instead of SDPA


def layout_of(parts: Sequence[Any], rows: bool) -> Layout:
    """What suits these projections. Tiles where the processor has them, all weights are whole ones, and passes go by
    `rows`, which alone take them; else what oneDNN takes."""
    weights = [part.weight for part in parts]
    if any(weight.device.type != "cpu" or weight.dtype != torch.bfloat16 for weight in weights):
        return "plain"
    if rows and tiles.available() and all(tiles.fit(weight) for weight in weights):
        return "tiles"
    backend = torch.backends.mkldnn
    there = backend.is_available() and backend.enabled  # type: ignore[no-untyped-call]
    return "onednn" if there and torch.ops.mkldnn._is_mkldnn_bf16_supported() else "plain"


def block_of(layer: Any, layout: Layout, pages: Pages) -> Block:
    """The weights of one of the model's layers. What is laid out for a CPU's passes is put into `pages`."""
    attention, mlp = layer.self_attn, layer.mlp
    scales = None
    if hasattr(attention, "q_norm"):
        counts = [part.out_features // attention.head_dim for part in (attention.q_proj, attention.k_proj)]
        norms = [attention.q_norm.weight, attention.k_norm.weight]
        scales = torch.cat([n.detach().expand(c, -1) for n, c in zip(norms, counts, strict=True)])
    return Block(
        layer.input_layernorm.weight,
        product_of(attention.q_proj, attention.k_proj, attention.v_proj, layout=layout, pages=pages),
        scales,
        product_of(attention.o_proj, layout=layout, pages=pages),
        layer.post_attention_layernorm.weight,
        product_of(mlp.gate_proj, mlp.up_proj, layout=layout, pages=pages),
        product_of(mlp.down_proj, layout=layout, pages=pages),
    )


def linears_of(layer: Any) -> tuple[Any, ...]:
    """The layer's projections, as the model has them."""
    attention, mlp = layer.self_attn, layer.mlp
    return (
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    )


def product_of(*parts: torch.nn.Linear, layout: Layout, pages: Pages) -> Product:
    """Projections of the same input as one."""
    weight = joined([part.weight for part in parts], pages if layout == "onednn" else None)
    biases = [part.bias for part in parts if part.bias is not None]
    return Product(weight, joined(biases, None) if biases else None, packed(weight, layout, pages), layout)


@torch.no_grad()
def joined(parts: Sequence[torch.Tensor], pages: Pages | None) -> torch.Tensor:
    """The rows of all parts as one tensor, of which the parts become views: no weight is held twice."""
    first = parts[0].data
    if len(parts) == 1 and (pages is None or pages.holds(first)):
        return first
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
    # Neighbours in memory need not be one block: tensors of their own lie side by side now and then.
    ends = [part.data_ptr() + part.numel() * part.element_size() for part in parts]
    one = {part.untyped_storage().data_ptr() for part in parts}
    if len(parts) > 1 and len(one) == 1 and all(p.data_ptr() == end for p, end in zip(parts[1:], ends, strict=False)):
        return first.as_strided(shape, first.stride())  # Joined by an earlier target.
    whole = first.new_empty(shape) if pages is None else pages.empty(shape, first.dtype)
    torch.cat([part.data for part in parts], out=whole)
    at = 0
    for part in parts:
        part.data = whole[at : at + part.shape[0]]
        at += part.shape[0]
    return whole


@torch.no_grad()
def packed(weight: torch.Tensor, layout: Layout, pages: Pages) -> torch.Tensor | None:
    """The weight once more, in a layout that is not its own."""
    if layout == "tiles":
        return tiles.tiled(weight, pages)
    if layout == "onednn":
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1)  # type: ignore[no-any-return]
    return None


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, sizes: Sizes
) -> torch.Tensor:
    """[heads, n, head size] from queries [heads, n, head size] and keys and values [1, kv heads, m, head size].

    Query heads that share keys are rows of one product, so keys and values are never repeated; a mask is, by
    `for_heads`.
    """
    shared = queries.reshape(1, sizes.kv_heads, -1, sizes.head_dim)
    seen = functional.scaled_dot_product_attention(shared, keys, values, attn_mask=mask, scale=sizes.scaling)
    return seen.view(queries.shape)


def for_heads(mask: torch.Tensor | None, sizes: Sizes) -> torch.Tensor | None:
    """A pass's mask [1, 1, n, window] for the rows that share keys."""
    return None if mask is None else mask.repeat(1, 1, sizes.heads // sizes.kv_heads, 1)


def times(states: torch.Tensor, product: Product) -> torch.Tensor:
    """[n, out] = states [n, in] · the weight's rows."""
    if product.layout == "onednn":
        if states.shape[0] == 1 and product.bias is None:
            # A lone row is a matrix-vector product, bound by reading: torch's own kernel reads faster than oneDNN's.
            return torch.mv(product.weight, states[0])[None]
        return torch.ops.mkldnn._linear_pointwise(states, product.packed, product.bias, "none", [], "")  # type: ignore[no-any-return]
    return functional.linear(states, product.weight, product.bias)
