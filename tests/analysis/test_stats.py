"""Intervals: what they cover on skewed data with a known truth, and the words that go with them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from simulation import METHODS, coverage

from dfbench.analysis import stats
from dfbench.analysis.stats import Interval


def test_coverage_at_30_prompts_on_skewed_data(capsys: pytest.CaptureFixture[str]) -> None:
    """Each kind of interval in use, on log-normal MATs with early ends; 250 runs have an error of 1.4 points."""
    reached = coverage(prompts=30, runs=250, seed=7)
    with capsys.disabled():
        print("\ncoverage at 30 prompts: " + ", ".join(f"{name} {share:.1%}" for name, share in reached.items()))
    assert set(reached) == set(METHODS)
    for name, share in reached.items():
        assert 0.92 <= share <= 0.98, name


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764)])
def test_student_quantiles_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert stats.student_quantile(freedom) == pytest.approx(quantile, abs=1e-4)


def test_an_interval_holds_its_estimate_and_shrinks_with_prompts() -> None:
    generator = np.random.default_rng(0)
    steps = generator.integers(100, 256, 400).astype(float)
    wide = stats.ratio_interval([256.0] * 30, steps[:30])
    narrow = stats.ratio_interval([256.0] * 400, steps)
    assert wide and narrow
    assert wide.lo < 256 * 30 / steps[:30].sum() < wide.hi
    assert math.log(narrow.hi / narrow.lo) == pytest.approx(math.log(wide.hi / wide.lo) * math.sqrt(30 / 400), rel=0.3)


def test_intervals_are_the_same_every_time() -> None:
    steps = [float(count) for count in range(100, 130)]
    assert stats.ratio_interval([256.0] * 30, steps) == stats.ratio_interval([256.0] * 30, steps)


@pytest.mark.parametrize("prompts", [30, 1200])
def test_intervals_do_not_depend_on_the_order_of_prompts(prompts: int) -> None:
    generator = np.random.default_rng(3)
    tokens, steps = np.full(prompts, 256.0), generator.integers(50, 256, prompts).astype(float)
    mixed = generator.permutation(prompts)
    assert stats.ratio_interval(tokens, steps) == stats.ratio_interval(tokens[mixed], steps[mixed])


def test_grouping_many_prompts_changes_little() -> None:
    generator = np.random.default_rng(1)
    steps = generator.lognormal(5, 0.5, 5000)
    tokens = np.full(5000, 256.0)
    ours = stats.ratio_interval(tokens, steps)
    influence = tokens / tokens.sum() - steps / steps.sum()
    error = math.sqrt(influence @ influence)
    assert ours
    assert math.log(ours.hi / ours.lo) / 2 == pytest.approx(1.96 * error, rel=0.1)


def test_where_there_is_no_interval() -> None:
    assert stats.ratio_interval([1.0, 1.0], [2.0, 3.0]) is None
    assert stats.ratio_interval([], []) is None
    assert stats.ratio_interval([0.0] * 3, [1.0] * 3) is None
    assert stats.ratio_interval([1.0, 2.0, math.nan], [1.0] * 3) is None
    assert stats.ratio_interval([3.0] * 3, [3.0] * 3) == Interval(1.0, 1.0)


def test_three_prompts_use_students_t() -> None:
    found = stats.ratio_interval([10.0, 10.0, 10.0], [5.0, 8.0, 10.0])
    assert found
    sums = (30.0, 23.0)
    influence = [10 / sums[0] - steps / sums[1] for steps in (5, 8, 10)]
    error = math.sqrt(sum(value**2 for value in influence) * 3 / 2)
    assert math.log(found.hi * sums[1] / sums[0]) == pytest.approx(4.3027 * error, rel=1e-4)


def test_a_difference_of_equal_arms_is_nothing() -> None:
    steps = [5.0, 8.0, 10.0, 7.0, 9.0, 6.0]
    assert stats.difference_interval([10.0] * 6, steps, [10.0] * 6, steps) == Interval(0.0, 0.0)


def test_verdicts() -> None:
    words = stats.verdict("cacheback − pld on code", "MAT", 0.01, Interval(-0.01, 0.03), 30)
    assert words == (
        "cacheback − pld on code: +0.01 MAT, interval -0.01…+0.03: no difference shown with 30 prompts; "
        "about 250 would be needed."
    )
    assert "a difference, shown with 30 prompts" in stats.verdict("a − b", "MAT", 0.2, Interval(0.1, 0.3), 30)
    assert "none to speak of" in stats.verdict("a − b", "MAT", 0.0, Interval(-0.1, 0.1), 30)
    assert "no interval (too few prompts)" in stats.verdict("a − b", "MAT", 0.1, None, 1)
    talks = ("conversations",)
    assert "shown with 30 conversations" in stats.verdict("a − b", "MAT", 0.2, Interval(0.1, 0.3), 30, *talks)
    assert "no interval (conversations depend on each other)" in stats.verdict("a − b", "MAT", 0.1, None, 9, *talks)


def test_a_tie_needs_as_many_prompts_as_the_power_formula_says() -> None:
    needed = stats.prompts_needed(0.01, Interval(-0.01, 0.03), 30)
    assert needed == pytest.approx(30 * (2.8016 / 1.95996 * 2) ** 2, rel=1e-3)


def test_no_end_of_a_difference_is_printed_as_zero() -> None:
    said = stats.verdict("a − b on code", "MAT", -0.03, Interval(-0.06, -0.004), 30)
    assert "-0.030 MAT, interval -0.060…-0.004: a difference" in said
    assert "+0.01 MAT, interval -0.01…+0.03: no difference" in stats.verdict(
        "a", "MAT", 0.01, Interval(-0.01, 0.03), 30
    )
    assert "interval +0.00…+0.00" in stats.verdict("a", "MAT", 0.0, Interval(0.0, 0.0), 30)
