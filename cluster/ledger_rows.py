"""The ledger's rows, written and settled: what its transactions are made of. Each takes a connection inside one."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path

from dfbench.cluster.ledger_schema import CANCELLED, LEDGER_VERSION, Counts, Failure, Outcome, RecordFile, now, versions
from dfbench.cluster.runspec import PlannedShard, RunSpec

OUT_OF_REACH = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM}


def connect(path: Path, readonly: bool) -> sqlite3.Connection:
    if readonly:
        return sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None, timeout=30)
    db = sqlite3.connect(path, isolation_level=None, timeout=30)
    try:
        db.execute("select 1 from meta")  # Before anything is written: what is no ledger stays as it is.
        db.execute("pragma journal_mode=wal")
        db.execute("pragma synchronous=full")
    except sqlite3.Error:
        db.close()
        raise
    return db


def insert_meta(db: sqlite3.Connection, run: RunSpec, meta: dict[str, str]) -> None:
    software = versions()
    values = {
        **meta,
        "run_id": run.run_id,
        "sweep": run.sweep,
        "sweep_sha": run.sweep_sha,
        "run": run.to_json(),
        "state": "planned",
        "created_at": now(),
        "versions": json.dumps(software, sort_keys=True),
        **{f"{name}_version": version for name, version in software.items() if not name.startswith("plugin ")},
        "ledger_version": str(LEDGER_VERSION),
    }
    db.executemany("insert into meta values (?, ?)", values.items())


def insert_plan(db: sqlite3.Connection, shards: Iterable[PlannedShard]) -> None:
    for position, shard in enumerate(shards):
        spec = json.dumps({"prompts": list(shard.prompt_ids), "max_new_tokens": shard.max_new_tokens})
        db.execute(
            "insert into shards values (?, ?, ?, 'pending', 0, null, ?)",
            (shard.shard_id, position, shard.workload, spec),
        )
        db.executemany(
            "insert into jobs values (?, ?, ?, ?, ?, ?, ?, ?, 'pending', null)",
            [
                (j.job_id, shard.shard_id, j.workload, j.prompt_id, j.arm, j.repeat, j.turn, j.arm_order)
                for j in shard.jobs
            ],
        )


def insert_files(db: sqlite3.Connection, files: Sequence[RecordFile], shards: dict[str, set[str]]) -> None:
    db.executemany("insert into files values (?, ?, ?, ?, ?, ?, 1)", files)
    for file in files:
        db.executemany(
            "insert into file_shards values (?, ?)", [(file.name, shard) for shard in sorted(shards[file.name])]
        )


def insert_failures(db: sqlite3.Connection, failures: Sequence[Failure]) -> None:
    at = now()
    db.executemany("insert into attempts values (?, ?, ?, ?, ?, ?, ?, ?)", [(*failure, at) for failure in failures])


def fail_jobs(db: sqlite3.Connection, failures: Sequence[Failure]) -> None:
    """Attempts at jobs that did not commit; a job that was cancelled meanwhile keeps its state."""
    insert_failures(db, failures)
    db.executemany(
        "update jobs set state = 'failed', attempt = ? where job_id = ? and state != 'done'",
        [(failure.attempt, failure.job_id) for failure in failures if failure.kind != CANCELLED],
    )


def settle_jobs(db: sqlite3.Connection, outcome: Outcome) -> None:
    db.executemany(
        "update jobs set state = 'done', attempt = ? where job_id = ?",
        [(outcome.attempt, job_id) for job_id in outcome.done],
    )
    fail_jobs(db, outcome.failures)
    db.execute(
        "update shards set attempts = max(attempts, ?), worker_id = ? where shard_id = ?",
        (outcome.attempt, outcome.worker_id, outcome.shard_id),
    )


def settle(db: sqlite3.Connection, shards: Sequence[str]) -> None:
    """A shard is pending while a job of it is, failed when one failed, cancelled when one was, done otherwise."""
    db.executemany(
        """
        update shards set state = (
            select case when sum(state = 'pending') then 'pending'
                        when sum(state = 'failed') then 'failed'
                        when sum(state = 'cancelled') then 'cancelled'
                        else 'done' end
            from jobs where jobs.shard_id = shards.shard_id)
        where shard_id = ?
        """,
        [(shard,) for shard in shards],
    )


def forgive(db: sqlite3.Connection, failed: Sequence[tuple[str, str]]) -> None:
    """These failed (job, shard) pairs are to be done again, and the attempts that their shards lost no longer count."""
    db.executemany("update jobs set state = 'pending', attempt = null where job_id = ?", [(job,) for job, _ in failed])
    db.executemany(
        "update shards set state = 'pending', spec = json_set(spec, '$.forgiven', attempts) where shard_id = ?",
        [(shard,) for shard in sorted({shard for _, shard in failed})],
    )


def mark_unpaired(db: sqlite3.Connection, failed: Sequence[tuple[str, str]], reference: str | None) -> None:
    """Mark the shards of these (job, shard) pairs where the reference arm is to run again and other jobs are done."""
    db.executemany(
        """
        update shards set spec = json_set(spec, '$.redo', 1)
        where shard_id = ? and exists (select 1 from jobs where job_id = ? and arm = ?)
        and exists (select 1 from jobs where jobs.shard_id = shards.shard_id and state = 'done')
        """,
        [(shard, job, reference) for job, shard in failed],
    )


def last_kind(db: sqlite3.Connection, job_id: str, shard_id: str) -> str | None:
    row = db.execute(
        "select kind from attempts where shard_id = ? and (job_id = ? or job_id is null) order by rowid desc limit 1",
        (shard_id, job_id),
    ).fetchone()
    return None if row is None else str(row[0])


def counted(jobs: dict[str, int], shards: dict[str, int]) -> Counts:
    pending, done, failed, cancelled = (jobs.get(state, 0) for state in ("pending", "done", "failed", "cancelled"))
    return Counts(pending, done, failed, cancelled, shards)
