"""The ledger of a run: what is planned, what is committed and in which files, what failed, what is left.

One SQLite file, `ledger.db`, in WAL mode with `synchronous=FULL`. The driver is its only steady writer and holds the
run's lock; `cancel` and `retry` are single short transactions that any process may make beside it. A transaction that
names record files is the one commit point of a run: a file that the ledger does not name does not exist.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, NamedTuple

from dfbench import __version__
from dfbench.cluster.runspec import PlannedShard, RunSpec, ShardRow, with_pairs
from dfbench.errors import RunError, unknown
from dfbench.workers.faults import reach
from dfbench.workers.spec import JobSpec

LEDGER_FILE = "ledger.db"
LOCK_FILE = "driver.lock"
LEDGER_VERSION = 1

SCHEMA = """
create table meta(key text primary key, value text not null);
create table shards(shard_id text primary key, position integer not null, workload text not null, state text not null,
                    attempts integer not null default 0, worker_id text, spec text);
create table jobs(job_id text primary key, shard_id text not null, workload text not null, prompt_id text not null,
                  arm text not null, repeat integer not null, turn integer not null, arm_order integer not null,
                  state text not null, attempt integer);
create table attempts(shard_id text, job_id text, attempt integer, kind text, message text, node text, worker_id text,
                      at text);
create table files(name text primary key, tbl text not null, generation integer not null, rows integer not null,
                   bytes integer not null, sha256 text not null, live integer not null);
create table file_shards(name text not null, shard_id text not null);
create table workers(worker_id text primary key, node text, device text, facts text not null, joined_at text,
                     left_at text);
"""
INDEXES = """
create index jobs_by_shard on jobs(shard_id);
create index jobs_by_state on jobs(arm, state);
create index shards_by_state on shards(state, position);
create index attempts_by_shard on attempts(shard_id);
create index file_shards_by_name on file_shards(name);
create index file_shards_by_shard on file_shards(shard_id);
"""

KINDS = {
    "error": "the job raised an exception",
    "record": "its rows broke an identity of the record format",
    "oom": "the device ran out of memory; the worker was replaced",
    "device": "the device reported an error that it does not recover from; the worker was replaced",
    "deadline": "the job took longer than its total deadline",
    "stalled": "the job made no progress for longer than the progress deadline",
    "worker": "the worker process died",
    "node": "the node died or could not be reached",
    "memory": "the node ran out of memory and the worker was killed",
    "object": "the records were lost on their way to the driver",
    "setup": "the worker could not load the target",
}
"""Every kind of attempt that did not commit, and what it means."""

INFRASTRUCTURE = ("worker", "node", "memory", "object", "setup")
"""Kinds that say nothing against the shard: it runs again elsewhere, up to a limit."""

NETWORK_FILE_SYSTEMS = frozenset(
    (
        *("nfs", "nfs3", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "9p", "afs", "lustre", "gpfs", "beegfs"),
        *("ceph", "glusterfs", "davfs", "ocfs2", "gfs2", "orangefs", "pvfs2", "fuse.sshfs", "fuse.glusterfs"),
        *("fuse.cephfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.juicefs", "fuse.davfs2"),
    )
)


class Failure(NamedTuple):
    """One attempt that did not commit; `job_id` is None where the whole shard's attempt was lost."""

    shard_id: str | None
    job_id: str | None
    attempt: int
    kind: str
    message: str
    node: str | None = None
    worker_id: str | None = None


class RecordFile(NamedTuple):
    """One committed Parquet file; `name` is relative to the run directory."""

    name: str
    table: str
    generation: int
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Outcome:
    """How one attempt at a shard ended: which jobs have rows, which failed. Jobs in neither are still to do."""

    shard_id: str
    attempt: int
    worker_id: str
    done: tuple[str, ...]
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True)
class Counts:
    """How many jobs (and shards) are in each state."""

    pending: int = 0
    done: int = 0
    failed: int = 0
    cancelled: int = 0
    shards: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.pending + self.done + self.failed + self.cancelled


class Worker(NamedTuple):
    """A worker that took part; `facts` is what it read back from what it loaded."""

    worker_id: str
    node: str
    device: str
    facts: dict[str, Any]
    joined_at: str
    left_at: str | None


def now() -> str:
    """The time as the ledger writes it: UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def versions() -> dict[str, str]:
    """The software that decides outputs and timing: what a run records and refuses to be resumed without."""
    found = {"dfbench": __version__}
    for name in ("torch", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    for point in sorted(importlib.metadata.entry_points(group="dfbench.drafters")):
        if point.dist is not None:
            found[f"plugin {point.dist.name}"] = point.dist.version
    return found


def exists(run_dir: Path) -> bool:
    """Whether this directory holds a run."""
    return (run_dir / LEDGER_FILE).is_file()


def file_system(path: Path, mounts: str | None = None) -> str:
    """The type of the file system that `path` is (or would be) on; "" where this machine does not tell."""
    if mounts is None:
        table = Path("/proc/self/mounts")
        mounts = table.read_text() if table.is_file() else ""
    place = str(path.absolute() if not path.exists() else path.resolve())
    best, kind = -1, ""
    for line in mounts.splitlines():
        _, point, found, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        inside = place == point or place.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:
            best, kind = len(point), found
    return kind


def require_usable(run_dir: Path, mounts: str | None = None) -> None:
    """Raise RunError unless a run may live here: a writable directory on a local file system. Writes nothing."""
    kind = file_system(run_dir, mounts)
    if kind in NETWORK_FILE_SYSTEMS:
        raise RunError(
            f"{run_dir} is on a network file system ({kind}), where the ledger's locks do not work: "
            "write --run with a directory on a local disk, and use `dfbench export` to copy the run."
        )
    there = run_dir
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        raise RunError(f"{there} is not a directory: write --run with the name of one.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise RunError(f"{there} is not writable: write --run with a directory that is.")


@contextmanager
def driver_lock(run_dir: Path) -> Iterator[None]:
    """Hold the run's only driver seat; the death of the process gives it back. Raises RunError when it is taken."""
    with (run_dir / LOCK_FILE).open("a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunError(
                f"another driver{_holder(handle)} is at work on {run_dir}: wait for it, or stop it first."
            ) from error
        handle.truncate(0)
        handle.write(json.dumps({"pid": os.getpid(), "since": now()}))
        handle.flush()
        yield


def driver_alive(run_dir: Path) -> bool:
    """Whether a driver holds the run now."""
    path = run_dir / LOCK_FILE
    if not path.is_file():
        return False
    with path.open("a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _holder(handle: IO[str]) -> str:
    handle.seek(0)
    try:
        return f" (process {json.loads(handle.read())['pid']})"
    except (ValueError, KeyError):
        return ""


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
            _insert_meta(db, run, meta)
            _insert_plan(db, shards)
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
            ledger = cls(run_dir, _connect(path, readonly))
            found = int(ledger.meta("ledger_version"))
        except (sqlite3.Error, ValueError, KeyError, TypeError) as error:
            held = getattr(error, "sqlite_errorcode", 0) & 0xFF in _OUT_OF_REACH
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
        return _counted(dict(self._db.execute("select state, count(*) from jobs group by state").fetchall()), shards)

    def counts_by_arm(self) -> dict[str, Counts]:
        """Jobs by state, for each arm in plan order."""
        found: dict[str, dict[str, int]] = {arm.name: {} for arm in self.run.arms}
        for arm, state, count in self._db.execute("select arm, state, count(*) from jobs group by arm, state"):
            found.setdefault(arm, {})[state] = count
        return {arm: _counted(states, {}) for arm, states in found.items()}

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
            _insert_failures(db, [failure])
            db.execute(
                "update shards set attempts = max(attempts, ?) where shard_id = ?", (failure.attempt, failure.shard_id)
            )
            if final:
                db.execute(
                    "update jobs set state = 'failed', attempt = ? where shard_id = ? and state = 'pending'",
                    (failure.attempt, failure.shard_id),
                )
            _settle(db, [str(failure.shard_id)])

    def fail_jobs(self, failures: Sequence[Failure]) -> None:
        """These jobs failed in an attempt that committed nothing; the rest of their shards is to be done again."""
        with self.transaction() as db:
            _fail_jobs(db, failures)
            db.executemany(
                "update shards set attempts = max(attempts, ?) where shard_id = ?",
                [(failure.attempt, failure.shard_id) for failure in failures],
            )
            _settle(db, sorted({failure.shard_id for failure in failures if failure.shard_id is not None}))

    def commit(self, files: Sequence[RecordFile], outcomes: Sequence[Outcome], shards: dict[str, set[str]]) -> None:
        """The commit point: from here on these files exist and these jobs are done or failed.

        `shards` says for each file name whose rows it holds.
        """
        with self.transaction() as db:
            _insert_files(db, files, shards)
            for outcome in outcomes:
                _settle_jobs(db, outcome)
            reach("commit.inside")
            _settle(db, sorted({outcome.shard_id for outcome in outcomes}))

    def replace_files(
        self, new: Sequence[RecordFile], shards: dict[str, set[str]], retired: Sequence[str], redo: Iterable[str] = ()
    ) -> None:
        """Switch generations in one transaction: `retired` files leave, `new` ones come; `redo` shards are pending."""
        redo = sorted(redo)
        with self.transaction() as db:
            _insert_files(db, new, shards)
            db.executemany("update files set live = 0 where name = ?", [(name,) for name in retired])
            db.executemany("delete from file_shards where name = ?", [(name,) for name in retired])
            for shard in redo:
                db.execute("update jobs set state = 'pending', attempt = null where shard_id = ?", (shard,))
                db.execute("update shards set state = 'pending', worker_id = null where shard_id = ?", (shard,))
            if redo:
                db.execute("insert or replace into meta values ('state', 'planned')")

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
        return [Worker(row[0], row[1], row[2], json.loads(row[3]), row[4], row[5]) for row in rows]

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

        Returns how many jobs will run again. Raises RunError for an unknown shard or kind.
        """
        if kind is not None and kind not in KINDS:
            raise RunError(unknown("kind", kind, KINDS))
        for shard in shards:
            if self._db.execute("select 1 from shards where shard_id = ?", (shard,)).fetchone() is None:
                raise RunError(f"the run has no shard '{shard}': `dfbench status` lists those that failed.")
        with self.transaction() as db:
            failed = db.execute("select job_id, shard_id from jobs where state = 'failed'").fetchall()
            chosen = [
                (job, shard)
                for job, shard in failed
                if (not shards or shard in shards) and (kind is None or _last_kind(db, job, shard) == kind)
            ]
            db.executemany(
                "update jobs set state = 'pending', attempt = null where job_id = ?", [(j,) for j, _ in chosen]
            )
            touched = sorted({shard for _, shard in chosen})
            for shard in touched:
                db.execute(
                    "update shards set state = 'pending', spec = json_set(spec, '$.forgiven', attempts) "
                    "where shard_id = ?",
                    (shard,),
                )
            if touched and self.state == "done":
                db.execute("insert or replace into meta values ('state', 'planned')")
        return len(chosen)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _counted(jobs: dict[str, int], shards: dict[str, int]) -> Counts:
    pending, done, failed, cancelled = (jobs.get(state, 0) for state in ("pending", "done", "failed", "cancelled"))
    return Counts(pending, done, failed, cancelled, shards)


_OUT_OF_REACH = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM}


def _connect(path: Path, readonly: bool) -> sqlite3.Connection:
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


def _insert_meta(db: sqlite3.Connection, run: RunSpec, meta: dict[str, str]) -> None:
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


def _insert_plan(db: sqlite3.Connection, shards: Iterable[PlannedShard]) -> None:
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


def _insert_files(db: sqlite3.Connection, files: Sequence[RecordFile], shards: dict[str, set[str]]) -> None:
    db.executemany("insert into files values (?, ?, ?, ?, ?, ?, 1)", files)
    for file in files:
        db.executemany(
            "insert into file_shards values (?, ?)", [(file.name, shard) for shard in sorted(shards[file.name])]
        )


def _insert_failures(db: sqlite3.Connection, failures: Sequence[Failure]) -> None:
    at = now()
    db.executemany("insert into attempts values (?, ?, ?, ?, ?, ?, ?, ?)", [(*failure, at) for failure in failures])


def _fail_jobs(db: sqlite3.Connection, failures: Sequence[Failure]) -> None:
    _insert_failures(db, failures)
    db.executemany(
        "update jobs set state = 'failed', attempt = ? where job_id = ? and state != 'done'",
        [(failure.attempt, failure.job_id) for failure in failures],
    )


def _settle_jobs(db: sqlite3.Connection, outcome: Outcome) -> None:
    db.executemany(
        "update jobs set state = 'done', attempt = ? where job_id = ?",
        [(outcome.attempt, job_id) for job_id in outcome.done],
    )
    _fail_jobs(db, outcome.failures)
    db.execute(
        "update shards set attempts = max(attempts, ?), worker_id = ? where shard_id = ?",
        (outcome.attempt, outcome.worker_id, outcome.shard_id),
    )


def _settle(db: sqlite3.Connection, shards: Sequence[str]) -> None:
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


def _last_kind(db: sqlite3.Connection, job_id: str, shard_id: str) -> str | None:
    row = db.execute(
        "select kind from attempts where shard_id = ? and (job_id = ? or job_id is null) order by rowid desc limit 1",
        (shard_id, job_id),
    ).fetchone()
    return None if row is None else str(row[0])
