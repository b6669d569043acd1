"""The commands that read runs: what they print, and what they refuse."""

from __future__ import annotations

import csv
import io
import json
import re
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from runmaker import Facts, RunMaker
from typer.testing import CliRunner

from dfbench.analysis import open_run, report_markup, seed
from dfbench.analysis.compare import Change, Comparison, parse_condition
from dfbench.analysis.console import comparison
from dfbench.analysis.query import run_query
from dfbench.analysis.stats import Interval
from dfbench.cluster import cli_sqlshell, upkeep
from dfbench.cluster.cli import app
from dfbench.errors import QueryError, RunError

Make = Callable[..., RunMaker]


def made(run: RunMaker, *, faster: float = 1.0, prompts: int = 6, emits: int = 2) -> Path:
    for number in range(prompts):
        size = 1 + 0.1 * number
        run.job("code", f"p{number}", "ar", range(9), [1] * 8, [size] * 8)
        run.job("code", f"p{number}", "pld", range(9), [emits] * (8 // emits), [size * faster] * (8 // emits))
        cost = [size * faster * (1.01 + 0.001 * number)] * 4
        run.job("code", f"p{number}", "cacheback", range(9), [2] * 4, cost)
    return run.write()


def dfbench(*arguments: object, code: int = 0, stdin: str | None = None) -> str:
    """Standard output of a command that must end with `code`."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin, catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout


def test_sql_in_every_format(make: Make, tmp_path: Path) -> None:
    run = made(make())
    query = "select arm, mat, null as nothing, [1, 2] as ids from mat order by arm"
    assert "cacheback" in dfbench("sql", run, query)
    rows = list(csv.DictReader(io.StringIO(dfbench("sql", run, query, "--format", "csv"))))
    assert rows[2] == {"arm": "pld", "mat": "2.0", "nothing": "", "ids": "[1, 2]"}
    assert json.loads(dfbench("sql", run, query, "--format", "json"))[2] == {
        "arm": "pld", "mat": 2.0, "nothing": None, "ids": [1, 2],
    }  # fmt: skip
    assert dfbench("sql", run, query, "--format", "markdown").splitlines()[-1] == "| pld | 2 |  | [1, 2] |"
    dfbench("sql", run, query, "--format", "parquet", "--out", tmp_path / "x.parquet")
    assert pq.read_table(tmp_path / "x.parquet")["arm"].to_pylist() == ["ar", "cacheback", "pld"]


def test_a_views_name_is_a_query_and_so_is_standard_input(make: Make) -> None:
    run = made(make())
    assert "mat_mean_prompt" in dfbench("sql", run, "mat", "--format", "csv")
    assert dfbench("sql", run, "--format", "csv", stdin="select 40 + 2 as answer") == "answer\n42\n"


def test_the_views_are_listed_with_their_meaning() -> None:
    listed = dfbench("sql", "--views")
    assert "divergences" in listed
    assert "one measured spec job whose output is not AR's" in listed
    assert (
        "\n    workload VARCHAR, arm VARCHAR, prompts BIGINT, jobs BIGINT, done BIGINT (jobs), failed BIGINT" in listed
    )


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("selec 1", 'does not parse: syntax error at or near "selec"'),
        ("from nowhere", "there is no view 'nowhere': use one of prompts, steps"),
        ("select b from mat", '"b" not found'),
        ("copy mat to 'x.csv'", "only reads"),
        ("attach 'x.db'", "only reads"),
        ("set threads = 1", "only reads"),
        ("from read_csv('/etc/passwd')", "may read this run and nothing else"),
        ("select 1; select 2", "write one query"),
        ("select error('boo')", "boo"),
    ],
)
def test_bad_queries_are_one_sentence(make: Make, query: str, words: str) -> None:
    run = made(make(), prompts=1)
    with pytest.raises(QueryError, match=words.replace("(", r"\(")) as error:
        dfbench("sql", run, query)
    assert "\n" not in str(error.value)


def test_bad_options_of_sql(make: Make, tmp_path: Path) -> None:
    run = made(make(), prompts=1)
    with pytest.raises(QueryError, match="unknown format 'cvs': did you mean 'csv'"):
        dfbench("sql", run, "from mat", "--format", "cvs")
    with pytest.raises(QueryError, match="write --out"):
        dfbench("sql", run, "from mat", "--format", "parquet")
    with pytest.raises(QueryError, match="cannot be written"):
        dfbench("sql", run, "from mat", "--out", tmp_path / "no" / "x.csv")
    with pytest.raises(RunError, match="there is no run at 'nowhere'"):
        dfbench("sql", "nowhere", "from mat")


def test_the_prompt_answers(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    con = open_run(made(make(), prompts=1))
    cli_sqlshell.respond(con, "select 40 + 2 as answer")
    cli_sqlshell.respond(con, ".views")
    cli_sqlshell.respond(con, ".schema mat")
    printed = capsys.readouterr().out
    assert "42" in printed
    assert "speedup_le_mat:" in printed
    assert "1 + ΣA / ΣD" in printed
    with pytest.raises(QueryError, match="did you mean 'mat'"):
        cli_sqlshell.respond(con, ".schema matt")


def test_the_headline_and_its_checks(make: Make) -> None:
    printed = dfbench("report", made(make(), faster=1.1))
    assert "toy, bfloat16, cached, on toy device" in printed
    assert "speedup ≤ bound: holds in 2 of 2 cells" in printed
    words = " ".join(printed.split())
    assert "12 of 12 planned pairs compared, 12 with identical outputs" in words
    assert "pld − cacheback on code: +0.00 MAT, interval +0.00…+0.00: no difference shown with 6 prompts" in words


def test_a_breach_of_the_bound_is_printed_with_its_cause(make: Make) -> None:
    printed = " ".join(dfbench("report", made(make(), faster=0.5)).split())
    assert "✗ speedup ≤ bound: pld on code: 4.000 is above its bound 2.000" in printed
    assert "an unsynchronised clock?" in printed and "?." not in printed


def test_the_headline_for_pasting_and_as_json(make: Make) -> None:
    run = made(make())
    assert "| code | pld | 6 | " in dfbench("report", run, "--markdown")
    found = json.loads(dfbench("report", run, "--json"))
    assert found["cells"]["sql"] == "select * from cells"
    assert {row["arm"]: row["mat"] for row in found["cells"]["rows"]} == {"ar": 1.0, "cacheback": 2.0, "pld": 2.0}
    assert found["checks"][0].keys() == {"name", "state", "text", "sql"}


def test_the_seed_table_stands_beside_its_published_figures(make: Make) -> None:
    printed = " ".join(dfbench("report", made(make()), "--seed-table").split())
    assert "code seed 1.00 1.45 1.47 ▲ 1.45 1.46" in printed
    assert "chat seed 1.00 1.26 ▲ 1.26 ▲ 1.25 1.25" in printed
    assert "this run 1.00 2.00 1.97 2.00 2.00" in printed
    assert "differs differs differs differs" in printed
    assert "model: seed Qwen/Qwen3-8B, this run toy" in printed
    assert "Cacheback ties PLD on code: agrees" in printed


def test_a_run_compared_with_itself_has_not_changed(make: Make) -> None:
    run = made(make())
    printed = dfbench("compare", run, run, "--fail-if", "mat < -1%", "--fail-if", "speedup > +0.001")
    assert "Nothing in the set-up differs." in printed


def test_turns_and_conversations_are_called_so(make: Make) -> None:
    run = make()
    for name, turn in (*((f"p{number}", 0) for number in range(4)), ("p0#2", 1)):
        run.job("chat", name, "ar", range(9), [1] * 8, turn=turn)
        run.job("chat", name, "pld", range(9), [2] * 4, turn=turn)
        run.job("chat", name, "tree", range(9), [1] * 8, [0.5] * 8, turn=turn)
    talk, plain = run.write(), made(make("plain"))
    for words in (["report", talk], ["report", talk, "--markdown"]):
        printed = dfbench(*words)
        assert " turns " in printed and " prompts " not in printed
        cells = printed.replace("|", " ").split()
        assert cells[cells.index("pld") + 1] == "5"
        assert "shown with 4 conversations" in printed
    printed = dfbench("compare", talk, talk)
    assert " conversations " in printed and " prompts " not in printed
    cells = printed.split()
    assert cells[cells.index("mat") + 1] == "4"
    assert all(" prompts " in dfbench(*words) for words in (["report", plain], ["compare", plain, plain]))


def test_what_rounds_to_zero_has_no_sign(make: Make) -> None:
    change = Change("code", "pld", "mat", 9, 2.0, 1.9999, -0.00003, Interval(-0.00004, 0.00001))
    screen = Console(file=io.StringIO(), width=200)
    screen.print(comparison(Comparison([change], [], 0, 0)))
    shown = " ".join(screen.file.getvalue().split())  # type: ignore[attr-defined]
    assert "+0.0 % +0.0…+0.0 %" in shown and "mat of pld on code: +0.00 %, interval +0.00…+0.00" in shown
    assert "-0" not in shown
    answer = dfbench("sql", made(make(), prompts=1), "select -0.0::double as z", "--format", "markdown")
    assert answer.endswith("| 0 |\n")
    assert report_markup.number(-0.001) == "0.00"
    assert str(report_markup.figure_cell(-0.001, -0.004, 0.0)).count("-") == 0
    for folder in ("analysis", "cluster", "workers"):
        for module in (Path(__file__).resolve().parents[2] / folder).glob("*.py"):
            assert not re.search(r":\+,?\.\d", module.read_text(encoding="utf-8")), f"{module}: write z after the +"


def test_a_change_is_paired_judged_and_can_fail(make: Make) -> None:
    a = made(make("a"))
    b = made(make("b", facts=Facts(stack="dfbench 9")), faster=1.25, emits=4)
    printed = " ".join(dfbench("compare", a, b).split())
    assert "code pld mat 6 2.000 4.000 +100.0 %" in printed
    assert "code pld speedup 6 2.000 3.200 +60.0 %" in printed
    assert "stack: dfbench 0.1.0, torch 0, transformers 0 → dfbench 9" in printed
    assert "a difference, shown with 6 prompts" in printed
    dfbench("compare", a, b, "--fail-if", "mat > 50%", code=1)
    dfbench("compare", b, a, "--fail-if", "speedup < -1", code=1)
    dfbench("compare", b, a, "--fail-if", "speedup < -1.3")


def pld_change(metric: str, a: float, b: float) -> Change:
    return Change("code", "pld", metric, 6, a, b, b / a - 1, None)


@pytest.mark.parametrize(
    ("text", "a", "b", "met"),
    [
        ("mat < -1%", 2.0, 1.97, True),
        ("mat < -1%", 2.0, 1.99, False),
        ("mat < 1%", 2.0, 2.01, True),  # it has not grown by 1 %
        ("mat < -0.05", 2.0, 1.94, True),
        ("mat < -0.05", 2.0, 1.96, False),
        ("mat > +.5", 2.0, 2.6, True),
        ("mat < 1", 2.0, 1.5, False),  # B's own value, whatever A's is
        ("mat < 1.6", 1.5, 1.5, True),
        ("mat > 1.6", 1.5, 1.7, True),
        ("speedup < 9", 2.0, 1.0, False),
    ],
)
def test_what_a_condition_is_about(text: str, a: float, b: float, met: bool) -> None:
    """With %: relative change; with a sign: change; with neither: the value in B."""
    assert parse_condition(text).met(pld_change("mat", a, b)) is met


def test_conditions_leave_out_what_is_1_by_definition(make: Make) -> None:
    """AR's MAT and speedup: `mat < 1.5` is about the arms that draft."""
    run = made(make())
    dfbench("compare", run, run, "--fail-if", "mat < 1.5", "--fail-if", "speedup < 1%", code=1)
    dfbench("compare", run, run, "--fail-if", "mat < 1.5")
    dfbench("compare", run, run, "--fail-if", "tokens_per_s < 1000", code=1)  # AR alone


def test_a_condition_that_nothing_could_meet_is_refused(make: Make) -> None:
    run = make()
    for number in range(3):
        run.job("code", f"p{number}", "ar", range(9))
    path = run.write()
    with pytest.raises(QueryError, match="no arm that drafts has a mat in both runs, so nothing could fail"):
        dfbench("compare", path, path, "--fail-if", "mat < 1.2")


@pytest.mark.parametrize("form", ["table", "csv", "json", "markdown"])
def test_dates_beyond_pythons_calendar_and_numbers_that_json_lacks(make: Make, form: str) -> None:
    query = "select date '-2000-01-01' as day, ['infinity'::timestamp] as moments, 'nan'::double as odd"
    printed = dfbench("sql", made(make(), prompts=1), query, "--format", form)
    assert "2001-01-01 (BC)" in printed and "infinity" in printed
    if form == "json":
        assert json.loads(printed, parse_constant=pytest.fail)[0]["odd"] is None


def test_ctrl_c_stops_a_query(make: Make) -> None:
    """Which would otherwise run to its end first."""
    con = open_run(made(make(), prompts=1))
    stopped = threading.Event()

    class Busy:
        def sql(self, query: str) -> None:
            signal.raise_signal(signal.SIGINT)
            assert stopped.wait(60)

        def interrupt(self) -> None:
            stopped.set()

        def __getattr__(self, name: str) -> object:
            return getattr(con, name)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_query(Busy(), "select 1")  # type: ignore[arg-type]
    finally:
        signal.signal(signal.SIGINT, before)
    assert stopped.is_set()


def test_a_table_shows_brackets_as_they_are(make: Make) -> None:
    assert "[/b]" in dfbench("sql", made(make(), prompts=1), """select '[/b]' as "[/c]" """)


def test_a_plan_is_printed_as_it_is_drawn(make: Make) -> None:
    run = made(make(), prompts=1)
    for query in ("explain from mat", "explain analyze from mat"):
        printed = dfbench("sql", run, query)
        assert "explain_value" not in printed and len(printed.splitlines()) > 10
        assert all("│" in line or "─" in line for line in printed.splitlines() if line.strip())
    assert dfbench("sql", run, "explain from mat", "--format", "markdown").startswith("```\n")
    assert dfbench("sql", run, "explain from mat", "--format", "csv").startswith("explain_key,explain_value\n")
    assert "\x1b" not in dfbench("sql", run, "explain select * from mat where arm = '\x1b[31m'")


def test_an_unknown_metric_in_a_condition_names_the_nearest() -> None:
    with pytest.raises(QueryError, match="unknown metric 'speedups': did you mean 'speedup'"):
        parse_condition("speedups < -1%")


def test_only_common_jobs_are_compared_and_the_rest_is_counted(make: Make) -> None:
    printed = dfbench("compare", made(make("a")), made(make("b"), prompts=4))
    assert "6 jobs that only A has and 0 that only B has" in " ".join(printed.split())


def test_unlike_runs_are_not_compared_unless_told(make: Make) -> None:
    a, b = made(make("a")), made(make("b", facts=Facts(device="other", dtype="float32")))
    with pytest.raises(RunError, match=r"device \(toy device and other\), dtype \(bfloat16 and float32\)") as error:
        dfbench("compare", a, b)
    assert "write --across device --across dtype" in str(error.value)
    with pytest.raises(RunError, match="write --across dtype to"):
        dfbench("compare", a, b, "--across", "device")
    assert "compared across device, dtype" in dfbench("compare", a, b, "--across", "device", "--across", "dtype")


@pytest.mark.parametrize("text", ["mat", "mat < x", "mat <= 3", "mat < 1 %%", ""])
def test_bad_conditions(text: str) -> None:
    with pytest.raises(QueryError, match="is not a condition"):
        parse_condition(text)


def test_verify_misses_the_prompts(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where every record is as committed."""
    monkeypatch.setattr(upkeep, "verify", lambda _: [])
    path = made(make(), prompts=1)
    assert "every file and row is as committed" in dfbench("verify", path)
    (path / "prompts.parquet").unlink()
    assert "prompts.parquet is missing: the run cannot go on" in dfbench("verify", path, code=1)


def test_a_comparison_says_how_many_divergences_went_away(make: Make) -> None:
    """What `logits_dtype: float32` is for: two of three outputs part from AR's in A, none in B."""
    for name, parting in (("a", 2), ("b", 0)):
        run = make(name)
        run.workers["w0"] = {"device": "toy device", "logits_dtype": "float32" if name == "b" else "bfloat16"}
        run.workers["w0"]["pid"] = 1 if name == "b" else 2  # No part of a set-up.
        for number in range(3):
            run.job("code", f"p{number}", "ar", range(9))
            run.job("code", f"p{number}", "pld", [*range(8), 99 if number < parting else 8])
        run.write()
    printed = " ".join(dfbench("compare", make("a").path, make("b").path).split())
    assert "pld on code: of 3 outputs, 2 part from AR's in A and 0 in B (2 fewer)." in printed
    assert 'worker: logits_dtype: "bfloat16" → "float32"' in printed and "pid" not in printed


def test_runs_without_common_jobs(make: Make) -> None:
    other = make("b")
    other.job("chat", "q", "ar", range(9))
    with pytest.raises(RunError, match="no job of the same workload"):
        dfbench("compare", made(make("a")), other.write())


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_export_writes_a_file_a_table(make: Make, tmp_path: Path, form: str) -> None:
    run = made(make())
    assert "jobs: 18 rows" in dfbench("export", tmp_path / "out", run, "--format", form)
    con = duckdb.connect()
    assert con.sql(f"select count(*) from '{tmp_path}/out/steps.{form}'").fetchall() == [(96,)]
    assert con.sql(f"select mat from '{tmp_path}/out/cells.{form}' where arm = 'pld'").fetchall() == [(2.0,)]
    with pytest.raises(QueryError, match="exports replace nothing"):
        dfbench("export", tmp_path / "out", run, "--format", form)


def test_export_to_a_duckdb_file_and_to_a_url(make: Make, tmp_path: Path) -> None:
    run = made(make())
    dfbench("export", tmp_path / "run.duckdb", run)
    with duckdb.connect(str(tmp_path / "run.duckdb"), read_only=True) as con:
        assert con.sql("select count(*) from steps").fetchall() == [(96,)]
        assert con.sql("select len(output_ids) from jobs limit 1").fetchall() == [(9,)]
    import fsspec

    dfbench("export", "memory://exports/one", run)
    files = fsspec.filesystem("memory")
    assert files.exists("/exports/one/jobs.parquet")


def test_an_export_that_did_not_fit_is_no_success(make: Make, tmp_path: Path) -> None:
    """DuckDB says nothing when what it holds in memory cannot be written as it closes."""
    run, (_, most) = made(make(), prompts=1), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, most))
    try:
        with pytest.raises(QueryError, match=r"for temporary files .*set TMPDIR"):
            dfbench("export", tmp_path / "run.duckdb", run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert not (tmp_path / "run.duckdb").exists()


def test_export_refuses_what_it_cannot_write(make: Make) -> None:
    run = made(make(), prompts=1)
    with pytest.raises(QueryError, match="cannot be written"):
        dfbench("export", "nosuch://x/y", run)
    with pytest.raises(QueryError, match="unknown format 'xls'"):
        dfbench("export", "x", run, "--format", "xls")


def test_many_numbers_of_a_set_up_are_told_by_their_ends() -> None:
    assert seed._listed(["10", "102", "9", "160", "30"]) == "9 to 160"
    assert seed._listed(["b", "a"]) == "a, b"
    assert seed._listed(["256"]) == "256"
