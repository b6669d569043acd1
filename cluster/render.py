"""Rows of a workload → token ids, by the model's own tokenizer and template; and whether they fit its context."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

from dfbench.cluster.sweep import Sweep
from dfbench.cluster.workloads import Row
from dfbench.drafters.base import DrafterContext
from dfbench.errors import ModelError, WorkloadError


class Renderer(Protocol):
    """Token ids of a row, and what is known about the target from planning."""

    sweep: Sweep
    eos_ids: frozenset[int]

    def ids(self, workload: str, row: Row) -> array[int]:
        """The row's prompt. Raises WorkloadError or ModelError naming workload and prompt."""

    def context(self) -> DrafterContext:
        """What drafters will know about the target."""


def open_renderer(sweep: Sweep) -> Renderer:
    """The renderer of a sweep with a torch or recorded target. Raises ModelError when there is no such model."""
    return TorchRenderer(sweep) if sweep.target == "torch" else RecordedRenderer(sweep)


class RecordedRenderer:
    """Rows of recorded streams bring their token ids along."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self.eos_ids = frozenset(sweep.recorded.eos_ids)

    def ids(self, workload: str, row: Row) -> array[int]:
        if row.prompt_ids is None or row.recorded_ids is None:
            raise WorkloadError(
                f"workload '{workload}', prompt '{row.prompt_id}': a recorded target needs rows with"
                " `prompt_ids` and `output_ids`."
            )
        return array("i", row.prompt_ids)

    def context(self) -> DrafterContext:
        """The vocabulary, as far as the sweep tells it."""
        return DrafterContext(self.sweep.recorded.vocab_size or 2**31 - 1, self.eos_ids)


class TorchRenderer:
    """Renders rows with the model's own tokenizer and template, and checks that prompt and cap fit its context."""

    def __init__(self, sweep: Sweep) -> None:
        from dfbench.workers import models

        resolved = models.resolve(sweep.target_spec())
        claimed = sweep.model.digest
        digest = None if resolved.revision else resolved.digest
        if claimed not in (None, digest, resolved.digest):
            raise ModelError(
                f"the weights of '{sweep.model.id}' have SHA-256 {resolved.digest}, not {claimed}"
                " as the sweep says: get those weights, or leave `model.digest` out."
            )
        pinned = sweep.model.model_copy(update={"revision": resolved.revision, "digest": digest})
        self.sweep = sweep.model_copy(update={"model": pinned})
        self._models, self._resolved = models, resolved
        self._tokenizer = models.load_tokenizer(resolved)
        self.eos_ids = models.eos_ids(resolved, self._tokenizer)

    def context(self) -> DrafterContext:
        """The model's vocabulary, ends of text and tokenizer."""
        return DrafterContext(self._resolved.vocab_size, self.eos_ids, self._models.tokenizer_hash(self._tokenizer))

    def ids(self, workload: str, row: Row) -> array[int]:
        place = f"workload '{workload}', prompt '{row.prompt_id}'"
        if row.prompt_ids is not None:
            ids = list(row.prompt_ids)
        elif row.messages:
            try:
                ids = self._render(row.messages)
            except ModelError as error:
                raise ModelError(f"{place}: {error}") from error
        else:
            ids = self._models.render_text(self._tokenizer, row.text)
        if not ids:
            raise WorkloadError(f"{place} has no token: write a longer prompt.")
        if max(ids) >= self._resolved.vocab_size:
            raise WorkloadError(f"{place} has a token id beyond the model's vocabulary of {self._resolved.vocab_size}.")
        self._check_context(place, row, len(ids))
        return array("i", ids)

    def _render(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return self._models.render(self._tokenizer, messages, self.sweep.enable_thinking)

    def _check_context(self, place: str, row: Row, tokens: int) -> None:
        """Later turns count too, each with an earlier answer as long as the cap."""
        turns = len(row.followups) + 1
        if row.followups:
            talk = list(row.messages)
            for message in row.followups:
                talk += [{"role": "assistant", "content": ""}, {"role": "user", "content": message}]
            tokens = len(self._render(talk))
        limit, cap = self._resolved.context_limit, self.sweep.max_new_tokens
        if tokens + cap * turns > limit:
            room = (limit - tokens) // turns
            fix = f"write max_new_tokens: {room} or less, or shorten the prompt" if room > 0 else "shorten the prompt"
            if limit == self.sweep.model.options.get("context"):
                fix += ", or raise the model's option `context`"
            over = "and a later turn's " if turns > 1 else ""
            raise WorkloadError(
                f"{place}: {tokens} prompt tokens {over}and up to {cap * turns} new ones exceed the model's context"
                f" of {limit}: {fix}."
            )
