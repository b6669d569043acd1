"""SuffixDecoding: the compiled automaton against a readable count-trie, and against recorded peer counts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dfbench.drafters.base import Draft
from dfbench.drafters.registry import create
from dfbench.drafters.suffix import Suffix
from dfbench.drafters.suffix_counts import SuffixCounts
from dfbench.workers.loop import decode
from dfbench.workers.target import RecordedTarget

Gram = tuple[int, ...]


class CountTrie:
    """The specification: counts of all substrings of at most `depth` tokens, continuations in the published order."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.count: Counter[Gram] = Counter()
        self.children: dict[Gram, list[Gram]] = {}

    def add(self, sequence: Sequence[int]) -> None:
        for end in range(1, len(sequence) + 1):
            for length in range(1, min(self.depth, end) + 1):
                self._count(tuple(sequence[end - length : end]))

    def _count(self, gram: Gram) -> None:
        self.count[gram] += 1
        siblings = self.children.setdefault(gram[:-1], [])
        if gram not in siblings:
            siblings.append(gram)
            return
        count, place = self.count[gram], siblings.index(gram)
        first_of_old_equals = place == 0 or self.count[siblings[place - 1]] >= count
        siblings.remove(gram)
        above = (lambda other: other > count) if first_of_old_equals else (lambda other: other >= count)
        siblings.insert(sum(above(self.count[s]) for s in siblings), gram)

    def path(self, gram: Gram, limit: int, min_prob: float) -> tuple[list[int], list[int], float]:
        tokens: list[int] = []
        probability, score = np.float32(1), np.float32(0)
        while len(tokens) < limit and self.children.get(gram):
            child = self.children[gram][0]
            probability *= np.float32(self.count[child]) / np.float32(self.count[gram])
            if probability < np.float32(min_prob):
                break
            tokens.append(child[-1])
            score += probability
            gram = child
        return tokens, list(range(-1, len(tokens) - 1)), float(score)

    def tree(self, gram: Gram, limit: int, min_prob: float) -> tuple[list[int], list[int], float]:
        waiting: list[tuple[np.float32, Gram, int]] = []
        tokens: list[int] = []
        parents: list[int] = []
        score = np.float32(0)

        def push(node: Gram, probability: np.float32, parent: int) -> None:
            for child in self.children.get(node, [])[:limit]:
                p = probability * (np.float32(self.count[child]) / np.float32(self.count[node]))
                if p >= np.float32(min_prob):
                    waiting.append((p, child, parent))

        push(gram, np.float32(1), -1)
        while waiting and len(tokens) < limit:
            best = max(range(len(waiting)), key=lambda i: (waiting[i][0], -i))
            probability, node, parent = waiting.pop(best)
            tokens.append(node[-1])
            parents.append(parent)
            score += probability
            push(node, probability, len(tokens) - 1)
        return tokens, parents, float(score)

    def speculate(self, context: Sequence[int], options: dict[str, object], nodes: int) -> Draft:
        factor, offset, min_prob = (float(options[k]) for k in ("factor", "offset", "min_prob"))  # type: ignore[arg-type]
        follow = self.tree if options["mode"] == "tree" else self.path
        best = Draft((), None, 0, 0.0)
        context = tuple(context[-self.depth :])
        for match in range(1, len(context)):
            gram = context[-match:]
            if not self.count[gram]:
                break
            limit = max(0, min(nodes, int(match * factor + offset + 1e-6)))
            tokens, parents, score = follow(gram, limit, min_prob)
            if score >= (best.score or 0.0) and tokens:
                best = Draft(tokens, parents, match, score)
        return best


def same(draft: Draft, expected: Draft, mode: str) -> None:
    assert list(draft.tokens) == list(expected.tokens)
    if draft.tokens:
        assert draft.match_len == expected.match_len
        assert draft.score == expected.score
        if mode == "tree":
            assert list(draft.parents or ()) == list(expected.parents or ())


few_tokens = st.integers(2, 5).flatmap(lambda n: st.lists(st.integers(0, n), min_size=1, max_size=60))


@settings(max_examples=120, deadline=None)
@given(
    few_tokens,
    st.lists(st.integers(1, 4), max_size=12),
    st.integers(2, 12),
    st.sampled_from([(1.0, 0.0, 0.1), (2.0, 0.0, 0.1), (1.5, 1.0, 0.0), (0.5, -1.0, 0.3), (0.0, 6.0, 0.05)]),
    st.sampled_from(["linear", "tree"]),
)
def test_local_drafts_are_those_of_the_count_trie(
    text: list[int], steps: list[int], depth: int, numbers: tuple[float, float, float], mode: str
) -> None:
    options = dict(zip(("factor", "offset", "min_prob"), numbers, strict=True)) | {"depth": depth, "mode": mode}
    drafter = create("suffix", {**options, "max_draft": 9})
    start = max(1, len(text) // 2)
    drafter.start(text[:start])
    at = start
    for step in [*steps, 0]:
        trie = CountTrie(depth)
        trie.add(text[:at])
        for budget in (1, 4, 9):
            same(drafter.propose(budget), trie.speculate(text[:at], options, budget), mode)
        if step and at < len(text):
            drafter.observe(text[at : at + step])
            at = min(at + step, len(text))


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(few_tokens, few_tokens), min_size=1, max_size=6),
    st.integers(2, 8),
    st.integers(1, 4),
    st.sampled_from(["linear", "tree"]),
)
def test_global_drafts_count_kept_outputs_only(
    requests: list[tuple[list[int], list[int]]], depth: int, kept: int, mode: str
) -> None:
    options = {"factor": 1.0, "offset": 0.0, "min_prob": 0.1, "depth": depth, "mode": mode}
    drafter = create("suffix", {**options, "cached_requests": kept})
    for number, (prompt, output) in enumerate(requests):
        drafter.start(prompt)
        for token in output:
            drafter.observe([token])
        local, shared = CountTrie(depth), CountTrie(depth)
        local.add(prompt + output)
        outputs = [o for _, o in requests[: number + 1]][-kept:]
        for text in outputs:
            shared.add(text)
        ours = drafter.propose(24)
        expected = [trie.speculate(prompt + output, options, 24) for trie in (local, shared)]
        assert (ours.score or 0.0) == pytest.approx(max(e.score or 0.0 for e in expected))
        if number < kept:  # nothing evicted yet: the order among equal counts is the published one too
            same(ours, max(expected, key=lambda e: e.score or 0.0), mode)


@settings(max_examples=100, deadline=None)
@given(st.lists(few_tokens, min_size=1, max_size=5), st.integers(1, 6), st.data())
def test_counts_are_exact_with_and_without_removal(texts: list[list[int]], depth: int, data: st.DataObject) -> None:
    counts = SuffixCounts(depth, capacity=1)
    for text in texts:
        counts.begin()
        counts.extend(np.asarray(text, np.int32), len(text))
    gone = data.draw(st.integers(0, len(texts)))
    for text in texts[:gone]:
        counts.remove(np.asarray(text, np.int32))
    trie = CountTrie(depth)
    for text in texts[gone:]:
        trie.add(text)
    grams = {tuple(t[i : i + n]) for t in texts for n in range(1, depth + 1) for i in range(len(t) - n + 1)}
    assert {g: counts.count(g) for g in grams} == {g: trie.count[g] for g in grams}
    assert counts.count([99]) == 0


def test_a_pattern_seen_once_before_is_worth_half_a_token_each() -> None:
    drafter = create("suffix", {})
    drafter.start([1, 2, 3, 7, 8, 9, 4, 1, 2, 3])
    draft = drafter.propose(24)
    assert (list(draft.tokens), draft.match_len, draft.score) == ([7, 8, 9], 3, 1.5)


def test_someone_elses_output_is_worth_a_whole_token_each() -> None:
    drafter = create("suffix", {"cached_requests": 10})
    drafter.start([5])
    drafter.observe([1, 2, 3, 7, 8, 9])
    drafter.start([6, 1, 2])
    drafter.observe([3])
    draft = drafter.propose(24)
    assert (list(draft.tokens), draft.match_len, draft.score) == ([7, 8, 9], 3, 3.0)


def test_evicted_outputs_are_dropped_from_memory() -> None:
    drafter = create("suffix", {"cached_requests": 2})
    assert isinstance(drafter, Suffix)
    rng = np.random.default_rng(1)
    sizes = []
    for _ in range(30):
        drafter.start([1])
        drafter.observe(rng.integers(0, 1000, 200).tolist())
        sizes.append(drafter.nbytes())
    assert max(sizes[10:]) <= 2 * max(sizes[:10])


PEERS = {
    "local_d24_f1": {},
    "local_d64_f2_k10": {"depth": 64, "factor": 2.0, "max_draft": 10},
    "global_d24_f1": {"cached_requests": 10_000},
}


@pytest.mark.parametrize("peer", PEERS)
def test_step_counts_are_those_of_the_peer(shared_data: Path, peer: str) -> None:
    expected = json.loads((shared_data / "peer_steps.json").read_text())["suffix"][peer]
    drafter = create("suffix", PEERS[peer])
    steps: Counter[str] = Counter()
    for line in (shared_data / "traces_smollm2.jsonl").read_text().splitlines():
        row = json.loads(line)
        target = RecordedTarget()
        target.load(row["output_ids"])
        trace = decode(target, drafter, row["prompt_ids"], max_new_tokens=len(row["output_ids"]))
        assert trace.output == row["output_ids"]
        steps[row["workload"]] += len(trace.steps)
        steps["all"] += len(trace.steps)
    assert steps == {workload: counts["steps"] for workload, counts in expected.items()}
