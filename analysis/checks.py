"""What a run's figures must satisfy, judged from its views: each check is one line, with the SQL that made it."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import duckdb

from dfbench.analysis import stats
from dfbench.analysis.counting import counted
from dfbench.analysis.store import PLANNED_PAIRS, problems, rows

State = Literal["ok", "finding", "note"]


class Check(NamedTuple):
    """One line under the headline table. A finding is something that must be explained; a note is worth knowing."""

    name: str
    state: State
    text: str
    sql: str


def checks(con: duckdb.DuckDBPyConnection) -> list[Check]:
    """Every check that has something to say about this run."""
    found = [*_completeness(con), *_bound(con), *_plain(con), *_losslessness(con), *_left_out(con), *_repetition(con)]
    return [*found, *_failures(con), *_throttled(con)]


VERDICTS_SQL = (
    "select workload, arm, other, difference, difference_lo as lo, difference_hi as hi, prompts from differences "
    "where metric = 'mat' and arm not in (select arm from jobs where drafter = 'ar') "
    "and other not in (select arm from jobs where drafter = 'ar')"
)


def verdicts(con: duckdb.DuckDBPyConnection) -> list[str]:
    """For every two spec arms of a workload, whether their MAT differs, in a sentence."""
    units = counted(con).units
    return [
        stats.verdict(
            f"{row['arm']} − {row['other']} on {row['workload']}",
            "MAT",
            row["difference"],
            None if row["lo"] is None else stats.Interval(row["lo"], row["hi"]),
            row["prompts"],
            units,
        )
        for row in rows(con, VERDICTS_SQL)
    ]


def _completeness(con: duckdb.DuckDBPyConnection) -> list[Check]:
    sql = "select kind, detail from problems"
    return [Check("run", "note", problem.detail, sql) for problem in problems(con)]


def _bound(con: duckdb.DuckDBPyConnection) -> list[Check]:
    sql = (
        "select workload, arm, prompts, speedup, speedup_bound, over_bound, over_bound_lo as lo, over_bound_hi as hi, "
        "holds_bound, finding, likely_cause from speedup_le_mat "
        "join (select distinct arm from jobs where drafter <> 'ar') using (arm)"
    )
    cells = rows(con, sql)
    if not cells:
        if not con.sql("select 1 from jobs where drafter = 'ar' limit 1").fetchall():
            return [Check("speedup ≤ bound", "note", "no AR arm: there is nothing to compare speeds with.", sql)]
        return []
    above = [cell for cell in cells if not cell["holds_bound"]]
    shown = sum(cell["finding"] for cell in above)
    text = f"holds in {len(cells) - len(above)} of {len(cells)} cells"
    if above:
        text += f"; a breach is shown in {shown or 'none'}"
    unit = counted(con).units.removesuffix("s")
    lines = [
        Check("speedup ≤ bound", "finding" if cell["finding"] else "note", _breach(cell, unit), sql) for cell in above
    ]
    return [Check("speedup ≤ bound", "note" if above else "ok", f"{text}.", sql), *lines]


def _breach(cell: dict[str, Any], unit: str) -> str:
    """A cell above its bound, in words: shown, or not to be told from noise. `unit`: what its interval resamples."""
    size = f"{cell['arm']} on {cell['workload']}: {cell['speedup']:.3f} is above its bound {cell['speedup_bound']:.3f}"
    size += f" by a factor of {cell['over_bound']:.3f}"
    if cell["lo"] is not None:
        size += f", interval {cell['lo']:.3f}…{cell['hi']:.3f}"
    few = cell["prompts"] < stats.MIN_PROMPTS
    prompts = f"{cell['prompts']} {unit}{'' if cell['prompts'] == 1 else 's'}"
    if not cell["finding"]:
        need = f"{stats.MIN_PROMPTS} or more have an interval" if few else "measure more prompts or repeats"
        return f"{size}: no breach shown with {prompts}; {need}."
    if cell["lo"] is None:
        size += ", which is no noise" if few else ", and there is no interval to cover it"
    cause = str(cell["likely_cause"])
    return f"{size}: a breach, shown with {prompts}; {cause}{'' if cause.endswith('?') else '.'}"


def _plain(con: duckdb.DuckDBPyConnection) -> list[Check]:
    sql = (
        "select workload, arm, speedup, mat, holds_mat from speedup_le_mat "
        "join (select distinct arm from jobs where drafter <> 'ar') using (arm)"
    )
    cells = rows(con, sql)
    if not cells:
        return []
    above = [
        f"{c['arm']} on {c['workload']} ({c['speedup']:.3f} > {c['mat']:.3f})" for c in cells if not c["holds_mat"]
    ]
    text = f"holds in {len(cells) - len(above)} of {len(cells)} cells"
    if above:
        text += f"; above: {', '.join(above)}. The plain form may be broken in a sound run, the bound may not"
    return [Check("speedup ≤ MAT", "note" if above else "ok", f"{text}.", sql)]


def _losslessness(con: duckdb.DuckDBPyConnection) -> list[Check]:
    sql = (
        f"select ({PLANNED_PAIRS}) planned, sum(pairs_compared)::bigint compared, "
        "sum(pairs_identical)::bigint identical, sum(tokens_compared)::bigint tokens, "
        "sum(tokens_differing)::bigint differing, sum(divergences)::bigint divergences, sum(ties)::bigint ties, "
        "sum(ulps)::bigint ulps, sum(unresolved)::bigint unresolved, sum(violations)::bigint violations "
        "from losslessness"
    )
    total = rows(con, sql)[0]
    if not total["compared"]:
        return []
    text = (
        f"{total['compared']} of {total['planned']} planned pairs compared, {total['identical']} with identical "
        f"outputs; {total['tokens'] - total['differing']} of {total['tokens']} tokens compared are identical"
    )
    if total["divergences"]:
        classes = ("ties", "ulps", "unresolved", "violations")
        listed = ", ".join(f"{total[name]} {name}" for name in classes if total[name])
        text += f"; first divergences: {listed}"
    state: State = "ok"
    if total["violations"]:
        state = "finding"
    elif total["unresolved"] or total["compared"] < (total["planned"] or 0):
        state = "note"
    control_sql = (
        "select sum(control_divergences)::bigint as diverged, sum(controls)::bigint as done from guard_summary"
    )
    control = rows(con, control_sql)[0]
    if control["done"]:
        text += f"; shape control: AR at the arms' widths parts from AR in {control['diverged']} of {control['done']}"
    elif total["divergences"]:
        text += ". A class from logits clears nobody: run `dfbench guard`"
    return [Check("losslessness", state, f"{text}.", f"{sql};\n\n{control_sql}")]


def _left_out(con: duckdb.DuckDBPyConnection) -> list[Check]:
    sql = "select sum(pairs_left_out)::bigint from speedup"
    [(count,)] = con.sql(sql).fetchall()
    [(untimed,)] = con.sql("select bool_and(decode_s is null) from jobs where not warmup").fetchall()
    if untimed:
        return [Check("timing", "note", "the target is not timed (recorded tokens): MAT alone can be shown.", sql)]
    if not count:
        return []
    return [Check("pairs", "note", f"{count} jobs have no pair (no AR run, or no step) and are in no speedup.", sql)]


def _repetition(con: duckdb.DuckDBPyConnection) -> list[Check]:
    sql = (
        "select workload, avg(repetition) share from jobs where drafter = 'ar' and not warmup "
        "group by workload having share > 0.5"
    )
    return [
        Check("repetition", "note", f"{workload}: {share:.0%} of AR's 4-grams repeat: loops inflate MAT.", sql)
        for workload, share in con.sql(sql).fetchall()
    ]


def _failures(con: duckdb.DuckDBPyConnection) -> list[Check]:
    sql = "select kind, count(*) from attempts group by kind order by 2 desc"
    found = con.sql(sql).fetchall()
    if not found:
        return []
    listed = ", ".join(f"{count} {kind}" for kind, count in found)
    return [Check("attempts", "note", f"attempts that did not commit: {listed}.", sql)]


def _throttled(con: duckdb.DuckDBPyConnection) -> list[Check]:
    sql = "select count(*) filter (throttled), count(*) from jobs where not warmup"
    [(count, total)] = con.sql(sql).fetchall()
    if not count:
        return []
    return [Check("throttling", "note", f"{count} of {total} jobs ran throttled; they are marked, not dropped.", sql)]
