"""One query from a person: checked, run, and its answer in the format asked for."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import datetime
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
from rich import box
from rich.table import Table
from rich.text import Text

from dfbench.analysis.catalog import View, views
from dfbench.analysis.rundir import require_not_own
from dfbench.errors import QueryError

FORMATS = ("table", "csv", "json", "markdown", "parquet")
SHOWN_ROWS = 60
_READING = ("SELECT", "EXPLAIN", "MULTI", "CALL")


def run_query(con: duckdb.DuckDBPyConnection, query: str) -> pa.Table:
    """The answer to one query. Raises QueryError, in a sentence, for what does not parse, exist or may not be done."""
    try:
        query.encode()  # DuckDB takes what is not UTF-8 for a mistake in the call.
        statements = con.extract_statements(query)
        if len(statements) != 1:
            raise QueryError('write one query, such as "from cells".')
        if statements[0].type.name not in _READING:
            raise QueryError("dfbench sql only reads: write a select; --format and --out write its answer to a file.")
        return _distinct(_run(con, query))
    except UnicodeError as error:
        raise QueryError("the query is not UTF-8 text: write it in UTF-8.") from error
    except duckdb.Error as error:
        raise QueryError(explain(str(error))) from error


def _run(con: duckdb.DuckDBPyConnection, query: str) -> pa.Table:
    """The answer, worked out beside the main thread: inside DuckDB, that would not hear a Ctrl-C before the end."""
    with ThreadPoolExecutor(1) as beside:
        try:
            answer = beside.submit(lambda: con.sql(query).to_arrow_table())  # It may be stopped before this returns.
            while not wait([answer], timeout=0.2).done:
                pass  # The signal may have gone to another thread, which does not wake this one.
            return answer.result()
        except KeyboardInterrupt:
            con.interrupt()
            raise


def _distinct(table: pa.Table) -> pa.Table:
    """The same columns, each under a name of its own: a join may give two the same, and rows would keep but one."""
    names: list[str] = []
    for name in table.column_names:
        fresh, number = name, 0
        while fresh in names:
            number += 1
            fresh = f"{name}_{number}"
        names.append(fresh)
    return table.rename_columns(names)


def explain(message: str) -> str:
    """DuckDB's message in one sentence that says what to write instead."""
    missing = re.match(r"Catalog Error: Table with name (.+?) does not exist!", message)
    if missing:
        return f"there is no view '{missing[1]}': use one of {', '.join(names())}."
    first, *rest = message.splitlines()
    kind, _, text = first.partition(": ")
    hint = next((line.removesuffix(".") for line in rest if line.startswith(("Candidate", "Did you mean"))), "")
    text = text.rstrip(".!")
    if kind == "Parser Error":
        return f"the query does not parse: {text}."
    if kind == "Permission Error":
        return f"a query may read this run and nothing else: {text.split(' - ')[0]}."
    return f"{text} ({hint})." if hint else f"{text}."


def names() -> list[str]:
    """The names of all views."""
    return [view.name for view in listed()]


def listed() -> list[View]:
    """All views, without macros."""
    return [view for view in views() if "view" in view.kind]


def needs_more(con: duckdb.DuckDBPyConnection, query: str) -> bool:
    """Whether a query typed so far is only a beginning: a comment, an open bracket, or DuckDB stumbles over its end."""
    try:
        if not con.extract_statements(query):
            return True
    except duckdb.Error as error:
        first = str(error).splitlines()[0]
        near = re.search(r'at or near "(.*)"$', first)
        words = query.split()
        if near and len(words) > 1 and words[-1].endswith(near[1]):
            return True
        return "end of input" in first or "unterminated" in first or query.count("(") > query.count(")")
    return False


def _listed(table: pa.Table) -> list[dict[str, Any]]:
    """The rows as Python values."""
    columns = [_values(column) for column in table.columns]
    return [dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)]


def _values(column: pa.ChunkedArray) -> list[Any]:
    """A column as Python values; as text where it holds a date that Python's calendar does not."""
    try:
        return list(column.to_pylist())
    except (OverflowError, ValueError):
        with duckdb.connect(":memory:") as con:
            con.register("given", pa.table({"value": column}))
            return [value for (value,) in con.sql("select value::varchar from given").fetchall()]


def _finite(value: Any) -> Any:
    """The same with null for every number that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return {name: _finite(entry) for name, entry in value.items()} if isinstance(value, dict) else value


def text(table: pa.Table, form: str) -> str:
    """A table as csv, json or markdown."""
    return _WRITERS[form](table)


def save(table: pa.Table, form: str, path: Path) -> None:
    """Write a table to a file in any format but `table`. Raises QueryError when the file cannot be written."""
    require_not_own(path)
    try:
        if form == "parquet":
            pq.write_table(table, path, compression="zstd")
        else:
            path.write_text(text(table, form), encoding="utf-8")
    except OSError as error:
        raise QueryError(f"{path} cannot be written ({error.strerror}): write another --out.") from error


def _csv(table: pa.Table) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(table.column_names)
    writer.writerows([_plain(value) for value in row.values()] for row in _listed(table))
    return out.getvalue()


def _json(table: pa.Table) -> str:
    return json.dumps(_finite(_listed(table)), default=_jsonable, ensure_ascii=False, indent=2) + "\n"


def _markdown(table: pa.Table) -> str:
    if (plan := plan_text(table)) is not None:
        return f"```\n{plan}\n```\n"
    right = [_is_number(entry.type) for entry in table.schema]
    lines = [table.column_names, ["---:" if number else "---" for number in right]]
    lines += [[markdown_cell(shown(value)) for value in row.values()] for row in _listed(table)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


_WRITERS: dict[str, Callable[[pa.Table], str]] = {"csv": _csv, "json": _json, "markdown": _markdown}


def markdown_cell(value: str) -> str:
    """Text that stays within its cell."""
    return value.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def shown(value: Any) -> str:
    """A value as a person reads it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:z.6g}"
    if isinstance(value, int):
        return str(value)
    return str(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, (list, dict)):
        return json.dumps(value, default=_jsonable, ensure_ascii=False)
    if isinstance(value, datetime):
        return value.isoformat()
    return value


def _jsonable(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.hex()
    return str(value)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def plan_text(table: pa.Table) -> str | None:
    """What an `explain` drew, over many lines; None for any other answer."""
    if table.column_names != ["explain_key", "explain_value"]:
        return None
    return "\n".join("\n".join(map(_printable, str(row["explain_value"]).splitlines())) for row in _listed(table))


def terminal(table: pa.Table, width: int) -> tuple[Table, str]:
    """A table for the terminal, and a line that says what of it is not shown."""
    head = _listed(table.slice(0, SHOWN_ROWS))
    cells = {name: [_clip(shown(row[name])) for row in head] for name in table.column_names}
    kept = _fitting(cells, width)
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in kept:
        right = name != "…" and _is_number(table.schema.field(name).type)
        drawn.add_column(Text(name), justify="right" if right else "left", no_wrap=True)
    for number in range(len(head)):
        drawn.add_row(*(Text(cells[name][number] if name != "…" else "…") for name in kept))
    notes = []
    if table.num_rows > SHOWN_ROWS:
        notes.append(f"{SHOWN_ROWS} of {table.num_rows} rows")
    if "…" in kept:
        notes.append(f"{len(kept) - 1} of {table.num_columns} columns")
    note = f"({', '.join(notes)} shown; select fewer, or write --format csv)" if notes else ""
    return drawn, note or f"({table.num_rows} row{'' if table.num_rows == 1 else 's'})"


def _printable(value: str) -> str:
    return "".join(character if character.isprintable() else " " for character in value)


def _clip(value: str, longest: int = 48) -> str:
    line = _printable(value)
    return line if len(line) <= longest else line[: longest - 1] + "…"


def _fitting(cells: dict[str, list[str]], width: int) -> list[str]:
    """Column names that fit, first and last ones first; "…" stands for those left out."""
    widths = {name: max([len(name), *(len(value) for value in values)]) + 3 for name, values in cells.items()}
    order = list(cells)
    if sum(widths.values()) <= width:
        return order
    front: list[str] = []
    back: list[str] = []
    room = width - 4
    while order:
        at = 0 if len(front) <= 2 * len(back) + 1 else -1
        name = order.pop(at)
        if widths[name] > room:
            break
        room -= widths[name]
        (front if at == 0 else back).append(name)
    return [*front, "…", *reversed(back)]
