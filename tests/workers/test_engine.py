"""The torch target on tiny random models in float64: every engine and every draft gives the tokens of plain greedy."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from dfbench.drafters.base import Draft, Drafter, DrafterContext, Options, Verified
from dfbench.drafters.registry import create
from dfbench.errors import DraftError, EngineError, ModelError, UsageError
from dfbench.workers.engine import TorchTarget, load_target
from dfbench.workers.evidence import TopTwo
from dfbench.workers.loop import Trace, decode
from dfbench.workers.spec import TargetSpec

TinyModel = Callable[..., PreTrainedModel]

VOCAB = 29  # of the tiny models
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
CAP = 20
ENGINES = [("cached", "compact"), ("cached", "refeed"), ("recompute", "compact")]


class Gambler(Drafter):
    """Drafts random trees around the known continuation: right and wrong tokens, duplicate siblings, any shape."""

    name = "gambler"

    def __init__(self, answer: Sequence[int], seed: int, chain: bool = False, top_k: int = 0) -> None:
        super().__init__(Options(), DrafterContext())
        self.answer, self.seed, self.chain, self.top_k = list(answer), seed, chain, top_k
        self.done = 0
        self.learned: list[Verified | None] = []

    def start(self, prompt: Sequence[int]) -> None:
        self.done = 0

    def propose(self, budget: int) -> Draft:
        dice = random.Random(self.seed * 1000 + self.done)
        nodes = min(dice.randint(0, 14), budget)
        parents = [node - 1 if self.chain else dice.randint(max(-1, node - 4), node - 1) for node in range(nodes)]
        depths = Draft([0] * nodes, parents).depths()
        tokens = [self._guess(depth, dice) for depth in depths]
        return Draft(tokens, None if self.chain else parents)

    def _guess(self, depth: int, dice: random.Random) -> int:
        at = self.done + depth - 1
        right = at < len(self.answer) and dice.random() < 0.75
        return self.answer[at] if right else dice.randrange(VOCAB)

    def observe(self, emitted: Sequence[int], verified: Verified | None = None) -> None:
        self.done += len(emitted)
        self.learned.append(verified)

    def reset(self) -> None:
        """Nothing is kept."""


@cache
def greedy(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """The simplest decoder there is: the whole prefix through the model for every token."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def target(model: PreTrainedModel, **settings: Any) -> TorchTarget:
    return TorchTarget(model, TargetSpec(dtype="float64", **settings))


def run(it: TorchTarget, drafter: Drafter, cap: int = CAP, eos: Sequence[int] = ()) -> Trace:
    it.top_k = drafter.top_k
    return decode(it, drafter, PROMPT, max_new_tokens=cap, eos_ids=eos)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("engine", "repair"), ENGINES)
def test_random_trees_with_duplicate_siblings_change_nothing(
    tiny_model: TinyModel, family: str, engine: Any, repair: Any, attention: str
) -> None:
    model = tiny_model(family, attention)
    expected = greedy(model, PROMPT, CAP)
    assert len(set(expected)) > 8, "a model that repeats one token tests nothing"
    it = target(model, engine=engine, kv_repair=repair, attention=attention)
    assert run(it, create("ar", {})).output == expected
    accepted = rejected = branched = 0
    for seed in range(12):
        trace = run(it, Gambler(expected, seed))
        assert trace.output == expected
        accepted += sum(step.accepted for step in trace.steps)
        rejected += sum(step.drafted - step.accepted for step in trace.steps)
        branched += sum(0 < step.depth < step.drafted for step in trace.steps)
    assert accepted > 25 and rejected > 25 and branched > 25


@given(seed=st.integers(0, 10**6), cap=st.integers(1, 30), eos=st.sets(st.integers(0, VOCAB - 1), max_size=2))
@settings(deadline=None, max_examples=25)
def test_any_cap_and_any_end_of_text(tiny_model: TinyModel, seed: int, cap: int, eos: set[int]) -> None:
    model = tiny_model("llama")
    plain = greedy(model, PROMPT, 30)
    expected = plain[:cap]
    for place, token in enumerate(expected):
        if token in eos:
            expected = expected[: place + 1]
            break
    for repair in ("compact", "refeed"):
        trace = run(target(model, kv_repair=repair), Gambler(plain, seed, chain=bool(seed % 2)), cap, sorted(eos))
        assert trace.output == expected


@pytest.mark.parametrize(("engine", "repair"), ENGINES)
def test_evidence_is_the_top_two_of_the_row_that_gave_each_token(
    tiny_model: TinyModel, family: str, engine: Any, repair: Any
) -> None:
    model = tiny_model(family)
    expected = greedy(model, PROMPT, CAP)
    it = target(model, engine=engine, kv_repair=repair)
    with torch.inference_mode():
        whole = model(input_ids=torch.tensor([[*PROMPT, *expected]]), use_cache=False).logits[0]
    best, ids = whole[len(PROMPT) - 1 : -1].sort(dim=-1, descending=True)
    for drafter in (create("ar", {}), Gambler(expected, 1, chain=True), Gambler(expected, 2)):
        evidence = run(it, drafter).evidence
        assert evidence is not None
        assert evidence.top1_id.tolist() == expected == ids[:, 0].tolist()
        assert evidence.top2_id.tolist() == ids[:, 1].tolist()
        assert evidence.top1_logit == pytest.approx(best[:, 0].numpy(), rel=1e-5)
        assert evidence.top2_logit == pytest.approx(best[:, 1].numpy(), rel=1e-5)
        assert evidence.top_ties.tolist() == [1] * CAP


def test_ties_are_counted_and_the_second_is_another_entry(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    head = model.get_output_embeddings()
    kept = head.weight.detach().clone()
    first = greedy(model, PROMPT, CAP)[0]
    other = (first + 5) % VOCAB
    try:
        with torch.no_grad():
            head.weight[other] = head.weight[first]
        trace = run(target(model), create("ar", {}), cap=1)
    finally:
        with torch.no_grad():
            head.weight.copy_(kept)
    evidence = trace.evidence
    assert evidence is not None
    assert evidence.top_ties.tolist() == [2]
    assert {int(evidence.top1_id[0]), int(evidence.top2_id[0])} == {first, other}
    assert evidence.top1_logit[0] == evidence.top2_logit[0]
    assert evidence.top1_id[0] == trace.output[0]


def test_evidence_outlives_the_next_job_and_a_full_table(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    it = target(model)
    it._top_two = TopTwo(it.device, capacity=2)
    first = run(it, create("ar", {})).evidence
    assert first is not None
    kept = first.top1_logit.copy()
    decode(it, create("ar", {}), PROMPT[::-1], max_new_tokens=CAP)
    assert len(kept) == CAP
    assert (first.top1_logit == kept).all()


def test_queries_count_what_was_fed_again(tiny_model: TinyModel, family: str) -> None:
    model = tiny_model(family)
    expected = greedy(model, PROMPT, CAP)
    compact = run(target(model), Gambler(expected, 3))
    refeed = run(target(model, kv_repair="refeed"), Gambler(expected, 3))
    assert all(step.queries == 1 + step.drafted for step in compact.steps)
    before = [0, *(step.accepted for step in refeed.steps)]
    assert [step.queries for step in refeed.steps] == [
        1 + step.drafted + refed for step, refed in zip(refeed.steps, before, strict=False)
    ]
    assert sum(before) > 0


def test_the_query_budget_holds_in_every_pass(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    expected = greedy(model, PROMPT, CAP)
    for engine, repair in ENGINES:
        it = target(model, engine=engine, kv_repair=repair, max_queries=6)
        trace = run(it, Gambler(expected, 3))
        assert trace.output == expected
        assert max(step.queries for step in trace.steps) == 6


def test_the_most_likely_ids_reach_a_drafter_that_asks(tiny_model: TinyModel, family: str) -> None:
    model = tiny_model(family)
    expected = greedy(model, PROMPT, CAP)
    it = target(model)
    drafter = Gambler(expected, 4, top_k=3)
    run(it, drafter)
    seen = [verified for verified in drafter.learned if verified is not None]
    assert seen
    for verified in seen:
        assert verified.topk.shape == (len(verified.tokens), 3)
    assert int(seen[0].topk[0, 0]) == expected[1]
    it.top_k = 0
    it.prefill(PROMPT)
    assert it.verify(Draft((1, 2))).topk is None


def test_the_last_projection_in_float32(tiny_model: TinyModel) -> None:
    model = tiny_model("llama", "sdpa", torch.bfloat16)
    plain, wide = target(model), None
    expected = run(plain, create("ar", {}))
    head = model.get_output_embeddings()
    try:
        wide = run(target(model, logits_dtype="float32"), create("ar", {}))
    finally:
        model.set_output_embeddings(head)
    assert expected.evidence is not None and wide.evidence is not None

    def is_bf16(values: Any) -> bool:
        return bool((torch.tensor(values).bfloat16().float() == torch.tensor(values)).all())

    assert is_bf16(expected.evidence.top1_logit)
    assert not is_bf16(wide.evidence.top1_logit)


def test_bad_requests_are_named(tiny_model: TinyModel) -> None:
    it = target(tiny_model("llama"))
    with pytest.raises(EngineError, match="vocabulary of 29"):
        it.prefill([1, 29])
    with pytest.raises(EngineError, match="context of 256"):
        it.prefill([1] * 256)
    with pytest.raises(EngineError, match="empty"):
        it.prefill([])
    it.prefill(PROMPT)
    with pytest.raises(DraftError, match="vocabulary"):
        it.verify(Draft((99,)))
    with pytest.raises(DraftError, match="budget of 127"):
        it.verify(Draft((1,) * 128))
    with pytest.raises(ModelError, match="logits_dtype 'float16'"):
        target(tiny_model("llama"), logits_dtype="float16")
    with pytest.raises(UsageError, match="'context' belongs to engine compiled"):
        load_target(TargetSpec(options={"context": 512}))


def test_the_context_bounds_the_draft_and_the_output(tiny_model: TinyModel) -> None:
    it = target(tiny_model("llama"))
    it.prefill([1, 2] * 126)
    assert it.max_nodes == 256 - 253
    it.prefill([1, 2, 3] * 85)
    assert it.max_nodes == 0
    first = it.verify(Draft(())).argmax[0]
    it.commit((), (first,))
    with pytest.raises(EngineError, match="end of the model's context"):
        it.verify(Draft(()))


def test_a_sliding_window_is_refused_at_load() -> None:
    from transformers import AutoModelForCausalLM, MistralConfig

    config = MistralConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=8,
    )
    with pytest.raises(EngineError, match="SlidingWindow"):
        target(AutoModelForCausalLM.from_config(config))
