"""Tree drafts in one pass: who may see whom, and which keys and values stay afterwards. Chains are the plain case.

A pass feeds `lead` tokens that are already decided (re-fed ones, the root last) and then the draft's nodes. The lead is
causal; a node sees the cache, the lead, its ancestors and itself. Positions go by depth, so siblings share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from dfbench.workers.timing import to_device


class KeyValues(Protocol):
    """One layer's cache: `keys` and `values` of shape [1, heads, tokens, head size]."""

    keys: torch.Tensor
    values: torch.Tensor


def visibility(parents: Sequence[int], lead: int = 1) -> np.ndarray:
    """Bool [lead + n, lead + n]: row i is what fed token i sees of the fed tokens, itself included."""
    size = lead + len(parents)
    seen = np.zeros((size, size), dtype=np.bool_)
    seen[:lead, :lead] = np.tri(lead, dtype=np.bool_)
    for node, parent in enumerate(parents, start=lead):
        seen[node] = seen[lead + parent if parent >= 0 else lead - 1]
        seen[node, node] = True
    return seen


def offsets(depths: Sequence[int], lead: int = 1) -> list[int]:
    """Position of every fed token, counted from the first of them."""
    return [*range(lead), *(lead - 1 + depth for depth in depths)]


class Masks:
    """Attention masks [1, 1, fed, past + fed] in the form that the attention implementation reads.

    SDPA takes bool, True = attend. Eager attention adds its mask to the scores, and would add a bool one as 0 and 1
    without complaint, so it gets 0 and the lowest number of `dtype`.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, additive: bool, width: int) -> None:
        self._device = device
        self._dtype = dtype
        self._additive = additive
        self._width = width
        self._reach = -1  # No triangle yet.
        self._causal = torch.empty(0)

    def causal(self, past: int, fed: int) -> torch.Tensor:
        """Mask of a chain: a view of one large triangle, so it costs nothing to make."""
        if past > self._reach or fed > self._width:
            self._grow(past, fed)
        first = self._reach - past
        return self._causal[None, None, :fed, first : self._reach + fed]

    def tree(self, past: int, parents: Sequence[int], lead: int = 1) -> torch.Tensor:
        """Mask of a tree below `lead` decided tokens, with `past` tokens in the cache."""
        seen = torch.from_numpy(visibility(parents, lead))
        fed = seen.shape[0]
        mask = torch.ones((1, 1, fed, past + fed), dtype=torch.bool)
        mask[0, 0, :, past:] = seen
        return self._form(to_device(mask, self._device))

    def _grow(self, past: int, fed: int) -> None:
        """Column `reach` of the triangle is the first fed token; those before it are the cache."""
        self._reach = max(2048, 2 * past)
        self._width = max(self._width, fed)
        triangle = torch.ones((self._width, self._reach + self._width), dtype=torch.bool, device=self._device)
        self._causal = self._form(triangle.tril_(self._reach))

    def _form(self, mask: torch.Tensor) -> torch.Tensor:
        if not self._additive:
            return mask
        lowest = torch.finfo(self._dtype).min
        return torch.zeros(mask.shape, dtype=self._dtype, device=mask.device).masked_fill_(~mask, lowest)


def is_prefix(path: Sequence[int]) -> bool:
    """Whether the accepted nodes are the first ones fed, in order, as they always are in a chain."""
    return all(node == place for place, node in enumerate(path))


def compact(layers: Sequence[KeyValues], start: int, path: Sequence[int]) -> None:
    """Move the keys and values of the nodes `path` to the front of the draft's, which begins at `start`, in place.

    `path` ascends, because parents come before children. RoPE was applied at the node's own position, which is the
    one it keeps, so nothing is rotated again.
    """
    if is_prefix(path):
        return
    source = to_device(torch.tensor([start + node for node in path]), layers[0].keys.device)
    for layer in layers:
        for states in (layer.keys, layer.values):
            # index_select copies: source and target overlap.
            states[:, :, start : start + len(path)] = states.index_select(2, source)
