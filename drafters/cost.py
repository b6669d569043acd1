"""What a verification pass costs by its number of queries, relative to a plain step of one query."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dfbench.drafters.base import DrafterContext
from dfbench.errors import OptionError


@dataclass(frozen=True)
class CostCurve:
    """Measured points (queries, relative cost), queries ascending; linear between them and beyond the last two."""

    points: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, points: Iterable[tuple[int, float]]) -> CostCurve:
        """A curve through these points, in any order, made to start at (1, 1) and never to fall.

        Costs are divided by that of one query where it is given. A wider pass cannot be cheaper, so a fall is noise of
        the measurement. Raises OptionError for queries below 1, repeated queries, costs that are not positive numbers,
        and fewer than two points.
        """
        ordered = sorted((int(queries), float(cost)) for queries, cost in points)
        if len({queries for queries, _ in ordered}) < max(len(ordered), 2):
            raise OptionError("a cost curve needs two or more points [queries, cost], each with queries of its own.")
        if not 1 <= ordered[0][0] <= ordered[-1][0] < 2**31 or not all(0 < cost < float("inf") for _, cost in ordered):
            raise OptionError("a cost curve's points are [queries, cost] with queries of 1 or more and costs above 0.")
        unit = ordered[0][1] if ordered[0][0] == 1 else 1.0
        scaled = [(1, 1.0), *((queries, cost / unit) for queries, cost in ordered if queries > 1)]
        rising = itertools.accumulate((cost for _, cost in scaled), max)
        return cls(tuple(zip((queries for queries, _ in scaled), rising, strict=True)))

    def __call__(self, queries: int) -> float:
        """Relative cost of a pass over this many queries."""
        (before, low), (last, high) = self.points[-2:]
        if queries > last:
            return high + (queries - last) * (high - low) / (last - before)
        return float(np.interp(queries, [at for at, _ in self.points], [cost for _, cost in self.points]))

    def save(self, path: Path) -> str:
        """Write the curve as JSON; returns the file's SHA-256, by which a worker finds it."""
        queries, costs = zip(*self.points, strict=True)
        data = json.dumps({"queries": queries, "relative": costs}).encode()
        path.write_bytes(data)
        return hashlib.sha256(data).hexdigest()


def load(path: str | None, sha256: str | None, context: DrafterContext) -> CostCurve | None:
    """The curve in a file that a drafter's options name, by content where this worker was sent it, else by path.

    The file is JSON: `{"queries": [1, 8], "relative": [1.0, 1.15]}`, as `dfbench replay --verify-cost` reads it too.
    Raises OptionError for a missing, foreign or other file.
    """
    if path is None and sha256 is None:
        return None
    place, data = context.read("cost curve", "cost_file", path, sha256)
    try:
        curve = json.loads(data)
        return CostCurve.of(zip(curve["queries"], curve["relative"], strict=True))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        example = '{"queries": [1, 8], "relative": [1.0, 1.15]}'
        raise OptionError(f"{place} is not a cost curve: write one as {example}.") from error
