"""Commits, recovery, compaction and verify, with a worker in this process and no Ray."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from runkit import CARRIED, make_run, whole, work

from dfbench.cluster import cli_analysis, commit, upkeep
from dfbench.cluster.commit import Committer, FinishedShard
from dfbench.cluster.ledger import Ledger
from dfbench.errors import RunError
from dfbench.workers.parts import JobOutcome, Part
from dfbench.workers.records import SCHEMAS

EOS = frozenset({2})


def commit_each(ledger: Ledger, shards: list[FinishedShard]) -> None:
    """One commit a shard: many small files."""
    committer = Committer(ledger, EOS)
    for shard in shards:
        committer.add(shard)
        committer.flush()


def rows(ledger: Ledger, table: str = "jobs") -> list[tuple[str, int]]:
    """(job_id, attempt) of every committed row that counts."""
    tables = [pq.read_table(ledger.run_dir / file.name) for file in ledger.files(table)]
    found = pa.concat_tables(tables).to_pylist() if tables else []
    return sorted((row["job_id"], row["attempt"]) for row in found if not row["warmup"] and not row["pair_only"])


def assert_whole(ledger: Ledger) -> None:
    """Every planned job is there once, and everything on disk is sound."""
    counts = ledger.counts()
    assert counts.done == counts.total
    assert len({job for job, _ in rows(ledger)}) == len(rows(ledger)) == counts.total
    assert upkeep.verify(ledger.run_dir) == []


def joined(shard: FinishedShard) -> Part:
    """The parts that a shard came in, which are the more the slower the machine, as one."""
    names = {name for part in shard.parts for name in part.tables}
    tables = {name: pa.concat_tables(shard.table(name)) for name in names}
    return Part(shard.shard_id, shard.attempt, tuple(shard.outcomes), tables)


def broken(shard: FinishedShard, table: str, column: str, value: object, at: int = 0) -> None:
    """Spoil one value of the shard's records."""
    part = joined(shard)
    whole = part.tables[table]
    values = whole[column].to_pylist()
    values[at] = value
    entry = whole.schema.field(column)
    spoiled = whole.set_column(whole.schema.get_field_index(column), entry, pa.array(values, entry.type))
    shard.parts = [Part(part.shard_id, part.attempt, part.outcomes, {**part.tables, table: spoiled})]


def failed(shard: FinishedShard, job_id: str) -> None:
    """Have this job of the shard fail in place of what it did."""
    part = joined(shard)
    outcomes = [
        outcome._replace(kind="error", message="KeyError: 1") if outcome.job_id == job_id else outcome
        for outcome in part.outcomes
    ]
    kept = {name: table.filter(pa.compute.field("job_id") != job_id) for name, table in part.tables.items()}
    shard.parts = [Part(part.shard_id, part.attempt, tuple(outcomes), kept)]


def test_a_group_of_shards_is_one_file_a_table(tmp_path: Path) -> None:
    with make_run(tmp_path, 4, eos_at=9) as ledger:
        committer = Committer(ledger, EOS, max_age_s=1000, max_jobs=9)
        for shard in work(ledger):
            assert not committer.due()
            committer.add(shard)
        assert committer.due()
        outcomes = committer.flush()
        assert [outcome.shard_id for outcome in outcomes] == ["s0", "s1", "s2", "s3"]
        tables = ("jobs", "steps", "sums")
        assert [file.name for file in ledger.files()] == [f"records/0/{table}-000000.parquet" for table in tables]
        assert committer.flush() == []
        assert_whole(ledger)


def test_files_carry_their_schema_and_checksums(tmp_path: Path) -> None:
    with make_run(tmp_path, 1) as ledger:
        commit_each(ledger, work(ledger))
        for file in ledger.files():
            path = tmp_path / file.name
            assert pq.read_schema(path).metadata == SCHEMAS[file.table].metadata
            assert path.stat().st_size == file.bytes
            assert upkeep.damage(tmp_path, file) == ""


EDGES: dict[pa.DataType, list[object]] = {
    pa.string(): ["", "name", "ü" * 300],
    pa.bool_(): [True, False, True],
    pa.int32(): [-(2**31), 0, 2**31 - 1],
    pa.int64(): [-(2**63), 2**63 - 1, 20_000_000],
    pa.float32(): [0.125, float("inf"), -0.0],
    pa.float64(): [1e300, -5e-324, 0.1],
    pa.timestamp("us", tz="UTC"): [0, 1, 2**50],
    pa.list_(pa.int32()): [[], [1, 2], [2**31 - 1]],
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_written_reads_back_as_it_was(name: str) -> None:
    schema = SCHEMAS[name]
    columns = [[*EDGES[entry.type], None if entry.nullable else EDGES[entry.type][0]] for entry in schema]
    table = pa.table(columns, schema=schema)
    assert pq.read_table(pa.BufferReader(commit.encode(table))).cast(schema).equals(table)
    absent = pa.Table.from_arrays([pa.nulls(4, entry.type) for entry in schema], names=schema.names)
    assert pq.read_table(pa.BufferReader(commit.encode(absent))).cast(absent.schema).equals(absent)


def test_counts_and_times_are_laid_out_for_who_adds_them_up(tmp_path: Path) -> None:
    with make_run(tmp_path, 4) as ledger:
        commit_each(ledger, work(ledger))
        (file, *_) = ledger.files("steps")
        group = pq.read_metadata(tmp_path / file.name).row_group(0)
    used = {group.column(i).path_in_schema: group.column(i).encodings for i in range(group.num_columns)}
    for count in ("attempt", "step", "position", "queries", "drafted", "accepted", "emitted"):
        assert "RLE_DICTIONARY" in used[count], count
    for time_ in ("step_ns", "draft_ns", "forward_ns", "accept_ns", "commit_ns"):
        assert "DELTA_BINARY_PACKED" in used[time_], time_


def test_warm_up_is_recorded_and_planned_for_nobody(tmp_path: Path) -> None:
    with make_run(tmp_path, 2, warmups=2) as ledger:
        commit_each(ledger, work(ledger))
        jobs = pa.concat_tables([pq.read_table(tmp_path / file.name) for file in ledger.files("jobs")]).to_pylist()
        warm = [job for job in jobs if job["warmup"]]
        assert len(warm) == 4  # two prompts times two arms, before the worker's first shard only
        assert {job["shard_id"] for job in warm} == {"s0"}
        assert_whole(ledger)


@pytest.mark.parametrize(
    ("table", "column", "value", "says"),
    [
        ("steps", "emitted", 7, "accepted 0 but emitted 7"),
        ("steps", "position", 5, "begins at 5, not 1"),
        ("steps", "step", 3, "is numbered 3"),
        ("steps", "queries", 0, "has 0 queries"),
        ("steps", "step_ns", 1, "shorter than its phases"),
        ("steps", "draft_ns", -1, "negative length"),
        ("jobs", "finish_reason", "eos", "finish reason 'eos', not 'length'"),
        ("jobs", "output_ids", [3] * 13, "13 output tokens at a cap of 12"),
        ("jobs", "output_ids", [3, 2, *[3] * 10], "an end of text inside"),
        ("jobs", "max_new_tokens", 40, "it stopped at 12 of 40"),
    ],
)
def test_a_breach_fails_the_job_and_leaves_the_others(
    tmp_path: Path, table: str, column: str, value: object, says: str
) -> None:
    with make_run(tmp_path, 2, warmups=0, eos_at=0) as ledger:
        shards = work(ledger)
        broken(shards[0], table, column, value)
        committer = Committer(ledger, EOS)
        for shard in shards:
            committer.add(shard)
        committer.flush()
        ((failure, _),) = ledger.failures()
        assert (failure.kind, failure.job_id) == ("record", "j0-ar")
        assert says in failure.message
        assert [job for job, _ in rows(ledger)] == ["j0-pld", "j1-ar", "j1-pld"]
        assert not [job for job, _ in rows(ledger, "steps") if job == "j0-ar"]
        assert upkeep.verify(tmp_path) == []
        assert ledger.retry(kind="record") == 1
        commit_each(ledger, work(ledger))
        assert_whole(ledger)


def test_a_failed_job_leaves_the_others_of_its_shard(tmp_path: Path) -> None:
    with make_run(tmp_path, 1) as ledger:
        (shard,) = work(ledger)
        failed(shard, "j0-pld")
        commit_each(ledger, [shard])
        assert rows(ledger) == [("j0-ar", 1)]
        ledger.retry()
        commit_each(ledger, work(ledger))
        assert rows(ledger) == [("j0-ar", 1), ("j0-pld", 2)]
        assert_whole(ledger)
        jobs = pa.concat_tables([pq.read_table(tmp_path / file.name) for file in ledger.files("jobs")]).to_pylist()
        pairs = [job["attempt"] for job in jobs if job["pair_only"]]
        assert pairs == [2]  # the retried arm's fresh reference


def test_a_reference_that_runs_again_takes_its_arms_along(tmp_path: Path) -> None:
    """An arm's pair is the reference of the same attempt, so one that is done alone is run again beside it."""
    with make_run(tmp_path, 2) as ledger:
        first, second = work(ledger)
        failed(first, "j0-ar")
        commit_each(ledger, [first, second])
        assert rows(ledger) == [("j0-pld", 1), ("j1-ar", 1), ("j1-pld", 1)]
        assert ledger.retry() == 1
        assert upkeep.redo(ledger, busy=["s0"])  # not while the shard is out
        assert not upkeep.redo(ledger)
        assert [row.shard_id for row in ledger.pending(9)] == ["s0"]
        commit_each(ledger, work(ledger))
        assert rows(ledger) == [("j0-ar", 2), ("j0-pld", 2), ("j1-ar", 1), ("j1-pld", 1)]
        assert_whole(ledger)


def test_ctrl_c_waits_for_the_end_of_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_run(tmp_path, 2) as ledger:
        first, second = work(ledger)
        committer = Committer(ledger, EOS)
        committer.add(first)
        monkeypatch.setattr(commit, "reach", lambda point: os.kill(os.getpid(), signal.SIGINT))
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # What runs in the background ignores it.
        with pytest.raises(KeyboardInterrupt):
            committer.flush()
        signal.signal(signal.SIGINT, before)
        monkeypatch.undo()
        assert committer.flush() == []  # it knows that the first shard is committed
        committer.add(second)
        committer.flush()
        assert_whole(ledger)


def test_jobs_that_were_told_to_stop(tmp_path: Path) -> None:
    with make_run(tmp_path, 2, warmups=0) as ledger:
        shards = work(ledger)
        for shard in shards:
            part = joined(shard)
            outcomes = tuple(JobOutcome(o.job_id, o.arm, "cancelled") if o.arm == "pld" else o for o in part.outcomes)
            tables = {n: t.filter(pa.compute.field("arm") == "ar") for n, t in part.tables.items()}
            shard.parts = [Part(shard.shard_id, 1, outcomes, tables)]
        shards[0].stopped["j0-pld"] = "deadline"
        commit_each(ledger, shards)
        assert [(f.job_id, f.kind) for f, _ in ledger.failures()] == [("j0-pld", "deadline")]
        assert [row.shard_id for row in ledger.pending(9)] == ["s1"]


def test_a_carried_arm_counts_as_one(tmp_path: Path) -> None:
    with make_run(tmp_path, 4, arms=CARRIED, plan=whole(4)) as ledger:
        (shard,) = work(ledger)
        part = joined(shard)
        bad = {"j2-cacheback", "j3-cacheback"}
        outcomes = tuple(o._replace(kind="error", message="it broke") if o.job_id in bad else o for o in part.outcomes)
        keep = ~pa.compute.field("job_id").isin(sorted(bad))
        shard.parts = [Part("all", 1, outcomes, {n: t.filter(keep) for n, t in part.tables.items()})]
        commit_each(ledger, [shard])
        assert {job for job, _ in rows(ledger)} == {f"j{i}-ar" for i in range(4)}
        assert upkeep.verify(tmp_path) == []
        assert ledger.end() == "planned"  # the arm's sound jobs are to be done again with the others
        ledger.retry()
        (row,) = ledger.pending(9)
        assert [job.job_id for job in row.jobs if not job.pair_only] == [f"j{i}-cacheback" for i in range(4)]
        commit_each(ledger, work(ledger))
        assert_whole(ledger)


def test_orphans_are_removed(tmp_path: Path) -> None:
    with make_run(tmp_path, 3) as ledger:
        commit_each(ledger, work(ledger, 2))
        for name in ("jobs-000009.parquet", ".steps-000002.part"):
            (tmp_path / "records" / "0" / name).write_bytes(b"left behind")
        assert upkeep.recover(ledger) == ["removed 2 files of a commit that never happened."]
        assert upkeep.recover(ledger) == []
        commit_each(ledger, work(ledger))
        assert_whole(ledger)


@pytest.mark.parametrize("table", ["jobs", "steps"])
@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
@pytest.mark.parametrize("compacted", [False, True], ids=["small", "compacted"])
def test_a_broken_file_makes_its_shards_run_again(tmp_path: Path, table: str, harm: str, compacted: bool) -> None:
    with make_run(tmp_path, 5, warmups=1) as ledger:
        shards = work(ledger)
        commit_each(ledger, shards[:3])
        if compacted:
            assert upkeep.compact(ledger, at_least=2)
        commit_each(ledger, shards[3:])
        before = len(rows(ledger))
        victim = tmp_path / ledger.files(table)[0].name
        if victim.name.endswith(".parquet") and harm == "flip":
            data = bytearray(victim.read_bytes())
            data[len(data) // 3] ^= 0x40
            victim.write_bytes(data)
        elif harm == "cut":
            os.truncate(victim, 40)
        else:
            victim.unlink()
        assert upkeep.verify(tmp_path)
        (note, *_) = upkeep.recover(ledger)
        lost = 3 if compacted else 1
        assert f"{lost} shards will run again" in note
        assert len(rows(ledger)) == len(rows(ledger, "jobs")) == before - 2 * lost
        assert ledger.counts().pending == 2 * lost
        assert upkeep.verify(tmp_path) == []
        commit_each(ledger, work(ledger))
        assert_whole(ledger)


def test_compaction_keeps_every_row_and_few_files(tmp_path: Path) -> None:
    with make_run(tmp_path, 8) as ledger:
        commit_each(ledger, work(ledger))
        before, steps = rows(ledger), rows(ledger, "steps")
        old = [file.name for file in ledger.files()]
        assert not upkeep.compact(ledger, at_least=25)
        assert upkeep.compact(ledger, at_least=24)
        assert [file.name.split("/")[1] for file in ledger.files()] == ["1", "1", "1"]
        assert rows(ledger) == before
        assert rows(ledger, "steps") == steps
        assert_whole(ledger)
        # Readers may hold the old list a little longer; an hour later the files go.
        assert all((tmp_path / name).exists() for name in old)
        upkeep.recover(ledger)
        assert all((tmp_path / name).exists() for name in old)
        for name in old:
            os.utime(tmp_path / name, (time.time() - 7200, time.time() - 7200))
        upkeep.recover(ledger)
        assert not any((tmp_path / name).exists() for name in old)
        assert ledger.files(live=False) == []
        assert_whole(ledger)


def test_compact_leaves_a_damaged_run_as_it_is(tmp_path: Path) -> None:
    with make_run(tmp_path, 4, eos_at=9) as ledger:
        commit_each(ledger, work(ledger))
    record = tmp_path / "records/0/steps-000001.parquet"
    record.write_bytes(record.read_bytes()[:-1] + b"x")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RunError, match=r"holds damaged files, records/0/steps-000001\.parquet \(.*submit it again"):
        cli_analysis.compact(str(tmp_path))
    assert sorted(tmp_path.rglob("*")) == before


def test_rows_of_one_job_lie_together_after_compaction(tmp_path: Path) -> None:
    with make_run(tmp_path, 6) as ledger:
        commit_each(ledger, work(ledger))
        upkeep.compact(ledger, at_least=2)
        (file,) = ledger.files("steps")
        table = pq.read_table(tmp_path / file.name)
        keys = list(zip(table["job_id"].to_pylist(), table["step"].to_pylist(), strict=True))
        assert keys == sorted(keys)


def test_verify_finds_rows_that_the_ledger_does_not_know(tmp_path: Path) -> None:
    with make_run(tmp_path, 2) as ledger:
        commit_each(ledger, work(ledger))
        with ledger.transaction() as db:
            db.execute("update jobs set state = 'pending' where job_id = 'j0-ar'")
            db.execute("update jobs set attempt = 5 where job_id = 'j1-ar'")
    findings = upkeep.verify(tmp_path)
    assert findings == [
        "job j0-ar has rows but is not done.",
        "job j1-ar has rows of attempt 1, the ledger says 5.",
    ]


def test_large_runs_are_verified_in_portions_of_whole_jobs(tmp_path: Path) -> None:
    with make_run(tmp_path, 6) as ledger:
        commit_each(ledger, work(ledger))
        portions = list(upkeep._portions(ledger, rows=30))
        assert len(portions) > 2
        steps = pa.concat_tables([portion["steps"] for portion in portions])
        assert steps.num_rows == sum(file.rows for file in ledger.files("steps"))
        names = [set(portion["jobs"]["job_id"].to_pylist()) for portion in portions]
        assert sum(map(len, names)) == len(set().union(*names))
        for portion, jobs in zip(portions, names, strict=True):
            assert set(portion["steps"]["job_id"].to_pylist()) <= jobs


STAGES = ["commit.before_write", "commit.before_rename", "commit.after_rename", "commit.inside", "commit.after"]


def drive(run: Path) -> None:
    """What a driver does to a run's files, without Ray."""
    with Ledger.open(run) as ledger:
        upkeep.recover(ledger)
        commit_each(ledger, work(ledger))
        upkeep.compact(ledger, at_least=2)


def in_child(run: Path) -> int:
    """`drive` in a process of its own, which may die; its exit status, negative for a signal."""
    child = os.fork()
    if child == 0:
        try:
            drive(run)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


@pytest.mark.chaos
@pytest.mark.parametrize("stage", [*STAGES, "compact.before_switch", "compact.after_switch"])
def test_sigkill_at_each_stage_of_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """Whatever the moment of death, the same work again leads to every job once."""
    run, notes = tmp_path / "run", tmp_path / "notes"
    notes.mkdir()
    make_run(run, 4, eos_at=9).close()
    nth = 2 if stage.startswith("commit") else 1
    monkeypatch.setenv("DFBENCH_FAULT", f"{stage}:kill@{nth}")
    monkeypatch.setenv("DFBENCH_FAULT_DIR", str(notes))
    assert in_child(run) == -signal.SIGKILL
    assert (notes / stage).exists()
    assert in_child(run) == 0
    with Ledger.open(run) as ledger:
        assert_whole(ledger)
        named = {file.name for file in (*ledger.files(), *ledger.files(live=False))}
        on_disk = {path.relative_to(run).as_posix() for path in (run / "records").rglob("*") if path.is_file()}
        assert on_disk == named
