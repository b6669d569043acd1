"""Two drafters behind one gate, and a budget that knows what a wide pass costs.

The gate is that of SAM-Decoding (arXiv 2411.10666: a long copy where the match is long, else a wide shallow tree) or of
SuffixDecoding (arXiv 2411.04975: whichever expects more accepted tokens); `union` offers both drafts as one tree.

With a cost curve, only those nodes are drafted that raise tokens per second. Each node has a chance to be accepted: the
product, along its path, of how often nodes of its kind were accepted when their parents were. Let r be the rate so far,
tokens per unit of cost. The n likeliest nodes are drafted for which

    chances of these nodes, summed  −  r · (cost of 1 + n queries − cost of 1 query)

is largest: a node that brings less than r per unit of cost it adds lowers the rate. Kinds are counted as verification
shows them, from `acceptance`, counts gathered on other prompts, onwards.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field, model_validator

from dfbench.drafters import cost, registry
from dfbench.drafters.base import EMPTY, Draft, Drafter, DrafterContext, Options, Verified
from dfbench.errors import OptionError

Kind = tuple[int, int, int, int, int, int]
"""Source, match, depth, chance, rank among siblings, rank in the other's draft: each in a few classes."""

NAME = "hybrid"
NOT_THERE = 3
UNKNOWN = 7
CHANCE_CLASSES = (0.15, 0.3, 0.45, 0.55, 0.7, 0.95)
PRIOR_TRIALS = 6.0
"""A kind's prior weighs as much as this many observed nodes."""
RATE_STEPS = 20.0
"""`rate` weighs as much as this many steps."""


class Part(Options):
    """One of the two drafters, with its options filled in and checked."""

    drafter: str = Field(description="name of a drafter")
    options: dict[str, Any] = Field(default_factory=dict, description="its options; `preset` too")

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        if isinstance(given, dict) and isinstance(given.get("drafter"), str):
            name, options = given["drafter"], given.get("options", {})
            if not isinstance(options, dict):
                raise ValueError("`options` must be a mapping")
            if name == NAME:
                raise ValueError("a hybrid cannot hold a hybrid: name another drafter")
            try:
                parsed = registry.parse_options(name, dict(options))
            except OptionError as error:
                raise ValueError(str(error)) from error
            return {**given, "options": parsed.model_dump()}
        return given


def _long() -> Part:
    return Part(drafter="suffix", options={"depth": 64, "factor": 4.0, "mode": "tree", "max_draft": 24})


def _wide() -> Part:
    return Part(drafter="ngram-trie", options={"index_prompt": True, "draft_tokens": 25})


class HybridOptions(Options):
    """Options of `hybrid`. Without `cost` and `cost_file` a draft is cut by `budget` alone."""

    long: Part = Field(default_factory=_long, description="the drafter of long copies")
    wide: Part = Field(default_factory=_wide, description="the drafter of shallow, wide trees")
    gate: Literal["union", "match", "score"] = Field(
        "union", description="both; `long` where its match is long, else `wide`; whichever expects more accepted tokens"
    )
    min_match: int = Field(5, ge=1, description="for gate 'match': the shortest match that is long")
    budget: int = Field(24, ge=1, le=1024, description="most nodes in a draft")
    cost: tuple[tuple[int, float], ...] | None = Field(
        None, description="verification cost: [queries, cost] pairs, cost relative to one query"
    )
    cost_file: str | None = Field(None, description="file with those pairs")
    cost_file_sha256: str | None = Field(None, description="SHA-256 of that file, by which a worker finds it")
    acceptance: dict[str, tuple[float, float]] = Field(
        default_factory=dict, description="kind of node: [accepted, tried], gathered on other prompts"
    )
    rate: float = Field(1.7, gt=0, allow_inf_nan=False, description="tokens per unit of cost expected at the start")

    @model_validator(mode="after")
    def _usable(self) -> HybridOptions:
        if self.cost is not None:
            try:
                cost.CostCurve.of(self.cost)
            except OptionError as error:
                raise ValueError(str(error)) from error
        for name, (accepted, tried) in self.acceptance.items():
            classes = name.split(".")
            whole = len(classes) == len(Kind.__args__) and all(map(str.isdecimal, classes))  # type: ignore[attr-defined]
            if not whole or not 0 <= accepted <= tried < float("inf"):
                raise ValueError(f"acceptance '{name}': write what HybridDrafter.acceptance() gave")
        return self


class Candidates(NamedTuple):
    """The nodes that a step may draft, parents first: token, parent, kind."""

    tokens: list[int]
    parents: list[int]
    kinds: list[Kind]
    match_len: int


class Plan(NamedTuple):
    """The candidates, the chance of each that it and all above it are accepted, and their order, likeliest first."""

    candidates: Candidates
    chances: list[float]
    order: list[int]


class HybridDrafter(Drafter):
    """The two drafters, the counts of their accepted nodes, and the rate so far."""

    name = NAME
    summary = "A long copy and a wide tree behind one gate, cut to the nodes that pay for a pass's cost."
    Options = HybridOptions
    file_options: ClassVar[dict[str, str]] = {"cost_file": "cost_file_sha256"}
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "sam": {
            # Beside another drafter, SAM-Decoding copies all it may after any match that is long: 5 · 8 is the whole.
            "long": Part(drafter="sam", options={"max_predicts": 40, "alpha": 8.0}).model_dump(),
            "wide": Part(drafter="recycling").model_dump(),
            "gate": "match",
            "budget": 80,
        }
    }
    options: HybridOptions

    def __init__(self, options: HybridOptions, context: DrafterContext) -> None:
        super().__init__(options, context)
        self._parts = [registry.create(p.drafter, p.options, context) for p in (options.long, options.wide)]
        self.top_k = max(part.top_k for part in self._parts)
        curve = cost.CostCurve.of(options.cost) if options.cost else None
        curve = curve or cost.load(options.cost_file, options.cost_file_sha256, context)
        self._costs = [curve(queries) for queries in range(1, options.budget + 2)] if curve else None
        self.reset()

    def reset(self) -> None:
        """Forget every request, and what was learned beyond the given acceptance."""
        for part in self._parts:
            part.reset()
        self._counts: defaultdict[Kind, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for name, (accepted, tried) in self.options.acceptance.items():
            self._counts[tuple(map(int, name.split(".")))] = [accepted, tried]  # type: ignore[index]
        self._tokens, self._spent = self.options.rate * RATE_STEPS, RATE_STEPS
        self._begun = False
        self._ready: Plan | None = None

    def start(self, prompt: Sequence[int]) -> None:
        """Both drafters index the prompt."""
        for part in self._parts:
            part.start(prompt)
        self._begun = False
        self._ready = None

    def observe(self, emitted: Sequence[int], verified: Verified | None = None) -> None:
        """Count which candidates the target would have accepted, then let both drafters learn."""
        if self._begun:
            self._judge(emitted)
        self._begun = True
        self._ready = None
        for part in self._parts:
            seen = verified
            if verified is not None:
                seen = verified._replace(topk=verified.topk[:, : part.top_k]) if part.top_k else None
            part.observe(emitted, seen)

    def propose(self, budget: int) -> Draft:
        """The gate's candidates, cut to those that pay."""
        plan = self._plan()
        candidates, chances, _ = plan
        kept = sorted(self._worthwhile(plan, min(budget, self.options.budget)))
        if not kept:
            return EMPTY
        place = {-1: -1} | {old: new for new, old in enumerate(kept)}
        return Draft(
            [candidates.tokens[i] for i in kept],
            [place[candidates.parents[i]] for i in kept],
            candidates.match_len,
            sum(chances[i] for i in kept),
            [chances[i] for i in kept],
        )

    def acceptance(self) -> dict[str, tuple[float, float]]:
        """What was learned so far, as the option `acceptance` for other prompts."""
        return {".".join(map(str, kind)): (a, n) for kind, (a, n) in self._counts.items() if n}

    def _plan(self) -> Plan:
        """Both drafts behind the gate, judged; kept until the text goes on."""
        if self._ready is None:
            long, wide = (part.propose(self.options.budget) for part in self._parts)
            if self.options.gate == "match":
                long, wide = (long, EMPTY) if long.match_len >= self.options.min_match else (EMPTY, wide)
            elif self.options.gate == "score":
                long, wide = (long, EMPTY) if self._promise(0, long) >= self._promise(1, wide) else (EMPTY, wide)
            candidates = _merged(long, wide)
            chances = self._chances(candidates)
            # A parent is likelier than its child or as likely and earlier, so any beginning of this order is a tree.
            order = sorted(range(len(chances)), key=chances.__getitem__, reverse=True)
            self._ready = Plan(candidates, chances, order)
        return self._ready

    def _promise(self, source: int, draft: Draft) -> float:
        """Expected accepted tokens: the drafter's own estimate, else from the counts."""
        if draft.score is not None:
            return draft.score
        sides = (draft, EMPTY) if source == 0 else (EMPTY, draft)
        return sum(self._chances(_merged(*sides)))

    def _chances(self, candidates: Candidates) -> list[float]:
        """For each node the chance that it and all nodes above it are accepted."""
        chances: list[float] = []
        for parent, kind in zip(candidates.parents, candidates.kinds, strict=True):
            accepted, tried = self._counts.get(kind, (0.0, 0.0))
            own = (accepted + PRIOR_TRIALS * _prior(kind)) / (tried + PRIOR_TRIALS)
            chances.append(own * chances[parent] if parent >= 0 else own)
        return chances

    def _worthwhile(self, plan: Plan, most: int) -> list[int]:
        """The likeliest nodes, at most `most`, as many as pay."""
        order = plan.order[:most]
        if self._costs is None:
            return order
        rate, gain, best, count = self._tokens / self._spent, 0.0, 0.0, 0
        for n, i in enumerate(order, start=1):
            gain += plan.chances[i]
            value = gain - rate * (self._costs[n] - 1.0)
            if value > best:
                best, count = value, n
        return order[:count]

    def _judge(self, emitted: Sequence[int]) -> None:
        """Count the candidates whose parents were accepted: those that verification had an answer for."""
        plan = self._plan()
        if self._costs is not None:
            self._tokens += len(emitted)
            self._spent += self._costs[len(self._worthwhile(plan, self.options.budget))]
        depth = {-1: 0}
        for i, (token, parent, kind) in enumerate(zip(*plan.candidates[:3], strict=True)):
            place = depth.get(parent, len(emitted))
            if place < len(emitted):
                counts = self._counts[kind]
                counts[1] += 1
                if emitted[place] == token:
                    counts[0] += 1
                    depth[i] = place + 1


def _merged(long: Draft, wide: Draft) -> Candidates:
    """One tree of both drafts; equal paths are one node, of the kind that `long` gives it."""
    tokens: list[int] = []
    parents: list[int] = []
    kinds: list[Kind] = []
    index: dict[tuple[int, int], int] = {}
    for source, draft in enumerate((long, wide)):
        place = {-1: -1}
        for i, (parent, kind) in enumerate(_kinds(source, draft)):
            key = (place[parent], draft.tokens[i])
            node = index.get(key)
            if node is None:
                node = index[key] = len(tokens)
                tokens.append(key[1])
                parents.append(key[0])
                kinds.append(kind)
            elif kinds[node][0] != source:
                kinds[node] = (*kinds[node][:5], min(kind[4], NOT_THERE - 1))
            place[i] = node
    return Candidates(tokens, parents, kinds, max(long.match_len, wide.match_len))


def _kinds(source: int, draft: Draft) -> list[tuple[int, Kind]]:
    """Parent and kind of every node of one draft."""
    nodes = range(len(draft.tokens))
    parents = draft.parents if draft.parents is not None else [i - 1 for i in nodes]
    match = draft.match_len
    match = match if match <= 4 else 5 if match <= 6 else 6 if match <= 9 else 7 if match <= 14 else 8
    ranks: defaultdict[int, int] = defaultdict(int)
    found: list[tuple[int, Kind]] = []
    for i, parent, depth in zip(nodes, parents, draft.depths(), strict=True):
        if draft.chances is None:
            level, chance = depth if depth <= 4 else 5 if depth <= 8 else 6, UNKNOWN
        else:
            share = draft.chances[i] / draft.chances[parent] if parent >= 0 else draft.chances[i]
            level, chance = 1 if depth == 1 else 2, bisect_right(CHANCE_CLASSES, share)
        rank = ranks[parent]
        ranks[parent] = rank + 1
        found.append((parent, (source, match, level, chance, rank if rank < 3 else 3, NOT_THERE)))
    return found


def _prior(kind: Kind) -> float:
    """A guess for a kind that was hardly seen: longer matches hold more often, second choices seldom do.

    Where the drafter has an estimate, it weighs the guess: low classes are as rare as they say, but a continuation
    seen once (one half) holds more often than that after a long match.
    """
    _, match, _, chance, rank, _ = kind
    first = (0.3, 0.3, 0.45, 0.6, 0.75, 0.75, 0.9, 0.9, 0.9)[match]
    if rank:
        return first / 4
    return first if chance == UNKNOWN else first * (0.1, 0.2, 0.3, 0.6, 0.7, 0.8, 1.0)[chance]
