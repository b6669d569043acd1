"""A suffix automaton of one growing text that knows, at any time, its longest suffix that occurred before.

The classic online construction (Blumer et al. 1985), amortised constant time a token. Everything lies in flat integer
arrays, so that the loops compile (numba).

    states  [n, 5]  LEN of the longest string, suffix LINK, FIRST and RECENT position where it ends, HEAD of its edges
    edges   [n, 4]  OWNER state, TOKEN, TARGET state, NEXT of the same owner
    table   [2^k]   open addressing, (owner, token) → edge number + 1
    meta    [6]     numbers of STATES and EDGES, the text's LENGTH, the state of the whole text (LAST), the ANCHOR and
                    the END of its latest earlier occurrence

The suffix link of the state of the whole text is the state of its longest suffix that ends earlier as well: no cursor
is needed, and the text is never matched against itself.

RECENT is kept up to date only on request, for strings of at most `horizon` tokens: a text that has been repeating for
long has as many suffixes that occurred before as it has repeats, and each of them ends at every new token. The
ANCHOR is the state of that longest suffix, or of its last `horizon` tokens where it is longer; no more than `horizon`
links lead from it to the empty string.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit

from dfbench.drafters.edge_table import OWNER, TARGET, TOKEN, empty_table, enter, find_edge, grown, refill

LEN, LINK, FIRST, RECENT, HEAD = range(5)
NEXT = 3
STATES, EDGES, LENGTH, LAST, ANCHOR, END = range(6)
NONE = -1


class SuffixAutomaton:
    """Reads tokens; after each `extend`, `match` and `end` describe the longest suffix that occurred before.

    match: its length in tokens, 0 for none. end: the position of the last token of its first earlier occurrence, or,
    with a horizon, of the latest earlier occurrence of its last `horizon` tokens.
    """

    def __init__(self, capacity: int = 256) -> None:
        self.match, self.end = 0, NONE
        self._tokens = 0
        self._meta = np.zeros(6, np.int64)
        self._meta[STATES] = 1
        self._states = np.empty((0, 5), np.int32)
        self._edges = np.empty((0, 4), np.int32)
        self._buffer = np.empty(64, np.int32)
        self._enlarge(capacity)
        self._states[0] = (0, NONE, NONE, NONE, NONE)

    def read(self, tokens: Sequence[int], horizon: int) -> None:
        """Append these tokens; horizon 0 looks for first occurrences."""
        count, buffer = len(tokens), self._buffer
        if count > len(buffer):
            buffer = np.array(tokens, np.int32)
        else:
            for i, token in enumerate(tokens):
                buffer[i] = token
        self._tokens += count
        if self._tokens > self._room:
            self._enlarge(2 * self._tokens)
        self.match, self.end = extend(self._meta, self._states, self._edges, self._table, buffer, count, horizon)

    def nbytes(self) -> int:
        """Bytes held by the arrays."""
        return self._states.nbytes + self._edges.nbytes + self._table.nbytes

    def _enlarge(self, room: int) -> None:
        """Room for so many tokens: an automaton has at most 2 states and 3 edges a token."""
        self._room = room
        self._states = grown(self._states, 2 * room + 2)
        self._edges = grown(self._edges, 3 * room + 4)
        self._table = empty_table(len(self._edges))
        refill(self._edges, self._table, int(self._meta[EDGES]))


@njit(cache=True, nogil=True)
def extend(meta, states, edges, table, tokens, count, horizon):  # type: ignore[no-untyped-def]
    """Append tokens one by one; returns length and end of the longest suffix that occurred before."""
    for i in range(count):
        append(meta, states, edges, table, tokens[i])
        if horizon > 0:
            note(meta, states, edges, table, tokens[i], horizon)
    state = states[meta[LAST], LINK]
    if state <= 0:
        return 0, NONE
    return states[state, LEN], (meta[END] if horizon > 0 else states[state, FIRST])


@njit(cache=True, nogil=True)
def append(meta, states, edges, table, token):  # type: ignore[no-untyped-def]
    """One step of the construction."""
    here = meta[LENGTH]
    meta[LENGTH] = here + 1
    state = add_state(meta, states, here + 1, here, here)
    walk = meta[LAST]
    meta[LAST] = state
    edge = NONE
    while walk >= 0:
        edge = find_edge(edges, table, walk, token)
        if edge >= 0:
            break
        add_edge(meta, states, edges, table, walk, token, state)
        walk = states[walk, LINK]
    if walk < 0:
        states[state, LINK] = 0
        return
    target = edges[edge, TARGET]
    if states[target, LEN] != states[walk, LEN] + 1:
        target = split(meta, states, edges, table, walk, token, target)
    states[state, LINK] = target


@njit(cache=True, nogil=True)
def split(meta, states, edges, table, walk, token, target):  # type: ignore[no-untyped-def]
    """Give the shorter strings of `target`, which just occurred once more, a state of their own."""
    clone = add_state(meta, states, states[walk, LEN] + 1, states[target, FIRST], states[target, RECENT])
    edge = states[target, HEAD]
    while edge >= 0:
        add_edge(meta, states, edges, table, clone, edges[edge, TOKEN], edges[edge, TARGET])
        edge = edges[edge, NEXT]
    states[clone, LINK] = states[target, LINK]
    states[target, LINK] = clone
    while walk >= 0:
        edge = find_edge(edges, table, walk, token)
        if edge < 0 or edges[edge, TARGET] != target:
            break
        edges[edge, TARGET] = clone
        walk = states[walk, LINK]
    return clone


@njit(cache=True, nogil=True)
def note(meta, states, edges, table, token, horizon):  # type: ignore[no-untyped-def]
    """Find the latest earlier end of the match; then all its suffixes end here."""
    state = states[meta[LAST], LINK]
    if states[state, LEN] > horizon:
        state = edges[find_edge(edges, table, meta[ANCHOR], token), TARGET]
        while states[states[state, LINK], LEN] >= horizon:
            state = states[state, LINK]
    meta[ANCHOR] = state
    meta[END] = states[state, RECENT]
    while state > 0:
        states[state, RECENT] = meta[LENGTH] - 1
        state = states[state, LINK]


@njit(cache=True, nogil=True)
def add_state(meta, states, length, first, recent):  # type: ignore[no-untyped-def]
    state = meta[STATES]
    meta[STATES] = state + 1
    states[state, LEN], states[state, FIRST], states[state, RECENT] = length, first, recent
    states[state, HEAD] = NONE
    return state


@njit(cache=True, nogil=True)
def add_edge(meta, states, edges, table, state, token, target):  # type: ignore[no-untyped-def]
    edge = meta[EDGES]
    meta[EDGES] = edge + 1
    edges[edge, OWNER], edges[edge, TOKEN], edges[edge, TARGET] = state, token, target
    edges[edge, NEXT] = states[state, HEAD]
    states[state, HEAD] = edge
    enter(edges, table, edge)
