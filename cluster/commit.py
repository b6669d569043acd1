"""Finished shards on their way to disk: gathered, checked, written as Parquet, and named in the ledger.

The order that makes a commit safe: write every file under a name that does not end in `.parquet`, fsync it, rename it,
fsync the folder, then one ledger transaction that names the files and settles their shards. A crash before that
transaction leaves files that no ledger names; `upkeep.recover` removes them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dfbench.cluster.ledger import Ledger
from dfbench.cluster.ledger_schema import KINDS, Failure, Outcome, RecordFile
from dfbench.cluster.run_place import sync_folder
from dfbench.cluster.sums import sums_of
from dfbench.workers.checks import JobKey, breaches
from dfbench.workers.faults import reach
from dfbench.workers.parts import JobOutcome, Part
from dfbench.workers.records import SCHEMAS
from dfbench.workers.spec import GuardSpec, ShardSpec

RECORDS = "records"
_NAMES = [
    "run_id", "job_id", "ar_job_id", "workload", "prompt_id", "arm", "device", "shard_id", "worker_id", "drafter",
    "model",
]  # fmt: skip
_COUNTS = [
    "attempt", "step", "position", "queries", "padding", "drafted", "depth", "accepted", "emitted", "top_ties",
]  # fmt: skip
DICTIONARY = [*_NAMES, *_COUNTS]
ENCODINGS = {
    pa.int64(): "DELTA_BINARY_PACKED",
    pa.float32(): "BYTE_STREAM_SPLIT",
    pa.float64(): "BYTE_STREAM_SPLIT",
}
ROW_GROUP = 122_880


@dataclass
class FinishedShard:
    """One attempt at a shard, its parts as they came in. `stopped`: why jobs were told to stop, by job."""

    spec: ShardSpec | GuardSpec
    worker_id: str
    node: str = ""
    parts: list[Part] = field(default_factory=list)
    stopped: dict[str, str] = field(default_factory=dict)

    @property
    def shard_id(self) -> str:
        return self.spec.shard_id

    @property
    def attempt(self) -> int:
        return self.spec.attempt

    @property
    def outcomes(self) -> list[JobOutcome]:
        return [outcome for part in self.parts for outcome in part.outcomes]

    def table(self, name: str) -> list[pa.Table]:
        return [part.tables[name] for part in self.parts if name in part.tables and part.tables[name].num_rows]


class Committer:
    """Gathers finished shards and commits them in groups: at most `max_age_s` of work or `max_jobs` jobs."""

    def __init__(
        self,
        ledger: Ledger,
        eos_ids: Collection[int] = (),
        *,
        max_age_s: float = 2.0,
        max_jobs: int = 2000,
    ) -> None:
        self._ledger = ledger
        self.eos_ids = eos_ids
        self._max_age_s, self._max_jobs = max_age_s, max_jobs
        self._waiting: list[FinishedShard] = []
        self._jobs = 0
        self._since = 0.0
        self._number = next_number(ledger)

    def add(self, shard: FinishedShard) -> None:
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting.append(shard)
        self._jobs += len(shard.outcomes)

    def due(self) -> bool:
        if not self._waiting:
            return False
        return self._jobs >= self._max_jobs or time.monotonic() - self._since >= self._max_age_s

    def flush(self) -> list[Outcome]:
        """Commit everything gathered. Returns how each shard's attempt ended. Raises OSError when the disk is full."""
        if not self._waiting:
            return []
        with uninterrupted():
            return self._flush()

    def _flush(self) -> list[Outcome]:
        tables = {name: _concat(name, self._waiting) for name in SCHEMAS}
        bad = breaches(tables["jobs"], tables["steps"], tables["tokens"], self.eos_ids)
        dropped = {(job_id, shard.attempt): shard for shard in self._waiting for job_id in _incomplete(shard, bad)}
        if bad or dropped:
            refused = bad.keys() | dropped.keys()
            tables = {name: _without(table, refused) for name, table in tables.items()}
        tables["sums"] = sums_of(tables["jobs"], tables["steps"])
        outcomes = [_settle(shard, bad, {job_id for job_id, _ in dropped}) for shard in self._waiting]
        reach("commit.before_write")
        files = write_files(self._ledger.run_dir, tables, generation=0, number=self._number)
        shard_ids = {shard.shard_id for shard in self._waiting}
        self._ledger.commit(files, outcomes, {file.name: shard_ids for file in files})
        reach("commit.after")
        self._number += 1
        self._waiting, self._jobs = [], 0
        return outcomes


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until this is over: between the ledger's word and ours about it, it would commit the same twice."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    late: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda *seen: late.append(seen))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if late:
            before(*late[0])


def write_files(run_dir: Path, tables: dict[str, pa.Table], *, generation: int, number: int) -> list[RecordFile]:
    """Write each table that has rows to `records/<generation>/<table>-<number>.parquet`, durably."""
    folder = run_dir / RECORDS / str(generation)
    if not folder.is_dir():
        folder.mkdir(parents=True)
        sync_folder(folder.parent)
        sync_folder(run_dir)
    partial = [(folder / f".{name}-{number:06}.part", name, table) for name, table in tables.items() if table.num_rows]
    files = [_write(path, name, table, generation, number) for path, name, table in partial]
    reach("commit.before_rename")
    for (path, _, _), file in zip(partial, files, strict=True):
        path.replace(run_dir / file.name)
    sync_folder(folder)
    reach("commit.after_rename")
    return files


def _write(path: Path, name: str, table: pa.Table, generation: int, number: int) -> RecordFile:
    data = encode(table)
    with path.open("wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    target = f"{RECORDS}/{generation}/{name}-{number:06}.parquet"
    return RecordFile(target, name, generation, table.num_rows, len(data), hashlib.sha256(data).hexdigest())


def encode(table: pa.Table) -> pa.Buffer:
    """A table as one Parquet file, laid out for who adds it up: reading a column costs more than adding it.

    Names and counts have few values: dictionaries. Times are near each other: their differences in as few bits as they
    need. Floats: their bytes apart. All of it zstd.
    """
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        compression="zstd",
        use_dictionary=[
            entry.name for entry in table.schema if entry.name in DICTIONARY and entry.type not in ENCODINGS
        ],
        column_encoding={entry.name: ENCODINGS[entry.type] for entry in table.schema if entry.type in ENCODINGS},
        row_group_size=ROW_GROUP,
        write_page_checksum=True,
    )
    return sink.getvalue()


def sha256(path: Path) -> str:
    """Digest of a file, read in pieces."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def next_number(ledger: Ledger) -> int:
    """A number that no committed file has yet, so that a name is never used twice."""
    names = [file.name for live in (True, False) for file in ledger.files(live=live)]
    return max((int(name.rsplit("-", 1)[1].removesuffix(".parquet")) for name in names), default=-1) + 1


def _concat(name: str, shards: Iterable[FinishedShard]) -> pa.Table:
    tables = [table for shard in shards for table in shard.table(name)]
    return pa.concat_tables(tables).combine_chunks() if tables else SCHEMAS[name].empty_table()


def _without(table: pa.Table, bad: Collection[JobKey]) -> pa.Table:
    if not table.num_rows or "attempt" not in table.schema.names:
        return table
    keys = zip(table["job_id"].to_pylist(), table["attempt"].to_pylist(), strict=True)
    return table.filter(pa.array([key not in bad for key in keys], pa.bool_()))


def _settle(shard: FinishedShard, bad: dict[JobKey, str], dropped: Collection[str]) -> Outcome:
    """Which jobs of an attempt are done and which failed; a job whose rows were refused has failed."""
    done: list[str] = []
    failures: list[Failure] = []
    for outcome in shard.outcomes:
        kind, message = _verdict(shard, outcome, bad)
        if kind:
            where = (shard.node, shard.worker_id)
            failures.append(Failure(shard.shard_id, outcome.job_id, shard.attempt, kind, message, *where))
        elif outcome.job_id not in dropped and not (outcome.kind or outcome.warmup or outcome.pair_only):
            done.append(outcome.job_id)
    return Outcome(shard.shard_id, shard.attempt, shard.worker_id, tuple(done), tuple(failures))


def _verdict(shard: FinishedShard, outcome: JobOutcome, bad: dict[JobKey, str]) -> tuple[str, str]:
    """Kind and message of a job without rows, empty where it has them or was told to stop for no reason of its own."""
    if outcome.kind == "cancelled":
        kind = shard.stopped.get(outcome.job_id, "")
        return kind, KINDS.get(kind, "")
    breach = bad.get((outcome.job_id, shard.attempt))
    if breach is not None and not outcome.kind:
        return "record", breach
    return outcome.kind, outcome.message


def _incomplete(shard: FinishedShard, bad: dict[JobKey, str]) -> set[str]:
    """Sound jobs of carried arms that are not whole: such an arm's jobs depend on each other, so it counts as one."""
    sound = {
        outcome.job_id for outcome in shard.outcomes if not outcome.kind and (outcome.job_id, shard.attempt) not in bad
    }
    found: set[str] = set()
    for arm in shard.spec.arms:
        if arm.cache == "carried":
            jobs = {job.job_id for job in shard.spec.jobs if job.arm == arm.name}
            if not jobs <= sound:
                found |= jobs & sound
    return found
