"""A run's headline for the terminal, for pasting as Markdown, and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import duckdb
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dfbench.analysis.checks import VERDICTS_SQL, Check, checks, verdicts
from dfbench.analysis.compare import Comparison
from dfbench.analysis.counting import counted
from dfbench.analysis.parts import PARTS_SQL, sentences
from dfbench.analysis.query import markdown_cell
from dfbench.analysis.store import rows

HEADLINE_SQL = "select * from cells"
SETUP = ("model", "revision", "dtype", "engine", "device", "stack")
SHOWN_VERDICTS = 12
_MARKS = {"ok": ("✓", "green"), "finding": ("✗", "red"), "note": ("·", "yellow")}


class Headline:
    """The headline table, one for each set-up of the run, with the checks beneath. Print it with rich.

    A narrow terminal gets the columns that matter most.
    """

    def __init__(self, con: duckdb.DuckDBPyConnection) -> None:
        self.groups = by_setup(con)
        self.heads = _heads(con)
        self.checks = checks(con)
        self.verdicts = verdicts(con)
        self.parts = sentences(con)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for setup, cells in self.groups:
            yield Text(setup_line(setup), style="bold")
            yield _table(self.heads, cells, options.max_width)
        if not self.groups:
            yield Text("No job of this run is finished: there is no figure to show yet.")
        for check in self.checks:
            yield _check_line(check)
        if self.verdicts:
            yield Text("Arms compared on the same prompts:", style="bold")
            yield from (Text(f"  {line}") for line in self.verdicts[:SHOWN_VERDICTS])
        if len(self.verdicts) > SHOWN_VERDICTS:
            yield Text(f"  … {len(self.verdicts) - SHOWN_VERDICTS} more: dfbench sql differences")
        if self.parts:
            yield Text("What each part adds:", style="bold")
            yield from (Text(f"  {line}") for line in self.parts)


def headline(con: duckdb.DuckDBPyConnection) -> RenderableType:
    """The headline of an opened run, to be printed with rich."""
    return Headline(con)


def markdown(con: duckdb.DuckDBPyConnection) -> str:
    """The headline table and the checks as Markdown, for pasting."""
    lines: list[str] = []
    heads = _heads(con)
    for setup, cells in by_setup(con):
        lines += [f"**{markdown_cell(setup_line(setup))}**", ""]
        lines += [f"| {' | '.join(heads)} |", f"|{'---|' * 2}{'---:|' * (len(heads) - 2)}"]
        lines += [f"| {' | '.join(map(markdown_cell, _row(cell)))} |" for cell in cells] + [""]
    lines += [f"- {_MARKS[check.state][0]} {check.name}: {markdown_cell(check.text)}" for check in checks(con)]
    lines += [f"- {markdown_cell(line)}" for line in (*verdicts(con)[:SHOWN_VERDICTS], *sentences(con))]
    return "\n".join(lines) + "\n"


def as_json(con: duckdb.DuckDBPyConnection) -> dict[str, Any]:
    """The headline's figures and the checks, with the SQL that gives them."""
    return {
        "meta": dict(con.sql("select key, value from ledger_meta where length(value) < 4096").fetchall()),
        "cells": {"sql": HEADLINE_SQL, "rows": rows(con, HEADLINE_SQL)},
        "speedup_le_mat": {"sql": "from speedup_le_mat", "rows": rows(con, "from speedup_le_mat")},
        "losslessness": {"sql": "from losslessness", "rows": rows(con, "from losslessness")},
        "checks": [check._asdict() for check in checks(con)],
        "verdicts": {"sql": VERDICTS_SQL, "lines": verdicts(con)},
        "parts": {"sql": PARTS_SQL, "rows": rows(con, PARTS_SQL), "lines": sentences(con)},
    }


def by_setup(con: duckdb.DuckDBPyConnection) -> list[tuple[dict[str, str], list[dict[str, Any]]]]:
    """Cells grouped by everything that must not be pooled, arms in the order of the plan."""
    order = [arm for (arm,) in con.sql("select arm from ledger_plan group by arm order by min(place)").fetchall()]
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


_OPTIONAL = (3, 9, 10, 8)
"""Columns that a narrow terminal goes without, the first to go first."""


def _heads(con: duckdb.DuckDBPyConnection) -> list[str]:
    answers = counted(con).answers
    return ["workload", "arm", answers, "tokens/s", "MAT", "95 %", "speedup", "95 %", "bound", "drafted", "accepted"]


def _table(heads: list[str], cells: Iterable[dict[str, Any]], width: int) -> Table:
    body = [_row(cell) for cell in cells]
    kept = _fitting([heads, *body], width)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number in kept:
        table.add_column(heads[number], justify="left" if number < 2 else "right", no_wrap=True)
    last = None
    for row in body:
        first = "" if row[0] == last else row[0]
        if last not in (None, row[0]):
            table.add_section()
        last = row[0]
        table.add_row(*(escape(first if number == 0 else row[number]) for number in kept))
    return table


def _fitting(body: list[list[str]], width: int) -> list[int]:
    """Numbers of the columns that fit into a width."""
    kept = list(range(len(body[0])))
    widths = [max(len(row[number]) for row in body) + 3 for number in kept]
    for number in _OPTIONAL:
        if sum(widths[column] for column in kept) > width:
            kept.remove(number)
    return kept


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
    return "–" if lo is None or hi is None else f"{lo:z.2f}…{hi:z.2f}"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, f"z{form}")


def _check_line(check: Check) -> Text:
    mark, style = _MARKS[check.state]
    return Text.assemble((f"{mark} ", style), (f"{check.name}: ", "bold"), check.text)


def comparison(found: Comparison) -> RenderableType:
    """Two runs compared, for the terminal: figures, verdicts, what differs in set-up."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    units = next((change.counted for change in found.changes), "prompts")
    for number, head in enumerate(("workload", "arm", "metric", units, "A", "B", "change", "95 %")):
        table.add_column(head, justify="left" if number < 3 else "right", no_wrap=True)
    for change in found.changes:
        interval = change.interval
        band = f"{100 * interval.lo:+z.1f}…{100 * interval.hi:+z.1f} %" if interval else "–"
        names = (escape(change.workload), escape(change.arm), change.metric, str(change.prompts))
        table.add_row(*names, f"{change.a:.3f}", f"{change.b:.3f}", f"{100 * change.change:+z.1f} %", band)
    lines = [change.words for change in found.changes if change.change]
    if found.only_a or found.only_b:
        lines.append(f"Left out: {found.only_a} jobs that only A has and {found.only_b} that only B has.")
    if found.outputs:
        lines += ["Outputs that are not AR's:", *(f"  {line}" for line in found.outputs)]
    lines += found.notes
    lines.append("What changed in set-up:" if found.setup else "Nothing in the set-up differs.")
    lines += [f"  {name}: {a} → {b}" for name, a, b in found.setup]
    return Group(table, *map(Text, lines))
