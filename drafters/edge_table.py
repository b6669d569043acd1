"""What the drafters' automata and tries share: growing arrays, and finding the edge of a state for a token by hash.

edges   [n, 3 + …]  OWNER state, TOKEN, TARGET state, and what its module adds
table   [2^k]       open addressing, (owner, token) → edge number + 1; 0 = free
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

OWNER, TOKEN, TARGET = range(3)

Ints = npt.NDArray[np.int32]


def grown(rows: Ints, size: int) -> Ints:
    """A longer array that begins with these rows; the others hold anything."""
    longer = np.empty((size, *rows.shape[1:]), rows.dtype)
    longer[: len(rows)] = rows
    return longer


def empty_table(edges: int) -> Ints:
    """A table with room for this many edges, at most half full."""
    return np.zeros(1 << (2 * edges).bit_length(), np.int32)


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
def enter(edges, table, edge):  # type: ignore[no-untyped-def]
    """Put an edge, which is not there yet, into the table."""
    mask = len(table) - 1
    slot = slot_of(edges[edge, OWNER], edges[edge, TOKEN], mask)
    while table[slot] != 0:
        slot = (slot + 1) & mask
    table[slot] = edge + 1


@njit(cache=True, nogil=True)
def refill(edges, table, count):  # type: ignore[no-untyped-def]
    """Enter the first `count` edges into a new, empty table."""
    for edge in range(count):
        enter(edges, table, edge)
