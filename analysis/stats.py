"""Intervals and verdicts: bootstrap over prompts, AR and arm kept paired.

Every headline figure is a ratio of sums over prompts (MAT: tokens ÷ steps; speedup: AR's time ÷ the arm's), or a ratio
of two such ratios. Its interval is a bootstrap-t interval on the log scale (Efron and Tibshirani, An Introduction to
the Bootstrap, ch. 12; standard errors by linearisation): plain percentile intervals cover too little on the skewed
data of 30 prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

RESAMPLES = 4000
LEVEL = 0.95
SEED = 20_240_229
MAX_UNITS = 1000
"""Above this many prompts, prompts are added up in this many groups before resampling."""


class Interval(NamedTuple):
    """A two-sided interval."""

    lo: float
    hi: float


def ratio_interval(numerator: Sequence[float], denominator: Sequence[float]) -> Interval | None:
    """95 % interval of Σ numerator ÷ Σ denominator over prompts (pairs of entries belong to one prompt).

    None where there is none: fewer than two prompts, or sums that are not positive.
    """
    return log_interval((numerator, denominator), (1, -1))


def ratio_of_ratios_interval(
    a: Sequence[float], b: Sequence[float], c: Sequence[float], d: Sequence[float]
) -> Interval | None:
    """95 % interval of (Σa ÷ Σb) ÷ (Σc ÷ Σd) over prompts; None as `ratio_interval`."""
    return log_interval((a, b, c, d), (1, -1, -1, 1))


def log_interval(columns: Sequence[Sequence[float]], signs: Sequence[int]) -> Interval | None:
    """Bootstrap-t interval of Π (Σ column)^sign, resampling rows (prompts).

    With x̄ⱼ the column sums, log θ = Σ sⱼ log x̄ⱼ has the influence values ψᵢ = Σ sⱼ xᵢⱼ / x̄ⱼ, so its squared standard
    error is Σ ψᵢ². Each resample is studentised by its own.
    """
    data = np.asarray(columns, dtype=np.float64).T
    if data.ndim != 2 or len(data) < 2 or not np.isfinite(data).all():
        return None
    data = grouped(data)
    powers = np.asarray(signs, dtype=np.float64)
    sums = data.sum(axis=0)
    if not (sums > 0).all():
        return None
    estimate = float(np.exp(powers @ np.log(sums)))
    influence = (data / sums) @ powers
    error = float(np.sqrt(influence @ influence))
    if error <= 1e-12:
        return Interval(estimate, estimate)
    error *= math.sqrt(len(data) / (len(data) - 1))
    lo, hi = _student_quantiles(data, powers, sums)
    return Interval(estimate * math.exp(-hi * error), estimate * math.exp(-lo * error))


def _student_quantiles(data: Array, powers: Array, sums: Array) -> tuple[float, float]:
    """Quantiles of (log θ* − log θ) ÷ its standard error over resamples."""
    scaled = data / sums
    units, columns = scaled.shape
    weights = resample_weights(units)
    first, second = np.triu_indices(columns)
    moments = weights @ np.hstack([scaled, scaled[:, first] * scaled[:, second]])
    means, products = moments[:, :columns], moments[:, columns:]
    usable = (means > 0).all(axis=1)
    means, products = means[usable], products[usable]
    shift = np.log(means) @ powers
    twice = np.where(first == second, 1.0, 2.0) * powers[first] * powers[second]
    variance = (products * twice / (means[:, first] * means[:, second])).sum(axis=1)
    variance *= units / (units - 1)
    # A resample of one prompt over and over has no spread of its own and cannot be studentised.
    varied = variance > 1e-9 * np.median(variance)
    student = shift[varied] / np.sqrt(variance[varied])
    tail = (1 - LEVEL) / 2
    lo, hi = np.quantile(student, [tail, 1 - tail])
    return float(lo), float(hi)


@lru_cache(maxsize=8)
def resample_weights(units: int) -> Array:
    """How often each of `units` prompts is drawn in each resample: [RESAMPLES, units], from a fixed seed."""
    generator = np.random.default_rng([SEED, units])
    return generator.multinomial(units, np.full(units, 1 / units), size=RESAMPLES).astype(np.float64)


def grouped(data: Array) -> Array:
    """Rows added up in at most MAX_UNITS groups of nearly equal size: prompts are independent, so are such groups."""
    if len(data) <= MAX_UNITS:
        return data
    edges = np.linspace(0, len(data), MAX_UNITS + 1).astype(int)[:-1]
    return np.add.reduceat(data, edges, axis=0)


def normal_quantile(probability: float) -> float:
    """Quantile of the standard normal distribution."""
    return NormalDist().inv_cdf(probability)
