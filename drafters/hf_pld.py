"""transformers' own prompt lookup, as a cross-check of ours.

On a model the worker hands the whole job to `generate`, and records its tokens and wall time. On targets without a
model, where there is no `generate` to call, it drafts as `pld` does with the same settings.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from dfbench.drafters.base import DrafterContext, Options
from dfbench.drafters.pld import PldOptions, PromptLookup


class HfPldOptions(Options):
    """Options of transformers' prompt lookup, by our names."""

    max_ngram: int = Field(2, ge=1, description="transformers' max_matching_ngram_size")
    draft_len: int = Field(10, ge=1, description="transformers' prompt_lookup_num_tokens")


class HfPromptLookup(PromptLookup):
    """Prompt lookup by transformers' rules."""

    name = "hf-pld"
    summary = "transformers' own generate with prompt lookup: tokens and wall time only, to check ours against."
    Options = HfPldOptions
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    generates = True
    """The worker runs a model's own `generate` for this arm, not our loop."""

    def __init__(self, options: HfPldOptions, context: DrafterContext) -> None:
        rules = {**PromptLookup.presets["hf"], "max_ngram": options.max_ngram, "draft_len": options.draft_len}
        super().__init__(PldOptions(**rules), context)
