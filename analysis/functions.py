"""Intervals as SQL functions of lists, so that they work in any grouping that a query makes."""

from __future__ import annotations

from collections.abc import Callable

import duckdb
import pyarrow as pa
from duckdb.func import FunctionNullHandling, PythonUDFType

from dfbench.analysis import stats

INTERVAL = "STRUCT(lo DOUBLE, hi DOUBLE)"
FUNCTIONS = {"ratio_interval": "a, b", "ratio_of_ratios_interval": "a, b, c, d", "difference_interval": "a, b, c, d"}
"""Names and arguments of the functions: lists with one entry a prompt."""
_ARROW = pa.struct([("lo", pa.float64()), ("hi", pa.float64())])


def register(con: duckdb.DuckDBPyConnection) -> None:
    """Add `ratio_interval(Σa/Σb)`, `ratio_of_ratios_interval` and `difference_interval` (of Σa/Σb and Σc/Σd)."""

    def ratio_interval(a: pa.ChunkedArray, b: pa.ChunkedArray) -> pa.Array:
        return _by_row(stats.ratio_interval, a, b)

    def ratio_of_ratios_interval(
        a: pa.ChunkedArray, b: pa.ChunkedArray, c: pa.ChunkedArray, d: pa.ChunkedArray
    ) -> pa.Array:
        return _by_row(stats.ratio_of_ratios_interval, a, b, c, d)

    def difference_interval(a: pa.ChunkedArray, b: pa.ChunkedArray, c: pa.ChunkedArray, d: pa.ChunkedArray) -> pa.Array:
        return _by_row(stats.difference_interval, a, b, c, d)

    functions: tuple[Callable[..., pa.Array], ...] = (ratio_interval, ratio_of_ratios_interval, difference_interval)
    for function in functions:
        arguments = FUNCTIONS[function.__name__].count(",") + 1
        con.create_function(
            function.__name__,
            function,
            ["DOUBLE[]"] * arguments,
            INTERVAL,
            type=PythonUDFType.ARROW,
            null_handling=FunctionNullHandling.SPECIAL,
        )


def _by_row(function: Callable[..., stats.Interval | None], *columns: pa.ChunkedArray) -> pa.Array:
    """Call `function` for each row of list columns; NULL where a list is NULL or has a NULL in it."""
    rows = []
    for lists in zip(*columns, strict=True):
        values = [entry.values for entry in lists]
        whole = all(entry is not None and not entry.null_count for entry in values)
        interval = function(*(entry.to_numpy() for entry in values)) if whole else None
        rows.append(interval._asdict() if interval else None)
    return pa.array(rows, _ARROW)
