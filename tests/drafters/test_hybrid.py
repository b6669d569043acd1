"""The gate, the cost-aware budget, and what both are worth on recorded streams."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dfbench.drafters import cost, frozen
from dfbench.drafters.base import Draft, Drafter, DrafterContext
from dfbench.drafters.cost import CostCurve
from dfbench.drafters.hybrid import HybridDrafter
from dfbench.drafters.registry import create, parse_options
from dfbench.errors import OptionError
from dfbench.workers import fastpath
from dfbench.workers.target import RecordedTarget

CPU = [[1, 1.0], [4, 1.04], [8, 1.15], [16, 1.3], [32, 2.1], [64, 3.2]]
"""SmolLM2-135M, bf16, two quiet CPU cores."""
PLD = {"drafter": "pld"}
TRIE = {"drafter": "ngram-trie", "options": {"index_prompt": True}}


def hybrid(**options: Any) -> HybridDrafter:
    drafter = create("hybrid", options)
    assert isinstance(drafter, HybridDrafter)
    return drafter


def test_gate_match_takes_the_long_copy_only_after_a_long_match() -> None:
    drafter = hybrid(long=PLD, wide=TRIE, gate="match", min_match=3)
    drafter.start([1, 2, 3, 4, 5, 9, 1, 2])
    drafter.observe([3])
    assert list(drafter.propose(24).tokens) == [4, 5, 9, 1, 2, 3]
    drafter.reset()
    drafter.start([1, 2, 8, 4, 2, 7, 4])
    drafter.observe([2])
    wide = create("ngram-trie", TRIE["options"])  # type: ignore[arg-type]
    wide.start([1, 2, 8, 4, 2, 7, 4])
    wide.observe([2])
    assert set(drafter.propose(24).tokens) == set(wide.propose(11).tokens)


def test_gate_score_takes_whichever_expects_more() -> None:
    one = {"drafter": "suffix", "options": {"max_draft": 1}}
    many = {"drafter": "suffix"}
    for long, wide in ((one, many), (many, one)):
        drafter = hybrid(long=long, wide=wide, gate="score")
        drafter.start([1, 2, 3, 4, 5, 6, 9, 1, 2])
        drafter.observe([3])
        assert list(drafter.propose(24).tokens) == [4, 5, 6]


def test_union_merges_equal_paths() -> None:
    drafter = hybrid(long=PLD, wide=PLD)
    drafter.start([1, 2, 3, 4, 5, 9, 1, 2])
    drafter.observe([3])
    draft = drafter.propose(24)
    assert (list(draft.tokens), list(draft.parents or ())) == ([4, 5, 9, 1, 2, 3], [-1, 0, 1, 2, 3, 4])


def test_a_steeper_cost_drafts_less_and_a_prohibitive_one_nothing() -> None:
    sizes = []
    for slope in (0.0001, 0.05, 0.1, 10.0):
        drafter = hybrid(cost=[[1, 1.0], [101, 1.0 + 100 * slope]])
        drafter.start([*range(40), *range(12)])
        drafter.observe([12])
        sizes.append(len(drafter.propose(24).tokens))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[1] > sizes[-1] == 0


def best_subset(draft: Draft, costs: CostCurve, rate: float) -> float:
    """The largest value over every set of nodes that holds its parents, by trying them all."""
    chances, parents = list(draft.chances or ()), list(draft.parents or ())
    best = 0.0
    for mask in range(1 << len(chances)):
        chosen = [i for i in range(len(chances)) if mask >> i & 1]
        if all(parents[i] < 0 or mask >> parents[i] & 1 for i in chosen):
            value = sum(chances[i] for i in chosen) - rate * (costs(1 + len(chosen)) - 1)
            best = max(best, value)
    return best


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=30), st.lists(st.floats(0, 0.6), min_size=3, max_size=8))
def test_the_budget_is_the_best_of_all_subsets(text: list[int], rises: list[float]) -> None:
    points = [(1, 1.0), *((2 + i, 1.0 + float(c)) for i, c in enumerate(np.cumsum(rises)))]
    free, aware = hybrid(budget=8), hybrid(budget=8, cost=points, rate=1.5)
    for drafter in (free, aware):
        drafter.start(text[:-1])
        drafter.observe(text[-1:])
    draft, whole = aware.propose(8), free.propose(8)
    costs = CostCurve.of(points)
    value = sum(draft.chances or ()) - 1.5 * (costs(1 + len(draft.tokens)) - 1)
    assert value == pytest.approx(best_subset(whole, costs, 1.5))


def test_acceptance_is_learned_given_on_and_forgotten() -> None:
    drafter = hybrid(long=PLD, wide=PLD)
    text = [3, 5, 3, 6, 3, 7, 3, 8, 3, 9, 3, 10, 3, 11, 3]
    drafter.start(text[:3])
    for token in text[3:]:
        drafter.observe([token])
    before = drafter.propose(1)
    learned = drafter.acceptance()
    assert learned
    drafter.reset()
    assert drafter.acceptance() == {}
    again = hybrid(long=PLD, wide=PLD, acceptance=learned)
    again.start([3, 12, 3, 13])
    again.observe([3])
    fresh = hybrid(long=PLD, wide=PLD)
    fresh.start([3, 12, 3, 13])
    fresh.observe([3])
    assert before.score is not None
    assert (again.propose(1).score or 0) < (fresh.propose(1).score or 0)
    assert again.acceptance() == learned
    json.dumps(again.options.model_dump())


def test_nested_options_are_checked_and_complete() -> None:
    options = parse_options("hybrid", {"long": {"drafter": "pld", "options": {"preset": "hf"}}}).model_dump()
    assert options["long"]["options"]["max_ngram"] == 2
    assert parse_options("hybrid", options).model_dump() == options
    for bad, message in (
        ({"drafter": "pdl"}, "did you mean 'pld'"),
        ({"drafter": "pld", "options": {"max_ngramm": 1}}, "did you mean 'max_ngram'"),
        ({"drafter": "hybrid"}, "cannot hold a hybrid"),
        ({"options": {}}, "long.drafter"),
    ):
        with pytest.raises(OptionError, match=message):
            parse_options("hybrid", {"long": bad})
    with pytest.raises(OptionError, match="two or more points"):
        parse_options("hybrid", {"cost": [[1, 1.0]]})
    for bad_acceptance in ({"1.2": [1, 2]}, {"0.1.1.1.0.3": [3, 2]}):
        with pytest.raises(OptionError, match="acceptance"):
            parse_options("hybrid", {"acceptance": bad_acceptance})


def test_sam_beside_another_copies_its_longest_draft_after_a_match_of_five() -> None:
    drafter = hybrid(preset="sam")
    text = list(range(100, 150))
    drafter.start([*text, 7])
    drafter.observe([7])
    drafter.observe(text[:4])
    assert set(drafter.propose(80).tokens) == {0}  # the other's tree, which has seen nothing yet
    drafter.observe(text[4:5])
    assert list(drafter.propose(80).tokens) == text[5:44]


def test_top_k_reaches_the_part_that_asks() -> None:
    drafter = hybrid(preset="sam")
    assert drafter.top_k == 8


def test_a_part_finds_its_file_by_content(tmp_path: Path) -> None:
    texts = ["\x05\x06\x07\x08"]
    table = frozen.build(texts, lambda text: list(text.encode()), tokenizer_hash="t", corpus="c")
    sha256 = table.save(tmp_path / "c.table")
    part = {"drafter": "cacheback", "options": {"frozen": "/not/on/this/machine", "frozen_sha256": sha256}}
    options = parse_options("hybrid", {"long": part, "wide": PLD}).model_dump(mode="json")
    drafter = create("hybrid", options, DrafterContext(files={sha256: tmp_path / "c.table"}))
    drafter.start([1, 2])
    drafter.observe([5])
    assert list(drafter.propose(9).tokens) == [6, 7, 8]
    with pytest.raises(OptionError, match="the frozen table /not/on/this/machine cannot be read"):
        create("hybrid", options)


class TestCostCurve:
    def test_between_and_beyond_its_points(self) -> None:
        curve = CostCurve.of([(8, 1.2), (1, 1.0), (16, 1.6)])
        assert [curve(q) for q in (1, 8, 12, 16, 20)] == pytest.approx([1.0, 1.2, 1.4, 1.6, 1.8])

    def test_times_become_ratios_and_falls_are_noise(self) -> None:
        assert CostCurve.of([(1, 50.0), (2, 49.0), (4, 100.0)]).points == ((1, 1.0), (2, 1.0), (4, 2.0))
        assert CostCurve.of([(4, 1.5), (8, 2.0)]).points[0] == (1, 1.0)

    @pytest.mark.parametrize(
        "points",
        [[(1, 1.0)], [(1, 1.0), (1, 2.0)], [(0, 1.0), (2, 1.0)], [(1, 0.0), (2, 1.0)], [(1, 1.0), (2, np.inf)]],
    )
    def test_bad_points_are_refused(self, points: list[tuple[int, float]]) -> None:
        with pytest.raises(OptionError, match="cost curve"):
            CostCurve.of(points)

    def test_files(self, tmp_path: Path) -> None:
        path = tmp_path / "curve.json"
        sha256 = CostCurve.of(CPU).save(path)  # type: ignore[arg-type]
        here = DrafterContext(files={sha256: path})
        for options, context in (({"cost_file": str(path)}, DrafterContext()), ({"cost_file_sha256": sha256}, here)):
            drafter = create("hybrid", options, context)
            drafter.start([1, 2, 1])
            drafter.observe([2])
            drafter.propose(9).check(9, 10)
        with pytest.raises(OptionError, match="does not have the SHA-256"):
            cost.load(str(path), "0" * 64, DrafterContext())
        with pytest.raises(OptionError, match="cannot be read"):
            cost.load(str(path) + ".gone", None, DrafterContext())
        with pytest.raises(OptionError, match="on this machine"):
            cost.load(None, sha256, DrafterContext())
        path.write_text("[1, 2]")
        with pytest.raises(OptionError, match="is not a cost curve"):
            cost.load(str(path), None, DrafterContext())


MEASURED = [
    *([1, 1.0], [2, 1.06], [4, 1.06], [8, 1.16], [12, 1.16], [16, 1.21], [24, 1.39], [32, 1.41], [48, 1.67]),
    *([64, 1.74], [96, 2.19]),
]
"""`dfbench calibrate` of SmolLM2-135M in bf16 on two Xeon cores that multiply bf16 in hardware; mean over contexts."""

PUBLISHED: list[tuple[str, dict[str, Any]]] = [
    ("pld", {}),
    ("pld", {"preset": "hf"}),
    ("pld", {"preset": "original"}),
    ("cacheback", {}),
    ("cacheback", {"draft": "tree"}),
    ("suffix", {}),
    ("suffix", {"mode": "tree"}),
    ("suffix", {"preset": "specbench"}),
    ("sam", {}),
    ("ngram-cache", {}),
    ("ngram-trie", {}),
    ("ngram-trie", {"preset": "prompt"}),
]
TUNED: list[tuple[str, dict[str, Any]]] = [
    ("suffix", {"mode": "tree", "factor": 3.0, "min_prob": 0.1, "max_draft": 16}),
    ("suffix", {"mode": "tree", "factor": 4.0, "min_prob": 0.03, "max_draft": 32, "depth": 64}),
    ("suffix", {"mode": "tree", "factor": 4.0, "min_prob": 0.1, "max_draft": 32, "depth": 64}),
    ("ngram-trie", {"index_prompt": True, "draft_tokens": 16}),
    ("ngram-trie", {"index_prompt": True, "draft_tokens": 25}),
    ("cacheback", {"draft": "tree", "queries": 16, "reserve": 4}),
]
"""What a search of 652 settings of one method found best on one half of the prompts for some workload."""
Row = dict[str, Any]


def predicted(drafter: Drafter, rows: Iterable[Row], curve: CostCurve, *, cold: bool = True) -> dict[str, float]:
    """Tokens per unit of cost by workload: the speedup that this curve predicts."""
    tokens: defaultdict[str, int] = defaultdict(int)
    spent: defaultdict[str, float] = defaultdict(float)
    prices = np.array([curve(q) for q in range(200)])
    target = RecordedTarget()
    target.max_nodes = 127
    for row in rows:
        output = row["output_ids"]
        done = fastpath.decode(drafter, row["prompt_ids"], output, target=target, max_new_tokens=len(output), cold=cold)
        assert list(done.output) == output
        tokens[row["workload"]] += len(output) - 1
        spent[row["workload"]] += prices[done.queries].sum()
    return {workload: tokens[workload] / spent[workload] for workload in tokens}


def test_predicted_speedup_is_at_least_the_best_single_methods(shared_data: Path) -> None:
    """One setting for all workloads; acceptance from other prompts than those scored, both halves in both roles."""
    text = (shared_data / "traces_smollm2.jsonl").read_text()
    rows, curve = [json.loads(line) for line in text.splitlines()], CostCurve.of(MEASURED)  # type: ignore[arg-type]
    halves = [[row for i, row in enumerate(rows) if (i // 3) % 2 == part] for part in (0, 1)]
    for scored, others in (halves, halves[::-1]):
        learner = hybrid(cost=MEASURED)
        predicted(learner, others, curve, cold=False)
        ours = predicted(hybrid(cost=MEASURED, acceptance=learner.acceptance()), scored, curve)
        assert set(ours) == {"code", "copyctx", "chat"}
        for name, options in [*PUBLISHED, *TUNED]:
            single = predicted(create(name, options), scored, curve)
            assert all(ours[workload] >= single[workload] for workload in single), (name, options, ours, single)
