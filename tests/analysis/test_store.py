"""Opening a run: what its connection can read and what it cannot, beside whoever writes it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest
from handmade import two_prompts
from runmaker import RunMaker

from dfbench.analysis import open_run, write_run_sql
from dfbench.analysis.catalog import views
from dfbench.errors import RunError


def digest(folder: Path) -> dict[str, str]:
    """What a run directory holds, SQLite's own side files aside."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix not in (".db-shm", ".db-wal"))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def run(make: Callable[..., RunMaker]) -> Path:
    return two_prompts(make()).write()


def test_every_view_can_be_read(run: Path) -> None:
    con = open_run(run)
    for view in views():
        if "view" in view.kind:
            names = [row[0] for row in con.sql(f"describe from {view.name}").fetchall()]
            assert names == [column.name for column in view.columns], view.name
            con.sql(f"from {view.name}").fetchall()


def test_duckdbs_own_shell_reads_run_sql(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = write_run_sql(run).read_text(encoding="utf-8")
    monkeypatch.chdir(run)
    shell = duckdb.connect()
    shell.execute(script)
    here = open_run(run)
    columns = "select table_name, column_name, data_type from duckdb_columns() where not internal order by all"
    known = shell.sql(columns).fetchall()
    assert known == here.sql(columns).fetchall()
    assert {name for name, *_ in known} >= {view.name for view in views() if "view" in view.kind}
    query = "select arm, mat, speedup, mat_lo from cells"
    cells = shell.sql(query).fetchall()
    assert cells == here.sql(query).fetchall()
    assert [row[-1] for row in cells] == [None, None]
    assert shell.sql("from plan").fetchall() == here.sql("from plan").fetchall()


REFUSED = [
    "from read_csv('/etc/passwd')",
    "from read_text('/etc/passwd')",
    "from '/etc/passwd'",
    "from glob('/etc/*')",
    "from read_parquet('{record}')",
    "copy (select 1) to '{outside}/out.csv'",
    "copy (select 1) to '{outside}/out.csv' (use_tmp_file false)",
    "copy (select 1) to '{record}' (format parquet)",
    "copy (select 1) to '{record}' (format parquet, use_tmp_file false)",
    "copy (select 1) to 'run://{name}' (format parquet)",
    "copy (select 1) to 'run://{name}' (format parquet, use_tmp_file false)",
    "copy (select 1) to 'run://records/0/new.parquet'",
    "attach '{outside}/new.db' as x",
    "attach '{folder}/new.db' as x",
    "attach 'run://records/0/new.db' as x",
    "attach 'run://{name}' as x (type duckdb)",
    "attach '{folder}/ledger.db' as x (type sqlite)",
    "export database '{outside}/copy'",
    "install httpfs",
    "load httpfs",
    "load '{outside}/x.duckdb_extension'",
    "set threads = 1",
    "set enable_external_access = true",
    "set allowed_paths = ['/etc/passwd']",
    "set lock_configuration = false",
    "reset lock_configuration",
    "pragma threads = 1",
    "pragma enable_profiling",
    "create persistent secret (type s3, key_id 'a', secret 'b')",
]


def test_the_connection_reads_its_run_and_writes_nothing(run: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    name = "records/0/steps-000000.parquet"
    con = open_run(run)
    before = digest(run)
    for statement in REFUSED:
        with pytest.raises(duckdb.Error):
            con.execute(statement.format(outside=outside, folder=run, name=name, record=run / name))
        assert digest(run) == before, statement
    assert not list(outside.iterdir())
    assert con.sql("select count(*) from steps").fetchall() == [(40,)]


def test_the_whole_run_is_unchanged_by_reading_it(run: Path) -> None:
    before = digest(run)
    con = open_run(run)
    con.sql("from cells").fetchall()
    con.sql("from divergences").fetchall()
    assert digest(run) == before


def test_the_newest_run_is_the_default(make: Callable[..., RunMaker], monkeypatch: pytest.MonkeyPatch) -> None:
    path = two_prompts(make("one")).write()
    (path.parent / "latest").symlink_to("one")
    monkeypatch.chdir(path.parent.parent)
    assert open_run().sql("select count(*) from jobs").fetchall() == [(4,)]
    assert open_run("one").sql("select count(*) from jobs").fetchall() == [(4,)]


def test_no_run_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for given, words in ((None, "no run under"), ("nowhere", "no run at 'nowhere'"), ("empty", "is not a run")):
        with pytest.raises(RunError, match=words):
            open_run(given)
    (tmp_path / "empty" / "ledger.db").write_bytes(b"")
    with pytest.raises(RunError, match="cannot be read"):
        open_run("empty")


def test_files_that_were_read_are_let_go_of(make: Callable[..., RunMaker]) -> None:
    """A notebook opens a run a hundred times; many a process may have no more than 1024 files open."""
    path = two_prompts(make()).write()

    def read() -> int:
        with open_run(path) as con:
            con.sql("select count(*) from steps, prompts").fetchall()
            con.sql("from cells").fetchall()
        return len(list(Path("/dev/fd").iterdir()))

    assert read() == read()
