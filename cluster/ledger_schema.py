"""What the ledger holds: its tables, the kinds of failure, and its rows as plain values."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from dfbench import __version__

LEDGER_FILE = "ledger.db"
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

CANCELLED = "cancelled"
"""The one kind that is no failure: the job is cancelled, and the same submit goes on with it."""
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
    CANCELLED: "the run was cancelled while the job ran",
}
"""Every kind of attempt that did not commit, and what it means."""


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
