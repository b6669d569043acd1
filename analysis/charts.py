"""The charts of the report, by Vega-Altair; drawn as SVG or PNG by vl-convert, without a browser or a network.

A chart is drawn once, for light paper. In the page its inks become the page's variables, so it follows light and dark;
the colours of data are those that stand out on both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import altair as alt

from dfbench.analysis.report_markup import Html, el, text

Rows = Sequence[Mapping[str, Any]]

INK, MUTED, GRID = "#1b2330", "#5a6472", "#dfe3e8"
_INKS = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)"}
PALETTE = ("#3987d6", "#d07a1c", "#2b9a6e", "#c9559d", "#8872d8", "#ae8420", "#5f8f9e", "#d9574f")
"""Colours of data: at least 3:1 against light and dark paper."""
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left")
PHASES = {"draft": PALETTE[1], "forward": PALETTE[0], "accept": PALETTE[2], "commit": PALETTE[3], "other": "#868e98"}
FONT = "Arial, Helvetica, Liberation Sans, sans-serif"
"""Fonts as wide as the one that vl-convert lays labels out by."""
VEGA_LITE = "6.4"
WIDTH = 300
MOST_ACCEPTED = 16
"""A histogram's last bar: this many accepted tokens and more."""


class Chart(NamedTuple):
    """One chart. `name` is its file's when exported, `description` what a screen reader says.

    A notebook shows it as a picture; `altair.Chart.from_dict(chart.spec)` goes on from it.
    """

    name: str
    description: str
    spec: dict[str, Any]

    def _repr_svg_(self) -> str:
        """What a notebook shows."""
        return svg(self)


def svg(chart: Chart) -> str:
    """The chart as a file of its own, on white."""
    import vl_convert

    return str(vl_convert.vegalite_to_svg({**chart.spec, "background": "white"}, vl_version=VEGA_LITE))


def png(chart: Chart) -> bytes:
    """The chart as a picture at twice its size, on white."""
    import vl_convert

    return bytes(vl_convert.vegalite_to_png({**chart.spec, "background": "white"}, vl_version=VEGA_LITE, scale=2))


def inline(chart: Chart) -> Html:
    """The chart as SVG for the page: no ground of its own, the page's inks, one label for screen readers."""
    import vl_convert

    drawn = vl_convert.vegalite_to_svg({**chart.spec, "background": "transparent"}, vl_version=VEGA_LITE)
    for ink, variable in _INKS.items():
        drawn = re.sub(rf'(fill|stroke)="{ink}"', rf'\1="{variable}"', drawn)
    label = f'<svg role="img" aria-label="{text(chart.description)}" '
    return el("div", Html(drawn.replace("<svg ", label, 1)))


def export(charts: Sequence[Chart], folder: Path) -> list[Path]:
    """Write every chart as SVG and as PNG into a folder, made where it is missing. Returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for chart in charts:
        files += [folder / f"{chart.name}.svg", folder / f"{chart.name}.png"]
        files[-2].write_text(svg(chart), encoding="utf-8")
        files[-1].write_bytes(png(chart))
    return files


def slope(name: str, title: str, rows: Rows, arms: Sequence[str], value: str) -> Chart:
    """One line a workload over the arms, with intervals: AR → PLD → Cacheback. Rows: workload, arm, value, lo, hi."""
    low, high = _domain([row[value] for row in rows])
    base = _chart([_cut(row, "lo", "hi", low, high) for row in rows]).encode(
        x=alt.X(
            "arm:N",
            sort=list(arms),
            title=None,
            axis=alt.Axis(labelAngle=_angle(arms), grid=False),
            scale=alt.Scale(paddingInner=0.65, paddingOuter=0.3),
        ),
        xOffset=alt.XOffset("workload:N", sort=_names(rows)),
        color=_workload_colour(rows),
    )
    y = alt.Y(f"{value}:Q", title=None, scale=alt.Scale(domain=[low, high], nice=False, zero=False))
    intervals = base.transform_filter("isValid(datum.lo)").mark_rule(strokeWidth=1.5, opacity=0.8)
    layers = alt.layer(
        base.mark_line(strokeWidth=2).encode(y=y),
        intervals.encode(y=alt.Y("lo:Q"), y2="hi:Q"),
        base.mark_point(filled=True, size=55, opacity=1).encode(y=y, shape=_workload_shape(rows)),
    )
    return _finished(name, title, layers.properties(width=max(WIDTH, 46 * len(arms)), height=240),
                     _told(title, rows, value))  # fmt: skip


def mat_against_speedup(name: str, rows: Rows, arms: Sequence[str]) -> Chart:
    """Speedup over MAT: points, intervals, each point's bound as a bar, and the line where both are equal."""
    title = "Speedup against MAT"
    across = _domain([row["mat"] for row in rows])
    up = _domain([row[key] for row in rows for key in ("speedup", "speedup_bound") if row[key] is not None])
    shared = max(across[0], up[0]), min(across[1], up[1])
    ends = [{"mat": end, "speedup": end} for end in shared] if shared[0] < shared[1] else []
    x = alt.X("mat:Q", title="MAT", scale=alt.Scale(domain=list(across), nice=False, zero=False))
    y = alt.Y("speedup:Q", title="speedup", scale=alt.Scale(domain=list(up), nice=False, zero=False))
    kept = [_cut(_cut(row, "speedup_lo", "speedup_hi", *up), "mat_lo", "mat_hi", *across) for row in rows]
    base = _chart(kept).encode(x=x, color=_colour("workload", _names(rows), title="workload"))
    equal = _chart(ends).mark_line(strokeDash=[4, 4], strokeWidth=1.2, color=MUTED).encode(x=x, y=y)
    layers = alt.layer(
        equal,
        base.mark_rule(strokeWidth=1, opacity=0.8).transform_filter("isValid(datum.speedup_lo)")
        .encode(y=alt.Y("speedup_lo:Q"), y2="speedup_hi:Q"),
        base.mark_rule(strokeWidth=1, opacity=0.8).transform_filter("isValid(datum.mat_lo)")
        .encode(x=alt.X("mat_lo:Q"), x2="mat_hi:Q", y=y),
        base.mark_tick(thickness=2.5, size=18, orient="horizontal").transform_filter("isValid(datum.speedup_bound)")
        .encode(y=alt.Y("speedup_bound:Q")),
        base.mark_point(filled=True, size=60, opacity=1).encode(y=y, shape=_shape("arm", arms, title="arm")),
    )  # fmt: skip
    told = "; ".join(
        f"{row['arm']} on {row['workload']}: MAT {row['mat']:.2f}, speedup {row['speedup']:.2f}, bound "
        + (f"{row['speedup_bound']:.2f}" if row["speedup_bound"] is not None else "not known")
        for row in rows
    )
    return _finished(name, title, layers.properties(width=380, height=300), f"{title}. {told}.")


def accepted_histogram(name: str, workload: str, rows: Rows, arms: Sequence[str]) -> Chart:
    """Share of a workload's steps by accepted draft tokens, one row an arm. Rows: arm, accepted, share."""
    labels = [str(count) for count in range(max(row["accepted"] for row in rows) + 1)]
    if len(labels) > MOST_ACCEPTED:
        labels[MOST_ACCEPTED] = f"{MOST_ACCEPTED}+"
    data = [{"arm": row["arm"], "accepted": labels[row["accepted"]], "share": row["share"]} for row in rows]
    bars = _chart(data).mark_bar().encode(
        x=alt.X("accepted:O", scale=alt.Scale(domain=labels), title="accepted draft tokens",
                axis=alt.Axis(labelAngle=0, grid=False)),
        y=alt.Y("share:Q", title=None, axis=alt.Axis(format="%", tickCount=3)),
        color=_colour("arm", arms, legend=False),
    )  # fmt: skip
    faceted = bars.properties(width=WIDTH, height=70).facet(
        row=alt.Row("arm:N", sort=list(arms), title=None, header=_header()), spacing=12
    )
    told = "; ".join(
        f"{arm}: " + ", ".join(f"{row['accepted']} in {row['share']:.0%}" for row in data if row["arm"] == arm)
        for arm in arms
    )
    return _finished(name, workload, faceted, f"Steps by accepted draft tokens on {workload}. {told}.")


def verify_cost(name: str, rows: Rows) -> Chart:
    """Cost of a pass by its width: a line for each calibrated context, hollow points for the run's own passes."""
    title = "Cost of a pass, in passes over one token"
    x = alt.X("queries:Q", title="tokens in the pass", scale=alt.Scale(type="log", base=2, padding=8),
              axis=alt.Axis(format="d", grid=False, values=_powers(max(row["queries"] for row in rows))))  # fmt: skip
    y = alt.Y("verify_cost:Q", title=None, scale=alt.Scale(zero=False, padding=8))
    lines = [{**row, "context": str(row["context"])} for row in rows if row["source"] == "calibration"]
    layers = [_chart([row for row in rows if row["source"] == "steps"])
              .mark_point(filled=False, size=40, color=MUTED).encode(x=x, y=y)]  # fmt: skip
    if lines:
        contexts = sorted({row["context"] for row in lines}, key=int)
        base = _chart(lines).encode(x=x, y=y, color=_colour("context", contexts, title="tokens in the cache"))
        layers += [base.mark_line(strokeWidth=2), base.mark_point(filled=True, size=40, opacity=1)]
    return _finished(name, title, alt.layer(*layers).properties(width=380, height=260), _told_costs(title, rows))


def _told_costs(title: str, rows: Rows) -> str:
    def place(row: Mapping[str, Any]) -> str:
        return "the run's own passes" if row["source"] == "steps" else f"context {row['context']}"

    told = [f"{row['queries']} tokens {row['verify_cost']:.2f} ({place(row)})" for row in rows]
    return f"{title}. {'; '.join(told[:40])}."


def phases(name: str, rows: Rows, arms: Sequence[str]) -> Chart:
    """Mean time of a step by phase, stacked; one block a workload. Rows: workload, arm and `<phase>_us`."""
    title = "Mean time of a step (ms)"
    order = {phase: place for place, phase in enumerate(PHASES)}
    data = [
        {"workload": row["workload"], "arm": row["arm"], "phase": phase, "place": order[phase],
         "ms": row[f"{phase}_us"] / 1e3}
        for row in rows for phase in PHASES
    ]  # fmt: skip
    bars = _chart(data).mark_bar(size=14).encode(
        x=alt.X("ms:Q", title=None, stack="zero"),
        y=alt.Y("arm:N", sort=list(arms), title=None, axis=alt.Axis(grid=False)),
        color=alt.Color("phase:N", title=None, sort=list(PHASES),
                        scale=alt.Scale(domain=list(PHASES), range=list(PHASES.values()))),
        order=alt.Order("place:Q"),
    )  # fmt: skip
    faceted = bars.properties(width=WIDTH + 40, height=alt.Step(22)).facet(
        row=alt.Row("workload:N", title=None, header=_header()), spacing=14
    )
    told = "; ".join(
        f"{row['arm']} on {row['workload']} {row['step_us'] / 1e3:.2f}, of which forward {row['forward_share']:.0%} "
        f"and draft {row['draft_share']:.1%}"
        for row in rows
    )
    return _finished(name, title, faceted, f"{title}. {told}.")


def _domain(values: Sequence[float]) -> tuple[float, float]:
    """What an axis shows: the points and as much room on either side. A few prompts have intervals far wider."""
    lo, hi = min(values), max(values)
    room = 0.8 * (hi - lo) or 0.1
    return max(0.0, lo - room), hi + room


def _cut(row: Mapping[str, Any], lo: str, hi: str, low: float, high: float) -> dict[str, Any]:
    """A row whose interval ends at the chart's edge where it goes on beyond."""
    if row[lo] is None or row[hi] is None:
        return dict(row)
    return {**row, lo: min(max(row[lo], low), high), hi: min(max(row[hi], low), high)}


def _chart(rows: Rows) -> alt.Chart:
    return alt.Chart(alt.Data(values=[dict(row) for row in rows]))  # type: ignore[no-untyped-call]


def _finished(name: str, title: str, chart: alt.TopLevelMixin, description: str) -> Chart:
    """The chart's Vega-Lite specification in the house style. `title` is data: it is shown as it is."""
    spec = chart.to_dict(validate=False)
    spec["title"] = {"text": title, "anchor": "start", "fontSize": 13, "fontWeight": 600, "offset": 10}
    spec["config"] = _CONFIG
    spec["padding"] = 6
    return Chart(name, description, spec)


_WORDS = {"labelColor": INK, "titleColor": MUTED, "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"}
_CONFIG: dict[str, Any] = {
    "font": FONT,
    "title": {"color": INK},
    "view": {"stroke": None},
    "axis": {**_WORDS, "gridColor": GRID, "domainColor": MUTED, "tickColor": MUTED, "labelLimit": 140},
    "legend": {
        **_WORDS,
        "orient": "bottom",
        "columns": 3,
        "symbolSize": 70,
        "symbolStrokeWidth": 1.5,
        "symbolOpacity": 1,
        "labelLimit": 140,
    },
    "header": {"labelColor": INK, "labelFontSize": 12},
}


def _header() -> alt.Header:
    return alt.Header(labelAngle=0, labelAnchor="start", labelOrient="top", labelPadding=2)


def _angle(names: Sequence[str]) -> int:
    """Labels stand straight while they fit side by side."""
    return 0 if max(map(len, names)) * 7 * len(names) < max(WIDTH, 46 * len(names)) else -40


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length() + 1) if 2**power <= most]


def _names(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row["workload"] for row in rows))


def _workload_colour(rows: Rows) -> alt.Color:
    return _colour("workload", _names(rows))


def _workload_shape(rows: Rows) -> alt.Shape:
    return _shape("workload", _names(rows))


def _colour(field: str, names: Sequence[str], *, title: str | None = None, legend: bool = True) -> alt.Color:
    kept = [PALETTE[place % len(PALETTE)] for place in range(len(names))]
    scale = alt.Scale(domain=list(names), range=kept)
    return alt.Color(f"{field}:N", title=title, scale=scale, legend=alt.Undefined if legend else None)


def _shape(field: str, names: Sequence[str], title: str | None = None) -> alt.Shape:
    kept = [SHAPES[place % len(SHAPES)] for place in range(len(names))]
    legend = alt.Legend(symbolFillColor=MUTED, symbolStrokeColor=MUTED) if field == "arm" else alt.Undefined
    return alt.Shape(f"{field}:N", title=title, scale=alt.Scale(domain=list(names), range=kept), legend=legend)


def _told(title: str, rows: Rows, value: str) -> str:
    parts = []
    for workload in _names(rows):
        mine = [f"{row['arm']} {row[value]:.2f}" for row in rows if row["workload"] == workload]
        parts.append(f"{workload}: {', '.join(mine)}")
    return f"{title}. {'; '.join(parts)}."
