"""The kernels of passes over kept tokens: each against torch, and whole passes against the layers they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from dfbench.drafters.base import Draft
from dfbench.drafters.registry import create
from dfbench.workers import lean, lean_rows
from dfbench.workers.compiled import CompiledTarget
from dfbench.workers.lean_rows import bits
from dfbench.workers.loop import Trace, decode
from dfbench.workers.spec import TargetSpec

from .conftest import TinyModel

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def random_rows(seed: int, *shape: int) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).bfloat16()


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200))
@settings(deadline=None)
def test_rounding_is_torchs(words: list[int]) -> None:
    floats = np.array(words, np.uint32).view(np.float32)
    theirs = bits(torch.from_numpy(floats).bfloat16())
    for number, word in zip(floats, theirs, strict=True):
        if np.isnan(number):
            assert np.isnan(lean_rows.widened(lean_rows.rounded(number)))
        else:
            assert lean_rows.rounded(number) == word


def test_ties_go_to_even() -> None:
    halfway = np.array([0x3F808000, 0x3F818000], np.uint32).view(np.float32)
    assert [int(lean_rows.rounded(number)) for number in halfway] == [0x3F80, 0x3F82]


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 700), st.sampled_from([1e-6, 1e-5]))
@settings(deadline=None)
def test_sums_and_their_norms(seed: int, count: int, size: int, epsilon: float) -> None:
    hidden, delta = random_rows(seed, 2, count, size)
    weight = random_rows(seed + 1, size)
    expected = hidden + delta
    normed = lean._normed(expected, weight, epsilon)
    out = torch.empty_like(hidden)
    lean_rows.add_norm(bits(hidden), bits(delta), bits(weight), epsilon, bits(out))
    assert torch.equal(hidden, expected), "sums are rounded as torch rounds them"
    # Squares are summed in another order: one in some hundred values falls on the other side of a rounding.
    torch.testing.assert_close(out, normed, rtol=2**-6, atol=0)
    assert ((out != normed).float().mean(-1) <= max(0.1, 2 / size)).all()


@given(
    st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.sampled_from([2, 8, 64]),
    st.booleans(),
)  # fmt: skip
@settings(deadline=None)
def test_heads_are_turned_and_kept(seed: int, count: int, group: int, kv_heads: int, size: int, normed: bool) -> None:
    heads, slot, half = group * kv_heads, 2, size // 2
    joined = random_rows(seed, count, heads + 2 * kv_heads, size)
    cos, turn = random_rows(seed + 1, 2, count, size) / 6
    scales = random_rows(seed + 2, heads + kv_heads, size) if normed else torch.empty((0, size), dtype=torch.bfloat16)
    keys, values = torch.zeros((2, kv_heads, 7, size), dtype=torch.bfloat16)
    queries = torch.empty((heads, count, size), dtype=torch.bfloat16)
    turned, kept = joined[:, : heads + kv_heads], joined[:, heads + kv_heads :].clone()
    if normed:
        turned = lean._normed(turned, scales, 1e-6)
    expected = (turned * cos[:, None] + turned.roll(half, -1) * turn[:, None]).transpose(0, 1)
    lean_rows.turn_and_keep(
        *(bits(joined.flatten(1)), bits(cos), bits(turn), bits(scales), 1e-6),
        *(bits(queries), bits(keys), bits(values), slot),
    )
    exact = {"rtol": 2**-5, "atol": 2**-6} if normed else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(queries, expected[:heads], **exact)
    here = slice(slot, slot + count)
    torch.testing.assert_close(keys[:, here], expected[heads:], **exact)
    assert torch.equal(values[:, here].transpose(0, 1), kept)
    others = [at for at in range(7) if not slot <= at < slot + count]
    assert not keys[:, others].any() and not values[:, others].any()


@contextmanager
def without(target: CompiledTarget) -> Iterator[None]:
    """The same target by its layers."""
    assert isinstance(target._forward, lean.Lean)
    held, target._forward._rows = target._forward._rows, None
    yield
    target._forward._rows = held


def compiled(model: object, **given: object) -> CompiledTarget:
    return CompiledTarget(model, TargetSpec(engine="compiled", dtype="bfloat16", **given))  # type: ignore[arg-type]


def ar(target: CompiledTarget, tokens: int) -> Trace:
    return decode(target, create("ar", {}), PROMPT, max_new_tokens=tokens)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_whole_passes_are_the_layers(tiny_model: TinyModel, family: str) -> None:
    """Until the first rounding parts the two, evidence agrees; the buffers grow on the way."""
    target = compiled(tiny_model(family, "sdpa", torch.bfloat16), buckets=(1, 4))
    assert target.engine_facts()["row_kernels"]
    with without(target):
        expected = ar(target, 40)
    rows = ar(target, 40)
    same = next((at for at, (a, b) in enumerate(zip(rows.output, expected.output, strict=True)) if a != b), 40)
    assert same >= 20, "a tie may part them, but not at once"
    assert rows.evidence is not None and expected.evidence is not None
    mine, theirs = (trace.evidence.top1_logit[:same] for trace in (rows, expected))  # type: ignore[union-attr]
    np.testing.assert_allclose(mine, theirs, atol=0.02 * np.abs(theirs).max())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_wide_passes_are_the_layers(tiny_model: TinyModel, family: str) -> None:
    """Chains and trees in padded passes, each against the same one by the layers."""
    target = compiled(tiny_model(family, "sdpa", torch.bfloat16), buckets=(1, 4, 12))
    drafts = [Draft((7, 8)), Draft((7, 8, 9, 9, 1), (-1, -1, 0, 1, 3)), Draft(tuple(range(11)))]
    for draft in drafts:
        seen = []
        for layers in (True, False):
            target.prefill(PROMPT)
            with without(target) if layers else nullcontext():
                target.verify(draft)
            seen.append(target._rows.float().clone())
        torch.testing.assert_close(seen[1], seen[0], rtol=0.05, atol=0.05 * float(seen[0].abs().max()))


def test_buffers_that_are_replaced_are_seen(tiny_model: TinyModel) -> None:
    target = compiled(tiny_model("llama", "sdpa", torch.bfloat16), buckets=(1, 4))
    first = ar(target, 20).output
    target._grow(len(PROMPT) + 400)
    assert ar(target, 20).output == first


def test_whom_they_serve(tiny_model: TinyModel) -> None:
    sixteen = tiny_model("llama", "sdpa", torch.bfloat16)
    assert compiled(sixteen).engine_facts()["row_kernels"]
    assert not compiled(tiny_model("llama", "eager", torch.bfloat16)).engine_facts()["row_kernels"]
    wide = CompiledTarget(tiny_model("llama"), TargetSpec(engine="compiled", dtype="float64"))
    assert not wide.engine_facts()["row_kernels"]
    traced = compiled(sixteen, options={"compile": "eager"}).engine_facts()
    assert not traced["row_kernels"]
    assert traced["packed_weight_bytes"] == 0, "inductor lays weights out itself, and refuses others"


def test_biases_keep_the_layers(tiny_model: TinyModel) -> None:
    target = compiled(tiny_model("llama", "sdpa", torch.bfloat16))
    assert isinstance(target._forward, lean.Lean)
    blocks, sizes = target._forward._blocks, target._forward._sizes
    silu = functional.silu
    bias = torch.zeros(blocks[0].joined.weight.shape[0], dtype=torch.bfloat16)
    biased = [blocks[0]._replace(joined=blocks[0].joined._replace(bias=bias)), *blocks[1:]]
    activation = target._forward._activation
    assert lean_rows.fits(blocks, sizes, activation)
    assert not lean_rows.fits(biased, sizes, activation)
    assert not lean_rows.fits(blocks, sizes, silu), "a plain function could be any"
