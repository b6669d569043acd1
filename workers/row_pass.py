"""A pass of some rows through a decoder on a CPU, in bfloat16: all threads together in compiled code.

narrow   one function from the embedding to the logits, bound by reading the weights
wide     torch makes the attention; where the processor has no tiles (see `tiles`), oneDNN the products
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dfbench.workers import team, tiles
from dfbench.workers.lean_weights import attend, for_heads, times
from dfbench.workers.row_kernels import bits

if TYPE_CHECKING:
    from dfbench.workers.lean_weights import Block, Product, Sizes
    from dfbench.workers.static_cache import StaticKeyValues

NARROW = 8
"""The widest pass whose products are made here in loops, where oneDNN has the weights as well."""
WORK = 4096
"""Rows times tokens that they see, up to which the attention made here is quicker than torch's: measured on two cores.
Where loops make the products too, it is twice that."""


class RowPass:
    """Passes of tokens that follow one another over kept keys and values. Raises nothing: ask `fits` first.

    `head`: the last projection, where it is a plain one.
    """

    def __init__(self, blocks: Sequence[Block], sizes: Sizes, norm: torch.Tensor, head: Product | None) -> None:
        found = team.find()
        assert found is not None, "`fits` comes first"
        began = perf_counter()
        # Compiles: a quarter of a minute, where no disk has it yet.
        from dfbench.workers import pass_kernels, product_kernels

        self._kernels, self._products = pass_kernels, product_kernels
        self.compile_s = perf_counter() - began
        self._team, self._blocks, self._sizes = found, blocks, sizes
        self._held = norm, head  # Compiled code has their addresses.
        whole = head is not None and head.bias is None
        self._vocab = head.weight.shape[0] if head is not None and whole else 0
        layout = blocks[0].down.layout
        # A CPU without products of bfloat16 has none in oneDNN either.
        self._alone, self._tiles = layout == "plain", layout == "tiles"
        self._configuration = tiles.configuration()
        hidden, inner = blocks[0].down.weight.shape
        mixed = sizes.heads * sizes.head_dim
        every = mixed + 2 * sizes.kv_heads * sizes.head_dim
        self._widths = {"delta": hidden, "normed": hidden, "joined": every, "attended": mixed, "gated": 2 * inner}
        self._widths |= {"inner": inner, "queries": mixed}
        self._scratch: dict[str, np.ndarray] = {}
        self._addresses = np.array([_addresses(block, pass_kernels.BLOCK) for block in blocks], np.int64)
        self._kept: StaticKeyValues | None = None
        self._it = np.zeros(1, pass_kernels.PASS)
        self._say(barrier=found.barrier, number=found.number, size=found.size)
        self._say(layers=len(blocks), vocab=self._vocab, hidden_size=hidden, inner_size=inner)
        self._say(heads=sizes.heads, kv_heads=sizes.kv_heads, head_dim=sizes.head_dim)
        self._say(epsilon=sizes.epsilon, scaling=sizes.scaling, blocks=self._addresses.ctypes.data)
        self._say(last_norm=norm.data_ptr(), head=_place(head) if head is not None and whole else 0)
        self._say(tiles=self._configuration.ctypes.data if self._tiles else 0)

    def __call__(
        self,
        embedded: torch.Tensor,
        cos: torch.Tensor,
        turn: torch.Tensor,
        mask: torch.Tensor | None,
        kept: StaticKeyValues,
    ) -> tuple[torch.Tensor, bool]:
        """Logits [n, vocabulary] of the tokens that are written at `kept.slots`, which follow one another, and True;
        or, where the last projection is still to come, normed hidden states [n, hidden size] and False.

        `embedded` [n, hidden size]; `cos`, `turn` [n, head size]; `mask` [1, 1, n, window], 0 where a row sees, or None
        for a lone token.
        """
        assert kept.slots is not None, "a prompt goes through the layers"
        count, slot = len(embedded), int(kept.slots[0])
        threads = torch.get_num_threads()
        narrow = self._is_narrow(count, kept.window)
        self._use(kept, count, narrow)
        states = embedded.float().contiguous()
        cos, turn = cos.contiguous(), turn.contiguous()
        seen = np.ones((count, count), np.uint8) if mask is None else _seen(mask, slot)
        self._say(rows=count, slot=slot, states=states.data_ptr(), seen=seen.ctypes.data)
        self._say(cos=cos.data_ptr(), turn=turn.data_ptr())
        if narrow:
            return self._whole(embedded, threads)
        mask = for_heads(mask, self._sizes)
        if self._tiles:
            return self._by_segments(embedded, mask, kept, threads)
        return self._by_products(embedded, mask, kept, threads), False

    def _is_narrow(self, count: int, window: int) -> bool:
        if self._tiles:
            return count * window <= WORK
        return self._alone or (count <= NARROW and count * window <= 2 * WORK)

    def _whole(self, embedded: torch.Tensor, threads: int) -> tuple[torch.Tensor, bool]:
        logits = self._begin(embedded)
        self._team.start(self._kernels.run_pass.address, self._it.ctypes.data, threads)
        return self._end(logits)

    def _by_segments(
        self, embedded: torch.Tensor, mask: torch.Tensor | None, kept: StaticKeyValues, threads: int
    ) -> tuple[torch.Tensor, bool]:
        """The same with torch's attention."""
        sizes, count, window = self._sizes, len(embedded), kept.window
        logits, run = self._begin(embedded), self._kernels.run_segment.address
        queries = torch.from_numpy(self._scratch["queries"]).view(embedded.dtype)
        # Rows of scratch memory follow one another, so the first `count` of them hold all heads' queries.
        queries = queries[:count].view(sizes.heads, count, sizes.head_dim)
        attended = torch.from_numpy(self._scratch["attended"]).view(embedded.dtype)[:count]
        attended = attended.view(count, sizes.heads, sizes.head_dim).transpose(0, 1)
        for layer, (keys, values) in enumerate(kept.layers):
            self._it["layer"] = layer
            self._team.start(run, self._it.ctypes.data, threads)
            attended.copy_(attend(queries, keys[:, :, :window], values[:, :, :window], mask, sizes))
        self._it["layer"] = len(kept.layers)
        self._team.start(run, self._it.ctypes.data, threads)
        return self._end(logits)

    def _begin(self, embedded: torch.Tensor) -> torch.Tensor:
        """Where logits are to come."""
        logits = embedded.new_empty((len(embedded), self._vocab))
        self._scratch["delta"][: len(embedded)] = 0
        self._say(logits=logits.data_ptr(), **{name: array.ctypes.data for name, array in self._scratch.items()})
        return logits

    def _end(self, logits: torch.Tensor) -> tuple[torch.Tensor, bool]:
        if self._vocab:
            return logits, True
        normed = torch.from_numpy(self._scratch["normed"][: len(logits)])
        return (normed.view(logits.dtype) if self._products.DOT else normed.to(logits.dtype)), False

    def _by_products(
        self, embedded: torch.Tensor, mask: torch.Tensor | None, kept: StaticKeyValues, threads: int
    ) -> torch.Tensor:
        """Normed hidden states; products and attention are torch's."""
        sizes, count, window = self._sizes, len(embedded), kept.window
        normed, inner = (embedded.new_empty((count, self._widths[name])) for name in ("normed", "inner"))
        queries = embedded.new_empty((sizes.heads, count, sizes.head_dim))
        self._say(normed=normed.data_ptr(), inner=inner.data_ptr(), queries=queries.data_ptr())
        delta = torch.zeros_like(embedded)
        for layer, (block, (keys, values)) in enumerate(zip(self._blocks, kept.layers, strict=True)):
            self._between(layer, 0, threads, delta=delta)
            self._between(layer, 1, threads, joined=times(normed, block.joined))
            seen = attend(queries, keys[:, :, :window], values[:, :, :window], mask, sizes)
            attended = seen.transpose(0, 1).reshape(count, -1)
            self._between(layer, 2, threads, delta=times(attended, block.out))
            self._between(layer, 3, threads, gated=times(normed, block.gated))
            delta = times(inner, block.down)
        self._between(len(self._blocks), 0, threads, delta=delta)
        return normed

    def _between(self, layer: int, step: int, threads: int, **given: torch.Tensor) -> None:
        it = self._it
        it["layer"], it["step"] = layer, step
        for name, tensor in given.items():
            it[name] = tensor.data_ptr()
        self._team.start(self._kernels.run_between.address, it.ctypes.data, threads)

    def _say(self, **told: Any) -> None:
        for name, number in told.items():
            self._it[name] = number

    def _use(self, kept: StaticKeyValues, count: int, narrow: bool) -> None:
        """Run over these keys and values, with scratch memory for this many rows."""
        if kept is not self._kept:
            self._kept = kept
            self._say(keys=kept.keys.data_ptr(), values=kept.values.data_ptr(), capacity=kept.capacity)
        tile = self._products.TILE
        if narrow:
            group = self._sizes.heads // self._sizes.kv_heads * count
            rows = self._sizes.kv_heads * -(-group // tile) * tile
            for name, needed in (("scores", rows * kept.capacity), ("totals", rows)):
                if needed > len(self._scratch.get(name, ())):
                    self._scratch[name] = np.zeros(needed, np.float32)
        if count > len(self._scratch.get("queries", ())) - tile:
            # Products read and write whole tiles of rows; what is beyond the pass's own is ignored.
            rows = -(-count // tiles.SIDE) * tiles.SIDE + tile
            for name, width in self._widths.items():
                kind = self._products.STATE if name in self._kernels.STATES else np.float32
                self._scratch[name] = np.zeros((rows, width), kind)


def fits(parts: Sequence[Any], sizes: Sizes, activation: Any) -> bool:
    """Whether `RowPass` does what the layers with these projections do, here: bfloat16 on a CPU, SDPA, SiLU, no biases,
    torch's threads."""
    return (
        not sizes.additive
        and type(activation).__name__ in ("SiLU", "SiLUActivation")
        and all(part.bias is None for part in parts)
        and all(part.weight.dtype == torch.bfloat16 and part.weight.device.type == "cpu" for part in parts)
        and all(part.weight.is_contiguous() for part in parts)
        and team.find() is not None
    )


def _addresses(block: Block, order: Sequence[str]) -> list[int]:
    places = {
        **{name: getattr(block, name).data_ptr() for name in ("before", "after")},
        **{name: _place(getattr(block, name)) for name in ("joined", "out", "gated", "down")},
        "scales": 0 if block.head_scales is None else block.head_scales.data_ptr(),
    }
    return [places[name] for name in order]


def _place(product: Product) -> int:
    """Address of a weight as passes read it."""
    return (product.packed if product.layout == "tiles" and product.packed is not None else product.weight).data_ptr()


def _seen(mask: torch.Tensor, slot: int) -> np.ndarray:
    """[n, n]: which of the pass's own tokens each of them sees."""
    rows = mask.shape[2]
    return np.ascontiguousarray(bits(mask)[0, 0, :, slot : slot + rows] == 0).view(np.uint8)
