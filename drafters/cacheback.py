"""Cacheback: a table from a leader (the last tokens) to the followers seen after it, both kept in LRU order.

Method: "Cacheback" (arXiv 2511.21699) as its released code does it. Every window of leader + follower tokens of prompt
and output is learned; a rejected draft never is. `draft: chain` follows the most recent follower; `draft: tree`
offers many followers of the root and continues below them, level by level, within a budget of queries.

A read makes its leader the most recently used one. `propose` may change nothing, so the leaders that the published
code touches while it drafts are touched here at the next `observe`, before anything is learned: no read or write comes
between, so the order, and what is evicted, are the same. The draft of a state is a function of the state and the
options alone; a smaller budget only cuts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heapreplace
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from dfbench.drafters.base import EMPTY, Draft, Drafter, DrafterContext, Options, Verified, check_prompt
from dfbench.drafters.frozen import FrozenIndex, load

Gram = tuple[int, ...]
Leader = int | Gram
"""A leader of one token is the token itself, which spares a tuple at every look-up."""


class CachebackOptions(Options):
    """Options of Cacheback; the defaults are those of the released run, but for `draft`."""

    draft: Literal["chain", "tree"] = Field("chain", description="one continuation, or many as a tree")
    leader: int = Field(1, ge=1, description="tokens that are looked up")
    follower: int = Field(3, ge=1, description="tokens stored after a leader")
    leaders: int = Field(1_048_576, ge=1, description="capacity: leaders kept")
    followers: int = Field(128, ge=1, description="capacity: followers kept for one leader")
    draft_len: int = Field(10, ge=1, description="chain: most tokens proposed")
    queries: int = Field(96, ge=1, description="tree: most tokens in a pass, re-fed ones included")
    reserve: int = Field(16, ge=0, description="tree: queries kept back from the first level for those below it")
    count_refed: bool = Field(
        True,
        description="tree: count every token that the last step emitted as a query, as the released harness feeds "
        "them again; false: the root alone",
    )
    merge: bool = Field(False, description="tree: fold branches that begin alike, so that no query is spent twice")
    frozen: str | None = Field(None, description="file of a frozen table, read beside the dynamic one")
    frozen_sha256: str | None = Field(None, description="SHA-256 of that file, by which a worker finds it")


class Entry:
    """One leader of the dynamic table: its followers, most recent last, and when it was last read or written."""

    __slots__ = ("followers", "used")

    def __init__(self, follower: Gram, used: int) -> None:
        self.followers: dict[Gram, None] = {follower: None}
        self.used = used


class Planned(NamedTuple):
    """The whole draft of the present state and the leaders that were found on the way, in order of reading."""

    draft: Draft
    touched: Sequence[Entry]


class Cacheback(Drafter):
    """The dynamic table, its learning, and the two ways to draft from it and from the frozen one."""

    name = "cacheback"
    summary = "Cacheback: LRU table of leaders and followers over prompt and output (arXiv 2511.21699)."
    Options = CachebackOptions
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "seed": {"draft": "chain", "leader": 1, "follower": 10, "draft_len": 10},
        "released": {"draft": "tree", "leader": 1, "follower": 3, "queries": 96, "reserve": 16, "merge": False},
    }
    file_options: ClassVar[dict[str, str]] = {"frozen": "frozen_sha256"}
    options: CachebackOptions

    def __init__(self, options: CachebackOptions, context: DrafterContext) -> None:
        super().__init__(options, context)
        self._frozen = _load_frozen(options, context)
        self._plan = self._plan_chain if options.draft == "chain" else self._plan_tree
        self.reset()

    def reset(self) -> None:
        """Empty the dynamic table; the frozen one stays."""
        self._table: dict[Leader, Entry] = {}
        self._clock = 0
        self._oldest: list[tuple[int, Leader]] | None = None
        self._seq: list[int] = []
        self._planned: Planned | None = None
        self._emitted = 0

    def start(self, prompt: Sequence[int]) -> None:
        """Learn every window of the prompt."""
        check_prompt(prompt, self.context)
        self._seq = list(prompt)
        self._planned = None
        self._emitted = 0
        self._learn(self.options.leader + self.options.follower)

    def observe(self, emitted: Sequence[int], verified: Verified | None = None) -> None:
        """Apply the touches of the draft that was just judged, then learn one window an emitted token."""
        if self._emitted:  # no draft precedes the token that prefill gave
            for entry in (self._planned or self._plan()).touched:
                self._clock += 1
                entry.used = self._clock
        self._planned = None
        self._emitted = len(emitted)
        known = len(self._seq)
        self._seq.extend(emitted)
        self._learn(known + 1)

    def _learn(self, end: int) -> None:
        """Put the windows that end at `end`, `end` + 1, … up to the end of the sequence."""
        seq, table, length = self._seq, self._table, self.options.leader
        most_leaders, most_followers = self.options.leaders, self.options.followers
        width = length + self.options.follower
        for begin in range(max(end - width, 0), len(seq) - width + 1):
            middle = begin + length
            leader: Leader = seq[begin] if length == 1 else tuple(seq[begin:middle])
            follower = tuple(seq[middle : begin + width])
            self._clock += 1
            entry = table.get(leader)
            if entry is None:
                table[leader] = Entry(follower, self._clock)
                if len(table) > most_leaders:
                    self._evict()
                continue
            entry.used = self._clock
            followers = entry.followers
            followers.pop(follower, None)
            followers[follower] = None
            if len(followers) > most_followers:
                del followers[next(iter(followers))]

    def _evict(self) -> None:
        """Forget the leader that was used least recently.

        A linked list in order of use costs a touch of three distant leaders at every read. Most tables never fill, so
        the order is only looked for here: in a heap by the time of use as it was when last looked at, which can only
        have grown since.
        """
        if self._oldest is None:
            self._oldest = [(entry.used, leader) for leader, entry in self._table.items()]
            heapify(self._oldest)
        else:  # the newest of all, so the end of a heap is its place
            newest = next(reversed(self._table))
            self._oldest.append((self._table[newest].used, newest))
        while True:
            used, leader = self._oldest[0]
            now = self._table[leader].used
            if now == used:
                heappop(self._oldest)
                del self._table[leader]
                return
            heapreplace(self._oldest, (now, leader))

    def propose(self, budget: int) -> Draft:
        """The draft of the present state, cut to its first `budget` nodes."""
        planned = self._planned
        if planned is None:
            planned = self._planned = self._plan()
        draft = planned.draft
        if len(draft.tokens) <= budget:
            return draft
        parents = None if draft.parents is None else draft.parents[:budget]
        return Draft(draft.tokens[:budget], parents, draft.match_len)

    def _root(self) -> Leader:
        """The last tokens, as a leader."""
        seq, length = self._seq, self.options.leader
        return seq[-1] if length == 1 and seq else tuple(seq[-length:])

    def _read(self, leader: Leader, touched: list[Entry]) -> Iterable[Gram]:
        """Followers to try below this leader, best first; notes the leader if the dynamic table has it."""
        entry = self._table.get(leader)
        if entry is None:
            return self._frozen.get(leader) if self._frozen else ()
        touched.append(entry)
        if self._frozen is None:
            return reversed(entry.followers)
        return [*reversed(entry.followers), *self._frozen.get(leader)]

    def _plan_chain(self) -> Planned:
        """The most recent follower, then that of the new last tokens, until the draft is long enough."""
        length, wanted = self.options.leader, self.options.draft_len
        table, frozen, leader = self._table, self._frozen, self._root()
        tokens: list[int] = []
        touched: list[Entry] = []
        while len(tokens) < wanted:
            entry = table.get(leader)
            if entry is not None:
                touched.append(entry)
                follower = next(reversed(entry.followers))
            elif frozen is not None and (known := frozen.get(leader)):
                follower = known[0]
            else:
                break
            tokens += follower
            leader = follower[-1] if length == 1 else _below(leader, follower, length)
        return Planned(Draft(tokens[:wanted], None, length) if tokens else EMPTY, touched)

    def _plan_tree(self) -> Planned:
        """Every follower of the root while the budget lasts, then those below each of them, level by level."""
        options, length = self.options, self.options.leader
        budget = max(0, options.queries - (self._emitted if options.count_refed else 1))
        tree = (MergedTree if options.merge else Tree)(budget - options.reserve)
        touched: list[Entry] = []
        frontier: dict[int, Leader] = {-1: self._root()}
        level = 0
        while frontier:
            below: dict[int, Leader] = {}
            full = False
            for node, leader in frontier.items():
                for follower in self._read(leader, touched):
                    end = tree.add(node, follower)
                    if end is None:
                        full = True
                        break
                    below[end] = _below(leader, follower, length)
                if full:
                    break
            if level == 0:
                tree.room += options.reserve
            elif full:
                break
            frontier = below
            level += 1
        return Planned(Draft(tree.tokens, tree.parents, length) if tree.tokens else EMPTY, touched)


class Tree:
    """Branches side by side, as released: what two followers share is drafted twice."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.tokens: list[int] = []
        self.parents: list[int] = []

    def add(self, node: int, follower: Gram) -> int | None:
        """Hang a follower below a node; its last node, or None where there is no room for all of it."""
        size = len(follower)
        if self.room < size:
            return None
        self.room -= size
        first = len(self.tokens)
        self.tokens += follower
        self.parents.append(node)
        self.parents += range(first, first + size - 1)
        return first + size - 1


class MergedTree(Tree):
    """A trie: a follower costs only the nodes that are not there yet."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._child: dict[tuple[int, int], int] = {}

    def add(self, node: int, follower: Gram) -> int | None:
        """As `Tree.add`; a follower that is there already costs nothing."""
        shared = 0
        for token in follower:
            child = self._child.get((node, token))
            if child is None:
                break
            node, shared = child, shared + 1
        fresh = follower[shared:]
        if self.room < len(fresh):
            return None
        self.room -= len(fresh)
        for token in fresh:
            self._child[node, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(node)
            node = len(self.tokens) - 1
        return node


def _below(leader: Leader, follower: Gram, length: int) -> Leader:
    """The leader at the end of a follower that hangs below a leader."""
    if isinstance(leader, int):
        return follower[-1]
    return follower[-length:] if len(follower) >= length else (leader + follower)[-length:]


def _load_frozen(options: CachebackOptions, context: DrafterContext) -> FrozenIndex | None:
    """The frozen table that the options name: by content where this worker was sent it, by path otherwise."""
    if options.frozen is None and options.frozen_sha256 is None:
        return None
    table = load(options.frozen, options.frozen_sha256, context, leader=options.leader, follower=options.follower)
    # Side by side no more find room in a draft than these; merged, those that begin alike take less.
    room = -(-max(options.queries, options.draft_len) // options.follower)
    limit = options.followers if options.merge else min(room, options.followers)
    return FrozenIndex(table, limit, options.leaders)
