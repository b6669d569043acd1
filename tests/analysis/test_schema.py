"""The columns that the views know are those of the record format, and every view says what its columns are."""

from __future__ import annotations

import pyarrow as pa

from dfbench.analysis import catalog, schema
from dfbench.workers import records

DUCKDB = {
    pa.string(): "VARCHAR",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.bool_(): "BOOLEAN",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.timestamp("us", tz="UTC"): "TIMESTAMP WITH TIME ZONE",
    pa.list_(pa.int32()): "INTEGER[]",
}


def test_both_sides_know_the_same_columns() -> None:
    assert schema.SCHEMA_VERSION == records.SCHEMA_VERSION
    for name, columns in records.SCHEMAS.items():
        assert dict(schema.RECORDS[name]) == {entry.name: DUCKDB[entry.type] for entry in columns}


def test_heads_are_read() -> None:
    text = (
        "-- view (made once): mat: one cell;\n--   a thing.\n"
        "-- columns: arm VARCHAR, mat DOUBLE (ΣN / ΣS), why VARCHAR (a; b (c)), at_\n--   INTEGER (ns)\n"
        "create or replace view mat as\nselect 1;\n"
    )
    view = catalog.parse_view(text)
    assert (view.name, view.kind, view.made_once) == ("mat", "view (made once)", True)
    assert view.meaning == "one cell; a thing."
    assert view.columns == (
        ("arm", "VARCHAR", ""),
        ("mat", "DOUBLE", "ΣN / ΣS"),
        ("why", "VARCHAR", "a; b (c)"),
        ("at_", "INTEGER", "ns"),
    )
    assert view.query == "select 1"


def test_every_view_has_a_meaning_and_names_its_columns() -> None:
    for view in catalog.views():
        assert view.meaning.endswith((".", "?")), view.name
        assert view.columns or view.kind == "macro", view.name
