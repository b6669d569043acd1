"""A trie of n-grams in flat arrays: counts, recency of siblings and of all nodes, eviction of the least recent leaf.

    nodes  [n, 10]  see the column names; node 0 is the root. Siblings are a list in the order that drafting needs,
                    all nodes but the root a list by recency, FIRST and OLDEST being its ends
    table  [2^k]    first node of each hash bucket, chained by BUCKET
    meta   [4]      number of rows used, nodes alive, FIRST, OLDEST, first free row

A path is touched from its end to its beginning, so a node is never more recent than its parent: the oldest node of all
is always a leaf.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from dfbench.drafters.edge_table import slot_of

TOKEN, PARENT, FREQ, CHILD, AFTER, BEFORE, NEWER, OLDER, BUCKET, CHILDREN = range(10)
ROWS, ALIVE, FIRST, OLDEST, FREE = range(5)
NONE = -1


class Trie:
    """At most `capacity` nodes below the root. `ordered` = 0 keeps siblings by recency, most recent first; otherwise
    the first `ordered` siblings are those of highest count, highest first, of equals the one counted last first.
    """

    def __init__(self, depth: int, capacity: int, ordered: int = 0) -> None:
        self.depth, self.capacity, self.ordered = depth, capacity, ordered
        self.nodes = np.full((1024, 10), NONE, np.int32)
        self.table = np.full(2048, NONE, np.int32)
        self.nodes[0, FREQ] = self.nodes[0, CHILDREN] = 0
        self.meta = np.asarray([1, 0, NONE, NONE, NONE], np.int64)

    def insert(self, tokens: np.ndarray, first: int, last: int) -> None:
        """Count the paths that begin at each place in [first, last) of these tokens (int32), `depth` long at most."""
        for begin in range(first, last, 4096):
            end = min(begin + 4096, last)
            self._reserve((end - begin) * self.depth)
            insert_paths(self.meta, self.nodes, self.table, tokens, begin, end, self.depth, self.capacity, self.ordered)

    def nbytes(self) -> int:
        """Bytes held by the arrays."""
        return self.nodes.nbytes + self.table.nbytes

    def _reserve(self, more: int) -> None:
        need = min(int(self.meta[ROWS]) + more, self.capacity + 1)
        if need > len(self.nodes):
            rows = min(max(2 * len(self.nodes), need), self.capacity + 1)
            grown = np.full((rows, 10), NONE, np.int32)
            grown[: len(self.nodes)] = self.nodes
            self.nodes = grown
            self.table = np.full(1 << (2 * rows - 1).bit_length(), NONE, np.int32)
            rehash(self.nodes, self.table, int(self.meta[ROWS]))


@njit(cache=True, nogil=True)
def child_of(nodes, table, parent, token):  # type: ignore[no-untyped-def]
    """The child of `parent` for `token`, or -1."""
    node = table[slot_of(parent, token, len(table) - 1)]
    while node >= 0 and not (nodes[node, PARENT] == parent and nodes[node, TOKEN] == token):
        node = nodes[node, BUCKET]
    return node


@njit(cache=True, nogil=True)
def rehash(nodes, table, rows):  # type: ignore[no-untyped-def]
    """Enter all nodes into a new, empty table."""
    for node in range(1, rows):
        if nodes[node, PARENT] >= 0:
            bucket = slot_of(nodes[node, PARENT], nodes[node, TOKEN], len(table) - 1)
            nodes[node, BUCKET] = table[bucket]
            table[bucket] = node


@njit(cache=True, nogil=True)
def insert_paths(meta, nodes, table, tokens, first, last, depth, capacity, ordered):  # type: ignore[no-untyped-def]
    """Count every path; where the trie is full, the oldest leaf makes room."""
    for begin in range(first, last):
        node = 0
        for i in range(begin, min(begin + depth, len(tokens))):
            child = child_of(nodes, table, node, tokens[i])
            if child < 0:
                if meta[ALIVE] >= capacity and not evict(meta, nodes, table, node, ordered):
                    break
                child = new_node(meta, nodes, table, node, tokens[i], ordered)
            node = child
        while node > 0:
            nodes[node, FREQ] += 1
            rise(nodes, node, ordered)
            forget_age(meta, nodes, node)
            make_first(meta, nodes, node)
            node = nodes[node, PARENT]


@njit(cache=True, nogil=True)
def new_node(meta, nodes, table, parent, token, ordered):  # type: ignore[no-untyped-def]
    """A node without counts, last of the sorted siblings or first of the recent ones."""
    node = meta[FREE]
    if node >= 0:
        meta[FREE] = nodes[node, AFTER]
    else:
        node = meta[ROWS]
        meta[ROWS] = node + 1
    meta[ALIVE] += 1
    nodes[node, TOKEN], nodes[node, PARENT], nodes[node, FREQ] = token, parent, 0
    nodes[node, CHILD], nodes[node, CHILDREN] = NONE, 0
    before, place, seen = NONE, nodes[parent, CHILD], 0
    while place >= 0 and seen < ordered:
        before, place, seen = place, nodes[place, AFTER], seen + 1
    put_behind(nodes, parent, node, before)
    nodes[parent, CHILDREN] += 1
    make_first(meta, nodes, node)
    bucket = slot_of(parent, token, len(table) - 1)
    nodes[node, BUCKET] = table[bucket]
    table[bucket] = node
    return node


@njit(cache=True, nogil=True)
def put_behind(nodes, parent, node, before):  # type: ignore[no-untyped-def]
    """Link a node among its siblings behind `before` (-1: first)."""
    after = nodes[parent, CHILD] if before < 0 else nodes[before, AFTER]
    nodes[node, BEFORE], nodes[node, AFTER] = before, after
    if after >= 0:
        nodes[after, BEFORE] = node
    if before < 0:
        nodes[parent, CHILD] = node
    else:
        nodes[before, AFTER] = node


@njit(cache=True, nogil=True)
def take_out(nodes, parent, node):  # type: ignore[no-untyped-def]
    """Unlink a node from its siblings."""
    before, after = nodes[node, BEFORE], nodes[node, AFTER]
    if before < 0:
        nodes[parent, CHILD] = after
    else:
        nodes[before, AFTER] = after
    if after >= 0:
        nodes[after, BEFORE] = before


@njit(cache=True, nogil=True)
def rise(nodes, node, ordered):  # type: ignore[no-untyped-def]
    """The node was just counted: move it to its place among its siblings."""
    parent = nodes[node, PARENT]
    place, seen = nodes[parent, CHILD], 0
    while place != node and ordered > 0 and nodes[place, FREQ] > nodes[node, FREQ]:
        place, seen = nodes[place, AFTER], seen + 1
        if seen >= ordered:
            return
    if place != node:
        take_out(nodes, parent, node)
        put_behind(nodes, parent, node, nodes[place, BEFORE])


@njit(cache=True, nogil=True)
def make_first(meta, nodes, node):  # type: ignore[no-untyped-def]
    """The most recent node of all."""
    newest = meta[FIRST]
    nodes[node, NEWER], nodes[node, OLDER] = NONE, newest
    if newest >= 0:
        nodes[newest, NEWER] = node
    else:
        meta[OLDEST] = node
    meta[FIRST] = node


@njit(cache=True, nogil=True)
def forget_age(meta, nodes, node):  # type: ignore[no-untyped-def]
    """Unlink a node from the list by recency."""
    newer, older = nodes[node, NEWER], nodes[node, OLDER]
    if newer < 0:
        meta[FIRST] = older
    else:
        nodes[newer, OLDER] = older
    if older < 0:
        meta[OLDEST] = newer
    else:
        nodes[older, NEWER] = newer


@njit(cache=True, nogil=True)
def evict(meta, nodes, table, kept, ordered):  # type: ignore[no-untyped-def]
    """Remove the oldest leaf but `kept`, the end of the path being written; False where there is none."""
    node = meta[OLDEST]
    while node >= 0 and (node == kept or nodes[node, CHILDREN] > 0):
        node = nodes[node, NEWER]
    if node < 0:
        return False
    parent = nodes[node, PARENT]
    bucket = slot_of(parent, nodes[node, TOKEN], len(table) - 1)
    if table[bucket] == node:
        table[bucket] = nodes[node, BUCKET]
    else:
        other = table[bucket]
        while nodes[other, BUCKET] != node:
            other = nodes[other, BUCKET]
        nodes[other, BUCKET] = nodes[node, BUCKET]
    take_out(nodes, parent, node)
    nodes[parent, CHILDREN] -= 1
    forget_age(meta, nodes, node)
    nodes[node, PARENT], nodes[node, AFTER] = NONE, meta[FREE]
    meta[FREE] = node
    meta[ALIVE] -= 1
    if ordered > 0:
        sort_front(nodes, parent, ordered)
    return True


@njit(cache=True, nogil=True)
def sort_front(nodes, parent, ordered):  # type: ignore[no-untyped-def]
    """After a sibling left: the next best of all the others becomes the last of the sorted ones."""
    before, place, seen = NONE, nodes[parent, CHILD], 0
    while place >= 0 and seen < ordered - 1:
        before, place, seen = place, nodes[place, AFTER], seen + 1
    best, other = place, place
    while other >= 0:
        if nodes[other, FREQ] > nodes[best, FREQ]:
            best = other
        other = nodes[other, AFTER]
    if best != place:
        take_out(nodes, parent, best)
        put_behind(nodes, parent, best, before)
