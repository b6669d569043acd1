"""The HTML report: one self-contained file that needs no network and runs no script.

views of sql/ ─► report_tables, report_figures (charts) ─► report_markup (escapes) ─► one page
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb

from dfbench.analysis import charts, report_tables
from dfbench.analysis.checks import Check, checks
from dfbench.analysis.console import HEADLINE_SQL, by_setup, setup_line
from dfbench.analysis.report_divergences import Decode, divergences
from dfbench.analysis.report_figures import Figure, Scene, figures
from dfbench.analysis.report_markup import Html, el, evidence, join, prose, table
from dfbench.analysis.report_parts import parts as added
from dfbench.analysis.report_style import STYLE
from dfbench.analysis.rundir import require_not_own, run_settings, standing
from dfbench.errors import RunError

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""What the page may load or run: nothing but its own style sheet, should any escaping ever fail."""
CAVEATS = (
    "Greedy decoding only: a draft token is accepted when it is the target's argmax. Nothing is said about sampling.",
    "Batch 1, one stream: a server that batches pays for wider passes what a single stream does not.",
    "MAT counts every target pass after prefill, those without a draft included, and the bonus token; AR is 1.00. The "
    "first output token comes from prefill and is in no figure.",
    "Speedup compares the same prompt on the same device in the same run, the arm's time scaled to AR's token count.",
    "Intervals are 95 %, by bootstrap over prompts. They speak of prompts like these, this model and this device.",
    "Warm-up jobs are in no figure. Devices, models, dtypes, engines and software stacks are never pooled.",
)
RECOMPUTE = (
    "Engine recompute: the whole prefix is computed again at each step (no KV cache), so the cost of a step grows with "
    "its position and tokens/s say little; speedup and MAT do not depend on that."
)
META_SQL = "select key, value from ledger_meta"
SETTINGS = ("model", "revision", "dtype", "engine", "device", "attention", "kv_repair", "logits_dtype", "buckets")


def write(
    con: duckdb.DuckDBPyConnection, file: Path, *, decode: Decode | None = None, notes: Sequence[str] = ()
) -> None:
    """Write the report of an opened run to a file. `decode` gives tokens their text, `notes` are the sweep's own.

    Raises RunError when the file cannot be written.
    """
    require_not_own(file)
    content = page(con, decode=decode, notes=notes)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
    except OSError as error:
        raise RunError(
            f"the report cannot be written to '{file}' ({error.strerror}): name a file in a folder that can be."
        ) from error


def export_charts(con: duckdb.DuckDBPyConnection, folder: Path) -> list[Path]:
    """Write every chart of the report as SVG and PNG into a folder. Returns the files. Raises RunError."""
    try:
        return charts.export(list(charts_of(con).values()), folder)
    except OSError as error:
        raise RunError(
            f"charts cannot be written to '{folder}' ({error.strerror}): name a folder that can be."
        ) from error


def charts_of(con: duckdb.DuckDBPyConnection) -> dict[str, charts.Chart]:
    """Every chart of an opened run by its name, such as `slope-speedup`; a notebook shows each as a picture."""
    found = (chart for scene in scenes(con) for figure in figures(scene) for chart in figure.charts)
    return {chart.name: chart for chart in found}


def scenes(con: duckdb.DuckDBPyConnection) -> list[Scene]:
    """The run's set-ups, each with its arms in the order of the plan, AR first."""
    groups = by_setup(con)
    found = []
    for number, (setup, cells) in enumerate(groups, 1):
        arms = tuple(dict.fromkeys(cell["arm"] for cell in sorted(cells, key=lambda cell: cell["workload"])))
        found.append(Scene(con, setup, _ar_first(con, arms), f"-{number}" if len(groups) > 1 else ""))
    return found


def _ar_first(con: duckdb.DuckDBPyConnection, arms: tuple[str, ...]) -> tuple[str, ...]:
    baselines = {arm for (arm,) in con.sql("select distinct arm from jobs where drafter = 'ar'").fetchall()}
    asked = [arm["name"] for arm in _run(dict(con.sql(META_SQL).fetchall())).get("arms", [])]
    order = [*asked, *sorted(arms)]
    return tuple(sorted(arms, key=lambda arm: (arm not in baselines, order.index(arm))))


def page(con: duckdb.DuckDBPyConnection, *, decode: Decode | None = None, notes: Sequence[str] = ()) -> str:
    """The whole page."""
    meta = dict(con.sql(META_SQL).fetchall())
    found = scenes(con)
    sections = [("checks", "Checks", _checks(checks(con)))]
    for number, scene in enumerate(found, 1):
        name = "Figures" if len(found) == 1 else f"Figures, set-up {number} of {len(found)}"
        sections.append((f"figures{scene.suffix}", name, _scene(scene)))
    if found:
        sections += [
            ("losslessness", "Differences from AR's outputs", _losslessness(con, decode)),
            ("timing", "Order of arms and throttling", report_tables.timing(con)),
            ("outputs", "How outputs ended", report_tables.endings(con)),
        ]  # fmt: skip
    else:
        nothing = el("p", "No job of this run is finished: there is no figure to show yet.", class_="absent")
        sections.append(("figures", "Figures", join([nothing, evidence(HEADLINE_SQL, [])])))
    sections += [
        ("environment", "Set-up and environment", _environment(con, meta)),
        ("caveats", "Assumptions and caveats", _caveats(found, notes)),
    ]
    title = f"{meta.get('sweep', 'run')} · dfbench report"
    body = el(
        "body",
        _head(con, meta),
        _contents(sections),
        el("main", *(_section(*section) for section in sections)),
        _foot(meta),
    )
    head = el(
        "head",
        el("meta", charset="utf-8"),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("title", title),
        el("style", Html(STYLE)),
    )
    return "<!doctype html>\n" + el("html", head, body, lang="en") + "\n"


def _losslessness(con: duckdb.DuckDBPyConnection, decode: Decode | None) -> Html:
    return join([divergences(con, decode), report_tables.guard(con)])


STANDING_SQL = """
select coalesce(sum(done), 0)::bigint, coalesce(sum(jobs), 0)::bigint, (select count(*) from workers) > 0 from plan
"""


def _head(con: duckdb.DuckDBPyConnection, meta: dict[str, str]) -> Html:
    [(done, jobs, begun)] = con.sql(STANDING_SQL).fetchall()
    told = [
        f"Run {meta.get('run_id', 'without a name')}",
        f"submitted {meta['created_at'][:19]} UTC" if "created_at" in meta else "",
        f"{standing(meta.get('state', ''), begun)}, {done} of {jobs} jobs done",
    ]
    return el(
        "header",
        el("h1", f"Draft-free speculative decoding: {meta.get('sweep', 'run')}"),
        el("p", ", ".join(part for part in told if part), class_="sub"),
    )


def _contents(sections: Sequence[tuple[str, str, Html]]) -> Html:
    links = (el("li", el("a", title, href=f"#{key}")) for key, title, _ in sections)
    return el("nav", el("ul", *links), aria_label="Contents")


def _section(key: str, title: str, content: Html) -> Html:
    return el("section", el("h2", title, id=f"{key}-title"), content, id=key, aria_labelledby=f"{key}-title")


def _foot(meta: dict[str, str]) -> Html:
    known = ((name, meta.get(f"{name}_version")) for name in ("dfbench", "torch", "transformers"))
    made = ", ".join(f"{name} {version}" for name, version in known if version)
    origin = f"Made by dfbench from the run's records{f' ({made})' if made else ''}."
    return el("footer", el("p", prose(f"{origin} Every figure carries its query; ask others with `dfbench sql`.")))


_MARKS = {"ok": ("✓", "ok", "in order"), "finding": ("✗", "finding", "finding"), "note": ("!", "note-line", "note")}


def _checks(found: Sequence[Check]) -> Html:
    if not found:
        return el("p", "Nothing to check yet.", class_="absent")
    lines = []
    for check in found:
        mark, style, word = _MARKS[check.state]
        sign = el("span", mark, class_="mark", aria_hidden="true")
        said = join(
            [sign, el("span", f"{word}: ", class_="hidden"), el("strong", f"{check.name}: "), prose(check.text)]
        )
        lines.append(el("li", said, class_=style))
    queries = list(dict.fromkeys(check.sql for check in found))
    return join([el("ul", *lines, class_="checks"), evidence(";\n\n".join(queries) + ";", [])])


def _scene(scene: Scene) -> Html:
    parts: list[str] = [el("p", setup_line(dict(scene.setup)), class_="lead")]
    parts += [report_tables.headline(scene), report_tables.definitions(scene), report_tables.differences(scene)]
    parts += [added(scene), report_tables.prompts_and_bounds(scene)]
    return join([*parts, *(_figure(figure) for figure in figures(scene))])


def _figure(figure: Figure) -> Html:
    parts: list[str] = [el("h3", figure.title, id=figure.key)]
    if figure.absent:
        parts.append(el("p", prose(figure.absent), class_="absent"))
    if figure.charts:
        drawn = el("div", *(charts.inline(chart) for chart in figure.charts), class_="charts")
        parts.append(el("figure", el("p", figure.lead, class_="lead"), drawn, aria_labelledby=figure.key))
    return join([*parts, evidence(figure.sql, figure.rows)])


def _environment(con: duckdb.DuckDBPyConnection, meta: dict[str, str]) -> Html:
    run = _run(meta)
    target = run.get("target", {})
    settings = [[name, _setting(target[name])] for name in SETTINGS if target.get(name) not in (None, [], {})]
    settings += [[name, _setting(run[name])] for name in ("enable_thinking", "ignore_eos") if run.get(name) is not None]
    caps = con.sql("select distinct max_new_tokens::varchar from jobs where not warmup order by 1").fetchall()
    if caps:
        settings.append(["max_new_tokens", ", ".join(cap for (cap,) in caps if cap is not None)])
    asked = table("As asked for", ("setting", "value"), settings, left=2) if settings else Html("")
    return join([asked, report_tables.arms(con), el("h3", "Workers"), report_tables.environment(con)])


def _run(meta: dict[str, str]) -> dict[str, Any]:
    """What the run was begun with; empty where the ledger does not say, which is one of the run's problems."""
    try:
        return run_settings(meta)
    except RunError:
        return {}


def _setting(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _caveats(found: Sequence[Scene], notes: Sequence[str]) -> Html:
    lines = list(CAVEATS)
    if any(scene.setup["engine"] == "recompute" for scene in found):
        lines.append(RECOMPUTE)
    parts: list[str] = [el("ul", *(el("li", line) for line in lines))]
    if notes:
        parts += [el("h3", "Notes of the sweep"), el("ul", *(el("li", note) for note in notes))]
    return join(parts)
