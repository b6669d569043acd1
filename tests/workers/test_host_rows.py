"""Searching logits on the host gives what torch's own operations give, to the bit and for every kind of number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dfbench.workers.evidence import TopTwo, top_two
from dfbench.workers.host_rows import HostTopTwo

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
CPU = torch.device("cpu")
NUMBERS = [0.0, -0.0, 1.0, -1.0, 1.5, -1.5, 3e4, -3e4, 1e-6, -1e-6, float("inf"), float("-inf")]
# NaN with either sign and with other bits set, as arithmetic makes them.
NANS = {torch.bfloat16: [0x7FC0, -0x40, 0x7F81, -1], torch.float16: [0x7E00, -0x200, 0x7C01, -1]}


def negative_nan() -> float:
    return float(np.copysign(np.nan, -1.0))


@st.composite
def logits(draw: st.DrawFn) -> torch.Tensor:
    """Few different numbers in a row, so that most rows have equal ones; rows of negative ones, or with NaN, too."""
    dtype = draw(st.sampled_from(DTYPES))
    vocabulary = draw(st.integers(2, 70))
    kind = draw(st.sampled_from(["all", "negative", "non-positive", "lowest", "nan"]))
    allowed = {
        "all": NUMBERS,
        "negative": [number for number in NUMBERS if number < 0],
        "non-positive": [number for number in NUMBERS if number <= 0],
        "lowest": [float("-inf")],
        "nan": [*NUMBERS, float("nan"), negative_nan()],
    }[kind]
    row = st.lists(st.sampled_from(allowed), min_size=vocabulary, max_size=vocabulary)
    drawn = torch.tensor(draw(st.lists(row, min_size=1, max_size=4)), dtype=dtype)
    apart = draw(st.sampled_from([1, 40]))  # Over several blocks of the search, or in one.
    rows = torch.full((len(drawn), apart * vocabulary), draw(st.sampled_from(allowed)), dtype=dtype)
    rows[:, draw(st.integers(0, apart - 1)) :: apart] = drawn
    if kind == "nan" and dtype in NANS:
        at = draw(st.integers(0, vocabulary - 1))
        rows.view(torch.int16)[0, at * apart] = draw(st.sampled_from(NANS[dtype]))
    return rows


def same_as_torch(rows: torch.Tensor, chosen: Sequence[int], apart: bool = False) -> None:
    def fresh() -> torch.Tensor:
        return torch.cat((rows, rows), -1)[:, : rows.shape[1]] if apart else rows.clone()

    expected, found = TopTwo(CPU, capacity=1), HostTopTwo(rows.dtype)
    assert found.look(fresh()) == expected.look(fresh()).tolist()
    for table in (expected, found):
        table.add(fresh(), chosen)
        table.add(fresh(), chosen[:1])
    for name, wanted, column in zip(expected.read()._fields, expected.read(), found.read(), strict=True):
        assert column.dtype == wanted.dtype
        np.testing.assert_array_equal(column, wanted, err_msg=name)


@given(rows=logits(), chosen=st.sets(st.integers(0, 3)), apart=st.booleans())
@settings(deadline=None, max_examples=300)
def test_it_finds_what_torch_finds(rows: torch.Tensor, chosen: set[int], apart: bool) -> None:
    same_as_torch(rows, sorted(row for row in chosen if row < len(rows)) or [0], apart)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_as_long_as_a_vocabulary(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = (torch.randn((24, 20_011), generator=generator) * 3).to(dtype)
    rows[8:16] -= 40
    same_as_torch(rows, [0, 3, 9, 23])
    assert HostTopTwo(dtype).look(rows) == rows.max(-1).indices.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_of_both_signs_tie(dtype: torch.dtype) -> None:
    rows = torch.tensor([[-1.0, -0.0, 0.0, -0.0, -2.0]], dtype=dtype)
    table = top_two(CPU, dtype)
    assert table.look(rows) == [1]
    table.add(rows, [0])
    evidence = table.read()
    assert (int(evidence.top1_id[0]), int(evidence.top2_id[0]), int(evidence.top_ties[0])) == (1, 2, 3)
