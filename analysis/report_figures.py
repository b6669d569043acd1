"""The report's figures: for each one question, the SQL that answers it, the rows it gave and the charts of them.

A figure that a run cannot have says why in one sentence and has no chart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import duckdb

from dfbench.analysis import charts
from dfbench.analysis.charts import Chart
from dfbench.analysis.console import SETUP
from dfbench.analysis.counting import counted
from dfbench.analysis.store import rows

Row = dict[str, Any]

_COLUMNS = ", ".join(SETUP)
SPEEDS = f"""select workload, arm, {_COLUMNS}, speedup_decode as speedup, speedup_lo as lo, speedup_hi as hi
from speedup
where speedup_decode is not null"""
MATS = f"""select workload, arm, {_COLUMNS}, mat, mat_lo as lo, mat_hi as hi
from mat
where mat is not null"""
BOUNDS = f"""select workload, arm, {_COLUMNS}, mat, mat_lo, mat_hi, speedup, speedup_lo, speedup_hi, speedup_bound
from cells
where speedup is not null and mat is not null
  and arm in (select arm from jobs where drafter <> 'ar')"""
HISTOGRAM = f"""select workload, arm, {_COLUMNS}, least(accepted, {charts.MOST_ACCEPTED}) as accepted,
  sum(steps)::bigint as steps, sum(share) as share
from accepted_histogram
where arm in (select arm from jobs where drafter <> 'ar')
group by all
order by all"""
COSTS = """select device, model, dtype, engine, stack, source,
  case when source = 'calibration' then context end as context, queries,
  sum(passes)::bigint as passes, sum(verify_cost * passes) / sum(passes) as verify_cost
from verify_cost
where verify_cost is not null
group by all
order by all"""
PHASES = f"""select workload, arm, {_COLUMNS}, steps, step_us, draft_us, forward_us, accept_us, commit_us,
  other_us, draft_share, forward_share
from phases"""

NOT_TIMED = "The target of this run is not timed (recorded tokens), so there is no speed to show."
NO_AR = "The run has no AR arm, so there is nothing to compare speeds with."
NO_PAIR = "No job of the run has an AR job to be compared with, so there is no speedup to show."
ONLY_AR = "The run has no arm beside AR, so no drafts to show."


@dataclass(frozen=True)
class Figure:
    """One question of the report. `key` is its anchor; `absent` says why there is no chart."""

    key: str
    title: str
    lead: str
    sql: str
    rows: list[Row] = field(default_factory=list)
    charts: tuple[Chart, ...] = ()
    absent: str = ""


@dataclass(frozen=True)
class Scene:
    """One set-up of the run: what must not be pooled with another. `suffix` tells its charts from others'."""

    con: duckdb.DuckDBPyConnection
    setup: Mapping[str, str]
    arms: tuple[str, ...]
    suffix: str = ""

    def rows(self, sql: str) -> list[Row]:
        """Rows of a query that belong to this set-up, its columns left out, arms in the order of the plan."""
        found = [
            row for row in rows(self.con, sql) if all(row.get(key, value) == value for key, value in self.setup.items())
        ]
        kept = [{key: value for key, value in row.items() if key not in self.setup} for row in found]
        return sorted(kept, key=self._place) if kept and "arm" in kept[0] else kept

    def _place(self, row: Row) -> tuple[str, int]:
        return str(row.get("workload", "")), self.arms.index(row["arm"]) if row["arm"] in self.arms else len(self.arms)

    @property
    def drafting(self) -> list[str]:
        """Arms that draft."""
        known = {arm for (arm,) in self.con.sql("select distinct arm from jobs where drafter <> 'ar'").fetchall()}
        return [arm for arm in self.arms if arm in known]


def figures(scene: Scene) -> list[Figure]:
    """Every figure of one set-up, in the order of the page."""
    made: Sequence[Callable[[Scene], Figure]] = (slopes, bound, histogram, costs, phases)
    return [figure(scene) for figure in made]


def why_no_speed(con: duckdb.DuckDBPyConnection) -> str:
    """Why a run has no speedup; empty where nothing stands in the way."""
    [(timed, ar, pairs)] = con.sql(
        "select count(decode_s), count(*) filter (drafter = 'ar'), "
        "(select count(*) from pairs where drafter <> 'ar' and comparable) from jobs where not warmup"
    ).fetchall()
    if not timed:
        return NOT_TIMED
    if not ar:
        return NO_AR
    return "" if pairs else NO_PAIR


def slopes(scene: Scene) -> Figure:
    """Speedup and MAT, a line a workload over the arms."""
    made = []
    speeds, mats = scene.rows(SPEEDS), scene.rows(MATS)
    if speeds and scene.drafting and not why_no_speed(scene.con):
        made.append(charts.slope(f"slope-speedup{scene.suffix}", "Speedup over AR", speeds, scene.arms, "speedup"))
    if mats and scene.drafting:
        made.append(charts.slope(f"slope-mat{scene.suffix}", "MAT (tokens a target pass)", mats, scene.arms, "mat"))
    return Figure(
        f"slope{scene.suffix}",
        "From AR to each arm, by workload",
        f"A line for each workload; vertical bars are 95 % intervals over {counted(scene.con).units}, cut at the "
        "chart's edge where they go on (the table above has them whole). Lines only guide the eye.",
        f"{SPEEDS};\n\n{MATS};",
        [*speeds, *mats] if made else [],
        tuple(made),
        ONLY_AR if not scene.drafting else why_no_speed(scene.con),
    )


def bound(scene: Scene) -> Figure:
    """Speedup against MAT, with the bound that no sound run exceeds."""
    found = scene.rows(BOUNDS)
    drawn = (charts.mat_against_speedup(f"mat-speedup{scene.suffix}", found, scene.drafting),) if found else ()
    return Figure(
        f"bound{scene.suffix}",
        "Speedup against MAT, and its bound",
        "Each point is a workload and arm, with 95 % intervals, cut at the edge where they go on; the short bar above "
        "or below it is its bound, what AR paid at the very positions where the arm ran a pass. On the dashed line "
        "speedup equals MAT. How far a point lies under its bar is what wider passes and drafting cost.",
        BOUNDS,
        found,
        drawn,
        "" if found else ONLY_AR if not scene.drafting else why_no_speed(scene.con) or NO_PAIR,
    )


def histogram(scene: Scene) -> Figure:
    """How many draft tokens a step accepted."""
    found = scene.rows(HISTOGRAM)
    workloads = list(dict.fromkeys(row["workload"] for row in found))
    drawn = []
    for number, workload in enumerate(workloads, 1):
        mine = [row for row in found if row["workload"] == workload]
        arms = [arm for arm in scene.drafting if any(row["arm"] == arm for row in mine)]
        drawn.append(charts.accepted_histogram(f"accepted-{number}{scene.suffix}", workload, mine, arms))
    return Figure(
        f"accepted{scene.suffix}",
        "Accepted draft tokens a step",
        f"Share of all steps, those without a draft included (they accept 0). The last bar is {charts.MOST_ACCEPTED} "
        "and more, where a run gets so far.",
        HISTOGRAM,
        found,
        tuple(drawn),
        "" if found else ONLY_AR,
    )


def costs(scene: Scene) -> Figure:
    """What a pass costs by its width."""
    found = scene.rows(COSTS)
    calibrated = any(row["source"] == "calibration" for row in found)
    wide = any(row["queries"] > 1 for row in found)
    absent = "" if calibrated else "The run has no calibration: `dfbench calibrate` measures this curve with care."
    if not wide:
        absent = "The run has no calibration and no timed pass over more than one token, so there is no cost to show."
    return Figure(
        f"cost{scene.suffix}",
        "What a wider pass costs",
        "Median forward time of a pass over so many tokens, relative to a pass over one at the same context length. "
        "Lines: calibration. Hollow points: the run's own passes, averaged over context lengths.",
        COSTS,
        found if wide else [],
        (charts.verify_cost(f"verify-cost{scene.suffix}", found),) if wide else (),
        absent,
    )


def phases(scene: Scene) -> Figure:
    """Where a step's time goes."""
    found = scene.rows(PHASES)
    return Figure(
        f"phases{scene.suffix}",
        "Where a step's time goes",
        "Draft, forward pass, accept (read back and compare), commit (cache repair and drafter update); other is what "
        "these four miss of the step.",
        PHASES,
        found,
        (charts.phases(f"phases{scene.suffix}", found, scene.arms),) if found else (),
        "" if found else NOT_TIMED,
    )
