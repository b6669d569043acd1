"""A suffix automaton that counts: how often every substring of some token sequences occurred, and what followed it.

It answers exactly what a trie over all substrings of at most `depth` tokens would, in a twelfth of its memory: one
state stands for all substrings that end at the same places, so they share their count and their continuations.
Appending a token costs a walk over the suffix links, a handful of states, whatever was read before.

Everything lies in flat integer arrays, so that the loops compile (numba) and one append costs about a microsecond.

    states  [n, 4]  LEN of the longest substring, suffix LINK, COUNT of occurrences, HEAD of its list of edges
    edges   [n, 5]  OWNER state, TOKEN, TARGET state, NEXT and PREV in the owner's list
    table   [2^k]   open addressing, (owner, token) → edge number + 1
    meta    [4]     number of states, number of edges, state of the text read last, and CURSOR with its LENGTH below

The first `ordered` edges of a list are the continuations with the highest counts, best first. Ties are those of
SuffixDecoding's tree: continuations seen once stay in order of first sight, one that rises goes before its equals.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit

LEN, LINK, COUNT, HEAD = range(4)
OWNER, TOKEN, TARGET, NEXT, PREV = range(5)
STATES, EDGES, LAST, CURSOR, CURSOR_LEN = range(5)
NONE = -1


class SuffixCounts:
    """Counts of all substrings, up to `depth` tokens long, of the sequences fed to it.

    `ordered`: how many continuations of a state are kept sorted by count. The caller may only ask about substrings of
    at most `depth` tokens.
    """

    def __init__(self, depth: int, ordered: int = 1, capacity: int = 1024) -> None:
        self.depth = depth
        self.ordered = ordered
        self.tokens = 0
        self.meta = np.zeros(5, np.int64)
        self.states = np.empty((2 * capacity + 2, 4), np.int32)
        self.edges = np.empty((3 * capacity + 4, 5), np.int32)
        self.table = np.zeros(_table_size(len(self.edges)), np.int32)
        self.states[0] = (0, NONE, 0, NONE)
        self.meta[STATES] = 1

    def begin(self) -> None:
        """The next tokens start a new sequence: no substring spans the two."""
        self.meta[LAST] = self.meta[CURSOR] = self.meta[CURSOR_LEN] = 0

    def extend(self, tokens: np.ndarray, count: int) -> None:
        """Append the first `count` of these tokens (int32) to the current sequence."""
        self._reserve(count)
        self.tokens += count
        append(self.meta, self.states, self.edges, self.table, tokens, count, self.depth, self.ordered)

    def remove(self, tokens: np.ndarray) -> None:
        """Take a whole sequence's occurrences out of the counts (its states stay)."""
        discount(self.states, self.edges, self.table, tokens, self.depth, self.ordered)

    def count(self, tokens: Sequence[int]) -> int:
        """How often this substring occurred."""
        state = 0
        for token in tokens:
            edge = find_edge(self.edges, self.table, state, token)
            if edge < 0:
                return 0
            state = int(self.edges[edge, TARGET])
        return int(self.states[state, COUNT])

    def nbytes(self) -> int:
        """Bytes held by the arrays."""
        return self.states.nbytes + self.edges.nbytes + self.table.nbytes

    def _reserve(self, more: int) -> None:
        """Room for `more` tokens: an automaton has at most 2 states and 3 edges a token."""
        total = self.tokens + more
        if 2 * total + 2 > len(self.states) or 3 * total + 4 > len(self.edges):
            self.states = _grown(self.states, 4 * total)
            self.edges = _grown(self.edges, 6 * total)
            self.table = np.zeros(_table_size(len(self.edges)), np.int32)
            refill(self.edges, self.table, int(self.meta[EDGES]))


def _grown(rows: np.ndarray, size: int) -> np.ndarray:
    grown = np.empty((size, rows.shape[1]), rows.dtype)
    grown[: len(rows)] = rows
    return grown


def _table_size(edges: int) -> int:
    return 1 << int(2 * edges).bit_length()


@njit(cache=True, nogil=True)
def slot_of(state: int, token: int, mask: int) -> int:
    """First slot to look at: a multiplicative hash, since neighbours in both are the rule."""
    mixed = state * 0x9E3779B1 + token * 0x85EBCA77
    return ((mixed >> 15) ^ mixed) & mask


@njit(cache=True, nogil=True)
def find_edge(edges, table, state, token):  # type: ignore[no-untyped-def]
    """Number of the edge of `state` for `token`, or -1."""
    mask = len(table) - 1
    slot = slot_of(state, token, mask)
    while table[slot] != 0:
        edge = table[slot] - 1
        if edges[edge, OWNER] == state and edges[edge, TOKEN] == token:
            return edge
        slot = (slot + 1) & mask
    return -1


@njit(cache=True, nogil=True)
def refill(edges, table, count):  # type: ignore[no-untyped-def]
    """Enter all edges into a new, empty table."""
    mask = len(table) - 1
    for edge in range(count):
        slot = slot_of(edges[edge, OWNER], edges[edge, TOKEN], mask)
        while table[slot] != 0:
            slot = (slot + 1) & mask
        table[slot] = edge + 1


@njit(cache=True, nogil=True)
def add_edge(meta, states, edges, table, state, token, target, after):  # type: ignore[no-untyped-def]
    """A new edge, placed in its owner's list behind edge `after` (-1: at the front)."""
    edge = meta[EDGES]
    meta[EDGES] = edge + 1
    edges[edge, OWNER], edges[edge, TOKEN], edges[edge, TARGET] = state, token, target
    link_after(states, edges, state, edge, after)
    mask = len(table) - 1
    slot = slot_of(state, token, mask)
    while table[slot] != 0:
        slot = (slot + 1) & mask
    table[slot] = edge + 1
    return edge


@njit(cache=True, nogil=True)
def link_after(states, edges, state, edge, after):  # type: ignore[no-untyped-def]
    """Put an edge into its owner's list behind edge `after` (-1: at the front)."""
    following = states[state, HEAD] if after < 0 else edges[after, NEXT]
    edges[edge, PREV], edges[edge, NEXT] = after, following
    if following >= 0:
        edges[following, PREV] = edge
    if after < 0:
        states[state, HEAD] = edge
    else:
        edges[after, NEXT] = edge


@njit(cache=True, nogil=True)
def unlink(states, edges, state, edge):  # type: ignore[no-untyped-def]
    """Take an edge out of its owner's list."""
    before, following = edges[edge, PREV], edges[edge, NEXT]
    if before < 0:
        states[state, HEAD] = following
    else:
        edges[before, NEXT] = following
    if following >= 0:
        edges[following, PREV] = before


@njit(cache=True, nogil=True)
def end_of_order(states, edges, state, ordered):  # type: ignore[no-untyped-def]
    """The last edge of the sorted part of a list, -1 when the list is empty."""
    after, edge, seen = -1, states[state, HEAD], 0
    while edge >= 0 and seen < ordered:
        after, edge, seen = edge, edges[edge, NEXT], seen + 1
    return after


@njit(cache=True, nogil=True)
def promote(states, edges, state, edge, ordered):  # type: ignore[no-untyped-def]
    """The edge's count has just risen: move it to its place in the sorted part, if it now belongs there."""
    count = states[edges[edge, TARGET], COUNT]
    level = count if count > 1 else 0
    other, seen = states[state, HEAD], 0
    while other >= 0 and seen < ordered:
        if other == edge:
            return
        if states[edges[other, TARGET], COUNT] <= level:
            unlink(states, edges, state, edge)
            link_after(states, edges, state, edge, edges[other, PREV])
            return
        other, seen = edges[other, NEXT], seen + 1


@njit(cache=True, nogil=True)
def demote(states, edges, state, edge, ordered):  # type: ignore[no-untyped-def]
    """The edge's count has just fallen: sort the front of the list again if the edge was in it."""
    after, other, seen = -1, states[state, HEAD], 0
    while other >= 0 and seen < ordered and other != edge:
        other, seen = edges[other, NEXT], seen + 1
    if other != edge or seen >= ordered:
        return
    for _ in range(ordered):
        first = states[state, HEAD] if after < 0 else edges[after, NEXT]
        if first < 0:
            return
        best, other = first, edges[first, NEXT]
        while other >= 0:
            if states[edges[other, TARGET], COUNT] > states[edges[best, TARGET], COUNT]:
                best = other
            other = edges[other, NEXT]
        if best != first:
            unlink(states, edges, state, best)
            link_after(states, edges, state, best, after)
        after = best


@njit(cache=True, nogil=True)
def clone_of(meta, states, edges, table, p, q, token, ordered):  # type: ignore[no-untyped-def]
    """Split state q: its substrings no longer than p's plus `token` become a state of their own."""
    clone = meta[STATES]
    meta[STATES] = clone + 1
    states[clone, LEN] = states[p, LEN] + 1
    states[clone, LINK] = states[q, LINK]
    states[clone, COUNT] = states[q, COUNT]
    states[clone, HEAD] = -1
    states[q, LINK] = clone
    edge, after = states[q, HEAD], -1
    while edge >= 0:
        after = add_edge(meta, states, edges, table, clone, edges[edge, TOKEN], edges[edge, TARGET], after)
        edge = edges[edge, NEXT]
    while p >= 0:
        edge = find_edge(edges, table, p, token)
        if edges[edge, TARGET] != q:
            break
        edges[edge, TARGET] = clone
        p = states[p, LINK]
    return clone


@njit(cache=True, nogil=True)
def grow(meta, states, edges, table, token, ordered):  # type: ignore[no-untyped-def]
    """Extend the automaton by one token; the counts are the caller's business."""
    last = meta[LAST]
    edge = find_edge(edges, table, last, token)
    if edge >= 0:  # another sequence read the same before
        q = edges[edge, TARGET]
        if states[q, LEN] != states[last, LEN] + 1:
            q = clone_of(meta, states, edges, table, last, q, token, ordered)
        meta[LAST] = q
        return
    new = meta[STATES]
    meta[STATES] = new + 1
    states[new, LEN], states[new, COUNT], states[new, HEAD] = states[last, LEN] + 1, 0, -1
    p = last
    while p >= 0 and edge < 0:
        add_edge(meta, states, edges, table, p, token, new, end_of_order(states, edges, p, ordered))
        p = states[p, LINK]
        if p >= 0:
            edge = find_edge(edges, table, p, token)
    if p < 0:
        states[new, LINK] = 0
    else:
        q = edges[edge, TARGET]
        if states[q, LEN] != states[p, LEN] + 1:
            q = clone_of(meta, states, edges, table, p, q, token, ordered)
        states[new, LINK] = q
    meta[LAST] = new


@njit(cache=True, nogil=True)
def holder(states, state, length):  # type: ignore[no-untyped-def]
    """The state of the suffix of `length` tokens, from a state further down."""
    while state > 0 and states[states[state, LINK], LEN] >= length:
        state = states[state, LINK]
    return state


@njit(cache=True, nogil=True)
def append(meta, states, edges, table, tokens, count, depth, ordered):  # type: ignore[no-untyped-def]
    """Read tokens: grow, count every suffix of at most `depth` tokens, keep the order of continuations."""
    for i in range(count):
        token = tokens[i]
        grow(meta, states, edges, table, token, ordered)
        length = min(meta[CURSOR_LEN], depth - 1)
        before = holder(states, meta[CURSOR], length)
        state = edges[find_edge(edges, table, before, token), TARGET]
        state = holder(states, state, length + 1)
        meta[CURSOR], meta[CURSOR_LEN] = state, length + 1
        while state > 0:
            states[state, COUNT] += 1
            state = states[state, LINK]
        while before > 0:
            promote(states, edges, before, find_edge(edges, table, before, token), ordered)
            before = states[before, LINK]


@njit(cache=True, nogil=True)
def discount(states, edges, table, tokens, depth, ordered):  # type: ignore[no-untyped-def]
    """The reverse of `append` for a whole sequence: what it counted is counted down."""
    cursor, length = 0, 0
    for token in tokens:
        length = min(length, depth - 1)
        before = holder(states, cursor, length)
        state = edges[find_edge(edges, table, before, token), TARGET]
        length += 1
        cursor = state = holder(states, state, length)
        while state > 0:
            states[state, COUNT] -= 1
            state = states[state, LINK]
        while before > 0:
            demote(states, edges, before, find_edge(edges, table, before, token), ordered)
            before = states[before, LINK]


@njit(cache=True, nogil=True)
def advance(states, edges, table, state, length, tokens, count, longest):  # type: ignore[no-untyped-def]
    """Follow tokens: the longest suffix of what was read, at most `longest` tokens, that occurs; (state, length)."""
    for i in range(count):
        length = min(length, longest - 1)
        state = holder(states, state, length)
        while True:
            edge = find_edge(edges, table, state, tokens[i])
            if edge >= 0:
                target = holder(states, edges[edge, TARGET], length + 1)
                if states[target, COUNT] > 0:
                    state, length = target, length + 1
                    break
            if state == 0:
                break
            state = states[state, LINK]
            length = states[state, LEN]
    return state, length
