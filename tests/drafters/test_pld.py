"""Prompt lookup: the incremental index against a scan of the whole text, and its presets' rules one by one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from restatements import prompt_lookup

from dfbench.drafters.base import Drafter, DrafterContext
from dfbench.drafters.ngram_index import NgramIndex
from dfbench.drafters.registry import create, parse_options
from dfbench.errors import OptionError

EOS = 0
CONTEXT = DrafterContext(vocab_size=100, eos_ids=frozenset({EOS}))

option_sets = st.fixed_dictionaries(
    {
        "max_ngram": st.integers(2, 5),
        "min_ngram": st.integers(1, 2),
        "draft_len": st.integers(1, 8),
        "match": st.sampled_from(["recent", "earliest"]),
        "full": st.booleans(),
        "stop_at_eos": st.booleans(),
    }
)
texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def fed(options: dict[str, Any], prompt: list[int], *emitted: list[int]) -> Drafter:
    drafter = create("pld", options, CONTEXT)
    drafter.start(prompt)
    for tokens in emitted:
        drafter.observe(tokens)
    return drafter


@settings(deadline=None, max_examples=300)
@given(options=option_sets, prompt=texts, chunks=st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=8))
def test_equals_a_scan_of_the_whole_text(options: dict[str, Any], prompt: list[int], chunks: list[list[int]]) -> None:
    drafter = create("pld", options, CONTEXT)
    drafter.start(prompt)
    seq = list(prompt)
    for chunk in [[], *chunks]:
        drafter.observe(chunk)
        seq += chunk
        assert list(drafter.propose(1000).tokens) == prompt_lookup(seq, options, CONTEXT.eos_ids)


@given(options=option_sets, prompt=texts, cut=st.integers(0, 60))
def test_indexed_in_bulk_or_token_by_token(options: dict[str, Any], prompt: list[int], cut: int) -> None:
    cut = min(max(cut, 1), len(prompt))
    assert fed(options, prompt).propose(99) == fed(options, prompt[:cut], prompt[cut:]).propose(99)


@given(prompt=texts, chunks=st.lists(texts, max_size=5))
def test_the_index_grows_with_the_text(prompt: list[int], chunks: list[list[int]]) -> None:
    """A room of one token: every chunk makes it move all that it knows."""
    index = NgramIndex([3, 2, 1], [1, 1, 1], True, 1)
    seq: list[int] = []
    for chunk in [prompt, *chunks]:
        index.read(chunk)
        seq += chunk
        found = prompt_lookup(seq, {"draft_len": 1000})
        assert seq[index.end :] * bool(index.n) == found
    assert index.nbytes() < 100 * len(seq) + 1000


def test_published_defaults() -> None:
    recent = {"max_ngram": 3, "min_ngram": 1, "draft_len": 10, "match": "recent", "full": False, "stop_at_eos": False}
    assert parse_options("pld", {}).model_dump() == recent
    assert parse_options("pld", {"preset": "recent"}).model_dump() == recent
    hf = {"max_ngram": 2, "match": "earliest", "stop_at_eos": True}
    assert parse_options("pld", {"preset": "hf"}).model_dump() == recent | hf
    original = {"match": "earliest", "full": True}
    assert parse_options("pld", {"preset": "original"}).model_dump() == recent | original
    vllm = {"max_ngram": 5, "min_ngram": 5, "match": "earliest"}
    assert parse_options("pld", {"preset": "vllm"}).model_dump() == recent | vllm


def test_the_longest_match_wins_over_the_tie_rule() -> None:
    draft = fed({"match": "recent", "draft_len": 2}, [7, 8, 9, 1, 8, 5, 7, 8]).propose(9)
    assert (list(draft.tokens), draft.match_len) == ([9, 1], 2)


@pytest.mark.parametrize(("match", "wanted"), [("recent", [2, 4]), ("earliest", [1, 4])])
def test_which_occurrence_is_copied(match: str, wanted: list[int]) -> None:
    assert list(fed({"match": match, "max_ngram": 1, "draft_len": 2}, [4, 1, 4, 2, 4]).propose(9).tokens) == wanted


def test_hf_cuts_before_the_end_of_text_and_tries_no_other_match() -> None:
    assert list(fed({"preset": "hf"}, [5, 6, 7, EOS, 8, 5, 6]).propose(9).tokens) == [7]
    # A one-token match with text after it exists; the two-token match starts with the end of text.
    assert list(fed({"preset": "hf"}, [6, 9, 5, 6, EOS, 5, 6]).propose(9).tokens) == []


def test_original_needs_a_full_continuation() -> None:
    text = [1, 2, *range(10, 20), 1, 2]
    assert list(fed({"preset": "original"}, text).propose(99).tokens) == list(range(10, 20))
    assert list(fed({"preset": "original"}, [1, 2, *range(10, 17), 1, 2]).propose(99).tokens) == []
    assert list(fed({"preset": "hf"}, [1, 2, *range(10, 17), 1, 2]).propose(99).tokens) == [*range(10, 17), 1, 2]


def test_original_occurrence_ends_before_the_suffix_begins() -> None:
    options = {"max_ngram": 2, "min_ngram": 2, "draft_len": 1, "full": True, "match": "earliest"}
    assert list(fed(options, [3, 3, 3]).propose(9).tokens) == []
    assert list(fed(options, [3, 3, 3, 3]).propose(9).tokens) == []
    assert list(fed(options, [3, 3, 3, 3, 3]).propose(9).tokens) == [3]


def test_vllm_matches_five_tokens_or_nothing() -> None:
    assert list(fed({"preset": "vllm"}, [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5]).propose(3).tokens) == [6, 7, 1]
    assert list(fed({"preset": "vllm"}, [1, 2, 3, 4, 5, 6, 7, 9, 2, 3, 4, 5]).propose(3).tokens) == []


def test_lengths_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(OptionError, match="min_ngram 4 is above max_ngram 3"):
        parse_options("pld", {"min_ngram": 4})
