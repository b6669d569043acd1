"""The report's tables: headline, other definitions, paired differences, timing notes, endings, environment."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import duckdb

from dfbench.analysis.counting import counted
from dfbench.analysis.parts import difference
from dfbench.analysis.report_figures import Row, Scene
from dfbench.analysis.report_markup import (
    NONE,
    Html,
    el,
    evidence,
    figure_cell,
    header_row,
    join,
    number,
    prose,
    scrolling,
    table,
    text,
)
from dfbench.analysis.stats import MIN_PROMPTS
from dfbench.analysis.store import rows

CELLS = (
    "select * from cells left join losslessness using (workload, arm, device, model, revision, dtype, engine, stack)"
)
DEFINITIONS = """select workload, arm, device, model, revision, dtype, engine, stack, mat.mat,
  mat_drafted, mat_mean_prompt, speedup_decode,
  speedup_identical, identical_pairs, pairs, speedup_e2e, efficiency, efficiency_lo,
  efficiency_hi, draft_share
from mat
left join speedup using (workload, arm, device, model, revision, dtype, engine, stack)
left join efficiency using (workload, arm, device, model, revision, dtype, engine, stack)
where arm in (select arm from jobs where drafter <> 'ar')"""
DIFFERENCES = """select * from differences
where arm in (select arm from jobs where drafter <> 'ar') and other in (select arm from jobs where drafter <> 'ar')"""
PROMPT_BOUNDS = """select workload, arm, prompt_id, device, model, revision, dtype, engine, stack, mat, speedup,
  speedup_bound, over_bound, holds_bound, holds_mat, likely_cause
from speedup_le_mat_prompts
where arm in (select arm from jobs where drafter <> 'ar')"""
GUARD = """select workload, arm, device, controls, control_divergences, scored, outside, witnessed, cleared, replayed,
  replay_differs
from guard_summary
where controls + scored + witnessed + replayed > 0"""
ORDER = """select workload, arm, device, arm_order, jobs, ms_per_token, relative, relative_lo, relative_hi
from order_effects
where relative is not null and arm in (select arm from jobs where drafter <> 'ar')"""
THROTTLED = "select workload, arm, device, jobs, known, throttled, pairs_clean, speedup, speedup_clean from throttled"
ENDINGS = """select workload, arm, device, outputs, capped, loops, repetition, mat, mat_uncapped
from repetition"""
WORKERS = "select worker_id, node, device, joined_at, left_at, facts from workers"
ARMS = "select distinct arm, drafter, cache, params from jobs where not warmup order by drafter <> 'ar', arm"


MOST_BREACHES = 10


def headline(scene: Scene) -> Html:
    """Workload × arm: MAT and speedup with intervals, the bound, losslessness."""
    found = scene.rows(CELLS)
    count = counted(scene.con)
    heads = ("arm", "MAT", "speedup", "bound", "outputs equal to AR's", "tokens that differ", count.answers, "tokens/s")
    lines: list[Html] = []
    workload = None
    for cell in found:
        if cell["workload"] != workload:
            workload = cell["workload"]
            lines.append(el("tr", el("th", workload, class_="group", scope="colgroup", colspan=len(heads))))
        first, *others = _headline_cells(cell)
        lines.append(el("tr", el("th", first, scope="row"), *(el("td", other, class_="number") for other in others)))
    caption = (
        f"Workload and arm, with 95 % intervals over {count.units} beneath the figures; speedup is decoding time over "
        "AR's"
    )
    whole = el(
        "table",
        el("caption", el("span", caption)),
        header_row(heads),
        el("tbody", *lines),
    )  # fmt: skip
    missing = [f"{cell['arm']} on {cell['workload']}" for cell in found if cell["mat_lo"] is None]
    note = (
        f"Where no interval is shown there are fewer than three {count.units}, or they depend on each other."
        if missing
        else ""
    )
    return join([scrolling(caption, whole), el("p", note, class_="note") if note else "", evidence(CELLS, found)])


def _headline_cells(cell: Row) -> list[str]:
    planned = cell["prompts_planned"]
    done = str(cell["prompts"]) if planned in (None, cell["prompts"]) else f"{cell['prompts']} of {planned}"
    compared = cell["pairs_compared"]
    return [
        cell["arm"],
        figure_cell(cell["mat"], cell["mat_lo"], cell["mat_hi"]),
        figure_cell(cell["speedup"], cell["speedup_lo"], cell["speedup_hi"]),
        number(cell["speedup_bound"]),
        f"{cell['pairs_identical']} of {compared}" if compared else NONE,
        f"{cell['tokens_differing']} of {cell['tokens_compared']}" if compared else NONE,
        done,
        number(cell["tokens_per_s"], ".1f"),
    ]


def definitions(scene: Scene) -> Html:
    """MAT and speedup by every definition in use, side by side."""
    found = scene.rows(DEFINITIONS)
    if not found:
        return Html("")
    heads = ("workload", "arm", "MAT, all steps", "MAT, drafted steps only", "MAT, mean of prompts",
             "speedup, decoding", "speedup, identical outputs", "speedup, end to end", "efficiency",
             "time drafting")  # fmt: skip
    body = [
        [row["workload"], row["arm"], number(row["mat"]), number(row["mat_drafted"]), number(row["mat_mean_prompt"]),
         number(row["speedup_decode"]), _identical(row), number(row["speedup_e2e"]),
         figure_cell(row["efficiency"], row["efficiency_lo"], row["efficiency_hi"]), number(row["draft_share"], ".2%")]
        for row in found
    ]  # fmt: skip
    note = (
        "Engines that report MAT over drafted steps only flatter drafters that are often silent. Efficiency is speedup "
        "/ MAT: 1 where a wide pass costs a plain one and drafting is free. In brackets: pairs with identical outputs."
    )
    return join([table("By other definitions", heads, body, left=2, note=note), evidence(DEFINITIONS, found)])


def _identical(row: Row) -> str:
    shown = number(row["speedup_identical"])
    return shown if row["pairs"] in (None, 0) else f"{shown} ({row['identical_pairs']} of {row['pairs']})"


def differences(scene: Scene) -> Html:
    """Do two arms differ? In words, with what it would take to know."""
    found = scene.rows(DIFFERENCES)
    if not found:
        return Html("")
    units = counted(scene.con).units
    lines = [el("li", difference(row, f"{row['arm']} − {row['other']} on {row['workload']}", units)) for row in found]
    listed: str = el("ul", *lines)
    if len(lines) > 12:
        listed = el("details", el("summary", f"{len(lines)} paired differences"), listed)
    title = el("h3", "Do the arms differ from each other?")
    return join([title, listed, evidence(DIFFERENCES, found)])


def prompts_and_bounds(scene: Scene) -> Html:
    """Is the speedup under its bound prompt by prompt, too?"""
    found = scene.rows(PROMPT_BOUNDS)
    if not found:
        return Html("")
    over = sorted((row for row in found if not row["holds_bound"]), key=lambda row: -row["over_bound"])
    plain = sum(row["holds_mat"] for row in found)
    said = (
        f"Speedup is at most its bound for {len(found) - len(over)} of {len(found)} {counted(scene.con).answers} and "
        f"arms, at most MAT for {plain}. A prompt alone has no interval, so a small breach may be timing noise."
    )
    lines = [
        f"{row['arm']} on {row['workload']}, {row['prompt_id']}: {row['speedup']:.3f}, {row['over_bound']:.3f} times "
        f"its bound; {row['likely_cause']}"
        for row in over[:MOST_BREACHES]
    ]
    listed: str = el("ul", *(el("li", line) for line in lines))
    if lines:
        listed = el("details", el("summary", f"The largest {len(lines)} of {len(over)} breaches"), listed)
    return join([el("h3", "The bound, prompt by prompt"), el("p", said), listed if lines else "",
                 evidence(PROMPT_BOUNDS, found)])  # fmt: skip


def guard(con: duckdb.DuckDBPyConnection) -> Html:
    """What the guard's model work found, where it was run."""
    found = rows(con, GUARD)
    if not found:
        none = "The guard has not been run on this run; `dfbench guard` repeats the passes that these outputs rest on."
        return join([el("p", prose(none), class_="absent"), evidence(GUARD, [])])
    heads = ("workload", "arm", "AR at the arm's widths that diverged", "outputs beyond the bound",
             "divergences cleared by a witness", "replays that differ")  # fmt: skip
    body = [
        [row["workload"], row["arm"], _of(row, "control_divergences", "controls"), _of(row, "outside", "scored"),
         _of(row, "cleared", "witnessed"), _of(row, "replay_differs", "replayed")]
        for row in found
    ]  # fmt: skip
    return join([table("What the guard found", heads, body, left=2), evidence(GUARD, found)])


def _of(row: Row, part: str, whole: str) -> str:
    return f"{row[part]} of {row[whole]}" if row[whole] else "not done"


def timing(con: duckdb.DuckDBPyConnection) -> Html:
    """Does an arm's place in the rotation matter, and did jobs run throttled?"""
    order, throttled = rows(con, ORDER), rows(con, THROTTLED)
    return join([_order(order), evidence(ORDER, order), _throttled(throttled), evidence(THROTTLED, throttled)])


def _order(found: Sequence[Row]) -> Html:
    judged = [row for row in found if row["relative_lo"] is not None and row["jobs"] >= MIN_PROMPTS]
    if not judged:
        return el("p", "Whether an arm's place in the rotation matters cannot be said: too few timed prompts.",
                  class_="absent")  # fmt: skip
    drifting = [row for row in judged if row["relative_lo"] > 1 or row["relative_hi"] < 1]
    said = (
        f"{len(drifting)} of {len(judged)} places in the rotation of arms have a speedup whose interval leaves out "
        "that of the other places."
    )
    if len(drifting) <= len(judged) / 10:
        return el("p", f"{said} By chance alone it would be about one in twenty: no drift shown.")
    lines = [
        f"{row['arm']} on {row['workload']}, place {row['arm_order'] + 1}: {row['relative']:.2f} times as fast as "
        f"elsewhere, interval {row['relative_lo']:.2f}…{row['relative_hi']:.2f} ({row['jobs']} jobs)"
        for row in drifting[:12]
    ]
    return join(
        [
            el("p", f"{said} That hints at drift (heat, clocks, neighbours)."),
            el("ul", *(el("li", line) for line in lines)),
        ]
    )


def _throttled(found: Sequence[Row]) -> Html:
    jobs, known, hot = (sum(row[key] for row in found) for key in ("jobs", "known", "throttled"))
    if not known:
        return el("p", "The devices of this run do not tell whether they were throttled.", class_="absent")
    if not hot:
        return el("p", f"None of the {known} jobs that can tell ran throttled.")
    lines = [
        f"{row['arm']} on {row['workload']}: {row['throttled']} of {row['known']} jobs; speedup "
        f"{number(row['speedup'])}, without them {number(row['speedup_clean'])}"
        for row in found
        if row["throttled"]
    ]
    said = f"{hot} of {jobs} jobs ran throttled. They are marked, not dropped."
    return join([el("p", said), el("ul", *(el("li", line) for line in lines))])


def endings(con: duckdb.DuckDBPyConnection) -> Html:
    """How outputs ended, and how much they repeat themselves."""
    found = rows(con, ENDINGS)
    if not found:
        return Html("")
    heads = (
        "workload",
        "arm",
        "outputs",
        "ran into the cap",
        "loops",
        "repetition",
        "MAT",
        "MAT without capped outputs",
    )
    body = [
        [row["workload"], row["arm"], str(row["outputs"]), str(row["capped"]), str(row["loops"]),
         number(row["repetition"], ".0%"), number(row["mat"]), number(row["mat_uncapped"])]
        for row in found
    ]  # fmt: skip
    note = (
        "Repetition is the share of an output's 4-grams that it had before; a loop is an output where that is above "
        "one half. Greedy loops are easy to draft and inflate MAT."
    )
    return join([table("Caps, loops and repetition", heads, body, left=2, note=note), evidence(ENDINGS, found)])


def environment(con: duckdb.DuckDBPyConnection) -> Html:
    """What each worker read back from what it loaded: facts that all share once, others with who has them."""
    found = rows(con, WORKERS)
    if not found:
        return el("p", "The run names no worker yet.", class_="absent")
    facts = [json.loads(row["facts"] or "{}") for row in found]
    names = dict.fromkeys(name for fact in facts for name in fact)
    body = [[name, _values([fact.get(name) for fact in facts])] for name in names]
    nodes = Counter(row["node"] for row in found)
    said = f"{len(found)} workers on {len(nodes)} nodes: " + ", ".join(
        f"{node} ({count})" for node, count in nodes.items()
    )
    who: list[dict[str, Any]] = [{key: row[key] for key in row if key != "facts"} for row in found]
    parts: list[str] = [el("p", f"{said}.")]
    if body:
        listed = table("Facts that the workers read back", ("fact", "value"), body, left=2)
        parts.append(el("details", el("summary", f"{len(body)} facts"), listed) if len(body) > 12 else listed)
    return join([*parts, evidence(WORKERS, who)])


def _values(values: Sequence[Any]) -> str:
    """One value that all share, or each with its number of workers."""
    counts = Counter(json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value for value in values)
    if len(counts) == 1:
        return next(iter(counts))
    listed = [f"{value} ({count}×)" for value, count in counts.most_common(6)]
    return "; ".join(listed + ([f"and {len(counts) - 6} more"] if len(counts) > 6 else []))


def arms(con: duckdb.DuckDBPyConnection) -> Html:
    """Every arm with its drafter, cache policy and parameters."""
    found = rows(con, ARMS)
    body = [[row["arm"], row["drafter"], row["cache"], _parameters(row["params"])] for row in found]
    if not body:
        return Html("")
    return join([table("Arms", ("arm", "drafter", "cache", "parameters"), body, left=4), evidence(ARMS, found)])


def _parameters(params: str | None) -> str:
    given: Mapping[str, Any] = json.loads(params or "{}")
    return ", ".join(f"{key} {value}" for key, value in given.items() if value is not None) or text("none")
