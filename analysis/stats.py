"""Intervals and verdicts: bootstrap over prompts, AR and arm kept paired.

Every headline figure is a ratio of sums over prompts (MAT: tokens ÷ steps; speedup: AR's time ÷ the arm's), a ratio of
two such ratios, or a difference of two. Its interval is a symmetric bootstrap-t interval (Hall, The Bootstrap and
Edgeworth Expansion, 1992, §3.5) with standard errors by linearisation; ratios on the log scale. Percentile and BCa
intervals cover too little on skewed data of 30 prompts and fewer (`make bench-analysis` prints what each reaches).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

RESAMPLES = 2000
LEVEL = 0.95
POWER = 0.8
SEED = 20_240_229
MIN_PROMPTS = 3
"""With fewer there is no interval: two prompts would give one that holds everything."""
FEWEST = 5
"""With fewer prompts most resamples repeat one prompt and cannot be studentised: Student's t serves instead."""
MAX_UNITS = 500
"""Above this many prompts, prompts are added up in this many groups before resampling."""

STRIP = 20
"""Resamples that are multiplied at a time: products this small a BLAS does without its threads, which would wait for
the cores that DuckDB keeps busy ten times longer than they work."""


class Interval(NamedTuple):
    """A two-sided interval."""

    lo: float
    hi: float


class Statistic(NamedTuple):
    """A function of column sums and its gradient; both take sums as [..., columns]."""

    value: Callable[[Array], Array]
    gradient: Callable[[Array], Array]


def log_product(signs: Sequence[int]) -> Statistic:
    """log Π sumⱼ^signⱼ."""
    powers = np.asarray(signs, dtype=np.float64)
    return Statistic(lambda sums: np.log(sums) @ powers, lambda sums: powers / sums)


def _difference(sums: Array) -> Array:
    a, b, c, d = np.moveaxis(sums, -1, 0)
    return np.asarray(a / b - c / d)


def _difference_gradient(sums: Array) -> Array:
    a, b, c, d = np.moveaxis(sums, -1, 0)
    return np.stack([1 / b, -a / b**2, -1 / d, c / d**2], axis=-1)


LOG_RATIO = log_product((1, -1))
LOG_RATIO_OF_RATIOS = log_product((1, -1, -1, 1))
DIFFERENCE = Statistic(_difference, _difference_gradient)


def ratio_interval(numerator: Sequence[float], denominator: Sequence[float]) -> Interval | None:
    """95 % interval of Σ numerator ÷ Σ denominator over prompts (entries of one place belong to one prompt).

    None where there is none: fewer than three prompts, or sums that are not positive.
    """
    return _exponential(interval((numerator, denominator), LOG_RATIO))


def ratio_of_ratios_interval(
    a: Sequence[float], b: Sequence[float], c: Sequence[float], d: Sequence[float]
) -> Interval | None:
    """95 % interval of (Σa ÷ Σb) ÷ (Σc ÷ Σd) over prompts; None as `ratio_interval`."""
    return _exponential(interval((a, b, c, d), LOG_RATIO_OF_RATIOS))


def difference_interval(
    a: Sequence[float], b: Sequence[float], c: Sequence[float], d: Sequence[float]
) -> Interval | None:
    """95 % interval of Σa ÷ Σb − Σc ÷ Σd over prompts; None as `ratio_interval`."""
    return interval((a, b, c, d), DIFFERENCE)


def _exponential(found: Interval | None) -> Interval | None:
    return Interval(math.exp(found.lo), math.exp(found.hi)) if found else None


def interval(columns: Sequence[Sequence[float]], statistic: Statistic) -> Interval | None:
    """Symmetric bootstrap-t interval of a statistic of column sums, resampling rows (prompts)."""
    data = np.asarray(columns, dtype=np.float64).T
    if data.ndim != 2 or len(data) < MIN_PROMPTS or not np.isfinite(data).all():
        return None
    data = grouped(ordered(data))
    sums = data.sum(axis=0)
    if not (sums > 0).all():
        return None
    units = len(data)
    influence = data @ statistic.gradient(sums)
    estimate = float(statistic.value(sums))
    error = math.sqrt(influence @ influence * units / (units - 1))
    if error <= 1e-12 * max(1.0, abs(estimate)):
        return Interval(estimate, estimate)
    half = error * (student_quantile(units - 1) if units < FEWEST else _studentised_quantile(data, statistic))
    return Interval(estimate - half, estimate + half)


def _studentised_quantile(data: Array, statistic: Statistic) -> float:
    """Quantile of |θ* − θ| ÷ its standard error over resamples, each studentised by its own."""
    units, columns = data.shape
    scale = data.sum(axis=0)
    first, second = np.triu_indices(columns)
    strips = resample_weights(units).reshape(-1, STRIP, units)
    moments = (strips @ np.hstack([data, data[:, first] * data[:, second]])).reshape(RESAMPLES, -1)
    sums, products = moments[:, :columns], moments[:, columns:]
    usable = (sums > 0).all(axis=1)
    sums, products = sums[usable], products[usable]
    gradient = statistic.gradient(sums)
    twice = np.where(first == second, 1.0, 2.0)
    variance = (products * twice * gradient[:, first] * gradient[:, second]).sum(axis=1) * units / (units - 1)
    # A resample of one prompt over and over has no spread of its own.
    varied = variance > 1e-9 * np.median(variance)
    shift = statistic.value(sums[varied]) - statistic.value(scale)
    return float(np.quantile(np.abs(shift) / np.sqrt(variance[varied]), LEVEL))


@lru_cache(maxsize=8)
def resample_weights(units: int) -> Array:
    """How often each of `units` prompts is drawn in each resample: [RESAMPLES, units], from a fixed seed."""
    drawn = np.random.default_rng([SEED, units]).integers(0, units, (RESAMPLES, units))
    drawn += np.arange(RESAMPLES)[:, None] * units
    return np.bincount(drawn.ravel(), minlength=RESAMPLES * units).reshape(RESAMPLES, units).astype(np.float64)


def ordered(data: Array) -> Array:
    """Rows in an order of their own, whatever order they came in, so that an interval is the same every time.

    Many are shuffled, from a fixed seed: groups of sorted rows would be less alike than groups drawn by chance.
    """
    order = np.lexsort(data.T)
    if len(data) > MAX_UNITS:
        order = order[np.random.default_rng([SEED, len(data)]).permutation(len(data))]
    return np.asarray(data[order])


def grouped(data: Array) -> Array:
    """Rows added up in at most MAX_UNITS groups of nearly equal size: prompts are independent, so are such groups."""
    if len(data) <= MAX_UNITS:
        return data
    edges = np.linspace(0, len(data), MAX_UNITS + 1).astype(int)[:-1]
    return np.add.reduceat(data, edges, axis=0)


@lru_cache
def student_quantile(freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t, by bisection on its distribution function (freedom 1 to 4)."""
    lo, hi = 0.0, 1000.0
    for _ in range(100):
        middle = (lo + hi) / 2
        lo, hi = (middle, hi) if _student_cdf(middle, freedom) < (1 + LEVEL) / 2 else (lo, middle)
    return hi


def _student_cdf(t: float, freedom: int) -> float:
    """Distribution function of Student's t (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    theta = math.atan(t / math.sqrt(freedom))
    cosine, term, total = math.cos(theta), 1.0, 0.0
    if freedom % 2:
        term = cosine
        for k in range(1, freedom - 1, 2):
            total += term
            term *= cosine * cosine * (k + 1) / (k + 2)
        within = 2 / math.pi * (theta + math.sin(theta) * total)
    else:
        for k in range(0, freedom - 1, 2):
            total += term
            term *= cosine * cosine * (k + 1) / (k + 2)
        within = math.sin(theta) * total
    return (1 + within) / 2


def prompts_needed(difference: float, found: Interval, prompts: int) -> float:
    """About how many prompts would show a difference of this size, four times in five (inf for none at all)."""
    if difference == 0:
        return math.inf
    normal = NormalDist()
    half = normal.inv_cdf((1 + LEVEL) / 2)
    error = (found.hi - found.lo) / 2 / half
    return prompts * ((half + normal.inv_cdf(POWER)) * error / difference) ** 2


def verdict(
    what: str, unit: str, difference: float, found: Interval | None, prompts: int, counted: str = "prompts"
) -> str:
    """A paired difference in words: how large, how sure, and how many prompts it would take to be surer.

    `counted`: what the prompts are called, see `counting`.
    """
    # Where 0 lies outside, no end is printed as 0: as many digits as tell them apart, from two to six.
    ends = (found.lo, found.hi) if found and (found.lo > 0 or found.hi < 0) else ()
    digits = next((digits for digits in range(2, 6) if all(not end or round(end, digits) for end in ends)), 6)
    size = f"{what}: {difference:+z.{digits}f} {unit}"
    if found is None:
        return (
            f"{size}, no interval "
            f"({f'too few {counted}' if prompts < MIN_PROMPTS else f'{counted} depend on each other'})."
        )
    size += f", interval {found.lo:+z.{digits}f}…{found.hi:+z.{digits}f}"
    if found.lo > 0 or found.hi < 0:
        return f"{size}: a difference, shown with {prompts} {counted}."
    needed = prompts_needed(difference, found, prompts)
    if needed > 100_000:
        return f"{size}: no difference shown with {prompts} {counted}, and none to speak of."
    return f"{size}: no difference shown with {prompts} {counted}; about {_rounded(needed)} would be needed."


def _rounded(count: float) -> str:
    """A count with two figures, as befits a guess."""
    digits = max(0, math.floor(math.log10(max(count, 1))) - 1)
    return f"{max(2, math.ceil(count / 10**digits) * 10**digits):,}"
