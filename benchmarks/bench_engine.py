"""What the harness costs, and how it compares with transformers' own `generate`, interleaved in one run.

    python benchmarks/bench_engine.py [--rounds 7] [--tokens 48] [--dtype bfloat16]

Prints medians over the rounds. The order of the contestants changes every round, so that a busy machine is busy for
all of them; on one that is too busy the spread says so. Ratios are given in CPU time too, which other processes
disturb less; it counts all threads, so on an idle machine with OMP_WAIT_POLICY=active spinning is in it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence

from dfbench.drafters.base import DrafterContext
from dfbench.drafters.registry import create
from dfbench.workers import models
from dfbench.workers.engine import TorchTarget, load_target
from dfbench.workers.hf import hf_decode
from dfbench.workers.loop import Trace, decode
from dfbench.workers.spec import TargetSpec

QUESTION = "Write a Python function that reverses a linked list, then write it again with comments in each line."
Contestant = Callable[[], Trace]


def contestants(target: TorchTarget, prompt: Sequence[int], tokens: int) -> dict[str, Contestant]:
    """Name → one decode of the same prompt. End of text is ignored, so that all do the same work."""
    context = DrafterContext(vocab_size=target.vocab_size, eos_ids=target.eos_ids)

    def ours(name: str, **options: object) -> Contestant:
        drafter = create(name, options, context)
        return lambda: decode(target, drafter, prompt, max_new_tokens=tokens)

    def theirs(draft_len: int | None) -> Contestant:
        return lambda: hf_decode(target, prompt, max_new_tokens=tokens, draft_len=draft_len)

    return {
        "ar": ours("ar"),
        "hf generate": theirs(None),
        "pld (hf settings)": ours("pld", preset="hf", stop_at_eos=False),
        "hf prompt lookup": theirs(10),
    }


def overhead(trace: Trace) -> float:
    """Median over steps of what is neither forward nor draft, as a share of the step."""
    return statistics.median((step.step_ns - step.forward_ns - step.draft_ns) / step.step_ns for step in trace.steps)


def spread(values: Sequence[float]) -> str:
    low, _, high = statistics.quantiles(values, n=4)
    return f"{statistics.median(values):7.3f}   (quartiles {low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--model", default=TargetSpec().model)
    given = parser.parse_args()
    target = load_target(TargetSpec(model=given.model, dtype=given.dtype))
    prompt = models.render(target.tokenizer, [{"role": "user", "content": QUESTION}])
    racing = contestants(target, prompt, given.tokens)
    walls: dict[str, list[float]] = {name: [] for name in racing}
    busy: dict[str, list[float]] = {name: [] for name in racing}
    shares: list[float] = []
    outputs: dict[str, list[int]] = {}
    order = list(racing)
    for turn in range(given.rounds + 1):
        random.Random(turn).shuffle(order)
        for name in order:
            before = time.process_time()
            trace = racing[name]()
            used = time.process_time() - before
            outputs[name] = trace.output
            if turn:  # The first round warms up.
                walls[name].append(trace.wall_ns / 1e6)
                busy[name].append(used)
                if name == "ar":
                    shares.append(overhead(trace))
    print(f"{given.model}, {given.dtype}, {given.tokens} tokens, {given.rounds} rounds; ms an answer, prefill included")
    for name, times in walls.items():
        print(f"  {name:20s} {spread(times)}")

    def ratios(slow: str, fast: str, times: dict[str, list[float]]) -> str:
        return spread([one / other for one, other in zip(times[slow], times[fast], strict=True)])

    print(f"harness overhead of an AR step       {spread(shares)}   goal ≤ 0.020")
    for slow, fast in (("hf generate", "ar"), ("hf prompt lookup", "pld (hf settings)")):
        print(f"{slow + ' ÷ ' + fast:36s} {ratios(slow, fast, walls)}   goal ≥ 1")
        print(f"{'    in CPU time':36s} {ratios(slow, fast, busy)}")
    print(f"our pld, same tokens as hf's: {outputs['pld (hf settings)'] == outputs['hf prompt lookup']}")


if __name__ == "__main__":
    main()
