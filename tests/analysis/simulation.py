"""Prompts with a known truth: skewed MATs, early ends, unequal step costs. Used by the tests and by the benchmark."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from dfbench.analysis import stats

Array = npt.NDArray[np.float64]
COLUMNS = ("tokens", "steps", "ar", "arm", "other_steps")


def draw(generator: np.random.Generator, prompts: int) -> dict[str, Array]:
    """Prompts of one workload under AR and two arms: MAT is 1 + log-normal (skewness 6), three in ten end early."""
    early = generator.random(prompts) < 0.3
    tokens = np.where(early, generator.integers(20, 256, prompts), 256).astype(np.float64)
    gain = generator.lognormal(-1.2, 1.0, prompts)
    cost = 20 * generator.lognormal(0, 0.1, prompts)
    steps = np.ceil(tokens / (1 + gain))
    other = np.ceil(tokens / (1 + gain * generator.lognormal(-0.1, 0.3, prompts)))
    return {
        "tokens": tokens,
        "steps": steps,
        "ar": tokens * cost * (1 + 0.01 * generator.standard_normal(prompts)),
        "arm": steps * cost * 1.08 * (1 + 0.02 * generator.standard_normal(prompts)),
        "other_steps": other,
    }


Method = tuple[Callable[..., stats.Interval | None], tuple[str, ...], Callable[..., float]]

METHODS: dict[str, Method] = {
    "MAT (ratio)": (stats.ratio_interval, ("tokens", "steps"), lambda a, b: a / b),
    "speedup (ratio)": (stats.ratio_interval, ("ar", "arm"), lambda a, b: a / b),
    "speedup ÷ MAT (ratio of ratios)": (
        stats.ratio_of_ratios_interval,
        ("ar", "arm", "tokens", "steps"),
        lambda a, b, c, d: a / b / (c / d),
    ),
    "MAT of two arms (difference)": (
        stats.difference_interval,
        ("tokens", "steps", "tokens", "other_steps"),
        lambda a, b, c, d: a / b - c / d,
    ),
}
"""Every kind of interval in use, the columns it is given here, and its true value as a function of their means."""


@cache
def truths() -> dict[str, float]:
    """True values, from a million prompts."""
    many = draw(np.random.default_rng(99), 1_000_000)
    return {name: float(value(*(many[c].mean() for c in columns))) for name, (_, columns, value) in METHODS.items()}


def coverage(*, prompts: int, runs: int, seed: int) -> dict[str, float]:
    """For each kind of interval, the share of `runs` simulated experiments whose interval holds the truth."""
    generator = np.random.default_rng(seed)
    hits = dict.fromkeys(METHODS, 0)
    for _ in range(runs):
        data = draw(generator, prompts)
        for name, (method, columns, _) in METHODS.items():
            found = method(*(data[column] for column in columns))
            hits[name] += bool(found and found.lo <= truths()[name] <= found.hi)
    return {name: count / runs for name, count in hits.items()}


def percentile_interval(numerator: Array, denominator: Array) -> stats.Interval:
    """Plain percentile bootstrap of Σ numerator ÷ Σ denominator: for comparison only."""
    resampled = stats.resample_weights(len(numerator)) @ np.column_stack([numerator, denominator])
    lo, hi = np.quantile(resampled[:, 0] / resampled[:, 1], [0.025, 0.975])
    return stats.Interval(float(lo), float(hi))


def bca_interval(numerator: Array, denominator: Array) -> stats.Interval:
    """Bias-corrected and accelerated bootstrap of the same (Efron 1987): for comparison only."""
    resampled = stats.resample_weights(len(numerator)) @ np.column_stack([numerator, denominator])
    ratios = resampled[:, 0] / resampled[:, 1]
    normal, estimate = NormalDist(), numerator.sum() / denominator.sum()
    below = float(np.clip((ratios < estimate).mean(), 1e-3, 1 - 1e-3))
    bias = normal.inv_cdf(below)
    left_out = (numerator.sum() - numerator) / (denominator.sum() - denominator)
    spread = left_out.mean() - left_out
    skew = float((spread**3).sum() / (6 * ((spread**2).sum()) ** 1.5))
    ends = [normal.cdf(bias + (bias + z) / (1 - skew * (bias + z))) for z in (-1.959964, 1.959964)]
    lo, hi = np.quantile(ratios, ends)
    return stats.Interval(float(lo), float(hi))
