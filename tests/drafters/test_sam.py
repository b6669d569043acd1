"""SAM-Decoding: the automaton against a search of the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from restatements import longest_repeat

from dfbench.drafters import sam
from dfbench.drafters.registry import create, parse_options
from dfbench.drafters.sam import HORIZON
from dfbench.drafters.sam_automaton import ANCHOR, LINK, SuffixAutomaton

texts = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size), min_size=1, max_size=50))


@pytest.mark.parametrize("position", ["first", "recent"])
@settings(deadline=None, max_examples=150)
@given(text=texts, prompt=st.integers(1, 50))
def test_longest_earlier_suffix_and_its_end(position: str, text: list[int], prompt: int) -> None:
    drafter = create("sam", {"position": position})
    prompt = min(prompt, len(text))
    drafter.start(text[:prompt])
    for length in range(prompt, len(text) + 1):
        match, end = longest_repeat(text[:length], position == "recent")
        draft = drafter.propose(1000)
        assert draft.match_len == match
        assert list(draft.tokens) == text[end + 1 : length][: min(59, 4 * match)] * bool(match)
        drafter.observe([])
        assert drafter.propose(1000) == draft
        drafter.observe(text[length : length + 1])


@settings(deadline=None, max_examples=150)
@given(text=texts)
def test_beyond_the_horizon_the_last_tokens_decide(text: list[int]) -> None:
    horizon, sam.HORIZON = sam.HORIZON, 3
    try:
        drafter = create("sam", {"position": "recent"})
        drafter.start(text)
        match, end = longest_repeat(text, True, horizon=3)
        assert list(drafter.propose(1000).tokens) == text[end + 1 :][: min(59, 4 * match)] * bool(match)
    finally:
        sam.HORIZON = horizon


@pytest.mark.parametrize(
    ("options", "length"),
    [
        ({}, 3 * 4),
        ({"alpha": 1.5}, 4),
        ({"max_predicts": 4}, 3),
        ({"min_match": 3}, 12),
        ({"min_match": 4}, 0),
    ],
)
def test_draft_length_follows_the_match(options: dict[str, float], length: int) -> None:
    drafter = create("sam", options)
    drafter.start([1, 2, 3, *range(10, 40), 9, 1, 2, 3])
    assert list(drafter.propose(100).tokens) == list(range(10, 10 + length))


def test_published_defaults() -> None:
    assert parse_options("sam", {}).model_dump() == {
        "max_predicts": 60,
        "alpha": 4.0,
        "position": "first",
        "min_match": 1,
    }


def test_a_long_loop_costs_no_more_than_its_horizon() -> None:
    """Links walked for a token are bounded, however long the text has been repeating."""
    automaton = SuffixAutomaton()
    automaton.read([7] * 3000, HORIZON)
    assert (automaton.match, automaton.end) == (2999, 2998)
    state, walked = automaton._meta[ANCHOR], 0
    while state > 0:
        state, walked = automaton._states[state, LINK], walked + 1
    assert walked == HORIZON


def test_the_automaton_grows_with_the_text() -> None:
    """Read at once or in pieces far beyond its first room, it knows the same."""
    text = [(i * i) % 91 for i in range(2000)]
    whole, pieces = SuffixAutomaton(len(text)), SuffixAutomaton(1)
    whole.read(text, HORIZON)
    for i in range(0, len(text), 3):
        pieces.read(text[i : i + 3], HORIZON)
    assert (whole.match, whole.end) == (pieces.match, pieces.end)
    assert pieces.match > 100
    assert pieces.nbytes() > 100 * len(text)
