"""Compiled decoding of recorded outputs: whole jobs of `pld`, `cacheback` and `suffix` without a Python step.

Each kernel does what `loop.decode` does with its drafter on a `RecordedTarget`, for a drafter that starts empty, and
writes one row a step: POSITION, DRAFTED, DEPTH, ACCEPTED, EMITTED. The loop and the drafters are the definition; tests
hold these kernels to them row by row.

    text     int32, prompt and recorded output in one array; `start` is where the output begins
    cap      most tokens an output may have; the text may end earlier, with an end of text
    table    open addressing: a slot holds the end of an n-gram of `text`, 0 = free
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numba import njit

from dfbench.drafters import edge_table, suffix, suffix_counts
from dfbench.drafters.suffix import speculate_chain, speculate_tree
from dfbench.drafters.suffix_counts import CURSOR, CURSOR_LEN, append

POSITION, DRAFTED, DEPTH, ACCEPTED, EMITTED = range(5)

Array = np.ndarray[Any, np.dtype[Any]]


def table_for(tokens: int) -> Array:
    """An empty table with room for this many n-grams."""
    return np.zeros(1 << max(2 * tokens, 8).bit_length(), np.int32)


@njit(cache=True, nogil=True)
def slot_of(table, text, probe, at, n):  # type: ignore[no-untyped-def]
    """The slot of the n-gram probe[at : at + n]: the one that holds it, else the free one where it belongs."""
    mixed = 0
    for i in range(n):
        mixed = mixed * 0x9E3779B1 + probe[at + i] + 1
        mixed ^= mixed >> 17
    mask = len(table) - 1
    slot = mixed & mask
    while table[slot] != 0:
        begin = table[slot] - n
        same = True
        for i in range(n):
            if text[begin + i] != probe[at + i]:
                same = False
                break
        if same:
            return slot
        slot = (slot + 1) & mask
    return slot


@njit(cache=True, nogil=True)
def judge_chain(text, at, draft, size, room, row):  # type: ignore[no-untyped-def]
    """One step over a chain: cut it to the room, count what the recording confirms. Returns the tokens emitted."""
    left = len(text) - at
    size = min(size, room - 1)
    accepted = 0
    while accepted < min(size, left) and draft[accepted] == text[at + accepted]:
        accepted += 1
    emitted = min(accepted + 1, left)
    row[DRAFTED], row[DEPTH], row[ACCEPTED], row[EMITTED] = size, size, accepted, emitted
    return emitted


@njit(cache=True, nogil=True)
def judge_tree(text, at, tokens, parents, size, room, depth, row):  # type: ignore[no-untyped-def]
    """One step over a tree: the longest confirmed path below the root. `depth` is scratch, 0 = off the path."""
    left = len(text) - at
    kept = deepest = accepted = 0
    level = depth[0]
    confirmed = depth[1]
    for i in range(size):
        parent = parents[i]
        level[i] = 1 if parent < 0 else level[parent] + 1
        confirmed[i] = 0
        if level[i] > room - 1:
            continue
        kept += 1
        deepest = max(deepest, level[i])
        known = parent < 0 or confirmed[parent] == 1
        if known and level[i] <= left and tokens[i] == text[at + level[i] - 1]:
            confirmed[i] = 1
            accepted = max(accepted, level[i])
    emitted = min(accepted + 1, left)
    row[DRAFTED], row[DEPTH], row[ACCEPTED], row[EMITTED] = kept, deepest, accepted, emitted
    return emitted


@njit(cache=True, nogil=True)
def index_gram(table, text, end, n, recent):  # type: ignore[no-untyped-def]
    """Enter the n-gram that ends at `end`; the most recent occurrence stays, or the earliest."""
    slot = slot_of(table, text, text, end - n, n)
    if recent or table[slot] == 0:
        table[slot] = end


@njit(cache=True, nogil=True)
def pld_steps(text, start, cap, budget, tables, longest, shortest, draft_len, delays, recent, eos, rows):  # type: ignore[no-untyped-def]
    """Prompt lookup (drafters/pld.py). `tables[k]`, `delays[k]`: of n-grams of length `longest` - k."""
    kinds = longest - shortest + 1
    draft = np.empty(draft_len, np.int32)
    length, count = 0, 0
    until = start + 1
    while True:
        while length < until:
            length += 1
            for k in range(kinds):
                n, end = longest - k, length - delays[k]
                if end >= n:
                    index_gram(tables[k], text, end, n, recent)
        if length >= len(text):
            return count
        position = length - start
        size = 0
        if cap - position > 1:
            size = pld_draft(text, length, tables, longest, kinds, min(draft_len, budget), eos, draft)
        rows[count, POSITION] = position
        until = length + judge_chain(text, length, draft, size, cap - position, rows[count])
        count += 1


@njit(cache=True, nogil=True)
def pld_draft(text, length, tables, longest, kinds, most, eos, draft):  # type: ignore[no-untyped-def]
    """What followed the longest suffix that occurred before, up to an end of text; the number of tokens."""
    for k in range(kinds):
        n = longest - k
        if n > length:
            continue
        end = tables[k][slot_of(tables[k], text, text, length - n, n)]
        if end == 0:
            continue
        size = min(most, length - end)
        for i in range(size):
            draft[i] = text[end + i]
            for token in eos:
                if draft[i] == token:
                    return i
        return size
    return 0


@njit(cache=True, nogil=True)
def cacheback_chain_steps(text, start, cap, budget, table, leader, follower, draft_len, rows):  # type: ignore[no-untyped-def]
    """Cacheback's chain (drafters/cacheback.py): only a leader's latest follower matters while nothing is evicted."""
    path = np.empty(leader + draft_len + follower, np.int32)
    length, count = 0, 0
    until = start + 1
    while True:
        while length < until:
            length += 1
            if length - follower >= leader:
                index_gram(table, text, length - follower, leader, True)
        if length >= len(text):
            return count
        position = length - start
        size = 0
        if cap - position > 1 and length >= leader:
            path[:leader] = text[length - leader : length]
            while size < draft_len:
                end = table[slot_of(table, text, path, size, leader)]
                if end == 0:
                    break
                path[leader + size : leader + size + follower] = text[end : end + follower]
                size += follower
            size = min(size, draft_len, budget)
        rows[count, POSITION] = position
        until = length + judge_chain(text, length, path[leader:], size, cap - position, rows[count])
        count += 1


LEADER_OF, BEFORE, AFTER, ALIVE, BEGIN = range(5)
HEAD, TAIL, SIZE = range(3)


@njit(cache=True, nogil=True)
def cacheback_tree_steps(  # type: ignore[no-untyped-def]
    text, start, cap, budget, leader_table, window_table, leader, follower, followers,
    queries, reserve, count_refed, merge, rows,
):  # fmt: skip
    """Cacheback's tree (drafters/cacheback.py), without a frozen table and while no leader is evicted.

    `leader_ids` and `window_ids` name what a slot of the tables holds. A window (leader and follower) is a node of its
    leader's list, most recently used first; an evicted one stays in the table and may come back.
    """
    leader_ids = np.full(len(leader_table), -1, np.int32)
    window_ids = np.full(len(window_table), -1, np.int32)
    lists = np.full((len(text) + 1, 3), -1, np.int32)
    nodes = np.empty((len(text) + 1, 5), np.int32)
    counts = np.zeros(2, np.int64)
    most = max(queries, 1) + reserve + follower
    tree = np.empty((2, most), np.int32)
    scratch = np.empty((4, most + 1), np.int32)
    depth = np.empty((2, most), np.int32)
    gram = np.empty(leader, np.int32)
    length, count = 0, 0
    until, emitted = start + 1, 1
    while True:
        while length < until:
            length += 1
            if length >= leader + follower:
                learn_window(
                    text, length, leader, follower, followers, leader_table, leader_ids, window_table, window_ids,
                    lists, nodes, counts,
                )  # fmt: skip
        if length >= len(text):
            return count
        position = length - start
        size = 0
        if cap - position > 1 and length >= leader:
            room = max(0, queries - (emitted if count_refed else 1)) - reserve
            size = grow_tree(
                text, length, leader, follower, leader_table, leader_ids, lists, nodes, room, reserve, merge,
                tree, scratch, gram,
            )  # fmt: skip
        rows[count, POSITION] = position
        size = min(size, budget)
        emitted = judge_tree(text, length, tree[0], tree[1], size, cap - position, depth, rows[count])
        until = length + emitted
        count += 1


@njit(cache=True, nogil=True)
def learn_window(  # type: ignore[no-untyped-def]
    text, last, leader, follower, followers, leader_table, leader_ids, window_table, window_ids, lists, nodes, counts
):
    """Put the window that ends at `last` at the front of its leader's list; drop the list's last one if it is full."""
    middle = last - follower
    slot = slot_of(leader_table, text, text, middle - leader, leader)
    if leader_table[slot] == 0:
        leader_table[slot] = middle
        leader_ids[slot] = counts[0]
        lists[counts[0], SIZE] = 0
        counts[0] += 1
    owner = leader_ids[slot]
    slot = slot_of(window_table, text, text, middle - leader, leader + follower)
    node = window_ids[slot]
    if node < 0:
        node = counts[1]
        counts[1] += 1
        window_table[slot] = last
        window_ids[slot] = node
        nodes[node, LEADER_OF], nodes[node, BEGIN], nodes[node, ALIVE] = owner, middle, 0
    if nodes[node, ALIVE]:
        unlink_node(lists, nodes, owner, node)
    head = lists[owner, HEAD]
    nodes[node, BEFORE], nodes[node, AFTER], nodes[node, ALIVE] = -1, head, 1
    if head >= 0:
        nodes[head, BEFORE] = node
    else:
        lists[owner, TAIL] = node
    lists[owner, HEAD] = node
    lists[owner, SIZE] += 1
    if lists[owner, SIZE] > followers:
        unlink_node(lists, nodes, owner, lists[owner, TAIL])


@njit(cache=True, nogil=True)
def unlink_node(lists, nodes, owner, node):  # type: ignore[no-untyped-def]
    """Take a node out of its leader's list."""
    before, after = nodes[node, BEFORE], nodes[node, AFTER]
    if before >= 0:
        nodes[before, AFTER] = after
    else:
        lists[owner, HEAD] = after
    if after >= 0:
        nodes[after, BEFORE] = before
    else:
        lists[owner, TAIL] = before
    nodes[node, ALIVE] = 0
    lists[owner, SIZE] -= 1


@njit(cache=True, nogil=True)
def grow_tree(  # type: ignore[no-untyped-def]
    text, length, leader, follower, leader_table, leader_ids, lists, nodes, room, reserve, merge, tree, scratch, gram
):
    """Followers of the root while there is room, then those below each of them, level by level; the number of nodes."""
    frontier, below, mark, sibling = scratch[0], scratch[1], scratch[2], scratch[3]
    size, width, level = 0, 1, 0
    frontier[0] = -1
    while width > 0:
        found, full = 0, False
        for f in range(width):
            at = frontier[f]
            path_below(text, length, tree, at, leader, gram)
            slot = slot_of(leader_table, text, gram, 0, leader)
            node = -1 if leader_table[slot] == 0 else lists[leader_ids[slot], HEAD]
            while node >= 0:
                end, size_after = hang(text, nodes[node, BEGIN], follower, at, room, merge, tree, size, mark, sibling)
                if end < 0:
                    full = True
                    break
                room -= size_after - size
                for i in range(size, size_after):
                    mark[i] = -1
                size = size_after
                if mark[end] != level:
                    mark[end] = level
                    below[found] = end
                    found += 1
                node = nodes[node, AFTER]
            if full:
                break
        if level == 0:
            room += reserve
        elif full:
            break
        frontier, below = below, frontier
        width = found
        level += 1
    return size


@njit(cache=True, nogil=True)
def path_below(text, length, tree, node, leader, gram):  # type: ignore[no-untyped-def]
    """The last `leader` tokens of the path that ends in a node, the text before it included."""
    i = leader - 1
    while i >= 0 and node >= 0:
        gram[i] = tree[0, node]
        node = tree[1, node]
        i -= 1
    while i >= 0:
        length -= 1
        gram[i] = text[length]
        i -= 1


@njit(cache=True, nogil=True)
def hang(text, begin, follower, at, room, merge, tree, size, mark, sibling):  # type: ignore[no-untyped-def]
    """Hang text[begin : begin + follower] below node `at`; (its last node, the new size), or (-1, size): no room."""
    shared = 0
    if merge:
        while shared < follower:
            child = -1
            for i in range(size):
                if tree[1, i] == at and tree[0, i] == text[begin + shared]:
                    child = i
                    break
            if child < 0:
                break
            at = child
            shared += 1
    if room < follower - shared:
        return -1, size
    for i in range(shared, follower):
        tree[0, size], tree[1, size] = text[begin + i], at
        at = size
        size += 1
    return at, size


def _stamp(*modules: ModuleType) -> int:
    """A number that changes with these modules' source."""
    digest = hashlib.sha256()
    for module in modules:
        digest.update(Path(str(module.__file__)).read_bytes())
    return int.from_bytes(digest.digest()[:7], "big")


def _compiled_from(stamp: int) -> Any:
    """`suffix_steps`, whose copy on disk is known by what it was compiled from.

    numba looks at a function's own file alone, and much of this one comes from others; but the values that a function
    closes over are part of a copy's key.
    """

    @njit(cache=True, nogil=True)
    def suffix_steps(  # type: ignore[no-untyped-def]
        text, start, cap, budget, meta, states, edges, groups, table, limits, min_prob, tree, out, chances, depth, rows
    ):
        """SuffixDecoding's counts of one request (drafters/suffix.py). `depth` is the scratch space of `judge_tree`."""
        if stamp < 0:  # never: this is what closes over it
            return -1
        longest = len(limits)
        append(meta, states, edges, groups, table, text, start, longest)
        length, count = start, 0
        until = start + 1
        while True:
            append(meta, states, edges, groups, table, text[length:], until - length, longest)
            length = until
            if length >= len(text):
                return count
            position, size = length - start, 0
            if cap - position > 1:
                state, match = meta[CURSOR], min(meta[CURSOR_LEN], length - 1)
                if tree:
                    size, _, _ = speculate_tree(states, edges, limits, out, chances, state, match, budget, min_prob)
                else:
                    size, _, _ = speculate_chain(states, edges, limits, out, chances, state, match, budget, min_prob)
            rows[count, POSITION] = position
            if tree:
                emitted = judge_tree(text, length, out[0], out[1], size, cap - position, depth, rows[count])
            else:
                emitted = judge_chain(text, length, out[0], size, cap - position, rows[count])
            until = length + emitted
            count += 1

    return suffix_steps


suffix_steps = _compiled_from(_stamp(suffix, suffix_counts, edge_table))
