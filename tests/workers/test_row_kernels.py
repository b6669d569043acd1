"""The kernels of passes on a CPU, each against torch or numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from dfbench.workers import attention_kernels, lean, pass_kernels, product_kernels, row_kernels, vectors
from dfbench.workers.row_kernels import bits


def random_rows(seed: int, *shape: int) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).bfloat16()


def whole_pass(**told: int) -> Any:
    it = np.zeros(1, pass_kernels.PASS)
    for name, number in told.items():
        it[name] = number
    return it[0]


def states(rows: torch.Tensor) -> np.ndarray:
    return bits(rows).copy() if product_kernels.DOT else floats(rows)


def floats(rows: torch.Tensor) -> np.ndarray:
    return rows.float().numpy().copy()


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200))
@settings(deadline=None)
def test_rounding_is_torchs(words: list[int]) -> None:
    numbers = np.array(words, np.uint32).view(np.float32)
    theirs = bits(torch.from_numpy(numbers).bfloat16())
    for number, word in zip(numbers, theirs, strict=True):
        if np.isnan(number):
            assert np.isnan(row_kernels.widened(row_kernels.rounded(number)))
        else:
            assert row_kernels.rounded(number) == word


def test_ties_go_to_even() -> None:
    halfway = np.array([0x3F808000, 0x3F818000], np.uint32).view(np.float32)
    assert [int(row_kernels.rounded(number)) for number in halfway] == [0x3F80, 0x3F82]


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 700), st.sampled_from([1e-6, 1e-5]), st.booleans())
@settings(deadline=None)
def test_sums_and_their_norms(seed: int, count: int, size: int, epsilon: float, as_bits: bool) -> None:
    """The same whether rows are held as bits or as float32."""
    hidden, delta = random_rows(seed, 2, count, size)
    weight = random_rows(seed + 1, size)
    expected = hidden + delta
    normed = lean._normed(expected, weight, epsilon)
    held: Any = bits if as_bits else floats
    states, out = held(hidden), held(torch.zeros_like(hidden))
    for first in range(2):  # Two threads, one after the other.
        row_kernels.add_norm(states, held(delta), bits(weight), epsilon, out, first, 2)
    assert np.array_equal(states, held(expected)), "sums are rounded as torch rounds them"
    found = torch.from_numpy(out.view(np.int16)).view(torch.bfloat16) if as_bits else torch.from_numpy(out).bfloat16()
    # Squares are summed in another order: one in some hundred values falls on the other side of a rounding.
    torch.testing.assert_close(found, normed, rtol=2**-6, atol=0)
    assert ((found != normed).float().mean(-1) <= max(0.1, 2 / size)).all()


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
    for first in range(3):
        row_kernels.turn_and_keep(
            *(bits(joined.flatten(1)), bits(cos), bits(turn), bits(scales), 1e-6),
            *(bits(queries), bits(keys), bits(values), slot, first, 3),
        )
    exact = {"rtol": 2**-5, "atol": 2**-6} if normed else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(queries, expected[:heads], **exact)
    here = slice(slot, slot + count)
    torch.testing.assert_close(keys[:, here], expected[heads:], **exact)
    assert torch.equal(values[:, here].transpose(0, 1), kept)
    others = [at for at in range(7) if not slot <= at < slot + count]
    assert not keys[:, others].any() and not values[:, others].any()


@njit
def exponentials(numbers, out):  # type: ignore[no-untyped-def]
    for at in range(len(numbers)):
        out[at] = row_kernels.exponential(numbers[at])


def test_powers_of_e() -> None:
    numbers = np.concatenate([np.linspace(-87, 88, 100_001), [0, -1e-30, 1e-30]]).astype(np.float32)
    out = np.empty_like(numbers)
    exponentials(numbers, out)
    exact = np.exp(numbers.astype(np.float64))
    assert (np.abs(out - exact) <= 2 * np.spacing(exact.astype(np.float32))).all()
    ends = np.array([-87.5, -1e30, -np.inf], np.float32)
    exponentials(ends, out)
    assert not out[:3].any()


@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 40))
@settings(deadline=None)
def test_activation(seed: int, count: int, size: int) -> None:
    gated = random_rows(seed, count, 2 * size) * 4
    gate, up = gated.chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    inner = torch.zeros_like(expected)
    middle = size // 2
    pass_kernels.activate(bits(gated), bits(inner), 0, middle)
    assert not inner[:, middle:].any()
    pass_kernels.activate(bits(gated), bits(inner), middle, size)
    torch.testing.assert_close(inner, expected, rtol=2**-6, atol=1e-30)


@given(st.integers(0, 10**6), st.integers(1, 21), st.sampled_from([8, 32, 40, 64, 96, 100]), st.integers(1, 9))
@settings(deadline=None, max_examples=60)
def test_products(seed: int, rows: int, size: int, count: int) -> None:
    """Against float64, in parts as threads take them; a row's result does not depend on the other rows."""
    weight, factors = random_rows(seed, rows, size), random_rows(seed + 1, count + 4, size)
    held = states(factors)
    out = np.full((count, rows), np.nan, np.float32)
    for number in range(3):
        first, last = pass_kernels.share(whole_pass(), rows, number, 3)
        product_kernels.product(weight.data_ptr(), size, first, last, held.ctypes.data, count, out)
    exact = floats(factors)[:count].astype(np.float64) @ floats(weight).astype(np.float64).T
    scale = np.abs(floats(factors)[:count]) @ np.abs(floats(weight)).T
    assert (np.abs(out - exact) <= size * 2**-24 * scale + 1e-30).all()
    for row in range(count):
        alone = np.empty((1, rows), np.float32)
        product_kernels.product(weight.data_ptr(), size, 0, rows, held[row:].ctypes.data, 1, alone)
        assert np.array_equal(alone[0], out[row])
    rounded = np.empty((count, rows), np.uint16)
    product_kernels.product(weight.data_ptr(), size, 0, rows, held.ctypes.data, count, rounded)
    assert np.array_equal(rounded, bits(torch.from_numpy(out).bfloat16()))


@given(st.integers(0, 10**6), st.integers(1, 30), st.sampled_from([8, 16, 32, 40, 64]), st.data())
@settings(deadline=None, max_examples=60)
def test_attention_sums_in_the_order_of_what_is_seen(seed: int, window: int, size: int, data: st.DataObject) -> None:
    """Against float64; and what is hidden leaves no trace, wherever it stands among the last ones."""
    dice = np.random.default_rng(seed)
    values = random_rows(seed, window, size)
    scores = (dice.normal(size=(4, window)) * 5).astype(np.float32)
    seen = np.array(data.draw(st.lists(st.booleans(), min_size=0, max_size=window - 1)), np.uint8)
    shown = np.concatenate([np.ones(window - len(seen), bool), seen.astype(bool)])
    weights, closed = scores.copy(), scores[:, shown].copy()
    totals = [attention_kernels.weigh(row, seen, np.float32(0.125)) for row in weights]
    fewer = [attention_kernels.weigh(row, np.zeros(0, np.uint8), np.float32(0.125)) for row in closed]
    assert totals == fewer
    mixed, same = np.empty((4, size), np.float32), np.empty((4, size), np.float32)
    for lane in range(0, size, 32):
        attention_kernels.mix(values.data_ptr(), size, weights, lane, mixed[:, lane:])
    shown_values = values[torch.from_numpy(shown)].contiguous()
    for lane in range(0, size, 32):
        attention_kernels.mix(shown_values.data_ptr(), size, closed, lane, same[:, lane:])
    assert np.array_equal(mixed, same)
    powers = np.exp(0.125 * scores[:, shown].astype(np.float64))
    expected = powers / powers.sum(-1, keepdims=True) @ floats(shown_values)
    np.testing.assert_allclose(mixed / np.array(totals)[:, None], expected, rtol=1e-4, atol=1e-4)


def test_vectors_sum_up() -> None:
    numbers = np.arange(64, dtype=np.float32).reshape(4, 16)
    step = numbers.strides[0]
    start = numbers.ctypes.data

    @njit
    def four(at, step):  # type: ignore[no-untyped-def]
        load = vectors.load
        return vectors.sums(load(at), load(at + step), load(at + 2 * step), load(at + 3 * step))

    assert list(four(start, step)) == list(numbers.sum(-1))
