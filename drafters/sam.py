"""SAM-Decoding: copy what followed the longest suffix of the text that occurred before, found by a suffix automaton.

Method: Hu et al., arXiv 2411.10666, the dynamic automaton over prompt and output (the static one, over a corpus of the
target's own answers, is not here). The draft is as long as the match justifies: 1 + int(alpha · match) tokens, the root
counted, at most `max_predicts`.

After a token is appended, the suffix link of the state of the whole text is the state of its longest suffix that
occurred before, so no cursor is needed, and the text is never matched against itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from dfbench.drafters.base import EMPTY, Draft, Drafter, DrafterContext, Options, Verified, check_prompt

HORIZON = 64
"""`position: recent` tells occurrences apart by at most this many last tokens: it bounds the work for a token."""


class SamOptions(Options):
    """Options of SAM-Decoding; the defaults are the class defaults of its repository."""

    max_predicts: int = Field(60, ge=2, description="most tokens of a step, the root included")
    alpha: float = Field(4.0, gt=0, allow_inf_nan=False, description="draft tokens for each token of the match")
    position: Literal["first", "recent"] = Field("first", description="which occurrence of the match is copied from")
    min_match: int = Field(1, ge=1, description="shortest match that is drafted from")


class SamDecoding(Drafter):
    """The suffix automaton of one request. State 0 is the empty string; lists are indexed by state."""

    name = "sam"
    summary = (
        "SAM-Decoding: copies after the longest suffix that occurred before, by suffix automaton (arXiv 2411.10666)."
    )
    Options = SamOptions
    options: SamOptions

    def __init__(self, options: SamOptions, context: DrafterContext) -> None:
        super().__init__(options, context)
        self._recent_wanted = options.position == "recent"
        self.reset()

    def reset(self) -> None:
        """Forget the request."""
        self._seq: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._first = [-1]
        self._recent = [-1]
        self._last = 0
        self._anchor = 0
        self._recent_end = -1

    def start(self, prompt: Sequence[int]) -> None:
        """Build the automaton of the prompt."""
        check_prompt(prompt, self.context)
        self.reset()
        self.observe(prompt)

    def observe(self, emitted: Sequence[int], verified: Verified | None = None) -> None:
        """Extend the automaton by every token."""
        for token in emitted:
            self._extend(token)
            if self._recent_wanted:
                self._note(token)

    def propose(self, budget: int) -> Draft:
        """What followed the longest suffix that occurred before."""
        state = self._link[self._last]
        match = self._length[state] if state > 0 else 0
        if match < self.options.min_match:
            return EMPTY
        end = (self._recent_end if self._recent_wanted else self._first[state]) + 1
        count = min(self.options.max_predicts - 1, int(match * self.options.alpha), budget)
        return Draft(self._seq[end : end + count], None, match)

    def _extend(self, token: int) -> None:
        """Append one token: the classic online construction (Blumer et al. 1985), amortised constant time."""
        follow, link, length = self._next, self._link, self._length
        position = len(self._seq)
        self._seq.append(token)
        state = self._new({}, position + 1, position, position)
        walk = self._last
        while walk >= 0 and token not in follow[walk]:
            follow[walk][token] = state
            walk = link[walk]
        if walk >= 0:
            target = follow[walk][token]
            link[state] = target if length[target] == length[walk] + 1 else self._split(walk, token, target)
        else:
            link[state] = 0
        self._last = state

    def _split(self, walk: int, token: int, target: int) -> int:
        """Give the shorter strings of `target`, which just occurred once more, a state of their own."""
        follow, link = self._next, self._link
        clone = self._new(dict(follow[target]), self._length[walk] + 1, self._first[target], self._recent[target])
        link[clone] = link[target]
        link[target] = clone
        while walk >= 0 and follow[walk].get(token) == target:
            follow[walk][token] = clone
            walk = link[walk]
        return clone

    def _new(self, follow: dict[int, int], length: int, first: int, recent: int) -> int:
        self._next.append(follow)
        self._link.append(0)
        self._length.append(length)
        self._first.append(first)
        self._recent.append(recent)
        return len(self._next) - 1

    def _note(self, token: int) -> None:
        """Find the latest earlier end of the match, then mark that all its suffixes end here.

        `_anchor` is the state of the match, or of its last HORIZON tokens where it is longer; at most HORIZON links
        lead from it to the empty string.
        """
        link, length, recent = self._link, self._length, self._recent
        state = link[self._last]
        if length[state] > HORIZON:
            state = self._next[self._anchor][token]
            while length[link[state]] >= HORIZON:
                state = link[state]
        self._anchor = state
        self._recent_end = recent[state]
        here = len(self._seq) - 1
        while state > 0:
            recent[state] = here
            state = link[state]
