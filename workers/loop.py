"""The decode loop: draft → verify → accept → commit, for one prompt. One loop for every arm and every target.

Greedy and lossless: a draft token is accepted only when it is what the target says at that place, so the output is
the target's own, whatever the drafter guessed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dfbench.drafters.base import EMPTY, Draft, Drafter, Verified
from dfbench.errors import Cancelled, DraftError
from dfbench.workers.target import Evidence, Target


class Step(NamedTuple):
    """One target forward after prefill. `position` is that of the first token it emits; times are ns."""

    position: int
    queries: int
    padding: int
    drafted: int
    depth: int
    accepted: int
    emitted: int
    step_ns: int
    draft_ns: int
    forward_ns: int
    accept_ns: int
    commit_ns: int


@dataclass
class Trace:
    """What one job did; filled while it runs, so that another thread can see it move or tell it to stop.

    `start_ns` is the drafter's work on the prompt, `prefill_ns` the target's, `decode_ns` everything after.
    `wall_only`: another project's loop ran it; there are no steps, and `decode_ns` is the time of the whole job.
    """

    output: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    finish_reason: str = ""
    start_ns: int = 0
    prefill_ns: int = 0
    decode_ns: int = 0
    evidence: Evidence | None = None
    stop: bool = False
    wall_only: bool = False

    @property
    def wall_ns(self) -> int:
        return self.start_ns + self.prefill_ns + self.decode_ns


def decode(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    eos_ids: Collection[int] = (),
    trace: Trace | None = None,
) -> Trace:
    """Decode one prompt until an id of `eos_ids` is emitted or exactly `max_new_tokens` are out.

    Raises DraftError when the drafter breaks its contract and Cancelled when `trace.stop` is set by another thread.
    """
    trace = Trace() if trace is None else trace
    for _ in passes(target, drafter, prompt, max_new_tokens=max_new_tokens, eos_ids=eos_ids, trace=trace):
        pass
    return trace


def passes(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    eos_ids: Collection[int],
    trace: Trace,
) -> Iterator[None]:
    """What `decode` does, with a halt after prefill and after every step: to take turns with another loop."""
    target.reserve(len(prompt) + max_new_tokens)
    clock = target.clock
    began = clock()
    drafter.start(prompt)
    indexed = clock()
    first = target.prefill(prompt)
    filled = clock()
    drafter.observe((first,))
    end = clock()
    trace.prefill_ns = filled - indexed
    trace.start_ns = (indexed - began) + (end - filled)
    trace.output.append(first)

    decoding = end
    yield
    while not (reason := _finished(trace.output, max_new_tokens, eos_ids)):
        if trace.stop:
            raise Cancelled("the job was told to stop.")
        end = _step(target, drafter, trace, max_new_tokens, eos_ids, end)
        yield
    trace.finish_reason = reason
    trace.decode_ns = end - decoding
    trace.evidence = target.evidence()


def _finished(output: list[int], max_new_tokens: int, eos_ids: Collection[int]) -> str:
    if output[-1] in eos_ids:
        return "eos"
    return "length" if len(output) >= max_new_tokens else ""


def _step(
    target: Target, drafter: Drafter, trace: Trace, max_new_tokens: int, eos_ids: Collection[int], previous_end: int
) -> int:
    """One draft → verify → accept → commit; returns the clock at its end. A step begins where the last one ended."""
    clock, output = target.clock, trace.output
    position = len(output)
    room = max_new_tokens - position
    begin = clock()
    budget = target.max_nodes
    draft = drafter.propose(budget) if room > 1 else EMPTY
    if len(draft.tokens) > budget:
        raise DraftError(f"drafter '{drafter.name}' proposed {len(draft.tokens)} nodes on a budget of {budget}.")
    draft = draft.cut(room - 1)
    drafted_at = clock()
    verdict = target.verify(draft)
    path, emitted = accept(draft, verdict.argmax)
    emitted = cut(emitted, room, eos_ids)
    accepted = min(len(path), len(emitted))
    accepted_at = clock()
    target.commit(path[:accepted], emitted)
    drafter.observe(emitted, _verified(drafter, output[-1], draft, verdict.topk))
    output.extend(emitted)
    end = clock()
    trace.steps.append(
        Step(
            position,
            verdict.queries,
            verdict.padding,
            len(draft.tokens),
            _depth(draft),
            accepted,
            len(emitted),
            end - previous_end,
            drafted_at - begin,
            verdict.forward_ns,
            accepted_at - verdict.ready,
            end - accepted_at,
        )
    )
    return end


def accept(draft: Draft, argmax: Sequence[int]) -> tuple[list[int], list[int]]:
    """The greedy walk: node indices of the longest path whose every token is the target's choice, and what is emitted.

    `argmax[0]` is the target's token after the root, `argmax[i + 1]` the one after node i. Emitted are the path's
    tokens and the bonus, the target's choice after the last of them. Duplicate siblings are legal: the longest path
    wins, the first on ties.
    """
    tokens = draft.tokens
    if draft.parents is None:
        count = 0
        for token, expected in zip(tokens, argmax, strict=False):
            if token != expected:
                break
            count += 1
        return list(range(count)), list(argmax[: count + 1])
    depth = [0] * (len(tokens) + 1)
    depth[0] = 1
    best = 0
    for i, (token, parent) in enumerate(zip(tokens, draft.parents, strict=True), start=1):
        if depth[parent + 1] and token == argmax[parent + 1]:
            depth[i] = depth[parent + 1] + 1
            if depth[i] > depth[best]:
                best = i
    path: list[int] = []
    node = best - 1
    while node >= 0:
        path.append(node)
        node = draft.parents[node]
    path.reverse()
    return path, [*(tokens[i] for i in path), argmax[best]]


def cut(emitted: list[int], room: int, eos_ids: Collection[int]) -> list[int]:
    """What may still be emitted: at most `room` tokens, none after the first id of `eos_ids`."""
    if len(emitted) > room:
        emitted = emitted[:room]
    for i, token in enumerate(emitted):
        if token in eos_ids:
            return emitted[: i + 1]
    return emitted


def _verified(drafter: Drafter, root: int, draft: Draft, topk: object) -> Verified | None:
    if not drafter.top_k:
        return None
    return Verified((root, *draft.tokens), topk)  # type: ignore[arg-type]


def _depth(draft: Draft) -> int:
    if draft.parents is None or not draft.tokens:
        return len(draft.tokens)
    return max(draft.depths())
