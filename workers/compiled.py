"""The engine `compiled`: an AR baseline near the memory's speed, and the same passes for drafts.

Static keys and values, passes of a few fixed widths, on CUDA each recorded once as a graph; for the common decoders a
forward of few kernels (`lean`). An eager loop on a GPU waits for kernel launches, so that a wide pass costs what a
narrow one does by accident and every drafter looks good; here a step costs what it reads.

    prompt ─► run whole ─► slots 0 … p-1
    draft  ─► frame of the next larger width ─► graph ─► rows ─► accepted keys and values moved in place
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from dfbench.drafters.base import Draft
from dfbench.errors import EngineError, UsageError
from dfbench.workers import lean
from dfbench.workers.engine import TorchTarget
from dfbench.workers.graphs import Forward, Runner
from dfbench.workers.memory import STATIC_TOKENS
from dfbench.workers.spec import TargetSpec
from dfbench.workers.static_cache import StaticKeyValues, shape_of
from dfbench.workers.tree import compact, offsets, visibility

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96)
FIRST_WINDOW = 256
"""The shortest window of a graph; the others are its doublings."""
FIRST_REQUEST = STATIC_TOKENS - BUCKETS[-1]
"""Tokens of prompt and answer that buffers and graphs are made for before the first request is known."""
_MOST_SHAPES = 128
_STEP = 64  # Capacities are multiples of this.


class CompiledTarget(TorchTarget):
    """Greedy decoding in passes of fixed widths. `spec` tells the widths in use, once it is made."""

    def __init__(self, model: PreTrainedModel, spec: TargetSpec, **known: Any) -> None:
        widths = buckets(spec)
        spec = replace(spec, buckets=widths, max_queries=min(spec.max_queries, widths[-1]))
        super().__init__(model, spec, **known)
        if self.attention not in ("sdpa", "eager"):
            raise EngineError(f"attention '{self.attention}' takes no mask: use sdpa or eager, or engine cached.")
        if self.device.type == "cuda" and _rope_type(model) in ("dynamic", "longrope"):
            raise EngineError(
                f"the model's '{_rope_type(model)}' positions depend on a request's length, which a graph cannot"
                " follow: write engine cached."
            )
        self._widths = widths
        self._fixed = spec.options.get("context")
        if self._fixed is not None:
            self.context_limit = min(self.context_limit, int(self._fixed))
        self.lean = bool(spec.options.get("lean", True)) and lean.fits(model)
        self._forward = self._lean_forward() if self.lean else _transformers_forward(model, self.cache_argument)
        replay = self.device.type == "cuda"
        self._runner = Runner(
            self._forward,
            widths,
            self.device,
            replay=replay,
            exact=not replay and not spec.options.get("compile"),
            mask_dtype=model.dtype,
        )
        self._shape = shape_of(model, self.cache_argument)
        self._window = 0
        self._width = 0
        self._kept = self._allocate(self.context_limit if self._fixed else FIRST_REQUEST)
        self.reserve(min(FIRST_REQUEST, self.context_limit))

    def reserve(self, tokens: int) -> None:
        """Make buffers and graphs for a request of this many tokens, prompt and answer, so that none is made in it."""
        tokens = min(tokens, self.context_limit)
        self._window = self._planned(tokens)
        if self._window > self._kept.capacity:
            self._grow(tokens)
        with torch.inference_mode():
            self._runner.prepare(self._window)

    def engine_facts(self) -> dict[str, Any]:
        """What was built: widths, buffers, graphs, and what they cost."""
        forward = self._forward if isinstance(self._forward, lean.Lean) else None
        return {
            "forward": "lean" if forward else "transformers",
            "row_kernels": bool(forward and forward.row_kernels),
            "row_kernels_s": round(forward.compile_s, 3) if forward else 0.0,
            "compile": self.spec.options.get("compile", False),
            "static_tokens": self._kept.capacity,
            "static_bytes": self._kept.size,
            "packed_weight_bytes": forward.packed_bytes if forward else 0,
            "graphs": self._runner.graphs,
            "capture_s": round(self._runner.capture_s, 3),
        }

    def _empty(self) -> None:
        """Nothing to do: what lies beyond `past` is never seen, and is overwritten."""

    def _run(self, inputs: dict[str, Any], rows: int) -> torch.Tensor:
        if not self._past:
            return self._forward(inputs["ids"], inputs["positions"], None, self._kept, rows)
        return self._runner.run(self._width, inputs["window"])[inputs["fed"] - rows : inputs["fed"]]

    def _inputs(self, draft: Draft) -> dict[str, Any]:
        """Fill the frame of the next larger width; a prompt needs none."""
        lead, past = len(self._pending), self._past
        tokens = [*self._pending, *draft.tokens]
        fed = len(tokens)
        self._width = fed
        if not past:
            if fed > self._kept.capacity - self._widths[-1]:
                self.reserve(fed + FIRST_WINDOW)
            self._kept.slots = None
            return {"ids": self.timer.upload(tokens), "positions": self._positions[:, :fed]}
        self._width = next(width for width in self._widths if width >= fed)
        frame = self._runner.frames[self._width]
        if draft.parents is None or not draft.tokens:
            frame.fill(past, tokens)
        else:
            frame.fill(past, tokens, offsets(draft.depths(), lead), visibility(draft.parents, lead))
        return {"fed": fed, "window": self._reach(past + self._width)}

    def _padding(self, fed: int) -> int:
        return self._width - fed

    def _settle(self, kept: Sequence[int]) -> None:
        compact([self._kept], self._past, kept)

    def _reach(self, end: int) -> int:
        """The window of a pass that writes up to slot `end`: exact where no shape is kept, else the request's."""
        if end > self._kept.capacity:
            self._grow(end)
        if self._runner.exact:
            return end
        if end > self._window:
            self._window = self._planned(end)
            if self._window > self._kept.capacity:
                self._grow(end)
        return self._window

    def _planned(self, tokens: int) -> int:
        """The window for a request: enough for it and a whole frame past its end."""
        need = tokens + self._widths[-1]
        window = FIRST_WINDOW
        while window < need:
            window *= 2
        return min(window, _rounded(self.context_limit + self._widths[-1]))

    def _grow(self, tokens: int) -> None:
        """Longer buffers, with what the old ones held."""
        old = self._kept
        self._kept = self._allocate(tokens)
        self._kept.take(old, min(self._past, old.capacity))

    def _allocate(self, tokens: int) -> StaticKeyValues:
        tokens = min(tokens, self.context_limit)
        capacity = _rounded(max(self._planned(tokens), tokens + self._widths[-1]))
        try:
            kept = StaticKeyValues(self._shape, capacity, self.device)
        except torch.OutOfMemoryError as error:
            free = torch.cuda.mem_get_info(self.device)[0] // self._shape.bytes_per_token
            raise EngineError(
                f"keys and values of {capacity} tokens do not fit the device beside the model: the largest context that"
                f" does is about {free} tokens."
            ) from error
        self._runner.use(kept)
        return kept

    def _lean_forward(self) -> lean.Lean:
        forward = lean.Lean(self.model, compiler(self.spec))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # What the weights took before they were joined.
        return forward


def buckets(spec: TargetSpec) -> tuple[int, ...]:
    """The widths that a spec asks for, ascending. Raises UsageError where they would leave a plain step unserved."""
    widths = tuple(sorted(set(spec.buckets or BUCKETS)))
    if widths[0] < 1:
        raise UsageError("a bucket is a number of queries, 1 or more: write for instance buckets: [1, 4, 16].")
    if spec.max_queries < widths[-1]:
        widths = (*(width for width in widths if width < spec.max_queries), spec.max_queries)
    return widths


def compiler(spec: TargetSpec) -> Callable[[Any], Any] | None:
    """What `options.compile` asks for: torch.compile with inductor (true) or another backend; None = nothing."""
    wanted = spec.options.get("compile", False)
    if not wanted:
        return None
    backend = "inductor" if wanted is True else str(wanted)
    # Every width and window is a shape of its own; past the usual limit torch would go on without compiling.
    from torch._dynamo import config as limits

    limits.recompile_limit = max(limits.recompile_limit, _MOST_SHAPES)
    return lambda function: torch.compile(function, backend=backend, dynamic=False)


def _transformers_forward(model: PreTrainedModel, cache_argument: str) -> Forward:
    """The model's own forward over static buffers: for every model that has no lean one."""

    def forward(
        ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None, kept: StaticKeyValues, last: int
    ) -> torch.Tensor:
        inputs: dict[str, Any] = {"attention_mask": mask, cache_argument: kept.cache}
        logits = model(input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=last, **inputs).logits
        return logits[0]  # type: ignore[no-any-return]

    return forward


def _rope_type(model: PreTrainedModel) -> str:
    settings = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    return str(settings.get("rope_type", "default"))


def _rounded(tokens: int) -> int:
    return -(-tokens // _STEP) * _STEP
