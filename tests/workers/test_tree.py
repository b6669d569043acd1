"""Masks, positions and KV compaction against what they mean, spelled out naively."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dfbench.workers import tree


@st.composite
def parents(draw: st.DrawFn, most: int = 12) -> list[int]:
    size = draw(st.integers(0, most))
    return [draw(st.integers(-1, node - 1)) for node in range(size)]


def ancestors(parents: list[int], node: int) -> set[int]:
    found = {node}
    while parents[node] >= 0:
        node = parents[node]
        found.add(node)
    return found


@given(parents(), st.integers(1, 4))
def test_a_node_sees_the_lead_its_ancestors_and_itself(links: list[int], lead: int) -> None:
    seen = tree.visibility(links, lead)
    assert (seen[:lead, :lead] == np.tri(lead)).all()
    assert not seen[:lead, lead:].any()
    for node in range(len(links)):
        assert seen[lead + node, :lead].all()
        assert set(np.flatnonzero(seen[lead + node, lead:])) == ancestors(links, node)


@given(st.integers(0, 5000), st.integers(1, 20))
def test_the_causal_mask_is_a_triangle_behind_the_cache(past: int, fed: int) -> None:
    mask = tree.Masks(torch.device("cpu"), torch.float32, additive=False, width=8).causal(past, fed)
    assert mask.shape == (1, 1, fed, past + fed)
    rows, columns = np.indices((fed, past + fed))
    assert (mask[0, 0].numpy() == (columns <= past + rows)).all()


@given(parents(), st.integers(0, 7), st.integers(1, 3))
def test_the_eager_mask_is_the_sdpa_mask_in_other_words(links: list[int], past: int, lead: int) -> None:
    seen = tree.Masks(torch.device("cpu"), torch.float32, additive=False, width=4).tree(past, links, lead)
    added = tree.Masks(torch.device("cpu"), torch.float32, additive=True, width=4).tree(past, links, lead)
    assert seen.dtype == torch.bool and added.dtype == torch.float32
    assert torch.equal(added == 0, seen)
    assert bool((added[~seen] == torch.finfo(torch.float32).min).all())


def test_siblings_share_a_position() -> None:
    assert tree.offsets([1, 1, 2, 2, 3], lead=1) == [0, 1, 1, 2, 2, 3]
    assert tree.offsets([1, 2, 1], lead=3) == [0, 1, 2, 3, 4, 3]


@pytest.mark.parametrize("path", [(), (0, 1), (1,), (0, 2), (1, 2, 4)])
def test_compaction_moves_keys_and_values_of_every_layer(path: tuple[int, ...]) -> None:
    def states() -> torch.Tensor:
        return torch.randn(1, 2, 9, 3)

    layers = [SimpleNamespace(keys=states(), values=states()) for _ in range(3)]
    before = [(layer.keys.clone(), layer.values.clone()) for layer in layers]
    tree.compact(layers, 4, path)
    wanted = [*range(4), *(4 + node for node in path)]
    for layer, (keys, values) in zip(layers, before, strict=True):
        assert torch.equal(layer.keys[:, :, : len(wanted)], keys[:, :, wanted])
        assert torch.equal(layer.values[:, :, : len(wanted)], values[:, :, wanted])
