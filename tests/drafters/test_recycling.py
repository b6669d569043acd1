"""Token Recycling: the static tree against its definition by ranks, and what a pass teaches."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from restatements import ranked_tree

from dfbench.drafters.base import DrafterContext, Verified
from dfbench.drafters.recycling import CHILDREN
from dfbench.drafters.registry import create, parse_options

PATHS = sorted(
    (f"{path}{rank}" for path, count in CHILDREN.items() for rank in range(count)), key=lambda p: (len(p), p)
)


def row(*ids: int) -> np.ndarray:
    return np.array([[*ids, *range(90, 98)][:8]])


def test_template_has_the_published_shape() -> None:
    assert Counter(map(len, PATHS)) == {1: 8, 2: 21, 3: 25, 4: 15, 5: 8, 6: 3}
    assert {"0007" in PATHS, "00000" in PATHS, "000001" in PATHS, "000100" in PATHS} == {False, True}
    assert all(path[:-1] in {"", *PATHS} for path in PATHS)


@settings(deadline=None, max_examples=60)
@given(
    passes=st.lists(
        st.lists(st.integers(0, 9), min_size=1, max_size=6).flatmap(
            lambda nodes: st.tuples(
                st.just(nodes),
                st.lists(st.lists(st.integers(0, 9), min_size=8, max_size=8), min_size=len(nodes), max_size=len(nodes)),
            )
        ),
        max_size=5,
    ),
    budget=st.integers(0, 90),
    root=st.integers(0, 9),
)
def test_tree_equals_its_definition(passes: list[tuple[list[int], list[list[int]]]], budget: int, root: int) -> None:
    drafter = create("recycling", {}, DrafterContext(vocab_size=100))
    drafter.start([5])
    matrix: dict[int, list[int]] = {}
    for nodes, topk in passes:
        drafter.observe([root], Verified(tuple(nodes), np.array(topk)))
        matrix.update(zip(nodes, topk, strict=True))  # of a token verified twice, the last row stays
    drafter.observe([root])
    tokens, parents = ranked_tree(matrix, root, PATHS[:budget])
    draft = drafter.propose(budget)
    assert list(draft.tokens) == tokens
    assert list(draft.parents or []) == parents


def test_a_pass_teaches_rejected_nodes_too() -> None:
    drafter = create("recycling", {"skip_unknown": True})
    drafter.start([1])
    drafter.observe([2])
    assert drafter.propose(80).tokens == ()
    drafter.observe([3], Verified((2, 4), np.concatenate([row(3, 5), row(6, 7)])))
    assert drafter.propose(80).tokens == ()  # nothing is known of 3
    drafter.observe([4])
    assert list(drafter.propose(3).tokens) == [6, 7, 90]


def test_the_prompt_teaches_nothing_and_reset_forgets() -> None:
    drafter = create("recycling", {})
    drafter.start([1, 2, 1, 2])
    assert set(drafter.propose(80).tokens) == {0}
    drafter.observe([1], Verified((2,), row(1)))
    drafter.observe([2])
    assert drafter.propose(1).tokens == [1]
    drafter.start([2])  # carried: what was learned stays
    assert drafter.propose(1).tokens == [1]
    drafter.reset()
    drafter.start([2])
    assert drafter.propose(1).tokens == [0]


@pytest.mark.parametrize(("nodes", "levels"), [(80, 6), (9, 2), (8, 1), (1, 1)])
def test_fewer_nodes_keep_the_shallow_ones(nodes: int, levels: int) -> None:
    drafter = create("recycling", {"nodes": nodes})
    drafter.start([1])
    draft = drafter.propose(100)
    assert (len(draft.tokens), max(draft.depths())) == (nodes, levels)


def test_published_defaults() -> None:
    assert parse_options("recycling", {}).model_dump() == {"nodes": 80, "skip_unknown": False}
    assert create("recycling", {}).top_k == 8
