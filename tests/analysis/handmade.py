"""What the tests of the views share: runs small enough to work out by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import duckdb
from runmaker import RunMaker

from dfbench.analysis import open_run

Make = Callable[..., RunMaker]


def ids(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def one(con: duckdb.DuckDBPyConnection, query: str) -> dict[str, Any]:
    """The only row of a query, floats rounded to what can be worked out by hand."""
    [row] = con.sql(query).to_arrow_table().to_pylist()
    return {name: round(value, 9) if isinstance(value, float) else value for name, value in row.items()}


def to_twelve_places(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows with floats to 12 places of their own size: sums of floats depend on the order of rows in the last ones."""
    return [
        {name: float(f"{value:.11e}") if isinstance(value, float) else value for name, value in row.items()}
        for row in rows
    ]


def two_prompts(run: RunMaker) -> RunMaker:
    """The example of docs/measurement.md: AR step costs 1 and 2 ms, MATs 1 and 3, passes as dear as plain steps."""
    run.job("code", "p1", "ar", ids(100, 13), [1] * 12, [1.0] * 12)
    run.job("code", "p1", "pld", ids(100, 13), [1] * 12, [1.0] * 12, arm_order=1)
    run.job("code", "p2", "ar", ids(200, 13), [1] * 12, [2.0] * 12, arm_order=1)
    run.job("code", "p2", "pld", ids(200, 13), [3] * 4, [2.0] * 4)
    return run


def drafts(make: Make) -> duckdb.DuckDBPyConnection:
    """Drafts of 2, 2, 1 and 0 tokens, of which 2, 0, 1 and 0 are accepted."""
    run = make()
    run.job("code", "p1", "ar", ids(0, 8))
    run.job("code", "p1", "pld", ids(0, 8), [3, 1, 2, 1], [4.0, 4.0, 4.0, 2.0], drafted=[2, 2, 1, 0], draft_ms=1.0)
    return open_run(run.write())
