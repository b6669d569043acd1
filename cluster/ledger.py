"""The ledger of a run: what is planned, what is committed and in which files, what failed, what is left.

One SQLite file, `ledger.db`, in WAL mode with `synchronous=FULL`. The driver is its only steady writer and holds the
run's lock; `cancel` and `retry` are single short transactions that any process may make beside it. A transaction that
names record files is the one commit point of a run: a file that the ledger does not name does not exist.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dfbench.cluster import ledger_rows
from dfbench.cluster.ledger_schema import (
    INDEXES,
    KINDS,
    LEDGER_FILE,
    LEDGER_VERSION,
    SCHEMA,
    Counts,
    Failure,
    Outcome,
    RecordFile,
    Worker,
    now,
    versions,
)
from dfbench.cluster.run_place import sync_folder
from dfbench.cluster.runspec import PlannedShard, RunSpec, ShardRow, with_pairs
from dfbench.errors import RunError, unknown
from dfbench.workers.faults import reach
from dfbench.workers.spec import JobSpec


class Ledger:
    """A run's ledger, open. Make one with `create` or `open`; close it, or use it as a context manager."""

    def __init__(self, run_dir: Path, connection: sqlite3.Connection) -> None:
        self.run_dir = run_dir
        self._db = connection
        self.run = RunSpec.from_json(self.meta("run"))
        self._reference = next((arm.name for arm in self.run.arms if arm.drafter == "ar"), None)

    # --- opening -----------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, run_dir: Path, run: RunSpec, shards: Iterable[PlannedShard], **meta: str) -> Ledger:
        """A new ledger holding this plan, read as a stream. It appears whole or not at all.

        `run_dir` exists already. Raises RunError where it holds a run.
        """
        final = run_dir / LEDGER_FILE
        if final.exists():
            raise RunError(f"{run_dir} already holds a run: write another --run, or leave it out.")
        partial = run_dir / f".{LEDGER_FILE}.part"
        partial.unlink(missing_ok=True)
        db = sqlite3.connect(partial, isolation_level=None)
        try:
            # Nothing reads this file before it is renamed, so it needs no journal: a crash leaves only a .part file.
            db.executescript("pragma journal_mode=off; pragma synchronous=off;" + SCHEMA)
            db.execute("begin")
            ledger_rows.insert_meta(db, run, meta)
            ledger_rows.insert_plan(db, shards)
            db.execute("commit")
            db.executescript(INDEXES)
        finally:
            db.close()
        with partial.open("rb") as handle:
            os.fsync(handle.fileno())
        partial.replace(final)
        sync_folder(run_dir)
        return cls.open(run_dir)

    @classmethod
    def open(cls, run_dir: Path, *, readonly: bool = False) -> Ledger:
        """The ledger of an existing run. Raises RunError where there is none, or one of a newer dfbench."""
        path = run_dir / LEDGER_FILE
        if not path.is_file():
            raise RunError(f"{run_dir} holds no run: name a directory that `dfbench submit` made.")
        try:
            ledger = cls(run_dir, ledger_rows.connect(path, readonly))
            found = int(ledger.meta("ledger_version"))
        except (sqlite3.Error, ValueError, KeyError, TypeError) as error:
            held = getattr(error, "sqlite_errorcode", 0) & 0xFF in ledger_rows.OUT_OF_REACH
            hint = (
                "its folder must be writable, and no other program may hold it"
                if held
                else "submit the sweep again to a new directory"
            )
            raise RunError(f"the ledger of '{run_dir}' cannot be used ({error}): {hint}.") from error
        if found > LEDGER_VERSION:
            ledger.close()
            raise RunError(f"{run_dir} was written by a newer dfbench (ledger {found}): update dfbench to open it.")
        return ledger

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """One short write transaction, all of it or nothing."""
        self._db.execute("begin immediate")
        try:
            yield self._db
        except BaseException:
            self._db.execute("rollback")
            raise
        self._db.execute("commit")

    # --- the run itself ----------------------------------------------------------------------------------------

    def meta(self, key: str, default: str | None = None) -> str:
        row = self._db.execute("select value from meta where key = ?", (key,)).fetchone()
        if row is not None:
            return str(row[0])
        if default is None:
            raise RunError(f"the ledger of {self.run_dir} does not say its '{key}': it was not made by dfbench.")
        return default

    def set_meta(self, key: str, value: str) -> None:
        with self.transaction() as db:
            db.execute("insert or replace into meta values (?, ?)", (key, value))

    @property
    def state(self) -> str:
        """planned, running, done or cancelled; `running` outlives a driver that died."""
        return self.meta("state")

    def check_versions(self, current: dict[str, str] | None = None, *, allow_change: bool = False) -> None:
        """Raise RunError when the software differs from the run's, unless told; an allowed change is recorded."""
        current = versions() if current is None else current
        begun: dict[str, str] = json.loads(self.meta("versions"))
        changed = {
            name: (begun.get(name, "none"), current.get(name, "none"))
            for name in sorted(begun.keys() | current.keys())
            if begun.get(name) != current.get(name)
        }
        if not changed:
            return
        if not allow_change:
            listed = ", ".join(f"{name} {old} → {new}" for name, (old, new) in changed.items())
            raise RunError(f"this run was begun with other software ({listed}): write --allow-version-change or --new.")
        history = json.loads(self.meta("version_changes", "[]"))
        self.set_meta("version_changes", json.dumps([*history, {"at": now(), "changed": changed}]))
        self.set_meta("versions", json.dumps(current, sort_keys=True))

    def data_version(self) -> int:
        """A number that changes whenever another process has written to the ledger."""
        return int(self._db.execute("pragma data_version").fetchone()[0])

    # --- what is left ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A driver takes over: what another one left running is to be done again."""
        with self.transaction() as db:
            db.execute("update shards set state = 'pending', worker_id = null where state = 'running'")
            db.execute("insert or replace into meta values ('state', 'running')")

    def end(self) -> str:
        """A driver leaves: the run is done when nothing is left, planned otherwise. Returns the state."""
        with self.transaction() as db:
            state = self.state
            if state != "cancelled":
                left = db.execute("select 1 from shards where state in ('pending', 'running') limit 1").fetchone()
                state = "planned" if left else "done"
                db.execute("insert or replace into meta values ('state', ?)", (state,))
            db.execute("update shards set state = 'pending', worker_id = null where state = 'running'")
            db.execute("update workers set left_at = ? where left_at is null", (now(),))
        return state

    def pending(self, limit: int, after: int = -1) -> list[ShardRow]:
        """At most `limit` shards with work left, in plan order, behind position `after`."""
        rows = self._db.execute(
            "select shard_id, position, workload, spec, attempts from shards "
            "where state = 'pending' and position > ? order by position limit ?",
            (after, limit),
        ).fetchall()
        return [self._shard_row(*row) for row in rows]

    def _shard_row(self, shard_id: str, position: int, workload: str, spec: str, attempts: int) -> ShardRow:
        given = json.loads(spec)
        rows = self._db.execute(
            "select job_id, workload, prompt_id, arm, repeat, arm_order, turn, state from jobs "
            "where shard_id = ? order by rowid",
            (shard_id,),
        ).fetchall()
        jobs = [JobSpec(*row[:7]) for row in rows]
        left = [job for job, row in zip(jobs, rows, strict=True) if row[7] == "pending"]
        if len(left) < len(jobs):
            left = list(with_pairs(left, jobs, self._reference))
        strikes = self._strikes(shard_id, given.get("forgiven", 0)) if attempts else 0
        prompt_ids, cap = tuple(given["prompts"]), int(given["max_new_tokens"])
        return ShardRow(shard_id, position, workload, prompt_ids, cap, attempts + 1, strikes, tuple(left))

    def _strikes(self, shard_id: str, forgiven: int) -> int:
        found = self._db.execute(
            "select count(distinct attempt) from attempts where shard_id = ? and job_id is null and attempt > ?",
            (shard_id, forgiven),
        ).fetchone()
        return int(found[0])

    def counts(self) -> Counts:
        """Jobs and shards by state."""
        shards = dict(self._db.execute("select state, count(*) from shards group by state").fetchall())
        return ledger_rows.counted(
            dict(self._db.execute("select state, count(*) from jobs group by state").fetchall()), shards
        )

    def counts_by_arm(self) -> dict[str, Counts]:
        """Jobs by state, for each arm in plan order."""
        found: dict[str, dict[str, int]] = {arm.name: {} for arm in self.run.arms}
        for arm, state, count in self._db.execute("select arm, state, count(*) from jobs group by arm, state"):
            found.setdefault(arm, {})[state] = count
        return {arm: ledger_rows.counted(states, {}) for arm, states in found.items()}

    # --- what happened -----------------------------------------------------------------------------------------

    def set_running(self, placed: dict[str, str]) -> None:
        """Note which shards are on which worker: for `status` only, nothing depends on it."""
        with self.transaction() as db:
            db.executemany(
                "update shards set state = 'running', worker_id = ? where shard_id = ? and state = 'pending'",
                [(worker, shard) for shard, worker in placed.items()],
            )

    def fail_attempt(self, failure: Failure, *, final: bool = False) -> None:
        """A shard's whole attempt was lost. It is to be done again, or, if `final`, what was left of it has failed."""
        with self.transaction() as db:
            ledger_rows.insert_failures(db, [failure])
            db.execute(
                "update shards set attempts = max(attempts, ?) where shard_id = ?", (failure.attempt, failure.shard_id)
            )
            if final:
                db.execute(
                    "update jobs set state = 'failed', attempt = ? where shard_id = ? and state = 'pending'",
                    (failure.attempt, failure.shard_id),
                )
            ledger_rows.settle(db, [str(failure.shard_id)])

    def fail_jobs(self, failures: Sequence[Failure]) -> None:
        """These jobs failed in an attempt that committed nothing; the rest of their shards is to be done again."""
        with self.transaction() as db:
            ledger_rows.fail_jobs(db, failures)
            db.executemany(
                "update shards set attempts = max(attempts, ?) where shard_id = ?",
                [(failure.attempt, failure.shard_id) for failure in failures],
            )
            ledger_rows.settle(db, sorted({failure.shard_id for failure in failures if failure.shard_id is not None}))

    def commit(self, files: Sequence[RecordFile], outcomes: Sequence[Outcome], shards: dict[str, set[str]]) -> None:
        """The commit point: from here on these files exist and these jobs are done or failed.

        `shards` says for each file name whose rows it holds.
        """
        with self.transaction() as db:
            ledger_rows.insert_files(db, files, shards)
            for outcome in outcomes:
                ledger_rows.settle_jobs(db, outcome)
            reach("commit.inside")
            ledger_rows.settle(db, sorted({outcome.shard_id for outcome in outcomes}))

    def replace_files(
        self, new: Sequence[RecordFile], shards: dict[str, set[str]], retired: Sequence[str], redo: Iterable[str] = ()
    ) -> None:
        """Switch generations in one transaction: `retired` files leave, `new` ones come; `redo` shards are pending."""
        redo = sorted(redo)
        with self.transaction() as db:
            ledger_rows.insert_files(db, new, shards)
            db.executemany("update files set live = 0 where name = ?", [(name,) for name in retired])
            db.executemany("delete from file_shards where name = ?", [(name,) for name in retired])
            for shard in redo:
                db.execute("update jobs set state = 'pending', attempt = null where shard_id = ?", (shard,))
                db.execute(
                    "update shards set state = 'pending', worker_id = null, spec = json_remove(spec, '$.redo') "
                    "where shard_id = ?",
                    (shard,),
                )
            if redo:
                db.execute("update meta set value = 'planned' where key = 'state' and value = 'done'")

    def redo(self) -> set[str]:
        """Shards that `retry` wants to run again as a whole, what is done of them included."""
        rows = self._db.execute("select shard_id from shards where json_extract(spec, '$.redo')")
        return {row[0] for row in rows}

    # --- files -------------------------------------------------------------------------------------------------

    def files(self, table: str | None = None, *, live: bool = True) -> list[RecordFile]:
        """The committed files, oldest first; `live=False` gives those that a later generation replaced."""
        rows = self._db.execute(
            "select name, tbl, generation, rows, bytes, sha256 from files "
            "where live = ? and (? is null or tbl = ?) order by rowid",
            (int(live), table, table),
        )
        return [RecordFile(*row) for row in rows]

    def file_count(self) -> int:
        """How many files are live."""
        return int(self._db.execute("select count(*) from files where live").fetchone()[0])

    def next_generation(self) -> int:
        """A generation that no file has yet."""
        return int(self._db.execute("select coalesce(max(generation), 0) + 1 from files").fetchone()[0])

    def jobs_of(self, shards: Iterable[str]) -> set[str]:
        """The ids of all planned jobs of these shards."""
        found: set[str] = set()
        for shard in shards:
            found.update(row[0] for row in self._db.execute("select job_id from jobs where shard_id = ?", (shard,)))
        return found

    def shards_of(self, name: str) -> set[str]:
        """The shards that have rows in this file."""
        rows = self._db.execute("select shard_id from file_shards where name = ?", (name,))
        return {row[0] for row in rows}

    def files_of(self, shards: Iterable[str]) -> set[str]:
        """The live files that hold rows of any of these shards."""
        found: set[str] = set()
        for shard in shards:
            rows = self._db.execute("select name from file_shards where shard_id = ?", (shard,))
            found.update(row[0] for row in rows)
        return found

    def forget_files(self, names: Iterable[str]) -> None:
        """Drop the rows of files that were replaced and are gone from disk."""
        with self.transaction() as db:
            db.executemany("delete from files where name = ? and live = 0", [(name,) for name in names])

    def done_jobs(self) -> Iterator[tuple[str, int]]:
        """(job_id, attempt) of every committed job."""
        yield from self._db.execute("select job_id, attempt from jobs where state = 'done'")

    # --- workers and failures ----------------------------------------------------------------------------------

    def add_worker(self, worker_id: str, node: str, device: str, facts: dict[str, Any]) -> None:
        with self.transaction() as db:
            db.execute(
                "insert or replace into workers values (?, ?, ?, ?, ?, null)",
                (worker_id, node, device, json.dumps(facts, sort_keys=True), now()),
            )

    def worker_left(self, worker_id: str) -> None:
        with self.transaction() as db:
            db.execute("update workers set left_at = ? where worker_id = ?", (now(), worker_id))

    def workers(self) -> list[Worker]:
        rows = self._db.execute("select worker_id, node, device, facts, joined_at, left_at from workers order by rowid")
        try:
            return [Worker(row[0], row[1], row[2], json.loads(row[3]), row[4], row[5]) for row in rows]
        except ValueError as error:
            raise RunError(
                f"the ledger of '{self.run_dir}' is damaged: what it says of a worker is no JSON ({error}); submit the "
                "sweep again to a new directory."
            ) from error

    def running(self) -> dict[str, str]:
        """Shard → worker, as the driver last noted it."""
        return dict(self._db.execute("select shard_id, worker_id from shards where state = 'running'").fetchall())

    def done_by_worker(self) -> dict[str, int]:
        """Jobs done so far, by the worker that ran their shard last."""
        rows = self._db.execute(
            "select s.worker_id, count(*) from jobs j join shards s using (shard_id) "
            "where j.state = 'done' and s.worker_id is not null group by 1"
        )
        return dict(rows.fetchall())

    def failures(self, shard_id: str | None = None) -> list[tuple[Failure, str]]:
        """Every attempt that did not commit, with its time, oldest first."""
        rows = self._db.execute(
            "select shard_id, job_id, attempt, kind, message, node, worker_id, at from attempts "
            "where ? is null or shard_id = ? order by rowid",
            (shard_id, shard_id),
        )
        return [(Failure(*row[:7]), row[7]) for row in rows]

    # --- requests by other processes ---------------------------------------------------------------------------

    def cancel(self) -> int:
        """Take back everything that is not done; a driver at work stops soon. Returns how many jobs that were."""
        with self.transaction() as db:
            count = db.execute("update jobs set state = 'cancelled' where state = 'pending'").rowcount
            db.execute("update shards set state = 'cancelled' where state in ('pending', 'running')")
            if count:  # A run with nothing left is over already, and stays so.
                db.execute("insert or replace into meta values ('state', 'cancelled')")
        return int(count)

    def resume(self) -> int:
        """Undo a cancel: what it took back is pending again. Returns how many jobs that are."""
        with self.transaction() as db:
            count = db.execute("update jobs set state = 'pending' where state = 'cancelled'").rowcount
            db.execute("update shards set state = 'pending' where state = 'cancelled'")
            db.execute("insert or replace into meta values ('state', 'planned')")
        return int(count)

    def retry(self, shards: Sequence[str] = (), kind: str | None = None) -> int:
        """Make failed jobs pending again: all, those of these shards, those that last failed by this kind.

        Where the reference arm is among them, arms that are done would be left without their pair, which is of the same
        attempt: their shards are marked, and the driver has them run again as a whole (`redo`).
        Returns how many failed jobs will run again. Raises RunError for an unknown shard or kind.
        """
        if kind is not None and kind not in KINDS:
            raise RunError(unknown("kind", kind, KINDS))
        for shard in shards:
            if self._db.execute("select 1 from shards where shard_id = ?", (shard,)).fetchone() is None:
                raise RunError(f"the run has no shard '{shard}': `dfbench status` lists those that failed.")
        with self.transaction() as db:
            chosen = [
                (job, shard)
                for job, shard in db.execute("select job_id, shard_id from jobs where state = 'failed'").fetchall()
                if (not shards or shard in shards) and (kind is None or ledger_rows.last_kind(db, job, shard) == kind)
            ]
            ledger_rows.forgive(db, chosen)
            ledger_rows.mark_unpaired(db, chosen, self._reference)
            if chosen and self.state == "done":
                db.execute("insert or replace into meta values ('state', 'planned')")
        return len(chosen)
