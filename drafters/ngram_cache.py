"""llama.cpp's n-gram lookup: counts of what followed the last 1 to 4 tokens, drafted where the counts are decided.

Method: llama.cpp's `lookup` example (PR 5479, PR 6828). Three sources, tried in this order for every token of a draft:
this request, past requests (`dynamic`), a corpus (`static`: what followed the last two tokens). The thresholds are the
published ones. The static counts also weigh the candidates of the other two.

Among equal weights the continuation that reached its count first wins (llama.cpp takes whichever its hash map has
first).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field, model_validator

from dfbench.drafters.base import EMPTY, Draft, Drafter, DrafterContext, Options, Verified, check_prompt
from dfbench.drafters.bigrams import load


class NgramCacheOptions(Options):
    """Options of `ngram-cache`."""

    min_ngram: int = Field(1, ge=1, le=4, description="shortest context that is looked up, in tokens")
    max_ngram: int = Field(4, ge=1, le=4, description="longest context that is looked up, in tokens")
    draft_len: int = Field(8, ge=1, description="most tokens proposed (llama.cpp's server: 8)")
    dynamic: bool = Field(False, description="also draft from the requests before this one")
    static: str | None = Field(None, description="file of a static 2-gram table")
    static_sha256: str | None = Field(None, description="SHA-256 of that file, by which a worker finds it")
    learn: Literal["all", "within"] = Field(
        "all", description="'within': only n-grams inside the tokens of one step, as llama.cpp's server does"
    )

    @model_validator(mode="after")
    def _in_order(self) -> NgramCacheOptions:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram {self.min_ngram} is above max_ngram {self.max_ngram}: write it lower")
        return self


class Rule(NamedTuple):
    """When counts are decided enough to draft from: at least `samples` in all, `percent` of them for the best."""

    samples: int
    percent: int


CONTEXT_RULES = {1: Rule(2, 66), 2: Rule(2, 50), 3: Rule(1, 50), 4: Rule(1, 50)}
DYNAMIC_RULES = {1: Rule(4, 75), 2: Rule(3, 66), 3: Rule(2, 66), 4: Rule(2, 66)}
STATIC = 2
"""Tokens of context that the static table knows."""
STATIC_RULE = Rule(2, 50)


class Tally:
    """Counts of the continuations of one n-gram; the best is kept up to date."""

    __slots__ = ("best", "best_count", "counts", "total")

    def __init__(self, token: int) -> None:
        self.total = self.best_count = 1
        self.best = token
        self.counts = {token: 1}

    def add(self, token: int, times: int = 1) -> None:
        count = self.counts[token] = self.counts.get(token, 0) + times
        self.total += times
        if count > self.best_count:
            self.best_count, self.best = count, token

    def decided(self, rule: Rule, weights: dict[int, int] | None) -> tuple[int, float] | None:
        """The token to draft and its share of the counts, where the rule allows one."""
        if self.total < rule.samples or 100 * self.best_count < rule.percent * self.total:
            return None
        best, count = self.best, self.best_count
        if weights:
            best = max(self.counts, key=lambda token: self.counts[token] * (100 * weights.get(token, 0) or 1))
            count = self.counts[best]
            if 100 * count < rule.percent * self.total:
                return None
        return best, count / self.total


class Counts:
    """n-gram → tally, one table a length. A key packs the tokens; one seen once maps to its continuation."""

    def __init__(self, lengths: range) -> None:
        self.tables: dict[int, dict[int, int | Tally]] = {n: {} for n in lengths}

    def learn(self, keys: Sequence[int], token: int) -> None:
        """This token followed the n-grams with these keys (index n - 1)."""
        for n, table in self.tables.items():
            if n > len(keys):
                return
            seen = table.get(keys[n - 1])
            if seen is None:
                table[keys[n - 1]] = token
            elif isinstance(seen, Tally):
                seen.add(token)
            else:
                tally = table[keys[n - 1]] = Tally(seen)
                tally.add(token)

    def decide(
        self, keys: Sequence[int], rules: dict[int, Rule], weights: dict[int, int] | None
    ) -> tuple[int, float, int] | None:
        """The token to draft, its share of the counts and n, from the longest n-gram whose counts are decided."""
        for n in reversed(self.tables):
            seen = self.tables[n].get(keys[n - 1]) if n <= len(keys) else None
            if seen is None:
                continue
            if not isinstance(seen, Tally):
                if rules[n].samples <= 1:
                    return seen, 1.0, n
            elif decided := seen.decided(rules[n], weights):
                return *decided, n
        return None

    def merge(self, other: Counts) -> None:
        """Add another's counts."""
        for n, table in other.tables.items():
            mine = self.tables[n]
            for key, seen in table.items():
                known = mine.get(key)
                counts = seen.counts if isinstance(seen, Tally) else {seen: 1}
                if known is None:
                    mine[key] = seen
                    continue
                if not isinstance(known, Tally):
                    known = mine[key] = Tally(known)
                for token, times in counts.items():
                    known.add(token, times)


class NgramCache(Drafter):
    """The three sources, the request's last tokens, and the token-by-token draft."""

    name = "ngram-cache"
    summary = "llama.cpp's lookup: what followed the last 1 to 4 tokens, where its counts are decided (PR 6828)."
    Options = NgramCacheOptions
    presets: ClassVar[dict[str, dict[str, Any]]] = {"server": {"learn": "within"}}
    file_options: ClassVar[dict[str, str]] = {"static": "static_sha256"}
    options: NgramCacheOptions

    def __init__(self, options: NgramCacheOptions, context: DrafterContext) -> None:
        super().__init__(options, context)
        table = load(options.static, options.static_sha256, context)
        self._static = table.follow if table else {}
        self._lengths = range(options.min_ngram, options.max_ngram + 1)
        self._longest = max(options.max_ngram, STATIC)
        self.reset()

    def reset(self) -> None:
        """Forget every request; the static table stays."""
        self._dynamic = Counts(self._lengths)
        self._counts = Counts(self._lengths)
        self._keys: list[int] = []

    def start(self, prompt: Sequence[int]) -> None:
        """Count the prompt; the request before joins the dynamic counts."""
        check_prompt(prompt, self.context)
        if self.options.dynamic:
            self._dynamic.merge(self._counts)
        self._counts = Counts(self._lengths)
        self._keys = []
        self.observe(prompt)

    def observe(self, emitted: Sequence[int], verified: Verified | None = None) -> None:
        """Count every token after the n-grams before it."""
        counts, keys = self._counts, self._keys
        if self.options.learn == "within":
            known, keys = keys, []
        for token in emitted:
            counts.learn(keys, token)
            keys = self._extend(keys, token)
        if self.options.learn == "within":
            for token in emitted:
                known = self._extend(known, token)
            keys = known
        self._keys = keys

    def propose(self, budget: int) -> Draft:
        """Token by token, until no source is decided."""
        keys, tokens = self._keys, []
        share, score, match = 1.0, 0.0, 0
        for _ in range(min(budget, self.options.draft_len)):
            found = self._next(keys)
            if found is None:
                break
            token, part, n = found
            match = match or n
            share *= part
            score += share
            tokens.append(token)
            keys = self._extend(keys, token)
        return Draft(tokens, None, match, score) if tokens else EMPTY

    def _next(self, keys: list[int]) -> tuple[int, float, int] | None:
        weights = self._static.get(keys[STATIC - 1]) if len(keys) >= STATIC else None
        found = self._counts.decide(keys, CONTEXT_RULES, weights)
        if found is None and self.options.dynamic:
            found = self._dynamic.decide(keys, DYNAMIC_RULES, weights)
        if found is None and weights:
            total, best = sum(weights.values()), max(weights, key=weights.__getitem__)
            if total >= STATIC_RULE.samples and 100 * weights[best] >= STATIC_RULE.percent * total:
                found = best, weights[best] / total, STATIC
        return found

    def _extend(self, keys: list[int], token: int) -> list[int]:
        """The keys of the n-grams that end in this token, from those before it."""
        return [token, *(key << 32 | token for key in keys[: self._longest - 1])]
