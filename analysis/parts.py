"""What each part of a drafter adds, where a run has arms of one drafter that differ in its options."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import duckdb

from dfbench.analysis.counting import counted
from dfbench.analysis.stats import Interval, verdict
from dfbench.analysis.store import rows

Row = dict[str, Any]
PARTS_SQL = "select * from parts"
UNITS = {"mat": "MAT", "queries": "tokens a pass", "speedup": "speedup"}
"""What a difference in each metric is counted in."""


def steps_of(found: Sequence[Row]) -> list[dict[str, Row]]:
    """Rows of `parts` put together: for each arm and the arm it builds on, its row of each metric."""
    steps: dict[tuple[Any, ...], dict[str, Row]] = {}
    setup = ("workload", "device", "model", "revision", "dtype", "engine", "stack", "drafter", "arm", "base", "whole")
    for row in found:
        steps.setdefault(tuple(row.get(name) for name in setup), {})[row["metric"]] = row
    return list(steps.values())


def changes(row: Row) -> str:
    """What differs in the options of the two arms: "draft: chain → tree". A file's digest goes with its name."""
    mine, theirs = (_options(row[key]) for key in ("params", "base_params"))
    differing = (name for name in {**theirs, **mine} if mine.get(name) != theirs.get(name))
    names = [name for name in differing if not name.endswith("_sha256")]
    return ", ".join(f"{name}: {_shown(theirs.get(name))} → {_shown(mine.get(name))}" for name in names) or "nothing"


def _options(params: str | None) -> Mapping[str, Any]:
    options: dict[str, Any] = json.loads(params or "{}")
    return options


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


def sentences(con: duckdb.DuckDBPyConnection) -> list[str]:
    """What each arm adds to the one it builds on, a line each: what differs, and MAT, tokens a pass and speedup."""
    lines, units = [], counted(con).units
    for step in steps_of(rows(con, PARTS_SQL)):
        row = next(iter(step.values()))
        figures = "; ".join(_figure(step[metric]) for metric in UNITS if metric in step)
        where = f"{row['arm']} − {row['base']} on {row['workload']}, {row['prompts']} {units}"
        lines.append(f"{where} ({changes(row)}): {figures}.")
    return lines


def _figure(row: Row) -> str:
    """One metric: both values, the difference, its interval, and whether that shows a difference."""
    values = f"{UNITS[row['metric']]} {row['base_value']:.2f} → {row['value']:.2f}, {row['difference']:+z.2f}"
    if row["difference_lo"] is None:
        return f"{values} (no interval)"
    shown = "" if row["shown"] else ", no difference shown"
    return f"{values} ({row['difference_lo']:+z.2f}…{row['difference_hi']:+z.2f}{shown})"


def difference(row: Row, what: str, units: str) -> str:
    """One row of `parts` as a sentence."""
    lo, hi = row["difference_lo"], row["difference_hi"]
    found = None if lo is None or hi is None else Interval(lo, hi)
    return verdict(what, UNITS[row["metric"]], row["difference"], found, row["prompts"], units)
