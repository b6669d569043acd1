"""The compiled engine gives the cached engine's tokens, whatever the widths, the shape of the draft and the buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from dfbench.drafters.base import Draft, Drafter, DrafterContext, Options
from dfbench.drafters.registry import create
from dfbench.errors import DraftError, EngineError, ModelError, UsageError
from dfbench.workers import calibrate, compiled, lean, models, provenance
from dfbench.workers.compiled import CompiledTarget
from dfbench.workers.engine import TorchTarget
from dfbench.workers.evidence import TopTwo
from dfbench.workers.graphs import Runner
from dfbench.workers.loop import Trace, decode
from dfbench.workers.score import score
from dfbench.workers.spec import TargetSpec
from dfbench.workers.witness import control, plain

TinyModel = Callable[..., PreTrainedModel]

VOCAB = 29  # of the tiny models
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)


class Planned(Drafter):
    """Proposes the given trees in turn; a token of -1 stands for the right one at that depth."""

    name = "planned"

    def __init__(self, answer: Sequence[int], trees: Sequence[Draft]) -> None:
        super().__init__(Options(), DrafterContext())
        self.answer, self.trees, self.step, self.done = list(answer), list(trees), 0, 0

    def propose(self, budget: int) -> Draft:
        tree = self.trees[self.step % len(self.trees)]
        nodes = min(len(tree.tokens), budget)
        parents = None if tree.parents is None else tree.parents[:nodes]
        depths = Draft(tree.tokens[:nodes], parents).depths()
        tokens = [self._right(depth) if token < 0 else token for token, depth in zip(tree.tokens, depths, strict=False)]
        return Draft(tokens, parents)

    def _right(self, depth: int) -> int:
        at = self.done + depth - 1
        return self.answer[at] if at < len(self.answer) else 0

    def observe(self, emitted: Sequence[int], verified: object = None) -> None:
        self.done += len(emitted)
        self.step += 1

    def start(self, prompt: Sequence[int]) -> None:
        self.done = self.step = 0

    def reset(self) -> None:
        """Nothing is kept."""


@st.composite
def trees(draw: st.DrawFn) -> Draft:
    """A chain, or a tree with duplicate siblings; about half of the tokens are right."""
    nodes = draw(st.integers(0, 20))
    tokens = draw(st.lists(st.one_of(st.just(-1), st.integers(0, VOCAB - 1)), min_size=nodes, max_size=nodes))
    if draw(st.booleans()):
        return Draft(tokens)
    return Draft(tokens, [draw(st.integers(max(-1, node - 4), node - 1)) for node in range(nodes)])


def spec(**settings: Any) -> TargetSpec:
    return TargetSpec(**{"engine": "compiled", "dtype": "float64", **settings})


def run(target: TorchTarget, drafter: Drafter, cap: int = 20, prompt: Sequence[int] = PROMPT) -> Trace:
    target.top_k = drafter.top_k
    return decode(target, drafter, prompt, max_new_tokens=cap)


@cache
def _greedy(model: PreTrainedModel) -> list[int]:
    return run(TorchTarget(model, spec(engine="cached")), create("ar", {}), 60).output


def greedy(target: TorchTarget) -> list[int]:
    """Sixty tokens of the model's own, worked out once."""
    return _greedy(target.model)


def same(one: Trace, other: Trace) -> None:
    """Tokens, steps and evidence; widths may differ by padding alone."""
    assert one.output == other.output
    assert [step[:2] + step[3:7] for step in one.steps] == [step[:2] + step[3:7] for step in other.steps]
    assert one.evidence is not None and other.evidence is not None
    for mine, theirs in zip(one.evidence, other.evidence, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module", params=["llama-sdpa-lean", "llama-eager", "qwen3-sdpa", "qwen3-eager-lean"])
def pair(request: pytest.FixtureRequest, tiny_model: TinyModel) -> Callable[..., tuple[TorchTarget, CompiledTarget]]:
    """The cached and the compiled engine on one model, under the same settings."""
    family, attention, *short = request.param.split("-")
    model = tiny_model(family, attention)

    def make(buckets: Sequence[int] = (), **settings: Any) -> tuple[TorchTarget, CompiledTarget]:
        options = {"lean": bool(short)}
        fast = CompiledTarget(model, spec(attention=attention, buckets=tuple(buckets), options=options, **settings))
        assert fast.lean == bool(short)
        slow = TorchTarget(
            model, spec(attention=attention, engine="cached", max_queries=fast.spec.max_queries, **settings)
        )
        return slow, fast

    return make


@given(
    drafts=st.lists(trees(), min_size=1, max_size=6),
    widths=st.sets(st.integers(1, 24), min_size=1, max_size=4),
    cap=st.integers(1, 24),
    refeed=st.booleans(),
)
@settings(deadline=None, max_examples=10)
def test_any_drafts_in_any_widths(pair: Any, drafts: list[Draft], widths: set[int], cap: int, refeed: bool) -> None:
    slow, fast = pair(sorted(widths), kv_repair="refeed" if refeed else "compact")
    answer = greedy(slow)
    slow_trace, fast_trace = (run(target, Planned(answer, drafts), cap) for target in (slow, fast))
    same(fast_trace, slow_trace)
    for step in fast_trace.steps:
        assert step.queries + step.padding == min(width for width in widths if width >= step.queries)


def test_every_bucket_and_both_its_edges(pair: Any) -> None:
    slow, fast = pair()
    assert fast.spec.buckets == compiled.BUCKETS
    answer = greedy(slow)
    sizes = sorted({max(0, width - 1 + edge) for width in compiled.BUCKETS for edge in (-1, 0, 1)} - {96})
    drafts = [Draft([-1, *[7] * (size - 1)], [-1, *[-1] * (size - 1)]) if size else Draft(()) for size in sizes]
    seen = run(fast, Planned(answer, drafts), 50)
    same(seen, run(slow, Planned(answer, drafts), 50))
    assert {step.queries + step.padding for step in seen.steps} == set(compiled.BUCKETS)
    assert {step.queries for step in seen.steps} >= {1, 2, 3, 4, 5, 95, 96}


def test_what_a_pass_leaves_behind_is_never_seen(pair: Any) -> None:
    """Rejected nodes and padding stay in the buffers as garbage: even poison there must change nothing."""
    slow, fast = pair([8])
    first = fast.prefill(PROMPT)
    verdict = fast.verify(Draft((1, 2, 3)))
    fast.commit((), verdict.argmax[:1])
    with torch.inference_mode():
        fast._kept.keys[:, :, fast._past :] = 1e6
        fast._kept.values[:, :, fast._past :] = 1e6
    again = [first, verdict.argmax[0]]
    for _ in range(10):
        again.append(fast.verify(Draft(())).argmax[0])
        fast.commit((), again[-1:])
    assert again == run(slow, create("ar", {}), 12).output


def test_a_second_request_is_not_told_of_the_first(pair: Any) -> None:
    slow, fast = pair([4, 16])
    run(fast, create("ar", {}), 40, prompt=PROMPT[::-1] * 5)
    same(run(fast, create("ar", {})), run(slow, create("ar", {})))


def test_buffers_grow_for_a_request_and_in_the_middle_of_one(tiny_model: TinyModel, monkeypatch: Any) -> None:
    monkeypatch.setattr(compiled, "FIRST_REQUEST", 8)
    monkeypatch.setattr(compiled, "FIRST_WINDOW", 8)
    model = tiny_model("llama")
    slow = TorchTarget(model, spec(engine="cached"))
    fast = CompiledTarget(model, spec(buckets=(1, 4)))
    before = fast.engine_facts()["static_tokens"]
    expected = run(slow, create("ar", {}), 120).output
    output = [fast.prefill(PROMPT)]  # Nobody told it how much is to come.
    while len(output) < 120:
        output += fast.verify(Draft(())).argmax
        fast.commit((), output[-1:])
    assert output == expected
    assert fast.engine_facts()["static_tokens"] > before
    assert (
        run(fast, create("ar", {}), 20, prompt=PROMPT * 20).output
        == run(slow, create("ar", {}), 20, PROMPT * 20).output
    )


def test_a_reserved_request_grows_nothing_while_it_runs(tiny_model: TinyModel, monkeypatch: Any) -> None:
    fast = CompiledTarget(tiny_model("llama"), spec())
    fast.reserve(200)
    monkeypatch.setattr(CompiledTarget, "_grow", None)
    run(fast, create("ar", {}), 190)


def test_the_context_bounds_draft_and_output(tiny_model: TinyModel) -> None:
    it = CompiledTarget(tiny_model("llama"), spec(options={"context": 20}))
    it.prefill([1, 2] * 8)
    assert it.max_nodes == 20 - 17
    verdict = it.verify(Draft((1, 2, 3)))
    assert (verdict.queries, verdict.padding) == (4, 0)
    with pytest.raises(DraftError, match="budget of 3"):
        it.verify(Draft((1,) * 4))
    with pytest.raises(EngineError, match="context of 20"):
        it.prefill([1] * 20)


def test_the_widest_bucket_bounds_the_draft(tiny_model: TinyModel) -> None:
    it = CompiledTarget(tiny_model("llama"), spec(buckets=(1, 5)))
    it.prefill(PROMPT)
    assert (it.max_nodes, it.spec.max_queries) == (4, 5)
    assert compiled.buckets(spec(max_queries=10)) == (1, 2, 4, 8, 10)
    assert compiled.buckets(spec(max_queries=1)) == (1,)
    assert compiled.buckets(spec()) == compiled.BUCKETS
    with pytest.raises(UsageError, match="1 or more"):
        compiled.buckets(spec(buckets=(0, 4)))


def test_what_only_this_engine_heeds_is_refused_elsewhere() -> None:
    models.check_options({"lean": False, "compile": True, "context": 100}, "compiled")
    models.check_options({"compile": "eager"}, "compiled")
    with pytest.raises(ModelError, match=r"'compile' is 'nosuch': write .* the name of a backend, as .*inductor"):
        models.check_options({"compile": "nosuch"}, "compiled")
    with pytest.raises(ModelError, match="'lean' belongs to engine compiled"):
        models.check_options({"lean": False}, "cached")
    with pytest.raises(ModelError, match="'context' is 'long'"):
        models.check_options({"context": "long"}, "compiled")


def test_an_attention_without_masks_is_refused(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    held = model.config._attn_implementation
    model.config._attn_implementation = "flash_attention_2"
    try:
        with pytest.raises(EngineError, match="takes no mask"):
            CompiledTarget(model, spec(attention="flash_attention_2"))
    finally:
        model.config._attn_implementation = held


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_short_forward_serves_each_family_with_biases(family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    biases = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.5,
        tie_word_embeddings=True,
        pad_token_id=None,
        sliding_window=None,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
        **biases,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                weight.uniform_(-1, 1)
    slow, fast = TorchTarget(model, spec(engine="cached")), CompiledTarget(model, spec(buckets=(1, 6)))
    assert fast.lean
    answer = run(slow, create("ar", {}), 30).output
    drafts = [Draft((-1, 3, -1, -1, 2), (-1, -1, 0, 2, 3)), Draft((-1, -1, 4))]
    same(run(fast, Planned(answer, drafts)), run(slow, Planned(answer, drafts)))
    assert fast.engine_facts()["forward"] == "lean"


def test_other_models_run_their_own_forward(tiny_model: TinyModel) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "gpt_neox",
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    assert not lean.fits(model)
    slow, fast = TorchTarget(model, spec(engine="cached")), CompiledTarget(model, spec(buckets=(1, 6)))
    drafts = [Draft((-1, 3, -1, -1), (-1, -1, 0, 2))]
    answer = run(slow, create("ar", {}), 30).output
    same(run(fast, Planned(answer, drafts)), run(slow, Planned(answer, drafts)))


@pytest.mark.parametrize("logits_dtype", [None, "float32"])
def test_sixteen_bits(tiny_model: TinyModel, logits_dtype: str | None) -> None:
    """oneDNN's packed weights, where this CPU has them: logits near the model's own, and of the dtype asked for."""
    model = tiny_model("llama", "sdpa", torch.bfloat16)
    head = model.get_output_embeddings()
    try:
        it = CompiledTarget(model, spec(dtype="bfloat16", logits_dtype=logits_dtype))
        trace = run(it, create("ar", {}))
        scored = score(it, PROMPT, trace.output)
    finally:
        model.set_output_embeddings(head)
    assert trace.evidence is not None
    spread = np.abs(scored.top1_logit).max()
    assert np.abs(trace.evidence.top1_logit - scored.token_logit).max() < 0.05 * spread
    rounded = torch.tensor(trace.evidence.top1_logit).bfloat16().float().numpy()
    assert bool((rounded == trace.evidence.top1_logit).all()) == (logits_dtype is None)


def test_torch_compile_traces_the_layer_once_a_width(tiny_model: TinyModel) -> None:
    """Lone tokens and drafts in windows that reach beyond them, as shapes that are kept need."""
    torch._dynamo.reset()
    model = tiny_model("qwen3")
    slow = TorchTarget(model, spec(engine="cached"))
    fast = CompiledTarget(model, spec(buckets=(1, 4), options={"compile": "aot_eager"}))
    torch._dynamo.utils.counters.clear()
    answer = greedy(slow)
    drafts = [Draft(()), Draft((-1, 3, -1), (-1, -1, 0)), Draft((-1, -1, 4)), Draft(())]
    same(run(fast, Planned(answer, drafts), 12), run(slow, Planned(answer, drafts), 12))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "two layers, two widths, two graphs"


def test_the_guard_and_calibration_work_on_it(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    it = CompiledTarget(model, spec())
    output = run(it, create("ar", {})).output
    tokens, evidence = control(it, PROMPT, plain(20), 20)
    assert tokens == output
    np.testing.assert_allclose(score(it, PROMPT, output).top1_logit, evidence.top1_logit, rtol=1e-5)
    facts = provenance.worker_facts(it)
    assert (facts["engine"], facts["forward"], facts["buckets"]) == ("compiled", "lean", list(compiled.BUCKETS))
    assert facts["static_bytes"] == facts["static_tokens"] * facts["kv_bytes_per_token"]
    short = calibrate.Settings(queries=(1, 3), contexts=(16,), samples=2, read_samples=2, read_bytes=1 << 16)
    table = calibrate.calibrate(it, provenance.record_facts(facts, "here"), short)
    assert [(point.queries, point.samples) for point in calibrate.curve(table)] == [(1, 2), (3, 2)]
    past = it._past
    it.probe(Draft((1, 2)))
    assert it._past == past


def test_evidence_looked_at_ahead_is_the_same(pair: Any) -> None:
    """As on a device that works while the host does: all rows before anybody knows which ones count."""
    slow, fast = pair([1, 12])
    drafts = [Draft((-1, 3, -1, -1, 2), (-1, -1, 0, 2, 3)), Draft((-1, -1, 4)), Draft(())]
    expected = run(slow, Planned(greedy(slow), drafts))
    fast._top_two = TopTwo(fast.device, capacity=2, ahead=True)
    same(run(fast, Planned(greedy(slow), drafts)), expected)


def test_a_fixed_context_is_the_limit_that_plans_are_held_to(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    model = str(tmp_path)
    assert models.resolve(spec(model=model)).context_limit == 2048
    assert models.resolve(spec(model=model, options={"context": 100})).context_limit == 100
    assert models.resolve(spec(model=model, options={"context": 10**6})).context_limit == 2048


class Recorded:
    """A stand-in for a CUDA graph: the same kernels over the same buffers, its result always in the same place."""

    def __init__(self, runner: Runner, width: int, window: int) -> None:
        self.compute = lambda: Runner._compute(runner, width, window)
        self.buffers = runner._kept
        self.runner = runner
        self.logits = self.compute()

    def replay(self) -> None:
        assert self.buffers is self.runner._kept, "a graph over buffers that are gone"
        self.logits.copy_(self.compute())


def test_what_a_graph_replays_is_what_runs_eagerly(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bookkeeping of graphs, on the CPU: one a width and window, made before a request, made anew after growth."""
    made: list[tuple[int, int]] = []

    def capture(self: Runner, width: int, window: int) -> tuple[Recorded, torch.Tensor]:
        made.append((width, window))
        graph = Recorded(self, width, window)
        return graph, graph.logits

    monkeypatch.setattr(Runner, "_capture", capture)
    monkeypatch.setattr(compiled, "FIRST_REQUEST", 20)
    monkeypatch.setattr(compiled, "FIRST_WINDOW", 16)
    slow, fast = pair([1, 4, 12])
    fast._runner.replay, fast._runner.exact = True, False
    drafts = [Draft((-1, 3, -1, -1, 2), (-1, -1, 0, 2, 3)), Draft((-1, -1, 4)), Draft(()), Draft((1, 2) * 5)]
    same(run(fast, Planned(greedy(slow), drafts), 12), run(slow, Planned(greedy(slow), drafts), 12))
    assert made == [(12, 32), (4, 32), (1, 32)], "the widest first, all before the request"
    same(run(fast, Planned(greedy(slow), drafts), 60), run(slow, Planned(greedy(slow), drafts), 60))
    assert made[3:] == [(12, 128), (4, 128), (1, 128)]
    assert fast.engine_facts()["graphs"] == 3, "those over the buffers before are of no more use"
    fast.reserve(20)
    assert fast._window == 32, "a short request after a long one attends to a short window"
    output = [fast.prefill(PROMPT)]
    while len(output) < 60:  # Longer than was reserved.
        output += fast.verify(Draft(())).argmax
        fast.commit((), output[-1:])
    assert output == greedy(slow)
