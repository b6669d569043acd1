"""A drafter from another package: it expects the text to go on as it did `period` tokens ago."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from dfbench.drafters.base import EMPTY, Draft, Drafter, DrafterContext, Options, Verified, check_prompt


class EchoOptions(Options):
    """Options of `echo`."""

    period: int = Field(16, ge=1, description="how many tokens back the text is copied from")
    draft_len: int = Field(4, ge=1, description="most tokens proposed")


class Echo(Drafter):
    """Keeps the text; copies from `period` tokens back."""

    name = "echo"
    summary = "Copies what stood a fixed number of tokens back."
    Options = EchoOptions
    options: EchoOptions

    def __init__(self, options: EchoOptions, context: DrafterContext) -> None:
        super().__init__(options, context)
        self.reset()

    def reset(self) -> None:
        """Forget the text."""
        self._text: list[int] = []

    def start(self, prompt: Sequence[int]) -> None:
        """Keep the prompt."""
        check_prompt(prompt, self.context)
        self._text = list(prompt)

    def observe(self, emitted: Sequence[int], verified: Verified | None = None) -> None:
        """Keep what was emitted."""
        self._text.extend(emitted)

    def propose(self, budget: int) -> Draft:
        """The tokens that followed, `period` tokens back."""
        begin = len(self._text) - self.options.period
        if begin < 0:
            return EMPTY
        size = min(budget, self.options.draft_len, self.options.period)
        return Draft(self._text[begin : begin + size])
