"""Keys and values that grow in place.

transformers' own growing cache makes every layer's keys and values anew on each pass, the old ones and the new ones
joined: at 1,000 tokens of context some 46 MB a token on a model of 135 million weights, a twentieth of its step. Here
all layers lie in one block as long as the request: a pass writes what is new behind what is there and sees views, which
are made for all layers at once, since a view costs a layer as much as copying a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from dfbench.workers.static_cache import Shape, states_of_a_token

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MORE = 64  # A request that nobody announced makes the block longer by this many tokens and a quarter.


def growing_cache(model: PreTrainedModel, cache_argument: str) -> GrowingCache | None:
    """An empty cache for this model; None where layers differ in what they keep, or in where they keep it."""
    kept = states_of_a_token(model, cache_argument)
    if any(states is None for states in kept):
        return None
    if len({(tuple(states.shape), states.dtype, states.device) for states in kept}) != 1:
        return None
    _, heads, _, head_dim = kept[0].shape
    return GrowingCache(model, Shape(len(kept) // 2, heads, head_dim, kept[0].dtype), kept[0].device)


class GrowingCache(DynamicCache):
    """For one request after another: `clear` lies between them.

    `keys` and `values` [1, layers · heads, capacity, head size] are those of all layers, which is what `tree.compact`
    moves. To crop only shortens what is seen; what comes next is written over the rest.
    """

    def __init__(self, model: PreTrainedModel, shape: Shape, device: torch.device) -> None:
        super().__init__(config=model.config)
        self._shape, self._device = shape, device
        self._own_layers = [GrowingLayer(self, at) for at in range(shape.layers)]
        self.layers = list(self._own_layers)
        self._allocate(0)

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
        return self.keys.shape[2]

    def reserve(self, tokens: int) -> None:
        """The next request is this long. Between requests only: a block that is too short is made anew, empty."""
        if tokens > self.capacity:
            self._allocate(0)  # Lets go of the old one first.
            self._allocate(tokens)

    def clear(self) -> None:
        """Forget every key and value; the block stays."""
        for layer in self._own_layers:
            layer.length = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a layer's new keys and values [1, heads, n, head size]; all that it has, as views."""
        layer, values = self._own_layers[layer_idx], self._shape.layers + layer_idx
        start, fed = layer.length, key_states.shape[2]
        if self._viewed != (start, fed):
            self._view(start, fed)
        self._new[layer_idx].copy_(key_states)
        self._new[values].copy_(value_states)
        layer.length = start + fed
        return self._all[layer_idx], self._all[values]

    def of_layer(self, layer: int, values: bool) -> torch.Tensor:
        """One layer's keys, or values, [1, heads, tokens, head size]."""
        at = layer + self._shape.layers * values
        return self._states[at].narrow(2, 0, self._own_layers[layer].length)

    def _view(self, start: int, fed: int) -> None:
        """Views for a pass of `fed` tokens behind `start`: of all layers' keys, then of their values."""
        if start + fed > self.capacity:
            old = self._states
            self._allocate(max(start + fed, self.capacity + self.capacity // 4 + _MORE))
            self._states.narrow(3, 0, start).copy_(old.narrow(3, 0, start))
        self._viewed = start, fed
        self._new = self._states.narrow(3, start, fed).unbind(0)
        self._all = self._states.narrow(3, 0, start + fed).unbind(0)

    def _allocate(self, tokens: int) -> None:
        layers, heads, head_dim, dtype = self._shape
        block = torch.empty((2, layers * heads, tokens, head_dim), dtype=dtype, device=self._device)
        self.keys, self.values = block[:1], block[1:]
        self._states = block.view(2 * layers, 1, heads, tokens, head_dim)
        self._viewed = -1, 0
        self._new = self._all = ()


class GrowingLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer of the block, as transformers knows layers."""

    def __init__(self, cache: GrowingCache, at: int) -> None:
        self._cache, self._at = cache, at
        self.length = 0
        self.is_initialized = True

    @property
    def keys(self) -> torch.Tensor:  # type: ignore[override]
        """[1, heads, tokens, head size]."""
        return self._cache.of_layer(self._at, values=False)

    @property
    def values(self) -> torch.Tensor:  # type: ignore[override]
        """[1, heads, tokens, head size]."""
        return self._cache.of_layer(self._at, values=True)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache.update(key_states, value_states, self._at)

    def get_seq_length(self) -> int:
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        self.length -= abs(tokens_to_remove)
