"""Rows of a run's record files, so many at a time that memory holds them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dfbench.cluster.ledger import Ledger
from dfbench.cluster.ledger_schema import RecordFile
from dfbench.workers.records import SCHEMAS

ROWS = 2_000_000
"""Rows that are held at once, about."""


def read_rows(
    ledger: Ledger,
    files: Iterable[RecordFile],
    table: str,
    condition: pc.Expression,
    columns: Sequence[str] | None = None,
) -> pa.Table:
    """Rows of these files of a table that satisfy a condition, with the types that the table has now."""
    names = list(columns or SCHEMAS[table].names)
    schema = pa.schema([SCHEMAS[table].field(name) for name in names], metadata=SCHEMAS[table].metadata)
    found = [
        pq.read_table(ledger.run_dir / file.name, columns=names, filters=condition).select(names).cast(schema)
        for file in files
    ]
    return pa.concat_tables(found) if found else schema.empty_table()
