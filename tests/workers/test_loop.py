"""The decode loop on scripted targets: whatever a drafter guesses, the output is plain decoding's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dfbench.drafters import registry
from dfbench.drafters.base import Draft, Drafter, DrafterContext, Options, Verified
from dfbench.errors import Cancelled, DraftError
from dfbench.workers.loop import Trace, accept, cut, decode
from dfbench.workers.records import WorkerFacts, check, job_record
from dfbench.workers.spec import ArmSpec, JobSpec, PromptSpec, ShardSpec, TargetSpec
from dfbench.workers.target import RecordedTarget, ScriptedTarget

EOS = frozenset({0, 1})
VOCAB = 6


class Guesser(Drafter):
    """Proposes random chains and trees: some right, some wrong, past the end of text and past the cap, repeated."""

    name = "guesser"
    summary = "For tests."

    def __init__(self, seed: int, rule: Any = None, tree: bool = True, width: int = 9) -> None:
        super().__init__(Options(), DrafterContext())
        self._seed, self._rule, self._tree, self._width = seed, rule, tree, width
        self._prefix: list[int] = []
        self.proposed = 0

    def reset(self) -> None:
        self._prefix = []

    def start(self, prompt: Sequence[int]) -> None:
        self._prefix = list(prompt)

    def observe(self, emitted: Sequence[int], verified: Verified | None = None) -> None:
        self._prefix.extend(emitted)

    def propose(self, budget: int) -> Draft:
        rng = random.Random(f"{self._seed}:{len(self._prefix)}")
        count = min(rng.randrange(self._width), budget)
        tokens: list[int] = []
        parents: list[int] = []
        for i in range(count):
            parent = rng.randrange(-1, i) if self._tree and rng.random() < 0.4 else i - 1
            path: list[int] = []
            node = parent
            while node >= 0:
                path.append(tokens[node])
                node = parents[node]
            right = self._rule(self._prefix + path[::-1]) if self._rule and rng.random() < 0.8 else None
            tokens.append(rng.randrange(VOCAB) if right is None else right)
            parents.append(parent)
        self.proposed += count
        return Draft(tokens, parents if self._tree else None)


def text(seed: int, period: int, ends: float) -> Any:
    """A random target with loops; an end of text may come anywhere."""

    def rule(prefix: Sequence[int]) -> int:
        rng = random.Random(f"{seed}:{len(prefix) % period if len(prefix) > 9 else len(prefix)}:{prefix[-1]}")
        return rng.randrange(2) if rng.random() < ends else rng.randrange(2, VOCAB)

    return rule


def run(drafter: Drafter, rule: Any, cap: int, eos: frozenset[int] = EOS, cost: Any = None) -> Trace:
    target = ScriptedTarget(rule, vocab_size=VOCAB, eos_ids=eos, cost=cost or (lambda queries: 1000 + queries))
    return decode(target, drafter, [2, 3, 4], max_new_tokens=cap, eos_ids=eos)


def plain(rule: Any, cap: int, eos: frozenset[int] = EOS) -> list[int]:
    """Greedy decoding, restated."""
    prefix = [2, 3, 4]
    while len(prefix) < 3 + cap:
        prefix.append(rule(prefix))
        if prefix[-1] in eos:
            break
    return prefix[3:]


def sound(trace: Trace, cap: int, drafter: str = "pld") -> None:
    """The rows of this job pass every identity."""
    prompt = PromptSpec("w", "p", "test", "text", (2, 3, 4), "sha")
    facts = WorkerFacts("worker", "cpu", "model", None, "none", "scripted", "stack")
    shard = ShardSpec("run", "shard", "w", (prompt,), (), (), cap)
    job, target = JobSpec("job", "w", "p", drafter), TargetSpec(kind="scripted")
    check(job_record(shard, job, ArmSpec(drafter, drafter), prompt, target, facts, trace, began_at=1), EOS)


@settings(deadline=None, max_examples=300)
@given(
    seed=st.integers(0, 10**6),
    period=st.integers(1, 7),
    ends=st.sampled_from([0.0, 0.02, 0.1, 0.5, 1.0]),
    cap=st.integers(1, 40),
    tree=st.booleans(),
    knows=st.booleans(),
)
def test_any_drafter_gives_the_output_of_plain_decoding(
    seed: int, period: int, ends: float, cap: int, tree: bool, knows: bool
) -> None:
    rule = text(seed, period, ends)
    expected = plain(rule, cap)
    trace = run(Guesser(seed, rule if knows else None, tree), rule, cap)
    assert trace.output == expected
    assert trace.finish_reason == ("eos" if expected[-1] in EOS else "length")
    assert len(trace.output) <= cap
    assert sum(step.emitted for step in trace.steps) == len(expected) - 1
    assert all(step.depth <= max(cap - step.position - 1, 0) for step in trace.steps)
    sound(trace, cap)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 10**6), st.integers(1, 7), st.sampled_from([0.0, 0.1]), st.integers(1, 40))
def test_every_built_in_chain_drafter_is_lossless(seed: int, period: int, ends: float, cap: int) -> None:
    rule = text(seed, period, ends)
    for name in ("ar", "pld", "cacheback"):
        trace = run(registry.create(name, {}, DrafterContext(vocab_size=VOCAB)), rule, cap)
        assert trace.output == plain(rule, cap)
        sound(trace, cap, name)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.integers(1, 40))
def test_plain_decoding_emits_one_token_a_pass(seed: int, cap: int) -> None:
    trace = run(registry.create("ar", {}), text(seed, 3, 0.0), cap)
    assert [step.emitted for step in trace.steps] == [1] * (cap - 1)
    assert all(step.drafted == 0 and step.queries == 1 for step in trace.steps)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(2, 40), st.booleans())
def test_a_recording_replays_what_a_live_run_did(seed: int, cap: int, tree: bool) -> None:
    rule = text(seed, 4, 0.05)
    live = run(Guesser(seed, rule, tree), rule, cap)
    recorded = RecordedTarget(VOCAB, EOS)
    recorded.load(plain(rule, cap))
    replay = decode(recorded, Guesser(seed, rule, tree), [2, 3, 4], max_new_tokens=cap, eos_ids=EOS)
    assert replay.output == live.output
    counts = [(s.position, s.drafted, s.depth, s.accepted, s.emitted) for s in live.steps]
    assert [(s.position, s.drafted, s.depth, s.accepted, s.emitted) for s in replay.steps] == counts


def test_one_token_is_prefills_alone() -> None:
    drafter = Guesser(0)
    trace = run(drafter, text(0, 3, 0.0), 1)
    assert len(trace.output) == 1
    assert trace.steps == []
    assert drafter.proposed == 0
    assert trace.finish_reason == "length"


def test_an_end_of_text_from_prefill_ends_the_job() -> None:
    trace = run(Guesser(0), lambda prefix: 1, 9)
    assert trace.output == [1]
    assert trace.finish_reason == "eos"


def test_an_end_of_text_that_is_ignored_is_a_token_like_others() -> None:
    trace = run(Guesser(1, lambda prefix: 1, tree=False), lambda prefix: 1, 9, frozenset())
    assert trace.output == [1] * 9
    assert trace.finish_reason == "length"


def test_the_drafters_time_and_the_targets_are_told_apart() -> None:
    """A scripted clock: the drafter costs 7 a proposal and 5 a start, a pass 100, prefill 30."""
    clock: list[ScriptedTarget] = []

    class Slow(Guesser):
        def propose(self, budget: int) -> Draft:
            clock[0].advance(7)
            return Draft([5, 5])

        def start(self, prompt: Sequence[int]) -> None:
            clock[0].advance(5)

    target = ScriptedTarget(lambda prefix: 5, cost=lambda queries: 30 if queries == 1 or not clock[0]._emitted else 100)
    clock.append(target)
    trace = decode(target, Slow(0), [2], max_new_tokens=7)
    assert (trace.start_ns, trace.prefill_ns) == (5, 30)
    assert [(s.draft_ns, s.forward_ns, s.accept_ns, s.step_ns) for s in trace.steps] == [(7, 100, 0, 107)] * 2
    assert trace.decode_ns == 214
    assert trace.wall_ns == 249


def test_a_drafter_that_exceeds_its_budget_is_refused() -> None:
    class Greedy(Guesser):
        def propose(self, budget: int) -> Draft:
            return Draft([2] * (budget + 1))

    target = ScriptedTarget(text(0, 3, 0.0))
    target.max_nodes = 4
    with pytest.raises(DraftError, match="proposed 5 nodes on a budget of 4"):
        decode(target, Greedy(0), [2], max_new_tokens=9)


def test_a_job_that_is_told_to_stop_stops() -> None:
    with pytest.raises(Cancelled):
        decode(ScriptedTarget(text(0, 3, 0.0)), Guesser(0), [2], max_new_tokens=9, trace=Trace(stop=True))


def test_duplicate_siblings_are_legal_and_the_longest_path_wins() -> None:
    # Two children of the root hold the right token; the second of them goes on.
    draft = Draft([7, 7, 8, 9], [-1, -1, 1, 2])
    path, emitted = accept(draft, [7, 8, 8, 9, 10])
    assert path == [1, 2, 3]
    assert emitted == [7, 8, 9, 10]


@pytest.mark.parametrize(("room", "eos", "left"), [(9, (), 5), (3, (), 3), (9, (4,), 2), (1, (4,), 1), (9, (3,), 1)])
def test_what_may_still_be_emitted(room: int, eos: tuple[int, ...], left: int) -> None:
    assert cut([3, 4, 5, 6, 7], room, eos) == [3, 4, 5, 6, 7][:left]
