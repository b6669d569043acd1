"""Opening a run: a DuckDB connection with the views of `sql/`, which can read the run's committed files and no more.

The list of files comes from the ledger, never from a glob, and stays as it was when the run was opened: open it again
to see what was committed since. What is costly to make is made when a query first asks for it, and kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from dfbench.analysis import functions
from dfbench.analysis.catalog import TYPES, View, views
from dfbench.analysis.lazy import LazyTable
from dfbench.analysis.rundir import Problem, RunDir, as_rows, find_run, inspect, ledger_table
from dfbench.analysis.sandbox import PROTOCOL, RunFileSystem, lock
from dfbench.analysis.schema import LEDGER, PROMPTS, RECORDS

_PROBLEMS = pa.schema([("kind", pa.string()), ("detail", pa.string())])


def open_run(path: str | Path | None = None) -> duckdb.DuckDBPyConnection:
    """A DuckDB connection to the run at `path`, the newest under `runs/` by default.

    Its views are those of `catalog.views()`; `problems` says what the run lacks. The connection can read the run's
    committed files and nothing else, and write nothing. Works beside the driver while a sweep runs. Query it with
    `con.sql(…)` and take `.df()`, `.to_arrow_table()` or `.fetchall()`; its cursors do not see the views. Raises
    RunError.
    """
    return connect(inspect(find_run(path)))


def connect(run: RunDir) -> duckdb.DuckDBPyConnection:
    """`open_run` for a directory that has been inspected."""
    con = duckdb.connect(":memory:")
    con.register_filesystem(RunFileSystem(run.path, run.files))
    con.execute("".join(raw_views(run, lambda name: f"{PROTOCOL}://{name}")))
    for name, table in _Maker(run).tables.items():
        con.register(name, table)
    functions.register(con)
    for view in views():
        if not view.made_once:
            con.execute(view.sql)
    con.register("problems", pa.table(as_rows(run.problems), schema=_PROBLEMS))
    lock(con, run.files)
    return con


def problems(con: duckdb.DuckDBPyConnection) -> list[Problem]:
    """What is missing from an opened run, in sentences."""
    return [Problem(*row) for row in con.sql("select kind, detail from problems").fetchall()]


PLANNED_PAIRS = (
    "select sum(jobs)::bigint from plan where arm not in (select distinct arm from raw_jobs where drafter = 'ar')"
)
"""Jobs of the plan that pair with AR's, over all arms and devices.

Not a sum over cells: a plan does not know devices, and an arm without a single record has no cell.
"""


def planned_pairs(con: duckdb.DuckDBPyConnection) -> int | None:
    """The count of `PLANNED_PAIRS`; None where a run has no plan."""
    return con.sql(PLANNED_PAIRS).fetchall()[0][0]  # type: ignore[no-any-return]


def rows(con: duckdb.DuckDBPyConnection, query: str) -> list[dict[str, Any]]:
    """Rows of a query as dicts."""
    return list(con.sql(query).to_arrow_table().to_pylist())


def raw_views(run: RunDir, locate: Callable[[str], str]) -> list[str]:
    """Statements that make `raw_<table>` for every table of Parquet files, empty where the run has none.

    `locate` turns a file name relative to the run directory into what DuckDB is to open.
    """
    tables: Mapping[str, Mapping[str, str]] = {**RECORDS, "prompts": PROMPTS}
    return [_raw_view(run, table, columns, locate) for table, columns in tables.items()]


def _raw_view(run: RunDir, table: str, columns: Mapping[str, str], locate: Callable[[str], str]) -> str:
    source = run.sources[table]
    if not source.files:
        empty = ", ".join(f"null::{kind} as {name}" for name, kind in columns.items())
        return f"create or replace view raw_{table} as select {empty} where false;\n"
    listed = ", ".join(quote(locate(name)) for name in source.files)
    chosen = ", ".join(name if name in source.columns else f"null::{kind} as {name}" for name, kind in columns.items())
    mixed = ", union_by_name = true" if source.mixed else ""
    return f"create or replace view raw_{table} as select {chosen} from read_parquet([{listed}]{mixed});\n"


def quote(text: str) -> str:
    """A SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


class _Maker:
    """Makes what is kept, on a database out of reach of any query: the ledger as Arrow, and the rows of views.

    There, views are tables of DuckDB's own, which the views that build on them read many times faster than Arrow.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._con: duckdb.DuckDBPyConnection | None = None
        self._views = {view.name: view for view in views()}
        self._made: set[str] = set()
        self._lock = threading.RLock()
        self.tables = {f"ledger_{name}": self._ledger(name) for name in LEDGER}
        self.tables |= {view.name: self._view(view) for view in self._views.values() if view.made_once}

    def _ledger(self, name: str) -> LazyTable:
        schema = pa.schema([(column, TYPES[kind]) for column, kind in LEDGER[name][1].items()])
        return LazyTable(schema, lambda: ledger_table(self._run.path, name, schema))

    def _view(self, view: View) -> LazyTable:
        return LazyTable(view.schema, lambda: self._rows(view))

    def _rows(self, view: View) -> pa.Table:
        """The rows of a view; several threads may ask."""
        with self._lock:
            con = self._connection()
            self._make(con, view)
            return con.sql(f"from {view.name}").to_arrow_table().cast(view.schema)

    def _make(self, con: duckdb.DuckDBPyConnection, view: View) -> None:
        """Make a view, and before it those that it reads."""
        if view.name in self._made:
            return
        for name in sorted(view.reads.intersection(self._views) - {view.name}):
            self._make(con, self._views[name])
        con.execute(f"create table {view.name} as {view.query}" if view.made_once else view.sql)
        self._made.add(view.name)

    def _connection(self) -> duckdb.DuckDBPyConnection:
        if self._con is None:
            self._con = duckdb.connect(":memory:")
            root = self._run.path.resolve()
            self._con.execute("".join(raw_views(self._run, lambda name: str(root / name))))
            functions.register(self._con)
            for name in LEDGER:
                self._con.register(f"ledger_{name}", self.tables[f"ledger_{name}"])
            for view in self._views.values():
                if view.kind == "macro" and view.reads.isdisjoint(self._views):
                    self._make(self._con, view)
        return self._con
