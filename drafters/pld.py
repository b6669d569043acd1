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

from dfbench.drafters.base import EMPTY, Draft, Drafter, DrafterContext, Options, Verified, check_prompt

Table = dict[tuple[int, ...], int]


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
    """Longest n-gram first; for each length one table from n-gram to the position after the occurrence to copy."""

    name = "pld"
    summary = "Prompt lookup: copies what followed an earlier occurrence of the last tokens (Saxena 2023)."
    Options = PldOptions
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
        self._recent = options.match == "recent"
        self._eos = context.eos_ids if options.stop_at_eos else frozenset()
        self._draft_len = options.draft_len
        self.reset()

    def reset(self) -> None:
        """Forget the request."""
        self._seq: list[int] = []
        self._tables: list[tuple[int, int, Table]] = [
            (n, self._delay(n), {}) for n in range(self.options.max_ngram, self.options.min_ngram - 1, -1)
        ]

    def _delay(self, n: int) -> int:
        """How many tokens must follow an n-gram before it may be copied from.

        Full continuations, in the original's rule: `draft_len` tokens follow, and the occurrence ends before the
        suffix that is looked up begins (at least n + 1 tokens follow).
        """
        return max(self.options.draft_len, n + 1) if self.options.full else 1

    def start(self, prompt: Sequence[int]) -> None:
        """Index the prompt, in bulk."""
        check_prompt(prompt, self.context)
        self.reset()
        seq = self._seq = list(prompt)
        for n, delay, table in self._tables:
            count = len(seq) - delay - n + 1
            if count <= 0:
                continue
            columns = [seq[i : i + count] for i in range(n)]
            ends: Sequence[int] = range(n, n + count)
            if not self._recent:  # the last write stays, so the earliest must come last
                columns = [column[::-1] for column in columns]
                ends = ends[::-1]
            table.update(zip(zip(*columns, strict=True), ends, strict=True))

    def observe(self, emitted: Sequence[int], verified: Verified | None = None) -> None:
        """Append the tokens; index each n-gram as soon as enough tokens follow it."""
        seq, tables, recent = self._seq, self._tables, self._recent
        for token in emitted:
            seq.append(token)
            length = len(seq)
            for n, delay, table in tables:
                end = length - delay
                if end >= n:
                    if recent:
                        table[tuple(seq[end - n : end])] = end
                    else:
                        table.setdefault(tuple(seq[end - n : end]), end)

    def propose(self, budget: int) -> Draft:
        """What followed the longest suffix that occurred before."""
        seq = self._seq
        for n, _, table in self._tables:
            end = table.get(tuple(seq[-n:]))
            if end is not None:
                draft = seq[end : end + min(self._draft_len, budget)]
                return Draft(self._before_eos(draft) if self._eos else draft, None, n)
        return EMPTY

    def _before_eos(self, draft: list[int]) -> list[int]:
        """A continuation that starts with an end of text gives an empty draft: no shorter match is tried."""
        for i, token in enumerate(draft):
            if token in self._eos:
                return draft[:i]
        return draft
