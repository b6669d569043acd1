"""SAM-Decoding: copy what followed the longest suffix of the text that occurred before, found by a suffix automaton.

Method: Hu et al., arXiv 2411.10666, the dynamic automaton over prompt and output (the static one, over a corpus of the
target's own answers, is not here). The draft is as long as the match justifies: 1 + int(alpha · match) tokens, the root
counted, at most `max_predicts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from dfbench.drafters.base import EMPTY, Draft, Drafter, DrafterContext, Options, Verified, check_prompt
from dfbench.drafters.sam_automaton import SuffixAutomaton

HORIZON = 64
"""`position: recent` tells occurrences apart by at most this many last tokens: it bounds the work for a token."""

OUTPUT_ROOM = 2048
"""Output tokens for which the arrays need not grow, so that no step pays for it."""


class SamOptions(Options):
    """Options of SAM-Decoding; the defaults are the class defaults of its repository."""

    max_predicts: int = Field(60, ge=2, description="most tokens of a step, the root included")
    alpha: float = Field(4.0, gt=0, allow_inf_nan=False, description="draft tokens for each token of the match")
    position: Literal["first", "recent"] = Field("first", description="which occurrence of the match is copied from")
    min_match: int = Field(1, ge=1, description="shortest match that is drafted from")


class SamDecoding(Drafter):
    """One automaton a request, and the length rule."""

    name = "sam"
    summary = "SAM-Decoding: copies after the longest suffix that occurred before, by automaton (arXiv 2411.10666)."
    Options = SamOptions
    options: SamOptions

    def __init__(self, options: SamOptions, context: DrafterContext) -> None:
        super().__init__(options, context)
        self._horizon = HORIZON if options.position == "recent" else 0
        self.reset()

    def reset(self) -> None:
        """Forget the request."""
        self._begin(())

    def start(self, prompt: Sequence[int]) -> None:
        """Build the automaton of the prompt."""
        check_prompt(prompt, self.context)
        self._begin(prompt)

    def _begin(self, tokens: Sequence[int]) -> None:
        self._seq = list(tokens)
        self._automaton = SuffixAutomaton(len(tokens) + OUTPUT_ROOM)
        self._automaton.read(tokens, self._horizon)

    def observe(self, emitted: Sequence[int], verified: Verified | None = None) -> None:
        """Extend the automaton by the tokens."""
        self._seq.extend(emitted)
        self._automaton.read(emitted, self._horizon)

    def propose(self, budget: int) -> Draft:
        """What followed the longest suffix that occurred before."""
        options, match = self.options, self._automaton.match
        if match < options.min_match:
            return EMPTY
        begin = self._automaton.end + 1
        count = min(options.max_predicts - 1, int(match * options.alpha), budget)
        return Draft(self._seq[begin : begin + count], None, match)
