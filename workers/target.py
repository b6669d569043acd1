"""What a drafter drafts for: the `Target` protocol, and the two targets that need no model.

`RecordedTarget` answers with a stream that was generated before; `ScriptedTarget` with any function from prefix to
token, on a clock that the test sets. The torch target is in `engine`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from dfbench.drafters.base import Draft
from dfbench.errors import EngineError


class Verdict(NamedTuple):
    """What one target forward said.

    `argmax`: the target's next token after the root, then after each draft node (length n + 1). `queries`: tokens in
    the pass, root, nodes and re-fed ones; `padding`: filler beside them. `forward_ns`: duration of the forward;
    `ready`: the target's clock when it had completed. `topk`: [n + 1, k] most likely ids per token, where asked for.
    """

    argmax: Sequence[int]
    queries: int
    padding: int = 0
    forward_ns: int = 0
    ready: int = 0
    topk: np.ndarray | None = None


class Evidence(NamedTuple):
    """The two highest logits behind every emitted token, as the pass that emitted it computed them.

    Arrays of one length, the number of emitted tokens. `top_ties`: how many entries equal the maximum.
    """

    top1_id: np.ndarray
    top1_logit: np.ndarray
    top2_id: np.ndarray
    top2_logit: np.ndarray
    top_ties: np.ndarray


class Target(Protocol):
    """A greedy decoder that answers for whole drafts in one pass.

    `kind`: torch, recorded or scripted. `timed`: whether its clock means anything; where it does not, no time is
    recorded. `eos_ids`: ids that end an output. `max_nodes`: the largest draft one pass can carry now.
    """

    kind: str
    timed: bool
    vocab_size: int
    eos_ids: frozenset[int]
    top_k: int

    @property
    def max_nodes(self) -> int: ...

    def reserve(self, tokens: int) -> None:
        """A request of this many tokens, prompt and answer, comes next: prepare for it now, where no clock runs."""

    def clock(self) -> int:
        """Now, in ns, from an arbitrary start; never goes back."""

    def prefill(self, prompt: Sequence[int]) -> int:
        """Begin a request: run the prompt, return the first output token, which becomes the root."""

    def verify(self, draft: Draft) -> Verdict:
        """One pass over the root and the draft's nodes."""

    def commit(self, path: Sequence[int], emitted: Sequence[int]) -> None:
        """Keep the root and the accepted nodes `path`; the last of `emitted` becomes the root."""

    def evidence(self) -> Evidence | None:
        """Top-two logits of every token emitted since prefill, prefill's token first; None where there are none."""


class RecordedTarget:
    """Replays a recorded output: the token after output position i is the next recorded one.

    Greedy verification makes the output independent of the drafter, so the accepted counts are those of a live run.
    Off the recorded path it does not know the target's choice and answers with what the path holds at that depth: a
    walk from the root leaves the path only after the last accepted node, so no such answer is ever used.
    """

    kind = "recorded"
    timed = False
    max_nodes = 2**20

    def __init__(self, vocab_size: int = 2**31 - 1, eos_ids: frozenset[int] = frozenset()) -> None:
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids
        self.top_k = 0
        self._stream: list[int] = []
        self._at = 0

    def load(self, output_ids: Sequence[int]) -> None:
        """The stream that the next request answers with; its first token is the one that prefill gives."""
        if not output_ids:
            raise EngineError("a recorded output is empty: leave its row out, or record it again.")
        self._stream = list(output_ids)

    def reserve(self, tokens: int) -> None:
        """Nothing to prepare."""

    def clock(self) -> int:
        return 0

    def prefill(self, prompt: Sequence[int]) -> int:
        self._at = 1
        return self._stream[0]

    def verify(self, draft: Draft) -> Verdict:
        at, nodes = self._at, len(draft.tokens)
        if draft.parents is None:
            answer = self._stream[at : at + nodes + 1]
            if len(answer) <= nodes:
                answer += [-1] * (nodes + 1 - len(answer))
            return Verdict(answer, nodes + 1)
        ahead = self._stream[at:]
        known = len(ahead)
        depths = draft.depths()
        return Verdict([ahead[d] if d < known else -1 for d in (0, *depths)], nodes + 1)

    def commit(self, path: Sequence[int], emitted: Sequence[int]) -> None:
        self._at += len(emitted)

    def evidence(self) -> Evidence | None:
        return None


class ScriptedTarget:
    """A target for tests: `rule(prefix) → token`, where prefix is the prompt and everything emitted.

    `cost(queries) → ns` drives a virtual clock, so that timing logic can be tested without time;
    `sleep=True` spends that time for real as well (for tests of scheduling).
    """

    kind = "scripted"
    timed = True
    max_nodes = 4096

    def __init__(
        self,
        rule: Callable[[Sequence[int]], int],
        *,
        vocab_size: int = 2**31 - 1,
        eos_ids: frozenset[int] = frozenset(),
        cost: Callable[[int], int] = lambda queries: 1_000_000,
        sleep: bool = False,
    ) -> None:
        self.rule = rule
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids
        self.top_k = 0
        self._cost = cost
        self._sleep = sleep
        self._now = 0
        self._prefix: list[int] = []
        self._emitted: list[int] = []

    def reserve(self, tokens: int) -> None:
        """Nothing to prepare."""

    def clock(self) -> int:
        return self._now

    def advance(self, ns: int) -> None:
        """Let time pass: for drafters and phases that should seem to cost something."""
        self._now += ns
        if self._sleep:
            time.sleep(ns / 1e9)

    def prefill(self, prompt: Sequence[int]) -> int:
        self._prefix = list(prompt)
        self.advance(self._cost(len(prompt)))
        first = self.rule(self._prefix)
        self._prefix.append(first)
        self._emitted = [first]
        return first

    def verify(self, draft: Draft) -> Verdict:
        paths: list[list[int]] = []
        argmax = [self.rule(self._prefix)]
        for i, token in enumerate(draft.tokens):
            parent = i - 1 if draft.parents is None else draft.parents[i]
            paths.append([*(paths[parent] if parent >= 0 else ()), token])
            argmax.append(self.rule(self._prefix + paths[i]))
        queries = len(draft.tokens) + 1
        forward = self._cost(queries)
        self.advance(forward)
        topk = np.asarray(argmax, dtype=np.int64)[:, None].repeat(self.top_k, 1) if self.top_k else None
        return Verdict(argmax, queries, 0, forward, self._now, topk)

    def commit(self, path: Sequence[int], emitted: Sequence[int]) -> None:
        self._prefix.extend(emitted)
        self._emitted.extend(emitted)

    def evidence(self) -> Evidence | None:
        return None


def scripted_rule(options: dict[str, Any]) -> Callable[[Sequence[int]], int]:
    """A deterministic stand-in for a model, from a sweep's options.

    `seed`, `vocab` (ids 3 and up are text), `period` (the text repeats with this period, so that drafters find
    something), `eos_at` (id 2 ends the text whenever its length is a multiple of this; 0 = never).
    """
    seed, vocab = int(options.get("seed", 0)), int(options.get("vocab", 64))
    period, eos_at = int(options.get("period", 17)), int(options.get("eos_at", 0))

    def rule(prefix: Sequence[int]) -> int:
        if eos_at and len(prefix) % eos_at == 0:
            return 2
        mixed = ((len(prefix) % period + 1) * 2654435761 + seed * 40503 + (prefix[0] if prefix else 0)) & 0xFFFFFFFF
        return 3 + (mixed >> 8) % (vocab - 3)

    return rule
