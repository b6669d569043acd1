"""Passes of fixed width: the static inputs of each, and how they run, by replaying a CUDA graph or eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np
import torch

from dfbench.workers.static_cache import StaticKeyValues

Forward = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None", StaticKeyValues, int], torch.Tensor]
"""(ids [1, n], positions [1, n], mask, keys and values, rows wanted) → logits [rows, vocabulary]."""


class Frame:
    """The inputs of a pass of `width` tokens: one block of int64, on the device, filled by one copy.

    `past` [1]: tokens in the cache; `ids`, `positions` [1, width]; `seen` [width, width]: 1 where row i sees fed token
    j. Rows beyond the tokens that are really fed are padding: no real row sees them, and they see something, so that
    what they leave in the cache is finite.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        self.width = width
        size = 1 + 2 * width + width * width
        self._block = torch.zeros(size, dtype=torch.int64, device=device)
        self._host = self._block if device.type == "cpu" else torch.zeros(size, dtype=torch.int64, pin_memory=True)
        self.past, ids, positions, seen = self._block.split([1, width, width, width * width])  # type: ignore[no-untyped-call]
        self.ids, self.positions, self.seen = ids[None], positions[None], seen.view(width, width)
        self._head = 1 + 2 * width
        words = self._host.numpy()
        self._past, self._ids, self._positions = words[:1], words[1 : 1 + width], words[1 + width : self._head]
        self._seen = words[self._head :].reshape(width, width)
        self._chain = False

    def fill(
        self, past: int, tokens: Sequence[int], offsets: Sequence[int] | None = None, seen: np.ndarray | None = None
    ) -> None:
        """Set what the next pass feeds: a chain, or a tree's positions (from `past` on) and visibility."""
        fed = len(tokens)
        self._past[0] = past
        self._ids[:fed] = tokens
        self._positions[:] = np.arange(past, past + self.width)
        if offsets is not None:
            self._positions[:fed] = np.add(offsets, past)
        if seen is None:
            changed = not self._chain
            if changed:
                self._seen[:] = np.tri(self.width, dtype=np.int64)
        else:
            changed = True
            self._seen[:] = 0
            self._seen[:, 0] = 1
            self._seen[:fed, :fed] = seen
        self._chain = seen is None
        if self._host is not self._block:
            words = self._block.numel() if changed else self._head
            self._block[:words].copy_(self._host[:words], non_blocking=True)


class Runner:
    """Runs passes of the given widths over one block of keys and values.

    `replay`: record each width's kernels once a window as a CUDA graph. `exact`: windows end with the last token that
    is fed, and not somewhere beyond it. Masks are added to the scores in `mask_dtype`: SDPA would turn others into
    such ones in every layer.
    """

    def __init__(
        self,
        forward: Forward,
        widths: Sequence[int],
        device: torch.device,
        *,
        replay: bool,
        exact: bool,
        mask_dtype: torch.dtype,
    ) -> None:
        self._forward = forward
        self.frames = {width: Frame(width, device) for width in widths}
        self.replay = replay
        self.exact = exact
        self._mask_dtype = mask_dtype
        self._device = device
        self._kept: StaticKeyValues | None = None
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool: torch.cuda._POOL_HANDLE | None = None
        self._iota = torch.arange(0, device=device)
        self.capture_s = 0.0

    @property
    def graphs(self) -> int:
        """How many graphs there are."""
        return len(self._graphs)

    def use(self, kept: StaticKeyValues) -> None:
        """Run over these keys and values from now on; graphs over others are of no more use."""
        self._graphs.clear()
        self._kept = kept
        self._iota = torch.arange(kept.capacity, device=self._device)

    def prepare(self, window: int) -> None:
        """Record the graphs of every width at this window, the widest first, whose memory the others then share."""
        if not self.replay:
            return
        began = perf_counter()
        for width in sorted(self.frames, reverse=True):
            if (width, window) in self._graphs:
                continue
            # Recording runs the pass a few times, which must not write over tokens of a request that is under way.
            past = self.frames[width].past
            held = past.clone()
            past.fill_(window - width)
            self._graphs[width, window] = self._capture(width, window)
            past.copy_(held)
        self.capture_s += perf_counter() - began

    def run(self, width: int, window: int) -> torch.Tensor:
        """Logits [width, vocabulary] of the frame of this width; the next pass overwrites them."""
        if not self.replay:
            return self._compute(width, window)
        if (width, window) not in self._graphs:
            self.prepare(window)
        graph, logits = self._graphs[width, window]
        graph.replay()
        return logits

    def _capture(self, width: int, window: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # Libraries choose and load their kernels before anything is recorded.
                self._compute(width, window)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on with what they do to the device; this thread's work is what is recorded.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._compute(width, window)
        return graph, logits

    def _compute(self, width: int, window: int) -> torch.Tensor:
        frame, kept = self.frames[width], self._kept
        assert kept is not None, "`use` comes first"
        kept.slots, kept.window = frame.past + self._iota[:width], window
        return self._forward(frame.ids, frame.positions, self._mask(frame, kept.slots, window), kept, width)

    def _mask(self, frame: Frame, slots: torch.Tensor, window: int) -> torch.Tensor | None:
        """[1, 1, width, window]: the cache, and what the frame says of the fed tokens."""
        if frame.width == 1 and self.exact:
            return None  # The window ends with the one token, which sees everything.
        past = (self._iota[:window] < frame.past).expand(frame.width, window)
        hidden = ~past.index_copy(1, slots, frame.seen.bool())[None, None]
        lowest = torch.finfo(self._mask_dtype).min
        return torch.zeros_like(hidden, dtype=self._mask_dtype).masked_fill_(hidden, lowest)
