"""Figures from the sums that commits leave are those from step rows; where sums are missing, step rows count."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from handmade import Make, ids, to_twelve_places
from runmaker import RunMaker

from dfbench.analysis import open_run
from dfbench.analysis.store import problems
from dfbench.analysis.sums import sums_astray
from dfbench.cluster.commit import encode
from dfbench.workers.records import SUMS

HEADLINE = ("cells", "mat", "speedup", "speedup_le_mat", "losslessness", "divergences")
BENEATH = ("step_totals", "pass_costs", "pairs")


def jumble(run: RunMaker, seed: int) -> RunMaker:
    """Jobs of every kind at random: long and short outputs, other lengths than AR's, drafts that fail, several AR jobs,
    attempts and repeats, warm-ups, pair-only rows, untimed jobs, jobs of which only the wall time is known."""
    chance = random.Random(seed)
    for number in range(14):
        where: dict[str, Any] = {"repeat": number % 2, "attempt": 1 + number % 3}
        prompt = f"p{number // 2}"
        steps = chance.choice((0, 1, 9, 20))
        timed = number != 5
        costs = [chance.uniform(0.5, 3) for _ in range(steps)]
        plain = {"drafter": "ar", "timed": timed, **where}
        if number != 7:
            run.job("code", prompt, "ar", ids(0, steps + 1), [1] * steps, costs, pair_only=number == 3, **plain)
        if number in (2, 7):
            run.job("code", prompt, "again", ids(0, steps + 1), [1] * steps, costs[::-1], **plain)
        for arm in ("pld", "tree"):
            emits = [chance.randint(1, 4) for _ in range(chance.randint(0, 8))]
            drafted = [count - 1 + chance.randint(0, 3) for count in emits]
            costs = [chance.uniform(0.5, 3) for _ in emits]
            output = ids(chance.choice((0, 50)), sum(emits) + 1)
            run.job("code", prompt, arm, output, emits, costs, drafted=drafted, timed=timed, draft_ms=0.1, **where)
        run.job("code", prompt, "hf", ids(0, 6), drafter="hf-pld", wall_ms=4.0, **where)
    for arm in ("ar", "pld"):
        run.job("code", "w0", arm, ids(0, 5), warmup=True)
    return run


def figures(con: duckdb.DuckDBPyConnection) -> dict[str, list[Any]]:
    """Every row of the headline views and of those beneath them, floats to 12 places of their own size."""
    return {
        view: to_twelve_places(con.sql(f"from {view} order by all").to_arrow_table().to_pylist())
        for view in (*HEADLINE, *BENEATH)
    }


def rewrite(path: Path, change: Callable[[pa.Table], pa.Table], table: str = "sums") -> None:
    """Change a run's files of one table behind its back, and its ledger with them."""
    with closing(sqlite3.connect(path / "ledger.db")) as ledger, ledger:
        for (name,) in ledger.execute("select name from files where tbl = ?", (table,)).fetchall():
            data = encode(change(pq.read_table(path / name))).to_pybytes()
            (path / name).write_bytes(data)
            ledger.execute("update files set bytes = ? where name = ?", (len(data), name))


def with_column(name: str, change: Callable[[list[Any]], list[Any]]) -> Callable[[pa.Table], pa.Table]:
    """A table with other values in one column."""

    def changed(table: pa.Table) -> pa.Table:
        values = pa.array(change(table[name].to_pylist()), table.schema.field(name).type)
        return table.set_column(table.schema.get_field_index(name), table.schema.field(name), values)

    return changed


@pytest.mark.parametrize("seed", range(3))
def test_figures_from_sums_are_those_from_step_rows(make: Make, seed: int) -> None:
    summed = open_run(jumble(make("summed"), seed).write())
    plain = open_run(jumble(make("plain"), seed).write(sums=False))
    assert summed.sql("from unsummed").fetchall() == []
    assert len(plain.sql("from unsummed").fetchall()) == len(plain.sql("from raw_jobs").fetchall())
    assert figures(summed) == figures(plain)
    assert summed.sql("from pass_costs where passes_past_ar > 0").fetchall()


def test_with_sums_no_headline_view_looks_at_step_rows(make: Make) -> None:
    path = jumble(make(), 0).write()
    due = figures(open_run(path))
    for name in ("position", "drafted", "accepted", "emitted", "step_ns", "draft_ns", "forward_ns"):
        rewrite(path, with_column(name, lambda values: [None if value is None else 7 for value in values]), "steps")
    assert figures(open_run(path)) == due
    rewrite(path, lambda table: table.slice(0, 0))
    assert figures(open_run(path)) != due


def test_jobs_without_sums_are_added_up_beside_those_that_have_them(make: Make) -> None:
    """As in a run of schema 1 that goes on under schema 2."""
    path = jumble(make(), 1).write(groups=4)
    due = figures(open_run(path))
    with closing(sqlite3.connect(path / "ledger.db")) as ledger, ledger:
        ledger.execute("update files set live = 0 where name in ('records/0/sums-000000.parquet', "
                       "'records/0/sums-000002.parquet')")  # fmt: skip
    con = open_run(path)
    some, whole = (con.sql(f"select count(*) from {table}").fetchall()[0][0] for table in ("unsummed", "raw_jobs"))
    assert 0 < some < whole
    assert figures(con) == due


def test_sums_beside_another_ar_job_than_the_pairs_do_not_count(make: Make) -> None:
    """What is compared with what is the views' to say: sums that took another pair are not read, whatever they say."""
    path = jumble(make(), 2).write()
    due = figures(open_run(path))
    rewrite(path, with_column("ar_job_id", lambda names: [name and "code/p0/again/0" for name in names]))
    rewrite(path, with_column("ar_pass_ns", lambda times: [None if time is None else time * 3 for time in times]))
    rewrite(path, with_column("steps", lambda counts: [count + 1 for count in counts]))
    con = open_run(path)
    found = figures(con)
    assert found["pass_costs"] == due["pass_costs"]
    alone = {job for (job,) in con.sql("select job_id from couples where ar_job_id is null").fetchall()}
    assert [row for row in found["step_totals"] if row["job_id"] not in alone] == [
        row for row in due["step_totals"] if row["job_id"] not in alone
    ]


@pytest.mark.parametrize("harm", ["cut", "remove", "garbage"])
def test_broken_sums_are_named_and_step_rows_count_in_their_place(make: Make, harm: str) -> None:
    path = jumble(make(), 0).write(groups=2)
    due = figures(open_run(path))
    victim = path / "records/0/sums-000000.parquet"
    data = victim.read_bytes()
    if harm == "remove":
        victim.unlink()
    else:
        victim.write_bytes(data[:-9] if harm == "cut" else b"x" * len(data))
    con = open_run(path)
    [said] = [problem.detail for problem in problems(con)]
    assert "sums-000000.parquet" in said
    assert figures(con) == due


def test_sums_that_lack_a_column_are_not_read(make: Make) -> None:
    path = jumble(make(), 0).write(groups=2)
    due = figures(open_run(path))
    rewrite(path, lambda table: table.drop_columns(["emitted", "ar_pass_ns"]))
    con = open_run(path)
    assert [problem.detail for problem in problems(con)] == [
        "sums has no emitted, ar_pass_ns: step rows are added up in their place."
    ]
    assert figures(con) == due


def test_sums_that_say_what_their_rows_do_not_are_found(make: Make) -> None:
    """A figure left out is a lie too."""
    path = jumble(make(), 0).write()
    assert list(sums_astray(open_run(path))) == []
    before = pq.read_table(path / "records/0/sums-000000.parquet")
    for name in SUMS.names[SUMS.names.index("steps") :]:
        for lie in (None, 77):
            if name != "ar_job_id" and (lie or SUMS.field(name).nullable):  # the views take an AR job of their own
                rewrite(path, with_column(name, lambda values, lie=lie: [lie for _ in values]))
                assert any("code/pld: the sums of " in said for said in sums_astray(open_run(path))), (name, lie)
                rewrite(path, lambda table: before)
    for name in ("passes_past_ar", "ar_pass_ns"):  # both at once, as AR's own jobs have them
        rewrite(path, with_column(name, lambda values: [None for _ in values]))
    assert list(sums_astray(open_run(path)))


def test_sums_are_named_after_what_they_sum() -> None:
    """Columns that both tables have mean the same in both."""
    from dfbench.workers.records import JOBS, STEPS

    assert set(SUMS.names) & set(JOBS.names) <= set(STEPS.names)
