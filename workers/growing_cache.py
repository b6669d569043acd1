"""Keys and values that grow in place.

transformers' own growing cache makes every layer's keys and values anew on each pass, the old ones and the new ones
joined: at 1,000 tokens of context some 46 MB a token on a model of 135 million weights, a twentieth of its step. Here a
layer has a buffer as long as the request, writes what is new behind what is there, and hands out views.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


_MORE = 64  # Buffers of a request that nobody announced grow by this many tokens and a quarter.


class GrowingCache(DynamicCache):
    """A cache of full attention in every layer, used for one request after another: `clear` lies between them."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self._growing = [GrowingLayer() for _ in self.layers]
        self.layers = list(self._growing)

    def reserve(self, tokens: int) -> None:
        """The next request is this long. Between requests only: buffers that are too short are made anew, empty."""
        for layer in self._growing:
            layer.reserve(tokens)

    def clear(self) -> None:
        """Forget every key and value; the buffers stay."""
        for layer in self._growing:
            layer.clear()


class GrowingLayer(DynamicLayer):
    """One layer. `keys` and `values` [1, heads, tokens, head size] are the beginnings of buffers; to crop shortens the
    view, and what comes next is written over the rest."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._planned = 0
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
        return 0 if self._buffers is None else self._buffers[0].shape[2]

    def reserve(self, tokens: int) -> None:
        """Make room for a request of this many tokens; the first buffers are made when a token's shape is known."""
        self._planned = tokens
        if self._buffers is not None and tokens > self.capacity:
            keys, values = self._buffers
            self._buffers = _longer(keys, tokens), _longer(values, tokens)
            self.clear()

    def clear(self) -> None:
        """Forget every token."""
        if self._buffers is not None:
            self.keys, self.values = (buffer.narrow(2, 0, 0) for buffer in self._buffers)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Learn what a token looks like."""
        self.device = key_states.device
        tokens = max(self._planned, key_states.shape[2])
        self._buffers = _longer(key_states, tokens), _longer(value_states, tokens)
        self.is_initialized = True
        self.clear()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add new keys and values [1, heads, n, head size]; all of them, as views."""
        if self._buffers is None:
            self.lazy_initialization(key_states, value_states)
        assert self._buffers is not None and self.keys is not None and self.values is not None
        start, more = self.keys.shape[2], key_states.shape[2]
        if start + more > self.capacity:
            tokens = max(start + more, self.capacity + self.capacity // 4 + _MORE)
            self._buffers = _longer(self.keys, tokens), _longer(self.values, tokens)
            for buffer, held in zip(self._buffers, (self.keys, self.values), strict=True):
                buffer.narrow(2, 0, start).copy_(held)
        keys, values = self._buffers
        keys.narrow(2, start, more).copy_(key_states)
        values.narrow(2, start, more).copy_(value_states)
        self.keys, self.values = keys.narrow(2, 0, start + more), values.narrow(2, 0, start + more)
        return self.keys, self.values


def _longer(states: torch.Tensor, tokens: int) -> torch.Tensor:
    """Room for this many tokens, shaped like `states`."""
    batch, heads, _, size = states.shape
    return states.new_empty((batch, heads, tokens, size))
