"""Keys and values in buffers that keep their place and length, so that a pass is the same kernels every time.

A pass writes at `slots` and attends to the first `window` tokens; what lies beyond the decided ones is garbage that the
mask hides and the next pass overwrites. A prompt, which begins at slot 0, is run whole: it attends to itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from dfbench.errors import EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Shape(NamedTuple):
    """What one token leaves in the cache: [layers, heads, head size] keys, and as many values."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self.layers * self.heads * self.head_dim * self.dtype.itemsize


def shape_of(model: PreTrainedModel, cache_argument: str) -> Shape:
    """Read off a growing cache after one token. Raises EngineError where layers differ from one another."""
    kept = states_of_a_token(model, cache_argument)
    found = {tuple(states.shape) for states in kept}
    if len(found) != 1:
        raise EngineError(
            f"the model '{model.config.model_type}' keeps keys and values of different shapes, which one static buffer"
            " cannot hold: write engine cached."
        )
    _, heads, _, head_dim = found.pop()
    return Shape(len(kept) // 2, heads, head_dim, kept[0].dtype)


def states_of_a_token(model: PreTrainedModel, cache_argument: str) -> list[torch.Tensor]:
    """Keys and values of every layer, in turn, as a growing cache holds them after one token."""
    cache = DynamicCache(config=model.config)
    token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        model(input_ids=token, use_cache=True, logits_to_keep=1, **{cache_argument: cache})
    layers: list[Any] = cache.layers  # Layers of other kinds, which hold neither, are refused with the model.
    return [states for layer in layers for states in (layer.keys, layer.values)]


def write(
    held: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor | None,
    window: int,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put new keys and values [1, heads, n, head size] into one layer's buffers; return those to attend to.

    Without `slots` they are a prompt's, and are all there is.
    """
    if slots is None:
        for buffer, states in zip(held, (keys, values), strict=True):
            buffer[:, :, : states.shape[2]] = states
        return keys, values
    for buffer, states in zip(held, (keys, values), strict=True):
        buffer.index_copy_(2, slots, states)
    return held[0][:, :, :window], held[1][:, :, :window]


class StaticKeyValues:
    """The buffers of all layers, in one block, so that moving tokens takes a few kernels and not a few per layer.

    `keys` and `values` are [1, layers · heads, capacity, head size], which is what `tree.compact` moves.
    """

    def __init__(self, shape: Shape, capacity: int, device: torch.device) -> None:
        self.shape = shape
        self.capacity = capacity
        block = torch.zeros(
            (2, 1, shape.layers * shape.heads, capacity, shape.head_dim), dtype=shape.dtype, device=device
        )
        self.keys, self.values = block[0], block[1]
        self.layers = [
            (self.keys[:, at : at + shape.heads], self.values[:, at : at + shape.heads])
            for at in range(0, shape.layers * shape.heads, shape.heads)
        ]
        self.slots: torch.Tensor | None = None
        self.window = 0
        self.cache = Cache(layers=[_Layer(self, layer) for layer in range(shape.layers)])
        """This block as transformers' models write to it."""

    @property
    def size(self) -> int:
        """Bytes."""
        return self.shape.bytes_per_token * self.capacity

    def take(self, other: StaticKeyValues, tokens: int) -> None:
        """Copy the first `tokens` tokens of another block."""
        self.keys[:, :, :tokens] = other.keys[:, :, :tokens]
        self.values[:, :, :tokens] = other.values[:, :, :tokens]


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of the block. Positions and masks come with the call, so it says that it is empty."""

    is_sliding = False

    def __init__(self, block: StaticKeyValues, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._block = block
        self._held = block.layers[layer]
        self.keys, self.values = self._held
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the block is there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return write(self._held, self._block.slots, self._block.window, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self._block.capacity
