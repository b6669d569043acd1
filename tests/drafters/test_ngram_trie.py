"""SGLang's NGRAM: the compiled trie against a readable one, with and without eviction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dfbench.drafters.registry import create
from dfbench.drafters.trie_arrays import ALIVE, FREQ, TOKEN, Trie, child_of

Path = tuple[int, ...]


class PlainTrie:
    """The same trie as dictionaries: `freq`, and the time of the last touch of every path."""

    def __init__(self, depth: int, capacity: int) -> None:
        self.depth, self.capacity = depth, capacity
        self.freq: dict[Path, int] = {}
        self.touched: dict[Path, int] = {}
        self.now = 0

    def insert(self, tokens: Sequence[int]) -> None:
        for begin in range(len(tokens)):
            self._count(tuple(tokens[begin : begin + self.depth]))

    def _count(self, path: Path) -> None:
        reached: Path = ()
        for end in range(1, len(path) + 1):
            node = path[:end]
            if node not in self.freq:
                if len(self.freq) >= self.capacity and not self._evict(reached):
                    break
                self.freq[node] = 0
                self._touch(node)
            reached = node
        while reached:
            self.freq[reached] += 1
            self._touch(reached)
            reached = reached[:-1]

    def _touch(self, node: Path) -> None:
        self.now += 1
        self.touched[node] = self.now

    def _evict(self, kept: Path) -> bool:
        inner = {node[:-1] for node in self.freq}
        leaves = [node for node in self.freq if node not in inner and node != kept]
        if not leaves:
            return False
        oldest = min(leaves, key=self.touched.__getitem__)
        del self.freq[oldest], self.touched[oldest]
        return True

    def children(self, node: Path, *, frequent: bool) -> list[Path]:
        found = [path for path in self.freq if path[:-1] == node and path]
        if frequent:
            return sorted(found, key=lambda path: (-self.freq[path], -self.touched[path]))
        return sorted(found, key=lambda path: -self.touched[path])

    def anchors(self, text: Sequence[int]) -> Iterator[Path]:
        for length in range(min(len(text), self.depth - 1), 0, -1):
            node = tuple(text[len(text) - length :])
            if node in self.freq and self.children(node, frequent=False):
                yield node


class Merged:
    """A draft that grows; equal paths are one node."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.index: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token: int) -> int | None:
        if (parent, token) not in self.index:
            if len(self.index) >= self.limit:
                return None
            self.index[parent, token] = len(self.index)
        return self.index[parent, token]

    def draft(self) -> tuple[list[int], list[int]]:
        return [token for _, token in self.index], [parent for parent, _ in self.index]


def by_recency(trie: PlainTrie, text: Sequence[int], limit: int, low: int, high: int) -> tuple[list[int], list[int]]:
    merged = Merged(limit)
    step = (high - low) / (trie.depth - 1)
    for anchor in trie.anchors(text):
        queue = [(anchor, -1, low + (trie.depth - 1 - len(anchor)) * step)]
        for path, place, breadth in queue:
            for child in trie.children(path, frequent=False)[: max(1, int(breadth + 1e-9))]:
                node = merged.add(place, child[-1])
                if node is not None:
                    queue.append((child, node, breadth - step))
    return merged.draft()


def by_probability(trie: PlainTrie, text: Sequence[int], limit: int, breadth: int) -> tuple[list[int], list[int]]:
    merged = Merged(limit)
    for anchor in trie.anchors(text):
        queue: list[tuple[float, Path, int]] = []

        def push(path: Path, place: int, share: float, queue: list[tuple[float, Path, int]] = queue) -> None:
            best = trie.children(path, frequent=True)[:breadth]
            total = sum(trie.freq[child] for child in best)
            queue.extend((share * trie.freq[child] / total, child, place) for child in best)

        push(anchor, -1, 1.0)
        while queue and len(merged.index) < limit:
            share, path, place = queue.pop(max(range(len(queue)), key=lambda i: (queue[i][0], -i)))
            node = merged.add(place, path[-1])
            assert node is not None
            push(path, node, share)
    return merged.draft()


texts = st.integers(1, 4).flatmap(lambda n: st.lists(st.integers(0, n), min_size=1, max_size=30))


@settings(max_examples=120, deadline=None)
@given(
    st.lists(texts, min_size=1, max_size=3),
    st.integers(2, 7),
    st.sampled_from([3, 10, 40, 10**6]),
    st.booleans(),
    st.sampled_from(["recency", "probability"]),
    st.integers(1, 3),
)
def test_drafts_are_those_of_a_readable_trie(
    requests: list[list[int]], depth: int, capacity: int, prompt_too: bool, mode: str, step: int
) -> None:
    low, high = 1, 4
    options = {"depth": depth, "capacity": capacity, "mode": mode, "index_prompt": prompt_too, "draft_tokens": 9}
    drafter = create("ngram-trie", {**options, "min_breadth": low, "max_breadth": high})
    trie = PlainTrie(depth, capacity)
    for text in requests:
        at = max(1, len(text) // 2)
        drafter.start(text[:at])
        if prompt_too:
            trie.insert(text[:at])
        while at < len(text):
            drafter.observe(text[at : at + step])
            at = min(at + step, len(text))
            trie.insert(text[max(0, at - depth) : at])
            for budget in (1, 5, 8):
                if mode == "recency":
                    expected = by_recency(trie, text[:at], budget, low, high)
                else:
                    expected = by_probability(trie, text[:at], budget, high)
                draft = drafter.propose(budget)
                assert (list(draft.tokens), list(draft.parents or ())) == expected


@settings(max_examples=80, deadline=None)
@given(st.lists(texts, min_size=1, max_size=6), st.integers(1, 6), st.integers(1, 30), st.sampled_from([0, 2]))
def test_capacity_holds_and_the_counts_are_right(
    sequences: list[list[int]], depth: int, capacity: int, ordered: int
) -> None:
    trie, plain = Trie(depth, capacity, ordered), PlainTrie(depth, capacity)
    for tokens in sequences:
        trie.insert(np.asarray(tokens, np.int32), 0, len(tokens))
        plain.insert(tokens)
    assert trie.meta[ALIVE] == len(plain.freq) <= capacity
    for path, count in plain.freq.items():
        node = 0
        for token in path:
            node = child_of(trie.nodes, trie.table, node, token)
        assert trie.nodes[node, TOKEN] == path[-1]
        assert trie.nodes[node, FREQ] == count


def test_the_prompt_counts_only_where_asked() -> None:
    prompt = [*range(30), 0, 1]
    plain, indexed = create("ngram-trie", {}), create("ngram-trie", {"index_prompt": True})
    for drafter in (plain, indexed):
        drafter.start(prompt)
        drafter.observe([2])
    assert not plain.propose(11).tokens
    assert list(indexed.propose(11).tokens) == list(range(3, 14))


def test_outputs_of_earlier_requests_are_drafted_until_reset() -> None:
    drafter = create("ngram-trie", {})
    drafter.start([1])
    for token in [5, 6, 7, 8]:
        drafter.observe([token])
    drafter.start([2])
    drafter.observe([5])
    assert list(drafter.propose(3).tokens) == [6, 7, 8]
    drafter.reset()
    drafter.start([2])
    drafter.observe([5])
    assert not drafter.propose(3).tokens


def test_the_trie_grows_past_its_first_arrays() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50_000, 3000).astype(np.int32)
    trie = Trie(6, 10**6)
    trie.insert(tokens, 0, len(tokens))
    assert trie.meta[ALIVE] == pytest.approx(6 * 3000, rel=0.05)
    node = 0
    for token in tokens[100:106]:
        node = child_of(trie.nodes, trie.table, node, token)
        assert node > 0
