"""SGLang's NGRAM: one trie of n-grams of all requests' outputs, drafted as a tree from every matching suffix.

Method: SGLang 0.5's `NGRAM` speculation. After each step the last `depth` tokens are counted, every suffix of them.
A draft starts at all suffixes of the text that the trie continues, longest first, and merges what follows into one
tree. `mode: recency` takes the most recent continuations, more of them after a short match; `mode: probability` the
most frequent ones. The published method does not index the prompt; `index_prompt` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numba import njit
from pydantic import Field, model_validator

from dfbench.drafters.base import EMPTY, Draft, Drafter, DrafterContext, Options, Verified, check_prompt
from dfbench.drafters.trie_arrays import AFTER, CHILD, FREQ, TOKEN, Trie, child_of


class NgramTrieOptions(Options):
    """Options of `ngram-trie`."""

    depth: int = Field(18, ge=2, le=256, description="longest n-gram counted: match and draft together")
    capacity: int = Field(10_000_000, ge=1, le=100_000_000, description="most n-grams kept; the least recent leave")
    min_breadth: int = Field(1, ge=1, le=256, description="continuations of a node after the longest match")
    max_breadth: int = Field(10, ge=1, le=256, description="continuations of a node after the shortest match")
    draft_tokens: int = Field(12, ge=2, le=1024, description="tokens in a pass, the root included")
    mode: Literal["recency", "probability"] = Field("recency", description="which continuations come first")
    index_prompt: bool = Field(False, description="count the prompt's n-grams too")

    @model_validator(mode="after")
    def _in_order(self) -> NgramTrieOptions:
        if self.min_breadth > self.max_breadth:
            raise ValueError(f"min_breadth {self.min_breadth} is above max_breadth {self.max_breadth}: write it lower")
        return self


class NgramTrie(Drafter):
    """The trie, shared by all requests until `reset`, and the last tokens of the running one."""

    name = "ngram-trie"
    summary = "SGLang's NGRAM: a tree from a shared trie of recent output n-grams (sglang 0.5)."
    Options = NgramTrieOptions
    presets: ClassVar[dict[str, dict[str, Any]]] = {"prompt": {"index_prompt": True}}
    options: NgramTrieOptions

    def __init__(self, options: NgramTrieOptions, context: DrafterContext) -> None:
        super().__init__(options, context)
        self._out = np.empty((2, options.draft_tokens), np.int32)
        self._scale = (options.max_breadth - options.min_breadth) / (options.depth - 1)
        self.reset()

    def reset(self) -> None:
        """Forget every request."""
        options = self.options
        ordered = options.max_breadth if options.mode == "probability" else 0
        self._trie = Trie(options.depth, options.capacity, ordered)
        self._tail = np.empty(0, np.int32)

    def start(self, prompt: Sequence[int]) -> None:
        """Keep the prompt's tail; count the prompt where the options say so."""
        check_prompt(prompt, self.context)
        tokens = np.asarray(prompt, np.int32)
        if self.options.index_prompt:
            self._trie.insert(tokens, 0, len(tokens))
        self._tail = tokens[-self.options.depth :]

    def observe(self, emitted: Sequence[int], verified: Verified | None = None) -> None:
        """Count every suffix of the last `depth` tokens, once more for those that were counted before."""
        self._tail = np.append(self._tail, np.asarray(emitted, np.int32))[-self.options.depth :]
        self._trie.insert(self._tail, 0, len(self._tail))

    def propose(self, budget: int) -> Draft:
        """One tree from all matching suffixes."""
        options, trie = self.options, self._trie
        nodes = min(budget, options.draft_tokens - 1)
        if nodes < 1:
            return EMPTY
        if options.mode == "recency":
            size, match = spread_recent(
                trie.nodes, trie.table, self._tail, options.depth, nodes, self._scale, options.min_breadth, self._out
            )
        else:
            size, match = spread_likely(
                trie.nodes, trie.table, self._tail, options.depth, nodes, options.max_breadth, self._out
            )
        if not size:
            return EMPTY
        tokens, parents = self._out[:, :size].tolist()
        return Draft(tokens, parents, match)

    def nbytes(self) -> int:
        """Bytes held by the trie."""
        return self._trie.nbytes()


@njit(cache=True, nogil=True)
def anchor(nodes, table, tail, length):  # type: ignore[no-untyped-def]
    """The trie's node for the last `length` tokens, or -1 where nothing is known to follow them."""
    node = 0
    for i in range(len(tail) - length, len(tail)):
        node = child_of(nodes, table, node, tail[i])
        if node < 0:
            return -1
    return node if nodes[node, CHILD] >= 0 else -1


@njit(cache=True, nogil=True)
def merge(out, size, limit, parent, token):  # type: ignore[no-untyped-def]
    """The draft's node for `token` below `parent`, added where there is room; (node or -1, size)."""
    for node in range(parent + 1, size):
        if out[1, node] == parent and out[0, node] == token:
            return node, size
    if size >= limit:
        return -1, size
    out[0, size], out[1, size] = token, parent
    return size, size + 1


@njit(cache=True, nogil=True)
def spread_recent(nodes, table, tail, depth, limit, scale, min_breadth, out):  # type: ignore[no-untyped-def]
    """Breadth first from each suffix, the most recent continuations; (size, longest match)."""
    size, match = 0, 0
    waiting = np.empty((limit + 1, 2), np.int64)  # trie node, draft node
    breadths = np.empty(limit + 1)
    for length in range(min(len(tail), depth - 1), 0, -1):
        start = anchor(nodes, table, tail, length)
        if start < 0:
            continue
        match = max(match, length)
        waiting[0, 0], waiting[0, 1], breadths[0] = start, -1, (depth - 1 - length) * scale + min_breadth
        at, end = 0, 1
        while at < end:
            child, left = nodes[waiting[at, 0], CHILD], max(1, int(breadths[at] + 1e-9))
            while child >= 0 and left > 0:
                node, size = merge(out, size, limit, waiting[at, 1], nodes[child, TOKEN])
                if node >= 0:
                    waiting[end, 0], waiting[end, 1], breadths[end] = child, node, breadths[at] - scale
                    end += 1
                child, left = nodes[child, AFTER], left - 1
            at += 1
        if size >= limit:
            break
    return size, match


@njit(cache=True, nogil=True)
def spread_likely(nodes, table, tail, depth, limit, breadth, out):  # type: ignore[no-untyped-def]
    """Best first from each suffix by the product of shares among the `breadth` most frequent; (size, longest match)."""
    size, match = 0, 0
    waiting = np.empty(((limit + 1) * breadth, 2), np.int64)  # trie node, draft node of its parent
    shares = np.empty((limit + 1) * breadth)
    for length in range(min(len(tail), depth - 1), 0, -1):
        start = anchor(nodes, table, tail, length)
        if start < 0:
            continue
        match = max(match, length)
        end = queue_children(nodes, start, -1, 1.0, breadth, waiting, shares, 0)
        while end > 0 and size < limit:
            best = 0
            for i in range(1, end):
                if shares[i] > shares[best]:
                    best = i
            trie_node, parent, share = waiting[best, 0], waiting[best, 1], shares[best]
            end -= 1
            for i in range(best, end):
                waiting[i], shares[i] = waiting[i + 1], shares[i + 1]
            node, size = merge(out, size, limit, parent, nodes[trie_node, TOKEN])
            end = queue_children(nodes, trie_node, node, share, breadth, waiting, shares, end)
        if size >= limit:
            break
    return size, match


@njit(cache=True, nogil=True)
def queue_children(nodes, trie_node, node, share, breadth, waiting, shares, end):  # type: ignore[no-untyped-def]
    """Queue the most frequent children with their parts of `share`; returns the new length."""
    total, seen, child = 0, 0, nodes[trie_node, CHILD]
    while child >= 0 and seen < breadth:
        total, seen, child = total + nodes[child, FREQ], seen + 1, nodes[child, AFTER]
    child = nodes[trie_node, CHILD]
    for _ in range(seen):
        waiting[end, 0], waiting[end, 1], shares[end] = child, node, share * nodes[child, FREQ] / total
        end, child = end + 1, nodes[child, AFTER]
    return end
