"""The published methods restated to be read, not to be fast: what the drafters are held against.

Each takes the whole sequence at every step, and nothing is shared with the code under test. `steps` walks a recorded
output without the decode loop, so that loop and drafters are checked together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any

Nodes = tuple[list[int], list[int]]
"""Tokens and parents of a draft (-1 = root)."""


def chain(tokens: Sequence[int]) -> Nodes:
    return list(tokens), list(range(-1, len(tokens) - 1))


def steps(draft: Callable[[list[int], int], Nodes], prompt: Sequence[int], output: Sequence[int]) -> int:
    """Decode steps that a drafter needs for a recorded output. `draft(seq, emitted by the last step) → nodes`."""
    at, last, count = 1, 1, 0
    while at < len(output):
        tokens, parents = draft([*prompt, *output[:at]], last)
        paths: list[list[int]] = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else []), token])
        ahead = list(output[at:])
        accepted = max((len(path) for path in paths if path == ahead[: len(path)]), default=0)
        last = min(accepted + 1, len(ahead))
        at, count = at + last, count + 1
    return count


def prompt_lookup(seq: Sequence[int], options: dict[str, Any], eos_ids: Collection[int] = ()) -> list[int]:
    """Longest n first, all occurrences looked at, one chosen by the tie rule."""
    length, wanted = len(seq), options.get("draft_len", 10)
    for n in range(options.get("max_ngram", 3), options.get("min_ngram", 1) - 1, -1):
        if n >= length:
            continue
        ends = [s + n for s in range(length - n) if list(seq[s : s + n]) == list(seq[-n:])]
        if options.get("full"):
            ends = [end for end in ends if end + wanted <= length and end < length - n]
        if ends:
            end = ends[-1] if options.get("match", "recent") == "recent" else ends[0]
            draft = list(seq[end : end + wanted])
            stop = (
                next((i for i, t in enumerate(draft) if t in eos_ids), wanted) if options.get("stop_at_eos") else wanted
            )
            return draft[:stop]
    return []


class ReleasedCacheback:
    """Two LRU levels as released: a read moves its leader to the front at once, while the draft is being made."""

    def __init__(
        self,
        leader: int = 1,
        follower: int = 3,
        leaders: int = 1_048_576,
        followers: int = 128,
        frozen: dict[tuple[int, ...], list[tuple[int, ...]]] | None = None,
    ) -> None:
        self.leader, self.follower, self.leaders, self.followers = leader, follower, leaders, followers
        self.table: OrderedDict[tuple[int, ...], OrderedDict[tuple[int, ...], None]] = OrderedDict()
        self.frozen = frozen or {}
        self.known = 0

    def request(self, prompt: Sequence[int]) -> None:
        self.known = 0
        self.learn(prompt)

    def learn(self, seq: Sequence[int]) -> None:
        """Put every window that ends behind what was known before."""
        width = self.leader + self.follower
        for end in range(max(width, self.known + 1), len(seq) + 1):
            window = tuple(seq[end - width : end])
            self.put(window[: self.leader], window[self.leader :])
        self.known = len(seq)

    def put(self, leader: tuple[int, ...], follower: tuple[int, ...]) -> None:
        entry = self.table.setdefault(leader, OrderedDict())
        self.table.move_to_end(leader)
        if len(self.table) > self.leaders:
            self.table.popitem(last=False)
        entry[follower] = None
        entry.move_to_end(follower)
        if len(entry) > self.followers:
            entry.popitem(last=False)

    def get(self, leader: tuple[int, ...]) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        if leader in self.table:
            self.table.move_to_end(leader)
            found = list(reversed(self.table[leader]))
        return found + self.frozen.get(leader, [])

    def chain(self, seq: Sequence[int], wanted: int) -> list[int]:
        path = list(seq)
        while len(path) < len(seq) + wanted:
            found = self.get(tuple(path[-self.leader :]))
            if not found:
                break
            path += found[0]
        return path[len(seq) : len(seq) + wanted]

    def tree(self, seq: Sequence[int], refed: int, queries: int = 96, reserve: int = 16) -> Nodes:
        tokens: list[int] = []
        parents: list[int] = []
        remain = max(0, queries - refed) - reserve
        frontier: list[tuple[int, list[int]]] = [(-1, list(seq))]
        level = 0
        while True:
            below: list[tuple[int, list[int]]] = []
            full = False
            for node, path in frontier:
                for follower in self.get(tuple(path[-self.leader :])):
                    if remain < self.follower:
                        full = True
                        break
                    remain -= self.follower
                    at = node
                    for token in follower:
                        tokens.append(token)
                        parents.append(at)
                        at = len(tokens) - 1
                    below.append((at, path + list(follower)))
                if full:
                    break
            if level == 0:
                remain += reserve
            elif full or not below:
                return tokens, parents
            frontier = below
            level += 1


def longest_repeat(seq: Sequence[int], recent: bool, horizon: int | None = None) -> tuple[int, int]:
    """Length of the longest suffix that ends earlier as well, and where: its first or its latest such end.

    With a horizon, the latest end is that of at most so many last tokens of the match.
    """
    text = list(seq)
    for length in range(len(text) - 1, 0, -1):
        if ends := _ends(text, length):
            if recent and horizon is not None and length > horizon:
                ends = _ends(text, horizon)
            return length, ends[-1 if recent else 0]
    return 0, -1


def _ends(text: list[int], length: int) -> list[int]:
    suffix = text[len(text) - length :]
    return [end for end in range(length - 1, len(text) - 1) if text[end - length + 1 : end + 1] == suffix]


def ranked_tree(matrix: dict[int, list[int]], root: int, paths: Sequence[str]) -> Nodes:
    """Token Recycling's static tree: the node of ranks r1 r2 … is matrix[… matrix[root][r1] …][rn]."""
    tokens: list[int] = []
    place = {"": -1}
    parents: list[int] = []
    for path in paths:
        parent = place[path[:-1]]
        above = root if parent < 0 else tokens[parent]
        place[path] = len(tokens)
        tokens.append(matrix.get(above, [0] * 8)[int(path[-1])])
        parents.append(parent)
    return tokens, parents
