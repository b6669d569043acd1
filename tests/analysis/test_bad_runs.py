"""Runs that lack something: each says what is missing and shows what can still be shown."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from handmade import to_twelve_places
from runmaker import RunMaker

from dfbench.analysis import open_run, report, write_run_sql
from dfbench.analysis.checks import checks
from dfbench.analysis.guard import judge
from dfbench.analysis.store import problems
from dfbench.cluster.ledger import Ledger
from dfbench.cluster.upkeep import compact, verify
from dfbench.errors import RunError
from dfbench.workers.records import SCHEMA_VERSION

Make = Callable[..., RunMaker]
STORED = Path(__file__).parent / "data"


def two_commits(run: RunMaker) -> Path:
    """Two prompts, each with its own commit."""
    for prompt in ("p1", "p2"):
        run.job("code", prompt, "ar", range(9), [1] * 8)
        run.job("code", prompt, "pld", range(9), [2] * 4)
    return run.write(groups=2)


def spoil(path: Path, statement: str) -> None:
    """Change a run's ledger behind its back."""
    with closing(sqlite3.connect(path / "ledger.db")) as ledger, ledger:
        ledger.execute(statement)


def said(path: Path) -> str:
    return " ".join(problem.detail for problem in problems(open_run(path)))


def test_a_truncated_file_takes_its_whole_commit_with_it(make: Make) -> None:
    """A job without its steps would have a wrong MAT: the shard is left out, the other one stays."""
    path = two_commits(make())
    broken = path / "records/0/steps-000001.parquet"
    broken.write_bytes(broken.read_bytes()[:-20])
    con = open_run(path)
    words = said(path)
    assert "steps-000001.parquet has" in words
    assert "its shards are left out" in words
    assert con.sql("select distinct prompt_id from jobs").fetchall() == [("p1",)]
    assert con.sql("select mat, prompts, prompts_planned from cells where arm = 'pld'").fetchall() == [(2.0, 1, 2)]


def test_a_missing_file_too(make: Make) -> None:
    path = two_commits(make())
    (path / "records/0/jobs-000000.parquet").unlink()
    assert "jobs-000000.parquet is missing" in said(path)
    assert open_run(path).sql("select distinct prompt_id from steps").fetchall() == [("p2",)]


@pytest.mark.parametrize("table", ["jobs", "steps", "tokens"])
def test_a_file_that_is_not_parquet_takes_its_whole_commit_with_it(make: Make, table: str) -> None:
    path = two_commits(make())
    name = f"records/0/{table}-000000.parquet"
    (path / name).write_bytes(b"x" * (path / name).stat().st_size)
    assert f"{name} is not a readable Parquet file; its shards are left out" in said(path)
    assert open_run(path).sql("select distinct prompt_id from jobs").fetchall() == [("p2",)]


def test_a_run_without_any_commit_shows_its_plan(make: Make) -> None:
    run = make()
    run.plan("code", "p1", "ar")
    path = run.write(state="running")
    con = open_run(path)
    assert "0 of 1 jobs are done (1 pending)" in said(path)
    assert con.sql("select count(*) from cells").fetchall() == [(0,)]
    assert con.sql("select jobs, done from plan").fetchall() == [(1, 0)]
    write_run_sql(path)


def test_a_half_written_run_says_how_far_it_is(make: Make) -> None:
    run = make()
    run.job("code", "p1", "ar", range(9))
    run.plan("code", "p1", "pld", state="failed")
    run.plan("code", "p2", "ar")
    assert "1 of 3 jobs are done (1 failed, 1 pending)" in said(run.write())


@pytest.mark.parametrize(
    ("state", "worked", "words"),
    [
        ("planned", False, "planned, not begun: 0 of 1 jobs are done"),
        ("planned", True, "stopped: 1 of 2 jobs are done"),
        ("running", True, "running, or its driver died: 1 of 2 jobs are done"),
        ("cancelled", True, "cancelled: 1 of 2 jobs are done"),
        ("done", True, "ended: 1 of 2 jobs are done"),
    ],
)
def test_an_unfinished_run_says_what_its_state_means(make: Make, state: str, worked: bool, words: str) -> None:
    run = make()
    if worked:
        run.job("code", "p1", "ar", range(9))
    run.plan("code", "p2", "ar", state="failed" if state == "done" else "pending")
    assert words in said(run.write(state=state))


def test_settings_that_are_not_json_are_left_out_or_missed(make: Make) -> None:
    path = two_commits(make())
    spoil(path, "insert into meta values ('run', '{')")
    assert "entry 'run' is not JSON" in said(path)
    con = open_run(path)
    assert "is not JSON): its settings are not shown" in report.page(con)
    with pytest.raises(RunError, match=r"entry 'run' is not JSON.*submit the sweep again"):
        judge(con, join_only=True)


def test_a_worker_whose_facts_are_not_json_is_named_and_the_rest_is_shown(make: Make) -> None:
    path = two_commits(make())
    spoil(path, "insert into workers values ('w9', 'n', 'd', '{', null, null)")
    assert "what worker w9 said of itself is no JSON" in said(path)
    con = open_run(path)
    assert "said of itself is no JSON" in report.page(con)
    judge(con, join_only=True)


def test_an_empty_plan_says_so(make: Make) -> None:
    assert "the plan is empty" in said(make().write())


def test_a_missing_prompts_file_is_a_note(make: Make) -> None:
    path = two_commits(make())
    (path / "prompts.parquet").unlink()
    assert "prompts.parquet is missing" in said(path)
    assert open_run(path).sql("select count(*) from cells").fetchall() == [(2,)]


def test_without_an_ar_arm_there_is_mat_and_no_speedup(make: Make) -> None:
    run = make()
    run.job("code", "p1", "pld", range(9), [2] * 4)
    con = open_run(run.write())
    assert con.sql("select mat, speedup, pairs_left_out from cells").fetchall() == [(2.0, None, 1)]
    assert any("no AR arm" in check.text for check in checks(con))


def test_one_prompt_has_figures_and_no_interval(make: Make) -> None:
    run = make()
    run.job("code", "p1", "ar", range(9))
    run.job("code", "p1", "pld", range(9), [2] * 4)
    con = open_run(run.write())
    assert con.sql("select mat, mat_lo, speedup_lo from cells where arm = 'pld'").fetchall() == [(2.0, None, None)]
    assert con.sql("select interval_note from mat where arm = 'pld'").fetchall() == [("fewer than three prompts",)]


def newer(path: Path, version: int, drop: str = "") -> None:
    """Rewrite a run's files as a newer schema would have them: one more column, perhaps one column less."""
    ledger = sqlite3.connect(path / "ledger.db")
    for name, table in ledger.execute("select name, tbl from files").fetchall():
        rows = pq.read_table(path / name)
        rows = rows.append_column("surprise", pa.array([0] * rows.num_rows))
        if drop in rows.column_names:
            rows = rows.drop_columns([drop])
        rows = rows.replace_schema_metadata({"dfbench.table": table, "dfbench.schema_version": str(version)})
        pq.write_table(rows, path / name)
        ledger.execute("update files set bytes = ? where name = ?", ((path / name).stat().st_size, name))
    ledger.commit()
    ledger.close()


def test_a_newer_schema_shows_the_columns_that_are_known(make: Make) -> None:
    path = two_commits(make())
    newer(path, version=99, drop="repetition")
    con = open_run(path)
    words = said(path)
    assert f"jobs has schema version 99, this dfbench knows {SCHEMA_VERSION}" in words
    assert "jobs has no repetition: they read as NULL" in words
    assert con.sql("select mat from cells where arm = 'pld'").fetchall() == [(2.0,)]
    assert "surprise" not in [row[0] for row in con.sql("describe from steps").fetchall()]


def test_a_run_resumed_by_a_newer_version_reads_both(make: Make) -> None:
    path = two_commits(make())
    name = "records/0/steps-000001.parquet"
    rows = pq.read_table(path / name)
    pq.write_table(rows.append_column("surprise", pa.array([0] * rows.num_rows)), path / name)
    ledger = sqlite3.connect(path / "ledger.db")
    ledger.execute("update files set bytes = ? where name = ?", ((path / name).stat().st_size, name))
    ledger.commit()
    ledger.close()
    assert open_run(path).sql("select count(*) from steps").fetchall() == [(24,)]


def test_a_ledger_that_is_not_one_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "ledger.db").write_bytes(b"not a database at all, just text " * 9)
    with pytest.raises(RunError, match="cannot be read"):
        open_run(tmp_path)


def test_reading_beside_the_writer(make: Make) -> None:
    """An open write transaction neither blocks opening a run nor shows what it has not committed."""
    path = two_commits(make())
    writer = sqlite3.connect(path / "ledger.db", isolation_level=None)
    writer.execute("begin immediate")
    writer.execute("update files set live = 0")
    assert open_run(path).sql("select count(*) from jobs").fetchall() == [(4,)]
    writer.execute("rollback")
    writer.close()


@pytest.mark.parametrize("stored", sorted(entry.name for entry in STORED.glob("schema-*")))
def test_stored_runs_of_every_schema_version_load(stored: str, tmp_path: Path) -> None:
    """Runs written when their schema was current; never written anew."""
    path = tmp_path / stored
    shutil.copytree(STORED / stored, path)
    con = open_run(path)
    assert problems(con) == []
    assert con.sql("select workload, arm, round(mat, 9), round(speedup, 9) from cells").fetchall() == [
        ("code", "ar", 1.0, 1.0),
        ("code", "pld", 1.5, 1.8),
    ]
    assert con.sql("select class from divergences").fetchall() == [("tie_both",)]


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION + 1))
def test_stored_runs_of_every_schema_version_keep_their_figures(version: int, tmp_path: Path) -> None:
    """Runs of a real engine: plain, chain and tree arms, warm-ups, a job that was retried, a divergence after which
    AR's output ends first. Their figures are those that the views gave when the run was made."""
    path = tmp_path / "run"
    shutil.copytree(STORED / f"whole-{version}", path)
    due = json.loads((STORED / f"whole-{version}.json").read_text(encoding="utf-8"))
    assert due["divergences"]
    assert any(row["passes_past_ar"] for row in due["pass_costs"])
    with Ledger.open(path) as ledger:
        assert bool(ledger.files("sums")) == (version > 1)
        for _ in range(2):  # as stored; then compacted, which gives an older run its sums
            assert verify(path) == []
            con = open_run(path)
            assert problems(con) == []
            for view, rows in due.items():
                found = con.sql(f"from {view} order by all").to_arrow_table().to_pylist()
                assert to_twelve_places(found) == to_twelve_places(rows), view
            con.close()
            compact(ledger, at_least=2)
            assert ledger.files("sums")


def test_there_is_a_stored_run_of_the_current_schema() -> None:
    assert (STORED / f"schema-{SCHEMA_VERSION}").is_dir()
