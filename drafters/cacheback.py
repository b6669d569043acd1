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

from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal, NamedTuple

from pydantic import Field

from dfbench.drafters.base import EMPTY, Draft, Drafter, DrafterContext, Options, Verified, check_prompt

Gram = tuple[int, ...]


class CachebackOptions(Options):
    """Options of Cacheback; the defaults are those of the released run, but for `draft`."""

    draft: Literal["chain", "tree"] = Field("chain", description="one continuation, or many as a tree")
    leader: int = Field(1, ge=1, description="tokens that are looked up")
    follower: int = Field(3, ge=1, description="tokens stored after a leader")
    draft_len: int = Field(10, ge=1, description="chain: most tokens proposed")
    leaders: int = Field(1_048_576, ge=1, description="capacity: leaders kept")
    followers: int = Field(128, ge=1, description="capacity: followers kept for one leader")


class Planned(NamedTuple):
    """The whole draft of the present state and the leaders that were found on the way, in order of reading."""

    draft: Draft
    touched: Sequence[Gram]


class Cacheback(Drafter):
    """The dynamic table, its learning, and the two ways to draft from it."""

    name = "cacheback"
    summary = "Cacheback: LRU table of leaders and followers over prompt and output (arXiv 2511.21699)."
    Options = CachebackOptions
    options: CachebackOptions

    def __init__(self, options: CachebackOptions, context: DrafterContext) -> None:
        super().__init__(options, context)
        self.reset()

    def reset(self) -> None:
        """Empty the dynamic table."""
        self._table: OrderedDict[Gram, dict[Gram, None]] = OrderedDict()
        self._seq: list[int] = []
        self._planned: Planned | None = None
        self._started = False

    def start(self, prompt: Sequence[int]) -> None:
        """Learn every window of the prompt."""
        check_prompt(prompt, self.context)
        self._seq = list(prompt)
        self._planned = None
        self._started = False
        self._learn(self.options.leader + self.options.follower)

    def observe(self, emitted: Sequence[int], verified: Verified | None = None) -> None:
        """Apply the touches of the draft that was just judged, then learn one window an emitted token."""
        if self._started:
            move = self._table.move_to_end
            for leader in (self._planned or self._plan()).touched:
                move(leader)
        self._started = True
        self._planned = None
        known = len(self._seq)
        self._seq.extend(emitted)
        self._learn(known + 1)

    def _learn(self, end: int) -> None:
        """Put the windows that end at `end`, `end` + 1, … up to the end of the sequence."""
        seq, table, length = self._seq, self._table, self.options.leader
        width = length + self.options.follower
        for last in range(max(end, width), len(seq) + 1):
            begin = last - width
            leader = tuple(seq[begin : begin + length])
            follower = tuple(seq[begin + length : last])
            followers = table.get(leader)
            if followers is None:
                table[leader] = {follower: None}
                if len(table) > self.options.leaders:
                    table.popitem(last=False)
                continue
            table.move_to_end(leader)
            followers.pop(follower, None)
            followers[follower] = None
            if len(followers) > self.options.followers:
                del followers[next(iter(followers))]

    def propose(self, budget: int) -> Draft:
        """The draft of the present state, cut to its first `budget` nodes."""
        if self._planned is None:
            self._planned = self._plan()
        draft = self._planned.draft
        if len(draft.tokens) <= budget:
            return draft
        if budget <= 0:
            return EMPTY
        parents = None if draft.parents is None else draft.parents[:budget]
        return draft._replace(tokens=draft.tokens[:budget], parents=parents)

    def _plan(self) -> Planned:
        return self._chain()

    def _chain(self) -> Planned:
        """The most recent follower, then that of the new last tokens, until the draft is long enough."""
        length, wanted = self.options.leader, self.options.draft_len
        table = self._table
        path = self._seq[-length:]
        touched: list[Gram] = []
        while len(path) < length + wanted:
            leader = tuple(path[-length:])
            followers = table.get(leader)
            if followers is None:
                break
            touched.append(leader)
            path.extend(next(reversed(followers)))
        tokens = path[length : length + wanted]
        return Planned(Draft(tokens, None, length) if tokens else EMPTY, touched)
