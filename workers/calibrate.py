"""What a pass costs on this device: forward time by number of queries and context, and the memory's read bandwidth.

Widths take turns within each round, in a new order every round, so that a slow moment of the machine falls on all of
them and the ratios stay good. A median without its interval says nothing: `curve` gives both, `verdict` judges.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from dfbench.drafters.base import Draft
from dfbench.workers import team
from dfbench.workers.engine import TorchTarget
from dfbench.workers.pages import Pages
from dfbench.workers.records import CALIBRATION, WorkerFacts

QUERIES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96)
NOISY = 0.10
"""Half-width of a ratio's interval, as a share of the ratio, beyond which it is not worth quoting."""
READ_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}
"""Bytes in one sweep over memory, many times what caches hold."""
_SEED = 20
_RESAMPLES = 2000


@dataclass(frozen=True)
class Settings:
    """`contexts`: tokens in the cache; `samples`: timed passes a width; `read_bytes`: None fits the device."""

    queries: tuple[int, ...] = QUERIES
    contexts: tuple[int, ...] = (128, 512, 2048)
    samples: int = 15
    read_samples: int = 15
    read_bytes: int | None = None


FULL = Settings()
SHORT = Settings(contexts=(256,), samples=3, read_samples=5)
"""For the start of a sweep: a few seconds on two CPU cores."""


class Point(NamedTuple):
    """Cost at one width: median forward time, and its ratio to one query at the same context, with a 95 % interval."""

    context: int
    queries: int
    samples: int
    median_ns: float
    ratio: float
    ratio_lo: float
    ratio_hi: float

    @property
    def noisy(self) -> bool:
        """Whether the interval is too wide for the ratio to be quoted."""
        return self.samples < 2 or (self.ratio_hi - self.ratio_lo) / 2 > NOISY * self.ratio


class Bandwidth(NamedTuple):
    """Bytes read per second: median over the sweeps, with a 95 % interval."""

    median: float
    lo: float
    hi: float


def calibrate(target: TorchTarget, facts: WorkerFacts, settings: Settings = FULL, run_id: str = "") -> pa.Table:
    """Time passes and memory sweeps on a loaded target; rows in the schema CALIBRATION.

    Widths that do not fit the target's query budget, and contexts beyond the model's, are left out.
    """
    about: dict[str, Any] = {
        "run_id": run_id,
        **{name: getattr(facts, name) for name in ("worker_id", "device", "model", "dtype", "engine", "stack")},
    }
    rows = [
        {**about, "kind": "forward", "context": context, "queries": queries, "sample": sample, "ns": ns}
        for context, queries, sample, ns in _forwards(target, settings)
    ]
    size, sweeps = _reads(target, settings)
    rows += [{**about, "kind": "read", "bytes": size, "sample": at, "ns": ns} for at, ns in enumerate(sweeps)]
    return pa.Table.from_pylist(rows, schema=CALIBRATION)


def _forwards(target: TorchTarget, settings: Settings) -> Iterator[tuple[int, int, int, int]]:
    """(context, queries, sample, ns); sample 0 is the first after a round that only warms up."""
    dice = random.Random(_SEED)
    for context in settings.contexts:
        if context + max(settings.queries) > target.context_limit:
            continue
        target.prefill([dice.randrange(target.vocab_size) for _ in range(context)])
        widths = [queries for queries in settings.queries if queries <= target.max_nodes + 1]
        for sample in range(-1, settings.samples):
            dice.shuffle(widths)
            for queries in widths:
                ns = target.probe(Draft([dice.randrange(target.vocab_size) for _ in range(queries - 1)]))
                if sample >= 0:
                    yield context, queries, sample, ns


def _reads(target: TorchTarget, settings: Settings) -> tuple[int, list[int]]:
    """Bytes of a buffer and the times of summing it up: it is far larger than any cache, so memory sets the pace."""
    device = target.device
    size = settings.read_bytes or READ_BYTES["cuda" if device.type == "cuda" else "cpu"]
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 2)
    size = size // 512 * 512
    work = _gpu_read(size, device) if device.type == "cuda" else _cpu_read(size)
    times = [_sweep(target, work) for _ in range(settings.read_samples + 1)]
    return size, times[1:]


def _gpu_read(size: int, device: torch.device) -> Callable[[], torch.Tensor]:
    return torch.ones(size // 4, dtype=torch.float32, device=device).sum


def _cpu_read(size: int) -> Callable[[], torch.Tensor]:
    """The quickest read there is here, for no pass may be measured against a slower one."""
    buffer = Pages().empty((size // 4,), torch.float32).fill_(1)
    threads = team.find()
    if threads is None:
        return buffer.sum
    from dfbench.workers import reading  # Compiles, where no disk has it yet.

    return lambda: torch.tensor(reading.read(threads, buffer.data_ptr(), size, torch.get_num_threads()))


def _sweep(target: TorchTarget, work: Callable[[], torch.Tensor]) -> int:
    timer = target.timer
    timer.begin()
    total = work()
    timer.end()
    return timer.read(total.long()[None], None)[2]


def curve(table: pa.Table) -> list[Point]:
    """Medians, ratios and intervals of a calibration, by context and width."""
    forwards = table.filter(pc.equal(table["kind"], "forward"))
    times: dict[tuple[int, int], list[int]] = {}
    for context, queries, ns in zip(
        *(forwards[name].to_pylist() for name in ("context", "queries", "ns")), strict=True
    ):
        times.setdefault((context, queries), []).append(ns)
    points = []
    for (context, queries), sample in sorted(times.items()):
        single = times.get((context, 1))
        if single is not None:
            points.append(_point(context, queries, sample, single))
    return points


def _point(context: int, queries: int, sample: Sequence[int], single: Sequence[int]) -> Point:
    median = float(np.median(sample))
    ratio = median / float(np.median(single))
    if queries == 1:
        spread = _resampled(single) / median
    else:
        spread = _resampled(sample) / _resampled(single, _SEED + 1)
    lo, hi = np.quantile(spread, [0.025, 0.975])
    return Point(context, queries, len(sample), median, ratio, float(lo), float(hi))


def _resampled(sample: Sequence[int], seed: int = _SEED) -> np.ndarray:
    """Medians of bootstrap resamples."""
    values = np.asarray(sample, dtype=np.float64)
    draws = np.random.default_rng(seed).integers(0, len(values), (_RESAMPLES, len(values)))
    return np.median(values[draws], axis=1)


def bandwidth(table: pa.Table) -> Bandwidth | None:
    """Read bandwidth, bytes a second; None where it was not measured."""
    reads = table.filter(pc.equal(table["kind"], "read"))
    if not reads.num_rows:
        return None
    size, times = reads["bytes"][0].as_py(), reads["ns"].to_pylist()
    slow, fast = np.quantile(_resampled(times), [0.975, 0.025])
    return Bandwidth(size / np.median(times) * 1e9, size / slow * 1e9, size / fast * 1e9)


def verdict(points: Sequence[Point]) -> str:
    """One sentence: whether the curve may be quoted, and if not, what to do."""
    noisy = [point for point in points if point.noisy]
    if not points:
        return "Nothing was measured: the contexts exceed the model's, or no width fits max_queries."
    if not noisy:
        return f"Steady: every ratio is known to within {NOISY:.0%}."
    worst = max(noisy, key=lambda point: (point.ratio_hi - point.ratio_lo) / point.ratio)
    return (
        f"Too noisy to quote: {len(noisy)} of {len(points)} ratios are not known to within {NOISY:.0%} (the worst, at"
        f" {worst.queries} queries and context {worst.context}: {worst.ratio_lo:.2f} to {worst.ratio_hi:.2f});"
        " stop what else runs on this machine, or take more samples."
    )
