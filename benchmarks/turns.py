"""Two decode loops that take turns, pass by pass, so that a machine whose speed swings is the same for both.

Whole answers of two loops that differ by a hundredth cannot be told apart on a shared machine: it swings by half within
a minute. Neighbouring passes are some 50 ms apart. transformers' `generate` hands each token to a streamer; ours does
its own pass in that moment, in the same thread, for a second one would bring a second team of OpenMP threads along.
Neither goes first: each pass of one follows a pass of the other.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns, process_time_ns
from typing import Any, NamedTuple

from transformers.generation.streamers import BaseStreamer

from dfbench.drafters.base import Drafter
from dfbench.workers.engine import TorchTarget
from dfbench.workers.hf import hf_decode
from dfbench.workers.loop import Trace, passes


class Pass(NamedTuple):
    """What one pass emitted, and its time in ns from the end of the one before it: wall time, and CPU time of all
    threads, which other processes disturb less."""

    emitted: int
    ns: int
    busy_ns: int


@dataclass
class Turns:
    """The passes of two loops after the first, by the position of the first token that each emitted."""

    theirs: dict[int, Pass] = field(default_factory=dict)
    ours: dict[int, Pass] = field(default_factory=dict)
    same: bool = False
    """Whether both loops gave the same tokens."""

    def ratios(self, *, busy: bool = False) -> list[float]:
        """Theirs ÷ ours, of the passes at one position that emitted as many tokens; in wall time, or in CPU time."""
        return [
            theirs.busy_ns / ours.busy_ns if busy else theirs.ns / ours.ns
            for position, theirs in self.theirs.items()
            if (ours := self.ours.get(position)) is not None and ours.emitted == theirs.emitted
        ]


class OurLoop:
    """One answer of our loop, a pass at a time."""

    def __init__(self, target: TorchTarget, drafter: Drafter, prompt: Sequence[int], tokens: int) -> None:
        self.trace = Trace()
        self._passes: Iterator[None] = passes(
            target, drafter, prompt, max_new_tokens=tokens, eos_ids=(), trace=self.trace
        )

    def turn(self, into: dict[int, Pass]) -> None:
        """One pass, unless the answer is complete; noted if it is not the first, which is prefill."""
        position = len(self.trace.output)
        began = _clocks()
        next(self._passes, None)
        ended = _clocks()
        if position and (emitted := len(self.trace.output) - position):
            into[position] = Pass(emitted, *_between(began, ended))

    def rest(self) -> list[int]:
        """Every token, once the answer is complete."""
        for _ in self._passes:
            pass
        return self.trace.output


class _Between(BaseStreamer):
    """Lets our loop have a pass after each of `generate`'s."""

    def __init__(self, turns: Turns, ours: OurLoop) -> None:
        self._turns, self._ours = turns, ours
        self._position = -1
        self._resumed = 0, 0

    def put(self, value: Any) -> None:
        ended = _clocks()
        emitted = value.numel()
        if self._position < 0:
            self._position = 0  # The prompt.
            return
        if self._position:
            self._turns.theirs[self._position] = Pass(emitted, *_between(self._resumed, ended))
        self._position += emitted
        self._ours.turn(self._turns.ours)
        self._resumed = _clocks()

    def end(self) -> None:
        """Nothing is left to do."""


def _clocks() -> tuple[int, int]:
    return perf_counter_ns(), process_time_ns()


def _between(began: tuple[int, int], ended: tuple[int, int]) -> tuple[int, int]:
    return ended[0] - began[0], ended[1] - began[1]


def against_generate(
    target: TorchTarget, drafter: Drafter, prompt: Sequence[int], tokens: int, draft_len: int | None = None
) -> Turns:
    """Our loop with this drafter, and `generate` with as long drafts of prompt lookup, or plain. End of text is
    ignored."""
    turns, ours = Turns(), OurLoop(target, drafter, prompt, tokens)
    theirs = hf_decode(target, prompt, max_new_tokens=tokens, draft_len=draft_len, streamer=_Between(turns, ours))
    turns.same = theirs.output == ours.rest()
    return turns


def against_itself(
    first: TorchTarget, second: TorchTarget, drafter: Drafter, prompt: Sequence[int], tokens: int
) -> Turns:
    """The same loop twice, on two targets: what the method makes of no difference at all."""
    turns, one, other = Turns(), *(OurLoop(target, drafter, prompt, tokens) for target in (first, second))
    for _ in range(tokens):
        one.turn(turns.theirs)
        other.turn(turns.ours)
    turns.same = one.rest() == other.rest()
    return turns


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Median with an interval of 95 %, by order statistics: whatever the distribution, the median lies below as many of
    the values as a coin falls heads."""
    ordered, count = sorted(values), len(values)
    reach = 0.98 * math.sqrt(count)  # Half of 1.96, since the heads of `count` tosses spread by half a root.
    low = max(math.floor(count / 2 - reach) - 1, 0)
    return statistics.median(ordered), ordered[low], ordered[count - 1 - low]
