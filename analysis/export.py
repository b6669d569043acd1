"""A run taken elsewhere: one Parquet or CSV file a table, or one DuckDB file; to a folder or to any fsspec URL."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

import duckdb
import fsspec
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq

from dfbench.errors import QueryError, unknown

FORMATS = ("parquet", "csv", "duckdb")
TABLES = (
    "prompts", "jobs", "steps", "tokens", "witness", "calibration", "workers", "attempts", "plan", "cells", "mat",
    "speedup", "speedup_le_mat", "divergences", "losslessness",
)  # fmt: skip
"""Views that are written, as tables of these names."""
BATCH = 100_000


def export(con: duckdb.DuckDBPyConnection, target: str, form: str = "parquet") -> list[tuple[str, int]]:
    """Write the tables of an opened run to `target`: a new folder, a new .duckdb file, or a fsspec URL of one.

    Returns the tables and their rows. Raises QueryError when the format is unknown, the target exists or cannot be
    written.
    """
    if form not in FORMATS:
        raise QueryError(unknown("format", form, FORMATS))
    try:
        files, path = fsspec.core.url_to_fs(target)
        if files.exists(path):
            raise QueryError(f"{target} exists: write a target that does not, exports replace nothing.")
        if form == "duckdb":
            return _database(con, files, path)
        files.makedirs(path, exist_ok=True)
        return [(name, _table(con, files, f"{path}/{name}.{form}", name, form)) for name in TABLES]
    except (OSError, ValueError, ImportError, NotImplementedError) as error:
        reason = error if str(error) else "it is of a kind that is only read"
        raise QueryError(f"{target} cannot be written ({reason}): write another target.") from error


def _table(con: duckdb.DuckDBPyConnection, files: fsspec.AbstractFileSystem, path: str, name: str, form: str) -> int:
    count = 0
    reader = _batches(con, name, flat=form == "csv")
    with files.open(path, "wb") as out:
        options = pc.WriteOptions(quoting_style="needed")
        writer = (
            pq.ParquetWriter(out, reader.schema, compression="zstd")
            if form == "parquet"
            else pc.CSVWriter(out, reader.schema, write_options=options)
        )
        with writer:
            for batch in reader:
                writer.write_table(pa.Table.from_batches([batch]))
                count += batch.num_rows
    return count


def _batches(con: duckdb.DuckDBPyConnection, name: str, *, flat: bool) -> pa.RecordBatchReader:
    """Rows of a view as a stream; lists as JSON where the format has none."""
    chosen = ", ".join(_column(column, kind, flat) for column, kind, *_ in con.sql(f"describe from {name}").fetchall())
    return con.sql(f"select {chosen} from {name}").to_arrow_reader(BATCH)


def _column(name: str, kind: str, flat: bool) -> str:
    return f'to_json("{name}")::varchar as "{name}"' if flat and kind.endswith("[]") else f'"{name}"'


def _database(con: duckdb.DuckDBPyConnection, files: fsspec.AbstractFileSystem, path: str) -> list[tuple[str, int]]:
    with tempfile.TemporaryDirectory(prefix="dfbench-") as folder:
        local = Path(folder) / "run.duckdb"
        try:
            with duckdb.connect(str(local)) as database:
                written = list(_fill(con, database))
                database.execute("checkpoint")  # as closing does, which says nothing when it fails
        except duckdb.Error as error:
            raise QueryError(
                f"the DuckDB file cannot be written in {local.parent.parent}, for temporary files "
                f"({str(error).splitlines()[0]}): make room there, or set TMPDIR to another folder."
            ) from error
        parent = path.rsplit("/", 1)[0]
        if parent and parent != path:
            files.makedirs(parent, exist_ok=True)
        files.put_file(str(local), path)
    return written


def _fill(con: duckdb.DuckDBPyConnection, database: duckdb.DuckDBPyConnection) -> Iterable[tuple[str, int]]:
    for name in TABLES:
        database.register("incoming", _batches(con, name, flat=False))
        database.execute(f"create table {name} as select * from incoming")
        database.unregister("incoming")
        [(count,)] = database.sql(f"select count(*) from {name}").fetchall()
        yield name, count
