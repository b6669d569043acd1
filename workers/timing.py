"""The forward's clock and the way to the device and back: what differs between CPU and CUDA.

On CUDA a host clock around a call measures how long it took to enqueue it, so events time the forward, and the host
waits once a step, for the argmaxes that it needs anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any, Protocol

import numpy as np
import torch


class ForwardTimer(Protocol):
    """Times one forward after another and carries token ids to the device and results back."""

    def upload(self, values: Sequence[int]) -> torch.Tensor:
        """int64 tensor [1, n] on the device. Call at most twice a pass."""

    def begin(self) -> None:
        """Just before the forward."""

    def end(self) -> None:
        """Just after it was called."""

    def read(self, ids: Any, topk: torch.Tensor | None) -> tuple[list[int], np.ndarray | None, int, int]:
        """Wait; return the ids (a tensor on the device, or a list where that is the host), the top-k ids, the
        forward's duration in ns and the host clock when it was done."""


def forward_timer(device: torch.device) -> ForwardTimer:
    """The timer for a device."""
    return CudaTimer(device) if device.type == "cuda" else HostTimer()


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A small host tensor on the device, without waiting for it: from pageable memory the copy would."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


class HostTimer:
    """For devices that compute while the host waits."""

    def __init__(self) -> None:
        self._began = 0
        self._ended = 0

    def upload(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor([values])

    def begin(self) -> None:
        self._began = perf_counter_ns()

    def end(self) -> None:
        self._ended = perf_counter_ns()

    def read(self, ids: Any, topk: torch.Tensor | None) -> tuple[list[int], np.ndarray | None, int, int]:
        chosen = None if topk is None else topk.numpy()
        known = ids if isinstance(ids, list) else ids.tolist()
        return known, chosen, self._ended - self._began, self._ended


class CudaTimer:
    """Events around the forward; results into pinned memory, then one wait. Pinned buffers are reused: after the wait
    of one pass nothing of it is in flight."""

    def __init__(self, device: torch.device, capacity: int = 4096) -> None:
        self._device = device
        self._start, self._end, self._done = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(3)
        )
        self._staging = [torch.empty(capacity, dtype=torch.int64, pin_memory=True) for _ in range(2)]
        self._results = torch.empty(capacity, dtype=torch.int64, pin_memory=True)
        self._turn = 0

    def upload(self, values: Sequence[int]) -> torch.Tensor:
        self._turn ^= 1
        count = len(values)
        if count > self._staging[self._turn].numel():
            self._staging[self._turn] = torch.empty(2 * count, dtype=torch.int64, pin_memory=True)
        staged = self._staging[self._turn][:count]
        staged.numpy()[:] = values
        return staged.to(self._device, non_blocking=True)[None]

    def begin(self) -> None:
        self._start.record()

    def end(self) -> None:
        self._end.record()

    def read(self, ids: Any, topk: torch.Tensor | None) -> tuple[list[int], np.ndarray | None, int, int]:
        rows = ids.numel()
        wanted = rows if topk is None else rows + topk.numel()
        if wanted > self._results.numel():
            self._results = torch.empty(2 * wanted, dtype=torch.int64, pin_memory=True)
        self._results[:rows].copy_(ids, non_blocking=True)
        if topk is not None:
            self._results[rows:wanted].copy_(topk.reshape(-1), non_blocking=True)
        self._done.record()
        self._done.synchronize()
        ready = perf_counter_ns()
        chosen = None if topk is None else self._results[rows:wanted].numpy().reshape(rows, -1).copy()
        return self._results[:rows].tolist(), chosen, round(self._start.elapsed_time(self._end) * 1e6), ready
