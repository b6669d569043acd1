"""The seed report's table beside a run's: its published figures, where the run agrees, and what differs in set-up."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, NamedTuple

import duckdb
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dfbench.analysis.store import rows


class Published(NamedTuple):
    """What the seed report published for one workload: speedup over AR and MAT of its two arms."""

    pld_speedup: float
    cacheback_speedup: float
    pld_mat: float
    cacheback_mat: float


FIGURES = {
    "code": Published(1.45, 1.47, 1.45, 1.46),
    "copyctx": Published(1.30, 1.30, 1.30, 1.30),
    "chat": Published(1.26, 1.26, 1.25, 1.25),
}
SETUP = {
    "model": "Qwen/Qwen3-8B",
    "dtype": "bfloat16",
    "device": "NVIDIA GeForce RTX 5090",
    "engine": "recompute",
    "max_new_tokens": "256",
    "prompts": "30",
    "target": "torch",
}
"""The seed's set-up as far as its report tells."""
PLD = {"max_ngram": 1, "match": "recent"}
CACHEBACK = {"leader": 1, "draft": "chain"}
UNTOLD = "what the seed report does not say: draft and follower length, thinking mode, EOS rule, wording of the prompts"
ARMS = ("pld", "cacheback")
_MOST = 4
"""Numbers that are listed one by one."""


class Cell(NamedTuple):
    """One figure of the table: published, and this run's with its interval (None where the run has none)."""

    workload: str
    arm: str
    metric: str
    published: float
    published_flag: bool
    value: float | None
    lo: float | None
    hi: float | None
    flag: bool

    @property
    def agreement(self) -> str:
        """agrees, differs, or why that cannot be said. A published figure is exact to half a hundredth."""
        if self.value is None:
            return "not measured"
        lo, hi = (self.value, self.value) if self.lo is None or self.hi is None else (self.lo, self.hi)
        return "agrees" if lo - 0.005 <= self.published <= hi + 0.005 else "differs"


def cells(con: duckdb.DuckDBPyConnection) -> list[Cell]:
    """The seed table's figures, published and measured. A run with several devices gives its first in name order."""
    measured = {(row["workload"], row["drafter"]): row for row in rows(con, _QUERY)}
    found = []
    for workload, published in FIGURES.items():
        for metric in ("speedup", "mat"):
            for arm in ARMS:
                row = measured.get((workload, arm), {})
                figure = float(getattr(published, f"{arm}_{metric}"))
                above = getattr(published, f"{arm}_speedup") > getattr(published, f"{arm}_mat")
                value, mat = row.get(metric), row.get("mat")
                flag = metric == "speedup" and value is not None and mat is not None and round(value, 2) > round(mat, 2)
                found.append(
                    Cell(workload, arm, metric, figure, above and metric == "speedup", value,
                         row.get(f"{metric}_lo"), row.get(f"{metric}_hi"), flag)
                )  # fmt: skip
    return found


_QUERY = """
select workload, drafter, mat, mat_lo, mat_hi, speedup, speedup_lo, speedup_hi
from cells
join (select distinct arm, drafter from jobs where drafter in ('pld', 'cacheback')) using (arm)
qualify row_number() over (partition by workload, drafter order by arm <> drafter, device, arm) = 1
"""


def differences(con: duckdb.DuckDBPyConnection) -> list[str]:
    """What differs between the seed's set-up and this run's, a line each."""
    lines = []
    [facts] = rows(
        con,
        "select list(distinct model) as model, list(distinct dtype) as dtype, list(distinct device) as device, "
        "list(distinct engine) as engine, list(distinct max_new_tokens::varchar) as max_new_tokens, "
        "list(distinct target) as target from jobs where not warmup",
    )
    counts = con.sql("select distinct prompts::varchar from cells").fetchall()
    facts["prompts"] = [count for (count,) in counts]
    for name, seed in SETUP.items():
        mine = _listed(facts[name] or [])
        if mine and mine != seed:
            lines.append(f"{name}: seed {seed}, this run {mine}")
    for drafter, options in (("pld", PLD), ("cacheback", CACHEBACK)):
        query = f"select distinct arm, params from jobs where drafter = '{drafter}' and not warmup order by arm"
        for arm, text in con.sql(query).fetchall():
            given: dict[str, Any] = json.loads(text)
            lines += [
                f"{arm} {name}: seed {seed}, this run {given[name]}"
                for name, seed in options.items()
                if name in given and given[name] != seed
            ]
    return [*lines, UNTOLD]


def _listed(values: Collection[str]) -> str:
    """Some values; of many numbers, the ends."""
    if len(values) > _MOST and all(value.isdigit() for value in values):
        numbers = [int(value) for value in values]
        return f"{min(numbers)} to {max(numbers)}"
    return ", ".join(sorted(values))


def findings(con: duckdb.DuckDBPyConnection) -> list[str]:
    """The seed's two findings, held against this run: the order of the workloads, and the tie of its two arms."""
    known = {(cell.workload, cell.arm): cell.value for cell in cells(con) if cell.metric == "mat"}
    lines = []
    for arm in ARMS:
        values = [value for workload in FIGURES if (value := known[workload, arm]) is not None]
        if len(values) == len(FIGURES):
            ordered = sorted(values, reverse=True) == values
            shown = ", ".join(f"{workload} {value:.2f}" for workload, value in zip(FIGURES, values, strict=True))
            lines.append(
                f"code first, then copyctx, then chat: {'agrees' if ordered else 'differs'} for {arm} ({shown})."
            )
    ties = rows(
        con,
        "select workload, difference, difference_lo lo, difference_hi hi, shown from differences "
        "where metric = 'mat' and arm = 'pld' and other = 'cacheback' order by workload",
    )
    for tie in ties:
        interval = "no interval" if tie["lo"] is None else f"{tie['lo']:+z.2f}…{tie['hi']:+z.2f}"
        state = "cannot be said" if tie["shown"] is None else "differs" if tie["shown"] else "agrees"
        size = f"pld − cacheback {tie['difference']:+z.2f} MAT, {interval}"
        lines.append(f"Cacheback ties PLD on {tie['workload']}: {state} ({size}).")
    return lines


def seed_table(con: duckdb.DuckDBPyConnection) -> RenderableType:
    """The seed's table for this run beside the published one; ▲ marks speedups above their MAT."""
    known = {(cell.workload, cell.arm, cell.metric): cell for cell in cells(con)}
    columns = [(arm, metric) for metric in ("speedup", "mat") for arm in ARMS]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("workload", "", "AR", "PLD speedup", "Cacheback speedup", "MAT PLD", "MAT Cacheback"):
        table.add_column(head, justify="left" if head in ("workload", "") else "right")
    for workload in FIGURES:
        row = [known[workload, arm, metric] for arm, metric in columns]
        table.add_row(workload, "seed", "1.00", *(_figure(cell.published, cell.published_flag) for cell in row))
        table.add_row("", "this run", "1.00", *(_figure(cell.value, cell.flag) for cell in row))
        table.add_row("", "", "", *(cell.agreement for cell in row), end_section=True)
    lines = [
        "▲ speedup above MAT, rounded as shown: the seed's own table has three such cells.",
        *findings(con),
        "What differs in set-up:",
        *(f"  {line}" for line in differences(con)),
    ]
    return Group(table, *map(Text, lines))


def _figure(value: float | None, flag: bool) -> str:
    return "–" if value is None else f"{value:.2f}{' ▲' if flag else ''}"
