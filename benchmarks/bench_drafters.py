"""What drafting costs: µs a step (propose + observe), start-up and memory of every drafter by context length.

    python benchmarks/bench_drafters.py [--contexts 1000 8000 32000 128000] [--steps 400] [--only NAME …]

The text is made up: tokens by Zipf's law, half of it copied from earlier, so that drafters find matches of all lengths.
Steps go through the text as a target would: what a draft guesses right is emitted with one token more.
Times are the thread's CPU time: drafting never waits, so that is wall time on a quiet core, and neighbours do no harm.
Goals, on one core: median at 32k at most 50 µs for chains and 300 µs for trees; at 128k at most 1.5 times that at 1k.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import tracemalloc
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from dfbench.drafters import registry
from dfbench.drafters.base import Draft, DrafterContext, Verified
from dfbench.workers.loop import accept

VOCAB = 49_152
CONTEXTS = (1_000, 8_000, 32_000, 128_000)
GOALS = {"chain": 50.0, "tree": 300.0}
GROWTH = 1.5

SKIPPED = ("hf-pld",)
"""Not drafters of ours: transformers drafts inside its own generate."""

TREES: dict[str, list[dict[str, Any]]] = {
    "cacheback": [{"draft": "tree"}],
    "suffix": [{"mode": "tree", "factor": 4.0, "max_draft": 96}],
    "ngram-trie": [{"index_prompt": True}, {"index_prompt": True, "draft_tokens": 97}],
    "hybrid": [{"cost": [[1, 1.0], [16, 1.3], [64, 3.2]]}],
}
"""Beside the defaults: trees of 96 nodes, prompts indexed, budgets that know the cost."""


class Row(NamedTuple):
    """One drafter at one context. `kind`: chain or tree, as its drafts were."""

    median_us: float
    p99_us: float
    start_ms: float
    memory_mb: float
    kind: str
    nodes: float


def text(length: int, seed: int = 7) -> list[int]:
    """Token ids that repeat themselves as prompts and outputs do."""
    rng = np.random.default_rng(seed)
    fresh = (rng.zipf(1.2, length) % VOCAB).tolist()
    tokens: list[int] = fresh[:64]
    while len(tokens) < length:
        size = int(rng.integers(3, 40))
        if rng.random() < 0.5:
            begin = int(rng.integers(0, max(1, len(tokens) - size)))
            tokens += tokens[begin : begin + size]
        else:
            tokens += fresh[len(tokens) : len(tokens) + size]
    return tokens[:length]


class Walk:
    """One drafter on its way through a text that follows a prompt of `context` tokens."""

    def __init__(self, name: str, options: dict[str, Any], context: int, steps: int) -> None:
        self.tokens = text(context + steps * 12)
        self.drafter = registry.create(name, options, DrafterContext(vocab_size=VOCAB))
        self.times: list[float] = []
        self.drafts: list[Draft] = []
        self._rng = np.random.default_rng(1)
        self._begin(1000)
        for _ in range(50):  # compiles what has to be
            self.step()
        self.times, self.drafts = [], []
        gc.collect()
        tracemalloc.start()
        self._begin(context)
        self.memory = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        began = time.thread_time()
        self._begin(context)
        self.start = time.thread_time() - began

    def _begin(self, context: int) -> None:
        self.drafter.reset()
        self.drafter.start(self.tokens[:context])
        self.drafter.observe(self.tokens[context : context + 1])
        self.at = context + 1

    def step(self) -> None:
        """Propose, emit what was right and one token more, observe; unless the text is at its end."""
        tokens, at, drafter = self.tokens, self.at, self.drafter
        if at + 128 > len(tokens):
            return
        began = time.thread_time_ns()
        draft = drafter.propose(96)
        proposed = time.thread_time_ns()
        depths = [0, *draft.depths()]
        _, emitted = accept(draft, [tokens[at + depth] for depth in depths])
        verified = None
        if drafter.top_k:
            ids = self._rng.integers(0, VOCAB, (len(depths), drafter.top_k))
            verified = Verified((tokens[at - 1], *draft.tokens), ids)
        resumed = time.thread_time_ns()
        drafter.observe(emitted, verified)
        self.times.append((proposed - began + time.thread_time_ns() - resumed) / 1e3)
        self.drafts.append(draft)
        self.at += len(emitted)

    def row(self) -> Row:
        """What was measured."""
        times = sorted(self.times)
        kind = "tree" if any(draft.parents is not None for draft in self.drafts) else "chain"
        nodes = statistics.mean(len(draft.tokens) for draft in self.drafts)
        high = times[int(len(times) * 0.99)]
        return Row(statistics.median(times), high, self.start * 1e3, self.memory / 1e6, kind, nodes)


def measure(name: str, options: dict[str, Any], contexts: list[int], steps: int) -> dict[int, Row]:
    """All contexts of one drafter; they take turns, so that a slow moment of the machine falls on all of them."""
    walks = {context: Walk(name, options, context, steps) for context in contexts}
    gc.collect()
    gc.disable()
    try:
        for _ in range(steps):
            for walk in walks.values():
                walk.step()
    finally:
        gc.enable()
    return {context: walk.row() for context, walk in walks.items()}


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--only", nargs="+", default=None, metavar="NAME")
    arguments = parser.parse_args()
    console = Console(width=120)
    for name in arguments.only or [name for name in registry.names() if name not in SKIPPED]:
        for options in ({}, *TREES.get(name, [])):
            shown = ", ".join(f"{key}={value}" for key, value in options.items()) or "defaults"
            table = Table("context", "kind", "nodes", "median µs", "p99 µs", "start ms", "MB", "growth")
            table.title = f"{name}: {shown}"
            rows = measure(name, options, arguments.contexts, arguments.steps)
            for context, row in rows.items():
                table.add_row(*_cells(context, row, next(iter(rows.values()))))
            console.print(table)


def _cells(context: int, row: Row, first: Row) -> list[str]:
    """One line; a goal that is missed is marked."""
    growth = row.median_us / first.median_us if first.median_us else 1.0
    slow = " !" if context == 32_000 and row.median_us > GOALS[row.kind] else ""
    steep = " !" if context == 128_000 and growth > GROWTH else ""
    return [
        f"{context:,}",
        row.kind,
        f"{row.nodes:.1f}",
        f"{row.median_us:.1f}{slow}",
        f"{row.p99_us:.1f}",
        f"{row.start_ms:.1f}",
        f"{row.memory_mb:.1f}",
        f"{growth:.2f}{steep}",
    ]


if __name__ == "__main__":
    main()
