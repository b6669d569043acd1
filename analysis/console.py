"""A run's headline for the terminal, for pasting as Markdown, and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import duckdb
from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dfbench.analysis.checks import Check, checks
from dfbench.analysis.query import markdown_cell
from dfbench.analysis.store import rows

HEADLINE_SQL = "select * from cells"
SETUP = ("model", "revision", "dtype", "engine", "device", "stack")
_MARKS = {"ok": ("✓", "green"), "finding": ("✗", "red"), "note": ("·", "yellow")}


def headline(con: duckdb.DuckDBPyConnection) -> RenderableType:
    """The headline table, one for each set-up of the run, with the checks beneath. Print it with rich."""
    parts: list[RenderableType] = []
    for setup, cells in by_setup(con):
        parts += [Text(setup_line(setup), style="bold"), _table(cells)]
    if not parts:
        parts.append(Text("No job of this run is finished: there is no figure to show yet."))
    return Group(*parts, *map(_check_line, checks(con)))


def markdown(con: duckdb.DuckDBPyConnection) -> str:
    """The headline table and the checks as Markdown, for pasting."""
    lines = []
    for setup, cells in by_setup(con):
        lines += [f"**{markdown_cell(setup_line(setup))}**", ""]
        lines += [f"| {' | '.join(_HEADS)} |", f"|{'---|' * 2}{'---:|' * (len(_HEADS) - 2)}"]
        lines += [f"| {' | '.join(map(markdown_cell, _row(cell)))} |" for cell in cells] + [""]
    lines += [f"- {_MARKS[check.state][0]} {check.name}: {markdown_cell(check.text)}" for check in checks(con)]
    return "\n".join(lines) + "\n"


def as_json(con: duckdb.DuckDBPyConnection) -> dict[str, Any]:
    """The headline's figures and the checks, with the SQL that gives them."""
    return {
        "meta": dict(con.sql("select key, value from ledger_meta where length(value) < 4096").fetchall()),
        "cells": {"sql": HEADLINE_SQL, "rows": rows(con, HEADLINE_SQL)},
        "speedup_le_mat": {"sql": "from speedup_le_mat", "rows": rows(con, "from speedup_le_mat")},
        "losslessness": {"sql": "from losslessness", "rows": rows(con, "from losslessness")},
        "checks": [check._asdict() for check in checks(con)],
    }


def by_setup(con: duckdb.DuckDBPyConnection) -> list[tuple[dict[str, str], list[dict[str, Any]]]]:
    """Cells grouped by everything that must not be pooled, arms in the order of the plan."""
    order = [arm for (arm,) in con.sql("select distinct on (arm) arm from ledger_plan").fetchall()]
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for cell in rows(con, HEADLINE_SQL):
        groups.setdefault(tuple(cell[name] for name in SETUP), []).append(cell)
    for cells in groups.values():
        cells.sort(key=lambda cell: (cell["workload"], cell["arm"] != "ar", _place(order, cell["arm"])))
    return [(dict(zip(SETUP, key, strict=True)), cells) for key, cells in groups.items()]


def _place(order: list[str], arm: str) -> int:
    return order.index(arm) if arm in order else len(order)


def setup_line(setup: dict[str, str]) -> str:
    """A set-up in one line."""
    model = f"{setup['model']}@{setup['revision'][:12]}" if setup["revision"] else setup["model"]
    return f"{model}, {setup['dtype']}, {setup['engine']}, on {setup['device']} ({setup['stack']})"


_HEADS = ("workload", "arm", "prompts", "tokens/s", "MAT", "95 %", "speedup", "95 %", "bound", "drafted", "accepted")


def _table(cells: Iterable[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, head in enumerate(_HEADS):
        table.add_column(head, justify="left" if number < 2 else "right", no_wrap=number != 1)
    last = None
    for cell in cells:
        row = _row(cell)
        if cell["workload"] == last:
            row[0] = ""
        elif last is not None:
            table.add_section()
        last = cell["workload"]
        table.add_row(*map(escape, row))
    return table


def _row(cell: dict[str, Any]) -> list[str]:
    planned = cell["prompts_planned"]
    prompts = str(cell["prompts"]) if planned in (None, cell["prompts"]) else f"{cell['prompts']} of {planned}"
    return [
        cell["workload"],
        cell["arm"],
        prompts,
        _number(cell["tokens_per_s"], ".1f"),
        _number(cell["mat"], ".2f"),
        interval_text(cell["mat_lo"], cell["mat_hi"]),
        _number(cell["speedup"], ".2f"),
        interval_text(cell["speedup_lo"], cell["speedup_hi"]),
        _number(cell["speedup_bound"], ".2f"),
        _number(cell["draft_coverage"], ".0%"),
        _number(cell["acceptance_rate"], ".0%"),
    ]


def interval_text(lo: float | None, hi: float | None) -> str:
    """An interval as a table shows it; – where there is none."""
    return "–" if lo is None or hi is None else f"{lo:.2f}…{hi:.2f}"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _check_line(check: Check) -> Text:
    mark, style = _MARKS[check.state]
    return Text.assemble((f"{mark} ", style), (f"{check.name}: ", "bold"), check.text)
