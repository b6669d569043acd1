"""SuffixDecoding (arXiv 2411.04975; defaults of vLLM's "suffix"): draft the likeliest continuation of what repeats.

Per request it counts every substring of prompt and output; across requests, where `cached_requests` allows, every
substring of past outputs. A draft follows the continuations with the highest counts from every suffix of the text;
the suffix with the largest sum of path probabilities, which is the expected number of accepted tokens, wins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numba import njit
from pydantic import Field

from dfbench.drafters.base import EMPTY, Draft, Drafter, DrafterContext, Options, Verified, check_prompt
from dfbench.drafters.edge_table import TARGET, TOKEN
from dfbench.drafters.suffix_counts import (
    COUNT,
    CURSOR,
    CURSOR_LEN,
    HEAD,
    NEXT,
    SuffixCounts,
    advance,
    holder,
)


class SuffixOptions(Options):
    """Options of `suffix`; a match of m tokens drafts at most `m * factor + offset` nodes."""

    depth: int = Field(24, ge=2, le=1024, description="longest substring counted: match and draft together")
    factor: float = Field(1.0, ge=0, allow_inf_nan=False, description="draft length per matched token")
    offset: float = Field(0.0, allow_inf_nan=False, description="draft length beside that")
    min_prob: float = Field(0.1, ge=0, le=1, description="stop a path below this probability")
    max_draft: int = Field(24, ge=1, le=1024, description="most nodes in a draft")
    cached_requests: int = Field(0, ge=0, description="past outputs kept across requests, first in first out; 0 = none")
    mode: Literal["linear", "tree"] = Field("linear", description="draft one path, or the likeliest nodes of a tree")


class Suffix(Drafter):
    """Frequency-weighted copy from everything that was read and written so far."""

    name = "suffix"
    summary = "SuffixDecoding: the likeliest continuation by counts over all suffixes; arXiv 2411.04975."
    Options = SuffixOptions
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "arctic": {"depth": 64, "max_draft": 64, "cached_requests": 100_000},
        "specbench": {"depth": 64, "factor": 2.0, "max_draft": 10, "cached_requests": 100_000},
    }
    options: SuffixOptions

    def __init__(self, options: SuffixOptions, context: DrafterContext) -> None:
        super().__init__(options, context)
        self._tree = options.mode == "tree"
        self._speculate = speculate_tree if self._tree else speculate_chain
        wanted = [min(m * options.factor + options.offset + 1e-6, options.max_draft) for m in range(options.depth)]
        self._limits = np.asarray([max(0, int(nodes)) for nodes in wanted], np.int32)
        self._min_prob = np.float32(options.min_prob)
        self._out = np.empty((2, options.max_draft), np.int32)
        self._chances = np.empty(options.max_draft, np.float32)
        self._buffer = np.empty(64, np.int32)
        self.reset()

    def reset(self) -> None:
        """Forget every request."""
        self._past: deque[np.ndarray] = deque()
        self._response: list[int] = []
        self._shared = SuffixCounts(self.options.depth)
        self._removed = 0
        self._begin(np.empty(0, np.int32))

    def start(self, prompt: Sequence[int]) -> None:
        """Count the prompt's substrings; keep the output of the request before for later ones."""
        check_prompt(prompt, self.context)
        self._begin(np.asarray(prompt, np.int32))

    def _begin(self, tokens: np.ndarray) -> None:
        options = self.options
        self._local = SuffixCounts(options.depth, len(tokens) + 256)
        self._local.extend(tokens, len(tokens))
        self._length = len(tokens)
        self._keeps = options.cached_requests > 0
        if self._keeps:
            self._rotate()
            tail = tokens[max(len(tokens) - options.depth, 0) :]
            self._match = self._follow(0, 0, tail, len(tail))

    def observe(self, emitted: Sequence[int], verified: Verified | None = None) -> None:
        """Count the substrings that end in the new tokens."""
        count = len(emitted)
        buffer = self._buffer
        if count > len(buffer):
            buffer = self._buffer = np.empty(2 * count, np.int32)
        for i, token in enumerate(emitted):
            buffer[i] = token
        self._local.extend(buffer, count)
        self._length += count
        if self._keeps:
            self._response.extend(emitted)
            self._shared.extend(buffer, count)
            self._match = self._follow(*self._match, buffer, count)

    def propose(self, budget: int) -> Draft:
        """The local draft, or the shared one where that promises more accepted tokens."""
        local = self._local
        draft = self._draft(local, local.meta[CURSOR], local.meta[CURSOR_LEN], budget)
        if self._keeps:
            shared = self._draft(self._shared, *self._match, budget)
            if (shared.score or 0.0) > (draft.score or 0.0):
                return shared
        return draft

    def nbytes(self) -> int:
        """Bytes held by the counts."""
        return self._local.nbytes() + self._shared.nbytes()

    def _draft(self, counts: SuffixCounts, state: int, length: int, budget: int) -> Draft:
        """The best draft from these counts; the match leaves out at least the first token of the text."""
        length = min(length, self._length - 1)
        size, match, score = self._speculate(
            counts.states, counts.edges, self._limits, self._out, self._chances, state, length, budget, self._min_prob
        )
        if not size:
            return EMPTY
        chances = self._chances[:size].tolist()
        if self._tree:
            tokens, parents = self._out[:, :size].tolist()
            return Draft(tokens, parents, match, score, chances)
        return Draft(self._out[0, :size].tolist(), None, match, score, chances)

    def _follow(self, state: int, length: int, tokens: np.ndarray, count: int) -> tuple[int, int]:
        shared = self._shared
        return advance(shared.states, shared.edges, shared.table, state, length, tokens, count, self.options.depth)  # type: ignore[no-any-return]

    def _rotate(self) -> None:
        """The finished output joins the past; beyond `cached_requests`, counting the new one, the oldest leaves."""
        if self._response:
            self._past.append(np.asarray(self._response, np.int32))
            self._response = []
        while len(self._past) >= self.options.cached_requests:
            oldest = self._past.popleft()
            self._removed += len(oldest)
            self._shared.remove(oldest)
        if self._removed > self._shared.tokens // 2:
            self._rebuild()
        self._shared.begin()

    def _rebuild(self) -> None:
        """Drop the states of evicted outputs: most of the automaton is dead."""
        kept = sum(map(len, self._past))
        self._shared = SuffixCounts(self.options.depth, kept + 1024)
        self._removed = 0
        for tokens in self._past:
            self._shared.begin()
            self._shared.extend(tokens, len(tokens))


@njit(cache=True, nogil=True)
def speculate_chain(states, edges, limits, out, chances, state, length, budget, min_prob):  # type: ignore[no-untyped-def]
    """The best path over all matches of at most `length` tokens; (size, match length, score), tokens in out[0].

    `limits[m]` is the most nodes that a match of m tokens may draft. Longest match first, so that a shorter one must
    be strictly better. A score never exceeds the number of nodes.
    """
    depth = len(limits)
    best, best_state, best_match, best_limit = np.float32(0), 0, 0, 0
    for match in range(min(length, depth - 1), 0, -1):
        state = holder(states, state, match)
        limit = min(budget, limits[match], depth - match)
        if limit > best and states[state, HEAD] >= 0 and states[state, COUNT] > 0:
            _, score = walk(states, edges, state, limit, min_prob, out, chances)
            if score > best:
                best, best_state, best_match, best_limit = score, state, match, limit
    size, _ = walk(states, edges, best_state, best_limit, min_prob, out, chances)
    return size, best_match, float(best)


@njit(cache=True, nogil=True)
def walk(states, edges, state, limit, min_prob, out, chances):  # type: ignore[no-untyped-def]
    """Follow the likeliest continuations; fills out[0], returns (length, sum of path probabilities)."""
    probability, score, size = np.float32(1), np.float32(0), 0
    while size < limit:
        edge = states[state, HEAD]
        if edge < 0:
            break
        target = edges[edge, TARGET]
        count = states[target, COUNT]
        probability *= np.float32(count) / np.float32(states[state, COUNT])
        if probability < min_prob or count == 0:
            break
        out[0, size], chances[size] = edges[edge, TOKEN], probability
        size, score, state = size + 1, score + probability, target
    return size, score


@njit(cache=True, nogil=True)
def speculate_tree(states, edges, limits, out, chances, state, length, budget, min_prob):  # type: ignore[no-untyped-def]
    """As `speculate_chain`, with the likeliest nodes of the tree below a match; parents in out[1]."""
    depth = len(limits)
    most = min(budget, limits.max())
    # A node has at most 1 / min_prob children that are likely enough.
    wide = most if min_prob * most <= 1 else int(1 / min_prob + 1e-3)
    heap = np.empty((most * wide + 1, 4), np.float64)
    best, best_state, best_match, best_limit = np.float32(0), 0, 0, 0
    for match in range(min(length, depth - 1), 0, -1):
        state = holder(states, state, match)
        limit = min(budget, limits[match])
        if limit > best and states[state, HEAD] >= 0 and states[state, COUNT] > 0:
            _, score = spread(states, edges, state, limit, depth - match, min_prob, out, chances, heap)
            if score > best:
                best, best_state, best_match, best_limit = score, state, match, limit
    size, _ = spread(states, edges, best_state, best_limit, depth - best_match, min_prob, out, chances, heap)
    return size, best_match, float(best)


@njit(cache=True, nogil=True)
def spread(states, edges, state, limit, room, min_prob, out, chances, heap):  # type: ignore[no-untyped-def]
    """The `limit` likeliest nodes at most `room` below a state, best first; fills out, returns (size, score).

    Rows that wait: probability, edge, parent, depth. Of equals the one that came first leaves first.
    """
    size, score, waiting = 0, np.float32(0), 0
    if limit > 0:
        waiting = push_children(states, edges, state, np.float32(1), -1, 1, limit, min_prob, heap, 0)
    while size < limit and waiting > 0:
        top = 0
        for i in range(1, waiting):
            if heap[i, 0] > heap[top, 0]:
                top = i
        probability, edge, depth = np.float32(heap[top, 0]), int(heap[top, 1]), int(heap[top, 3])
        out[0, size], out[1, size] = edges[edge, TOKEN], int(heap[top, 2])
        chances[size] = probability
        score += probability
        waiting -= 1
        for i in range(top, waiting):
            heap[i] = heap[i + 1]
        if depth < room:
            state = edges[edge, TARGET]
            waiting = push_children(states, edges, state, probability, size, depth + 1, limit, min_prob, heap, waiting)
        size += 1
    return size, score


@njit(cache=True, nogil=True)
def push_children(states, edges, state, probability, parent, depth, limit, min_prob, heap, waiting):  # type: ignore[no-untyped-def]
    """Queue the children of a state that are likely enough, at most `limit`; returns the new queue length."""
    edge, pushed = states[state, HEAD], 0
    while edge >= 0 and pushed < limit:
        count = states[edges[edge, TARGET], COUNT]
        child = probability * (np.float32(count) / np.float32(states[state, COUNT]))
        if count == 0 or child < min_prob:
            break
        heap[waiting, 0], heap[waiting, 1], heap[waiting, 2], heap[waiting, 3] = child, edge, parent, depth
        waiting, pushed, edge = waiting + 1, pushed + 1, edges[edge, NEXT]
    return waiting
