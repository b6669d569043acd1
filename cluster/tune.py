"""`dfbench tune`: search drafters and their options for a workload; every evaluation is a replay.

    recordings ─► tuning prompts ─► grid ─► successive halving over prompts ─► survivors
                └► held-out prompts ───────────────────────────────────────► figures with intervals

Conversations stay whole on one side of the split. The winner is chosen on tuning prompts alone.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from dfbench.cluster.settings import ENGINES, engines_for
from dfbench.cluster.sources import Recording
from dfbench.cluster.verify_cost import VerifyCost, times
from dfbench.drafters import registry
from dfbench.drafters.base import DrafterContext
from dfbench.errors import UsageError
from dfbench.workers import fastpath
from dfbench.workers.fastpath_kernels import POSITION
from dfbench.workers.target import RecordedTarget

Interval = Callable[[Sequence[float], Sequence[float]], Any]
"""(numerators, denominators) by prompt → interval with `lo` and `hi`, or None."""

HELD_OUT = 1 / 3
KEEP = 1 / 3
"""Share of configurations that go on from one rung to the next."""
KEEP_PER_ENGINE = 3
RUNGS = (1 / 9, 1 / 3, 1.0)
"""Share of the tuning prompts that each rung replays."""
MIN_PROMPTS = 4
UNLIMITED = 2**20


@dataclass(frozen=True)
class Config:
    """One candidate: a drafter with all its options."""

    drafter: str
    options: dict[str, Any]
    given: dict[str, Any] = field(compare=False)

    @property
    def name(self) -> str:
        """Drafter and the options that were searched."""
        return " ".join([self.drafter, *(f"{key}={value}" for key, value in self.given.items())])


@dataclass
class Score:
    """What replays of one configuration gave, a row a prompt: tokens, steps, queries, AR's and its own model time."""

    rows: list[tuple[int, int, int, float, float]] = field(default_factory=list)

    def column(self, index: int) -> list[float]:
        return [row[index] for row in self.rows]

    @property
    def mat(self) -> float:
        steps = sum(self.column(1))
        return sum(self.column(0)) / steps if steps else 1.0

    @property
    def queries(self) -> float:
        """Mean queries a step."""
        steps = sum(self.column(1))
        return sum(self.column(2)) / steps if steps else 1.0

    @property
    def speedup(self) -> float:
        """Predicted, pooled over prompts."""
        own = sum(self.column(4))
        return sum(self.column(3)) / own if own else 1.0


class Finding(NamedTuple):
    """A configuration that survived: figures on tuning prompts and, with interval, on held-out ones."""

    config: Config
    tuned: Score
    held_out: Score
    interval: Any


@dataclass(frozen=True)
class Tuned:
    """The result: the winner, the Pareto front on held-out prompts, the best arm of each engine."""

    best: Finding
    front: list[Finding]
    engines: dict[str, Finding]
    configurations: int
    evaluations: int
    tuning_prompts: int
    held_out_prompts: int


def sample(recordings: Iterable[Recording], most: int, seed: int = 0) -> list[Recording]:
    """A uniform sample of at most `most` recordings of a stream, in the order of the stream."""
    chosen: list[tuple[int, Recording]] = []
    generator = random.Random(seed)
    for number, recording in enumerate(recordings):
        if len(chosen) < most:
            chosen.append((number, recording))
        elif (place := generator.randrange(number + 1)) < most:
            chosen[place] = (number, recording)
    return [recording for _, recording in sorted(chosen, key=lambda item: item[0])]


def split(recordings: Sequence[Recording]) -> tuple[list[Recording], list[Recording]]:
    """Tuning and held-out recordings: by digest of the conversation, the same whatever else the source holds.

    Raises UsageError where either side would have fewer than two prompts.
    """
    sides: tuple[list[Recording], list[Recording]] = ([], [])
    for recording in recordings:
        base = recording.prompt_id.removesuffix(f"#{recording.turn + 1}") if recording.turn else recording.prompt_id
        digest = hashlib.sha256(f"{recording.workload}/{base}".encode()).digest()
        sides[digest[0] < 256 * HELD_OUT].append(recording)
    tuning, held_out = sides
    if len(tuning) < 2 or len(held_out) < 2:
        raise UsageError(
            f"{len(recordings)} recorded answers are too few to tune on and to hold some out: give ten or more."
        )
    random.Random(0).shuffle(tuning)
    return tuning, held_out


def grid() -> Iterator[Config]:
    """The built-in search space: every drafter that reads only tokens, and what each engine can run."""
    seen: set[str] = set()
    known = set(registry.names())
    for drafter, given in _entries():
        if drafter not in known:
            continue
        options = registry.parse_options(drafter, given).model_dump(mode="json")
        config = Config(drafter, options, given)
        if (key := f"{drafter} {sorted(options.items())}") not in seen:
            seen.add(key)
            yield config


def _entries() -> Iterator[tuple[str, dict[str, Any]]]:
    lengths = [2, 3, 4, 5, 7, 10, 15, 20]
    pairs = [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (2, 2), (3, 2), (5, 2), (3, 3), (5, 3), (5, 5)]
    for (longest, shortest), length, match in itertools.product(pairs, lengths, ["recent", "earliest"]):
        yield "pld", {"max_ngram": longest, "min_ngram": shortest, "draft_len": length, "match": match}
    for longest, length in itertools.product([1, 2, 3, 4], lengths):
        yield "pld", {"max_ngram": longest, "draft_len": length, "match": "earliest", "stop_at_eos": True}
    for size, length in itertools.product([4, 6, 8, 12], [8, 16, 32, 48]):
        yield "pld", {"max_ngram": size, "min_ngram": size, "draft_len": length}
    for leader, follower, length in itertools.product([1, 2, 3], [1, 2, 3, 5, 10], [3, 5, 10, 15]):
        yield "cacheback", {"leader": leader, "follower": follower, "draft_len": length}
    for leader, follower, queries, merge in itertools.product([1, 2], [2, 3], [8, 16, 32, 48, 64, 96], [False, True]):
        for reserve in (0, queries // 4):
            shape = {"leader": leader, "follower": follower, "queries": queries, "reserve": reserve, "merge": merge}
            yield "cacheback", {"draft": "tree", "count_refed": False, **shape}
    for depth, factor, share, most in itertools.product(
        [16, 24, 64], [0.5, 1.0, 2.0, 3.0], [0.05, 0.1, 0.3], [8, 16, 24]
    ):
        yield "suffix", {"depth": depth, "factor": factor, "min_prob": share, "max_draft": most}
    for factor, share, most in itertools.product([1.0, 2.0], [0.05, 0.1], [8, 16, 32]):
        yield "suffix", {"mode": "tree", "factor": factor, "min_prob": share, "max_draft": most}
    for tokens, mode in itertools.product([4, 8, 12], ["recency", "probability"]):
        yield "ngram-trie", {"draft_tokens": tokens, "mode": mode}
    yield "ngram-cache", {"preset": "server"}
    yield from (("ngram-cache", {"draft_len": length}) for length in (4, 8))
    yield from (("sam", {"max_predicts": most, "alpha": alpha}) for most in (8, 20) for alpha in (1.0, 4.0))


class Evaluator:
    """Replays configurations over recordings; what was replayed once is not replayed again."""

    def __init__(self, cost: VerifyCost, context: DrafterContext, max_queries: int = 128) -> None:
        self._cost = cost
        self._context = context
        self._target = RecordedTarget(context.vocab_size, context.eos_ids)
        self._target.max_nodes = max_queries - 1
        self.evaluations = 0

    def extend(self, score: Score, config: Config, recordings: Sequence[Recording]) -> None:
        """Replay the recordings that the score lacks; a score's rows are those of the first recordings, in order."""
        drafter = registry.create(config.drafter, config.options, self._context)
        for recording in recordings[len(score.rows) :]:
            decoded = fastpath.decode(
                drafter,
                recording.prompt_ids,
                recording.output_ids,
                target=self._target,
                max_new_tokens=UNLIMITED,
                eos_ids=self._context.eos_ids,
            )
            tokens, queries = len(decoded.output) - 1, decoded.queries
            positions = decoded.steps[:, POSITION]
            ar, own = times(self._cost, len(recording.prompt_ids), positions, queries, tokens)
            score.rows.append((tokens, len(decoded.steps), int(queries.sum()), ar, own))
            self.evaluations += 1


def tune(
    recordings: Sequence[Recording],
    cost: VerifyCost,
    interval: Interval,
    *,
    configs: Sequence[Config] | None = None,
    context: DrafterContext | None = None,
    max_queries: int = 128,
    on_rung: Callable[[int, int, int], None] = lambda rung, configurations, prompts: None,
) -> Tuned:
    """Search, then report on prompts that the search never saw. `on_rung` is told how far it is."""
    tuning, held_out = split(recordings)
    candidates = list(grid()) if configs is None else list(configs)
    evaluator = Evaluator(cost, context or DrafterContext(), max_queries)
    scores = [(config, Score()) for config in candidates]
    for rung, share in enumerate(RUNGS):
        prompts = tuning[: max(min(MIN_PROMPTS, len(tuning)), round(share * len(tuning)))]
        on_rung(rung, len(scores), len(prompts))
        for config, score in scores:
            evaluator.extend(score, config, prompts)
        if rung < len(RUNGS) - 1:
            scores = survivors(scores)
    scores.sort(key=lambda item: -item[1].speedup)
    reported = survivors(scores)
    on_rung(len(RUNGS), len(reported), len(held_out))
    findings = [_finding(config, score, evaluator, held_out, interval) for config, score in reported]
    return Tuned(
        best=findings[0],
        front=pareto(findings),
        engines=_by_engine(findings),
        configurations=len(candidates),
        evaluations=evaluator.evaluations,
        tuning_prompts=len(tuning),
        held_out_prompts=len(held_out),
    )


def survivors(scores: list[tuple[Config, Score]]) -> list[tuple[Config, Score]]:
    """The fastest third, the fastest few of every engine, and what no other beats in MAT at no more queries."""
    ranked = sorted(scores, key=lambda item: -item[1].speedup)
    kept = {id(item[0]) for item in ranked[: max(1, round(KEEP * len(ranked)))]}
    for engine in ENGINES:
        own = [item for item in ranked if engine.runs(item[0].drafter, item[0].options)]
        kept |= {id(item[0]) for item in own[:KEEP_PER_ENGINE]}
    kept |= {id(item[0]) for item in _front(ranked, lambda item: item[1])}
    return [item for item in ranked if id(item[0]) in kept]


def pareto(findings: Sequence[Finding]) -> list[Finding]:
    """Findings whose held-out MAT no other reaches with as few queries a step; fewest queries first."""
    return _front(findings, lambda finding: finding.held_out)


def _front(items: Sequence[Any], score_of: Callable[[Any], Score]) -> list[Any]:
    front: list[Any] = []
    best = -np.inf
    for item in sorted(items, key=lambda item: (score_of(item).queries, -score_of(item).mat)):
        if score_of(item).mat > best:
            front.append(item)
            best = score_of(item).mat
    return front


def _finding(
    config: Config, score: Score, evaluator: Evaluator, held_out: Sequence[Recording], interval: Interval
) -> Finding:
    unseen = Score()
    evaluator.extend(unseen, config, held_out)
    return Finding(config, score, unseen, interval(unseen.column(3), unseen.column(4)))


def _by_engine(findings: Sequence[Finding]) -> dict[str, Finding]:
    """For every engine the finding that was fastest on the tuning prompts."""
    best: dict[str, Finding] = {}
    for finding in sorted(findings, key=lambda f: -f.tuned.speedup):
        for engine in engines_for(finding.config.drafter, finding.config.options):
            best.setdefault(engine.name, finding)
    return best
