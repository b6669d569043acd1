"""Prompt lookup: find where the last tokens occurred before, and propose what followed there.

Methods: Saxena, prompt-lookup-decoding (preset `original`); transformers' `PromptLookupCandidateGenerator` (`hf`);
vLLM's `ngram` proposer (`vllm`). They differ in tie rule and in what they do near the end of the text, so all of it is
an option here. The published codes scan the whole text at every step; here every n-gram is indexed once, when the
token after it arrives, so a step costs the same in a long context as in a short one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from dfbench.drafters.base import (
    EMPTY,
    AnyOptions,
    Draft,
    Drafter,
    DrafterContext,
    Options,
    Verified,
    check_prompt,
)
from dfbench.drafters.ngram_index import NgramIndex

OUTPUT_ROOM = 2048
"""Output tokens for which the index need not grow, so that no step pays for it."""


class PldOptions(Options):
    """Options of prompt lookup."""

    max_ngram: int = Field(3, ge=1, description="longest suffix that is looked up, in tokens")
    min_ngram: int = Field(1, ge=1, description="shortest suffix that is looked up, in tokens")
    draft_len: int = Field(10, ge=1, description="most tokens proposed")
    match: Literal["recent", "earliest"] = Field("recent", description="which earlier occurrence is copied from")
    full: bool = Field(
        False,
        description="only occurrences that `draft_len` tokens follow and that end before the suffix begins",
    )
    stop_at_eos: bool = Field(False, description="cut the draft before the first end-of-text id")

    @model_validator(mode="after")
    def _ordered(self) -> PldOptions:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram {self.min_ngram} is above max_ngram {self.max_ngram}: write it lower")
        return self


class PromptLookup(Drafter):
    """One index a request, and what is copied from the occurrence that it finds."""

    name = "pld"
    summary = "Prompt lookup: copies what followed an earlier occurrence of the last tokens (Saxena 2023)."
    Options: ClassVar[type[AnyOptions]] = PldOptions
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "recent": {"max_ngram": 3, "min_ngram": 1, "draft_len": 10, "match": "recent", "full": False},
        "hf": {
            "max_ngram": 2,
            "min_ngram": 1,
            "draft_len": 10,
            "match": "earliest",
            "full": False,
            "stop_at_eos": True,
        },
        "original": {"max_ngram": 3, "min_ngram": 1, "draft_len": 10, "match": "earliest", "full": True},
        "vllm": {"max_ngram": 5, "min_ngram": 5, "draft_len": 10, "match": "earliest", "full": False},
    }
    options: PldOptions

    def __init__(self, options: PldOptions, context: DrafterContext) -> None:
        super().__init__(options, context)
        self._eos = context.eos_ids if options.stop_at_eos else frozenset()
        self._lengths = range(options.max_ngram, options.min_ngram - 1, -1)
        self.reset()

    def reset(self) -> None:
        """Forget the request."""
        self._begin(())

    def start(self, prompt: Sequence[int]) -> None:
        """Index the prompt."""
        check_prompt(prompt, self.context)
        self._begin(prompt)

    def _begin(self, tokens: Sequence[int]) -> None:
        delays = [self._delay(n) for n in self._lengths]
        self._seq = list(tokens)
        self._index = NgramIndex(self._lengths, delays, self.options.match == "recent", len(tokens) + OUTPUT_ROOM)
        self._index.read(tokens)

    def _delay(self, n: int) -> int:
        """How many tokens must follow an n-gram before it may be copied from.

        Full continuations, in the original's rule: `draft_len` tokens follow, and the occurrence ends before the
        suffix that is looked up begins (at least n + 1 tokens follow).
        """
        return max(self.options.draft_len, n + 1) if self.options.full else 1

    def observe(self, emitted: Sequence[int], verified: Verified | None = None) -> None:
        """Append the tokens; each n-gram is indexed as soon as enough tokens follow it."""
        self._seq.extend(emitted)
        self._index.read(emitted)

    def propose(self, budget: int) -> Draft:
        """What followed the longest suffix that occurred before."""
        n, end = self._index.n, self._index.end
        if not n:
            return EMPTY
        draft = self._seq[end : end + min(self.options.draft_len, budget)]
        return Draft(self._before_eos(draft) if self._eos else draft, None, n)

    def _before_eos(self, draft: list[int]) -> list[int]:
        """A continuation that starts with an end of text gives an empty draft: no shorter match is tried."""
        for i, token in enumerate(draft):
            if token in self._eos:
                return draft[:i]
        return draft
