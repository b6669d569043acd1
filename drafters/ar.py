"""Autoregressive decoding as a drafter: it never drafts, so the baseline runs the very loop that the others run."""

from __future__ import annotations

from collections.abc import Sequence

from dfbench.drafters.base import EMPTY, Draft, Drafter, Verified


class Autoregressive(Drafter):
    """Never drafts; every step is one plain target forward."""

    name = "ar"
    summary = "Plain autoregressive decoding: never drafts. The baseline of every speedup."

    def start(self, prompt: Sequence[int]) -> None:
        """Nothing to index."""

    def propose(self, budget: int) -> Draft:
        """Always the empty draft."""
        return EMPTY

    def observe(self, emitted: Sequence[int], verified: Verified | None = None) -> None:
        """Nothing to learn."""

    def reset(self) -> None:
        """Nothing to forget."""
