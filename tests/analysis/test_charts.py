"""Charts: seen on light and dark, escaped, and files that other programs open."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import altair as alt
import pytest
from pages import HOSTILE

from dfbench.analysis import charts
from dfbench.analysis.charts import Chart
from dfbench.analysis.report_style import STYLE

PAPERS = ("#ffffff", "#12161c")


def rows(workload: str = "code", arm: str = "pld") -> list[dict[str, Any]]:
    return [
        {"workload": workload, "arm": "ar", "mat": 1.0, "lo": 1.0, "hi": 1.0},
        {"workload": workload, "arm": arm, "mat": 1.5, "lo": 1.4, "hi": 99.0},
    ]


def slope(workload: str = "code", arm: str = "pld") -> Chart:
    return charts.slope("s", "MAT", rows(workload, arm), ["ar", arm], "mat")


def luminance(colour: str) -> float:
    """Relative luminance of a colour (WCAG 2.2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("paper", PAPERS)
@pytest.mark.parametrize("colour", [*charts.PALETTE, *charts.PHASES.values()])
def test_colours_stand_out_on_both_papers(colour: str, paper: str) -> None:
    """3:1, what WCAG asks of graphics."""
    assert f"--paper: {paper}" in STYLE
    lighter, darker = sorted((luminance(colour), luminance(paper)), reverse=True)
    assert (lighter + 0.05) / (darker + 0.05) >= 3


def test_a_chart_in_the_page_takes_the_pages_ink() -> None:
    drawn = charts.inline(slope())
    assert "var(--ink)" in drawn and charts.INK not in drawn and "white" not in drawn.split(">", 2)[1]
    assert charts.INK in charts.svg(slope())


def test_a_chart_is_what_vega_lite_knows() -> None:
    """Specifications are not validated as they are made, which would take longer than drawing them."""
    alt.LayerChart.from_dict(slope().spec)


def test_names_are_escaped_in_charts() -> None:
    drawn = charts.inline(slope(HOSTILE, HOSTILE))
    names = {element.tag.split("}")[-1] for element in ElementTree.fromstring(drawn).iter()}
    assert names <= {"div", "svg", "g", "path", "line", "text", "tspan"}
    assert "<script" not in drawn and "<img" not in drawn


def test_an_interval_beyond_the_chart_ends_at_its_edge() -> None:
    """One interval up to 99 beside points at 1.0 and 1.5 would flatten the chart."""
    spec = slope().spec
    low, high = spec["layer"][0]["encoding"]["y"]["scale"]["domain"]
    assert low < 1.0 and 1.5 < high < 3
    drawn = spec["data"]["values"] if "data" in spec else spec["layer"][1]["data"]["values"]
    assert max(row["hi"] for row in drawn) == high


def test_a_description_has_the_figures() -> None:
    assert slope().description == "MAT. code: ar 1.00, pld 1.50."


def test_a_long_tail_is_one_bar() -> None:
    found = [{"arm": "pld", "accepted": count, "share": 0.5} for count in (0, charts.MOST_ACCEPTED)]
    chart = charts.accepted_histogram("a", "code", found, ["pld"])
    domain = chart.spec["spec"]["encoding"]["x"]["scale"]["domain"]
    assert domain == [*map(str, range(charts.MOST_ACCEPTED)), f"{charts.MOST_ACCEPTED}+"]


def test_export_writes_svg_and_png(tmp_path: Path) -> None:
    files = charts.export([slope()], tmp_path / "new")
    assert [file.name for file in files] == ["s.svg", "s.png"]
    assert ElementTree.parse(files[0]).getroot().tag.endswith("svg")
    data = files[1].read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert width > 400 and height > 300
