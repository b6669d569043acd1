"""Memory for weights in huge pages, where the system gives them: reading a model then misses the page tables less.

A pass on a CPU reads every weight once, some hundred megabytes. In pages of 4 KiB every one of them has to be looked
up, on a virtual machine twice over; in pages of 2 MiB that is nothing beside the read.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch

_HUGE = 2 << 20
_CHUNK = 32 * _HUGE
_LINE = 64


class Pages:
    """A place for the weights of one model. It is given back when the last of them goes."""

    def __init__(self) -> None:
        self._chunk: torch.Tensor | None = None
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the CPU, with undefined content."""
        advice = getattr(mmap, "MADV_HUGEPAGE", None)
        if advice is None:
            return torch.empty(tuple(shape), dtype=dtype)
        size = math.prod(shape) * dtype.itemsize
        if self._chunk is None or self._used + size > len(self._chunk):
            self._chunk, self._used = _chunk(max(size, _CHUNK), advice), 0
        begin = self._used
        self._used = -(-(begin + size) // _LINE) * _LINE
        return self._chunk[begin : begin + size].view(dtype).view(tuple(shape))

    @staticmethod
    def holds(tensor: torch.Tensor) -> bool:
        """Whether a tensor is a part of such memory, or of some other block that is larger than itself."""
        return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


def _chunk(size: int, advice: int) -> torch.Tensor:
    """At least `size` bytes from the start of a huge page on."""
    memory = mmap.mmap(-1, (size // _HUGE + 2) * _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(advice)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % _HUGE :]
