"""Keys and values that grow in place are those of transformers' own growing cache, whatever is cropped or moved."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from dfbench.drafters.base import EMPTY, Draft
from dfbench.drafters.registry import create
from dfbench.workers import growing_cache as module
from dfbench.workers.engine import TorchTarget
from dfbench.workers.growing_cache import GrowingCache, growing_cache
from dfbench.workers.loop import decode
from dfbench.workers.spec import TargetSpec
from dfbench.workers.static_cache import Shape
from dfbench.workers.tree import compact

TinyModel = Callable[..., PreTrainedModel]
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)


@given(
    planned=st.integers(0, 12),
    passes=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=8),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=60)
def test_it_holds_what_joining_would_give(
    tiny_model: TinyModel, planned: int, passes: list[tuple[int, int]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    config = tiny_model("llama")
    ours = GrowingCache(config, Shape(2, 3, 4, torch.float32), torch.device("cpu"))
    theirs = DynamicCache(config=config.config)
    ours.reserve(planned)
    for fed, dropped in passes:
        start = ours.get_seq_length()
        for layer in range(2):
            states = [torch.randn((1, 3, fed, 4), generator=generator) for _ in range(2)]
            for found, expected in zip(ours.update(*states, layer), theirs.update(*states, layer), strict=True):
                assert torch.equal(found, expected)
        compact([ours], start, [fed - 1])
        compact(theirs.layers, start, [fed - 1])  # type: ignore[arg-type]
        for cache in (ours, theirs):
            cache.crop(-min(dropped, fed))
        assert ours.get_seq_length() == theirs.get_seq_length() <= ours.capacity
        for mine, other in zip(ours.layers, theirs.layers, strict=True):
            assert torch.equal(mine.keys, other.keys) and torch.equal(mine.values, other.values)  # type: ignore


def test_a_request_that_was_announced_moves_nothing(tiny_model: TinyModel) -> None:
    target = TorchTarget(tiny_model("llama"), TargetSpec(dtype="float64"))
    target.reserve(len(PROMPT) + 40)
    cache = target._growing
    assert cache is not None
    place = cache.keys.data_ptr()
    target.prefill(PROMPT)
    for _ in range(38):
        target.verify(Draft((1, 2, 3)))
        target.commit((), (5,))
    assert target._cache is cache
    assert cache.keys.data_ptr() == place
    assert cache.capacity == len(PROMPT) + 40 + target.spec.max_queries, "what the memory plan counts"
    target.reserve(5)
    target.prefill(PROMPT[:2])
    assert cache.keys.data_ptr() == place, "shorter requests use what is there"


def test_the_next_request_sees_nothing_of_the_last(tiny_model: TinyModel, family: str) -> None:
    model = tiny_model(family)
    used = TorchTarget(model, TargetSpec(dtype="float64"))
    decode(used, create("ar", {}), PROMPT[::-1], max_new_tokens=30)
    for cap in (3, 60):  # In the buffers that are there, and in longer ones.
        fresh = TorchTarget(model, TargetSpec(dtype="float64"))
        expected = decode(fresh, create("ar", {}), PROMPT, max_new_tokens=cap)
        assert decode(used, create("ar", {}), PROMPT, max_new_tokens=cap).output == expected.output


@pytest.mark.parametrize("engine", ["cached", "recompute"])
def test_a_request_that_was_not_announced_works_too(tiny_model: TinyModel, engine: str) -> None:
    model = tiny_model("llama")
    expected = decode(TorchTarget(model, TargetSpec(dtype="float64")), create("ar", {}), PROMPT, max_new_tokens=30)
    target = TorchTarget(model, TargetSpec(dtype="float64", engine=engine))  # type: ignore[arg-type]
    output = [target.prefill(PROMPT)]
    while len(output) < 30:
        output += target.verify(EMPTY).argmax
        target.commit((), output[-1:])
    assert output == expected.output


def test_attention_that_would_copy_views_keeps_transformers_own_cache(tiny_model: TinyModel) -> None:
    target = TorchTarget(tiny_model("llama", "eager"), TargetSpec(dtype="float64", attention="eager"))
    target.prefill(PROMPT)
    assert type(target._cache).__name__ == "DynamicCache"


def test_layers_that_differ_keep_transformers_own_cache(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    assert growing_cache(model, "cache") is not None
    shapes = [(1, 2, 1, 8)] * 3 + [(1, 4, 1, 8)]
    monkeypatch.setattr(module, "states_of_a_token", lambda *_: [torch.zeros(shape) for shape in shapes])
    assert growing_cache(model, "cache") is None
    target = TorchTarget(model, TargetSpec(dtype="float64"))
    target.prefill(PROMPT)
    assert type(target._cache) is DynamicCache
