"""The laws of the drafter interface, held over every registered drafter and each of its settings."""

from __future__ import annotations

import json
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dfbench.drafters import registry
from dfbench.drafters.base import Draft, Drafter, DrafterContext, Verified
from dfbench.errors import OptionError, UsageError
from dfbench.workers.loop import decode
from dfbench.workers.target import ScriptedTarget

VOCAB = 12
CONTEXT = DrafterContext(vocab_size=VOCAB, eos_ids=frozenset({2}))
BUDGETS = (0, 1, 2, 7, 100)

TIGHT: dict[str, list[dict[str, Any]]] = {
    "pld": [{"max_ngram": 4, "min_ngram": 2, "draft_len": 1}, {"max_ngram": 3, "draft_len": 2, "full": True}],
    "cacheback": [
        {"draft": "tree", "leaders": 3, "followers": 2, "queries": 12, "reserve": 4},
        {"draft": "tree", "leader": 3, "follower": 1, "leaders": 4, "merge": True, "count_refed": False},
        {"leader": 2, "follower": 4, "leaders": 2, "followers": 1},
    ],
    "sam": [{"position": "recent", "max_predicts": 3}],
    "recycling": [{"nodes": 9, "skip_unknown": True}],
}
"""Settings that reach capacities and corners, beside defaults, presets and every alternative of every choice."""


def variants(name: str) -> Iterator[dict[str, Any]]:
    """Defaults, presets, each other value of every switch and choice, and the tight settings."""
    cls = registry.find(name)
    yield {}
    yield from ({"preset": preset} for preset in cls.presets)
    for key, info in cls.Options.model_fields.items():
        choices = (True, False) if info.annotation is bool else typing.get_args(info.annotation)
        for value in choices:
            if isinstance(value, bool | str) and value != info.default:
                yield {key: value}
    yield from TIGHT.get(name, [])


def usable() -> list[Any]:
    """Every variant that can be had alone; a choice may be refused without the file that it needs."""
    found = []
    for name in registry.names():
        for given_options in variants(name):
            try:
                registry.create(name, given_options, CONTEXT)
            except OptionError:
                if "preset" in given_options or not given_options or given_options in TIGHT.get(name, []):
                    raise
                continue
            found.append(pytest.param(name, given_options, id=f"{name}-{json.dumps(given_options)}"))
    return found


every_variant = pytest.mark.parametrize(("name", "options"), usable())
every_drafter = pytest.mark.parametrize("name", registry.names())
every_real_drafter = pytest.mark.parametrize("name", [name for name in registry.names() if name != "ar"])

tokens = st.integers(0, VOCAB - 1) | st.integers(3, 5)
"""Ids, some far more often than others, so that texts repeat."""
prompts = st.lists(tokens, min_size=1, max_size=40)
chunks = st.lists(st.lists(tokens, min_size=1, max_size=6), min_size=1, max_size=12)


def make(name: str, options: dict[str, Any]) -> Drafter:
    return registry.create(name, options, CONTEXT)


def verified(drafter: Drafter, root: int, nodes: Sequence[int]) -> Verified | None:
    """What the target could have said of these nodes: any ids will do, as long as they are the same each time."""
    if not drafter.top_k:
        return None
    ids = np.arange((len(nodes) + 1) * drafter.top_k).reshape(-1, drafter.top_k)
    return Verified((root, *nodes), (ids * 7 + root + len(nodes)) % VOCAB)


def show(draft: Draft) -> tuple[list[int], list[int] | None]:
    return list(draft.tokens), None if draft.parents is None else list(draft.parents)


def run(drafter: Drafter, prompt: Sequence[int], steps: Sequence[Sequence[int]]) -> list[Any]:
    """A whole request that emits these tokens, whatever is drafted; every draft on the way."""
    drafter.start(prompt)
    drafter.observe(steps[0][:1])
    root = steps[0][0]
    drafts = []
    for emitted in steps[1:]:
        draft = drafter.propose(16)
        drafts.append(show(draft))
        drafter.observe(emitted, verified(drafter, root, draft.tokens))
        root = emitted[-1]
    return [*drafts, *(show(drafter.propose(budget)) for budget in BUDGETS)]


@every_variant
@settings(deadline=None, max_examples=15)
@given(prompt=prompts, steps=chunks)
def test_drafts_are_legal(name: str, options: dict[str, Any], prompt: list[int], steps: list[list[int]]) -> None:
    """Budget respected (0 too), ids valid, parents before children; an empty draft is fine."""
    drafter = make(name, options)
    drafter.start(prompt)
    root = prompt[-1]
    for emitted in [steps[0][:1], *steps[1:]]:
        drafter.observe(emitted, verified(drafter, root, ()))
        root = emitted[-1]
        for budget in BUDGETS:
            drafter.propose(budget).check(budget, VOCAB)


@every_variant
@settings(deadline=None, max_examples=15)
@given(prompt=prompts, steps=chunks, later=prompts)
def test_propose_changes_nothing(
    name: str, options: dict[str, Any], prompt: list[int], steps: list[list[int]], later: list[int]
) -> None:
    """Asked often, with any budget, or never: what comes after is the same, in the next request too."""
    asked, silent = make(name, options), make(name, options)
    for text in (prompt, later):
        for drafter in (asked, silent):
            drafter.start(text)
            drafter.observe(steps[0][:1])
        root = steps[0][0]
        for emitted in steps[1:]:
            first = [show(asked.propose(budget)) for budget in BUDGETS]
            assert [show(asked.propose(budget)) for budget in BUDGETS] == first
            for drafter in (asked, silent):
                drafter.observe(emitted, verified(drafter, root, emitted))
            root = emitted[-1]
    for budget in BUDGETS:
        assert show(asked.propose(budget)) == show(silent.propose(budget))


@every_variant
@settings(deadline=None, max_examples=15)
@given(prompt=prompts, steps=chunks)
def test_same_history_same_drafts(
    name: str, options: dict[str, Any], prompt: list[int], steps: list[list[int]]
) -> None:
    assert run(make(name, options), prompt, steps) == run(make(name, options), prompt, steps)


@every_variant
@settings(deadline=None, max_examples=15)
@given(first=prompts, second=prompts, steps=chunks)
def test_reset_leaves_nothing_behind(
    name: str, options: dict[str, Any], first: list[int], second: list[int], steps: list[list[int]]
) -> None:
    """Two prompts in either order give the same drafts when each starts cold."""
    results = []
    for order in ((first, second), (second, first)):
        drafter = make(name, options)
        drafts = {}
        for number, prompt in enumerate(order):
            drafter.reset()
            drafts[number if order[0] is first else 1 - number] = run(drafter, prompt, steps)
        results.append(drafts)
    assert results[0] == results[1]


def markov(table: Sequence[int], order: int) -> Callable[[Sequence[int]], int]:
    """A target that looks at its last tokens alone: it soon repeats itself, so drafters find something."""

    def rule(prefix: Sequence[int]) -> int:
        key = 0
        for token in prefix[-order:]:
            key = key * 31 + token + 1
        return table[key % len(table)]

    return rule


@every_variant
@settings(deadline=None, max_examples=20)
@given(
    prompt=prompts,
    table=st.lists(tokens, min_size=1, max_size=24),
    order=st.integers(1, 3),
    cap=st.integers(1, 50),
    eos=st.sets(tokens, max_size=2),
)
def test_output_is_that_of_plain_decoding(
    name: str, options: dict[str, Any], prompt: list[int], table: list[int], order: int, cap: int, eos: set[int]
) -> None:
    """Any target, prompt of one token, end of text anywhere, any cap."""

    def output(drafter: Drafter) -> tuple[list[int], str]:
        target = ScriptedTarget(markov(table, order), vocab_size=VOCAB)
        target.top_k = drafter.top_k
        trace = decode(target, drafter, prompt, max_new_tokens=cap, eos_ids=eos)
        assert sum(step.emitted for step in trace.steps) == len(trace.output) - 1
        return trace.output, trace.finish_reason

    assert output(make(name, options)) == output(make("ar", {}))


@every_real_drafter
def test_drafts_are_accepted_where_text_repeats(name: str) -> None:
    """The law above would hold for a drafter that never drafts; a text that cycles must be seen to help."""
    drafter = make(name, {})
    target = ScriptedTarget(lambda prefix: 3 + (prefix[-1] - 2) % 7, vocab_size=VOCAB)
    target.top_k = drafter.top_k
    trace = decode(target, drafter, [3 + i % 7 for i in range(30)], max_new_tokens=60)
    assert sum(step.accepted for step in trace.steps) > 20


@every_drafter
def test_options_are_typed_described_and_survive_json(name: str) -> None:
    cls = registry.find(name)
    assert cls.name == name
    assert cls.summary.strip().endswith(".")
    for given_options in variants(name):
        try:
            options = registry.parse_options(name, given_options)
        except OptionError:
            continue
        assert registry.parse_options(name, json.loads(options.model_dump_json())) == options
    for key, info in cls.Options.model_fields.items():
        assert info.annotation is not None, key
        assert info.description, f"{name}.{key} has no description"
        assert not info.is_required(), f"{name}.{key} has no default"


@every_drafter
def test_presets_name_their_own_options(name: str) -> None:
    cls = registry.find(name)
    for preset, values in cls.presets.items():
        options = registry.parse_options(name, {"preset": preset}).model_dump()
        assert {key: options[key] for key in values} == values


@every_drafter
def test_an_unknown_option_names_the_nearest(name: str) -> None:
    for key in registry.find(name).Options.model_fields:
        with pytest.raises(OptionError, match=f"unknown option '{key}x': did you mean"):
            registry.parse_options(name, {f"{key}x": 1})
    with pytest.raises(OptionError, match=f"drafter '{name}': unknown option 'qqqq'"):
        registry.parse_options(name, {"qqqq": 1})


@every_drafter
def test_an_unknown_preset_is_refused(name: str) -> None:
    with pytest.raises(OptionError, match="unknown preset 'qqqq'"):
        registry.parse_options(name, {"preset": "qqqq"})


def test_an_unknown_drafter_names_the_nearest() -> None:
    with pytest.raises(OptionError, match="did you mean 'cacheback'"):
        registry.create("cachebak", {})


@every_drafter
def test_bad_values_are_refused_or_harmless(name: str) -> None:
    """Wrong types are refused; zero and negative numbers are refused, or they mean something legal."""
    for key, info in registry.find(name).Options.model_fields.items():
        with pytest.raises(OptionError, match=key):
            registry.parse_options(name, {key: {"no": "such value"}})
        if info.annotation not in (int, float):
            continue
        for value in (0, -1, -(2**40), float("nan"), float("inf")):
            try:
                drafter = make(name, {key: value})
            except OptionError as error:
                assert key in str(error)
                continue
            drafter.start([3, 4, 3, 4, 3])
            drafter.observe([4], verified(drafter, 3, ()))
            drafter.propose(20).check(20, VOCAB)


@every_drafter
@pytest.mark.parametrize("prompt", [[VOCAB], [3, -1, 3, -1, 3], [3, VOCAB + 5, 3], []])
def test_ids_outside_the_vocabulary_are_never_drafted(name: str, prompt: list[int]) -> None:
    drafter = make(name, {})
    try:
        drafter.start(prompt)
    except UsageError as error:
        assert str(error).count("\n") == 0
        return
    drafter.observe([3])
    drafter.propose(50).check(50, VOCAB)


@every_drafter
def test_a_prompt_of_one_token_is_legal(name: str) -> None:
    drafter = make(name, {})
    drafter.start([5])
    drafter.observe([5])
    drafter.propose(50).check(50, VOCAB)
