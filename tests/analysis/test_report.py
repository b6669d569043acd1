"""The HTML report: what it shows, what it leaves out and says so, and that nothing in it can run."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import ARMS, HOSTILE, Page, diverging_run, hostile_run, timed_run, with_parts
from runmaker import Facts, RunMaker
from typer.testing import CliRunner

from dfbench.analysis import charts, open_run, report
from dfbench.analysis.report_divergences import divergences, in_context
from dfbench.analysis.report_figures import NO_AR, NOT_TIMED, ONLY_AR, Figure, figures
from dfbench.analysis.report_markup import Html, el, prose, text
from dfbench.analysis.report_parts import parts
from dfbench.analysis.report_tables import prompts_and_bounds
from dfbench.cluster import cli_run
from dfbench.cluster.cli import app
from dfbench.errors import RunError

Make = Callable[..., RunMaker]


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts stand as their descriptions: drawing them takes longer than all else."""
    monkeypatch.setattr(charts, "inline", lambda chart: el("p", f"[{chart.name}] {chart.description}"))


@pytest.fixture(scope="module")
def con(tmp_path_factory: pytest.TempPathFactory) -> duckdb.DuckDBPyConnection:
    """A sound run with everything: AR and two arms on two workloads, timed and calibrated."""
    run = timed_run(RunMaker(tmp_path_factory.mktemp("sound") / "run"))
    run.forward(1, 100.0)
    run.forward(8, 150.0)
    path = run.write()
    with closing(sqlite3.connect(path / "ledger.db")) as ledger, ledger:
        ledger.execute("insert into meta values ('run', ?)", (json.dumps({"arms": [{"name": arm} for arm in ARMS]}),))
    return open_run(path)


@pytest.fixture(scope="module")
def page(con: duckdb.DuckDBPyConnection) -> str:
    """Its page, with charts drawn."""
    return report.page(con, notes=["Assumption: drafts of 10 tokens."])


def shown(con: duckdb.DuckDBPyConnection, decode: Callable[[Sequence[int]], str] | None = None) -> str:
    """The text of a run's page."""
    return Page(report.page(con, decode=decode)).text


def drawn_in(told: str) -> list[str]:
    """Names of the charts of an undrawn page."""
    return re.findall(r"\[([a-z]+[a-z0-9-]*)\] ", told)


def every_figure(con: duckdb.DuckDBPyConnection) -> dict[str, Figure]:
    return {figure.key: figure for scene in report.scenes(con) for figure in figures(scene)}


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"])))
def test_any_text_comes_back_as_it_was_and_holds_no_markup(content: str) -> None:
    page = Page(el("p", content, title=content))
    assert page.text == content
    assert page.elements == [("p", {"title": content})]


def test_control_characters_are_shown_not_kept() -> None:
    assert text("a\x00b\x1b[31m\udc80") == "a\ufffdb\ufffd[31m\ufffd"


def test_markup_is_kept_only_where_it_says_that_it_is() -> None:
    assert el("p", Html("<b>"), "<b>") == "<p><b>&lt;b&gt;</p>"


def test_nothing_that_a_run_says_can_run(make: Make) -> None:
    """With charts drawn: hostile names of workload, arm, prompt, device, model, and hostile output."""
    con = open_run(hostile_run(make()).write(sweep=HOSTILE))
    content = report.page(con, decode=lambda ids: HOSTILE * len(ids), notes=[HOSTILE])
    page = Page(content)
    names = {tag for tag, _ in page.elements}
    assert not names & {"script", "img", "iframe", "object", "embed", "link", "base", "form", "foreignobject", "a href"}
    assert not [key for _, attributes in page.elements for key in attributes if key.startswith("on")]
    assert page.text.count(HOSTILE) > 20
    assert "the arm went on" in page.text and "pwned" not in content.replace("&#x27;pwned&#x27;", "").replace(
        "'pwned'", ""
    )


def test_recorded_tokens_have_no_speed(make: Make, undrawn: None) -> None:
    run = make()
    for number in range(3):
        run.job("code", f"p{number}", "ar", range(9), [1] * 8, timed=False)
        run.job("code", f"p{number}", "pld", range(9), [2] * 4, timed=False)
    told = shown(open_run(run.write()))
    assert drawn_in(told) == ["slope-mat", "accepted-1"]
    assert told.count(NOT_TIMED) == 3 and "0.00" not in told


def test_without_ar_there_is_no_speedup(make: Make, undrawn: None) -> None:
    run = make()
    for number in range(3):
        run.job("code", f"p{number}", "pld", range(9), [2] * 4)
    told = shown(open_run(run.write()))
    assert drawn_in(told) == ["slope-mat", "accepted-1", "phases"]
    assert told.count(NO_AR) == 2 and "No output has an AR output to be compared with." in told


def test_ar_alone_has_nothing_to_draft(make: Make, undrawn: None) -> None:
    run = make()
    run.job("code", "p0", "ar", range(9), [1] * 8)
    told = shown(open_run(run.write()))
    assert drawn_in(told) == ["phases"] and told.count(ONLY_AR) == 3


def test_a_run_with_nothing_done_says_so(make: Make, undrawn: None) -> None:
    run = make()
    run.plan("code", "p0", "ar")
    told = shown(open_run(run.write(state="planned")))
    assert "No job of this run is finished" in told and "0 of 1 jobs are done" in told
    assert "planned, not begun, 0 of 1 jobs done" in told


def test_devices_are_shown_apart(make: Make, undrawn: None) -> None:
    run = make()
    for device in ("one", "two"):
        run.facts = Facts(device=device, worker_id=f"w-{device}")
        for number in range(3):
            prompt = f"{device}{number}"
            run.job("code", prompt, "ar", range(9), [1] * 8)
            run.job("code", prompt, "pld", range(9), [2] * 4)
    told = shown(open_run(run.write()))
    assert "set-up 1 of 2" in told and "set-up 2 of 2" in told
    assert told.count("on one (") == told.count("on two (") == 1
    names = drawn_in(told)
    assert len(names) == len(set(names)) and all(name.endswith(("-1", "-2")) for name in names)


def test_characters_that_span_tokens_do_not_break_a_context() -> None:
    """Bytes of one character in two tokens: the start alone decodes to �, which the whole does not begin with."""
    raw = {1: b"caf", 2: b"\xc3", 3: b"\xa9"}

    def decode(ids: Sequence[int]) -> str:
        return b"".join(raw[i] for i in ids).decode(errors="replace")

    assert "caf\ufffd<mark>\ufffd</mark>" in in_context([1, 2, 3], 2, decode)
    assert "<mark>(ends)</mark>" in in_context([1], 1, decode)


def test_code_between_backticks_is_escaped_like_all_else() -> None:
    assert prose("run `<b>` now") == "run <code>&lt;b&gt;</code> now"
    assert prose("an odd ` stays") == "an odd ` stays"


def test_the_page_loads_nothing(page: str) -> None:
    parsed = Page(page)
    assert all((a["href"] or "").startswith("#") for a in parsed.all("a"))
    assert not [
        key for _, attributes in parsed.elements for key in attributes if key in ("src", "xlink:href", "srcset")
    ]
    assert "@import" not in page and "url(" not in page
    assert any(meta.get("content") == report.POLICY for meta in parsed.all("meta"))


def test_a_screen_reader_finds_its_way(page: str) -> None:
    parsed = Page(page)
    identifiers = [attributes["id"] for _, attributes in parsed.elements if attributes.get("id")]
    assert len(identifiers) == len(set(identifiers))
    assert {a["href"] for a in parsed.all("a")} <= {f"#{name}" for name in identifiers}
    assert len(parsed.all("caption")) == len(parsed.all("table"))
    assert all(head.get("scope") for head in parsed.all("th"))
    drawings = parsed.all("svg")
    assert len(drawings) == 7
    assert all(svg["role"] == "img" and len(svg["aria-label"] or "") > 20 for svg in drawings)
    assert parsed.all("html")[0]["lang"] == "en"


def test_the_headline_has_every_cell(page: str) -> None:
    told = Page(page).text
    for figure in ("2.00", "3.00", "5 of 5", "0 of 65", "All 20 outputs compared are AR's"):
        assert figure in told, figure
    assert "1.82" in told  # 12 steps of 1 ms ÷ 6 of 1.1 ms


def test_the_sweeps_notes_and_the_caveats_are_there(page: str) -> None:
    told = Page(page).text
    assert "Assumption: drafts of 10 tokens." in told
    assert "Greedy decoding only" in told and "Batch 1" in told


def test_every_figure_carries_the_sql_that_gives_it(con: duckdb.DuckDBPyConnection, page: str) -> None:
    """What is folded away under a figure is what made it: run again, it gives the rows shown."""
    found = every_figure(con)
    assert set(found) == {"slope", "bound", "accepted", "cost", "phases"}
    for figure in found.values():
        again = [row for query in figure.sql.split(";") if query.strip() for row in con.sql(query).fetchall()]
        assert figure.charts and len(again) == len(figure.rows) > 0, figure.key
        assert figure.sql.splitlines()[0] in Page(page).text
    names = ["slope-speedup", "slope-mat", "mat-speedup", "accepted-1", "accepted-2", "verify-cost", "phases"]
    assert [chart.name for figure in found.values() for chart in figure.charts] == names


def test_arms_go_from_ar_on_in_the_order_of_the_run(con: duckdb.DuckDBPyConnection) -> None:
    [scene] = report.scenes(con)
    assert scene.arms == ARMS


def test_a_part_of_a_run_is_called_a_part(make: Make, undrawn: None) -> None:
    """One prompt of two: figures without intervals, the reason why, and how much is missing."""
    run = timed_run(make(), workloads=("code",), prompts=1)
    for arm in ARMS:
        run.plan("code", "p9", arm)
    told = shown(open_run(run.write(state="cancelled")))
    assert "cancelled, 3 of 6 jobs done" in told
    assert "1 of 2" in told and "3 of 6 jobs are done" in told
    assert "fewer than three prompts" in told and "1.82" in told and "1.82…" not in told
    assert "too few timed prompts" in told


def test_a_divergence_shows_both_tokens_in_context(make: Make) -> None:
    con = open_run(diverging_run(make()).write())
    words = {10: "the", 11: " sky", 12: " is", 13: " blue", 22: " was", 23: "\n"}
    content = divergences(con, lambda ids: "".join(words[i] for i in ids))
    assert "the sky<mark> is</mark> blue" in content
    assert "the sky<mark> was</mark>\n" in content
    assert "tie in AR's" in Page(content).text
    content = divergences(con, None)
    assert "10 11 <mark>12</mark> 13" in content and "10 11 <mark>22</mark> 23" in content
    assert "tokenizer is not at hand" in content


def test_what_each_part_of_a_drafter_adds_has_a_table(make: Make) -> None:
    [scene] = report.scenes(open_run(with_parts(make()).write()))
    told = Page(parts(scene)).text
    assert "tree − chain" in told and "draft: chain → tree" in told and "frozen: none → f" in told
    assert "all parts together, on code" in told and "2.00 → 8.00, +6.00…+6.00" in told
    assert (
        "tree − chain on code: +4.00 tokens a pass, interval +4.00…+4.00: a difference, shown with 3 prompts." in told
    )


def test_breaches_of_the_bound_are_listed_prompt_by_prompt(make: Make) -> None:
    """An arm whose passes are timed at half of AR's plain steps: speedup 4 where its passes explain 2."""
    run = make()
    for number in range(3):
        run.job("code", f"p{number}", "ar", range(9), [1] * 8, [1.0] * 8)
        run.job("code", f"p{number}", "pld", range(9), [2] * 4, [0.5] * 4)
    [scene] = report.scenes(open_run(run.write()))
    told = Page(prompts_and_bounds(scene)).text
    assert "at most its bound for 0 of 3 prompts" in told and "pld on code, p0: 4.000, 2.000 times its bound" in told


def test_a_report_is_a_file_or_a_usage_error(
    con: duckdb.DuckDBPyConnection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "page", lambda *_, **__: "<!doctype html>")
    report.write(con, tmp_path / "new" / "r.html")
    assert (tmp_path / "new" / "r.html").read_text(encoding="utf-8") == "<!doctype html>"
    with pytest.raises(RunError, match="cannot be written"):
        report.write(con, tmp_path)


def test_demo_and_the_command_leave_reports(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], undrawn: None
) -> None:
    path = timed_run(make("quick"), workloads=("code",), prompts=1).write()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli_run, "submit", lambda *_, **__: None)
    monkeypatch.setattr(charts, "export", lambda drawn, folder: [folder / chart.name for chart in drawn])
    cli_run.demo()
    assert "report written to runs/quick/report.html" in capsys.readouterr().out
    assert (path / "report.html").is_file()
    told = CliRunner().invoke(app, ["report", "quick", "--html", "r.html", "--charts", "drawn"])
    assert told.exit_code == 0, told.output
    assert "report written to r.html" in told.stdout and "6 files written to drawn" in told.stdout
    assert (tmp_path / "r.html").read_text() == (path / "report.html").read_text()
