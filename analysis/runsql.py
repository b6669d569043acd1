"""`run.sql`: a run's views for DuckDB's own shell, with literal relative file lists.

What DuckDB's shell cannot do is left out and said so: intervals are NULL (they are computed in Python), and the ledger
is a copy from when the file was written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from dfbench.analysis.catalog import TYPES, views
from dfbench.analysis.functions import FUNCTIONS, INTERVAL
from dfbench.analysis.rundir import RunDir, inspect, ledger_table
from dfbench.analysis.schema import LEDGER
from dfbench.analysis.store import quote, raw_views

HEAD = """\
-- The views of this run for DuckDB's own shell. In this directory: duckdb -init run.sql
-- Written with every commit; file lists and ledger are those of that moment. Intervals (the columns …_lo and …_hi)
-- are NULL here: `dfbench sql` and `dfbench.analysis.open_run` compute them.
"""


def script(run: RunDir) -> str:
    """The text of `run.sql`."""
    parts = [HEAD, *raw_views(run, lambda name: name)]
    for name, (_, columns) in LEDGER.items():
        schema = pa.schema([(column, TYPES[kind]) for column, kind in columns.items()])
        parts.append(_literal(f"ledger_{name}", ledger_table(run.path, name, schema).to_pylist(), columns))
    problems = [dict(zip(("kind", "detail"), problem, strict=True)) for problem in run.problems]
    parts.append(_literal("problems", problems, dict.fromkeys(("kind", "detail"), "VARCHAR")))
    for name, arguments in FUNCTIONS.items():
        parts.append(f"create or replace macro {name}({arguments}) as null::{INTERVAL};\n")
    parts += [view.sql for view in views()]
    return "\n".join(parts)


def write_run_sql(path: str | Path) -> Path:
    """Write `run.sql` into the run at `path`, replacing it as a whole. Call it after a commit. Raises RunError."""
    run = inspect(Path(path))
    target = run.path / "run.sql"
    partial = target.with_suffix(".sql.part")
    partial.write_text(script(run), encoding="utf-8")
    partial.replace(target)
    return target


def _literal(name: str, rows: Sequence[Mapping[str, object]], columns: Mapping[str, str]) -> str:
    """A view of literal rows."""
    cast = ", ".join(f"{_name(column)}::{kind} as {_name(column)}" for column, kind in columns.items())
    names = ", ".join(map(_name, columns))
    values = ",\n    ".join(f"({', '.join(_value(row[column]) for column in columns)})" for row in rows)
    if not rows:
        values = f"({', '.join('null' for _ in columns)})"
    condition = "" if rows else " where false"
    return (
        f"create or replace view {name} as select {cast} from (values\n    {values}\n) as given({names}){condition};\n"
    )


def _name(column: str) -> str:
    return f'"{column}"'


def _value(value: object) -> str:
    if value is None:
        return "null"
    return quote(value) if isinstance(value, str) else str(value)
