"""The views of `sql/`: what each means, its columns and its statement, read from the head of its file."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import NamedTuple

import pyarrow as pa

TYPES: dict[str, pa.DataType] = {
    "VARCHAR": pa.string(),
    "INTEGER": pa.int32(),
    "BIGINT": pa.int64(),
    "DOUBLE": pa.float64(),
    "FLOAT": pa.float32(),
    "BOOLEAN": pa.bool_(),
    "INTEGER[]": pa.list_(pa.int32()),
    "BIGINT[]": pa.list_(pa.int64()),
}
"""DuckDB's types that a view made once may have, as Arrow's."""

_COLUMN = re.compile(
    r"(\w+)(?: ([A-Z]\w*(?: WITH TIME ZONE)?(?:\[\])?))?(?: \(([^()]*(?:\([^()]*\)[^()]*)*)\))?(?:, |$)"
)


class Column(NamedTuple):
    """One column: `type` is DuckDB's, `note` its unit or meaning; both may be empty."""

    name: str
    type: str
    note: str

    def __str__(self) -> str:
        """As the head of its view's file has it."""
        return " ".join([self.name, *filter(None, [self.type]), *([f"({self.note})"] if self.note else [])])


class View(NamedTuple):
    """One file of `sql/`. `kind` is view, "view (made once)" or macro."""

    name: str
    kind: str
    meaning: str
    columns: tuple[Column, ...]
    sql: str

    @property
    def made_once(self) -> bool:
        """Whether a connection keeps the rows: others build on them, or they read every step or token."""
        return "made once" in self.kind

    @property
    def query(self) -> str:
        """The view's select, without its head."""
        return re.split(r"create or replace view \w+ as\n", self.sql, maxsplit=1)[1].strip().removesuffix(";")

    @property
    def reads(self) -> frozenset[str]:
        """Names of the tables and views that its statement reads, its own parts (`with … as (`) left out."""
        statement = re.sub(r"--.*", "", self.sql)
        parts = re.findall(r"(\w+) as (?:materialized )?\(", statement)
        return frozenset(re.findall(r"\b(?:from|join)\s+(\w+)", statement)).difference(parts)

    @property
    def schema(self) -> pa.Schema:
        """Its columns as Arrow's, from the head of its file."""
        return pa.schema([(column.name, TYPES[column.type]) for column in self.columns])


@cache
def views() -> tuple[View, ...]:
    """Every view and macro of `sql/`, in the order in which they build on each other."""
    folder = resources.files("dfbench.analysis") / "sql"
    files = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".sql")), key=lambda entry: entry.name)
    return tuple(parse_view(entry.read_text(encoding="utf-8")) for entry in files)


def parse_view(text: str) -> View:
    """A view from its file, which begins `-- view: name: meaning`, then `-- columns: name TYPE (unit), …`.

    A view whose rows a connection keeps once they are made says `-- view (made once): …`.
    """
    lines = []
    for line in text.splitlines():
        if not line.startswith("--"):
            break
        lines.append(line[2:].strip())
    head, _, columns = " ".join(lines).partition("columns: ")
    kind, name, meaning = (part.strip() for part in head.split(":", 2))
    found = (Column(*match) for match in _COLUMN.findall(columns.strip()))
    return View(name, kind, meaning, tuple(found), text)
