"""Cacheback against a restatement of the released code, and the seed report's finding about prompt lookup."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from restatements import ReleasedCacheback, prompt_lookup

from dfbench.drafters.base import Draft, Drafter
from dfbench.drafters.frozen import build
from dfbench.drafters.registry import create, parse_options

texts = st.integers(1, 6).flatmap(lambda size: st.lists(st.integers(0, size), min_size=1, max_size=40))
requests = st.lists(
    st.tuples(texts, st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5), max_size=8)), max_size=3
)
lengths = st.fixed_dictionaries({"leader": st.integers(1, 3), "follower": st.integers(1, 4)})
capacities = st.fixed_dictionaries({"leaders": st.integers(1, 5), "followers": st.integers(1, 3)})


def fed(options: dict[str, Any], prompt: list[int], *emitted: list[int]) -> Drafter:
    drafter = create("cacheback", options)
    drafter.start(prompt)
    for tokens in emitted:
        drafter.observe(tokens)
    return drafter


@settings(deadline=None, max_examples=200)
@given(
    requests=requests,
    lengths=lengths,
    capacities=capacities,
    shape=st.fixed_dictionaries({"queries": st.integers(1, 40), "reserve": st.integers(0, 20)}),
)
def test_tree_equals_the_released_code(
    requests: list[Any], lengths: dict[str, int], capacities: dict[str, int], shape: dict[str, int]
) -> None:
    """Drafts and evictions, at capacities so small that the order of every touch matters, over carried requests."""
    drafter = create("cacheback", {"draft": "tree", **lengths, **capacities, **shape})
    released = ReleasedCacheback(**lengths, **capacities)
    for prompt, chunks in requests:
        drafter.start(prompt)
        released.request(prompt)
        seq, last = list(prompt), 0
        for chunk in [prompt[-1:], *chunks]:
            if last:
                draft = drafter.propose(1000)
                tokens, parents = released.tree(seq, last, **shape)
                assert (list(draft.tokens), list(draft.parents or [])) == (tokens, parents)
            drafter.observe(chunk)
            seq, last = seq + chunk, len(chunk)
            released.learn(seq)


@settings(deadline=None, max_examples=200)
@given(requests=requests, lengths=lengths, capacities=capacities, wanted=st.integers(1, 12))
def test_chain_equals_the_released_code(
    requests: list[Any], lengths: dict[str, int], capacities: dict[str, int], wanted: int
) -> None:
    drafter = create("cacheback", {"draft_len": wanted, **lengths, **capacities})
    released = ReleasedCacheback(**lengths, **capacities)
    for prompt, chunks in requests:
        drafter.start(prompt)
        released.request(prompt)
        seq = list(prompt)
        for i, chunk in enumerate([prompt[-1:], *chunks]):
            if i:
                assert list(drafter.propose(1000).tokens) == released.chain(seq, wanted)
            drafter.observe(chunk)
            seq = seq + chunk
            released.learn(seq)


@settings(deadline=None, max_examples=300)
@given(text=texts, wanted=st.integers(1, 8), followers=st.integers(1, 3))
def test_leader_of_one_is_prompt_lookup(text: list[int], wanted: int, followers: int) -> None:
    """With leader 1 and followers as long as the draft, the chain is prompt lookup's `recent` with n = 1:

    exactly when `wanted` tokens follow the last token's latest earlier occurrence, or it has none. Otherwise they
    always differ: prompt lookup copies the shorter end of the text, Cacheback has no follower there yet and uses an
    older occurrence, or none. From draft length 2 on, it always equals prompt lookup of full continuations.
    This needs a cold table that holds all leaders; the capacity for followers does not matter.
    """
    options = {"leader": 1, "follower": wanted, "draft_len": wanted, "followers": followers}
    draft = list(fed(options, text).propose(1000).tokens)
    lookup = {"max_ngram": 1, "draft_len": wanted, "match": "recent"}
    latest = max((i for i, token in enumerate(text[:-1]) if token == text[-1]), default=None)
    complete = latest is None or latest + wanted < len(text)
    assert (draft == prompt_lookup(text, lookup)) == complete
    if wanted >= 2:
        assert draft == prompt_lookup(text, lookup | {"full": True})


def test_a_window_is_learned_with_each_emitted_token_and_no_draft_ever() -> None:
    drafter = fed({"follower": 2, "draft_len": 2}, [1, 2, 3], [1])
    assert list(drafter.propose(9).tokens) == [2, 3]
    drafter.observe([7])  # the draft 2, 3 was rejected
    assert list(drafter.propose(9).tokens) == []
    drafter.observe([1])  # completes 1 → 7, 1
    assert list(drafter.propose(9).tokens) == [7, 1]
    drafter.observe([3])
    assert list(drafter.propose(9).tokens) == [1, 7]  # not what 3 was followed by in a draft


@pytest.mark.parametrize(("draft_len", "kept"), [(1, []), (2, [3])])
def test_a_read_keeps_a_leader(draft_len: int, kept: list[int]) -> None:
    """Four leaders fit. With drafts of two tokens leader 2 is read on the way, so 3 and 5 are evicted before it."""
    drafter = fed({"leaders": 4, "follower": 1, "draft_len": draft_len}, [1, 2, 3, 5], [1])
    assert list(drafter.propose(9).tokens) == [2, 3][:draft_len]
    for token in (9, 8, 2):
        drafter.observe([token])
    assert list(drafter.propose(9).tokens) == kept


@given(text=texts, chunk=st.lists(st.integers(0, 6), min_size=1, max_size=5), queries=st.integers(2, 60))
def test_merging_folds_branches(text: list[int], chunk: list[int], queries: int) -> None:
    """No two children of a node carry one token, and no first-level branch is lost by it."""
    options = {"draft": "tree", "queries": queries, "reserve": 4, "follower": 2}
    plain, merged = (fed({**options, "merge": merge}, text, chunk).propose(1000) for merge in (False, True))
    edges = list(zip(merged.parents or [], merged.tokens, strict=True))
    assert len(set(edges)) == len(edges) <= queries
    assert first_level(plain) <= first_level(merged)


def first_level(draft: Draft) -> set[tuple[int, int]]:
    """The pairs of tokens at depths one and two."""
    assert draft.parents is not None or not draft.tokens
    parents = draft.parents or []
    return {
        (draft.tokens[parent], draft.tokens[node])
        for node, parent in enumerate(parents)
        if parent >= 0 and parents[parent] == -1
    }


def test_merging_spends_no_query_twice() -> None:
    text = [1, 2, 3, 1, 2, 4, 1, 2, 5]
    options = {"draft": "tree", "queries": 6, "reserve": 0, "follower": 2}
    plain, merged = (fed({**options, "merge": merge}, text, [1]).propose(99) for merge in (False, True))
    assert (plain.tokens, plain.parents) == ([2, 5, 2, 4], [-1, 0, -1, 2])
    assert (merged.tokens, merged.parents) == ([2, 5, 4, 3], [-1, 0, 0, 0])


@pytest.mark.parametrize(("count_refed", "nodes"), [(True, 4), (False, 7)])
def test_tokens_fed_again_count_as_queries(count_refed: bool, nodes: int) -> None:
    options = {"draft": "tree", "queries": 8, "reserve": 0, "follower": 1, "count_refed": count_refed}
    drafter = fed(options, [5, 1, 5, 2, 5, 3, 5, 4, 5, 6, 5, 7, 5, 8], [9, 9, 9, 5])
    assert len(drafter.propose(99).tokens) == nodes


def test_a_smaller_budget_cuts_the_draft() -> None:
    drafter = fed({"draft": "tree"}, [1, 2, 3, 4] * 5, [1])
    whole = drafter.propose(1000)
    for budget in range(len(whole.tokens) + 1):
        part = drafter.propose(budget)
        assert list(part.tokens) == list(whole.tokens)[:budget]
        assert list(part.parents or []) == list(whole.parents or [])[:budget]


@settings(deadline=None, max_examples=60)
@given(corpus=texts, text=texts, draft=st.sampled_from(["chain", "tree"]), chunks=st.lists(texts, max_size=3))
def test_frozen_followers_come_after_the_dynamic_ones(
    corpus: list[int], text: list[int], draft: str, chunks: list[list[int]], frozen_file: Any
) -> None:
    windows: dict[tuple[int, ...], dict[tuple[int, ...], int]] = {}
    for i in range(len(corpus) - 2):
        counts = windows.setdefault((corpus[i],), {})
        follower = (corpus[i + 1], corpus[i + 2])
        counts[follower] = counts.get(follower, 0) + 1
    frozen = {key: sorted(counts, key=lambda f: (-counts[f], f)) for key, counts in windows.items()}
    released = ReleasedCacheback(leader=1, follower=2, frozen=frozen)
    options = {"draft": draft, "follower": 2, "queries": 20, "reserve": 5}
    drafter = create("cacheback", options | {"frozen": frozen_file(corpus)} if windows else options)
    drafter.reset()  # what was loaded with the options stays
    drafter.start(text)
    released.request(text)
    seq, refed = list(text), 0
    for chunk in [text[-1:], *chunks]:
        if refed:
            shown = drafter.propose(1000)
            if draft == "chain":
                assert list(shown.tokens) == released.chain(seq, 10)
            else:
                tokens, parents = released.tree(seq, refed, queries=20, reserve=5)
                assert (list(shown.tokens), list(shown.parents or [])) == (tokens, parents)
        drafter.observe(chunk)
        seq, refed = seq + chunk, len(chunk)
        released.learn(seq)


@pytest.fixture(scope="module")
def frozen_file(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("frozen")

    def write(corpus: list[int]) -> str:
        path: Path = folder / f"{'-'.join(map(str, corpus))}.dft"
        if not path.exists():
            table = build(["text"], lambda _: corpus, tokenizer_hash="t", corpus="c", leader=1, follower=2)
            table.save(path)
        return str(path)

    return write


def test_merged_branches_leave_room_for_more_of_the_corpus(frozen_file: Any) -> None:
    corpus = [token for last in range(10, 20) for token in (5, 1, last)]
    options = {"draft": "tree", "follower": 2, "queries": 8, "reserve": 0, "frozen": frozen_file(corpus)}
    assert fed(options, [0], [5]).propose(99).tokens == [1, 10, 1, 11, 1, 12]
    assert fed(options | {"merge": True}, [0], [5]).propose(99).tokens == [1, 10, 11, 12, 13, 14, 15]


def test_published_defaults() -> None:
    released = parse_options("cacheback", {"preset": "released"}).model_dump()
    assert released == {
        "draft": "tree",
        "leader": 1,
        "follower": 3,
        "leaders": 1_048_576,
        "followers": 128,
        "draft_len": 10,
        "queries": 96,
        "reserve": 16,
        "count_refed": True,
        "merge": False,
        "frozen": None,
        "frozen_sha256": None,
    }
    assert parse_options("cacheback", {}).model_dump() == released | {"draft": "chain"}
    assert parse_options("cacheback", {"preset": "seed"}).model_dump() == released | {"draft": "chain", "follower": 10}
