"""The report's table of what each part of a drafter adds."""

from __future__ import annotations

from dfbench.analysis.counting import counted
from dfbench.analysis.parts import PARTS_SQL, UNITS, Row, changes, difference, steps_of
from dfbench.analysis.report_figures import Scene
from dfbench.analysis.report_markup import NONE, Html, el, evidence, join, number, table


def parts(scene: Scene) -> Html:
    """Arms of one drafter, each beside the one that it builds on: what differs, and what that changes."""
    found = scene.rows(PARTS_SQL)
    if not found:
        return Html("")
    steps, units = steps_of(found), counted(scene.con).units
    heads = ("arm and what it builds on", "what differs", units, *UNITS.values())
    body = [[_names(step), changes(_any(step)), str(_any(step)["prompts"]),
             *(_change(step.get(metric)) for metric in UNITS)] for step in steps]  # fmt: skip
    note = (
        "Each arm beside the one before it in the sweep with the same drafter, on the same prompts; where there are "
        "three or more, also the last beside the first. Differences with their 95 % intervals; tokens a pass are "
        "what a target forward carries, and what it costs."
    )
    said = [el("li", difference(row, f"{row['arm']} − {row['base']} on {row['workload']}", units))
            for step in steps for row in step.values()]  # fmt: skip
    words: str = el("ul", *said)
    if len(said) > 9:
        words = el("details", el("summary", f"The same in {len(said)} sentences"), words)
    title = el("h3", "What each part adds")
    return join([title, table("What each part of a drafter adds", heads, body, left=2, note=note), words,
                 evidence(PARTS_SQL, found)])  # fmt: skip


def _any(step: dict[str, Row]) -> Row:
    return next(iter(step.values()))


def _names(step: dict[str, Row]) -> Html:
    row = _any(step)
    kind = f"all parts together, on {row['workload']}" if row["whole"] else f"on {row['workload']}"
    return join([f"{row['arm']} − {row['base']}", el("span", kind, class_="detail")])


def _change(row: Row | None) -> Html:
    """Both values, the difference, and its interval beneath."""
    if row is None:
        return join([NONE])
    lo, hi = row["difference_lo"], row["difference_hi"]
    interval = "no interval" if lo is None or hi is None else f"{lo:+z.2f}…{hi:+z.2f}"
    values = f"{number(row['base_value'])} → {number(row['value'])}"
    shown = el("span", f"{values}, {interval}", class_="interval")
    return join([f"{row['difference']:+z.2f}", shown])
