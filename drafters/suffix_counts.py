"""A suffix automaton that counts: how often every substring of some token sequences occurred, and what followed it.

It answers exactly what a trie over all substrings of at most `depth` tokens would, in a twelfth of its memory: one
state stands for all substrings that end at the same places, so they share their count and their continuations.
Appending a token costs a walk over the suffix links, a handful of states, whatever was read before.

Everything lies in flat integer arrays, so that the loops compile (numba) and one append costs about a microsecond.

    states  [n, 5]  LEN of the longest substring, suffix LINK, COUNT of occurrences, HEAD and TAIL of its list of edges
    edges   [n, 6]  OWNER state, TOKEN, TARGET state, NEXT and PREV in the owner's list, GROUP
    groups  [n]     first edge of a group, the neighbours in a list that have the same count; the next free one + 1
    table   [2^k]   open addressing, (owner, token) → edge number + 1
    meta    [7]     numbers of states, edges and groups, the first FREE group + 1, the state of all that was LAST read,
                    and the state and length of the CURSOR: the same, but for at most `depth` tokens

A list holds a state's continuations, highest count first. Among equals the order is that of ArcticInference's tree:
a new continuation comes last; one that rises goes to the front of its new equals if it was the first of its old
ones, else to their end. Groups make every such move take constant time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit

from dfbench.drafters.edge_table import OWNER, TARGET, TOKEN, empty_table, enter, find_edge, grown, refill

LEN, LINK, COUNT, HEAD, TAIL = range(5)
NEXT, PREV, GROUP = range(3, 6)
STATES, EDGES, GROUPS, FREE, LAST, CURSOR, CURSOR_LEN = range(7)
NONE = -1


class SuffixCounts:
    """Counts of all substrings, up to `depth` tokens long, of the sequences fed to it.

    The caller may only ask about substrings of at most `depth` tokens.
    """

    def __init__(self, depth: int, capacity: int = 1024) -> None:
        self.depth = depth
        self.tokens = 0
        self._room = capacity
        self.meta = np.zeros(7, np.int64)
        self.states = np.empty((2 * capacity + 2, 5), np.int32)
        self.edges = np.empty((3 * capacity + 4, 6), np.int32)
        self.groups = np.empty(len(self.edges), np.int32)
        self.table = empty_table(len(self.edges))
        self.states[0] = (0, NONE, 0, NONE, NONE)
        self.meta[STATES] = 1

    def begin(self) -> None:
        """The next tokens start a new sequence: no substring spans the two."""
        self.meta[LAST] = self.meta[CURSOR] = self.meta[CURSOR_LEN] = 0

    def extend(self, tokens: np.ndarray, count: int) -> None:
        """Append the first `count` of these tokens (int32) to the current sequence."""
        self.tokens += count
        if self.tokens > self._room:
            self._enlarge()
        append(self.meta, self.states, self.edges, self.groups, self.table, tokens, count, self.depth)

    def remove(self, tokens: np.ndarray) -> None:
        """Take a whole sequence's occurrences out of the counts (its states stay)."""
        discount(self.meta, self.states, self.edges, self.groups, self.table, tokens, self.depth)

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
        return self.states.nbytes + self.edges.nbytes + self.groups.nbytes + self.table.nbytes

    def _enlarge(self) -> None:
        """Twice the room that is needed: an automaton has at most 2 states and 3 edges a token."""
        self._room = 2 * self.tokens
        self.states = grown(self.states, 2 * self._room + 2)
        self.edges = grown(self.edges, 3 * self._room + 4)
        self.groups = grown(self.groups, len(self.edges))
        self.table = empty_table(len(self.edges))
        refill(self.edges, self.table, int(self.meta[EDGES]))


@njit(cache=True, nogil=True)
def add_edge(meta, states, edges, table, state, token, target):  # type: ignore[no-untyped-def]
    """A new edge at the end of its owner's list, whose group the caller sets."""
    edge = meta[EDGES]
    meta[EDGES] = edge + 1
    edges[edge, OWNER], edges[edge, TOKEN], edges[edge, TARGET] = state, token, target
    link_after(states, edges, state, edge, states[state, TAIL])
    enter(edges, table, edge)
    return edge


@njit(cache=True, nogil=True)
def link_after(states, edges, state, edge, before):  # type: ignore[no-untyped-def]
    """Put an edge into its owner's list behind edge `before` (-1: at the front)."""
    after = states[state, HEAD] if before < 0 else edges[before, NEXT]
    edges[edge, PREV], edges[edge, NEXT] = before, after
    if after < 0:
        states[state, TAIL] = edge
    else:
        edges[after, PREV] = edge
    if before < 0:
        states[state, HEAD] = edge
    else:
        edges[before, NEXT] = edge


@njit(cache=True, nogil=True)
def unlink(states, edges, state, edge):  # type: ignore[no-untyped-def]
    """Take an edge out of its owner's list."""
    before, after = edges[edge, PREV], edges[edge, NEXT]
    if before < 0:
        states[state, HEAD] = after
    else:
        edges[before, NEXT] = after
    if after < 0:
        states[state, TAIL] = before
    else:
        edges[after, PREV] = before


@njit(cache=True, nogil=True)
def count_of(states, edges, edge):  # type: ignore[no-untyped-def]
    """Occurrences of an edge's target; -1 for no edge."""
    return states[edges[edge, TARGET], COUNT] if edge >= 0 else -1


@njit(cache=True, nogil=True)
def open_group(meta, edges, groups, edge):  # type: ignore[no-untyped-def]
    """A group of its own for an edge."""
    group = meta[FREE] - 1
    if group >= 0:
        meta[FREE] = groups[group]
    else:
        group = meta[GROUPS]
        meta[GROUPS] = group + 1
    groups[group] = edge
    edges[edge, GROUP] = group


@njit(cache=True, nogil=True)
def leave_group(meta, edges, groups, edge):  # type: ignore[no-untyped-def]
    """Take an edge, still in its place, out of its group; a group left empty becomes free."""
    group, after = edges[edge, GROUP], edges[edge, NEXT]
    if groups[group] != edge:
        return
    if after >= 0 and edges[after, GROUP] == group:
        groups[group] = after
    else:
        groups[group] = meta[FREE]
        meta[FREE] = group + 1


@njit(cache=True, nogil=True)
def promote(meta, states, edges, groups, state, edge):  # type: ignore[no-untyped-def]
    """The edge's count has just risen by one: move it to its new equals."""
    count, group, before = count_of(states, edges, edge), edges[edge, GROUP], edges[edge, PREV]
    first = groups[group]
    leave_group(meta, edges, groups, edge)
    if first != edge:  # to the end of its new equals
        before = edges[first, PREV]
        unlink(states, edges, state, edge)
        link_after(states, edges, state, edge, before)
    if count_of(states, edges, before) != count:
        open_group(meta, edges, groups, edge)
        return
    group = edges[before, GROUP]
    edges[edge, GROUP] = group
    if first == edge and count > 1:  # to their front
        before = edges[groups[group], PREV]
        unlink(states, edges, state, edge)
        link_after(states, edges, state, edge, before)
        groups[group] = edge


@njit(cache=True, nogil=True)
def demote(meta, states, edges, groups, state, edge):  # type: ignore[no-untyped-def]
    """The edge's count has just fallen by one: move it behind its old equals, to the front of its new ones."""
    group, end = edges[edge, GROUP], edge
    while edges[end, NEXT] >= 0 and edges[edges[end, NEXT], GROUP] == group:
        end = edges[end, NEXT]
    leave_group(meta, edges, groups, edge)
    if end != edge:
        unlink(states, edges, state, edge)
        link_after(states, edges, state, edge, end)
    after = edges[edge, NEXT]
    if after >= 0 and count_of(states, edges, after) == count_of(states, edges, edge):
        edges[edge, GROUP] = edges[after, GROUP]
        groups[edges[after, GROUP]] = edge
    else:
        open_group(meta, edges, groups, edge)


@njit(cache=True, nogil=True)
def clone_of(meta, states, edges, groups, table, p, q, token):  # type: ignore[no-untyped-def]
    """Split state q: its substrings no longer than p's plus `token` become a state of their own."""
    clone = meta[STATES]
    meta[STATES] = clone + 1
    states[clone, LEN], states[clone, LINK] = states[p, LEN] + 1, states[q, LINK]
    states[clone, COUNT], states[clone, HEAD], states[clone, TAIL] = states[q, COUNT], NONE, NONE
    states[q, LINK] = clone
    edge, group = states[q, HEAD], NONE
    while edge >= 0:
        copy = add_edge(meta, states, edges, table, clone, edges[edge, TOKEN], edges[edge, TARGET])
        if edges[edge, GROUP] == group:
            edges[copy, GROUP] = edges[edges[copy, PREV], GROUP]
        else:
            group = edges[edge, GROUP]
            open_group(meta, edges, groups, copy)
        edge = edges[edge, NEXT]
    while p >= 0:
        edge = find_edge(edges, table, p, token)
        if edges[edge, TARGET] != q:
            break
        edges[edge, TARGET] = clone
        p = states[p, LINK]
    return clone


@njit(cache=True, nogil=True)
def grow(meta, states, edges, groups, table, token):  # type: ignore[no-untyped-def]
    """Extend the automaton by one token; the counts are the caller's business."""
    last = meta[LAST]
    edge = find_edge(edges, table, last, token)
    if edge >= 0:  # another sequence read the same before
        q = edges[edge, TARGET]
        if states[q, LEN] != states[last, LEN] + 1:
            q = clone_of(meta, states, edges, groups, table, last, q, token)
        meta[LAST] = q
        return
    new = meta[STATES]
    meta[STATES] = new + 1
    states[new, LEN], states[new, LINK] = states[last, LEN] + 1, 0
    states[new, COUNT], states[new, HEAD], states[new, TAIL] = 0, NONE, NONE
    p = last
    while p >= 0 and edge < 0:
        first_sight(meta, states, edges, groups, table, p, token, new)
        p = states[p, LINK]
        if p >= 0:
            edge = find_edge(edges, table, p, token)
    if edge >= 0:
        q = edges[edge, TARGET]
        if states[q, LEN] != states[p, LEN] + 1:
            q = clone_of(meta, states, edges, groups, table, p, q, token)
        states[new, LINK] = q
    meta[LAST] = new


@njit(cache=True, nogil=True)
def first_sight(meta, states, edges, groups, table, state, token, target):  # type: ignore[no-untyped-def]
    """A continuation that was not counted yet, at the end of the list."""
    tail = states[state, TAIL]
    edge = add_edge(meta, states, edges, table, state, token, target)
    if count_of(states, edges, tail) == 0:
        edges[edge, GROUP] = edges[tail, GROUP]
    else:
        open_group(meta, edges, groups, edge)


@njit(cache=True, nogil=True)
def holder(states, state, length):  # type: ignore[no-untyped-def]
    """The state of the suffix of `length` tokens, from a state further down."""
    while state > 0 and states[states[state, LINK], LEN] >= length:
        state = states[state, LINK]
    return state


@njit(cache=True, nogil=True)
def append(meta, states, edges, groups, table, tokens, count, depth):  # type: ignore[no-untyped-def]
    """Read tokens: grow, count every suffix of at most `depth` tokens, keep the order of continuations."""
    for i in range(count):
        token = tokens[i]
        grow(meta, states, edges, groups, table, token)
        length = min(meta[CURSOR_LEN], depth - 1)
        before = holder(states, meta[CURSOR], length)
        state = edges[find_edge(edges, table, before, token), TARGET]
        state = holder(states, state, length + 1)
        meta[CURSOR], meta[CURSOR_LEN] = state, length + 1
        while state > 0:
            states[state, COUNT] += 1
            state = states[state, LINK]
        while before > 0:
            promote(meta, states, edges, groups, before, find_edge(edges, table, before, token))
            before = states[before, LINK]


@njit(cache=True, nogil=True)
def discount(meta, states, edges, groups, table, tokens, depth):  # type: ignore[no-untyped-def]
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
            demote(meta, states, edges, groups, before, find_edge(edges, table, before, token))
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
